"""Section "Is the model equally good for all clients?": scores on held-out examples of each client."""

import math
from collections.abc import Sequence

import numpy as np

from fedshift.report.charts import Axis, Chart, Choice, Curve, Curves, Panel, Section, Table, TableRow
from fedshift.report.curves import (
    BAND,
    ROUND,
    by_metric,
    chosen,
    curve,
    cut,
    cuts,
    every,
    points_per_curve,
    score_axis,
    titled,
)
from fedshift.report.lines import Strand, panels
from fedshift.runs.columns import GROUP, column
from fedshift.runs.recorded import Recorded
from fedshift.runs.sheet import Figures
from fedshift.runs.summary import client_figure, metric, scored, spread_text

FEW = 4  # most lines that have a sentence each


def sections(strands: Sequence[Strand]) -> list[Section]:
    """The section, or [] if no run was evaluated for each client."""
    known = [strand for strand in strands if any("clients.mean" in run.figures for run in strand.runs)]
    if not known:
        return []
    answer: list[str] = []
    parts: list[Table | Chart | Choice] = []
    for end, some in by_metric(known):
        answer += sentences(some)
        parts += table(some, f"client-table{end}")
        parts += [chart for chart in (ordered(some, end), by_round(some, end)) if chart.panels]
    return [Section("clients-scores", "Is the model equally good for all clients?", [*answer, *missing(known)], parts)]


def sentences(strands: Sequence[Strand]) -> list[str]:
    """Sentences on the worst tenth of the clients and on the groups; [] for many lines, which the table compares."""
    made: list[str] = []
    if len(strands) > FEW:
        return made
    for strand in strands:
        figures = strand.row.clients if strand.row else {}
        if "worst" not in figures or not math.isfinite(figures["worst"][0]):
            continue
        mean, worst = (scored(figures[name][0], strand.experiment) for name in ("mean", "worst"))
        unit = " %" if strand.experiment.train.metric == "accuracy" else ""
        text = f"{strand.line.label}: the mean {metric(strand.experiment)} of clients is {mean}{unit}, that of the "
        made.append(f"{text}worst tenth {worst}{unit}.{_groups(strand)}")
    return made


def _groups(strand: Strand) -> str:
    """Sentence with the mean of each group of clients, the worst first; '' without several groups."""
    assert strand.row
    means = [(mean, name) for name, (mean, _) in strand.row.clients.items() if name.startswith("group.")]
    listed = [
        f"{client_figure(name)} {scored(mean, strand.experiment)}"
        for mean, name in sorted(means, reverse=strand.experiment.train.lower)
    ]
    return f" By uplink, the worst first: {', '.join(listed)}." if listed else ""


def missing(strands: Sequence[Strand]) -> list[str]:
    """Sentence on clients without held-out examples or without a score."""
    counts = [sum(math.isnan(x) for x in _scores(run)) for strand in strands for run in strand.runs]
    if not any(counts):
        return []
    return [f"Clients without a score are left out: up to {max(counts)} in a run."]


def table(strands: Sequence[Strand], name: str) -> list[Table]:
    """Figures over clients in the last round that has them, mean over seeds; [] if no line is finished."""
    done = [strand for strand in strands if strand.row and strand.row.clients]
    if not done:
        return []
    figures = dict.fromkeys(figure for strand in done if strand.row for figure in strand.row.clients)
    rows = []
    for strand in done:
        known = strand.row.clients if strand.row else {}
        cells = [
            spread_text(*known[figure], strand.experiment.train.metric) if figure in known else "" for figure in figures
        ]
        rows.append(TableRow(strand.line.key, [strand.line.label, *cells]))
    unit = ", %" if done[0].experiment.train.metric == "accuracy" else ""
    caption = (
        "Last round with an evaluation for each client, mean ± standard deviation over seeds. The weighted mean counts "
        "held-out examples, the worst tenth are the clients with the worst scores, the deviation is that over clients, "
        "and the last columns are means over the clients of one uplink."
    )
    lower = " (lower is better)" * done[0].experiment.train.lower
    title = f"{titled(done[0].experiment)} over clients{unit}{lower}"
    return [Table(name, title, ["line", *map(client_figure, figures)], rows, caption=caption)]


def ordered(strands: Sequence[Strand], end: str) -> Curves:
    """Scores of clients in ascending order, against the share of clients."""
    points = points_per_curve(len(strands))
    experiment = strands[0].experiment
    caption = (
        "Clients in ascending order of their score in the last round with an evaluation for each client, mean over "
        "seeds: a flat line means that all clients are served equally."
    )
    drawn = panels(strands, lambda strand: _quantiles(strand, points))
    title = f"{titled(experiment)} of clients in ascending order"
    return Curves(f"clients-ordered{end}", title, caption, Axis("clients", "%"), score_axis(experiment), drawn)


def _quantiles(strand: Strand, points: int) -> list[Curve]:
    known = [np.sort(x[~np.isnan(x)]) for x in map(_scores, strand.runs)]
    known = [x for x in known if len(x)]
    if not known:
        return []
    longest = max(len(x) for x in known)
    grid = np.linspace(0, 1, longest)[chosen(longest, points)] if longest > 1 else np.array([1.0])
    values = np.mean([np.interp(grid, np.linspace(0, 1, len(x)), x) for x in known], axis=0)
    return [Curve(line=strand.line.key, x=[cut(float(x)) or 0 for x in grid], y=cuts(values))]


def _scores(run: Recorded) -> Figures:
    name = column(run.experiment)
    return np.array([client.scores.get(name, math.nan) for client in run.client_scores], dtype=np.float64)


def by_round(strands: Sequence[Strand], end: str) -> Curves:
    """Mean over clients and mean of the worst tenth, by round, and in further panels the mean of each group."""
    points = points_per_curve(2 * len(strands))
    experiment = strands[0].experiment

    def curves(strand: Strand) -> list[Curve]:
        return [
            *curve(strand, every("clients.mean"), points, banded=True),
            *curve(strand, every("clients.worst"), points, label="worst tenth", dashed=True),
        ]

    drawn = [panel._replace(title=panel.title or "all clients") for panel in panels(strands, curves)]
    groups = dict.fromkeys(name for strand in strands for name in strand.runs[0].figures if name.startswith(GROUP))
    for name in groups:
        title = f"clients: {name.removeprefix(GROUP)}"
        found = [line for strand in strands for line in curve(strand, every(name), points, banded=True)]
        drawn += [Panel(title, found)] if found else []
    caption = f"Mean over clients and over seeds. {BAND} Short dashes: the worst tenth of the clients."
    title = f"{titled(experiment)} of clients by round"
    return Curves(f"clients-rounds{end}", title, caption, ROUND, score_axis(experiment), drawn)
