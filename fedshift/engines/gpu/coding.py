"""What stacked clients upload: the codecs work on all of them together, and no frame is made.

The weights a server would read are decoded from the codes where they are; how long the frames would
be is known before they exist (`wire.size`), but for entropy coders. Those estimate it from counts of the codes, or,
like Zstd, cannot; then, and in rounds that check the estimate, frames are made to be measured.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.codecs.base import Codec, counts
from fedshift.core import rng
from fedshift.core.tree import over, take, tmap
from fedshift.core.types import Decoded, Params
from fedshift.data.cohorts import ROUNDING, travel
from fedshift.engines.client import histograms
from fedshift.engines.gpu.limits import flat, largest, most, refusal
from fedshift.rounds.engine import Histogram, Job, Task, Upload
from fedshift.rounds.uplink import ERROR, Sent, Uplink, code_tensor, quantized
from fedshift.wire.reader import code_count
from fedshift.wire.writer import EXACT, choose, known, pack, size

# numbers per client beside drifts: error, whether the change is finite, norms of update and of change, estimated bytes
FIGURES = 5


class Trained(NamedTuple):
    """A job whose clients have trained."""

    job: Job
    w: Params  # (K, ...)
    memory: list[Params]  # of each client, before
    own: Params  # (K, ...) the rule's part of it, {} where it has none


class Coded(NamedTuple):
    """What went into the codec and what comes out of it, for the clients of one job and one uplink."""

    owner: int  # the job
    rows: list[int]
    at: Tensor  # the same on the device
    uplink: Uplink
    u: Params  # (n, ...)
    arrived: Params  # of each tensor that was quantized
    failures: list[str]  # '' for those who can send
    reach: list[dict[str, float]]  # of u, tensor by tensor
    length: int | None = None  # of each frame; None where it depends on the codes
    estimate: Tensor | None = None  # (n,) of each length, float64; None where the coder has none


class Arrived(NamedTuple):
    """What the server reads of a job, and what there is to tell: all of it still on the device."""

    decoded: Params  # (K, ...)
    memory: Params  # the rule's, afterwards
    change: Params  # what goes up beside the weights
    figures: Tensor  # (K, 2 layers + FIGURES): drift, drift of what is decoded, and what `_arrived` says


def uploads(task: Task, trained: Sequence[Trained]) -> list[list[Upload]]:
    """The uploads of every job. The device is asked twice: who can send, and what there is to tell."""
    parts = _parts(task, trained)
    limits = torch.cat([largest(part.u) for part in parts], dim=1).cpu()  # (tensors, clients)
    each = torch.split(limits, [len(part.rows) for part in parts], dim=1)
    parts = [_checked(task, part, own) for part, own in zip(parts, each, strict=True)]
    for uplink in dict.fromkeys(part.uplink for part in parts):
        alike = [place for place, part in enumerate(parts) if part.uplink == uplink]
        for place, coded in zip(alike, _code(task, uplink, trained, [parts[place] for place in alike]), strict=True):
            parts[place] = coded
    owned = [[part for part in parts if part.owner == j] for j in range(len(trained))]
    read = [_arrived(task, one, own) for one, own in zip(trained, owned, strict=True)]
    widest = max(one.figures.shape[1] for one in read)
    told = torch.cat([F.pad(one.figures, (0, widest - one.figures.shape[1])) for one in read]).cpu()
    figures = torch.split(told, [len(one.job.clients) for one in trained])
    return [_job(task, *each) for each in zip(trained, owned, read, figures, strict=True)]


def _parts(task: Task, trained: Sequence[Trained]) -> list[Coded]:
    """u = w_k or w_k - w_t, plus what error feedback kept."""
    groups = [
        (j, uplink, [i for i, own in enumerate(one.job.uplinks) if own == uplink])
        for j, one in enumerate(trained)
        for uplink in dict.fromkeys(one.job.uplinks)
    ]
    places = torch.tensor([i for _, _, rows in groups for i in rows], device=_device(trained[0].w))
    parts = []
    for (j, uplink, rows), at in zip(groups, torch.split(places, [len(rows) for *_, rows in groups]), strict=True):
        one, start = trained[j], trained[j].job.sent.params
        whole = len(rows) == len(one.job.clients)
        u = one.w if whole else {name: x.index_select(0, at) for name, x in one.w.items()}
        u = u | {name: x.expand(len(rows), *x.shape) for name, x in start.items() if name not in u}
        if uplink.update:
            u = tmap(lambda w, start: w - start if w.is_floating_point() else w, u, start)
        if uplink.feedback:
            u = u | _fed_back(task, u, [one.memory[i] for i in rows])
        parts.append(Coded(j, rows, at, uplink, u, {}, [], []))
    return parts


def _fed_back(task: Task, u: Params, memories: Sequence[Params]) -> Params:
    """u + e, of the tensors of which there is an error to feed back."""
    found = {}
    for name in task.trained:
        kept = [memory.get(ERROR + name) for memory in memories]
        if any(e is not None for e in kept):
            zero = torch.zeros_like(u[name][0])
            found[name] = u[name] + torch.stack([zero if e is None else e.to(zero) for e in kept])
    return found


def _checked(task: Task, part: Coded, limits: Tensor) -> Coded:
    """NaN and infinity cannot travel: those who hold them fail, with zeros in place of their numbers."""
    failures = []
    codecs = {name: choose(quantized(part.uplink, task.trained), name, x[0]) for name, x in part.u.items()}
    for at, column in enumerate(limits.T.tolist()):
        broken = (name for name, far in zip(part.u, column, strict=True) if not far <= most(codecs[name]))
        failures.append(next((f"{name}: {refusal(codecs[name], part.u[name][at])}" for name in broken), ""))
    if any(failures):
        fine = torch.tensor([not failure for failure in failures], device=next(iter(part.u.values())).device)
        part = part._replace(u=tmap(lambda x: torch.where(over(fine, x), x, torch.zeros_like(x)), part.u))
    far = [dict(zip(part.u, column, strict=True)) for column in limits.T.tolist()]
    return part._replace(failures=failures, reach=far)


def _code(task: Task, uplink: Uplink, trained: Sequence[Trained], parts: Sequence[Coded]) -> list[Coded]:
    """Through the codec and back, all jobs' clients of this uplink at once, with what is known of their lengths."""
    key = None
    if uplink.codec.quantizer.random:
        key = torch.cat([rng.fold(trained[part.owner].job.plan.key[part.rows, 0], ROUNDING) for part in parts])
    device, rows = parts[0].at.device, [len(part.rows) for part in parts]
    key = None if key is None else key.to(device)
    length, variable = known(quantized(uplink, task.trained), task.params)
    estimate = torch.full((sum(rows),), float(length), dtype=torch.float64, device=device) if variable else None
    split: list[Params] = [{} for _ in parts]
    for name in task.trained:  # one after another: a stack of one tensor is large enough
        x = task.params[name]
        codec = choose(uplink.codec, name, x)
        if not codec.quantizer.lossy and (estimate is None or name not in variable):
            continue
        values, codes = code_tensor(codec, name, torch.cat([part.u[name] for part in parts]), key)
        if codec.quantizer.lossy:
            for own, arrived in zip(split, torch.split(values, rows), strict=True):
                own[name] = arrived
        if estimate is not None and name in variable:
            estimate = _longer(estimate, codec, codes, code_count(codec, x.dtype, x.shape)[1])
    each = [None] * len(parts) if estimate is None else torch.split(estimate, rows)
    return [
        part._replace(arrived=arrived, length=None if variable else length, estimate=own)
        for part, arrived, own in zip(parts, split, each, strict=True)
    ]


