"""Draw the figures of docs/guides/centring.md from the CSV files in results/.

python studies/centring/figures.py [--out docs/images]
"""

import argparse
import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from common import RESULTS
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedshift.paper.figures.style import EXACT, PAGE, sheet
from fedshift.report import style
from fedshift.report.style import COLOURS, content, styled
from fedshift.runs.progress import echo

Row = dict[str, str]
MAKER = "studies/centring/figures.py"
FREE, CENTRED, PAPER = COLOURS[1], COLOURS[0], COLOURS[2]  # no shift, filter centring, the paper's rule
WINDOW = 10
OTHER = ("weight decay", "off ")  # controls, drawn in the colour of no shift
# groups of the first figure: a heading, a file, and variants
SHOWN: list[tuple[str, str, Sequence[str]]] = [
    ("rule and share", "share", ("layer 0.5", "layer 1", "filter 0.25", "filter 0.5", "filter 1")),
    ("tensors", "tensors", ("fc1 alone", "fc2 alone")),
    ("rounds", "rounds", ("every 5 rounds", "every 25 rounds", "rounds 1 to 50", "from round 51")),
    (
        "place",
        "place",
        (
            "clients, every step",
            "clients, every step, first means kept",
            "server, first means kept",
            "model computes with w - mean(w_f)",
        ),
    ),
    ("other directions", "direction", ("off a random direction", "off random signs")),
    ("decay", "decay", ("decay of filter means 1", "weight decay 0.001", "weight decay 0.005")),
]


