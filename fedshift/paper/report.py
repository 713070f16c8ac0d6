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
from fedshift.paper.records import FinishedRun, Results, published
from fedshift.paper.tables import compared, listing
from fedshift.paper.uplinks import CodecUpload, crossover, table3
from fedshift.runs.sheet import estimates

BEGIN = "<!-- from here on written by `fedshift paper report --markdown` -->"
END = "<!-- up to here -->"
CODECS = "codecs.json"
ORDER = ("table1", "ablations", "table2")
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


def report(folder: Path) -> PaperReport:
    """Report from the records in a folder; it depends on nothing else."""
    cells = {name: experiments.TABLES[name]() for name in (*ORDER, "beyond", "uplinks", "codecs", "rivals")}
    results, others = published(folder, [cell for table in cells.values() for cell in table])
    uploads, measured_on = codecs(folder)
    sections: list[tuple[str, list[str | Listing]]] = [("Runs", runs_section(results, others))]
    sections += [("Precision", precisions)] if (precisions := _precisions(results)) else []
    sections.append(("The claims", [claims.listing(claims.answers(results, uploads))]))
    for name in ORDER:
        table = listing(name, cells[name], results)
        sections.append((table.title, [*_differences(cells[name], results), table]))
    sections.append(
        (
            beyond.CENTRING_TITLE,
            [*beyond.centring_sentences(results), beyond.centring_listing(experiments.contrasts(), results)],
        )
    )
    sections.append(
        (beyond.UPLINKS_TITLE, [beyond.UPLINKS_NOTE, beyond.uplinks_listing(experiments.compressed(), results)])
    )
    sections.append(
        (beyond.CODECS_TITLE, [beyond.CODECS_NOTE, beyond.codecs_listing(experiments.at_one_bit(), results)])
    )
    rules = beyond.rivals_listing(experiments.rivals_contrasts(), results)
    optimizers = beyond.optimizers_listing(experiments.optimizers(), results)
    sections.append((beyond.RIVALS_TITLE, [beyond.RIVALS_NOTE, rules, beyond.OPTIMIZERS_NOTE, optimizers]))
    if uploads:
        at = rate(PAPER_RATE)
        usable = [upload for upload in uploads if upload.trains]
        table = table3(uploads, at)
        sections.append((table.title, [f"Measured on {measured_on}. {crossover(usable)}", table]))
    else:
        sections.append((f"Table 3: one upload of the paper's CNN at {PAPER_RATE}", ["Not measured."]))
    selected = experiments.figures()
    figures = [make(selected, results) for make in (dynamics.curves, dynamics.predictions, dynamics.movement)]
    return PaperReport(sections + [(figure.title, [figure]) for figure in figures])


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


def _differences(cells: Sequence[experiments.Cell], results: Results) -> list[str]:
    """Number of runs, and mean and largest difference from the paper, in a sentence."""
    lines = [compared(cell, results) for cell in cells]
    done = sum(line.seeds > 0 for line in lines)
    text = f"{done} of {len(lines)} cells run, {sum(line.seeds for line in lines)} runs of {cells[0].rounds} rounds."
    ours = [(line.difference, line.cell) for line in lines if line.difference is not None]
    if not ours:
        return [text]
    largest, cell = max(ours, key=lambda item: abs(item[0]))
    mean = statistics.fmean(difference for difference, _ in ours)
    where = claims.cell_text(cell)
    return [f"{text} Difference from the paper: {mean:+.1f} points on average, at most {largest:+.1f} ({where})."]


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
