"""Rules compared with hand-worked numbers and with each other."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedshift import Params, chain, fedavg, fedprox, scaffold, shift, shifted
from fedshift.algorithms import (
    Average,
    Chain,
    Control,
    Controlled,
    ControlledExactly,
    Plain,
    Prox,
    ServerRule,
    Shift,
    layers,
    shorter,
)
from fedshift.core.types import Broadcast, DecodedUpload, Round


def tree(*values: float) -> Params:
    return {"w": torch.tensor([list(values)])}


def a_round(mean: Params, share: float = 0.5, number: int = 1, **more: object) -> Round:
    fields = {"arrived": 1, "population": 2, "start": Broadcast(mean, {})} | more
    return Round(number=number, mean=mean, share=share, **fields)  # type: ignore[arg-type]


def test_fedavg_sends_the_mean() -> None:
    out, state = Average().apply(Broadcast(tree(9.0), {}), {}, a_round(tree(1.0, 2.0)))
    assert torch.equal(out.params["w"], tree(1.0, 2.0)["w"])
    assert state == {}


def test_fedprox_without_mu_is_fedavg() -> None:
    grad = tree(1.0, 2.0)
    assert Prox(0).adjust(grad, tree(5.0, 5.0), Broadcast(tree(0.0, 0.0), {}), {}) is grad
    assert fedprox(0).server == fedavg().server


def test_the_example_of_scaffold() -> None:
    """The numbers of the module's docstring: w_k = 0.7, c_i+ = 3, c = 1."""
    sent = Broadcast(tree(1.0), tree(0.5))
    rule, w, c_i = Controlled(), tree(1.0), tree(2.0)
    for _ in range(2):
        w = {"w": w["w"] - 0.1 * rule.adjust(tree(3.0), w, sent, c_i)["w"]}
    assert w["w"].item() == pytest.approx(0.7)
    travel = torch.tensor(0.2)
    assert rule.remember(w, w, sent, c_i, travel)["w"].item() == pytest.approx(3.0)
    assert rule.change(w, sent, travel)["w"].item() == pytest.approx(1.0)
    state, _ = Control().take(DecodedUpload(0, w, {}, travel, 1, False, 0.0), sent, {}, {})
    out, state = Control().apply(sent, state, a_round(w))
    assert out.control["w"].item() == pytest.approx(1.0)
    assert state == {}


def test_scaffold_with_zero_controls_follows_the_gradient() -> None:
    grad = tree(1.0, -2.0)
    zero = Controlled().init(grad)
    direction = Controlled().adjust(grad, grad, Broadcast(grad, zero), zero)
    assert torch.equal(direction["w"], grad["w"])


def test_rules_work_on_stacked_clients_as_on_one() -> None:
    g = torch.Generator().manual_seed(0)
    sent = Broadcast({"w": torch.randn(3, 2, generator=g)}, {"w": torch.randn(3, 2, generator=g)})
    w, memory, grad = ({"w": torch.randn(4, 3, 2, generator=g)} for _ in range(3))
    travel = torch.rand(4, generator=g) + 0.1
    for rule in (Plain(), Prox(0.3), Controlled(), ControlledExactly()):
        new, change = rule.remember(w, w, sent, memory, travel), rule.second(w, sent, memory, travel)
        direction = rule.adjust(grad, w, sent, memory)

        def row(tree: Params, k: int) -> Params:
            return {name: x[k] for name, x in tree.items()}

        for k in range(4):
            of_k = row(w, k), sent, row(memory, k), travel[k]
            new_k, change_k = rule.remember(row(w, k), *of_k), rule.second(*of_k)
            direction_k = rule.adjust(row(grad, k), row(w, k), sent, row(memory, k))
            for stacked, alone in ((new, new_k), (change, change_k), (direction, direction_k)):
                assert all(torch.equal(stacked[name][k], alone[name]) for name in alone)


def test_the_shift_subtracts_the_share_of_each_layers_mean() -> None:
    """[1, 3] has mean 2; subtracting half of it gives [0, 2]; [2, 2, 5] has mean 3 and ends at [0.5, 0.5, 3.5]."""
    params = {"a.weight": torch.tensor([[1.0, 3.0]]), "b.weight": torch.tensor([[2.0], [2.0], [5.0]])}
    after = shift(params, 0.5)
    assert torch.equal(after["a.weight"], torch.tensor([[0.0, 2.0]]))
    assert torch.equal(after["b.weight"], torch.tensor([[0.5], [0.5], [3.5]]))


