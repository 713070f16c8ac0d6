"""Section "What was run?": runs with their status, settings, versions, and the labels of clients."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median_low
from typing import Any

from fedshift.experiment.links import group_bits
from fedshift.experiment.settings import Experiment
from fedshift.report.charts import Axis, Choice, Heat, Section, Table, TableRow
from fedshift.report.curves import chosen
from fedshift.report.labels import DEFINITION, marks
from fedshift.report.lines import Grouped, counts, rule_of
from fedshift.runs import summary
from fedshift.runs.recorded import Broken, ClientRecord, Recorded
from fedshift.runs.summary import comparable

CLIENTS = 120  # most rows of a chart of clients
PARTITIONS = 8
DRAWN = ("shards", "dirichlet", "iid", "labels")  # partitions that assign examples to a given number of clients
ABOUT = ("fedshift", "commit", "torch", "numpy", "python", "system", "cpu", "gpu", "data", "command")


def section(grouped: Grouped, runs: Sequence[Recorded], broken: Sequence[Broken]) -> Section:
    parts: list[Table | Heat | Choice] = [listed(grouped, runs, broken), common(grouped, runs)]
    parts += [*shifted(runs), *versions(runs), *populations(runs), *partitions(runs)]
    return Section("what", "What was run?", [], [*parts])


def status(run: Recorded) -> str:
    """Status of a run, and the lost parts of its record."""
    rounds = run.experiment.train.rounds
    end = "finished" if counts(run) else f"stopped after round {run.reached} of {rounds}"
    if run.finished and not counts(run):
        end = f"finished, but the record ends with round {run.reached} of {rounds}"
    return "; ".join([end, *damage(run)])


def damage(run: Recorded) -> list[str]:
    """Phrases on damaged lines and missing rounds of the record."""
    damaged = [f"{count} damaged line{'s' * (count > 1)} in {name}" for name, count in run.lost.items()]
    gone = run.missing
    return [*damaged, *([f"{gone} round{'s' * (gone > 1)} without a line"] if gone else [])]


def folder_names(folders: Sequence[Path]) -> dict[Path, str]:
    """Names of folders, with as many parent folders as needed to distinguish them.

    >>> list(folder_names([Path("runs/a/seed-0"), Path("runs/b/seed-0"), Path("runs/b/seed-1")]).values())
    ['a/seed-0', 'b/seed-0', 'seed-1']
    """
    found = {folder: folder.name for folder in folders}
    for depth in range(2, max((len(folder.parts) for folder in folders), default=0) + 1):
        often = Counter(found.values())
        found = {folder: "/".join(folder.parts[-depth:]) if often[name] > 1 else name for folder, name in found.items()}
    return found


def listed(grouped: Grouped, runs: Sequence[Recorded], broken: Sequence[Broken]) -> Table:
    words = summary.words(grouped.varying)
    lines = {run.folder: strand.line for strand in grouped.strands for run in strand.runs}
    named = folder_names([*(run.folder for run in runs), *(run.folder for run in broken)])
    doubles = {double.folder for double, _ in grouped.doubles}
    rows = []
    for run in runs:
        varying = summary.label(run.experiment, grouped.varying).values()
        line = lines.get(run.folder)
        ended = status(run) + "; left out: another run has the same settings and seed" * (run.folder in doubles)
        rows.append(TableRow(line.key if line else "", [named[run.folder], *varying, str(run.experiment.seed), ended]))
    rows += [TableRow("", [named[run.folder], *[""] * len(words), "", f"broken: {run.problem}"]) for run in broken]
    return Table("runs", "Runs", ["run", *words.values(), "seed", "status"], rows, folded=len(rows) > 20)


def common(grouped: Grouped, runs: Sequence[Recorded]) -> Table:
    """Table of the settings in which all runs agree, without optimizer, steps and schedules that are the usual ones."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        flat = comparable(run.experiment)
        for key, value in flat.items():
            found.setdefault(key, {})[summary.shown(value) if value is not None else ""] = None
    other = (*summary.apart([run.experiment for run in runs])[0], "seed", "name")
    same = {key: next(iter(values)) for key, values in found.items() if len(values) == 1 and key not in other}
    usual = {key: summary.shown(value) for key, value in summary.USUAL_TRAIN.items()}
    rows = [TableRow("", [key, value]) for key, value in same.items() if value and value != usual.get(key)]
    return Table("settings", "Settings in common", ["setting", "value"], rows, folded=True)


