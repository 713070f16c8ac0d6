"""Statistics of a round: bytes, times, errors, and values of each layer."""

import math
from functools import cached_property

import torch
from torch import Tensor

from fedshift.algorithms import Filters, Shift
from fedshift.algorithms.fedshift import shortening
from fedshift.codecs.exact import EXACT
from fedshift.core.types import Broadcast, Decoded, Params, Round
from fedshift.rounds.engine import Job, Upload
from fedshift.rounds.evaluate import Score
from fedshift.rounds.federation import Federation, Layer, Outcome, UsedUplink, shift_of
from fedshift.rounds.policy import LOSS_BYTES, label
from fedshift.rounds.uplink import Uplink, quantized
from fedshift.wire.frame import head
from fedshift.wire.writer import FrameSize


class Statistics:
    """Sums over the uploads of one round."""

    def __init__(self, fed: Federation, sent: Broadcast) -> None:
        self.fed, self.sent = fed, sent
        self.used: list[Upload] = []  # uploads in the mean, without frames and memory
        self.bytes_up = [0, 0, 0]  # codes, side data, header
        self.estimated: int | None = None  # bytes; None without uploads of estimated length
        self.framed = False  # True if such uploads were also framed to check the estimate
        self.sizes: dict[Uplink, FrameSize] = {}
        self.errors: list[float] = []
        self.train = self.encode = 0.0  # seconds, of all uploads
        self.slowest: float | None = None  # seconds of encoding and transfer
        self.uplinks: list[UsedUplink] = []  # of a run with a policy

    def spend(self, upload: Upload) -> None:
        """Add the time of an upload, used or not."""
        self.train, self.encode = self.train + upload.seconds[0], self.encode + upload.seconds[1]

    def count(self, upload: Upload, job: Job, i: int) -> None:
        """Add the upload of the i-th client, which is used in the mean."""
        uplink = job.uplinks[i]
        self.used.append(upload._replace(frame=b"", second=b"", memory={}))
        self._count_bytes(upload, job, i)
        if uplink.lossy:
            self.errors.append(upload.error)
        length = upload_bytes(upload)
        if self.fed.bandwidth is not None:
            sent = length / float(self.fed.bandwidth[upload.client])
            self.slowest = max(upload.seconds[1] + sent, self.slowest or 0.0)
        if self.fed.policy is not None:
            bits = 8 * length / self.fed.values
            self.uplinks.append(UsedUplink(upload.client, label(uplink.codec), length, bits))

    def _count_bytes(self, upload: Upload, job: Job, i: int) -> None:
        """Count bytes of codes, side data and header, and the total with estimates."""
        before, estimate = sum(self.bytes_up), upload.frame.estimate if isinstance(upload.frame, Decoded) else None
        if self.estimated is not None or estimate is not None:
            length = len(upload.frame) if estimate is None else estimate
            length += len(upload.second) + _loss_bytes(upload)
            self.estimated = (before if self.estimated is None else self.estimated) + length
            self.framed = job.frames
        uplink, start = job.uplinks[i], len(head(job.header(i)))
        if uplink not in self.sizes:
            self.sizes[uplink] = FrameSize(quantized(uplink, self.fed.task.trained), self.sent.params)
        header, side = self.sizes[uplink].overhead + start, self.sizes[uplink].side
        self.bytes_up[0] += len(upload.frame) - header - side
        self.bytes_up[1] += side + _loss_bytes(upload)
        self.bytes_up[2] += header
        if upload.second:
            header = self._second_overhead + start
            self.bytes_up[0] += len(upload.second) - header
            self.bytes_up[2] += header

    @cached_property
    def _second_overhead(self) -> int:
        return FrameSize(EXACT, self.fed.second).overhead

    def layers(self, rnd: Round, out: Broadcast, server: Params, before: Params) -> tuple[dict[str, Layer], str]:
        """Statistics of each layer, and the name of a tensor that the server's rules made NaN or infinite, or ''."""
        rule = shift_of(self.fed.algorithm) or Shift(max_share=1.0)
        share, known, figures = rule.share_in(rnd), self.fed.filters, list[Tensor]()
        for name in self.fed.layers:
            start, new = rnd.model[name], out.params[name]
            means = [known.get(name, Filters()).means(w) for w in (start, rnd.mean[name], new)]
            whole = [m.mean() for m in means]  # filters of a layer have equally many weights
            of_parts = means if rule.per == "filter" else whole
            figures += [whole[1], whole[2], shortening(share, of_parts[0], of_parts[1])]
            figures += [torch.linalg.vector_norm(new - start).double(), rms(means[1]), rms(means[2])]
        checked = self._checked(out, server, before)
        figures += [largest(x) for pair in checked.values() for x in pair]
        values = iter(torch.stack(figures).tolist())  # one transfer, because each synchronizes with the GPU
        stats: dict[str, Layer] = {}
        for i, name in enumerate(self.fed.layers):
            before_shift, after, gain, step, *spread = (next(values) for _ in range(6))
            drifts = zip(*(upload.drift[i] for upload in self.used), strict=True)
            mean_drifts = [sum(column) / len(self.used) for column in drifts]
            stats[name] = Layer(before_shift, after, gain > 0, step, *mean_drifts, *spread)
        reach = {name: [next(values) for _ in pair] for name, pair in checked.items()}
        broken = (n for n, (new, *old) in reach.items() if not math.isfinite(new) and all(map(math.isfinite, old)))
        return stats, next(broken, "")

    def _checked(self, out: Broadcast, server: Params, before: Params) -> dict[str, tuple[Tensor, ...]]:
        """Tensors that must be finite, with their previous values if those could be infinite."""
        trees = (("", out.params, self.sent.params), ("control ", out.control, self.sent.control))
        return {
            prefix + name: (x, old[name]) if name in old and (prefix or name not in self.fed.task.trained) else (x,)
            for prefix, new, old in (*trees, ("server state ", server, before))
            for name, x in new.items()
            if x.is_floating_point() and x.numel()
        }

    def outcome(
        self,
        number: int,
        score: Score | None,
        layers: dict[str, Layer],
        seconds: dict[str, float],
        share: float,
        arrived: int,
        dropped: int,
        failed: dict[int, str],
        capped: int,
        silent: int,
        bytes_down: int,
    ) -> Outcome:
        """Outcome of the round; `dropped` clients dropped out before they uploaded, `silent` ones chose not to."""
        errors = self.errors
        codes, side, header = self.bytes_up
        return Outcome(
            number=number,
            score=score,
            share=share,
            layers=layers,
            error=sum(errors) / len(errors) if errors else 0.0,
            bytes_up=(codes, side, header),
            bytes_down=bytes_down,
            arrived=arrived,
            dropped=dropped,
            failed=failed,
            seconds={"train": self.train, "encode": self.encode, "round": sum(seconds.values())} | seconds,
            uplink_seconds=self.slowest,
            histograms=next((upload.histograms for upload in self.used if upload.histograms), ()),
            capped=capped,
            silent=silent,
            bytes_estimated=self.estimated,
            bytes_framed=codes + side + header if self.framed else None,
            uplinks=tuple(self.uplinks),
        )


def upload_bytes(upload: Upload) -> int:
    """Bytes of all that a client sends in a round."""
    return len(upload.frame) + len(upload.second) + _loss_bytes(upload)


def _loss_bytes(upload: Upload) -> int:
    """Bytes of the loss that a client reports with its upload."""
    return 0 if upload.loss is None else LOSS_BYTES


def rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def largest(x: Tensor) -> Tensor:
    """Largest magnitude, NaN or infinite if x contains NaN or infinity."""
    norm: Tensor = torch.linalg.vector_norm(x, math.inf)
    return norm.double()
