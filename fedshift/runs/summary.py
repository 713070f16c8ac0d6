"""Comparison of runs: scores with their spread over seeds, bytes, and differences from full precision and no shift."""

import math
import statistics
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.measure import Measurement
from rich.table import Column, Table

from fedshift.codecs.named import WIDTH, default_coder
from fedshift.core.files import RunError
from fedshift.core.names import printable
from fedshift.core.tables import titled
from fedshift.core.units import megabytes
from fedshift.experiment.settings import (
    LATER_TRAIN,
    DownlinkSettings,
    Experiment,
    LinkSettings,
    ShiftSettings,
    TrainSettings,
    UplinkSettings,
    downlink_name,
    quantizes,
    uplink_name,
    widths,
)
from fedshift.experiment.toml import dotted
from fedshift.rounds.uplinks import REPLACED, UPLINKS
from fedshift.runs.columns import GROUP, SPREAD, column, metric_columns
from fedshift.runs.record import ROUNDS
from fedshift.runs.sheet import PARTS, Estimate, Uploaded, sheet

WINDOW = 10  # evaluated rounds whose mean is the score; single rounds vary by several points
# settings of the computation and the record, which change scores only by rounding
NEUTRAL: tuple[str, ...] = ("engine.workers", "engine.pack", "train.metrics", "evaluate.per_client", "evaluate.every")
NEUTRAL += ("record.checkpoint", "record.histograms", "record.frames", "record.memory")
# settings that are newer than the checksums in folder names, which leave them out at these values
LATER: dict[str, Any] = {"record.frames": 50, "uplink.biases": False, "data.most": 0}
LATER |= dict.fromkeys(("uplink.step", "uplink.rate", "uplink.keep", "uplink.codec"))
LATER |= (USUAL_TRAIN := dotted({"train": TrainSettings().model_dump(include={*LATER_TRAIN})}))
LATER |= {"train.metrics": None, "evaluate.per_client": False, "evaluate.every": 1, "evaluate.held_out": 0.0}
LATER |= {f"downlink.{name}": value for name, value in DownlinkSettings().model_dump().items()}
SHIFT, BITS, UPLINK = "shift.on", "uplink.bits", "uplink"  # UPLINK: all settings of the uplink as one
NO = "no"  # value of SHIFT without the shift
COUNTED = (BITS, "train.rounds", "train.epochs", "train.steps", "data.clients")
# settings of an uplink that have an effect on exact uploads
EXACT = ("bits", "coder", "bandwidth", "share", "clients")
# settings of an uplink that have an effect on quantized uploads only
QUANTIZED = ("quantizer", "step", "rate", "keep", "per", "biases")
# settings that define a task; runs of different tasks are not compared
TASK = ("data.", "model.", "algorithm.", "train.loss", "train.metric", "train.goal", "evaluate.held_out")
ORDER = (
    "Pareto-optimal settings first (none has both fewer bytes and a better score), by bytes; then the others, by bytes"
)
ONE_SEED = "one seed: noise unknown"  # a verdict
DIFFERENCE = "-10.0 against 32"  # has the smallest width of a column of differences


class Trace(NamedTuple):
    """Evaluated rounds of one run."""

    rounds: Sequence[int] = ()
    bytes_up: Sequence[float] = ()  # cumulative, at the end of each
    scores: Sequence[float] = ()


class Further(NamedTuple):
    """Scores of a run in addition to that of its metric on the test set."""

    metrics: Mapping[str, float] = {}  # mean of the last ten evaluated rounds by each metric
    clients: Mapping[str, float] = {}  # distribution over clients in the last round that has one


class RunResult(NamedTuple):
    """Result of a finished run, read from its record."""

    experiment: Experiment
    score: float  # mean of the last ten evaluated rounds
    last: float  # of the last round
    bytes_up: int  # all rounds
    bytes_down: int | None = None  # all rounds; None if not recorded
    trace: Trace = Trace()
    estimate: Estimate | None = None  # of the uploaded bytes
    further: Further = Further()


class Paired(NamedTuple):
    """Mean difference over the seeds that two settings have in common."""

    gain: float
    verdict: str  # '' if the difference is beyond noise
    margin: float | None = None  # half the 95 % interval; None for fewer than two seeds


