"""Contracts of an algorithm: the client rule in addition to SGD, and the server rules after averaging."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from fedshift.core.types import Broadcast, Params, Round


class ClientRule(Protocol):
    """Rule of clients in addition to SGD, for one client or for K stacked on a leading axis."""

    @property
    def extra(self) -> str:
        """Second upload beside the model: 'none', 'sent', or 'derived' by the server from the decoded upload."""

    def init(self, params: Params) -> Params:
        """Memory of a client before its first round, {} for none; params are the trained ones."""

    def adjust(self, grad: Params, w: Params, sent: Broadcast, memory: Params) -> Params:
        """Direction of one step instead of the gradient."""

    def finish(self, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> tuple[Params, Params]:
        """After training: new memory, and the second upload.

        w is the client's decoded upload if `extra` is 'derived', its weights before coding otherwise;
        travel () or (K,) is the distance that a unit gradient would have moved the client.
        """


class ServerRule(Protocol):
    """Rule of the server after averaging: one line of its pseudocode."""

    def init(self, params: Params) -> Params:
        """State before the first round, {} for none."""

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        """Return the next broadcast and state; `out` is the broadcast after the preceding rules."""


class Algorithm(NamedTuple):
    """Client rule and server rule: `shifted(fedprox())`, for example.

    >>> from fedshift import fedavg
    >>> fedavg()
    Algorithm(client=Plain(), server=Average())
    """

    client: ClientRule
    server: ServerRule


@dataclass(frozen=True)
class Chain:
    """Server rules in sequence; the state of the i-th has the prefix 'i/'."""

    rules: tuple[ServerRule, ...]

    def init(self, params: Params) -> Params:
        return {f"{i}/{name}": x for i, rule in enumerate(self.rules) for name, x in rule.init(params).items()}

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        after: Params = {}
        for i, rule in enumerate(self.rules):
            rule_state = {name.removeprefix(f"{i}/"): x for name, x in state.items() if name.startswith(f"{i}/")}
            out, rule_state = rule.apply(out, rule_state, rnd)
            after |= {f"{i}/{name}": x for name, x in rule_state.items()}
        return out, after


def chain(*rules: ServerRule) -> Chain:
    """Chain of server rules, in the order of the paper's pseudocode; nested chains are flattened.

    >>> from fedshift.algorithms import Average, Control, Shift
    >>> [type(rule).__name__ for rule in chain(chain(Average(), Control()), Shift()).rules]
    ['Average', 'Control', 'Shift']
    """
    return Chain(tuple(r for rule in rules for r in (rule.rules if isinstance(rule, Chain) else (rule,))))
