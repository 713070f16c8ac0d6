"""A node's side of a round: it plays its clients as a process of our own would, and keeps their memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fedshift.core.tree import take
from fedshift.core.types import Broadcast
from fedshift.data.cohorts import Plan, draw_plan
from fedshift.engines.client import Client
from fedshift.experiment.settings import Experiment
from fedshift.flower.addon.arrays import CONTROL, KEY, enclose
from fedshift.flower.addon.memory import NodeMemory, Recalled, Told
from fedshift.flower.app.turns import ARRAYS, CONFIG, EXTRA, FRAMES, Order, digest, remembers, report
from fedshift.rounds.engine import Job, TrainingError, Upload, one_thread
from fedshift.rounds.federation import Federation
from fedshift.wire.writer import unpack


class ClientNode:
    """The whole federation, of which a node plays some clients; it knows everything but what others remember."""

    def __init__(self, experiment: Experiment, fed: Federation) -> None:
        self.fed, self.client, self.experiment = fed, Client(fed.task), digest(experiment)

    def answer(self, message: Message, context: Context, folder: Path | str | None = None) -> Message:
        """Train the clients that the message names; memories are kept in the node's state, or in a folder."""
        order = Order.read(message.content.config_records[CONFIG])
        if order.experiment != self.experiment:
            raise ValueError("this node was given other settings than the server")
        sent = self._sent(message.content.array_records)
        memory, frames, reports = NodeMemory(context, folder), dict[str, Array](), dict[str, Any]()
        for client, accepted in zip(order.clients, order.accepted, strict=True):
            with one_thread():
                upload = self._play(
                    client, order, sent, memory, Told(order.number, order.session, accepted, order.saved)
                )
            reports[str(client)] = report(upload)
            if isinstance(upload.frame, bytes) and upload.frame:
                frames[str(client)] = enclose(upload.frame)
            if isinstance(upload.extra, bytes) and upload.extra:
                frames[f"{client}{EXTRA}"] = enclose(upload.extra)
        content = RecordDict({FRAMES: ArrayRecord(frames), CONFIG: ConfigRecord(reports)})
        return Message(content, reply_to=message)

    def _sent(self, records: Mapping[str, ArrayRecord]) -> Broadcast:
        params = unpack(records[ARRAYS][KEY].data, like=self.fed.task.params)
        control = self.fed.algorithm.client.init(take(params, self.fed.task.trained))
        return Broadcast(params, unpack(records[CONTROL][KEY].data, like=control) if control else {})

    def _play(self, client: int, order: Order, sent: Broadcast, memory: NodeMemory, told: Told) -> Upload:
        fed, name = self.fed, f"client-{client}"
        uplink, rule = fed.groups[int(fed.group[client])].uplink, fed.algorithm.client
        keeps = remembers(rule, uplink)
        recalled = memory.recall(name, told) if keeps else Recalled({}, False)
        # a lost control starts at the server's: such a client steps along the plain gradient
        own = dict(sent.control) if recalled.lost else recalled.memory
        plan = draw_plan(
            fed.partition,
            [client],
            seed=fed.seed,
            number=order.number,
            epochs=fed.epochs,
            batch=fed.batch,
            rate=fed.rate,
        )
        job = Job(
            number=order.number,
            clients=[client],
            rule=rule,
            sent=sent,
            recall=lambda _: own,
            plan=padded(plan, order.steps),
            examples=[int(fed.partition.sizes[client])],
            uplinks=[uplink],
            layers=fed.layers,
            histograms=order.histograms,
        )
        try:
            upload = self.client.turn(job, 0, own, recalled.lost)
        except TrainingError as problem:  # of this client; the node's others go on
            return Upload(client, b"", b"", {}, [], 0.0, (0.0, 0.0), str(problem))
        if keeps and not upload.failure:
            memory.keep(name, told.session, order.number, upload.memory)
        return upload


def padded(plan: Plan, steps: int) -> Plan:
    """The plan as it is among those of its cohort: with steps at its end that keep no example."""
    more = steps - plan.lr.shape[-1]
    if not more:
        return plan
    return Plan(
        F.pad(plan.batches, (0, 0, 0, more)),
        F.pad(plan.keep, (0, 0, 0, more)),
        F.pad(plan.lr, (0, more)),
        F.pad(plan.key, (0, more)),
    )
