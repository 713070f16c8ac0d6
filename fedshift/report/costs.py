"""Section "What did it cost?": bytes, seconds on a link, and time per phase of a round."""

from collections.abc import Callable, Sequence

import numpy as np

from fedshift.core.units import bytes_text, rate_text, seconds_text
from fedshift.report.charts import Axis, Curve, Curves, Panel, Section, Stack, Stacks
from fedshift.report.curves import (
    AVERAGE,
    BAND,
    Measure,
    MeasuredRounds,
    averaged,
    by_metric,
    curve,
    cut,
    points_per_curve,
    score,
    score_axis,
    sent,
    titled,
)
from fedshift.report.curves import ROUND as ROUNDS
from fedshift.report.lines import Strand, panels
from fedshift.runs.recorded import Recorded
from fedshift.runs.sheet import Figures, estimates

UPLINK = "seconds.uplink"
PARTS = {"codes": "bytes.codes", "side data": "bytes.side", "header": "bytes.header"}
SHIFTS = ("no shift", "shift per layer", "shift per filter")  # at the end of a label
WHOLE, ROUND = "upload, not split", "round, not split"
PHASES = ("train", "encode", "aggregate", "evaluate", "save", "other")


def section(strands: Sequence[Strand], rate: float) -> Section:
    """Section on cost; `rate` is the bandwidth in bytes per second of the link that all uploads of a round share."""
    parts: list[Curves | Stacks] = []
    for end, some in by_metric(strands):
        parts += against_cost(some, rate, end)
    parts += [chart for chart in (upload(strands), bits(strands), phases(strands)) if chart]
    return Section("cost", "What did it cost?", sentences(strands, rate), [*parts])


def sentences(strands: Sequence[Strand], rate: float) -> list[str]:
    """Sentences on the total bytes that runs send, the fewest and the most, and their time on the link."""
    sizes = {
        strand.line.label: float(np.mean([run.up.sum() for run in strand.runs])) for strand in strands if strand.row
    }
    if not any(sizes.values()):
        return []
    least, most = min(sizes.values()), max(sizes.values())

    def sent_in(count: float) -> str:
        return f"{bytes_text(count)}, {seconds_text(count / rate)} on one shared link of {rate_text(rate)}"

    def which(count: float) -> str:
        alike = [label for label, other in sizes.items() if bytes_text(other) == bytes_text(count)]
        return common(alike, [label for label in sizes if label not in alike])

    estimated = estimates(run.uploaded.estimate for strand in strands if strand.row for run in strand.runs)
    further = [estimated] if estimated else []
    if bytes_text(least) == bytes_text(most):
        return [f"A run sends {sent_in(least)}.", *further]
    factor = f"{most / least:.3g} times as much" if least else "most"
    return [
        f"Runs with {which(least)} send the least: {sent_in(least)}.",
        f"Those with {which(most)} send {factor}: {sent_in(most)}.",
        *further,
    ]


def common(labels: Sequence[str], others: Sequence[str]) -> str:
    """Name for these lines: the settings that they alone have in common, without the shift if it is not needed.

    >>> common(["fedavg, 32+4 bits, no shift", "fedprox, 32+4 bits, no shift"], ["fedavg, 32+8 bits, no shift"])
    '32+4 bits'
    >>> common(["fedavg, 32+4 bits", "fedprox, 32+4 bits"], ["scaffold, 32+4 bits"])
    'fedavg, 32+4 bits (and 1 more line)'
    """
    split = [label.split(", ") for label in labels]
    shared = [part for part in split[0] if all(part in parts for parts in split)]
    for kept in ([part for part in shared if part not in SHIFTS], shared):
        if kept and not any(set(kept) <= set(other.split(", ")) for other in others):
            return ", ".join(kept)
    more = len(labels) - 1
    return labels[0] + (f" (and {more} more line{'s' * (more > 1)})" if more else "")


def against_cost(strands: Sequence[Strand], rate: float, end: str) -> list[Curves]:
    """Score against bytes, against seconds on one link, and against seconds on the links in the settings, if any."""
    axis, points = score_axis(strands[0].experiment), points_per_curve(len(strands))
    title, caption = titled(strands[0].experiment), f"{AVERAGE} {BAND}"

    def drawn(some: Sequence[Strand], across: Callable[[Recorded], Figures]) -> list[Panel]:
        return panels(some, lambda strand: curve(strand, averaged(score), points, across, banded=True))

    sending = [strand for strand in strands if any(run.up.any() for run in strand.runs)]
    linked = [strand for strand in strands if all(UPLINK in run.figures for run in strand.runs)]
    shared = f"All uploads of a round share one link. {caption}"
    links = f"Bandwidths are those in the settings; a round takes as long as its slowest upload. {caption}"
    in_bytes, in_seconds = Axis("uploaded by all clients", "B"), Axis("time on the uplink", "s")
    made = [
        Curves(f"score-bytes{end}", f"{title} against uploaded bytes", caption, in_bytes, axis, drawn(sending, sent)),
        Curves(
            f"score-seconds{end}",
            f"{title} against time on the uplink",
            shared,
            in_seconds,
            axis,
            drawn(sending, lambda run: sent(run) / rate),
            rate=rate,
        ),
        Curves(
            f"score-links{end}",
            f"{title} against time on the clients' links",
            links,
            in_seconds,
            axis,
            drawn(linked, lambda run: np.cumsum(np.nan_to_num(run.figure(UPLINK)))),
        ),
    ]
    return [chart for chart in made if chart.panels]