def shifted(runs: Sequence[Recorded]) -> list[Table]:
    """Table of the tensors that were shifted, by rule, as far as they are recorded."""
    known = [(rule_of(run.experiment), run.about.get("shifted")) for run in runs if run.experiment.shift.on]
    named = [(rule, ", ".join(map(str, names)) or "none") for rule, names in known if isinstance(names, list)]
    rows = [TableRow("", [rule, names, str(count)]) for (rule, names), count in Counter(named).items()]
    return [Table("shifted", "Shifted tensors", ["shift", "tensors", "runs"], rows, folded=True)] if rows else []


def versions(runs: Sequence[Recorded]) -> list[Table]:
    rows = []
    for key in ABOUT:
        found = Counter(str(run.about[key]) for run in runs if key in run.about)
        for value, count in found.items():
            rows.append(TableRow("", [key if key != "data" else "data checksum", value, str(count)]))
    return [Table("versions", "Versions and machine", ["item", "value", "runs"], rows, folded=True)] if rows else []


def populations(runs: Sequence[Recorded]) -> list[Table]:
    """Table of the clients of natural and users' partitions: their number, sizes, and how many were left out."""
    known = [run for run in runs if run.clients and run.experiment.data.partition not in DRAWN]
    found = Counter(
        (run.experiment.data.partition, sizes(run.clients), str(run.about.get("left_out", ""))) for run in known
    )
    rows = [TableRow("", [name, *counts, left_out, str(count)]) for (name, counts, left_out), count in found.items()]
    columns = ["partition", "clients", "examples", "per client", "left out", "runs"]
    return [Table("populations", "Clients", columns, rows)] if rows else []


def sizes(clients: Sequence[ClientRecord]) -> tuple[str, str, str]:
    """Number of clients, of their examples, and the range of examples per client."""
    counts = sorted(client.examples for client in clients)
    spread = f"{counts[0]:,} to {counts[-1]:,}, median {median_low(counts):,}"
    return f"{len(counts):,}", f"{sum(counts):,}", spread


def partitions(runs: Sequence[Recorded]) -> list[Heat | Choice]:
    """Heat maps of the labels of each client, one per partition."""
    found: dict[str, tuple[Recorded, list[ClientRecord]]] = {}
    for run in runs:
        known = [client for client in run.clients if client.labels]
        if known:
            labels = str([client.labels for client in known])
            marked = labels in found and any(marks(found[labels][0].experiment, found[labels][1]))
            if labels not in found or (not marked and any(marks(run.experiment, known))):  # prefer a run with marks
                found[labels] = run, known
    kept = list(found.values())[:PARTITIONS]
    seeds = Counter(run.experiment.seed for run, _ in kept)
    made: list[tuple[str, Any]] = []
    for i, (run, clients) in enumerate(kept):
        seed = run.experiment.seed
        label = f"seed {seed}" if seeds[seed] == 1 else run.folder.name
        end, title = (f"-{i + 1}", f": {label}") if len(kept) > 1 else ("", "")
        made.append((label, _heat(run.experiment, clients, f"clients{end}", f"Labels of each client{title}")))
    if len(made) < 2:
        return [heat for _, heat in made]
    return [Choice("clients", "Labels of each client", made)]


def _heat(experiment: Experiment, clients: Sequence[ClientRecord], name: str, title: str) -> Heat:
    """Clients in the order of their groups, most bits first; a sample if there are many."""
    classes = len(clients[0].labels)
    bits = group_bits(experiment)
    ordered = sorted(clients, key=lambda client: (-bits.get(client.group, 32), client.group, client.number))
    shown = [ordered[i] for i in chosen(len(ordered), CLIENTS)]
    some = f" {len(shown)} of {len(ordered)} clients are shown." if len(shown) < len(ordered) else ""
    label_marks = marks(experiment, clients) or [""] * classes
    defined = f" {DEFINITION}" if any(label_marks) else ""
    return Heat(
        name=name,
        title=title,
        caption=f"Number of examples of each label, clients ordered by group.{some}{defined}",
        value=Axis("examples"),
        columns=[str(label) for label in range(classes)],
        rows=[f"{client.number}, {client.group}" for client in shown],
        values=[[*client.labels] for client in shown],
        lines=[""] * len(shown),
        marks=label_marks,
    )
