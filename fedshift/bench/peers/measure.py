"""Start every system in a separate process, in turn, and compare what they used."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import NamedTuple

from fedshift.bench.codecs import Target
from fedshift.bench.peers import task as tasks
from fedshift.bench.peers.runner import WARM, Measured, Request
from fedshift.bench.peers.systems import SYSTEMS
from fedshift.bench.peers.usage import kill, usage
from fedshift.core.extras import needs
from fedshift.core.files import RunError
from fedshift.core.tables import Listing
from fedshift.wire.measure import Tick

SAMPLE = 0.1  # seconds between samples of memory
FEDSHIFT = "sequential", "processes"  # without options: what is compared with the peers


class Size(NamedTuple):
    """Extent of the measurement."""

    rounds: int  # measured rounds of one process, at most
    clients: int
    populations: tuple[int, ...]
    swept: tuple[str, ...]  # systems of the sweep over populations
    sweep_rounds: int
    limit: float = 600.0  # seconds for one process
    sweep_limit: float = 120.0


FULL = Size(60, 100, (100, 1_000, 10_000, 100_000), ("sequential", "pfl", "flower"), 30)
QUICK = Size(2, 100, (100, 1_000), ("sequential", "pfl"), 2)


class FailedError(RuntimeError):
    """A system did not finish."""


def available(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Systems whose packages are installed, and for the others a sentence on how to install them."""
    missing = {name: [p for p in SYSTEMS[name].packages if find_spec(p) is None] for name in names}
    about = {
        SYSTEMS[name].label: f"not measured: it {needs('pfl' if name == 'pfl' else 'flwr', ' (extra peers)')}"
        for name, packages in missing.items()
        if packages
    }
    return [name for name in names if not missing[name]], about


def versions() -> dict[str, str]:
    packages = {package for system in SYSTEMS.values() for package in system.packages}
    return {package: version(package) for package in sorted(packages) if find_spec(package)}


