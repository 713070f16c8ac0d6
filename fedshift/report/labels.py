"""What the model predicts: the share of each label, and of those that only quantized clients hold."""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedshift.experiment.settings import Experiment
from fedshift.report.charts import Axis, Curves, Heat
from fedshift.report.curves import AVERAGE, BAND, ROUND, averaged, curve, cut, cuts, room
from fedshift.report.lines import PER_FILTER, PER_LAYER, Strand, panels, rule_of
from fedshift.runs.recorded import ClientRecord, Recorded
from fedshift.runs.sheet import Figures
from fedshift.runs.summary import NO, WINDOW

ONLY = 0.9  # of a label's examples, or more, lie with one kind of clients: it is theirs
SUPERIOR, INFERIOR = "superior", "inferior"
DEFINITION = (  # of the marks, which are the paper's words
    f"A label is superior, or inferior, when {100 * ONLY:.0f} % of its examples or more lie with full-precision, or "
    "quantized, clients."
)


class Held(NamedTuple):
    """The labels of a data set, and whose they are: those of exact uploads (superior), quantized ones, or nobody's."""

    strands: list[Strand]
    marks: list[str]  # for each label
    inferior: float  # the share of inferior labels among all examples


def bits(experiment: Experiment, group: str) -> int:
    """The bits of a group of clients, by the name it has in clients.csv.

    >>> bits(Experiment(uplink={"bits": "32+4"}), "4 bit")
    4
    """
    uplink = experiment.uplink
    for name, link in uplink.group.items():
        if " ".join(name.split()) == group:
            return link.bits
    found = re.match(r"(\d+) bit", group)
    return int(found[1]) if found else uplink.bits if isinstance(uplink.bits, int) else 32


def marks(experiment: Experiment, clients: Sequence[ClientRecord]) -> list[str]:
    """Group that holds each label: superior, inferior, or '' for both; '' throughout where all clients upload alike."""
    labels = np.array([client.labels for client in clients if len(client.labels) == len(clients[0].labels)])
    if not labels.size:
        return []
    lossy = np.array(
        [bits(experiment, client.group) < 32 for client in clients if len(client.labels) == labels.shape[1]]
    )
    if lossy.all() or not lossy.any():
        return [""] * labels.shape[1]
    theirs, others, least = labels[lossy].sum(axis=0), labels[~lossy].sum(axis=0), ONLY * labels.sum(axis=0)
    whose = zip(theirs, others, least, strict=True)
    return ["" if not of else INFERIOR if a >= of else SUPERIOR if b >= of else "" for a, b, of in whose]


def held(strands: Sequence[Strand]) -> list[Held]:
    """By data set and number of labels; a label is somebody's if it is theirs in every run that can tell."""
    kinds: dict[tuple[str, int], list[Strand]] = {}
    for strand in strands:
        classes = len(strand.runs[0].layers("predicted"))  # predicted.3 reads like a layer
        if classes and any(run.evaluated.any() for run in strand.runs):
            kinds.setdefault((strand.experiment.data.name, classes), []).append(strand)
    return [_held(some, classes) for (_, classes), some in kinds.items()]


def _held(strands: list[Strand], classes: int) -> Held:
    runs = [run for strand in strands for run in strand.runs if run.clients]
    marked = [marks(run.experiment, run.clients) for run in runs]
    known = [some for some in marked if any(some) and len(some) == classes]
    whose = [{some[label] for some in known} for label in range(classes)]
    agreed = [next(iter(seen)) if len(seen) == 1 else "" for seen in whose]
    counts = sum(
        (np.array(client.labels) for run in runs[:1] for client in run.clients if len(client.labels) == classes),
        np.zeros(classes),
    )
    inferior = np.array([mark == INFERIOR for mark in agreed])
    return Held(strands, agreed, float(counts[inferior].sum() / max(1.0, counts.sum())))


def charts(strands: Sequence[Strand]) -> list[Heat | Curves]:
    made: list[Heat | Curves] = []
    for i, group in enumerate(held(strands)):
        end = f"-{i + 1}" if i else ""
        made.append(predicted(group, end))
        if INFERIOR in group.marks:
            made.append(inferior(group, end))
    return made


