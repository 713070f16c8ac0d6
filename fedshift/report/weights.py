"""Histograms of weights before and after the quantizer: one seed of each line, some of its rounds."""

from collections.abc import Sequence

import numpy as np

from fedshift.report.charts import Axis, Choice, Histograms, Steps
from fedshift.report.curves import chosen, cut
from fedshift.report.lines import Strand
from fedshift.runs.recorded import Recorded, Weights

PANELS = 600  # that all histograms together may have


def charts(strands: Sequence[Strand]) -> list[Choice]:
    told = [(one, run) for one in strands for run in one.runs[:1] if run.weights]
    layers = max((len({held.histogram.layer for held in run.weights}) for _, run in told), default=1)
    most = max(1, PANELS // (layers * max(1, len(told))))
    made: list[tuple[str, Histograms]] = []
    for one, run in told:
        rounds = sorted({held.round for held in run.weights})
        kept = [rounds[i] for i in chosen(len(rounds), most)] if most > 1 else rounds[-1:]
        for number in kept:
            seed = f", seed {run.experiment.seed}" if len(one.line.runs) > 1 else ""
            label = f"{one.line.label}{seed}, round {number}"
            made.append((label, _histograms(run, number, f"weights-{len(made) + 1}", label)))
    return [Choice("weights", "Weights before and after the quantizer", [*made])] if made else []


def _histograms(run: Recorded, number: int, name: str, label: str) -> Histograms:
    found = [held for held in run.weights if held.round == number]
    return Histograms(
        name=name,
        title=f"Weights before and after the quantizer: {label}",
        caption="What one quantized client sends, layer by layer.",
        x=Axis("weight"),
        panels=[_steps(held) for held in found],
    )


def _steps(held: Weights) -> Steps:
    of = held.histogram
    edges = np.linspace(of.low, of.high, len(of.before) + 1)
    counts = [("before the quantizer", of.before), ("after", of.after)]
    return Steps(of.layer, [cut(float(edge), 6) or 0.0 for edge in edges], [*counts])
