"""Bytes of one upload; docs/wire.md is their specification.

    magic, version, flags, run, base round, client, examples | layout | codecs | lengths | side data | codes | CRC-32

This module knows bytes and bounds; `plan` knows which of them belong to which tensor, and `reader` and `writer`
interpret them.
"""

import hashlib
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from fedshift.codecs.base import read_varint, varint

MAGIC = b"FEDS"
VERSION = 2
PRELUDE = struct.Struct("<4sBBQ")  # magic, version, flags, run
CRC = struct.Struct("<I")
UPDATE, RESET, LOSSY, DESCRIBED = 1, 2, 4, 8  # flags
DIGEST = 8  # bytes of the digest of a layout
SHORTEST = PRELUDE.size + 3 + 1 + CRC.size
MOST_AXES = 16
MOST_NAME = 1 << 16


class WireError(ValueError):
    """A frame is invalid; the message states the reason.

    >>> from fedshift import header
    >>> header(b"GARBAGE" * 9)
    Traceback (most recent call last):
    fedshift.wire.frame.WireError: the frame begins with b'GARB' instead of b'FEDS'
    """


class Header(NamedTuple):
    """Information about an upload, as its client states it.

    >>> Header(update=True, base=7, examples=600, client=3)
    Header(update=True, base=7, examples=600, reset=False, lossy=False, run=0, client=3)
    """

    update: bool = False  # an update (the change since the base round), not weights
    base: int = 0  # round whose model the client started from
    examples: int = 0  # number of examples the client trained on
    reset: bool = False  # the client's memory (error feedback, control) was lost and reset
    lossy: bool = False  # some tensor is not exact; set by pack
    run: int = 0  # number of the training run, 0 if it has none
    client: int | None = None  # number of the client, None if it has none

    def check(self, run: int, base: int, client: int | None) -> None:
        """Raise WireError if the frame belongs to another run, round or client."""
        if self.run != run:
            raise WireError(f"the frame belongs to run {self.run:016x}, not {run:016x}")
        if self.base != base:
            raise WireError(f"the frame belongs to round {self.base}, not {base}")
        if self.client != client:
            raise WireError(f"the frame belongs to {_client(self.client)}, not {_client(client)}")


def _client(number: int | None) -> str:
    return "no client" if number is None else f"client {number}"


class TensorLayout(NamedTuple):
    """Name, dtype (its number in the wire format) and shape of one tensor."""

    name: str
    dtype: int
    shape: tuple[int, ...]


def describe(tensors: Sequence[TensorLayout]) -> bytes:
    """Bytes of a layout."""
    return varint(len(tensors)) + b"".join(map(_described, tensors))


def _described(tensor: TensorLayout) -> bytes:
    name, shape = tensor.name.encode(), tensor.shape
    if len(name) >= MOST_NAME:
        raise ValueError(f"{tensor.name[:40]}...: a tensor's name must be shorter than 65,536 bytes")
    if len(shape) > MOST_AXES or any(n >= 1 << 32 for n in shape):
        raise ValueError(f"{tensor.name}: shape {shape} has more than {MOST_AXES} axes or an axis of 2^32 or more")
    return varint(len(name)) + name + bytes([tensor.dtype, len(shape)]) + b"".join(map(varint, shape))


def digest(described: bytes) -> bytes:
    """Eight bytes that stand for a layout: the first of its SHA-256."""
    return hashlib.sha256(described).digest()[:DIGEST]


def head(header: Header) -> bytes:
    """First bytes of a frame, up to its layout, without the flag of a described layout."""
    flags = UPDATE * bool(header.update) | RESET * bool(header.reset) | LOSSY * bool(header.lossy)
    client = 0 if header.client is None else header.client + 1
    if not (0 <= header.run < 1 << 64 and 0 <= header.base < 1 << 32 and 0 <= header.examples < 1 << 64):
        raise ValueError(
            f"run={header.run}, base={header.base}, examples={header.examples}: must be integers of 0 or more, "
            "run and examples below 2^64 and base below 2^32"
        )
    if header.client is not None and not 0 < client < 1 << 64:
        raise ValueError(f"client={header.client}: must be None or an integer from 0 to 2^64 - 2")
    prelude = PRELUDE.pack(MAGIC, VERSION, flags, header.run)
    return prelude + varint(header.base) + varint(client) + varint(header.examples)


