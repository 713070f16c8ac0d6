"""The paper's claims, each answered from the records: yes, no or not tested, with figures.

The first line of each function is the criterion for a yes. If some cells of a claim were not run, the answer is based
on the others, and the figures show which ones.

A score is the mean of the last ten rounds; a difference is over the seeds that both sides have. Claims about
predictions and about the movement of models are answered from the last hundred rounds.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fedshift.core.tables import Listing
from fedshift.core.units import rate_text
from fedshift.paper.dynamics import early_ratios, late_odd_share, layer_ratios
from fedshift.paper.experiments import TITLES, Cell, dirichlet, mixed
from fedshift.paper.published import ALPHAS, BITS
from fedshift.paper.records import Results
from fedshift.paper.uplinks import CodecUpload, changes
from fedshift.runs.summary import ONE_SEED, difference

NOT_TESTED = "not tested"
ADVICE = "advice: 8-bit uniform on fast links, 4-bit K-means on slow ones"  # needs measured codecs
NAMES = ("fedpaq", "fedef", "fedprox", "scaffold")
HELPED = 0.05  # points: smallest gain that is printed as more than +0.0
SIMILAR = 2.0  # points: largest difference of scores that count as similar
FAILED = 10.0  # points: smallest loss that counts as a failed training
Verdict = tuple[str, str] | None  # yes or no, and the figures; None if it was not tested


class Answer(NamedTuple):
    claim: str
    answer: str  # yes, no, not tested
    why: str = ""


def pairs() -> Iterator[tuple[Cell, Cell]]:
    """Every cell of both tables, without and with the shift."""
    for name in NAMES:
        yield from ((mixed(name, bits, False), mixed(name, bits, True)) for bits in BITS)
    for quantizer in ("kmeans", "uniform"):
        for alpha in ALPHAS:
            for bits in BITS:
                yield dirichlet(quantizer, alpha, bits, False), dirichlet(quantizer, alpha, bits, True)


def shift_helps(results: Results) -> Verdict:
    """Criterion: the mean gain is at least 0.05 points, so that it is not printed as +0.0, in every cell that was run;
    a paired t-test marks gains within noise.
    """
    gains = {}
    for plain, shifted in pairs():
        before, after = results.scores(plain), results.scores(shifted)
        if before and after:
            gains[shifted] = difference(after, before)
    if not gains:
        return None
    least, most = (pick(gains, key=lambda cell: gains[cell][0]) for pick in (min, max))
    helped = sum(gain >= HELPED for gain, _ in gains.values())
    noisy = sum(verdict == "within noise" for _, verdict in gains.values())
    single = sum(verdict == ONE_SEED for _, verdict in gains.values())
    why = f"gain in {helped} of {len(gains)} cells run (of {len(list(pairs()))} in the tables): from "
    why += f"{gains[least][0]:+.1f} ({cell_text(least)}) to {gains[most][0]:+.1f} points ({cell_text(most)})"
    why += f"; {noisy} within noise, {single} with one seed"
    return yes(helped == len(gains)), why


def more_bits(results: Results) -> Verdict:
    """Criterion: in every row, accuracy rises from 4 to 8 bits, and from 7 to 8 by less than half of that or less than
    one point.
    """
    rows = []
    for name in NAMES:
        for shift in (False, True):
            at = {bits: results.mean(mixed(name, bits, shift)) for bits in (4, 7, 8)}
            if (four := at[4]) is not None and (seven := at[7]) is not None and (eight := at[8]) is not None:
                rise, end = eight - four, eight - seven
                rows.append(
                    (
                        f"{TITLES[name]}{' with shift' * shift} {rise:+.1f}, {end:+.1f}",
                        rise > 0 and end < max(1, rise / 2),
                    )
                )
    if not rows:
        return None
    why = f"rise from 4 to 8 bits, and from 7 to 8: {'; '.join(text for text, _ in rows)}"
    return yes(all(ok for _, ok in rows)), why


def five_bits(results: Results) -> Verdict:
    """Criterion: FedPAQ at 32+5 bits with the shift is above FedAvg at 32+32."""
    ours, theirs = results.scores(mixed("fedpaq", 5, True)), results.scores(mixed("fedavg", 32, False))
    if not ours or not theirs:
        return None
    gain, verdict = difference(ours, theirs)
    means = (sum(scores.values()) / len(scores) for scores in (ours, theirs))
    why = "FedPAQ 32+5 with the shift {:.1f}, FedAvg 32+32 {:.1f}".format(*means)
    return yes(gain > 0), f"{why}: {gain:+.1f} points{noise(verdict)}"


def _ranked(results: Results, bits: int) -> dict[str, float] | None:
    """Scores of all algorithms without the shift; None if one was not run."""
    found = {name: results.mean(mixed(name, bits, False)) for name in NAMES}
    scores = {name: score for name, score in found.items() if score is not None}
    return scores if len(scores) == len(NAMES) else None


def _placed(results: Results, bits: Sequence[int], pick: Callable[..., str], name: str) -> Verdict:
    """Criterion: an algorithm is the lowest, or the best, at each of these bits."""
    ranked = {n: scores for n in bits if (scores := _ranked(results, n))}
    if not ranked:
        return None
    found = {n: pick(scores, key=lambda algorithm: scores[algorithm]) for n, scores in ranked.items()}
    why = "; ".join(
        f"32+{n}: " + ", ".join(f"{TITLES[algorithm]} {score:.1f}" for algorithm, score in scores.items())
        for n, scores in ranked.items()
    )
    return yes(all(algorithm == name for algorithm in found.values())), f"without the shift, {why}"


def fedavg_lowest(results: Results) -> Verdict:
    """Criterion: quantized FedAvg (FedPAQ) is the lowest of the four without the shift at all bits that were run."""
    return _placed(results, BITS, min, "fedpaq")


def feedback_best(results: Results) -> Verdict:
    """Criterion: Fed-EF is the best of the four at 4 bits, without the shift."""
    return _placed(results, (4,), max, "fedef")


def scaffold_best(results: Results) -> Verdict:
    """Criterion: SCAFFOLD is the best of the four at 5 to 8 bits, without the shift."""
    return _placed(results, (5, 6, 7, 8), max, "scaffold")


def similar_at_eight(results: Results) -> Verdict:
    """Criterion: the four are within two points at 8 bits, without the shift."""
    scores = _ranked(results, 8)
    if not scores:
        return None
    spread = max(scores.values()) - min(scores.values())
    return yes(spread <= SIMILAR), f"{spread:.1f} points between the best and the worst at 32+8, without the shift"


def uniform_matches(results: Results) -> Verdict:
    """Criterion: uniform codes are at most two points below K-means in every cell of Table 2 with 6 bits or more."""
    found = dict(gaps(results, (6, 7, 8)))
    if not found:
        return None
    worst = min(found, key=lambda cell: found[cell])
    why = f"uniform minus K-means, {len(found)} cells: lowest {found[worst]:+.1f} points ({cell_text(worst)})"
    return yes(found[worst] >= -SIMILAR), why


def uniform_fails(results: Results) -> Verdict:
    """Criterion: uniform codes are more than ten points below K-means in every cell of Table 2 at 4 bits."""
    found = dict(gaps(results, (4,)))
    if not found:
        return None
    best = max(found, key=lambda cell: found[cell])
    why = f"uniform minus K-means, {len(found)} cells: highest {found[best]:+.1f} points ({cell_text(best)})"
    return yes(found[best] < -FAILED), why


def gaps(results: Results, bits: Sequence[int]) -> Iterator[tuple[Cell, float]]:
    """Scores of uniform codes minus those of K-means, per cell of Table 2."""
    for n in bits:
        for alpha in ALPHAS:
            for shift in (False, True):
                uniform, kmeans = (results.scores(dirichlet(q, alpha, n, shift)) for q in ("uniform", "kmeans"))
                if uniform and kmeans:
                    yield dirichlet("uniform", alpha, n, shift), difference(uniform, kmeans)[0]


def advice(results: Results, uploads: Sequence[CodecUpload]) -> Verdict:
    """Criterion: of the two, 4-bit K-means arrives first on slow links, 8-bit uniform on fast ones; in Table 2, 8-bit
    uniform is at most two points below 8-bit K-means, and 4-bit uniform more than ten below 4-bit K-means.
    """
    two = [upload for upload in uploads if upload.codec in ("Uniform(8)", "KMeans(4)")]
    eight, four = dict(gaps(results, (8,))), dict(gaps(results, (4,)))
    if len(two) < 2 or not eight or not four:
        return None
    turns = changes(two)
    first = [upload.codec for _, upload in turns] == ["KMeans(4)", "Uniform(8)"]
    least, most = min(eight.values()), max(four.values())
    where = (
        f"4-bit K-means arrives first below {rate_text(turns[1][0])}"
        if first
        else f"{turns[0][1].codec} arrives first on every link"
    )
    why = f"{where}; uniform minus K-means: at 8 bits at least {least:+.1f}, at 4 bits at most {most:+.1f} points"
    return yes(first and least >= -SIMILAR and most < -FAILED), why


def yes(true: bool) -> str:
    return "yes" if true else "no"


def noise(verdict: str) -> str:
    return f" ({verdict})" if verdict else ""


def cell_text(cell: Cell) -> str:
    """Name of a cell in a sentence.

    >>> cell_text(mixed("fedpaq", 4, True))
    'FedPAQ 32+4 with shift'
    """
    *parts, shift = cell.label
    return " ".join(parts) + " with shift" * (shift == "yes")


def biased(results: Results) -> Verdict:
    """Criterion: odd labels, those of quantized clients, are more than half of the predictions of FedPAQ 32+4."""
    odd = late_odd_share(results, mixed("fedpaq", 4, False))
    return (
        None if odd is None else (yes(odd.above(0.5)), f"odd labels: {odd.percent} % of the predictions of FedPAQ 32+4")
    )


def precision_is_the_cause(results: Results) -> Verdict:
    """Criterion: FedPAQ 32+4 predicts odd labels more often than the control, 32+32 with the same clients and draws."""
    mixture, control = (
        late_odd_share(results, mixed("fedpaq", 4, False)),
        late_odd_share(results, mixed("fedavg", 32, False)),
    )
    if mixture is None or control is None:
        return None
    more = mixture.minus(control)
    why = f"odd labels: {mixture.percent} % at 32+4, {control.percent} % at 32+32, difference {more.percent} points"
    return yes(more.above(0.0)), why


def balanced(results: Results) -> Verdict:
    """Criterion: at 4 bits, the share of odd labels is closer to one half with the shift than without."""
    plain, shifted = (late_odd_share(results, mixed("fedpaq", 4, shift)) for shift in (False, True))
    if plain is None or shifted is None:
        return None
    closer = abs(shifted.mean - 0.5) < abs(plain.mean - 0.5)
    return yes(closer), f"odd labels: {plain.percent} % without, {shifted.percent} % with the shift, at 32+4"


def smaller(figure: str) -> Callable[[Results], Verdict]:
    """Claim with the criterion: a figure is smaller with the shift, in every layer, at 4 and 8 bits."""

    def claim(results: Results) -> Verdict:
        ratios = {
            bits: found
            for bits in (4, 8)
            if (found := layer_ratios(results, figure, mixed("fedpaq", bits, False), mixed("fedpaq", bits, True)))
        }
        if not ratios:
            return None
        texts = [
            f"32+{bits}: " + ", ".join(f"{layer} {ratio:.2f}" for layer, ratio in found.items())
            for bits, found in ratios.items()
        ]
        fine = all(ratio < 1 for found in ratios.values() for ratio in found.values())
        return yes(fine), f"ratio with / without the shift, mean of the last hundred rounds; {'; '.join(texts)}"

    return claim


def mean_to_zero(results: Results) -> Verdict:
    """Criterion: with the shift at 4 bits, the absolute mean of every layer over the last hundred rounds is less than
    half of that without the shift, and smaller than over the first hundred rounds.
    """
    plain, shifted = mixed("fedpaq", 4, False), mixed("fedpaq", 4, True)
    against = layer_ratios(results, "mean_after", plain, shifted)
    since = early_ratios(results, "mean_after", shifted)
    if not against or not since:
        return None
    texts = ", ".join(f"{layer} {against[layer]:.2f}, {since[layer]:.2f}" for layer in against)
    why = "absolute mean over the last hundred rounds, divided by that without the shift, and by that over the first "
    why += f"hundred rounds: {texts}"
    return yes(max(against.values()) < 0.5 and max(since.values()) < 1), why


CLAIMS: list[tuple[str, Callable[[Results], Verdict]]] = [
    ("the shift helps in every cell", shift_helps),
    ("accuracy rises with bits, then saturates", more_bits),
    ("5-bit FedShift beats full-precision FedAvg", five_bits),
    ("FedAvg has the lowest accuracy", fedavg_lowest),
    ("Fed-EF is best at 4 bits", feedback_best),
    ("SCAFFOLD is best at 5 to 8 bits", scaffold_best),
    ("all algorithms are similar at 8 bits", similar_at_eight),
    ("predictions are biased towards the labels of quantized clients", biased),
    ("mixed precision is the cause of this bias", precision_is_the_cause),
    ("the shift balances predictions", balanced),
    ("the shift reduces divergence between rounds", smaller("step")),
    ("the shift reduces client drift", smaller("drift")),
    ("with the shift, mean weights approach zero", mean_to_zero),
    ("uniform matches K-means from 6 bits", uniform_matches),
    ("uniform fails at 4 bits", uniform_fails),
]


def answers(results: Results, uploads: Sequence[CodecUpload] = ()) -> list[Answer]:
    """Answers to all claims; `uploads` are the measured codecs."""
    found = [Answer(claim, *(function(results) or (NOT_TESTED,))) for claim, function in CLAIMS]
    verdict = advice(results, uploads) or (NOT_TESTED,)
    return [*found, Answer(ADVICE, *verdict)]


def listing(found: Sequence[Answer]) -> Listing:
    return Listing("The paper's claims", ("claim", "answer", "figures"), list(map(tuple, found)), 3)
