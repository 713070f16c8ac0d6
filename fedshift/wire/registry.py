"""Numbers of dtypes and codecs in the wire format. A number is never reused."""

from functools import lru_cache

import torch

from fedshift.codecs.base import Codec, Coder, Groups, PerBlock, PerChannel, PerTensor, Quantizer
from fedshift.codecs.bitpack import BitPack
from fedshift.codecs.entropy import Range, Zstd
from fedshift.codecs.exact import Cast, Identity
from fedshift.codecs.kmeans import KMeans
from fedshift.codecs.step import Step
from fedshift.codecs.ternary import Ternary
from fedshift.codecs.uniform import Stochastic, Uniform
from fedshift.wire.frame import TensorRecord

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
IDENTITY, FLOAT16, BFLOAT16 = 0, 4, 5
LOOKUPS: dict[int, type[Uniform | KMeans | Stochastic | Step | Ternary]] = {
    1: Uniform,
    2: KMeans,
    3: Stochastic,
    6: Step,
    7: Ternary,
}
CODERS: dict[int, type[Coder]] = {0: BitPack, 1: Zstd, 3: Range}  # 2: retired, a range coder of fixed tables
GROUPS: dict[int, type[Groups]] = {0: PerTensor, 1: PerChannel, 2: PerBlock}


@lru_cache(1024)
def numbers_of(codec: Codec, dtype: torch.dtype) -> tuple[int, int, int, int, int, int]:
    """Numbers of dtype, quantizer, bits, coder, groups and block in a record."""
    kind = next((number for number, known in DTYPES.items() if known == dtype), None)
    if kind is None:
        raise ValueError(
            f"tensors of {dtype} cannot be sent; known are {', '.join(str(d)[6:] for d in DTYPES.values())}"
        )
    block = codec.groups.n if isinstance(codec.groups, PerBlock) else 0
    coder, groups = _number(CODERS, codec.coder), _number(GROUPS, codec.groups)
    if isinstance(codec.quantizer, Identity):
        return kind, IDENTITY, 8 * dtype.itemsize, coder, 0, 0
    if isinstance(codec.quantizer, Cast):
        return kind, FLOAT16 if codec.quantizer.to == "float16" else BFLOAT16, 16, coder, 0, 0
    return kind, _number(LOOKUPS, codec.quantizer), codec.quantizer.bits, coder, groups, block


def codec_of(record: TensorRecord) -> Codec:
    """Codec of a record; ValueError for unknown numbers."""
    return _codec(record._replace(name="", shape=(), codes=0))


@lru_cache(1024)
def _codec(record: TensorRecord) -> Codec:
    if record.coder not in CODERS or record.groups not in GROUPS:
        raise ValueError(f"unknown coder {record.coder} or groups {record.groups}")
    if bool(record.block) != (GROUPS[record.groups] is PerBlock):
        raise ValueError(f"block {record.block} does not fit groups {record.groups}")
    quantizer = _quantizer(record)
    if not isinstance(quantizer, tuple(LOOKUPS.values())) and record.groups:
        raise ValueError(f"groups {record.groups} with a quantizer that has no side data")
    groups = PerBlock(record.block) if record.block else GROUPS[record.groups]()
    return Codec(quantizer, CODERS[record.coder](), groups)


def _quantizer(record: TensorRecord) -> Quantizer:
    if record.quantizer in LOOKUPS:
        return LOOKUPS[record.quantizer](record.bits)
    if record.quantizer == IDENTITY and record.bits == 8 * DTYPES[record.dtype].itemsize:
        return Identity()
    if record.quantizer in (FLOAT16, BFLOAT16) and record.bits == 16:
        return Cast("float16" if record.quantizer == FLOAT16 else "bfloat16")
    raise ValueError(f"unknown quantizer {record.quantizer} with {record.bits} bits")


def _number(table: dict[int, type], part: object) -> int:
    for number, kind in table.items():
        if isinstance(part, kind):
            return number
    raise ValueError(
        f"{part} has no number in the wire format; known are {', '.join(k.__name__ for k in table.values())}"
    )
