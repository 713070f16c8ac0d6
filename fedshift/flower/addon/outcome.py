"""What comes of a round: what there is to tell, and when to give up."""

from logging import getLogger
from typing import NamedTuple

from fedshift.flower.addon.arrays import PACKED
from fedshift.flower.addon.mod import WRONG_ORDER
from fedshift.flower.addon.replies import Sorted

LOG = getLogger("flwr.fedshift")
TWO_RECORDS = "expects exactly one ArrayRecord, but found 2"  # Flower's clipping mods, of a control before ScaffoldMod
NO_MOD = (
    "FedShift(pack=True) needs QuantizeMod or ScaffoldMod as the first mod of every client; add it or set pack=False"
)


class NoUploadsError(RuntimeError):
    """Several rounds in a row had no upload that could be used, or all of the first failed for the same reason.

    >>> check_hope(5, {}, arrived=False, why="no node is there", skipped=5, patience=5)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fedshift.flower.addon.outcome.NoUploadsError: round 5: no usable upload in 5 rounds in a row; ...
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
    >>> strategy.rounds  # doctest: +NORMALIZE_WHITESPACE
    [Aggregated(number=1, used=2, lossy=2, share=1.0, failed={}, reset=[], bytes_up=10268,
    bytes_exact=80256, outliers=[], capped=[])]
    """

    number: int
    used: int
    lossy: int
    share: float  # of the weight that quantized uploads had, before `max_share` and `warmup`
    failed: dict[int, str]  # nodes whose upload was left out, and why
    reset: list[int]  # nodes that had lost their memory
    bytes_up: int  # of arrays that were used
    bytes_exact: int  # what they would have been at full precision
    outliers: list[int]  # nodes in `failed` whose update was longer than `bound` allows
    capped: list[int]  # nodes whose weight was lowered to what `max_weight` allows


def aggregated(number: int, found: Sorted, share: float, accepted: bool) -> Aggregated:
    """The round, and its lines in the log; where its result was not accepted, no upload was used."""
    used, failed = found.usable if accepted else [], found.failed
    reset = [one.node for one in used if one.reset]
    capped = [one.node for one in used if one.lowered]
    lossy, size = sum(one.lossy for one in used), sum(one.bytes_up for one in used)
    exact = sum(one.bytes_exact for one in used)
    for node, why in failed.items():
        LOG.warning("round %d: the upload of node %d is left out: %s", number, node, why)
    for node in reset:
        LOG.warning("round %d: node %d had lost its memory and started anew", number, node)
    told = f"{len(used)} uploads, {lossy} of them quantized (share {share:.2f}), {len(failed)} left out"
    LOG.info("\t└──> FedShift: %s, %.1f kB up in place of %.1f", told, size / 1000, exact / 1000)
    return Aggregated(number, len(used), lossy, share, failed, reset, size, exact, found.outliers, capped)


def check_hope(
    number: int, failed: dict[int, str], arrived: bool, why: str, skipped: int, patience: int, unanimous: str = ""
) -> None:
    """NoUploadsError after so many rounds that changed nothing, the last one because of `why`.

    At once where all replies failed for one `unanimous` reason.
    """
    if not arrived and any(text in reason for reason in failed.values() for text in (WRONG_ORDER, TWO_RECORDS)):
        raise NoUploadsError(f"round {number}: {WRONG_ORDER}")
    if not arrived and failed and all(f"'{PACKED}'" in reason for reason in failed.values()):
        raise NoUploadsError(f"round {number}: {NO_MOD}")
    if unanimous:
        raise NoUploadsError(f"round {number}: every reply failed for the same reason: {unanimous}")
    if skipped >= patience:
        raise NoUploadsError(f"round {number}: no usable upload in {skipped} rounds in a row; the last: {why}")
