"""Build a federation from settings: data, model, algorithm, links."""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift.algorithms import Algorithm, Chain, ClientRule, ServerRule, Shift, chain, defines
from fedshift.algorithms.table import ALGORITHMS
from fedshift.core import rng, tree
from fedshift.core.names import named, suggest
from fedshift.core.types import Params
from fedshift.data import cohorts, datasets
from fedshift.data import partition as partitions
from fedshift.data.datasets import Dataset
from fedshift.data.heldout import hold_out, of_owners
from fedshift.data.partition import Partition
from fedshift.engines import Batched, Engine, ForkError, Processes, Sequential, StackError, Task, TrainingError
from fedshift.engines.client import Client
from fedshift.engines.gpu.rules import check_stackable
from fedshift.engines.workers import FORKS
from fedshift.experiment.links import bandwidth, downlink, links, policy_of
from fedshift.experiment.settings import OPTIMIZERS, AdamSettings, Experiment, run_number
from fedshift.experiment.toml import SettingsError
from fedshift.models import MODELS
from fedshift.rounds import evaluate
from fedshift.rounds.engine import RAISED, describe, duplicate, explained
from fedshift.rounds.evaluate import AnyMetric, Held, Loss, Metric, soft_labels
from fedshift.rounds.federation import Federation, shift_of
from fedshift.rounds.metrics import METRICS
from fedshift.rounds.optimizers import Adam, MakeOptimizer, check_optimizer
from fedshift.rounds.policy import Policy, begin
from fedshift.rounds.uplink import Uplink, quantized
from fedshift.wire.writer import FrameSize

TEXT_MODELS = ("char-lstm", "char-transformer")
TRIED_EXAMPLES = 64  # that are scored before training
TRIED = 10_000  # rounds for which a user's schedule is called before training


def build(
    experiment: Experiment,
    model: nn.Module | None = None,
    data: Dataset | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
    algorithm: Algorithm | None = None,
    partition: Partition | None = None,
    uplink: Uplink | None = None,
    optimizer: MakeOptimizer | None = None,
    policy: Policy | None = None,
) -> Federation:
    """Build the federation that the settings describe; objects replace what is named in the settings."""
    with users_code(f"data.name = {experiment.data.name!r}", experiment.data.name):
        data = data or datasets.load(experiment.data.name, experiment.data.args)
    train, device = experiment.train, device_of(experiment)
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("engine.device = 'cuda': no CUDA device was found; set engine.device = 'cpu'")
    if experiment.data.augment and (len(data.shape) != 3):
        raise SettingsError(f"data.augment = true: needs images (channels, height, width), not {data.shape}")
    if loss is None and train.loss == "cross-entropy":
        check_labels(data)
    with setting("model"):
        task = Task(
            model=(duplicate(model) if model is not None else named_model(experiment, data)).to(device),
            data=data.to(device),
            loss=loss or (F.cross_entropy if train.loss == "cross-entropy" else function("train.loss", train.loss)),
            metric=metric or named_metric(train.metric),
            further=tuple(named_metric(name, "train.metrics") for name in list(train.directions)[1:]),
            momentum=train.momentum if train.optimizer.name == "sgd" else 0.0,
            weight_decay=train.weight_decay if train.optimizer.name != "adamw" else 0.0,
            optimizer=optimizer or named_optimizer(experiment),
            clip=train.clip,
            augment=experiment.data.augment,
        )
    try_out(experiment, task)
    if task.optimizer is not None and not isinstance(task.optimizer, Adam):
        try_optimizer(experiment, task.optimizer, task)
    if experiment.engine.name == "batched":
        batched(experiment, task)
    with setting("data.partition"):
        clients = split(experiment, data) if partition is None else partitions.checked(partition, len(data.y))
    if not experiment.data.clients:
        if train.cohort > clients.clients:
            least = max(experiment.data.least, 1)
            few = (
                f": {clients.left_out} others have fewer than {least} examples (data.least)" if clients.left_out else ""
            )
            only = "is only 1 client" if clients.clients == 1 else f"are only {clients.clients} clients"
            raise SettingsError(f"train.cohort = {train.cohort}: there {only}{few}")
        experiment = experiment.changed(**{"data.clients": clients.clients})
    clients, held = held_out(experiment, data, clients)
    groups, group = links(experiment, uplink)
    with setting("train.cohort"):
        if train.selection == "stratified":
            drawn = cohorts.stratified(clients, group, train.cohort, experiment.seed, train.dropout)
        else:
            drawn = cohorts.uniform(clients, train.cohort, experiment.seed, train.dropout)
    fed = Federation(
        task=task,
        algorithm=complete_algorithm(experiment, algorithm),
        partition=clients,
        cohorts=drawn,
        groups=groups,
        group=group,
        bandwidth=bandwidth(experiment, groups, group),
        epochs=train.epochs,
        steps=train.steps,
        batch=train.batch,
        rate=rate(experiment),
        seed=experiment.seed,
        downlink=downlink(experiment),
        weights=experiment.algorithm.weights,
        patience=train.patience,
        bound=experiment.bounds.norm,
        cap=experiment.bounds.weight,
        run=run_number(experiment),
        held=held,
        policy=policy_of(experiment, policy),
        rounds=train.rounds,
    )
    check_frames(fed)
    if fed.policy is not None:
        with setting("uplink.policy"):
            try_policy(fed)
    with setting("algorithm"):
        fed.start()
    if task.optimizer is not None and (method := depends_on_travel(fed)):
        raise SettingsError(
            f"train.optimizer = {train.optimizer.name!r}: {type(fed.algorithm.client).__name__}.{method} of the "
            "algorithm uses the distance that a unit gradient moves a client, which is known for sgd only; "
            "set train.optimizer = 'sgd'"
        )
    if packable(experiment):
        try:
            check_stackable(fed.algorithm.client, task, fed.start().out.control)
        except StackError as problem:
            raise SettingsError(f"engine.name = {experiment.engine.name!r}: {problem}") from problem
    if (tensors := experiment.shift.tensors) is not None and experiment.shift.on and not fed.shifted:
        candidates = Shift(experiment.shift.per, tensors=("*",)).chosen(tree.take(task.params, task.trained))
        kind = "trained tensors" + (" with filters of two inputs or more" if experiment.shift.per == "filter" else "")
        names = ", ".join(candidates)
        raise SettingsError(f"shift.tensors = {tensors}: there is no such tensor among the {kind}: {names}")
    return fed


