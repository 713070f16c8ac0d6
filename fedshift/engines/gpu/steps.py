"""Local steps of K stacked clients, whatever their rules.

    v = m v + adjust(grad + weight_decay w);   w = w - lr v       for each client separately

or the step of `Adam` along adjust(grad + weight_decay w). For affine rules (`ClientRule.affine`), the step itself adds
a w + b, in the same pass over the weights; `adjust` of other rules is called for the rows of their clients.

Clients are divided into up to STAGES blocks by their number of steps, in descending order, so the clients that still
train are in the first blocks; the weights of a finished client do not change. Within a block they are sorted by kind,
so that a few slices of rows are treated alike: one slice per kind if all clients have the same number of steps.
On a GPU, a step is one CUDA graph, which finds its batches in the plan with a counter on the device. Two steps are one
graph if large weights can be stepped at once for both, which halves the memory traffic for them.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedshift.algorithms.base import ClientRule, adjusted, defines, is_affine
from fedshift.core import tree
from fedshift.core.types import Broadcast, Params
from fedshift.data.cohorts import moves
from fedshift.engines.gpu import kernels
from fedshift.engines.gpu.nets import Net
from fedshift.engines.gpu.stacked import each_loss, mean_losses
from fedshift.rounds.engine import Job, Task
from fedshift.rounds.optimizers import Adam

STAGES = 8  # number of blocks in which clients leave the stack
GRAPHS = 64  # recorded steps that are kept; there are many if cohorts differ in size from round to round
PLAIN, AFFINE = 0, 1  # kinds of clients: gradients are unchanged, or get a w + b; each further kind is one other rule

Index = slice | Tensor


class Segment(NamedTuple):
    """Consecutive rows of the stack with clients of one kind."""

    kind: int
    first: int
    last: int  # exclusive
    kind_first: int  # place of the first row among all rows of this kind

    @property
    def rows(self) -> slice:
        return slice(self.first, self.last)

    @property
    def kind_rows(self) -> slice:
        return slice(self.kind_first, self.kind_first + self.last - self.first)


class Layout(NamedTuple):
    """Places of clients in the stack, and the rows that each step trains."""

    rows: list[int]  # of each client
    kind_places: list[int]  # place of each client among those of its kind
    steps: list[tuple[Segment, ...]]


def arrange(counts: Sequence[int], kinds: Sequence[int]) -> Layout:
    """Layout of clients with these numbers of steps and these kinds.

    Block b contains the b-th part of each kind, so that the segments depend only on the number of clients of each kind:
    cohorts with other numbers of steps are trained with the same CUDA graphs.

    >>> arrange([5, 5, 5], [1, 0, 1])[:2]
    ([1, 0, 2], [0, 0, 1])
    """
    blocks = 1 if min(counts) == max(counts) else STAGES
    by_kind = {
        kind: sorted((k for k, other in enumerate(kinds) if other == kind), key=lambda k: -counts[k])
        for kind in sorted(set(kinds))
    }
    rows, kind_places = [0] * len(counts), [0] * len(counts)
    segments: list[Segment] = []
    stages: list[tuple[Segment, ...]] = []  # segments of each block and those before it
    for block in range(blocks):
        for kind, clients in by_kind.items():
            first, last = (-(-len(clients) * edge // blocks) for edge in (block, block + 1))
            row = segments[-1].last if segments else 0
            for place, k in enumerate(clients[first:last]):
                rows[k], kind_places[k] = row + place, first + place
            if segments and segments[-1].kind == kind:
                segments[-1] = segments[-1]._replace(last=row + last - first)
            elif last > first:
                segments.append(Segment(kind, row, row + last - first, first))
        stages.append(tuple(segments))
    beyond = [
        max((n for n, row in zip(counts, rows, strict=True) if row >= stage[-1].last), default=0) for stage in stages
    ]
    steps = [
        next(stage for stage, most in zip(stages, beyond, strict=True) if most <= step) for step in range(max(counts))
    ]
    return Layout(rows, kind_places, steps)


class Launch(NamedTuple):
    """One step of the clients in some segments, or two at once."""

    segments: tuple[Segment, ...]
    steps: int


class RuleBuffers(NamedTuple):
    """Arguments of `adjust` for the clients of one rule that is not affine."""

    start: Params  # w_t
    control: Params
    memory: Params


class Buffers(NamedTuple):
    """Tensors that steps read and write, at the same address in every round, as CUDA graphs require."""

    w: Params  # (K, ...) trained weights
    v: Params  # their velocity, or the first moment of Adam; {} without momentum
    second: Params  # the second moment of Adam; {} for SGD
    short: Params  # w in bfloat16, {} if the forward pass uses w
    ahead: Params  # w after a step whose gradient is 0, in bfloat16; {} if steps are not paired
    fixed: Params  # the model's buffers
    pull: Tensor  # (K,) weight decay, plus a of affine rules
    offset: Params  # b of affine rules, for the clients of this kind only
    rules: dict[int, RuleBuffers]  # of other rules by kind, for their clients only
    batches: Tensor  # (S, K, B) int64
    keep: Tensor  # (S, K, B) bool
    lr: Tensor  # (S, K), 0 for a client that has finished
    drawn: Tensor | None  # (S, K, B, 3) int32: crop and flip
    at: Tensor  # (1,) int64: index of the step


class Steps:
    """Local steps of all clients of a pack."""

    def __init__(self, task: Task, net: Net) -> None:
        self.task, self.net = task, net
        self.device = task.data.x.device
        assert task.optimizer is None or isinstance(task.optimizer, Adam)
        self.adam = task.optimizer  # None: SGD
        floats = all(x.dtype == torch.float32 for x in tree.take(task.params, task.trained).values())
        possible = kernels.AVAILABLE and floats and bool(task.momentum) and self.adam is None
        self.fused = self.device.type == "cuda" and possible  # the step is a kernel
        self.rules: list[ClientRule] = []  # those that are not affine
        self.buffers: Buffers | None = None
        self.sizes: Counter[int] = Counter()  # rows of the buffers for each kind
        self.recorded = self.device.type == "cuda"
        self.graphs: dict[Launch, torch.cuda.CUDAGraph] = {}
        self.pool: Any = None

    def train(self, jobs: Sequence[Job], memories: Sequence[Params]) -> list[Params]:
        """Train the clients of all jobs; return the weights of each job (K_j, ...), which the next call overwrites.

        memories: the memory of the rule for the clients of each job (K_j, ...).
        """
        plans = [job.plan for job in jobs]
        counts = torch.cat([plan.keep.any(-1).sum(-1) for plan in plans]).tolist()  # steps of each client
        kinds = [kind for job in jobs for kind in [self._kind(job.rule)] * len(job.clients)]
        layout = arrange(counts, kinds)
        buffers = self._make_buffers(
            Counter(kinds), max(p.keep.shape[1] for p in plans), max(p.keep.shape[2] for p in plans), jobs
        )
        launches = self._launches(layout.steps)
        for launch in dict.fromkeys(launches):
            self._prepare(launch)
        rows, kind_places = (self._by_job(jobs, places) for places in (layout.rows, layout.kind_places))
        self._load(buffers, jobs, memories, rows, kind_places)
        before, done = None, 0
        for launch in launches:
            if launch.steps == 2 and launch != before:
                self._look_ahead(buffers, launch.segments, buffers.lr[done])
            if launch in self.graphs:
                self.graphs[launch].replay()
            else:
                self._steps(buffers, launch)
            before, done = launch, done + launch.steps
        return [{name: x[at] for name, x in buffers.w.items()} for at in rows]

    def _kind(self, rule: ClientRule) -> int:
        if is_affine(rule):
            return AFFINE if defines(rule, "affine") else PLAIN
        if rule not in self.rules:
            self.rules.append(rule)
        return AFFINE + 1 + self.rules.index(rule)

    def _launches(self, steps: Sequence[tuple[Segment, ...]]) -> list[Launch]:
        """Steps one by one, or in pairs if weights are stepped for both at once."""
        launches = []
        for segments, group in groupby(steps):
            pairs, single = divmod(len(list(group)), 2)
            if self.net.cuts and self._cuts(segments):
                launches += [Launch(segments, 2)] * pairs + [Launch(segments, 1)] * single
            else:
                launches += [Launch(segments, 1)] * (2 * pairs + single)
        return launches

    def _by_job(self, jobs: Sequence[Job], places: Sequence[int]) -> list[Index]:
        """Places of the clients of each job, as a slice where they are consecutive."""
        result: list[Index] = []
        for each in torch.split(torch.tensor(places), [len(job.clients) for job in jobs]):
            first = int(each[0])
            together = torch.equal(each, torch.arange(first, first + len(each)))
            result.append(slice(first, first + len(each)) if together else each.to(self.device))
        return result

    def _make_buffers(self, sizes: Counter[int], s: int, b: int, jobs: Sequence[Job]) -> Buffers:
        """Buffers for these numbers of clients of each kind, steps and examples of a batch; kept if they fit."""
        k = sizes.total()
        if self.buffers is not None:
            fits = self.buffers.batches.shape
            if fits[0] >= s and fits[1] >= k and fits[2] >= b and self.sizes >= sizes:
                return self.buffers
            s, k, b = max(s, fits[0]), max(k, fits[1]), max(b, fits[2])
            sizes = Counter({kind: max(size, self.sizes[kind]) for kind, size in sizes.items()})
            self.close()
        params, trained, device = self.task.params, self.task.trained, self.device

        def stack(some: Params, rows: int = k, dtype: torch.dtype | None = None) -> Params:
            return {n: torch.zeros(rows, *x.shape, dtype=dtype or x.dtype, device=device) for n, x in some.items()}

        weights, paired = tree.take(params, trained), self.net.cuts if self._cuts([]) else ()
        self.sizes = sizes
        self.buffers = Buffers(
            w=stack(weights),
            v=stack(weights) if self.task.momentum or self.adam else {},
            second=stack(weights) if self.adam else {},
            short=stack(weights, dtype=torch.bfloat16) if self.net.short else {},
            ahead=stack({name: x for name, x in weights.items() if name in paired}, dtype=torch.bfloat16),
            fixed=stack({name: x for name, x in params.items() if name not in weights}),
            pull=torch.zeros(k, device=device),
            offset=stack(weights, sizes[AFFINE]) if sizes[AFFINE] else {},
            rules={
                kind: RuleBuffers(*(stack(part, sizes[kind]) for part in (weights, control, rule.init(weights))))
                for kind, rule, control in ((self._kind(job.rule), job.rule, job.sent.control) for job in jobs)
                if kind > AFFINE
            },
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
        memories: Sequence[Params],
        places: Sequence[Index],
        kind_places: Sequence[Index],
    ) -> None:
        buffers.at.zero_()
        for x in (*buffers.v.values(), *buffers.second.values()):
            x.zero_()
        buffers.keep.zero_()
        buffers.lr.zero_()
        buffers.pull.fill_(self.task.weight_decay)
        for job, memory, rows, kind_rows in zip(jobs, memories, places, kind_places, strict=True):
            kind, plan = self._kind(job.rule), job.plan
            _fill(buffers.w, rows, job.sent.params)
            _fill(buffers.fixed, rows, job.sent.params)
            if kind == AFFINE:
                sent = job.sent._replace(params=tree.take(job.sent.params, self.task.trained))
                a, b = job.rule.affine(sent, memory)
                buffers.pull[rows] += a
                _fill(buffers.offset, kind_rows, b or tree.zeros(sent.params))
            elif kind != PLAIN:
                for stack, part in zip(buffers.rules[kind], (*job.sent, memory), strict=True):
                    _fill(stack, kind_rows, part)
            s, size = plan.keep.shape[1:]
            keep = plan.keep.to(self.device)
            buffers.batches[:s, rows, :size] = plan.batches.to(self.device).transpose(0, 1)
            buffers.keep[:s, rows, :size] = keep.transpose(0, 1)
            buffers.lr[:s, rows] = torch.where(keep.any(-1), plan.lr.to(self.device), 0.0).T
            if buffers.drawn is not None:
                drawn = moves(plan.key.to(self.device), size)  # (K, S, B, 3)
                buffers.drawn[:s, rows, :size] = drawn.to(torch.int32).transpose(0, 1)
        for name, x in buffers.short.items():
            x.copy_(buffers.w[name])

    def _prepare(self, launch: Launch) -> None:
        """Record the steps of a launch as a CUDA graph; `_load` overwrites the results of the trial steps."""
        if launch in self.graphs:
            self.graphs[launch] = self.graphs.pop(launch)  # used last
        if not self.recorded or launch in self.graphs:
            return
        if len(self.graphs) >= GRAPHS:
            del self.graphs[next(iter(self.graphs))]
        buffers = self.buffers
        assert buffers is not None
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                buffers.at.zero_()
                self._steps(buffers, launch)
        torch.cuda.current_stream().wait_stream(side)
        buffers.at.zero_()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool):
                self._steps(buffers, launch)
        except RuntimeError:  # a model that synchronizes with the device: its steps are launched without a graph
            self.recorded = False
            torch.cuda.synchronize()
            return
        self.pool = self.pool or graph.pool()
        self.graphs[launch] = graph

    def _steps(self, buffers: Buffers, launch: Launch) -> None:
        """One step, or two, the first of which holds the gradients of products."""
        held: dict[str, kernels.Held] = {}
        for step in range(launch.steps):
            held = self._step(buffers, launch.segments, held, step == launch.steps - 1)

    def _step(
        self, buffers: Buffers, segments: tuple[Segment, ...], held: dict[str, kernels.Held], last: bool
    ) -> dict[str, kernels.Held]:
        """One step of the clients in these segments, which are the first rows of the stack.

        Returns the gradients of products that it holds: none if it is the last of its launch.
        """
        task, a = self.task, segments[-1].last
        index, keep, lr = (x.index_select(0, buffers.at)[0, :a] for x in (buffers.batches, buffers.keep, buffers.lr))
        drawn = None if buffers.drawn is None else buffers.drawn.index_select(0, buffers.at)[0, :a]
        active = slice(0, a)
        seen = _at(active, (buffers.short or buffers.w) | {name: buffers.ahead[name] for name in held})
        leaves = {name: x.detach().requires_grad_() for name, x in seen.items()}
        params = leaves | _at(active, buffers.fixed)
        x = self.net.inputs(task.data.x, index, drawn)
        outputs, products = self.net.cut(params, x, held) if self._cuts(segments) else (self.net(params, x), {})
        loss = mean_losses(each_loss(task.loss, outputs, task.data.targets(task.data.y[index])), keep).sum()
        sought = leaves | {name: product.y for name, product in products.items()}
        grads = _gradients(loss, sought, None)
        holds: dict[str, kernels.Held] = {}
        with torch.no_grad():
            for name, product in reversed(products.items()):
                latest = kernels.Held(product.x.detach(), grads[name], lr)
                if last:
                    parts = [self._move_product(buffers, segment, name, latest, held) for segment in segments]
                    dx = parts[0] if len(parts) == 1 else torch.cat(parts)
                else:
                    holds[name] = latest
                    dx = torch.bmm(latest.dy, buffers.short[name][active])
                grads |= _gradients(product.x, sought, dx)
            grads = {
                name: grads[name] if name in grads else torch.zeros_like(leaf)
                for name, leaf in leaves.items()
                if name not in products
            }
            if task.clip:
                squares = [grad.float().reshape(a, -1).square().sum(1) for grad in grads.values()]
                scale = (task.clip / torch.stack(squares).sum(0).sqrt()).clamp(max=1.0)
                grads = tree.tmap(lambda g: g * tree.over(scale, g), grads)
            for segment in segments:
                self._move(buffers, segment, _at(segment.rows, grads), lr[segment.rows])
            buffers.at.add_(1)
        return holds

    def _cuts(self, segments: Sequence[Segment]) -> bool:
        """True if no gradient is needed but for the step, so that products may apply theirs without storing it."""
        return self.fused and not self.task.clip and all(segment.kind <= AFFINE for segment in segments)

    def _look_ahead(self, buffers: Buffers, segments: tuple[Segment, ...], lr: Tensor) -> None:
        """Weights for the second step of a pair, without the gradient of the first."""
        for segment in segments:
            rows, (pull, offset) = segment.rows, self._added(buffers, segment)
            for name, x in buffers.ahead.items():
                w, v = buffers.w[name][rows], buffers.v[name][rows]
                kernels.look_ahead(w, v, lr[rows], self.task.momentum, x[rows], pull, offset.get(name))

    def _move_product(
        self, buffers: Buffers, segment: Segment, name: str, latest: kernels.Held, held: dict[str, kernels.Held]
    ) -> Tensor:
        """Change the weights of a product along its latest gradient and a held one; return dx of the latest."""
        rows, (pull, offset) = segment.rows, self._added(buffers, segment)
        w, v, short = (stack[name][rows] for stack in (buffers.w, buffers.v, buffers.short))
        x, dy, lr = (part[rows] for part in latest)
        if name not in held:
            return kernels.linear_sgd(x, dy, w, v, short, lr, self.task.momentum, pull, offset.get(name))
        first = kernels.Held(*(part[rows] for part in held[name]))
        soon = buffers.lr.index_select(0, (buffers.at + 1).clamp(max=len(buffers.lr) - 1))[0, rows]
        ahead = buffers.ahead[name][rows]
        return kernels.linear_sgd_pair(
            first, x, dy, w, v, short, ahead, lr, soon, self.task.momentum, pull, offset.get(name)
        )

    def _move(self, buffers: Buffers, segment: Segment, grads: Params, lr: Tensor) -> None:
        """Change the weights of a segment along its gradients, which its rule changes."""
        w, v, second, short = (_at(segment.rows, x) for x in (buffers.w, buffers.v, buffers.second, buffers.short))
        pull, offset = self._added(buffers, segment)
        if segment.kind > AFFINE:
            start, control, memory = (_at(segment.kind_rows, x) for x in buffers.rules[segment.kind])
            grads = {name: direction(g.to(w[name].dtype), w[name], pull) for name, g in grads.items()}
            grads = adjusted(self.rules[segment.kind - AFFINE - 1], grads, w, Broadcast(start, control), memory)
            pull = None
        rates = None if self.adam is None else adam_rates(self.adam, lr, buffers.at + 1)
        for name, grad in grads.items():
            x, b, shadow = w[name], offset.get(name), short.get(name)
            if self.fused:
                kernels.sgd(x, v[name], grad.contiguous(), lr, self.task.momentum, shadow, pull, b)
                continue
            step = direction(grad, x, pull, b)
            if self.adam and rates:
                adam_step(self.adam, x, v[name], second[name], step.to(x.dtype), rates)
            else:
                x.sub_((v[name].mul_(self.task.momentum).add_(step) if v else step) * tree.over(lr, x))
            if shadow is not None:
                shadow.copy_(x)

    def _added(self, buffers: Buffers, segment: Segment) -> tuple[Tensor | None, Params]:
        """pull (n,) and offset (n, ...) of a segment: weight decay and affine rules add pull w + offset."""
        affine = segment.kind == AFFINE
        pull = buffers.pull[segment.rows] if affine or self.task.weight_decay else None
        return pull, _at(segment.kind_rows, buffers.offset) if affine else {}

    def close(self) -> None:
        """Free the graphs and their buffers."""
        self.graphs.clear()
        self.buffers, self.pool = None, None


def direction(grad: Tensor, w: Tensor, pull: Tensor | None, offset: Tensor | None = None) -> Tensor:
    """grad + pull[k] w + offset for stacked clients (K, ...): what `kernels.sgd` adds to the velocity."""
    pulled = grad if pull is None else grad + tree.over(pull, w).to(w.dtype) * w
    return pulled if offset is None else pulled + offset


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


def _gradients(of: Tensor, sought: Params, grad: Tensor | None) -> Params:
    """Gradients of those tensors that `of` depends on."""
    if not of.requires_grad:
        return {}
    found = torch.autograd.grad(of, list(sought.values()), grad, allow_unused=True)
    return {name: slope for name, slope in zip(sought, found, strict=True) if slope is not None}


def _at(rows: slice, stack: Params) -> Params:
    return {name: x[rows] for name, x in stack.items()}
