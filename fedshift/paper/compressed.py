"""Beyond the paper: named uplinks and random rounding beside full precision, on the paper's task."""

import statistics
from collections.abc import Sequence

from fedshift.paper.beyond import paired, score
from fedshift.paper.experiments import ROUNDS, Compressed, mixed
from fedshift.paper.records import Results
from fedshift.paper.tables import Listing
from fedshift.runs import summary

TITLE = "Beyond the paper: uplinks"
NOTE = (
    f"Scores are means of the last ten of {ROUNDS} rounds. Differences are in points, over the seeds that both runs "
    "have: against full precision with the same server rule (the same shift), each seed in brackets, with a paired "
    "95 % interval; and against plain FedAvg (full precision, no shift). GB are uploaded by all clients in all "
    "rounds, then with what they receive. Times fewer: uploaded bytes of full precision over these."
)
COLUMNS = (
    *("uplink", "shift", "seeds", "accuracy", "against the same rule", "95 % interval", "against FedAvg"),
    *("GB up", "times fewer", "GB up and down"),
)


def listing(some: Sequence[Compressed], results: Results) -> Listing:
    """A line per uplink: score, paired differences, and bytes."""
    return Listing(TITLE, COLUMNS, [_line(one, results) for one in some], 2)


def _line(one: Compressed, results: Results) -> tuple[str, ...]:
    records = results.of(one.cell).values()
    fedavg = mixed("fedavg", 32, False)
    gains = [paired(one.cell, other, results).text if one.cell != other else "" for other in (one.exact, fedavg)]
    line = *one.what, str(len(records)), score(one.cell, results)
    if not records:
        return *line, *gains[:1], "", *gains[1:], "", "", ""
    up = statistics.fmean(sum(record.uploaded.up) for record in records)
    down = statistics.fmean(sum(record.column("bytes.down")) for record in records)
    full = [sum(record.uploaded.up) for record in results.of(one.exact).values()]
    return (
        *line,
        gains[0],
        _interval(summary.paired(results.scores(one.cell), results.scores(one.exact))) if gains[0] else "",
        gains[1],
        f"{up / 1e9:.3g}",
        summary.times(statistics.fmean(full) / up) if full else "",
        f"{(up + down) / 1e9:.3g}",
    )


def _interval(found: summary.Paired) -> str:
    """
    >>> _interval(summary.Paired(-0.2, "within noise", 0.5)), _interval(summary.Paired(-0.2, "1 seed"))
    ('-0.7 to +0.3', '')
    """
    if found.margin is None:
        return ""
    return f"{found.gain - found.margin:+.1f} to {found.gain + found.margin:+.1f}"
