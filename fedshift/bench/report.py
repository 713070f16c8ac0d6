"""The figures of `fedshift bench codecs`, measured and shown."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from rich.console import Console

from fedshift.bench import codecs, engines, rivals
from fedshift.bench.codecs import Bar
from fedshift.core.tables import Listing, titled
from fedshift.rounds.engine import one_thread
from fedshift.runs.about import machine
from fedshift.wire import measure as measuring
from fedshift.wire.measure import CodecRow, medians

PAPER_MS = {"Uniform(4)": 10.0, "Uniform(8)": 10.0, "KMeans(4)": 179.0, "KMeans(8)": 2172.0}  # its Table 3, M1 Pro
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
    bars: list[Bar]
    listings: tuple[Listing, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "codecs": [row._asdict() for row in self.rows],
            "bars": [bar._asdict() for bar in self.bars],
            **{listing.title: listing.as_dicts() for listing in self.listings},
        }


def measure(quick: bool, repeats: int, tick: Callable[[str], None]) -> BenchResult:
    params, about = measuring.weights(), machine()
    bars: list[Bar] = []
    with one_thread():
        if not quick:
            took = medians(codecs.jobs(params), repeats, tick)
            about["copy of the model"] = f"{1e3 * took['np.copyto']:.2f} ms (np.copy: {1e3 * took['np.copy']:.2f} ms)"
            bars += codecs.bars(took, params)
        rows = list(measuring.rows(params, repeats, tick))
        if not quick:
            bars += codecs.memory(tick)
            bars += rivals.optimum(params, tick)
            bars += rivals.rivals(params, tick)
    return BenchResult(about, rows, bars)


def measure_engines(quick: bool, repeats: int, tick: Callable[[str], None]) -> BenchResult:
    """Quick: without the parts that train the paper's CNN, which take minutes."""
    about = machine()
    with one_thread():
        bars, took = engines.overhead(15 * repeats, tick)
        about |= {f"round of digits, {name}": f"{1e3 * seconds:.2f} ms" for name, seconds in took.items()}
        bars += engines.population(20 * repeats, tick)
    listings: list[Listing] = []
    if not quick:
        bars += engines.cores(max(3, repeats // 3), tick)
        bars += engines.paper_round(tick)
    if torch.cuda.is_available():
        more, listings = measure_gpu(max(3, repeats // 3), tick)
        about = {"gpu": torch.cuda.get_device_name()} | about
        bars += more
    return BenchResult(about, [], bars, tuple(listings))


def measure_only_gpu(quick: bool, repeats: int, tick: Callable[[str], None]) -> BenchResult:
    """Measure the GPU only."""
    bars, listings = measure_gpu(3 if quick else max(3, repeats // 3), tick)
    return BenchResult(machine(), [], bars, tuple(listings))


def measure_gpu(rounds: int, tick: Callable[[str], None]) -> tuple[list[Bar], list[Listing]]:
    from fedshift.bench import gpu

    bars, table, curve = gpu.measure(rounds, tick)
    columns = (
        "precision",
        "one model,\nbatch 5,000",
        "one client\nat a time",
        "10 runs x\n10 clients",
        "seconds of\na round",
        "seconds of a\nrun of 800",
    )
    at_once = "precision", *(f"{runs} run{'s' * (runs > 1)}" for runs in gpu.CURVE)
    return bars, [
        Listing("us of training a sample of the paper's CNN", columns, table),
        Listing("us a sample, so many runs at once", at_once, curve),
    ]


def measure_flower(quick: bool, repeats: int, tick: Callable[[str], None]) -> BenchResult:
    """Quick: without the deployment; its processes alone take a minute or two."""
    from fedshift.bench import deployed, flower

    about = machine() | {"flwr": version("flwr")}
    with one_thread():
        bars, times = flower.overhead(repeats, tick)
    columns = "ms of CPU time, ten clients, 1.3 million weights", *(f"{bits} bit" for bits in flower.CODECS)
    listings = [Listing("A round in one process", columns, times)]
    if not quick:
        more, bytes_up = deployed.uplinks(tick)
        bars += more
        columns = "bytes up, a node and round", "all", "arrays", "polling", "other", "connec-\ntions", "seconds"
        listings.append(Listing("A deployment, 1.3 million weights, TCP with TLS", columns, bytes_up))
    return BenchResult(about, [], bars, tuple(listings))


def show(result: BenchResult, console: Console) -> None:
    table = titled("The paper's CNN, 2,155,872 weights, as one upload", padding=(0, 0, 0, 1))
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
    if result.bars:
        bars = titled("What is promised", padding=(0, 0, 0, 1))
        for column in ("what", "asked", "measured", "", "/ copyto" if any(bar.steady for bar in result.bars) else " "):
            bars.add_column(column, justify="left" if column in ("what", "") else "right")
        for bar in result.bars:
            steady = f"{bar.steady:.3g}x" if bar.steady else ""
            figure = (
                f"{bar.measured:,.0f}" if bar.measured > 1000 else f"{bar.measured:.4g}{'x' * bar.asked.endswith('x')}"
            )
            bars.add_row(bar.what, bar.asked, figure, "" if bar.asked == "-" else "yes" if bar.met else "NO", steady)
        console.print(bars)
    console.print("\n".join(f"{name}: {value}" for name, value in result.machine.items()), highlight=False)
    if result.rows:
        console.print("bits: sent for each weight; times: median CPU time, one thread")
