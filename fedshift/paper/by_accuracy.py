"""Claims about accuracy. A score is the mean of the last ten rounds; a difference is over the seeds both sides have."""

from collections.abc import Callable, Iterator, Sequence

from fedshift.experiment.rates import said
from fedshift.paper.experiments import TITLES, Cell, dirichlet, mixed
from fedshift.paper.published import ALPHAS, BITS
from fedshift.paper.records import Results
from fedshift.paper.uplinks import Upload, changes
from fedshift.runs.summary import ONE_SEED, difference

NAMES = ("fedpaq", "fedef", "fedprox", "scaffold")
ALIKE = 2.0  # points between the best and the worst of what is called alike
FAILED = 10.0  # points that a training which fails loses, at least
Told = tuple[str, str] | None  # yes or no, and the figures; None where it was not tested


def pairs() -> Iterator[tuple[Cell, Cell]]:
    """Every cell of both tables, without and with the shift."""
    for name in NAMES:
        yield from ((mixed(name, bits, False), mixed(name, bits, True)) for bits in BITS)
    for quantizer in ("kmeans", "uniform"):
        for alpha in ALPHAS:
            for bits in BITS:
                yield dirichlet(quantizer, alpha, bits, False), dirichlet(quantizer, alpha, bits, True)


def shift_helps(results: Results) -> Told:
    """Yes when the mean gain is above zero in every cell that was run; a paired t-test tells which could be chance."""
    gains = {}
    for plain, shifted in pairs():
        before, after = results.scores(plain), results.scores(shifted)
        if before and after:
            gains[shifted] = difference(after, before)
    if not gains:
        return None
    least, most = (pick(gains, key=lambda cell: gains[cell][0]) for pick in (min, max))
    helped = sum(gain > 0 for gain, _ in gains.values())
    noisy = sum(verdict == "within noise" for _, verdict in gains.values())
    single = sum(verdict == ONE_SEED for _, verdict in gains.values())
    why = f"it gains in {helped} of the {len(gains)} cells run (the tables have {len(list(pairs()))}): from "
    why += f"{gains[least][0]:+.1f} ({told(least)}) to {gains[most][0]:+.1f} points ({told(most)})"
    why += f"; {noisy} within noise, {single} of one seed"
    return yes(helped == len(gains)), why


def more_bits(results: Results) -> Told:
    """Yes when in every row the rise from 4 to 8 bits is above zero, that from 7 to 8 below half of it or a point."""
    rows = []
    for name in NAMES:
        for shift in (False, True):
            at = {bits: results.mean(mixed(name, bits, shift)) for bits in (4, 7, 8)}
            if (four := at[4]) is not None and (seven := at[7]) is not None and (eight := at[8]) is not None:
                rise, end = eight - four, eight - seven
                rows.append(
                    (f"{TITLES[name]}{' shifted' * shift} {rise:+.1f}, {end:+.1f}", rise > 0 and end < max(1, rise / 2))
                )
    if not rows:
        return None
    return yes(
        all(ok for _, ok in rows)
    ), f"from 4 to 8 bits and of that from 7 to 8: {'; '.join(text for text, _ in rows)}"


def five_bits(results: Results) -> Told:
    """Yes when FedPAQ at 32+5 bits with the shift is above FedAvg at 32+32."""
    ours, theirs = results.scores(mixed("fedpaq", 5, True)), results.scores(mixed("fedavg", 32, False))
    if not ours or not theirs:
        return None
    gain, verdict = difference(ours, theirs)
    means = (sum(scores.values()) / len(scores) for scores in (ours, theirs))
    why = "FedPAQ 32+5 with the shift {:.1f}, FedAvg 32+32 {:.1f}".format(*means)
    return yes(gain > 0), f"{why}: {gain:+.1f} points{noise(verdict)}"


def _ranked(results: Results, bits: int) -> dict[str, float] | None:
    """Every algorithm without the shift; None where one was not run."""
    found = {name: results.mean(mixed(name, bits, False)) for name in NAMES}
    scores = {name: score for name, score in found.items() if score is not None}
    return scores if len(scores) == len(NAMES) else None


