"""The server's side: any strategy of Flower's, with quantized uploads and the shift.

    strategy = FedShift(FedAdam(min_train_nodes=10))

Uploads are decoded and checked before the strategy aggregates them; what it makes of them is shifted.
"""

from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from uuid import uuid4

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from fedshift.algorithms.bounds import BOUND, CAP
from fedshift.algorithms.fedshift import Per, Share, Shift, patterns
from fedshift.codecs.base import finite
from fedshift.core.names import printable
from fedshift.core.types import Broadcast, Params, Round
from fedshift.flower.addon import nested
from fedshift.flower.addon.arrays import only, only_in, packed, to_params, to_record
from fedshift.flower.addon.memory import Told
from fedshift.flower.addon.mod import as_bits, as_uplink
from fedshift.flower.addon.outcome import Aggregated, aggregated, check_hope
from fedshift.flower.addon.replies import (
    Limits,
    Sorted,
    Usable,
    evaluated,
    longest,
    medians,
    opened,
    sort_out,
    substitute,
)
from fedshift.flower.addon.saved import SavedRounds, Saver
from fedshift.flower.addon.seeded import Seeded
from fedshift.flower.addon.targets import ArrivedUpload, changed, check_module, targets

LOG = getLogger("flwr.fedshift")
BitsFor = Callable[[int, int], int | str | None]  # of a node and a round; text is the name of an uplink


