"""Runs side by side: scores with their spread over seeds, bytes, and differences from full precision and no shift."""

import math
import statistics
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table

from fedshift.codecs.named import WIDTH, default_coder
from fedshift.core.files import RunError
from fedshift.core.names import printable
from fedshift.core.tables import titled
from fedshift.core.units import megabytes
from fedshift.experiment.settings import (
    Experiment,
    LinkSettings,
    ShiftSettings,
    UplinkSettings,
    quantizes,
    uplink_name,
    widths,
)
from fedshift.experiment.toml import dotted
from fedshift.rounds.uplinks import UPLINKS
from fedshift.runs.columns import column
from fedshift.runs.record import ROUNDS
from fedshift.runs.sheet import PARTS, Estimate, Uploaded, sheet

WINDOW = 10  # rounds a final figure is the mean of: single rounds wander by several points
# settings of how a run is computed and recorded, which change its scores by rounding at most
NEUTRAL = ("engine.workers", "engine.pack", "record.checkpoint", "record.histograms", "record.frames", "record.memory")
# settings added after folders were first named by a checksum, which does not count them at these values
LATER = {"record.frames": 50, "uplink.step": None, "uplink.rate": None, "uplink.keep": None, "uplink.biases": False}
SHIFT, BITS, UPLINK = "shift.on", "uplink.bits", "uplink"  # UPLINK: all settings of the uplink in one column
NO = "no"  # value of SHIFT without the shift
COUNTED = (BITS, "train.rounds", "train.epochs", "data.clients")
# settings of an uplink that have an effect on exact uploads
EXACT = ("bits", "coder", "bandwidth", "share", "clients")
# settings of an uplink that have an effect on quantized uploads only
QUANTIZED = ("quantizer", "step", "rate", "keep", "per", "biases")
# settings that make a task: runs of different ones are not compared with one another
TASK = ("data.", "model.", "algorithm.", "train.loss", "train.metric", "train.goal")
ORDER = (
    "Pareto-optimal settings first (none has both fewer bytes and a better score), by bytes; then the others, by bytes"
)
ONE_SEED = "one seed: noise unknown"  # a verdict
DIFFERENCE = "-10.0 against 32"  # the narrowest column of differences is as wide


class Trace(NamedTuple):
    """The evaluated rounds of one run."""

    rounds: Sequence[int] = ()
    bytes_up: Sequence[float] = ()  # from the first round to the end of each
    scores: Sequence[float] = ()


class RunResult(NamedTuple):
    """One finished run, read from its record."""

    experiment: Experiment
    score: float  # mean of the last ten evaluated rounds
    last: float  # of the last round
    bytes_up: int  # all rounds
    bytes_down: int | None = None  # all rounds; None where that is not recorded
    trace: Trace = Trace()
    estimate: Estimate | None = None  # of the uploaded bytes


class Paired(NamedTuple):
    """Mean difference over the seeds that two settings have in common."""

    gain: float
    verdict: str  # '' where it is beyond noise
    margin: float | None = None  # half the 95 % interval; None for fewer than two seeds


class SummaryRow(NamedTuple):
    """Runs that differ in nothing but their seed."""

    label: dict[str, str]  # the settings that differ between rows
    scores: dict[int, float]  # by seed
    last: float
    bytes_up: float  # a run
    against: str = ""  # what it is compared with
    gain: float | None = None
    verdict: str = ""
    experiment: Experiment = Experiment()  # of one of its runs
    runs: Sequence[RunResult] = ()  # one for each seed
    full: "SummaryRow | None" = (
        None  # full precision with the same server rule: all settings alike but those of the uplink
    )

    @property
    def mean(self) -> float:
        return mean_of([*self.scores.values()])

    @property
    def spread(self) -> float | None:
        return _deviation([*self.scores.values()]) if len(self.scores) > 1 else None

    @property
    def cost(self) -> Paired | None:
        """Difference from full precision with the same server rule."""
        return None if self.full is None else paired(self.scores, self.full.scores)

    @property
    def fewer(self) -> float | None:
        """Uploaded bytes of full precision with the same server rule, as a multiple of this row's."""
        return self.full.bytes_up / self.bytes_up if self.full and self.bytes_up else None

    @property
    def bytes_down(self) -> float | None:
        known = [run.bytes_down for run in self.runs if run.bytes_down is not None]
        return statistics.fmean(known) if known and len(known) == len(self.runs) else None


