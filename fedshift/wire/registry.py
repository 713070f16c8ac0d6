"""Dtypes and codecs as bytes of the wire format. A number is never reused.

Each part of a codec knows its own number (`codecs.base.Numbered`). Retired: quantizer 5 (bfloat16, now quantizer 4
with a parameter) and coder 2 (a range coder of fixed tables).
"""

from functools import lru_cache
from typing import Any

import torch

from fedshift.codecs.base import MOST_PARAMETERS, USERS, Coder, Groups, Numbered, Quantizer, Transform
from fedshift.codecs.codec import Codec, PerTensor
from fedshift.wire.frame import Cursor, WireError

DTYPES = {
    0: torch.float32,
    1: torch.float64,
    2: torch.float16,
    3: torch.bfloat16,
    4: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    8: torch.uint8,
    9: torch.bool,
}
NUMBERS = {dtype: number for number, dtype in DTYPES.items()}
GROUPED, TRANSFORMED = 1, 2  # flags of a codec: groups other than per tensor, and a transform, follow


def dtype_number(dtype: torch.dtype) -> int:
    """Number of a dtype; ValueError if it cannot be sent."""
    if dtype not in NUMBERS:
        known = ", ".join(str(dtype)[6:] for dtype in NUMBERS)
        raise ValueError(f"tensors of {dtype} cannot be sent; known are {known}")
    return NUMBERS[dtype]


@lru_cache(1024)
def codec_bytes(codec: Codec) -> bytes:
    """Bytes of a codec: what a decoder needs to know.

    >>> from fedshift import KMeans
    >>> codec_bytes(Codec(KMeans(4))).hex(" ")
    '02 01 04 00 00 00'
    """
    groups, transform = codec.groups, codec.transform
    grouped = type(groups) is not PerTensor and not codec.quantizer.plain  # exact values and casts have no rows
    flags = GROUPED * grouped | TRANSFORMED * (transform is not None)
    parts = [_part_bytes(codec.quantizer), _part_bytes(codec.coder), bytes([flags])]
    parts += [_part_bytes(groups)] if grouped else []
    parts += [_part_bytes(transform)] if transform is not None else []
    return b"".join(parts)


def _part_bytes(part: Numbered) -> bytes:
    kind = type(part)
    if kind.number is None:
        raise ValueError(
            f"{part} has no number in the wire format: define it as class {kind.__name__}(..., number=N) "
            f"with N between {USERS} and 255"
        )
    parameters = part.parameters()
    if len(parameters) > MOST_PARAMETERS:
        raise ValueError(f"{part} has {len(parameters)} bytes of parameters; at most {MOST_PARAMETERS} are allowed")
    return bytes([kind.number, len(parameters)]) + parameters


def read_codec(reader: Cursor) -> Codec:
    """The next codec of a frame; WireError for an unknown part."""
    quantizer: Quantizer = _read_part(reader, Quantizer)
    coder: Coder = _read_part(reader, Coder)
    flags = reader.take(1, "codecs")[0]
    if flags & ~(GROUPED | TRANSFORMED):
        raise WireError(f"a codec has the unknown flags {flags:#04x}")
    groups: Groups = _read_part(reader, Groups) if flags & GROUPED else PerTensor()
    transform: Transform | None = _read_part(reader, Transform) if flags & TRANSFORMED else None
    if flags & GROUPED and (quantizer.plain or type(groups) is PerTensor):
        raise WireError(f"{quantizer} is sent with {groups}, which no encoder writes")
    try:
        return Codec(quantizer, coder, groups, transform)
    except ValueError as error:
        raise WireError(str(error)) from None


def _read_part(reader: Cursor, kind: type[Numbered]) -> Any:
    number, length = reader.take(2, "codecs")
    parameters = reader.take(length, "codecs")
    found = kind.known.get(number)
    if found is None:
        where = "; import the module that defines it" if number >= USERS else ""
        raise WireError(f"{kind.kind} {number} is not known here{where}")
    try:
        part = found.read(parameters)
        if part.parameters() != parameters:
            raise ValueError(f"{part} does not have the parameters {parameters.hex()}")
    except ValueError as error:
        raise WireError(str(error)) from None
    except Exception as error:  # of a user's class, which need not foresee every sequence of bytes
        raise WireError(f"{found.__name__} cannot read the parameters {parameters.hex()}: {error!r}") from None
    return part
