"""Checkpoints of a Flower training, which Flower itself has none of.

    flower.ROUND.CHECKSUM.safetensors     the model, and arrays and numbers of the strategies; the two newest are kept

Nothing is pickled. What a strategy holds beside arrays, numbers and text cannot be kept, and is refused by
name: before the first round, or as soon as it is there.
"""

import copy
from collections.abc import Callable
from functools import partial
from logging import getLogger
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from fedshift.core.files import TEMPORARY, Lock, RunError, read_tensors, write_tensors
from fedshift.core.types import Params
from fedshift.flower.addon.arrays import to_params, to_record

KEPT = 2
LOG = getLogger("flwr.fedshift")
FUNCTIONS = FunctionType, BuiltinFunctionType, MethodType, type, partial  # settings, which do not change
SCALARS = bool, int, float, str, type(None)


class SavedRounds(NamedTuple):
    number: int  # rounds done
    arrays: ArrayRecord
    session: str
    accepted: dict[str, int]
    skipped: int


class Saver:
    """The checkpoints in one folder, of one chain of strategies."""

    def __init__(self, folder: Path, chain: list[Strategy]) -> None:
        self.folder, self.chain = folder, chain
        self.first = [_numbers(strategy) for strategy in chain]  # as the strategies were made
        for strategy in chain:
            _arrays(strategy)  # refuses what cannot be kept
        if folder.exists() and not folder.is_dir():
            raise RunError(f"{folder}: must be a folder for checkpoints, and is a file")
        self.oldest = min((number for number, _ in self._newest_first()), default=0)  # training may go back to it

    def lock(self) -> Lock:
        """Of the folder, while training writes to it: a server that was thought dead may be alive."""
        return Lock(self.folder)

    def save(self, state: SavedRounds) -> None:
        tensors: Params = {f"model/{name}": x for name, x in to_params(state.arrays).items()}
        kinds: dict[str, tuple[str, list[str]]] = {}  # how each attribute holds its arrays, and their order
        changed: list[dict[str, Any]] = []
        for i, strategy in enumerate(self.chain):
            for name, (kind, arrays) in _arrays(strategy).items():
                kinds[f"{i}/{name}"] = kind, list(arrays)
                tensors |= {f"{i}/{name}/{key}": x for key, x in arrays.items()}
            now, first = _numbers(strategy), self.first[i]
            changed.append({name: value for name, value in now.items() if name not in first or first[name] != value})
        about = {
            "number": state.number,
            "order": list(state.arrays),
            "session": state.session,
            "accepted": state.accepted,
            "skipped": state.skipped,
            "kinds": kinds,
            "changed": changed,
            "strategies": [type(strategy).__name__ for strategy in self.chain],
        }
        write_tensors(self.folder, f"flower.{state.number:06d}", tensors, about)
        kept = self._newest_first()
        for _, path in kept[KEPT:]:
            path.unlink(missing_ok=True)
        self.oldest = kept[:KEPT][-1][0]

    def restore(self, like: ArrayRecord) -> SavedRounds | None:
        """The newest whole checkpoint, with the strategies as they were then; None where there is none.

        Those that cannot be read are put aside, not removed; when no other is left, nothing is changed.
        """
        damaged: dict[Path, str] = {}
        for number, path in self._newest_first():
            try:
                tensors, about = read_tensors(path)
                _check(path, number, tensors, about)
            except RunError as problem:
                damaged[path] = str(problem)
                continue
            saved = self._set(path, tensors, about, like)
            for other, why in damaged.items():
                LOG.warning("%s; resuming from round %d", why, saved.number)
                other.rename(other.with_suffix(".damaged"))
            for rest in self.folder.glob(f"flower.*{TEMPORARY}"):
                rest.unlink()
            return saved
        if damaged:
            raise RunError(f"{next(iter(damaged.values()))}; there is no whole checkpoint to go on from")
        return None

    def _set(self, path: Path, tensors: Params, about: dict[str, Any], like: ArrayRecord) -> SavedRounds:
        names = [type(strategy).__name__ for strategy in self.chain]
        if about["strategies"] != names:
            was, now = " around ".join(about["strategies"]), " around ".join(names)
            raise RunError(f"{path}: was saved with {was}, not {now}")
        model = {name: tensors[f"model/{name}"] for name in about["order"]}
        if _kinds(model) != _kinds(to_params(like)):
            raise RunError(f"{path}: holds another model than the one that training begins with")
        for place, (kind, keys) in about["kinds"].items():
            i, _, name = place.partition("/")
            setattr(self.chain[int(i)], name, REBUILD[kind]({key: tensors[f"{place}/{key}"] for key in keys}))
        for strategy, numbers in zip(self.chain, about["changed"], strict=True):
            vars(strategy).update(numbers)
        return SavedRounds(about["number"], to_record(model), about["session"], about["accepted"], about["skipped"])

    def _newest_first(self) -> list[tuple[int, Path]]:
        found = [(path.name.split(".")[1], path) for path in self.folder.glob("flower.*.*.safetensors")]
        return sorted(((int(number), path) for number, path in found if number.isdecimal()), reverse=True)


