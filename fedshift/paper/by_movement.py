"""Claims about what goes on in a run: what it predicts, how far models move. All from the last hundred rounds."""

from collections.abc import Callable

from fedshift.paper.by_accuracy import Told, yes
from fedshift.paper.dynamics import early_ratios, layer_ratios, leaning
from fedshift.paper.experiments import mixed
from fedshift.paper.records import Results


def leans(results: Results) -> Told:
    """Yes when the quantized clients' labels, the odd ones, have more than half of the predictions of FedPAQ 32+4."""
    odd = leaning(results, mixed("fedpaq", 4, False))
    return (
        None if odd is None else (yes(odd.above(0.5)), f"they have {odd.percent} % of the predictions of FedPAQ 32+4")
    )


def precision_is_the_cause(results: Results) -> Told:
    """Yes when FedPAQ 32+4 predicts odd labels more often than the control, 32+32: same clients, same draws."""
    mixture, control = leaning(results, mixed("fedpaq", 4, False)), leaning(results, mixed("fedavg", 32, False))
    if mixture is None or control is None:
        return None
    more = mixture.minus(control)
    why = f"odd labels: {mixture.percent} % at 32+4, {control.percent} % at 32+32, which is {more.percent} points more"
    return yes(more.above(0.0)), why


def evens_out(results: Results) -> Told:
    """Yes when the share of odd labels is closer to one half with the shift than without, at 4 bits."""
    plain, shifted = (leaning(results, mixed("fedpaq", 4, shift)) for shift in (False, True))
    if plain is None or shifted is None:
        return None
    closer = abs(shifted.mean - 0.5) < abs(plain.mean - 0.5)
    return yes(closer), f"odd labels: {plain.percent} % without, {shifted.percent} % with the shift, at 32+4"


def smaller(figure: str) -> Callable[[Results], Told]:
    """Whether a figure is smaller with the shift, in every layer, at 4 and 8 bits."""

    def claim(results: Results) -> Told:
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


def mean_to_zero(results: Results) -> Told:
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
