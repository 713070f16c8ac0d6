"""Figure 1: a round of the paper's experiment, with the bytes of uploads and broadcasts."""

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from fedshift.codecs.exact import EXACT as AS_IT_IS
from fedshift.experiment.links import links
from fedshift.experiment.presets import PRESETS
from fedshift.experiment.settings import Experiment
from fedshift.models import PaperCNN
from fedshift.paper.figures.style import EXACT, INFERIOR, PAGE, SHIFTED, SMALL, SUPERIOR, DrawnFigure, sheet
from fedshift.rounds.uplink import Uplink
from fedshift.wire.writer import size

WIDE, HIGH = 100, 38  # units of the drawing
ROUND = "round,pad=0,rounding_size=1"


class Side(NamedTuple):
    """Clients of a round with the same uplink."""

    clients: int
    uplink: Uplink
    bytes: int  # of one upload

    @property
    def bits(self) -> int:
        return self.uplink.codec.bits


class System(NamedTuple):
    population: int
    epochs: int
    weights: int
    superior: Side
    inferior: Side
    broadcast: int  # bytes to each client

    @property
    def cohort(self) -> int:
        return self.superior.clients + self.inferior.clients

    @property
    def share(self) -> float:
        """I/K"""
        return self.inferior.clients / self.cohort

    @property
    def bytes_up(self) -> int:
        return sum(side.clients * side.bytes for side in (self.superior, self.inferior))


def system() -> System:
    """System of the preset `paper`; its cohort is drawn from both groups by their shares."""
    experiment, like = Experiment(**PRESETS["paper"]), PaperCNN().state_dict()
    groups, group = links(experiment)
    clients, cohort = experiment.data.clients, experiment.train.cohort
    sides = [
        Side(cohort * int((group == i).sum()) // clients, link.uplink, size(link.uplink.codec, like))
        for i, link in enumerate(groups)
    ]
    superior, inferior = sorted(sides, key=lambda side: side.uplink.lossy)
    weights = sum(w.numel() for w in like.values())
    return System(clients, experiment.train.epochs, weights, superior, inferior, size(AS_IT_IS, like))


def draw() -> DrawnFigure:
    setup = system()
    figure = sheet(PAGE, PAGE * HIGH / WIDE)
    axes = figure.add_subplot()
    axes.set_axis_off()
    axes.set(xlim=(0, WIDE), ylim=(0, HIGH))
    _clients(axes, setup)
    _server(axes, setup)
    _back(axes, setup)
    source = f"the preset paper, {setup.weights:,} weights: {setup.bytes_up:,} bytes uploaded per round"
    return DrawnFigure(figure, source)


def _clients(axes: Axes, setup: System) -> None:
    top, low = 30.5, 16.5
    trains = f"train {setup.epochs} epochs"
    up, down = setup.superior, setup.inferior
    _box(axes, 5, top, 15.5, 7, f"{up.clients} superior clients\n{trains}", SUPERIOR)
    _box(axes, 5, low, 15.5, 7, f"{down.clients} inferior clients\n{trains}", INFERIOR)
    _box(axes, 24, low - 0.5, 15.5, 8, f"quantize Q\nK-means, {2**down.bits} codes\nper layer", INFERIOR)
    _arrow(axes, (20.7, low + 3.5), (23.8, low + 3.5), INFERIOR)
    _arrow(axes, (20.7, top + 3.5), (74.3, top + 3.5), SUPERIOR)
    _arrow(axes, (39.7, low + 3.5), (57.3, low + 3.5), INFERIOR)
    for y, side in ((top + 3.5, up), (low + 3.5, down)):
        axes.text(47.5, y + 0.9, f"{side.bytes:,} bytes", ha="center", va="bottom", weight="bold")
        axes.text(47.5, y - 0.9, f"{side.bits} bits per weight", ha="center", va="top", fontsize=SMALL)
    axes.text(47.5, top - 3.5, "uplink", ha="center", va="center", style="italic", color=EXACT)


def _server(axes: Axes, setup: System) -> None:
    dashes = (0, (4, 3))
    frame = FancyBboxPatch((55.7, 6.2), 43.8, 31.4, boxstyle=ROUND, fill=False, edgecolor=EXACT, linestyle=dashes)
    axes.add_patch(frame)
    axes.text(57, 36, "server", ha="left", va="center", style="italic", color=EXACT)
    _box(axes, 57.5, 16.5, 12, 7, "dequantize\nDeQ", INFERIOR)
    k, i, s = setup.cohort, setup.inferior.clients, setup.superior.clients
    _box(axes, 74.5, 22, 24, 13.8, "", EXACT)
    axes.text(86.5, 33, f"average of {k} uploads", ha="center", va="center")
    sums = rf"$w=\frac{{1}}{{{k}}}\,(\sum_{{i=1}}^{{{i}}} DeQ(Q(w_i))+\sum_{{j=1}}^{{{s}}} w_j)$"
    axes.text(86.5, 26.8, sums, ha="center", va="center", fontsize=SMALL)
    _box(axes, 74.5, 7.5, 24, 9.5, "", SHIFTED)
    axes.text(86.5, 14.3, "shift per layer", ha="center", va="center", color=SHIFTED)
    rule = rf"$\hat{{w}}=w-\frac{{{i}}}{{{k}}}\,\mathrm{{mean}}(w)$"
    axes.text(86.5, 10.3, rule, ha="center", va="center", fontsize=9)
    _arrow(axes, (69.7, 20), (74.3, 24.5), INFERIOR)
    _arrow(axes, (86.5, 21.8), (86.5, 17.2), EXACT)


def _back(axes: Axes, setup: System) -> None:
    """Draw the arrow from the shift along the bottom to both groups."""
    axes.plot([86.5, 86.5, 1.5, 1.5], [7.4, 1, 1, 34], color=EXACT, linewidth=0.9, solid_joinstyle="round")
    for y in (20, 34):
        _arrow(axes, (1.5, y), (4.8, y), EXACT)
    text = f"downlink: {setup.broadcast:,} bytes to each of {setup.cohort} clients, drawn from {setup.population}"
    axes.text(47.5, 1.8, text, ha="center", va="bottom", color=EXACT)


def _box(axes: Axes, x: float, y: float, wide: float, high: float, text: str, colour: str) -> None:
    box = FancyBboxPatch((x, y), wide, high, boxstyle=ROUND, facecolor="white", edgecolor=colour, linewidth=1)
    axes.add_patch(box)
    axes.text(x + wide / 2, y + high / 2, text, ha="center", va="center", linespacing=1.35)


def _arrow(axes: Axes, begin: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    arrow = FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=7, color=colour, shrinkA=0, shrinkB=0)
    arrow.set_linewidth(0.9)
    axes.add_patch(arrow)
