"""A model's tensors <-> one frame of bytes.

    pack(codec, params) -> bytes      encode an upload
    unpack(data, like) -> params      decode it, with all checks against the expected model
    size(codec, like) -> int          len(pack(...)) without packing, for fixed-rate coders

A frame is untrusted input: no memory is allocated because of a size it declares, nothing in it is
executed, and an invalid frame raises a `WireError` that states the reason.
"""

import zlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from fedshift.codecs.base import finite, reason, varint
from fedshift.codecs.codec import Codec, Coded
from fedshift.codecs.exact import EXACT
from fedshift.core import rng
from fedshift.core.types import Params
from fedshift.wire.frame import CRC, DIGEST, Header, build, describe, head, parse
from fedshift.wire.plan import Buffer, FramePlan, Place, check_sizes, layout, plan
from fedshift.wire.reader import LARGEST, Reader, as_dtype
from fedshift.wire.registry import codec_bytes

Encoded = tuple[bytes, Tensor, Coded]  # seeds and side data, codes, and both as the codec returns them
Choice = Codec | Mapping[str, Codec]  # one codec, or {name or pattern: codec}: the name itself, else the first match
NO_HEADER = Header()
TOGETHER = 1 << 18  # values of small tensors that are encoded together
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

        Tensors are read one after another, so `params` may create each when it is read; a few small ones are kept until
        they are encoded together. `coded` is called with name, x and Q(x) of each tensor that is not sent exactly.
        """
        joint = {name: codec for name, codec in self.codecs.items() if codec.quantizer.across}
        scales = prepared(joint, {name: params[name][None] for name in joint}) if joint else {}
        sides, waiting, buffers = [b""] * len(self.plan.places), dict[int, Tensor](), dict[int, bytes]()
        missing = [len(buffer.places) for buffer in self.plan.buffers]  # tensors that are not encoded yet
        for i, x, (sides[i], waiting[i], made) in self._encoded(params, key, scales):
            place = self.plan.places[i]
            if coded is not None and place.codec.quantizer.lossy:
                decoded = _decoded(place, made)
                coded(place.name, x, as_dtype(decoded, x.dtype).to(x.dtype))
            at = self.plan.buffer_of[i]
            if at is None:
                continue
            missing[at] -= 1
            if not missing[at]:
                places, codec, _, levels, _ = self.plan.buffers[at]
                together = [waiting.pop(j) for j in places]
                codes = torch.cat(together) if len(together) > 1 else together[0]
                buffers[at] = codec.coder.encode(codes, levels)
                if codec.coder.by_user:
                    _check_coded(self.plan.buffers[at], buffers[at], place.name)
        in_order = [buffers[at] for at in range(len(buffers))]
        lengths = self.plan.lengths([len(buffer) for buffer in in_order])
        head = header._replace(lossy=self.plan.lossy)
        return build(head, self.layout, self.plan.coding, [lengths, *sides, *in_order], self.described)

    def _encoded(
        self, params: Mapping[str, Tensor], key: Tensor | None, scales: Mapping[Codec, Tensor]
    ) -> Iterator[tuple[int, Tensor, Encoded]]:
        """(number, tensor, encoding) of all tensors; small ones with equal shapes and codecs are encoded together."""
        stacks: dict[Hashable, list[tuple[int, Tensor]]] = {}
        try:
            for i, (name, codec, dtype, shape, *_) in enumerate(self.plan.places):
                x = params[name].detach()
                if codec.quantizer.plain or not 0 < x.numel() <= TOGETHER // 4:
                    yield from self._encode_all([(i, x)], key, scales)
                    continue
                stack = stacks.setdefault((codec, dtype, shape, x.device), [])
                stack.append((i, x))
                if len(stack) * x.numel() >= TOGETHER:
                    yield from self._encode_all(stack, key, scales)
                    stack.clear()
            for stack in filter(None, stacks.values()):
                yield from self._encode_all(stack, key, scales)
        except ValueError:  # name the first tensor that cannot be encoded
            for item in sorted((item for stack in stacks.values() for item in stack), key=lambda item: item[0]):
                list(self._encode_all([item], key, scales))
            raise

    def _encode_all(
        self, stack: Sequence[tuple[int, Tensor]], key: Tensor | None, scales: Mapping[Codec, Tensor]
    ) -> Iterator[tuple[int, Tensor, Encoded]]:
        """Encode tensors with equal shapes and codecs."""
        names, codec = [self.plan.places[i].name for i, _ in stack], self.plan.places[stack[0][0]].codec
        keys = [tensor_key(codec, name, key) for name in names]
        try:
            made = _encode([x for _, x in stack], codec, keys, scales.get(codec))
        except ValueError as error:
            raise ValueError(f"{names[0]}: {reason(error)}") from None
        for (i, x), encoded in zip(stack, made, strict=True):
            yield i, x, encoded


def _decoded(place: Place, made: Coded) -> Tensor:
    """Decoded values of one tensor; a ValueError of a user's codec names the tensor."""
    try:
        return place.codec.decode(made, 1, place.shape)[0]
    except ValueError as error:
        raise ValueError(f"{place.name}: {place.codec.quantizer}: {reason(error)}") from None


