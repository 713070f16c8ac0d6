"""Columns of the record: rounds.csv, clients.csv and uplinks.csv."""

from collections.abc import Iterable

import torch

from fedshift.experiment.settings import Experiment
from fedshift.rounds.federation import Federation, Outcome

PHASES = ("train", "encode", "aggregate", "evaluate", "round", "save")
ESTIMATES = ("bytes.estimated", "bytes.framed")  # if the length of uploads depends on their values
UPLINK_COLUMNS = ["round", "client", "codec", "bytes", "bits"]  # of uplinks.csv
LAYER = ("mean_before", "mean_after", "shorter", "step", "drift", "drift_coded", "filters_before", "filters_after")


def header(experiment: Experiment, fed: Federation) -> list[str]:
    return [
        "round",
        *dict.fromkeys((column(experiment), "loss")),
        *(f"predicted.{label}" for label in range(fed.task.data.classes)),
        *(f"{figure}.{' '.join(layer.split())}" for figure in LAYER for layer in fed.layers),
        "error",
        *(f"bytes.{part}" for part in ("codes", "side", "header", "down")),
        *(ESTIMATES if fed.variable else ()),
        *("share", "arrived", "dropped", "failed"),
        *(["capped"] if _caps(experiment) else []),
        *(f"seconds.{phase}" for phase in PHASES),
        *([] if fed.bandwidth is None else ["seconds.uplink"]),
    ]


def column(experiment: Experiment) -> str:
    """Column of the score: accuracy, loss, or metric.NAME for a metric of the user."""
    metric = experiment.train.metric
    return metric if metric in ("accuracy", "loss") else f"metric.{metric.rpartition(':')[2]}"


def row(experiment: Experiment, fed: Federation, outcome: Outcome) -> list[str]:
    score = outcome.score
    scores = [outcome.loss] if column(experiment) == "loss" else [outcome.accuracy, outcome.loss]
    predicted = [n / score.examples for n in score.predicted] if score else [None] * fed.task.data.classes
    layers = [
        getattr(outcome.layers[layer], figure) if outcome.layers else None for figure in LAYER for layer in fed.layers
    ]
    return [
        *map(six, (outcome.number, *scores, *predicted, *layers, outcome.error)),
        *map(str, (*outcome.bytes_up, outcome.bytes_down)),
        *(map(six, (outcome.bytes_estimated, outcome.bytes_framed)) if fed.variable else ()),
        six(outcome.share),
        *(str(outcome.arrived), str(outcome.dropped), " ".join(map(str, outcome.failed))),
        *([str(outcome.capped)] if _caps(experiment) else []),
        *(f"{outcome.seconds.get(phase, 0.0):.3g}" for phase in PHASES),
        *([] if fed.bandwidth is None else [six(outcome.uplink_seconds)]),
    ]


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