@contextmanager
def setting(name: str) -> Iterator[None]:
    """Name the setting in errors that occur when its value is used."""
    try:
        yield
    except SettingsError:
        raise
    except ValueError as problem:
        raise SettingsError(f"{name}: {problem}") from None


@contextmanager
def users_code(where: str, name: str) -> Iterator[None]:
    """Report exceptions as a SettingsError; those of a user's `module:function` with their type, file and line.

    The sentences of this package, about the result of a user's function as well, are reported as they are.
    """
    try:
        yield
    except SettingsError:
        raise
    except RAISED as problem:
        raise SettingsError(f"{where}: {explained(problem, name)}") from problem


def check_frames(fed: Federation) -> None:
    """Raise SettingsError if a codec cannot encode the model: its parts divide or describe a tensor wrongly."""
    links = {"downlink": {fed.downlink}, "uplink": {group.uplink for group in fed.groups}}
    for table, uplinks in links.items():
        for uplink in uplinks:
            with setting(f"{table}.codec"):
                FrameSize(quantized(uplink, fed.task.trained), fed.task.params)


def check_labels(data: Dataset) -> None:
    """Refuse floating point targets that are not probabilities, which cross-entropy would accept."""
    if data.y.is_floating_point() and not (soft_labels(data.y) and soft_labels(data.test_y)):
        raise SettingsError(
            f"train.loss = 'cross-entropy': the targets are floating point numbers of shape {tuple(data.y.shape)} and "
            "not class probabilities; labels must be whole numbers, and for regression train.loss = "
            "'torch.nn.functional:mse_loss' compares outputs and targets of one shape"
        )


