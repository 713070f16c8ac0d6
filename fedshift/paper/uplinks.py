"""Upload times of codecs and named uplinks on a link, and their measured accuracy.

t(codec) = encode + bytes / rate            seconds until the upload has arrived
(t32 - encode) / t                          the paper's rule, t32 = bytes32 / rate and t = bytes / rate:
                                            factor by which the slow link may be slower than the fast one
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fedshift.core.names import named
from fedshift.core.tables import Listing
from fedshift.core.types import Params
from fedshift.core.units import rate_text
from fedshift.experiment.frontier import GRID
from fedshift.experiment.links import links
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import SettingsError
from fedshift.models import MODELS
from fedshift.paper.published import TABLE3
from fedshift.rounds.engine import one_thread
from fedshift.wire.measure import CodecRow, row, rows, updates, weights

MOST = 4_000_000  # weights that are encoded for a measurement; results are scaled to larger models
# in the paper, K-means at 4 bits (20 dB on its CNN) trains well, uniform codes at 5 bits (18 dB) lose up to twenty
# points, and uniform codes at 4 bits (12 dB) fail
TRAINS_DB = 19.0
LOST = 0.5  # largest loss of a recommended uplink, in points of accuracy
BFLOAT16 = "Cast(bfloat16)"
CENTRING = (
    'Shift per filter (shift.per = "filter", the default): no additional bytes and no work for clients. '
    "Its effect on accuracy depends on the task and is not part of this plan."
)


class UplinkScore(NamedTuple):
    """Results of one uplink on a task, means over seeds."""

    accuracy: float  # percent, mean of the last ten rounds
    spread: float  # its standard deviation over seeds
    megabytes: float  # uploaded by all clients in all rounds
    points: float  # difference in accuracy from exact uploads
    margin: float  # half of its paired 95 % interval


# digits: `fedshift frontier --seeds 3`, 150 rounds, seeds 0, 1, 2; two cores of an EPYC, commit a760ead
MEASURED: dict[str, UplinkScore] = {
    "exact": UplinkScore(94.185, 0.486, 57.710, 0.000, 0.000),
    "uniform-8": UplinkScore(94.204, 0.500, 15.128, 0.019, 0.040),
    "random-4": UplinkScore(93.796, 0.324, 8.192, -0.389, 1.826),
    "random-4-updates": UplinkScore(94.157, 0.486, 8.192, -0.028, 0.000),
    "random-2-updates": UplinkScore(94.009, 0.457, 2.853, -0.176, 0.422),
    "kmeans-2-feedback": UplinkScore(94.000, 0.570, 3.002, -0.185, 0.211),
    "lean": UplinkScore(94.167, 0.655, 1.586, -0.019, 0.509),
    "step-0.8": UplinkScore(94.074, 0.616, 1.636, -0.111, 0.452),
    "step-0.8-no-feedback": UplinkScore(94.148, 0.516, 1.642, -0.037, 0.340),
    "extreme": UplinkScore(94.241, 0.841, 0.677, 0.056, 1.333),
    "step-0.3": UplinkScore(93.537, 0.636, 0.726, -0.648, 1.118),
    "random-0.15": UplinkScore(94.426, 0.693, 0.407, 0.241, 0.695),
    "step-0.15": UplinkScore(92.981, 0.251, 0.455, -1.204, 0.587),
    "ternary-0.05": UplinkScore(93.593, 0.389, 0.737, -0.593, 0.242),
    "ternary-0.02": UplinkScore(93.046, 0.431, 0.425, -1.139, 0.759),
    "ternary-0.01": UplinkScore(91.583, 0.619, 0.297, -2.602, 2.471),
}
# the task on which an uplink that a plan compares lost most, of those in docs/tasks.md: mean difference over seeds
WORST: dict[str, tuple[str, float]] = {
    "exact": ("digits", 0.0),
    "lean": ("Fashion-MNIST", -0.1),
    "extreme": ("Shakespeare", -2.6),
    "random-4": ("digits", -0.4),  # not run on other tasks
}
# setting of each uplink that a plan compares
SETTINGS = {name: f'uplink = "{name}"' for name in ("exact", "lean", "extreme")} | {"random-4": "uplink.bits = 4"}


class CodecUpload(NamedTuple):
    """Size, time and error of one upload with a codec."""

    codec: str
    bytes: float
    encode: float  # seconds
    snr_db: float | None  # None for exact codecs

    def seconds(self, rate: float) -> float:
        """encode + bytes / rate

        >>> CodecUpload("KMeans(4)", 1e6, 0.5, 20.0).seconds(1e6)
        1.5
        """
        return self.encode + self.bytes / rate

    def slower(self, exact: float, rate: float) -> float:
        """(t32 - encode) / t, for t32 = exact / rate; 7.78 for the paper's figures.

        >>> f"{CodecUpload('KMeans(4)', 1.059e6, 0.179, None).slower(8.421e6, 1e6):.2f}"
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
    """Synthetic weights in the shapes of a model, and the factor by which the model is larger."""
    if name is not None and count is not None:
        raise SettingsError("--weights: cannot be combined with --model, which determines the number of weights")
    if count is not None:
        measured = min(count, MOST)
        return weights(of={"weight": torch.empty(1, measured)}), count / measured
    if name is None or name == "paper-cnn":
        return weights(), 1.0
    if name not in MODELS and ":" not in name:
        raise SettingsError(f"--model {name}: no such model; known are {', '.join(MODELS)}, and module:function")
    try:
        network = (MODELS.get(name) or named(name))()
        params = {key: x for key, x in network.state_dict().items() if x.is_floating_point() and x.ndim >= 2}
    except Exception as problem:  # of the user's function
        raise SettingsError(f"--model {name}: {' '.join(str(problem).split())}") from problem
    if not params:
        raise SettingsError(f"--model {name}: has no weights with two or more axes, and others are not quantized")
    return weights(of=params), 1.0


