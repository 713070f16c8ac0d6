"""Settings become a federation: data, model, algorithm, links."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fedshift.algorithms import Algorithm, Shift, chain, fedavg, fedprox, scaffold
from fedshift.core import rng, tree
from fedshift.core.names import named
from fedshift.data import cohorts, datasets, partition
from fedshift.data.datasets import Dataset
from fedshift.data.partition import Partition
from fedshift.engines import Batched, Engine, ForkError, Processes, Sequential, StackError, Task, TrainingError
from fedshift.engines.client import Client
from fedshift.engines.workers import FORKS
from fedshift.experiment.links import bandwidth, links
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import SettingsError
from fedshift.models import MODELS
from fedshift.rounds.engine import describe, duplicate
from fedshift.rounds.evaluate import Loss, Metric, accuracy, soft_labels
from fedshift.rounds.federation import Federation


def build(
    experiment: Experiment,
    model: nn.Module | None = None,
    data: Dataset | None = None,
    loss: Loss | None = None,
    metric: Metric | None = None,
) -> Federation:
    """What the settings describe, with the caller's own model, data, loss or metric in place of named ones."""
    try:
        data = data or datasets.load(experiment.data.name)
    except (ValueError, ImportError, OSError) as problem:
        raise SettingsError(f"data.name = {experiment.data.name!r}: {problem}") from None
    except Exception as problem:  # of the user's own function
        raise SettingsError(f"data.name = {experiment.data.name!r}: {describe(problem)}") from problem
    train, device = experiment.train, device_of(experiment)
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("engine.device = 'cuda': there is no CUDA device here; 'cpu' works everywhere")
    if experiment.data.augment and (len(data.shape) != 3):
        raise SettingsError(f"data.augment = true: needs images (channels, height, width), not {data.shape}")
    if loss is None and train.loss == "cross-entropy":
        check_labels(data)
    with setting("model"):
        task = Task(
            model=(duplicate(model) if model is not None else named_model(experiment, data)).to(device),
            data=data.to(device),
            loss=loss or (F.cross_entropy if train.loss == "cross-entropy" else function("train.loss", train.loss)),
            metric=metric or named_metric(experiment),
            momentum=train.momentum,
            weight_decay=train.weight_decay,
            clip=train.clip,
            augment=experiment.data.augment,
        )
    try_out(task, train.batch)
    if experiment.engine.name == "batched":
        batched(experiment, task)
    with setting("data.partition"):
        held = split(experiment, data)
    groups, group = links(experiment)
    with setting("train.cohort"):
        if train.selection == "stratified":
            drawn = cohorts.stratified(held, group, train.cohort, experiment.seed, train.dropout)
        else:
            drawn = cohorts.uniform(held, train.cohort, experiment.seed, train.dropout)
    fed = Federation(
        task=task,
        algorithm=algorithm(experiment),
        partition=held,
        cohorts=drawn,
        groups=groups,
        group=group,
        bandwidth=bandwidth(experiment, groups, group),
        epochs=train.epochs,
        batch=train.batch,
        rate=rate(experiment),
        seed=experiment.seed,
        weights=experiment.algorithm.weights,
        patience=train.patience,
        bound=experiment.bounds.norm,
        cap=experiment.bounds.weight,
    )
    if (tensors := experiment.shift.tensors) is not None and experiment.shift.on and not fed.shifted:
        there = Shift(experiment.shift.per, tensors=("*",)).chosen(tree.take(task.params, task.trained))
        kind = "trained ones" if experiment.shift.per == "layer" else "trained ones with filters of two inputs or more"
        raise SettingsError(f"shift.tensors = {tensors}: there is no such tensor among the {kind}: {', '.join(there)}")
    return fed


@contextmanager
def setting(name: str) -> Iterator[None]:
    """What is wrong with a value shows only when it is used: say whose value it is."""
    try:
        yield
    except SettingsError:
        raise
    except ValueError as problem:
        raise SettingsError(f"{name}: {problem}") from None


def check_labels(data: Dataset) -> None:
    """Cross-entropy takes floating point targets of any meaning for probabilities."""
    if data.y.is_floating_point() and not (soft_labels(data.y) and soft_labels(data.test_y)):
        raise SettingsError(
            f"train.loss = 'cross-entropy': the targets are floating point numbers of shape {tuple(data.y.shape)} and "
            "not class probabilities; labels must be whole numbers, and for regression train.loss = "
            "'torch.nn.functional:mse_loss' compares outputs and targets of one shape"
        )


def named_metric(experiment: Experiment) -> Metric | None:
    """The metric of the settings; None where the loss is the score."""
    name = experiment.train.metric
    return accuracy if name == "accuracy" else None if name == "loss" else function("train.metric", name)


def require_goal(experiment: Experiment) -> None:
    """SettingsError where nothing says whether a lower or a higher metric is better."""
    if experiment.train.direction is None:
        raise SettingsError(
            f"train.metric = {experiment.train.metric!r}: its name does not say which scores are better; "
            "set train.goal to 'min' (lower is better) or 'max' (higher is better)"
        )


