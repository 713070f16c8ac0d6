"""Uploads of clients: weights or updates, through a codec, with or without error feedback.

    u = w_k            or  w_k - w_t
    send Q(u + e)      and keep  e = (u + e) - Q(u + e)

Without feedback e is zero and not stored. On weights this is the paper's Fed-EF (Li, Li 2023).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedshift.algorithms.base import ClientRule, defines
from fedshift.codecs.codec import Codec
from fedshift.codecs.exact import EXACT
from fedshift.codecs.named import WIDTH, make_codec
from fedshift.core.tree import part, prefixed, take, tmap, zeros
from fedshift.core.types import Decoded, Params
from fedshift.rounds.uplinks import expanded
from fedshift.wire.frame import Header
from fedshift.wire.reader import as_dtype
from fedshift.wire.writer import Choice, Writer, chosen, prepared, tensor_key, unpack
from fedshift.wire.writer import header as header_of

ERROR = "error/"  # prefix of the uplink's part of a client's memory
NODE = "flower/"  # prefix of what a run keeps of a client whose memory is on a node of Flower
SERVER = "server/"  # prefix of what the server's rules remember about a client


@dataclass(frozen=True)
class Uplink:
    """Codec and message of a client: `Uplink(Codec(KMeans(4)))` is the paper's inferior client.

    >>> from fedshift import KMeans
    >>> Uplink(Codec(KMeans(4)), feedback=True).lossy, Uplink().lossy
    (True, False)
    """

    codec: Codec = EXACT
    update: bool = False
    feedback: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise ValueError(f"Uplink(codec={self.codec!r}): codec must be a Codec, for example Codec(KMeans(4))")
        if self.feedback and self.codec.quantizer.expands:
            raise ValueError(
                f"feedback = true: errors of {self.codec.quantizer} may exceed the values and would grow from round "
                "to round; send them without feedback, or use another codec"
            )

    @property
    def lossy(self) -> bool:
        return self.codec.quantizer.lossy


def named(name: str) -> Uplink:
    """Uplink of a client by its name in `uplinks`; for "paper", that of a quantized client.

    >>> named("lean").update, named("exact") == Uplink()
    (True, True)
    """
    coding: dict[str, Any] = {"quantizer": "kmeans", "send": "weights", "feedback": False} | expanded(name)
    send, feedback = coding.pop("send"), coding.pop("feedback")
    widths = [int(bits) for bits in str(coding.pop("bits", WIDTH.get(coding["quantizer"], 32))).split("+")]
    return Uplink(make_codec(bits=min(widths), **coding), send == "updates", feedback)


def base_of(rule: ClientRule, params: Params, trained: Iterable[str]) -> Params:
    """Tensors that updates are added to: w_t, or zeros for trained tensors if the rule defines messages."""
    return params | zeros(take(params, trained)) if defines(rule, "message") else params


def remembers(rule: ClientRule, uplink: Uplink) -> bool:
    """True if a client keeps a memory between rounds; server and node must agree."""
    return defines(rule, "init") or (uplink.feedback and uplink.lossy)


class Sent(NamedTuple):
    """An encoded upload, and the client's view of it."""

    frame: bytes
    coded: Params  # u + e: input of the codec
    decoded: Params  # weights that the server decodes
    error: Params  # quantization error of each quantized tensor; with feedback, added in the next round


def send(
    uplink: Uplink,
    w: Params,
    start: Params,
    error: Params,
    trained: Iterable[str],
    header: Header,
    key: Tensor | None,
    writer: Writer | None = None,
) -> Sent:
    """Encode the upload of a client that started from `start` and trained to w.

    `writer`: for this uplink and model; saves time.
    """
    u = message(uplink, w, start, error)
    writer = writer or Writer(quantized(uplink, trained), u)
    decoded: Params = {}
    frame = writer.pack(u, header, key, lambda name, _, q: decoded.update({name: q}))
    return Sent(frame, u, received(uplink.update, u | decoded if decoded else u, start), lost(u, decoded))


class Messages(Mapping[str, Tensor]):
    """u + e of each tensor, computed when it is read."""

    def __init__(self, uplink: Uplink, w: Mapping[str, Tensor], start: Mapping[str, Tensor], error: Params) -> None:
        self.uplink, self.w, self.start, self.error = uplink, w, start, error

    def __getitem__(self, name: str) -> Tensor:
        w = self.w[name]
        start = {name: self.start[name].to(w.dtype)} if self.uplink.update else {}
        return message(self.uplink, {name: w}, start, take(self.error, [name] if name in self.error else []))[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.w)

    def __len__(self) -> int:
        return len(self.w)


