"""One client's round: local steps, the upload, and the new memory."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fedshift.algorithms.base import adjusted, defines, uses_travel
from fedshift.codecs.base import finite
from fedshift.codecs.exact import EXACT
from fedshift.core import rng
from fedshift.core.tree import same, take, tmap
from fedshift.core.types import Broadcast, Params
from fedshift.data.augment import cropped
from fedshift.data.cohorts import ROUNDING, Plan, moves, travel
from fedshift.rounds import evaluate
from fedshift.rounds.engine import RAISED, Job, Task, TrainingError, Upload, describe, evaluation
from fedshift.rounds.evaluate import ClientChunk, Part
from fedshift.rounds.optimizers import Stepper
from fedshift.rounds.policy import sent_loss
from fedshift.rounds.uplink import Uplink, base_of, join_memory, quantized, send, split_memory
from fedshift.rounds.upload_stats import drift, histograms, relative_error
from fedshift.wire.writer import Writer

# what torch.autograd.grad calls; private, so that another version of torch may not have it
ENGINE: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
NOWHERE = torch.zeros(())
WRITERS = 32  # of different uplinks that are kept; a policy may choose others in every round


class Client:
    """Local training and uploads of clients that share one model, one after another."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.trained = task.trained
        self.names = list(task.params)
        buffers = dict(task.model.named_buffers())
        self.private = {name: x.clone() for name, x in buffers.items() if name not in task.params}  # not sent
        self.changing = bool(buffers)
        self.weights = task.weights
        self.w = {name: p.detach() for name, p in zip(self.trained, self.weights, strict=True)}  # the same memory
        self.device = self.weights[0].device
        self.index = torch.cuda.current_device() if self.device.type == "cuda" else None  # of the GPU
        self.writers: dict[Uplink, Writer] = {}
        self.learning: bool | None = None
        self.tensors = self._tensors()

    def load(self, params: Params) -> None:
        """Copy tensors into the model, and restore the buffers that are not sent."""
        self.tensors = self._tensors() if self.changing else self.tensors
        torch._foreach_copy_(list(self.tensors.values()), [params[name] for name in self.names])
        for name, x in self.private.items():
            self.task.model.get_buffer(name).copy_(x)

    def _tensors(self) -> Params:
        """The model's tensors, looked up again if there are buffers: a model may replace them."""
        return take(self.w | dict(self.task.model.named_buffers()), self.names)

    def score(self, params: Params, part: slice) -> Part:
        """Score the model on one chunk of the test set."""
        task = self.task
        with self._evaluating(params, part.start):
            return evaluate.score(task.model, task.data, part, task.loss, task.metrics)

    def score_clients(self, params: Params, chunk: ClientChunk) -> list[Tensor]:
        """Rows of each metric for one chunk of held-out examples."""
        task = self.task
        with self._evaluating(params, int(chunk.places[0])):
            return evaluate.score_clients(task.model, task.data, chunk, task.loss, task.metrics)

    @contextmanager
    def _evaluating(self, params: Params, seed: int) -> Iterator[None]:
        """Put the model into evaluation mode, with these tensors and a seed for random numbers."""
        self.load(params)
        self._mode(False)
        with self._drawing() as generator, evaluation():
            generator.manual_seed(seed)
            yield

    def local_loss(self, params: Params, examples: Tensor) -> float:
        """F_k(w): mean loss of the model on a client's examples, in evaluation mode, as it is sent."""
        data, total = self.task.data, 0.0
        self.load(params)
        self._mode(False)
        with torch.no_grad(), self._drawing() as generator:
            generator.manual_seed(0)
            for part in torch.split(examples.to(self.device), evaluate.chunk_size(data)):
                outputs = self.task.model(data.inputs(data.x.index_select(0, part)))
                total += len(part) * float(self.task.loss(outputs, data.targets(data.y.index_select(0, part))))
        return sent_loss(total / len(examples))

    def writer(self, uplink: Uplink, like: Params) -> Writer:
        """Writer of an uplink; those used last are kept."""
        found = self.writers.pop(uplink, None) or Writer(quantized(uplink, self.trained), like)
        if len(self.writers) >= WRITERS:
            del self.writers[next(iter(self.writers))]
        self.writers[uplink] = found
        return found

    def outputs(self, examples: int) -> tuple[Any, Tensor]:
        """Outputs and targets of the first test examples, in evaluation mode; with gradients if they are enabled."""
        data = self.task.data
        with torch.no_grad():
            self.load(self.task.params)
        self._mode(False)
        with self._drawing() as generator:
            generator.manual_seed(0)
            outputs = self.task.model(data.inputs(data.test_x[:examples].clone()))
        return outputs, data.targets(data.test_y[:examples].clone())

    def try_step(self, batch: int) -> None:
        """Compute the gradients of one batch, and restore the model."""
        data = self.task.data
        self.load(self.task.params)
        self._mode(True)
        try:
            with self._drawing() as generator:
                generator.manual_seed(0)
                outputs = self.task.model(data.inputs(data.x[:batch].clone()))
                loss = self.task.loss(outputs, data.targets(data.y[:batch].clone()))
                torch.autograd.grad(loss, self.weights, allow_unused=True)
        except RAISED as problem:
            raise TrainingError(f"training: {describe(problem)}") from problem
        self._check_unsent()
        self.load(self.task.params)

    def train(self, job: Job, i: int, memory: Params, reset: bool = False) -> Upload:
        """Train the i-th client of a job, and encode its upload; `reset`: the client lost its memory."""
        begin = time.perf_counter()
        uplink, rule, sent, client = job.uplinks[i], job.rule, job.sent, job.clients[i]
        rule_memory, error = split_memory(memory)
        with training(job, client):
            rule_memory = rule.receive(sent, rule_memory or rule.init(take(sent.params, self.trained)))
            plan = Plan(*(part[i] for part in job.plan))
            loss = self.local_loss(sent.params, job.owned[i]) if job.owned else None
            w = self.steps(job, plan, rule_memory)
            weights = take(w, self.trained)
            distance = travel(plan, self.task.momentum) if uses_travel(rule) else NOWHERE
            silent = defines(rule, "sends") and not rule.sends(weights, sent, rule_memory)
            upload = w | rule.message(weights, sent, rule_memory, distance) if defines(rule, "message") else w
        middle = time.perf_counter()
        if silent:
            return Upload(client, b"", b"", memory, [], 0.0, (middle - begin, 0.0), silent=True)
        start, second = base_of(rule, sent.params, self.trained), b""
        try:
            key = rng.fold(plan.key[0], ROUNDING) if uplink.codec.random else None
            coded = send(
                uplink,
                upload,
                start,
                error,
                self.trained,
                job.header(i, reset),
                key,
                self.writer(uplink, w),
            )
            if defines(rule, "second"):
                with training(job, client):
                    further = rule.second(weights, sent, rule_memory, distance)
                check_finite(further, "second upload")
                second = Writer(EXACT, further).pack(further, job.header(i)._replace(update=False))
            if defines(rule, "remember"):
                with training(job, client):
                    decoded = take(coded.decoded, self.trained)
                    rule_memory = rule.remember(decoded, weights, sent, rule_memory, distance)
                check_finite(rule_memory, "memory")
        except ValueError as problem:  # NaN or infinity, which cannot be sent
            return Upload(client, b"", b"", memory, [], 0.0, (middle - begin, 0.0), str(problem))
        except TrainingError:
            raise
        except RAISED as problem:  # of a user's codec
            raise TrainingError(
                f"round {job.number}, client {client}: {uplink.codec}: {describe(problem)}"
            ) from problem
        end = time.perf_counter()
        return Upload(
            client=client,
            frame=coded.frame,
            second=second,
            memory=join_memory(rule_memory, coded.error if uplink.feedback else error),
            drift=drifts(upload, coded.decoded, start, job.layers),
            error=relative_error(coded.coded, coded.error),
            seconds=(middle - begin, end - middle),
            histograms=histograms(coded.coded, coded.error, job.layers) if job.histograms and uplink.lossy else (),
            loss=loss,
        )

    def steps(self, job: Job, plan: Plan, memory: Params) -> Params:
        """v = m v + adjust(grad + weight_decay w);  w = w - lr v;  v is 0 at the start of each round.

        Another optimizer than SGD steps along adjust(grad + weight_decay w) instead.
        """
        task, model, rule = self.task, self.task.model, job.rule
        self.load(job.sent.params)
        self._mode(True)
        sent = Broadcast(self._to_device(job.sent.params), self._to_device(job.sent.control))
        memory = self._to_device(memory)
        batches, values = plan.batches.to(self.device), list(self.w.values())
        seeds, rates, counts = plan.key.tolist(), plan.lr.tolist(), plan.keep.sum(-1).tolist()
        data, loss_of, weights = task.data, task.loss, tuple(self.weights)
        drawn = moves(plan.key.to(self.device), batches.shape[1]) if task.augment else None
        velocity: list[Tensor] | tuple[Tensor, ...] = []
        stepper: Stepper | None = None
        with self._drawing() as generator:
            if task.optimizer:
                generator.manual_seed(seeds[0])
                stepper = Stepper(task.optimizer, self.weights, rates[0])
            for step, n in enumerate(counts):
                if not n:
                    break
                generator.manual_seed(seeds[step])
                batch = batches[step, :n]
                x = data.x.index_select(0, batch)
                if drawn is not None:
                    x = cropped(x, drawn[step, :n])
                loss = loss_of(model(data.inputs(x)), data.targets(data.y.index_select(0, batch)))
                grads = gradients(loss, weights)
                if any(grad is None for grad in grads):  # a parameter that this batch does not use
                    grads = tuple(torch.zeros_like(w) if g is None else g for w, g in zip(values, grads, strict=True))
                if task.clip:
                    grads = clipped(grads, task.clip)
                if task.weight_decay:
                    grads = torch._foreach_add(grads, values, alpha=task.weight_decay)
                named = dict(zip(self.trained, grads, strict=True))
                directions = [*adjusted(rule, named, self.w, sent, memory).values()]
                if stepper:
                    stepper.step(directions, rates[step])
                    continue
                if task.momentum and velocity:
                    torch._foreach_mul_(velocity, task.momentum)
                    torch._foreach_add_(velocity, directions)
                else:
                    # a gradient may be a view
                    velocity = [g.clone() for g in directions] if task.momentum else directions
                torch._foreach_add_(values, velocity, alpha=-rates[step])
        self.tensors = self._tensors() if self.changing else self.tensors
        self._check_unsent()
        return {name: x.detach().to("cpu", copy=True) for name, x in self.tensors.items()}

    def _check_unsent(self) -> None:
        """Raise ValueError if training changed a buffer that is not sent: the change would be lost."""
        for name, problem in self.task.unsent.items():
            if not same(self.private[name], self.task.model.get_buffer(name)):
                raise ValueError(f"{name}: {problem}, so it cannot be sent, and training must not change it")

    @contextmanager
    def _drawing(self) -> Iterator[torch.Generator]:
        """Torch's generator, which dropout draws from; its state is restored afterwards."""
        generator = torch.cuda.default_generators[self.index] if self.index is not None else torch.default_generator
        before = generator.get_state()
        try:
            yield generator
        finally:
            generator.set_state(before)

    def _mode(self, learning: bool) -> None:
        if self.learning != learning:
            self.task.model.eval()
            for module in self.task.learners if learning else ():
                module.training = True
            self.learning = learning

    def _to_device(self, params: Params) -> Params:
        return params if self.device.type == "cpu" else tmap(lambda x: x.to(self.device), params)


