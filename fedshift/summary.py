"""Runs side by side: accuracy with its spread over seeds, bytes, and what bits cost and the shift gave back."""

import math
import statistics
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from fedshift.columns import column
from fedshift.files import RunError
from fedshift.names import printable
from fedshift.record import ROUNDS
from fedshift.recorded import PARTS, Estimate, Uploaded, sheet
from fedshift.settings import Experiment, Shift
from fedshift.toml import dotted

WINDOW = 10  # rounds a final figure is the mean of: single rounds wander by several points
# settings of how a run is computed and recorded, which change its scores by rounding at most
NEUTRAL = ("engine.workers", "engine.pack", "record.checkpoint", "record.histograms", "record.frames", "record.memory")
# settings added after folders were first named by a checksum, which does not count them at these values
LATER = {"record.frames": 50}
# Student's t, two-sided 95 %, for 1, 2, ... degrees of freedom
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


class Result(NamedTuple):
    """One finished run, read from its record."""

    experiment: Experiment
    score: float  # mean of the last ten evaluated rounds
    last: float  # of the last round
    bytes_up: int  # all rounds
    estimate: Estimate | None = None  # of these bytes


class Row(NamedTuple):
    """Runs that differ in nothing but their seed."""

    label: dict[str, str]  # the settings that differ between rows
    scores: dict[int, float]  # by seed
    last: float
    bytes_up: float  # a run
    against: str = ""  # what it is compared with
    gain: float | None = None
    verdict: str = ""
    experiment: Experiment = Experiment()  # of one of its runs

    @property
    def mean(self) -> float:
        return _mean([*self.scores.values()])

    @property
    def spread(self) -> float | None:
        return _deviation([*self.scores.values()]) if len(self.scores) > 1 else None


