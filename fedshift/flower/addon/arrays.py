"""Flower's records and our tensors.

An upload is one `Array` that holds a frame, with a serialisation type of its own: a server that does
not know it fails loudly, and one object is one request where many small ones are many. A model may
be sent to clients in the same way, as one packed array.
"""

import json
from collections.abc import Sequence
from io import BytesIO
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedshift.codecs.base import finite
from fedshift.core.types import Params
from fedshift.wire.frame import WireError, parse, records
from fedshift.wire.registry import DTYPES

FLOATS = ("float16", "float32", "float64")  # dtypes of a reply that are cast to one another
Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)
FRAME = "fedshift.frame"  # the serialisation type
PACKED = "fedshift.packed"  # the serialization type of an array that contains the arrays of a record
KEY = "fedshift"  # the only key of a record that holds a frame or a packed array
LENGTH = 8  # bytes of the number that a packed array begins with
OURS = "fedshift."  # records and config keys that are not the app's begin so
CONTROL = f"{OURS}control"  # the record with SCAFFOLD's c in a message
BUFFERS = ("*running_mean", "*running_var")  # statistics, not weights: they travel exactly


def to_params(record: ArrayRecord) -> Params:
    """The tensors of a record from somebody we trust."""
    return {name: torch.from_numpy(array.numpy()) for name, array in record.items()}


def to_record(params: Params) -> ArrayRecord:
    return ArrayRecord({name: Array(x.detach().cpu().numpy()) for name, x in params.items()})


def enclose(frame: bytes) -> Array:
    return Array("uint8", (len(frame),), FRAME, frame)


def packed(record: ArrayRecord) -> ArrayRecord:
    """The arrays of a record as one, byte for byte: a length, a description of each in JSON, and their data.

    Flower transfers an array as two objects or more, each by a request of its own.

    >>> record = ArrayRecord({"weight": Array(np.ones((2, 3))), "bias": Array(np.zeros(2))})
    >>> list(packed(record))
    ['fedshift']
    >>> unpacked(packed(record)) == record
    True
    """
    description = [(name, x.dtype, x.shape, x.stype, len(x.data)) for name, x in record.items()]
    head = json.dumps(description).encode()
    content = b"".join([len(head).to_bytes(LENGTH, "little"), head, *(x.data for x in record.values())])
    return ArrayRecord({KEY: Array("uint8", (len(content),), PACKED, content)})


def unpacked(record: ArrayRecord) -> ArrayRecord:
    """The record that was packed; a record that is not packed is returned as it is."""
    array = record.get(KEY)
    if array is None or array.stype != PACKED:
        return record
    content = memoryview(array.data)
    place = LENGTH + int.from_bytes(content[:LENGTH], "little")
    arrays = {}
    for name, dtype, shape, stype, length in json.loads(bytes(content[LENGTH:place])):
        arrays[name] = Array(dtype, tuple(shape), stype, bytes(content[place : place + length]))
        place += length
    return ArrayRecord(arrays)


def only(message: Message, kind: type[Record]) -> tuple[str, Record]:
    """The one record of a kind in a message that is the app's, and its name."""
    return only_in(message.content, kind)


def only_in(content: RecordDict, kind: type[Record]) -> tuple[str, Record]:
    """The same for the content of a message."""
    mine = [(name, record) for name, record in content.items() if not name.startswith(OURS)]
    found = [(name, record) for name, record in mine if isinstance(record, kind)]
    if len(found) != 1:
        raise ValueError(f"the message holds {len(found)} records of type {kind.__name__}, not one")
    return found[0]


def frame_of(record: ArrayRecord) -> bytes | None:
    """The frame that a record holds, None for one of plain arrays."""
    array = record.get(KEY)
    return array.data if array is not None and len(record) == 1 and array.stype == FRAME else None


def checked(record: ArrayRecord, sent: Sequence[Params]) -> tuple[Params, Params]:
    """The one of `sent` that has the reply's dtypes, the last if none has, and the tensors of a record from anybody.

    These are all or some of those that were sent: finite, of the same shapes, and cast to floating dtypes of `sent`.
    """
    model = sent[-1]
    strange = [name for name in record if name not in model]
    if strange or not record:
        raise WireError(f"the arrays are not the model's: {_unexpected(strange)}")
    alike = (start for start in sent if all(array.dtype == _dtype(start[n]) for n, array in record.items()))
    start = next(alike, model)
    found = {name: _checked(name, record[name], x) for name, x in start.items() if name in record}
    return start, as_model(found, start)


def as_model(params: Params, model: Params) -> Params:
    """Floating tensors in the dtypes of the model; WireError for a number that is too large for them."""
    cast = {name: x.to(model[name].dtype) for name, x in params.items()}
    for name, x in cast.items():
        if x.dtype != params[name].dtype and not finite(x):
            raise WireError(f"{name}: holds a number too large for {x.dtype}")
    return cast


def described(frame: bytes, model: Params) -> Params:
    """Tensors as a frame describes its own: all or some of the model's, perhaps in other floating dtypes."""
    opened = parse(frame)
    found, _ = records(opened, min(opened.tensors, len(model)))
    strange = [record.name for record in found if record.name not in model]
    if strange or not found:
        raise WireError(f"the frame's tensors are not the model's: {_unexpected(strange)}")
    dtypes = {record.name: DTYPES.get(record.dtype, model[record.name].dtype) for record in found}
    return {
        name: x.to(dtypes[name]) if x.is_floating_point() and dtypes[name].is_floating_point else x
        for name, x in model.items()
        if name in dtypes
    }


def _unexpected(names: list[str]) -> str:
    return f"unexpected {names[:3]}" if names else "there are none"


def _dtype(x: Tensor) -> str:
    return str(x.numpy().dtype)


def _checked(name: str, array: Array, x: Tensor) -> Tensor:
    """One array: its bytes must begin as numpy would write one like x, so nothing of them has to be interpreted."""
    dtype, shape = x.numpy().dtype, tuple(x.shape)
    if array.stype != "numpy.ndarray":
        raise WireError(f"{name}: unknown serialization type {array.stype[:40]!r}")
    if dtype.kind == "f" and array.dtype in FLOATS:
        dtype = np.dtype(array.dtype)
    if array.shape != shape or array.dtype != str(dtype):
        raise WireError(f"{name}: {array.dtype[:40]} {array.shape[:8]} where {dtype} {shape} is expected")
    orders: tuple[Literal["C", "F"], ...] = "C", "F"
    for order in orders:
        begin = _header(dtype, shape, order == "F")
        if array.data.startswith(begin) and len(array.data) - len(begin) == x.numel() * dtype.itemsize:
            values = np.frombuffer(array.data, dtype, offset=len(begin)).reshape(shape, order=order)
            if dtype.kind == "f" and not np.isfinite(values).all():
                raise WireError(f"{name}: holds NaN or infinity")
            return torch.from_numpy(np.array(values, order="C"))
    raise WireError(f"{name}: its {len(array.data)} bytes are not those of such an array")


def _header(dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool) -> bytes:
    file = BytesIO()
    about = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": fortran, "shape": shape}
    np.lib.format.write_array_header_1_0(file, about)
    return file.getvalue()