class SummaryRow(NamedTuple):
    """Summary of runs that differ only in their seed."""

    label: dict[str, str]  # settings in which rows differ
    scores: dict[int, float]  # by seed
    last: float
    bytes_up: float  # per run
    against: str = ""  # base of the comparison: 'no shift' or '32 bits'
    gain: float | None = None
    verdict: str = ""
    experiment: Experiment = Experiment()  # of one of its runs
    runs: Sequence[RunResult] = ()  # one per seed
    full: "SummaryRow | None" = None  # full precision with the same server rule: it differs only in the uplink

    @property
    def mean(self) -> float:
        return mean_of([*self.scores.values()])

    @property
    def spread(self) -> float | None:
        return deviation([*self.scores.values()]) if len(self.scores) > 1 else None

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

    @property
    def metrics(self) -> dict[str, tuple[float, float | None]]:
        """Mean and standard deviation over seeds of the score by each metric."""
        return _over_seeds([run.further.metrics for run in self.runs])

    @property
    def clients(self) -> dict[str, tuple[float, float | None]]:
        """Mean and standard deviation over seeds of the figures over clients: 'mean', 'worst', 'group.4 bit', ..."""
        return _over_seeds([run.further.clients for run in self.runs])


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


def deviation(values: Sequence[float]) -> float:
    """Standard deviation over seeds; NaN if a value is NaN or infinite."""
    return statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan


def _over_seeds(runs: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float | None]]:
    """Mean and standard deviation of the figures that all runs have."""
    shared = [name for name in (runs[0] if runs else ()) if all(name in run for run in runs)]
    columns = {name: [run[name] for run in runs] for name in shared}
    return {name: (mean_of(x), deviation(x) if len(x) > 1 else None) for name, x in columns.items()}


def load(folder: Path, experiment: Experiment) -> RunResult:
    found = sheet(folder / ROUNDS)
    if found.lost:
        many = f"{found.lost} damaged line{'s' * (found.lost > 1)}"
        raise RunError(f"{found.path}: {many}; `fedshift report {folder}` shows the undamaged ones")
    known = sum(sum(found.column(part)) for part in PARTS)
    sent = found.uploaded()
    lines = zip(found.values("round"), np.cumsum(sent.up).tolist(), found.values(column(experiment)), strict=True)
    evaluated = [(int(number or 0), up, score) for number, up, score in lines if score is not None]
    if not evaluated or not math.isfinite(known):
        missing = "no evaluated round" if not evaluated else "no finite number of uploaded bytes"
        raise RunError(f"{found.path}: damaged: it contains {missing}")
    down = sum(found.column("bytes.down")) if "bytes.down" in found.header else math.nan
    figures = {name: np.array(found.values(name), dtype=np.float64) for name in _further(experiment, found.header)}
    more = further(experiment, figures, [score is not None for score in found.values(column(experiment))])
    return result(experiment, Trace(*zip(*evaluated, strict=True)), sent, down)._replace(further=more)


def _further(experiment: Experiment, header: Iterable[str]) -> list[str]:
    """Columns of metrics and of the distribution over clients that a record has."""
    known = metric_columns(experiment).values()
    return [name for name in header if name in known or name in SPREAD or name.startswith(GROUP)]


def further(
    experiment: Experiment, figures: Mapping[str, NDArray[np.float64]], evaluated: Sequence[bool] | NDArray[np.bool_]
) -> Further:
    """Scores by all metrics, and the distribution over clients, from the columns of a record."""
    columns, mask = metric_columns(experiment), np.array(evaluated, dtype=bool)
    metrics = {
        name: mean_of(figures[column][mask][-WINDOW:].tolist()) for name, column in columns.items() if column in figures
    }
    clients = {}
    for name, values in figures.items():
        known = values[~np.isnan(values)]
        if name.startswith("clients.") and len(known):
            clients[name.removeprefix("clients.")] = float(known[-1])
    return Further(metrics, clients)


def result(experiment: Experiment, trace: Trace, sent: Uploaded, bytes_down: float = math.nan) -> RunResult:
    """Result of a run from its evaluated rounds and the bytes of all rounds."""
    down = int(bytes_down) if math.isfinite(bytes_down) else None
    scores, up = trace.scores, int(sent.up.sum())
    return RunResult(experiment, mean_of(scores[-WINDOW:]), scores[-1], up, down, trace, sent.estimate)


