"""Engine that trains the clients on the nodes of a Flower grid.

Models and uploads are sent; the memory of a client stays on its node. Instead of the memory, the run keeps and
checkpoints the round of each client's last accepted upload, and sends it to the node.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence

import torch
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedshift.algorithms.base import defines
from fedshift.codecs.exact import EXACT
from fedshift.core.types import CPU, Params
from fedshift.engines.sequential import Sequential
from fedshift.flower.addon.arrays import CONTROL, FRAME, KEY, enclose
from fedshift.flower.addon.outbox import Outbox
from fedshift.flower.addon.replies import brief
from fedshift.flower.app.nodes import Nodes
from fedshift.flower.app.protocol import ARRAYS, CONFIG, FRAMES, SECOND, TRAIN, TrainRequest, read_report
from fedshift.rounds.engine import Job, Task, Upload
from fedshift.rounds.evaluate import ClientScores, Held, Score
from fedshift.rounds.uplink import NODE
from fedshift.rounds.uplink_json import dumps
from fedshift.wire.frame import WireError
from fedshift.wire.writer import header, pack

ROUND = f"{NODE}round"  # key in the run's memory of a client: round of its last accepted upload
TIMEOUT, WAIT = 3600.0, 600.0  # seconds, for the replies of a round and for nodes to connect


class Flower:
    """Trains on the nodes of a grid and evaluates in this process."""

    home = CPU

    def __init__(
        self,
        grid: Grid,
        task: Task,
        *,
        experiment: str = "",
        session: str = "",
        saved: Callable[[], int] | None = None,
        timeout: float = TIMEOUT,
        wait: float = WAIT,
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """`experiment`: digest of the settings; `saved`: returns the oldest round that the run may resume from."""
        self.grid, self.experiment, self.saved = grid, experiment, saved
        self.session = session or secrets.token_hex(8)
        self.timeout, self.tell = timeout, tell
        self.local = Sequential(task)
        self.nodes = Nodes(grid, wait, tell)
        self.started = False
        self.lost = 0  # number of memories lost so far
        self.frames: dict[int, bytes] = {}  # of broadcasts that are updates, by round
        self.held: dict[int, int] = {}  # partition -> round of the broadcast that its node holds

    def train(self, jobs: Sequence[Job]) -> list[Iterator[Upload]]:
        return [self._cohort(job) for job in jobs]

    def evaluate(self, params: Params) -> Score:
        return self.local.evaluate(params)

    def evaluate_clients(self, params: Params, held: Held) -> ClientScores:
        return self.local.evaluate_clients(params, held)

    def close(self) -> None:
        """Do nothing: nodes are not started by the engine."""

    def _cohort(self, job: Job) -> Iterator[Upload]:
        at = self.nodes.now() if self.started else self.nodes.all()
        self.started, parts = True, self.nodes.partitions
        outbox = Outbox(self.grid, self._messages(job, at, parts), self.timeout)
        for i, client in enumerate(job.clients):
            part = client % parts
            if part not in at:
                yield failed(client, f"its node, partition {part}, is not connected")
                continue
            reply = outbox.reply(at[part])
            if reply is None or reply.has_error():
                self.held.pop(part, None)
            else:
                self.held[part] = job.number
            yield self._upload(job, i, reply)

    def _messages(self, job: Job, at: dict[int, int], parts: int) -> list[Message]:
        """Return one message per node; all share the same array objects, so that Flower transfers them once."""
        arrays, messages = self._broadcasts(job), list[Message]()
        control = {}
        if job.sent.control:
            control[CONTROL] = ArrayRecord({KEY: enclose(self._exact(job, job.sent.control))})
        for part in sorted({client % parts for client in job.clients} & at.keys()):
            clients = [client for client in job.clients if client % parts == part]
            base = self.held.get(part, 0)
            base = base if base in arrays else 0
            request = TrainRequest(
                number=job.number,
                steps=job.plan.lr.shape[-1],
                experiment=self.experiment,
                session=self.session,
                saved=self.saved() if self.saved else job.number - 1,
                histograms=job.histograms,
                clients=clients,
                accepted=[int(job.recall(client).get(ROUND, 0)) for client in clients],
                base=base,
                uplinks=[dumps(job.uplinks[job.clients.index(client)]) for client in clients] if job.adaptive else [],
            )
            content = RecordDict({ARRAYS: arrays[base], **control, CONFIG: request.config()})
            messages.append(Message(content, at[part], TRAIN, group_id=str(job.number)))
        return messages

    def _exact(self, job: Job, params: Params) -> bytes:
        return pack(EXACT, params, base=job.number, run=job.run)

    def _broadcasts(self, job: Job) -> dict[int, ArrayRecord]:
        """Arrays for nodes by the round of the broadcast that they hold; 0 for nodes that hold none."""
        whole = self._exact(job, job.sent.params)
        if job.broadcast is None or not header(job.broadcast).update:
            return {0: ArrayRecord({KEY: enclose(job.broadcast or whole)})}
        self.frames[job.number] = job.broadcast
        arrays, total, frames = {0: ArrayRecord({KEY: enclose(whole)})}, 0, dict[str, Array]()
        for number in range(job.number, 1, -1):  # as many frames as are shorter than the model
            total += len(self.frames[number]) if number in self.frames else len(whole)
            if total >= len(whole):
                break
            frames = {str(number): enclose(self.frames[number]), **frames}
            arrays[number - 1] = ArrayRecord(dict(frames))
        self.frames = {number: frame for number, frame in self.frames.items() if number - 1 in arrays}
        return arrays

    def _upload(self, job: Job, i: int, reply: Message | None) -> Upload:
        """Return the upload of a client from its node's reply; an invalid reply makes only this client fail."""
        client = job.clients[i]
        if reply is None:
            return failed(client, f"its node did not answer within {self.timeout:g} s")
        if reply.has_error():
            why = brief(reply.error.reason or "")
            return failed(client, f"its node answered with error {reply.error.code}: {why}")
        try:
            upload = read_report(client, reply.content[CONFIG][str(client)], job.layers)
            upload = upload if job.owned else upload._replace(loss=None)
            if upload.silent and defines(job.rule, "sends"):
                return upload
            if upload.silent:
                raise ValueError("its report is invalid")
            if upload.failure:
                return failed(client, upload.failure, upload.seconds)
            frame = _frame(reply, str(client))
            second = _frame(reply, f"{client}{SECOND}") if defines(job.rule, "second") else b""
            head = header(frame)
            head.check(job.run, job.number, client)
        except KeyError as missing:
            return failed(client, f"its node's reply lacks {missing}")
        except (ValueError, TypeError) as problem:
            return failed(client, str(problem))
        if head.reset:
            self.lost += 1
            self.tell(f"round {job.number}: client {client} lost its memory, which was reset ({self.lost} so far)")
        kept = {ROUND: torch.tensor(job.number)} if job.remembers(i) else {}
        return upload._replace(frame=frame, second=second, memory=kept)


def _frame(reply: Message, name: str) -> bytes:
    array = reply.content.array_records[FRAMES][name]
    if array.stype != FRAME:
        raise WireError(f"the reply contains an array of type {array.stype[:40]!r} instead of a frame")
    return array.data


def failed(client: int, why: str, seconds: tuple[float, float] = (0.0, 0.0)) -> Upload:
    return Upload(client, b"", b"", {}, [], 0.0, seconds, why)
