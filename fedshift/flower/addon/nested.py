"""Inspection and state of the strategies that `FedShift` wraps, which may wrap others in turn."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedAvg, FedXgbBagging, FedXgbCyclic, QFedAvg, Strategy
from torch import Tensor

from fedshift.core.types import Params
from fedshift.flower.addon.arrays import only
from fedshift.flower.addon.replies import MAX_WEIGHT, Distance
from fedshift.flower.addon.scaffold import Scaffold


def layers_of(strategy: Strategy) -> list[Strategy]:
    """Return the strategy, the one it wraps, and so on; TypeError or ValueError for one that cannot be wrapped."""
    found: list[Strategy] = []
    inner: object = strategy
    while True:
        _check(inner)
        assert isinstance(inner, Strategy)
        found.append(inner)
        wrapped = [x for name, x in vars(inner).items() if isinstance(x, Strategy) or name == "strategy"]
        if len(wrapped) > 1:
            raise ValueError(f"FedShift({type(inner).__name__}): wraps {len(wrapped)} strategies; only one is allowed")
        if not wrapped:
            break
        inner = wrapped[0]
    names = [type(layer).__name__ for layer in found]
    if any(name.startswith("DifferentialPrivacyServerSide") for name in names[: _place(found, Scaffold)]):
        raise ValueError("FedShift: Scaffold needs the uploads as received; use Scaffold(DifferentialPrivacy...(...))")
    return found


def _place(strategies: list[Strategy], kind: type[Strategy]) -> int:
    return next((i for i, strategy in enumerate(strategies) if isinstance(strategy, kind)), 0)


def _check(strategy: object) -> None:
    name = type(strategy).__name__
    if not isinstance(strategy, Strategy):
        what = f"the class {strategy.__name__}" if isinstance(strategy, type) else name
        raise TypeError(f"FedShift({what}): needs an instance of a flwr.serverapp.strategy class, such as FedAvg()")
    if isinstance(strategy, FedXgbBagging | FedXgbCyclic):
        raise ValueError(f"FedShift({name}): models of trees cannot be quantized or shifted")
    if any("secagg" in kind.__name__.lower().replace("secureaggregation", "secagg") for kind in type(strategy).__mro__):
        raise ValueError(f"FedShift({name}): with secure aggregation the server cannot decode uploads")


def weighting_key(strategies: list[Strategy]) -> str | None:
    """Metric by which uploads are weighted, None for equal weights."""
    keys = (getattr(strategy, "weighted_by_key", None) for strategy in reversed(strategies))
    return next((key for key in keys if isinstance(key, str)), None)


def weights(strategies: list[Strategy]) -> list[str]:
    """All metrics that affect the weight of an upload."""
    key = weighting_key(strategies)
    losses = [strategy.train_loss_key for strategy in strategies if isinstance(strategy, QFedAvg)]
    return losses if key is None else [key, *losses]


def alike(strategies: list[Strategy]) -> bool:
    """True if replies must contain the same records: Flower's strategies end the run if one differs."""
    return any(isinstance(strategy, FedAvg) for strategy in strategies)


def checks(strategies: list[Strategy]) -> list[Callable[[Message], dict[str, Distance]]]:
    """Return further checks of an upload, which raise ValueError or return distances to compare between uploads."""
    found: list[Callable[[Message], dict[str, Distance]]] = []
    for strategy in strategies:
        if isinstance(strategy, Scaffold):
            found.append(strategy.check)
        elif isinstance(strategy, QFedAvg):
            found.append(_usable_loss(strategy.train_loss_key))
    return found


def _usable_loss(key: str) -> Callable[[Message], dict[str, Distance]]:
    def check(reply: Message) -> dict[str, Distance]:
        loss = only(reply, MetricRecord)[1].get(key)
        if isinstance(loss, list | None) or not (math.isfinite(loss) and 0 <= loss <= MAX_WEIGHT):
            allowed = f"must be between 0 and {MAX_WEIGHT:g}"
            raise ValueError(f"{key}={loss!r}: the strategy weights uploads by this loss, which {allowed}")
        return {}

    return check


def set_bound(strategies: list[Strategy], bound: float) -> None:
    """Set the bound of strategies that apply it themselves."""
    for strategy in strategies:
        if isinstance(strategy, Scaffold):
            strategy.bound = bound


def write_back(strategies: list[Strategy], arrays: ArrayRecord) -> None:
    """Replace the copy of the global model that some strategies keep by the shifted model."""
    for strategy in strategies:
        copy = getattr(strategy, "current_arrays", None)
        if isinstance(copy, ArrayRecord):
            strategy.current_arrays = arrays.copy()  # type: ignore[attr-defined]
        elif isinstance(copy, dict):
            strategy.current_arrays = {name: array.numpy() for name, array in arrays.items()}  # type: ignore[attr-defined]


def snapshot(strategies: list[Strategy]) -> list[dict[str, Any]]:
    """Copy the attributes of all strategies, for `restore`."""
    return [{name: _copied(value) for name, value in vars(strategy).items()} for strategy in strategies]


def restore(strategies: list[Strategy], snapshots: list[dict[str, Any]]) -> None:
    """Set the attributes back to a snapshot."""
    for strategy, attributes in zip(strategies, snapshots, strict=True):
        vars(strategy).clear()
        vars(strategy).update(attributes)


def _copied(value: Any) -> Any:
    """Copy containers and arrays, which may be changed in place; return other values as they are."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, ArrayRecord):
        return value.copy()  # the bytes of arrays do not change
    if type(value) in (list, tuple):
        return type(value)(_copied(x) for x in value)
    return {key: _copied(x) for key, x in value.items()} if type(value) is dict else value


def not_finite(strategies: list[Strategy], arrays: ArrayRecord) -> str | None:
    """Return the name of the first array or attribute of a strategy that is NaN or infinite."""
    for name, array in arrays.items():
        if not np.isfinite(array.numpy()).all():
            return name
    for strategy in strategies:
        for name, value in vars(strategy).items():
            if not all(_finite(x) for x in _numbers(value)):
                return f"{type(strategy).__name__}.{name}"
    return None


def _numbers(value: Any) -> list[Any]:
    if isinstance(value, ArrayRecord):
        return [array.numpy() for array in value.values()]
    return list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list) else [value]


def _finite(x: Any) -> bool:
    if isinstance(x, Tensor):
        return bool(torch.isfinite(x).all())
    return not isinstance(x, np.ndarray | np.generic) or x.dtype.kind not in "fc" or bool(np.isfinite(x).all())


def private(strategies: list[Strategy]) -> bool:
    """True if a strategy adds noise for differential privacy."""
    return any(type(strategy).__name__.startswith("DifferentialPrivacy") for strategy in strategies)


def integers_restored(arrays: ArrayRecord, dtypes: Mapping[str, torch.dtype], integers: Params) -> ArrayRecord:
    """Replace integer tensors by `integers`, and round the others: averaging converts them to floats."""
    changed = {}
    for name, array in arrays.items():
        dtype = dtypes.get(name, torch.float32)
        if name in integers:
            changed[name] = Array(integers[name].to(dtype).numpy())
        elif not dtype.is_floating_point and (values := array.numpy()).dtype.kind == "f":
            changed[name] = Array(torch.from_numpy(np.asarray(np.rint(values))).to(dtype).numpy())
    return ArrayRecord({**arrays, **changed}) if changed else arrays
