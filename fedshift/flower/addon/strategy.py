"""Strategy wrapper that adds quantized uploads and the shift to any strategy of Flower.

    strategy = FedShift(FedAdam(min_train_nodes=10))

Uploads are decoded and checked, the wrapped strategy aggregates them, and the result is shifted.
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
from fedshift.codecs import Cast, Codec, KMeans
from fedshift.codecs.base import finite
from fedshift.core.names import printable
from fedshift.core.types import Broadcast, Params, Round
from fedshift.flower.addon import nested
from fedshift.flower.addon.arrays import coded, only, only_in, packed, to_params, to_record
from fedshift.flower.addon.memory import RoundInfo
from fedshift.flower.addon.mod import as_bits, as_uplink
from fedshift.flower.addon.outcome import Aggregated, aggregated, check_progress
from fedshift.flower.addon.replies import (
    Limits,
    Sorted,
    Usable,
    evaluated,
    largest_update,
    medians,
    opened,
    sort_out,
    substitute,
)
from fedshift.flower.addon.saved import SavedRounds, Saver
from fedshift.flower.addon.seeded import Seeded
from fedshift.flower.addon.targets import ArrivedUpload, changed, check_module, targets
from fedshift.rounds.uplink import Uplink
from fedshift.rounds.uplink_json import dumps
from fedshift.wire.registry import codec_bytes

LOG = getLogger("flwr.fedshift")
BitsFor = Callable[[int, int], int | str | Uplink | None]  # (node, round) -> bits, an uplink or its name, or None


class FedShift(Strategy):
    """Decode uploads, aggregate them with any strategy, and shift: w_hat = w - share * mean(w) for every layer.

    The share is the weight of the quantized uploads, at most `max_share`, or `share` if it is given. With
    `per="filter"` the mean of each filter is used, and the share is 1 by default, independent of quantization: filter
    centring (`fedshift.algorithms.centring`), which is not the paper's rule.

    An invalid upload is left out, logged and counted in `rounds`. NoUploadsError is raised after `patience` rounds in a
    row without a usable upload, or at once if every reply of the first round fails for the same reason.

    The influence of one upload is limited, as long as most uploads of a round are honest. An update longer than the
    model and than `bound` times the round's median is left out; a weight above `max_weight` times the median weight is
    lowered to that; tensors of integers or booleans are the elementwise median or majority of the uploads. 0 disables a
    limit, and none applies to fewer than three uploads. Small poisoned updates are not detected.

    With 32 bits everywhere, per layer and without a `share`, nothing is shifted, and floating tensors are bit-identical
    to the wrapped strategy's for replies in the order of the messages, unless a limit applied. Exceptions: integers and
    booleans (see above) keep the model's dtype; replies in another floating dtype are cast to the model's; uploads of
    `QuantizeMod(updates=True)` are rounded when they are added to the model.

    A round shifts the arrays that at least one client changed and that are selected by `tensors` (patterns of names) or
    `module` (the weights of the layers of the app's `torch.nn.Module`). Without either, weights are recognised by names
    and shapes. Per filter, embeddings and weights with fewer than 32 inputs per filter are not shifted unless `tensors`
    names them.

    `bits_for(node, round)` returns the bits or the uplink of one upload: a name such as "lean", or an `Uplink` with any
    codec. The node's own config takes precedence, and None leaves the choice to the node. `checkpoint` is a folder; a
    stopped run resumes from the last round saved there. `pack` sends the model for training as one array, which saves
    two requests per node for each further array; `QuantizeMod` unpacks it, so every client must have this mod.
    `downlink` also encodes it, with a codec or with K-means codes of so many bits, rounded at random: clients start
    from the decoded model, and their changes are added to the exact one.

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
        downlink: int | Codec | None = None,
    ) -> None:
        if patience < 1:
            raise ValueError(f"FedShift(patience={patience}): patience must be 1 or more rounds")
        for name, multiple in (("bound", bound), ("max_weight", max_weight)):
            if multiple != 0 and not multiple >= 1:
                raise ValueError(f"FedShift({name}={multiple}): {name} must be 1 or more, or 0 for no limit")
        self.limits = Limits(bound, max_weight)
        if bits_for is not None and not callable(bits_for):
            raise TypeError(f"FedShift(bits_for={bits_for!r}): bits_for must be a function (node, round) -> bits")
        check_module(module, tensors)
        self.pack, self.downlink = pack, downlink_codec(downlink)
        self.strategy, self.bits_for, self.patience, self.module = strategy, bits_for, patience, module
        self.rule = Shift(per, share, max_share, warmup, patterns(tensors))
        self.chain = nested.layers_of(strategy)
        nested.set_bound(self.chain, bound)
        self.key = nested.weighting_key(self.chain)
        self.saver = None if checkpoint is None else Saver(Path(checkpoint), self.chain)
        if any(isinstance(layer, FedShift) for layer in self.chain):
            raise ValueError("FedShift(FedShift(...)): FedShift cannot wrap FedShift; remove one of them")
        self.seeded = next((layer for layer in self.chain if isinstance(layer, Seeded)), None)
        self.asked: dict[int, Message] = {}  # last messages, by node
        self.sent: dict[int, RecordDict] = {}  # unpacked content of the last training messages, by node
        self.decoded: dict[int, RecordDict] = {}  # the same as nodes decode it
        self.names: dict[int, int] = {}  # partition-ids that nodes report, in the current round
        self._begin({})

    def _begin(self, model: Params) -> None:
        if broken := [name for name, x in model.items() if x.is_floating_point() and not finite(x)]:
            raise ValueError(
                f"FedShift: the array {printable(broken[0])!r} of the model contains NaN or infinity, which cannot "
                "be averaged; keep masks out of the record, for example as buffers with persistent=False"
            )
        self.session, self.skipped = uuid4().hex[:16], 0
        self.accepted: dict[str, int] = {}  # node -> round of its last accepted upload, 0 for none
        self.rounds: list[Aggregated] = []
        self.dtypes = {name: x.dtype for name, x in model.items()}  # of the initial model
        self.targeted = targets(model, self.rule, self.module) if model else self.rule
        self.shifted: list[str] | None = None  # names in the last shifted round; None before it

    def summary(self) -> None:
        LOG.info("\t├──> FedShift settings:")
        LOG.info("\t│\t├── %s", self.rule)
        LOG.info("\t│\t├── Tensors to shift: %s", printable(", ".join(self.targeted.tensors or ())) or "none")
        LOG.info("\t│\t├── Weights of uploads: %s", self.key or "equal")
        LOG.info("\t│\t└── %s, in multiples of the round's median (0: no limit)", self.limits)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if not self.dtypes:  # not called by `start`
            self._begin(to_params(arrays))
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self.names = self.seeded.unique(grid.get_node_ids()) if self.seeded else {}
        for message in messages:
            self._address(message, server_round)
        self.asked = {message.metadata.dst_node_id: message for message in messages}
        self.sent = {node: message.content for node, message in self.asked.items()}
        self.decoded = dict(self.sent)
        if self.downlink:
            self._encode(messages, server_round)
        elif self.pack:
            _pack(messages)
        return messages  # a list: in a deployment, Flower iterates over it twice

    def _encode(self, messages: Sequence[Message], number: int) -> None:
        """Replace the model by a frame; messages that share a record still share it, so that Flower sends it once."""
        assert self.downlink is not None
        made: dict[int, tuple[ArrayRecord, ArrayRecord]] = {}
        for message in messages:
            name, record = only(message, ArrayRecord)
            if id(record) not in made:
                made[id(record)] = coded(record, self.downlink, number)
            frame, decoded = made[id(record)]
            self.decoded[message.metadata.dst_node_id] = RecordDict({**message.content, name: decoded})
            message.content = RecordDict({**message.content, name: frame})

    def _move(self, usable: Sequence[Usable]) -> None:
        """Add what clients changed to the exact model: w + (w_k - decoded w)."""
        lost: dict[int, Params] = {}  # w - decoded w, by record: messages share records
        for upload in usable if self.downlink else ():
            model, start = (only_in(sent[upload.node], ArrayRecord)[1] for sent in (self.sent, self.decoded))
            if id(start) not in lost:
                decoded = to_params(start)
                floats = {n: w for n, w in to_params(model).items() if w.is_floating_point()}
                lost[id(start)] = {n: w - decoded[n] for n, w in floats.items()}
            name, record = only(upload.message, ArrayRecord)
            arrays = to_params(record)
            moved = {n: arrays[n] + x.to(arrays[n].dtype) for n, x in lost[id(start)].items() if n in arrays}
            upload.message.content[name] = to_record({n: moved.get(n, x) for n, x in arrays.items()})

    def _address(self, message: Message, number: int) -> None:
        """Give a message its own config: strategies share one record between all messages."""
        node = message.metadata.dst_node_id
        saved = number - 1 if self.saver is None else self.saver.oldest
        info = RoundInfo(number, self.session, self.accepted.get(self._name(node), -1), saved)
        self.accepted.setdefault(self._name(node), 0)
        content = RecordDict(dict(message.content))
        name = next(iter(content.config_records), "config")
        config = dict(content.config_records.get(name, {}))
        chosen, where = self.bits_for(node, number) if self.bits_for else None, f"bits_for({node}, {number})"
        if chosen is not None:  # overrides the strategy's config
            config = {key: value for key, value in config.items() if key not in ("bits", "uplink")}
        if isinstance(chosen, Uplink):
            config["uplink"] = _sendable(chosen, where)
        elif isinstance(chosen, str):
            as_uplink(f"{where} = {chosen!r}", chosen)
            config["uplink"] = chosen
        elif chosen is not None:
            config["bits"] = as_bits(where, chosen)
        content[name] = ConfigRecord({**config, **info.config()})
        message.content = content

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        found = self._sorted(server_round, replies, self._open(server_round), nested.weights(self.chain))
        usable, failed = found.usable, found.failed
        private, integers = nested.private(self.chain), medians(usable)
        if private:  # the wrapper adds noise to the medians as well
            substitute(usable, integers)
        before, first = nested.snapshot(self.chain), not any(self.accepted.values()) and not self.rounds
        changed_names = self._changed(usable)  # before aggregation: strategies may empty the messages
        self._move(usable)
        arrays, metrics = self.strategy.aggregate_train(server_round, found.messages) if usable else (None, None)
        share, why = 0.0, next(iter(failed.values()), "")
        if arrays is not None:
            share = sum(upload.weight for upload in usable if upload.lossy) / sum(upload.weight for upload in usable)
            arrays = nested.integers_restored(arrays, self.dtypes, {} if private else integers)
            arrays = self._shift(arrays, server_round, share, len(usable), changed_names)
            if broken := nested.not_finite(self.chain, arrays):
                why = f"{broken} is NaN or infinite{largest_update(usable)}"
                LOG.error("round %d: %s; the round is skipped", server_round, why)
                nested.restore(self.chain, before)
                arrays, share = None, 0.0
        if arrays is not None:
            self.accepted |= {self._name(upload.node): server_round for upload in usable}
        self.rounds.append(aggregated(server_round, found, share, arrays is not None))
        # without a reason, the strategy returned nothing by itself, or sent no messages
        self.skipped = 0 if arrays is not None else self.skipped + bool(why)
        if why and arrays is None:
            unanimous = found.unanimous if first else ""
            check_progress(server_round, failed, bool(usable), why, self.skipped, self.patience, unanimous)
        return arrays, metrics

    def _sorted(
        self, number: int, replies: Iterable[Message], open_: Callable[[Message], Usable], keys: Sequence[str]
    ) -> Sorted:
        found = sort_out(replies, self.asked, open_, nested.alike(self.chain), keys, self.limits)
        for node in found.repeated:
            LOG.warning("round %d: node %d replied more than once; only its first reply is used", number, node)
        for upload in found.usable:
            for key, (before, after) in upload.lowered.items():
                lowered = f"{key} of node {upload.node} is lowered from {before:g} to {after:g}"
                LOG.warning("round %d: %s, %g times the median", number, lowered, self.limits.max_weight)
        return found

    def _name(self, node: int) -> str:
        """Name of a node across restarts of the server: its partition-id, if no other node has the same."""
        return f"partition {self.names[node]}" if node in self.names else str(node)

    def _open(self, number: int) -> Callable[[Message], Usable]:
        """Return a function that decodes and checks an upload, including the checks of the wrapped strategies."""
        checks, broadcasts = nested.checks(self.chain), dict[int, tuple[Params, Params]]()

        def open_(reply: Message) -> Usable:
            _, record = only_in(self.decoded[reply.metadata.src_node_id], ArrayRecord)
            if id(record) not in broadcasts:  # messages share records
                sent = to_params(record)
                broadcasts[id(record)] = sent, {name: x.to(self.dtypes.get(name, x.dtype)) for name, x in sent.items()}
            upload = opened(reply, broadcasts[id(record)], number, self.key)
            more = [check(upload.message) for check in checks]
            return upload._replace(distances={**upload.distances, **dict(ChainMap(*more))})

        return open_

    def _changed(self, usable: Sequence[Usable]) -> list[str]:
        """Return the candidates for the shift that at least one client changed; none if the share will be zero."""
        if self.rule.share == "uploads" and not any(upload.lossy for upload in usable):
            return []
        sent = [only_in(self.decoded[upload.node], ArrayRecord)[1] for upload in usable]
        replies = [only(upload.message, ArrayRecord)[1] for upload in usable]
        frames = [upload.frame for upload in usable]
        return changed(self.targeted.tensors or (), list(map(ArrivedUpload, sent, replies, frames)))

    def _shift(self, arrays: ArrayRecord, number: int, share: float, arrived: int, names: list[str]) -> ArrayRecord:
        rnd = Round(number, arrived, arrived, Broadcast({}, {}), {}, share)
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
        """Aggregate metrics with the wrapped strategy, without replies that would end the run."""
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
        """Train up to round `num_rounds`, from the beginning or from the last checkpoint."""
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
                scores = self.aggregate_evaluate(number, grid.send_and_receive(messages, timeout=timeout))
                if scores is not None:
                    LOG.info("\t└──> Aggregated evaluation: %s", scores)
                    result.evaluate_metrics_clientapp[number] = scores
                if evaluate_fn and (score := evaluate_fn(number, result.arrays)) is not None:
                    LOG.info("\t└──> Global evaluation: %s", score)
                    result.evaluate_metrics_serverapp[number] = score
        return result

    def _restored(self, initial: ArrayRecord) -> tuple[int, ArrayRecord]:
        """Return the first round and the model to start with, from the last checkpoint if there is one."""
        self._begin(to_params(initial))
        saved = self.saver.restore(initial) if self.saver else None
        if saved is None:
            return 1, initial
        self.session, self.accepted, self.skipped = saved.session, saved.accepted, saved.skipped
        LOG.info("Resuming after round %d", saved.number)
        return saved.number + 1, saved.arrays


