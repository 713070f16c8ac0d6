"""Contract of an engine: the client side of a round.

An engine receives jobs, one per run, and returns the uploads of the clients of each job, in the order
of the cohort. It also evaluates models, because it has the model and the data.
"""

import copy
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn

from fedshift.algorithms.base import ClientRule
from fedshift.codecs.base import ends
from fedshift.core.names import printable
from fedshift.core.types import Broadcast, Decoded, Params
from fedshift.data.cohorts import Plan
from fedshift.data.datasets import Dataset
from fedshift.rounds.evaluate import AnyMetric, ClientScores, Held, Loss, Score
from fedshift.rounds.optimizers import MakeOptimizer
from fedshift.rounds.uplink import Uplink, remembers
from fedshift.wire.frame import Header
from fedshift.wire.registry import DTYPES

# magnitudes up to which uploads can be averaged: neither a base plus an update nor a sum over many clients overflows
MAX_MAGNITUDE = {torch.float32: 1e30, torch.float64: 1e300, torch.float16: 3e4, torch.bfloat16: 1e30}

# what calls of users' code raise: it may also call sys.exit(), which must not end the process
RAISED = (Exception, SystemExit)
PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
LIBRARIES = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(np.__file__).parent}{os.sep}")
INSTALLED = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "purelib", "platlib"))


@dataclass(frozen=True, eq=False)
class Task:
    """Model, data and local optimizer: the same for every client and round.

    Trained parameters and the buffers of the model's state are sent. Frozen weights, tensors without
    elements, and buffers that cannot be sent (-inf of an attention mask, float8, complex) stay in the
    model unchanged; training must not change such a buffer.
    """

    model: nn.Module
    data: Dataset
    loss: Loss
    metric: AnyMetric  # None: the loss is the score
    momentum: float = 0.0  # of SGD
    weight_decay: float = 0.0  # added to the gradient: g + weight_decay w
    optimizer: MakeOptimizer | None = None  # None: SGD
    clip: float = 0.0  # largest norm of a gradient; 0 for no limit
    augment: bool = False
    further: tuple[AnyMetric, ...] = ()  # metrics that are recorded in addition
    learners: list[nn.Module] = field(init=False)  # modules that are in training mode while clients train
    params: Params = field(init=False)  # initial values of the tensors that are sent: trained parameters and buffers
    unsent: dict[str, str] = field(init=False)  # buffers of the state that cannot be sent, with the reason
    unused: nn.Module = field(init=False)  # a copy that is never called, so that it can be copied

    def __post_init__(self) -> None:
        state = self.model.state_dict()
        if other := [name for name, x in state.items() if not isinstance(x, Tensor)]:
            raise ValueError(f"{other[0]}: is not a tensor; a model's state must contain only tensors")
        if lazy := [name for name, x in state.items() if nn.parameter.is_lazy(x)]:
            raise ValueError(f"{lazy[0]}: has no shape yet; call the lazy model on one batch before training")
        if not self.trained:
            raise ValueError(f"{type(self.model).__name__} has no parameters to train")
        for name, x in state.items():
            _check_storable(name, x)
        for name, p in zip(self.trained, self.weights, strict=True):
            if problem := obstacle(p):
                raise ValueError(f"{name}: {problem}; such a parameter cannot be trained")
        for x in (*self.model.parameters(), *self.model.buffers()):
            if x.layout == torch.strided and any(
                n > 1 and not step for n, step in zip(x.shape, x.stride(), strict=True)
            ):
                x.data = x.data.contiguous()  # an expanded tensor cannot be written to
        kinds = {p.dtype for p in self.weights}
        dtype = kinds.pop() if len(kinds) == 1 else torch.float32
        if self.data.dtype != dtype:
            object.__setattr__(self, "data", replace(self.data, dtype=dtype))
        # modules in evaluation mode, like a frozen batch norm, stay in it, unless the whole model is in evaluation mode
        learners = [module for module in self.model.modules() if module.training or not self.model.training]
        object.__setattr__(self, "learners", learners)
        # frozen weights are not sent, and shared tensors are sent under their first name
        buffers = {name: state[name] for name, x in self.model.named_buffers() if name in state and x.numel()}
        unsent = {name: problem for name, x in buffers.items() if (problem := obstacle(x))}
        sent = {*self.trained, *buffers} - {*unsent}
        params = {name: x.detach().to("cpu", copy=True) for name, x in state.items() if name in sent}
        object.__setattr__(self, "params", params)
        object.__setattr__(self, "unsent", unsent)
        object.__setattr__(self, "unused", duplicate(self.model))

    @property
    def metrics(self) -> tuple[AnyMetric, ...]:
        """All metrics, that of the run first."""
        return self.metric, *self.further

    @property
    def trained(self) -> list[str]:
        """Names of the parameters that are trained."""
        return [name for name, p in self.model.named_parameters() if _trains(p)]

    @property
    def weights(self) -> list[nn.Parameter]:
        """The parameters with the names `trained`, in the same order."""
        return [p for p in self.model.parameters() if _trains(p)]

    @property
    def fixed(self) -> Params:
        """Tensors that are not sent: frozen weights, and buffers that cannot or need not be sent."""
        tensors = (*self.model.named_parameters(), *self.model.named_buffers())
        return {name: x for name, x in tensors if name not in self.params}


