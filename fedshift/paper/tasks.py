"""The same uplinks on every task: full precision, lean, extreme and the paper's 32+4, each with its bytes.

The records of `fedshift frontier --task NAME --brief` are published in one folder per task, under tasks; those of
CIFAR-10 are the paper's.
"""

import statistics
from pathlib import Path
from typing import NamedTuple

from fedshift.core.files import RunError
from fedshift.core.tables import Listing
from fedshift.experiment.frontier import BRIEF, EARLIER, TASKS
from fedshift.experiment.settings import Experiment
from fedshift.models import MODELS
from fedshift.paper import beyond, dadaquant, experiments, records
from fedshift.paper.beyond import SeedGains, interval
from fedshift.paper.experiments import Cell
from fedshift.paper.records import FinishedRun, Results, bytes_per_upload
from fedshift.paper.report import PaperReport, runs_section
from fedshift.paper.tables import NOT_RUN, compared
from fedshift.runs import summary
from fedshift.runs.record import SETTINGS

FOLDER = "tasks"  # of published records
TITLE = "The same uplinks on every task"
NOTE = (
    "Scores are means of the last ten evaluated rounds, ± the standard deviation over seeds, number of seeds in "
    "brackets. Differences are against full precision with the same server rule, in points, over the seeds that both "
    "have, with single seeds in brackets and a 95 % interval (paired t). Times fewer bytes: uploaded bytes of full "
    "precision divided by those of lean. No setting of lean differs between tasks."
)
COLUMNS = (
    *("task", "weights", "shift", "full precision", "lean", "difference", "95 % interval"),
    "times fewer bytes",
)
OTHERS = (
    "task",
    "shift adds, full precision",
    "shift adds, lean",
    "extreme",
    "difference",
    "times fewer bytes",
    "32+4",
)
NEAREST_NOTE = (
    "Codes at the rate of lean, rounded at random without error feedback (lean), and to the nearest code with error "
    "feedback (lean in earlier versions), with differences from full precision as above:"
)
NEAREST_COLUMNS = "task", "shift", "random", "random, difference", "nearest", "nearest, difference"
PARTS_NOTE = "Mean bytes of an upload with lean and the shift, by part, and how many times fewer the codes alone are:"
SHIFTS_TITLE = "Where each shift helps"
SHIFTS_NOTE = (
    "Scores without a shift, with the number of seeds in brackets, and the points that a shift adds to the same runs, "
    "paired by seed, with single seeds in brackets: the paper's shift per layer, with a share of 0.5, and filter "
    "centring. All uploads of a run are exact, lean, or as many exact as of 4 bits (32+4)."
)
SHIFTS_COLUMNS = "task", "clients", "uploads", "no shift", "per layer adds", "per filter adds"
CLIENTS = {
    "digits": "two labels",
    "fashion": "two labels",
    "shakespeare": "roles of plays",
    "transformer": "roles of plays",
    "synthetic": "own inputs and own rule of labels",
}
PARTS_COLUMNS = ("task", "bytes per upload", "codes", "side data", "header", "codes alone, times fewer bytes")
CELLS = {name: Cell(name, (), changes) for name, changes in (BRIEF | EARLIER).items()}


class TaskRuns(NamedTuple):
    """Finished runs of a task, by the names of BRIEF and EARLIER."""

    name: str
    results: Results

    def gains(self, ours: str, theirs: str) -> SeedGains:
        return beyond.paired(CELLS[ours], CELLS[theirs], self.results)

    def score(self, name: str) -> str:
        """Mean score, its spread, and the number of seeds."""
        return compared(CELLS[name], self.results).score

    def bytes_up(self, name: str) -> float:
        """Uploaded bytes of a run, mean over seeds; 0 without runs."""
        runs = self.results.of(CELLS[name]).values()
        return statistics.fmean(sum(run.uploaded.up) for run in runs) if runs else 0.0

    def times(self, name: str, full: str) -> str:
        ours, theirs = self.bytes_up(name), self.bytes_up(full)
        return summary.times(theirs / ours) if ours and theirs else ""


def published(folder: Path) -> list[TaskRuns]:
    """Records of every task in a folder of published records."""
    found = []
    for task in TASKS:
        runs: dict[str, dict[int, FinishedRun]] = {}
        for path in sorted((folder / FOLDER / task).glob(f"*/{SETTINGS}")):
            record = FinishedRun(path.parent)
            if name := kind(record.experiment):
                seeds = runs.setdefault(name, {})
                if (seed := record.experiment.seed) in seeds:
                    raise RunError(f"{path.parent}: is the same run as {seeds[seed].folder}; remove one of them")
                seeds[seed] = record
        if task == "cifar10":
            cells = experiments.brief()
            results, _ = records.published(folder, cells.values())
            runs = {name: dict(sorted(seeds.items())) for name, cell in cells.items() if (seeds := results.of(cell))}
        if runs:
            found.append(TaskRuns(task, Results(runs)))
    return found


def kind(experiment: Experiment) -> str | None:
    """Name in BRIEF or EARLIER of a run with these settings of uplink and shift.

    >>> kind(Experiment(uplink="lean", shift={"on": False})), kind(Experiment(uplink={"bits": 5}))
    ('lean-no-shift', None)
    """
    ours = experiment.uplink.model_copy(update={"bandwidth": None}), shift_of(experiment)
    for name, changes in (BRIEF | EARLIER).items():
        theirs = Experiment(**changes)
        if ours == (theirs.uplink, shift_of(theirs)):
            return name
    return None


