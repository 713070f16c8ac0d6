"""Run the benchmarks and print their results."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from fedshift.bench import codecs, engines, large, rates, rivals
from fedshift.bench.codecs import Target
from fedshift.core.tables import Listing, titled
from fedshift.rounds.engine import one_thread
from fedshift.runs.about import machine
from fedshift.wire import measure as measuring
from fedshift.wire.measure import CodecRow, medians

# Table 3 of the paper, measured on an M1 Pro
PAPER_MS = {"Uniform(4)": 10.0, "Uniform(8)": 10.0, "KMeans(4)": 179.0, "KMeans(8)": 2172.0}
PAPER_KB = {
    "Identity": 8421.0,
    "Uniform(4)": 1052.25,
    "Uniform(8)": 2105.25,
    "KMeans(4)": 1058.19,
    "KMeans(8)": 2193.82,
}


class BenchResult(NamedTuple):
    machine: dict[str, str]
    rows: list[CodecRow]
    targets: list[Target]
    listings: tuple[Listing, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "codecs": [row._asdict() for row in self.rows],
            "bars": [target._asdict() for target in self.targets],
            **{listing.title: listing.as_dicts() for listing in self.listings},
        }


def measure(quick: bool, repeats: int, tick: Callable[[str], None]) -> BenchResult:
    """Measure the codecs; `quick` skips the targets."""
    params, about = measuring.weights(), machine()
    targets: list[Target] = []
    with one_thread():
        if not quick:
            took = medians(codecs.jobs(params), repeats, tick)
            about["copy of the model"] = f"{1e3 * took['np.copyto']:.2f} ms (np.copy: {1e3 * took['np.copy']:.2f} ms)"
            targets += codecs.targets(took, params)
        rows = list(measuring.rows(params, repeats, tick))
        if not quick:
            targets += codecs.memory(tick)
            targets += rivals.optimum(params, tick)
            targets += rivals.rivals(params, tick)
    return BenchResult(about, rows, targets)


def measure_rates(folder: Path | None, tick: Callable[[str], None]) -> BenchResult:
    """Measure the error of every codec at a few rates, on an update."""
    with one_thread():
        about, targets, listing = rates.measure(folder, tick)
    return BenchResult(machine() | about, [], targets, (listing,))


def measure_engines(quick: bool, repeats: int, tick: Callable[[str], None]) -> BenchResult:
    """Measure the engines; `quick` skips the paper's CNN, which takes minutes."""
    about = machine()
    with one_thread():
        targets, took = engines.overhead(15 * repeats, tick)
        about |= {f"round of digits, {name}": f"{1e3 * seconds:.2f} ms" for name, seconds in took.items()}
        targets += engines.population(20 * repeats, tick)
    listings: list[Listing] = []
    if not quick:
        targets += engines.cores(max(3, repeats // 3), tick)
        targets += engines.paper_round(tick)
    if torch.cuda.is_available():
        more, listings = measure_gpu(max(3, repeats // 3), tick)
        about = {"gpu": torch.cuda.get_device_name()} | about
        targets += more
    return BenchResult(about, [], targets, tuple(listings))


def measure_only_gpu(quick: bool, repeats: int, tick: Callable[[str], None]) -> BenchResult:
    """Measure only the GPU."""
    targets, listings = measure_gpu(3 if quick else max(3, repeats // 3), tick)
    return BenchResult(machine(), [], targets, tuple(listings))


def measure_gpu(rounds: int, tick: Callable[[str], None]) -> tuple[list[Target], list[Listing]]:
    from fedshift.bench import gpu

    result = gpu.measure(rounds, tick)
    columns = (
        "precision",
        "one model,\nbatch 5,000",
        "one client\nat a time",
        "10 runs x\n10 clients",
        "seconds\nper round",
        "seconds per\n800 rounds",
    )
    packs = "precision", *(f"{runs} run{'s' * (runs > 1)}" for runs in gpu.CURVE)
    mixed = "ten runs, bf16", "training,\nseconds", "round,\nseconds", "relative\nto FedAvg", "memory,\nGB"
    return result.targets, [
        Listing("Training time per sample of the paper's CNN, us", columns, result.precisions),
        Listing("Training time per sample by number of packed runs, us", packs, result.curve),
        Listing("Rounds of packs with different algorithms and uplinks", mixed, result.packs),
    ]


def measure_flower(quick: bool, repeats: int, tick: Callable[[str], None]) -> BenchResult:
    """Measure Flower; `quick` skips the deployment, which takes minutes."""
    from fedshift.bench import deployed, flower

    about = machine() | {"flwr": version("flwr")}
    with one_thread():
        targets, times = flower.overhead(repeats, tick)
    columns = "ms of CPU time, ten clients, 1.3 million weights", *(f"{bits} bit" for bits in flower.CODECS)
    listings = [Listing("A round in one process", columns, times)]
    if not quick:
        more, bytes_up = deployed.uplinks(tick)
        targets += more
        parts = "all", "arrays", "polling", "other", "bytes\ndown", "connec-\ntions", "seconds"
        columns = "bytes up per node and round", *parts
        listings.append(Listing("A deployment, 1.3 million weights, TCP with TLS", columns, bytes_up))
    return BenchResult(about, [], targets, tuple(listings))


def measure_peers(quick: bool, repeats: int, tick: Callable[[str], None]) -> BenchResult:
    """Measure other systems; `quick` trains few rounds and no large populations, which have no targets."""
    from fedshift.bench.peers import measure as peers

    size = peers.QUICK if quick else peers.FULL
    targets, rounds, notes = peers.compare(size, repeats, tick)
    more, populations, further = peers.sweep(size, repeats, tick)
    about = machine() | peers.versions() | notes | further
    targets += more
    return BenchResult(about, [], without_limits(targets) if quick else targets, (rounds, populations))


def measure_large(quick: bool, repeats: int, tick: Callable[[str], None], flower: bool = False) -> BenchResult:
    """Measure large models, with `flower` also through Flower; `quick` uses small ones, which have no targets."""
    size = large.QUICK if quick else large.FULL
    about = machine() | {"model": str(size)}
    with one_thread():
        targets = large.speed(size, repeats, tick) + large.many(size, repeats, tick)
    more, rows = large.memory(size, tick)
    traffic: list[tuple[str, ...]] = []
    targets += more
    if flower:
        through = size._replace(layers=size.flower_layers)
        about |= {"model through Flower": str(through), "flwr": version("flwr")}
        more, further, traffic = large.through_flower(size, tick)
        targets, rows = targets + more, rows + further
    if quick:
        targets = without_limits(targets)
    listings = []
    if rows:
        columns: tuple[str, ...] = "in sizes of the model", "peak", "frame", "kept", "beyond"
        listings.append(Listing("Memory of a client, from the end of training", columns, rows))
    if traffic:
        columns = "bytes per node and round", "up", "down"
        listings.append(Listing("Traffic through Flower, TCP with TLS", columns, traffic))
    return BenchResult(about, [], targets, tuple(listings))


def without_limits(targets: list[Target]) -> list[Target]:
    """The same measurements without targets, which are meant for the full size."""
    return [target._replace(asked="-", met=True) for target in targets]


def show(result: BenchResult, console: Console) -> None:
    """Print tables, targets and the machine."""
    table = titled("One upload of the paper's CNN, 2,155,872 weights", padding=(0, 0, 0, 1))
    for column in ("codec", "bits", "bytes", "encode\nms", "decode\nms", "SNR\ndB", "paper\nKB", "paper\nms"):
        table.add_column(column, justify="left" if column == "codec" else "right", no_wrap=True)
    for row in result.rows:
        table.add_row(
            row.codec,
            f"{row.bits:.2f}",
            f"{row.bytes:,}",
            f"{row.encode_ms:.1f}",
            f"{row.decode_ms:.1f}",
            "exact" if row.snr_db is None else f"{row.snr_db:.1f}",
            f"{PAPER_KB[row.codec]:,.0f}" if row.codec in PAPER_KB else "",
            f"{PAPER_MS[row.codec]:,.0f}" if row.codec in PAPER_MS else "",
        )
    if result.rows:
        console.print(table)
    for listing in result.listings:
        console.print(listing.drawn())
    if result.targets:
        last = "/ copyto" if any(target.steady for target in result.targets) else " "
        table = titled("Targets", padding=(0, 0, 0, 1))
        for column in ("measurement", "target", "measured", "met", last):
            table.add_column(column, justify="left" if column in ("measurement", "met") else "right")
        for target in result.targets:
            unit = "x" if target.asked.endswith("x") else ""
            figure = f"{target.measured:,.0f}" if target.measured > 1000 else f"{target.measured:.4g}{unit}"
            met = "" if target.asked == "-" else "yes" if target.met else "NO"
            table.add_row(target.what, target.asked, figure, met, f"{target.steady:.3g}x" if target.steady else "")
        console.print(table)
    console.print("\n".join(f"{name}: {value}" for name, value in result.machine.items()), highlight=False)
    if result.rows:
        console.print("bits: sent per weight; times: median CPU time, one thread")
