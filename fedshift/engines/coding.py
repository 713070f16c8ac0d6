"""What stacked clients upload: the codecs work on all of them together, and no frame is made.

The weights a server would read are decoded from the codes where they are; how long the frames would
be is known before they exist (`wire.size`), but for entropy coders, whose frames are made to be measured.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedshift import rng
from fedshift.codecs.base import NOT_FINITE
from fedshift.data.cohorts import ROUNDING, travel
from fedshift.engines.base import Histogram, Job, Task, Upload
from fedshift.engines.client import histograms
from fedshift.tree import over, take, tmap
from fedshift.types import Params
from fedshift.uplink import ERROR, Decoded, Sent, Uplink, code, quantized
from fedshift.wire import EXACT, choose, pack, size


class Trained(NamedTuple):
    """A job whose clients have trained."""

    job: Job
    w: Params  # (K, ...)
    memory: list[Params]  # of each client, before
    own: Params  # (K, ...) the rule's part of it, {} where it has none


class Coded(NamedTuple):
    """What went into the codec and what comes out of it, for the clients of one job and one uplink."""

    rows: list[int]
    uplink: Uplink
    u: Params  # (n, ...)
    arrived: Params  # of each tensor that was quantized
    failures: list[str]  # '' for those who can send


def uploads(task: Task, trained: Sequence[Trained]) -> list[list[Upload]]:
    """The uploads of every job."""
    parts = [(j, part) for j, one in enumerate(trained) for part in _parts(task, one)]
    limits = torch.cat([_largest(part.u) for _, part in parts], dim=1).cpu()  # (tensors, clients)
    first = 0
    for place, (j, part) in enumerate(parts):
        own = limits[:, first : first + len(part.rows)]
        first += len(part.rows)
        parts[place] = j, _checked(task, part, own)
    for uplink in dict.fromkeys(part.uplink for _, part in parts if part.uplink.lossy):
        alike = [place for place, (_, part) in enumerate(parts) if part.uplink == uplink]
        for place, arrived in zip(alike, _code(task, uplink, trained, [parts[p] for p in alike]), strict=True):
            parts[place] = parts[place][0], parts[place][1]._replace(arrived=arrived)
    return [_job(task, one, [part for owner, part in parts if owner == j]) for j, one in enumerate(trained)]


def _parts(task: Task, one: Trained) -> Iterator[Coded]:
    """u = w_k or w_k - w_t, plus what error feedback kept."""
    job, start = one.job, one.job.sent.params
    for uplink in dict.fromkeys(job.uplinks):
        rows = [i for i, own in enumerate(job.uplinks) if own == uplink]
        at = torch.tensor(rows, device=_device(one.w))
        u = one.w if len(rows) == len(job.uplinks) else {name: x.index_select(0, at) for name, x in one.w.items()}
        u = u | {name: start[name].expand(len(rows), *start[name].shape) for name in start if name not in u}
        if uplink.update:
            u = tmap(lambda w, start: w - start if w.is_floating_point() else w, u, start)
        if uplink.feedback and any(ERROR + name in one.memory[i] for name in task.trained for i in rows):
            for name in task.trained:
                if any(ERROR + name in one.memory[i] for i in rows):
                    kept = [one.memory[i].get(ERROR + name) for i in rows]
                    zero = torch.zeros_like(u[name][0])
                    u[name] = u[name] + torch.stack([zero if e is None else e.to(zero) for e in kept])
        yield Coded(rows, uplink, u, {}, [])


def _largest(u: Params) -> Tensor:
    """The largest magnitude of every tensor and client (tensors, n), NaN or infinity where it holds one."""
    return torch.stack(
        [
            torch.linalg.vector_norm(x.flatten(1).float(), torch.inf, dim=1)
            if x.is_floating_point() and x.numel()
            else torch.zeros(len(x), device=x.device)
            for x in u.values()
        ]
    )


def _checked(task: Task, part: Coded, limits: Tensor) -> Coded:
    """NaN and infinity cannot travel: those who hold them fail, with zeros in place of their numbers."""
    failures = []
    for column in limits.isfinite().T.tolist():
        broken = next((name for name, fine in zip(part.u, column, strict=True) if not fine), None)
        lossy = broken is not None and broken in task.trained and part.uplink.codec.covers(part.u[broken][0])
        why = NOT_FINITE if lossy and part.uplink.lossy else "holds NaN or infinity"
        failures.append(f"{broken}: {why}" if broken else "")
    if any(failures):
        fine = torch.tensor([not failure for failure in failures], device=next(iter(part.u.values())).device)
        part = part._replace(u=tmap(lambda x: torch.where(over(fine, x), x, torch.zeros_like(x)), part.u))
    return part._replace(failures=failures)


def _code(task: Task, uplink: Uplink, trained: Sequence[Trained], parts: list[tuple[int, Coded]]) -> list[Params]:
    """Through the codec and back, all jobs' clients of this uplink at once."""
    key = None
    if uplink.codec.quantizer.random:
        key = torch.cat([rng.fold(trained[j].job.plan.key[part.rows, 0], ROUNDING) for j, part in parts])
    names = [name for name in task.trained if choose(uplink.codec, name, task.params[name]).quantizer.lossy]
    split: list[Params] = [{} for _ in parts]
    for name in names:  # one after another: a stack of one tensor is large enough
        u = torch.cat([part.u[name] for _, part in parts])
        arrived = code(uplink, {name: u}, [name], None if key is None else key.to(u.device))[name]
        for own, rows in zip(split, torch.split(arrived, [len(part.rows) for _, part in parts]), strict=True):
            own[name] = rows
    return split


