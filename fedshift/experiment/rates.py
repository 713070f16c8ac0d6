"""Rates of links, as written in settings."""

import re

from fedshift.experiment.toml import SettingsError

PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30}
RATE = re.compile(
    r"(?P<number>[0-9.]+(e[+-]?[0-9]+)?)\s*(?P<prefix>[kmg]i?)?(?P<unit>b|B|bit|byte|bytes|bps)?(/s)?", re.I
)


def rate(text: str) -> float:
    """Bytes per second from the value of --uplink."""
    try:
        return parse(text)
    except ValueError as problem:
        raise SettingsError(f"--uplink {text}: {problem}") from None


def parse(text: str) -> float:
    """Bytes per second; ValueError if the text is not a rate.

    >>> parse("1MB/s"), parse("500kB/s"), parse("10Mbit/s"), parse("1e6"), parse("2 MiB/s")
    (1000000.0, 500000.0, 1250000.0, 1000000.0, 2097152.0)
    """
    match = RATE.fullmatch(text.strip())
    try:
        number = float(match["number"]) if match else 0.0
    except ValueError:
        number = 0.0
    if match is None or not 0 < number < 1e15:
        raise ValueError("must be a rate, for example 1MB/s, 500kB/s, 10Mbit/s or 1e6 (bytes per second)")
    unit = match["unit"] or "B"
    bits = unit == "b" or unit.lower() in ("bit", "bps")
    return number * PREFIX[(match["prefix"] or "").lower()] / (8 if bits else 1)