def _mean(values: Sequence[float]) -> float:
    """
    >>> _mean([0.5, 1.0]), _mean([math.inf, -math.inf]), _mean([1.7e308, 1.7e308])
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


def load(folder: Path, experiment: Experiment) -> Result:
    found = sheet(folder / ROUNDS)
    if found.lost:
        many = f"{found.lost} damaged line{'s' * (found.lost > 1)}"
        raise RunError(f"{found.path}: {many}; `fedshift report {folder}` shows the others")
    known = sum(sum(found.column(part)) for part in PARTS)
    scores = found.column(column(experiment))
    if not scores or not math.isfinite(known):
        missing = "no evaluated round" if not scores else "no finite number of uploaded bytes"
        raise RunError(f"{found.path}: damaged: it contains {missing}")
    return result(experiment, scores, found.uploaded())


def result(experiment: Experiment, scores: Sequence[float], sent: Uploaded) -> Result:
    """Of the scores of all evaluated rounds."""
    return Result(experiment, _mean(scores[-WINDOW:]), scores[-1], int(sent.up.sum()), sent.estimate)


def rows(results: Sequence[Result], of: Sequence[Experiment] = ()) -> list[Row]:
    """One for each setting of these runs; `of` are all runs there should be, where some have failed."""
    varying, kinds = apart([result.experiment for result in results], of)
    grouped: dict[tuple[str, ...], list[Result]] = {}
    for result, kind in zip(results, kinds, strict=True):
        grouped.setdefault(kind, []).append(result)
    made = [
        Row(
            label(comparable(members[0].experiment), varying),
            {result.experiment.seed: result.score for result in members},
            _mean([result.last for result in members]),
            statistics.fmean(result.bytes_up for result in members),
            experiment=members[0].experiment,
        )
        for members in grouped.values()
    ]
    return [_compared(row, made) for row in made]


def apart(experiments: Sequence[Experiment], of: Sequence[Experiment] = ()) -> tuple[list[str], list[tuple[str, ...]]]:
    """The settings but the seed in which runs differ, and the values of each run: those alike are of one kind."""
    varying = _varying(of or experiments)
    return varying, [tuple(str(flat.get(key)) for key in varying) for flat in map(comparable, experiments)]


def comparable(experiment: Experiment) -> dict[str, Any]:
    """Settings by dotted name, with the shift's rule as one setting and without settings that have no effect.

    >>> found = comparable(Experiment(shift={"on": True, "per": "filter"}))
    >>> {key: value for key, value in found.items() if key.startswith("shift.")}
    {'shift.on': 'per filter', 'shift.share': 1.0, 'shift.warmup': 0, 'shift.tensors': None}
    >>> found = comparable(Experiment(shift={"on": False, "max_share": 0.25}))
    >>> {key: value for key, value in found.items() if key.startswith("shift.")}
    {'shift.on': 'no'}
    """
    flat, shift = dotted(experiment.model_dump()), experiment.shift
    unused = {"shift.per"} | ({"shift.max_share"} if shift.share != "uploads" else set())
    if not shift.on:
        unused = {key for key in flat if key.startswith("shift.")}
    rule = {"shift.on": f"per {shift.per}" if shift.on else "no"}
    return {key: value for key, value in (flat | rule).items() if key in rule or key not in unused}


def label(flat: Mapping[str, Any], keys: Iterable[str]) -> dict[str, str]:
    """Settings as text, '-' for one that a run does not have."""
    return {key: shown(flat[key]) if key in flat else "-" for key in keys}


def _compared(row: Row, others: Sequence[Row]) -> Row:
    """A shifted row with the same without the shift, one of few bits with the same of 32."""
    for key, plain, against in (("shift.on", {"no"}, "no shift"), ("uplink.bits", {"32"}, "32 bits")):
        if key in row.label and set(row.label[key].split("+")) != plain:  # '32+32+32' is 32 bits, too
            free = "shift." if key == "shift.on" else key  # a run without shift has no settings of one
            base = _base(row, [other for other in others if set(other.label[key].split("+")) == plain], free)
            if base is not None:
                gain, verdict = difference(row.scores, base.scores)
                return row._replace(against=against, gain=gain, verdict=verdict)
    return row


def _base(row: Row, others: Sequence[Row], free: str) -> Row | None:
    """The row that agrees in all settings but the free ones, or else in all of them that scores depend on."""
    for prefixes in ((free,), (free, *NEUTRAL)):
        for other in others:
            if _but(other.label, prefixes) == _but(row.label, prefixes):
                return other
    return None


def _but(label: Mapping[str, str], prefixes: tuple[str, ...]) -> dict[str, str]:
    return {key: value for key, value in label.items() if not key.startswith(prefixes)}


def difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[float, str]:
    """Mean difference over the seeds both have, and whether chance alone could explain it (paired t, 95 %).

    >>> difference({0: 0.9, 1: 0.8, 2: 0.9}, {0: 0.8, 1: 0.7, 2: 0.81})[1]
    ''
    >>> difference({0: 0.9, 1: 0.8}, {0: 0.8, 1: 0.9})[1]
    'within noise'
    """
    seeds = sorted(ours.keys() & theirs.keys())
    if not seeds:
        return _mean([*ours.values()]) - _mean([*theirs.values()]), "no seed in common"
    differences = [ours[seed] - theirs[seed] for seed in seeds]
    gain = _mean(differences)
    if not math.isfinite(gain):
        return gain, "no number"
    if len(seeds) == 1:
        return gain, "one seed: noise unknown"
    t = T95[min(len(seeds) - 2, len(T95) - 1)]  # of more seeds it is smaller: rather noise than a finding
    noise = t * _deviation(differences) / math.sqrt(len(seeds))
    return gain, "within noise" if abs(gain) <= noise else ""


def table(made: Sequence[Row], experiment: Experiment, title: str = "", width: int | None = None) -> Table:
    """One row per setting; where the settings' own columns do not fit the width, they share one column."""
    labels = [list(row.label.values()) for row in made]
    wide = _drawn(made, experiment, title, list(words(made[0].label).values()), labels)
    for settings in wide.columns[: len(made[0].label)]:  # if they wrap, they do so within words
        settings.no_wrap = True
    roomy = Console(width=1000)
    if width is None or Measurement.get(roomy, roomy.options, wide).minimum <= width:
        return wide
    named = [[" ".join(f"{word}={row.label[key]}" for key, word in words(row.label).items())] for row in made]
    narrow = _drawn(made, experiment, title, ["settings"], named)
    for figures in narrow.columns[1:]:  # give settings the width that figures do not need
        figures.header = str(figures.header).replace("last round", "last\nround")
        figures.max_width = 16
    return narrow


