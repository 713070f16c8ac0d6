"""The upload of a client, and its memory."""

from collections.abc import Callable

import pytest
import torch

from fedshift import QSGD, Codec, KMeans, Params, RandomStep, Range, Stochastic, TopK, Uniform, Uplink, header, unpack
from fedshift.codecs.base import Quantizer
from fedshift.core import rng
from fedshift.core.tree import same, take
from fedshift.rounds.uplink import Sent, join_memory, lost, message, read, received, send, split_memory
from fedshift.rounds.upload_stats import drift, relative_error, stacked_relative_errors
from fedshift.wire.frame import Header


def model(seed: int, like: Params) -> Params:
    g = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(x.shape, generator=g).to(x.dtype) if x.is_floating_point() else x for name, x in like.items()
    }


def upload(uplink: Uplink, w: Params, start: Params, error: Params | None = None) -> Sent:
    trained = [name for name, x in w.items() if x.is_floating_point() and "running" not in name]
    return send(uplink, w, start, error or {}, trained, Header(uplink.update, 3, 7), rng.key(0, "upload"))


def test_exact_weights_are_decoded_exactly(params: Params) -> None:
    sent = upload(Uplink(), params, model(1, params))
    assert all(torch.equal(sent.decoded[name], x) for name, x in params.items())
    assert sent.error == {}
    assert header(sent.frame)[:3] == (False, 3, 7)


def test_client_and_server_decode_the_same_weights(params: Params) -> None:
    start = model(1, params)
    for update in (False, True):
        for codec in (Codec(KMeans(4)), Codec(Stochastic(2)), Uplink().codec):
            sent = upload(Uplink(codec, update), params, start)
            server = read(sent.frame, start)
            assert all(torch.equal(server[name], x) for name, x in sent.decoded.items())


def test_an_update_is_the_change_and_integers_are_sent_exactly(params: Params) -> None:
    start = model(1, params)
    sent = upload(Uplink(Codec(Uniform(8)), update=True), params, start)
    frame = unpack(sent.frame, like=params)
    assert torch.equal(frame["fc.bias"], params["fc.bias"] - start["fc.bias"])
    assert torch.equal(frame["norm.num_batches_tracked"], params["norm.num_batches_tracked"])
    assert (sent.decoded["fc.weight"] - params["fc.weight"]).abs().max() < 0.05


def test_only_trained_tensors_are_quantized(params: Params) -> None:
    sent = send(Uplink(Codec(KMeans(1))), params, params, {}, ["fc.weight"], Header(base=1), rng.key(0, "u"))
    assert list(sent.error) == ["fc.weight"]
    assert torch.equal(sent.decoded["conv.weight"], params["conv.weight"])


def test_error_feedback_telescopes(params: Params) -> None:
    """sum_t Q(u_t + e_t) = sum_t u_t - e_T, on weights and on updates: errors are sent later."""
    like = {name: x.double() for name, x in params.items() if name in ("conv.weight", "fc.weight")}
    for update in (False, True):
        uplink, error = Uplink(Codec(Uniform(2)), update, feedback=True), dict[str, torch.Tensor]()
        arrived, meant = ({name: torch.zeros_like(x) for name, x in like.items()} for _ in range(2))
        for t in range(20):
            w, start = model(t, like), model(t + 100, like)
            sent = upload(uplink, w, start, error)
            error = sent.error
            for name, u in unpack(sent.frame, like=like).items():
                arrived[name] += u
                meant[name] += w[name] - start[name] if update else w[name]
        for name in like:
            torch.testing.assert_close(arrived[name], meant[name] - error[name], rtol=0, atol=1e-9)


def test_without_feedback_the_error_is_not_stored(params: Params) -> None:
    plain, again = (
        upload(Uplink(Codec(KMeans(2))), params, params, error) for error in ({}, {"fc.weight": params["fc.weight"]})
    )
    assert plain.frame == again.frame


UPDATES = Uplink(Codec(Uniform(2)), update=True, feedback=True)
FORMULAS: dict[str, Callable[[Params, Params, Params], Params]] = {
    "message": lambda w, start, error: message(UPDATES, w, start, error),
    "received": lambda w, start, error: received(True, w, start),
    "lost": lambda w, start, error: lost(w, error),
    "drift": lambda w, start, error: {name: drift(x, start[name]) for name, x in w.items()},
}


@pytest.mark.parametrize("formula", FORMULAS)
def test_stacked_clients_have_the_same_bits_as_each_alone(formula: str, params: Params) -> None:
    """Scalars and half precision as well."""
    start = take(params, ["conv.weight", "half.weight", "fc.weight", "fc.bias"]) | {"scale": torch.tensor(0.3)}
    clients = [(model(k, start), model(k + 10, start)) for k in range(5)]
    w, error = ({name: torch.stack([client[part][name] for client in clients]) for name in start} for part in (0, 1))
    together = FORMULAS[formula](w, start, error)
    for k, (client_w, client_error) in enumerate(clients):
        alone = FORMULAS[formula](client_w, start, client_error)
        assert alone.keys() == together.keys() == start.keys()
        assert all(same(x, together[name][k]) for name, x in alone.items())


def test_the_relative_error_of_stacked_clients_is_that_of_each_alone(params: Params) -> None:
    """|(3, 0), 4| / |(3, 4), 12| = 5 / 13 by hand, and the same on random tensors within rounding."""
    u, arrived = {"a": torch.tensor([[3.0, 4.0]]), "b": torch.tensor([[12.0]])}, {"a": torch.tensor([[0.0, 4.0]])}
    arrived["b"] = torch.tensor([[8.0]])
    assert float(stacked_relative_errors(u, arrived)) == pytest.approx(5 / 13)
    weights = take(params, ["conv.weight", "fc.weight"])
    u, arrived = (
        {name: torch.stack([x, 2 * x.flip(0)]) for name, x in model(seed, weights).items()} for seed in (1, 2)
    )
    for k, error in enumerate(stacked_relative_errors(u, arrived).tolist()):
        row = {name: x[k] for name, x in u.items()}
        alone = relative_error(row, lost(row, {name: x[k] for name, x in arrived.items()}))
        assert error == pytest.approx(alone, rel=1e-12)
    zero = {"a": torch.zeros(2, 3)}
    assert stacked_relative_errors(zero, zero).tolist() == [0.0, 0.0]
    assert relative_error(zero, zero) == 0.0


def test_memory_is_split_and_joined_again() -> None:
    memory = {"c": torch.ones(2), "error/c": torch.zeros(2)}
    rule, errors = split_memory(memory)
    assert (rule, errors) == ({"c": memory["c"]}, {"c": memory["error/c"]})
    assert join_memory(rule, errors) == memory


@pytest.mark.parametrize("quantizer", [RandomStep(), QSGD(1), Stochastic(1), TopK(QSGD(1, norm="max"))], ids=str)
def test_feedback_of_codes_that_may_diverge_is_refused(quantizer: Quantizer) -> None:
    with pytest.raises(ValueError, match="may exceed the values and would grow from round to round"):
        Uplink(Codec(quantizer, Range()), update=True, feedback=True)
    assert Uplink(Codec(quantizer, Range()), update=True).lossy