def train(system: str, task: Path, rounds: int, limit: float, model: Path | None = None) -> Measured:
    """Train with one system in a separate process; raise FailedError if it fails or takes longer than `limit`."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as output:
        begin = time.monotonic()
        request = Request(system, str(task.absolute()), rounds, begin, str(model.absolute()) if model else "")
        # -P: modules in the current folder must not replace those of a peer
        command = [sys.executable, "-P", "-m", "fedshift.bench.peers.runner", json.dumps(request._asdict())]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C must reach only this process
        )
        peak = 0
        try:
            while process.poll() is None:
                peak = max(peak, usage(process.pid).resident)
                if time.monotonic() - begin > limit:
                    raise FailedError(f"stopped after {limit:g} s")
                time.sleep(SAMPLE)
        finally:
            if process.poll() is None:
                kill(process.pid)
                process.wait()
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    if process.returncode:
        last = lines[-1] if lines else f"exit code {process.returncode}"
        raise FailedError(f"failed: {last}")
    measured = Measured(**json.loads(lines[-1]))
    return measured._replace(peak=max(peak, measured.peak))


def attempt(system: str, task: Path, rounds: int, limit: float, notes: dict[str, str], what: str) -> Measured | None:
    """Train with one system; add a note and return None if a peer fails, raise RunError if fedshift does."""
    try:
        return train(system, task, rounds, limit)
    except FailedError as problem:
        if not SYSTEMS[system].packages:
            raise RunError(f"{what}: {problem}") from problem
        notes[what] = str(problem)
        return None


def compare(size: Size, repeats: int, tick: Tick) -> tuple[list[Target], Listing, dict[str, str]]:
    """Train the same task with all systems, interleaved; return targets, a table, and notes."""
    names, about = available(list(SYSTEMS))
    found: dict[str, list[Measured]] = {name: [] for name in names}
    rounds = {name: min(size.rounds, SYSTEMS[name].rounds) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "task.pt"
        tasks.write(tasks.make(size.clients, WARM + max(rounds.values())), path)
        for i in range(repeats):
            for name in list(found):
                tick(f"{SYSTEMS[name].label}, {i + 1} of {repeats}")
                measured = attempt(name, path, rounds[name], size.limit, about, SYSTEMS[name].label)
                if measured:
                    found[name].append(measured)
                else:
                    del found[name]
    return targets(found), listing(found, size.clients), about


def ratio(
    found: Mapping[str, Sequence[Measured]], figure: Callable[[Measured], float], above: Sequence[str], below: str
) -> float:
    """Median over repeats of the smallest figure of `above`, divided by that of `below` in the same repeat."""
    pairs = zip(zip(*(found[name] for name in above), strict=True), found[below], strict=True)
    return median(min(map(figure, each)) / figure(other) for each, other in pairs)


def wall(measured: Measured) -> float:
    return measured.wall


def cpu(measured: Measured) -> float:
    return measured.cpu


def targets(found: Mapping[str, Sequence[Measured]]) -> list[Target]:
    """Targets of the systems that were measured."""
    wanted = []
    if "flower" in found:
        faster = 1 / ratio(found, wall, FEDSHIFT, "flower")
        what = "wall time, Flower's simulation / faster engine of fedshift"
        wanted.append(Target(what, ">= 5x", faster, faster >= 5))
    if "pfl" in found:
        share = ratio(found, wall, FEDSHIFT, "pfl")
        wanted.append(Target("wall time, faster engine of fedshift / pfl-research", "<= 1x", share, share <= 1))
        share = ratio(found, cpu, ["sequential"], "pfl")
        wanted.append(Target("CPU time, fedshift, sequential / pfl-research", "<= 1x", share, share <= 1))
    share = ratio(found, wall, ["processes"], "loop")
    wanted.append(Target("wall time, fedshift, processes / hand-written loop", "<= 0.7x", share, share <= 0.7))
    share = ratio(found, cpu, ["sequential"], "loop")
    wanted.append(Target("CPU time, fedshift, sequential / hand-written loop", "-", share, True))
    return wanted


def listing(found: Mapping[str, Sequence[Measured]], clients: int) -> Listing:
    """Table of medians; accuracies are those after the last round that all systems trained."""
    last = min(len(each.accuracy) for several in found.values() for each in several)
    rows = []
    for name, several in found.items():
        middle = {
            field: median(getattr(each, field) for each in several)
            for field in ("wall", "cpu", "startup", "peak", "bytes_up")
        }
        rows.append(
            (
                SYSTEMS[name].label,
                f"{1e3 * middle['wall']:.1f}",
                f"{1e3 * middle['cpu']:.1f}",
                f"{ratio(found, wall, [name], 'loop'):.2f}",
                f"{ratio(found, cpu, [name], 'loop'):.2f}",
                f"{middle['startup']:.1f}",
                f"{middle['peak'] / 1e6:,.0f}",
                f"{middle['bytes_up']:,.0f}",
                f"{100 * median(each.accuracy[last - 1] for each in several):.1f}",
            )
        )
    columns = (
        f"{tasks.COHORT} of {clients} clients per round",
        "wall\nms",
        "CPU\nms",
        "wall\n/ loop",
        "CPU\n/ loop",
        "start-\nup s",
        "peak\nMB",
        "bytes up\nper round",
        f"accuracy,\nround {last}",
    )
    return Listing("One round of digits", columns, rows)


def sweep(size: Size, repeats: int, tick: Tick) -> tuple[list[Target], Listing, dict[str, str]]:
    """Train with growing populations and the same cohort; a peer that fails is not tried with more clients."""
    names, about = available(size.swept)
    found: dict[tuple[str, int], list[Measured]] = {}
    with tempfile.TemporaryDirectory() as folder:
        paths = {clients: Path(folder) / f"{clients}.pt" for clients in size.populations}
        for clients, path in paths.items():
            tasks.write(tasks.make(clients, WARM + size.sweep_rounds), path)
        for i in range(repeats):
            for clients, path in paths.items():
                for name in list(names):
                    if SYSTEMS[name].rounds < size.sweep_rounds and i:  # a slow peer runs once
                        continue
                    tick(f"{SYSTEMS[name].label}, {clients:,} clients, {i + 1} of {repeats}")
                    rounds = min(size.sweep_rounds, SYSTEMS[name].rounds)
                    what = f"{SYSTEMS[name].label}, {clients:,} clients"
                    measured = attempt(name, path, rounds, size.sweep_limit, about, what)
                    if measured:
                        found.setdefault((name, clients), []).append(measured)
                    else:
                        names.remove(name)
    return population_targets(found, size.populations), population_listing(found), about


def population_targets(found: Mapping[tuple[str, int], Sequence[Measured]], populations: Sequence[int]) -> list[Target]:
    """Time and memory of fedshift must not depend on the number of clients."""
    few, many = populations[0], populations[-1]
    wanted = []
    for what, field in ("CPU time per round", "cpu"), ("peak memory", "peak"):
        pairs = zip(found["sequential", many], found["sequential", few], strict=True)
        growth = median(getattr(more, field) / getattr(less, field) for more, less in pairs)
        wanted.append(Target(f"{what}, fedshift, {many:,} / {few:,} clients", "<= 1.1x", growth, growth <= 1.1))
    return wanted


def population_listing(found: Mapping[tuple[str, int], Sequence[Measured]]) -> Listing:
    rows = []
    for (name, clients), several in sorted(found.items(), key=lambda item: (list(SYSTEMS).index(item[0][0]), item[0])):
        wall_ms, cpu_ms = (1e3 * median(map(figure, several)) for figure in (wall, cpu))
        peak, startup = median(each.peak for each in several), median(each.startup for each in several)
        figures = f"{clients:,}", f"{wall_ms:.1f}", f"{cpu_ms:.1f}", f"{startup:.1f}", f"{peak / 1e6:,.0f}"
        rows.append((SYSTEMS[name].label, *figures))
    columns = f"{tasks.COHORT} clients per round", "clients", "wall\nms", "CPU\nms", "start-\nup s", "peak\nMB"
    return Listing("Populations", columns, rows)
