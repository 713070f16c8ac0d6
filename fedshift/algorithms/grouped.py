"""Grouped averaging: one mean per precision, then the mean of these means.

    server:  w = sum_g a_g w_g,  w_g = mean of the uploads with the same uplink

A group counts as much as any other, however many clients it has in the round, or full-precision uploads have the weight
`exact` and the others share the rest. With equally many clients per group and equal weights it is FedAvg.
"""

from dataclasses import dataclass
from typing import ClassVar

from fedshift.algorithms.base import Algorithm, ServerRule, chain
from fedshift.algorithms.fedavg import Average, Plain
from fedshift.core.types import Broadcast, Params, Round


@dataclass(frozen=True)
class ByGroup(ServerRule):
    """w = sum_g a_g w_g

    >>> import torch
    >>> from fedshift.core.types import GroupMean
    >>> values = (1.0, 9.0, False), (3.0, 1.0, True)  # nine exact uploads, and one quantized
    >>> groups = [GroupMean({"w": torch.tensor([x])}, weight, lossy) for x, weight, lossy in values]
    >>> rnd = Round(1, 10, 10, Broadcast({}, {}), {"w": torch.tensor([1.2])}, 0.1, groups=groups)
    >>> ByGroup().apply(Broadcast(rnd.mean, {}), {}, rnd)[0].params
    {'w': tensor([2.])}
    """

    needs: ClassVar[frozenset[str]] = frozenset({"groups"})
    exact: float | None = None

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        lossy = [group for group in rnd.groups if group.lossy]
        if not lossy or len(lossy) == len(rnd.groups):
            weights = [1 / len(rnd.groups)] * len(rnd.groups)
        else:
            share = 1 - len(lossy) / len(rnd.groups) if self.exact is None else self.exact
            exact = len(rnd.groups) - len(lossy)
            weights = [(1 - share) / len(lossy) if group.lossy else share / exact for group in rnd.groups]
        floats = [name for name, x in out.params.items() if x.is_floating_point()]
        w = {name: sum(a * group.mean[name] for a, group in zip(weights, rnd.groups, strict=True)) for name in floats}
        return out._replace(params=out.params | w), state  # type: ignore[arg-type]


def grouped(exact: float | None = None) -> Algorithm:
    """FedAvg in which each precision has the same weight, or full precision the weight `exact`."""
    if exact is not None and not 0 < exact < 1:
        raise ValueError(f"grouped(exact={exact}): exact must be between 0 and 1")
    return Algorithm(Plain(), chain(Average(), ByGroup(exact)))