def rows(results: Sequence[RunResult], planned: Sequence[Experiment] = ()) -> list[SummaryRow]:
    """One row per setting of these runs; `planned` are all runs of a sweep, including failed ones."""
    varying, kinds = apart([result.experiment for result in results], planned)
    keys = columns(varying, planned or [result.experiment for result in results])
    grouped: dict[tuple[str, ...], dict[int, RunResult]] = {}
    for result, kind in zip(results, kinds, strict=True):
        grouped.setdefault(kind, {})[result.experiment.seed] = result
    made = [_row(list(members.values()), keys) for members in grouped.values()]
    settings = [{key: shown(value) for key, value in comparable(row.experiment).items()} for row in made]
    others = list(zip(made, settings, strict=True))
    return [_compared(row, values, others) for row, values in others]


def _row(runs: Sequence[RunResult], keys: Sequence[str]) -> SummaryRow:
    return SummaryRow(
        label(runs[0].experiment, keys),
        {run.experiment.seed: run.score for run in runs},
        mean_of([run.last for run in runs]),
        statistics.fmean(run.bytes_up for run in runs),
        experiment=runs[0].experiment,
        runs=runs,
    )


def apart(
    experiments: Sequence[Experiment], planned: Sequence[Experiment] = ()
) -> tuple[list[str], list[tuple[str, ...]]]:
    """Settings other than the seed in which runs differ, and their values for each run, equal for runs of one kind."""
    varying = _varying(planned or experiments, [comparable(experiment) for experiment in planned or experiments])
    return varying, [tuple(str(flat.get(key)) for key in varying) for flat in map(comparable, experiments)]


