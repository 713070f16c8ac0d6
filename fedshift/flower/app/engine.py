"""An engine whose clients live on the nodes of a Flower grid.

What travels is the server's model, and what clients upload. What a client remembers stays on its node,
which is told what the server makes of it: in place of the memory itself, the run keeps for each client
the round of its last upload that was used, and checkpoints that.
"""

import secrets
from collections.abc import Callable, Iterator, Sequence

import torch
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from fedshift.core.types import CPU, Params
from fedshift.engines.sequential import Sequential
from fedshift.flower.addon.arrays import CONTROL, FRAME, KEY, enclose
from fedshift.flower.addon.replies import brief
from fedshift.flower.app.nodes import Nodes, Post
from fedshift.flower.app.turns import ARRAYS, CONFIG, EXTRA, FRAMES, TRAIN, Order, read_report, remembers
from fedshift.rounds.engine import Job, Task, Upload
from fedshift.rounds.evaluate import Score
from fedshift.wire.frame import WireError
from fedshift.wire.writer import EXACT, header, pack

ROUND = "flower/round"  # in the run's memory of a client: its last upload that was used
TIMEOUT, WAIT = 3600.0, 600.0  # seconds for a round's replies, and for nodes to connect


class Flower:
    """Trains on nodes and scores here."""

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
        """`experiment` is the digest of the settings; `saved` tells a round that the run may go back to."""
        self.grid, self.experiment, self.saved = grid, experiment, saved
        self.session = session or secrets.token_hex(8)
        self.timeout, self.tell = timeout, tell
        self.here = Sequential(task)
        self.nodes = Nodes(grid, wait, tell)
        self.begun = False
        self.lost = 0  # memories that were lost, so far

    def train(self, jobs: Sequence[Job]) -> list[Iterator[Upload]]:
        return [self._cohort(job) for job in jobs]

    def evaluate(self, params: Params) -> Score:
        return self.here.evaluate(params)

    def close(self) -> None:
        """Nodes are not ours to end."""

    def _cohort(self, job: Job) -> Iterator[Upload]:
        at = self.nodes.now() if self.begun else self.nodes.all()
        self.begun, parts = True, self.nodes.partitions
        post = Post(self.grid, self._messages(job, at, parts), self.timeout)
        for i, client in enumerate(job.clients):
            part = client % parts
            if part not in at:
                yield failed(client, f"its node, partition {part}, is not connected")
            else:
                yield self._upload(job, i, post.reply(at[part]))

    def _messages(self, job: Job, at: dict[int, int], parts: int) -> list[Message]:
        """One a node, of which all hold the very same arrays: Flower sends those once."""
        model = {ARRAYS: ArrayRecord({KEY: enclose(pack(EXACT, job.sent.params))})}
        if job.sent.control:
            model[CONTROL] = ArrayRecord({KEY: enclose(pack(EXACT, job.sent.control))})
        messages = []
        for part in sorted({client % parts for client in job.clients} & at.keys()):
            clients = [client for client in job.clients if client % parts == part]
            order = Order(
                number=job.number,
                steps=job.plan.lr.shape[-1],
                experiment=self.experiment,
                session=self.session,
                saved=self.saved() if self.saved else job.number - 1,
                histograms=job.histograms,
                clients=clients,
                accepted=[int(job.recall(client).get(ROUND, 0)) for client in clients],
            )
            content = RecordDict({**model, CONFIG: order.config()})
            messages.append(Message(content, at[part], TRAIN, group_id=str(job.number)))
        return messages

    def _upload(self, job: Job, i: int, reply: Message | None) -> Upload:
        """What a reply says of a client; whatever is wrong with it is this client's failure, and no one else's."""
        client = job.clients[i]
        if reply is None:
            return failed(client, f"its node did not answer within {self.timeout:g} s")
        if reply.has_error():
            why = brief(reply.error.reason or "")
            return failed(client, f"its node answered with error {reply.error.code}: {why}")
        try:
            upload = read_report(client, reply.content[CONFIG][str(client)], job.layers)
            if upload.failure:
                return failed(client, upload.failure, upload.seconds)
            frame = _frame(reply, str(client))
            extra = _frame(reply, f"{client}{EXTRA}") if job.rule.extra == "sent" else b""
            said = header(frame)
            if said.base != job.number:
                raise WireError(f"an upload of round {said.base} came in round {job.number}")
        except KeyError as missing:
            return failed(client, f"its node's reply lacks {missing}")
        except (ValueError, TypeError) as problem:
            return failed(client, str(problem))
        if said.reset:
            self.lost += 1
            self.tell(f"round {job.number}: client {client} had lost its memory and starts anew ({self.lost} so far)")
        kept = {ROUND: torch.tensor(job.number)} if remembers(job.rule, job.uplinks[i]) else {}
        return upload._replace(frame=frame, extra=extra, memory=kept)


def _frame(reply: Message, name: str) -> bytes:
    array = reply.content.array_records[FRAMES][name]
    if array.stype != FRAME:
        raise WireError(f"an array of type {array.stype[:40]!r} came where a frame is expected")
    return array.data


def failed(client: int, why: str, seconds: tuple[float, float] = (0.0, 0.0)) -> Upload:
    return Upload(client, b"", b"", {}, [], 0.0, seconds, why)