def measure(
    params: Params, times: float = 1.0, repeats: int = 3, tick: Callable[[str], None] = lambda name: None
) -> list[CodecUpload]:
    """Measure every codec on these weights, on one core of this machine."""
    with one_thread():
        return [upload(row, times) for row in rows(params, repeats, tick)]


def upload(row: CodecRow, times: float = 1.0) -> CodecUpload:
    return CodecUpload(row.codec, row.bytes * times, row.encode_ms * times / 1e3, row.snr_db)


def changes(uploads: Sequence[CodecUpload]) -> list[tuple[float, CodecUpload]]:
    """Rates from which another codec arrives first: the lower envelope of lines in 1 / rate, from slow links to fast.

    For 10 bytes encoded in 2 s and 40 bytes in 1 s, the 30 additional bytes take one second at 30 bytes/s:

    >>> small, quick = CodecUpload("small", 10, 2.0, None), CodecUpload("quick", 40, 1.0, None)
    >>> [(rate, upload.codec) for rate, upload in changes([small, quick])]
    [(0.0, 'small'), (30.0, 'quick')]
    """
    best = min(uploads, key=lambda upload: (upload.bytes, upload.encode))
    found = [(0.0, best)]
    while True:
        quicker = [upload for upload in uploads if upload.encode < best.encode]
        if not quicker:
            return found
        crossing = {upload.codec: (upload.bytes - best.bytes) / (best.encode - upload.encode) for upload in quicker}
        best = min(quicker, key=lambda upload: (crossing[upload.codec], upload.encode))
        found.append((crossing[best.codec], best))


def table3(uploads: Sequence[CodecUpload], at: float) -> Listing:
    """Table of time, size and the rule for every codec, with the paper's figures."""
    exact = next(upload.bytes for upload in uploads if upload.codec == "Identity")
    lines = []
    for upload in uploads:
        theirs = TABLE3.get(upload.codec)
        known: tuple[str, ...] = ("", "", "")
        if theirs:
            rule = CodecUpload(upload.codec, theirs.bytes, theirs.seconds, None).slower(TABLE3["Identity"].bytes, at)
            known = f"{theirs.kilobytes + theirs.side:,.0f}", f"{1e3 * theirs.seconds:,.0f}", f"{rule:.2f}"
        lines.append(
            (
                upload.codec,
                f"{upload.bytes / 1e3:,.0f}",
                f"{1e3 * upload.encode:.1f}",
                three_digits(upload.seconds(at)),
                f"{upload.slower(exact, at):.2f}",
                *known,
            )
        )
    columns = "codec", "kB", "encode ms", "seconds", "times slower", "paper KB", "paper ms", "paper's rule"
    return Listing(f"Table 3: one upload of the paper's CNN at {rate_text(at)}", columns, lines)


class Candidate(NamedTuple):
    """Named uplink with the measurements of its upload."""

    name: str  # in GRID and MEASURED
    upload: CodecUpload
    sends: str

    @property
    def points(self) -> float:
        return WORST[self.name][1]


def candidates(
    params: Params, times: float = 1.0, repeats: int = 3, tick: Callable[[str], None] = lambda name: None
) -> list[Candidate]:
    """Measure named uplinks on one core of this machine, on the weights or on synthetic updates of their shapes."""
    found = []
    for name in SETTINGS:
        tick(name)
        (group,), _ = links(Experiment(uplink=GRID[name]))
        uplink = group.uplink
        with one_thread():
            measured = row(name, uplink.codec, updates(params) if uplink.update else params, repeats)
        found.append(Candidate(name, upload(measured, times), "updates" if uplink.update else "weights"))
    return found


def recommended(found: Sequence[Candidate], at: float) -> Candidate:
    """First uplink to arrive on a link of this rate, of those that lost at most LOST points."""
    return min(
        (candidate for candidate in found if candidate.points >= -LOST),
        key=lambda candidate: candidate.upload.seconds(at),
    )