def columns(varying: Sequence[str], experiments: Sequence[Experiment]) -> list[str]:
    """Settings shown in tables: UPLINK instead of two or more settings of the uplink, unless that is ambiguous.

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
    flats = [comparable(experiment) for experiment in experiments]
    kinds = {
        (uplink_label(experiment), str([flat.get(key) for key in uplinks]))
        for experiment, flat in zip(experiments, flats, strict=True)
    }
    if not uplinks or len({name for name, _ in kinds}) < len(kinds):
        return [*varying]
    if len(uplinks) == 1 and not any(
        experiment.uplink.quantizer in WIDTH or experiment.uplink.group for experiment in experiments
    ):
        return [*varying]  # bits alone are a clear label
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
            scope = [key for key in flat if key.startswith(prefix) and not key.startswith(f"{prefix}group.")]
            flat = {key: x for key, x in flat.items() if key not in scope or key.removeprefix(prefix) in EXACT}
        elif not quantizes(coding):
            flat = {key: x for key, x in flat.items() if key not in {f"{prefix}{name}" for name in QUANTIZED}}
        if coding.codec is not None or (isinstance(coding, UplinkSettings) and coding.policy is not None):
            replaced = {f"{prefix}{name}" for name in (REPLACED if coding.codec is not None else ())} | (
                {f"{prefix}bits"} if widths(coding) == {8} else set()
            )
            flat = {key: x for key, x in flat.items() if key not in replaced}
        elif all(coding.coder == default_coder(coding.quantizer, bits) for bits in widths(coding)):
            flat[f"{prefix}coder"] = "auto"
    return flat


def _settings(experiment: Experiment) -> dict[str, Any]:
    """Settings by dotted name, with the rule of the shift as one setting and without those of a shift that is off."""
    flat, shift = dotted(experiment.model_dump()), experiment.shift
    for key, value in flat.items():
        if key.startswith(("train.milestones", "train.optimizer.")) and isinstance(value, (list, tuple)):
            flat[key] = ", ".join(map(str, value))  # in order, unlike a list of bits
    unused = {"shift.per"} | ({"shift.max_share"} if shift.share != "uploads" else set())
    if not shift.on:
        unused = {key for key in flat if key.startswith("shift.")}
    unused |= {key for key in flat if key.startswith("downlink.")}
    unused |= {"train.steps"} if experiment.train.steps is None else set()
    unused |= {"train.metrics"}
    whole: dict[str, Any] = {SHIFT: f"per {shift.per}" if shift.on else NO, "downlink": downlink_label(experiment)}
    if not experiment.data.clients:
        whole["data.clients"] = "all"
    if len(experiment.train.directions) > 1:
        whole["train.metrics"] = ", ".join(experiment.train.directions)
    return {key: value for key, value in (flat | whole).items() if key in whole or key not in unused}


def downlink_label(experiment: Experiment) -> str:
    """Name of the downlink in tables, or its settings like those of an uplink.

    >>> [downlink_label(Experiment(downlink=link)) for link in ("exact", "lean", {"bits": 8})]
    ['exact', 'lean', '8 bit']
    """
    downlink = experiment.downlink
    label = downlink_name(downlink) or uplink_label(Experiment(uplink=downlink.model_dump(exclude_unset=True)))
    return f"{label} bit" if label.isdecimal() else label


def uplink_label(experiment: Experiment) -> str:
    """Name of the uplink in tables and sentences: its name, or its bits and all settings that are not defaults.

    Named groups follow after clients without a group, each with its share or its number of clients.

    >>> [uplink_label(Experiment(uplink=uplink)) for uplink in ("lean", {"rate": 0.4, "send": "updates"})]
    ['lean', '0.4 bit updates, step-random']
    >>> uplink_label(Experiment(uplink={"keep": 0.02, "send": "updates", "feedback": True}))
    'top 2 % updates, ternary, feedback'
    >>> kinds = [{"policy": "adaquantfl"}, {"policy": {"name": "dadaquant", "q_max": 4}, "bits": "32+8"}]
    >>> [uplink_label(Experiment(uplink=uplink)) for uplink in kinds]
    ['adaquantfl', '32+8 bit, dadaquant(q_max=4)']
    >>> kinds = [{"bits": 32, "quantizer": "uniform"}, {"bits": "32+4"}]
    >>> kinds += [{"bits": 4, "send": "updates", "feedback": True}, {"bits": 8, "per": "channel"}]
    >>> kinds += [{"group": {"slow": {"share": 0.5, "bits": 4, "coder": "range"}}}]
    >>> [uplink_label(Experiment(uplink=uplink)) for uplink in kinds]
    ['32', '32+4', '4 bit updates, feedback', '8 bit, per channel', '32 bit; slow 0.5: 4 bit, range']
    >>> kinds = {"fast": {"clients": [1, 7], "bits": 8}, "slow": {"share": 0.5} | UPLINKS["extreme"]}
    >>> uplink_label(Experiment(uplink=UPLINKS["lean"] | {"group": kinds}))
    'lean; fast (2 clients): 8 bit; slow 0.5: extreme'
    """
    settings = _uplink(experiment)
    common = {key: value for key, value in settings.items() if not key.startswith("group.")}
    if not experiment.uplink.group:
        label, bits = _scope_label(common, UplinkSettings), shown(experiment.uplink.bits)
        return bits if label == f"{bits} bit" else label
    parts = [_scope_label(common, UplinkSettings)]
    for name, link in experiment.uplink.group.items():
        prefix = f"group.{name}."
        members = {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}
        count = len(link.clients or ())
        size = f"({count} client{'s' * (count != 1)})" if link.share is None else f"{link.share:g}"
        parts.append(f"{name} {size}: {_scope_label(members, LinkSettings)}")
    return "; ".join(parts)


def _uplink(experiment: Experiment) -> dict[str, Any]:
    """Settings of the uplink that have an effect on uploads, by their name in the table `uplink`."""
    flat = {
        key.removeprefix("uplink."): value for key, value in comparable(experiment).items() if key.startswith("uplink.")
    }
    return {key: value for key, value in flat.items() if key.rpartition(".")[2] != "bandwidth"}


def _scope_label(settings: Mapping[str, Any], kind: type[UplinkSettings] | type[LinkSettings]) -> str:
    """Label of clients with the same settings (their bits may differ): the name of an uplink, or its settings.

    A rate or a kept share replaces bits.
    """
    coding = {key: value for key, value in settings.items() if key not in ("share", "clients")}
    for name in UPLINKS:
        if name != "exact" and coding == _uplink(Experiment(uplink=name)):
            return name
    usual = kind(feedback=settings.get("feedback", False)).model_dump() | {"feedback": False}
    send, named = settings.get("send", usual["send"]), {"bits", "send", "share", "clients"}
    amount = f"{shown(settings.get('bits'))} bit"
    if which := [_called(settings, table) for table in ("policy", "codec") if f"{table}.name" in settings]:
        amount = ", ".join([amount] * ("bits" in settings) + which)
        named |= {key for key in settings if key.startswith(("policy.", "codec."))}
    elif isinstance(settings.get("bits"), int) and settings.get("rate") is not None:
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


def _called(settings: Mapping[str, Any], table: str) -> str:
    """Codec or policy of the settings as a call: 'qsgd(s=4)'."""
    found = {key.removeprefix(f"{table}."): x for key, x in settings.items() if key.startswith(f"{table}.")}
    args = ", ".join(f"{key}={shown(value)}" for key, value in found.items() if key not in ("name", "object"))
    name = str(found["name"]).rpartition(":")[2]
    return f"{name}({args})" if args else name


def _exact(coding: UplinkSettings | LinkSettings) -> bool:
    """True if all clients with this coding upload in full precision, whatever its quantizer."""
    return widths(coding) == {32}


def label(experiment: Experiment, keys: Iterable[str]) -> dict[str, str]:
    """Settings as text; '-' for settings that a run does not have."""
    flat = described(experiment)
    return {key: shown(flat[key]) if key in flat else "-" for key in keys}


def described(experiment: Experiment) -> dict[str, Any]:
    """Comparable settings, and UPLINK as one setting."""
    return comparable(experiment) | {UPLINK: uplink_label(experiment)}


def phrase(key: str, word: str, value: Any) -> str:
    """Setting as part of the name of a line; '' if it is off.

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
    if value is None and key.startswith(("shift.", "uplink.")):  # runs without shift or quantizer lack it
        return ""
    if value is None:
        return f"{word} not set"
    return shown(value) if key.endswith(".name") else f"{word} {shown(value)}"


