"""DAdaQuant's row of Synthetic(1, 1) (Hönig et al., ICML 2022, Table 2), with bytes of frames and of their parts."""

from pathlib import Path

from fedshift.core.tables import Listing
from fedshift.paper import beyond, experiments
from fedshift.paper.experiments import Q_MAX, SYNTHETIC, SYNTHETIC_ROUNDS
from fedshift.paper.records import Results, bytes_per_upload, published
from fedshift.runs import summary

TITLE = "DAdaQuant's row of Synthetic(1, 1)"
# times fewer bytes of clients in DAdaQuant's Table 2
PUBLISHED = {f"qsgd-{Q_MAX}": "17", f"dadaquant-{Q_MAX}": "48"}
NOTE = (
    f"{SYNTHETIC_ROUNDS} rounds of 10 of 30 clients without a shift. Scores are means of the last ten evaluated "
    "rounds, ± the standard deviation over seeds; the difference is from full precision in points, over the seeds that "
    "both have, with a 95 % interval (paired t). Bytes are means per upload, by part of the frame; times fewer: bytes "
    "of full precision divided by these, for the frames and for the codes alone, next to the published figure. QSGD "
    "has q levels per sign and one l2 norm of the whole update."
)
COLUMNS = (
    *("uplink", "seeds", "accuracy", "difference", "95 % interval", "bytes per upload", "codes", "side data", "header"),
    *("times fewer bytes", "codes alone", "published"),
)


def read(folder: Path) -> Results:
    """Published records of the row."""
    return published(folder, experiments.dadaquant(), SYNTHETIC)[0] if folder.is_dir() else Results({})


def listing(results: Results) -> Listing:
    """Table with one line per uplink."""
    exact, *_ = cells = experiments.dadaquant()
    full = bytes_per_upload(results.of(exact).values())
    lines = list[tuple[str, ...]]()
    for cell in cells:
        runs = results.of(cell)
        sent = bytes_per_upload(runs.values())
        gains = beyond.paired(cell, exact, results)
        compared = cell != exact and bool(gains.gains)
        spread = beyond.interval(summary.paired(results.scores(cell), results.scores(exact))) if compared else ""
        fewer = (
            [summary.times(a / b) for a, b in ((sum(full), sum(sent)), (full[0], sent[0]))] if compared else ["", ""]
        )
        lines.append(
            (
                *(*cell.label, str(len(runs)), beyond.score(cell, results), gains.text if compared else "", spread),
                *(f"{part:,.0f}" if runs else "" for part in (sum(sent), *sent)),
                *(*fewer, PUBLISHED.get(cell.name, "")),
            )
        )
    return Listing(TITLE, COLUMNS, lines, 1)
