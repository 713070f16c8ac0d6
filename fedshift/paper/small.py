"""Tables 1 and 2, the claims and the figures at a size for two cores, compared with the paper by what the shift adds.

Accuracies on another data set cannot be compared with the paper's; the gain of the shift and the answers to the claims
can.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from fedshift.core.tables import Listing
from fedshift.paper import beyond, claims, dynamics, experiments
from fedshift.paper.claims import ADVICE
from fedshift.paper.experiments import (
    FILTER,
    LAYER,
    NO,
    SMALL,
    SMALL_ROUNDS,
    Cell,
    CellChoice,
    with_third_column,
)
from fedshift.paper.records import Results, published
from fedshift.paper.report import PaperReport, runs_section
from fedshift.paper.tables import GAINS, HEADS, NOT_RUN, SHIFTS, rows

NAMES = {"table1": "Table 1, small: two labels per client, K-means", "table2": "Table 2, small: Dirichlet partitions"}
COLUMNS = (*SHIFTS, *GAINS, "in the paper")
NOTE = (
    "Mean of the last ten rounds in percent, ± sample standard deviation over seeds, number of seeds in brackets. "
    "Layer adds, filter adds: gain of each shift over no shift, in points, over the seeds that both have. In the "
    "paper: gain of its shift, the one per layer."
)
CARRIED_NOTE = (
    "Gains of a shift over no shift, in points: mean and range over the settings that were run here and at full size "
    "(of those run here), and in how many settings the gain is above zero."
)


def listing(table: str, cells: Sequence[Cell], results: Results) -> Listing:
    """Table with one line per setting: its scores with each shift, and what the shift adds here and in the paper."""
    lines = []
    for row in rows(cells):
        theirs = published_gain(row.cells[NO], row.cells[LAYER]) if NO in row.cells and LAYER in row.cells else ""
        lines.append((*row.label, *row.scores(results), *row.gains(results), theirs))
    return Listing(NAMES[table], (*HEADS[table], *COLUMNS), lines, len(HEADS[table]))


def published_gain(plain: Cell, shifted: Cell) -> str:
    """Gain of the shift in the paper; 'fails' if one of the two trainings fails there.

    >>> pair = [experiments.mixed("fedpaq", 4, shift) for shift in (False, True)]
    >>> published_gain(*pair)
    '+2.8'
    """
    figures = [cell.published.mean for cell in (plain, shifted) if cell.published]
    known = [figure for figure in figures if figure is not None]
    return f"{known[1] - known[0]:+.1f}" if len(known) == 2 else "fails"


def carried(here: Results, full: Results) -> Listing:
    """Gains of each shift here, at full size and in the paper, over the settings of a table that were run at all."""
    columns = "table", "shift", "settings", "gain here", "helps here", "at full size", "helps at full size", "same sign"
    lines = []
    for table in NAMES:
        for shift, title in ((LAYER, "per layer"), (FILTER, "per filter")):
            pairs = [(row.gain(shift, here), row.gain(shift, full)) for row in rows(with_third_column(table))]
            found = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
            alone = [ours for ours, _ in pairs if ours is not None]
            ours, theirs = ([pair[i] for pair in found] for i in (0, 1))
            same = sum((a > 0) == (b > 0) for a, b in found)
            lines.append(
                (
                    table.replace("table", "Table "),
                    title,
                    f"{len(found)} of {len(alone)}",
                    *_gains(ours),
                    *_gains(theirs),
                    f"{same} of {len(found)}" if found else "",
                )
            )
    return Listing("", columns, lines, 2)


def _gains(gains: Sequence[float]) -> tuple[str, str]:
    """Mean and range of gains, and how many are above zero.

    >>> _gains([1.0, 2.0, -0.5])
    ('+0.8 (-0.5 to +2.0)', '2 of 3')
    """
    if not gains:
        return NOT_RUN, ""
    text = f"{statistics.fmean(gains):+.1f} ({min(gains):+.1f} to {max(gains):+.1f})"
    return text, f"{sum(gain > 0 for gain in gains)} of {len(gains)}"


def agreement(results: Results) -> str:
    """Sentence: in how many settings the paper's shift helps here, in the paper, and in both."""
    ours, theirs = list[float](), list[float]()
    for plain, shifted in claims.pairs():
        gains, text = beyond.paired(shifted, plain, results).gains, published_gain(plain, shifted)
        if gains and text != "fails":
            ours.append(statistics.fmean(gains))
            theirs.append(float(text))
    if not ours:
        return "No setting was run without and with the shift yet."
    both = sum(a > 0 and b > 0 for a, b in zip(ours, theirs, strict=True))
    return (
        f"Of {len(ours)} settings with figures in the paper, its shift helps in {sum(a > 0 for a in ours)} here "
        f"and in {sum(b > 0 for b in theirs)} in the paper, {both} of them the same. The mean gain is "
        f"{statistics.fmean(ours):+.1f} points here and {statistics.fmean(theirs):+.1f} in the paper."
    )


def answers(here: Results, full: Results) -> Listing:
    """The claims with their answers here and at full size."""
    both = zip(claims.answers(here), claims.answers(full), strict=True)
    lines = [(small.claim, small.answer, large.answer, small.why) for small, large in both if small.claim != ADVICE]
    return Listing("The paper's claims", ("claim", "here", "at full size", "figures here"), lines, 4)


def tables(results: Results, choice: CellChoice = experiments.EVERYTHING) -> list[Listing]:
    """Both tables."""
    cells = {table: with_third_column(table, choice) for table in NAMES}
    return [listing(table, columns, results) for table, columns in cells.items() if columns]


def report(folder: Path) -> PaperReport:
    """Report from the records in a folder, and those at full size in the folder above it."""
    everything = [cell for table in NAMES for cell in with_third_column(table)]
    here, others = published(folder, everything, SMALL, SMALL_ROUNDS)
    full, _ = published(folder.parent, everything)
    first, second = tables(here)
    figures = [make(experiments.figures(), here) for make in (dynamics.curves, dynamics.predictions, dynamics.movement)]
    sections: list[tuple[str, list[str | Listing]]] = [
        ("What carries over", [agreement(here), CARRIED_NOTE, carried(here, full)]),
        ("The paper's claims", [answers(here, full)]),
        (first.title, [NOTE, first]),
        (second.title, [second]),
    ]
    sections += [(figure.title, [figure]) for figure in figures]
    return PaperReport([*sections, ("Runs", runs_section(here, others))])
