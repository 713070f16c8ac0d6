"""Replies of nodes: decoded, checked one by one and against each other before they are aggregated."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from torch import Tensor

from fedshift.algorithms.bounds import (
    CAP,
    VARIANCES,
    capped,
    median_integers,
    middle,
    outliers,
    reaches,
    reference,
    refusal,
    update_floor,
)
from fedshift.codecs.base import finite
from fedshift.core.names import printable
from fedshift.core.tree import norm
from fedshift.core.types import Params
from fedshift.flower.addon.arrays import BUFFERS, as_model, checked, described, frame_of, only, tensors, to_record
from fedshift.rounds.uplink import read
from fedshift.wire.frame import Header, WireError, parse

RAISED = "Exception ClientAppException occurred. Message:"  # Flower's prefix for the message of an exception
MAX_REASON = 500  # maximum number of characters of a reason
MAX_WEIGHT = 1e18  # maximum weight of a reply
LOSS = 0.1  # error of a coarse codec, relative to the norm of the weights; see `update_floor`
SPREAD = 8.0  # distance of running statistics of honest nodes, relative to their norm
UPDATE, BUFFER_UPDATE = "update", "buffer update"
CONTROL_UPDATE, INVERSE_TRAVEL = "control update", "inverse travel"  # for SCAFFOLD


class Limits(NamedTuple):
    """Limits on one reply, in multiples of the round's median; 0 for no limit."""

    bound: float  # for the norm of an update: a longer update is left out
    max_weight: float  # for a weight: a larger weight is lowered


class Distance(NamedTuple):
    """Norm of one part of an update, with the arguments of `update_floor`."""

    norm: float
    model: float = 0.0  # norm of the same part of the broadcast
    error: float = 0.0  # distance that honest uploads may have from it


class Usable(NamedTuple):
    """A reply that can be aggregated."""

    message: Message  # with plain arrays
    weight: float
    key: str | None  # name of the metric that is the weight
    lossy: bool = False
    reset: bool = False  # the node lost its memory
    bytes_up: int = 0  # of the arrays as received
    bytes_exact: int = 0  # of the arrays at full precision
    distances: Mapping[str, Distance] = MappingProxyType({})  # from the broadcast
    integers: Mapping[str, Tensor] = MappingProxyType({})  # tensors of integers and booleans
    frame: bytes | None = None  # the upload as received, None for plain arrays
    lowered: Mapping[str, tuple[float, float]] = MappingProxyType({})  # weights by metric, before and after

    @property
    def node(self) -> int:
        return self.message.metadata.src_node_id


class Sorted(NamedTuple):
    """Replies of a round, divided into usable and failed ones."""

    usable: list[Usable]  # in the order of the messages they answer
    failed: dict[int, str]  # reason by node, for replies that are left out
    messages: list[Message]  # one per message, for the strategy: errors replace the replies that are left out
    outliers: list[int]  # nodes in `failed` whose update is too long
    repeated: list[int]  # nodes with more than one reply; only the first is used
    unanimous: str  # the common reason if every reply failed for the same one, else empty


def opened(reply: Message, sent: Iterable[Params], number: int, key: str | None) -> Usable:
    """Decode and check one upload; ValueError if it is not usable.

    Some strategies convert a model to float64, and clients answer in float64 or in the original dtype: `sent` is the
    broadcast in either.
    """
    name, record = only(reply, ArrayRecord)
    weight, bytes_up = weight_of(reply, key), sum(len(array.data) for array in record.values())
    frame = frame_of(record)
    head = Header() if frame is None else _checked_header(frame, reply, number)
    start, decoded = _decoded(record, frame, list(sent))
    if broken := [n for n, x in decoded.items() if head.update and x.is_floating_point() and not finite(x)]:
        raise WireError(f"{broken[0]}: is infinite after adding the update")
    if negative := [n for n, x in decoded.items() if fnmatchcase(n, VARIANCES) and bool((x < 0).any())]:
        raise WireError(f"{negative[0]}: contains a negative variance")
    whole = {n: decoded.get(n, x) for n, x in start.items()}  # in the model's order, which some strategies rely on
    arrays = to_record(whole)
    reply.content = RecordDict({n: arrays if n == name else other for n, other in reply.content.items()})
    return Usable(
        reply,
        weight,
        key,
        head.lossy,
        head.reset,
        bytes_up,
        sum(len(arrays[n].data) for n in decoded),
        _distances(whole, start, head.lossy and not head.update),
        {n: x for n, x in whole.items() if not x.is_floating_point()},
        frame,
    )


def _checked_header(frame: bytes, reply: Message, number: int) -> Header:
    """Header of a frame; WireError if it is not of this reply's run, round and node, or without its layout."""
    parsed = parse(frame)
    parsed.header.check(reply.metadata.run_id, number, reply.metadata.src_node_id)
    tensors(parsed)
    return parsed.header


