"""The contracts of an algorithm: what a client does besides SGD, and what the server does with the mean."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from fedshift.core.types import Broadcast, Params, Round


class ClientRule(Protocol):
    """Works on one client, or on K of them stacked on a leading axis."""

    @property
    def extra(self) -> str:
        """What goes up beside the model: 'none', 'sent', or 'derived' by the server from the decoded upload."""

    def init(self, params: Params) -> Params:
        """The memory of a client that has not trained yet, {} for none; params are those that are trained."""

    def adjust(self, grad: Params, w: Params, sent: Broadcast, memory: Params) -> Params:
        """The direction of one step in place of the gradient."""

    def finish(self, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> tuple[Params, Params]:
        """After training: new memory, and what else the server learns.

        w is the client's decoded upload where `extra` is derived, its own weights otherwise;
        travel () or (K,) is how far a unit gradient would have taken it.
        """


class ServerRule(Protocol):
    """One line of the server's pseudocode."""

    def init(self, params: Params) -> Params:
        """State before the first round, {} for none."""

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        """What is sent next, given what the rules before this one would send."""


class Algorithm(NamedTuple):
    """What clients do besides SGD, and what the server makes of their mean: `shifted(fedprox())` is one.

    >>> from fedshift import fedavg
    >>> fedavg()
    Algorithm(client=Plain(), server=Average())
    """

    client: ClientRule
    server: ServerRule


@dataclass(frozen=True)
class Chain:
    """Rules one after another; the state of the i-th is kept under 'i/'."""

    rules: tuple[ServerRule, ...]

    def init(self, params: Params) -> Params:
        return {f"{i}/{name}": x for i, rule in enumerate(self.rules) for name, x in rule.init(params).items()}

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        after: Params = {}
        for i, rule in enumerate(self.rules):
            own = {name.removeprefix(f"{i}/"): x for name, x in state.items() if name.startswith(f"{i}/")}
            out, own = rule.apply(out, own, rnd)
            after |= {f"{i}/{name}": x for name, x in own.items()}
        return out, after


def chain(*rules: ServerRule) -> Chain:
    """The rules in the order of the paper's pseudocode; chains in it are laid flat.

    >>> from fedshift.algorithms import Average, Control, Shift
    >>> [type(rule).__name__ for rule in chain(chain(Average(), Control()), Shift()).rules]
    ['Average', 'Control', 'Shift']
    """
    return Chain(tuple(r for rule in rules for r in (rule.rules if isinstance(rule, Chain) else (rule,))))
