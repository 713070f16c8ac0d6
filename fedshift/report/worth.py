"""Was it worth it? Compressed settings beside full precision: scores, bytes, and what the same bytes buy without."""

import math
import statistics
from collections.abc import Callable, Sequence

from fedshift.core.units import megabytes
from fedshift.experiment.settings import Experiment
from fedshift.report.charts import Axis, Choice, Field, Point, Points, Section, Table, TableRow
from fedshift.report.curves import by_metric, cut, score_axis, titled
from fedshift.report.lines import Grouped, Strand
from fedshift.runs import summary, tradeoff
from fedshift.runs.summary import metric, much, quality, quantized, scored, times

SETTINGS = 3  # that have columns of their own; lines that differ in more are named in one
PANELS = 12  # tasks that are drawn side by side; one of more is chosen


def section(grouped: Grouped) -> Section:
    parts: list[Table | Points | Choice] = []
    answer: list[str] = []
    for end, strands in by_metric(grouped.strands):
        answer += sentences(strands)
        parts.append(table(strands, grouped.varying, f"worth-table{end}"))
        parts += charts(strands, end)
    return Section("worth", "Was it worth it?", answer, [*parts])


def sentences(strands: Sequence[Strand]) -> list[str]:
    rows = [strand.row for strand in strands if strand.row]
    if not rows:
        return ["No run is finished yet, so nothing can be said."]
    labels = {id(strand.row): strand.line.label for strand in strands}
    return tradeoff.answers(rows, lambda row: labels[id(row)])


def charts(strands: Sequence[Strand], end: str) -> list[Points | Choice]:
    """Final score against bytes sent up, and against bytes in both directions where those down are recorded."""
    experiment = strands[0].experiment
    title = titled(experiment)
    caption = (
        "Each setting is a point: mean over seeds, with their standard deviation. Ringed and joined by a line: "
        "Pareto-optimal settings, which no other beats in both bytes and score. Bytes are on a logarithmic axis."
    )
    made: list[Points | Choice | None] = [
        _chart(
            strands,
            Points(
                f"pareto{end}",
                f"{title} against uploaded bytes",
                caption,
                Axis("sent up by all clients", "B", log=True),
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
                f"{title} against all bytes, up and down",
                "The same with the bytes of the broadcasts to clients added.",
                Axis("sent up and down", "B", log=True),
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
    """A field for each task; one task at a time where there are very many."""
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
    """Every setting by merit, unfinished ones last."""
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
    title = f"{titled(experiment)}, bytes, and full precision beside them"
    return Table(name, title, columns, rows, caption=_caption(experiment))


def _caption(experiment: Experiment) -> str:
    return (
        f"{summary.ORDER}. Differences are against full precision with the same server rule (all settings alike but "
        "those of the uplink), over the seeds that both have, with a paired 95 % interval. At equal bytes: that full "
        "precision stopped after as many uploaded bytes. With one seed, noise is unknown. "
        f"Target: its final {metric(experiment)} {tradeoff.room_of(experiment)}. "
        "Both are read from curves that are smoothed over up to five evaluated rounds on each side."
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
        _difference(cost, experiment) if cost else "full precision" if full else "nothing to compare with",
        _equal(row),
        reached,
    ]


def _difference(cost: summary.Paired, experiment: Experiment) -> str:
    points = f"{much(cost.gain, experiment)}{quality(cost.gain, experiment)}"
    if cost.margin is None:
        return f"{points} ({summary.brief(cost.verdict)})"
    low, high = (much(cost.gain + side * cost.margin, experiment) for side in (-1, 1))
    return f"{points} ({low} to {high})"


def _equal(row: summary.SummaryRow) -> str:
    if row.full is None:
        return ""
    found = tradeoff.equal_bytes(row)
    if found is None:
        return "less than its first evaluated round"
    if not math.isfinite(found.gain.gain):
        return scored(found.score, row.experiment)
    by = much(found.gain.gain, row.experiment).lstrip("+-")
    known = found.gain.verdict not in ("", summary.ONE_SEED)  # of one seed, the difference says so
    verdict = f", {found.gain.verdict}" if known else ""
    which = "wins" if found.better else "loses"
    return f"{scored(found.score, row.experiment)} (this {which} by {by}{verdict})"


def _unfinished(strand: Strand) -> list[str]:
    up = statistics.fmean(float(run.up.sum()) for run in strand.runs)
    return [f"unfinished, round {strand.reached} of {strand.experiment.train.rounds}", megabytes(up), *[""] * 5]
