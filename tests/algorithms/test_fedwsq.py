"""FedWSQ: lossless messages are FedAvg, a hand-worked step of sigma, and fixed levels that need no scale."""

import math

import pytest
import torch

from fedshift.algorithms.fedwsq import FIRST, LEAST, Scales, Standardised, fedwsq
from fedshift.algorithms.table import ALGORITHMS
from fedshift.codecs import Codec, FixedCode
from fedshift.core.types import Broadcast, DecodedUpload, Params, Round
from fedshift.wire.writer import pack, unpack

TRAVEL = torch.tensor(1.0)


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    g = torch.Generator().manual_seed(seed)
    shapes = {"conv": (8, 3, 3, 3), "fc": (10, 72), "bias": (10,)}
    return {name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes.items()}


def trained(start: Params, k: int, size: float = 0.02) -> Params:
    """Weights of client k after training."""
    return {name: w + size * x for (name, w), x in zip(start.items(), weights(100 + k).values(), strict=True)}


def play(
    start: Params, clients: int = 3, rounds: int = 3, bits: int | None = None
) -> tuple[list[Params], list[Params]]:
    """Models and controls after each round, of clients with equal weights p_k."""
    client, server = fedwsq()
    control, state = server.init(start, [*start])
    sent, models, controls = Broadcast(start, control), [], []
    for number in range(1, rounds + 1):
        messages = []
        for k in range(clients):
            w = trained(sent.params, number * clients + k)
            message = client.message(w, sent, {}, TRAVEL)
            if bits is not None:
                message = unpack(pack(Codec(FixedCode(bits)), message), like=message)
            second = client.second(w, sent, {}, TRAVEL)
            state, _ = server.take(DecodedUpload(k, message, second, TRAVEL, 1, False, 0.0), sent, state, {})
            messages.append(message)
        mean = {name: torch.stack([m[name] for m in messages]).mean(0) for name in start}
        rnd = Round(number, clients, clients, sent, sent.params, 0.0, model=sent.params, message=mean)
        sent, state = server.apply(sent, state, rnd)
        models.append(sent.params)
        controls.append(sent.control)
    return models, controls


def test_with_exact_messages_it_is_fedavg() -> None:
    start = weights()
    models, _ = play(start)
    model = start
    for number, found in enumerate(models, 1):
        updates = [trained(model, number * 3 + k) for k in range(3)]
        model = {name: torch.stack([w[name] for w in updates]).mean(0) for name in start}
        for name, w in model.items():
            assert (found[name] - w).norm() <= 1e-6 * w.norm()


def test_hand_worked_steps_of_sigma() -> None:
    """Round 1 replaces the first guess: (3 + 5) / 2 = 4. Round 2: 0.9 * 4 + 0.1 * 1 = 3.7; beta = 0.5: 2.5."""
    for beta, expected in ((0.9, 3.7), (0.5, 2.5)):
        rule, start = Scales(beta), {"w": torch.full((2, 2), 50.0), "b": torch.ones(2)}
        control, state = rule.init(start, ["w", "b"])
        assert {name: float(x) for name, x in control.items()} == {"sigma/w": FIRST * 50}
        sent, seen = Broadcast(start, control), []
        for number, locals_ in ((1, [3.0, 5.0]), (2, [1.0])):
            for k, local in enumerate(locals_):
                upload = DecodedUpload(k, {}, {"w": torch.tensor([local])}, TRAVEL, 1, False, 0.0)
                state, _ = rule.take(upload, sent, state, {})
            zero = {name: torch.zeros_like(x) for name, x in start.items()}
            rnd = Round(number, len(locals_), 9, sent, start, 0.0, model=start, message=zero)
            sent, state = rule.apply(sent, state, rnd)
            seen.append(float(sent.control["sigma/w"]))
        assert seen == pytest.approx([4.0, expected])


