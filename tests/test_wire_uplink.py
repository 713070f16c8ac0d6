"""Uploads whose codec is not that of their uplink."""

import pytest

from fedshift import Codec, Identity, Range, pack
from tests.federations import federation, train
from tests.test_server import Edited


@pytest.mark.parametrize("control", ["derived", "sent"])
def test_a_client_that_uses_another_codec_than_its_uplink_is_left_out(control: str) -> None:
    fed = federation(algorithm={"name": "scaffold", "control": control}, uplink={"bits": 4})
    edited = Edited(fed, lambda upload, fed: upload._replace(frame=pack(Codec(Identity(), Range()), fed.task.params)))
    _, (outcome,), _ = train(fed, 1, edited)
    assert (len(outcome.failed), outcome.arrived) == (1, 4)
    assert all("coded by Identity(), Range()" in why for why in outcome.failed.values())
