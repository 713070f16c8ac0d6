"""Lines of the legend: runs that differ only in their seed form one line."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedshift.experiment.settings import Experiment
from fedshift.report.charts import Curve, Dash, LegendLine, Panel
from fedshift.report.style import COLOURS
from fedshift.runs import summary
from fedshift.runs.recorded import Recorded
from fedshift.runs.summary import BITS, NO, SHIFT, UPLINK, comparable, described, phrase

MOST = 8  # lines in one panel; more are split over several panels
PANELS = 12
ALGORITHM = "algorithm.name"
PER_LAYER, PER_FILTER = "per layer", "per filter"  # values of SHIFT in addition to NO, in the order of a legend
FIRST = (ALGORITHM, "data.name", "model.name", UPLINK, BITS)  # first settings of a label; the shift is last


class Strand(NamedTuple):
    """A line and its runs, one per seed: finished runs or, if there are none, unfinished ones."""

    line: LegendLine
    runs: list[Recorded]
    row: summary.SummaryRow | None  # result; None while none of its runs is finished
    heading: str  # setting that lines under this heading share: 'fedprox'
    band: str  # other settings except the shift: '32+4 bits'
    panel: str  # the heading if there are several panels, otherwise ''

    @property
    def experiment(self) -> Experiment:
        return self.runs[0].experiment

    @property
    def reached(self) -> int:
        """Last round that all of its runs have reached."""
        return min(run.reached for run in self.runs)


class Grouped(NamedTuple):
    strands: list[Strand]
    varying: list[str]  # settings in which they differ, as shown in tables
    doubles: list[tuple[Recorded, Recorded]]  # duplicates, and the runs that are used instead


def counts(run: Recorded) -> bool:
    """True if a run is finished and its last rounds, which the score is computed from, are recorded."""
    return run.finished and run.reached > run.experiment.train.rounds - summary.WINDOW and bool(run.evaluated.any())


def grouped(runs: Sequence[Recorded]) -> Grouped:
    """Strands in the order of a legend: by heading, by band, without shift, per layer, per filter."""
    experiments = [run.experiment for run in runs]
    differing, kinds = summary.apart(experiments)
    varying = summary.columns(differing, experiments)
    seeds: dict[tuple[str, ...], dict[int, Recorded]] = {}
    doubles = []
    for run, kind in zip(runs, kinds, strict=True):
        members, seed = seeds.setdefault(kind, {}), run.experiment.seed
        if seed in members:
            better = counts(run) and not counts(members[seed])
            doubles.append((members[seed], run) if better else (run, members[seed]))
            run = run if better else members[seed]
        members[seed] = run
    flat = {kind: described(next(iter(members.values())).experiment) for kind, members in seeds.items()}
    split = _split(varying, list(flat.values()))
    named = _label_keys(varying, list(flat.values())) or [ALGORITHM, UPLINK, SHIFT]  # a single line needs a name, too
    made = [_strand(flat[kind], members, varying, named, split) for kind, members in seeds.items()]
    rows = _rows(made, experiments)
    several = len(made) > MOST and bool(split)
    made = [
        strand._replace(row=row, panel=strand.heading if several else "")
        for strand, row in zip(made, rows, strict=True)
    ]
    return Grouped(_coloured(_ordered(made)), varying, doubles)


def _rows(made: Sequence[Strand], of: Sequence[Experiment]) -> list[summary.SummaryRow | None]:
    """Summary of each strand, in the same order."""
    finished = [counts(strand.runs[0]) for strand in made]
    results = [outcome(run) for strand, done in zip(made, finished, strict=True) if done for run in strand.runs]
    found = iter(summary.rows(results, of)) if results else iter(())
    return [next(found) if done else None for done in finished]


def outcome(run: Recorded) -> summary.RunResult:
    evaluated, sent = run.evaluated, run.uploaded
    trace = summary.Trace(*(x[evaluated].tolist() for x in (run.rounds, np.cumsum(sent.up), run.scores)))
    made = summary.result(run.experiment, trace, sent, float(run.down.sum()))
    return made._replace(further=summary.further(run.experiment, run.figures, evaluated))


def _split(varying: Sequence[str], flat: Sequence[Mapping[str, Any]]) -> str:
    """Setting used for headings: the algorithm, or the one with the fewest lines under each heading."""
    if ALGORITHM in varying:
        return ALGORITHM
    sizes = {key: _sizes([str(settings.get(key)) for settings in flat]) for key in varying if key != SHIFT}
    able = {key: lines for key, lines in sizes.items() if 1 < len(lines) <= PANELS}
    if len(flat) <= MOST or not able:
        return ""
    return min(able, key=lambda key: (max(0, max(able[key]) - MOST), len(able[key]), key in (BITS, UPLINK)))


def _label_keys(varying: Sequence[str], flat: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings of a label, in order, without those that are not needed to distinguish lines."""
    kept = sorted(varying, key=lambda key: (key == SHIFT, FIRST.index(key) if key in FIRST else len(FIRST)))
    for key in reversed([key for key in kept if key not in (*FIRST, SHIFT)]):
        fewer = [other for other in kept if other != key]
        if len({tuple(str(settings.get(other)) for other in fewer) for settings in flat}) == len(flat):
            kept = fewer
    return kept


