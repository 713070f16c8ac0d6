"""Section "Was compression worth it?": scores and bytes of compressed settings against full precision."""

import math
import statistics
from collections.abc import Callable, Sequence

from fedshift.core.units import megabytes
from fedshift.experiment.settings import Experiment
from fedshift.report.charts import Axis, Choice, Field, Point, Points, Section, Table, TableRow
from fedshift.report.curves import by_metric, cut, score_axis, titled
from fedshift.report.lines import Grouped, Strand
from fedshift.runs import summary, tradeoff
from fedshift.runs.summary import metric, quality, quantized, scored, signed, times

SETTINGS = 3  # most settings with their own columns; lines that differ in more are named in one column
PANELS = 12  # tasks drawn side by side; with more, the reader selects one


def section(grouped: Grouped) -> Section:
    parts: list[Table | Points | Choice] = []
    answer: list[str] = []
    for end, strands in by_metric(grouped.strands):
        answer += sentences(strands)
        parts.append(table(strands, grouped.varying, f"worth-table{end}"))
        parts += charts(strands, end)
    return Section("worth", "Was compression worth it?", answer, [*parts])


def sentences(strands: Sequence[Strand]) -> list[str]:
    rows = [strand.row for strand in strands if strand.row]
    if not rows:
        return ["No run is finished yet."]
    labels = {id(strand.row): strand.line.label for strand in strands}
    return tradeoff.answers(rows, lambda row: labels[id(row)])


def charts(strands: Sequence[Strand], end: str) -> list[Points | Choice]:
    """Final score against uploaded bytes, and against bytes in both directions if both are recorded."""
    experiment = strands[0].experiment
    title = f"Final {metric(experiment)}"
    caption = (
        "Each point is a setting: mean over seeds, with their standard deviation. Circles joined by a line mark "
        "Pareto-optimal settings: no other has both fewer bytes and a better score. The axis of bytes is logarithmic."
    )
    made: list[Points | Choice | None] = [
        _chart(
            strands,
            Points(
                f"pareto{end}",
                f"{title} against uploaded bytes",
                caption,
                Axis("uploaded by all clients", "B", log=True),
                score_axis(experiment),
                [],
                experiment.train.lower,
            ),
            lambda row: row.bytes_up,
        ),
        _chart(
            strands,
            Points(
                f"pareto-total{end}",
                f"{title} against uploaded and downloaded bytes",
                "The same, with the bytes of broadcasts to clients included.",
                Axis("uploaded and downloaded", "B", log=True),
                score_axis(experiment),
                [],
                experiment.train.lower,
            ),
            lambda row: None if row.bytes_down is None else row.bytes_up + row.bytes_down,
        ),
    ]
    return [chart for chart in made if chart]


def _chart(
    strands: Sequence[Strand], like: Points, across: Callable[[summary.SummaryRow], float | None]
) -> Points | Choice | None:
    """One panel per task, or a choice of tasks if there are many."""
    keys = {id(strand.row): strand.line.key for strand in strands}
    groups = summary.tasks(strand.row for strand in strands if strand.row)
    fields = []
    for rows in groups:
        places = [(row, x) for row in rows if (x := across(row)) and math.isfinite(row.mean)]
        best = summary.front([(x, row.mean) for row, x in places], like.lower)
        points = [
            Point(
                keys[id(row)],
                cut(x) or 0.0,
                cut(row.mean) or 0.0,
                None if row.spread is None else cut(row.spread),
                front,
            )
            for (row, x), front in zip(places, best, strict=True)
        ]
        title = tradeoff.task_name(rows[0], groups) if len(groups) > 1 else ""
        fields += [Field(title, points)] if points else []
    if not fields:
        return None
    if len(fields) <= PANELS:
        return like._replace(fields=fields)
    several = [
        like._replace(name=f"{like.name}-of-{i + 1}", title=f"{like.title}: {field.title}", fields=[field])
        for i, field in enumerate(fields)
    ]
    return Choice(like.name, like.title, [(chart.fields[0].title, chart) for chart in several])


