"""SCAFFOLD on Flower: a strategy wrapper and a client mod, with the rule of `algorithms/scaffold.py`.

    server_app.py    strategy = FedShift(Scaffold(FedAvg()))
    client_app.py    app = ClientApp(mods=[ScaffoldMod(bits=4)])
                     d = correction(context)
                     for name, p in model.named_parameters(): p.grad += d[name]
                     metrics = {"num-examples": n, "travel": lr * steps, ...}

Server and client compute the change of a control from the decoded upload, so nothing else is uploaded.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from logging import getLogger
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedshift.algorithms.bounds import BOUND, shortened
from fedshift.algorithms.scaffold import Controlled
from fedshift.codecs.base import finite
from fedshift.core.tree import norm, take, tmap, zeros
from fedshift.core.types import Broadcast, Params
from fedshift.flower.addon.arrays import BUFFERS, CONTROL, ArrayParams, frame_of, layout, only, to_params, to_record
from fedshift.flower.addon.mod import QuantizeMod
from fedshift.flower.addon.replies import CONTROL_UPDATE, INVERSE_TRAVEL, Distance
from fedshift.rounds.uplink import Uplink, read

CORRECTION = "fedshift.correction"  # key in the client's state, during training
CONTROL_KEY = "control/"  # prefix of the client's control in its memory
LOG = getLogger("flwr.fedshift")


class ScaffoldMod(QuantizeMod):
    """Client mod for `Scaffold`: the training adds `correction(context)` to every gradient.

    The metrics of the training must contain `travel`, the sum of the learning rates of its steps; with momentum m,
    sum_j lr (1 - m^j) / (1 - m). Server and client compute the control from the decoded upload, so nothing else is
    uploaded.

    >>> ScaffoldMod("lean").uplink().update  # takes the same arguments as QuantizeMod
    True
    """

    def remembers(self, uplink: Uplink) -> bool:
        """True for any uplink: the client keeps its control."""
        return True

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        try:
            return super().__call__(message, context, call_next)
        finally:
            context.state.pop(CORRECTION, None)

    def enter(self, message: Message, context: Context, memory: Params, lost: bool) -> tuple[Params, Params]:
        if CONTROL not in message.content.array_records:
            expected = "the server's strategy must be FedShift(Scaffold(...))"
            raise ValueError(f"ScaffoldMod: the message contains no control; {expected}")
        c = to_params(message.content.array_records[CONTROL])
        del message.content[CONTROL]
        c_i = {name.removeprefix(CONTROL_KEY): x for name, x in memory.items() if name.startswith(CONTROL_KEY)}
        c_i = c_i or (c if lost else zeros(c))  # the mean of all controls is the best guess for a lost one
        context.state[CORRECTION] = to_record(tmap(torch.sub, c, c_i))
        return c, c_i

    def leave(
        self, frame: bytes, start: ArrayParams, entered: tuple[Params, Params], metrics: dict[str, Any]
    ) -> Params:
        c, c_i = entered
        if missing := [name for name in c if name not in start]:
            raise ValueError(f"ScaffoldMod: the reply lacks {missing[:3]}; SCAFFOLD needs every trained tensor")
        sent = {name: start[name].to(like.dtype) for name, like in layout(frame).items()}
        w = read(frame, sent)
        c_i = Controlled().remember(w, w, Broadcast(sent, c), c_i, travel_of(metrics))
        return {CONTROL_KEY + name: x for name, x in c_i.items()}


def correction(context: Context) -> Params:
    """Return c - c_i, which a client with a `ScaffoldMod` adds to every gradient.

    >>> state = RecordDict({CORRECTION: to_record({"weight": torch.ones(2)})})  # set by the mod before training
    >>> correction(Context(run_id=1, node_id=2, node_config={}, state=state, run_config={}))
    {'weight': tensor([1., 1.])}
    """
    if CORRECTION not in context.state:
        raise ValueError("correction(context): available only during training with a ScaffoldMod")
    return to_params(context.state[CORRECTION])  # type: ignore[arg-type]


def travel_of(metrics: Mapping[str, Any]) -> Tensor:
    """Return the metric `travel`: the distance that a unit gradient would have moved the client."""
    travel = metrics.get("travel")
    if isinstance(travel, bool) or not isinstance(travel, int | float) or not 1e-12 <= travel <= 1e12:
        raise ValueError(
            f"travel={travel!r}: the metrics must contain the sum of the steps' learning rates, 1e-12 to 1e12"
        )
    return torch.tensor(float(travel))


class Scaffold(Strategy):
    """c = c + K/N * mean_k (c_i+ - c_i), around a strategy that aggregates the weights. To be wrapped in `FedShift`.

    >>> from flwr.serverapp.strategy import FedAvg
    >>> Scaffold(FedAvg(), population=100).population
    100
    """

    def __init__(self, strategy: Strategy, population: int | None = None, exact: tuple[str, ...] = BUFFERS) -> None:
        """`population`: number of clients N (default: connected nodes); `exact`: patterns of untrained names."""
        if population is not None and population < 1:
            raise ValueError(f"Scaffold(population={population}): population must be 1 or more clients")
        self.strategy, self.population, self.exact = strategy, population, exact
        self.bound = BOUND  # set by `FedShift`
        self.control: dict[str, Tensor] | None = None
        self.connected = 0
        self.started: Params = {}  # the model sent in the current round

    def summary(self) -> None:
        LOG.info("\t├──> SCAFFOLD (N = %s)", self.population or "nodes connected")
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        params = to_params(arrays)
        if self.control is None:
            self.control = zeros(take(params, [name for name, x in params.items() if self._trained(name, x)]))
        self.started = params
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self.connected = len(list(grid.get_node_ids()))
        record = to_record(self.control)
        for message in messages:
            message.content = RecordDict({**message.content, CONTROL: record})
        return messages

    def _trained(self, name: str, x: Tensor) -> bool:
        return x.is_floating_point() and not any(fnmatchcase(name, pattern) for pattern in self.exact)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies, total = list(replies), Params()
        for reply, factor in self._limited(server_round, [reply for reply in replies if not reply.has_error()]):
            change = self._change(reply)
            change = change if factor == 1 else {name: d * factor for name, d in change.items()}
            total = tmap(torch.add, total, change) if total else change
        arrays, metrics = self.strategy.aggregate_train(server_round, replies)
        self.started = {}
        if arrays is not None and total and self.control is not None:
            population = self.population or max(self.connected, len(replies))
            self.control = tmap(lambda c, d: c.add(d, alpha=1 / population), self.control, total)
        return arrays, metrics

    def _limited(self, number: int, replies: list[Message]) -> Iterable[tuple[Message, float]]:
        """Return each reply with the factor for its change of the control.

        A change is divided by the travel that the client reports. A change longer than `bound` times the round's median
        is scaled down to that length instead of left out: few steps or a coarse codec also cause it in honest clients.
        """
        norms = [norm(self._change(reply).values()) for reply in replies]
        factors = shortened(norms, self.bound)
        for reply, length, factor in zip(replies, norms, factors, strict=True):
            if factor < 1:
                node = reply.metadata.src_node_id
                scaled = f"the control update of node {node} is scaled from norm {length:.3g} to {factor * length:.3g}"
                LOG.warning("round %d: %s, %g times the median", number, scaled, self.bound)
        return zip(replies, factors, strict=True)

    def check(self, reply: Message) -> dict[str, Distance]:
        """Return the distances that `FedShift` checks for outliers; ValueError for an invalid control."""
        change = self._change(reply)
        if not all(finite(d) for d in change.values()):
            raise ValueError("its control is NaN or infinite")
        travel = float(travel_of(only(reply, MetricRecord)[1]))
        return {CONTROL_UPDATE: Distance(norm(change.values())), INVERSE_TRAVEL: Distance(1 / travel)}

    def _change(self, reply: Message) -> Params:
        """c_i+ - c_i, computed as on the client."""
        record = only(reply, ArrayRecord)[1]
        if frame_of(record) is not None:
            raise ValueError("Scaffold needs decoded uploads; use FedShift(Scaffold(...)), not Scaffold(FedShift(...))")
        w, travel = to_params(record), travel_of(only(reply, MetricRecord)[1])
        start = {name: x.to(w[name].dtype) for name, x in self.started.items()}
        return Controlled().change(w, Broadcast(start, self.control or {}), travel)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round, replies)
