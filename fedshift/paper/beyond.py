"""Results beyond the paper, on its task: filter centring compared with no shift and with the paper's shift per layer,
uplinks and codecs compared with full precision, and other aggregation rules and server optimizers with FedAvg.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from fedshift.core.tables import Listing
from fedshift.paper.experiments import RIVALS, ROUNDS, TITLES, Cell, Compressed, Contrast, all_quantized, mixed
from fedshift.paper.records import FinishedRun, Results
from fedshift.paper.tables import NOT_RUN
from fedshift.runs import summary
from fedshift.runs.summary import WINDOW

CENTRING_TITLE = "Beyond the paper: filter centring"
REACHED = 68.0  # percent, compared with means of ten rounds
CENTRING_COLUMNS = (
    *("algorithm", "clients", "bits", "seeds", "no shift", "per layer", "per filter"),
    *("gain over no shift", "gain over per layer", f"rounds to {REACHED:g} %"),
)
UPLINKS_TITLE = "Beyond the paper: uplinks"
UPLINKS_NOTE = (
    f"Scores are means of the last ten of {ROUNDS} rounds. Differences are in points, over the seeds that "
    "both settings have: against full precision with the same server rule (the same shift), with single seeds in "
    "brackets and a paired 95 % interval, and against plain FedAvg (full precision, no shift). GB up: uploaded by all "
    "clients in all rounds; GB up and down: including broadcasts. Times fewer bytes: uploaded bytes of full precision "
    "divided by those of the uplink."
)
UPLINKS_COLUMNS = (
    *("uplink", "shift", "seeds", "accuracy", "against the same rule", "95 % interval", "against FedAvg"),
    *("GB up", "times fewer bytes", "GB up and down"),
)
RIVALS_TITLE = "Beyond the paper: other aggregation rules"
RIVALS_NOTE = (
    f"Scores are means of the last ten of {ROUNDS} rounds. Every line has FedPAQ's uploads; only the server's rule and "
    "the shift differ. What a shift adds is the difference from the same rule without a shift, with single seeds in "
    "brackets. Against FedAvg: difference from FedAvg's mean with the same shift, without shift / per layer / per "
    "filter, mean over seeds. Both are in points, over the seeds that both settings have. With one seed, differences "
    "of less than two points may be noise. "
    "Half of the uploads of a round are quantized, so grouped averaging with equal groups is FedAvg; here "
    f"full-precision uploads have the weight {RIVALS['grouped']['exact']:g}. FedHQ weighs an upload by its "
    "quantization error relative to the update, not to the weights that are sent."
)
RIVALS_COLUMNS = (
    *("rule", "bits", "seeds", "no shift", "per layer", "per filter"),
    *("per layer adds", "per filter adds", "against FedAvg"),
)
OPTIMIZERS_TITLE = "Beyond the paper: server optimizers"
OPTIMIZERS_NOTE = (
    "Server optimizers, in full precision and without a shift, with settings that were not tuned on this task. The "
    "difference from FedAvg is in points, over the seeds that both have; rounds to a score are counted as in the "
    "section on filter centring:"
)
OPTIMIZERS_COLUMNS = ("optimizer", "bits", "seeds", "accuracy", "against FedAvg", f"rounds to {REACHED:g} %")

CODECS_TITLE = "Beyond the paper: codecs at one bit"
CODECS_NOTE = (
    "Every codec at about one bit per weight, or the nearest rate of its settings, on updates of all clients, with "
    "filter centring. Scores are means of the last ten of 300 rounds; the difference is in points from full precision "
    "with the same shift, over the same rounds and seeds. Bits per weight are those of the uploads, headers "
    "included. With one or two seeds, differences of less than about a point are within noise."
)
CODECS_COLUMNS = (
    *("codec", "feedback", "seeds", "accuracy", "against full precision"),
    *("bits per weight", "times fewer bytes"),
)


class SeedGains(NamedTuple):
    """Differences paired by seed."""

    gains: list[float]

    @property
    def mean(self) -> str:
        """Mean difference; empty without seeds."""
        return f"{statistics.fmean(self.gains):+.1f}" if self.gains else ""

    @property
    def text(self) -> str:
        """Mean difference, with that of each seed if there are several."""
        each = f" ({', '.join(f'{gain:+.1f}' for gain in self.gains)})" if len(self.gains) > 1 else ""
        return f"{self.mean}{each}"


def paired(ours: Cell, theirs: Cell, results: Results) -> SeedGains:
    """Differences of the scores of two cells over the seeds that both have."""
    a, b = results.scores(ours), results.scores(theirs)
    return SeedGains([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])


def rounds_to(record: FinishedRun, score: float) -> int | None:
    """Last of the first ten successive rounds whose mean is at least this score; None if there are none."""
    scores = record.scores
    means = (statistics.fmean(scores[end - WINDOW : end]) for end in range(WINDOW, len(scores) + 1))
    return next((end for end, mean in enumerate(means, WINDOW) if mean >= score), None)


def reached(cell: Cell, results: Results) -> str:
    """Mean number of rounds to the score over seeds; 'never' if a seed does not reach it."""
    found = [rounds_to(record, REACHED) for record in results.of(cell).values()]
    if not found:
        return NOT_RUN
    known = [rounds for rounds in found if rounds is not None]
    return f"{statistics.fmean(known):.0f}" if len(known) == len(found) else "never"


def centring_sentences(results: Results) -> list[str]:
    """Explanation of the table, and the result with every client quantized."""
    text = [
        f"Scores are means of the last ten of {ROUNDS} rounds. Gains are in points, paired by seed, with single seeds "
        f"in brackets. Rounds to {REACHED:g} %: number of rounds until the mean of the last ten is at least "
        f"{REACHED:g} %, without shift / per layer / per filter, mean over seeds."
    ]
    if scores := results.scores(cell := all_quantized()):
        result = f"{statistics.fmean(scores.values()):.1f} % after {cell.rounds} rounds (n = {len(scores)})"
        text.append(f"All clients at 4 bits, per filter with share 1: {result}.")
    return text


def centring_listing(contrasts: Sequence[Contrast], results: Results) -> Listing:
    """Table with one line per setting: scores with their spread, paired gains, and rounds to a score."""
    return Listing(CENTRING_TITLE, CENTRING_COLUMNS, [_centring_line(contrast, results) for contrast in contrasts], 3)


def _centring_line(contrast: Contrast, results: Results) -> tuple[str, ...]:
    return (
        *contrast.label,
        *_seeds_and_scores(contrast, results),
        *(paired(contrast.filter, other, results).text for other in (contrast.plain, contrast.layer)),
        " / ".join(reached(cell, results) for cell in contrast.cells),
    )


def _seeds_and_scores(contrast: Contrast, results: Results) -> list[str]:
    """Number of seeds, then the score of each cell."""
    seeds = [str(len(results.of(cell))) for cell in contrast.cells]
    return [
        seeds[0] if len(set(seeds)) == 1 else "/".join(seeds),
        *(score(cell, results) for cell in contrast.cells),
    ]


def rivals_listing(contrasts: Sequence[Contrast], results: Results) -> Listing:
    """Table with one line per rule and bits: scores, the gain of each shift, and differences from FedAvg's mean."""
    means = {contrast.bits: contrast for contrast in contrasts if contrast.label[0] == TITLES["fedavg"]}
    lines = [_rival_line(contrast, means[contrast.bits], results) for contrast in contrasts]
    return Listing(RIVALS_TITLE, RIVALS_COLUMNS, lines, 2)