def mean_of(values: Sequence[float]) -> float:
    """
    >>> mean_of([0.5, 1.0]), mean_of([math.inf, -math.inf]), mean_of([1.7e308, 1.7e308])
    (0.75, nan, inf)
    """
    try:
        return statistics.fmean(values)
    except ValueError:  # plus and minus infinity
        return math.nan
    except OverflowError:
        return math.copysign(math.inf, max(values, key=abs))


def _deviation(values: Sequence[float]) -> float:
    """Over seeds; NaN where one of them has come to no number."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def load(folder: Path, experiment: Experiment) -> RunResult:
    found = sheet(folder / ROUNDS)
    if found.lost:
        many = f"{found.lost} damaged line{'s' * (found.lost > 1)}"
        raise RunError(f"{found.path}: {many}; `fedshift report {folder}` shows the others")
    known = sum(sum(found.column(part)) for part in PARTS)
    sent = found.uploaded()
    lines = zip(found.values("round"), np.cumsum(sent.up).tolist(), found.values(column(experiment)), strict=True)
    evaluated = [(int(number or 0), up, score) for number, up, score in lines if score is not None]
    if not evaluated or not math.isfinite(known):
        missing = "no evaluated round" if not evaluated else "no finite number of uploaded bytes"
        raise RunError(f"{found.path}: damaged: it contains {missing}")
    down = sum(found.column("bytes.down")) if "bytes.down" in found.header else math.nan
    return result(experiment, Trace(*zip(*evaluated, strict=True)), sent, down)


def result(experiment: Experiment, trace: Trace, sent: Uploaded, bytes_down: float = math.nan) -> RunResult:
    """Of the evaluated rounds, and the bytes of all rounds."""
    down = int(bytes_down) if math.isfinite(bytes_down) else None
    scores, up = trace.scores, int(sent.up.sum())
    return RunResult(experiment, mean_of(scores[-WINDOW:]), scores[-1], up, down, trace, sent.estimate)


def rows(results: Sequence[RunResult], of: Sequence[Experiment] = ()) -> list[SummaryRow]:
    """One for each setting of these runs; `of` are all runs there should be, where some have failed."""
    varying, kinds = apart([result.experiment for result in results], of)
    keys = columns(varying, of or [result.experiment for result in results])
    grouped: dict[tuple[str, ...], dict[int, RunResult]] = {}
    for result, kind in zip(results, kinds, strict=True):
        grouped.setdefault(kind, {})[result.experiment.seed] = result
    made = [_row(list(members.values()), keys) for members in grouped.values()]
    settings = [{key: shown(value) for key, value in comparable(row.experiment).items()} for row in made]
    others = list(zip(made, settings, strict=True))
    return [_compared(row, own, others) for row, own in others]


def _row(runs: Sequence[RunResult], keys: Sequence[str]) -> SummaryRow:
    return SummaryRow(
        label(runs[0].experiment, keys),
        {run.experiment.seed: run.score for run in runs},
        mean_of([run.last for run in runs]),
        statistics.fmean(run.bytes_up for run in runs),
        experiment=runs[0].experiment,
        runs=runs,
    )


def apart(experiments: Sequence[Experiment], of: Sequence[Experiment] = ()) -> tuple[list[str], list[tuple[str, ...]]]:
    """The settings but the seed in which runs differ, and the values of each run: those alike are of one kind."""
    varying = _varying(of or experiments, [comparable(one) for one in of or experiments])
    return varying, [tuple(str(flat.get(key)) for key in varying) for flat in map(comparable, experiments)]


def columns(varying: Sequence[str], experiments: Sequence[Experiment]) -> list[str]:
    """The settings that tables show: UPLINK instead of two or more settings of the uplink, unless that is ambiguous.

    >>> runs = [Experiment(uplink="exact"), Experiment(uplink="lean")]
    >>> columns(apart(runs)[0], runs)
    ['uplink']
    >>> runs = [Experiment(uplink={"bits": 32}), Experiment(uplink={"bits": 4, "send": "updates"})]
    >>> runs += [Experiment(uplink={"bits": 4})]
    >>> columns(apart(runs)[0], runs), columns(apart(runs[:2])[0], runs[:2])
    (['uplink'], ['uplink.bits'])
    >>> runs = [Experiment(uplink={"bits": bits, "group": {"slow": {"share": 0.5, "bits": 4}}}) for bits in (32, 8)]
    >>> [label(one, columns(apart(runs)[0], runs)) for one in runs]
    [{'uplink': '32 bit; slow 0.5: 4 bit'}, {'uplink': '8 bit; slow 0.5: 4 bit'}]
    """
    uplinks = [key for key in varying if key.startswith("uplink.")]
    flats = [comparable(one) for one in experiments]
    kinds = {
        (uplink_label(one), str([flat.get(key) for key in uplinks]))
        for one, flat in zip(experiments, flats, strict=True)
    }
    if not uplinks or len({name for name, _ in kinds}) < len(kinds):
        return [*varying]
    if len(uplinks) == 1 and not any(one.uplink.quantizer in WIDTH or one.uplink.group for one in experiments):
        return [*varying]  # the bits of the others say how many there are
    first = uplinks[0]
    return [UPLINK if key == first else key for key in varying if key == first or key not in uplinks]


def comparable(experiment: Experiment) -> dict[str, Any]:
    """Settings by dotted name, with the shift's rule as one setting and without settings that have no effect.

    >>> found = comparable(Experiment(shift={"on": True, "per": "filter"}))
    >>> {key: value for key, value in found.items() if key.startswith("shift.")}
    {'shift.on': 'per filter', 'shift.share': 1.0, 'shift.warmup': 0, 'shift.tensors': None}
    >>> found = comparable(Experiment(shift={"on": False, "max_share": 0.25}, uplink={"quantizer": "uniform"}))
    >>> {key: value for key, value in found.items() if key.startswith(("shift.", "uplink."))}
    {'shift.on': 'no', 'uplink.coder': 'auto', 'uplink.bits': 32, 'uplink.bandwidth': None}
    """
    flat, uplink = _settings(experiment), experiment.uplink
    groups = {f"uplink.group.{name}.": link for name, link in uplink.group.items()}
    for prefix, coding in ({"uplink.": uplink} | groups).items():
        if _exact(coding):
            own = [key for key in flat if key.startswith(prefix) and not key.startswith(f"{prefix}group.")]
            flat = {key: x for key, x in flat.items() if key not in own or key.removeprefix(prefix) in EXACT}
        elif not quantizes(coding):
            flat = {key: x for key, x in flat.items() if key not in {f"{prefix}{name}" for name in QUANTIZED}}
        if all(coding.coder == default_coder(coding.quantizer, bits) for bits in widths(coding)):
            flat[f"{prefix}coder"] = "auto"
    return flat


def _settings(experiment: Experiment) -> dict[str, Any]:
    """Settings by dotted name, with the shift's rule as one setting and without those of a shift that is off."""
    flat, shift = dotted(experiment.model_dump()), experiment.shift
    unused = {"shift.per"} | ({"shift.max_share"} if shift.share != "uploads" else set())
    if not shift.on:
        unused = {key for key in flat if key.startswith("shift.")}
    rule = {SHIFT: f"per {shift.per}" if shift.on else NO}
    return {key: value for key, value in (flat | rule).items() if key in rule or key not in unused}