def test_only_weights_with_two_or_more_axes_are_standardised() -> None:
    sent = Broadcast(weights(), {"sigma/conv": torch.tensor([0.5]), "sigma/fc": torch.tensor([4.0])})
    w = trained(sent.params, 1)
    message = Standardised().message(w, sent, {}, TRAVEL)
    for name, sigma in (("conv", 0.5), ("fc", 4.0), ("bias", 1.0)):
        assert torch.allclose(message[name], (w[name] - sent.params[name]) / sigma)
    second = Standardised().second(w, sent, {}, TRAVEL)
    assert second.keys() == {"conv", "fc"}
    assert all(x.shape == (1,) for x in second.values())
    assert float(second["fc"]) == pytest.approx((w["fc"] - sent.params["fc"]).square().mean().sqrt().item(), rel=1e-6)


def test_stacked_clients_send_what_each_sends_alone() -> None:
    control, _ = fedwsq().server.init(weights(), [*weights()])
    sent, clients = Broadcast(weights(), control), [trained(weights(), k) for k in range(2)]
    stack = {name: torch.stack([w[name] for w in clients]) for name in sent.params}
    for method in (Standardised().message, Standardised().second):
        together = method(stack, sent, {}, torch.ones(2))
        for k, w in enumerate(clients):
            alone = method(w, sent, {}, TRAVEL)
            assert together.keys() == alone.keys()
            assert all(torch.equal(x[k], alone[name]) for name, x in together.items())


@pytest.mark.parametrize(("bits", "error"), [(1, 0.3634), (2, 0.135), (4, 0.0096)])
def test_fixed_levels_have_the_error_of_normal_values_once_sigma_is_known(bits: int, error: float) -> None:
    """In the second round, sigma is that of the clients; 720 and 216 values of 20 clients."""
    start = weights()
    models, controls = play(start, clients=20, rounds=2, bits=bits)
    sent = Broadcast(models[0], controls[0])
    lost = whole = 0.0
    for k in range(20):
        message = Standardised().message(trained(models[0], 40 + k), sent, {}, TRAVEL)
        read = unpack(pack(Codec(FixedCode(bits)), message), like=message)
        lost += sum(float((read[name] - message[name]).square().sum()) for name in ("conv", "fc"))
        whole += sum(float(message[name].square().sum()) for name in ("conv", "fc"))
    assert lost / whole == pytest.approx(error, rel=0.1)


def test_the_first_round_moves_weights_by_little_whatever_the_update() -> None:
    start = weights()
    models, _ = play(start, rounds=1, bits=1)
    for name in ("conv", "fc"):
        assert (models[0][name] - start[name]).norm() <= FIRST * start[name].norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_weights_that_are_or_stay_zero_have_a_positive_sigma_in_their_precision(dtype: torch.dtype) -> None:
    start = {"a": torch.zeros(2, 3, dtype=dtype), "b": torch.full((3, 3), 2.0, dtype=dtype), "none": torch.zeros(0, 3)}
    rule = Scales()
    control, state = rule.init(start, [*start])
    assert {name: x.dtype for name, x in control.items()} == {"sigma/a": dtype, "sigma/b": dtype}
    assert float(control["sigma/a"]) == pytest.approx(2 * FIRST, rel=1e-3)
    sent = Broadcast(start, control)
    message, second = (of(start, sent, {}, TRAVEL) for of in (Standardised().message, Standardised().second))
    assert not any(x.any() for x in (*message.values(), *second.values()))
    state, _ = rule.take(DecodedUpload(0, message, second, TRAVEL, 1, False, 0.0), sent, state, {})
    out, _ = rule.apply(sent, state, Round(1, 1, 1, sent, start, 0.0, model=start, message=message))
    for x in out.control.values():
        assert x.dtype == dtype
        assert float(x) >= 0.99 * LEAST
    assert all(torch.equal(x, start[name]) for name, x in out.params.items())


def test_models_without_such_weights_have_no_sigma() -> None:
    assert Scales().init({"bias": torch.ones(3)}, ["bias"])[0] == {}
    control, _ = Scales().init({"w": torch.zeros(2, 2)}, ["w"])
    assert float(control["sigma/w"]) == pytest.approx(FIRST)


def test_settings() -> None:
    assert ALGORITHMS["fedwsq"] is fedwsq
    for beta in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match=r"fedwsq\(beta=.*\): beta must be 0 or more and less than 1"):
            fedwsq(beta)
