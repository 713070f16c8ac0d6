"""Measurements of `fedshift bench large`: speed and memory on a transformer, on many tensors, and through Flower."""

import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fedshift.bench.codecs import Target
from fedshift.bench.timing import in_process, installed
from fedshift.codecs import Codec, KMeans, PerChannel
from fedshift.core.rng import key
from fedshift.core.types import Params
from fedshift.rounds.uplink import named
from fedshift.runs.run import cores_here
from fedshift.wire.measure import Job, Tick, medians, transformer, updates, weights
from fedshift.wire.writer import pack, unpack

NODES = 2  # of Flower
WEIGHTS_LIMIT, FEEDBACK_LIMIT = 1.5, 2.5  # models of memory beyond input and output


class Size(NamedTuple):
    """Sizes of the models."""

    layers: int
    width: int
    tensors: int
    flower_layers: int

    def __str__(self) -> str:
        count = sum(w.numel() for w in transformer(self.layers, self.width).values())
        return f"{self.layers} layers, {self.width} wide, {count:,} weights"


FULL = Size(12, 768, 10_000, 14)
QUICK = Size(2, 256, 200, 2)


class PeakMemory(NamedTuple):
    """Memory of a client from the end of its training to the end of the mod, in sizes of the model."""

    peak: float  # increase of resident memory
    frame: float
    kept: float  # memory for the next round

    @property
    def beyond(self) -> float:
        """Without the mod's output."""
        return self.peak - self.frame - self.kept


def speed(size: Size, repeats: int, tick: Tick) -> list[Target]:
    """CPU time of pack and unpack on a transformer."""
    params = weights(of=transformer(size.layers, size.width))
    count = sum(w.numel() for w in params.values())
    kmeans, lean = Codec(KMeans(4)), named("lean").codec
    sent = {"K-means, 4 bit": (kmeans, params), "lean": (lean, updates(params))}
    jobs: dict[str, Job] = {}
    for name, (codec, tensors) in sent.items():
        frame = pack(codec, tensors, key=key(0, "bench"))
        jobs[f"pack, {name}"] = partial(pack, codec, tensors, key=key(0, "bench"))
        jobs[f"unpack, {name}"] = partial(unpack, frame, tensors)
    jobs["per channel"] = partial(pack, Codec(KMeans(4), groups=PerChannel()), params)
    took = medians(jobs, repeats, tick)
    return list(speed_targets(took, count))


def speed_targets(took: dict[str, float], count: int) -> Iterator[Target]:
    limits = {"pack, K-means, 4 bit": 8, "unpack, K-means, 4 bit": 3, "pack, lean": 25, "unpack, lean": 25}
    for name, limit in limits.items():
        ns = 1e9 * took[name] / count
        yield Target(f"{name}, ns of CPU time per weight", f"<= {limit}", ns, ns <= limit)
    ratio = took["per channel"] / took["pack, K-means, 4 bit"]
    yield Target("pack, K-means, 4 bit, per channel / per tensor", "<= 4x", ratio, ratio <= 4)


def many(size: Size, repeats: int, tick: Tick) -> list[Target]:
    """CPU time of pack and unpack of many small tensors: half of them 32 x 32, half of them biases of 32."""
    few = size.tensors // 4
    jobs: dict[str, Job] = {f"{n:,} tensors": partial(there_and_back, small_tensors(n)) for n in (few, size.tensors)}
    took = medians(jobs, repeats, tick)
    seconds = took[f"{size.tensors:,} tensors"]
    ratio = seconds / took[f"{few:,} tensors"]
    return [
        Target(f"pack and unpack, {size.tensors:,} tensors, seconds of CPU time", "< 2", seconds, seconds < 2),
        Target(f"pack and unpack, {size.tensors:,} tensors / {few:,}", "<= 6x", ratio, ratio <= 6),
    ]


def small_tensors(n: int) -> Params:
    shapes = transformer(1, 32)
    weight, bias = shapes["0.proj.weight"], shapes["0.proj.bias"]
    return weights(of={f"{i}.{name}": x for i in range(n // 2) for name, x in (("weight", weight), ("bias", bias))})


def there_and_back(params: Params) -> Params:
    return unpack(pack(Codec(KMeans(4)), params), params)


def memory(size: Size, tick: Tick) -> tuple[list[Target], list[tuple[str, ...]]]:
    """Memory of QuantizeMod in separate processes; nothing without Flower."""
    targets, rows = [], []
    for feedback, name, limit in (0, "weights", WEIGHTS_LIMIT), (1, "updates with feedback", FEEDBACK_LIMIT):
        if not installed("flwr"):
            break
        tick(f"memory of QuantizeMod, {name}")
        found = in_process("fedshift.flower.testing.large", "memory", feedback, size.layers, size.width)
        measured = [PeakMemory(*found[i : i + 3]) for i in range(0, len(found), 3)]
        targets.append(memory_target(f"QuantizeMod, {name}", measured, limit))
        rows += memory_rows(f"QuantizeMod, {name}", measured)
    return targets, rows


def memory_target(name: str, rounds: Sequence[PeakMemory], limit: float) -> Target:
    worst = max(found.beyond for found in rounds)
    return Target(f"{name}: memory beyond its output / model", f"<= {limit:g}x", worst, worst <= limit)


def memory_rows(name: str, rounds: Sequence[PeakMemory]) -> list[tuple[str, ...]]:
    """Rows of the table of memory, one per round."""
    return [
        (f"{name}, round {i}", *(f"{value:.3f}" for value in (*found, found.beyond)))
        for i, found in enumerate(rounds, 1)
    ]


def through_flower(size: Size, tick: Tick) -> tuple[list[Target], list[tuple[str, ...]], list[tuple[str, ...]]]:
    """Memory of the clients of a simulation and of a deployment with TLS, and traffic: steps, downlink=8, two rounds.

    The steps have the rate of lean and error feedback, whose memory is the size of the model.

    A run that does not complete counts as a missed target.
    """
    from fedshift.bench.deployed import Relay, relayed, write_app
    from fedshift.flower.app.superlink import SuperLink
    from fedshift.flower.testing.large import FOUND, ROUNDS, TIMEOUT

    targets, rows, traffic = [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_app(folder / "app", "large", {"layers": size.flower_layers, "width": size.width, "nodes": NODES})
        for kind in ("simulation", "deployment"):
            tick(f"a {kind}, which takes minutes")
            with ExitStack() as stack:
                relays = list[Relay]()
                if kind == "simulation":  # one client at a time
                    link = stack.enter_context(SuperLink(folder / kind, supernodes=NODES, cpus=cores_here()))
                else:
                    link, relays = stack.enter_context(relayed(folder / kind, NODES))
                status, log = link.wait(link.run(folder / "app"), TIMEOUT)
            metrics = re.search(rf"{FOUND} (\[.*\])", log)
            if status != "finished:completed" or metrics is None:
                tick(f"the {kind} ended with status {status}: {' '.join(log.split())[-300:]}")
                targets.append(Target(f"{kind}, steps with feedback: rounds completed", ">= 2", 0.0, False))
                continue
            measured = [PeakMemory(**found) for found in json.loads(metrics[1])]
            targets.append(memory_target(f"{kind}, steps with feedback", measured, FEEDBACK_LIMIT))
            rows += memory_rows(f"{kind}, steps with feedback", measured)
            if relays:
                ways = sum(relay.up for relay in relays), sum(relay.down for relay in relays)
                figures = [f"{total / ROUNDS / NODES:,.0f}" for total in ways]
                traffic.append((f"{kind}, steps with feedback, downlink=8", *figures))
    return targets, rows, traffic