def read(name: str) -> list[Row]:
    with (RESULTS / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def paired(rows: Sequence[Row], variant: str, base: str, bits: str) -> list[float]:
    """Difference of two variants in points, one per seed."""

    def by_seed(name: str) -> dict[str, float]:
        return {row["seed"]: float(row["accuracy"]) for row in rows if row["variant"] == name and row["bits"] == bits}

    ours, theirs = by_seed(variant), by_seed(base)
    return [ours[seed] - theirs[seed] for seed in ours]


def dots(axes: Axes, at: float, values: Sequence[float], ink: str) -> None:
    """Draw the mean as a bar and seeds as dots."""
    axes.barh(at, fmean(values), height=0.62, color=ink, alpha=0.35, linewidth=0)
    axes.plot(values, [at] * len(values), "o", color=ink, markersize=2.2, linewidth=0)


def ablations() -> Figure:
    """Gain over no shift of each variant, 32+32."""
    figure = sheet(PAGE, 4.3)
    axes = figure.subplots()
    at, ticks, names = 0.0, [], []
    for heading, file, variants in SHOWN:
        axes.text(-3.15, at, heading, fontsize=6.5, color=EXACT, va="center", ha="left", style="italic")
        at += 0.9
        for variant in variants:
            ink = PAPER if variant.startswith("layer") else FREE if variant.startswith(OTHER) else CENTRED
            dots(axes, at, paired(read(file), variant, "no shift", "32+32"), ink)
            ticks.append(at)
            names.append(variant)
            at += 0.9
    axes.axvline(0, color="black", linewidth=0.5)
    axes.axvline(
        fmean(paired(read("share"), "filter 1", "no shift", "32+32")), color=CENTRED, linewidth=0.6, linestyle=":"
    )
    axes.set_yticks(ticks, names)
    axes.set_ylim(at, -0.8)
    axes.set_xlabel("accuracy against no shift, points (digits, 32+32; bar: mean of three seeds, dots: seeds)")
    return figure


def directions() -> Figure:
    """Shares of squared norms in the direction of the filter means, and the drift that remains after averaging."""
    figure = sheet(PAGE, 2.2)
    rows = [row for row in read("why_layers") if row["variant"] == "no shift" and row["bits"] == "32+32"]
    layers = ["fc1.weight", "fc2.weight"]
    left, right = figure.subplots(1, 2)
    parts = {
        "drift_along": "drift of a client",
        "spread_along": "disagreement of clients",
        "update_along": "their mean",
    }
    for i, (key, label) in enumerate(parts.items()):
        found = [[100 * float(row[key]) for row in rows if row["layer"] == name] for name in layers]
        bars(left, i, [fmean(x) for x in found], label, COLOURS[i])
    for i, name in enumerate(layers):
        n = 64 if name == "fc1.weight" else 128
        left.plot([i - 0.45, i + 0.45], [100 / n] * 2, color="black", linewidth=1.0, label="" if i else "1 / fan-in")
    left.set_ylabel("share of squared norm\nalong the filter means, %")
    for i, (key, label) in enumerate(
        {"left_along": "along the filter means", "left_rest": "all other directions"}.items()
    ):
        found = [[float(row[key]) for row in rows if row["layer"] == name] for name in layers]
        bars(right, i, [fmean(x) for x in found], label, COLOURS[3 + i])
    right.axhline(0.1, color=EXACT, linewidth=0.7, linestyle=":")
    right.text(0.5, 0.101, "independent", fontsize=6, color=EXACT, ha="center", va="bottom")
    right.set_ylim(0, 0.17)
    right.set_ylabel("|mean drift|$^2$ / mean |drift|$^2$")
    for axes in (left, right):
        axes.set_xticks([0, 1], ["first layer (64 inputs)", "last layer (128 inputs)"])
        axes.legend(loc="upper left")
        axes.set_xlim(-0.55, 1.55)
    return figure


def bars(axes: Axes, place: int, values: Sequence[float], label: str, ink: str) -> None:
    axes.bar(
        [i + 0.25 * place - 0.25 for i in range(len(values))], values, width=0.23, color=ink, label=label, linewidth=0
    )


def smoothed(values: Sequence[float]) -> list[float]:
    """Moving average over ten values."""
    return [fmean(values[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(values))]


def over_rounds() -> Figure:
    """Accuracy, change of the predictions, and size of the hidden activations by round."""
    figure = sheet(PAGE, 2.1)
    rows = [row for row in read("why_rounds") if row["bits"] == "32+32"]
    panels = {
        "accuracy": "accuracy, %",
        "swing": "change of predicted label\nshares per round, %",
        "hidden_factor": "factor of the last layer,\nE $s^2/n$",
    }
    inks = {"no shift": FREE, "layer 0.5": PAPER, "filter 1": CENTRED}
    for axes, (key, label) in zip(figure.subplots(1, 3), panels.items(), strict=True):
        for variant, ink in inks.items():
            seeds = sorted({row["seed"] for row in rows})
            curves = [[float(r[key]) for r in rows if r["variant"] == variant and r["seed"] == s] for s in seeds]
            mean = smoothed([fmean(column) for column in zip(*curves, strict=True)])
            axes.plot(range(1, len(mean) + 1), mean, color=ink, label=variant)
        axes.set_xlabel("round")
        axes.set_ylabel(label)
        if key == "accuracy":
            axes.set_ylim(70, 97)
            axes.legend(loc="lower right")
    return figure


def predictions() -> Figure:
    """Gain of centring in cases where the explanation predicts a larger gain or none."""
    figure = sheet(PAGE, 2.3)
    axes = figure.subplots()
    rows = read("inputs")
    cases = [
        ("inputs plus 0.5", "inputs plus 0.5"),
        ("", "as it is"),
        ("inputs minus their mean", "inputs minus their mean"),
        ("inputs minus pixel means", "inputs minus pixel means"),
        ("tanh", "tanh"),
        ("tanh, inputs minus pixel means", "tanh, inputs minus pixel means"),
        ("iid clients", "iid clients"),
    ]
    for at, (name, _) in enumerate(cases):
        prefix = f"{name}, " if name else ""
        dots(axes, at, paired(rows, f"{prefix}filter 1", f"{prefix}no shift", "32+32"), CENTRED)
    axes.axvline(0, color="black", linewidth=0.5)
    axes.set_yticks(range(len(cases)), [label for _, label in cases])
    axes.invert_yaxis()
    axes.set_xlabel("gain of filter centring, points (bar: mean of three seeds, dots: seeds)")
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "ablations": ablations,
    "directions": directions,
    "rounds": over_rounds,
    "predictions": predictions,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder (default: docs/images)")
    args = parser.parse_args()
    for name, draw in FIGURES.items():
        path = args.out / f"centring-{name}.png"
        with styled(style.PAPER | {"savefig.dpi": 200}):
            path.write_bytes(content(draw(), "png", MAKER))
        echo(path)


if __name__ == "__main__":
    main()
