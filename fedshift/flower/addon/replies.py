"""What comes back from nodes: decoded and checked one by one, and against one another, before anybody counts on it."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict
from torch import Tensor

from fedshift.algorithms.bounds import VARIANCES, capped, median_integers, outliers, reference, refusal, update_floor
from fedshift.codecs.base import finite
from fedshift.core.names import printable
from fedshift.core.tree import norm
from fedshift.core.types import Params
from fedshift.flower.addon.arrays import BUFFERS, as_model, checked, described, frame_of, only, to_record
from fedshift.rounds.uplink import read
from fedshift.wire.frame import Header, WireError
from fedshift.wire.writer import header

RAISED = "Exception ClientAppException occurred. Message:"  # Flower puts this before the message of an exception
LONGEST = 500  # characters of a reason
HEAVIEST = 1e18  # weight of a reply
LOSS = 0.1  # of the norm of weights: what a coarse codec may lose of them, see `update_floor`
SPREAD = 8.0  # of the norm of running statistics: how far they may be from each other on the data of honest nodes
UPDATE, BUFFER_UPDATE = "update", "buffer update"
CONTROL_UPDATE, INVERSE_TRAVEL = "control update", "inverse travel"  # of SCAFFOLD


class Limits(NamedTuple):
    """Limits on one reply, in multiples of the round's median; 0 for no limit."""

    bound: float  # of the norm of an update: a longer one is left out
    max_weight: float  # of a weight: a larger one is lowered


class Distance(NamedTuple):
    """Norm of one part of an upload's change, and what `update_floor` needs to know of it."""

    norm: float
    model: float = 0.0  # norm of what was sent
    error: float = 0.0  # by which honest uploads may differ from it


class Usable(NamedTuple):
    """A reply that can be aggregated."""

    message: Message  # with plain arrays
    weight: float
    key: str | None  # the metric that is its weight
    lossy: bool = False
    reset: bool = False  # its node had lost its memory
    bytes_up: int = 0  # of arrays, as they came
    bytes_exact: int = 0  # as they would have come at full precision
    distances: Mapping[str, Distance] = MappingProxyType({})  # from what was sent
    integers: Mapping[str, Tensor] = MappingProxyType({})  # tensors of integers and booleans
    frame: bytes | None = None  # the upload as it came, None for plain arrays
    lowered: Mapping[str, tuple[float, float]] = MappingProxyType({})  # metrics that weigh it, before and after

    @property
    def node(self) -> int:
        return self.message.metadata.src_node_id


class Sorted(NamedTuple):
    usable: list[Usable]  # in the order of the messages they answer, whenever they came
    failed: dict[int, str]  # nodes whose reply is left out, and why
    messages: list[Message]  # all of them, for a strategy: in the same order, errors in place of what is left out
    outliers: list[int]  # nodes in `failed` whose update was too long
    repeated: list[int]  # nodes of which more than one reply came; the first counts
    unanimous: str  # the reason why every reply failed, if it was the same for all


def opened(reply: Message, sent: Iterable[Params], number: int, key: str | None) -> Usable:
    """One upload, decoded; a ValueError says what is wrong with it.

    Some strategies make float64 of a model, and clients answer in that or in the model's own dtype:
    `sent` is what they started from in either.
    """
    name, record = only(reply, ArrayRecord)
    weight, bytes_up = weight_of(reply, key), sum(len(array.data) for array in record.values())
    frame = frame_of(record)
    about = header(frame) if frame is not None else Header()
    if frame is not None and about.base != number:
        raise WireError(f"the upload is of round {about.base}, not {number}")
    start, decoded = _decoded(record, frame, list(sent))
    if broken := [n for n, x in decoded.items() if about.update and x.is_floating_point() and not finite(x)]:
        raise WireError(f"{broken[0]}: became infinite when the update was added")
    if negative := [n for n, x in decoded.items() if fnmatchcase(n, VARIANCES) and bool((x < 0).any())]:
        raise WireError(f"{negative[0]}: holds a negative variance")
    whole = {n: decoded.get(n, x) for n, x in start.items()}  # in the model's order, which some strategies count on
    arrays = to_record(whole)
    reply.content = RecordDict({n: arrays if n == name else other for n, other in reply.content.items()})
    return Usable(
        reply,
        weight,
        key,
        about.lossy,
        about.reset,
        bytes_up,
        sum(len(arrays[n].data) for n in decoded),
        _distances(whole, start, about.lossy and not about.update),
        {n: x for n, x in whole.items() if not x.is_floating_point()},
        frame,
    )