def upload(strands: Sequence[Strand]) -> Stacks | None:
    """Bytes that one client sends in one round, by part."""
    found: list[tuple[Strand, dict[str, float]]] = []
    for strand in strands:
        uploads = sum(float(np.nansum(_uploads(run))) for run in strand.runs)
        split = all("bytes.codes" in run.figures for run in strand.runs)
        sums = {
            part: sum(float(np.nansum(run.figure(name) + corrected(run, name))) for run in strand.runs)
            for part, name in (PARTS.items() if split else ())
        } or {WHOLE: sum(float(np.nansum(run.up)) for run in strand.runs)}
        if uploads and sum(sums.values()):
            found.append((strand, {part: size / uploads for part, size in sums.items()}))
    caption = "Bytes of one upload, mean over clients and rounds; exact and quantized uploads together."
    return _stacks("upload", "Bytes per round and client", caption, Axis("one upload", "B"), [*PARTS, WHOLE], found)


def bits(strands: Sequence[Strand]) -> Curves | None:
    """Bits per value of the uploads of each round, for all clients and for each group; None without a policy."""
    adaptive = [strand for strand in strands if any(run.uplinks for run in strand.runs)]
    groups = dict.fromkeys(
        group for strand in adaptive for run in strand.runs for group in map(_groups(run).get, _clients(run)) if group
    )
    chosen: list[str] = ["", *(groups if len(groups) > 1 else ())]
    points = points_per_curve(len(adaptive) * len(chosen))
    drawn = [
        Panel(group or "all clients", [made for strand in adaptive for made in _bits(strand, group, points)])
        for group in chosen
    ]
    caption = "Bits of an upload per value of the model, mean over clients and seeds. Band: fewest to most bits."
    axis, title = Axis("bits per value"), "Bits per client over time"
    return Curves("bits", title, caption, ROUNDS, axis, drawn, apart=True) if adaptive else None


def _bits(strand: Strand, group: str, points: int) -> list[Curve]:
    """Mean over the clients of a group ('' for all) in each round, within a band from the fewest to the most bits."""

    def measured(of: Callable[[Sequence[float]], float]) -> Measure:
        def measure(run: Recorded) -> MeasuredRounds:
            found, groups = dict[int, list[float]](), _groups(run)
            for used in run.uplinks:
                if not group or groups.get(used.client) == group:
                    found.setdefault(used.round, []).append(used.bits)
            rounds = sorted(found)
            return MeasuredRounds(np.array(rounds, dtype=float), np.array([of(found[n]) for n in rounds]))

        return measure

    mean, low, high = (curve(strand, measured(of), points) for of in (lambda x: sum(x) / len(x), min, max))
    return [made._replace(low=low[0].y, high=high[0].y) for made in mean]


def _groups(run: Recorded) -> dict[int, str]:
    return {client.number: client.group for client in run.clients}


def _clients(run: Recorded) -> list[int]:
    """Clients whose uplinks are recorded."""
    return sorted({used.client for used in run.uplinks})


def corrected(run: Recorded, name: str) -> Figures:
    """Correction of estimated bytes, which concerns codes only: header and side data are exact."""
    return run.uploaded.correction if name == PARTS["codes"] else np.zeros(len(run.rounds))


def _uploads(run: Recorded) -> Figures:
    """Number of uploads that arrived in each round; from the settings if the record is a published one without it."""
    if "arrived" in run.figures:
        return run.figures["arrived"]
    return np.full(len(run.rounds), float(run.experiment.train.cohort))


def phases(strands: Sequence[Strand]) -> Stacks | None:
    """Seconds per round by phase; `seconds.round` does not include saving."""
    found = []
    for strand in strands:
        times = [_phases(run) for run in strand.runs if np.nansum(run.figure("seconds.round"))]
        if times:
            keys = dict.fromkeys(key for time in times for key in time)
            found.append((strand, {key: float(np.mean([time.get(key, 0.0) for time in times])) for key in keys}))
    caption = "Mean over rounds. If clients train in parallel, wall-clock time is divided in proportion to their times."
    return _stacks("phases", "Seconds per round", caption, Axis("one round", "s"), [*PHASES, ROUND], found)


def _phases(run: Recorded) -> dict[str, float]:
    """Seconds by phase; training and encoding, sums over clients, are scaled to the wall-clock time of the round."""
    known = {phase: float(np.nanmean(run.figure(f"seconds.{phase}"))) for phase in PHASES[:-1] if _timed(run, phase)}
    whole = float(np.nanmean(run.figure("seconds.round")))
    if "train" not in known:
        return {ROUND: whole}
    left = max(0.0, whole - known.get("aggregate", 0.0) - known.get("evaluate", 0.0))
    worked = known["train"] + known.get("encode", 0.0)
    if worked > left:
        known |= {phase: known[phase] * left / worked for phase in ("train", "encode") if phase in known}
    return known | {"other": max(0.0, left - worked)}


def _timed(run: Recorded, phase: str) -> bool:
    return not bool(np.isnan(run.figure(f"seconds.{phase}")).all())


def _stacks(
    name: str, title: str, caption: str, x: Axis, parts: Sequence[str], found: Sequence[tuple[Strand, dict[str, float]]]
) -> Stacks | None:
    """Chart of the parts that at least one line has; None without lines."""
    used = [part for part in parts if any(part in sizes for _, sizes in found)]
    stacks = [Stack(strand.line.key, [cut(sizes.get(part, 0.0)) or 0.0 for part in used]) for strand, sizes in found]
    return Stacks(name, title, caption, x, used, stacks) if stacks else None
