"""Draw the figure of docs/guides/choosing-bits.md: accuracy against uploaded bits, from the records in results/.

python studies/frontier.py [--records results] [--out docs/images]
"""

import argparse
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedshift.paper.experiments import FILTER, Compressed, at_one_bit, compressed
from fedshift.paper.figures.style import EXACT, PAGE, SMALL, letter, sheet
from fedshift.paper.records import FinishedRun, Results, published
from fedshift.report import style
from fedshift.report.style import COLOURS, content, styled
from fedshift.runs.progress import echo

MAKER = "studies/frontier.py"
CLOSE = 2.5  # ratio of bits below which a label would touch the next point
FEEDBACK, NONE = COLOURS[1], COLOURS[0]  # with error feedback, and without memory on clients


class Point(NamedTuple):
    """One uplink: bits per weight, and difference from full precision in points, one per seed."""

    name: str
    feedback: bool
    bits: float
    points: list[float]


def points(uplinks: list[Compressed], results: Results) -> list[Point]:
    """Uplinks that were run, compared with full precision after as many rounds, with the same server rule and seeds."""
    found = []
    for uplink in uplinks:
        runs, rounds = results.of(uplink.cell), uplink.cell.rounds
        exact = {seed: FinishedRun(run.folder, rounds) for seed, run in results.of(uplink.exact).items()}
        seeds = sorted(runs.keys() & exact.keys())
        if uplink.cell == uplink.exact or not seeds:
            continue
        up, full = (fmean(sum(some[seed].uploaded.up) for seed in seeds) for some in (runs, exact))
        fed_back = runs[seeds[0]].experiment.uplink.feedback
        gains = [runs[seed].score - exact[seed].score for seed in seeds]
        found.append(Point(uplink.label[0], fed_back, 32 * up / full, gains))
    return found


def frontier(axes: Axes, found: list[Point]) -> None:
    """Difference from full precision against bits per weight."""
    axes.axhline(0, color=EXACT, linewidth=0.7, linestyle=":")
    for point in found:
        ink = FEEDBACK if point.feedback else NONE
        axes.plot([point.bits] * len(point.points), point.points, "o", color=ink, markersize=2.2, linewidth=0)
        axes.plot([point.bits], [fmean(point.points)], "D", color=ink, markersize=4, linewidth=0)
        crowded = any(point.bits < other.bits < CLOSE * point.bits for other in found)
        axes.annotate(
            point.name,
            (point.bits, min(point.points) if crowded else fmean(point.points)),
            xytext=(-3, -4) if crowded else (5, 0),
            textcoords="offset points",
            fontsize=SMALL,
            ha="left",
            va="top" if crowded else "center",
        )
    axes.set_xscale("log")
    ticks = [0.1, 0.3, 1, 3, 10, 32]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlim(0.1, 70)
    axes.set_xlabel("uploaded bits per weight, of frames")
    axes.set_ylabel("accuracy against full precision, points")
    letter(axes, "a", "800 rounds, three seeds")


def codecs(axes: Axes, found: list[Point]) -> None:
    """Difference from full precision of each codec, best first."""
    found = sorted(found, key=lambda point: -fmean(point.points))
    axes.axvline(0, color=EXACT, linewidth=0.7, linestyle=":")
    for at, point in enumerate(found):
        ink = FEEDBACK if point.feedback else NONE
        axes.barh(at, fmean(point.points), height=0.62, color=ink, alpha=0.35, linewidth=0)
        axes.plot(point.points, [at] * len(point.points), "o", color=ink, markersize=2.2, linewidth=0)
    axes.set_yticks(range(len(found)), [f"{point.name}, {point.bits:.2f} bits" for point in found])
    axes.invert_yaxis()
    axes.set_xlabel("accuracy against full precision, points")
    letter(axes, "b", "near one bit, 300 rounds, two seeds")


def figure(records: Path) -> Figure:
    uplinks, one_bit = [row for row in compressed() if row.label[1] == FILTER], at_one_bit()
    cells = [cell for row in (*uplinks, *one_bit) for cell in (row.cell, row.exact)]
    results, _ = published(records, cells)
    drawn = sheet(PAGE, 3.0)
    left, right = drawn.subplots(1, 2, width_ratios=(1, 0.9))
    frontier(left, points(uplinks, results))
    codecs(right, points(one_bit, results))
    kinds = {"error feedback": FEEDBACK, "no memory on clients": NONE}
    marks = [Line2D([], [], color=ink, marker="D", markersize=4, linewidth=0) for ink in kinds.values()]
    drawn.legend(marks, list(kinds), loc="outside upper right", ncols=2, borderaxespad=0)
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=Path("results"), help="published records (default: results)")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder (default: docs/images)")
    args = parser.parse_args()
    path = args.out / "frontier.png"
    with styled(style.PAPER | {"savefig.dpi": 200}):
        path.write_bytes(content(figure(args.records), "png", MAKER))
    echo(path)


if __name__ == "__main__":
    main()