def _compared(
    row: SummaryRow, settings: Mapping[str, str], others: Sequence[tuple[SummaryRow, Mapping[str, str]]]
) -> SummaryRow:
    """Row with its full precision, and its difference: from no shift for a shifted row, otherwise from 32 bits."""
    lossy = quantized(row.experiment)
    exact = [other for other in others if not quantized(other[0].experiment)]
    full = _base(settings, exact, ("uplink.",)) or _base(_unshifted(settings), exact, ("uplink.",))
    if full is row or (full and not lossy and full.bytes_up == row.bytes_up):
        full = None
    base, against = full if lossy else None, "32 bits"
    unshifted = [other for other in others if other[1][SHIFT] == NO]
    if settings[SHIFT] != NO and (plain := _base(settings, unshifted, ("shift.",))):
        base, against = plain, "no shift"
    if base is None:
        return row._replace(full=full)
    gain, verdict = difference(row.scores, base.scores)
    return row._replace(against=against, gain=gain, verdict=verdict, full=full)


def _base(
    settings: Mapping[str, str], others: Sequence[tuple[SummaryRow, Mapping[str, str]]], free: tuple[str, ...]
) -> SummaryRow | None:
    """Row that agrees in all settings except the free ones or, without one, in all others that scores depend on.

    Of several rows, one whose uplink has no other settings than bits is preferred.
    """
    for prefixes in (free, (*free, *NEUTRAL)):
        alike = [row for row, other in others if _but(other, prefixes) == _but(settings, prefixes)]
        if alike:
            return min(alike, key=lambda row: not uplink_label(row.experiment).replace("+", "").isdecimal())
    return None


def _unshifted(settings: Mapping[str, str]) -> Mapping[str, str]:
    """Equivalent settings in full precision: the share of quantized uploads is 0, so that nothing is shifted."""
    if settings.get("shift.share") != "uploads":
        return settings
    return {key: x for key, x in settings.items() if not key.startswith("shift.")} | {SHIFT: NO}


