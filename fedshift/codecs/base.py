"""Contracts of the parts of a codec: quantizers, coders, groups and transforms.

    tensor --transform--> --groups--> rows of numbers --quantizer--> rows of codes + side --coder--> bytes

A transform changes the numbers of a tensor before they are quantized, for example by a rotation. Groups define the
rows. A quantizer turns each row into small integers and side data that a decoder needs (a range, a codebook). A coder
turns codes into bytes, without loss.

A part describes itself: its number in the wire format, and the parameters that a decoder needs, as bytes. Parameters
that only an encoder needs, such as a target rate, are not sent.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from textwrap import shorten
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

Side = Tensor  # float32 (rows, width): data that a decoder needs in addition to the codes
Shape = Sequence[int]
NOT_FINITE = "contains NaN or infinity, which cannot be quantized"
CHUNK = 1 << 17  # values processed at a time on a CPU: a chunk and its temporaries stay in the L2 cache
MOST_LEVELS = 256  # codes are bytes
USERS = 128  # numbers from here to 255 are for users' own codecs
MOST_PARAMETERS = 255  # bytes


class Numbered:
    """A part of a codec with a number in the wire format: `class Mine(Lookup, number=130)`.

    A frame contains the number of the exact class, so that a class without `number` cannot be sent, even if it is
    derived from one with a number.
    """

    kind: ClassVar[str] = "part"
    number: ClassVar[int | None] = None
    known: ClassVar[dict[int, type[Any]]] = {}

    def __init_subclass__(cls, number: int | None = None, **further: Any) -> None:
        super().__init_subclass__(**further)
        cls.number = number
        if number is None:
            return
        ours = cls.__module__.partition(".")[0] == "fedshift"
        if type(number) is not int:
            raise ValueError(f"{cls.__name__}: number {number!r} must be an integer")
        if not (0 <= number < USERS if ours else USERS <= number < 256):
            raise ValueError(f"{cls.__name__}: number {number} must be between {USERS} and 255")
        other = cls.known.get(number)
        if other is not None and _origin(other) != _origin(cls):
            raise ValueError(
                f"{cls.__name__}: {cls.kind} {number} is already {other.__module__}.{other.__qualname__}; "
                f"take another number between {USERS} and 255"
            )
        if other is not None and "<locals>" in cls.__qualname__:  # the two may decode differently
            raise ValueError(
                f"{cls.__name__}: {cls.kind} {number} was already defined by an earlier call of the function that "
                f"contains it; define it at the top level of {cls.__module__}"
            )
        cls.known[number] = cls

    def parameters(self) -> bytes:
        """Parameters that a decoder needs, as at most 255 bytes."""
        return b""

    @classmethod
    def read(cls, parameters: bytes) -> Self:
        """Part with these parameters, for decoding; ValueError if they are invalid."""
        if parameters:
            raise ValueError(f"{cls.__name__} has no parameters, but {len(parameters)} bytes of them were sent")
        return cls()

    @property
    def parts(self) -> "tuple[Numbered, ...]":
        """This part and those it consists of."""
        return (self,)

    @property
    def by_user(self) -> bool:
        """True if this part, or one it consists of, is not one of fedshift: its results are checked."""
        numbers = [type(part).number for part in self.parts]
        return any(number is None or number >= USERS for number in numbers)


def _origin(cls: type[Any]) -> tuple[str, str]:
    """File (or module) and name of a class: a script that is also imported by its name defines its classes twice."""
    module = sys.modules.get(cls.__module__)
    return getattr(module, "__file__", None) or cls.__module__, cls.__qualname__


class Quantizer(Numbered, ABC):
    """Rows of numbers <-> rows of codes, on any device.

    >>> from fedshift import Uniform
    >>> quantizer: Quantizer = Uniform(2)
    >>> quantizer.number, quantizer.levels(100), quantizer.width(100), quantizer.parameters()
    (1, 4, 2, b'\\x02')
    """

    kind = "quantizer"
    known: ClassVar[dict[int, type["Quantizer"]]] = {}
    plain: ClassVar[bool] = False  # True if the codes are the bytes of the values, in the dtype `stored`
    tabled: ClassVar[bool] = False  # True if `table` gives the values of all codes of a row
    lossy: ClassVar[bool] = True
    random: bool = False  # True if `encode` needs a key
    expands: bool = False  # True if errors may be larger than the values, so that error feedback would diverge

    @abstractmethod
    def width(self, n: int) -> int:
        """Numbers of side data for a row of n values."""

    @abstractmethod
    def levels(self, n: int) -> int:
        """Number of different codes of a row of n values: codes are below it; at most 256."""

    @abstractmethod
    def encode(self, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None) -> tuple[Tensor, Side]:
        """x float32 (rows, n), n > 0 -> codes uint8 (rows, n), side.

        key int64 (rows,), for random rounding; scale float64 (rows,), the result of `prepare` for the client of each
        row, or None if there is none.
        """

    @abstractmethod
    def decode(self, codes: Tensor, side: Side) -> Tensor:
        """codes uint8 (rows, n), side (rows, width) -> float32 (rows, n)."""

    @abstractmethod
    def reach(self, side: Side, highest: int) -> float:
        """Upper bound on decoded magnitudes for codes up to `highest`; NaN if the side data contain NaN."""

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype whose bytes are the codes of a tensor of `dtype`."""
        return torch.uint8

    def table(self, side: Side) -> Tensor | None:
        """Values of all codes, float32 (rows, levels), or None if they are not decoded with a table."""
        return None

    def prepare(self, tensors: Sequence[Tensor]) -> Tensor:
        """One number per client for `encode`, computed from all its tensors, float32 (K, n_i): float64 (K,)."""
        raise TypeError(f"{type(self).__name__} prepares nothing")

    @property
    def prepares(self) -> bool:
        """True if `encode` expects the result of `prepare`."""
        return type(self).prepare is not Quantizer.prepare

    @property
    def across(self) -> bool:
        """True if `prepare` needs the values of all tensors, and `encode` its result."""
        return self.prepares

    def with_bits(self, bits: int) -> "Quantizer":
        """The same quantizer with another number of bits; ValueError if it is not determined by a number of bits."""
        raise ValueError(f"{self} cannot have {bits} bits")

    @property
    def encoders(self) -> "tuple[Quantizer, ...]":
        """Quantizers that may have made a frame of this one: encoder-only parameters are not sent."""
        return (self,)

    @property
    def stack(self) -> Hashable:
        """Key of quantizers that encode alike if they get the results of their own `prepare`."""
        return self

    @property
    def most(self) -> float:
        """Largest magnitude that can be encoded."""
        return torch.finfo(torch.float64).max


