"""Settings become a federation: data, model, algorithm, links."""

import copy
import importlib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedshift import rng
from fedshift.algorithms import Algorithm, fedavg, fedprox, layers, scaffold, shifted
from fedshift.codecs import (
    BitPack,
    Cast,
    Codec,
    Coder,
    Groups,
    KMeans,
    PerBlock,
    PerChannel,
    PerTensor,
    Quantizer,
    Range,
    Stochastic,
    Uniform,
    Zstd,
)
from fedshift.data import cohorts, datasets, partition
from fedshift.data.datasets import Dataset
from fedshift.data.partition import Partition
from fedshift.engines import Engine, ForkError, Processes, Sequential, Task, TrainingError
from fedshift.engines.base import told
from fedshift.engines.client import Client
from fedshift.evaluate import Loss, Metric, accuracy
from fedshift.loop import Federation, Group
from fedshift.models import MODELS
from fedshift.settings import Bits, Experiment, Link, SettingsError
from fedshift.uplink import Uplink
from fedshift.wire import EXACT

QUANTIZERS: dict[str, Callable[[int], Quantizer]] = {"kmeans": KMeans, "uniform": Uniform, "stochastic": Stochastic}
CODERS: dict[str, Callable[[], Coder]] = {"bitpack": BitPack, "zstd": Zstd, "range": Range}
GROUPS: dict[str, Groups] = {"tensor": PerTensor(), "channel": PerChannel()}


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
        raise SettingsError(f"data.name = {experiment.data.name!r}: {told(problem)}") from problem
    train, device = experiment.train, experiment.engine.device
    if device == "cuda" and not torch.cuda.is_available():
        raise SettingsError("engine.device = 'cuda': there is no CUDA device here; 'cpu' works everywhere")
    if experiment.data.augment and (len(data.shape) != 3):
        raise SettingsError(f"data.augment = true: needs images (channels, height, width), not {data.shape}")
    try:
        task = Task(
            model=(copy.deepcopy(model) if model is not None else named_model(experiment, data)).to(device),
            data=data.to(device),
            loss=loss or (F.cross_entropy if train.loss == "cross-entropy" else named("train.loss", train.loss)),
            metric=metric or (accuracy if train.metric == "accuracy" else named("train.metric", train.metric)),
            momentum=train.momentum,
            weight_decay=train.weight_decay,
            clip=train.clip,
            augment=experiment.data.augment,
        )
        try_out(task)
        held = split(experiment, data)
        groups, group = links(experiment)
        rates = bandwidth(experiment, groups, group)
        if train.selection == "stratified":
            drawn = cohorts.stratified(held, group, train.cohort, experiment.seed, train.dropout)
        else:
            drawn = cohorts.uniform(held, train.cohort, experiment.seed, train.dropout)
        chosen = algorithm(experiment, task)
    except SettingsError:
        raise
    except ValueError as problem:
        raise SettingsError(f"data, model or train: {problem}") from None
    return Federation(
        task=task,
        algorithm=chosen,
        partition=held,
        cohorts=drawn,
        groups=groups,
        group=group,
        bandwidth=rates,
        epochs=train.epochs,
        batch=train.batch,
        rate=rate(experiment),
        seed=experiment.seed,
        weights=experiment.algorithm.weights,
        patience=train.patience,
    )


def try_out(task: Task) -> None:
    """Score a few examples before anything is trained or written: a model that does not fit the data fails here."""
    try:
        Client(task).score(task.params, slice(0, 64))
    except TrainingError as problem:
        seen, classes = tuple(task.data.x.shape[1:]), task.data.classes
        about = f"{type(task.model).__name__} on examples of shape {seen}" + (
            f" with {classes} classes" if classes else ""
        )
        raise SettingsError(f"{about}: {str(problem).removeprefix('evaluation: ')}") from problem


def engine(experiment: Experiment, task: Task, cores: int) -> Engine:
    workers = min(experiment.engine.workers or cores, experiment.train.cohort)
    # elsewhere a worker would begin by running the user's script once more, which not every script is written for
    forks = sys.platform == "linux"
    many = experiment.engine.name == "processes" or (experiment.engine.name == "auto" and workers > 1 and forks)
    if not many or experiment.engine.device != "cpu":
        return Sequential(task)
    try:
        return Processes(task, workers)
    except ForkError:
        if experiment.engine.name == "processes":
            raise
        return Sequential(task)


def algorithm(experiment: Experiment, task: Task) -> Algorithm:
    said, shift = experiment.algorithm, experiment.shift
    match said.name:
        case "fedavg":
            chosen = fedavg()
        case "fedprox":
            chosen = fedprox(said.mu)
        case "scaffold":
            chosen = scaffold(said.control)
    tensors = shift.tensors
    if shift.on and not layers(task.params, tensors):
        raise SettingsError(f"shift.tensors = {tensors}: there is no such tensor; there are {', '.join(task.params)}")
    if tensors is None and set(layers(task.params)) - set(task.trained):  # a buffer of two axes is no weight
        tensors = tuple(name for name in layers(task.params) if name in task.trained)
    return shifted(chosen, shift.max_share, shift.warmup, tensors) if shift.on else chosen


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


