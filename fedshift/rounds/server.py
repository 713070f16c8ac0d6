"""Server side of a round: uploads are checked, compared with each other, and averaged."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from statistics import median_low
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift.algorithms.base import defines
from fedshift.algorithms.bounds import (
    capped,
    median_integers,
    middle,
    outliers,
    reaches,
    reference,
    refusal,
    update_floor,
)
from fedshift.codecs.base import CHUNK, finite
from fedshift.codecs.exact import EXACT
from fedshift.core import rng, tree
from fedshift.core.names import printable
from fedshift.core.tree import norm
from fedshift.core.types import Broadcast, Decoded, DecodedUpload, GroupMean, Params, Round
from fedshift.data.cohorts import Plan, travel
from fedshift.rounds.engine import Job, Upload
from fedshift.rounds.evaluate import Score
from fedshift.rounds.federation import Federation, Layer, Outcome, State
from fedshift.rounds.policy import Report, loss_problem
from fedshift.rounds.statistics import Statistics, upload_bytes
from fedshift.rounds.uplink import Uplink, base_of, code, join_server, quantized, read, split_server
from fedshift.wire.frame import WireError
from fedshift.wire.mean import Frame, Mean, Ruler, UploadNorms
from fedshift.wire.writer import Choice, header, unpack

SMALL = CHUNK  # size of a model up to which decoded uploads are stored; larger ones are decoded twice
TINY, HUGE = 1e-9, 1e9  # limits of factors of weights
UPDATE, BUFFERS, SECOND = "update", "buffer update", "second upload"  # kinds of norms


class CheckedUpload(NamedTuple):
    """A checked upload that is stored until all uploads of the round have arrived."""

    upload: Upload
    place: int  # in the cohort
    norms: dict[str, float]  # by kind
    integers: Params
    frame: Frame | None  # None if it is opened again later, or was not a frame
    second: Params | None  # content of the second upload; None if it is read again later


class RoundUploads:
    """The uploads of one round: checks, mean and statistics.

    Norms of uploads are computed as they arrive, and the uploads are stored encoded, because outliers
    are only known when all have arrived. Then `settle` adds the others to the mean, in the order of
    the cohort.
    """

    def __init__(self, fed: Federation, state: State, sent: Broadcast, recall: Callable[[int], Params]) -> None:
        """`sent`: the broadcast as clients decode it; `recall`: memory of a client, with the server's part."""
        self.fed, self.state, self.recall = fed, state, recall
        self.sent, self.trained = sent, fed.task.trained
        self.base = base_of(fed.algorithm.client, sent.params, self.trained)
        self.mean = Mean(like=sent.params, base=self.base)
        self.small = sum(x.numel() for x in sent.params.values()) <= SMALL
        self.server, rule = state.server, fed.algorithm.server
        self.inspects = bool(rule.needs) or defines(rule, "take") or defines(rule, "weigh")
        self.groups: dict[Uplink, Mean] = {}  # if a rule needs them
        self.kept: list[DecodedUpload] = []  # if a rule needs them
        self.travels: Tensor | None = None  # of all clients of a stack, if a rule inspects uploads
        self.silent: list[int] = []  # clients that did not upload
        self.integers: Params = {}
        self.clients: Sequence[int] = ()  # the cohort, in whose order failures are reported
        self.failed: dict[int, str] = {}
        self.waiting: list[CheckedUpload] = []
        self.memory: dict[int, Params] = {}  # of the clients whose uploads are used
        self.reports: dict[int, Report] = {}  # of the same clients
        self.capped = 0
        self.lost: dict[Uplink, float] = {}  # quantization error of the broadcast
        self.stats = Statistics(fed, sent)

    def take(self, upload: Upload, job: Job, i: int) -> None:
        """Check one upload and compute its norms; a refused one is listed in `failed` with the reason."""
        self.stats.spend(upload)
        if upload.silent:
            self.silent.append(upload.client)
            return
        if upload.failure:
            self.failed[upload.client] = printable(upload.failure)
            return
        try:
            self.waiting.append(self._measured(upload, job, i))
        except WireError as problem:
            self.failed[upload.client] = printable(str(problem))

    def _measured(self, upload: Upload, job: Job, i: int) -> CheckedUpload:
        second: Params | None = None
        norms: dict[str, float] = {}
        if job.owned and (problem := loss_problem(upload.loss)):
            raise WireError(problem)
        if self.fed.second:
            norms[SECOND], second = self._second(upload.second, job, i)
        if isinstance(upload.frame, Decoded):
            frame, measured = None, self._decoded(upload.frame)
        else:
            frame = self._open(upload, job, i)
            frame = frame.decoded() if self.small else frame
            measured = self._ruler.measure(frame)
        norms = {UPDATE: measured.trained, BUFFERS: measured.buffers} | norms
        if not self.small:
            frame = second = None
        return CheckedUpload(upload, i, norms, measured.integers, frame, second)

    def _second(self, second: bytes | Decoded, job: Job, i: int) -> tuple[float, Params | None]:
        """Norm of a second upload, and its content."""
        if isinstance(second, Decoded) and second.norms is not None:
            return second.norms[0], None
        if not isinstance(second, Decoded):
            header(second).check(job.run, job.number, job.clients[i])
        content = self._read_second(second)
        return norm(content.values()), content

    def _read_second(self, second: bytes | Decoded) -> Params:
        return second.params if isinstance(second, Decoded) else unpack(second, like=self.fed.second, codec=EXACT)

    def _decoded(self, upload: Decoded) -> UploadNorms:
        integers = {name: x for name, x in upload.params.items() if not x.is_floating_point()}
        if upload.norms is not None:
            return UploadNorms(*upload.norms, integers)
        change = {name: upload.params[name] - x for name, x in self.base.items() if x.is_floating_point()}
        return UploadNorms(
            norm(x for name, x in change.items() if name in self.trained),
            norm(x for name, x in change.items() if name not in self.trained and name not in self._infinite),
            integers,
        )

    @cached_property
    def _ruler(self) -> Ruler:
        return Ruler(self.base, self.trained, self._infinite)

    @cached_property
    def _infinite(self) -> set[str]:
        """Buffers that contain infinity from the start, like masks: their change has no norm."""
        buffers = {name: x for name, x in self.sent.params.items() if name not in self.trained}
        return {name for name, x in buffers.items() if x.is_floating_point() and not finite(x)}

    def settle(self, job: Job) -> None:
        """Leave out outliers, cap weights, and average the other uploads in the order of the cohort."""
        self.clients, kept = job.clients, self._bounded(job)
        weights = [float(job.examples[upload.place]) if self.fed.weights == "examples" else 1.0 for upload in kept]
        integers: list[Params] = []
        for checked, weight, uncapped in zip(kept, capped(weights, self.fed.cap), weights, strict=True):
            if self._add(checked, job, weight):
                self.capped += weight < uncapped
                integers.append(checked.integers)
        self.waiting.clear()
        for name in integers[0] if integers else ():
            self.integers[name] = median_integers(torch.stack([tensors[name] for tensors in integers]))
        self.failed = {client: self.failed[client] for client in self.clients if client in self.failed}

    def _bounded(self, job: Job) -> list[CheckedUpload]:
        """The uploads whose norms are within the bound."""
        bound = self.fed.bound
        for kind in self.waiting[0].norms if self.waiting else ():
            norms = [checked.norms[kind] for checked in self.waiting]
            most = bound * median_low(norms)
            if not bound or all(x <= most for x in norms):
                continue  # the usual case: floors, which take time, are not needed
            reach = self._reaches(job)
            for k, checked in enumerate(self.waiting):
                floor = self._floor(kind, job, checked.place, reach[k])
                if kind == UPDATE:
                    floor = max(floor, reach[k] * middle(norms))
                if outliers(norms, bound, floor)[k]:
                    why = refusal(kind, norms[k], reference(norms, floor), bound)
                    self.failed.setdefault(checked.upload.client, why)
        return [checked for checked in self.waiting if checked.upload.client not in self.failed]

    def _floor(self, kind: str, job: Job, i: int, reach: float) -> float:
        """Lower limit of the typical norm: see `update_floor`; for buffers, their own norm.

        A second upload is a change of a gradient; the corresponding change of the model is travel times as large.
        """
        if kind == UPDATE:
            return update_floor(reach * self._size, self.fed.bound, self._error(job.uplinks[i]))
        if kind == SECOND:
            distance = float(travel(Plan(*(part[i] for part in job.plan)), self.fed.task.momentum))
            moved = self._size / distance if distance else 0.0
            return update_floor(moved + norm(self.sent.control.values()), self.fed.bound)
        skipped = {*self.trained, *self._infinite}
        return norm(x for name, x in self.sent.params.items() if name not in skipped)

    def _reaches(self, job: Job) -> list[float]:
        """Distances that the plans of the uploads' clients allow, relative to the typical one."""
        travels = travel(job.plan, self.fed.task.momentum).tolist()
        return reaches([travels[checked.place] for checked in self.waiting], self.fed.bound)

    @cached_property
    def _size(self) -> float:
        """|w| over trained tensors"""
        return norm(self.sent.params[name] for name in self.trained)

    def _error(self, uplink: Uplink) -> float:
        """|Q(w) - w| of the broadcast: the distance of a client that sends weights, without any training."""
        if uplink.update or not uplink.lossy:
            return 0.0
        if uplink not in self.lost:
            w = {name: self.sent.params[name][None] for name in self.trained}
            key = rng.key(self.fed.seed, "bound")[None].to(next(iter(w.values())).device)
            arrived = code(uplink, w, self.trained, key)
            self.lost[uplink] = norm(x - w[name] for name, x in arrived.items())
        return self.lost[uplink]

    def _add(self, checked: CheckedUpload, job: Job, weight: float) -> bool:
        """Add an upload to the mean; False if it cannot be used."""
        upload, uplink = checked.upload, job.uplinks[checked.place]
        theirs = self._remembered(upload.client) if "memory" in self.fed.algorithm.server.needs else {}
        server, factor, rule = self.server, None, self.fed.algorithm.server
        try:
            if self.inspects:
                received = self._received(checked, job, weight)
                factor = self._weighed(received) if defines(rule, "weigh") else None
                server, theirs = rule.take(received, self.sent, server, theirs)
                if theirs and "memory" not in rule.needs:
                    raise TypeError(f"{rule}: take returned a memory; a rule with one must have 'memory' in its needs")
                self._check_finite(upload, server, theirs)
            # last, so that a refused upload has no effect
            self._mix(self.mean, checked, job, weight, factor)
        except WireError as problem:
            self.failed[upload.client] = printable(str(problem))
            return False
        self.server = server
        if "groups" in rule.needs:
            group = self.groups.setdefault(uplink, Mean(like=self.sent.params, base=self.base))
            self._mix(group, checked, job, weight, factor)
        if "uploads" in rule.needs:
            self.kept.append(received)
        self.stats.count(upload, job, checked.place)
        self.memory[upload.client] = join_server(upload.memory, theirs)
        norm_of_update, length = checked.norms[UPDATE], upload_bytes(upload)
        self.reports[upload.client] = Report(upload.loss or 0.0, norm_of_update, upload.error, length)
        return True

    def _remembered(self, client: int) -> Params:
        """Memory of the server's rules about a client, on the device of the model."""
        home = next(iter(self.sent.params.values())).device
        return {name: x.to(home) for name, x in split_server(self.recall(client))[1].items()}

    def _weighed(self, upload: DecodedUpload) -> float | Mapping[str, float]:
        """Factor of the weight of an upload; WireError if it is not a positive number."""
        factor = self.fed.algorithm.server.weigh(upload, self.sent)
        if bad := [x for x in (factor.values() if isinstance(factor, Mapping) else [factor]) if not TINY <= x <= HUGE]:
            raise WireError(f"its weight is multiplied by {bad[0]:g}, which must be between {TINY:g} and {HUGE:g}")
        return factor

    def _mix(
        self, mean: Mean, checked: CheckedUpload, job: Job, weight: float, factor: float | Mapping[str, float] | None
    ) -> None:
        """Add an upload to a mean."""
        upload, factors = checked.upload, factor if isinstance(factor, Mapping) else None
        if isinstance(factor, float | int):
            weight *= factor
        if isinstance(upload.frame, Decoded):
            mean.take(upload.frame, weight, factors)
        else:
            mean.add_opened(checked.frame or self._open(upload, job, checked.place), weight, factors)

    def _received(self, checked: CheckedUpload, job: Job, weight: float) -> DecodedUpload:
        """The upload as the server's rules see it."""
        upload, i, uplink = checked.upload, checked.place, job.uplinks[checked.place]
        second = checked.second if checked.second is not None else {}
        if self.fed.second and not second:
            second = self._read_second(upload.second)
        if isinstance(upload.frame, Decoded):  # of a stack: all at once, because each transfer waits for the device
            self.travels = travel(job.plan, self.fed.task.momentum) if self.travels is None else self.travels
            distance = self.travels[i]
        else:
            distance = travel(Plan(*(part[i] for part in job.plan)), self.fed.task.momentum)
        decoded = read(upload.frame, self.base, self._codec(uplink))
        update = uplink.update or defines(self.fed.algorithm.client, "message")
        n, lossy = job.examples[i], uplink.lossy
        return DecodedUpload(
            upload.client, decoded, second, distance, n, lossy, upload.error, weight, update, upload.loss
        )

    def _check_finite(self, upload: Upload, server: Params, theirs: Params) -> None:
        """Raise WireError if the server's rules computed NaN or infinity from an upload."""
        if isinstance(upload.frame, Decoded):  # checked by the engine that decoded it
            return
        changed = [(name, x) for name, x in (server | theirs).items() if x is not self.server.get(name)]
        if broken := [name for name, x in changed if x.is_floating_point() and not finite(x)]:
            raise WireError(f"{broken[0]}: the server's state computed from the upload is NaN or infinite")

    def skipped(self, why: str) -> "RoundUploads":
        """The same round without any used upload, for this reason."""
        empty = RoundUploads(self.fed, self.state, self.sent, self.recall)
        empty.silent = self.silent
        used = (client for client in self.clients if client not in self.silent)
        empty.failed = {client: self.failed.get(client, why) for client in used}
        empty.stats.train, empty.stats.encode = self.stats.train, self.stats.encode
        return empty

    def _open(self, upload: Upload, job: Job, i: int) -> Frame:
        assert isinstance(upload.frame, bytes)
        frame = self.mean.open(upload.frame, self._codec(job.uplinks[i]))
        frame.header.check(job.run, job.number, job.clients[i])
        return frame

    def _codec(self, uplink: Uplink) -> Choice:
        """Codec of each tensor; uploads with another codec, which may be much slower to decode, are left out."""
        return quantized(uplink, self.trained)

    def round(self, number: int, population: int) -> Round:
        """Input of the server's rules."""
        mean = self.mean.result()
        mean |= {name: x.to(mean[name]) for name, x in self.integers.items()}
        message, model = dict[str, Tensor](), self.state.out.params
        messages = defines(self.fed.algorithm.client, "message")
        if messages:
            message, mean = tree.take(mean, self.trained), mean | tree.take(self.sent.params, self.trained)
        mean = self._moved(mean)
        groups = []
        for uplink, group in self.groups.items():
            result = group.result() if messages else self._moved(group.result())
            groups.append(GroupMean(result, group.weight, uplink.lossy))
        return Round(
            number,
            self.mean.count,
            population,
            self.sent,
            mean,
            self.mean.share,
            model,
            message,
            groups,
            self.kept,
            self.trained,
        )

    def _moved(self, mean: Params) -> Params:
        """w + (mean - sent): updates refer to what clients decoded, and are added to the server's model."""
        if not self.fed.downlink.lossy:
            return mean
        model, sent = self.state.out.params, self.sent.params
        return {name: model[name] + (x - sent[name]) if x.is_floating_point() else x for name, x in mean.items()}

    def outcome(
        self,
        number: int,
        score: Score | None,
        layers: dict[str, Layer],
        dropped: int,
        seconds: dict[str, float],
        bytes_down: int,
    ) -> Outcome:
        """Outcome of the round."""
        return self.stats.outcome(
            number,
            score,
            layers,
            seconds,
            self.mean.share,
            self.mean.count,
            dropped,
            self.failed,
            self.capped,
            len(self.silent),
            bytes_down,
        )