def _trains(p: nn.Parameter) -> bool:
    return p.requires_grad and p.numel() > 0


def obstacle(x: Tensor) -> str:
    """Reason why a tensor cannot be sent and averaged, '' if it can.

    >>> obstacle(torch.tensor([0.0, -torch.inf])), obstacle(torch.tensor([-1e9]))
    ('contains NaN, infinity or a number beyond 1e+30', '')
    """
    if x.layout != torch.strided:
        return f"is sparse ({x.layout})"
    if x.dtype not in DTYPES.values():
        return f"has dtype {x.dtype}"
    if x.is_floating_point() and not all(abs(end) <= MAX_MAGNITUDE[x.dtype] for end in ends(x.detach())):
        return f"contains NaN, infinity or a number beyond {MAX_MAGNITUDE[x.dtype]:g}"
    return ""


def _check_storable(name: str, x: Tensor) -> None:
    """Raise ValueError for a tensor that cannot be stored in the final model file."""
    try:
        if x.layout != torch.strided:
            raise KeyError(x.layout)
        if x.dtype not in DTYPES.values():
            save({name: torch.empty(0, dtype=x.dtype)})
    except (KeyError, ValueError, RuntimeError):
        kind = f"dtype {x.dtype}" if x.layout == torch.strided else f"layout {x.layout}"
        raise ValueError(
            f"{name}: has {kind}, which model.safetensors cannot store; "
            "make it dense and of another dtype, or a buffer with persistent=False"
        ) from None


class TrainingError(RuntimeError):
    """A model, a loss or a metric raised an exception."""


def duplicate(model: nn.Module) -> nn.Module:
    """Deep copy of a model; tensors that it computed from its parameters are detached.

    `torch.nn.utils.weight_norm` and pruning store such a tensor in the module, and compute it again in each forward
    pass; `copy.deepcopy` alone refuses it.

    >>> model = nn.Linear(2, 3)
    >>> model.doubled = 2 * model.weight
    >>> duplicate(model).doubled.requires_grad
    False
    """
    computed = [x for m in model.modules() for x in vars(m).values() if isinstance(x, Tensor) and not x.is_leaf]
    try:
        return copy.deepcopy(model, {id(x): x.detach().clone() for x in computed})
    except Exception as problem:
        raise ValueError(f"{type(model).__name__} cannot be copied: {describe(problem)}") from problem


def describe(problem: BaseException) -> str:
    """Exception as one line: its type and message, and the last line of the user's code that led to it."""
    text = f"{type(problem).__name__}: {' '.join(str(problem).split())}".removesuffix(": ")
    if isinstance(problem, SystemExit):
        text = f"SystemExit({problem.code!r}): it must not end the process"
    return printable(text + _place(problem))


def explained(problem: BaseException, name: str) -> str:
    """Sentence of this package as it is; other exceptions of a user's `module:function` with type, file and line."""
    user = ":" in name
    ours = isinstance(problem, ValueError | OSError | ImportError) and (not user or raised_here(problem))
    ours = ours or (isinstance(problem, TypeError) and not user)
    return " ".join(str(problem).split()) if ours else describe(problem)


def raised_here(problem: BaseException) -> bool:
    """True if this package raised the exception, or called a function with arguments that it does not take."""
    frames = traceback.extract_tb(problem.__traceback__)
    return not frames or frames[-1].filename.startswith(PACKAGE)