def table(strands: Sequence[Strand], varying: Sequence[str], name: str) -> Table:
    """Table of all settings by merit, unfinished ones last."""
    experiment = strands[0].experiment
    unit = ", %" if experiment.train.metric == "accuracy" else ""
    points = ", points" if experiment.train.metric == "accuracy" else ""
    named = not 0 < len(varying) <= SETTINGS
    words = ["line"] if named else [*summary.words(varying).values()]
    columns = [
        *words,
        f"{metric(experiment)}{unit}",
        "MB up",
        "Pareto",
        "times fewer bytes",
        f"difference{points} (95 % interval)",
        f"full precision at equal bytes{unit}",
        "MB to target",
    ]
    by_row = {id(strand.row): strand for strand in strands if strand.row}
    merits = summary.merits([strand.row for strand in strands if strand.row])
    listed = [(by_row[id(row)], _setting_cells(row, optimal)) for row, optimal in merits]
    listed += [(strand, _unfinished(strand)) for strand in strands if strand.row is None]
    labels = [[strand.line.label] if named else [*strand.line.settings.values()] for strand, _ in listed]
    rows = [TableRow(strand.line.key, [*label, *cells]) for (strand, cells), label in zip(listed, labels, strict=True)]
    title = f"{titled(experiment)} and bytes, compared with full precision"
    return Table(name, title, columns, rows, caption=_caption(experiment))


def _caption(experiment: Experiment) -> str:
    return (
        f"{summary.ORDER}. Differences are from full precision with the same server rule (the same settings except "
        "those of the uplink), over the seeds that both have, with a paired 95 % interval. At equal bytes: full "
        "precision stopped after the same uploaded bytes. With one seed, noise is unknown. "
        f"Target: the final {metric(experiment)} of full precision {tradeoff.margin_text(experiment)}. "
        "Both are read from curves smoothed over up to five evaluated rounds on each side."
    )


def _setting_cells(row: summary.SummaryRow, optimal: bool) -> list[str]:
    experiment, cost = row.experiment, row.cost
    spread = "" if row.spread is None else f" ± {scored(row.spread, experiment)}"
    full = row.full or (None if quantized(experiment) else row)
    if full is None or not math.isfinite(full.mean):
        reached = ""
    else:
        sent = tradeoff.bytes_to(row, tradeoff.target(full))
        reached = "not reached" if sent is None else megabytes(sent)
    return [
        f"{scored(row.mean, experiment)}{spread}",
        megabytes(row.bytes_up),
        "yes" if optimal else "no",
        times(row.fewer),
        _difference(cost, experiment) if cost else "full precision" if full else "no full precision to compare with",
        _equal(row),
        reached,
    ]


def _difference(cost: summary.Paired, experiment: Experiment) -> str:
    points = f"{signed(cost.gain, experiment)}{quality(cost.gain, experiment)}"
    if cost.margin is None:
        return f"{points} ({summary.brief(cost.verdict)})"
    low, high = (signed(cost.gain + side * cost.margin, experiment) for side in (-1, 1))
    return f"{points} ({low} to {high})"


def _equal(row: summary.SummaryRow) -> str:
    if row.full is None:
        return ""
    found = tradeoff.equal_bytes(row)
    if found is None:
        return "fewer bytes than its first evaluated round"
    if not math.isfinite(found.gain.gain):
        return scored(found.score, row.experiment)
    by = signed(found.gain.gain, row.experiment).lstrip("+-")
    known = found.gain.verdict not in ("", summary.ONE_SEED)  # that there is one seed is in the column of differences
    verdict = f", {found.gain.verdict}" if known else ""
    outcome = "wins" if found.better else "loses"
    return f"{scored(found.score, row.experiment)} (this setting {outcome} by {by}{verdict})"


def _unfinished(strand: Strand) -> list[str]:
    up = statistics.fmean(float(run.up.sum()) for run in strand.runs)
    return [f"unfinished, round {strand.reached} of {strand.experiment.train.rounds}", megabytes(up), *[""] * 5]
