"""A model's tensors <-> one frame of bytes.

    pack(codec, params) -> bytes      encode an upload
    unpack(data, like) -> params      decode it, with all checks against the expected model
    size(codec, like) -> int          len(pack(...)) without packing, for fixed-rate coders

A frame is untrusted input: no memory is allocated because of a size it declares, nothing in it is
executed, and an invalid frame raises a `WireError` that states the reason.
"""

import zlib
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from fedshift.codecs.base import finite
from fedshift.codecs.codec import Codec, Coded
from fedshift.codecs.exact import EXACT
from fedshift.core import rng
from fedshift.core.types import Params
from fedshift.wire.frame import CRC, DIGEST, Header, build, describe, head, parse, varint
from fedshift.wire.plan import FramePlan, layout, plan
from fedshift.wire.reader import LARGEST, Reader, as_dtype
from fedshift.wire.registry import codec_bytes

Choice = Codec | Mapping[str, Codec]  # one codec, or {name or pattern: codec}: the name itself, else the first match
NO_HEADER = Header()
SPECIAL = frozenset("*?[")  # characters of patterns


def pack(
    codec: Choice,
    params: Params,
    *,
    update: bool = False,
    base: int = 0,
    examples: int = 0,
    reset: bool = False,
    run: int = 0,
    client: int | None = None,
    described: bool = False,
    key: Tensor | None = None,
) -> bytes:
    """Encode tensors as a frame; `key` is for codecs that round at random.

    A frame refers to the names, shapes and dtypes of its tensors by a digest. If the receiver may not know them, or to
    name differences in an error message, it can contain them: `described=True`.

    >>> from fedshift import Codec, KMeans
    >>> params = {"weight": torch.arange(20.0).view(4, 5), "bias": torch.ones(4)}
    >>> frame = pack(Codec(KMeans(1)), params)
    >>> len(frame), size(Codec(KMeans(1)), params)
    (68, 68)
    >>> unpack(frame, like=params)["weight"][0]
    tensor([4.5000, 4.5000, 4.5000, 4.5000, 4.5000])
    """
    made = Header(update, base, examples, reset, run=run, client=client)
    return Writer(codec, params, described).pack(params, made, key)


class Writer:
    """Pack several models with the same names, shapes and codec, whose plan is made once."""

    def __init__(self, codec: Choice, like: Params, described: bool = False) -> None:
        self.codecs = chosen(codec, like)
        self.layout, self.described = describe(layout(like)), described
        self.plan = _plan(self.codecs, like)

    def pack(
        self,
        params: Mapping[str, Tensor],
        header: Header,
        key: Tensor | None = None,
        coded: Callable[[str, Tensor, Tensor], None] | None = None,
    ) -> bytes:
        """Encode a model like the first; the lossy flag of the header is set here.

        Tensors are encoded one after another, so `params` may create each when it is read. `coded` is called with name,
        x and Q(x) of each tensor that is not sent exactly.
        """
        joint = {name: codec for name, codec in self.codecs.items() if codec.quantizer.across}
        scales = prepared(joint, {name: params[name][None] for name in joint}) if joint else {}
        sides, waiting, buffers = [], dict[int, Tensor](), dict[int, bytes]()
        last = {buffer.places[-1]: at for at, buffer in enumerate(self.plan.buffers)}
        for i, place in enumerate(self.plan.places):
            name, codec, x = place.name, place.codec, params[place.name].detach()
            try:
                side, codes, made = _encode(codec, x, tensor_key(codec, name, key), scales.get(codec))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            sides.append(side)
            waiting[i] = codes
            if coded is not None and codec.quantizer.lossy:
                coded(name, x, as_dtype(codec.decode(made, 1, x.shape)[0], x.dtype).to(x.dtype))
            if i in last:
                places, codec, _, levels, _ = self.plan.buffers[last[i]]
                together = [waiting.pop(j) for j in places]
                buffers[last[i]] = codec.coder.encode(torch.cat(together) if len(together) > 1 else codes, levels)
        in_order = [buffers[at] for at in range(len(buffers))]
        lengths = self.plan.lengths([len(buffer) for buffer in in_order])
        head = header._replace(lossy=self.plan.lossy)
        return build(head, self.layout, self.plan.coding, [lengths, *sides, *in_order], self.described)


def unpack(data: bytes | memoryview, like: Params, codec: Choice | None = None) -> Params:
    """Decode the tensors of a frame, which must have the names, shapes and dtypes of `like`, on its devices.

    With a `codec`, a frame that is neither packed with it nor exact is refused before it is decoded.

    >>> sent = {"bias": torch.tensor([1.0, 2.0])}
    >>> unpack(pack(EXACT, sent), like=sent)
    {'bias': tensor([1., 2.])}
    >>> unpack(pack(EXACT, sent, described=True), like={"bias": torch.zeros(3)})
    Traceback (most recent call last):
    fedshift.wire.frame.WireError: bias: shape (2,) instead of (3,)
    """
    _, parts = Reader(like).open(data, expected(codec, like))
    params = {}
    for name, x in like.items():
        flat = torch.empty(x.numel(), dtype=x.dtype)
        for start, values in parts[name].values():
            flat[start : start + len(values)] = as_dtype(values, x.dtype)
        params[name] = flat.view(x.shape).to(x.device)
    return params