def _numbers(strategy: Strategy) -> dict[str, Any]:
    """Attributes that are numbers or text, or lists and dictionaries of them."""
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in vars(strategy).items()}
    return {name: copy.copy(x) for name, x in plain.items() if _plain(x)}


def _plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and isinstance(x, SCALARS) for key, x in value.items())
    several = isinstance(value, list | tuple) and all(isinstance(x, SCALARS) for x in value)
    return several or isinstance(value, SCALARS)


def _check(path: Path, number: int, tensors: Params, about: dict[str, Any]) -> None:
    """RunError where a file is not what `save` wrote for the round that its name says."""
    needed = {"number", "order", "session", "accepted", "skipped", "kinds", "changed", "strategies"}
    if about.keys() != needed:
        raise RunError(f"{path}: damaged: it does not say which training and round it is of")
    names = {f"model/{name}" for name in about["order"]}
    names |= {f"{place}/{key}" for place, (_, keys) in about["kinds"].items() for key in keys}
    if names != tensors.keys():
        raise RunError(f"{path}: damaged: its tensors are not those that it lists")
    if about["number"] != number:
        raise RunError(f"{path}: is the checkpoint of round {about['number']}, which is not the one its name says")


def _kinds(params: Params) -> dict[str, tuple[torch.Size, bool]]:
    return {name: (x.shape, x.is_floating_point()) for name, x in params.items()}  # some strategies change precision


def _arrays(strategy: Strategy) -> dict[str, tuple[str, Params]]:
    """Attributes that are arrays: how they are held, and the arrays by name."""
    found = {}
    for name, value in vars(strategy).items():
        if _plain(value) or isinstance(value, (np.generic, Strategy, *FUNCTIONS)):
            continue
        if isinstance(value, ArrayRecord):
            found[name] = "record", to_params(value)
        elif isinstance(value, np.ndarray):
            found[name] = "array", {"0": _tensor(value)}
        elif isinstance(value, Tensor):
            found[name] = "tensor", {"0": value.clone()}
        elif isinstance(value, list | tuple) and all(isinstance(x, np.ndarray | np.generic) for x in value):
            found[name] = "list", {str(i): _tensor(x) for i, x in enumerate(value)}
        elif isinstance(value, dict) and all(isinstance(x, np.ndarray | np.generic) for x in value.values()):
            found[name] = "arrays", {key: _tensor(x) for key, x in value.items()}
        elif isinstance(value, dict) and all(isinstance(x, Tensor) for x in value.values()):
            found[name] = "tensors", {key: x.clone() for key, x in value.items()}
        else:
            held = type(value).__name__
            raise ValueError(
                f"FedShift(checkpoint=...): {type(strategy).__name__}.{name} is of type {held}, which a checkpoint "
                "cannot hold; leave the checkpoint out, or the attribute"
            )
    return found


def _tensor(x: Any) -> Tensor:
    return torch.from_numpy(np.array(x, order="C"))


REBUILD: dict[str, Callable[[Params], Any]] = {
    "record": lambda found: ArrayRecord({name: Array(x.numpy()) for name, x in found.items()}),
    "array": lambda found: found["0"].numpy(),
    "tensor": lambda found: found["0"],
    "list": lambda found: [x.numpy() for x in found.values()],
    "arrays": lambda found: {name: x.numpy() for name, x in found.items()},
    "tensors": dict,
}