def _decoded(record: ArrayRecord, frame: bytes | None, sent: Sequence[Params]) -> tuple[Params, Params]:
    """Return the broadcast in the dtypes of the reply, and the reply's tensors: all or some of the model.

    A reply in floating dtypes that match no version of the broadcast is cast to those of the model.
    """
    if frame is None:
        return checked(record, sent)
    for start in sent:
        try:
            return start, read(frame, start)
        except WireError:
            continue
    return sent[-1], as_model(read(frame, described(frame, sent[-1])), sent[-1])


def _distances(w: Params, start: Params, quantized: bool) -> dict[str, Distance]:
    """|w - start| of the weights, and of the buffers of normalization layers; `quantized` weights may differ more."""
    floats = [n for n, x in start.items() if x.is_floating_point()]
    buffers = [n for n in floats if any(fnmatchcase(n, pattern) for pattern in BUFFERS)]
    weights = [n for n in floats if n not in buffers]
    found = {}
    for what, names, error in ((UPDATE, weights, LOSS if quantized else 0.0), (BUFFER_UPDATE, buffers, SPREAD)):
        model = norm(start[n] for n in names)
        found[what] = Distance(norm(_difference(w[n], start[n]) for n in names), model, error * model)
    return found


def _difference(x: Tensor, start: Tensor) -> Tensor:
    """x - start in float32 or wider; infinite, and so above every bound, where it overflows."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) - start


def evaluated(reply: Message, key: str | None) -> Usable:
    """Check an evaluation reply, which contains metrics only."""
    return Usable(reply, weight_of(reply, key), key)


def weight_of(reply: Message, key: str | None) -> float:
    """Weight of a reply: the metric `key` of the strategy, or 1 without a key."""
    if key is None:
        return 1.0
    _, metrics = only(reply, MetricRecord)
    weight = metrics.get(key)
    if weight is None:
        raise ValueError(f"its metrics contain no '{key}', which is the weight of the reply")
    if isinstance(weight, bool | list) or not (math.isfinite(weight) and 0 <= weight <= MAX_WEIGHT):
        raise ValueError(f"{key}={weight!r}: a weight must be a single number from 0 to {MAX_WEIGHT:g}")
    return float(weight)


def sort_out(
    replies: Iterable[Message],
    asked: Mapping[int, Message],
    open_: Callable[[Message], Usable],
    alike: bool,
    keys: Sequence[str],
    limits: Limits,
) -> Sorted:
    """Open every reply and divide them into usable and failed ones.

    `asked` are the messages by node. With `alike`, replies whose records differ from those of most nodes fail. `keys`
    are the metrics that weight the replies.
    """
    first, repeated = dict[int, Message](), list[int]()
    for reply in replies:
        node = _node(reply, asked)
        if first.setdefault(node, reply) is not reply:
            repeated.append(node)
    found, failed = dict[int, Usable](), dict[int, str]()
    for node in [*(node for node in asked if node in first), *(node for node in first if node not in asked)]:
        try:
            if first[node].has_error():
                error = first[node].error
                raise ValueError(error.reason or f"error {error.code}")
            if node not in asked:
                raise ValueError("the reply does not answer a message of this round")
            found[node] = open_(first[node])
        except ValueError as problem:
            failed[node] = brief(problem)
        except Exception as problem:  # an invalid reply must not affect the others
            failed[node] = brief(f"{type(problem).__name__}: {problem}")
    failed |= _unlike(found) if alike else {}
    far = _outliers({node: upload for node, upload in found.items() if node not in failed}, limits.bound)
    failed |= far
    found = {node: upload for node, upload in found.items() if node not in failed}
    if found and not any(upload.weight for upload in found.values()):
        failed |= dict.fromkeys(found, "all weights of the round are 0")
        found = {}
    usable = _lowered(list(found.values()), keys, limits.max_weight)
    reasons = {failed.get(node, "") for node, reply in first.items() if reply.metadata.src_node_id in asked}
    failed |= {node: "the node did not reply" for node in asked if node not in first}
    messages = [
        found[node].message if node in found else Message(Error(0, failed[node]), reply_to=message)
        for node, message in asked.items()
    ]
    return Sorted(usable, failed, messages, list(far), repeated, reasons.pop() if len(reasons) == 1 else "")


def _unlike(found: Mapping[int, Usable]) -> dict[int, str]:
    """Return the reason by node, for nodes whose records differ from those of most nodes."""
    counts = Counter(_signature(upload.message) for upload in found.values())
    common = max(counts, key=lambda signature: counts[signature], default=())  # the first one on a tie
    others = [node for node, upload in found.items() if _signature(upload.message) != common]
    return dict.fromkeys(others, "its records differ from those of most nodes")


def _outliers(found: Mapping[int, Usable], bound: float) -> dict[int, str]:
    """Return the reason by node, for nodes whose update is longer than `bound` times the median of the round.

    Nodes with more examples take more steps and move farther, mostly by the square root of their number. The number of
    steps is not known here and weights are those that nodes report, so a weight counts only up to `CAP` times the
    median: a node cannot raise its bound by more than sqrt(CAP). Few steps or a coarse codec also make a control update
    long. So it is an outlier only if both its norm and the travel that it was divided by are.
    """
    beyond: dict[str, dict[int, str]] = {}
    for what in dict.fromkeys(what for upload in found.values() for what in upload.distances):
        distances = {node: upload.distances[what] for node, upload in found.items() if what in upload.distances}
        norms = [distance.norm for distance in distances.values()]
        reach = dict.fromkeys(distances, 1.0)
        if what == UPDATE:
            weights = capped([found[node].weight for node in distances], CAP)
            reach = dict(zip(distances, reaches(weights, bound), strict=True))
        floors = {
            node: max(update_floor(reach[node] * distance.model, bound, distance.error), reach[node] * middle(norms))
            for node, distance in distances.items()
        }
        for floor in set(floors.values()):
            far = [node for node, out in zip(distances, outliers(norms, bound, floor), strict=True) if out]
            typical = reference(norms, floor)
            reasons = {
                node: refusal(what, distances[node].norm, typical, bound) for node in far if floors[node] == floor
            }
            beyond[what] = beyond.get(what, {}) | reasons
    hardly_moved = beyond.pop(INVERSE_TRAVEL, {})
    beyond[CONTROL_UPDATE] = {node: why for node, why in beyond.get(CONTROL_UPDATE, {}).items() if node in hardly_moved}
    return {node: why for reasons in reversed(beyond.values()) for node, why in reasons.items()}


def _lowered(usable: Sequence[Usable], keys: Iterable[str], most: float) -> list[Usable]:
    """Limit the weights of replies to `most` times the median, also in the metrics that a strategy reads."""
    found = list(usable)
    for key in keys:
        values = [float(only(upload.message, MetricRecord)[1][key]) for upload in found]  # type: ignore[arg-type]
        limited = zip(found, values, capped(values, most), strict=True)
        found = [upload if value == limit else _lower(upload, key, limit) for upload, value, limit in limited]
    return found


def _lower(upload: Usable, key: str, limit: float) -> Usable:
    _, metrics = only(upload.message, MetricRecord)
    before: Any = metrics[key]
    metrics[key] = after = math.ceil(limit) if isinstance(before, int) else limit
    lowered = {**upload.lowered, key: (float(before), float(after))}
    return upload._replace(weight=float(after) if key == upload.key else upload.weight, lowered=lowered)


def medians(usable: Sequence[Usable]) -> Params:
    """Elementwise median of each tensor of integers, the majority of booleans."""
    names = usable[0].integers if usable else {}
    return {
        name: median_integers(torch.stack([upload.integers[name] for upload in usable]))
        for name in names
        if all(name in upload.integers for upload in usable)
    }


def substitute(usable: Iterable[Usable], params: Params) -> None:
    """Replace these tensors in every reply."""
    for upload in usable if params else ():
        name, record = only(upload.message, ArrayRecord)
        upload.message.content[name] = ArrayRecord({**record, **to_record(params)})


def largest_update(usable: Sequence[Usable]) -> str:
    """Return a clause for an error message that names the node with the largest update."""
    norms = {upload.node: upload.distances[UPDATE].norm for upload in usable}
    node = max(norms, key=lambda node: norms[node])
    return f"; the largest update (norm {norms[node]:.3g}) is from node {node}"


def brief(problem: object) -> str:
    """Shorten a reason to one line of limited length, without control characters.

    For an exception in a ClientApp, Flower sends the class, in a simulation the traceback, and then the message.
    """
    _, raised, text = str(problem).rpartition(RAISED)
    short = " ".join(text.removesuffix("'>")[:MAX_REASON].split()) if raised else " ".join(text[:MAX_REASON].split())
    return printable(short)


def _node(reply: Message, asked: Mapping[int, Message]) -> int:
    """Node that a reply belongs to; errors of the SuperLink have its own id as source."""
    source, to = reply.metadata.src_node_id, reply.metadata.reply_to_message_id
    if source in asked:
        return source
    return next((node for node, message in asked.items() if to and message.metadata.message_id == to), source)


def _signature(reply: Message) -> tuple[object, ...]:
    signature: list[object] = []
    for name, record in sorted(reply.content.items()):
        if isinstance(record, ArrayRecord):
            signature.append(name)
        elif isinstance(record, MetricRecord):
            kinds = ((key, len(value) if isinstance(value, list) else -1) for key, value in record.items())
            signature.append((name, *sorted(kinds)))
    return tuple(signature)
