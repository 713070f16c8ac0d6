"""Training of clients on a node, with their memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedshift.codecs.exact import EXACT
from fedshift.core.tree import take
from fedshift.core.types import Broadcast, Params
from fedshift.data.cohorts import Plan, draw_plan
from fedshift.engines.client import Client
from fedshift.experiment.settings import Experiment
from fedshift.flower.addon.arrays import CONTROL, KEY, enclose
from fedshift.flower.addon.memory import NodeMemory, Recalled, RoundInfo
from fedshift.flower.app.protocol import ARRAYS, CONFIG, FRAMES, SECOND, TrainRequest, digest, report
from fedshift.rounds.engine import Job, TrainingError, Upload, one_thread
from fedshift.rounds.federation import Federation
from fedshift.rounds.uplink import Uplink, received, remembers
from fedshift.rounds.uplink_json import loads
from fedshift.wire.writer import header, pack, unpack

HELD = "fedshift/broadcast"  # in the node's state: the last broadcast, by its round


class ClientRunner:
    """Trains the clients that a message names, as in the sequential engine."""

    def __init__(self, experiment: Experiment, fed: Federation) -> None:
        self.fed, self.client, self.experiment = fed, Client(fed.task), digest(experiment)

    def answer(self, message: Message, context: Context, folder: Path | str | None = None) -> Message:
        """Train the clients that the message names; their memory is in the node's state, or in `folder`."""
        request = TrainRequest.read(message.content.config_records[CONFIG])
        if request.experiment != self.experiment:
            raise ValueError("the settings of this node differ from those of the server")
        sent = self._sent(message.content.array_records, request, context)
        memory, frames, reports = NodeMemory(context, folder), dict[str, Array](), dict[str, Any]()
        for client, accepted, uplink in zip(request.clients, request.accepted, self._uplinks(request), strict=True):
            with one_thread():
                info = RoundInfo(request.number, request.session, accepted, request.saved)
                upload = self._train(client, uplink, request, sent, memory, info)
            reports[str(client)] = report(upload)
            if isinstance(upload.frame, bytes) and upload.frame:
                frames[str(client)] = enclose(upload.frame)
            if isinstance(upload.second, bytes) and upload.second:
                frames[f"{client}{SECOND}"] = enclose(upload.second)
        content = RecordDict({FRAMES: ArrayRecord(frames), CONFIG: ConfigRecord(reports)})
        return Message(content, reply_to=message)

    def _uplinks(self, request: TrainRequest) -> list[Uplink]:
        """Uplink of each client of the message: that of its group, or the one the server's policy chose."""
        if self.fed.policy is not None:
            return [loads(text) for text in request.uplinks]
        return [self.fed.uplinks[int(self.fed.group[client])] for client in request.clients]

    def _sent(self, records: Mapping[str, ArrayRecord], request: TrainRequest, context: Context) -> Broadcast:
        """The broadcast; if it is sent as updates, it is kept in the node's state for the next round."""
        like = self.fed.task.params
        if request.base:
            params = self._held(context, request.base)
            for number in sorted(map(int, records[ARRAYS])):
                params = received(True, self._opened(records[ARRAYS][str(number)], like, number), params)
        else:
            params = self._opened(records[ARRAYS][KEY], like, request.number)
        if self.fed.downlink.lossy and self.fed.downlink.update:
            context.state[HELD] = ArrayRecord({str(request.number): enclose(pack(EXACT, params))})
        control, _ = self.fed.algorithm.server.init(params, self.fed.task.trained)
        return Broadcast(params, self._opened(records[CONTROL][KEY], control, request.number) if control else {})

    def _opened(self, array: Array, like: Params, number: int) -> Params:
        """Decode a frame of the server, which must belong to this run and round."""
        header(array.data).check(self.fed.run, number, None)
        return unpack(array.data, like=like)

    def _held(self, context: Context, number: int) -> Params:
        record = context.state.array_records.get(HELD)
        if record is None or str(number) not in record:
            raise ValueError(f"this node does not have the broadcast of round {number}; it may have been restarted")
        return unpack(record[str(number)].data, like=self.fed.task.params)

    def _train(
        self,
        client: int,
        uplink: Uplink,
        request: TrainRequest,
        sent: Broadcast,
        memory: NodeMemory,
        info: RoundInfo,
    ) -> Upload:
        fed, name, rule = self.fed, f"client-{client}", self.fed.algorithm.client
        adaptive = fed.policy is not None
        keeps = adaptive or remembers(rule, uplink)
        recalled = memory.recall(name, info) if keeps else Recalled({}, False)
        start = rule.recover(take(sent.params, fed.task.trained), sent) if recalled.lost else recalled.memory
        plan = draw_plan(
            fed.partition,
            [client],
            seed=fed.seed,
            number=request.number,
            epochs=fed.epochs,
            steps=fed.steps,
            batch=fed.batch,
            rate=fed.rate,
        )
        job = Job(
            number=request.number,
            clients=[client],
            rule=rule,
            sent=sent,
            recall=lambda _: start,
            plan=padded(plan, request.steps),
            examples=[int(fed.partition.sizes[client])],
            uplinks=[uplink],
            layers=fed.layers,
            histograms=request.histograms,
            run=fed.run,
            adaptive=adaptive,
            owned=[fed.partition.of(client)] if fed.reports_loss else (),
        )
        try:
            upload = self.client.train(job, 0, start, recalled.lost)
        except TrainingError as problem:  # only this client fails, not the others of the node
            return Upload(client, b"", b"", {}, [], 0.0, (0.0, 0.0), str(problem))
        if keeps and not upload.failure and not upload.silent:
            memory.keep(name, info.session, request.number, upload.memory)
        return upload


def padded(plan: Plan, steps: int) -> Plan:
    """Pad a plan with empty steps to the number of steps of its cohort."""
    missing = steps - plan.lr.shape[-1]
    if not missing:
        return plan
    return Plan(
        F.pad(plan.batches, (0, 0, 0, missing)),
        F.pad(plan.keep, (0, 0, 0, missing)),
        F.pad(plan.lr, (0, missing)),
        F.pad(plan.key, (0, missing)),
    )
