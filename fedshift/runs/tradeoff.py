"""Tradeoff of compression: each compressed setting against full precision with the same server rule.

Three comparisons: the difference of the scores, the score of full precision after the same uploaded bytes (that is,
after fewer rounds), and the bytes needed to reach a target.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fedshift.core.units import bytes_text
from fedshift.experiment.settings import Experiment
from fedshift.runs.summary import (
    BITS,
    SHIFT,
    UPLINK,
    WINDOW,
    Paired,
    SummaryRow,
    Trace,
    described,
    mean_of,
    metric,
    paired,
    phrase,
    quality,
    quantized,
    scored,
    signed,
    tasks,
    times,
    words,
)

# allowed losses of score against full precision: in points for accuracy, as a fraction for other metrics
KEPT = 0.005  # of the best choice, as in `fedshift plan`
NEAR = 0.01  # of the target
NAMED = 3  # settings named in one sentence
ANSWERS = 4  # tasks with sentences of their own

Name = Callable[[SummaryRow], str]


class Equal(NamedTuple):
    """Full precision, stopped after the uploaded bytes of a setting."""

    score: float
    gain: Paired  # of the setting over it
    better: bool  # the setting has the better score
    noise: bool  # the difference is within noise


def smooth(scores: Sequence[float]) -> list[float]:
    """Centred moving average of scores: up to five on each side, fewer at the beginning.

    The last value is the final score of the run, the mean of the last ten.

    >>> smooth([1.0, 3.0, 8.0, 6.0])
    [1.0, 4.0, 4.5, 4.5]
    """
    sides = [min(i, WINDOW // 2) for i in range(len(scores))]
    means = [mean_of(scores[i - side : i + side + 1]) for i, side in enumerate(sides)]
    return [*means[:-1], mean_of(scores[-WINDOW:])] if scores else []


def score_at(trace: Trace, sent: float) -> float:
    """Smoothed score of a run after `sent` uploaded bytes, linear between evaluated rounds; NaN before the first.

    >>> run = Trace([1, 2, 3], [100, 200, 300], [0.2, 0.6, 0.7])
    >>> [round(score_at(run, sent), 3) for sent in (99, 100, 150, 300, 999)]
    [nan, 0.2, 0.35, 0.5, 0.5]
    """
    curve = list(zip(trace.bytes_up, smooth(trace.scores), strict=True))
    if not curve or sent < curve[0][0]:
        return math.nan
    for (low, before), (high, after) in itertools.pairwise(curve):
        if low <= sent < high:
            return before + (after - before) * (sent - low) / (high - low)
    return curve[-1][1]


def equal_bytes(row: SummaryRow) -> Equal | None:
    """Full precision with the same server rule at the bytes of this row, seed by seed where both have the seed."""
    if row.full is None or not row.runs:
        return None
    sent = {run.experiment.seed: run.bytes_up for run in row.runs}
    scores = {
        run.experiment.seed: score_at(run.trace, sent.get(run.experiment.seed, row.bytes_up)) for run in row.full.runs
    }
    known = {seed: score for seed, score in scores.items() if math.isfinite(score)}
    if not known:
        return None
    gain = paired(row.scores, known)
    better = gain.gain < 0 if row.experiment.train.lower else gain.gain > 0
    return Equal(mean_of([*known.values()]), gain, better, gain.verdict == "within noise")


def target(full: SummaryRow) -> float:
    """Target score: 1 point of accuracy, or 1 % of another metric, worse than full precision."""
    return worse(full, NEAR)


def worse(full: SummaryRow, loss: float) -> float:
    """Score of full precision less a loss."""
    margin = loss if full.experiment.train.metric == "accuracy" else loss * abs(full.mean)
    return full.mean + margin if full.experiment.train.lower else full.mean - margin


def reaches(score: float, goal: float, experiment: Experiment) -> bool:
    return score <= goal if experiment.train.lower else score >= goal


def bytes_to(row: SummaryRow, goal: float) -> float | None:
    """Uploaded bytes up to the first evaluated round whose smoothed score, mean over seeds, reaches the goal."""
    curves = [
        dict(zip(run.trace.rounds, zip(run.trace.bytes_up, smooth(run.trace.scores), strict=True), strict=True))
        for run in row.runs
    ]
    for number in sorted(set.intersection(*(set(curve) for curve in curves)) if curves else ()):
        sent, scores = zip(*(curve[number] for curve in curves), strict=True)
        if reaches(mean_of(scores), goal, row.experiment):
            return mean_of(sent)
    return None


def answers(table: Sequence[SummaryRow], name: Name | None = None) -> list[str]:
    """Sentences on each task; `name` returns the name of a row."""
    groups = tasks(table)
    sentences: list[str] = []
    for rows in groups[:ANSWERS]:
        first, *rest = about(rows, name or namer(table))
        prefix = f"{task_name(rows[0], groups)}: " if len(groups) > 1 else ""
        sentences += [first if first.startswith(prefix.replace(": ", ", ")) else f"{prefix}{first}", *rest]
    more = len(groups) - ANSWERS
    return sentences + (
        [f"The other {more} combinations of data, model and algorithm are in the report's table."] if more > 0 else []
    )


def namer(table: Sequence[SummaryRow]) -> Name:
    """Names of rows by the settings in which they differ, those of the uplink first and the shift last."""
    keys = sorted(table[0].label if table else (), key=lambda key: (key == SHIFT, key not in (UPLINK, BITS)))
    short = words(keys)

    def name(row: SummaryRow) -> str:
        flat = described(row.experiment)
        return ", ".join(filter(None, (phrase(key, short[key], flat.get(key)) for key in keys))) or phrase(
            UPLINK, "", flat[UPLINK]
        )

    return name


def task_name(row: SummaryRow, groups: Sequence[Sequence[SummaryRow]]) -> str:
    """Name of a task: the data, model, algorithm and metric in which it differs from the others."""
    flats = [described(rows[0].experiment) for rows in groups]
    settings = described(row.experiment)
    differing = [key for key in settings if len({str(flat.get(key)) for flat in flats}) > 1]
    keys = [key for key in differing if key.startswith(("data.", "model.", "algorithm.", "train.metric"))]
    short = words(keys)
    return ", ".join(filter(None, (phrase(key, short[key], settings[key]) for key in keys))) or metric(row.experiment)


def about(rows: Sequence[SummaryRow], name: Name) -> list[str]:
    """Sentences on the rows of one task."""
    finite = [row for row in rows if math.isfinite(row.mean)]
    packed = [row for row in finite if quantized(row.experiment)]
    if not finite:
        return [f"Final scores ({metric(rows[0].experiment)}) are NaN or infinite."]
    if not packed:
        return ["All runs upload in full precision, so there is no compression to judge."]
    judged = [row for row in packed if row.full and math.isfinite(row.full.mean)]
    exact = [row for row in finite if not quantized(row.experiment)]
    sentences = [*_best(judged, exact, name), *_losing(judged, name)] if judged else []
    sentences += _missing([row for row in packed if row.full is None], name)
    return sentences or ["Final scores of full precision are NaN or infinite, so compression cannot be judged."]


def _best(judged: Sequence[SummaryRow], exact: Sequence[SummaryRow], name: Name) -> list[str]:
    """Sentences on the setting with the fewest bytes near full precision or, without one, the best at equal bytes."""
    experiment = judged[0].experiment
    sign = -1 if experiment.train.lower else 1
    best = max(exact, key=lambda row: sign * row.mean)
    pairs = [(row, equal_bytes(row)) for row in judged]
    saving = [(row, equal) for row, equal in pairs if (row.fewer or 0) > 1 and (equal is None or equal.better)]
    near = [(row, equal) for row, equal in saving if reaches(row.mean, worse(best, KEPT), experiment)]
    if near:
        return _sentences(*min(near, key=lambda pair: (pair[0].bytes_up, -sign * pair[0].mean)), name)
    gains = [(row, equal) for row, equal in saving if equal]
    if not saving:
        return ["Compression was not worth it: no setting beats full precision stopped after the same uploaded bytes."]
    margin = "0.5 points" if experiment.train.metric == "accuracy" else "0.5 %"
    full = f"full precision ({_score(best.mean, experiment)})"
    none = f"No compressed setting stays within {margin} of {full} and beats it at equal bytes"
    if not gains:
        return [f"{none}."]
    row, equal = max(gains, key=lambda pair: sign * pair[1].gain.gain)
    first, *rest = _sentences(row, equal, name)
    return [f"{none}; the best setting at equal bytes: {first}", *rest]


def _sentences(row: SummaryRow, equal: Equal | None, name: Name) -> list[str]:
    """Bytes and score of a setting, compared with those of full precision, also at equal bytes."""
    full, cost, experiment = row.full, row.cost, row.experiment
    assert full is not None
    assert cost is not None
    unit = " points" if experiment.train.metric == "accuracy" else quality(cost.gain, experiment)
    verdict = f", {cost.verdict}" if cost.verdict else ""
    sentences = [
        f"{name(row)} uploads {bytes_text(row.bytes_up)} instead of {bytes_text(full.bytes_up)} "
        f"({times(row.fewer)} times fewer) and reaches {_score(row.mean, experiment)} "
        f"(full precision with the same server rule: {_score(full.mean, experiment)}; "
        f"difference {signed(cost.gain, experiment)}{unit}{verdict})."
    ]
    if equal:
        sentences.append(
            f"Full precision stopped after the same uploaded bytes reaches {_score(equal.score, experiment)}."
        )
    goal = target(full)
    sent, full_sent = bytes_to(row, goal), bytes_to(full, goal)
    if sent and full_sent:
        score = f"{_score(goal, experiment)} (full precision {margin_text(experiment)})"
        sentences.append(f"To reach {score} it uploads {bytes_text(sent)}, and full precision {bytes_text(full_sent)}.")
    return sentences


def margin_text(experiment: Experiment) -> str:
    """Difference of the target from the score of full precision."""
    if experiment.train.metric == "accuracy":
        return "less 1 point"
    return "plus 1 %" if experiment.train.lower else "less 1 %"


def _losing(judged: Sequence[SummaryRow], name: Name) -> list[str]:
    """Sentences on settings that are no better than fewer rounds in full precision."""
    lower = [(row, equal) for row in judged if (equal := equal_bytes(row)) and not equal.better]
    verbs = {False: ("loses to", "lose to"), True: ("does not beat", "do not beat")}
    sentences = []
    for noise, verb in verbs.items():
        group = [(row, equal) for row, equal in lower if equal.noise is noise]
        losing = [
            f"{name(row)} ({_score(row.mean, row.experiment)} against {_score(equal.score, row.experiment)})"
            for row, equal in group
        ]
        unknown = any(equal.gain.verdict and not equal.noise for _, equal in group)
        why = "; the difference is within noise" if noise else "; too few seeds to know the noise" if unknown else ""
        if losing:
            rest = f" and {len(losing) - NAMED} more" if len(losing) > NAMED else ""
            sentences.append(
                f"{'; '.join(losing[:NAMED])}{rest} {verb[len(losing) > 1]} simply running fewer rounds in full "
                f"precision (stopped after the same uploaded bytes{why})."
            )
    return sentences


def _missing(alone: Sequence[SummaryRow], name: Name) -> list[str]:
    """Sentence on settings without a full-precision run to compare with, and how to add one."""
    if not alone:
        return []
    bits = alone[0].experiment.uplink.bits
    exact = (
        f"--set uplink.bits={'+'.join(['32'] * len(bits.split('+')))}" if isinstance(bits, str) else "--uplink exact"
    )
    rest = f" and {len(alone) - NAMED} more" if len(alone) > NAMED else ""
    names = "; ".join(map(name, alone[:NAMED]))
    return [
        "There is no finished full-precision run with the same server rule to compare with "
        f"{names}{rest}; add a run with `{exact}` and otherwise the same settings."
    ]


def _score(x: float, experiment: Experiment) -> str:
    if experiment.train.metric == "accuracy":
        return f"{scored(x, experiment)} %"
    return f"{metric(experiment)} {scored(x, experiment)}"
