"""Section "What happened during training?": scores, losses, layers, predictions, quantization errors, weights."""

from collections.abc import Callable, Sequence
from functools import partial

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
    points_per_curve,
    score,
    titled,
)
from fedshift.report.curves import score_axis as axis
from fedshift.report.lines import Strand, panels
from fedshift.runs.columns import metric_columns
from fedshift.runs.recorded import Recorded, Weights
from fedshift.runs.sheet import Figures
from fedshift.runs.summary import metric_labels, with_goal

FEW = 6  # layers drawn side by side; with more, the reader selects one
SPARE = 3  # divides the points of layer curves, which are many and smooth
HISTOGRAMS = 600  # limit for all panels of histograms together


def section(strands: Sequence[Strand]) -> Section:
    parts: list[Chart | Choice] = [*scores(strands), *losses(strands), *further(strands), *layer_charts(strands)]
    parts += [*labels.charts(strands), *errors(strands), *weight_charts(strands)]
    return Section("inside", "What happened during training?", labels.sentences(strands), [*parts])


def scores(strands: Sequence[Strand]) -> list[Curves]:
    made = []
    for end, some in by_metric(strands):
        experiment, found = some[0].experiment, averages(some, score)
        made.append(Curves(f"score{end}", titled(experiment), f"{AVERAGE} {BAND}", ROUND, axis(experiment), found))
    return [chart for chart in made if chart.panels]


def averages(strands: Sequence[Strand], of: Callable[[Recorded], Figures]) -> list[Panel]:
    points = points_per_curve(len(strands))
    return panels(strands, lambda strand: curve(strand, averaged(of), points, banded=True))


def losses(strands: Sequence[Strand]) -> list[Curves]:
    others = [strand for strand in strands if strand.experiment.train.metric != "loss"]  # otherwise it is the score
    found = averages(others, lambda run: run.figure("loss"))
    return [Curves("loss", "Loss", f"{AVERAGE} {BAND}", ROUND, Axis("test loss"), found)] if found else []


def _by_metric(name: str, run: Recorded) -> Figures:
    return run.figure(metric_columns(run.experiment)[name])


def further(strands: Sequence[Strand]) -> list[Curves | Choice]:
    """Curves of the metrics other than the score and the loss; a choice if there are several."""
    charts: list[tuple[str, Chart]] = []
    goals = {name: goal for strand in strands for name, goal in strand.experiment.train.directions.items()}
    for name, label in metric_labels(goals).items():
        some = [
            strand
            for strand in strands
            if name in strand.experiment.train.directions and name not in (strand.experiment.train.metric, "loss")
        ]
        found = averages(some, partial(_by_metric, name))
        if not found:
            continue
        axis = Axis(with_goal(label, goals[name]), "%" if name == "accuracy" else "")
        title = f"Further metric: {label}"
        charts.append((label, Curves(f"metric-{len(charts) + 1}", title, f"{AVERAGE} {BAND}", ROUND, axis, found)))
    if len(charts) < 2:
        return [chart for _, chart in charts if isinstance(chart, Curves)]
    return [Choice("metric", "Further metrics", charts)]


def errors(strands: Sequence[Strand]) -> list[Curves]:
    lossy = [strand for strand in strands if any(np.nansum(run.figure("error")) for run in strand.runs)]
    found = panels(lossy, lambda strand: curve(strand, every("error"), points_per_curve(2 * len(lossy)), banded=True))
    caption = f"|w - Q(w)| / |w|, mean over the quantized uploads of a round and over seeds. {BAND}"
    axis = Axis("relative error", "%")
    return [Curves("error", "Quantization error", caption, ROUND, axis, found)] if found else []


def layer_charts(strands: Sequence[Strand]) -> list[Curves | Choice]:
    made = [
        _layer_chart(
            strands,
            Curves(
                "layer-mean",
                "Mean of each layer",
                "Mean over seeds. Short dashes: before the shift, if the run has one.",
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
    """One panel per layer, or a choice of layers if there are many layers or lines."""
    names = list(dict.fromkeys(layer for strand in strands for layer in strand.runs[0].layers(figure)))
    points = max(4, points_per_curve(len(names) * len(strands) * (2 if second[0] else 1)) // SPARE)

    def curves(layer: str) -> Callable[[Strand], list[Curve]]:
        return lambda strand: [
            *curve(strand, every(f"{figure}.{layer}"), points),
            *(_second(strand, f"{second[0]}.{layer}", second[1], points) if second[0] else []),
        ]

    if not names:
        return None
    if len(names) <= FEW and not any(strand.panel for strand in strands):
        drawn = [Panel(layer, [line for strand in strands for line in curves(layer)(strand)]) for layer in names]
        filled = [panel for panel in drawn if panel.curves]  # a run that has just started has layers and no rounds
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
    """Second curve of a layer; [] if it equals the first one: without a shift, or without a quantizer."""
    kind, _, layer = name.partition(".")
    other = {"mean_before": "mean_after", "drift_coded": "drift"}[kind]
    same = all(np.array_equal(run.figure(name), run.figure(f"{other}.{layer}"), equal_nan=True) for run in strand.runs)
    return [] if same else curve(strand, every(name), points, label=label, dashed=True)


def weight_charts(strands: Sequence[Strand]) -> list[Choice]:
    recorded = [(strand, run) for strand in strands for run in strand.runs[:1] if run.weights]
    layers = max((len({entry.histogram.layer for entry in run.weights}) for _, run in recorded), default=1)
    most = max(1, HISTOGRAMS // (layers * max(1, len(recorded))))
    made: list[tuple[str, Histograms]] = []
    for strand, run in recorded:
        rounds = sorted({entry.round for entry in run.weights})
        kept = [rounds[i] for i in chosen(len(rounds), most)] if most > 1 else rounds[-1:]
        for number in kept:
            seed = f", seed {run.experiment.seed}" if len(strand.line.runs) > 1 else ""
            label = f"{strand.line.label}{seed}, round {number}"
            made.append((label, _histograms(run, number, f"weights-{len(made) + 1}", label)))
    return [Choice("weights", "Weights before and after the quantizer", [*made])] if made else []


def _histograms(run: Recorded, number: int, name: str, label: str) -> Histograms:
    found = [entry for entry in run.weights if entry.round == number]
    return Histograms(
        name=name,
        title=f"Weights before and after the quantizer: {label}",
        caption="Weights of one quantized client by layer.",
        x=Axis("weight"),
        panels=[_steps(entry) for entry in found],
    )


def _steps(entry: Weights) -> HistogramPanel:
    histogram = entry.histogram
    edges = np.linspace(histogram.low, histogram.high, len(histogram.before) + 1)
    counts = [("before the quantizer", histogram.before), ("after", histogram.after)]
    return HistogramPanel(histogram.layer, [cut(float(edge), 6) or 0.0 for edge in edges], [*counts])
