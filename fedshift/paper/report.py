"""Everything the published records say: the tables, the claims, and the part of a page that is made of them."""

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
    """From the records in a folder alone; the same records give the same report."""
    cells = {name: experiments.TABLES[name]() for name in (*ORDER, "beyond", "uplinks")}
    results, others = published(folder, [cell for some in cells.values() for cell in some])
    uploads, measured_on = codecs(folder)
    made: list[tuple[str, list[str | Listing]]] = [("What was run", _runs(results, others))]
    made += [("Precision", precisions)] if (precisions := _precisions(results)) else []
    made.append(("The claims", [claims.listing(claims.answers(results, uploads))]))
    for name in ORDER:
        table = listing(name, cells[name], results)
        made.append((table.title, [*_differences(cells[name], results), table]))
    made.append(
        (
            beyond.CENTRING_TITLE,
            [*beyond.centring_sentences(results), beyond.centring_listing(experiments.contrasts(), results)],
        )
    )
    made.append(
        (beyond.UPLINKS_TITLE, [beyond.UPLINKS_NOTE, beyond.uplinks_listing(experiments.compressed(), results)])
    )
    if uploads:
        at = rate(PAPER_RATE)
        able = [upload for upload in uploads if upload.trains]
        table = table3(uploads, at)
        made.append((table.title, [f"Measured on {measured_on}. {crossover(able)}", table]))
    else:
        made.append((f"Table 3: one upload of the paper's CNN at {PAPER_RATE}", ["Not run."]))
    drawn = experiments.figures()
    figures = [part(drawn, results) for part in (dynamics.curves, dynamics.predictions, dynamics.movement)]
    return PaperReport(made + [(figure.title, [figure]) for figure in figures])


def _runs(results: Results, others: Sequence[str]) -> list[str | Listing]:
    """Number of runs by machine, commit, torch and precision."""
    kinds = Counter((*_where(record.about), precision(record)) for record in results.all)
    lines = [(*kind, str(count)) for kind, count in sorted(kinds.items())]
    parts: list[str | Listing] = ["Nothing yet: every cell below says not run."]
    if lines:
        parts = [Listing("", ("machine", "commit", "torch", "precision", "runs"), lines, 4)]
    if guessed := estimates(record.uploaded.estimate for record in results.all):
        parts.append(guessed)
    if others:
        parts.append(f"Records of no cell of these tables, left out: {', '.join(others)}.")
    return parts


def _precisions(results: Results) -> list[str | Listing]:
    """Runs that differ in nothing but the precision, as far as the shorter one goes."""
    lines = []
    for short, whole in results.short:
        if precision(short) != precision(whole):
            apart = statistics.fmean(abs(a - b) for a, b in zip(short.scores, whole.scores, strict=True))
            more = statistics.fmean(b - a for a, b in zip(short.scores, whole.scores, strict=True))
            each = [f"{record.score:.1f}" for record in (short, whole)]
            rounds = str(short.experiment.train.rounds)
            lines.append(
                (whole.folder.name, rounds, precision(short), precision(whole), *each, f"{more:+.2f}", f"{apart:.1f}")
            )
    if not lines:
        return []
    columns = (
        "run",
        "rounds",
        "one",
        "other",
        "last ten, one",
        "other",
        "other less one, all rounds",
        "apart in a round",
    )
    return ["The same runs, the same draws, in two precisions:", Listing("", columns, lines, 1)]


def precision(record: FinishedRun) -> str:
    """Of its arithmetic; a CPU has but one."""
    return record.experiment.engine.precision if "gpu" in record.about else "fp32"


def _where(about: dict[str, Any]) -> tuple[str, str, str]:
    device = about.get("gpu") or about.get("device") or about.get("cpu") or "unknown"
    return str(device), str(about.get("commit", "unknown")), str(about.get("torch", "unknown"))


def _differences(cells: Sequence[experiments.Cell], results: Results) -> list[str]:
    """Differences of our scores from the paper's, in a sentence."""
    lines = [compared(cell, results) for cell in cells]
    done = sum(line.seeds > 0 for line in lines)
    text = f"{done} of {len(lines)} cells run, {sum(line.seeds for line in lines)} runs of {cells[0].rounds} rounds."
    ours = [(line.difference, line.cell) for line in lines if line.difference is not None]
    if not ours:
        return [text]
    worst, where = max(ours, key=lambda one: abs(one[0]))
    mean = statistics.fmean(one for one, _ in ours)
    label = " ".join(part for part in where.label[:-1]) + " shifted" * (where.label[-1] == "yes")
    return [f"{text} Ours less the paper's: {mean:+.1f} points in the mean, at most {worst:+.1f} ({label})."]


def codecs(folder: Path) -> tuple[list[CodecUpload], str]:
    """The codecs as they were measured when Table 3 was published; none when it was not."""
    path = folder / CODECS
    if not path.exists():
        return [], ""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return [CodecUpload(**upload) for upload in content["uploads"]], str(content["machine"]["cpu"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise RunError(f"{path}: is not what `fedshift paper table3 --to` writes: {problem}") from None


def publish_codecs(folder: Path, uploads: Sequence[CodecUpload], machine: dict[str, str]) -> Path:
    """Table 3 among the published records."""
    about = {key: value for key, value in machine.items() if key != "command"}
    rows = [upload._asdict() | {"encode": float(f"{upload.encode:.3g}")} for upload in uploads]
    rows = [row | {"snr_db": row["snr_db"] and round(row["snr_db"], 2), "bytes": round(row["bytes"])} for row in rows]
    make_folder(folder)
    write(folder / CODECS, (json.dumps({"machine": about, "uploads": rows}, indent=1) + "\n").encode())
    return folder / CODECS


def rewritten(page: str, made: PaperReport, where: str) -> str:
    """A page with its generated part made anew."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SettingsError(f"{where}: has no line '{BEGIN}' with a line '{END}' after it")
    return f"{before}{BEGIN}\n\n{made.markdown()}\n\n{END}{after}"
