"""Statistics of an aggregated round, and the conditions that end a training."""

from logging import getLogger
from typing import NamedTuple

from fedshift.flower.addon.arrays import FRAME, PACKED
from fedshift.flower.addon.mod import WRONG_ORDER
from fedshift.flower.addon.replies import Sorted

LOG = getLogger("flwr.fedshift")
TWO_RECORDS = "expects exactly one ArrayRecord, but found 2"  # error of Flower's clipping mods before ScaffoldMod
NO_MOD = (
    "FedShift(pack=True) and FedShift(downlink=...) need QuantizeMod or ScaffoldMod as the first mod of every client; "
    "add it, or leave out pack and downlink"
)


class NoUploadsError(RuntimeError):
    """Several rounds in a row had no usable upload, or every reply of the first round failed for the same reason.

    >>> check_progress(5, {}, arrived=False, why="no node is connected", skipped=5, patience=5)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedshift.flower.addon.outcome.NoUploadsError: round 5: no usable upload in 5 rounds in a row; ...
    """


class Aggregated(NamedTuple):
    """Statistics of a round; `strategy.rounds` contains one item per round.

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
    >>> result = strategy.start(LocalGrid(app, 2, seed=0), start, num_rounds=1)
    >>> strategy.rounds  # doctest: +NORMALIZE_WHITESPACE
    [Aggregated(number=1, used=2, lossy=2, share=1.0, failed={}, reset=[], bytes_up=10235,
    bytes_exact=80256, outliers=[], capped=[])]
    """

    number: int
    used: int
    lossy: int
    share: float  # weight of the quantized uploads, before `max_share` and `warmup`
    failed: dict[int, str]  # reason by node, for uploads that were left out
    reset: list[int]  # nodes that lost their memory
    bytes_up: int  # of the arrays of used uploads
    bytes_exact: int  # of the same arrays at full precision
    outliers: list[int]  # nodes in `failed` whose update was longer than `bound` allows
    capped: list[int]  # nodes whose weight was lowered to what `max_weight` allows


def aggregated(number: int, found: Sorted, share: float, accepted: bool) -> Aggregated:
    """Log the round and return its statistics; no upload counts as used if the result was not accepted."""
    used, failed = found.usable if accepted else [], found.failed
    reset = [upload.node for upload in used if upload.reset]
    capped = [upload.node for upload in used if upload.lowered]
    lossy, size = sum(upload.lossy for upload in used), sum(upload.bytes_up for upload in used)
    exact = sum(upload.bytes_exact for upload in used)
    for node, why in failed.items():
        LOG.warning("round %d: the upload of node %d is left out: %s", number, node, why)
    for node in reset:
        LOG.warning("round %d: node %d lost its memory, which was reset", number, node)
    summary = f"{len(used)} uploads, {lossy} of them quantized (share {share:.2f}), {len(failed)} left out"
    LOG.info("\t└──> FedShift: %s, %.1f kB uploaded instead of %.1f kB", summary, size / 1000, exact / 1000)
    return Aggregated(number, len(used), lossy, share, failed, reset, size, exact, found.outliers, capped)


def check_progress(
    number: int, failed: dict[int, str], arrived: bool, why: str, skipped: int, patience: int, unanimous: str = ""
) -> None:
    """Raise NoUploadsError after `patience` skipped rounds, or at once for a reason that no further round can change.

    `why` is the reason of the last round; `unanimous` the reason that all replies of the first round have in common.
    """
    if not arrived and any(text in reason for reason in failed.values() for text in (WRONG_ORDER, TWO_RECORDS)):
        raise NoUploadsError(f"round {number}: {WRONG_ORDER}")
    if not arrived and failed and all(f"'{PACKED}'" in why or f"'{FRAME}'" in why for why in failed.values()):
        raise NoUploadsError(f"round {number}: {NO_MOD}")
    if unanimous:
        raise NoUploadsError(f"round {number}: every reply failed for the same reason: {unanimous}")
    if skipped >= patience:
        raise NoUploadsError(f"round {number}: no usable upload in {skipped} rounds in a row; last reason: {why}")