def size(codec: Choice, like: Params, header: Header = NO_HEADER) -> int:
    """len(pack(codec, params)) for any params like these, with this header.

    The paper's CNN, exact and with 4 bits:

    >>> from fedshift import KMeans
    >>> from fedshift.models import PaperCNN
    >>> size(EXACT, PaperCNN().state_dict()), size(Codec(KMeans(4)), PaperCNN().state_dict())
    (8623521, 1078231)
    """
    found = FrameSize(codec, like)
    for names in found.variable:
        coder = found.codecs[names[0]].coder
        raise ValueError(f"{names[0]}: the size with {coder} depends on the values; use len(pack(...))")
    return found.fixed + len(head(header))


class FrameSize:
    """Bytes of a frame of a model that do not depend on its values, besides those of its header."""

    def __init__(self, codec: Choice, like: Params) -> None:
        self.codecs = chosen(codec, like)
        self.plan = _plan(self.codecs, like)
        self.side = self.plan.side  # bytes of side data
        coding = self.plan.coding
        self.overhead = DIGEST + len(varint(len(coding))) + len(coding) + CRC.size
        self.fixed = self.overhead + self.side + sum(buffer.size or 0 for buffer in self.plan.buffers)
        variable = [buffer for buffer in self.plan.buffers if buffer.size is None]
        # tensors of each buffer whose size depends on the values, and the levels of their codes
        self.variable = [[self.plan.places[i].name for i in buffer.places] for buffer in variable]
        self.levels = [buffer.levels for buffer in variable]


def header(data: bytes | memoryview) -> Header:
    """Read the header of a frame, after its checksum.

    >>> header(pack(EXACT, {"bias": torch.zeros(2)}, base=7, examples=600))
    Header(update=False, base=7, examples=600, reset=False, lossy=False, run=0, client=None)
    """
    return parse(data).header


def chosen(codec: Choice, like: Params) -> dict[str, Codec]:
    """Codec of each tensor."""
    if isinstance(codec, Codec):
        return {name: codec if codec.covers(x) else EXACT for name, x in like.items()}
    patterns = {pattern: found for pattern, found in codec.items() if SPECIAL & set(pattern)}
    result = {}
    for name, x in like.items():
        found = codec.get(name) or next((c for p, c in patterns.items() if fnmatchcase(name, p)), EXACT)
        result[name] = found if found.covers(x) else EXACT
    return result


def choose(codec: Choice, name: str, x: Tensor) -> Codec:
    """Codec of one tensor: the given one if it covers the tensor, else `EXACT`."""
    return chosen(codec, {name: x})[name]


def prepared(codecs: Mapping[str, Codec], stacks: Params) -> dict[Codec, Tensor]:
    """Results of `prepare` for K stacked models, (K,), by codec; codecs that need none are left out."""
    tensors: dict[Codec, list[Tensor]] = {}
    for name, codec in codecs.items():
        if codec.quantizer.prepares and stacks[name].numel():
            tensors.setdefault(codec, []).append(stacks[name])
    return {codec: codec.prepare(found) for codec, found in tensors.items()}


def tensor_key(codec: Codec, name: str, key: Tensor | None) -> Tensor | None:
    """Key of one tensor; None if the codec is not random."""
    return None if key is None or not codec.random else rng.fold(key, zlib.crc32(name.encode()))


def expected(codec: Choice | None, like: Params) -> dict[str, Codec] | None:
    """Codec of each tensor; None if any codec is accepted."""
    return None if codec is None else chosen(codec, like)


def _plan(codecs: Mapping[str, Codec], like: Params) -> FramePlan:
    """Plan of a frame; ValueError names a tensor whose codec has no number in the wire format."""
    for name, codec in codecs.items():
        try:
            codec_bytes(codec)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return plan(codecs, like)


def _encode(codec: Codec, x: Tensor, key: Tensor | None, scale: Tensor | None) -> tuple[bytes, Tensor, Coded]:
    """Seeds and side data of one tensor as bytes, its codes, and both as the codec returns them."""
    if not x.numel():
        return b"", torch.zeros(0, dtype=torch.uint8), Coded([])
    if codec.quantizer.plain and not codec.quantizer.lossy:
        if x.is_floating_point() and not finite(x):
            raise ValueError("contains NaN or infinity")
        return b"", x.cpu().reshape(-1).view(torch.uint8), Coded([])
    if not x.is_floating_point() and x.double().abs().max() > LARGEST:
        raise ValueError("contains an integer beyond 2^24, which cannot be quantized; send it exactly")
    coded = codec.encode(x[None], None if key is None else key[None], scale)
    side = b"".join(side.cpu().numpy().astype("<f4").tobytes() for _, side in coded.parts)
    seeds = b"" if coded.seeds is None else coded.seeds.cpu().numpy().astype("<u4").tobytes()
    codes = [codes.flatten() for codes, _ in coded.parts]
    return seeds + side, torch.cat(codes) if len(codes) > 1 else codes[0], coded
