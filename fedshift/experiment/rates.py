"""Rates of links as people write them."""

import re

from fedshift.experiment.toml import SettingsError

PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30}
RATE = re.compile(
    r"(?P<number>[0-9.]+(e[+-]?[0-9]+)?)\s*(?P<prefix>[kmg]i?)?(?P<unit>b|B|bit|byte|bytes|bps)?(/s)?", re.I
)


def rate(text: str) -> float:
    """Bytes per second, from the command line's --uplink."""
    try:
        return parse(text)
    except ValueError as problem:
        raise SettingsError(f"--uplink {text}: {problem}") from None


def parse(text: str) -> float:
    """Bytes per second; ValueError where the text is no rate.

    >>> parse("1MB/s"), parse("500kB/s"), parse("10Mbit/s"), parse("1e6"), parse("2 MiB/s")
    (1000000.0, 500000.0, 1250000.0, 1000000.0, 2097152.0)
    """
    found = RATE.fullmatch(text.strip())
    try:
        number = float(found["number"]) if found else 0.0
    except ValueError:
        number = 0.0
    if found is None or not 0 < number < 1e15:
        raise ValueError("must be a rate, for example 1MB/s, 500kB/s, 10Mbit/s or 1e6 (bytes per second)")
    unit = found["unit"] or "B"
    bits = unit == "b" or unit.lower() in ("bit", "bps")
    return number * PREFIX[(found["prefix"] or "").lower()] / (8 if bits else 1)