def named_metric(name: str, setting: str = "train.metric") -> AnyMetric:
    """Metric by name; None where the loss is the score. A user's class is instantiated."""
    if name in METRICS:
        return METRICS[name]
    if ":" not in name:
        raise SettingsError(f"{setting} = {name!r}: no such metric; {suggest(name, METRICS)} (or module:function)")
    found: Any = function(setting, name)
    with users_code(f"{setting} = {name!r}", name):
        metric: Metric = found() if isinstance(found, type) else found
    return metric


def held_out(experiment: Experiment, data: Dataset, partition: Partition) -> tuple[Partition, Held | None]:
    """Training examples of each client, and its held-out examples if the settings ask for them."""
    config = experiment.evaluate
    if not config.per_client:
        return partition, None
    if config.held_out:
        train, held = hold_out(partition, config.held_out, rng.key(experiment.seed, "held out"))
        found = Held(held, train=True)
    else:
        if data.owner is None or data.test_owner is None:
            raise SettingsError(
                f"evaluate.per_client = true: the test examples of {data.name} have no owners; hold out a share of "
                "each client's training examples with evaluate.held_out, for example 0.2"
            )
        try:
            train, found = partition, Held(of_owners(partition, data.owner, data.test_owner), train=False)
        except ValueError as problem:
            raise SettingsError(
                f"evaluate.per_client = true: {problem}; use data.partition = 'natural', or evaluate.held_out"
            ) from None
    if not len(found.examples.order):
        raise SettingsError("evaluate.per_client = true: no client has held-out examples")
    return train, found


def require_goal(experiment: Experiment) -> None:
    """Raise SettingsError if it is unknown whether a lower or a higher metric is better."""
    if experiment.train.direction is None:
        raise SettingsError(
            f"train.metric = {experiment.train.metric!r}: its name does not say which scores are better; "
            "set train.goal to 'min' (lower is better) or 'max' (higher is better)"
        )


def try_out(experiment: Experiment, task: Task) -> None:
    """Score a few examples, so that a model, loss or metric that does not fit the data fails before training.

    A model with buffers that must not change, or with weights that are not float32, also takes a training step.
    """
    client, train, seen = Client(task), experiment.train, tuple(task.data.x.shape[1:])
    classes = f" with {task.data.classes} classes" if task.data.classes else ""
    model = f"{type(task.model).__name__} on examples of shape {seen}{classes}"
    usual = task.loss is F.cross_entropy  # then it is the model that does not fit
    loss = (model, "") if usual else (f"train.loss = {train.loss!r}", train.loss)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("error", message="Using a target size")  # torch would broadcast
        with users_code(model, ":"), torch.no_grad():
            outputs, targets = client.outputs(TRIED_EXAMPLES)
            check_outputs(experiment, task, outputs)
        with users_code(*loss), torch.no_grad():
            evaluate.loss_mean(task.loss, outputs, targets)
        for place, (name, metric) in enumerate(zip(train.directions, task.metrics, strict=True)):
            where = f"train.{'metrics' if place else 'metric'} = {name!r}" if ":" in name else model
            with users_code(where, ":"), torch.no_grad():
                evaluate.try_metric(metric, outputs, targets)
        with users_code(model, ":"), torch.enable_grad():
            outputs, targets = client.outputs(TRIED_EXAMPLES)
        if not isinstance(outputs, Tensor) or outputs.requires_grad:  # some models have no gradients in evaluation mode
            with users_code(*loss), torch.enable_grad():
                evaluate.try_loss(task.loss, outputs, targets)
    try:
        if task.unsent or task.data.dtype != torch.float32:
            client.try_step(train.batch)
    except TrainingError as problem:
        raise SettingsError(f"{model}: {problem}") from problem
    except ValueError as problem:  # training changes a buffer
        raise SettingsError(f"model: {problem}") from None


def check_outputs(experiment: Experiment, task: Task, outputs: object) -> None:
    """Refuse outputs that are not a tensor, unless only the user's own functions use them."""
    own = not any(evaluate.pure(function) for function in (task.loss, *task.metrics) if function is not None)
    if not isinstance(outputs, Tensor) and not (own and not experiment.evaluate.per_client):
        raise ValueError(
            f"returns {type(outputs).__name__}; it must return a tensor with one row of outputs per example, unless "
            "train.loss and all metrics are your own functions"
        )