def uplink_label(experiment: Experiment) -> str:
    """Name of the uplink in tables and sentences: its own, or else its bits and whatever is not as usual.

    Named groups follow after those without a group, each with its share or its number of clients.

    >>> [uplink_label(Experiment(uplink=uplink)) for uplink in ("lean", {"rate": 0.4, "send": "updates"})]
    ['lean', '0.4 bit updates, step']
    >>> uplink_label(Experiment(uplink={"keep": 0.02, "send": "updates", "feedback": True}))
    'top 2 % updates, ternary, feedback'
    >>> kinds = [{"bits": 32, "quantizer": "uniform"}, {"bits": "32+4"}]
    >>> kinds += [{"bits": 4, "send": "updates", "feedback": True}, {"bits": 8, "per": "channel"}]
    >>> kinds += [{"group": {"slow": {"share": 0.5, "bits": 4, "coder": "range"}}}]
    >>> [uplink_label(Experiment(uplink=uplink)) for uplink in kinds]
    ['32', '32+4', '4 bit updates, feedback', '8 bit, per channel', '32 bit; slow 0.5: 4 bit, range']
    >>> kinds = {"fast": {"clients": [1, 7], "bits": 8}, "slow": {"share": 0.5} | UPLINKS["extreme"]}
    >>> uplink_label(Experiment(uplink=UPLINKS["lean"] | {"group": kinds}))
    'lean; fast (2 clients): 8 bit; slow 0.5: extreme'
    """
    own = _uplink(experiment)
    common = {key: value for key, value in own.items() if not key.startswith("group.")}
    if not experiment.uplink.group:
        label, bits = _scope_label(common, UplinkSettings), shown(experiment.uplink.bits)
        return bits if label == f"{bits} bit" else label
    parts = [_scope_label(common, UplinkSettings)]
    for name, link in experiment.uplink.group.items():
        prefix = f"group.{name}."
        mine = {key.removeprefix(prefix): value for key, value in own.items() if key.startswith(prefix)}
        count = len(link.clients or ())
        who = f"({count} client{'s' * (count != 1)})" if link.share is None else f"{link.share:g}"
        parts.append(f"{name} {who}: {_scope_label(mine, LinkSettings)}")
    return "; ".join(parts)