class FedShift(Strategy):
    """Decode, aggregate, and then w_hat = w - share * mean(w) for every layer, after any strategy.

    The share is that of the quantized uploads under the strategy's own weights, at most `max_share`, or `share`. With
    `per="filter"` the mean is that of each filter, and the share 1 unless another is given, whatever was quantized:
    filter centring (`fedshift.algorithms.centring`), which is not the paper's rule.

    A bad upload is left out, named in the log and counted in `rounds`; after `patience` rounds in a row without one
    that could be used, NoUploadsError, and at once when every reply of the first round fails for the
    same reason.

    One upload has a limited influence, as long as most uploads of a round are honest: one whose
    update is longer than the model and than `bound` times the round's median is left out, a weight above
    `max_weight` times the median weight counts as that much, and tensors of integers or booleans are
    the elementwise median or majority of the uploads. 0 switches a limit off; with fewer than three
    uploads there is none. Small poisoned updates pass.

    With 32 bits everywhere, per layer and without a `share`, nothing is shifted, and floating tensors are the
    strategy's own to the bit, for replies in the order of the messages and unless a limit applied. Exceptions: integers
    and booleans, see above, have the model's dtype; replies in another floating dtype are cast to
    the model's; uploads of `QuantizeMod(updates=True)` are rounded when they are added to the model.

    Shifted are the arrays that some client changed in the round and that `tensors`, patterns of names, or `module`
    chooses: of the app's `torch.nn.Module`, the weights of its layers. Without either, names and shapes tell weights
    from normalisations, tokens, tables, masks and adapters as well as they can. Per filter, weights of fewer than 32
    inputs per filter and embeddings are left alone unless `tensors` names them.

    `bits_for(node, round)` chooses the bits of one upload, or its uplink by name, such as "lean"; a node's own config
    comes before it, and None leaves the choice to the node. `checkpoint` is a folder: a run that was stopped goes on
    from the last round saved there. `pack` sends the model to be trained as one array, which saves a node two requests
    for each further array; `QuantizeMod` unpacks it, so every client must have this mod.

    >>> from flwr.serverapp.strategy import FedAdam
    >>> FedShift(FedAdam(min_train_nodes=10), max_share=1.0).rule
    Shift(per='layer', share='uploads', max_share=1.0, warmup=0, tensors=None)
    >>> FedShift(FedAdam(), per="filter").rule  # filter centring
    Shift(per='filter', share=1.0, max_share=0.5, warmup=0, tensors=None)
    """

    def __init__(
        self,
        strategy: Strategy,
        max_share: float = 0.5,
        warmup: int = 0,
        tensors: Sequence[str] | None = None,
        *,
        per: Per = "layer",
        share: Share | None = None,
        module: nn.Module | None = None,
        bits_for: BitsFor | None = None,
        patience: int = 5,
        checkpoint: Path | str | None = None,
        bound: float = BOUND,
        max_weight: float = CAP,
        pack: bool = False,
    ) -> None:
        if patience < 1:
            raise ValueError(f"FedShift(patience={patience}): patience must be 1 or more rounds")
        for name, multiple in (("bound", bound), ("max_weight", max_weight)):
            if multiple != 0 and not multiple >= 1:
                raise ValueError(f"FedShift({name}={multiple}): {name} must be 1 or more, or 0 for no limit")
        self.limits = Limits(bound, max_weight)
        if bits_for is not None and not callable(bits_for):
            raise TypeError(f"FedShift(bits_for={bits_for!r}): needs a function of a node and a round")
        check_module(module, tensors)
        self.pack = pack
        self.strategy, self.bits_for, self.patience, self.module = strategy, bits_for, patience, module
        self.rule = Shift(per, share, max_share, warmup, patterns(tensors))
        self.chain = nested.layers_of(strategy)
        nested.set_bound(self.chain, bound)
        self.key = nested.weighting_key(self.chain)
        self.saver = None if checkpoint is None else Saver(Path(checkpoint), self.chain)
        if any(isinstance(one, FedShift) for one in self.chain):
            raise ValueError("FedShift(FedShift(...)): once is enough")
        self.seeded = next((one for one in self.chain if isinstance(one, Seeded)), None)
        self.asked: dict[int, Message] = {}  # the last messages, by node
        self.sent: dict[int, RecordDict] = {}  # content of the last messages for training, by node, before it is packed
        self.names: dict[int, int] = {}  # partitions of nodes that say who they are, in the round that is on
        self._begin({})

    def _begin(self, model: Params) -> None:
        if broken := [name for name, x in model.items() if x.is_floating_point() and not finite(x)]:
            raise ValueError(
                f"FedShift: the array {printable(broken[0])!r} of the model holds NaN or infinity, which cannot be "
                "averaged; leave masks out of the record, for example as buffers with persistent=False"
            )
        self.session, self.skipped = uuid4().hex[:16], 0
        self.accepted: dict[str, int] = {}  # node -> the round of its last upload that was used, 0 for none
        self.rounds: list[Aggregated] = []
        self.dtypes = {name: x.dtype for name, x in model.items()}  # of the model at the start
        self.targeted = targets(model, self.rule, self.module) if model else self.rule
        self.shifted: list[str] | None = None  # in the last round that was shifted; None before it

    def summary(self) -> None:
        LOG.info("\t├──> FedShift settings:")
        LOG.info("\t│\t├── %s", self.rule)
        LOG.info("\t│\t├── Tensors to shift: %s", printable(", ".join(self.targeted.tensors or ())) or "none")
        LOG.info("\t│\t├── Weights of uploads: %s", self.key or "equal")
        LOG.info("\t│\t└── %s, in medians of a round (0: no limit)", self.limits)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if not self.dtypes:  # not from `start`
            self._begin(to_params(arrays))
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self.names = self.seeded.unique(grid.get_node_ids()) if self.seeded else {}
        for message in messages:
            self._address(message, server_round)
        self.asked = {message.metadata.dst_node_id: message for message in messages}
        self.sent = {node: message.content for node, message in self.asked.items()}
        if self.pack:
            _pack(messages)
        return messages  # a list: deployed, Flower goes through it twice

    def _address(self, message: Message, number: int) -> None:
        """Give a message its own config: strategies put one and the same record into all."""
        node = message.metadata.dst_node_id
        saved = number - 1 if self.saver is None else self.saver.oldest
        words = Told(number, self.session, self.accepted.get(self._name(node), -1), saved).config()
        self.accepted.setdefault(self._name(node), 0)
        content = RecordDict(dict(message.content))
        name = next(iter(content.config_records), "config")
        config = dict(content.config_records.get(name, {}))
        chosen, where = self.bits_for(node, number) if self.bits_for else None, f"bits_for({node}, {number})"
        if chosen is not None:  # it replaces what the strategy's own config says
            config = {key: value for key, value in config.items() if key not in ("bits", "uplink")}
        if isinstance(chosen, str):
            as_uplink(f"{where} = {chosen!r}", chosen)
            config["uplink"] = chosen
        elif chosen is not None:
            config["bits"] = as_bits(where, chosen)
        content[name] = ConfigRecord({**config, **words})
        message.content = content

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        found = self._sorted(server_round, replies, self._open(server_round), nested.weights(self.chain))
        usable, failed = found.usable, found.failed
        private, integers = nested.private(self.chain), medians(usable)
        if private:  # the wrapper adds its noise to the medians too
            substitute(usable, integers)
        before, first = nested.snapshot(self.chain), not any(self.accepted.values()) and not self.rounds
        moved = self._changed(usable)  # strategies may empty the messages
        arrays, metrics = self.strategy.aggregate_train(server_round, found.messages) if usable else (None, None)
        share, why = 0.0, next(iter(failed.values()), "")
        if arrays is not None:
            share = sum(one.weight for one in usable if one.lossy) / sum(one.weight for one in usable)
            arrays = nested.integers_restored(arrays, self.dtypes, {} if private else integers)
            arrays = self._shift(arrays, server_round, share, len(usable), moved)
            if broken := nested.not_finite(self.chain, arrays):
                why = f"{broken} became NaN or infinite{longest(usable)}"
                LOG.error("round %d: %s; the round is left out", server_round, why)
                nested.go_back(self.chain, before)
                arrays, share = None, 0.0
        if arrays is not None:
            self.accepted |= {self._name(one.node): server_round for one in usable}
        self.rounds.append(aggregated(server_round, found, share, arrays is not None))
        self.skipped = 0 if arrays is not None else self.skipped + bool(why)  # strategies may wait, or ask nobody
        if why and arrays is None:
            unanimous = found.unanimous if first else ""
            check_hope(server_round, failed, bool(usable), why, self.skipped, self.patience, unanimous)
        return arrays, metrics

    def _sorted(
        self, number: int, replies: Iterable[Message], open_: Callable[[Message], Usable], keys: Sequence[str]
    ) -> Sorted:
        found = sort_out(replies, self.asked, open_, nested.alike(self.chain), keys, self.limits)
        for node in found.repeated:
            LOG.warning("round %d: node %d replied more than once; its first reply counts", number, node)
        for one in found.usable:
            for key, (before, after) in one.lowered.items():
                lowered = f"{key} of node {one.node} is lowered from {before:g} to {after:g}"
                LOG.warning("round %d: %s, %g times the median", number, lowered, self.limits.max_weight)
        return found

    def _name(self, node: int) -> str:
        """Name of a node across restarts of the server: its partition-id, if no other node has the same."""
        return f"partition {self.names[node]}" if node in self.names else str(node)

    def _open(self, number: int) -> Callable[[Message], Usable]:
        """How an upload is opened: by us, and then by strategies that have a say in it."""
        checks, begun = nested.checks(self.chain), dict[int, tuple[Params, Params]]()

        def open_(reply: Message) -> Usable:
            _, record = only_in(self.sent[reply.metadata.src_node_id], ArrayRecord)
            if id(record) not in begun:  # messages share it
                sent = to_params(record)
                begun[id(record)] = sent, {name: x.to(self.dtypes.get(name, x.dtype)) for name, x in sent.items()}
            upload = opened(reply, begun[id(record)], number, self.key)
            more = [check(upload.message) for check in checks]
            return upload._replace(distances={**upload.distances, **dict(ChainMap(*more))})

        return open_

    def _changed(self, usable: Sequence[Usable]) -> list[str]:
        """Of the arrays that may be shifted those that some client changed; none where the share will be zero."""
        if self.rule.share == "uploads" and not any(one.lossy for one in usable):
            return []
        sent = [only_in(self.sent[one.node], ArrayRecord)[1] for one in usable]
        replies = [only(one.message, ArrayRecord)[1] for one in usable]
        frames = [one.frame for one in usable]
        return changed(self.targeted.tensors or (), list(map(ArrivedUpload, sent, replies, frames)))

    def _shift(self, arrays: ArrayRecord, number: int, share: float, arrived: int, names: list[str]) -> ArrayRecord:
        rnd = Round(number, arrived, arrived, Broadcast({}, {}), {}, {}, share)
        if not self.rule.share_in(rnd):
            return arrays
        if names != self.shifted:
            LOG.info("\t└──> FedShift: shifted tensors: %s", printable(", ".join(names)) or "none")
            self.shifted = names
        if not names:
            return arrays
        shifted = to_record(replace(self.targeted, tensors=tuple(names)).shifted(to_params(arrays), rnd))
        nested.write_back(self.chain, shifted)
        return shifted

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        messages = list(self.strategy.configure_evaluate(server_round, arrays, config, grid))
        self.asked = {message.metadata.dst_node_id: message for message in messages}
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the strategy does it, without replies that would end the run."""
        keys = [] if self.key is None else [self.key]
        found = self._sorted(server_round, replies, lambda reply: evaluated(reply, self.key), keys)
        for node, why in found.failed.items():
            LOG.warning("round %d: the evaluation of node %d is left out: %s", server_round, node, why)
        return self.strategy.aggregate_evaluate(server_round, found.messages)

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
        with self.saver.lock() if self.saver else nullcontext():
            first, arrays = self._restored(initial_arrays)
            LOG.info("Starting FedShift around %s, rounds %d to %d", type(self.strategy).__name__, first, num_rounds)
            self.summary()
            result = Result(arrays=arrays)
            if evaluate_fn and (score := evaluate_fn(first - 1, arrays)) is not None:
                result.evaluate_metrics_serverapp[first - 1] = score
            for number in range(first, num_rounds + 1):
                LOG.info("[ROUND %d/%d]", number, num_rounds)
                messages = self.configure_train(number, result.arrays, train_config, grid)
                new, metrics = self.aggregate_train(number, grid.send_and_receive(messages, timeout=timeout))
                result.arrays = result.arrays if new is None else new
                if metrics is not None:
                    LOG.info("\t└──> Aggregated MetricRecord: %s", metrics)
                    result.train_metrics_clientapp[number] = metrics
                if self.saver:
                    self.saver.save(SavedRounds(number, result.arrays, self.session, self.accepted, self.skipped))
                messages = self.configure_evaluate(number, result.arrays, evaluate_config, grid)
                told = self.aggregate_evaluate(number, grid.send_and_receive(messages, timeout=timeout))
                if told is not None:
                    LOG.info("\t└──> Aggregated evaluation: %s", told)
                    result.evaluate_metrics_clientapp[number] = told
                if evaluate_fn and (score := evaluate_fn(number, result.arrays)) is not None:
                    LOG.info("\t└──> Global evaluation: %s", score)
                    result.evaluate_metrics_serverapp[number] = score
        return result

    def _restored(self, initial: ArrayRecord) -> tuple[int, ArrayRecord]:
        """The round to begin with, and the model: from the checkpoint, if there is one."""
        self._begin(to_params(initial))
        saved = self.saver.restore(initial) if self.saver else None
        if saved is None:
            return 1, initial
        self.session, self.accepted, self.skipped = saved.session, saved.accepted, saved.skipped
        LOG.info("Going on after round %d", saved.number)
        return saved.number + 1, saved.arrays


def _pack(messages: Sequence[Message]) -> None:
    """Pack each record of arrays; messages that share a record still share it, so that Flower sends it once."""
    records = {id(record): record for message in messages for record in message.content.array_records.values()}
    packs = {key: packed(record) for key, record in records.items()}
    for message in messages:
        message.content = RecordDict({name: packs.get(id(one), one) for name, one in message.content.items()})
