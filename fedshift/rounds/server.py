"""The server's side of a round: uploads are checked, measured against each other, and averaged."""

import math
from collections.abc import Sequence
from functools import cached_property
from statistics import median_low
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.algorithms import Filters, Shift
from fedshift.algorithms.bounds import capped, median_integers, middle, outliers, reference, refusal, update_floor
from fedshift.algorithms.fedshift import shortening
from fedshift.codecs.base import CHUNK, finite
from fedshift.core import rng, tree
from fedshift.core.names import printable
from fedshift.core.tree import norm
from fedshift.core.types import Broadcast, Decoded, Params, Round
from fedshift.data.cohorts import Plan, travel
from fedshift.rounds.engine import Job, Upload
from fedshift.rounds.evaluate import Score
from fedshift.rounds.federation import Federation, Layer, Outcome, shift_of
from fedshift.rounds.uplink import Uplink, code, quantized, read
from fedshift.wire.frame import WireError
from fedshift.wire.mean import Frame, Mean, Measured, Ruler
from fedshift.wire.writer import EXACT, Choice, fixed, size, unpack

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
        self.taken: list[Upload] = []  # without frames and memory
        self.memory: dict[int, Params] = {}  # of the clients whose uploads were taken
        self.capped = 0
        self.bytes_up = [0, 0, 0]
        self.estimated: int | None = None  # bytes, once there is an upload of estimated length
        self.framed = False  # whether such uploads were framed to check the estimate
        self.fixed: dict[Uplink, tuple[int, int]] = {}
        self.lost: dict[Uplink, float] = {}  # what coding loses of the model that was sent
        self.errors: list[float] = []
        self.train = self.encode = 0.0
        self.slowest: float | None = None
        self.down = size(EXACT, sent.params) + (size(EXACT, sent.control) if sent.control else 0)

    def take(self, upload: Upload, job: Job, i: int) -> None:
        """Check and measure one upload; what is refused is in `failed`, with the reason."""
        self.train, self.encode = self.train + upload.seconds[0], self.encode + upload.seconds[1]
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
        self._count(upload, job, job.uplinks[i])
        if job.uplinks[i].lossy:
            self.errors.append(upload.error)
        if self.fed.bandwidth is not None:
            sent = (len(upload.frame) + len(upload.extra)) / float(self.fed.bandwidth[upload.client])
            self.slowest = max(upload.seconds[1] + sent, self.slowest or 0.0)
        self.memory[upload.client] = upload.memory
        self.taken.append(upload._replace(frame=b"", extra=b"", memory={}))
        return True

    def skipped(self, why: str) -> "Uploads":
        """The same round with no upload used, for this reason."""
        empty = Uploads(self.fed, self.sent)
        empty.failed = {client: self.failed.get(client, why) for client in self.clients}
        empty.train, empty.encode = self.train, self.encode
        return empty

    def _count(self, upload: Upload, job: Job, uplink: Uplink) -> None:
        """Bytes by what they are: codes, side data, header; and the total by estimates, where there are some."""
        before, estimate = sum(self.bytes_up), upload.frame.estimate if isinstance(upload.frame, Decoded) else None
        if self.estimated is not None or estimate is not None:
            own = len(upload.frame) if estimate is None else estimate
            self.estimated = (before if self.estimated is None else self.estimated) + own + len(upload.extra)
            self.framed = job.frames
        if uplink not in self.fixed:
            self.fixed[uplink] = fixed(quantized(uplink, self.trained), self.sent.params)
        about, side = self.fixed[uplink]
        self.bytes_up[0] += len(upload.frame) - about - side
        self.bytes_up[1] += side
        self.bytes_up[2] += about
        if upload.extra:
            about, _ = fixed(EXACT, self.sent.control)
            self.bytes_up[0] += len(upload.extra) - about
            self.bytes_up[2] += about

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
            raise WireError(f"{broken[0]}: the control that follows from the upload is NaN or infinite")
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

    def layers(self, rnd: Round, out: Broadcast, server: Params, before: Params) -> tuple[dict[str, Layer], str]:
        """Statistics of each layer, and the name of a tensor that the server's rules made infinite, or ''."""
        rule = shift_of(self.fed.algorithm) or Shift(max_share=1.0)
        share, known, figures = rule.share_in(rnd), self.fed.filters, list[Tensor]()
        for name in self.fed.layers:
            start, new = self.sent.params[name], out.params[name]
            means = [known.get(name, Filters()).means(w) for w in (start, rnd.mean[name], new)]
            whole = [m.mean() for m in means]  # filters of a layer have equally many weights
            of_parts = means if rule.per == "filter" else whole
            figures += [whole[1], whole[2], shortening(share, of_parts[0], of_parts[1])]
            figures += [torch.linalg.vector_norm(new - start).double(), rms(means[1]), rms(means[2])]
        checked = self._checked(out, server, before)
        figures += [largest(x) for pair in checked.values() for x in pair]
        seen = iter(torch.stack(figures).tolist())  # at once: a GPU answers slowly
        told: dict[str, Layer] = {}
        for i, name in enumerate(self.fed.layers):
            before_shift, after, gain, step, *spread = (next(seen) for _ in range(6))
            drifts = zip(*(upload.drift[i] for upload in self.taken), strict=True)
            far = [sum(column) / len(self.taken) for column in drifts]
            told[name] = Layer(before_shift, after, gain > 0, step, *far, *spread)
        reach = {name: [next(seen) for _ in pair] for name, pair in checked.items()}
        broken = (n for n, (new, *old) in reach.items() if not math.isfinite(new) and all(map(math.isfinite, old)))
        return told, next(broken, "")

    def _checked(self, out: Broadcast, server: Params, before: Params) -> dict[str, tuple[Tensor, ...]]:
        """Tensors that must be finite, each with what it was before, where that may have been infinite."""
        trees = (("", out.params, self.sent.params), ("control ", out.control, self.sent.control))
        return {
            prefix + name: (x, old[name]) if name in old and (prefix or name not in self.trained) else (x,)
            for prefix, new, old in (*trees, ("server state ", server, before))
            for name, x in new.items()
            if x.is_floating_point() and x.numel()
        }

    def outcome(
        self, number: int, score: Score | None, told: dict[str, Layer], dropped: int, seconds: dict[str, float]
    ) -> Outcome:
        errors, sent_to = self.errors, len(self.taken) + len(self.failed) + dropped
        codes, side, header = self.bytes_up
        return Outcome(
            number=number,
            score=score,
            share=self.mean.share,
            layers=told,
            error=sum(errors) / len(errors) if errors else 0.0,
            bytes_up=(codes, side, header),
            bytes_down=sent_to * self.down,
            arrived=self.mean.count,
            dropped=dropped,
            failed=self.failed,
            seconds={"train": self.train, "encode": self.encode, "round": sum(seconds.values())} | seconds,
            uplink_seconds=self.slowest,
            histograms=next((upload.histograms for upload in self.taken if upload.histograms), ()),
            capped=self.capped,
            bytes_estimated=self.estimated,
            bytes_framed=codes + side + header if self.framed else None,
        )


def rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def largest(x: Tensor) -> Tensor:
    """The largest magnitude, NaN or infinite where x holds one."""
    far: Tensor = torch.linalg.vector_norm(x, math.inf)
    return far.double()