def _uplink(experiment: Experiment) -> dict[str, Any]:
    """Settings of the uplink that have an effect on uploads, by the name they have in their table."""
    flat = {
        key.removeprefix("uplink."): value for key, value in comparable(experiment).items() if key.startswith("uplink.")
    }
    return {key: value for key, value in flat.items() if key.rpartition(".")[2] != "bandwidth"}


def _scope_label(settings: Mapping[str, Any], kind: type[UplinkSettings] | type[LinkSettings]) -> str:
    """Label of the clients that upload alike, or alike but for their bits: the name of an uplink, or its settings.

    A rate or a kept part stands for bits.
    """
    coding = {key: value for key, value in settings.items() if key not in ("share", "clients")}
    for name in UPLINKS:
        if name != "exact" and coding == _uplink(Experiment(uplink=name)):
            return name
    usual = kind(feedback=settings.get("feedback", False)).model_dump() | {"feedback": False}
    send, named = settings.get("send", usual["send"]), {"bits", "send", "share", "clients"}
    amount = f"{shown(settings.get('bits'))} bit"
    if isinstance(settings.get("bits"), int) and settings.get("rate") is not None:
        amount, named = f"{settings['rate']:g} bit", named | {"rate"}
    elif isinstance(settings.get("bits"), int) and settings.get("keep") is not None:
        amount, named = f"top {100 * settings['keep']:g} %", named | {"keep"}
    more = [
        _unusual(key, value)
        for key, value in settings.items()
        if value != usual.get(key) and value is not None and key not in named
    ]
    return ", ".join([f"{amount} {send}" if send != usual["send"] else amount, *more])


def _unusual(key: str, value: Any) -> str:
    if isinstance(value, bool):
        return key if value else f"no {key}"
    return str(value) if key in ("quantizer", "coder") else f"{key} {shown(value)}"


def _exact(coding: UplinkSettings | LinkSettings) -> bool:
    """True if all clients with this coding upload in full precision, whatever its quantizer."""
    return widths(coding) == {32}


def label(experiment: Experiment, keys: Iterable[str]) -> dict[str, str]:
    """Settings as text, '-' for one that a run does not have."""
    flat = described(experiment)
    return {key: shown(flat[key]) if key in flat else "-" for key in keys}


def described(experiment: Experiment) -> dict[str, Any]:
    """Comparable settings, and the uplink's in one."""
    return comparable(experiment) | {UPLINK: uplink_label(experiment)}


def phrase(key: str, word: str, value: Any) -> str:
    """A setting in the name of a line; nothing for what is off.

    >>> phrase("uplink.bits", "bits", "32+4"), phrase("shift.on", "shift", "per filter"), phrase("train.lr", "lr", 0.1)
    ('32+4 bits', 'shift per filter', 'lr 0.1')
    >>> phrase("uplink", "uplink", "32+4"), phrase("uplink", "uplink", "4 bit updates")
    ('32+4 bits', '4 bit updates')
    """
    if key == UPLINK:
        return f"{value} bit{'s' * (value != '1')}" if value.replace("+", "").isdecimal() else value
    if key in COUNTED:
        counted = key.rpartition(".")[2]
        return f"{shown(value)} {counted.removesuffix('s') if str(value) == '1' else counted}"
    if key == SHIFT:
        return "no shift" if value == NO else f"shift {value}"
    if isinstance(value, bool):
        return word if value else ""
    if value is None and key.startswith(("shift.", "uplink.")):  # which runs without shift or quantizer do not have
        return ""
    if value is None:
        return f"{word} not set"
    return shown(value) if key.endswith(".name") else f"{word} {shown(value)}"


