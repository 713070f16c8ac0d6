"""The paper's claims, each answered from the records: yes, no or not tested, with the figures beside it.

Each function says in its first line what makes the answer a yes. Where some of a claim's cells were not run, the others
answer it, and the figures show which they are.

A score is the mean of the last ten rounds; a difference is over the seeds both sides have. Claims about what a run
predicts and how far models move are answered from its last hundred rounds.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from fedshift.core.tables import Listing
from fedshift.core.units import rate_text
from fedshift.paper.dynamics import early_ratios, layer_ratios, leaning
from fedshift.paper.experiments import TITLES, Cell, dirichlet, mixed
from fedshift.paper.published import ALPHAS, BITS
from fedshift.paper.records import Results
from fedshift.paper.uplinks import CodecUpload, changes
from fedshift.runs.summary import ONE_SEED, difference

NOT_TESTED = "not tested"
NAMES = ("fedpaq", "fedef", "fedprox", "scaffold")
ALIKE = 2.0  # points between the best and the worst of what is called alike
FAILED = 10.0  # points that a training which fails loses, at least
Verdict = tuple[str, str] | None  # yes or no, and the figures; None where it was not tested


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
    why += f"{gains[least][0]:+.1f} ({cell_text(least)}) to {gains[most][0]:+.1f} points ({cell_text(most)})"
    why += f"; {noisy} within noise, {single} of one seed"
    return yes(helped == len(gains)), why


def more_bits(results: Results) -> Verdict:
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


def five_bits(results: Results) -> Verdict:
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


def _placed(results: Results, bits: Sequence[int], pick: Callable[..., str], name: str) -> Verdict:
    """Yes when an algorithm is the lowest, or the best, at each of these bits."""
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
    """Yes when quantized FedAvg, which is FedPAQ, is the lowest of the four without the shift at all bits run."""
    return _placed(results, BITS, min, "fedpaq")


def feedback_best(results: Results) -> Verdict:
    """Yes when Fed-EF is the best of the four at 4 bits, without the shift."""
    return _placed(results, (4,), max, "fedef")


def scaffold_best(results: Results) -> Verdict:
    """Yes when SCAFFOLD is the best of the four at 5 to 8 bits, without the shift."""
    return _placed(results, (5, 6, 7, 8), max, "scaffold")


def alike_at_eight(results: Results) -> Verdict:
    """Yes when the four lie within two points at 8 bits, without the shift."""
    scores = _ranked(results, 8)
    if not scores:
        return None
    apart = max(scores.values()) - min(scores.values())
    return yes(apart <= ALIKE), f"{apart:.1f} points between the best and the worst at 32+8, without the shift"


def uniform_matches(results: Results) -> Verdict:
    """Yes when uniform codes are at most two points below K-means in every cell of Table 2 from 6 bits on."""
    found = dict(gaps(results, (6, 7, 8)))
    if not found:
        return None
    worst = min(found, key=lambda cell: found[cell])
    why = f"uniform less K-means, {len(found)} cells: the lowest is {found[worst]:+.1f} points ({cell_text(worst)})"
    return yes(found[worst] >= -ALIKE), why


def uniform_fails(results: Results) -> Verdict:
    """Yes when uniform codes are more than ten points below K-means in every cell of Table 2 at 4 bits."""
    found = dict(gaps(results, (4,)))
    if not found:
        return None
    best = max(found, key=lambda cell: found[cell])
    why = f"uniform less K-means, {len(found)} cells: the highest is {found[best]:+.1f} points ({cell_text(best)})"
    return yes(found[best] < -FAILED), why


def gaps(results: Results, bits: Sequence[int]) -> Iterator[tuple[Cell, float]]:
    for n in bits:
        for alpha in ALPHAS:
            for shift in (False, True):
                uniform, kmeans = (results.scores(dirichlet(q, alpha, n, shift)) for q in ("uniform", "kmeans"))
                if uniform and kmeans:
                    yield dirichlet("uniform", alpha, n, shift), difference(uniform, kmeans)[0]


def advice(results: Results, uploads: Sequence[CodecUpload]) -> Verdict:
    """Yes when of the two 4-bit K-means is there first on slow links and 8-bit uniform on fast ones, and in Table 2 the
    latter is never more than two points below 8-bit K-means, 4-bit uniform always more than ten below 4-bit K-means.
    """
    two = [upload for upload in uploads if upload.codec in ("Uniform(8)", "KMeans(4)")]
    eight, four = dict(gaps(results, (8,))), dict(gaps(results, (4,)))
    if len(two) < 2 or not eight or not four:
        return None
    turns = changes(two)
    first = [upload.codec for _, upload in turns] == ["KMeans(4)", "Uniform(8)"]
    least, most = min(eight.values()), max(four.values())
    where = (
        f"K-means is there first below {rate_text(turns[1][0])}"
        if first
        else f"{turns[0][1].codec} is first on every link"
    )
    why = f"{where}; 8-bit uniform less 8-bit K-means {least:+.1f} points or more; 4-bit uniform less 4-bit K-means "
    return yes(first and least >= -ALIKE and most < -FAILED), f"{why}{most:+.1f} points or less"


def yes(true: bool) -> str:
    return "yes" if true else "no"


def noise(verdict: str) -> str:
    return f" ({verdict})" if verdict else ""


def cell_text(cell: Cell) -> str:
    """A cell in a sentence."""
    *what, shift = cell.label
    return " ".join(what) + " shifted" * (shift == "yes")


def leans(results: Results) -> Verdict:
    """Yes when the quantized clients' labels, the odd ones, have more than half of the predictions of FedPAQ 32+4."""
    odd = leaning(results, mixed("fedpaq", 4, False))
    return (
        None if odd is None else (yes(odd.above(0.5)), f"they have {odd.percent} % of the predictions of FedPAQ 32+4")
    )


