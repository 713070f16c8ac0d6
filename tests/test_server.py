"""Uploads of a round: both frames of an upload are checked before any part of it is used."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from fedshift import unpack
from fedshift.core.types import Decoded, Params
from fedshift.engines import Job, Sequential, Upload
from fedshift.rounds.federation import Federation
from tests.federations import federation, forged, same, train

Edit = Callable[[Upload, Federation], Upload]


class Edited(Sequential):
    """One client of the cohort sends another upload."""

    def __init__(self, fed: Federation, edit: Edit, all_of_them: bool = False) -> None:
        super().__init__(fed.task)
        self.fed, self.edit, self.all = fed, edit, all_of_them

    def train(self, jobs: Sequence[Job]) -> list[Iterator[Upload]]:
        return [
            (self.edit(upload, self.fed) if i == 2 or self.all else upload for i, upload in enumerate(uploads))
            for uploads in super().train(jobs)
        ]


def full(like: Params, value: float) -> Params:
    return {name: torch.full_like(x, value) for name, x in like.items()}


def raw(frame: bytes | Decoded) -> bytes:
    assert isinstance(frame, bytes)
    return frame


def weights(upload: Upload, fed: Federation) -> Params:
    return unpack(raw(upload.frame), fed.task.params)


def control(upload: Upload, fed: Federation) -> Params:
    return unpack(raw(upload.second), fed.second)


def flipped(frame: bytes) -> bytes:
    return frame[:-9] + bytes([frame[-9] ^ 1]) + frame[-8:]


HOSTILE: dict[str, tuple[str, Edit, str]] = {
    "no control": ("sent", lambda u, fed: u._replace(second=b""), "0 bytes are too few for a frame"),
    "cut control": ("sent", lambda u, fed: u._replace(second=raw(u.second)[:-3]), "is incomplete"),
    "damaged control": (
        "sent",
        lambda u, fed: u._replace(second=flipped(raw(u.second))),
        "the checksum does not match",
    ),
    "control of another model": (
        "sent",
        lambda u, fed: u._replace(second=forged(u.second, {"w": torch.zeros(2)})),
        "names, shapes or dtypes of their tensors differ",
    ),
    "derived control beyond float32": (
        "derived",
        lambda u, fed: u._replace(frame=forged(u.frame, full(fed.task.params, 3e38))),
        "the server's state computed from the upload is NaN or infinite",
    ),
    "weights of another run": (
        "derived",
        lambda u, fed: u._replace(frame=forged(u.frame, weights(u, fed), run=7)),
        "belongs to run 0000000000000007, not ",
    ),
    "weights of another round": (
        "derived",
        lambda u, fed: u._replace(frame=forged(u.frame, weights(u, fed), base=9)),
        "belongs to round 9, not ",
    ),
    "weights of another client": (
        "derived",
        lambda u, fed: u._replace(frame=forged(u.frame, weights(u, fed), client=99)),
        "belongs to client 99, not client ",
    ),
    "control of another run": (
        "sent",
        lambda u, fed: u._replace(second=forged(u.second, control(u, fed), run=7)),
        "belongs to run 0000000000000007, not ",
    ),
    "control of another round": (
        "sent",
        lambda u, fed: u._replace(second=forged(u.second, control(u, fed), base=9)),
        "belongs to round 9, not ",
    ),
    "control of another client": (
        "sent",
        lambda u, fed: u._replace(second=forged(u.second, control(u, fed), client=99)),
        "belongs to client 99, not client ",
    ),
    "cut weights": ("derived", lambda u, fed: u._replace(frame=raw(u.frame)[:-3]), "is incomplete"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_upload_fails_and_has_no_effect(name: str) -> None:
    control, edit, why = HOSTILE[name]
    bounds = {"norm": 0} if "beyond float32" in name else {}  # its weights exceed the bound
    fed = federation(algorithm={"name": "scaffold", "control": control}, train={"lr": 0.001}, bounds=bounds)
    reference, expected, remembered = train(fed, 2, Edited(fed, lambda u, _: u._replace(failure="x")))
    state, outcomes, memory = train(fed, 2, Edited(fed, edit))
    for outcome, other in zip(outcomes, expected, strict=True):
        assert list(outcome.failed) == list(other.failed)
        assert all(why in reason for reason in outcome.failed.values())
        assert (outcome.bytes_up, outcome.arrived, outcome.layers) == (other.bytes_up, other.arrived, other.layers)
    assert same(state.out.params, reference.out.params)
    assert same(state.out.control, reference.out.control)
    assert memory.held.keys() == remembered.held.keys()


def test_controls_are_refused_if_their_sum_would_be_infinite() -> None:
    fed = federation(algorithm={"name": "scaffold", "control": "sent"})
    huge = full(fed.start().out.control, 3e38)
    hostile = Edited(fed, lambda u, _: u._replace(second=forged(u.second, huge)), all_of_them=True)
    state, (outcome,), _ = train(fed, 1, hostile)
    assert outcome.arrived == 1
    assert all("NaN or infinite" in why for why in outcome.failed.values())
    assert all(bool(x.isfinite().all()) for x in state.out.control.values())
