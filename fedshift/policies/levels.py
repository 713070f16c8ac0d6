"""Uplinks of policies that choose the levels of QSGD: Federated QSGD, which sends updates without feedback."""

from dataclasses import replace
from functools import lru_cache
from typing import Literal

from fedshift.codecs.qsgd import MOST, qsgd
from fedshift.rounds.uplink import Uplink


@lru_cache(1024)
def uplink(s: int, norm: Literal["l2", "max"] = "l2", bucket: int = 0) -> Uplink:
    """Updates in s levels per sign, biases included; without buckets, with one norm of the whole update.

    >>> uplink(4).codec.quantizer
    QSGD(s=4, norm='l2', whole=True)
    """
    return Uplink(replace(qsgd(s, norm, whole=not bucket, bucket=bucket), min_axes=1), update=True)


def check_levels(policy: str, bucket: int, **levels: int) -> None:
    """Raise ValueError for a number of levels or a size of buckets that QSGD does not have."""
    if bucket < 0:
        raise ValueError(f"{policy}(bucket={bucket}): bucket must be a number of values, or 0 for the whole update")
    for name, s in levels.items():
        if isinstance(s, bool) or not isinstance(s, int) or not 1 <= s <= MOST:
            raise ValueError(f"{policy}({name}={s}): {name}, levels per sign, must be an integer from 1 to {MOST}")