class Lookup(Quantizer):
    """A quantizer that decodes with a table: code q of row r represents table[r, q].

    >>> from fedshift import Sign
    >>> Sign().table(torch.tensor([[0.5]])), Sign().decode(torch.tensor([[0, 1]]), torch.tensor([[0.5]]))
    (tensor([[ 0.5000, -0.5000]]), tensor([[ 0.5000, -0.5000]]))
    """

    tabled = True

    @abstractmethod
    def table(self, side: Side) -> Tensor:
        """side (rows, width) -> float32 (rows, levels)."""

    def reach(self, side: Side, highest: int) -> float:
        """Largest magnitude of the side data or, without side data, of the table."""
        numbers = side if side.numel() else self.table(side)
        return max(map(abs, ends(numbers)), key=lambda end: (math.isnan(end), end))

    def decode(self, codes: Tensor, side: Side) -> Tensor:
        """out[r, i] = table[r, codes[r, i]], where tables are computed chunk by chunk.

        Subclasses must not compute a table with more entries than the row has values: it would cost more than the row.
        """
        out = torch.empty(codes.shape, device=codes.device)
        for r, c in chunks(codes):
            table = self.table(side[r])
            index = codes[r, c].int()
            if len(table) > 1:
                index += torch.arange(len(table), dtype=torch.int32, device=codes.device)[:, None] * table.shape[1]
            out[r, c] = table.flatten().index_select(0, index.flatten()).view(index.shape)
        return out


@dataclass(frozen=True)
class FixedWidth(Lookup):
    """A quantizer with a table for codes of 1 to 8 bits."""

    bits: int

    def __post_init__(self) -> None:
        require_integer(self, bits=self.bits)
        if not 1 <= self.bits <= 8:
            raise ValueError(f"{type(self).__name__}(bits={self.bits}): bits must be between 1 and 8")

    def with_bits(self, bits: int) -> "FixedWidth":
        return replace(self, bits=bits)

    def parameters(self) -> bytes:
        return bytes([self.bits])

    @classmethod
    def read(cls, parameters: bytes) -> Self:
        if len(parameters) != 1:
            raise ValueError(f"{cls.__name__} has {len(parameters)} bytes of parameters instead of 1")
        return cls(parameters[0])


class Verbatim(Quantizer):
    """A quantizer whose codes are the bytes of the values, exact or in a shorter dtype."""

    plain = True

    def width(self, n: int) -> int:
        return 0

    def levels(self, n: int) -> int:
        return MOST_LEVELS

    def reach(self, side: Side, highest: int) -> float:
        return math.inf  # the values themselves show their magnitude


