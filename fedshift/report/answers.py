"""Section "Did the shift help?": final scores with their spread over seeds, and differences beyond noise."""

import math
import statistics
from collections.abc import Sequence

from fedshift.core.units import megabytes
from fedshift.report.charts import Band, Interval, Intervals, Section, Table, TableRow
from fedshift.report.curves import by_metric, cut, score, score_axis
from fedshift.report.lines import PER_FILTER, PER_LAYER, Grouped, Strand, rule_of
from fedshift.runs import summary
from fedshift.runs.summary import BITS, SHIFT, UPLINK, metric, scored

FEW = {SHIFT, BITS, UPLINK}  # with no other varying settings, each comparison has its own sentence


def section(grouped: Grouped) -> Section:
    parts: list[Table | Intervals] = []
    answer: list[str] = []
    for end, strands in by_metric(grouped.strands):
        answer += sentences(strands)
        parts.append(table(strands, grouped.varying, f"results{end}"))
        parts += metrics(strands, f"metrics{end}")
        if any(strand.row and math.isfinite(strand.row.mean) for strand in strands):
            parts.append(intervals(strands, f"final{end}"))
    return Section("answer", "Did the shift help?", answer, [*parts])


def metrics(strands: Sequence[Strand], name: str) -> list[Table]:
    """Table of all metrics with their goals, one row per line; [] if no line has further metrics."""
    done = [strand for strand in strands if strand.row and len(strand.experiment.train.directions) > 1]
    if not done:
        return []
    goals = {metric: goal for strand in done for metric, goal in strand.experiment.train.directions.items()}
    rows = []
    for strand in done:
        known = strand.row.metrics if strand.row else {}
        cells = [summary.spread_text(*known[metric], metric) if metric in known else "" for metric in goals]
        rows.append(TableRow(strand.line.key, [strand.line.label, *cells]))
    better = {"min": "lower is better", "max": "higher is better", None: "goal unknown"}
    heads = [
        f"{label}{', %' * (metric == 'accuracy')} ({better[goals[metric]]})"
        for metric, label in summary.metric_labels(goals).items()
    ]
    caption = "Mean of the last ten evaluated rounds, ± standard deviation over seeds."
    return [Table(name, "All metrics", ["line", *heads], rows, caption=caption)]


def sentences(strands: Sequence[Strand]) -> list[str]:
    done = [strand for strand in strands if strand.row]
    if not done:
        return ["No run is finished yet."]
    done = [strand for strand in done if strand.row and math.isfinite(strand.row.mean)]
    if not done:
        return [f"Final scores ({metric(strands[0].experiment)}) are NaN or infinite."]
    rows = [strand.row for strand in done if strand.row]
    shifted = [
        strand
        for strand in done
        if strand.row and strand.row.against == "no shift" and math.isfinite(strand.row.gain or 0.0)
    ]
    experiment = done[0].experiment
    if not shifted:
        data = dict.fromkeys(strand.experiment.data.name for strand in done)
        by_data = [[strand for strand in done if strand.experiment.data.name == name] for name in data]
        return [*map(_reached, by_data), _nothing_to_compare([strand for strand in strands if strand.row])]
    if set(rows[0].label) <= FEW and experiment.train.metric == "accuracy":
        gained = summary.sentences([*(row for row in rows if row.against == "no shift")])
        return gained + summary.sentences([row for row in rows if row.against != "no shift"])
    rules = {
        rule: [strand for strand in shifted if rule_of(strand.experiment) == rule] for rule in (PER_LAYER, PER_FILTER)
    }
    return [sentence for rule, some in rules.items() if some for sentence in _counted(rule, some)]


def _reached(done: Sequence[Strand]) -> str:
    """Final score of the only line, or of the best of several."""
    lower = done[0].experiment.train.lower
    best = (min if lower else max)(done, key=lambda strand: strand.row.mean if strand.row else 0.0)
    assert best.row
    unit = " %" if best.experiment.train.metric == "accuracy" else ""
    spread = "" if best.row.spread is None else f" ± {scored(best.row.spread, best.experiment)}"
    window = min(summary.WINDOW, int(best.runs[0].evaluated.sum()))
    end = "lowest" if lower else "highest"
    which = f"{best.line.label} reached" if len(done) == 1 else f"The {end} of {len(done)} is {best.line.label}, with"
    many = "the last evaluated round" if window == 1 else f"the mean of the last {window} evaluated rounds"
    return f"{which} {metric(best.experiment)} {scored(best.row.mean, best.experiment)}{spread}{unit}, {many}."


def _nothing_to_compare(done: Sequence[Strand]) -> str:
    if any(strand.row and strand.row.gain is not None and strand.row.against == "no shift" for strand in done):
        return "Scores with or without the shift are NaN or infinite, so its effect is unknown."
    with_it = [strand for strand in done if strand.experiment.shift.on]
    if len(with_it) == len(done):
        return "There is no run without the shift to compare with, so its effect is unknown."
    if not with_it:
        return "No run uses the shift, so its effect is unknown."
    return "No two runs differ in the shift alone, so its effect is unknown."