def shift_of(experiment: Experiment) -> tuple[str, float | str]:
    """Rule and share of the shift; ("no", 0.0) without one."""
    shift = experiment.shift
    return (shift.per, shift.share) if shift.on else ("no", 0.0)


def lean_lines(task: TaskRuns) -> list[tuple[str, ...]]:
    """Lean against full precision, without and with the shift."""
    lines = list[tuple[str, ...]]()
    for shift, full, lean in ("no", "exact-no-shift", "lean-no-shift"), ("per filter", "exact", "lean"):
        ours, theirs = (task.results.scores(CELLS[name]) for name in (lean, full))
        gains = task.gains(lean, full)
        lines.append(
            (
                *(task.name, weights(task), shift, task.score(full), task.score(lean), gains.text),
                *(interval(summary.paired(ours, theirs)) if gains.gains else "", task.times(lean, full)),
            )
        )
    return lines


def nearest_lines(task: TaskRuns) -> list[tuple[str, ...]]:
    """Random and nearest codes, where there are records of both."""
    kinds = ("no", "exact-no-shift", "lean-no-shift", "nearest-no-shift"), ("per filter", "exact", "lean", "nearest")
    return [
        (task.name, shift, *(text for name in codes for text in (task.score(name), task.gains(name, full).text)))
        for shift, full, *codes in kinds
        if task.results.records.keys() >= set(codes)
    ]


def other_line(task: TaskRuns) -> tuple[str, ...]:
    """Gain of the shift, scores of extreme, and those of the paper's 32+4 with its shift."""
    return (
        task.name,
        task.gains("exact", "exact-no-shift").text,
        task.gains("lean", "lean-no-shift").text,
        task.score("extreme"),
        task.gains("extreme", "exact").text,
        task.times("extreme", "exact"),
        task.score("paper"),
    )


def parts_line(task: TaskRuns) -> tuple[str, ...]:
    """Bytes of an upload with lean, by part."""
    per_upload, (exact, *_) = (bytes_per_upload(task.results.of(CELLS[name]).values()) for name in ("lean", "exact"))
    if not exact or not per_upload[0]:
        return task.name, "", "", "", "", ""
    each = (f"{part:,.0f}" for part in (sum(per_upload), *per_upload))
    return task.name, *each, summary.times(exact / per_upload[0])


def shift_lines(task: TaskRuns) -> list[tuple[str, ...]]:
    """Gains of each shift with exact uploads and with lean."""
    lines = list[tuple[str, ...]]()
    for uploads in "exact", "lean":
        plain = f"{uploads}-no-shift"
        gains = [task.gains(name, plain).text for name in (f"{uploads}-layer", uploads)]
        figures = task.score(plain), *(text or NOT_RUN for text in gains)
        lines.append((task.name, CLIENTS[task.name], uploads, *figures))
    return lines


def paper_shift_lines(folder: Path) -> list[tuple[str, ...]]:
    """The same for the paper's task, from its records."""
    contrasts = [row for row in experiments.contrasts() if row.bits in ("32+32", "32+4") and "Fed-EF" not in row.label]
    results, _ = records.published(folder, [cell for row in contrasts for cell in row.cells])
    lines = list[tuple[str, ...]]()
    for row in contrasts:
        gains = [beyond.paired(cell, row.plain, results) for cell in (row.layer, row.filter)]
        uploads = "exact" if row.bits == "32+32" else row.bits
        figures = compared(row.plain, results).score, *(gain.text or NOT_RUN for gain in gains)
        lines.append(("cifar10", row.label[1], uploads, *figures))
    return lines


def weights(task: TaskRuns) -> str:
    """Number of weights of the model; sizes of its inputs and outputs are the defaults."""
    model = task.results.all[0].experiment.model
    return f"{sum(p.numel() for p in MODELS[model.name](**model.args).parameters()):,}"


def report(folder: Path) -> PaperReport:
    """Report from the records in a folder; it depends on nothing else."""
    found = published(folder)
    row = dadaquant.read(folder / FOLDER / "dadaquant")
    everything = Results(
        {f"{task.name}/{name}": runs for task in found for name, runs in task.results.records.items()}
        | {f"dadaquant/{name}": runs for name, runs in row.records.items()}
    )
    lean = Listing(TITLE, COLUMNS, [line for task in found for line in lean_lines(task)], 3)
    others = Listing("", OTHERS, [other_line(task) for task in found], 1)
    nearest = Listing("", NEAREST_COLUMNS, [line for task in found for line in nearest_lines(task)], 2)
    parts = Listing("", PARTS_COLUMNS, [line for task in found if (line := parts_line(task))[1]], 1)
    helps = [line for task in found if task.name in CLIENTS for line in shift_lines(task)]
    shifts = Listing(SHIFTS_TITLE, SHIFTS_COLUMNS, [*paper_shift_lines(folder), *helps], 3)
    return PaperReport(
        [
            (TITLE, [NOTE, lean, others, NEAREST_NOTE, nearest, PARTS_NOTE, parts]),
            (SHIFTS_TITLE, [SHIFTS_NOTE, shifts]),
            (dadaquant.TITLE, [dadaquant.NOTE, dadaquant.listing(row)]),
            ("Runs", runs_section(everything, [])),
        ]
    )
