"""The server's side of a round: uploads are folded into the mean one by one, and let go."""

import torch

from fedshift import tree
from fedshift.accumulate import Mean
from fedshift.algorithms import shorter
from fedshift.algorithms.fedshift import mean
from fedshift.codecs.base import finite
from fedshift.data.cohorts import Plan, travel
from fedshift.engines.base import Job, Upload
from fedshift.evaluate import Score
from fedshift.federation import Federation, Layer, Outcome, shift_of
from fedshift.frame import WireError
from fedshift.names import printable
from fedshift.types import Broadcast, Decoded, Params, Round
from fedshift.uplink import Uplink, quantized, read
from fedshift.wire import EXACT, fixed, size, unpack


class Uploads:
    """What arrives in one round, and what comes of it."""

    def __init__(self, fed: Federation, sent: Broadcast) -> None:
        self.fed, self.sent, self.trained = fed, sent, fed.task.trained
        self.mean = Mean(like=sent.params, base=sent.params)
        self.extra: Params = {}
        self.failed: dict[int, str] = {}
        self.taken: list[Upload] = []  # without frames and memory
        self.bytes_up = [0, 0, 0]
        self.fixed: dict[Uplink, tuple[int, int]] = {}
        self.errors: list[float] = []
        self.train = self.encode = 0.0
        self.slowest: float | None = None
        self.down = size(EXACT, sent.params) + (size(EXACT, sent.control) if sent.control else 0)

    def take(self, upload: Upload, job: Job, i: int) -> bool:
        """Whether it could be used."""
        self.train, self.encode = self.train + upload.seconds[0], self.encode + upload.seconds[1]
        if upload.failure:
            self.failed[upload.client] = printable(upload.failure)
            return False
        weight = float(job.examples[i]) if self.fed.weights == "examples" else 1.0
        try:
            extra = self._with(upload, job, i) if job.rule.extra != "none" else {}
            if isinstance(upload.frame, Decoded):
                self.mean.take(upload.frame, weight)
            else:
                self.mean.add(upload.frame, weight)  # last: what is refused leaves no trace
        except WireError as problem:
            self.failed[upload.client] = printable(str(problem))
            return False
        self.extra = extra
        self._count(upload, job.uplinks[i])
        if job.uplinks[i].lossy:
            self.errors.append(upload.error)
        if self.fed.bandwidth is not None:
            sent = (len(upload.frame) + len(upload.extra)) / float(self.fed.bandwidth[upload.client])
            self.slowest = max(upload.seconds[1] + sent, self.slowest or 0.0)
        self.taken.append(upload._replace(frame=b"", extra=b"", memory={}))
        return True

    def _count(self, upload: Upload, uplink: Uplink) -> None:
        """Bytes by what they are: codes, side data, header."""
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

    def _with(self, upload: Upload, job: Job, i: int) -> Params:
        """The sum of what clients changed in their memories, with this one's change; WireError if it is not finite."""
        if isinstance(upload.extra, Decoded):
            change = upload.extra.params
        elif job.rule.extra == "sent":
            change = unpack(upload.extra, like=self.sent.control)
        else:
            change = self._derive(upload, job, i)
        total = tree.tmap(torch.add, self.extra, change) if self.extra else change
        if isinstance(upload.frame, Decoded):  # whoever decoded it has looked
            return total
        if broken := [name for name, x in total.items() if not finite(x)]:
            raise WireError(f"{broken[0]}: the control that follows from the upload is NaN or infinite")
        return total

    def _derive(self, upload: Upload, job: Job, i: int) -> Params:
        """What the client changed in its memory, worked out from its upload as the client did."""
        plan = Plan(*(part[i] for part in job.plan))
        decoded = read(upload.frame, self.sent.params)
        return job.rule.finish(decoded, self.sent, {}, travel(plan, self.fed.task.momentum))[1]

    def round(self, number: int, population: int) -> Round:
        arrived = self.mean.count
        extra = tree.tmap(lambda d: d / arrived, self.extra)
        return Round(number, arrived, population, self.sent, self.mean.result(), extra, self.mean.share)

    def layers(self, rnd: Round, params: Params) -> dict[str, Layer]:
        rule = shift_of(self.fed.algorithm)
        share = rule.share(rnd) if rule else rnd.share
        told: dict[str, Layer] = {}
        if not self.fed.layers:
            return told
        figures = []
        for name in self.fed.layers:
            start, new = self.sent.params[name], params[name]
            figures += [mean(start), mean(rnd.mean[name]), mean(new), torch.linalg.vector_norm(new - start).double()]
        seen = torch.stack(figures).view(-1, 4).tolist()  # at once: a GPU answers slowly
        for i, (name, (began, before, after, step)) in enumerate(zip(self.fed.layers, seen, strict=True)):
            drifts = zip(*(upload.drift[i] for upload in self.taken), strict=True)
            far = [sum(column) / len(self.taken) for column in drifts]
            told[name] = Layer(before, after, shorter(share, began, before), step, *far)
        return told

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
        )
