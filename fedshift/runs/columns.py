"""Columns of the record: rounds.csv, clients.csv, client_scores.csv and uplinks.csv."""

import math
import re
from collections.abc import Iterable

import torch

from fedshift.experiment.settings import Experiment
from fedshift.rounds.evaluate import Spread, spread
from fedshift.rounds.federation import Federation, Outcome

PHASES = ("train", "encode", "aggregate", "evaluate", "round", "save")
ESTIMATES = ("bytes.estimated", "bytes.framed")  # if the length of uploads depends on their values
UPLINK_COLUMNS = ["round", "client", "codec", "bytes", "bits"]  # of uplinks.csv
LAYER = ("mean_before", "mean_after", "shorter", "step", "drift", "drift_coded", "filters_before", "filters_after")


SPREAD = tuple(f"clients.{figure}" for figure in Spread._fields)  # of the score over clients
GROUP = "clients.group."  # mean over the clients of a group


def header(experiment: Experiment, fed: Federation) -> list[str]:
    return [
        "round",
        *dict.fromkeys((column(experiment), "loss", *metric_columns(experiment).values())),
        *(f"predicted.{label}" for label in range(fed.task.data.classes)),
        *(f"{figure}.{' '.join(layer.split())}" for figure in LAYER for layer in fed.layers),
        "error",
        *(f"bytes.{part}" for part in ("codes", "side", "header", "down")),
        *(ESTIMATES if fed.variable else ()),
        *("share", "arrived", "dropped", "failed"),
        *(["capped"] if _caps(experiment) else []),
        *(f"seconds.{phase}" for phase in PHASES),
        *([] if fed.bandwidth is None else ["seconds.uplink"]),
        *([] if fed.held is None else [*SPREAD, *group_columns(fed)]),
    ]


def column(experiment: Experiment) -> str:
    """Column of the score: accuracy, loss, or metric.NAME."""
    return next(iter(metric_columns(experiment).values()))


def metric_columns(experiment: Experiment) -> dict[str, str]:
    """Columns of all metrics by name, that of the score first: accuracy, loss, or metric.NAME.

    A module is part of the name only if another metric has the same name; one of fedshift never has a module.

    >>> metric_columns(Experiment(train={"metrics": ["accuracy", "f1", "mine:f1", "mine:mae"]}))
    {'accuracy': 'accuracy', 'f1': 'metric.f1', 'mine:f1': 'metric.mine:f1', 'mine:mae': 'metric.mae'}
    """
    names = list(experiment.train.directions)
    found = {name: name if name in ("accuracy", "loss") else f"metric.{name}" for name in names if ":" not in name}
    for name in names:
        if ":" in name:
            short = f"metric.{' '.join(name.rpartition(':')[2].split())}"
            found[name] = short if short not in found.values() else f"metric.{' '.join(name.split())}"
    return {name: found[name] for name in names}


def group_columns(fed: Federation) -> list[str]:
    """Columns of the mean score of the clients of each uplink; [] if all have the same."""
    return [f"{GROUP}{name}" for name in _kinds(fed)] if len(_kinds(fed)) > 1 else []


def _kinds(fed: Federation) -> dict[str, list[int]]:
    """Groups by name; equal parts of the clients with the same uplink, like '32 bit (1)' and '32 bit (2)', are one."""
    found: dict[str, list[int]] = {}
    for place, group in enumerate(fed.groups):
        name = " ".join(group.name.split())
        part = re.sub(r" \(\d+\)$", "", name)
        alike = [other for other in fed.groups if other.uplink == group.uplink]
        found.setdefault(part if len(alike) > 1 else name, []).append(place)
    return found


