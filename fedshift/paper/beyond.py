"""Beyond the paper: filter centring beside no shift and the paper's shift per layer, on the paper's task."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from fedshift.paper.experiments import ROUNDS, Cell, Contrast, all_quantized
from fedshift.paper.records import Record, Results
from fedshift.paper.tables import NOT_RUN, Listing
from fedshift.runs.summary import WINDOW

TITLE = "Beyond the paper: filter centring"
REACHED = 68.0  # percent; the first mean of ten rounds at or above it counts
COLUMNS = (
    *("algorithm", "clients", "bits", "seeds", "no shift", "per layer", "per filter"),
    *("over no shift", "over per layer", f"rounds to {REACHED:g} %"),
)


class Paired(NamedTuple):
    """Differences of the same seeds."""

    gains: list[float]

    @property
    def text(self) -> str:
        """The mean difference, and that of each seed where there are several."""
        if not self.gains:
            return ""
        each = f" ({', '.join(f'{gain:+.1f}' for gain in self.gains)})" if len(self.gains) > 1 else ""
        return f"{statistics.fmean(self.gains):+.1f}{each}"


def paired(ours: Cell, theirs: Cell, results: Results) -> Paired:
    a, b = results.scores(ours), results.scores(theirs)
    return Paired([a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())])


def rounds_to(record: Record, score: float) -> int | None:
    """The round that ends the first ten rounds whose mean is at least this score; None if there is none."""
    scores = record.scores
    means = (statistics.fmean(scores[end - WINDOW : end]) for end in range(WINDOW, len(scores) + 1))
    return next((end for end, mean in enumerate(means, WINDOW) if mean >= score), None)


def reached(cell: Cell, results: Results) -> str:
    """Mean over seeds of the rounds to the score; 'never' if one of them does not reach it."""
    found = [rounds_to(record, REACHED) for record in results.of(cell).values()]
    if not found:
        return NOT_RUN
    known = [rounds for rounds in found if rounds is not None]
    return f"{statistics.fmean(known):.0f}" if len(known) == len(found) else "never"


def sentences(results: Results) -> list[str]:
    """Explanation of the table, and the result with every client quantized."""
    text = [
        f"Scores are means of the last ten of {ROUNDS} rounds; differences are in points, of the same seeds, each seed "
        f"in brackets. Rounds to {REACHED:g} %: the end of the first ten rounds whose mean is at or above it, without "
        "shift / per layer / per filter, mean over seeds."
    ]
    if scores := results.scores(cell := all_quantized()):
        result = f"{statistics.fmean(scores.values()):.1f} % after {cell.rounds} rounds (n = {len(scores)})"
        text.append(f"All clients at 4 bits, per filter with share 1: {result}.")
    return text


def listing(contrasts: Sequence[Contrast], results: Results) -> Listing:
    """A line per setting: scores with their spread, paired differences, and rounds to a score."""
    return Listing(TITLE, COLUMNS, [_line(one, results) for one in contrasts], 3)


def _line(one: Contrast, results: Results) -> tuple[str, ...]:
    cells = (one.plain, one.layer, one.filter)
    seeds = [str(len(results.of(cell))) for cell in cells]
    return (
        *one.what,
        seeds[0] if len(set(seeds)) == 1 else "/".join(seeds),
        *(score(cell, results) for cell in cells),
        *(paired(one.filter, other, results).text for other in (one.plain, one.layer)),
        " / ".join(reached(cell, results) for cell in cells),
    )


def score(cell: Cell, results: Results) -> str:
    """Mean of a cell's scores and their standard deviation over seeds, in percent."""
    scores = [*results.scores(cell).values()]
    if not scores:
        return NOT_RUN
    spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
    return f"{statistics.fmean(scores):.1f}{spread}"
