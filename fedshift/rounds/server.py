"""The server's side of a round: uploads are checked, measured against each other, and averaged."""

from collections.abc import Sequence
from functools import cached_property
from statistics import median_low
from typing import NamedTuple

import torch

from fedshift.algorithms.bounds import capped, median_integers, middle, outliers, reference, refusal, update_floor
from fedshift.codecs.base import CHUNK, finite
from fedshift.core import rng, tree
from fedshift.core.names import printable
from fedshift.core.tree import norm
from fedshift.core.types import Broadcast, Decoded, Params, Round
from fedshift.data.cohorts import Plan, travel
from fedshift.rounds.engine import Job, Upload
from fedshift.rounds.evaluate import Score
from fedshift.rounds.federation import Federation, Layer, Outcome
from fedshift.rounds.statistics import Statistics
from fedshift.rounds.uplink import Uplink, code, quantized, read
from fedshift.wire.frame import WireError
from fedshift.wire.mean import Frame, Mean, Measured, Ruler
from fedshift.wire.writer import EXACT, Choice, unpack

SMALL = CHUNK  # numbers of a model whose uploads wait decoded; larger ones are decoded twice
UPDATE, BUFFERS, SECOND = "update", "buffer update", "second upload"  # what has a norm


class Waiting(NamedTuple):
    """An upload that was checked, until all of its round have been measured."""

    upload: Upload
    place: int  # in the cohort
    norms: dict[str, float]  # of what it changes
    integers: Params
    frame: Frame | None  # None for one that is to be opened again, or never was a frame
    change: Params | None  # of the client's memory, None for one that is to be worked out again