def _compared(
    row: SummaryRow, own: Mapping[str, str], others: Sequence[tuple[SummaryRow, Mapping[str, str]]]
) -> SummaryRow:
    """With its full precision; and a shifted row with the same without the shift, or else one of few bits with 32."""
    lossy = quantized(row.experiment)
    exact = [other for other in others if not quantized(other[0].experiment)]
    full = _base(own, exact, ("uplink.",)) or _base(_unshifted(own), exact, ("uplink.",))
    if full is row or (full and not lossy and full.bytes_up == row.bytes_up):
        full = None
    base, against = full if lossy else None, "32 bits"
    if own[SHIFT] != NO and (plain := _base(own, [other for other in others if other[1][SHIFT] == NO], ("shift.",))):
        base, against = plain, "no shift"
    if base is None:
        return row._replace(full=full)
    gain, verdict = difference(row.scores, base.scores)
    return row._replace(against=against, gain=gain, verdict=verdict, full=full)


def _base(
    own: Mapping[str, str], others: Sequence[tuple[SummaryRow, Mapping[str, str]]], free: tuple[str, ...]
) -> SummaryRow | None:
    """The row that agrees in all settings but the free ones, or else in all of them that scores depend on.

    Of several, one whose uplink has no settings of its own but bits.
    """
    for prefixes in (free, (*free, *NEUTRAL)):
        alike = [row for row, settings in others if _but(settings, prefixes) == _but(own, prefixes)]
        if alike:
            return min(alike, key=lambda row: not uplink_label(row.experiment).replace("+", "").isdecimal())
    return None


def _unshifted(own: Mapping[str, str]) -> Mapping[str, str]:
    """Settings that do the same in full precision: of its uploads, the quantized ones' share is none."""
    if own.get("shift.share") != "uploads":
        return own
    return {key: x for key, x in own.items() if not key.startswith("shift.")} | {SHIFT: NO}