@given(st.floats(0, 1), st.integers(0, 99))
def test_the_shift_multiplies_the_mean_by_one_minus_share(share: float, seed: int) -> None:
    w = torch.randn(7, 9, generator=torch.Generator().manual_seed(seed)) + 0.5
    after = shift({"weight": w}, share)["weight"]
    assert float(after.double().mean()) == pytest.approx((1 - share) * float(w.double().mean()), abs=1e-6)


def test_without_lossy_uploads_the_shift_is_the_identity() -> None:
    params = tree(1.0, 2.0)
    out, _ = Shift().apply(Broadcast(params, {}), {}, a_round(params, share=0.0))
    assert out.params["w"] is params["w"]


def test_the_share_is_capped_and_ramped_up() -> None:
    params = tree(1.0)
    assert Shift().share_in(a_round(params, share=0.9)) == 0.5
    assert Shift(max_share=1).share_in(a_round(params, share=0.9)) == 0.9
    assert Shift(max_share=1, warmup=10).share_in(a_round(params, share=0.8, number=5)) == pytest.approx(0.4)
    assert Shift(max_share=1, warmup=10).share_in(a_round(params, share=0.8, number=11)) == pytest.approx(0.8)
    assert Shift(share=0.75).share_in(a_round(params, share=0.0)) == 0.75


def test_only_weights_are_shifted_unless_names_are_given(params: Params) -> None:
    chosen = layers(params)
    assert chosen == ["conv.weight", "half.weight", "fc.weight"]
    assert layers(params, ["*.bias", "mask"]) == ["fc.bias"]  # never integers
    after = shift(params, 0.5)
    for name, x in params.items():
        assert (after[name] is x) == (name not in chosen)
        assert after[name].dtype == x.dtype


@pytest.mark.parametrize(
    "wrong",
    [{"max_share": 1.1}, {"max_share": -0.1}, {"warmup": -1}, {"share": 2.0}, {"share": "all"}, {"per": "unit"}],
)
def test_invalid_shifts_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Shift(**wrong)  # type: ignore[arg-type]


def test_invalid_rules_are_refused() -> None:
    with pytest.raises(ValueError, match="mu must be 0 or more"):
        fedprox(-1)
    with pytest.raises(ValueError, match="'derived' or 'sent'"):
        scaffold("other")  # type: ignore[arg-type]


def test_a_chain_is_flat_and_keeps_the_state_of_each_rule_apart() -> None:
    class Counts(ServerRule):
        def init(self, params: Params, trained: Sequence[str]) -> tuple[Params, Params]:
            return {}, {"n": torch.zeros(())}

        def apply(self, out: Broadcast, state: Params, rnd: Round) -> tuple[Broadcast, Params]:
            return out, {"n": state["n"] + 1}

    rule = chain(Average(), chain(Counts(), Shift()), Counts())
    assert isinstance(rule, Chain)
    assert [type(part).__name__ for part in rule.rules] == ["Average", "Counts", "Shift", "Counts"]
    control, state = rule.init({}, [])
    assert control == {}
    assert set(state) == {"1/n", "3/n"}
    _, state = rule.apply(Broadcast(tree(1.0), {}), state, a_round(tree(1.0)))
    assert {name: int(n) for name, n in state.items()} == {"1/n": 1, "3/n": 1}


def test_shifted_appends_the_shift_to_the_algorithm() -> None:
    algorithm = shifted(scaffold(), max_share=1, warmup=3, tensors=["fc*"])
    assert algorithm.client == Controlled()
    assert algorithm.server == Chain((Average(), Control(), Shift(max_share=1, warmup=3, tensors=("fc*",))))


@given(st.floats(0.01, 1), st.floats(-2, 2), st.floats(-2, 2), st.integers(2, 40))
def test_theorem_2_decides_which_step_is_shorter(share: float, before: float, after: float, n: int) -> None:
    """Theorem 2 by brute force: |w' - w|^2 compared with |w' - share m' - w|^2."""
    spread: Tensor = torch.linspace(-1, 1, n, dtype=torch.float64)
    w, new = before + spread, after + spread.flip(0) ** 3
    plain, moved = ((new - s * after - w).square().sum() for s in (0.0, share))
    if abs(float(plain - moved)) > 1e-9 * n:
        assert shorter(share, before, after) == bool(moved < plain)
