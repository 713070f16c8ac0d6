"""Reports with invented numbers: one run, a demo of three lines, a sweep of forty."""

import math
import random
from itertools import product

from fedshift.report.charts import (
    Axis,
    Band,
    Choice,
    Curve,
    Curves,
    Heat,
    HistogramPanel,
    Histograms,
    Interval,
    Intervals,
    LegendLine,
    Panel,
    Report,
    Section,
    Stack,
    Stacks,
    Table,
    TableRow,
)

ACCURACY = Axis("test accuracy", "%")
ROUND = Axis("round")
SEEDS = [0, 1, 2]


def line(key: str, label: str, settings: dict[str, str], colour: int, dashed: bool = False) -> LegendLine:
    return LegendLine(key, label, settings, colour, "dashed" if dashed else "", [f"{key}-{seed}" for seed in SEEDS])


def curve(draw: random.Random, key: str, rounds: int, top: float, step: float = 1, gap: bool = False) -> Curve:
    y: list[float | None] = []
    for number in range(rounds):
        y.append(top * (1 - math.exp(-number / (rounds / 5))) + draw.gauss(0, 0.008))
    spread = [0.01 + 0.02 * draw.random() for _ in y]
    low = [None if value is None else value - width for value, width in zip(y, spread, strict=True)]
    high = [None if value is None else value + width for value, width in zip(y, spread, strict=True)]
    if gap:
        y[rounds // 2] = low[rounds // 2] = high[rounds // 2] = None
    return Curve(key, [step * (number + 1) for number in range(rounds)], y, low, high)


def charts(lines: list[LegendLine], rounds: int, panels: dict[str, list[LegendLine]]) -> list[Section]:
    """Every kind of chart with these lines."""
    draw = random.Random(7)
    tops = {each.key: 0.5 + 0.4 * draw.random() for each in lines}
    accuracy = Curves(
        "accuracy",
        "Test accuracy by round",
        "Means over seeds; the bands are one standard deviation wide to each side.",
        ROUND,
        ACCURACY,
        [
            Panel(title, [curve(draw, each.key, rounds, tops[each.key], gap=True) for each in some])
            for title, some in panels.items()
        ],
        level=0.1,
    )
    time = Curves(
        "time",
        "Test accuracy by time on the uplink",
        "",
        Axis("time to send", "s"),
        ACCURACY,
        [Panel("", [curve(draw, each.key, rounds, tops[each.key], 3.5 + place) for place, each in enumerate(lines)])],
        rate=1.25e6,
    )
    error = Curves(
        "error",
        "Quantization error",
        "Squared distance between what was meant and what arrived.",
        ROUND,
        Axis("error", log=True),
        [
            Panel(
                "",
                [
                    Curve(
                        each.key,
                        list(range(1, rounds + 1)),
                        [10 ** (-1 - 3 * n / rounds - place / 9) for n in range(rounds)],
                    )
                    for place, each in enumerate(lines)
                ],
            )
        ],
    )
    final = Intervals(
        "final",
        "Final accuracy",
        "Mean and standard deviation over seeds; small rings are single seeds.",
        ACCURACY,
        [
            (
                title,
                [
                    Band(
                        each.label,
                        [Interval(each.key, tops[each.key], 0.02, {s: tops[each.key] + (s - 1) * 0.02 for s in SEEDS})],
                    )
                    for each in some
                ],
            )
            for title, some in panels.items()
        ],
    )
    sent = Stacks(
        "sent",
        "Bytes sent by one client in a round",
        "",
        Axis("bytes", "B"),
        ["weights", "centroids", "scales", "headers"],
        [Stack(each.key, [4e5 * (1 + place % 5), 9e4, 2e4, 1.2e3]) for place, each in enumerate(lines)],
    )
    labels = Heat(
        "by-label",
        "Accuracy by label",
        "",
        ACCURACY,
        [str(n) for n in range(10)],
        [each.label for each in lines],
        [[None if n == 3 and not place else draw.random() for n in range(10)] for place, each in enumerate(lines)],
        [each.key for each in lines],
        ["rare"] * 3 + ["common"] * 7,
    )
    clients = Choice(
        "clients",
        "Examples of each client",
        [
            (
                f"seed {seed}",
                Heat(
                    f"clients-{seed}",
                    "Examples of each client",
                    f"How seed {seed} shared them out.",
                    Axis("examples"),
                    [str(n) for n in range(10)],
                    [f"client {n}" for n in range(12)],
                    [[draw.randrange(500) for _ in range(10)] for _ in range(12)],
                    [""] * 12,
                    [""] * 10,
                ),
            )
            for seed in SEEDS
        ],
    )
    weights = Histograms(
        "weights",
        "Weights before and after",
        "",
        Axis("weight"),
        [
            HistogramPanel(
                layer,
                [-0.5 + n / 20 for n in range(21)],
                [(name, [1000 * math.exp(-(((n - 9.5) / wide) ** 2)) for n in range(20)]) for name, wide in pairs],
            )
            for layer in ("conv1", "conv2", "fc1", "fc2")
            for pairs in [[("before the quantizer", 4), ("after it", 3)]]
        ],
    )
    table = Table(
        "summary",
        "All lines",
        ["line", "accuracy", "MB up", "note"],
        [TableRow(each.key, [each.label, f"{100 * tops[each.key]:.1f} ± 2.0", "13.26", "finished"]) for each in lines],
    )
    runs = Table(
        "runs",
        "Every run",
        ["run", "seed", "accuracy"],
        [
            TableRow(each.key, [run, str(s), f"{100 * tops[each.key]:.1f}"])
            for each in lines
            for s, run in enumerate(each.runs)
        ],
        folded=True,
    )
    best = max(lines, key=lambda each: tops[each.key])
    return [
        Section(
            "best",
            "Which one learns best?",
            [f"{best.label}, by a little.", "Seeds differ more."],
            [table, accuracy, final],
        ),
        Section("cost", "What does it cost to send?", ["Four fifths are weights."], [sent, time]),
        Section("labels", "Who is left behind?", ["Labels that few clients have."], [labels, clients]),
        Section("inside", "What does the quantizer do?", ["It moves weights little."], [error, weights, runs]),
    ]


def one() -> Report:
    lines = [line("one", "fedavg, 32+4 bits, shift", {}, 0)]
    about = "one run of 60 rounds, seed 0"
    return Report("digits", about, [], lines, charts(lines, 60, {"": lines}))


def demo() -> Report:
    names = [("plain", "fedavg", "no"), ("shift", "fedavg", "yes"), ("prox", "fedprox", "yes")]
    lines = [
        line(
            key,
            f"{algorithm}, 32+4 bits{', shift' if shift == 'yes' else ''}",
            {"algorithm": algorithm, "shift": shift},
            place,
            shift == "no",
        )
        for place, (key, algorithm, shift) in enumerate(names)
    ]
    warnings = ["demo/fedavg-2: unfinished, 80 of 150 rounds."]
    return Report("demo", "9 runs of 150 rounds, seeds 0, 1, 2", warnings, lines, charts(lines, 150, {"": lines}))


def sweep() -> Report:
    algorithms = ["fedavg", "fedprox", "scaffold", "feddyn"]
    made = product(enumerate(algorithms), enumerate(["32", "32+8", "32+4", "32+2", "32+1"]), ["yes", "no"])
    lines = [
        line(
            f"{algorithm}-{bits}-{shift}",
            f"{algorithm}, {bits} bits{', shift' if shift == 'yes' else ''}",
            {"algorithm": algorithm, "bits": bits, "shift": shift},
            number,
            shift == "no",
        )
        for (_, algorithm), (number, bits), shift in made
    ]
    panels = {name: [each for each in lines if each.settings["algorithm"] == name] for name in algorithms}
    sections = charts(lines, 200, panels)
    return Report("big", "120 runs of 200 rounds, seeds 0, 1, 2", [], lines, sections)
