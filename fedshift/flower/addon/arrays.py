"""Conversion between Flower's records and tensors.

An upload is a single `Array` that contains a frame. It has its own serialization type, so a server without `FedShift`
fails with an error, and it takes one request instead of one per tensor. A model can be sent to clients in the same
way, as one packed array.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from io import BytesIO
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from fedshift.codecs.base import finite
from fedshift.codecs.codec import Codec
from fedshift.core import rng
from fedshift.core.types import Params
from fedshift.wire.frame import ParsedFrame, TensorLayout, WireError, parse, read_layout
from fedshift.wire.registry import DTYPES
from fedshift.wire.writer import pack, unpack

FLOATS = ("float16", "float32", "float64")  # dtypes of a reply that are cast to the dtype of the model
Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)
FRAME = "fedshift.frame"  # serialization type of an array that contains a frame
PACKED = "fedshift.packed"  # serialization type of an array that contains all arrays of a record
KEY = "fedshift"  # the only key of a record that contains a frame or a packed array
LENGTH = 8  # size in bytes of the length field at the start of a packed array
OURS = "fedshift."  # prefix of records and config keys of fedshift
CONTROL = f"{OURS}control"  # the record with SCAFFOLD's control c in a message
BUFFERS = ("*running_mean", "*running_var")  # statistics, not weights: they are sent exactly


def to_params(record: ArrayRecord) -> Params:
    """Return the tensors of a record from a trusted source; nothing is checked."""
    return {name: torch.from_numpy(array.numpy()) for name, array in record.items()}


class ArrayParams(Mapping[str, Tensor]):
    """Tensors of a record from a trusted source, each created when it is read.

    >>> params = ArrayParams(ArrayRecord({"bias": Array(np.zeros(2))}))
    >>> params["bias"], params.like()["bias"]
    (tensor([0., 0.], dtype=torch.float64), tensor(..., device='meta', size=(2,), dtype=torch.float64))
    """

    def __init__(self, record: Mapping[str, Array]) -> None:
        self.record = record

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self.record[name].numpy())

    def __iter__(self) -> Iterator[str]:
        return iter(self.record)

    def __len__(self) -> int:
        return len(self.record)

    def like(self) -> Params:
        """Tensors with these shapes and dtypes, without values."""
        dtypes = {array.dtype: torch.from_numpy(np.empty(0, array.dtype)).dtype for array in self.record.values()}
        return {n: torch.empty(x.shape, dtype=dtypes[x.dtype], device="meta") for n, x in self.record.items()}


def to_record(params: Params) -> ArrayRecord:
    return ArrayRecord({name: Array(x.detach().cpu().numpy()) for name, x in params.items()})


def enclose(frame: bytes) -> Array:
    return Array("uint8", (len(frame),), FRAME, frame)


def packed(record: ArrayRecord) -> ArrayRecord:
    """Pack the arrays of a record into one: a length, a JSON description of the arrays, and their bytes, unchanged.

    Flower transfers an array as two objects or more, with one request per object.

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
    """Unpack a record made by `packed`; return any other record unchanged."""
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


def coded(record: ArrayRecord, codec: Codec, number: int) -> tuple[ArrayRecord, ArrayRecord]:
    """Encode the arrays of a record as one frame; return the record with it, and the arrays as nodes decode them.

    >>> from fedshift import Uniform
    >>> frame, decoded = coded(ArrayRecord({"w": Array(np.array([[0.0, 0.4, 1.0]], "float32"))}), Codec(Uniform(1)), 1)
    >>> to_params(decoded), list(frame)
    ({'w': tensor([[0., 0., 1.]])}, ['fedshift'])
    """
    params = to_params(record)
    frame = pack(
        dict.fromkeys(quantizable(params), codec),
        params,
        base=number,
        described=True,
        key=rng.key(0, "downlink", number),
    )
    content = ArrayRecord({KEY: enclose(frame)})
    return content, decoded(content)


def decoded(record: ArrayRecord) -> ArrayRecord:
    """Decode a record made by `coded`; return any other record unchanged."""
    frame = frame_of(record)
    return record if frame is None else to_record(unpack(frame, like=layout(frame)))


def quantizable(params: Params, exact: Sequence[str] = BUFFERS) -> list[str]:
    """Names of floating point tensors, except those that match a pattern of `exact`."""
    return [n for n, x in params.items() if x.is_floating_point() and not any(fnmatchcase(n, p) for p in exact)]


def layout(frame: bytes) -> Params:
    """Empty tensors with the names, shapes and dtypes of a trusted frame."""
    return {name: torch.empty(shape, dtype=DTYPES[dtype]) for name, dtype, shape in tensors(parse(frame))}


