"""Where the rounds of recorded runs lie about the fence of Theorem 2."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from fedshift.algorithms import Shift, shorter
from fedshift.core.files import RunError
from fedshift.core.types import Broadcast, Round
from fedshift.paper.figures.records import Line, Panel
from fedshift.paper.figures.rounds import fitting
from fedshift.paper.records import Record


class Means(NamedTuple):
    """A layer in a round: its mean before and after aggregation, and the share that is taken or would be."""

    share: float
    before: float  # m^t, of the model that clients were sent
    after: float  # m^{t+1}, before the shift

    @property
    def ratio(self) -> float:
        return self.after / self.before

    @property
    def shorter(self) -> bool:
        return shorter(self.share, self.before, self.after)


def means(record: Record, layer: str) -> list[Means]:
    """From the second round on; the first begins with a mean that no record has."""
    sent, shares = record.series(f"mean_after.{layer}"), record.series("share")
    whole = record.series(f"mean_before.{layer}") if f"mean_before.{layer}" in record.header else None
    made = []
    for t in sorted(sent.keys() & shares.keys()):
        share = taken(record, t, shares[t])
        if sent.get(t - 1) and (whole or share < 1):
            kept = 1 - share if record.experiment.shift.on else 1.0
            made.append(Means(share, sent[t - 1], whole[t] if whole else sent[t] / kept))
    return made


def taken(record: Record, number: int, share: float) -> float:
    """The share of the mean that the rule takes when quantized uploads have this one; without it, their own.

    A published record has this to work the mean before the shift out from the mean after it.
    """
    said = record.experiment.shift
    if not said.on:
        return share
    rule = Shift(said.per, said.share, said.max_share, said.warmup)
    return rule.share_in(Round(number, 0, 0, Broadcast({}, {}), {}, {}, share))


class Spread(NamedTuple):
    """Percentiles 5, 25, 50, 75 and 95 of the ratio, and how often the shift makes the step the shorter one."""

    ratios: tuple[float, ...]
    shorter: float


def spread(rounds: Sequence[Means]) -> Spread:
    """
    >>> spread([Means(0.5, 1.0, 1.0), Means(0.5, 1.0, 2.0)]).shorter
    0.5
    """
    if len(rounds) < 2:
        raise RunError("the fence: needs runs of three rounds or more")
    at = statistics.quantiles((one.ratio for one in rounds), n=20, method="inclusive")
    return Spread(tuple(at[i] for i in (0, 4, 9, 14, 18)), statistics.fmean(one.shorter for one in rounds))


class Ratios(NamedTuple):
    share: float
    layers: list[str]
    lines: dict[str, list[Spread]]  # by 'without shift', 'with shift': one for each layer


def ratios(panel: Panel) -> Ratios:
    """Of the runs of a panel, without the shift and with it."""
    per_layer = [line for line in panel.shifted if line.experiment.shift.per == "layer"]
    lines = [line for line in (panel.plain, *per_layer[:1]) if line]
    if not lines:
        where = panel.shifted[0].records[0].folder
        raise RunError(f"{where}: the fence: is about means of layers, and this run's shift is per filter")
    layers = fitting(lines[0].records[0].layers("mean_after"))
    seen = {line.label: [_rounds(line, layer) for layer in layers] for line in lines}
    shares = [one.share for rounds in seen.values() for some in rounds for one in some]
    if not shares:
        raise RunError(
            f"{lines[0].records[0].folder}: the fence: needs means of layers in rounds that follow each other"
        )
    if not any(shares):
        raise RunError(f"{lines[0].records[0].folder}: nothing was quantized or shifted; the fence is about both")
    return Ratios(statistics.median(shares), layers, {name: list(map(spread, some)) for name, some in seen.items()})


def _rounds(line: Line, layer: str) -> list[Means]:
    return [one for record in line.records for one in means(record, layer)]
