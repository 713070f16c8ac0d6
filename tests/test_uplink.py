"""What a client sends, and what it keeps."""

import torch

from fedshift import Codec, KMeans, Params, Stochastic, Uniform, Uplink, header, unpack
from fedshift.core import rng
from fedshift.rounds.uplink import Sent, read, send


def model(seed: int, like: Params) -> Params:
    g = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(x.shape, generator=g).to(x.dtype) if x.is_floating_point() else x for name, x in like.items()
    }


def upload(uplink: Uplink, w: Params, start: Params, error: Params | None = None) -> Sent:
    trained = [name for name, x in w.items() if x.is_floating_point() and "running" not in name]
    return send(uplink, w, start, error or {}, trained, number=3, examples=7, key=rng.key(0, "upload"))


def test_exact_weights_come_back_as_they_are(params: Params) -> None:
    sent = upload(Uplink(), params, model(1, params))
    assert all(torch.equal(sent.decoded[name], x) for name, x in params.items())
    assert sent.error == {}
    assert header(sent.frame)[:3] == (False, 3, 7)


def test_both_ends_read_the_same_weights(params: Params) -> None:
    start = model(1, params)
    for update in (False, True):
        for codec in (Codec(KMeans(4)), Codec(Stochastic(2)), Uplink().codec):
            sent = upload(Uplink(codec, update), params, start)
            server = read(sent.frame, start)
            assert all(torch.equal(server[name], x) for name, x in sent.decoded.items())


def test_an_update_is_the_change_and_integers_travel_as_they_are(params: Params) -> None:
    start = model(1, params)
    sent = upload(Uplink(Codec(Uniform(8)), update=True), params, start)
    frame = unpack(sent.frame, like=params)
    assert torch.equal(frame["fc.bias"], params["fc.bias"] - start["fc.bias"])
    assert torch.equal(frame["norm.num_batches_tracked"], params["norm.num_batches_tracked"])
    assert (sent.decoded["fc.weight"] - params["fc.weight"]).abs().max() < 0.05


def test_only_what_is_trained_is_quantized(params: Params) -> None:
    sent = send(Uplink(Codec(KMeans(1))), params, params, {}, ["fc.weight"], number=1, examples=1, key=rng.key(0, "u"))
    assert list(sent.error) == ["fc.weight"]
    assert torch.equal(sent.decoded["conv.weight"], params["conv.weight"])


def test_error_feedback_telescopes(params: Params) -> None:
    """sum_t Q(u_t + e_t) = sum_t u_t - e_T, on weights and on updates: what is lost is sent later."""
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


def test_without_feedback_an_error_is_forgotten(params: Params) -> None:
    plain, again = (
        upload(Uplink(Codec(KMeans(2))), params, params, error) for error in ({}, {"fc.weight": params["fc.weight"]})
    )
    assert plain.frame == again.frame
