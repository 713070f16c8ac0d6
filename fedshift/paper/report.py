"""Report from published records: tables, claims, and the generated part of a page."""

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedshift.core.files import RunError, make_folder, write
from fedshift.core.tables import Listing
from fedshift.experiment.rates import rate
from fedshift.experiment.toml import SettingsError
from fedshift.paper import beyond, claims, dynamics, experiments
from fedshift.paper.experiments import FILTER, LAYER, mixed
from fedshift.paper.records import FinishedRun, Results, published
from fedshift.paper.tables import NAMES, NOTE, ablations, compared, differences, last_rounds, listing, rows, scorings
from fedshift.paper.uplinks import CodecUpload, crossover, table3
from fedshift.runs.sheet import estimates

BEGIN = "<!-- from here on written by `fedshift paper report --markdown` -->"
END = "<!-- up to here -->"
CODECS = "codecs.json"
SUMMARY_TITLE = "Summary"
PAPER_RATE = "1MB/s"


class PaperReport(NamedTuple):
    """Sections of text and tables, in the order of a page."""

    sections: list[tuple[str, list[str | Listing]]]

    def markdown(self) -> str:
        text = []
        for title, parts in self.sections:
            text += [f"## {title}", *(part if isinstance(part, str) else part.markdown() for part in parts)]
        return "\n\n".join(text)

    def as_dict(self) -> dict[str, Any]:
        return {
            title: [part if isinstance(part, str) else part.as_dicts() for part in parts]
            for title, parts in self.sections
        }


Sections = list[tuple[str, list[str | Listing]]]


def report(folder: Path) -> PaperReport:
    """Tables 1 and 2, the claims, and tests of possible reasons for differences, from the records in a folder."""
    results, _ = _published(folder)
    sections: Sections = [(SUMMARY_TITLE, summary(results))]
    for name in ("table1", "table2"):
        cells = experiments.with_third_column(name)
        sections.append((NAMES[name], [*[NOTE] * (name == "table1"), listing(name, cells, results)]))
    sections.append(("The claims", [claims.listing(claims.answers(results, codecs(folder)[0]))]))
    sections.append((NAMES["differences"], reasons(results)))
    return PaperReport(sections)


def details(folder: Path) -> PaperReport:
    """Everything else in the records in a folder: runs, last rounds, results beyond the paper, Table 3, figures."""
    results, others = _published(folder)
    uploads, measured_on = codecs(folder)
    sections: Sections = [("Runs", runs_section(results, others))]
    sections += [("Precision", precisions)] if (precisions := _precisions(results)) else []
    last = [last_rounds(name, experiments.with_third_column(name), results) for name in ("table1", "table2")]
    sections += [(table.title, [table]) for table in last]
    cells = experiments.ablations()
    sections.append((NAMES["ablations"], [_count(cells, results), ablations(cells, results)]))
    sections += beyond_sections(results)
    if uploads:
        usable = [upload for upload in uploads if upload.trains]
        table = table3(uploads, rate(PAPER_RATE))
        sections.append((table.title, [f"Measured on {measured_on}. {crossover(usable)}", table]))
    else:
        sections.append((f"Table 3: one upload of the paper's CNN at {PAPER_RATE}", ["Not measured."]))
    selected = experiments.figures()
    figures = [make(selected, results) for make in (dynamics.curves, dynamics.predictions, dynamics.movement)]
    return PaperReport(sections + [(figure.title, [figure]) for figure in figures])


def _published(folder: Path) -> tuple[Results, list[str]]:
    """Results of all cells, and the names of records that belong to none."""
    return published(folder, [cell for table in experiments.TABLES.values() for cell in table()])


def beyond_sections(results: Results) -> Sections:
    """Sections on what the paper does not have."""
    centring = beyond.centring_listing(experiments.contrasts(), results)
    rules = beyond.rivals_listing(experiments.rivals_contrasts(), results)
    optimizers = beyond.optimizers_listing(experiments.optimizers(), results)
    return [
        (beyond.CENTRING_TITLE, [*beyond.centring_sentences(results), centring]),
        (beyond.UPLINKS_TITLE, [beyond.UPLINKS_NOTE, beyond.uplinks_listing(experiments.compressed(), results)]),
        (beyond.CODECS_TITLE, [beyond.CODECS_NOTE, beyond.codecs_listing(experiments.at_one_bit(), results)]),
        (beyond.RIVALS_TITLE, [beyond.RIVALS_NOTE, rules, beyond.OPTIMIZERS_NOTE, optimizers]),
    ]


def summary(results: Results) -> list[str | Listing]:
    """Sentences on how far the tables are run, what each shift adds, and how far results are from the paper's."""
    text = list[str | Listing]()
    for name in ("table1", "table2"):
        found = [compared(cell, results) for cell in experiments.TABLES[name]()]
        points = [line.difference for line in found if line.difference is not None]
        sentence = f"{NAMES[name].partition(':')[0]}: {sum(line.seeds > 0 for line in found)} of {len(found)} cells run"
        sentence += f". Our figures minus the paper's: {_range(points)}." if points else "."
        table = rows(experiments.with_third_column(name))
        for shift, title in ((LAYER, "The paper's shift per layer"), (FILTER, "The shift per filter")):
            gains = [gain for row in table if (gain := row.gain(shift, results)) is not None]
            sentence += f" {title} adds {_range(gains)}, settings: {len(gains)}." if gains else ""
        text.append(sentence)
    return text