def _longer(lengths: Tensor, codec: Codec, codes: Sequence[Tensor], bits: int) -> Tensor | None:
    """Lengths (K,) of frames with the codes of one more tensor; None where the coder cannot tell from counts."""
    more = codec.coder.estimate(counts(codes, len(lengths), bits), bits)
    return None if more is None else lengths + more


def _arrived(task: Task, one: Trained, parts: Sequence[Coded]) -> Arrived:
    start, layers = one.job.sent.params, one.job.layers
    decoded = _decoded(one, parts)
    memory, change = _finished(task, one, decoded)
    error, length = torch.zeros((2, len(one.job.clients)), dtype=torch.float64, device=_device(one.w))
    for part in parts:
        if part.estimate is not None:
            length.index_copy_(0, part.at, part.estimate)
        if part.arrived:
            error.index_copy_(0, part.at, _relative_errors(part))
    sane = largest(change).isfinite().all(0).double() if change else torch.ones_like(error)
    drifts = [_drift(w, start, name) for w in (one.w, decoded) for name in layers]
    update = _norm([decoded[name] - start[name] for name in one.w], error)
    beside = _norm(list(change.values()), error) if one.job.rule.extra == "sent" else torch.zeros_like(error)
    return Arrived(decoded, memory, change, torch.stack([*drifts, error, sane, update, beside, length], dim=1))