def _decoded(record: ArrayRecord, frame: bytes | None, sent: Sequence[Params]) -> tuple[Params, Params]:
    """The broadcast in the dtypes of the reply, and the tensors of the reply: all of the model's, or some.

    A reply in other floating dtypes than were sent is brought to those of the model.
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
    """|w - start| of weights, and of the buffers of normalisations; `quantized` weights are not an exact update."""
    floats = [n for n, x in start.items() if x.is_floating_point()]
    buffers = [n for n in floats if any(fnmatchcase(n, pattern) for pattern in BUFFERS)]
    weights = [n for n in floats if n not in buffers]
    found = {}
    for what, names, error in ((UPDATE, weights, LOSS if quantized else 0.0), (BUFFER_UPDATE, buffers, SPREAD)):
        model = norm(start[n] for n in names)
        found[what] = Distance(norm(_difference(w[n], start[n]) for n in names), model, error * model)
    return found


def _difference(x: Tensor, start: Tensor) -> Tensor:
    """In float32 or wider; what is beyond it is infinite, and beyond every bound."""
    return x.to(torch.promote_types(x.dtype, torch.float32)) - start


def evaluated(reply: Message, key: str | None) -> Usable:
    """One reply with metrics only."""
    return Usable(reply, weight_of(reply, key), key)


def weight_of(reply: Message, key: str | None) -> float:
    """The weight of a reply under the strategy's key; 1 where it has none."""
    if key is None:
        return 1.0
    _, metrics = only(reply, MetricRecord)
    weight = metrics.get(key)
    if weight is None:
        raise ValueError(f"its metrics hold no '{key}' to weigh it by")
    if isinstance(weight, bool | list) or not (math.isfinite(weight) and 0 <= weight <= HEAVIEST):
        raise ValueError(f"{key}={weight!r}: a weight must be one number, 0 or more")
    return float(weight)