def try_policy(fed: Federation) -> None:
    """Create the state of the policy, so that a user's policy that fails does so before training."""
    assert fed.policy is not None
    try:
        begin(fed.policy, fed.partition.clients, fed.rounds)
    except RAISED as problem:
        if isinstance(problem, ValueError):
            raise
        raise ValueError(f"{fed.policy}: {describe(problem)}") from problem


def device_of(experiment: Experiment) -> str:
    """Return 'cpu' or 'cuda'."""
    config = experiment.engine
    if config.device != "auto":
        return config.device
    return "cuda" if config.name in ("auto", "batched") and torch.cuda.is_available() else "cpu"


def packable(experiment: Experiment) -> bool:
    """True if all clients are to be trained at once, together with those of other runs of a sweep."""
    name = experiment.engine.name
    return name == "batched" or (name == "auto" and device_of(experiment) == "cuda")


def engine(experiment: Experiment, task: Task, cores: int) -> Engine:
    """Engine of the settings; for 'auto', the fastest that supports the model and the device."""
    config, device = experiment.engine, device_of(experiment)
    if config.name == "batched":
        return batched(experiment, task)
    if packable(experiment):
        with suppress(StackError):
            return Batched(task, config.precision, config.deterministic)
    workers = min(config.workers or cores, experiment.train.cohort)
    many = config.name == "processes" or (config.name == "auto" and workers > 1 and FORKS)
    if not many or device != "cpu":
        return Sequential(task, config.precision)
    try:
        return Processes(task, workers)
    except ForkError:
        if experiment.engine.name == "processes":
            raise
        return Sequential(task, config.precision)


def batched(experiment: Experiment, task: Task) -> Batched:
    """Batched engine, or a SettingsError with the reason why the model does not support it."""
    try:
        return Batched(task, experiment.engine.precision, experiment.engine.deterministic)
    except StackError as problem:
        raise SettingsError(f"engine.name = 'batched': {problem}") from problem


def complete_algorithm(experiment: Experiment, given: Algorithm | None = None) -> Algorithm:
    """The given algorithm or that of the settings; the shift of the settings is its last rule unless it has a shift."""
    chosen, shift = given or named_algorithm(experiment), experiment.shift
    if isinstance(chosen.server, Chain) and len(chosen.server.weighing) > 1:
        names = " and ".join(type(rule).__name__ for rule in chosen.server.weighing)
        raise SettingsError(f"algorithm: {names} both weigh uploads; an algorithm can have only one such rule")
    if not shift.on or shift_of(chosen):
        return chosen
    rule = Shift(shift.per, shift.share, shift.max_share, shift.warmup, shift.tensors)
    return Algorithm(chosen.client, chain(chosen.server, rule))


def named_algorithm(experiment: Experiment) -> Algorithm:
    """Algorithm of the settings, without the shift."""
    config = experiment.algorithm
    make = ALGORITHMS.get(config.name) or function("algorithm.name", config.name)
    taken = inspect.signature(make).parameters.values()
    names, free = {p.name for p in taken}, any(p.kind is p.VAR_KEYWORD for p in taken)
    args = {name: value for name, value in config.args.items() if name in names}
    if config.name not in ALGORITHMS:
        args |= {name: value for name, value in (config.model_extra or {}).items() if free or name not in names}
    with users_code(f"algorithm = {config.name!r} with {args}", config.name):
        made = make(**args)
    check_algorithm(made, f"algorithm.name = {config.name!r}: returns {type(made).__name__}")
    return made


def check_algorithm(given: object, where: str) -> None:
    """Raise SettingsError if an object is not an algorithm."""
    if not isinstance(given, Algorithm):
        raise SettingsError(f"{where}; it must be an Algorithm(client, server)")
    for rule, kind in ((given.client, ClientRule), (given.server, ServerRule)):
        if not isinstance(rule, kind):
            raise SettingsError(f"{where}, whose {rule!r} is not a {kind.__name__}")


def named_optimizer(experiment: Experiment) -> MakeOptimizer | None:
    """Local optimizer of the settings; None for SGD."""
    train, config = experiment.train, experiment.train.optimizer
    if config.name == "sgd":
        return None
    if config.name in OPTIMIZERS:
        args = AdamSettings(**config.args)
        return Adam(args.betas, args.eps, train.weight_decay if config.name == "adamw" else 0.0)
    return partial(function("train.optimizer", config.name), **config.args)