class Coder(Numbered, ABC):
    """Codes of one or more tensors <-> bytes, without loss.

    >>> from fedshift import Range
    >>> coder: Coder = Range()
    >>> data = coder.encode(torch.zeros(1000, dtype=torch.uint8), levels=3)
    >>> len(data), coder.size(1000, 3), coder.most(1000, 3), int(coder.decode(data, 1000, 3).sum())
    (8, None, 251, 0)
    """

    kind = "coder"
    known: ClassVar[dict[int, type["Coder"]]] = {}

    @abstractmethod
    def encode(self, codes: Tensor, levels: int) -> bytes:
        """codes uint8 (n,), each below levels."""

    @abstractmethod
    def decode(self, data: bytes | memoryview, n: int, levels: int) -> Tensor:
        """Return the n codes; raise ValueError if data cannot be the encoding of n codes below levels."""

    @abstractmethod
    def size(self, n: int, levels: int) -> int | None:
        """len(encode(...)) for any n codes, or None if it depends on the codes."""

    @abstractmethod
    def most(self, n: int, levels: int) -> int:
        """Upper bound on len(encode(...)) for any n codes."""

    def check_sizes(self, n: int, levels: int) -> None:
        """Raise ValueError if `size` or `most` of n codes are not numbers of bytes, or contradict each other."""
        size, most = self.size(n, levels), self.most(n, levels)
        for name, found in (("size", size), ("most", most)):
            absent = name == "size" and found is None
            if not absent and (not isinstance(found, int) or isinstance(found, bool) or found < 0):
                raise ValueError(f"{name}({n}, {levels}) is {found!r}, which is not a number of bytes")
        if size is not None and size > most:
            raise ValueError(f"size({n}, {levels}) is {size}, more than most({n}, {levels}), which is {most}")

    def estimate(self, counts: Tensor) -> Tensor | None:
        """Expected len(encode(...)) of codes with counts[..., q] occurrences of code q; None if unknown.

        counts (..., levels) of any integer type -> float64 (...) on the device of counts, without synchronization.
        """
        return None


class Groups(Numbered, ABC):
    """Values that share side data."""

    kind = "groups"
    known: ClassVar[dict[int, type["Groups"]]] = {}

    @abstractmethod
    def segments(self, shape: Shape) -> list[tuple[int, int]]:
        """Consecutive matrices (rows, n) of the flattened tensor; [] for an empty tensor."""


class Transform(Numbered, ABC):
    """An invertible change of all values of a tensor before they are quantized, determined by a seed.

    >>> from fedshift import Hadamard
    >>> x, seeds = torch.tensor([[3.0, 1.0, 1.0, 5.0]]), torch.tensor([7])
    >>> y = Hadamard().encode(x, seeds)
    >>> y.norm(), Hadamard().decode(y, seeds, n=4)
    (tensor(6.), tensor([[3., 1., 1., 5.]]))
    """

    kind = "transform"
    known: ClassVar[dict[int, type["Transform"]]] = {}

    @abstractmethod
    def length(self, n: int) -> int:
        """Number of values that n values are turned into, at least n."""

    @abstractmethod
    def encode(self, x: Tensor, seeds: Tensor) -> Tensor:
        """x float32 (K, n), seeds int64 (K,) below 2^32 -> float32 (K, length(n))."""

    @abstractmethod
    def decode(self, y: Tensor, seeds: Tensor, n: int) -> Tensor:
        """The inverse: (K, length(n)) -> (K, n)."""

    @abstractmethod
    def reach(self, largest: float, n: int) -> float:
        """Upper bound on the magnitudes of n decoded values if those of y are at most `largest`."""


def quantized(
    quantizer: Quantizer, x: Tensor, key: Tensor | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Side]:
    """Codes and side data of x (rows, n); ValueError if a user's quantizer made what a decoder would read otherwise."""
    if not quantizer.by_user:
        return quantizer.encode(x, key, scale)
    made = quantizer.encode(x.clone(), key, scale)  # a copy, which it may change
    if not (isinstance(made, tuple) and len(made) == 2 and all(isinstance(part, Tensor) for part in made)):
        raise ValueError(f"{quantizer}: encode must return two tensors, codes and side data")
    (codes, side), (rows, n) = made, x.shape
    require(codes, torch.uint8, (rows, n), f"{quantizer} made codes")
    require(side, torch.float32, (rows, quantizer.width(n)), f"{quantizer} made side data")
    if codes.device.type == "cpu" and codes.numel():  # elsewhere it would wait for the device
        if (highest := int(codes.max())) >= quantizer.levels(n):
            raise ValueError(f"{quantizer} made code {highest}, but has {quantizer.levels(n)} levels")
        if not finite(side):
            raise ValueError(f"{quantizer} made side data with NaN or infinity")
    return made


