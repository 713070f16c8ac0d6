"""A model's tensors <-> one frame of bytes.

    pack(codec, params) -> bytes      encode an upload
    unpack(data, like) -> params      decode it, with all checks against the expected model
    size(codec, like) -> int          len(pack(...)) without packing, for fixed-rate coders

A frame is untrusted input: no memory is allocated because of a size it declares, nothing in it is
executed, and an invalid frame raises a `WireError` that states the reason.
"""

import zlib
from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from fedshift.codecs.base import Codec, finite
from fedshift.codecs.exact import Identity
from fedshift.core import rng
from fedshift.core.types import Params
from fedshift.wire.frame import Header, TensorRecord, build, describe, overhead, parse
from fedshift.wire.reader import LARGEST, Reader, as_dtype, code_count, side_numbers
from fedshift.wire.registry import numbers_of

Choice = Codec | Mapping[str, Codec]  # one codec, or {name or pattern: codec}: the name itself, else the first match
EXACT = Codec(Identity())


def pack(
    codec: Choice,
    params: Params,
    *,
    update: bool = False,
    base: int = 0,
    examples: int = 0,
    reset: bool = False,
    key: Tensor | None = None,
) -> bytes:
    """Encode tensors as a frame; `key` is for codecs that round at random.

    >>> from fedshift import Codec, KMeans
    >>> params = {"weight": torch.arange(20.0).view(4, 5), "bias": torch.ones(4)}
    >>> frame = pack(Codec(KMeans(1)), params)
    >>> len(frame), size(Codec(KMeans(1)), params)
    (125, 125)
    >>> unpack(frame, like=params)["weight"][0]
    tensor([4.5000, 4.5000, 4.5000, 4.5000, 4.5000])
    """
    return Writer(codec, params).pack(params, Header(update, base, examples, reset), key)


class Writer:
    """Pack several models with the same names, shapes and codec, whose records are prepared once."""

    def __init__(self, codec: Choice, like: Params) -> None:
        self.codecs = {name: choose(codec, name, x) for name, x in like.items()}
        self.lossy = any(chosen.quantizer.lossy for chosen in self.codecs.values())
        self.records = [self._record(name, x) for name, x in like.items()]
        self.described: tuple[list[int], bytes] = [], b""  # bytes of codes, and the records with these numbers

    def pack(self, params: Params, header: Header, key: Tensor | None = None) -> bytes:
        """Encode a model like the first; the lossy flag of the header is set here."""
        buffers, lengths = [], []
        for name, codec in self.codecs.items():
            try:
                side, codes = _encode(codec, params[name], tensor_key(codec, name, key))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
            buffers += [side, codes]
            lengths.append(len(codes))
        if lengths != self.described[0]:
            pairs = zip(self.records, lengths, strict=True)
            self.described = lengths, describe([record._replace(codes=length) for record, length in pairs])
        return build(header._replace(lossy=self.lossy), len(lengths), self.described[1], buffers)

    def _record(self, name: str, x: Tensor) -> TensorRecord:
        try:
            return TensorRecord(name, tuple(x.shape), *numbers_of(self.codecs[name], x.dtype), codes=0)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def unpack(data: bytes | memoryview, like: Params, codec: Choice | None = None) -> Params:
    """Decode the tensors of a frame, which must have the names, shapes and dtypes of `like`, on its devices.

    With a `codec`, a frame that is neither packed with it nor exact is refused before it is decoded.

    >>> sent = {"bias": torch.tensor([1.0, 2.0])}
    >>> unpack(pack(EXACT, sent), like=sent)
    {'bias': tensor([1., 2.])}
    >>> unpack(pack(EXACT, sent), like={"bias": torch.zeros(3)})
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


def size(codec: Choice, like: Params) -> int:
    """len(pack(codec, params)) for any params like these.

    The paper's CNN, exact and with 4 bits:

    >>> from fedshift import KMeans
    >>> from fedshift.models import PaperCNN
    >>> size(EXACT, PaperCNN().state_dict()), size(Codec(KMeans(4)), PaperCNN().state_dict())
    (8623696, 1078400)
    """
    total, variable = known(codec, like)
    for name in variable:
        coder = choose(codec, name, like[name]).coder
        raise ValueError(f"{name}: the size with {coder} depends on the values; use len(pack(...))")
    return total


def known(codec: Choice, like: Params) -> tuple[int, list[str]]:
    """Bytes of a frame that do not depend on the values, and the tensors whose number of code bytes does."""
    total, variable = sum(fixed(codec, like)), []
    for name, x in like.items():
        chosen = choose(codec, name, x)
        codes = chosen.coder.size(*code_count(chosen, x.dtype, x.shape)) if x.numel() else 0
        if codes is None:
            variable.append(name)
        else:
            total += codes
    return total, variable


def fixed(codec: Choice, like: Params) -> tuple[int, int]:
    """Bytes of header and bytes of side data in a frame; the others are codes."""
    header_bytes = overhead(list(like), [x.ndim for x in like.values()])
    return header_bytes, 4 * sum(side_numbers(choose(codec, name, x), x.shape) for name, x in like.items())


def header(data: bytes | memoryview) -> Header:
    """Read the header of a frame, after its checksum.

    >>> header(pack(EXACT, {"bias": torch.zeros(2)}, base=7, examples=600))
    Header(update=False, base=7, examples=600, reset=False, lossy=False)
    """
    return parse(data).header


def choose(codec: Choice, name: str, x: Tensor) -> Codec:
    """Codec of one tensor: the given one if it covers the tensor, else `EXACT`."""
    if not isinstance(codec, Codec):
        matches = (c for pattern, c in codec.items() if fnmatchcase(name, pattern))
        codec = codec.get(name) or next(matches, EXACT)
    return codec if codec.covers(x) else EXACT


def tensor_key(codec: Codec, name: str, key: Tensor | None) -> Tensor | None:
    """Key of one tensor; None if the codec does not round at random."""
    return None if key is None or not codec.quantizer.random else rng.fold(key, zlib.crc32(name.encode()))


def expected(codec: Choice | None, like: Params) -> dict[str, Codec] | None:
    """Codec of each tensor; None if any codec is accepted."""
    return None if codec is None else {name: choose(codec, name, x) for name, x in like.items()}


def _encode(codec: Codec, x: Tensor, key: Tensor | None) -> tuple[bytes, bytes]:
    """Side data and codes of one tensor."""
    x = x.detach()
    if not x.numel():
        return b"", b""
    if isinstance(codec.quantizer, Identity):
        if x.is_floating_point() and not finite(x):
            raise ValueError("contains NaN or infinity")
        return b"", codec.coder.encode(x.cpu().reshape(-1).view(torch.uint8), 8)
    if not x.is_floating_point() and x.double().abs().max() > LARGEST:
        raise ValueError("contains an integer beyond 2^24, which cannot be quantized; send it exactly")
    parts = codec.encode(x[None], None if key is None else key[None])
    side = b"".join(side.cpu().numpy().astype("<f4").tobytes() for _, side in parts)
    codes = [codes.flatten() for codes, _ in parts]
    return side, codec.coder.encode(torch.cat(codes) if len(codes) > 1 else codes[0], min(codec.quantizer.bits, 8))
