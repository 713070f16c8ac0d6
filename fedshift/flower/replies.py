"""What comes back from nodes: decoded and checked one by one, and against one another, before anybody counts on it."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from flwr.app import ArrayRecord, Error, Message, MetricRecord, RecordDict

from fedshift.codecs.base import finite
from fedshift.flower.arrays import checked, frame_of, only, to_record
from fedshift.frame import Header, WireError
from fedshift.types import Params
from fedshift.uplink import read
from fedshift.wire import header


class Usable(NamedTuple):
    """A reply that can be aggregated."""

    message: Message  # with plain arrays
    weight: float
    lossy: bool
    reset: bool  # its node had lost its memory
    bytes_up: int  # of arrays, as they came
    bytes_exact: int  # as they would have come at full precision
    frame: bytes | None = None  # the upload as it came, None for plain arrays


class Sorted(NamedTuple):
    usable: list[Usable]  # in the order of the messages they answer, whenever they came
    failed: dict[int, str]  # nodes whose reply is left out, and why
    messages: list[Message]  # all of them, for a strategy: in the same order, errors in place of what is left out


def opened(reply: Message, sent: Iterable[Params], number: int, key: str | None) -> Usable:
    """One upload, decoded; a ValueError says what is wrong with it.

    Some strategies make float64 of a model, and clients answer in that or in the model's own dtype:
    `sent` is what they started from in either.
    """
    name, record = only(reply, ArrayRecord)
    weight, bytes_up = weight_of(reply, key), sum(len(array.data) for array in record.values())
    frame = frame_of(record)
    said = header(frame) if frame is not None else Header()
    if frame is not None and said.base != number:
        raise WireError(f"the upload is of round {said.base}, not {number}")
    problem: WireError | None = None
    for start in sent:
        try:
            # in the model's order, which some strategies count on
            decoded = checked(record, start) if frame is None else read(frame, start)
        except WireError as wrong:
            problem = problem or wrong
            continue
        if broken := [n for n, x in decoded.items() if said.update and x.is_floating_point() and not finite(x)]:
            raise WireError(f"{broken[0]}: became infinite when the update was added")
        arrays = to_record(decoded)
        reply.content = RecordDict({n: arrays if n == name else other for n, other in reply.content.items()})
        bytes_exact = sum(len(array.data) for array in arrays.values())
        return Usable(reply, weight, said.lossy, said.reset, bytes_up, bytes_exact, frame)
    raise problem or WireError("nothing was sent")


def evaluated(reply: Message, key: str | None) -> Usable:
    """One reply with metrics only."""
    return Usable(reply, weight_of(reply, key), False, False, 0, 0)


def weight_of(reply: Message, key: str | None) -> float:
    """The weight of a reply under the strategy's key; 1 where it has none."""
    if key is None:
        return 1.0
    _, metrics = only(reply, MetricRecord)
    weight = metrics.get(key)
    if weight is None:
        raise ValueError(f"its metrics hold no '{key}' to weigh it by")
    if isinstance(weight, bool | list) or not (math.isfinite(weight) and 0 <= weight <= 1e18):
        raise ValueError(f"{key}={weight!r}: a weight must be one number, 0 or more")
    return float(weight)


def sort_out(
    replies: Iterable[Message], asked: Mapping[int, Message], open_: Callable[[Message], Usable], alike: bool
) -> Sorted:
    """Open every reply; `asked` are the messages by node, and where all must be alike, one that is not is left out."""
    place = {node: i for i, node in enumerate(asked)}
    ordered = sorted(replies, key=lambda reply: place.get(_node(reply, asked), len(place)))
    nodes = [_node(reply, asked) for reply in ordered]
    found, failed = dict[int, Usable](), dict[int, str]()  # by place, by node
    for i, (node, reply) in enumerate(zip(nodes, ordered, strict=True)):
        try:
            if reply.has_error():
                raise ValueError(reply.error.reason or f"error {reply.error.code}")
            if node not in asked:
                raise ValueError("it answers no message of this round")
            found[i] = open_(reply)
        except ValueError as problem:
            failed[node] = brief(problem)
        except Exception as problem:  # whatever somebody sent, it is their upload that fails
            failed[node] = brief(f"{type(problem).__name__}: {problem}")
    counts = Counter(_signature(one.message) for one in found.values())
    common = max(counts, key=lambda signature: counts[signature], default=())  # the first of equals
    for i, one in list(found.items()):
        if alike and _signature(one.message) != common:
            failed[nodes[i]] = "its records are not those that most nodes sent"
            del found[i]
    if found and not any(one.weight for one in found.values()):
        failed |= {nodes[i]: "it weighs nothing, like all others" for i in found}
        found = {}
    silent = [node for node in asked if node not in nodes]
    failed |= dict.fromkeys(silent, "it did not reply")
    errors = {node: Message(Error(0, why), reply_to=asked[node]) for node, why in failed.items() if node in asked}
    messages = [found[i].message if i in found else errors[node] for i, node in enumerate(nodes) if node in asked]
    return Sorted(list(found.values()), failed, messages + [errors[node] for node in silent])


def brief(problem: object) -> str:
    """In one line, and not as long as whoever sent it would have it."""
    return " ".join(str(problem)[:500].split())


def _node(reply: Message, asked: Mapping[int, Message]) -> int:
    """Whose reply it is: errors of the SuperLink are its own, and Flower's mods address theirs the wrong way round."""
    source, target, to = reply.metadata.src_node_id, reply.metadata.dst_node_id, reply.metadata.reply_to_message_id
    if source in asked:
        return source
    answered = (node for node, message in asked.items() if to and message.metadata.message_id == to)
    return next(answered, target if target in asked else source)


def _signature(reply: Message) -> tuple[object, ...]:
    signature: list[object] = []
    for name, record in sorted(reply.content.items()):
        if isinstance(record, ArrayRecord):
            signature.append(name)
        elif isinstance(record, MetricRecord):
            kinds = ((key, len(value) if isinstance(value, list) else -1) for key, value in record.items())
            signature.append((name, *sorted(kinds)))
    return tuple(signature)