def _range(points: Sequence[float]) -> str:
    """
    >>> _range([1.0, 3.0])
    '+2.0 points on average (+1.0 to +3.0)'
    """
    return f"{statistics.fmean(points):+.1f} points on average ({min(points):+.1f} to {max(points):+.1f})"


def reasons(results: Results) -> list[str | Listing]:
    """Tests of possible reasons for differences from the paper."""
    few = [mixed(name, bits, False) for name, bits in (("fedavg", 32), ("fedef", 4), ("fedpaq", 8), ("fedpaq", 4))]
    scored = scorings([*experiments.table1(), *experiments.table2()], few, results)
    return [
        "Runs with one setting as in the authors' code or the paper's text. K-means that stops early: the search of "
        "the authors' library, from random values until the means move by less than an absolute tolerance. Clients "
        "drawn at random: instead of five of each group. Above paper: our mean minus the paper's, without and with "
        "the change.",
        differences(experiments.changed(), results),
        "The paper does not say how it scores a run. Differences from the paper's figures in points, over all cells of "
        "Tables 1 and 2 that were run, and for some cells without the shift:",
        scored,
    ]


def runs_section(results: Results, others: Sequence[str]) -> list[str | Listing]:
    """Number of runs by machine, commit, torch and precision."""
    kinds = Counter((*_where(record.about), precision(record)) for record in results.all)
    lines = [(*kind, str(count)) for kind, count in sorted(kinds.items())]
    parts: list[str | Listing] = ["No runs yet: all cells below are marked 'not run'."]
    if lines:
        parts = [Listing("", ("machine", "commit", "torch", "precision", "runs"), lines, 4)]
    if estimate := estimates(record.uploaded.estimate for record in results.all):
        parts.append(estimate)
    if others:
        parts.append(f"Records that belong to no cell of these tables, left out: {', '.join(others)}.")
    return parts


def _precisions(results: Results) -> list[str | Listing]:
    """Comparison of runs that differ only in precision, over the rounds that both have."""
    lines = []
    for short, full in results.short:
        if precision(short) != precision(full):
            differences = [b - a for a, b in zip(short.scores, full.scores, strict=True)]
            mean, absolute = statistics.fmean(differences), statistics.fmean(map(abs, differences))
            scores = [f"{record.score:.1f}" for record in (short, full)]
            rounds = str(short.experiment.train.rounds)
            lines.append(
                (
                    full.folder.name,
                    rounds,
                    precision(short),
                    precision(full),
                    *scores,
                    f"{mean:+.2f}",
                    f"{absolute:.1f}",
                )
            )
    if not lines:
        return []
    columns = (
        "run",
        "rounds",
        "precision A",
        "precision B",
        "last ten, A",
        "last ten, B",
        "mean difference, B - A",
        "mean absolute difference",
    )
    return [
        "The same runs with the same draws in two precisions; differences in points, over all rounds:",
        Listing("", columns, lines, 1),
    ]


def precision(record: FinishedRun) -> str:
    """Precision of the arithmetic of a run; fp32 on a CPU."""
    return record.experiment.engine.precision if "gpu" in record.about else "fp32"


def _where(about: dict[str, Any]) -> tuple[str, str, str]:
    """Device, commit and version of torch of a run."""
    device = about.get("gpu") or about.get("device") or about.get("cpu") or "unknown"
    return str(device), str(about.get("commit", "unknown")), str(about.get("torch", "unknown"))


def _count(cells: Sequence[experiments.Cell], results: Results) -> str:
    """Number of cells and runs, in a sentence."""
    seeds = [len(results.of(cell)) for cell in cells]
    return f"{sum(n > 0 for n in seeds)} of {len(cells)} cells run, {sum(seeds)} runs of {cells[0].rounds} rounds."


def codecs(folder: Path) -> tuple[list[CodecUpload], str]:
    """Measured codecs of the published Table 3, and the machine; none if it was not published."""
    path = folder / CODECS
    if not path.exists():
        return [], ""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return [CodecUpload(**upload) for upload in content["uploads"]], str(content["machine"]["cpu"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise RunError(f"{path}: is not a file of `fedshift paper table3 --to`: {problem}") from None


def publish_codecs(folder: Path, uploads: Sequence[CodecUpload], machine: dict[str, str]) -> Path:
    """Write Table 3 to a folder of published records; return its path."""
    about = {key: value for key, value in machine.items() if key != "command"}
    rows = [upload._asdict() | {"encode": float(f"{upload.encode:.3g}")} for upload in uploads]
    rows = [row | {"snr_db": row["snr_db"] and round(row["snr_db"], 2), "bytes": round(row["bytes"])} for row in rows]
    make_folder(folder)
    write(folder / CODECS, (json.dumps({"machine": about, "uploads": rows}, indent=1) + "\n").encode())
    return folder / CODECS


def rewritten(page: str, content: PaperReport, where: str) -> str:
    """Page with its generated part replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SettingsError(f"{where}: has no line '{BEGIN}' with a line '{END}' after it")
    return f"{before}{BEGIN}\n\n{content.markdown()}\n\n{END}{after}"
