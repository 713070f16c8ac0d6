"""The server's side: any strategy of Flower's, with quantized uploads and the shift.

    strategy = FedShift(FedAdam(min_train_nodes=10))

Uploads are decoded and checked before the strategy aggregates them; what it makes of them is shifted.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from logging import getLogger
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedshift.algorithms.fedshift import Shift
from fedshift.flower import nested
from fedshift.flower.arrays import to_params, to_record
from fedshift.flower.mod import Order, as_bits
from fedshift.flower.replies import Usable, evaluated, opened, sort_out
from fedshift.flower.saved import Saved, Saver
from fedshift.types import Broadcast, Params, Round

LOG = getLogger("flwr.fedshift")
WRONG_ORDER = "expects the keys in the ArrayRecord of the reply message to match"  # what Flower's DP mods say
BitsFor = Callable[[int, int], int | None]  # of a node and a round


class NoUploadsError(RuntimeError):
    """Several rounds in a row had no upload that could be used."""


class Aggregated(NamedTuple):
    """What there is to tell about a round."""

    number: int
    used: int
    lossy: int
    share: float  # of the weight that quantized uploads had, before `max_share` and `warmup`
    failed: dict[int, str]  # nodes whose upload was left out, and why
    reset: list[int]  # nodes that had lost their memory
    bytes_up: int  # of arrays that were used


class FedShift(Strategy):
    """Decode, aggregate, and then w_hat = w - share * mean(w) for every layer, after any strategy.

    The share is that of the quantized uploads under the strategy's own weights. A bad upload is
    left out, named in the log and counted in `rounds`; after `patience` rounds in a row without one
    that could be used, NoUploadsError. With 32 bits everywhere nothing is shifted, and the result is
    the strategy's own to the bit.

    `bits_for(node, round)` chooses the bits of one upload; a node's own config comes before it, and
    None leaves the choice to the node. `checkpoint` is a folder: a run that was stopped goes on from
    the last round saved there.
    """

    def __init__(
        self,
        strategy: Strategy,
        max_share: float = 0.5,
        warmup: int = 0,
        tensors: Sequence[str] | None = None,
        *,
        bits_for: BitsFor | None = None,
        patience: int = 5,
        checkpoint: Path | str | None = None,
    ) -> None:
        if patience < 1:
            raise ValueError(f"FedShift(patience={patience}): patience must be 1 or more rounds")
        self.strategy, self.bits_for, self.patience = strategy, bits_for, patience
        self.rule = Shift(max_share, warmup, None if tensors is None else tuple(tensors))
        self.chain = nested.layers_of(strategy)
        self.key = nested.weighting_key(self.chain)
        self.saver = None if checkpoint is None else Saver(Path(checkpoint), self.chain)
        self.session, self.skipped = uuid4().hex[:16], 0
        self.accepted: dict[int, int] = {}  # node -> the round of its last upload that was used
        self.rounds: list[Aggregated] = []
        self.dtypes: dict[str, torch.dtype] = {}  # of the model at the start
        self.sent: tuple[Params, Params] = {}, {}  # the last model, as it was sent and in its first dtypes
        self.asked: dict[int, Message] = {}  # the last messages, by node

    def summary(self) -> None:
        LOG.info("\t├──> FedShift settings:")
        LOG.info("\t│\t├── %s", self.rule)
        LOG.info("\t│\t└── Weights of uploads: %s", self.key or "equal")
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        sent = to_params(arrays)
        self.dtypes = self.dtypes or {name: x.dtype for name, x in sent.items()}
        self.sent = sent, {name: x.to(self.dtypes[name]) for name, x in sent.items()}
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        for message in messages:
            self._address(message, server_round)
        self.asked = {message.metadata.dst_node_id: message for message in messages}
        return messages  # a list: deployed, Flower goes through it twice

    def _address(self, message: Message, number: int) -> None:
        """Give a message its own config: strategies put one and the same record into all."""
        node = message.metadata.dst_node_id
        saved = number - 1 if self.saver is None else self.saver.oldest
        words = Order(number, self.session, self.accepted.get(node, 0), saved).config()
        if self.bits_for is not None and (bits := self.bits_for(node, number)) is not None:
            words["bits"] = as_bits(f"bits_for({node}, {number})", bits)
        content = RecordDict(dict(message.content))
        name = next(iter(content.config_records), "config")
        content[name] = ConfigRecord({**content.get(name, {}), **words})  # type: ignore[dict-item]
        message.content = content

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        usable, failed, messages = sort_out(replies, self.asked, self._open(server_round))
        before = nested.snapshot(self.chain)
        arrays, metrics = self.strategy.aggregate_train(server_round, messages) if usable else (None, None)
        if arrays is not None:
            arrays = nested.integers_restored(arrays, self.dtypes)
            if broken := [name for name, array in arrays.items() if not np.isfinite(array.numpy()).all()]:
                LOG.error("round %d: %s became NaN or infinite; the round is left out", server_round, broken[0])
                nested.go_back(self.chain, before)
                arrays = None
        share = 0.0
        if arrays is not None:
            self.accepted |= dict.fromkeys((one.message.metadata.src_node_id for one in usable), server_round)
            share = sum(one.weight for one in usable if one.lossy) / sum(one.weight for one in usable)
            arrays = self._shift(arrays, server_round, share, len(usable))
        self._tell(server_round, usable if arrays is not None else [], share, failed)
        self.skipped = 0 if arrays is not None else self.skipped + 1
        if self.skipped:
            self._stop_if_hopeless(server_round, failed, bool(usable))
        return arrays, metrics

    def _open(self, number: int) -> Callable[[Message], Usable]:
        """How an upload is opened: by us, and then by strategies that have a say in it."""
        checks = nested.checks(self.chain)

        def open_(reply: Message) -> Usable:
            upload = opened(reply, self.sent, number, self.key)
            for check in checks:
                check(upload.message)
            return upload

        return open_

    def _shift(self, arrays: ArrayRecord, number: int, share: float, arrived: int) -> ArrayRecord:
        if not share:
            return arrays
        rnd = Round(number, arrived, arrived, Broadcast(self.sent[0], {}), {}, {}, share)
        out, _ = self.rule.apply(Broadcast(to_params(arrays), {}), {}, rnd)
        shifted = to_record(out.params)
        nested.write_back(self.chain, shifted)
        return shifted

    def _stop_if_hopeless(self, number: int, failed: dict[int, str], arrived: bool) -> None:
        """After a round that changed nothing."""
        if not arrived and any(WRONG_ORDER in why for why in failed.values()):
            raise NoUploadsError(
                f"round {number}: the clients' mods are in the wrong order; QuantizeMod must be the first: "
                "ClientApp(mods=[QuantizeMod(...), fixedclipping_mod])"
            )
        if self.skipped >= self.patience:
            why = next(iter(failed.values()), "the strategy aggregated nothing" if arrived else "no node was asked")
            raise NoUploadsError(f"round {number}: no usable upload in {self.skipped} rounds in a row; the last: {why}")

    def _tell(self, number: int, used: Sequence[Usable], share: float, failed: dict[int, str]) -> None:
        reset = [one.message.metadata.src_node_id for one in used if one.reset]
        lossy, size = sum(one.lossy for one in used), sum(one.bytes_up for one in used)
        self.rounds.append(Aggregated(number, len(used), lossy, share, failed, reset, size))
        for node, why in failed.items():
            LOG.warning("round %d: the upload of node %d is left out: %s", number, node, why)
        for node in reset:
            LOG.warning("round %d: node %d had lost its memory and started anew", number, node)
        told = f"{len(used)} uploads, {lossy} of them quantized (share {share:.2f}), {len(failed)} left out"
        LOG.info("\t└──> FedShift: %s, %.1f kB up", told, size / 1000)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(self.strategy.configure_evaluate(server_round, arrays, config, grid))
        self.asked = {message.metadata.dst_node_id: message for message in messages}
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the strategy does it, without replies that would end the run."""
        _, failed, messages = sort_out(replies, self.asked, lambda reply: evaluated(reply, self.key))
        for node, why in failed.items():
            LOG.warning("round %d: the evaluation of node %d is left out: %s", server_round, node, why)
        return self.strategy.aggregate_evaluate(server_round, messages)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Train to round `num_rounds`, from the start or from the checkpoint there is."""
        train_config = ConfigRecord() if train_config is None else train_config
        evaluate_config = ConfigRecord() if evaluate_config is None else evaluate_config
        begin, arrays, first = time.monotonic(), initial_arrays, 1
        self.dtypes = {name: x.dtype for name, x in to_params(initial_arrays).items()}
        if self.saver and (saved := self.saver.restore(initial_arrays)):
            arrays, first = saved.arrays, saved.number + 1
            self.session, self.accepted, self.skipped = saved.session, saved.accepted, saved.skipped
            LOG.info("Going on after round %d, from %s", saved.number, self.saver.folder)
        LOG.info("Starting FedShift around %s, rounds %d to %d", type(self.strategy).__name__, first, num_rounds)
        self.summary()
        result = Result(arrays=arrays)
        if evaluate_fn and (score := evaluate_fn(first - 1, arrays)) is not None:
            result.evaluate_metrics_serverapp[first - 1] = score
        for number in range(first, num_rounds + 1):
            LOG.info("[ROUND %d/%d]", number, num_rounds)
            messages = self.configure_train(number, arrays, train_config, grid)
            new, metrics = self.aggregate_train(number, grid.send_and_receive(messages, timeout=timeout))
            arrays = arrays if new is None else new
            result.arrays = arrays
            if metrics is not None:
                LOG.info("\t└──> Aggregated MetricRecord: %s", metrics)
                result.train_metrics_clientapp[number] = metrics
            if self.saver:
                self.saver.save(Saved(number, arrays, self.session, self.accepted, self.skipped))
            messages = self.configure_evaluate(number, arrays, evaluate_config, grid)
            told = self.aggregate_evaluate(number, grid.send_and_receive(messages, timeout=timeout))
            if told is not None:
                LOG.info("\t└──> Aggregated evaluation: %s", told)
                result.evaluate_metrics_clientapp[number] = told
            if evaluate_fn and (score := evaluate_fn(number, arrays)) is not None:
                LOG.info("\t└──> Global evaluation: %s", score)
                result.evaluate_metrics_serverapp[number] = score
        LOG.info("Finished in %.1f s", time.monotonic() - begin)
        return result