def try_optimizer(experiment: Experiment, optimizer: MakeOptimizer, task: Task) -> None:
    """Raise SettingsError if a user's optimizer cannot take a step with the model's parameters."""
    config = experiment.train.optimizer
    args = f" with {config.args}" if config.args else ""
    with users_code(f"train.optimizer = {config.name!r}{args}", config.name):
        check_optimizer(optimizer, task.weights)


def depends_on_travel(fed: Federation) -> str:
    """Name of a method of the client rule whose result depends on `travel`, '' if there is none."""
    rule, sent = fed.algorithm.client, fed.start().out
    start = tree.take(sent.params, fed.task.trained)
    w, memory = tree.tmap(lambda x: x + 1, start), rule.init(start)
    calls: dict[str, Callable[[Tensor], Params]] = {
        "message": lambda travel: rule.message(w, sent, memory, travel),
        "second": lambda travel: rule.second(w, sent, memory, travel),
        "remember": lambda travel: rule.remember(w, w, sent, memory, travel),
    }
    for method, call in calls.items():
        if defines(rule, method):
            near, far = call(torch.tensor(1.0)), call(torch.tensor(2.0))
            if near.keys() != far.keys() or not all(tree.same(x, far[name]) for name, x in near.items()):
                return method
    return ""


def rate(experiment: Experiment) -> cohorts.Rate:
    """Learning rate schedule of the settings."""
    train = experiment.train
    schedules: dict[str, Callable[[], cohorts.Rate]] = {
        "constant": lambda: cohorts.constant(train.lr),
        "decayed": lambda: cohorts.decayed(train.lr, train.decay),
        "steps": lambda: cohorts.stepped(train.lr, train.decay, train.milestones),
        "cosine": lambda: cohorts.cosine(train.lr, train.final, train.rounds),
        "strongly-convex": lambda: cohorts.strongly_convex(train.convexity, train.gamma),
    }
    chosen = schedules[train.schedule]() if train.schedule in schedules else named_rate(experiment)
    if train.warmup:
        chosen = cohorts.warmed_up(chosen, train.warmup)
    return (
        cohorts.annealed(chosen, cohorts.LOCAL[train.local_schedule])
        if train.local_schedule in cohorts.LOCAL
        else chosen
    )


def named_rate(experiment: Experiment) -> cohorts.Rate:
    """Schedule of the user, a function (round from 1, step of the round from 0) -> learning rate.

    It is called for the first step of the rounds, so that a wrong one fails before training.
    """
    name, rounds = experiment.train.schedule, experiment.train.rounds
    schedule = function("train.schedule", name)

    def lr(number: int, step: int) -> float:
        where = f"train.schedule = {name!r}: round {number}, step {step}"
        try:
            value = float(schedule(number, step))
        except RAISED as problem:
            raise TrainingError(f"{where}: {describe(problem)}") from problem
        if not 0 <= value < math.inf:
            raise TrainingError(f"{where}: returns {value}; a learning rate must be 0 or more, and finite")
        return value

    try:
        for number in range(1, min(rounds, TRIED) + 1):
            lr(number, 0)
    except TrainingError as problem:
        raise SettingsError(str(problem)) from problem
    return lambda number, step, count: torch.tensor([[lr(number, j) for j in step.tolist()]]).expand(len(count), -1)


def split(experiment: Experiment, data: Dataset) -> Partition:
    """Partition of the training examples among clients."""
    config, key = experiment.data, rng.key(experiment.seed, "partition")
    if config.partition in ("shards", "dirichlet", "labels") and not data.classes:
        raise SettingsError(
            f"data.partition = {config.partition!r}: needs class labels, and the targets are not classes; use 'iid'"
        )
    match config.partition:
        case "shards":
            made = partitions.shards(data.y, config.clients, key)
        case "dirichlet":
            made = partitions.dirichlet(data.y, config.clients, config.alpha, key, config.least)
        case "labels":
            made = partitions.labels(data.y, config.clients, config.labels, key)
        case "iid":
            made = partitions.iid(data.y, config.clients, key)
        case "natural":
            if data.owner is None:
                raise SettingsError(f"data.partition = 'natural': {data.name} has no owners; use another partition")
            if len(data.owner) != len(data.y):
                counts = f"{len(data.owner)} owners for {len(data.y)} examples"
                raise SettingsError(f"data.partition = 'natural': {data.name} has {counts}; needs one per example")
            made = partitions.natural(data.owner, config.clients, key, config.least, len(data.owners))
        case _:
            made = own_partition(experiment, data, key)
    return partitions.limited(made, config.most, rng.key(experiment.seed, "most")) if config.most else made


