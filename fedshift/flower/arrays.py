"""Flower's records and our tensors.

An upload is one `Array` that holds a frame, with a serialisation type of its own: a server that does
not know it fails loudly, and one object is one request where many small ones are many.
"""

from io import BytesIO
from typing import TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from torch import Tensor

from fedshift.frame import WireError
from fedshift.types import Params

Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)
FRAME = "fedshift.frame"  # the serialisation type
KEY = "fedshift"  # the only key of a record that holds a frame


def to_params(record: ArrayRecord) -> Params:
    """The tensors of a record from somebody we trust."""
    return {name: torch.from_numpy(np.array(array.numpy())) for name, array in record.items()}


def to_record(params: Params) -> ArrayRecord:
    return ArrayRecord({name: Array(x.detach().cpu().numpy()) for name, x in params.items()})


def enclose(frame: bytes) -> Array:
    return Array("uint8", (len(frame),), FRAME, frame)


def only(message: Message, kind: type[Record]) -> tuple[str, Record]:
    """The one record of a kind in a message, and its name."""
    found = [(name, record) for name, record in message.content.items() if isinstance(record, kind)]
    if len(found) != 1:
        raise ValueError(f"the message holds {len(found)} records of type {kind.__name__}, not one")
    return found[0]


def frame_of(record: ArrayRecord) -> bytes | None:
    """The frame that a record holds, None for one of plain arrays."""
    array = record.get(KEY)
    return array.data if array is not None and len(record) == 1 and array.stype == FRAME else None


def checked(record: ArrayRecord, like: Params) -> Params:
    """The tensors of a record from anybody: those of `like` in name, shape and dtype, and finite."""
    missing, strange = [n for n in like if n not in record], [n for n in record if n not in like]
    if missing or strange:
        wrong = f"missing {missing[:3]}" if missing else f"unexpected {strange[:3]}"
        raise WireError(f"the arrays are not the model's: {wrong}")
    return {name: _checked(name, record[name], x) for name, x in like.items()}


def _checked(name: str, array: Array, x: Tensor) -> Tensor:
    """One array, looked at before any memory is taken for it."""
    expected = x.numpy().dtype
    try:
        if array.stype != "numpy.ndarray":
            raise ValueError(f"unknown serialization type {array.stype[:40]!r}")
        file = BytesIO(array.data)
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if shape != tuple(x.shape) or dtype != expected:
            raise ValueError(f"{dtype} {shape} where {expected} {tuple(x.shape)} is expected")
        if len(array.data) - file.tell() != x.numel() * expected.itemsize:
            raise ValueError(f"{len(array.data)} bytes are not what the array takes")
    except (ValueError, SyntaxError, TypeError) as problem:
        raise WireError(f"{name}: {' '.join(str(problem).split())}") from None
    values = np.frombuffer(array.data, expected, offset=file.tell()).reshape(shape, order="F" if fortran else "C")
    if expected.kind in "fc" and not np.isfinite(values).all():
        raise WireError(f"{name}: holds NaN or infinity")
    return torch.from_numpy(np.array(values, order="C"))