def try_out(task: Task, batch: int) -> None:
    """Score a few examples before anything is trained or written: a model that does not fit the data fails here.

    A model with buffers that must not change, or with weights that are not float32, is also tried in training.
    """
    client = Client(task)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Using a target size")  # which torch broadcasts, to no good end
            client.score(task.params, slice(0, 64))
        if task.held or task.data.dtype != torch.float32:
            client.try_step(batch)
    except TrainingError as problem:
        seen, classes = tuple(task.data.x.shape[1:]), task.data.classes
        about = f"{type(task.model).__name__} on examples of shape {seen}" + (
            f" with {classes} classes" if classes else ""
        )
        raise SettingsError(f"{about}: {str(problem).removeprefix('evaluation: ')}") from problem
    except ValueError as problem:  # of a buffer that training changes
        raise SettingsError(f"model: {problem}") from None


def device_of(experiment: Experiment) -> str:
    """'cpu' or 'cuda'."""
    said = experiment.engine
    if said.device != "auto":
        return said.device
    return "cuda" if said.name in ("auto", "batched") and torch.cuda.is_available() else "cpu"


def packable(experiment: Experiment) -> bool:
    """Whether it wants all clients trained at once, with those of other runs where there are any."""
    name = experiment.engine.name
    return name == "batched" or (name == "auto" and device_of(experiment) == "cuda")


def engine(experiment: Experiment, task: Task, cores: int) -> Engine:
    said, device = experiment.engine, device_of(experiment)
    if said.name == "batched":
        return batched(experiment, task)
    if packable(experiment):
        with suppress(StackError):
            return Batched(task, said.precision, said.deterministic)
    workers = min(said.workers or cores, experiment.train.cohort)
    many = said.name == "processes" or (said.name == "auto" and workers > 1 and FORKS)
    if not many or device != "cpu":
        return Sequential(task, said.precision)
    try:
        return Processes(task, workers)
    except ForkError:
        if experiment.engine.name == "processes":
            raise
        return Sequential(task, said.precision)


def batched(experiment: Experiment, task: Task) -> Batched:
    """The engine that was asked for by its name, or a SettingsError that says why this model is not for it."""
    try:
        return Batched(task, experiment.engine.precision, experiment.engine.deterministic)
    except StackError as problem:
        raise SettingsError(f"engine.name = 'batched': {problem}") from problem


def algorithm(experiment: Experiment) -> Algorithm:
    said, shift = experiment.algorithm, experiment.shift
    match said.name:
        case "fedavg":
            chosen = fedavg()
        case "fedprox":
            chosen = fedprox(said.mu)
        case "scaffold":
            chosen = scaffold(said.control)
    if not shift.on:
        return chosen
    rule = Shift(shift.per, shift.share, shift.max_share, shift.warmup, shift.tensors)
    return Algorithm(chosen.client, chain(chosen.server, rule))


def rate(experiment: Experiment) -> cohorts.Rate:
    train = experiment.train
    if train.schedule == "strongly-convex":
        return cohorts.strongly_convex(train.convexity, train.gamma)
    return cohorts.decayed(train.lr, train.decay) if train.schedule == "decayed" else cohorts.constant(train.lr)


def split(experiment: Experiment, data: Dataset) -> Partition:
    said, key = experiment.data, rng.key(experiment.seed, "partition")
    if said.partition != "iid" and not data.classes:
        raise SettingsError(
            f"data.partition = {said.partition!r}: needs labels, and these targets are none; 'iid' works"
        )
    if said.partition == "dirichlet":
        return partition.dirichlet(data.y, said.clients, said.alpha, key, said.least)
    if said.partition == "labels":
        return partition.labels(data.y, said.clients, said.labels, key)
    return (partition.shards if said.partition == "shards" else partition.iid)(data.y, said.clients, key)


def named_model(experiment: Experiment, data: Dataset) -> nn.Module:
    """A model by name, its weights drawn from the seed."""
    said = experiment.model
    if said.name not in MODELS and ":" not in said.name:
        known = ", ".join(MODELS)
        raise SettingsError(f"model.name = {said.name!r}: no such model; known are {known}, and module:function")
    make = MODELS.get(said.name) or function("model.name", said.name)
    fit = {"shape": data.shape, "classes": data.classes} if said.name in MODELS else {}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(rng.key(experiment.seed, "model")))
        try:
            model = make(**fit, **said.args)
        except (TypeError, ValueError) as problem:
            raise SettingsError(f"model = {said.name!r} with {said.args}: {' '.join(str(problem).split())}") from None
        except Exception as problem:
            raise SettingsError(f"model = {said.name!r} with {said.args}: {describe(problem)}") from problem
    if not isinstance(model, nn.Module):
        raise SettingsError(f"model.name = {said.name!r}: gives {type(model).__name__}, not a torch.nn.Module")
    return model


def function(setting: str, name: str) -> Callable[..., Any]:
    """The user's own function that a setting names."""
    try:
        return named(name)
    except ValueError as problem:
        raise SettingsError(f"{setting} = {name!r}: {problem}") from None
    except Exception as problem:  # while the user's module was read
        raise SettingsError(f"{setting} = {name!r}: {describe(problem)}") from problem
