"""Predictions of the model: the share of each label, and of labels that (almost) only quantized clients have."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedshift.experiment.links import group_bits
from fedshift.experiment.settings import Experiment
from fedshift.report.charts import Axis, Curves, Heat
from fedshift.report.curves import AVERAGE, BAND, ROUND, averaged, curve, cut, cuts, points_per_curve
from fedshift.report.lines import PER_FILTER, PER_LAYER, Strand, panels, rule_of
from fedshift.runs.recorded import ClientRecord, Recorded
from fedshift.runs.sheet import Figures
from fedshift.runs.summary import NO, WINDOW

ONLY = 0.9  # a label belongs to a kind of clients that has at least this share of its examples
SUPERIOR, INFERIOR = "superior", "inferior"
DEFINITION = (  # of the marks, which are terms of the paper
    f"A label is superior if {100 * ONLY:.0f} % of its examples or more belong to full-precision clients, and inferior "
    "if they belong to quantized clients."
)


class LabelGroup(NamedTuple):
    """Lines on one data set, and the kind of clients that each label belongs to: superior, inferior, or ''."""

    strands: list[Strand]
    marks: list[str]  # for each label
    inferior: float  # the share of inferior labels among all examples


def marks(experiment: Experiment, clients: Sequence[ClientRecord]) -> list[str]:
    """Mark of each label: superior, inferior, or '' for neither; all '' if all clients are of one kind."""
    labels = np.array([client.labels for client in clients if len(client.labels) == len(clients[0].labels)])
    if not labels.size:
        return []
    bits = group_bits(experiment)
    lossy = np.array([bits.get(client.group, 32) < 32 for client in clients if len(client.labels) == labels.shape[1]])
    if lossy.all() or not lossy.any():
        return [""] * labels.shape[1]
    quantized, exact, least = labels[lossy].sum(axis=0), labels[~lossy].sum(axis=0), ONLY * labels.sum(axis=0)
    counts = zip(quantized, exact, least, strict=True)
    return ["" if not n else INFERIOR if a >= n else SUPERIOR if b >= n else "" for a, b, n in counts]


def label_groups(strands: Sequence[Strand]) -> list[LabelGroup]:
    """Lines by data set and number of labels; a label has a mark if all runs with marks agree on it."""
    kinds: dict[tuple[str, int], list[Strand]] = {}
    for strand in strands:
        classes = len(strand.runs[0].layers("predicted"))  # columns predicted.LABEL are named like those of layers
        if classes and any(run.evaluated.any() for run in strand.runs):
            kinds.setdefault((strand.experiment.data.name, classes), []).append(strand)
    return [_label_group(some, classes) for (_, classes), some in kinds.items()]


def _label_group(strands: list[Strand], classes: int) -> LabelGroup:
    runs = [run for strand in strands for run in strand.runs if run.clients]
    marked = [marks(run.experiment, run.clients) for run in runs]
    known = [some for some in marked if any(some) and len(some) == classes]
    seen = [{some[label] for some in known} for label in range(classes)]
    agreed = [next(iter(values)) if len(values) == 1 else "" for values in seen]
    counts = sum(
        (np.array(client.labels) for run in runs[:1] for client in run.clients if len(client.labels) == classes),
        np.zeros(classes),
    )
    inferior = np.array([mark == INFERIOR for mark in agreed])
    return LabelGroup(strands, agreed, float(counts[inferior].sum() / max(1.0, counts.sum())))


def charts(strands: Sequence[Strand]) -> list[Heat | Curves]:
    made: list[Heat | Curves] = []
    for i, group in enumerate(label_groups(strands)):
        end = f"-{i + 1}" if i else ""
        made.append(predicted(group, end))
        if INFERIOR in group.marks:
            made.append(inferior(group, end))
    return made


def share(run: Recorded, label: int) -> float:
    """Share of a label among the predictions of the last ten evaluated rounds."""
    late = run.figure(f"predicted.{label}")[run.evaluated][-WINDOW:]
    return float(late.mean()) if len(late) else math.nan


def _share(strand: Strand, label: int) -> float:
    return float(np.mean([share(run, label) for run in strand.runs if run.evaluated.any()]))


def predicted(group: LabelGroup, end: str) -> Heat:
    classes = range(len(group.marks))
    values = [[_share(strand, c) for c in classes] for strand in group.strands]
    known = any(group.marks)
    return Heat(
        name=f"predicted{end}",
        title=f"Predicted share of each label{_data(group, end)}",
        caption=f"Mean over the last ten evaluated rounds and over seeds. {DEFINITION if known else ''}".strip(),
        value=Axis("share of predictions", "%"),
        columns=[str(c) for c in classes],
        rows=[strand.line.label for strand in group.strands],
        values=[cuts(row, 4) for row in values],
        lines=[strand.line.key for strand in group.strands],
        marks=group.marks if known else [""] * len(group.marks),
    )


def inferior(group: LabelGroup, end: str) -> Curves:
    """Share of inferior labels among predictions, by round."""
    inferior_labels = [label for label, mark in enumerate(group.marks) if mark == INFERIOR]

    def total(run: Recorded) -> Figures:
        return sum((run.figure(f"predicted.{label}") for label in inferior_labels), np.zeros(len(run.rounds)))

    points = points_per_curve(2 * len(group.strands))
    found = panels(group.strands, lambda strand: curve(strand, averaged(total), points, banded=True))
    named = ", ".join(map(str, inferior_labels))
    return Curves(
        name=f"inferior{end}",
        title=f"Predicted share of labels of quantized clients{_data(group, end)}",
        caption=f"Inferior labels: {named}. {AVERAGE} {BAND} Horizontal line: their share of the data.",
        x=ROUND,
        y=Axis("share of predictions", "%"),
        panels=found,
        level=cut(group.inferior),
    )


def _data(group: LabelGroup, end: str) -> str:
    return f": {group.strands[0].experiment.data.name}" if end else ""


def sentences(strands: Sequence[Strand]) -> list[str]:
    """Predicted share of inferior labels, without shift and with each rule, and their share of the data."""
    answer: list[str] = []
    groups = label_groups(strands)
    for group in groups:
        inferior_labels = [label for label, mark in enumerate(group.marks) if mark == INFERIOR]
        parts: list[str] = []
        for rule, how in ((NO, "without shift"), (PER_LAYER, "with the shift per layer"), (PER_FILTER, "per filter")):
            runs = [run for strand in group.strands for run in strand.runs if strand.row and _mixed(run, rule)]
            if inferior_labels and runs:
                mean = float(np.mean([sum(share(run, label) for label in inferior_labels) for run in runs]))
                if math.isfinite(mean):
                    first = rule == PER_FILTER and not any("the shift" in part for part in parts)
                    parts.append(f"{100 * mean:.1f} % {'with the shift ' * first}{how}")
        if parts:
            where = f" of {group.strands[0].experiment.data.name}" if len(groups) > 1 else ""
            answer.append(
                f"Inferior labels{where} (at least {100 * ONLY:.0f} % of their examples belong to quantized clients) "
                f"are {100 * group.inferior:.1f} % of the data; their share of final predictions is {joined(parts)}."
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