def links(experiment: Experiment) -> tuple[list[Group], Tensor]:
    """The groups of clients that upload alike, and the group of each client (N,)."""
    said, clients = experiment.uplink, experiment.data.clients
    common = said.model_dump(exclude={"bits", "bandwidth", "group"})

    def link(bits: Bits, name: str) -> Group:
        every = said.bandwidth.get(bits) if isinstance(said.bandwidth, dict) else said.bandwidth
        return group_of(name, Link(**common, bits=bits, bandwidth=None if isinstance(every, tuple) else every))

    if isinstance(said.bits, tuple):
        kinds = sorted(set(said.bits), reverse=True)
        return [link(bits, f"{bits} bit") for bits in kinds], torch.tensor([kinds.index(bits) for bits in said.bits])
    if isinstance(said.bits, dict):
        groups = [link(bits, f"{bits} bit") for bits in said.bits]
        return groups, _populated(groups, interleave(list(said.bits.values()), clients), "uplink.bits")
    if isinstance(said.bits, str):
        parts = [cast(Bits, int(bits)) for bits in said.bits.split("+")]
        groups = [link(bits, f"{bits} bit{f' ({i})' * (parts.count(bits) > 1)}") for i, bits in enumerate(parts, 1)]
        return groups, _populated(groups, torch.arange(clients) % len(parts), "uplink.bits")
    if not said.group:
        return [link(said.bits, f"{said.bits} bit")], torch.zeros(clients, dtype=torch.int64)
    return named_groups(experiment, link)


def named_groups(experiment: Experiment, link: Callable[[Bits, str], Group]) -> tuple[list[Group], Tensor]:
    """Groups with lists of clients first, then those with shares among the others, then everybody else."""
    said, clients = experiment.uplink, experiment.data.clients
    assert isinstance(said.bits, int)
    groups = [group_of(name, own) for name, own in said.group.items()] + [link(said.bits, "others")]
    others = len(groups) - 1
    group = torch.full((clients,), others)
    for i, (name, own) in enumerate(said.group.items()):
        for client in own.clients or ():
            if client >= clients or group[client] != others:
                why = f"there are {clients} clients" if client >= clients else "it is in another group already"
                raise SettingsError(f"uplink.group.{name}.clients: client {client}: {why}")
            group[client] = i
    shares = [own.share or 0.0 for own in said.group.values()]
    free = torch.nonzero(group == others)[:, 0]
    if any(shares) and len(free):
        mine = [share * clients / len(free) for share in shares]
        if sum(mine) > 1 + 1e-6:
            raise SettingsError("uplink.group: more clients are listed than the shares leave over")
        group[free] = interleave([*mine, max(0.0, 1 - sum(mine))], len(free))
    if not (group == others).any():
        groups.pop()
    return groups, _populated(groups, group, "uplink.group")


def bandwidth(experiment: Experiment, groups: Sequence[Group], group: Tensor) -> Tensor | None:
    """Bytes a second of each client (N,); None where nothing is said."""
    said = experiment.uplink.bandwidth
    if isinstance(said, tuple):
        return torch.tensor(said)
    if not any(one.bandwidth for one in groups):
        return None
    return torch.tensor([one.bandwidth or math.inf for one in groups])[group]


def _populated(groups: Sequence[Group], group: Tensor, where: str) -> Tensor:
    for i, one in enumerate(groups):
        if not (group == i).any():
            raise SettingsError(f"{where}: group '{one.name}' is empty: its share of {len(group)} clients is none")
    return group


def group_of(name: str, link: Link) -> Group:
    return Group(name, Uplink(codec_of(link), link.send == "updates", link.feedback), link.bandwidth)


def codec_of(link: Link) -> Codec:
    coder = CODERS[link.coder]()
    if link.bits == 32:
        return EXACT if link.coder == "bitpack" else Codec(EXACT.quantizer, coder)
    if link.bits == 16:
        return Codec(Cast("bfloat16"), coder)
    groups = PerBlock(link.per) if isinstance(link.per, int) else GROUPS[link.per]
    return Codec(QUANTIZERS[link.quantizer](link.bits), coder, groups)


def interleave(shares: Sequence[float], n: int) -> Tensor:
    """Shares spread as evenly as can be: each next client goes to the group that is furthest behind.

    >>> interleave([0.5, 0.25, 0.25], 8).tolist()
    [0, 1, 2, 0, 0, 1, 2, 0]
    """
    counts, group = [0] * len(shares), []
    for i in range(n):
        g = max(range(len(shares)), key=lambda g: (round(shares[g] * (i + 1) - counts[g], 9), -g))
        counts[g] += 1
        group.append(g)
    return torch.tensor(group)


def named_model(experiment: Experiment, data: Dataset) -> nn.Module:
    """A model by name, its weights drawn from the seed."""
    said = experiment.model
    if said.name not in MODELS and ":" not in said.name:
        known = ", ".join(MODELS)
        raise SettingsError(f"model.name = {said.name!r}: no such model; known are {known}, and module:function")
    make = MODELS.get(said.name) or named("model.name", said.name)
    fit = {"shape": data.shape, "classes": data.classes} if said.name in MODELS else {}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(rng.key(experiment.seed, "model")))
        try:
            model = make(**fit, **said.args)
        except (TypeError, ValueError) as problem:
            raise SettingsError(f"model = {said.name!r} with {said.args}: {problem}") from None
        except Exception as problem:
            raise SettingsError(f"model = {said.name!r} with {said.args}: {told(problem)}") from problem
    if not isinstance(model, nn.Module):
        raise SettingsError(f"model.name = {said.name!r}: gives {type(model).__name__}, not a torch.nn.Module")
    return model


def named(setting: str, name: str) -> Callable[..., Any]:
    """What `module:function` stands for, with the current folder among the places to look."""
    module, colon, attribute = name.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        thing = getattr(importlib.import_module(module), attribute) if colon else None
    except (ImportError, AttributeError) as problem:
        raise SettingsError(f"{setting} = {name!r}: {problem}") from None
    except Exception as problem:  # while the user's module was read
        raise SettingsError(f"{setting} = {name!r}: {told(problem)}") from problem
    finally:
        sys.path.remove(here)
    if not callable(thing):
        raise SettingsError(f"{setting} = {name!r}: must be module:function")
    return thing  # type: ignore[no-any-return]
