"""Byte layout of one upload; docs/wire.md is its specification.

    magic, version, flags, length, examples, base round, tensors | one record per tensor | buffers | CRC-32

This module knows bytes and bounds; `reader` and `writer` interpret the buffers.
"""

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

MAGIC = b"FEDS"
VERSION = 1
PRELUDE = struct.Struct("<4sHHQQII")  # magic, version, flags, length, examples, base round, tensors
CODEC = struct.Struct("<BBBBBIQ")  # dtype, quantizer, bits, coder, groups, block, bytes of codes
CRC = struct.Struct("<I")
UPDATE, RESET, LOSSY = 1, 2, 4  # flags
MOST_AXES = 16


class WireError(ValueError):
    """A frame is invalid; the message states the reason.

    >>> from fedshift import header
    >>> header(b"GARBAGE" * 9)
    Traceback (most recent call last):
    fedshift.wire.frame.WireError: the frame begins with b'GARB' instead of b'FEDS'
    """


class Header(NamedTuple):
    """Information about an upload, as its client states it.

    >>> Header(update=True, base=7, examples=600)
    Header(update=True, base=7, examples=600, reset=False, lossy=False)
    """

    update: bool = False  # an update (the change since the base round), not weights
    base: int = 0  # round whose model the client started from
    examples: int = 0  # number of examples the client trained on
    reset: bool = False  # the client's memory (error feedback, control) was lost and reset
    lossy: bool = False  # some tensor is not exact; set by pack


class TensorRecord(NamedTuple):
    """Name, shape, codec and buffer size of one tensor, with the numbers of the wire format."""

    name: str
    shape: tuple[int, ...]
    dtype: int
    quantizer: int
    bits: int
    coder: int
    groups: int
    block: int
    codes: int  # bytes of codes


def describe(records: Sequence[TensorRecord]) -> bytes:
    """Bytes of the records."""
    return b"".join(_record(record) for record in records)


def build(header: Header, tensors: int, described: bytes, buffers: Sequence[bytes]) -> bytes:
    """Frame from its header, the bytes of its records, and the buffers: side data and codes of each tensor in turn."""
    length = PRELUDE.size + len(described) + sum(map(len, buffers)) + CRC.size
    flags = UPDATE * header.update | RESET * header.reset | LOSSY * header.lossy
    try:
        prelude = PRELUDE.pack(MAGIC, VERSION, flags, length, header.examples, header.base, tensors)
    except struct.error:
        raise ValueError(
            f"examples={header.examples}, base={header.base}: must be integers of 0 or more, "
            "examples below 2^64 and base below 2^32"
        ) from None
    crc = 0
    for piece in (prelude, described, *buffers):
        crc = zlib.crc32(piece, crc)
    return b"".join([prelude, described, *buffers, CRC.pack(crc)])


def overhead(names: Sequence[str], axes: Sequence[int]) -> int:
    """Bytes of a frame that are neither side data nor codes."""
    records = sum(3 + len(name.encode()) + 4 * n + CODEC.size for name, n in zip(names, axes, strict=True))
    return PRELUDE.size + records + CRC.size


class ParsedFrame(NamedTuple):
    """A frame whose prelude and checksum are valid."""

    header: Header
    tensors: int
    rest: memoryview  # records, then buffers


def parse(data: bytes | memoryview) -> ParsedFrame:
    """Read the prelude of a frame; raise WireError if prelude or checksum is invalid."""
    view = memoryview(data).cast("B")
    if len(view) < PRELUDE.size + CRC.size:
        raise WireError(f"{len(view)} bytes are too few for a frame, which has at least {PRELUDE.size + CRC.size}")
    magic, version, flags, length, examples, base, tensors = PRELUDE.unpack_from(view)
    if magic != MAGIC:
        raise WireError(f"the frame begins with {magic!r} instead of {MAGIC!r}")
    if version != VERSION:
        raise WireError(f"the frame has version {version}; this program reads version {VERSION}")
    if length != len(view):
        raise WireError(f"the frame has {len(view)} bytes instead of {length}, the length in its header")
    if zlib.crc32(view[: -CRC.size]) != CRC.unpack_from(view, length - CRC.size)[0]:
        raise WireError("the checksum does not match: the frame was damaged in transit")
    if flags & ~(UPDATE | RESET | LOSSY):
        raise WireError(f"unknown flags {flags:#06x}")
    header = Header(bool(flags & UPDATE), base, examples, bool(flags & RESET), bool(flags & LOSSY))
    return ParsedFrame(header, tensors, view[PRELUDE.size : -CRC.size])


def records(frame: ParsedFrame, expected: int) -> tuple[list[TensorRecord], int]:
    """Return the records, whose number must be the expected one, and their size in bytes."""
    if frame.tensors != expected:
        raise WireError(f"the frame has {frame.tensors} tensors, the model has {expected}")
    result, at = [], 0
    for number in range(expected):
        record, at = _read_record(frame.rest, at, number)
        result.append(record)
    return result, at


def _record(record: TensorRecord) -> bytes:
    name = record.name.encode()
    if len(name) >= 1 << 16:
        raise ValueError(f"{record.name[:40]}...: a tensor's name must be shorter than 65,536 bytes")
    if len(record.shape) > MOST_AXES or any(n >= 1 << 32 for n in record.shape):
        raise ValueError(
            f"{record.name}: shape {record.shape} has more than {MOST_AXES} axes or an axis of 2^32 or more"
        )
    return (
        struct.pack("<HB", len(name), len(record.shape))
        + name
        + struct.pack(f"<{len(record.shape)}I", *record.shape)
        + CODEC.pack(*record[2:])
    )


def _read_record(view: memoryview, at: int, number: int) -> tuple[TensorRecord, int]:
    try:
        length, axes = struct.unpack_from("<HB", view, at)
        if axes > MOST_AXES:
            raise WireError(f"tensor {number} has {axes} axes; at most {MOST_AXES} are allowed")
        at += 3
        name = bytes(view[at : at + length]).decode()
        shape = struct.unpack_from(f"<{axes}I", view, at + length)
        at += length + 4 * axes
        record = TensorRecord(name, shape, *CODEC.unpack_from(view, at))
    except struct.error:
        raise WireError(f"the record of tensor {number} extends beyond the frame") from None
    except UnicodeDecodeError:
        raise WireError(f"the name of tensor {number} is not UTF-8") from None
    return record, at + CODEC.size
