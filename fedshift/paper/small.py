"""Tables 1 and 2, the claims and the figures at a size for two cores, compared with the paper by what the shift adds.

Accuracies on another data set cannot be compared with the paper's; the gain of the shift and the answers to the claims
can.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

from fedshift.core.tables import Listing
from fedshift.paper import beyond, claims, dynamics, experiments
from fedshift.paper.experiments import SMALL, SMALL_ROUNDS, Cell, CellChoice, table1, table2
from fedshift.paper.records import Results, published
from fedshift.paper.report import PaperReport, runs_section
from fedshift.paper.tables import NOT_RUN, place

NAMES = {"table1": "Table 1, small: two labels per client, K-means", "table2": "Table 2, small: Dirichlet partitions"}
HEADS = {"table1": ("algorithm", "bits"), "table2": ("quantizer", "alpha", "bits")}
COLUMNS = ("seeds", "no shift", "with shift", "gain", "gain in the paper")


def listing(table: str, cells: Sequence[Cell], results: Results) -> Listing:
    """Table with one line per pair of cells, without and with the shift."""
    shifted = {cell.label[:-1]: cell for cell in cells if cell.label[-1] == "yes"}
    ordered = [cell for cell in sorted(cells, key=place) if cell.label[-1] == "no"]
    lines = [_line(cell, shifted.get(cell.label[:-1]), results) for cell in ordered]
    return Listing(NAMES[table], (*HEADS[table], *COLUMNS), lines, len(HEADS[table]))


def _line(plain: Cell, shifted: Cell | None, results: Results) -> tuple[str, ...]:
    """Scores of a pair of cells, and the gain of the shift, here and in the paper; FedAvg has only one cell."""
    seeds = str(len(results.of(plain)))
    if shifted is None:
        return *plain.label[:-1], seeds, beyond.score(plain, results), "", "", ""
    gain = beyond.paired(shifted, plain, results).text or NOT_RUN
    scores = beyond.score(plain, results), beyond.score(shifted, results)
    return *plain.label[:-1], seeds, *scores, gain, published_gain(plain, shifted)


def published_gain(plain: Cell, shifted: Cell) -> str:
    """Gain of the shift in the paper; 'fails' if one of the two trainings fails there.

    >>> pair = [experiments.mixed("fedpaq", 4, shift) for shift in (False, True)]
    >>> published_gain(*pair)
    '+2.8'
    """
    figures = [cell.published.mean for cell in (plain, shifted) if cell.published]
    known = [figure for figure in figures if figure is not None]
    return f"{known[1] - known[0]:+.1f}" if len(known) == 2 else "fails"


def agreement(results: Results) -> str:
    """Sentence: in how many pairs of cells the shift helps here, in the paper, and in both."""
    ours, theirs = list[float](), list[float]()
    for plain, shifted in claims.pairs():
        gains, text = beyond.paired(shifted, plain, results).gains, published_gain(plain, shifted)
        if gains and text != "fails":
            ours.append(statistics.fmean(gains))
            theirs.append(float(text))
    if not ours:
        return "No pair of cells was run yet."
    both = sum(a > 0 and b > 0 for a, b in zip(ours, theirs, strict=True))
    return (
        f"Of {len(ours)} pairs of cells with a figure in the paper, the shift helps in {sum(a > 0 for a in ours)} here "
        f"and in {sum(b > 0 for b in theirs)} in the paper, {both} of them the same. The mean gain is "
        f"{statistics.fmean(ours):+.1f} points here and {statistics.fmean(theirs):+.1f} in the paper."
    )


def tables(results: Results, choice: CellChoice = experiments.EVERYTHING) -> list[Listing]:
    """Both tables and the claims."""
    both = {"table1": table1(choice), "table2": table2(choice)}
    found = [listing(name, cells, results) for name, cells in both.items() if cells]
    return [*found, claims.listing(claims.answers(results))]


def report(folder: Path) -> PaperReport:
    """Report from the records in a folder; it depends on nothing else."""
    results, others = published(folder, [*table1(), *table2()], SMALL, SMALL_ROUNDS)
    first, second, answers = tables(results)
    figures = [
        make(experiments.figures(), results) for make in (dynamics.curves, dynamics.predictions, dynamics.movement)
    ]
    sections: list[tuple[str, list[str | Listing]]] = [
        ("Runs", runs_section(results, others)),
        ("What carries over", [agreement(results), answers]),
    ]
    return PaperReport(sections + [(table.title, [table]) for table in (first, second, *figures)])