def own_partition(experiment: Experiment, data: Dataset, key: Tensor) -> Partition:
    """Partition by the user's function(data, clients, key, **partition_args).

    It returns a Partition or, per client, the indices of its examples; `clients` is 0 if the settings have no number.
    """
    config = experiment.data
    where = f"data.partition = {config.partition!r}"
    make = function("data.partition", config.partition)
    with users_code(where, config.partition):
        made = make(data, config.clients, key, **config.partition_args)
        count = len(data.y)
        made = partitions.checked(made, count) if isinstance(made, Partition) else partitions.listed(made, count)
    if config.clients not in (0, made.clients):
        raise SettingsError(f"{where}: returns {made.clients} clients; data.clients is {config.clients}")
    return made


def named_model(experiment: Experiment, data: Dataset) -> nn.Module:
    """Model of the settings, with weights drawn from the seed."""
    config = experiment.model
    if config.name not in MODELS and ":" not in config.name:
        known = ", ".join(MODELS)
        raise SettingsError(f"model.name = {config.name!r}: no such model; known are {known}, and module:function")
    check_inputs(experiment, data)
    make = MODELS.get(config.name) or function("model.name", config.name)
    fit = {"shape": data.shape, "classes": data.classes} if config.name in MODELS else {}
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")  # they are refused below
        torch.default_generator.manual_seed(int(rng.key(experiment.seed, "model")))
        with users_code(f"model = {config.name!r} with {config.args}", config.name):
            model = make(**(fit | config.args))
    if not isinstance(model, nn.Module):
        raise SettingsError(
            f"model.name = {config.name!r}: returns {type(model).__name__}; it must return a torch.nn.Module"
        )
    empty = [name for name, p in model.named_parameters() if not p.numel()]
    if empty and data.classes and config.name in MODELS:
        raise SettingsError(f"model = {config.name!r} with {config.args}: {empty[0]} is empty; sizes must be 1 or more")
    return model


def check_inputs(experiment: Experiment, data: Dataset) -> None:
    """Refuse examples that a model of this package does not support: characters or numbers, and their values."""
    name, args = experiment.model.name, experiment.model.args
    if name not in MODELS:
        return
    where, windows = f"model.name = {name!r}", not data.x.is_floating_point() and data.x.dtype != torch.uint8
    if name not in TEXT_MODELS:
        if windows:
            raise SettingsError(
                f"{where}: the examples are whole numbers, like characters; it needs images (uint8) or floating point "
                f"numbers. Models of characters are {' and '.join(TEXT_MODELS)}"
            )
        return
    if not windows:
        raise SettingsError(f"{where}: needs windows of characters, whole numbers of shape (length,)")
    known = args.get("classes", data.classes)
    low, high = (int(end) for end in torch.stack([*data.x.aminmax(), *data.test_x.aminmax()]).aminmax())
    if known and isinstance(known, int) and not 0 <= low <= high < known:
        wrong = low if low < 0 else high
        raise SettingsError(
            f"{where}: found character {wrong}; with {known} classes, characters must be 0 to {known - 1}. "
            "model.args.classes sets the size of the vocabulary"
        )
    positions, targets = args.get("positions", 1), data.y[0].numel()
    if experiment.train.loss == "cross-entropy" and not data.y.is_floating_point() and positions != targets:
        raise SettingsError(
            f"model.args.positions = {positions}: must be {targets}, the number of targets of each example"
        )


def function(setting: str, name: str) -> Callable[..., Any]:
    """Function of the user that a setting names."""
    with users_code(f"{setting} = {name!r}", name):
        return named(name)
