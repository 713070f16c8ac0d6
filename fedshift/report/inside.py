"""What happened inside? Scores and losses, layers, predictions, errors of the quantizer, weights."""

from collections.abc import Callable, Sequence

import numpy as np

from fedshift.report import labels
from fedshift.report.charts import Axis, Chart, Choice, Curve, Curves, HistogramPanel, Histograms, Panel, Section
from fedshift.report.curves import (
    AVERAGE,
    BAND,
    ROUND,
    averaged,
    by_metric,
    chosen,
    curve,
    cut,
    every,
    room,
    score,
    titled,
)
from fedshift.report.curves import score_axis as axis
from fedshift.report.lines import Strand, panels
from fedshift.runs.recorded import Recorded, Weights
from fedshift.runs.sheet import Figures

FEW = 6  # layers that are drawn side by side; one of more is chosen
SPARE = 3  # there are many of these curves, and they are smooth
HISTOGRAMS = 600  # that all histograms together may have


def section(strands: Sequence[Strand]) -> Section:
    parts: list[Chart | Choice] = [*scores(strands), *losses(strands), *layer_charts(strands)]
    parts += [*labels.charts(strands), *errors(strands), *weight_charts(strands)]
    return Section("inside", "What happened inside?", labels.sentences(strands), [*parts])


def scores(strands: Sequence[Strand]) -> list[Curves]:
    made = []
    for end, some in by_metric(strands):
        experiment, found = some[0].experiment, averages(some, score)
        made.append(Curves(f"score{end}", titled(experiment), f"{AVERAGE} {BAND}", ROUND, axis(experiment), found))
    return [chart for chart in made if chart.panels]


def averages(strands: Sequence[Strand], of: Callable[[Recorded], Figures]) -> list[Panel]:
    points = room(len(strands))
    return panels(strands, lambda strand: curve(strand, averaged(of), points, banded=True))


def losses(strands: Sequence[Strand]) -> list[Curves]:
    others = [strand for strand in strands if strand.experiment.train.metric != "loss"]  # of which it is the score
    found = averages(others, lambda run: run.figure("loss"))
    return [Curves("loss", "Loss", f"{AVERAGE} {BAND}", ROUND, Axis("test loss"), found)] if found else []


def errors(strands: Sequence[Strand]) -> list[Curves]:
    lossy = [strand for strand in strands if any(np.nansum(run.figure("error")) for run in strand.runs)]
    found = panels(lossy, lambda strand: curve(strand, every("error"), room(2 * len(lossy)), banded=True))
    caption = f"|w - Q(w)| / |w|, mean over the quantized uploads of a round, and over seeds. {BAND}"
    axis = Axis("relative error", "%")
    return [Curves("error", "Quantization error", caption, ROUND, axis, found)] if found else []


def layer_charts(strands: Sequence[Strand]) -> list[Curves | Choice]:
    made = [
        _layer_chart(
            strands,
            Curves(
                "layer-mean",
                "Mean of each layer",
                "Mean over seeds. Short dashes: before the shift, where one was made.",
                ROUND,
                Axis("mean weight"),
                [],
            ),
            "mean_after",
            ("mean_before", "before the shift"),
        ),
        _layer_chart(
            strands,
            Curves(
                "layer-filters",
                "Spread of the filters' means",
                "Root mean square of the means of a layer's filters before the shift of a round, mean over seeds.",
                ROUND,
                Axis("RMS of filter means"),
                [],
            ),
            "filters_before",
        ),
        _layer_chart(
            strands,
            Curves(
                "layer-step",
                "Distance between rounds",
                "|w(t+1) - w(t)| of the model that the server sends, mean over seeds.",
                ROUND,
                Axis("L2 distance"),
                [],
            ),
            "step",
        ),
        _layer_chart(
            strands,
            Curves(
                "layer-drift",
                "Client drift",
                "|w_k - w(t)|, mean over the clients of a round and over seeds. Short dashes: as sent.",
                ROUND,
                Axis("L2 distance"),
                [],
            ),
            "drift",
            ("drift_coded", "as sent"),
        ),
    ]
    return [chart for chart in made if chart]


def _layer_chart(
    strands: Sequence[Strand], like: Curves, figure: str, second: tuple[str, str] = ("", "")
) -> Curves | Choice | None:
    """A panel for each layer; one layer at a time where there are many, or many lines."""
    names = list(dict.fromkeys(layer for strand in strands for layer in strand.runs[0].layers(figure)))
    points = max(4, room(len(names) * len(strands) * (2 if second[0] else 1)) // SPARE)

    def curves(layer: str) -> Callable[[Strand], list[Curve]]:
        return lambda strand: [
            *curve(strand, every(f"{figure}.{layer}"), points),
            *(_second(strand, f"{second[0]}.{layer}", second[1], points) if second[0] else []),
        ]

    if not names:
        return None
    if len(names) <= FEW and not any(strand.panel for strand in strands):
        drawn = [Panel(layer, [line for strand in strands for line in curves(layer)(strand)]) for layer in names]
        filled = [panel for panel in drawn if panel.curves]  # a run that has only begun has layers and no rounds
        return like._replace(panels=filled, apart=True) if filled else None
    several = [(layer, drawn) for layer in names if (drawn := panels(strands, curves(layer)))]
    if not several:
        return None
    return Choice(
        like.name,
        like.title,
        [
            (layer, like._replace(name=f"{like.name}-{i + 1}", title=f"{like.title}: {layer}", panels=drawn))
            for i, (layer, drawn) in enumerate(several)
        ],
    )


def _second(strand: Strand, name: str, label: str, points: int) -> list[Curve]:
    """Curve of the value before; none where both are equal: without a shift, or without a quantizer."""
    kind, _, layer = name.partition(".")
    other = {"mean_before": "mean_after", "drift_coded": "drift"}[kind]
    same = all(np.array_equal(run.figure(name), run.figure(f"{other}.{layer}"), equal_nan=True) for run in strand.runs)
    return [] if same else curve(strand, every(name), points, label=label, dashed=True)


def weight_charts(strands: Sequence[Strand]) -> list[Choice]:
    recorded = [(strand, run) for strand in strands for run in strand.runs[:1] if run.weights]
    layers = max((len({held.histogram.layer for held in run.weights}) for _, run in recorded), default=1)
    most = max(1, HISTOGRAMS // (layers * max(1, len(recorded))))
    made: list[tuple[str, Histograms]] = []
    for strand, run in recorded:
        rounds = sorted({held.round for held in run.weights})
        kept = [rounds[i] for i in chosen(len(rounds), most)] if most > 1 else rounds[-1:]
        for number in kept:
            seed = f", seed {run.experiment.seed}" if len(strand.line.runs) > 1 else ""
            label = f"{strand.line.label}{seed}, round {number}"
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


def _steps(held: Weights) -> HistogramPanel:
    of = held.histogram
    edges = np.linspace(of.low, of.high, len(of.before) + 1)
    counts = [("before the quantizer", of.before), ("after", of.after)]
    return HistogramPanel(of.layer, [cut(float(edge), 6) or 0.0 for edge in edges], [*counts])
