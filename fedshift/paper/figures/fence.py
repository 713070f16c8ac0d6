"""Figure 5: the fence of Theorem 2, compared with measured steps of models.

    D_FA^2 - D_FS^2 = s P m' ((2 - s) m' - 2 m)        D_FA = |w^{t+1} - w^t|, D_FS = |w_hat^{t+1} - w^t|

for a layer of P weights whose mean is m = m^t, then m' = m^{t+1} before the shift, and a share s = I/K. Divided by
s P m^2 it depends only on the ratio r = m'/m: r ((2 - s) r - 2). It is below zero, and the shift makes the step longer,
between r = 0 and the fence r = 2 / (2 - s), which is 2K / (K + S).
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from fedshift.algorithms import Algorithm, ServerRule, Shift, chain, fedavg, shifted, shorter
from fedshift.core.files import RunError
from fedshift.core.types import Broadcast, Params, Round
from fedshift.data.datasets import load
from fedshift.experiment.settings import Experiment
from fedshift.paper.figures.curves import coloured, fitting
from fedshift.paper.figures.records import SeedLine, ShiftPanel, Source
from fedshift.paper.figures.style import COLUMN, EXACT, SHIFTED, SMALL, TINT, DrawnFigure, footnote, letter, sheet
from fedshift.paper.records import FinishedRun
from fedshift.runs.run import Run

LEAST, MOST = -1.0, 4.0  # range of ratios that is drawn
WATCHED: dict[str, dict[str, Any]] = {
    "train": {"rounds": 30, "cohort": 10, "selection": "stratified", "epochs": 5, "batch": 15, "lr": 0.1},
    "uplink": {"bits": "32+5", "quantizer": "uniform"},
    "shift": {"per": "layer"},
    "engine": {"name": "sequential"},
}


def gain(share: float, ratio: float) -> float:
    """(D_FA^2 - D_FS^2) / (s P m^2)

    >>> gain(0.5, 1.0), gain(0.5, 2.0), round(gain(0.5, 4 / 3), 9)
    (-0.5, 2.0, 0.0)
    """
    return ratio * ((2 - share) * ratio - 2)


def fence(share: float) -> float:
    """Ratio above which the shift makes the step shorter.

    >>> round(fence(0.5), 3), fence(1.0)
    (1.333, 2.0)
    """
    return 2 / (2 - share)


class LayerStep(NamedTuple):
    """One layer in one round: the quantities of the theorem, computed from weights."""

    share: float
    ratio: float
    gain: float  # measured difference of the squared lengths of both steps

    @property
    def right(self) -> bool:
        """True if the theorem predicts correctly whether the shift makes the step shorter."""
        return (self.gain > 0) == (gain(self.share, self.ratio) > 0)


@dataclass(eq=False)
class Watch(ServerRule):
    """Server rule that records w^t, w^{t+1} and w_hat^{t+1}, as the last rule of a chain; it changes nothing."""

    seen: list[tuple[Params, Params, Params, float]] = field(default_factory=list)

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        self.seen.append((rnd.start.params, rnd.mean, out.params, rnd.share))
        return out, state


def steps() -> list[LayerStep]:
    """Steps of every layer in every round of a small run on digits, in float64 to avoid rounding errors."""
    digits, watch = load("digits"), Watch()
    digits = replace(digits, x=digits.x.double(), test_x=digits.test_x.double())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)).double()
    client, server = shifted(fedavg())
    training = Run(Experiment(**WATCHED), model=model, data=digits, algorithm=Algorithm(client, chain(server, watch)))
    for _ in training:
        pass
    return [
        step(start[name], average[name], after[name], share)
        for start, average, after, share in watch.seen
        for name in training.fed.layers
    ]


def step(start: Tensor, average: Tensor, shifted: Tensor, share: float) -> LayerStep:
    """Step of a layer from w^t, w^{t+1} and w_hat^{t+1}.

    >>> step(torch.tensor([1.0, 1.0]), torch.tensor([2.0, 2.0]), torch.tensor([1.0, 1.0]), 0.5)
    LayerStep(share=0.5, ratio=2.0, gain=2.0)
    """
    before, after = float(start.mean()), float(average.mean())
    difference = float((average - start).square().sum() - (shifted - start).square().sum())
    return LayerStep(share, after / before, difference / (share * start.numel() * before**2))


class LayerMeans(NamedTuple):
    """Mean of a layer before and after aggregation in a round, and the share of the shift (also if it is off)."""

    share: float
    before: float  # m^t, of the broadcast model
    after: float  # m^{t+1}, before the shift

    @property
    def ratio(self) -> float:
        return self.after / self.before

    @property
    def shorter(self) -> bool:
        return shorter(self.share, self.before, self.after)


def means(record: FinishedRun, layer: str) -> list[LayerMeans]:
    """Means from the second round on; the mean before the first round is not recorded."""
    sent, shares = record.series(f"mean_after.{layer}"), record.series("share")
    recorded = record.series(f"mean_before.{layer}") if f"mean_before.{layer}" in record.header else None
    found = []
    for t in sorted(sent.keys() & shares.keys()):
        share = subtracted(record, t, shares[t])
        if sent.get(t - 1) and (recorded or share < 1):
            kept = 1 - share if record.experiment.shift.on else 1.0
            found.append(LayerMeans(share, sent[t - 1], recorded[t] if recorded else sent[t] / kept))
    return found


def subtracted(record: FinishedRun, number: int, share: float) -> float:
    """Share of the mean that the rule subtracts, given the share of quantized uploads; the latter without a rule.

    Published records contain only the mean after the shift; the mean before it is computed with this share.
    """
    config = record.experiment.shift
    if not config.on:
        return share
    rule = Shift(config.per, config.share, config.max_share, config.warmup)
    return rule.share_in(Round(number, 0, 0, Broadcast({}, {}), {}, share))


class Spread(NamedTuple):
    """Percentiles 5, 25, 50, 75 and 95 of the ratio, and the share of rounds in which the shift shortens the step."""

    ratios: tuple[float, ...]
    shorter: float


def spread(rounds: Sequence[LayerMeans]) -> Spread:
    """
    >>> spread([LayerMeans(0.5, 1.0, 1.0), LayerMeans(0.5, 1.0, 2.0)]).shorter
    0.5
    """
    if len(rounds) < 2:
        raise RunError("the fence needs runs of at least three rounds")
    at = statistics.quantiles((means.ratio for means in rounds), n=20, method="inclusive")
    return Spread(tuple(at[i] for i in (0, 4, 9, 14, 18)), statistics.fmean(means.shorter for means in rounds))


class Ratios(NamedTuple):
    share: float
    layers: list[str]
    lines: dict[str, list[Spread]]  # by label ('without shift', 'with shift'), one per layer


def ratios(panel: ShiftPanel) -> Ratios:
    """Ratios of the runs of a panel, without and with the shift."""
    per_layer = [line for line in panel.shifted if line.experiment.shift.per == "layer"]
    lines = [line for line in (panel.plain, *per_layer[:1]) if line]
    if not lines:
        where = panel.shifted[0].records[0].folder
        raise RunError(f"{where}: has a shift per filter; the fence needs runs without shift or with a shift per layer")
    layers = fitting(lines[0].records[0].layers("mean_after"))
    seen = {line.label: [_means(line, layer) for layer in layers] for line in lines}
    shares = [means.share for layer_rounds in seen.values() for rounds in layer_rounds for means in rounds]
    if not shares:
        raise RunError(f"{lines[0].records[0].folder}: the fence needs layer means of consecutive rounds")
    if not any(shares):
        raise RunError(
            f"{lines[0].records[0].folder}: the fence needs quantized uploads or a shift, and this run has neither"
        )
    return Ratios(statistics.median(shares), layers, {name: list(map(spread, rounds)) for name, rounds in seen.items()})


def _means(line: SeedLine, layer: str) -> list[LayerMeans]:
    return [mean for record in line.records for mean in means(record, layer)]


def draw(source: Source) -> DrawnFigure:
    panel = source.pair._replace(exact=None)
    recorded, measured = ratios(panel), steps()
    rows = sum(map(len, recorded.lines.values()))
    figure = sheet(COLUMN, 2.75 + 0.13 * rows)
    top, low = figure.subplots(2, 1, sharex=True, height_ratios=[1.75, 0.3 + 0.13 * rows])
    _curve(top, measured)
    _rounds(low, recorded, panel)
    low.set_xlim(LEAST, MOST)
    low.set_xlabel(r"ratio of the means, $m^{t+1}\,/\,m^{t}$")
    footnote(figure, f"(a) digits, {WATCHED['train']['rounds']} rounds, float64\n(b) {source.about([panel])}")
    right = sum(step.right for step in measured)
    checked = f"the theorem is correct in {right} of {len(measured)} steps of a small run on digits"
    return DrawnFigure(figure, f"{checked}; {source.drawn([panel])}")


def _curve(axes: Axes, measured: list[LayerStep]) -> None:
    share = measured[0].share
    x = np.linspace(LEAST, MOST, 301)
    _fence(axes, share)
    axes.axhline(0, color=EXACT, linewidth=0.4)
    axes.plot(x, [gain(share, float(r)) for r in x], color=EXACT, label="Theorem 2, corrected")
    points = [step.ratio for step in measured], [step.gain for step in measured]
    axes.plot(*points, "o", color=SHIFTED, markersize=2.8, markeredgewidth=0, alpha=0.8, label="measured on weights")
    axes.set_ylim(-2.9, 9)
    axes.text(fence(share) / 2, 8.7, "inside the fence:\nlonger steps", ha="center", va="top", fontsize=SMALL)
    axes.text(fence(share) + 0.12, 8.7, "outside: the shift\nshortens steps", ha="left", va="top", fontsize=SMALL)
    axes.set_ylabel(r"$(D_{FA}^2-D_{FS}^2)\,/\,(\frac{I}{K}P\,(m^t)^2)$")
    axes.legend(loc="lower right", borderpad=0)
    letter(axes, "a", f"effect of the shift on a step, I/K = {share:g}")


def _rounds(axes: Axes, recorded: Ratios, panel: ShiftPanel) -> None:
    """Draw the ratios of recorded rounds: 5 to 95 % of them thin, the middle half thick, a dot at the median."""
    _fence(axes, recorded.share)
    colours = {line.label: colour for line, colour in coloured(panel)}
    row, ticks = 0.0, []
    for i in range(len(recorded.layers)):
        for name, spreads in recorded.lines.items():
            colour, (least, low, median, high, most) = colours[name], spreads[i].ratios
            first = name if not i else None
            axes.plot([least, most], [row, row], color=colour, linewidth=0.8)
            axes.plot([low, high], [row, row], color=colour, linewidth=2.6, solid_capstyle="butt", label=first)
            axes.plot(median, row, "o", color="white", markeredgecolor=colour, markersize=3, markeredgewidth=0.8)
            text = f"{100 * spreads[i].shorter:.0f} %"
            axes.text(MOST - 0.05, row, text, ha="right", va="center", fontsize=5.5, color=colour)
            row += 1
        ticks.append(row - (len(recorded.lines) + 1) / 2)
        row += 0.7
    axes.set_yticks(ticks, [layer.removesuffix(".weight") for layer in recorded.layers])
    axes.set_ylim(row - 0.2, -2.4)
    axes.tick_params(axis="y", length=0)
    axes.legend(loc="upper left", ncols=2, borderpad=0, borderaxespad=0.2)
    axes.text(MOST - 0.05, -1.5, "rounds outside", ha="right", va="center", fontsize=5.5)
    letter(axes, "b", f"recorded rounds: {panel.title}")


def _fence(axes: Axes, share: float) -> None:
    axes.axvspan(0, fence(share), color=TINT, linewidth=0, zorder=0)