def _placed(results: Results, bits: Sequence[int], pick: Callable[..., str], name: str) -> Told:
    """Whether an algorithm is the lowest, or the best, at each of these bits."""
    ranked = {n: scores for n in bits if (scores := _ranked(results, n))}
    if not ranked:
        return None
    found = {n: pick(scores, key=lambda one: scores[one]) for n, scores in ranked.items()}
    why = "; ".join(
        f"32+{n}: " + ", ".join(f"{TITLES[one]} {score:.1f}" for one, score in scores.items())
        for n, scores in ranked.items()
    )
    return yes(all(one == name for one in found.values())), f"without the shift, {why}"


def fedavg_lowest(results: Results) -> Told:
    """Yes when quantized FedAvg, which is FedPAQ, is the lowest of the four without the shift at all bits run."""
    return _placed(results, BITS, min, "fedpaq")


def feedback_best(results: Results) -> Told:
    """Yes when Fed-EF is the best of the four at 4 bits, without the shift."""
    return _placed(results, (4,), max, "fedef")


def scaffold_best(results: Results) -> Told:
    """Yes when SCAFFOLD is the best of the four at 5 to 8 bits, without the shift."""
    return _placed(results, (5, 6, 7, 8), max, "scaffold")


def alike_at_eight(results: Results) -> Told:
    """Yes when the four lie within two points at 8 bits, without the shift."""
    scores = _ranked(results, 8)
    if not scores:
        return None
    apart = max(scores.values()) - min(scores.values())
    return yes(apart <= ALIKE), f"{apart:.1f} points between the best and the worst at 32+8, without the shift"


def uniform_matches(results: Results) -> Told:
    """Yes when uniform codes are at most two points below K-means in every cell of Table 2 from 6 bits on."""
    found = dict(gaps(results, (6, 7, 8)))
    if not found:
        return None
    worst = min(found, key=lambda cell: found[cell])
    why = f"uniform less K-means, {len(found)} cells: the lowest is {found[worst]:+.1f} points ({told(worst)})"
    return yes(found[worst] >= -ALIKE), why


def uniform_fails(results: Results) -> Told:
    """Yes when uniform codes are more than ten points below K-means in every cell of Table 2 at 4 bits."""
    found = dict(gaps(results, (4,)))
    if not found:
        return None
    best = max(found, key=lambda cell: found[cell])
    why = f"uniform less K-means, {len(found)} cells: the highest is {found[best]:+.1f} points ({told(best)})"
    return yes(found[best] < -FAILED), why


def gaps(results: Results, bits: Sequence[int]) -> Iterator[tuple[Cell, float]]:
    for n in bits:
        for alpha in ALPHAS:
            for shift in (False, True):
                uniform, kmeans = (results.scores(dirichlet(q, alpha, n, shift)) for q in ("uniform", "kmeans"))
                if uniform and kmeans:
                    yield dirichlet("uniform", alpha, n, shift), difference(uniform, kmeans)[0]


def advice(results: Results, uploads: Sequence[Upload]) -> Told:
    """Yes when of the two 4-bit K-means is there first on slow links and 8-bit uniform on fast ones, and in Table 2 the
    latter is never more than two points below 8-bit K-means, 4-bit uniform always more than ten below 4-bit K-means.
    """
    two = [one for one in uploads if one.codec in ("Uniform(8)", "KMeans(4)")]
    eight, four = dict(gaps(results, (8,))), dict(gaps(results, (4,)))
    if len(two) < 2 or not eight or not four:
        return None
    turns = changes(two)
    first = [one.codec for _, one in turns] == ["KMeans(4)", "Uniform(8)"]
    least, most = min(eight.values()), max(four.values())
    where = (
        f"K-means is there first below {said(turns[1][0])}" if first else f"{turns[0][1].codec} is first on every link"
    )
    why = f"{where}; 8-bit uniform less 8-bit K-means {least:+.1f} points or more; 4-bit uniform less 4-bit K-means "
    return yes(first and least >= -ALIKE and most < -FAILED), f"{why}{most:+.1f} points or less"


def yes(true: bool) -> str:
    return "yes" if true else "no"


def noise(verdict: str) -> str:
    return f" ({verdict})" if verdict else ""


def told(cell: Cell) -> str:
    """A cell in a sentence."""
    *what, shift = cell.label
    return " ".join(what) + " shifted" * (shift == "yes")
