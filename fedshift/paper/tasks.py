"""The same uplinks on every task: full precision, lean, extreme and the paper's 32+4, each with its bytes.

The records of `fedshift frontier --task NAME --brief` are published in one folder per task.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fedshift.core.tables import Listing
from fedshift.experiment.frontier import BRIEF, TASKS
from fedshift.paper.beyond import SeedGains, interval
from fedshift.paper.records import FinishedRun, Results
from fedshift.paper.report import PaperReport, runs_section
from fedshift.paper.tables import NOT_RUN
from fedshift.runs import summary
from fedshift.runs.record import SETTINGS
from fedshift.runs.sheet import PARTS

TITLE = "The same uplinks on every task"
NOTE = (
    "Scores are means of the last ten evaluated rounds, ± the standard deviation over seeds. The difference of lean is "
    "against full precision with the same server rule, in points, over the seeds that both have, with a 95 % interval "
    "(paired t). Times fewer bytes: uploaded bytes of full precision divided by those of lean. No setting of lean "
    "differs between tasks."
)
COLUMNS = (
    *("task", "weights", "shift", "seeds", "full precision", "lean", "difference", "95 % interval"),
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
PARTS_NOTE = "Mean bytes of an upload with lean and the shift, by part, and how many times fewer the codes alone are:"
PARTS_COLUMNS = ("task", "bytes per upload", "codes", "side data", "header", "codes alone, times fewer bytes")


class TaskRuns(NamedTuple):
    """Finished runs of a task, by the names of BRIEF and by seed."""

    name: str
    runs: Mapping[str, Mapping[int, FinishedRun]]

    def scores(self, name: str) -> dict[int, float]:
        return {seed: record.score for seed, record in sorted(self.runs.get(name, {}).items())}

    def gains(self, ours: str, theirs: str) -> SeedGains:
        a, b = self.scores(ours), self.scores(theirs)
        return SeedGains([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])

    def bytes_up(self, name: str) -> float:
        """Uploaded bytes of a run, mean over seeds."""
        return statistics.fmean(sum(record.uploaded.up) for record in self.runs[name].values())

    def score(self, name: str) -> str:
        scores = [*self.scores(name).values()]
        if not scores:
            return NOT_RUN
        return f"{statistics.fmean(scores):.1f}" + (f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else "")

    def times(self, name: str, full: str) -> str:
        done = self.runs.get(name) and self.runs.get(full)
        return summary.times(self.bytes_up(full) / self.bytes_up(name)) if done else ""


def published(folder: Path) -> list[TaskRuns]:
    """Records of every task in a folder."""
    found = []
    for task in TASKS:
        runs: dict[str, dict[int, FinishedRun]] = {}
        for path in sorted((folder / task).glob(f"*/{SETTINGS}")):
            record = FinishedRun(path.parent)
            name = path.parent.name.rpartition("_seed-")[0]
            if name in BRIEF:
                runs.setdefault(name, {})[record.experiment.seed] = record
        if runs:
            found.append(TaskRuns(task, runs))
    return found


def lean_lines(task: TaskRuns) -> list[tuple[str, ...]]:
    """Lean against full precision, without and with the shift."""
    lines = list[tuple[str, ...]]()
    for shift, full, lean in ("no", "exact-no-shift", "lean-no-shift"), ("per filter", "exact", "lean"):
        gains = task.gains(lean, full)
        found = summary.paired(task.scores(lean), task.scores(full)) if gains.gains else None
        lines.append(
            (
                *(task.name, weights(task), shift, str(len(gains.gains)), task.score(full), task.score(lean)),
                *(gains.text, interval(found) if found else "", task.times(lean, full)),
            )
        )
    return lines


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
    per_upload = [_per_upload(task, "lean", name) for name in PARTS]
    exact = _per_upload(task, "exact", PARTS[0])
    fewer = summary.times(exact / per_upload[0]) if exact and per_upload[0] else ""
    return task.name, *(f"{part:,.0f}" for part in (sum(per_upload), *per_upload)), fewer


def weights(task: TaskRuns) -> str:
    """Number of weights: a quarter of the bytes of an exact upload, without its header; '' without exact uploads."""
    sent = _per_upload(task, "exact", PARTS[0])
    return f"{sent / 4:,.0f}" if sent else ""


def _per_upload(task: TaskRuns, name: str, part: str) -> float:
    """Mean bytes of one part of an upload; 0 without runs."""
    runs = task.runs.get(name, {}).values()
    sent = [statistics.fmean(run.column(part)) / run.experiment.train.cohort for run in runs]
    return statistics.fmean(sent) if sent else 0.0


def report(folder: Path) -> PaperReport:
    """Report from the records in a folder; it depends on nothing else."""
    found = published(folder)
    everything = Results({f"{task.name}/{name}": runs for task in found for name, runs in task.runs.items()})
    lean = Listing(TITLE, COLUMNS, [line for task in found for line in lean_lines(task)], 3)
    others = Listing("", OTHERS, [other_line(task) for task in found], 1)
    parts = Listing("", PARTS_COLUMNS, [parts_line(task) for task in found], 1)
    return PaperReport([("Runs", runs_section(everything, [])), (TITLE, [NOTE, lean, others, PARTS_NOTE, parts])])