def _rival_line(contrast: Contrast, mean: Contrast, results: Results) -> tuple[str, ...]:
    return (
        contrast.label[0],
        contrast.bits,
        *_seeds_and_scores(contrast, results),
        *(paired(shifted, contrast.plain, results).text for shifted in (contrast.layer, contrast.filter)),
        " / ".join(paired(*pair, results).mean or NOT_RUN for pair in zip(contrast.cells, mean.cells, strict=True))
        if contrast != mean
        else "",
    )


def optimizers_listing(cells: Sequence[Cell], results: Results) -> Listing:
    """Table with one line per server optimizer: score, difference from FedAvg, and rounds to a score."""
    fedavg = mixed("fedavg", 32, False)
    lines = [
        (
            *cell.label[:2],
            str(len(results.of(cell))),
            score(cell, results),
            _against(cell, fedavg, results),
            reached(cell, results),
        )
        for cell in cells
    ]
    return Listing(OPTIMIZERS_TITLE, OPTIMIZERS_COLUMNS, lines, 2)


def _against(ours: Cell, theirs: Cell, results: Results) -> str:
    """Paired difference of two cells; empty for a cell against itself."""
    return paired(ours, theirs, results).text if ours != theirs else ""


def score(cell: Cell, results: Results) -> str:
    """Mean score of a cell and its standard deviation over seeds, in percent."""
    scores = [*results.scores(cell).values()]
    if not scores:
        return NOT_RUN
    spread = f" ± {summary.deviation(scores):.1f}" if len(scores) > 1 else ""
    return f"{statistics.fmean(scores):.1f}{spread}"