def _job(task: Task, one: Trained, parts: list[Coded]) -> list[Upload]:
    """The uploads of one job, in the order of its clients."""
    job, start = one.job, one.job.sent.params
    decoded = _decoded(one, parts)
    memory, change = _finished(task, one, decoded)
    sane = _largest(change).isfinite().all(0).tolist() if change else [True] * len(job.clients)
    drifts = torch.stack([_drift(w, start, job.layers) for w in (one.w, decoded)], dim=-1).transpose(0, 1).tolist()
    made: dict[int, Upload] = {}
    for part in parts:
        lengths, errors = _sizes(task, part, job), _relative_errors(part)
        for at, i in enumerate(part.rows):
            failure = part.failures[at] or ("" if sane[i] else "its control became NaN or infinite")
            if failure:
                made[i] = Upload(job.clients[i], b"", b"", one.memory[i], [], 0.0, (0.0, 0.0), failure)
                continue
            own = _row(change, i)
            lost = part.arrived if part.uplink.feedback else {}
            made[i] = Upload(
                client=job.clients[i],
                frame=Decoded({name: decoded[name][i] for name in start}, lengths[at], part.uplink.lossy),
                extra=Decoded(own, size(EXACT, job.sent.control)) if job.rule.extra == "sent" else b"",
                memory=tmap(torch.clone, _row(memory, i))
                | {ERROR + name: part.u[name][at] - x[at] for name, x in lost.items()},
                drift=[(drift, coded) for drift, coded in drifts[i]],
                error=errors[at],
                seconds=(0.0, 0.0),
                histograms=_histograms(part, at, job) if job.histograms and part.uplink.lossy else (),
            )
    return [made[i] for i in range(len(job.clients))]


def _decoded(one: Trained, parts: list[Coded]) -> Params:
    """The weights the server reads: (K, ...)"""
    start, clients = one.job.sent.params, len(one.job.clients)
    changed = any(part.arrived or part.uplink.update for part in parts)
    decoded = tmap(torch.clone, one.w) if changed else dict(one.w)
    for part in parts:
        rows = torch.tensor(part.rows, device=_device(one.w))
        for name, x in decoded.items():
            if part.uplink.update:
                x.index_copy_(0, rows, part.arrived.get(name, part.u[name]) + start[name])
            elif name in part.arrived:
                x.index_copy_(0, rows, part.arrived[name])
    return decoded | {name: x.expand(clients, *x.shape) for name, x in start.items() if name not in decoded}


def _finished(task: Task, one: Trained, decoded: Params) -> tuple[Params, Params]:
    """The rule's new memory, and what else the server learns: (K, ...)"""
    rule = one.job.rule
    if rule.extra == "none":
        return one.own, {}
    seen = take(decoded if rule.extra == "derived" else one.w, task.trained)
    return rule.finish(seen, one.job.sent, one.own, travel(one.job.plan, task.momentum).to(_device(seen)))


def _row(stack: Params, i: int) -> Params:
    return {name: x[i] for name, x in stack.items()}


def _histograms(part: Coded, at: int, job: Job) -> tuple[Histogram, ...]:
    u, arrived = _row(part.u, at), _row(part.arrived, at)
    return histograms(Sent(b"", u, {}, {name: u[name] - x for name, x in arrived.items()}), job.layers)


def _sizes(task: Task, part: Coded, job: Job) -> list[int]:
    """How long each frame would be."""
    codec, like = quantized(part.uplink, task.trained), {name: x[0] for name, x in part.u.items()}
    try:
        return [size(codec, like)] * len(part.rows)
    except ValueError:  # it depends on the codes
        keys = rng.fold(job.plan.key[part.rows, 0], ROUNDING).cpu()
        frames = [
            pack(codec, {name: x[at].cpu() for name, x in part.u.items()}, key=keys[at]) for at in range(len(part.rows))
        ]
        return [len(frame) for frame in frames]


def _relative_errors(part: Coded) -> list[float]:
    """|u - Q(u)| / |u| over all quantized tensors, for every client"""
    if not part.arrived:
        return [0.0] * len(part.rows)
    lost, whole = torch.zeros((2, len(part.rows)), dtype=torch.float64, device=_device(part.u))
    for name, x in part.arrived.items():
        u = part.u[name].flatten(1)
        lost += torch.linalg.vector_norm(u - x.flatten(1), dim=1).double().square()
        whole += torch.linalg.vector_norm(u, dim=1).double().square()
    errors: list[float] = torch.where(whole > 0, (lost / whole).sqrt(), 0.0).tolist()
    return errors


def _drift(w: Params, start: Params, layers: Sequence[str]) -> Tensor:
    """|w_k - w_t| of every layer and client: (layers, K)"""
    if not layers:
        return torch.zeros(0)
    return torch.stack([torch.linalg.vector_norm((w[name] - start[name]).flatten(1).float(), dim=1) for name in layers])


def _device(params: Params) -> torch.device:
    return next(iter(params.values())).device
