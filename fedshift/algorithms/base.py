"""Contracts of an algorithm: the client rule in addition to the local optimizer, and the server rules after averaging.

Every method has a default, so a rule defines only what it changes. `w_t` is the model that clients receive, `w_k` the
model that client k trained, and `travel` the distance that a unit gradient would have moved the client: steps * lr
without momentum. Rules whose results depend on it require SGD.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedshift.core.tree import part, prefixed, tmap
from fedshift.core.types import Broadcast, DecodedUpload, Params, Round


class ClientRule:
    """Rule of clients in addition to the local optimizer, for one client or for K stacked on a leading axis.

    `sent` is not stacked, except in `adjust`. All tensors are the trained ones; `travel` is (), or (K,) if stacked.
    On a GPU, `adjust` is recorded as a CUDA graph, so it must not depend on values of tensors in Python conditions. A
    rule that adds the same to the gradient in every step of a round can say so with `affine`, which is faster there.
    Rules are compared and hashed: write them as frozen dataclasses.

    Clients that clip every entry of the gradient:

    >>> @dataclass(frozen=True)
    ... class Clipped(ClientRule):
    ...     most: float
    ...
    ...     def adjust(self, grad, w, sent, memory):
    ...         return {name: g.clamp(-self.most, self.most) for name, g in grad.items()}
    >>> Clipped(0.5).adjust({"w": torch.tensor([2.0, -0.25])}, {}, Broadcast({}, {}), {})
    {'w': tensor([ 0.5000, -0.2500])}
    """

    def init(self, params: Params) -> Params:
        """Memory of a client before its first round, {} for none."""
        return {}

    def recover(self, params: Params, sent: Broadcast) -> Params:
        """Memory of a client that lost its memory."""
        return self.init(params)

    def receive(self, sent: Broadcast, memory: Params) -> Params:
        """Memory at the start of a round, after the broadcast was received."""
        return memory

    def affine(self, sent: Broadcast, memory: Params) -> tuple[float, Params]:
        """(a, b) if `adjust` is grad + a w + b in all steps of a round; {} for b = 0.

        >>> from fedshift.algorithms import Prox  # adds mu (w - w_t)
        >>> Prox(0.5).affine(Broadcast({"w": torch.tensor([4.0])}, {}), {})
        (0.5, {'w': tensor([-2.])})
        """
        return 0.0, {}

    def adjust(self, grad: Params, w: Params, sent: Broadcast, memory: Params) -> Params:
        """Direction of one step instead of the gradient: grad + a w + b, unless the rule defines another."""
        a, b = self.affine(sent, memory)
        pulled = tmap(lambda g, w: g.add(w, alpha=a), grad, w) if a else grad
        return tmap(torch.add, pulled, b) if b else pulled

    def sends(self, w: Params, sent: Broadcast, memory: Params) -> Tensor:
        """() or (K,) bool: False if the client does not upload in this round."""
        return torch.tensor(True)

    def message(self, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> Params:
        """Tensors to upload instead of w_k or w_k - w_t; the server's rules then use `Round.message`."""
        return w

    def second(self, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> Params:
        """Second upload, which is exact; {} for none."""
        return {}

    def remember(self, decoded: Params, w: Params, sent: Broadcast, memory: Params, travel: Tensor) -> Params:
        """Memory after the round; stored only if the upload is used. `decoded` is what the server decodes."""
        return memory


class ServerRule:
    """Rule of the server after averaging: one line of its pseudocode.

    `needs` may contain "memory" (the server remembers something about each client, see `take`), "groups" (one mean per
    uplink in `Round.groups`), "uploads" (all decoded uploads in `Round.uploads`, as many models in memory) and "loss"
    (clients compute the loss of the received model on their examples and send it: `DecodedUpload.loss`).

    Half a step from the model towards the mean:

    >>> @dataclass(frozen=True)
    ... class Half(ServerRule):
    ...     def apply(self, out, state, rnd):
    ...         return out._replace(params={name: (w + rnd.mean[name]) / 2 for name, w in rnd.model.items()}), state
    >>> sent = Broadcast({"w": torch.zeros(1)}, {})
    >>> rnd = Round(1, 1, 1, sent, mean={"w": torch.ones(1)}, share=0.0, model=sent.params)
    >>> Half().apply(sent, {}, rnd)[0].params
    {'w': tensor([0.5000])}
    """

    needs: ClassVar[frozenset[str]] = frozenset()

    def init(self, params: Params, trained: Sequence[str]) -> tuple[Params, Params]:
        """Control, which is sent to clients with the model, and state, before the first round; {} for none."""
        return {}, {}

    def weigh(self, upload: DecodedUpload, sent: Broadcast) -> float | Mapping[str, float]:
        """Factor of the weight p_k of an upload, or one factor for each tensor."""
        return 1.0

    def take(self, upload: DecodedUpload, sent: Broadcast, state: Params, memory: Params) -> tuple[Params, Params]:
        """State and memory after one upload of the round; `memory` is that of the server about this client."""
        return state, memory

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        """Return the next model and control, and state; `out` is the result of the preceding rules."""
        return out, state


def defines(rule: ClientRule | ServerRule, method: str) -> bool:
    """True if a rule defines a method itself, instead of the default.

    >>> from fedshift.algorithms import Controlled, Plain
    >>> defines(Controlled(), "adjust"), defines(Plain(), "adjust")
    (True, False)
    """
    if isinstance(rule, Chain):
        return any(defines(member, method) for member in rule.rules)
    base: Any = ServerRule if isinstance(rule, ServerRule) else ClientRule
    return getattr(type(rule), method) is not getattr(base, method)


def is_affine(rule: ClientRule) -> bool:
    """True if the rule's `affine` describes its `adjust`; a class that overrides only `adjust` has no `affine`.

    >>> from fedshift.algorithms import Controlled, Plain
    >>> is_affine(Controlled()), is_affine(Plain())
    (True, True)
    """
    last = next(cls for cls in type(rule).__mro__ if "affine" in vars(cls) or "adjust" in vars(cls))
    return "affine" in vars(last)


def adjusted(rule: ClientRule, grad: Params, w: Params, sent: Broadcast, memory: Params) -> Params:
    """Direction of one step, with the tensors in the order of the gradients; every trained tensor needs one."""
    found = rule.adjust(grad, w, sent, memory)
    if not isinstance(found, dict) or found.keys() != grad.keys():
        seen = ", ".join(found) if isinstance(found, dict) else repr(found)
        raise ValueError(
            f"{type(rule).__name__}.adjust must return a tensor for each of {', '.join(grad)}; it returned {seen}"
        )
    return {name: found[name] for name in grad}


def uses_travel(rule: ClientRule) -> bool:
    """True if the rule defines a method that gets `travel`."""
    return any(defines(rule, method) for method in ("message", "second", "remember"))


class Algorithm(NamedTuple):
    """Client rule and server rule: `shifted(fedprox())`, for example.

    >>> from fedshift import fedavg
    >>> fedavg()
    Algorithm(client=Plain(), server=Average())
    """

    client: ClientRule
    server: ServerRule


@dataclass(frozen=True)
class Chain(ServerRule):
    """Server rules in sequence; state and memory of the i-th have the prefix 'i/'."""

    rules: tuple[ServerRule, ...]

    @property
    def weighing(self) -> list[ServerRule]:
        """Rules that define `weigh`; an algorithm can have only one."""
        return [rule for rule in self.rules if defines(rule, "weigh")]

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(need for rule in self.rules for need in rule.needs)

    def init(self, params: Params, trained: Sequence[str]) -> tuple[Params, Params]:
        control: Params = {}
        state: Params = {}
        for i, rule in enumerate(self.rules):
            more, mine = rule.init(params, trained)
            if both := sorted(control.keys() & more.keys()):
                raise ValueError(f"two server rules of the algorithm send a control named {both[0]}")
            control |= more
            state |= prefixed(f"{i}/", mine)
        return control, state

    def weigh(self, upload: DecodedUpload, sent: Broadcast) -> float | Mapping[str, float]:
        return self.weighing[0].weigh(upload, sent) if self.weighing else 1.0

    def take(self, upload: DecodedUpload, sent: Broadcast, state: Params, memory: Params) -> tuple[Params, Params]:
        states: Params = {}
        memories: Params = {}
        for i, rule in enumerate(self.rules):
            mine, kept = rule.take(upload, sent, part(f"{i}/", state), part(f"{i}/", memory))
            states |= prefixed(f"{i}/", mine)
            memories |= prefixed(f"{i}/", kept)
        return states, memories

    def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
        after: Params = {}
        for i, rule in enumerate(self.rules):
            out, mine = rule.apply(out, part(f"{i}/", state), rnd)
            after |= prefixed(f"{i}/", mine)
        return out, after


def chain(*rules: ServerRule) -> Chain:
    """Chain of server rules, in the order of the paper's pseudocode; nested chains are flattened.

    >>> from fedshift.algorithms import Average, Control, Shift
    >>> [type(rule).__name__ for rule in chain(chain(Average(), Control()), Shift()).rules]
    ['Average', 'Control', 'Shift']
    """
    return Chain(tuple(r for rule in rules for r in (rule.rules if isinstance(rule, Chain) else (rule,))))