def downlink_codec(downlink: int | Codec | None) -> Codec | None:
    """Codec of the model that is sent to nodes, from its argument.

    >>> downlink_codec(8).quantizer
    KMeans(bits=8, exact=False, random=True)
    """
    if downlink is None or isinstance(downlink, Codec):
        return downlink
    where = f"FedShift(downlink={downlink!r})"
    if isinstance(downlink, str):
        raise ValueError(f"{where}: must be a number of bits or a Codec; nodes keep no model, so it is sent as weights")
    bits = as_bits(where, downlink)
    return None if bits == 32 else Codec(Cast("bfloat16") if bits == 16 else KMeans(bits, random=True))


def _sendable(uplink: Uplink, where: str) -> str:
    """Uplink as JSON; ValueError, with `where`, if it cannot be named in a message or its uploads cannot be sent."""
    try:
        codec_bytes(uplink.codec)
        return dumps(uplink)
    except ValueError as problem:
        raise ValueError(f"{where}: {problem}") from None


def _pack(messages: Sequence[Message]) -> None:
    """Pack each record of arrays; messages that share a record still share it, so that Flower sends it once."""
    records = {id(record): record for message in messages for record in message.content.array_records.values()}
    packs = {key: packed(record) for key, record in records.items()}
    for message in messages:
        message.content = RecordDict({name: packs.get(id(record), record) for name, record in message.content.items()})