def dequantized(quantizer: Quantizer, codes: Tensor, side: Side) -> Tensor:
    """Values of codes (rows, n); ValueError if a user's quantizer returns none or others."""
    if quantizer.by_user and quantizer.tabled:
        table, wanted = quantizer.table(side), (len(codes), quantizer.levels(codes.shape[1]))
        require(table, torch.float32, wanted, f"{quantizer} has a table")
    if not quantizer.by_user:
        return quantizer.decode(codes, side)
    values = quantizer.decode(codes.clone(), side.clone())  # copies, which it may change
    require(values, torch.float32, tuple(codes.shape), f"{quantizer} decoded values")
    return values


def require(x: object, dtype: torch.dtype, shape: Shape, what: str) -> None:
    """Raise ValueError unless x is a tensor of this dtype and shape."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{what} {shorten(repr(x), 60)}, which is not a tensor")
    if x.dtype != dtype or tuple(x.shape) != tuple(shape):
        raise ValueError(f"{what} {str(x.dtype)[6:]} {tuple(x.shape)} instead of {str(dtype)[6:]} {tuple(shape)}")


def require_integer(part: object, **settings: object) -> None:
    """Raise ValueError for a setting of a part of a codec that is not an integer.

    >>> from fedshift import KMeans
    >>> KMeans(2.5)
    Traceback (most recent call last):
    ValueError: KMeans(bits=2.5): bits must be an integer
    """
    for name, value in settings.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{type(part).__name__}({name}={value!r}): {name} must be an integer")


def require_number(part: object, **settings: object) -> None:
    """Raise ValueError for a setting of a part of a codec that is not a number."""
    for name, value in settings.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{type(part).__name__}({name}={value!r}): {name} must be a number")


def reason(problem: Exception) -> str:
    """Exception of a user's part in one line: its message, after its type unless it is a ValueError with a message.

    >>> reason(ValueError("odd side data")), reason(ValueError()), reason(KeyError("k"))
    ('odd side data', 'ValueError', "KeyError: 'k'")
    """
    message = " ".join(str(problem).split())
    if type(problem) is ValueError and message:
        return message
    return f"{type(problem).__name__}: {message}" if message else type(problem).__name__


def chunks(x: Tensor) -> Iterator[tuple[slice, slice]]:
    """Slices of x (rows, n) with about CHUNK values each; on a GPU, which needs no cache blocking, one slice."""
    rows, n = x.shape
    if x.device.type != "cpu":
        yield slice(0, rows), slice(0, n)
        return
    tall, wide = max(1, CHUNK // max(n, 1)), min(n, CHUNK)
    for r in range(0, rows, tall):
        for c in range(0, n, wide):
            yield slice(r, min(r + tall, rows)), slice(c, min(c + wide, n))


@contextmanager
def any_order() -> Iterator[None]:
    """Allow operations that torch does not list as deterministic: sums of integers, and scans along rows."""
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(strict, warn_only=warns)


def kth_largest(x: Tensor, k: int) -> Tensor:
    """The k-th largest value of each row, (rows, n) -> (rows, 1)."""
    with any_order():  # which of several equal values is found may vary, but not the value
        return x.kthvalue(x.shape[1] + 1 - k, dim=1, keepdim=True).values


def kept(keep: float, n: int) -> int:
    """Number of values that a fraction `keep` of n values is: at least one."""
    return max(1, round(keep * n))


def varint(number: int) -> bytes:
    """Seven bits per byte, lowest first; the highest bit is set in all bytes but the last.

    >>> varint(5).hex(), varint(300).hex()
    ('05', 'ac02')
    """
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def read_varint(data: memoryview, at: int, what: str) -> tuple[int, int]:
    """Number below 2^64 in its shortest form, and the position after it; ValueError, with `what`, if it is invalid.

    >>> read_varint(memoryview(varint(300)), 0, "the number")
    (300, 2)
    """
    number = 0
    for i, byte in enumerate(data[at : at + 10]):
        number |= (byte & 127) << 7 * i
        if byte < 128:
            if (not byte and i) or number >= 1 << 64:
                break
            return number, at + i + 1
    raise ValueError(f"{what} is truncated, not in its shortest form or too large")


def finite(x: Tensor) -> bool:
    """True if x contains neither NaN nor infinity: minimum and maximum, found in one pass, show both."""
    return not x.numel() or all(math.isfinite(end) for end in ends(x))


def ends(x: Tensor) -> tuple[float, float]:
    """Minimum and maximum, both NaN if x contains NaN."""
    low, high = torch.aminmax(x)
    return float(low), float(high)
