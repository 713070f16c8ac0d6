"""Rates of links and numbers of bytes: parsing and formatting."""

import math
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


def said(at: float) -> str:
    """Bytes per second as text.

    >>> said(1e6), said(1250), said(115.2e6), said(0.5)
    ('1 MB/s', '1.25 kB/s', '115 MB/s', '0.5 B/s')
    """
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if at >= size:
            return f"{at / size:.3g} {unit}"
    return f"{at:.3g} B/s"


def megabytes(count: float, digits: int = 2) -> str:
    """Bytes in MB, with two significant digits below 0.01 MB or where the value rounds to zero.

    >>> megabytes(1_514_000), megabytes(10_000), megabytes(9_900), megabytes(2_040), megabytes(12), megabytes(0)
    ('1.51', '0.01', '0.0099', '0.0020', '0.000012', '0.00')
    >>> megabytes(1_250_000, digits=1), megabytes(52_500, digits=1), megabytes(40_000, digits=1)
    ('1.2', '0.1', '0.040')
    """
    size = count / 1e6
    text = f"{size:.{digits}f}"
    if size > 0 and (size < 0.01 or not float(text)):
        return f"{size:.{1 - math.floor(math.log10(size))}f}"
    return text