def sort_out(
    replies: Iterable[Message],
    asked: Mapping[int, Message],
    open_: Callable[[Message], Usable],
    alike: bool,
    keys: Sequence[str],
    limits: Limits,
) -> Sorted:
    """Open every reply; `asked` are the messages by node, and where all must be alike, one that is not is left out.

    `keys` are the metrics by which replies are weighed.
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
                raise ValueError("it answers no message of this round")
            found[node] = open_(first[node])
        except ValueError as problem:
            failed[node] = brief(problem)
        except Exception as problem:  # whatever somebody sent, it is their upload that fails
            failed[node] = brief(f"{type(problem).__name__}: {problem}")
    failed |= _unlike(found) if alike else {}
    far = _outliers({node: one for node, one in found.items() if node not in failed}, limits.bound)
    failed |= far
    found = {node: one for node, one in found.items() if node not in failed}
    if found and not any(one.weight for one in found.values()):
        failed |= dict.fromkeys(found, "it weighs nothing, like all others")
        found = {}
    usable = _lowered(list(found.values()), keys, limits.max_weight)
    own = {failed.get(node, "") for node, reply in first.items() if reply.metadata.src_node_id in asked}
    failed |= {node: "it did not reply" for node in asked if node not in first}
    messages = [
        found[node].message if node in found else Message(Error(0, failed[node]), reply_to=message)
        for node, message in asked.items()
    ]
    return Sorted(usable, failed, messages, list(far), repeated, own.pop() if len(own) == 1 else "")


def _unlike(found: Mapping[int, Usable]) -> dict[int, str]:
    """Nodes whose records are not those of most, and why they are left out."""
    counts = Counter(_signature(one.message) for one in found.values())
    common = max(counts, key=lambda signature: counts[signature], default=())  # the first of equals
    others = [node for node, one in found.items() if _signature(one.message) != common]
    return dict.fromkeys(others, "its records are not those that most nodes sent")


def _outliers(found: Mapping[int, Usable], bound: float) -> dict[int, str]:
    """Nodes whose update is longer than `bound` times the median of the round, and why they are left out.

    A control is long where a client took few steps or lost much to its codec, too: it has to be out of line in both
    its norm and the travel that it was divided by.
    """
    beyond: dict[str, dict[int, str]] = {}
    for what in dict.fromkeys(what for one in found.values() for what in one.distances):
        own = {node: one.distances[what] for node, one in found.items() if what in one.distances}
        norms = [distance.norm for distance in own.values()]
        floors = {node: update_floor(distance.model, bound, distance.error) for node, distance in own.items()}
        for floor in set(floors.values()):
            far = [node for node, out in zip(own, outliers(norms, bound, floor), strict=True) if out]
            typical = reference(norms, floor)
            reasons = {node: refusal(what, own[node].norm, typical, bound) for node in far if floors[node] == floor}
            beyond[what] = beyond.get(what, {}) | reasons
    hardly_moved = beyond.pop(INVERSE_TRAVEL, {})
    beyond[CONTROL_UPDATE] = {node: why for node, why in beyond.get(CONTROL_UPDATE, {}).items() if node in hardly_moved}
    return {node: why for reasons in reversed(beyond.values()) for node, why in reasons.items()}


def _lowered(usable: Sequence[Usable], keys: Iterable[str], most: float) -> list[Usable]:
    """The same replies, whose weights are at most `most` times the median, also where a strategy reads them."""
    found = list(usable)
    for key in keys:
        values = [float(only(one.message, MetricRecord)[1][key]) for one in found]  # type: ignore[arg-type]
        limited = zip(found, values, capped(values, most), strict=True)
        found = [one if value == limit else _lower(one, key, limit) for one, value, limit in limited]
    return found


def _lower(one: Usable, key: str, limit: float) -> Usable:
    _, metrics = only(one.message, MetricRecord)
    before: Any = metrics[key]
    metrics[key] = after = math.ceil(limit) if isinstance(before, int) else limit
    lowered = {**one.lowered, key: (float(before), float(after))}
    return one._replace(weight=float(after) if key == one.key else one.weight, lowered=lowered)


def medians(usable: Sequence[Usable]) -> Params:
    """Elementwise median of each tensor of integers, the majority of booleans."""
    names = usable[0].integers if usable else {}
    return {
        name: median_integers(torch.stack([one.integers[name] for one in usable]))
        for name in names
        if all(name in one.integers for one in usable)
    }


def substitute(usable: Iterable[Usable], params: Params) -> None:
    """Put these tensors into every reply."""
    for one in usable if params else ():
        name, record = only(one.message, ArrayRecord)
        one.message.content[name] = ArrayRecord({**record, **to_record(params)})


def longest(usable: Sequence[Usable]) -> str:
    """The node whose update is the longest of one or more, as an addition to a sentence."""
    norms = {one.node: one.distances[UPDATE].norm for one in usable}
    node = max(norms, key=lambda node: norms[node])
    return f"; the longest update, of norm {norms[node]:.3g}, is that of node {node}"


def brief(problem: object) -> str:
    """In one line, without control characters, and not as long as whoever sent it would have it.

    Of an exception in a ClientApp, Flower sends the class, in a simulation the traceback, and then the message.
    """
    _, raised, text = str(problem).rpartition(RAISED)
    short = " ".join(text.removesuffix("'>")[:LONGEST].split()) if raised else " ".join(text[:LONGEST].split())
    return printable(short)


def _node(reply: Message, asked: Mapping[int, Message]) -> int:
    """Whose reply it is: errors of the SuperLink are its own."""
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
