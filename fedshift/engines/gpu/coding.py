"""Uploads of stacked clients: codecs are applied to all clients at once, without making frames.

The weights that a server would decode are computed from the codes on the device. The length of a frame is known in
advance (`wire.size`), except with entropy coders: these estimate it from counts of the codes or, like Zstd, cannot.
For the latter, and in rounds that check the estimate, frames are made to measure their lengths.
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fedshift.algorithms.base import defines
from fedshift.codecs.base import NOT_FINITE
from fedshift.codecs.codec import Codec, counts
from fedshift.codecs.exact import EXACT
from fedshift.core import rng
from fedshift.core.tree import over, take, tmap
from fedshift.core.types import Decoded, Params
from fedshift.data.cohorts import ROUNDING
from fedshift.rounds.engine import Job, Task, Upload
from fedshift.rounds.uplink import (
    Uplink,
    base_of,
    code_tensor,
    join_memory,
    lost,
    message,
    quantized,
    received,
    split_memory,
)
from fedshift.rounds.upload_stats import drift, flat, histograms, stacked_relative_errors
from fedshift.wire.frame import Header, head
from fedshift.wire.writer import FrameSize, Writer, chosen, prepared, size

# statistics per client besides drifts: error, 1 if the change is finite, norms of update and of change, estimated bytes
STATS = 5


class TrainedJob(NamedTuple):
    """A job after training."""

    job: Job
    w: Params  # (K, ...) trained tensors
    upload: Params  # (K, ...) the same, or messages of the clients' rule
    memory: list[Params]  # of each client, before the round
    rule_memory: Params  # (K, ...) the rule's part of the memory, {} if it has none
    travel: Tensor  # (K,), or () if the rule does not use it
    sends: list[bool]  # False for a client that does not upload

    def base(self, task: Task) -> Params:
        return base_of(self.job.rule, self.job.sent.params, task.trained)


def trained_job(job: Job, w: Params, memory: list[Params], rule_memory: Params, distance: Tensor) -> TrainedJob:
    """Messages of the clients of a job after training."""
    rule, sent = job.rule, job.sent
    upload = rule.message(w, sent, rule_memory, distance) if defines(rule, "message") else w
    sends = [True] * len(job.clients)
    if defines(rule, "sends"):
        sends = rule.sends(w, sent, rule_memory).expand(len(job.clients)).tolist()
    return TrainedJob(job, w, upload, memory, rule_memory, distance, sends)


class CodedGroup(NamedTuple):
    """Input and output of the codec, for the clients of one job and one uplink."""

    owner: int  # index of the job
    rows: list[int]  # indices of the clients in the job
    at: Tensor  # the same on the device
    uplink: Uplink
    u: Params  # (n, ...) messages
    fed_back: bool  # True if messages contain errors of earlier rounds
    arrived: Params  # decoded values of each quantized tensor
    failures: list[str]  # reason per client; '' if the message can be sent
    reach: list[dict[str, float]]  # largest magnitude of each tensor of u
    length: int | None = None  # of each frame, without its header; None if it depends on the codes
    estimate: Tensor | None = None  # (n,) the same, estimated, float64; None if the coder has no estimate


class DecodedJob(NamedTuple):
    """Decoded uploads of a job and their statistics, all on the device."""

    decoded: Params  # (K, ...)
    rule_memory: Params  # after the round
    second: Params  # second uploads
    stats: Tensor  # (K, 2 layers + STATS): drift before and after coding of each layer, then the others


def uploads(task: Task, trained: Sequence[TrainedJob]) -> list[list[Upload]]:
    """Uploads of each job. There are two transfers from the device: magnitudes of messages, and statistics."""
    parts = _parts(task, trained)
    limits = torch.cat([_largest(part.u) for part in parts], dim=1).cpu()  # (tensors, clients)
    each = torch.split(limits, [len(part.rows) for part in parts], dim=1)
    parts = [_checked(task, part, part_limits) for part, part_limits in zip(parts, each, strict=True)]
    for stack in dict.fromkeys(part.uplink.codec.stack for part in parts):
        places = [place for place, part in enumerate(parts) if part.uplink.codec.stack == stack]
        for place, coded in zip(places, _code(task, trained, [parts[place] for place in places]), strict=True):
            parts[place] = coded
    by_job = [[part for part in parts if part.owner == j] for j in range(len(trained))]
    arrived = [_arrived(task, stack, job_parts) for stack, job_parts in zip(trained, by_job, strict=True)]
    widest = max(job.stats.shape[1] for job in arrived)
    stats = torch.cat([F.pad(job.stats, (0, widest - job.stats.shape[1])) for job in arrived]).cpu()
    job_stats = torch.split(stats, [len(stack.job.clients) for stack in trained])
    return [_job(task, *job) for job in zip(trained, by_job, arrived, job_stats, strict=True)]


def _parts(task: Task, trained: Sequence[TrainedJob]) -> list[CodedGroup]:
    """Messages of the clients of each job and uplink."""
    groups = [
        (j, uplink, [i for i, other in enumerate(stack.job.uplinks) if other == uplink])
        for j, stack in enumerate(trained)
        for uplink in dict.fromkeys(stack.job.uplinks)
    ]
    bases = [stack.base(task) for stack in trained]
    places = torch.tensor([i for _, _, rows in groups for i in rows], device=_device(trained[0].w))
    parts = []
    for (j, uplink, rows), at in zip(groups, torch.split(places, [len(rows) for *_, rows in groups]), strict=True):
        stack, start = trained[j], bases[j]
        whole = len(rows) == len(stack.job.clients)
        w = stack.upload if whole else {name: x.index_select(0, at) for name, x in stack.upload.items()}
        w = w | {name: x.expand(len(rows), *x.shape) for name, x in start.items() if name not in w}
        errors = _errors(task, w, [stack.memory[i] for i in rows]) if uplink.feedback else {}
        parts.append(CodedGroup(j, rows, at, uplink, message(uplink, w, start, errors), bool(errors), {}, [], []))
    return parts


def _errors(task: Task, w: Params, memories: Sequence[Params]) -> Params:
    """Errors to feed back (n, ...), 0 for a client without one; tensors without any error are left out."""
    errors = [split_memory(memory)[1] for memory in memories]
    stacked = {}
    for name in task.trained:
        if any(name in client for client in errors):
            zero = torch.zeros_like(w[name][0])
            stacked[name] = torch.stack([client[name].to(zero) if name in client else zero for client in errors])
    return stacked


def _checked(task: Task, part: CodedGroup, limits: Tensor) -> CodedGroup:
    """Record failures of clients whose message contains NaN or infinity, and replace the message by zeros."""
    failures = []
    codecs = chosen(quantized(part.uplink, task.trained), {name: x[0] for name, x in part.u.items()})
    for at, column in enumerate(limits.T.tolist()):
        broken = (
            name for name, largest in zip(part.u, column, strict=True) if not largest <= codecs[name].quantizer.most
        )
        failures.append(next((f"{name}: {_refusal(codecs[name], part.u[name][at])}" for name in broken), ""))
    if any(failures):
        fine = torch.tensor([not failure for failure in failures], device=next(iter(part.u.values())).device)
        part = part._replace(u=tmap(lambda x: torch.where(over(fine, x), x, torch.zeros_like(x)), part.u))
    reach = [dict(zip(part.u, column, strict=True)) for column in limits.T.tolist()]
    return part._replace(failures=failures, reach=reach)


def _largest(u: Params) -> Tensor:
    """Largest magnitude of each tensor and client (tensors, n); NaN or infinity if a tensor contains one."""
    return torch.stack(
        [
            torch.linalg.vector_norm(flat(x), torch.inf, dim=1).double()
            if x.is_floating_point() and x.numel()
            else torch.zeros(len(x), dtype=torch.float64, device=x.device)
            for x in u.values()
        ]
    )


def _refusal(codec: Codec, x: Tensor) -> str:
    """Reason why the codec refuses a tensor."""
    if not codec.quantizer.lossy:
        return "contains NaN or infinity"
    try:
        codec.encode(x[None], torch.zeros(1, dtype=torch.int64))
    except ValueError as problem:
        return str(problem)
    return NOT_FINITE


def _code(task: Task, trained: Sequence[TrainedJob], parts: Sequence[CodedGroup]) -> list[CodedGroup]:
    """Encode and decode messages whose codecs can be stacked, of all jobs at once; set lengths or their estimates."""
    codecs = [chosen(quantized(part.uplink, task.trained), take(task.params, task.trained)) for part in parts]
    scales = [prepared(chosen_codecs, part.u) for chosen_codecs, part in zip(codecs, parts, strict=True)]
    key = None
    if parts[0].uplink.codec.random:
        key = torch.cat([rng.fold(trained[part.owner].job.plan.key[part.rows, 0], ROUNDING) for part in parts])
        key = key.to(parts[0].at.device)
    sizes, rows = FrameSize(quantized(parts[0].uplink, task.trained), task.params), [len(part.rows) for part in parts]
    buffers = {name: at for at, names in enumerate(sizes.variable) for name in names}
    counted: dict[int, Tensor] = {}
    split: list[Params] = [{} for _ in parts]
    for name, codec in codecs[0].items():  # one tensor at a time: its stack is large enough
        if not codec.quantizer.lossy and name not in buffers:
            continue
        given = [found.get(by_name[name]) for found, by_name in zip(scales, codecs, strict=True)]
        scale = None if given[0] is None else torch.cat([x for x in given if x is not None])
        u = torch.cat([part.u[name] for part in parts]) if len(parts) > 1 else parts[0].u[name]
        values, codes = code_tensor(codec, name, u, key, scale)
        if codec.quantizer.lossy:
            for decoded, arrived in zip(split, torch.split(values, rows), strict=True):
                decoded[name] = arrived
        if name in buffers and task.params[name].numel():
            at = buffers[name]
            found = counts(codes, sum(rows), sizes.levels[at])
            counted[at] = counted[at] + found if at in counted else found
    estimate = _estimate(sizes, counted, sum(rows)) if sizes.variable else None
    each = [None] * len(parts) if estimate is None else torch.split(estimate, rows)
    return [
        part._replace(arrived=arrived, length=None if sizes.variable else sizes.fixed, estimate=part_estimate)
        for part, arrived, part_estimate in zip(parts, split, each, strict=True)
    ]


def _estimate(sizes: FrameSize, counted: dict[int, Tensor], clients: int) -> Tensor | None:
    """Estimated lengths (K,) of frames without their headers; None if a coder has no estimate."""
    device = next(iter(counted.values())).device
    total = torch.full((clients,), float(sizes.fixed), dtype=torch.float64, device=device)
    for at, found in counted.items():
        length = sizes.codecs[sizes.variable[at][0]].coder.estimate(found)
        if length is None:
            return None
        total += length + 1 + sum((length >= 1 << bits).double() for bits in (7, 14, 21))  # the length as a varint
    return total


def _arrived(task: Task, stack: TrainedJob, parts: Sequence[CodedGroup]) -> DecodedJob:
    """Decode the uploads of a job and compute their statistics."""
    start, layers = stack.base(task), stack.job.layers
    decoded = _decoded(task, stack, parts)
    rule_memory, second = _finished(task, stack, decoded)
    error, length = torch.zeros((2, len(stack.job.clients)), dtype=torch.float64, device=_device(stack.w))
    for part in parts:
        if part.estimate is not None:
            length.index_copy_(0, part.at, part.estimate)
        if part.arrived:
            error.index_copy_(0, part.at, stacked_relative_errors(part.u, part.arrived))
    valid = torch.ones_like(error)
    for made in (rule_memory if defines(stack.job.rule, "remember") else {}, second):
        valid = valid * _largest(made).isfinite().all(0).double() if made else valid
    before = [drift(stack.upload[name], start[name]).double() for name in layers]
    after = {name: _norms(decoded[name] - start[name]) for name in stack.w}
    further = _total([_norms(x) for x in second.values()]) if second else torch.zeros_like(error)
    after_layers = [after[name] for name in layers]
    stats = torch.stack([*before, *after_layers, error, valid, _total(after.values()), further, length], dim=1)
    return DecodedJob(decoded, rule_memory, second, stats)


def _job(
    task: Task, stack: TrainedJob, parts: Sequence[CodedGroup], arrived: DecodedJob, stats: Tensor
) -> list[Upload]:
    """Uploads of one job, in the order of its clients."""
    job, start, n = stack.job, stack.job.sent.params, len(stack.job.layers)
    rows = stats.tolist()
    result: dict[int, Upload] = {}
    for part in parts:
        lengths = _lengths(task, part, job, [round(rows[i][2 * n + STATS - 1]) for i in part.rows])
        for at, i in enumerate(part.rows):
            error, valid, update, second, _ = rows[i][2 * n : 2 * n + STATS]
            length, estimate = lengths[at]
            failure = part.failures[at] or ("" if valid else "its memory or second upload is NaN or infinite")
            if not stack.sends[i]:
                result[i] = Upload(job.clients[i], b"", b"", stack.memory[i], [], 0.0, (0.0, 0.0), silent=True)
                continue
            if failure:
                result[i] = Upload(job.clients[i], b"", b"", stack.memory[i], [], 0.0, (0.0, 0.0), failure)
                continue
            counted = job.histograms and part.uplink.lossy
            u = _row(part.u, at) if part.uplink.feedback or counted else {}
            errors = lost(u, _row(part.arrived, at)) if u else {}
            result[i] = Upload(
                client=job.clients[i],
                frame=Decoded(
                    {name: arrived.decoded[name][i] for name in start},
                    length,
                    part.reach[at],
                    part.uplink.lossy,
                    part.uplink.update,
                    norms=(update, 0.0),  # buffers do not change
                    estimate=estimate,
                ),
                second=_second(_row(arrived.second, i), second, job.header(i)) if arrived.second else b"",
                memory=join_memory(
                    tmap(torch.clone, _row(arrived.rule_memory, i)),
                    errors if part.uplink.feedback else split_memory(stack.memory[i])[1],
                ),
                drift=list(zip(rows[i][:n], rows[i][n : 2 * n], strict=True)),
                error=error,
                seconds=(0.0, 0.0),
                histograms=histograms(u, errors, job.layers) if counted else (),
            )
    return [result[i] for i in range(len(job.clients))]


def _second(content: Params, norm: float, header: Header) -> Decoded:
    return Decoded(content, size(EXACT, content, header), norms=(norm, 0.0))


def _decoded(task: Task, stack: TrainedJob, parts: Sequence[CodedGroup]) -> Params:
    """Weights or messages that the server decodes: (K, ...)"""
    start, clients = stack.base(task), len(stack.job.clients)
    changed = [part for part in parts if part.arrived or part.uplink.update or part.fed_back]
    values = [received(part.uplink.update, take(part.u, stack.w) | part.arrived, start) for part in changed]
    if changed and len(parts) == 1:  # all clients have the same uplink
        decoded = values[0]
    else:
        decoded = tmap(torch.clone, stack.upload) if changed else dict(stack.upload)
        for part, part_values in zip(changed, values, strict=True):
            for name, x in part_values.items():
                decoded[name].index_copy_(0, part.at, x)
    return decoded | {name: x.expand(clients, *x.shape) for name, x in start.items() if name not in decoded}


def _finished(task: Task, stack: TrainedJob, decoded: Params) -> tuple[Params, Params]:
    """New memory of the rule, and the second uploads: (K, ...)"""
    rule, sent, memory, second = stack.job.rule, stack.job.sent, stack.rule_memory, dict[str, Tensor]()
    if defines(rule, "second"):
        second = rule.second(stack.w, sent, memory, stack.travel)
    if defines(rule, "remember"):
        after = rule.remember(take(decoded, task.trained), stack.w, sent, memory, stack.travel)
        memory = tmap(torch.Tensor.type_as, after, memory)
    return memory, tmap(torch.Tensor.type_as, second, stack.w) if second else {}


def _row(params: Params, i: int) -> Params:
    return {name: x[i] for name, x in params.items()}


def _lengths(task: Task, part: CodedGroup, job: Job, estimates: Sequence[int]) -> list[tuple[int, int | None]]:
    """Length of each frame, and its estimate or None; both are equal unless frames are made."""
    headers = [job.header(i) for i in part.rows]
    heads = [len(head(header)) for header in headers]
    if part.length is not None:
        return [(part.length + start, None) for start in heads]
    estimates = [estimate + start for estimate, start in zip(estimates, heads, strict=True)]
    if part.estimate is not None and not job.frames:
        return [(estimate, estimate) for estimate in estimates]
    keys = rng.fold(job.plan.key[part.rows, 0], ROUNDING).cpu()
    writer = Writer(quantized(part.uplink, task.trained), tmap(lambda x: x[0], part.u))

    def framed(at: int) -> int:
        return len(writer.pack(tmap(torch.Tensor.cpu, _row(part.u, at)), headers[at], keys[at]))

    with ThreadPoolExecutor(min(len(part.rows), os.cpu_count() or 1)) as pool:  # packing mostly releases the GIL
        lengths = list(pool.map(framed, range(len(part.rows))))
    if part.estimate is None:
        return [(length, None) for length in lengths]
    return list(zip(lengths, estimates, strict=True))


def _norms(x: Tensor) -> Tensor:
    """Norm of each client's tensor (K, ...), in float64: (K,)"""
    norms: Tensor = torch.linalg.vector_norm(flat(x), dim=1, dtype=torch.float64)
    return norms


def _total(norms: Iterable[Tensor]) -> Tensor:
    """Norm of each client over all tensors, from the norms of each (K,): (K,)"""
    total: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)), dim=0)
    return total


def _device(params: Params) -> torch.device:
    return next(iter(params.values())).device