def _but(settings: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    """Settings without seed, name and those with these prefixes."""
    return {key: x for key, x in settings.items() if key not in ("seed", "name") and not key.startswith(prefixes)}


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[float, str]:
    """Mean difference over common seeds, and a verdict on whether it is within noise (paired t, 95 %).

    >>> difference({0: 0.9, 1: 0.8, 2: 0.9}, {0: 0.8, 1: 0.7, 2: 0.81})[1]
    ''
    >>> difference({0: 0.9, 1: 0.8}, {0: 0.8, 1: 0.9})[1]
    'within noise'
    """
    gain, verdict, _ = paired(ours, theirs)
    return gain, verdict


def paired(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Paired:
    """Mean difference over common seeds, with its 95 % interval (paired t)."""
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return Paired(mean_of([*ours.values()]) - mean_of([*theirs.values()]), "no seed in common")
    differences = [ours[seed] - theirs[seed] for seed in seeds]
    gain = mean_of(differences)
    if not math.isfinite(gain):
        return Paired(gain, "NaN or infinite")
    if len(seeds) == 1:
        return Paired(gain, ONE_SEED)
    margin = _t95(len(seeds) - 1) * deviation(differences) / math.sqrt(len(seeds))
    return Paired(gain, "within noise" if abs(gain) <= margin else "", margin)


def _t95(degrees: int) -> float:
    """Quantile of Student's t, two-sided 95 %.

    >>> round(_t95(2), 3)
    4.303
    """
    from scipy.special import stdtrit  # like scipy.stats.t, but imported in a third of the time

    return float(stdtrit(degrees, 0.975))


def task(experiment: Experiment) -> tuple[str, ...]:
    """Settings that runs must share to be compared: data, model, algorithm and metric."""
    flat = comparable(experiment)
    return tuple(f"{key}={x}" for key, x in flat.items() if key.startswith(TASK) and key != "train.metrics")


def tasks(made: Iterable[SummaryRow]) -> list[list[SummaryRow]]:
    """Rows grouped by task, in the order in which the tasks appear."""
    found: dict[tuple[str, ...], list[SummaryRow]] = {}
    for row in made:
        found.setdefault(task(row.experiment), []).append(row)
    return list(found.values())


def front(points: Sequence[tuple[float, float]], lower: bool = False) -> list[bool]:
    """True for Pareto-optimal pairs of bytes and score: no other is better in one and at least as good in the other.

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
    """Rows by task, Pareto-optimal ones first, then dominated ones, both in ascending order of uploaded bytes."""
    return [row for row, _ in merits(made)]


def merits(made: Sequence[SummaryRow]) -> list[tuple[SummaryRow, bool]]:
    """Rows by merit, with True for those that are Pareto-optimal in their task."""
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
    """Table with one row per setting, by merit; settings share one column if their columns exceed the width."""
    made = by_merit(made)
    labels = [list(row.label.values()) for row in made]
    heads = words(made[0].label)
    wide = _drawn(made, experiment, title, list(heads.values()), labels)
    settings = wide.columns[: len(heads)]
    for setting in settings:
        _whole(setting)
    if width is None or _least(wide) <= width:
        return wide
    if UPLINK in heads and _wrapped(
        wide, settings[list(heads).index(UPLINK)], [row.label[UPLINK] for row in made], width
    ):
        return wide
    joined = [[" ".join(f"{word}={row.label[key]}" for key, word in heads.items())] for row in made]
    narrow = _drawn(made, experiment, title, ["settings"], joined)
    for figures in narrow.columns[1:]:  # leave more width to settings
        figures.max_width = 16
    return narrow


def _whole(column: Column) -> None:
    """Do not wrap the lines of a column."""
    cells = [str(column.header), *map(str, column.cells)]
    column.no_wrap, column.min_width = True, max(len(line) for cell in cells for line in cell.split("\n"))


def _wrapped(drawn: Table, column: Column, labels: Sequence[str], width: int) -> bool:
    """Wrap the labels of a column between words so that the table has this width; False if that is not enough."""
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
    """Smallest width of a table without cut words."""
    console = Console(width=1000)
    return Measurement.get(console, console.options, drawn).minimum


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
    last = [] if compared else ["last round"]  # less important than a difference
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


def metrics_table(made: Sequence[SummaryRow]) -> Table | None:
    """Table of the scores by all metrics, with one row per setting; None if no run has further metrics."""
    if not any(len(row.experiment.train.directions) > 1 for row in made):
        return None
    ordered = by_merit(made)
    goals = {name: goal for row in ordered for name, goal in row.experiment.train.directions.items()}
    heads = {name: with_goal(label, goals[name]) for name, label in metric_labels(goals).items()}
    cells = [
        [spread_text(row.metrics[name][0], None, name) if name in row.metrics else "" for name in heads]
        for row in ordered
    ]
    return _further_table("All metrics", ordered, list(heads.values()), cells)


def clients_table(made: Sequence[SummaryRow]) -> Table | None:
    """Table of the distribution of the score over clients; None if no run was evaluated for each client."""
    ordered = [row for row in by_merit(made) if row.clients]
    if not ordered:
        return None
    heads = dict.fromkeys(name for row in ordered for name in row.clients)
    cells = [
        [spread_text(row.clients[x][0], None, row.experiment.train.metric) if x in row.clients else "" for x in heads]
        for row in ordered
    ]
    metrics = ", ".join(dict.fromkeys(directed(row.experiment) for row in ordered))
    return _further_table(f"{metrics} over clients", ordered, list(map(client_figure, heads)), cells)


def client_figure(name: str) -> str:
    """Name of a figure over clients in tables.

    >>> client_figure("worst"), client_figure("group.4 bit"), client_figure("std")
    ('worst tenth', '4 bit', 'deviation')
    """
    known = {"mean": "mean", "weighted": "weighted mean", "worst": "worst tenth", "std": "deviation"}
    return known.get(name) or name.removeprefix("group.")


def spread_text(mean: float, spread: float | None, metric: str) -> str:
    """Score with its standard deviation over seeds: accuracy in percent, other metrics unchanged.

    >>> spread_text(0.5, 0.01, "accuracy"), spread_text(2.5, None, "mine:mae")
    ('50.0 ± 1.0', '2.5')
    """
    if metric == "accuracy":
        return points(mean) + ("" if spread is None else f" ± {points(spread)}")
    return f"{mean:.4g}" + ("" if spread is None else f" ± {spread:.2g}")


def _further_table(
    title: str, made: Sequence[SummaryRow], heads: Sequence[str], cells: Sequence[Sequence[str]]
) -> Table:
    drawn = titled(printable(title))
    named = words(made[0].label)
    if named:
        drawn.add_column("settings", overflow="fold", min_width=12)
    for head in heads:
        drawn.add_column(printable(head), justify="right", overflow="fold")
    for row, figures in zip(made, cells, strict=True):
        label = [" ".join(f"{word}={row.label[key]}" for key, word in named.items())] if named else []
        drawn.add_row(*map(printable, (*label, *figures)))
    return drawn


def times(fewer: float | None) -> str:
    """
    >>> times(1.7466), times(27.63), times(187.4), times(None)
    ('1.7', '27.6', '187', '')
    """
    return "" if fewer is None else f"{fewer:.1f}" if fewer < 99.95 else f"{fewer:.0f}"


def words(keys: Iterable[str]) -> dict[str, str]:
    """Names of settings in tables, short unless that is ambiguous.

    >>> words(["algorithm.name", "shift.on", "train.lr", "model.args.lr"])
    {'algorithm.name': 'algorithm', 'shift.on': 'shift', 'train.lr': 'train.lr', 'model.args.lr': 'model.args.lr'}
    """
    short = {key: key.rpartition(".")[0 if key.endswith((".name", ".on")) else 2] or key for key in keys}
    return {key: key if list(short.values()).count(word) > 1 else word for key, word in short.items()}


def metric(experiment: Experiment) -> str:
    """Name of the metric without its module."""
    return experiment.train.metric.rpartition(":")[2]


def directed(experiment: Experiment) -> str:
    """Name of the metric, with its goal if lower values are better."""
    return with_goal(metric(experiment), experiment.train.direction)


def with_goal(label: str, goal: str | None) -> str:
    """
    >>> with_goal("mae", "min"), with_goal("f1", "max")
    ('mae (lower is better)', 'f1')
    """
    return label + " (lower is better)" * (goal == "min")


def metric_labels(names: Iterable[str]) -> dict[str, str]:
    """Labels of metrics by name: without the module, unless another of them has the same label.

    >>> metric_labels(["f1", "mine:f1", "mine:mae"])
    {'f1': 'f1', 'mine:f1': 'mine:f1', 'mine:mae': 'mae'}
    """
    short = {name: name.rpartition(":")[2] for name in names}
    return {name: name if list(short.values()).count(label) > 1 else label for name, label in short.items()}


def scored(x: float, experiment: Experiment) -> str:
    """Score as text: accuracy in percent, other metrics unchanged."""
    return points(x) if experiment.train.metric == "accuracy" else f"{x:.4g}"


def points(x: float) -> str:
    return f"{100 * x:.1f}"


def difference_text(row: SummaryRow, experiment: Experiment) -> str:
    """Difference of a row as text, with its base and verdict."""
    return "" if row.gain is None else _difference_text(Paired(row.gain, row.verdict), row.against, experiment)


def compared_with(row: SummaryRow) -> str:
    """Difference from full precision with the same server rule or, without one, from no shift; for tables."""
    if row.cost is None:
        return difference_text(row._replace(verdict=brief(row.verdict)), row.experiment)
    return _difference_text(row.cost._replace(verdict=brief(row.cost.verdict)), "32 bits", row.experiment)


def brief(verdict: str) -> str:
    """Verdict, abbreviated for tables."""
    return "one seed" if verdict == ONE_SEED else verdict


def _difference_text(difference: Paired, against: str, experiment: Experiment) -> str:
    gain, verdict = difference.gain, f" ({difference.verdict})" if difference.verdict else ""
    return f"{signed(gain, experiment)}{quality(gain, experiment)} against {against}{verdict}"


def signed(gain: float, experiment: Experiment) -> str:
    """Difference with its sign: points of accuracy, other metrics unchanged."""
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
    """Sentences on what few bits cost and what the shift gave back, as far as runs can be compared."""
    compared = [(row, row.gain) for row in made if row.gain is not None and math.isfinite(row.gain)]
    keys = dict.fromkeys(key for row, _ in compared for key in row.label if key not in (SHIFT, BITS, UPLINK))
    named = words(key for key in keys if len({row.label.get(key) for row, _ in compared}) > 1)
    return [_sentence(row, gain, named) for row, gain in compared]


def _sentence(row: SummaryRow, gain: float, named: Mapping[str, str]) -> str:
    """Sentence on one comparison; `named` are the other settings in which comparisons differ, and their names."""
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
    """Value of a setting in a table: {32: 0.5, 4: 0.5} is 32+4.

    >>> shown({32: 0.5, 4: 0.5}), shown((4, 32, 4)), shown({"levels": ["low", [2]]})
    ('32+4', '32+4', 'levels:low+2')
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        equal = _numbers(value.values()) and len(set(value.values())) == 1
        return "+".join(str(key) if equal else f"{key}:{_short(part)}" for key, part in value.items())
    if isinstance(value, (list, tuple)) and _numbers(value):
        return "+".join(str(part) for part in sorted(set(value), reverse=True))
    if isinstance(value, (list, tuple)):
        return "+".join(map(shown, value))
    return str(value)


def _numbers(values: Iterable[Any]) -> bool:
    return all(isinstance(value, (int, float)) for value in values)


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else shown(value)


def names(experiments: Iterable[Experiment]) -> list[str]:
    """Folder name of each run: the settings in which runs differ, with a checksum if that is not enough.

    Runs whose names end in their seed keep their names. If all uplinks have names, those replace their settings.

    >>> names([Experiment(uplink=uplink, seed=3) for uplink in ("exact", "lean")])
    ['uplink-exact_seed-3', 'uplink-lean_seed-3']
    """
    runs = list(experiments)
    if all(experiment.name.endswith(f"_seed-{experiment.seed}") for experiment in runs):
        return [experiment.name for experiment in runs]
    settings = [
        _settings(experiment) for experiment in runs
    ]  # all: names do not depend on which settings are known to have no effect
    uplinks = [uplink_name(experiment.uplink) for experiment in runs]
    if all(uplinks):
        others = [{key: x for key, x in flat.items() if not key.startswith("uplink.")} for flat in settings]
        settings = [flat | {UPLINK: name} for flat, name in zip(others, uplinks, strict=True)]
    varying = _varying(runs, settings)
    short = {key: "shift" if key == "shift.on" else key.rpartition(".")[2] for key in varying}
    named = {key: key if list(short.values()).count(name) > 1 else name for key, name in short.items()}
    joined, exact = [], []
    for experiment, flat in zip(runs, settings, strict=True):
        parts = [f"{named[key]}-{_slug(shown(flat[key]))}" for key in varying if key in flat]
        joined.append("_".join([*parts, f"seed-{experiment.seed}"])[:200])
        counted = [item for item in sorted(dotted(experiment.model_dump()).items()) if item not in LATER.items()]
        exact.append(f"{zlib.crc32(str(counted).encode()):08x}")
    return [f"{name}_{crc}" if joined.count(name) > 1 else name for name, crc in zip(joined, exact, strict=True)]


def _varying(experiments: Sequence[Experiment], settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings other than seed and name in which runs differ.

    Settings of the shift and of the uplink are compared only among runs that have them, and the share of the shift only
    if it is not the default of each rule.
    """
    shifts = [experiment.shift for experiment in experiments if experiment.shift.on]
    usual = all(shift.share == ShiftSettings(per=shift.per).share for shift in shifts)
    found = []
    for key in dict.fromkeys(key for flat in settings for key in flat):
        partial = key.startswith(("shift.", "uplink.")) and not key.startswith("uplink.group.")
        # an argument that only one run has is a difference
        partial = partial and ".codec." not in key and ".policy." not in key
        values = {str(flat.get(key)) for flat in settings if key in flat or not partial}
        if len(values) > 1 and key not in ("seed", "name") and not (usual and key == "shift.share"):
            found.append(key)
    return found


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c in "+.-" else "-" for c in text)
