"""Local steps of K stacked clients.

    v = m v + adjust(grad + weight_decay w);   w = w - lr v       for each client separately

or the step of `Adam` along adjust(grad + weight_decay w).

Clients are sorted by their number of steps, in descending order, so the clients that still train are
the first A of the stack; A decreases in a few stages, and the weights of a finished client do not change.
On a GPU, a step is one CUDA graph, which finds its batches in the plan with a counter on the device.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedshift.algorithms.base import ClientRule, defines
from fedshift.core import tree
from fedshift.core.types import Broadcast, Params
from fedshift.data.cohorts import Plan, moves
from fedshift.engines.gpu import kernels
from fedshift.engines.gpu.nets import Net
from fedshift.engines.gpu.stacked import each_loss, mean_losses
from fedshift.rounds.engine import Job, Task
from fedshift.rounds.optimizers import Adam

STAGES = 8  # number of different A for which a step is prepared


class Buffers(NamedTuple):
    """Tensors that steps read and write, at the same address in every round, as CUDA graphs require."""

    w: Params  # (K, ...) trained weights
    v: Params  # their velocity, or the first moment of Adam; {} without momentum
    second: Params  # the second moment of Adam; {} for SGD
    short: Params  # w in bfloat16, {} if the forward pass uses w
    fixed: Params  # the model's buffers
    start: Params  # w_t, control and memory: {} if the rule does not use them
    control: Params
    memory: Params
    batches: Tensor  # (S, K, B) int64
    keep: Tensor  # (S, K, B) bool
    lr: Tensor  # (S, K), 0 for a client that has finished
    drawn: Tensor | None  # (S, K, B, 3) int32: crop and flip
    at: Tensor  # (1,) int64: index of the step


class Steps:
    """Local steps of all clients with the same rule."""

    def __init__(self, task: Task, net: Net, rule: ClientRule) -> None:
        self.task, self.net, self.rule = task, net, rule
        self.device = task.data.x.device
        self.fused = self.device.type == "cuda" and kernels.AVAILABLE
        assert task.optimizer is None or isinstance(task.optimizer, Adam)
        self.adam = task.optimizer  # None: SGD
        self.idle = not defines(rule, "adjust")  # the rule does not change gradients
        self.buffers: Buffers | None = None
        self.recorded = self.device.type == "cuda"
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool: Any = None

    def train(self, jobs: Sequence[Job], memories: Sequence[Sequence[Params]]) -> list[Params]:
        """Train the clients of all jobs; return the weights of each job (K_j, ...), which the next call overwrites.

        memories: the memory of the rule, for each client of each job.
        """
        plans = [job.plan for job in jobs]
        counts = torch.cat([plan.keep.any(-1).sum(-1) for plan in plans]).cpu()  # steps of each client
        order = counts.argsort(descending=True, stable=True)
        stages = self._stages(counts[order].tolist())
        buffers = self._make_buffers(
            len(order), max(p.keep.shape[1] for p in plans), max(p.keep.shape[2] for p in plans), jobs
        )
        for a in dict.fromkeys(stages):
            self._prepare(a)
        self._load(buffers, jobs, memories, plans, order)
        for a in stages:
            if a in self.graphs:
                self.graphs[a].replay()
            else:
                self._step(buffers, a)
        return [{name: x[rows] for name, x in buffers.w.items()} for rows in self._rows(jobs, order)]

    def _rows(self, jobs: Sequence[Job], order: Tensor) -> list[slice | Tensor]:
        """Rows of the stack with the clients of each job."""
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        result: list[slice | Tensor] = []
        for places in torch.split(back, [len(job.clients) for job in jobs]):
            first = int(places[0])
            together = torch.equal(places, torch.arange(first, first + len(places)))
            result.append(slice(first, first + len(places)) if together else places.to(self.device))
        return result

    def _stages(self, counts: Sequence[int]) -> list[int]:
        """Number of clients in each step: those that still train, rounded up to a stage."""
        unit = max(1, -(-len(counts) // STAGES))
        stages = []
        for step in range(counts[0]):
            active = sum(count > step for count in counts) if counts[-1] <= step else len(counts)
            stages.append(min(-(-active // unit) * unit, len(counts)))
        return stages

    def _make_buffers(self, k: int, s: int, b: int, jobs: Sequence[Job]) -> Buffers:
        if self.buffers is not None:
            fits = self.buffers.batches.shape
            if fits[0] >= s and fits[1] >= k and fits[2] >= b:
                return self.buffers
            s, k, b = max(s, fits[0]), max(k, fits[1]), max(b, fits[2])
            self.close()
        params, trained, device = self.task.params, self.task.trained, self.device
        control = jobs[0].sent.control

        def stack(some: Params, dtype: torch.dtype | None = None) -> Params:
            return {n: torch.zeros(k, *x.shape, dtype=dtype or x.dtype, device=device) for n, x in some.items()}

        weights = tree.take(params, trained)
        memory = {} if self.idle else self.rule.init(weights)
        self.buffers = Buffers(
            w=stack(weights),
            v=stack(weights) if self.task.momentum or self.adam else {},
            second=stack(weights) if self.adam else {},
            short=stack(weights, torch.bfloat16) if self.net.short else {},
            fixed=stack({name: x for name, x in params.items() if name not in weights}),
            start={} if self.idle else stack(weights),
            control={} if self.idle else stack(control),
            memory=stack(memory),
            batches=torch.zeros(s, k, b, dtype=torch.int64, device=device),
            keep=torch.zeros(s, k, b, dtype=torch.bool, device=device),
            lr=torch.zeros(s, k, device=device),
            drawn=torch.zeros(s, k, b, 3, dtype=torch.int32, device=device) if self.task.augment else None,
            at=torch.zeros(1, dtype=torch.int64, device=device),
        )
        return self.buffers

    def _load(
        self,
        buffers: Buffers,
        jobs: Sequence[Job],
        memories: Sequence[Sequence[Params]],
        plans: Sequence[Plan],
        order: Tensor,
    ) -> None:
        buffers.at.zero_()
        for x in (*buffers.v.values(), *buffers.second.values()):
            x.zero_()
        buffers.keep.zero_()
        buffers.lr.zero_()
        for job, plan, memory, rows in zip(jobs, plans, memories, self._rows(jobs, order), strict=True):
            _fill(buffers.w, rows, job.sent.params)
            _fill(buffers.fixed, rows, job.sent.params)
            _fill(buffers.start, rows, job.sent.params)
            _fill(buffers.control, rows, job.sent.control)
            for name, x in buffers.memory.items():
                x[rows] = torch.stack([client[name].to(x) for client in memory])
            s, b = plan.keep.shape[1:]
            keep = plan.keep.to(self.device)
            buffers.batches[:s, rows, :b] = plan.batches.to(self.device).transpose(0, 1)
            buffers.keep[:s, rows, :b] = keep.transpose(0, 1)
            buffers.lr[:s, rows] = torch.where(keep.any(-1), plan.lr.to(self.device), 0.0).T
            if buffers.drawn is not None:
                drawn = moves(plan.key.to(self.device), b)  # (K, S, B, 3)
                buffers.drawn[:s, rows, :b] = drawn.to(torch.int32).transpose(0, 1)
        for name, x in buffers.short.items():
            x.copy_(buffers.w[name])

    def _prepare(self, a: int) -> None:
        """Record the step of A clients as a CUDA graph; `_load` overwrites the results of the trial steps."""
        if not self.recorded or a in self.graphs:
            return
        buffers = self.buffers
        assert buffers is not None
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                buffers.at.zero_()
                self._step(buffers, a)
        torch.cuda.current_stream().wait_stream(side)
        buffers.at.zero_()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                self._step(buffers, a)
        except RuntimeError:  # a model that synchronizes with the device: its steps are launched without a graph
            self.recorded = False
            torch.cuda.synchronize()
            return
        self.pool = self.pool or graph.pool()
        self.graphs[a] = graph

    def _step(self, buffers: Buffers, a: int) -> None:
        """One step of the first A clients."""
        task = self.task
        index, keep, lr = (x.index_select(0, buffers.at)[0, :a] for x in (buffers.batches, buffers.keep, buffers.lr))
        drawn = None if buffers.drawn is None else buffers.drawn.index_select(0, buffers.at)[0, :a]
        w = _first(buffers.w, a)
        leaves = {name: x.detach().requires_grad_() for name, x in _first(buffers.short or buffers.w, a).items()}
        x = self.net.inputs(task.data.x, index, drawn)
        outputs = self.net(leaves | _first(buffers.fixed, a), x)
        loss = mean_losses(each_loss(task.loss, outputs, task.data.targets(task.data.y[index])), keep).sum()
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        with torch.no_grad():
            grads = {
                name: torch.zeros_like(leaf) if grad is None else grad
                for (name, leaf), grad in zip(leaves.items(), found, strict=True)
            }
            self._move(buffers, a, w, grads, lr)
            buffers.at.add_(1)

    def _move(self, buffers: Buffers, a: int, w: Params, grads: Params, lr: Tensor) -> None:
        task = self.task
        if task.clip:
            squares = [grad.float().reshape(a, -1).square().sum(1) for grad in grads.values()]
            scale = (task.clip / torch.stack(squares).sum(0).sqrt()).clamp(max=1.0)
            grads = tree.tmap(lambda g: g * tree.over(scale, g), grads)
        if task.weight_decay:
            grads = tree.tmap(lambda g, w: g + task.weight_decay * w, grads, w)
        if not self.idle:
            sent = Broadcast(_first(buffers.start, a), _first(buffers.control, a))
            grads = self.rule.adjust(
                tree.tmap(lambda g: g.float(), grads) if buffers.short else grads, w, sent, _first(buffers.memory, a)
            )
        rates = None if self.adam is None else adam_rates(self.adam, lr, buffers.at + 1)
        for name, x in w.items():
            v = buffers.v[name][:a] if buffers.v else None
            short = buffers.short[name][:a] if buffers.short else None
            if self.adam and rates and v is not None:
                adam_step(self.adam, x, v, buffers.second[name][:a], grads[name].to(x.dtype), rates)
            elif self.fused and v is not None and x.dtype == torch.float32:
                kernels.sgd(x, v, grads[name].contiguous(), lr, task.momentum, short)
                continue
            else:
                step = grads[name] if v is None else v.mul_(task.momentum).add_(grads[name])
                x.sub_(step * tree.over(lr, x))
            if short is not None:
                short.copy_(x)

    def close(self) -> None:
        """Free the graphs and their buffers."""
        self.graphs.clear()
        self.buffers, self.pool = None, None


class AdamRates(NamedTuple):
    """Numbers of one step of Adam that all tensors share."""

    decay: Tensor  # (K,) lr decay
    rate: Tensor  # (K,) lr / (1 - b1^t)
    root: Tensor  # (1,) sqrt(1 - b2^t)


def adam_rates(adam: Adam, lr: Tensor, t: Tensor) -> AdamRates:
    """Rates at step t (1,) of a round for clients with learning rates lr (K,).

    Every client begins with step 1, and clients that have finished have the rate 0, so t is the same for all.
    """
    first, second = (1 - torch.pow(beta, t.double()) for beta in adam.betas)
    return AdamRates(lr * adam.decay, (lr / first).to(lr.dtype), second.sqrt().to(lr.dtype))


def adam_step(adam: Adam, w: Tensor, m: Tensor, v: Tensor, grad: Tensor, rates: AdamRates) -> None:
    """Step of `Adam` for stacked clients (K, ...), in place; a client with rate 0 does not move."""
    first, second = adam.betas
    m.lerp_(grad, 1 - first)
    v.mul_(second).addcmul_(grad, grad, value=1 - second)
    step = m / (v.sqrt() / rates.root.to(v.dtype) + adam.eps)
    if adam.decay:
        w.sub_(w * tree.over(rates.decay, w))
    w.sub_(step * tree.over(rates.rate, w))


def _fill(stack: Params, rows: slice | Tensor, of: Params) -> None:
    for name, x in stack.items():
        x[rows] = of[name].to(x)


def _first(stack: Params, a: int) -> Params:
    return {name: x[:a] for name, x in stack.items()}
