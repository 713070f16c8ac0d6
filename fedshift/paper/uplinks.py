"""What a codec is worth on a slow link.

t(codec) = encode + bytes / rate            seconds until the upload is there
(t32 - encode) / t                          the paper's rule, t32 = bytes32 / rate and t = bytes / rate:
                                            how many times slower than the fast link the slow one may be
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from fedshift.bench.codecs import Row, rows, weights
from fedshift.engines.base import one_thread
from fedshift.models import MODELS
from fedshift.names import named
from fedshift.paper.published import TABLE3
from fedshift.paper.tables import Listing
from fedshift.rates import said
from fedshift.toml import SettingsError
from fedshift.types import Params

MOST = 4_000_000  # weights that are encoded to measure; of a larger model, as many times that as it has
# K-means at 4 bits (20 dB on the paper's CNN) trains as well as the paper says; uniform codes at 5 bits (18 dB)
# lose up to twenty points there, and at 4 bits (12 dB) fail
TRAINS_DB = 19.0
# below, whole weights cost accuracy that updates with error feedback do not: on digits, 36.7 dB cost 0.1 points,
# 24.6 dB 1.6 and 20.1 dB 10.7 (docs/guides/choosing-bits.md)
WHOLE_DB = 30.0
CENTRING = (
    'Shift per filter (shift.per = "filter", the default): nothing on the wire, no work for clients. '
    "Its effect on accuracy depends on the task and is not part of this plan."
)


class Upload(NamedTuple):
    """One codec: what it takes to get a model to the server, and what is lost on the way."""

    codec: str
    bytes: float
    encode: float  # seconds
    snr_db: float | None  # None when nothing is lost

    def seconds(self, rate: float) -> float:
        """encode + bytes / rate

        >>> Upload("KMeans(4)", 1e6, 0.5, 20.0).seconds(1e6)
        1.5
        """
        return self.encode + self.bytes / rate

    def slower(self, exact: float, rate: float) -> float:
        """(t32 - encode) / t, for t32 = exact / rate; the paper's own figures give its 7.78.

        >>> f"{Upload('KMeans(4)', 1.059e6, 0.179, None).slower(8.421e6, 1e6):.2f}"
        '7.78'
        """
        return (exact / rate - self.encode) / (self.bytes / rate)

    @property
    def error(self) -> float:
        """|w - w'| / |w|"""
        return 0.0 if self.snr_db is None else float(10 ** (-self.snr_db / 20))

    @property
    def trains(self) -> bool:
        return self.snr_db is None or self.snr_db >= TRAINS_DB


def model(name: str | None, count: int | None) -> tuple[Params, float]:
    """Weights like those of a model, and how many times as many the model has."""
    if name is not None and count is not None:
        raise SettingsError("--weights: goes without --model, which says how many there are")
    if count is not None:
        measured = min(count, MOST)
        return weights(of={"weight": torch.empty(1, measured)}), count / measured
    if name is None or name == "paper-cnn":
        return weights(), 1.0
    if name not in MODELS and ":" not in name:
        raise SettingsError(f"--model {name}: no such model; known are {', '.join(MODELS)}, and module:function")
    try:
        made = (MODELS.get(name) or named(name))()
        params = {key: x for key, x in made.state_dict().items() if x.is_floating_point() and x.ndim >= 2}
    except Exception as problem:  # of the user's own function
        raise SettingsError(f"--model {name}: {' '.join(str(problem).split())}") from problem
    if not params:
        raise SettingsError(f"--model {name}: has no weights of two axes or more, and others are not coded")
    return weights(of=params), 1.0


def measure(
    params: Params, times: float = 1.0, repeats: int = 3, tick: Callable[[str], None] = lambda name: None
) -> list[Upload]:
    """Every codec on these weights, on one core of this machine."""
    with one_thread():
        return [upload(row, times) for row in rows(params, repeats, tick)]


def upload(row: Row, times: float = 1.0) -> Upload:
    return Upload(row.codec, row.bytes * times, row.encode_ms * times / 1e3, row.snr_db)


def first(uploads: Iterable[Upload], at: float) -> Upload:
    """Who is there first on a link of this rate."""
    return min(uploads, key=lambda one: one.seconds(at))


