"""SCAFFOLD on Flower, after `algorithms/scaffold.py`: a strategy around another one, and the mod of its clients.

    server_app.py    strategy = FedShift(Scaffold(FedAvg()))
    client_app.py    app = ClientApp(mods=[ScaffoldMod(bits=4)])
                     d = correction(context)
                     for name, p in model.named_parameters(): p.grad += d[name]
                     metrics = {"num-examples": n, "travel": lr * steps, ...}

The change of a client's control follows from its decoded upload, on both ends: nothing else goes up.
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
from fedshift.flower.addon.arrays import BUFFERS, CONTROL, frame_of, only, to_params, to_record
from fedshift.flower.addon.mod import QuantizeMod
from fedshift.flower.addon.replies import CONTROL_UPDATE, INVERSE_TRAVEL, Distance
from fedshift.rounds.uplink import Sent, Uplink

CORRECTION = "fedshift.correction"  # in the client's state, while it trains
OWN = "control/"  # in its memory
LOG = getLogger("flwr.fedshift")


class ScaffoldMod(QuantizeMod):
    """A client of `Scaffold`: `correction(context)` is what its training adds to every gradient.

    The training reports `travel`, the sum of the learning rates of its steps, among its metrics; with
    momentum m, sum_j lr (1 - m^j) / (1 - m). The control follows from the decoded upload on both ends,
    so nothing else goes up.

    >>> ScaffoldMod("lean").uplink().feedback  # with the options and names of QuantizeMod
    True
    """

    def remembers(self, uplink: Uplink) -> bool:
        """Its control, by any uplink."""
        return True

    def compares(self, uplink: Uplink) -> bool:
        return True

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        try:
            return super().__call__(message, context, call_next)
        finally:
            context.state.pop(CORRECTION, None)

    def enter(self, message: Message, context: Context, memory: Params, lost: bool) -> tuple[Params, Params]:
        if CONTROL not in message.content.array_records:
            wrapped = "the server's strategy must be FedShift(Scaffold(...))"
            raise ValueError(f"ScaffoldMod: the message holds no control; {wrapped}")
        c = to_params(message.content.array_records[CONTROL])
        del message.content[CONTROL]
        c_i = {name.removeprefix(OWN): x for name, x in memory.items() if name.startswith(OWN)}
        c_i = c_i or (c if lost else zeros(c))  # a control that was lost is likeliest near the mean of all
        context.state[CORRECTION] = to_record(tmap(torch.sub, c, c_i))
        return c, c_i

    def leave(self, sent: Sent, start: Params, own: tuple[Params, Params], metrics: dict[str, Any]) -> Params:
        c, c_i = own
        if missing := [name for name in c if name not in sent.decoded]:
            raise ValueError(f"ScaffoldMod: the reply lacks {missing[:3]}; a control needs every trained tensor")
        c_i, _ = Controlled().finish(sent.decoded, Broadcast(start, c), c_i, travel_of(metrics))
        return {OWN + name: x for name, x in c_i.items()}


def correction(context: Context) -> Params:
    """c - c_i, to be added to every gradient of a client with a `ScaffoldMod`.

    >>> state = RecordDict({CORRECTION: to_record({"weight": torch.ones(2)})})  # as the mod leaves it for the training
    >>> correction(Context(run_id=1, node_id=2, node_config={}, state=state, run_config={}))
    {'weight': tensor([1., 1.])}
    """
    if CORRECTION not in context.state:
        raise ValueError("correction(context): there is none outside of training under a ScaffoldMod")
    return to_params(context.state[CORRECTION])  # type: ignore[arg-type]


def travel_of(metrics: Mapping[str, Any]) -> Tensor:
    """What a client reports as `travel`: how far a unit gradient would have moved it."""
    travel = metrics.get("travel")
    if isinstance(travel, bool) or not isinstance(travel, int | float) or not 1e-12 <= travel <= 1e12:
        raise ValueError(f"travel={travel!r}: the sum of the steps' learning rates must be among the metrics")
    return torch.tensor(float(travel))


class Scaffold(Strategy):
    """c = c + K/N * mean_k (c_i+ - c_i), around a strategy that aggregates the weights; inside of `FedShift`.

    >>> from flwr.serverapp.strategy import FedAvg
    >>> Scaffold(FedAvg(), population=100).population
    100
    """

    def __init__(self, strategy: Strategy, population: int | None = None, exact: tuple[str, ...] = BUFFERS) -> None:
        """`population`: the N clients there are, those connected if it is not given; `exact`: not trained."""
        if population is not None and population < 1:
            raise ValueError(f"Scaffold(population={population}): population must be 1 or more clients")
        self.strategy, self.population, self.exact = strategy, population, exact
        self.bound = BOUND  # that of `FedShift`, which sets it
        self.control: dict[str, Tensor] | None = None
        self.connected = 0
        self.started: Params = {}  # the model that was sent in the round that is on

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
        """Each reply, and by what its change of the control is multiplied.

        A change is divided by the travel that its client reports. One that is longer than `bound` times the round's
        median counts as that long: honest clients may get there by few steps or a coarse codec, and are not left out.
        """
        norms = [norm(self._change(reply).values()) for reply in replies]
        factors = shortened(norms, self.bound)
        for reply, long, factor in zip(replies, norms, factors, strict=True):
            if factor < 1:
                node = reply.metadata.src_node_id
                seen = f"the control update of node {node} is shortened from norm {long:.3g} to {factor * long:.3g}"
                LOG.warning("round %d: %s, %g times the median", number, seen, self.bound)
        return zip(replies, factors, strict=True)

    def check(self, reply: Message) -> dict[str, Distance]:
        """Distances by which `FedShift` finds outliers; ValueError for an upload from which no control follows."""
        change = self._change(reply)
        if not all(finite(d) for d in change.values()):
            raise ValueError("its control became NaN or infinite")
        travel = float(travel_of(only(reply, MetricRecord)[1]))
        return {CONTROL_UPDATE: Distance(norm(change.values())), INVERSE_TRAVEL: Distance(1 / travel)}

    def _change(self, reply: Message) -> Params:
        """c_i+ - c_i, worked out as the client did."""
        record = only(reply, ArrayRecord)[1]
        if frame_of(record) is not None:
            raise ValueError("Scaffold reads decoded uploads only: FedShift(Scaffold(...)), not the other way round")
        w, travel = to_params(record), travel_of(only(reply, MetricRecord)[1])
        start = {name: x.to(w[name].dtype) for name, x in self.started.items()}
        return Controlled().finish(w, Broadcast(start, self.control or {}), {}, travel)[1]

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round, replies)
