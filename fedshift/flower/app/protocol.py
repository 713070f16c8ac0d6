"""Messages between server and nodes in a round: a training request, and a report on each client.

Models and uploads are sent as arrays in the same messages. The memory of clients is not sent.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flwr.app import ConfigRecord

from fedshift.experiment.settings import Experiment, run_number
from fedshift.flower.addon.replies import brief
from fedshift.rounds.engine import Histogram, Upload
from fedshift.rounds.policy import sent_loss
from fedshift.rounds.upload_stats import BINS

TRAIN = "train"
ARRAYS, CONFIG = "arrays", "config"  # names of the records of a message; a reply has the second as well
FRAMES = "frames"
SECOND = "/second"  # suffix of a client's number in the name of its second frame


class TrainRequest(NamedTuple):
    """Clients that a node trains in a round, with the information it needs besides the model."""

    number: int  # round
    steps: int  # of the cohort's longest plan: the length of a plan may change the last bit of a sum
    experiment: str  # digest of the server's settings
    session: str
    saved: int  # oldest round that the server may resume from
    histograms: bool
    clients: list[int]
    accepted: list[int]  # round of the last accepted upload of each client; 0 for none
    base: int  # round of the broadcast that the arrays update, if they are updates; 0 if they are the whole model
    uplinks: list[str]  # of each client, as JSON; [] if they are those of the settings

    def config(self) -> ConfigRecord:
        return ConfigRecord(self._asdict())

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "TrainRequest":
        return cls(*(config[name] for name in cls._fields))


def digest(experiment: Experiment) -> str:
    """Checksum of the settings that must be equal on server and nodes."""
    return f"{run_number(experiment):016x}"


def report(upload: Upload) -> str:
    """Statistics of an upload as JSON, without its frames."""
    stats = {
        "drift": upload.drift,
        "error": upload.error,
        "seconds": upload.seconds,
        "failure": upload.failure,
        "histograms": upload.histograms,
        "silent": upload.silent,
        "loss": upload.loss,
    }
    return json.dumps(stats)


def read_report(client: int, text: object, layers: Sequence[str]) -> Upload:
    """Read an upload without its frames from an untrusted report; ValueError if the report is invalid."""
    try:
        stats = json.loads(str(text))
        failure = brief(stats["failure"])
        seconds = _measure(stats["seconds"][0], math.inf), _measure(stats["seconds"][1], math.inf)
        drift = [(_measure(before), _measure(after)) for before, after in stats["drift"]]
        histograms = tuple(_histogram(values, layers) for values in stats["histograms"])
        silent = stats["silent"] is True
        loss = None if stats["loss"] is None else _loss(stats["loss"])
        if len(drift) != (0 if failure or silent else len(layers)):
            raise ValueError
        error = _measure(stats["error"])
        return Upload(client, b"", b"", {}, drift, error, seconds, failure, histograms, silent, loss)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError):
        raise ValueError("its report is invalid") from None


def _measure(x: Any, below: float | None = None) -> float:
    """Check a nonnegative number; it may be infinite in a client that diverges."""
    if type(x) not in (int, float) or not x >= 0 or (below is not None and x >= below):
        raise ValueError
    return float(x)


def _loss(x: Any) -> float:
    if type(x) not in (int, float):
        raise ValueError
    return sent_loss(float(x))


def _histogram(values: Any, layers: Sequence[str]) -> Histogram:
    layer, low, high, before, after = values
    whole = all(len(counts) == BINS and all(type(n) is int and n >= 0 for n in counts) for counts in (before, after))
    if layer not in layers or not whole or not math.isfinite(low) or not math.isfinite(high):
        raise ValueError
    return Histogram(layer, float(low), float(high), before, after)