def _counted(rule: str, shifted: Sequence[Strand]) -> list[str]:
    """Sentences on many comparisons of one rule."""
    gains = [
        (strand.row.gain, strand.row.verdict, strand)
        for strand in shifted
        if strand.row and strand.row.gain is not None
    ]
    experiment, name = shifted[0].experiment, metric(shifted[0].experiment)
    points = experiment.train.metric == "accuracy"

    def amount(gain: float) -> str:
        return f"{100 * gain:+.1f} points" if points else f"{gain:+.4g}{summary.quality(gain, experiment)}"

    if len(gains) == 1:
        ((gain, verdict, _),) = gains
        return [f"With the shift {rule}, {name} differs by {amount(gain)}{f' ({verdict})' if verdict else ''}."]
    more, less = (sum(sign * gain > 0 for gain, _, _ in gains) for sign in (1, -1))
    clear = [gain for gain, verdict, _ in gains if not verdict]
    alone = sum(verdict.startswith(("one seed", "no seed")) for _, verdict, _ in gains)
    higher, lower = ("higher (worse)", "lower (better)") if experiment.train.lower else ("higher", "lower")
    answer = [f"With the shift {rule}, {name} is {higher} in {more} of {len(gains)} comparisons and {lower} in {less}."]
    if alone == len(gains):
        answer.append("There are too few seeds to estimate the noise.")
    else:
        up, down = (sum(sign * gain > 0 for gain in clear) for sign in (1, -1))
        rest = f"; in {noise} the difference is within noise" if (noise := len(gains) - up - down - alone) else ""
        rest += f"; in {alone} there are too few seeds to judge" if alone else ""
        answer.append(f"Beyond noise it is {higher} in {up} and {lower} in {down}{rest}.")
    (least, _, worst), (most, _, best) = (pick(gains, key=lambda strand: strand[0]) for pick in (min, max))
    mean = statistics.fmean(gain for gain, _, _ in gains)
    ends = f"from {amount(least)} ({worst.line.label}) to {amount(most)} ({best.line.label})"
    return [*answer, f"The mean difference is {amount(mean)}, {ends}."]


def table(strands: Sequence[Strand], varying: Sequence[str], name: str) -> Table:
    experiment = strands[0].experiment
    unit = ", %" if experiment.train.metric == "accuracy" else ""
    lower = " (lower is better)" * experiment.train.lower
    compared = any(strand.row and strand.row.gain is not None for strand in strands)
    words = [*summary.words(varying).values()] or ["line"]
    columns = [*words, f"{metric(experiment)}{unit}", *(["difference"] * compared), "seeds", "last round", "MB up"]
    rows = []
    for strand in strands:
        label = [*strand.line.settings.values()] or [strand.line.label]
        rows.append(TableRow(strand.line.key, [*label, *_result_cells(strand, compared)]))
    return Table(name, f"Final {metric(experiment)}{lower}", columns, rows)


def _result_cells(strand: Strand, compared: bool) -> list[str]:
    experiment, row = strand.experiment, strand.row
    if row is None:
        so_far = [float(score(run)[run.evaluated][-1]) for run in strand.runs if run.evaluated.any()]
        at = f"unfinished, round {strand.reached} of {experiment.train.rounds}"
        last = scored(statistics.fmean(so_far), experiment) if so_far else ""
        up = statistics.fmean(float(run.up.sum()) for run in strand.runs)
        return [at, *([""] * compared), str(len(strand.runs)), last, megabytes(up)]
    spread = "" if row.spread is None else f" ± {scored(row.spread, experiment)}"
    cells = [f"{scored(row.mean, experiment)}{spread}", *([summary.difference_text(row, experiment)] * compared)]
    return [*cells, str(len(row.scores)), scored(row.last, experiment), megabytes(row.bytes_up)]


def intervals(strands: Sequence[Strand], name: str) -> Intervals:
    """Final scores of all seeds; those to be compared are in one band."""
    headings: dict[str, dict[str, list[Interval]]] = {}
    for strand in strands:
        if strand.row and math.isfinite(strand.row.mean):
            spread = None if strand.row.spread is None else cut(strand.row.spread)
            seeds = {seed: cut(value) or 0.0 for seed, value in strand.row.scores.items()}
            interval = Interval(strand.line.key, cut(strand.row.mean) or 0.0, spread, seeds)
            headings.setdefault(strand.heading, {}).setdefault(strand.band, []).append(interval)
    bands = [(heading, [Band(*band) for band in bands.items()]) for heading, bands in headings.items()]
    experiment = strands[0].experiment
    caption = "Mean of the last ten evaluated rounds: each seed, the mean over seeds, and their standard deviation."
    title = f"Final {metric(experiment)} by seed"
    return Intervals(name, title, caption, score_axis(experiment), bands, experiment.train.lower)