def row(experiment: Experiment, fed: Federation, outcome: Outcome) -> list[str]:
    score = outcome.score
    columns = metric_columns(experiment).values()
    others = score.others if score else [None] * (len(columns) - 1)
    scores = {column(experiment): outcome.accuracy, "loss": outcome.loss} | dict(
        zip(columns, [outcome.accuracy, *others], strict=True)
    )
    predicted = [n / score.examples for n in score.predicted] if score else [None] * fed.task.data.classes
    layers = [
        getattr(outcome.layers[layer], figure) if outcome.layers else None for figure in LAYER for layer in fed.layers
    ]
    return [
        *map(six, (outcome.number, *scores.values(), *predicted, *layers, outcome.error)),
        *map(str, (*outcome.bytes_up, outcome.bytes_down)),
        *(map(six, (outcome.bytes_estimated, outcome.bytes_framed)) if fed.variable else ()),
        six(outcome.share),
        *(str(outcome.arrived), str(outcome.dropped), " ".join(map(str, outcome.failed))),
        *([str(outcome.capped)] if _caps(experiment) else []),
        *(f"{outcome.seconds.get(phase, 0.0):.3g}" for phase in PHASES),
        *([] if fed.bandwidth is None else [six(outcome.uplink_seconds)]),
        *([] if fed.held is None else _client_cells(experiment, fed, outcome)),
    ]


def _client_cells(experiment: Experiment, fed: Federation, outcome: Outcome) -> list[str]:
    """Distribution of the score over clients, and its mean per group; empty in rounds without it."""
    names, groups = group_columns(fed), fed.group.tolist()
    if outcome.clients is None:
        return [""] * (len(SPREAD) + len(names))
    (values, *_), examples, lower = outcome.clients.values, outcome.clients.examples, experiment.train.lower
    means = []
    for places in _kinds(fed).values() if names else ():
        members = [client for client, group in enumerate(groups) if group in places]
        means.append(spread([values[k] for k in members], [examples[k] for k in members], lower).mean)
    return [six(x) for x in (*spread(values, examples, lower), *means)]


def client_score_lines(experiment: Experiment, fed: Federation, outcome: Outcome) -> list[list[str]]:
    """Scores of each client by each metric, with a header; empty cells for clients without a score."""
    if outcome.clients is None:
        return []
    columns = metric_columns(experiment).values()
    lines = [["round", "client", "group", "examples", *columns]]
    for client, n in enumerate(outcome.clients.examples):
        group = " ".join(fed.groups[int(fed.group[client])].name.split())
        scores = ["" if math.isnan(x[client]) else six(x[client]) for x in outcome.clients.values]
        lines.append([str(outcome.number), str(client), group, str(n), *scores])
    return lines


def _caps(experiment: Experiment) -> bool:
    """True if weights may be capped; equal weights never are."""
    return experiment.algorithm.weights == "examples" and experiment.bounds.weight > 0


def six(x: float | None) -> str:
    """Shortest text with six significant digits; '' for None.

    >>> six(0.000123456789), six(-1.5), six(True), six(None), six(48512345)
    ('1.23457e-4', '-1.5', '1', '', '48512345')
    """
    if x is None or isinstance(x, int):
        return "" if x is None else str(int(x))
    text = f"{x:.6g}"
    digits, e, power = text.partition("e")
    if text.startswith(("0.000", "-0.000")):
        digits, e, power = f"{x:.5e}".partition("e")
        digits = digits.rstrip("0").rstrip(".")
    return digits + (f"e{int(power)}" if e else "")


def uplink_rows(outcome: Outcome) -> Iterable[list[str]]:
    """Uplinks that a policy chose, one row per used upload."""
    for used in outcome.uplinks:
        codec = " ".join(used.codec.split())
        yield [str(outcome.number), str(used.client), codec, str(used.bytes), six(used.bits)]


def client_header(fed: Federation) -> list[str]:
    return ["client", "group", "examples", *(f"label.{label}" for label in range(fed.task.data.classes))]


def client_rows(fed: Federation) -> Iterable[list[str]]:
    """Label counts of every client."""
    classes, clients = fed.task.data.classes, fed.partition.clients
    sizes = fed.partition.sizes
    if classes:
        owner = torch.repeat_interleave(torch.arange(clients), sizes)
        places = owner * classes + fed.task.data.y.cpu()[fed.partition.order]
        counts = torch.bincount(places, minlength=clients * classes).view(clients, classes).tolist()
    else:
        counts = [[]] * clients
    for client, (g, n, labels) in enumerate(zip(fed.group.tolist(), sizes.tolist(), counts, strict=True)):
        yield [str(client), " ".join(fed.groups[g].name.split()), str(n), *map(str, labels)]
