"""What server and node say to each other in a round: an order goes out, a report on each client comes back.

Models and uploads travel beside it as arrays. What clients remember does not travel at all.
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from flwr.app import ConfigRecord

from fedshift.algorithms import ClientRule
from fedshift.experiment.settings import Experiment
from fedshift.flower.addon.replies import brief
from fedshift.rounds.engine import Histogram, Upload
from fedshift.rounds.uplink import Uplink
from fedshift.rounds.upload_stats import BINS

TRAIN = "train"
ARRAYS, CONFIG = "arrays", "config"  # records of a message; the last is of a reply as well
FRAMES = "frames"
EXTRA = "/extra"  # after a client's number, the name of its second frame


class Order(NamedTuple):
    """What a node is told beside the model: which clients it plays, and what it needs to know of each."""

    number: int  # of the round
    steps: int  # of the cohort's longest plan: a sum over a plan of another length may end in another bit
    experiment: str  # the digest of the server's
    session: str
    saved: int  # a round the server may go back to
    histograms: bool
    clients: list[int]
    accepted: list[int]  # for each client, the round of its last upload that was used; 0 for none

    def config(self) -> ConfigRecord:
        return ConfigRecord(self._asdict())

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> "Order":
        return cls(*(config[name] for name in cls._fields))


def digest(experiment: Experiment) -> str:
    """A checksum of what has to be the same at both ends: not where things are kept, nor names of one's own objects."""
    said = experiment.model_dump(mode="json", exclude={"name", "model", "engine", "record"})
    said["data"].pop("name")
    said["train"] = {key: x for key, x in said["train"].items() if key not in ("rounds", "loss", "metric", "goal")}
    return f"{zlib.crc32(json.dumps(said, sort_keys=True).encode()):08x}"


def remembers(rule: ClientRule, uplink: Uplink) -> bool:
    """Whether a client keeps something from one round to the next: both ends have to agree."""
    return rule.extra != "none" or (uplink.feedback and uplink.lossy)


def report(upload: Upload) -> str:
    """What is to be told about an upload, but for its frames."""
    told = {
        "drift": upload.drift,
        "error": upload.error,
        "seconds": upload.seconds,
        "failure": upload.failure,
        "histograms": upload.histograms,
    }
    return json.dumps(told)


def read_report(client: int, text: object, layers: Sequence[str]) -> Upload:
    """An upload without its frames, from what anybody may have written; ValueError where it is not a report."""
    try:
        told = json.loads(str(text))
        failure = brief(told["failure"])
        seconds = _measure(told["seconds"][0], math.inf), _measure(told["seconds"][1], math.inf)
        drift = [(_measure(own), _measure(coded)) for own, coded in told["drift"]]
        histograms = tuple(_histogram(one, layers) for one in told["histograms"])
        if len(drift) != (0 if failure else len(layers)):
            raise ValueError
        return Upload(client, b"", b"", {}, drift, _measure(told["error"]), seconds, failure, histograms)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError):
        raise ValueError("its report cannot be read") from None


def _measure(x: Any, below: float | None = None) -> float:
    """A number that is not negative; a client that diverges may honestly measure infinity."""
    if type(x) not in (int, float) or not x >= 0 or (below is not None and x >= below):
        raise ValueError
    return float(x)


def _histogram(told: Any, layers: Sequence[str]) -> Histogram:
    layer, low, high, before, after = told
    whole = all(len(counts) == BINS and all(type(n) is int and n >= 0 for n in counts) for counts in (before, after))
    if layer not in layers or not whole or not math.isfinite(low) or not math.isfinite(high):
        raise ValueError
    return Histogram(layer, float(low), float(high), before, after)