def precision_is_the_cause(results: Results) -> Verdict:
    """Yes when FedPAQ 32+4 predicts odd labels more often than the control, 32+32: same clients, same draws."""
    mixture, control = leaning(results, mixed("fedpaq", 4, False)), leaning(results, mixed("fedavg", 32, False))
    if mixture is None or control is None:
        return None
    more = mixture.minus(control)
    why = f"odd labels: {mixture.percent} % at 32+4, {control.percent} % at 32+32, which is {more.percent} points more"
    return yes(more.above(0.0)), why


def evens_out(results: Results) -> Verdict:
    """Yes when the share of odd labels is closer to one half with the shift than without, at 4 bits."""
    plain, shifted = (leaning(results, mixed("fedpaq", 4, shift)) for shift in (False, True))
    if plain is None or shifted is None:
        return None
    closer = abs(shifted.mean - 0.5) < abs(plain.mean - 0.5)
    return yes(closer), f"odd labels: {plain.percent} % without, {shifted.percent} % with the shift, at 32+4"


def smaller(figure: str) -> Callable[[Results], Verdict]:
    """Claim whose answer is yes when a figure is smaller with the shift, in every layer, at 4 and 8 bits."""

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
        return yes(fine), f"with the shift / without, mean of the last hundred rounds, {'; '.join(texts)}"

    return claim


def mean_to_zero(results: Results) -> Verdict:
    """Yes when with the shift, at 4 bits, the mean of every layer is late in the run less than half as large as without
    the shift, and smaller than in the first hundred rounds."""
    plain, shifted = mixed("fedpaq", 4, False), mixed("fedpaq", 4, True)
    against = layer_ratios(results, "mean_after", plain, shifted)
    since = early_ratios(results, "mean_after", shifted)
    if not against or not since:
        return None
    texts = ", ".join(f"{layer} {against[layer]:.2f}, {since[layer]:.2f}" for layer in against)
    why = f"size of the mean late in the run / without the shift, / in its own first hundred rounds: {texts}"
    return yes(max(against.values()) < 0.5 and max(since.values()) < 1), why


CLAIMS: list[tuple[str, Callable[[Results], Verdict]]] = [
    ("the shift helps in every cell", shift_helps),
    ("accuracy rises with bits, then saturates", more_bits),
    ("5-bit FedShift beats full-precision FedAvg", five_bits),
    ("FedAvg is lowest", fedavg_lowest),
    ("Fed-EF is best at 4 bits", feedback_best),
    ("SCAFFOLD is best elsewhere", scaffold_best),
    ("all are alike at 8 bits", alike_at_eight),
    ("predictions lean to the quantized clients' labels", leans),
    ("mixed precision itself is the cause", precision_is_the_cause),
    ("the shift evens predictions out", evens_out),
    ("divergence between rounds shrinks", smaller("step")),
    ("client drift shrinks", smaller("drift")),
    ("the mean weight goes to zero", mean_to_zero),
    ("uniform matches K-means from 6 bits", uniform_matches),
    ("uniform fails at 4 bits", uniform_fails),
]


def answers(results: Results, uploads: Sequence[CodecUpload] = ()) -> list[Answer]:
    """All of them; `uploads` are the codecs as they were measured."""
    made = [Answer(claim, *(function(results) or (NOT_TESTED,))) for claim, function in CLAIMS]
    verdict = advice(results, uploads) or (NOT_TESTED,)
    return [*made, Answer("the advice: 8-bit uniform on good links, 4-bit K-means on poor ones", *verdict)]


def listing(made: Sequence[Answer]) -> Listing:
    return Listing("The paper's claims", ("claim", "answer", "figures"), list(map(tuple, made)), 3)