def _check_coded(buffer: Buffer, data: object, name: str) -> None:
    """Raise ValueError if a user's coder made a buffer that a reader would refuse."""
    coder, size = buffer.codec.coder, buffer.size
    if not isinstance(data, bytes):
        raise ValueError(f"{name}: {coder} made a {type(data).__name__}, which must be bytes")
    if len(data) > buffer.most or (size is not None and len(data) != size):
        limit = f"of at most {buffer.most}" if size is None else f"of {size}"
        raise ValueError(f"{name}: {coder} made {len(data)} bytes instead {limit}, as its sizes say")


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
        for buffer in variable:
            if buffer.codec.coder.by_user:  # an error now instead of when a frame is read
                check_sizes(buffer.codec.coder, buffer.total, buffer.levels)
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
    if not isinstance(codec, Codec | Mapping):
        raise ValueError(f"codec={codec!r}: must be a Codec, such as Codec(KMeans(4)), or a mapping of names to codecs")
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


def _encode(
    tensors: Sequence[Tensor], codec: Codec, keys: Sequence[Tensor | None], scale: Tensor | None
) -> list[Encoded]:
    """Encodings of tensors with equal shapes."""
    x = tensors[0]
    if not x.numel():
        return [(b"", torch.zeros(0, dtype=torch.uint8), Coded([]))] * len(tensors)
    if codec.quantizer.plain and not codec.quantizer.lossy:
        if not all(finite(x) for x in tensors if x.is_floating_point()):
            raise ValueError("contains NaN or infinity")
        return [(b"", x.cpu().reshape(-1).view(torch.uint8), Coded([])) for x in tensors]
    together = torch.stack(list(tensors)) if len(tensors) > 1 else x[None]
    if not x.is_floating_point() and together.double().abs().max() > LARGEST:
        raise ValueError("contains an integer beyond 2^24, which cannot be quantized; send it exactly")
    key = None if keys[0] is None else torch.stack([key for key in keys if key is not None])
    coded = codec.encode(together, key, None if scale is None else scale.expand(len(tensors)))
    k, seeds = len(tensors), coded.seeds
    parts = [[part.reshape(k, len(part) // k, part.shape[1]) for part in pair] for pair in coded.parts]
    sides = [side.cpu().numpy().astype("<f4") for _, side in parts]
    found = []
    for i in range(k):
        its_seeds = None if seeds is None else seeds[i : i + 1]
        start = b"" if its_seeds is None else its_seeds.cpu().numpy().astype("<u4").tobytes()
        made = Coded([(codes[i], side[i]) for codes, side in parts], its_seeds)
        flat = [codes.flatten() for codes, _ in made.parts]
        side = b"".join([start, *(side[i].tobytes() for side in sides)])
        found.append((side, torch.cat(flat) if len(flat) > 1 else flat[0], made))
    return found