def _but(settings: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    return {key: x for key, x in settings.items() if key not in ("seed", "name") and not key.startswith(prefixes)}


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[float, str]:
    """Mean difference over the seeds both have, and whether chance alone could explain it (paired t, 95 %).

    >>> difference({0: 0.9, 1: 0.8, 2: 0.9}, {0: 0.8, 1: 0.7, 2: 0.81})[1]
    ''
    >>> difference({0: 0.9, 1: 0.8}, {0: 0.8, 1: 0.9})[1]
    'within noise'
    """
    gain, verdict, _ = paired(ours, theirs)
    return gain, verdict


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Paired:
    """Mean difference over the seeds both have, with its 95 % interval (paired t)."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return Paired(mean_of([*ours.values()]) - mean_of([*theirs.values()]), "no seed in common")
    differences = [ours[seed] - theirs[seed] for seed in seeds]
    gain = mean_of(differences)
    if not math.isfinite(gain):
        return Paired(gain, "no number")
    if len(seeds) == 1:
        return Paired(gain, ONE_SEED)
    margin = _t95(len(seeds) - 1) * _deviation(differences) / math.sqrt(len(seeds))
    return Paired(gain, "within noise" if abs(gain) <= margin else "", margin)


def _t95(degrees: int) -> float:
    """Student's t, two-sided 95 %, for so many degrees of freedom.

    >>> round(_t95(2), 3)
    4.303
    """
    from scipy.special import stdtrit  # the quantile of scipy.stats.t, in a third of the time to import; not at start

    return float(stdtrit(degrees, 0.975))


def task(experiment: Experiment) -> tuple[str, ...]:
    """What runs must have in common to be compared: data, model, algorithm and metric."""
    return tuple(f"{key}={x}" for key, x in comparable(experiment).items() if key.startswith(TASK))


def tasks(made: Iterable[SummaryRow]) -> list[list[SummaryRow]]:
    """Rows of one task each, in the order in which the tasks appear."""
    found: dict[tuple[str, ...], list[SummaryRow]] = {}
    for row in made:
        found.setdefault(task(row.experiment), []).append(row)
    return list(found.values())


def front(points: Sequence[tuple[float, float]], lower: bool = False) -> list[bool]:
    """Pareto-optimal pairs of bytes and score: no other is better in one and no worse in the other.

    >>> front([(1, 0.5), (2, 0.5), (2, 0.7), (3, 0.6), (1, 0.5)])
    [True, False, True, False, True]
    >>> front([(1, 0.5), (2, 0.5), (2, 0.7), (3, 0.4)], lower=True)
    [True, False, False, True]
    """
    signed = [(size, -score if lower else score) for size, score in points]

    def beaten(size: float, score: float) -> bool:
        return any(a <= size and b >= score and (a < size or b > score) for a, b in signed)

    return [math.isfinite(score) and not beaten(size, score) for size, score in signed]


def by_merit(made: Sequence[SummaryRow]) -> list[SummaryRow]:
    """Task by task, Pareto-optimal rows first, then the dominated ones; both from few uploaded bytes to many."""
    return [row for row, _ in merits(made)]


def merits(made: Sequence[SummaryRow]) -> list[tuple[SummaryRow, bool]]:
    """Rows by merit, and whether each is Pareto-optimal in its task."""
    ordered: list[tuple[SummaryRow, bool]] = []
    for some in tasks(made):
        lower = some[0].experiment.train.lower
        best = front([(row.bytes_up, row.mean) for row in some], lower)
        places = sorted(
            range(len(some)),
            key=lambda i: (not best[i], some[i].bytes_up, some[i].mean if lower else -some[i].mean),
        )
        ordered += [(some[i], best[i]) for i in places]
    return ordered


def table(made: Sequence[SummaryRow], experiment: Experiment, title: str = "", width: int | None = None) -> Table:
    """One row per setting, by merit; where the settings' own columns do not fit the width, they share one column."""
    made = by_merit(made)
    labels = [list(row.label.values()) for row in made]
    heads = words(made[0].label)
    wide = _drawn(made, experiment, title, list(heads.values()), labels)
    settings = wide.columns[: len(heads)]
    for one in settings:
        _whole(one)
    if width is None or _least(wide) <= width:
        return wide
    if UPLINK in heads and _wrapped(
        wide, settings[list(heads).index(UPLINK)], [row.label[UPLINK] for row in made], width
    ):
        return wide
    joined = [[" ".join(f"{word}={row.label[key]}" for key, word in heads.items())] for row in made]
    narrow = _drawn(made, experiment, title, ["settings"], joined)
    for figures in narrow.columns[1:]:  # give settings the width that figures do not need
        figures.max_width = 16
    return narrow


def _whole(column: Column) -> None:
    """Keep the lines of a column in one piece."""
    cells = [str(column.header), *map(str, column.cells)]
    column.no_wrap, column.min_width = True, max(len(line) for cell in cells for line in cell.split("\n"))


def _wrapped(drawn: Table, column: Column, labels: Sequence[str], width: int) -> bool:
    """Break a column's labels between words so that the table has this width; False where that is not enough."""
    longest = max(len(word) for label in labels for word in label.split())
    column.no_wrap, column.min_width, column.width = False, None, longest
    spare = width - _least(drawn)
    if spare < 0:
        return False
    last = drawn.columns[-1]
    if last.header == "difference":
        last.width = len(DIFFERENCE) + min(spare, len(" bits"))
        spare -= last.width - len(DIFFERENCE)
    column.width = min(longest + spare, max(map(len, labels)))
    return True


def _least(drawn: Table) -> int:
    """The width below which words of a table are cut."""
    roomy = Console(width=1000)
    return Measurement.get(roomy, roomy.options, drawn).minimum


def _drawn(
    made: Sequence[SummaryRow],
    experiment: Experiment,
    title: str,
    heads: Sequence[str],
    labels: Sequence[Sequence[str]],
) -> Table:
    seeds = sorted({seed for row in made for seed in row.scores})
    listed = f"{len(seeds)} seeds" if len(seeds) > 5 else f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    about = f"{experiment.train.rounds} rounds, {listed}"
    drawn = titled(f"{printable(title)}: {about}" if title else about)
    for head in heads:
        drawn.add_column(printable(head), overflow="fold")
    metrics = list(dict.fromkeys(printable(metric(row.experiment)) for row in made))
    saving = any(row.fewer is not None for row in made)
    compared = saving or any(row.gain is not None for row in made)
    score = metrics[0] if len(metrics) == 1 else "score"
    last = [] if compared else ["last round"]  # which matters less than a difference
    for name in (score, *last, "MB up", *(["times\nfewer"] if saving else [])):
        drawn.add_column(name, justify="right")
    if compared:
        drawn.add_column("difference", overflow="fold", min_width=len(DIFFERENCE))
    for row, label in zip(made, labels, strict=True):
        show = partial(scored, experiment=row.experiment)
        spread = "" if row.spread is None else f" ± {show(row.spread)}"
        which = f"{metric(row.experiment)} " if len(metrics) > 1 else ""
        cells = [*label, f"{which}{show(row.mean)}{spread}", *([show(row.last)] if last else [])]
        cells += [megabytes(row.bytes_up), *([times(row.fewer)] if saving else [])]
        drawn.add_row(*map(printable, cells), *([compared_with(row)] if compared else []))
    for figures in drawn.columns[len(heads) : len(drawn.columns) - compared]:
        _whole(figures)
    return drawn


def times(fewer: float | None) -> str:
    """
    >>> times(1.7466), times(27.63), times(187.4), times(None)
    ('1.7', '27.6', '187', '')
    """
    return "" if fewer is None else f"{fewer:.1f}" if fewer < 99.95 else f"{fewer:.0f}"


def words(keys: Iterable[str]) -> dict[str, str]:
    """What settings are called, short as long as that tells them apart.

    >>> words(["algorithm.name", "shift.on", "train.lr", "model.args.lr"])
    {'algorithm.name': 'algorithm', 'shift.on': 'shift', 'train.lr': 'train.lr', 'model.args.lr': 'model.args.lr'}
    """
    short = {key: key.rpartition(".")[0 if key.endswith((".name", ".on")) else 2] or key for key in keys}
    return {key: key if list(short.values()).count(word) > 1 else word for key, word in short.items()}


def metric(experiment: Experiment) -> str:
    """The metric without the module it is from."""
    return experiment.train.metric.rpartition(":")[2]


def directed(experiment: Experiment) -> str:
    """The metric, and its goal where a reader may not expect it."""
    return metric(experiment) + " (lower is better)" * experiment.train.lower


def scored(x: float, experiment: Experiment) -> str:
    """A score: percent of accuracy, or a metric of one's own as it is."""
    return points(x) if experiment.train.metric == "accuracy" else f"{x:.4g}"


def points(x: float) -> str:
    return f"{100 * x:.1f}"


def difference_text(row: SummaryRow, experiment: Experiment) -> str:
    """A row's difference, in points of accuracy or as large as a metric of one's own has it."""
    return "" if row.gain is None else _difference_text(Paired(row.gain, row.verdict), row.against, experiment)


def compared_with(row: SummaryRow) -> str:
    """Difference from full precision with the same server rule where there is one, else from no shift; for tables."""
    if row.cost is None:
        return difference_text(row._replace(verdict=brief(row.verdict)), row.experiment)
    return _difference_text(row.cost._replace(verdict=brief(row.cost.verdict)), "32 bits", row.experiment)


def brief(verdict: str) -> str:
    """A verdict in the cell of a table."""
    return "one seed" if verdict == ONE_SEED else verdict


def _difference_text(of: Paired, against: str, experiment: Experiment) -> str:
    verdict = f" ({of.verdict})" if of.verdict else ""
    return f"{much(of.gain, experiment)}{quality(of.gain, experiment)} against {against}{verdict}"


def much(gain: float, experiment: Experiment) -> str:
    """A difference with its sign: points of accuracy, or a metric of one's own as it is."""
    return f"{100 * gain:+.1f}" if experiment.train.metric == "accuracy" else f"{gain:+.4g}"


def quality(gain: float, experiment: Experiment) -> str:
    """Meaning of a difference where its sign could be misread: for metrics that are minimised.

    >>> quality(0.1, Experiment(train={"metric": "mine:mae"})), quality(0.1, Experiment())
    (' (worse)', '')
    """
    if not experiment.train.lower or not gain or math.isnan(gain):
        return ""
    return " (worse)" if gain > 0 else " (better)"


def sentences(made: Sequence[SummaryRow]) -> list[str]:
    """What the few bits cost and what the shift gave back, where the runs tell."""
    compared = [(row, row.gain) for row in made if row.gain is not None and math.isfinite(row.gain)]
    keys = dict.fromkeys(key for row, _ in compared for key in row.label if key not in (SHIFT, BITS, UPLINK))
    named = words(key for key in keys if len({row.label.get(key) for row, _ in compared}) > 1)
    return [_sentence(row, gain, named) for row, gain in compared]


def _sentence(row: SummaryRow, gain: float, named: Mapping[str, str]) -> str:
    """One comparison; `named` are the further settings in which the comparisons differ, and their names."""
    verdict = f" ({row.verdict})" if row.verdict else ""
    key = UPLINK if UPLINK in row.label else BITS
    uplink = phrase(key, "", row.label[key]) if key in row.label else ""
    subject, rest = (f"The shift {row.label.get(SHIFT, '')}", f" at {uplink}" if uplink else "")
    if row.against == "32 bits":
        subject, rest = uplink or uplink_label(row.experiment), " against 32"
    if named:
        further = [f"{word}={row.label[key]}" for key, word in named.items() if row.label[key] != "-"]
        rest += " with " + ", ".join(further) if further else ""
    if row.experiment.train.metric == "accuracy":
        if points(gain) in ("0.0", "-0.0"):
            unknown = "" if row.verdict == "within noise" else verdict
            return f"{subject} made no difference{rest}{unknown}."
        lost, won = ("cost", "gained") if row.against == "32 bits" else ("took", "gave back")
        won = won if quantized(row.experiment) else "gained"
        return f"{subject} {lost if gain < 0 else won} {points(abs(gain))} points{rest}{verdict}."
    if not gain:
        return f"{subject} made no difference{rest}{verdict}."
    verb = "worsened" if (gain > 0) == row.experiment.train.lower else "improved"
    return f"{subject} {verb} {metric(row.experiment)} by {abs(gain):.4g}{rest}{verdict}."


def quantized(experiment: Experiment) -> bool:
    """True if some client uploads fewer than 32 bits.

    >>> quantized(Experiment(uplink={"bits": "32+4"})), quantized(Experiment(uplink={"bits": "32+32"}))
    (True, False)
    """
    uplink = experiment.uplink
    return not (_exact(uplink) and all(map(_exact, uplink.group.values())))


def shown(value: Any) -> str:
    """A setting in a table: {32: 0.5, 4: 0.5} is 32+4."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        equal = len(set(value.values())) == 1
        return "+".join(str(key) if equal else f"{key}:{part:g}" for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return "+".join(str(part) for part in sorted(set(value), reverse=True))
    return str(value)


def names(experiments: Iterable[Experiment]) -> list[str]:
    """A folder name for each run: the settings in which they differ, with a checksum where that is not enough.

    Runs that were given names which end in their seed keep those, whatever runs are beside them. Where all uplinks are
    named ones, their names stand for their settings.

    >>> names([Experiment(uplink=uplink, seed=3) for uplink in ("exact", "lean")])
    ['uplink-exact_seed-3', 'uplink-lean_seed-3']
    """
    runs = list(experiments)
    if all(one.name.endswith(f"_seed-{one.seed}") for one in runs):
        return [one.name for one in runs]
    settings = [_settings(one) for one in runs]  # all of them: names outlast what is known to have an effect
    uplinks = [uplink_name(one.uplink) for one in runs]
    if all(uplinks):
        others = [{key: x for key, x in flat.items() if not key.startswith("uplink.")} for flat in settings]
        settings = [flat | {UPLINK: name} for flat, name in zip(others, uplinks, strict=True)]
    varying = _varying(runs, settings)
    short = {key: "shift" if key == "shift.on" else key.rpartition(".")[2] for key in varying}
    named = {key: key if list(short.values()).count(name) > 1 else name for key, name in short.items()}
    joined, exact = [], []
    for one, flat in zip(runs, settings, strict=True):
        parts = [f"{named[key]}-{_slug(shown(flat[key]))}" for key in varying if key in flat]
        joined.append("_".join([*parts, f"seed-{one.seed}"])[:200])
        counted = [item for item in sorted(dotted(one.model_dump()).items()) if item not in LATER.items()]
        exact.append(f"{zlib.crc32(str(counted).encode()):08x}")
    return [f"{name}_{crc}" if joined.count(name) > 1 else name for name, crc in zip(joined, exact, strict=True)]


def _varying(experiments: Sequence[Experiment], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings but seed and name in which runs differ.

    Settings of the shift and of the uplink count only among runs that have them, and the shift's share only where it is
    not each rule's default.
    """
    shifts = [one.shift for one in experiments if one.shift.on]
    usual = all(shift.share == ShiftSettings(per=shift.per).share for shift in shifts)
    found = []
    for key in dict.fromkeys(key for one in settings for key in one):
        partial = key.startswith(("shift.", "uplink.")) and not key.startswith("uplink.group.")
        values = {str(one.get(key)) for one in settings if key in one or not partial}
        if len(values) > 1 and key not in ("seed", "name") and not (usual and key == "shift.share"):
            found.append(key)
    return found


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c in "+.-" else "-" for c in text)
