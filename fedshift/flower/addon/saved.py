"""Checkpoints of a Flower training.

    flower.ROUND.CHECKSUM.safetensors     the model, and arrays and numbers of the strategies; the two newest are kept

Nothing is pickled. An attribute of a strategy that is neither an array, nor a number, nor text cannot be stored and
raises an error: before the first round, or in the round that sets it.
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

from fedshift.core.files import TEMPORARY, Lock, RunError, newest_first, read_tensors, set_aside, write_tensors
from fedshift.core.types import Params
from fedshift.flower.addon.arrays import to_params, to_record

KEPT = 2
LOG = getLogger("flwr.fedshift")
FUNCTIONS = FunctionType, BuiltinFunctionType, MethodType, type, partial  # constant settings
SCALARS = bool, int, float, str, type(None)


class SavedRounds(NamedTuple):
    """State of the server after a round."""

    number: int  # completed rounds
    arrays: ArrayRecord
    session: str
    accepted: dict[str, int]
    skipped: int


class Saver:
    """Checkpoints of one chain of strategies, in one folder."""

    def __init__(self, folder: Path, chain: list[Strategy]) -> None:
        self.folder, self.chain = folder, chain
        self.first = [_numbers(strategy) for strategy in chain]  # before training
        for strategy in chain:
            _arrays(strategy)  # ValueError for attributes that cannot be stored
        if folder.exists() and not folder.is_dir():
            raise RunError(f"{folder}: checkpoint must be a folder, not a file")
        self.oldest = min(
            (number for number, _ in newest_first(self.folder, "flower")), default=0
        )  # training may resume from it

    def lock(self) -> Lock:
        """Lock the folder during training: a server that seems to be gone may still write to it."""
        return Lock(self.folder)

    def save(self, state: SavedRounds) -> None:
        tensors: Params = {f"model/{name}": x for name, x in to_params(state.arrays).items()}
        kinds: dict[str, tuple[str, list[str]]] = {}  # container type and keys of the arrays of each attribute
        changed: list[dict[str, Any]] = []
        for i, strategy in enumerate(self.chain):
            for name, (kind, arrays) in _arrays(strategy).items():
                kinds[f"{i}/{name}"] = kind, list(arrays)
                tensors |= {f"{i}/{name}/{key}": x for key, x in arrays.items()}
            now, first = _numbers(strategy), self.first[i]
            changed.append({name: value for name, value in now.items() if name not in first or first[name] != value})
        metadata = {
            "number": state.number,
            "order": list(state.arrays),
            "session": state.session,
            "accepted": state.accepted,
            "skipped": state.skipped,
            "kinds": kinds,
            "changed": changed,
            "strategies": [type(strategy).__name__ for strategy in self.chain],
        }
        write_tensors(self.folder, f"flower.{state.number:06d}", tensors, metadata)
        checkpoints = newest_first(self.folder, "flower")
        for _, path in checkpoints[KEPT:]:
            path.unlink(missing_ok=True)
        self.oldest = checkpoints[:KEPT][-1][0]

    def restore(self, like: ArrayRecord) -> SavedRounds | None:
        """Load the newest intact checkpoint and set the state of the strategies; None if there is no checkpoint.

        Damaged checkpoints are renamed, not removed. If all are damaged, nothing is changed and RunError is raised.
        """
        damaged: dict[Path, str] = {}
        for number, path in newest_first(self.folder, "flower"):
            try:
                tensors, metadata = read_tensors(path)
                _check(path, number, tensors, metadata)
            except RunError as problem:
                damaged[path] = str(problem)
                continue
            saved = self._set(path, tensors, metadata, like)
            for other, reason in damaged.items():
                LOG.warning("%s; resuming from round %d", reason, saved.number)
                set_aside(other)
            for leftover in self.folder.glob(f"flower.*{TEMPORARY}"):
                leftover.unlink()
            return saved
        if damaged:
            raise RunError(f"{next(iter(damaged.values()))}; there is no intact checkpoint to resume from")
        return None

    def _set(self, path: Path, tensors: Params, metadata: dict[str, Any], like: ArrayRecord) -> SavedRounds:
        names = [type(strategy).__name__ for strategy in self.chain]
        if metadata["strategies"] != names:
            was, now = " around ".join(metadata["strategies"]), " around ".join(names)
            raise RunError(f"{path}: was saved with {was}, not {now}")
        model = {name: tensors[f"model/{name}"] for name in metadata["order"]}
        if _kinds(model) != _kinds(to_params(like)):
            raise RunError(f"{path}: contains a different model than the initial arrays")
        for place, (kind, keys) in metadata["kinds"].items():
            i, _, name = place.partition("/")
            setattr(self.chain[int(i)], name, REBUILD[kind]({key: tensors[f"{place}/{key}"] for key in keys}))
        for strategy, numbers in zip(self.chain, metadata["changed"], strict=True):
            vars(strategy).update(numbers)
        return SavedRounds(
            metadata["number"], to_record(model), metadata["session"], metadata["accepted"], metadata["skipped"]
        )


def _numbers(strategy: Strategy) -> dict[str, Any]:
    """Return the attributes that are numbers or text, or lists and dictionaries of them."""
    plain = {name: value.item() if isinstance(value, np.generic) else value for name, value in vars(strategy).items()}
    return {name: copy.copy(x) for name, x in plain.items() if _plain(x)}


def _plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and isinstance(x, SCALARS) for key, x in value.items())
    several = isinstance(value, list | tuple) and all(isinstance(x, SCALARS) for x in value)
    return several or isinstance(value, SCALARS)


def _check(path: Path, number: int, tensors: Params, metadata: dict[str, Any]) -> None:
    """Raise RunError for a file that `save` did not write for the round in its name."""
    needed = {"number", "order", "session", "accepted", "skipped", "kinds", "changed", "strategies"}
    if metadata.keys() != needed:
        raise RunError(f"{path}: damaged: its metadata are incomplete")
    names = {f"model/{name}" for name in metadata["order"]}
    names |= {f"{place}/{key}" for place, (_, keys) in metadata["kinds"].items() for key in keys}
    if names != tensors.keys():
        raise RunError(f"{path}: damaged: its tensors differ from those in its metadata")
    if metadata["number"] != number:
        raise RunError(f"{path}: contains the checkpoint of round {metadata['number']}, not of the round in its name")


def _kinds(params: Params) -> dict[str, tuple[torch.Size, bool]]:
    return {name: (x.shape, x.is_floating_point()) for name, x in params.items()}  # some strategies change precision


def _arrays(strategy: Strategy) -> dict[str, tuple[str, Params]]:
    """Return the attributes that are arrays: container type, and arrays by name."""
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
            kind = type(value).__name__
            raise ValueError(
                f"FedShift(checkpoint=...): {type(strategy).__name__}.{name} is of type {kind}, which a checkpoint "
                "cannot store; remove the attribute or the checkpoint argument"
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