class Uploads:
    """The uploads of one round, and what follows from them.

    Uploads are measured as they arrive and wait in their coded form: whether one is far beyond the
    others shows only when all are there. Then `settle` adds those that are used to the mean, in the
    order of the cohort.
    """

    def __init__(self, fed: Federation, sent: Broadcast) -> None:
        self.fed, self.sent, self.trained = fed, sent, fed.task.trained
        self.mean = Mean(like=sent.params, base=sent.params)
        self.small = sum(x.numel() for x in sent.params.values()) <= SMALL
        self.extra: Params = {}
        self.integers: Params = {}
        self.clients: Sequence[int] = ()  # the cohort, in whose order failures are told
        self.failed: dict[int, str] = {}
        self.waiting: list[Waiting] = []
        self.memory: dict[int, Params] = {}  # of the clients whose uploads were taken
        self.capped = 0
        self.lost: dict[Uplink, float] = {}  # what coding loses of the model that was sent
        self.stats = Statistics(fed, sent)

    def take(self, upload: Upload, job: Job, i: int) -> None:
        """Check and measure one upload; what is refused is in `failed`, with the reason."""
        self.stats.spend(upload)
        if upload.failure:
            self.failed[upload.client] = printable(upload.failure)
            return
        try:
            self.waiting.append(self._measured(upload, job, i))
        except WireError as problem:
            self.failed[upload.client] = printable(str(problem))

    def _measured(self, upload: Upload, job: Job, i: int) -> Waiting:
        change: Params | None = None
        norms: dict[str, float] = {}
        if job.rule.extra == "sent":
            norms[SECOND], change = self._second(upload.extra)
        if isinstance(upload.frame, Decoded):
            frame, found = None, self._decoded(upload.frame)
        else:
            frame = self._open(upload, job, i)
            frame = frame.decoded() if self.small else frame
            found = self._ruler.measure(frame)
        norms = {UPDATE: found.trained, BUFFERS: found.buffers} | norms
        return Waiting(upload, i, norms, found.integers, frame if self.small else None, change if self.small else None)

    def _second(self, extra: bytes | Decoded) -> tuple[float, Params | None]:
        """The norm of a second upload, and what it holds."""
        if isinstance(extra, Decoded) and extra.norms is not None:
            return extra.norms[0], None
        change = extra.params if isinstance(extra, Decoded) else unpack(extra, like=self.sent.control, codec=EXACT)
        return norm(change.values()), change

    def _decoded(self, upload: Decoded) -> Measured:
        integers = {name: x for name, x in upload.params.items() if not x.is_floating_point()}
        if upload.norms is not None:
            return Measured(*upload.norms, integers)
        far = {name: upload.params[name] - x for name, x in self.sent.params.items() if x.is_floating_point()}
        return Measured(
            norm(x for name, x in far.items() if name in self.trained),
            norm(x for name, x in far.items() if name not in self.trained and name not in self._infinite),
            integers,
        )

    @cached_property
    def _ruler(self) -> Ruler:
        return Ruler(self.sent.params, self.trained, self._infinite)

    @cached_property
    def _infinite(self) -> set[str]:
        """Buffers that hold infinity from the start, as masks do: there is no distance from them."""
        buffers = {name: x for name, x in self.sent.params.items() if name not in self.trained}
        return {name for name, x in buffers.items() if x.is_floating_point() and not finite(x)}

    def settle(self, job: Job) -> None:
        """Leave out uploads far beyond the others, cap weights, and average the rest in the cohort's order."""
        self.clients, kept = job.clients, self._bounded(job)
        weights = [float(job.examples[one.place]) if self.fed.weights == "examples" else 1.0 for one in kept]
        integers: list[Params] = []
        for one, weight, own in zip(kept, capped(weights, self.fed.cap), weights, strict=True):
            if self._add(one, job, weight):
                self.capped += weight < own
                integers.append(one.integers)
        self.waiting.clear()
        for name in integers[0] if integers else ():
            self.integers[name] = median_integers(torch.stack([own[name] for own in integers]))
        self.failed = {client: self.failed[client] for client in self.clients if client in self.failed}

    def _bounded(self, job: Job) -> list[Waiting]:
        """The uploads whose norms are within the bound."""
        bound = self.fed.bound
        for what in self.waiting[0].norms if self.waiting else ():
            norms = [one.norms[what] for one in self.waiting]
            most = bound * median_low(norms)
            if not bound or all(x <= most for x in norms):
                continue  # as nearly always: floors, which take time, are not needed
            longer = self._longer(job)
            for k, one in enumerate(self.waiting):
                floor = self._floor(what, job, one.place)
                if what == UPDATE:
                    floor = max(floor, longer[k] * middle(norms))
                if outliers(norms, bound, floor)[k]:
                    why = refusal(what, norms[k], reference(norms, floor), bound)
                    self.failed.setdefault(one.upload.client, why)
        return [one for one in self.waiting if one.upload.client not in self.failed]

    def _floor(self, what: str, job: Job, i: int) -> float:
        """The least that counts as a typical norm: see `update_floor`; of buffers all that they hold.

        A second upload is the change of a gradient, and that of the model is travel times as much.
        """
        if what == UPDATE:
            return update_floor(self._size, self.fed.bound, self._error(job.uplinks[i]))
        if what == SECOND:
            far = float(travel(Plan(*(part[i] for part in job.plan)), self.fed.task.momentum))
            moved = self._size / far if far else 0.0
            return update_floor(moved + norm(self.sent.control.values()), self.fed.bound)
        skipped = {*self.trained, *self._infinite}
        return norm(x for name, x in self.sent.params.items() if name not in skipped)

    def _longer(self, job: Job) -> list[float]:
        """s_k / (lower median of s): a client of many steps may move further than others, |w_k - w| <= s_k max |g|."""
        far = travel(job.plan, self.fed.task.momentum).tolist()
        typical = median_low([far[one.place] for one in self.waiting])
        return [far[one.place] / typical if typical else 0.0 for one in self.waiting]

    @cached_property
    def _size(self) -> float:
        """|w| over what is trained"""
        return norm(self.sent.params[name] for name in self.trained)

    def _error(self, uplink: Uplink) -> float:
        """|Q(w) - w| of what was sent: a client that sends weights is as far from it without having moved."""
        if uplink.update or not uplink.lossy:
            return 0.0
        if uplink not in self.lost:
            w = {name: self.sent.params[name][None] for name in self.trained}
            key = rng.key(self.fed.seed, "bound")[None].to(next(iter(w.values())).device)
            arrived = code(uplink, w, self.trained, key)
            self.lost[uplink] = norm(x - w[name] for name, x in arrived.items())
        return self.lost[uplink]

    def _add(self, one: Waiting, job: Job, weight: float) -> bool:
        """Add an upload to the mean; False if it cannot be used."""
        upload, i = one.upload, one.place
        try:
            extra = self._with(one, job) if job.rule.extra != "none" else {}
            if isinstance(upload.frame, Decoded):
                self.mean.take(upload.frame, weight)
            else:  # last: what is refused leaves no trace
                self.mean.add_opened(one.frame or self._open(upload, job, i), weight)
        except WireError as problem:
            self.failed[upload.client] = printable(str(problem))
            return False
        self.extra = extra
        self.stats.count(upload, job, job.uplinks[i])
        self.memory[upload.client] = upload.memory
        return True

    def skipped(self, why: str) -> "Uploads":
        """The same round with no upload used, for this reason."""
        empty = Uploads(self.fed, self.sent)
        empty.failed = {client: self.failed.get(client, why) for client in self.clients}
        empty.stats.train, empty.stats.encode = self.stats.train, self.stats.encode
        return empty

    def _open(self, upload: Upload, job: Job, i: int) -> Frame:
        assert isinstance(upload.frame, bytes)
        return self.mean.open(upload.frame, self._codec(job.uplinks[i]))

    def _codec(self, uplink: Uplink) -> Choice:
        """Codec of each tensor: a client that uses another, perhaps one that is much slower to decode, is left out."""
        return quantized(uplink, self.trained)

    def _with(self, one: Waiting, job: Job) -> Params:
        """The sum of what clients changed in their memories, with this one's change; WireError if it is not finite."""
        upload = one.upload
        if one.change is not None:
            change = one.change
        elif isinstance(upload.extra, Decoded):
            change = upload.extra.params
        elif job.rule.extra == "sent":
            change = unpack(upload.extra, like=self.sent.control, codec=EXACT)
        else:
            change = self._derive(upload, job, one.place)
        total = tree.tmap(torch.add, self.extra, change) if self.extra else change
        if isinstance(upload.frame, Decoded):  # whoever decoded it has looked
            return total
        if broken := [name for name, x in total.items() if not finite(x)]:
            raise WireError(f"{broken[0]}: the control computed from the upload is NaN or infinite")
        return total

    def _derive(self, upload: Upload, job: Job, i: int) -> Params:
        """What the client changed in its memory, worked out from its upload as the client did."""
        plan = Plan(*(part[i] for part in job.plan))
        decoded = read(upload.frame, self.sent.params, self._codec(job.uplinks[i]))
        return job.rule.finish(decoded, self.sent, {}, travel(plan, self.fed.task.momentum))[1]

    def round(self, number: int, population: int) -> Round:
        arrived = self.mean.count
        extra = tree.tmap(lambda d: d / arrived, self.extra)
        mean = self.mean.result()
        mean |= {name: x.to(mean[name]) for name, x in self.integers.items()}
        return Round(number, arrived, population, self.sent, mean, extra, self.mean.share)

    def outcome(
        self, number: int, score: Score | None, layers: dict[str, Layer], dropped: int, seconds: dict[str, float]
    ) -> Outcome:
        """The record of the round."""
        return self.stats.outcome(
            number, score, layers, seconds, self.mean.share, self.mean.count, dropped, self.failed, self.capped
        )