def _sizes(values: Sequence[str]) -> list[int]:
    return [values.count(value) for value in dict.fromkeys(values)]


def _strand(
    flat: Mapping[str, Any], seeds: Mapping[int, Recorded], varying: Sequence[str], named: Sequence[str], split: str
) -> Strand:
    runs = [seeds[seed] for seed in sorted(seeds)]
    done = [run for run in runs if counts(run)]
    words = summary.words(varying)
    phrases = {key: phrase(key, words.get(key, ""), flat.get(key)) for key in named}
    rest = [text for key, text in phrases.items() if text and key not in (split or ALGORITHM, SHIFT)]
    line = LegendLine(
        key="",
        label=", ".join([*filter(None, phrases.values()), *([] if done else ["unfinished"])]) or "plain",
        settings={words[key]: value for key, value in summary.label(runs[0].experiment, varying).items()},
        colour=0,
        dash="",
        runs=[run.folder.name for run in runs],
    )
    band = ", ".join(rest) or phrase(UPLINK, "", flat[UPLINK])
    return Strand(line, done or runs, None, phrases.get(split or ALGORITHM, ""), band, "")


def _ordered(made: Sequence[Strand]) -> list[Strand]:
    headings = list(dict.fromkeys(strand.heading for strand in made))
    bands = list(dict.fromkeys(strand.band for strand in made))

    def place(strand: Strand) -> tuple[int, int, int]:
        rule = (NO, PER_LAYER, PER_FILTER).index(rule_of(strand.experiment))
        return headings.index(strand.heading), bands.index(strand.band), rule

    return sorted(made, key=place)


def rule_of(experiment: Experiment) -> str:
    """Rule of the shift: 'no', 'per layer' or 'per filter'."""
    return str(comparable(experiment)[SHIFT])


def _dashes(made: Sequence[Strand]) -> dict[str, Dash]:
    """Dash of the lines of each rule; solid for a rule that has no other to be distinguished from."""
    rules = {rule_of(strand.experiment) for strand in made}
    return {
        NO: "dashed" if len(rules) > 1 else "",
        PER_LAYER: "dotdash" if PER_FILTER in rules else "",
        PER_FILTER: "",
    }


def _coloured(made: Sequence[Strand]) -> list[Strand]:
    """Strands with keys, distinct labels, one colour per band (the same in every panel), and one dash per rule."""
    colours = list(dict.fromkeys((strand.heading, strand.band)[bool(strand.panel) :] for strand in made))
    dashes = _dashes(made)
    labels = [strand.line.label for strand in made]
    coloured = []
    for i, strand in enumerate(made):
        alike = labels[:i].count(labels[i])
        line = strand.line._replace(
            key=f"line-{i}",
            label=labels[i] + (f" ({alike + 1})" if alike else ""),
            colour=colours.index((strand.heading, strand.band)[bool(strand.panel) :]) % len(COLOURS),
            dash=dashes[rule_of(strand.experiment)],
        )
        coloured.append(strand._replace(line=line))
    return coloured


def panels(strands: Iterable[Strand], curves: Callable[[Strand], Sequence[Curve]]) -> list[Panel]:
    """Panels with the curves of all lines, one per heading if there are many lines."""
    found: dict[str, list[Curve]] = {}
    for strand in strands:
        found.setdefault(strand.panel, []).extend(curves(strand))
    return [Panel(title, drawn) for title, drawn in found.items() if drawn]
