"""Bytes, rates and times as people read them."""

import math

Units = tuple[tuple[str, float, float], ...]

# from large to small: a unit, its size, and the value from which on it is used
BYTES: Units = (("GB", 1e9, 1e9), ("MB", 1e6, 1e6), ("kB", 1e3, 1e3), ("B", 1.0, 0.0))
SECONDS: Units = (("h", 3600.0, 7200.0), ("min", 60.0, 120.0), ("s", 1.0, 0.5), ("ms", 1e-3, 0.0))


def unit(value: float, units: Units) -> tuple[str, float]:
    """Name and size of the unit that suits a value.

    >>> unit(57.9e6, BYTES), unit(119.0, SECONDS)
    (('MB', 1000000.0), ('s', 1.0))
    """
    return next((name, size) for name, size, least in units if value >= least)


def bytes_text(count: float) -> str:
    """Number of bytes with its unit.

    >>> bytes_text(33_160_000), bytes_text(107_797_950_000), bytes_text(57_920_000), bytes_text(512)
    ('33.2 MB', '108 GB', '57.9 MB', '512 B')
    """
    name, size = unit(count, BYTES)
    return f"{count / size:.3g} {name}" if size > 1 else f"{count:.0f} B"


def rate_text(rate: float) -> str:
    """Bytes per second with their unit.

    >>> rate_text(1e6), rate_text(1250), rate_text(115.2e6), rate_text(0.5)
    ('1 MB/s', '1.25 kB/s', '115 MB/s', '0.5 B/s')
    """
    name, size = unit(rate, BYTES)
    return f"{rate / size:.3g} {name}/s"


def megabytes(count: float, digits: int = 2) -> str:
    """Bytes in MB, with two significant digits where that is below 0.01 MB or rounds to zero.

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


def seconds_text(seconds: float) -> str:
    """Measured time with its unit, at least seconds.

    >>> seconds_text(26.5), seconds_text(3104), seconds_text(86238), seconds_text(0.01)
    ('26.5 s', '51.7 min', '24 h', '0.01 s')
    """
    name, size = unit(max(seconds, 0.5), SECONDS)
    return f"{seconds / size:.3g} {name}"


def rough_time(seconds: float) -> str:
    """Estimated time in words.

    >>> rough_time(40), rough_time(400), rough_time(4e4), rough_time(4e5)
    ('40 seconds', '7 minutes', '11.1 hours', '4.6 days')
    """
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    if seconds < 7200:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.1f} hours" if seconds < 172_800 else f"{seconds / 86_400:.1f} days"