def pack_upload(
    uplink: Uplink,
    w: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
    error: Params,
    header: Header,
    key: Tensor | None,
    writer: Writer,
) -> bytes:
    """Encode an upload like `send`, tensor by tensor, and with feedback replace the errors of its tensors in `error`.

    It needs little memory beyond the frame and the errors, if `w` and `start` create their tensors when they are read.
    """
    if not uplink.feedback:
        return writer.pack(Messages(uplink, w, start, {}), header, key)
    frame = writer.pack(Messages(uplink, w, start, error), header, key, lambda name, x, q: error.update({name: x - q}))
    for name in [name for name in w if name in error and not writer.codecs[name].quantizer.lossy]:
        del error[name]
    return frame


def message(uplink: Uplink, w: Params, start: Params, error: Params) -> Params:
    """u + e with u = w_k or w_k - w_t: the input of the codec.

    w and error are those of one client, or of K stacked on a leading axis; `start` is w_t, the same for all.

    >>> stacked, start = torch.tensor([[3.0], [5.0]]), torch.tensor([1.0])
    >>> u = message(Uplink(update=True, feedback=True), {"w": stacked}, {"w": start}, {"w": torch.full((2, 1), 0.5)})
    >>> u["w"].tolist()
    [[2.5], [4.5]]
    """
    u = tmap(_difference, w, start) if uplink.update else w
    return u | {name: u[name] + e for name, e in error.items()} if uplink.feedback and error else u


def received(update: bool, arrived: Params, start: Params) -> Params:
    """Q(u), or w_t + Q(u) for an update: the weights that the server decodes, of one client or of K stacked."""
    return tmap(_sum, arrived, start) if update else arrived


def lost(u: Params, arrived: Params) -> Params:
    """e = u - Q(u) of each tensor of `arrived`, of one client or of K stacked."""
    return {name: u[name] - x for name, x in arrived.items()}


def split_memory(memory: Params) -> tuple[Params, Params]:
    """Return the memory of the client rule, and the error of each tensor that the uplink feeds back.

    >>> split_memory({"c": torch.ones(1), "error/w": torch.zeros(1)})
    ({'c': tensor([1.])}, {'w': tensor([0.])})
    """
    return {name: x for name, x in memory.items() if not name.startswith(ERROR)}, part(ERROR, memory)


def join_memory(rule: Params, errors: Params) -> Params:
    """Memory of a client from the parts that `split_memory` returns."""
    return rule | prefixed(ERROR, errors)


def split_server(memory: Params) -> tuple[Params, Params]:
    """Return the memory of a client, and what the server's rules remember about the client.

    >>> split_server({"c": torch.ones(1), "server/y": torch.zeros(1)})
    ({'c': tensor([1.])}, {'y': tensor([0.])})
    """
    theirs = part(SERVER, memory)
    return {name: x for name, x in memory.items() if not name.startswith(SERVER)} if theirs else memory, theirs


def join_server(memory: Params, theirs: Params) -> Params:
    """Stored memory from the parts that `split_server` returns."""
    return memory | prefixed(SERVER, theirs) if theirs else memory


def quantized(uplink: Uplink, trained: Iterable[str]) -> Choice:
    """Codec of each trained tensor; buffers and frozen weights match no name and are sent exactly."""
    return dict.fromkeys(trained, uplink.codec)


def code(uplink: Uplink, u: Params, trained: Iterable[str], key: Tensor | None) -> Params:
    """Decoded values of each tensor that the codec quantizes, for K stacked clients: u (K, ...), key (K,)."""
    arrived, codecs = {}, chosen(quantized(uplink, trained), tmap(lambda x: x[0], take(u, trained)))
    scales = prepared(codecs, u)
    for name, codec in codecs.items():
        if codec.quantizer.lossy and u[name].numel():
            arrived[name], _ = code_tensor(codec, name, u[name], key, scales.get(codec))
    return arrived


def code_tensor(
    codec: Codec, name: str, u: Tensor, key: Tensor | None, scale: Tensor | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Encode and decode one tensor of K stacked clients: the decoded values (K, ...), and the codes of each segment.

    An exact tensor is returned unchanged, and its codes are its bytes. `scale`: from `prepared`.
    """
    if not codec.quantizer.lossy:
        return u, [u.contiguous().view(len(u), -1).view(torch.uint8)]
    coded = codec.encode(u, tensor_key(codec, name, key), scale)
    values = as_dtype(codec.decode(coded, len(u), u.shape[1:]), u.dtype).to(u.dtype)
    return values, [codes for codes, _ in coded.parts]


def read(frame: bytes | Decoded, start: Params, codec: Choice | None = None) -> Params:
    """Weights of an upload, as client and server compute them; `codec` as in `unpack`."""
    if isinstance(frame, Decoded):
        return frame.params
    arrived = unpack(frame, like=start, codec=codec)
    return received(header_of(frame).update, arrived, start)


def _difference(w: Tensor, start: Tensor) -> Tensor:
    return w - start if w.is_floating_point() else w


def _sum(u: Tensor, start: Tensor) -> Tensor:
    return u + start if u.is_floating_point() else u