def _place(problem: BaseException) -> str:
    """Last file and line outside of this package, torch and Python's own import; '' without one."""
    frames = [
        (frame.filename, frame.lineno)
        for frame in traceback.extract_tb(problem.__traceback__)
        if not frame.filename.startswith((PACKAGE, *LIBRARIES, "<frozen"))
    ]
    own = [place for place in frames if not place[0].startswith(INSTALLED)]
    return " ({}:{})".format(*(own or frames)[-1]) if frames else ""


class Job(NamedTuple):
    """The clients of one round of one run."""

    number: int  # of the round
    clients: Sequence[int]
    rule: ClientRule
    sent: Broadcast
    recall: Callable[[int], Params]  # memory of a client: that of the rule, and 'error/' of its uplink
    plan: Plan
    examples: Sequence[int]  # number of examples of each client
    uplinks: Sequence[Uplink]  # one per client; of updates if the rule defines messages
    layers: Sequence[str]  # tensors whose drift and error are measured
    histograms: bool = False  # compute histograms of weights before and after the quantizer
    frames: bool = True  # make real frames even if the coder can estimate their lengths
    broadcast: bytes | None = None  # the encoded broadcast; None for an exact downlink
    run: int = 0  # number of the run, in the headers of its frames
    adaptive: bool = False  # uplinks change between rounds, so that a client without feedback may have a memory
    owned: Sequence[Tensor] = ()  # examples of each client, if the clients report the loss of the broadcast on them

    def remembers(self, i: int) -> bool:
        """True if the i-th client keeps a memory between rounds; server and node must agree."""
        return self.adaptive or remembers(self.rule, self.uplinks[i])

    def header(self, i: int, reset: bool = False) -> Header:
        """Header of the frame of the i-th client."""
        update, examples = self.uplinks[i].update, self.examples[i]
        return Header(update, self.number, examples, reset, self.uplinks[i].lossy, self.run, self.clients[i])


class Histogram(NamedTuple):
    """Counts of a layer's weights in equal bins between low and high."""

    layer: str
    low: float
    high: float
    before: list[int]  # before the quantizer
    after: list[int]


class Upload(NamedTuple):
    """Upload of one client, and statistics that only a simulation knows."""

    client: int
    frame: bytes | Decoded  # b"" if nothing could be sent
    second: bytes | Decoded  # second frame, of a rule that has second uploads
    memory: Params  # new memory of the client
    drift: list[tuple[float, float]]  # |w_k - w_t| and |Q(w_k) - w_t| of each layer
    error: float  # |u - Q(u)| / |u| over all quantized tensors
    seconds: tuple[float, float]  # training, encoding
    failure: str = ""  # reason why there is no frame
    histograms: tuple[Histogram, ...] = ()
    silent: bool = False  # True if the rule of the client decided not to upload
    loss: float | None = None  # of the broadcast on the client's examples, if the job asks for it


class Engine(Protocol):
    """Trains the clients of jobs, and evaluates models."""

    @property
    def home(self) -> torch.device:
        """Device of the server's state, the draws and the uploads."""

    def train(self, jobs: Sequence[Job]) -> list[Iterator[Upload]]:
        """Uploads of each job, in the order of its clients; they may be computed lazily."""

    def evaluate(self, params: Params) -> Score:
        """Score on the test set."""

    def evaluate_clients(self, params: Params, held: Held) -> ClientScores:
        """Scores on the held-out examples of each client."""

    def close(self) -> None:
        """Release processes and memory; nothing can be trained afterwards."""


@contextmanager
def evaluation() -> Iterator[None]:
    """Report exceptions of the user's model, loss or metric as a TrainingError."""
    try:
        yield
    except TrainingError:
        raise
    except RAISED as problem:
        raise TrainingError(f"evaluation: {describe(problem)}") from problem


@contextmanager
def arithmetic(precision: str, deterministic: bool = False) -> Iterator[None]:
    """Set how a GPU multiplies float32 matrices: 'tf32' rounds their entries to ten bits, other values do not."""
    matrices, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    strict, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by cuBLAS
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.use_deterministic_algorithms(deterministic or strict, warn_only=warns)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matrices)
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.use_deterministic_algorithms(strict, warn_only=warns)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread: results must not depend on the number of threads that compute a sum."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
