"""Records with given figures, in folders like those of runs."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedshift.core.files import seal
from fedshift.experiment.settings import Experiment
from fedshift.runs.columns import LAYER, PHASES, column
from fedshift.runs.sheet import csv_lines

Figure = float | Sequence[float | None]  # the same in every round, or one for each
CLASSES = 4
BYTES = {"codes": 900, "side": 60, "header": 40, "down": 2000}
# three rounds of 1000 bytes, the last two estimated: the ratio measured in the first makes them 1250
GUESSED: dict[str, Figure] = {"bytes.estimated": [800.0, 1000.0, 1000.0], "bytes.framed": [1000.0, None, None]}
SECONDS = {"train": 0.4, "encode": 0.1, "aggregate": 0.05, "evaluate": 0.05, "round": 0.7, "save": 0.02}


def settings(rounds: int = 20, bits: str = "32+4", shift: bool = True, **more: Any) -> dict[str, Any]:
    """Settings of a small run; `more` by table."""
    basic: dict[str, dict[str, Any]] = {
        "data": {"clients": 4},
        "train": {"rounds": rounds, "cohort": 2},
        "uplink": {"bits": bits},
        "shift": {"on": shift, "per": "layer"},
    }
    tables = {name: {**basic.get(name, {}), **table} for name, table in more.items() if isinstance(table, dict)}
    return {**basic, **more, **tables}


def write(
    folder: Path,
    raw: Mapping[str, Any] | None = None,
    score: Figure = 0.5,
    *,
    layers: Sequence[str] = ("fc.weight",),
    classes: int = CLASSES,
    figures: Mapping[str, Figure] | None = None,
    reached: int | None = None,
) -> Path:
    """Write the record of a finished run, or of one stopped after `reached` rounds."""
    experiment = Experiment(**(raw if raw is not None else settings()))
    folder.mkdir(parents=True)
    (folder / "settings.toml").write_text(experiment.toml())
    (folder / "about.json").write_text(json.dumps({"cpu": "a Xeon", "commit": "abc", "torch": "2.13"}))
    columns = _columns(experiment, layers, classes, score) | dict(figures or {})
    _lines(folder / "rounds.csv", ["round", *columns], experiment.train.rounds if reached is None else reached, columns)
    write_clients(folder, classes)
    if reached is None:
        (folder / "model.safetensors").write_bytes(b"".join(seal({}, {})[0]))
    return folder


def _columns(experiment: Experiment, layers: Sequence[str], classes: int, score: Figure) -> dict[str, Figure]:
    before = {"mean_before": 0.2, "mean_after": 0.1, "shorter": 1.0, "step": 0.3, "drift": 0.4, "drift_coded": 0.5}
    before |= {"filters_before": 0.3, "filters_after": 0.2}
    return {
        column(experiment): score,
        "loss": 1.0,
        **{f"predicted.{label}": 1 / classes for label in range(classes)},
        **{f"{figure}.{layer}": before[figure] for figure in LAYER for layer in layers},
        "error": 0.05,
        **{f"bytes.{part}": size for part, size in BYTES.items()},
        "share": 0.5,
        "arrived": 2.0,
        "dropped": 0.0,
        **{f"seconds.{phase}": SECONDS[phase] for phase in PHASES},
    }


def _lines(path: Path, header: Sequence[str], rounds: int, columns: Mapping[str, Figure]) -> None:
    def cell(figure: Figure, t: int) -> str:
        value = figure if isinstance(figure, int | float) else figure[t]
        return "" if value is None else f"{value:g}"

    lines = [",".join([str(t + 1), *(cell(figure, t) for figure in columns.values())]) for t in range(rounds)]
    path.write_text("\n".join([",".join(header), *lines, ""]))


def write_clients(folder: Path, classes: int = CLASSES, group: Callable[[int], str] | None = None) -> None:
    """Give even labels to even clients, of 32 bits, and odd labels to the others, of 4 bits."""
    rows = [["client", "group", "examples", *(f"label.{label}" for label in range(classes))]]
    for client in range(4):
        labels = [10 if label % 2 == client % 2 else 0 for label in range(classes)]
        named = group(client) if group else ("4 bit" if client % 2 else "32 bit")
        rows.append([str(client), named, str(sum(labels)), *map(str, labels)])
    (folder / "clients.csv").write_bytes(csv_lines(rows))


def write_histograms(folder: Path, rounds: Sequence[int], layers: Sequence[str] = ("fc.weight",)) -> None:
    histograms = [
        {"round": number, "layer": layer, "low": -1.0, "high": 1.0, "before": [1, 2, 3, 4], "after": [0, 5, 0, 5]}
        for number in rounds
        for layer in layers
    ]
    (folder / "histograms.jsonl").write_text("".join(json.dumps(one) + "\n" for one in histograms))


def published(folder: Path, raw: Mapping[str, Any], score: Figure = 0.5) -> Path:
    """Write the published record of a run: no clients, no model, bytes as one sum."""
    write(folder, raw, score)
    experiment = Experiment(**raw)
    kept = {name: x for name, x in _columns(experiment, ["fc.weight"], CLASSES, score).items() if _slim(name)}
    columns = {**kept, "bytes.up": 1000, "bytes.down": 2000}
    _lines(folder / "rounds.csv", ["round", *columns], experiment.train.rounds, columns)
    for name in ("clients.csv", "model.safetensors"):
        (folder / name).unlink()
    return folder


def _slim(name: str) -> bool:
    dropped = ("bytes.", "mean_before.", "shorter.", "arrived", "dropped", "seconds.")
    return not name.startswith(dropped) or name == "seconds.round"


def damage(path: Path, line: int, change: Callable[[bytes], bytes]) -> None:
    """Change one line of a file; the first is 0."""
    lines = path.read_bytes().split(b"\n")
    lines[line] = change(lines[line])
    path.write_bytes(b"\n".join(lines))