@contextmanager
def training(job: Job, client: int) -> Iterator[None]:
    """Name round and client in exceptions of the user's model, loss or rule."""
    try:
        yield
    except RAISED as problem:
        raise TrainingError(f"round {job.number}, client {client}: {describe(problem)}") from problem


def check_finite(params: Params, kind: str) -> None:
    """Raise ValueError for NaN or infinity."""
    if not all(finite(x) for x in params.values()):
        raise ValueError(f"its {kind} is NaN or infinite")


def gradients(loss: Tensor, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """torch.autograd.grad(loss, weights, allow_unused=True), faster: None for a weight that is not used.

    Its checks of the arguments, in Python, take a sixth of the time of a step of a small model.

    >>> w, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> gradients((w * w).sum(), (w, unused))
    (tensor([2., 2.]), None)
    """
    usual = type(loss) is Tensor and not loss.ndim and loss.is_floating_point() and loss.requires_grad
    if not usual or ENGINE is None:
        return torch.autograd.grad(loss, weights, allow_unused=True)  # which names the problem, if it is one
    seed_gradient = torch.ones_like(loss)
    found: tuple[Tensor, ...] = ENGINE.run_backward(
        (loss,), (seed_gradient,), False, False, weights, True, accumulate_grad=False
    )
    return found


def clipped(grads: tuple[Tensor, ...], most: float) -> tuple[Tensor, ...]:
    """g * min(1, most / |g|), with the norm over all tensors."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    return torch._foreach_mul(grads, (most / norm).clamp(max=1.0))


def drifts(w: Params, decoded: Params, start: Params, layers: Sequence[str]) -> list[tuple[float, float]]:
    """|w_k - w_t| and |Q(w_k) - w_t| of each layer"""
    before = [float(drift(w[name], start[name])) for name in layers]
    after = before if decoded is w else [float(drift(decoded[name], start[name])) for name in layers]
    return list(zip(before, after, strict=True))
