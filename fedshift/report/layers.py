"""Layer by layer: means of layers and of filters, how far the model and its clients move."""

from collections.abc import Callable, Sequence

import numpy as np

from fedshift.report.charts import Axis, Choice, Curve, Curves, Panel
from fedshift.report.curves import ROUND, curve, every, room
from fedshift.report.lines import Strand, panels

FEW = 6  # layers that are drawn side by side; one of more is chosen
SPARE = 3  # there are many of these curves, and they are smooth


def charts(strands: Sequence[Strand]) -> list[Curves | Choice]:
    made = [
        _chart(
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
        _chart(
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
        _chart(
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
        _chart(
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


def _chart(
    strands: Sequence[Strand], like: Curves, figure: str, second: tuple[str, str] = ("", "")
) -> Curves | Choice | None:
    """A panel for each layer; one layer at a time where there are many, or many lines."""
    names = list(dict.fromkeys(layer for one in strands for layer in one.runs[0].layers(figure)))
    points = max(4, room(len(names) * len(strands) * (2 if second[0] else 1)) // SPARE)

    def curves(layer: str) -> Callable[[Strand], list[Curve]]:
        return lambda one: [
            *curve(one, every(f"{figure}.{layer}"), points),
            *(_second(one, f"{second[0]}.{layer}", second[1], points) if second[0] else []),
        ]

    if not names:
        return None
    if len(names) <= FEW and not any(one.panel for one in strands):
        drawn = [Panel(layer, [line for one in strands for line in curves(layer)(one)]) for layer in names]
        told = [panel for panel in drawn if panel.curves]  # a run that has only begun has layers and no rounds
        return like._replace(panels=told, apart=True) if told else None
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


def _second(one: Strand, name: str, label: str, points: int) -> list[Curve]:
    """What it was before; nothing where that is the same: without a shift, or without a quantizer."""
    kind, _, layer = name.partition(".")
    other = {"mean_before": "mean_after", "drift_coded": "drift"}[kind]
    same = all(np.array_equal(run.figure(name), run.figure(f"{other}.{layer}"), equal_nan=True) for run in one.runs)
    return [] if same else curve(one, every(name), points, label=label, dashed=True)