def tensors(frame: ParsedFrame) -> list[TensorLayout]:
    """Layout of a frame, which must contain it: nodes may return some tensors only, or in other dtypes."""
    if frame.described is None:
        raise WireError("the frame does not contain its layout")
    return read_layout(frame.described)


def only(message: Message, kind: type[Record]) -> tuple[str, Record]:
    """Return name and content of the app's only record of a type; ValueError if there is none or more than one."""
    return only_in(message.content, kind)


def only_in(content: RecordDict, kind: type[Record]) -> tuple[str, Record]:
    """Like `only`, for the content of a message."""
    of_app = [(name, record) for name, record in content.items() if not name.startswith(OURS)]
    found = [(name, record) for name, record in of_app if isinstance(record, kind)]
    if len(found) != 1:
        raise ValueError(f"the message contains {len(found)} records of type {kind.__name__} instead of one")
    return found[0]


def frame_of(record: ArrayRecord) -> bytes | None:
    """Return the frame in a record, or None for a record of plain arrays."""
    array = record.get(KEY)
    return array.data if array is not None and len(record) == 1 and array.stype == FRAME else None


def checked(record: ArrayRecord, sent: Sequence[Params]) -> tuple[Params, Params]:
    """Check a reply from an untrusted source; return the broadcast in the dtypes of the reply, and the reply's tensors.

    `sent` are versions of the broadcast that differ in dtypes; the last one is used if none matches the reply. The
    reply may contain all or some tensors of the broadcast. They must be finite and have the same shapes; floating
    tensors are cast to the dtypes of the returned broadcast.
    """
    model = sent[-1]
    unknown = [name for name in record if name not in model]
    if unknown or not record:
        raise WireError(f"the arrays do not match the model: {_unexpected(unknown)}")
    matching = (start for start in sent if all(array.dtype == _dtype(start[n]) for n, array in record.items()))
    start = next(matching, model)
    found = {name: _checked(name, record[name], x) for name, x in start.items() if name in record}
    return start, as_model(found, start)


def as_model(params: Params, model: Params) -> Params:
    """Cast tensors to the dtypes of the model; WireError for a value that is too large."""
    cast = {name: x.to(model[name].dtype) for name, x in params.items()}
    for name, x in cast.items():
        if x.dtype != params[name].dtype and not finite(x):
            raise WireError(f"{name}: contains a value too large for {x.dtype}")
    return cast


def described(frame: bytes, model: Params) -> Params:
    """Return the model's tensors that a frame contains, in the floating dtypes of the frame."""
    found = tensors(parse(frame))
    unknown = [tensor.name for tensor in found if tensor.name not in model]
    if unknown or not found:
        raise WireError(f"the frame's tensors do not match the model: {_unexpected(unknown)}")
    dtypes = {name: DTYPES.get(dtype, model[name].dtype) for name, dtype, _ in found}
    return {
        name: x.to(dtypes[name]) if x.is_floating_point() and dtypes[name].is_floating_point else x
        for name, x in model.items()
        if name in dtypes
    }


def _unexpected(names: list[str]) -> str:
    return f"unexpected {names[:3]}" if names else "there are no tensors"


def _dtype(x: Tensor) -> str:
    return str(x.numpy().dtype)


def _checked(name: str, array: Array, x: Tensor) -> Tensor:
    """Decode one array; its bytes must start with the header that NumPy writes for x, so no header is parsed."""
    dtype, shape = x.numpy().dtype, tuple(x.shape)
    if array.stype != "numpy.ndarray":
        raise WireError(f"{name}: unknown serialization type {array.stype[:40]!r}")
    if dtype.kind == "f" and array.dtype in FLOATS:
        dtype = np.dtype(array.dtype)
    if array.shape != shape or array.dtype != str(dtype):
        raise WireError(f"{name}: {array.dtype[:40]} {array.shape[:8]} instead of {dtype} {shape}")
    orders: tuple[Literal["C", "F"], ...] = "C", "F"
    for order in orders:
        start = _header(dtype, shape, order == "F")
        if array.data.startswith(start) and len(array.data) - len(start) == x.numel() * dtype.itemsize:
            values = np.frombuffer(array.data, dtype, offset=len(start)).reshape(shape, order=order)
            if dtype.kind == "f" and not np.isfinite(values).all():
                raise WireError(f"{name}: contains NaN or infinity")
            return torch.from_numpy(np.array(values, order="C"))
    raise WireError(f"{name}: its {len(array.data)} bytes are not a NumPy array of type {dtype} and shape {shape}")


def _header(dtype: np.dtype[Any], shape: tuple[int, ...], fortran: bool) -> bytes:
    file = BytesIO()
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": fortran, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()