def build(header: Header, layout: bytes, coding: bytes, buffers: Sequence[bytes], described: bool = False) -> bytes:
    """Frame from its header, the bytes of its layout and codecs, and further buffers in order."""
    start = bytearray(head(header))
    if described:
        start[5] |= DESCRIBED
    where = varint(len(layout)) + layout if described else digest(layout)
    pieces = [bytes(start), where, varint(len(coding)), coding, *buffers]
    crc = 0
    for piece in pieces:
        crc = zlib.crc32(piece, crc)
    return b"".join([*pieces, CRC.pack(crc)])


class ParsedFrame(NamedTuple):
    """A frame whose checksum and header are valid."""

    header: Header
    digest: bytes  # of the layout
    described: bytes | None  # the layout, if the frame contains it
    coding: bytes  # codecs of the tensors
    rest: memoryview  # lengths, side data and codes


def parse(data: bytes | memoryview) -> ParsedFrame:
    """Read the beginning of a frame; raise WireError if it or the checksum is invalid."""
    view = memoryview(data).cast("B")
    if len(view) < SHORTEST:
        raise WireError(f"{len(view)} bytes are too few for a frame, which has at least {SHORTEST}")
    magic, version, flags, run = PRELUDE.unpack_from(view)
    if magic != MAGIC:
        raise WireError(f"the frame begins with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise WireError(f"the frame has version {version}; this program reads version {VERSION}")
    if zlib.crc32(view[: -CRC.size]) != CRC.unpack_from(view, len(view) - CRC.size)[0]:
        raise WireError("the checksum does not match: the frame was damaged in transit or is incomplete")
    if flags & ~(UPDATE | RESET | LOSSY | DESCRIBED):
        raise WireError(f"unknown flags {flags:#04x}")
    reader = Cursor(view[: -CRC.size], PRELUDE.size)
    base, client, examples = reader.varint("base round"), reader.varint("client"), reader.varint("examples")
    if base >= 1 << 32:
        raise WireError(f"the base round {base} must be below 2^32")
    described = reader.take(reader.varint("layout"), "layout") if flags & DESCRIBED else None
    found = reader.take(DIGEST, "layout") if described is None else digest(described)
    coding = reader.take(reader.varint("codecs"), "codecs")
    header = Header(
        update=bool(flags & UPDATE),
        base=base,
        examples=examples,
        reset=bool(flags & RESET),
        lossy=bool(flags & LOSSY),
        run=run,
        client=client - 1 if client else None,
    )
    return ParsedFrame(header, found, described, coding, reader.rest)


def read_layout(described: bytes) -> list[TensorLayout]:
    """Tensors of a described layout."""
    reader = Cursor(memoryview(described), 0)
    count = reader.varint("layout")
    if count > len(described):
        raise WireError(f"a layout of {len(described)} bytes cannot contain {count} tensors")
    tensors = []
    for number in range(count):
        what = f"layout of tensor {number}"
        name = reader.take(reader.varint(what), what)
        dtype, axes = reader.take(2, what)
        if axes > MOST_AXES:
            raise WireError(f"tensor {number} has {axes} axes; at most {MOST_AXES} are allowed")
        shape = tuple(reader.varint(what) for _ in range(axes))
        if any(n >= 1 << 32 for n in shape):
            raise WireError(f"tensor {number} has an axis of 2^32 or more")
        try:
            tensors.append(TensorLayout(name.decode(), dtype, shape))
        except UnicodeDecodeError:
            raise WireError(f"the name of tensor {number} is not UTF-8") from None
    if len(reader.rest):
        raise WireError(f"{len(reader.rest)} bytes follow the layout of the last tensor")
    return tensors


class Cursor:
    """Position in the bytes of a frame; reading beyond their end raises WireError."""

    def __init__(self, view: memoryview, at: int) -> None:
        self.view, self.at = view, at

    @property
    def rest(self) -> memoryview:
        return self.view[self.at :]

    def take(self, count: int, what: str) -> bytes:
        """The next `count` bytes."""
        if count > len(self.view) - self.at:
            raise WireError(f"the {what} extends beyond the frame")
        self.at += count
        return bytes(self.view[self.at - count : self.at])

    def varint(self, what: str) -> int:
        """The next number, of one to ten bytes."""
        try:
            number, self.at = read_varint(self.view, self.at, f"a number of the {what}")
        except ValueError as problem:
            raise WireError(str(problem)) from None
        return number