def _drawn(
    made: Sequence[Row], experiment: Experiment, title: str, heads: Sequence[str], labels: Sequence[Sequence[str]]
) -> Table:
    seeds = sorted({seed for row in made for seed in row.scores})
    listed = f"{len(seeds)} seeds" if len(seeds) > 5 else f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    about = f"{experiment.train.rounds} rounds, {listed}"
    drawn = Table(
        title=f"{printable(title)}: {about}" if title else about,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
    )
    for head in heads:
        drawn.add_column(printable(head), overflow="fold")
    metrics = list(dict.fromkeys(printable(metric(row.experiment)) for row in made))
    for name in (metrics[0] if len(metrics) == 1 else "score", "last round", "MB up"):
        drawn.add_column(name, justify="right", no_wrap=True)
    compared = any(row.gain is not None for row in made)
    if compared:
        drawn.add_column("difference", overflow="fold", min_width=len("-10.0 against 32"))
    for row, label in zip(made, labels, strict=True):
        show = partial(scored, experiment=row.experiment)
        spread = "" if row.spread is None else f" ± {show(row.spread)}"
        which = f"{metric(row.experiment)} " if len(metrics) > 1 else ""
        cells = [*label, f"{which}{show(row.mean)}{spread}", show(row.last), f"{row.bytes_up / 1e6:.2f}"]
        drawn.add_row(*map(printable, cells), *([told(row, row.experiment)] if compared else []))
    return drawn


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


def told(row: Row, experiment: Experiment) -> str:
    """A row's difference, in points of accuracy or as large as a metric of one's own has it."""
    if row.gain is None:
        return ""
    verdict = f" ({row.verdict})" if row.verdict else ""
    much = f"{100 * row.gain:+.1f}" if experiment.train.metric == "accuracy" else f"{row.gain:+.4g}"
    return f"{much}{quality(row.gain, experiment)} against {row.against}{verdict}"


def quality(gain: float, experiment: Experiment) -> str:
    """Meaning of a difference where its sign could be misread: for metrics that are minimised.

    >>> quality(0.1, Experiment(train={"metric": "mine:mae"})), quality(0.1, Experiment())
    (' (worse)', '')
    """
    if not experiment.train.lower or not gain or math.isnan(gain):
        return ""
    return " (worse)" if gain > 0 else " (better)"


def sentences(made: Sequence[Row]) -> list[str]:
    """What the few bits cost and what the shift gave back, where the runs tell."""
    compared = [(row, row.gain) for row in made if row.gain is not None and math.isfinite(row.gain)]
    keys = dict.fromkeys(key for row, _ in compared for key in row.label if key not in ("shift.on", "uplink.bits"))
    named = words(key for key in keys if len({row.label.get(key) for row, _ in compared}) > 1)
    return [_sentence(row, gain, named) for row, gain in compared]


def _sentence(row: Row, gain: float, named: Mapping[str, str]) -> str:
    """One comparison; `named` are the further settings in which the comparisons differ, and their names."""
    verdict = f" ({row.verdict})" if row.verdict else ""
    bits = row.label.get("uplink.bits", "")
    subject, rest = (f"The shift {row.label.get('shift.on', '')}", f" at {bits} bits" if bits else "")
    if row.against == "32 bits":
        subject, rest = f"{bits} bits", " against 32"
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
    bits, groups = experiment.uplink.bits, experiment.uplink.group.values()
    every = bits.split("+") if isinstance(bits, str) else [bits] if isinstance(bits, int) else bits
    return any(int(one) < 32 for one in (*every, *(group.bits for group in groups)))


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

    Runs that were given names which end in their seed keep those, whatever runs are beside them.
    """
    runs = list(experiments)
    if all(one.name.endswith(f"_seed-{one.seed}") for one in runs):
        return [one.name for one in runs]
    varying = _varying(runs)
    short = {key: "shift" if key == "shift.on" else key.rpartition(".")[2] for key in varying}
    named = {key: key if list(short.values()).count(name) > 1 else name for key, name in short.items()}
    joined, exact = [], []
    for one in runs:
        flat = comparable(one)
        parts = [f"{named[key]}-{_slug(shown(flat[key]))}" for key in varying if key in flat]
        joined.append("_".join([*parts, f"seed-{one.seed}"])[:200])
        settings = [item for item in sorted(dotted(one.model_dump()).items()) if item not in LATER.items()]
        exact.append(f"{zlib.crc32(str(settings).encode()):08x}")
    return [f"{name}_{crc}" if joined.count(name) > 1 else name for name, crc in zip(joined, exact, strict=True)]


def _varying(experiments: Sequence[Experiment]) -> list[str]:
    """The settings but seed and name in which runs differ.

    Settings of the shift count only among runs that have them, and its share only where it is not each rule's default.
    """
    flat = [comparable(one) for one in experiments]
    shifts = [one.shift for one in experiments if one.shift.on]
    usual = all(shift.share == Shift(per=shift.per).share for shift in shifts)
    found = []
    for key in dict.fromkeys(key for one in flat for key in one):
        values = {str(one.get(key)) for one in flat if key in one or not key.startswith("shift.")}
        if len(values) > 1 and key not in ("seed", "name") and not (usual and key == "shift.share"):
            found.append(key)
    return found


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c in "+.-" else "-" for c in text)
