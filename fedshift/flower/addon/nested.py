"""What has to be known about the strategies that `FedShift` may wrap, which may wrap others in turn."""

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
from fedshift.flower.addon.replies import HEAVIEST, Distance
from fedshift.flower.addon.scaffold import Scaffold


def layers_of(strategy: Strategy) -> list[Strategy]:
    """The strategy, the one it wraps, and so on; TypeError or ValueError for one that cannot be wrapped."""
    found: list[Strategy] = []
    inner: object = strategy
    while True:
        _check(inner)
        assert isinstance(inner, Strategy)
        found.append(inner)
        wrapped = [x for name, x in vars(inner).items() if isinstance(x, Strategy) or name == "strategy"]
        if len(wrapped) > 1:
            raise ValueError(f"FedShift({type(inner).__name__}): wraps {len(wrapped)} strategies, and may wrap one")
        if not wrapped:
            break
        inner = wrapped[0]
    names = [type(one).__name__ for one in found]
    if any(name.startswith("DifferentialPrivacyServerSide") for name in names[: _place(found, Scaffold)]):
        raise ValueError(
            "FedShift: a control follows from the upload as it came: Scaffold(DifferentialPrivacy...(...))"
        )
    return found


def _place(strategies: list[Strategy], kind: type[Strategy]) -> int:
    return next((i for i, strategy in enumerate(strategies) if isinstance(strategy, kind)), 0)


def _check(strategy: object) -> None:
    name = type(strategy).__name__
    if not isinstance(strategy, Strategy):
        what = f"the class {strategy.__name__}" if isinstance(strategy, type) else name
        raise TypeError(f"FedShift({what}): needs an object of a strategy of flwr.serverapp.strategy, like FedAvg()")
    if isinstance(strategy, FedXgbBagging | FedXgbCyclic):
        raise ValueError(f"FedShift({name}): trees are not tensors; there is nothing to quantize or shift")
    if any("secagg" in kind.__name__.lower().replace("secureaggregation", "secagg") for kind in type(strategy).__mro__):
        raise ValueError(f"FedShift({name}): under secure aggregation the server sees no upload that it could decode")


def weighting_key(strategies: list[Strategy]) -> str | None:
    """The metric by which uploads are weighted, None where they count alike."""
    keys = (getattr(strategy, "weighted_by_key", None) for strategy in reversed(strategies))
    return next((key for key in keys if isinstance(key, str)), None)


def weights(strategies: list[Strategy]) -> list[str]:
    """All metrics that decide how much an upload counts for."""
    key, losses = weighting_key(strategies), (one.train_loss_key for one in strategies if isinstance(one, QFedAvg))
    return [*([] if key is None else [key]), *losses]


def alike(strategies: list[Strategy]) -> bool:
    """Whether replies must hold the same records: Flower's own strategies end the run over one that differs."""
    return any(isinstance(strategy, FedAvg) for strategy in strategies)


def checks(strategies: list[Strategy]) -> list[Callable[[Message], dict[str, Distance]]]:
    """Further checks of an upload: ValueError, or more distances to compare with those of the others."""
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
        if isinstance(loss, list | None) or not (math.isfinite(loss) and 0 <= loss <= HEAVIEST):
            allowed = f"must be between 0 and {HEAVIEST:g}"
            raise ValueError(f"{key}={loss!r}: the strategy weighs it by its loss, which {allowed}")
        return {}

    return check


def set_bound(strategies: list[Strategy], bound: float) -> None:
    """Tell strategies of the bound that they apply themselves."""
    for strategy in strategies:
        if isinstance(strategy, Scaffold):
            strategy.bound = bound


def write_back(strategies: list[Strategy], arrays: ArrayRecord) -> None:
    """Some keep a copy of the global model to start the next step from: that is the shifted one now."""
    for strategy in strategies:
        copy = getattr(strategy, "current_arrays", None)
        if isinstance(copy, ArrayRecord):
            strategy.current_arrays = arrays.copy()  # type: ignore[attr-defined]
        elif isinstance(copy, dict):
            strategy.current_arrays = {name: array.numpy() for name, array in arrays.items()}  # type: ignore[attr-defined]


def snapshot(strategies: list[Strategy]) -> list[dict[str, Any]]:
    """Attributes as they are, to go back to."""
    return [{name: _copied(value) for name, value in vars(strategy).items()} for strategy in strategies]


def go_back(strategies: list[Strategy], before: list[dict[str, Any]]) -> None:
    for strategy, attributes in zip(strategies, before, strict=True):
        vars(strategy).clear()
        vars(strategy).update(attributes)


def _copied(value: Any) -> Any:
    """Containers and arrays anew, which may be changed in place; all else is the strategy's own."""
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
    """What became NaN or infinite: an array, or what a strategy will work with in the next round."""
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
    """True if noise is added for differential privacy, which nothing may bypass."""
    return any(type(strategy).__name__.startswith("DifferentialPrivacy") for strategy in strategies)


def integers_restored(arrays: ArrayRecord, dtypes: Mapping[str, torch.dtype], integers: Params) -> ArrayRecord:
    """Integers of the model as these, or rounded: averaging makes floats of them."""
    changed = {}
    for name, array in arrays.items():
        dtype = dtypes.get(name, torch.float32)
        if name in integers:
            changed[name] = Array(integers[name].to(dtype).numpy())
        elif not dtype.is_floating_point and (values := array.numpy()).dtype.kind == "f":
            changed[name] = Array(torch.from_numpy(np.asarray(np.rint(values))).to(dtype).numpy())
    return ArrayRecord({**arrays, **changed}) if changed else arrays
