"""Trial of a client rule: its results for two stacked clients must be those for each client alone."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fedshift.algorithms.base import ClientRule, adjusted, defines, is_affine
from fedshift.core.tree import take, tmap
from fedshift.core.types import Broadcast, Params
from fedshift.engines.gpu.stacked import StackError
from fedshift.rounds.engine import RAISED, Task, describe

CLIENTS = 2
METHODS = "adjust", "affine", "sends", "message", "second", "remember"


def check_stackable(rule: ClientRule, task: Task, control: Params) -> None:
    """Raise StackError if a method of the rule has another result for stacked clients, or `affine` is not `adjust`."""
    kind, device = type(rule).__name__, task.data.x.device
    generator = torch.Generator().manual_seed(0)

    def drawn(like: Params, clients: int = 0) -> Params:
        shape = (clients,) if clients else ()
        return {
            name: torch.randn((*shape, *x.shape), generator=generator).to(device) if x.is_floating_point() else x
            for name, x in like.items()
        }

    start = take(task.params, task.trained)
    sent, w, grad = Broadcast(drawn(start), drawn(control)), drawn(start, CLIENTS), drawn(start, CLIENTS)
    memory, distance = drawn(rule.init(start), CLIENTS), torch.tensor([0.5, 2.0], device=device)
    decoded = drawn(start, CLIENTS)
    stacked_sent = Broadcast(*(tmap(lambda x: x.expand(CLIENTS, *x.shape), part) for part in sent))
    calls: dict[str, Callable[[Callable[[Params], Params], Tensor, Broadcast], Params | Tensor]] = {
        "adjust": lambda of, _, sent: adjusted(rule, of(grad), of(w), sent, of(memory)),
        "affine": lambda of, _, sent: ClientRule.adjust(rule, of(grad), of(w), sent, of(memory)),  # grad + a w + b
        "sends": lambda of, _, sent: rule.sends(of(w), sent, of(memory)),
        "message": lambda of, travel, sent: rule.message(of(w), sent, of(memory), travel),
        "second": lambda of, travel, sent: rule.second(of(w), sent, of(memory), travel),
        "remember": lambda of, travel, sent: rule.remember(of(decoded), of(w), sent, of(memory), travel),
    }
    results: dict[str, list[Params | Tensor]] = {}  # for each client alone
    for method in METHODS:
        if not defines(rule, method) or (method == "affine" and not is_affine(rule)):
            continue
        try:
            together = calls[method](lambda x: x, distance, stacked_sent if method == "adjust" else sent)
            alone = [calls[method](partial(_row, k), distance[k], sent) for k in range(CLIENTS)]
        except RAISED as problem:
            raise StackError(f"{kind}.{method} fails for stacked clients: {describe(problem)}") from problem
        for k, single in enumerate(alone):
            if not _equal(together, single, k):
                raise StackError(
                    f"{kind}.{method} has another result for clients that are stacked on a leading axis than for one "
                    "client; use engine.name = 'sequential' or 'processes'"
                )
        results[method] = alone
        if method == "affine" and not all(_equal(together, x, k) for k, x in enumerate(results.get("adjust", []))):
            raise StackError(
                f"{kind}.affine returns (a, b), but {kind}.adjust does not return grad + a w + b; "
                "define only one of them, or make them agree"
            )


def _row(k: int, params: Params) -> Params:
    return {name: x[k] for name, x in params.items()}


def _equal(together: Params | Tensor, alone: Params | Tensor, k: int) -> bool:
    if isinstance(together, Tensor) and isinstance(alone, Tensor):
        return bool(together[k] == alone) if together.ndim else bool(together == alone)
    if not isinstance(together, dict) or not isinstance(alone, dict) or together.keys() != alone.keys():
        return False
    return all(
        x.shape[1:] == alone[name].shape and torch.allclose(x[k], alone[name].to(x), rtol=1e-3, atol=1e-5)
        for name, x in together.items()
    )