def _job(task: Task, one: Trained, parts: Sequence[Coded], read: Arrived, figures: Tensor) -> list[Upload]:
    """The uploads of one job, in the order of its clients."""
    job, start, n = one.job, one.job.sent.params, len(one.job.layers)
    told = figures.tolist()
    made: dict[int, Upload] = {}
    for part in parts:
        lengths = _lengths(task, part, job, [round(told[i][2 * n + FIGURES - 1]) for i in part.rows])
        for at, i in enumerate(part.rows):
            error, sane, update, beside, _ = told[i][2 * n : 2 * n + FIGURES]
            length, estimate = lengths[at]
            failure = part.failures[at] or ("" if sane else "its control became NaN or infinite")
            if failure:
                made[i] = Upload(job.clients[i], b"", b"", one.memory[i], [], 0.0, (0.0, 0.0), failure)
                continue
            lost = part.arrived if part.uplink.feedback else {}
            made[i] = Upload(
                client=job.clients[i],
                frame=Decoded(
                    {name: read.decoded[name][i] for name in start},
                    length,
                    part.reach[at],
                    part.uplink.lossy,
                    part.uplink.update,
                    norms=(update, 0.0),  # buffers stay as they were sent
                    estimate=estimate,
                ),
                extra=Decoded(_row(read.change, i), size(EXACT, job.sent.control), norms=(beside, 0.0))
                if job.rule.extra == "sent"
                else b"",
                memory=tmap(torch.clone, _row(read.memory, i))
                | {ERROR + name: part.u[name][at] - x[at] for name, x in lost.items()},
                drift=list(zip(told[i][:n], told[i][n : 2 * n], strict=True)),
                error=error,
                seconds=(0.0, 0.0),
                histograms=_histograms(part, at, job) if job.histograms and part.uplink.lossy else (),
            )
    return [made[i] for i in range(len(job.clients))]


def _decoded(one: Trained, parts: Sequence[Coded]) -> Params:
    """The weights the server reads: (K, ...)"""
    start, clients = one.job.sent.params, len(one.job.clients)
    changed = any(part.arrived or part.uplink.update for part in parts)
    decoded = tmap(torch.clone, one.w) if changed else dict(one.w)
    for part in parts:
        for name, x in decoded.items():
            if part.uplink.update:
                x.index_copy_(0, part.at, part.arrived.get(name, part.u[name]) + start[name])
            elif name in part.arrived:
                x.index_copy_(0, part.at, part.arrived[name])
    return decoded | {name: x.expand(clients, *x.shape) for name, x in start.items() if name not in decoded}


def _finished(task: Task, one: Trained, decoded: Params) -> tuple[Params, Params]:
    """The rule's new memory, and what else the server learns: (K, ...)"""
    rule = one.job.rule
    if rule.extra == "none":
        return one.own, {}
    seen = take(decoded if rule.extra == "derived" else one.w, task.trained)
    memory, change = rule.finish(seen, one.job.sent, one.own, travel(one.job.plan, task.momentum).to(_device(seen)))
    return tmap(torch.Tensor.type_as, memory, one.own), tmap(torch.Tensor.type_as, change, one.own)


def _row(stack: Params, i: int) -> Params:
    return {name: x[i] for name, x in stack.items()}


def _histograms(part: Coded, at: int, job: Job) -> tuple[Histogram, ...]:
    u, arrived = _row(part.u, at), _row(part.arrived, at)
    return histograms(Sent(b"", u, {}, {name: u[name] - x for name, x in arrived.items()}), job.layers)


def _lengths(task: Task, part: Coded, job: Job, estimates: Sequence[int]) -> list[tuple[int, int | None]]:
    """The length of each frame, and its estimate where there is one: both are the same unless frames are made."""
    if part.length is not None:
        return [(part.length, None)] * len(part.rows)
    if part.estimate is not None and not job.frames:
        return [(estimate, estimate) for estimate in estimates]
    codec, keys = quantized(part.uplink, task.trained), rng.fold(job.plan.key[part.rows, 0], ROUNDING).cpu()

    def framed(at: int) -> int:
        return len(pack(codec, tmap(torch.Tensor.cpu, _row(part.u, at)), key=keys[at]))

    with ThreadPoolExecutor(min(len(part.rows), os.cpu_count() or 1)) as pool:  # mostly without the interpreter's lock
        lengths = list(pool.map(framed, range(len(part.rows))))
    return [(length, None if part.estimate is None else own) for length, own in zip(lengths, estimates, strict=True)]


def _relative_errors(part: Coded) -> Tensor:
    """|u - Q(u)| / |u| over all quantized tensors, for every client"""
    lost, whole = torch.zeros((2, len(part.rows)), dtype=torch.float64, device=part.at.device)
    for name, x in part.arrived.items():
        u = flat(part.u[name])
        lost += torch.linalg.vector_norm(u - flat(x), dim=1).double().square()
        whole += torch.linalg.vector_norm(u, dim=1).double().square()
    return torch.where(whole > 0, (lost / whole).sqrt(), 0.0)


def _drift(w: Params, start: Params, name: str) -> Tensor:
    """|w_k - w_t| of a layer, for every client"""
    far: Tensor = torch.linalg.vector_norm(flat(w[name] - start[name]), dim=1)
    return far.double()


def _norm(changes: Sequence[Tensor], like: Tensor) -> Tensor:
    """The norm of every client's changes (K, ...) together, added up in float64"""
    each = [torch.linalg.vector_norm(flat(x), dim=1, dtype=torch.float64) for x in changes]
    total: Tensor = torch.linalg.vector_norm(torch.stack(each), dim=0) if each else torch.zeros_like(like)
    return total


def _device(params: Params) -> torch.device:
    return next(iter(params.values())).device
