"""Rates of links as text."""

import pytest

from fedshift.experiment.rates import rate
from fedshift.experiment.toml import SettingsError


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [
        ("1MB/s", 1e6),
        ("1 MB/s", 1e6),
        ("500kB/s", 5e5),
        ("10Mbit/s", 1.25e6),
        ("10Mb/s", 1.25e6),
        ("8kbps", 1e3),
        ("1e6", 1e6),
        ("250000", 2.5e5),
        ("0.5GB/s", 5e8),
    ],
)
def test_a_rate_may_be_written_in_many_ways(text: str, bytes_per_second: float) -> None:
    assert rate(text) == bytes_per_second


@pytest.mark.parametrize("text", ["", "fast", "0", "-1MB/s", "1XB/s", "1..2", "MB/s", "1e99"])
def test_text_that_is_not_a_rate_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--uplink .*must be a rate, for example 1MB/s"):
        rate(text)
