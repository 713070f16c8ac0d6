"""Client mod that encodes the arrays of a reply as one compressed frame."""

import dataclasses
import sys
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor

from fedshift.codecs import Cast, Codec, KMeans
from fedshift.codecs.exact import EXACT
from fedshift.core import rng
from fedshift.core.types import Params
from fedshift.flower.addon.arrays import (
    BUFFERS,
    CONTROL,
    KEY,
    OURS,
    ArrayParams,
    decoded,
    enclose,
    frame_of,
    only,
    quantizable,
    unpacked,
)
from fedshift.flower.addon.memory import NodeMemory, RoundInfo
from fedshift.rounds.uplink import ERROR, Uplink, named, pack_upload, quantized
from fedshift.rounds.uplink_json import loads
from fedshift.rounds.uplinks import UPLINKS
from fedshift.wire.frame import Header
from fedshift.wire.writer import Writer

WRONG_ORDER = (
    "the clients' mods are in the wrong order; QuantizeMod must be the first: "
    "ClientApp(mods=[QuantizeMod(...), fixedclipping_mod])"
)
CLIPPING = {mod.__code__ for mod in (fixedclipping_mod, adaptiveclipping_mod, LocalDpMod.__call__)}
BITS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)


class QuantizeMod:
    """Encode the uploads of a client. It must be the first of a ClientApp's mods, so that it acts last.

    The number of bits is taken from the first of these that sets `bits`: the node's config, the server's message, the
    run's config, this constructor. The codec is K-means, with random rounding unless `error_feedback` is on, or
    `codec`, whose bits are replaced in the same way. With `updates`, the client sends the difference from the server's
    model instead of its weights. With `error_feedback`, the error of the codec is added to the next upload. This
    memory is kept in files under `state_dir`. Without, it is kept in the state that Flower keeps for the node, which is
    lost when a SuperNode stops, or, beyond 16 MB, in files under `$FLWR_HOME/fedshift`.

    `QuantizeMod("lean")` selects an uplink by name, which sets the codec and what is sent, without error feedback. In a
    config or message, `uplink = "lean"` instead of `bits` has the same effect. A server can also send any `Uplink`,
    with the argument `bits_for` of `FedShift`.

    >>> QuantizeMod(bits=4).uplink(8)  # doctest: +ELLIPSIS
    Uplink(codec=Codec(quantizer=KMeans(bits=8, exact=False, random=True), ...), update=False, feedback=False)
    """

    def __init__(
        self,
        bits: int | str | None = None,
        *,
        codec: Codec | None = None,
        updates: bool = False,
        error_feedback: bool = False,
        state_dir: Path | str | None = None,
        exact: Sequence[str] = BUFFERS,
        seed: int = 0,
    ) -> None:
        """Configure the mod.

        `bits`: number of bits, or the name of an uplink, which also sets `codec`, `updates` and `error_feedback`.
        `exact`: patterns of names that are never quantized. `seed`: seed for codecs with random rounding.
        """
        where = f"{type(self).__name__}({bits!r})"
        if isinstance(bits, str):
            if codec is not None or updates or error_feedback:
                raise ValueError(
                    f"{where}: a named uplink sets codec, updates and error_feedback; do not pass them as well"
                )
            uplink, bits = as_uplink(where, bits), None
            codec, updates, error_feedback = uplink.codec, uplink.update, uplink.feedback
        if codec is not None and not isinstance(codec, Codec):
            raise TypeError(f"QuantizeMod(codec={codec!r}): codec must be a Codec, for example Codec(KMeans(4))")
        self.codec = codec or Codec(KMeans(4, random=not error_feedback))
        self.updates, self.error_feedback, self.seed = updates, error_feedback, seed
        self.state_dir, self.exact = state_dir, (exact,) if isinstance(exact, str) else tuple(exact)
        self.bits = None if bits is None else as_bits(where, bits)
        self.uplink(where=where)  # ValueError for a codec that cannot have these bits

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.partition(".")[0] != "train":
            return addressed(call_next(message, context), message)
        if _clipped_outside():
            raise ValueError(WRONG_ORDER)
        for name, record in list(message.content.array_records.items()):
            message.content[name] = decoded(unpacked(record))
        config = self._extracted(message)
        info, uplink = self.round_info(config), self.uplink_of(context, config)
        store = NodeMemory(context, self.state_dir)
        memory, lost = store.recall("mod", info)
        lost = lost and self.remembers(uplink)
        entered = self.enter(message, context, memory, lost)
        received = dict(only(message, ArrayRecord)[1])
        reply = call_next(message, context)
        if reply.has_error():
            return addressed(reply, message)
        name, record = only(reply, ArrayRecord)
        if frame_of(record) is not None:
            raise ValueError("QuantizeMod: the reply is already encoded; use only one QuantizeMod or ScaffoldMod")
        w = ArrayParams(record)
        if not w or not set(w) <= set(received):
            raise ValueError("QuantizeMod: the arrays of the reply must be among those that the server sent")
        start, like = ArrayParams({n: received[n] for n in w}), w.like()
        metrics = dict(only(reply, MetricRecord)[1]) if reply.content.metric_records else {}
        errors = {n.removeprefix(ERROR): e for n, e in memory.items() if n.startswith(ERROR)}
        frame = pack_upload(
            uplink,
            w,
            start,
            errors,
            Header(
                uplink.update,
                info.number,
                example_count(metrics.get("num-examples")),
                reset=lost,
                run=message.metadata.run_id,
                client=message.metadata.dst_node_id,
            ),
            self.key(context, info.number) if uplink.codec.random else None,
            Writer(quantized(uplink, self.coded(like)), like, described=True),
        )
        # stored even if empty: the next upload may use another uplink, and an empty memory is not a lost one
        kept = {ERROR + n: e for n, e in errors.items()} | self.leave(frame, start, entered, metrics)
        store.keep("mod", info.session, info.number, kept)
        reply.content[name] = ArrayRecord({KEY: enclose(frame)})
        return reply

    def _extracted(self, message: Message) -> dict[str, Any]:
        """Return the config of a message, and remove the keys of fedshift from the message."""
        config: dict[str, Any] = {}
        for name, record in list(message.content.config_records.items()):
            config |= record
            message.content[name] = ConfigRecord({key: x for key, x in record.items() if not key.startswith(OURS)})
        return config

    def round_info(self, config: Mapping[str, Any]) -> RoundInfo:
        try:
            return RoundInfo.read(config)
        except KeyError:
            wrap = "wrap the server's strategy: FedShift(FedAvg(...))"
            raise ValueError(f"QuantizeMod: only a FedShift strategy can read quantized uploads; {wrap}") from None

    def remembers(self, uplink: Uplink) -> bool:
        """True if an upload depends on earlier ones."""
        return uplink.feedback

    def uplink_of(self, context: Context, config: Mapping[str, Any]) -> Uplink:
        """Uplink of this upload, from the first place that sets `bits` or `uplink`, else that of the mod."""
        places = {"node's config": context.node_config, "message": config, "run's config": context.run_config}
        for place, values in places.items():
            if "bits" in values and "uplink" in values:
                raise ValueError(f"bits and uplink in the {place}: both choose the codec; set only one of them")
            if "uplink" in values:
                return as_uplink(f"uplink = {values['uplink']!r} in the {place}", values["uplink"])
            if "bits" in values:
                where = f"bits in the {place}"
                return self.uplink(as_bits(where, values["bits"]), where)
        return self.uplink()

    def uplink(self, bits: int | None = None, where: str = "bits") -> Uplink:
        """Uplink of the mod, with another number of bits if given; ValueError, with `where`, if it cannot have them.

        Step and ternary quantizers are set by their rate, so only 16 and 32 bits can replace them.
        """
        codec, quantizer, bits = self.codec, self.codec.quantizer, self.bits if bits is None else bits
        if bits == 32:
            codec = Codec(EXACT.quantizer, codec.coder)
        elif bits == 16 and codec.bits != 16:
            codec = dataclasses.replace(codec, quantizer=Cast("bfloat16"), transform=None)
        elif bits is not None and bits != 16:
            try:
                codec = dataclasses.replace(codec, quantizer=quantizer.with_bits(bits))
            except ValueError as problem:
                allowed = f"16, 32, or an uplink ({', '.join(UPLINKS)})"
                raise ValueError(f"{where}: {problem}; allowed are {allowed}") from None
        return Uplink(codec, self.updates, self.error_feedback)

    def coded(self, w: Params) -> list[str]:
        """Names of the tensors that are quantized."""
        return quantizable(w, self.exact)

    def key(self, context: Context, number: int) -> Tensor:
        node = zlib.crc32(f"{context.node_config.get('partition-id', context.node_id)}".encode())
        return rng.key(self.seed, "flower", node, number)

    def enter(self, message: Message, context: Context, memory: Params, lost: bool) -> Any:
        """Prepare the training; called before the client trains."""
        if CONTROL in message.content:
            raise ValueError("QuantizeMod: the server's strategy is Scaffold; use ScaffoldMod instead of QuantizeMod")

    def leave(self, frame: bytes, start: ArrayParams, entered: Any, metrics: dict[str, Any]) -> Params:
        """Return further memory to keep; called after encoding, with the received model and the result of `enter`."""
        return {}