def uplinks_listing(uplinks: Sequence[Compressed], results: Results) -> Listing:
    """Table with one line per uplink: score, paired differences, and bytes."""
    return Listing(UPLINKS_TITLE, UPLINKS_COLUMNS, [_uplink_line(uplink, results) for uplink in uplinks], 2)


def _uplink_line(uplink: Compressed, results: Results) -> tuple[str, ...]:
    records = results.of(uplink.cell).values()
    fedavg = mixed("fedavg", 32, False)
    gains = [_against(uplink.cell, other, results) for other in (uplink.exact, fedavg)]
    line = *uplink.label, str(len(records)), score(uplink.cell, results)
    if not records:
        return *line, *gains[:1], "", *gains[1:], "", "", ""
    up = statistics.fmean(sum(record.uploaded.up) for record in records)
    down = statistics.fmean(sum(record.column("bytes.down")) for record in records)
    full = [sum(record.uploaded.up) for record in results.of(uplink.exact).values()]
    return (
        *line,
        gains[0],
        interval(summary.paired(results.scores(uplink.cell), results.scores(uplink.exact))) if gains[0] else "",
        gains[1],
        f"{up / 1e9:.3g}",
        summary.times(statistics.fmean(full) / up) if full else "",
        f"{(up + down) / 1e9:.3g}",
    )


def codecs_listing(codecs: Sequence[Compressed], results: Results) -> Listing:
    """Table with one line per codec: score, difference from full precision after as many rounds, and bytes."""
    return Listing(CODECS_TITLE, CODECS_COLUMNS, [_codec_line(codec, results) for codec in codecs], 2)


def _codec_line(codec: Compressed, results: Results) -> tuple[str, ...]:
    records = results.of(codec.cell)
    line = *codec.label, str(len(records)), score(codec.cell, results)
    exact = {seed: FinishedRun(run.folder, codec.cell.rounds) for seed, run in results.of(codec.exact).items()}
    both = sorted(records.keys() & exact.keys())
    if not both:
        return *line, "", "", ""
    gains = SeedGains([records[seed].score - exact[seed].score for seed in both])
    full, up = (statistics.fmean(sum(runs[seed].uploaded.up) for seed in both) for runs in (exact, records))
    return *line, gains.text, f"{32 * up / full:.2f}", summary.times(full / up)


def interval(found: summary.Paired) -> str:
    """
    >>> interval(summary.Paired(-0.2, "within noise", 0.5)), interval(summary.Paired(-0.2, "1 seed"))
    ('-0.7 to +0.3', '')
    """
    if found.margin is None:
        return ""
    return f"{found.gain - found.margin:+.1f} to {found.gain + found.margin:+.1f}"