def choices(found: Sequence[Candidate], at: float) -> Listing:
    """Table of named uplinks in order of arrival, with their measured accuracy."""
    best = recommended(found, at)
    lines = [
        (
            SETTINGS[candidate.name],
            candidate.sends,
            three_digits(candidate.upload.seconds(at)),
            f"{1e3 * candidate.upload.encode:.1f}",
            f"{candidate.upload.bytes:,.0f}",
            "0" if candidate.name == "exact" else f"{candidate.points:+.1f}",
            "recommended" if candidate is best else "",
        )
        for candidate in sorted(found, key=lambda candidate: candidate.upload.seconds(at))
    ]
    columns = "setting", "clients send", "seconds", "encode ms", "bytes", "points, worst task", ""
    return Listing(f"One upload at {rate_text(at)}, by uplink", columns, lines, 2)


def advice(found: Sequence[Candidate], uploads: Sequence[CodecUpload], at: float) -> list[str]:
    """Recommended uplink for a link of this rate, with reasons and alternatives, in sentences."""
    best, by_name = recommended(found, at), {candidate.name: candidate for candidate in found}
    exact, plain = by_name["exact"], by_name["random-4"]
    if best is exact:
        sentences = [f"Use {SETTINGS['exact']}: no other uplink arrives earlier on this link."]
    else:
        sentences = [
            f"Use {SETTINGS[best.name]} ({best.sends}): an upload takes {_seconds(best, at)} instead of "
            f"{_seconds(exact, at)} (exact); {_points(best)}."
        ]
    cast = next(upload for upload in uploads if upload.codec == BFLOAT16)._replace(codec="uplink.bits = 16")
    if cast.seconds(at) < best.upload.seconds(at):
        sentences.append(
            f"{cast.codec} (bfloat16) is faster on this link, {three_digits(cast.seconds(at))} s, "
            f"with a relative error of {100 * cast.error:.2g} %; its accuracy was not measured."
        )
    sentences += [
        f"{SETTINGS[candidate.name]} is faster, {_seconds(candidate, at)}, but {_points(candidate)}."
        for candidate in found
        if candidate.upload.seconds(at) < best.upload.seconds(at)
    ]
    if best is not plain and best is not exact:
        sentences.append(
            f"For clients that cannot send updates, {SETTINGS[plain.name]} (4-bit K-means codes of "
            f"weights, rounded at random) takes {_seconds(plain, at)}; {_points(plain)}."
        )
    kept = [item.upload._replace(codec=SETTINGS[item.name]) for item in found if item.points >= -LOST]
    return [
        *sentences,
        crossover([*kept, cast]),
        "Accuracy was measured on several tasks, against exact uploads with the same server rule; the task on which an "
        "uplink lost most counts (4-bit codes: digits only). Measure yours with `fedshift frontier --task FILE.toml`.",
        "Bytes and encode times were measured on one core of this machine, with synthetic weights, or synthetic "
        "updates (Laplace) where updates are sent; the size of a range-coded upload depends on the values.",
        CENTRING,
    ]


def _seconds(candidate: Candidate, at: float) -> str:
    return f"{three_digits(candidate.upload.seconds(at))} s"


def _points(candidate: Candidate) -> str:
    """
    >>> _points(Candidate("exact", CodecUpload("exact", 1.0, 0.0, None), "weights"))
    'on digits its accuracy was equal to that of exact uploads'
    """
    task, points = WORST[candidate.name]
    if f"{abs(points):.1f}" == "0.0":
        return f"on {task} its accuracy was equal to that of exact uploads"
    return f"on {task} it {'lost' if points < 0 else 'gained'} {abs(points):.1f} points"


def plan(uploads: Sequence[CodecUpload], at: float) -> Listing:
    """Table of codecs in order of arrival."""
    lines = [
        (
            upload.codec,
            three_digits(upload.seconds(at)),
            f"{1e3 * upload.encode:.1f}",
            f"{upload.bytes:,.0f}",
            "exact" if upload.snr_db is None else f"{upload.snr_db:.1f}",
            "0" if upload.snr_db is None else f"{100 * upload.error:.2g} %",
        )
        for upload in sorted(uploads, key=lambda upload: upload.seconds(at))
    ]
    columns = "codec", "seconds", "encode ms", "bytes", "SNR dB", "error"
    return Listing(f"One upload of weights at {rate_text(at)}, by codec", columns, lines)


def crossover(uploads: Sequence[CodecUpload]) -> str:
    """Codecs that arrive first, by the rate of the link, in a sentence."""
    (_, slow), *faster = changes(uploads)
    if not faster:
        return f"First to arrive on every link: {slow.codec}."
    turns = "; ".join(f"from {rate_text(at)}: {upload.codec}" for at, upload in faster)
    return f"First to arrive on the slowest links: {slow.codec}; {turns}."


def three_digits(seconds: float) -> str:
    """Seconds with three significant digits.

    >>> three_digits(0.01234), three_digits(4806.2)
    ('0.0123', '4,806')
    """
    return f"{seconds:.3g}" if seconds < 1000 else f"{seconds:,.0f}"
