"""What happened inside? Scores and losses, layers, predictions, errors of the quantizer, weights."""

from collections.abc import Callable, Sequence

import numpy as np

from fedshift.report import labels, layers, weights
from fedshift.report.charts import Axis, Chart, Choice, Curves, Panel, Section
from fedshift.report.curves import AVERAGE, BAND, ROUND, averaged, by_metric, curve, every, room, score, titled
from fedshift.report.curves import score_axis as axis
from fedshift.report.lines import Strand, panels
from fedshift.runs.recorded import Recorded
from fedshift.runs.sheet import Figures


def section(strands: Sequence[Strand]) -> Section:
    parts: list[Chart | Choice] = [*scores(strands), *losses(strands), *layers.charts(strands)]
    parts += [*labels.charts(strands), *errors(strands), *weights.charts(strands)]
    return Section("inside", "What happened inside?", labels.sentences(strands), [*parts])


def scores(strands: Sequence[Strand]) -> list[Curves]:
    made = []
    for end, some in by_metric(strands):
        experiment, found = some[0].experiment, averages(some, score)
        made.append(Curves(f"score{end}", titled(experiment), f"{AVERAGE} {BAND}", ROUND, axis(experiment), found))
    return [chart for chart in made if chart.panels]


def averages(strands: Sequence[Strand], of: Callable[[Recorded], Figures]) -> list[Panel]:
    points = room(len(strands))
    return panels(strands, lambda one: curve(one, averaged(of), points, banded=True))


def losses(strands: Sequence[Strand]) -> list[Curves]:
    others = [one for one in strands if one.experiment.train.metric != "loss"]  # of which it is the score
    found = averages(others, lambda run: run.figure("loss"))
    return [Curves("loss", "Loss", f"{AVERAGE} {BAND}", ROUND, Axis("test loss"), found)] if found else []


def errors(strands: Sequence[Strand]) -> list[Curves]:
    lossy = [one for one in strands if any(np.nansum(run.figure("error")) for run in one.runs)]
    found = panels(lossy, lambda one: curve(one, every("error"), room(2 * len(lossy)), banded=True))
    caption = f"|w - Q(w)| / |w|, mean over the quantized uploads of a round, and over seeds. {BAND}"
    axis = Axis("relative error", "%")
    return [Curves("error", "Quantization error", caption, ROUND, axis, found)] if found else []
