"""What comes of a round: what there is to tell, and when to give up."""

from collections.abc import Sequence
from logging import getLogger
from typing import NamedTuple

from fedshift.flower.replies import Usable

LOG = getLogger("flwr.fedshift")
WRONG_ORDER = (  # what Flower's own mods say of a frame, or of a control
    "expects the keys in the ArrayRecord of the reply message to match",
    "expects exactly one ArrayRecord, but found 2",
)


class NoUploadsError(RuntimeError):
    """Several rounds in a row had no upload that could be used.

    >>> check_hope(5, {}, arrived=False, why="no node is there", skipped=5, patience=5)
    Traceback (most recent call last):
    fedshift.flower.outcome.NoUploadsError: round 5: no usable upload in 5 rounds in a row; the last: no node is there
    """


class Aggregated(NamedTuple):
    """What there is to tell about a round: `strategy.rounds` has one for each.

    >>> import torch
    >>> from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    >>> from flwr.clientapp import ClientApp
    >>> from flwr.serverapp.strategy import FedAvg
    >>> from fedshift.flower import FedShift, QuantizeMod
    >>> from fedshift.flower.testing import LocalGrid
    >>> app = ClientApp(mods=[QuantizeMod(bits=4)])
    >>> @app.train()
    ... def train(message, context):
    ...     content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 600})}
    ...     return Message(RecordDict(content), reply_to=message)
    >>> strategy = FedShift(FedAvg(fraction_evaluate=0.0))
    >>> start = ArrayRecord({"weight": torch.randn(100, 100)})
    >>> result = strategy.start(LocalGrid(app, 2), start, num_rounds=1)
    >>> strategy.rounds
    [Aggregated(number=1, used=2, lossy=2, share=1.0, failed={}, reset=[], bytes_up=10268, bytes_exact=80256)]
    """

    number: int
    used: int
    lossy: int
    share: float  # of the weight that quantized uploads had, before `max_share` and `warmup`
    failed: dict[int, str]  # nodes whose upload was left out, and why
    reset: list[int]  # nodes that had lost their memory
    bytes_up: int  # of arrays that were used
    bytes_exact: int  # what they would have been at full precision


def aggregated(number: int, used: Sequence[Usable], share: float, failed: dict[int, str]) -> Aggregated:
    """The round, and its lines in the log."""
    reset = [one.message.metadata.src_node_id for one in used if one.reset]
    lossy, size = sum(one.lossy for one in used), sum(one.bytes_up for one in used)
    exact = sum(one.bytes_exact for one in used)
    for node, why in failed.items():
        LOG.warning("round %d: the upload of node %d is left out: %s", number, node, why)
    for node in reset:
        LOG.warning("round %d: node %d had lost its memory and started anew", number, node)
    told = f"{len(used)} uploads, {lossy} of them quantized (share {share:.2f}), {len(failed)} left out"
    LOG.info("\t└──> FedShift: %s, %.1f kB up in place of %.1f", told, size / 1000, exact / 1000)
    return Aggregated(number, len(used), lossy, share, failed, reset, size, exact)


def check_hope(number: int, failed: dict[int, str], arrived: bool, why: str, skipped: int, patience: int) -> None:
    """NoUploadsError after so many rounds that changed nothing, the last one because of `why`."""
    if not arrived and any(sentence in reason for reason in failed.values() for sentence in WRONG_ORDER):
        raise NoUploadsError(
            f"round {number}: the clients' mods are in the wrong order; QuantizeMod must be the first: "
            "ClientApp(mods=[QuantizeMod(...), fixedclipping_mod])"
        )
    if skipped >= patience:
        raise NoUploadsError(f"round {number}: no usable upload in {skipped} rounds in a row; the last: {why}")