def changes(uploads: Sequence[Upload]) -> list[tuple[float, Upload]]:
    """From which rate on which codec is first: the lower envelope of lines in 1 / rate, from slow links to fast.

    Of 10 bytes in 2 s and 40 bytes in 1 s, 30 bytes take a second at 30 bytes/s:

    >>> small, quick = Upload("small", 10, 2.0, None), Upload("quick", 40, 1.0, None)
    >>> [(rate, one.codec) for rate, one in changes([small, quick])]
    [(0.0, 'small'), (30.0, 'quick')]
    """
    best = min(uploads, key=lambda one: (one.bytes, one.encode))
    found = [(0.0, best)]
    while True:
        quicker = [one for one in uploads if one.encode < best.encode]
        if not quicker:
            return found
        crossing = {one.codec: (one.bytes - best.bytes) / (best.encode - one.encode) for one in quicker}
        best = min(quicker, key=lambda one: (crossing[one.codec], one.encode))
        found.append((crossing[best.codec], best))


def table3(uploads: Sequence[Upload], at: float) -> Listing:
    """Time, size and the rule for every codec, beside the paper's."""
    exact = next(one.bytes for one in uploads if one.codec == "Identity")
    lines = []
    for one in uploads:
        theirs = TABLE3.get(one.codec)
        known: tuple[str, ...] = ("", "", "")
        if theirs:
            rule = Upload(one.codec, theirs.bytes, theirs.seconds, None).slower(TABLE3["Identity"].bytes, at)
            known = f"{theirs.kilobytes + theirs.side:,.0f}", f"{1e3 * theirs.seconds:,.0f}", f"{rule:.2f}"
        lines.append(
            (
                one.codec,
                f"{one.bytes / 1e3:,.0f}",
                f"{1e3 * one.encode:.1f}",
                time(one.seconds(at)),
                f"{one.slower(exact, at):.2f}",
                *known,
            )
        )
    columns = "codec", "kB", "encode ms", "seconds", "times slower", "paper KB", "paper ms", "paper's rule"
    return Listing(f"Table 3: one upload of the paper's CNN at {said(at)}", columns, lines)


def plan(uploads: Sequence[Upload], at: float) -> tuple[Listing, list[str]]:
    """Codecs in the order in which they reach the server, and what to make of it."""
    lines = [
        (
            one.codec,
            time(one.seconds(at)),
            f"{1e3 * one.encode:.1f}",
            f"{one.bytes:,.0f}",
            "exact" if one.snr_db is None else f"{one.snr_db:.1f}",
            "0" if one.snr_db is None else f"{100 * one.error:.2g} %",
        )
        for one in sorted(uploads, key=lambda one: one.seconds(at))
    ]
    columns = "codec", "seconds", "encode ms", "bytes", "SNR dB", "error"
    able = [one for one in uploads if one.trains]
    best, exact = first(able, at), next(one for one in uploads if one.codec == "Identity")
    advice = (
        f"Send {best.codec}: there in {time(best.seconds(at))} s where fp32 takes {time(exact.seconds(at))} s, "
        f"with an error of {100 * best.error:.2g} % of the weights."
    )
    if best.snr_db is not None and best.snr_db < WHOLE_DB:
        advice += " Use it on updates, with error feedback: on whole weights, such an error costs accuracy."
    if (quickest := first(uploads, at)).codec != best.codec:
        advice += f" {quickest.codec} is there in {time(quickest.seconds(at))} s, but its error of "
        advice += f"{100 * quickest.error:.2g} % is more than training on whole weights bears."
    return Listing(f"One upload at {said(at)}", columns, lines), [advice, crossover(able), CENTRING]


def crossover(uploads: Sequence[Upload]) -> str:
    """From which rate on which codec is first, in a sentence."""
    (_, slow), *faster = changes(uploads)
    if not faster:
        return f"{slow.codec} is first on every link."
    turns = ", ".join(f"from {said(at)} on {one.codec}" for at, one in faster)
    return f"First on the slowest links is {slow.codec}, {turns}."


def time(seconds: float) -> str:
    """
    >>> time(0.01234), time(4806.2)
    ('0.0123', '4,806')
    """
    return f"{seconds:.3g}" if seconds < 1000 else f"{seconds:,.0f}"
