"""What has to be known about the strategies that `FedShift` may wrap, which may wrap others in turn."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.serverapp.strategy import FedXgbBagging, FedXgbCyclic, QFedAvg, Strategy

from fedshift.flower.arrays import only


def layers_of(strategy: Strategy) -> list[Strategy]:
    """The strategy, the one it wraps, and so on; TypeError or ValueError for one that cannot be wrapped."""
    found: list[Strategy] = []
    inner: object = strategy
    while inner is not None:
        _check(inner)
        assert isinstance(inner, Strategy)
        found.append(inner)
        inner = getattr(inner, "strategy", None)
    return found


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


def checks(strategies: list[Strategy]) -> list[Callable[[Message], None]]:
    """What else an upload must pass, a ValueError otherwise: strategies of ours say it, and a loss may be a weight."""
    own = [strategy.check for strategy in strategies if hasattr(strategy, "check")]
    return own + [_finite_loss(strategy.train_loss_key) for strategy in strategies if isinstance(strategy, QFedAvg)]


def _finite_loss(key: str) -> Callable[[Message], None]:
    def check(reply: Message) -> None:
        loss = only(reply, MetricRecord)[1].get(key)
        if isinstance(loss, list | None) or not math.isfinite(loss):
            raise ValueError(f"{key}={loss!r}: the strategy weighs it by its loss, which must be a number")

    return check


def write_back(strategies: list[Strategy], arrays: ArrayRecord) -> None:
    """Some keep a copy of the global model to start the next step from: that is the shifted one now."""
    for strategy in strategies:
        copy = getattr(strategy, "current_arrays", None)
        if isinstance(copy, ArrayRecord):
            strategy.current_arrays = arrays.copy()  # type: ignore[attr-defined]
        elif isinstance(copy, dict):
            strategy.current_arrays = {name: array.numpy() for name, array in arrays.items()}  # type: ignore[attr-defined]


def snapshot(strategies: list[Strategy]) -> list[dict[str, Any]]:
    """Attributes as they are, to go back to; strategies put new arrays in place of old ones."""
    return [dict(vars(strategy)) for strategy in strategies]


def go_back(strategies: list[Strategy], before: list[dict[str, Any]]) -> None:
    for strategy, attributes in zip(strategies, before, strict=True):
        vars(strategy).clear()
        vars(strategy).update(attributes)


def integers_restored(arrays: ArrayRecord, dtypes: Mapping[str, torch.dtype]) -> ArrayRecord:
    """Integers of the model as integers again: averaging makes floats of them."""
    changed = {}
    for name, array in arrays.items():
        if not dtypes[name].is_floating_point and (values := array.numpy()).dtype.kind == "f":
            changed[name] = Array(torch.from_numpy(np.asarray(np.rint(values))).to(dtypes[name]).numpy())
    return ArrayRecord({**arrays, **changed}) if changed else arrays