def as_uplink(where: str, name: object) -> Uplink:
    """Return an uplink by name or from JSON (`uplink_json`); ValueError, with `where`, for an unknown one.

    >>> as_uplink("uplink = 'leen' in the node's config", "leen")
    Traceback (most recent call last):
    ValueError: uplink = 'leen' in the node's config: no such uplink; known are exact, paper, lean, extreme
    """
    if isinstance(name, str) and name.startswith("{"):
        try:
            return loads(name)
        except ValueError as problem:
            raise ValueError(f"{where}: {problem}") from None
    if not isinstance(name, str) or name not in UPLINKS:
        raise ValueError(f"{where}: no such uplink; known are {', '.join(UPLINKS)}")
    return named(name)


def addressed(reply: Message, message: Message) -> Message:
    """Return the reply; an error is addressed as a reply to the message.

    Flower's mods address an error to the reply that caused it. Flower drops such an error before it reaches the server.
    """
    return Message(reply.error, reply_to=message) if reply.has_error() else reply


def _clipped_outside() -> bool:
    """True if a clipping mod of Flower called this mod: it cannot read a frame, and its error would be dropped."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code not in CLIPPING:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def as_bits(where: str, bits: object) -> int:
    """Return a number of bits; ValueError, with `where`, for one that is not supported.

    >>> as_bits("bits in the node's config", 9)
    Traceback (most recent call last):
    ValueError: bits in the node's config: 9 is not allowed; use 1 to 8 (quantized), 16 (bfloat16) or 32 (exact)
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in BITS:
        raise ValueError(f"{where}: {bits!r} is not allowed; use 1 to 8 (quantized), 16 (bfloat16) or 32 (exact)")
    return bits


def example_count(examples: object) -> int:
    """Number of examples for the frame's header, from a metric; 0 if it is not a valid number."""
    return int(examples) if isinstance(examples, int | float) and 0 <= examples < 1 << 63 else 0