def share(run: Recorded, label: int) -> float:
    """Of the predictions of the last ten evaluated rounds."""
    late = run.figure(f"predicted.{label}")[run.evaluated][-WINDOW:]
    return float(late.mean()) if len(late) else math.nan


def _share(strand: Strand, label: int) -> float:
    return float(np.mean([share(run, label) for run in strand.runs if run.evaluated.any()]))


def predicted(of: Held, end: str) -> Heat:
    classes = range(len(of.marks))
    values = [[_share(strand, c) for c in classes] for strand in of.strands]
    known = any(of.marks)
    return Heat(
        name=f"predicted{end}",
        title=f"Predicted share of each label{_data(of, end)}",
        caption=f"Mean of the last ten evaluated rounds and of seeds. {DEFINITION if known else ''}".strip(),
        value=Axis("share of predictions", "%"),
        columns=[str(c) for c in classes],
        rows=[strand.line.label for strand in of.strands],
        values=[cuts(row, 4) for row in values],
        lines=[strand.line.key for strand in of.strands],
        marks=of.marks if known else [""] * len(of.marks),
    )


def inferior(of: Held, end: str) -> Curves:
    """Share of predictions that are labels of quantized clients."""
    theirs = [label for label, mark in enumerate(of.marks) if mark == INFERIOR]

    def total(run: Recorded) -> Figures:
        return sum((run.figure(f"predicted.{label}") for label in theirs), np.zeros(len(run.rounds)))

    points = room(2 * len(of.strands))
    found = panels(of.strands, lambda strand: curve(strand, averaged(total), points, banded=True))
    named = ", ".join(map(str, theirs))
    return Curves(
        name=f"inferior{end}",
        title=f"Predicted share of labels of quantized clients{_data(of, end)}",
        caption=f"Inferior labels: {named}. {AVERAGE} {BAND} Across: their share of the data.",
        x=ROUND,
        y=Axis("share of predictions", "%"),
        panels=found,
        level=cut(of.inferior),
    )


def _data(of: Held, end: str) -> str:
    return f": {of.strands[0].experiment.data.name}" if end else ""


def sentences(strands: Sequence[Strand]) -> list[str]:
    """Predicted share of inferior labels, without shift and with each rule, beside their share of the data."""
    answer: list[str] = []
    several = held(strands)
    for of in several:
        theirs = [label for label, mark in enumerate(of.marks) if mark == INFERIOR]
        parts: list[str] = []
        for rule, how in ((NO, "without shift"), (PER_LAYER, "with the shift per layer"), (PER_FILTER, "per filter")):
            runs = [run for strand in of.strands for run in strand.runs if strand.row and _mixed(run, rule)]
            if theirs and runs:
                mean = float(np.mean([sum(share(run, label) for label in theirs) for run in runs]))
                if math.isfinite(mean):
                    first = rule == PER_FILTER and not any("the shift" in part for part in parts)
                    parts.append(f"{100 * mean:.1f} % {'with the shift ' * first}{how}")
        if parts:
            where = f" of {of.strands[0].experiment.data.name}" if len(several) > 1 else ""
            answer.append(
                f"Labels{where} that quantized clients hold ({100 * ONLY:.0f} % or more of each) are "
                f"{100 * of.inferior:.1f} % of the data; "
                f"of what is predicted at the end they are {joined(parts)}."
            )
    return answer


def joined(parts: Sequence[str]) -> str:
    """
    >>> joined(["a"]), joined(["a", "b"]), joined(["a", "b", "c"])
    ('a', 'a and b', 'a, b and c')
    """
    return " and ".join([*([", ".join(parts[:-1])] if len(parts) > 1 else []), *parts[-1:]])


def _mixed(run: Recorded, rule: str) -> bool:
    """True if some clients of the run are quantized and some are not, and it has this rule of the shift."""
    return rule_of(run.experiment) == rule and any(marks(run.experiment, run.clients) if run.clients else [])
