"""The run directory.

settings.toml       every setting, defaults included; `fedshift run settings.toml` repeats the run
identity.json       id of the run, and digests of its data, its initial and its final model
about.json          versions, commit, machine, command; the names of the tensors that are shifted;
                    the number of clients, and of those left out because they have too few examples
clients.csv         each client's group, examples and labels
rounds.csv          one line per round, six significant digits
client_scores.csv   with evaluate.per_client: scores of each client in the last round in which they were evaluated
uplinks.csv         with an uplink policy: codec, bytes and bits per value of each used upload
histograms.jsonl    in some rounds: a layer's weights before and after the quantizer
tensorboard/, wandb/, tracked.*.json    with --track: logs of trackers, and the id of the run there
checkpoint.*, memory/   the state to resume from, until the run is finished
model.safetensors   the final model; a run with a complete one is finished
report.html         the report, written when the command ends
"""

import json
import math
import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from fedshift.core.files import LOCK, Lock, RunError, content_of, no_link, remove, seal, unseal, write
from fedshift.core.types import Params
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import SettingsError, read
from fedshift.rounds.federation import Federation, Outcome
from fedshift.runs.columns import (
    ESTIMATES,
    UPLINK_COLUMNS,
    client_header,
    client_rows,
    client_score_lines,
    header,
    row,
    uplink_rows,
)
from fedshift.runs.identity import SETTINGS as SETTINGS  # also a name in the run directory
from fedshift.runs.identity import RunIdentity
from fedshift.runs.sheet import cells, csv_lines, whole_lines

SWEEP, ABOUT, MODEL, ROUNDS = "sweep.toml", "about.json", "model.safetensors", "rounds.csv"
CLIENT_SCORES, UPLINKS = "client_scores.csv", "uplinks.csv"


class RunFolder:
    """Run directory, locked against other writers while it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.rounds = self.path / ROUNDS
        self.clients = self.path / "clients.csv"
        self.histograms = self.path / "histograms.jsonl"
        self.uplinks = self.path / UPLINKS
        self.model = self.path / MODEL
        self.checksum = 0  # of the lines of the record
        self.estimates = True  # False for a record of an earlier version, without columns of estimated bytes
        self.known = (self.path / LOCK).exists()  # a run or a sweep was started in this folder before
        self._lock = Lock(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def close(self) -> None:
        self._lock.close()

    def __del__(self) -> None:
        if hasattr(self, "_lock"):
            self.close()

    @property
    def begun(self) -> bool:
        """True if it contains a run or a sweep."""
        return any((self.path / name).exists() for name in (SETTINGS, SWEEP))

    @property
    def foreign(self) -> str:
        """Name of a file that does not belong to a run, or ''; files of a run killed at its start do belong."""
        others = sorted(path.name for path in self.path.iterdir() if path.name != LOCK)
        return others[0] if others and not self.known else ""

    def leave(self) -> None:
        """Close the folder and leave it as it was."""
        if not self.known:
            (self.path / LOCK).unlink(missing_ok=True)
        self.close()

    def begin(self, experiment: Experiment, fed: Federation, about: dict[str, Any], identity: RunIdentity) -> None:
        """Write the files of a new run; settings.toml is last, because it marks the folder as a run."""
        write(self.path / ABOUT, json.dumps(about, indent=2).encode() + b"\n")
        write(self.clients, csv_lines([client_header(fed), *client_rows(fed)]))
        write(self.rounds, csv_lines([header(experiment, fed)]))
        if fed.policy is not None:
            write(self.uplinks, csv_lines([UPLINK_COLUMNS]))
        identity.write(self.path)
        write(self.path / SETTINGS, experiment.toml().encode())

    def _columns(self, experiment: Experiment, fed: Federation) -> list[str]:
        """Columns of the record; a record of an earlier version stays without estimates."""
        columns = header(experiment, fed)
        before = [name for name in columns if name not in ESTIMATES]
        first = self._content().partition(b"\n")[0] + b"\n"
        old = first == csv_lines([before]) or (first != csv_lines([columns]) and bool(self._whole_lines(len(before))))
        self.estimates = not (old and fed.variable)
        return columns if self.estimates else before

    def records(self, experiment: Experiment, fed: Federation) -> list[str]:
        """Checksums of the record after 0, 1, ... rounds, over complete lines from round 1 on without a gap."""
        checksums = [0]
        for line in self._whole_lines(len(self._columns(experiment, fed))):
            checksums.append(zlib.crc32(line + b"\n", checksums[-1]))
        return [f"{checksum:08x}" for checksum in checksums]

    @property
    def record(self) -> str:
        """Checksum of the lines of the record."""
        return f"{self.checksum:08x}"

    def rewind(self, number: int, experiment: Experiment, fed: Federation) -> list[str]:
        """Remove rounds after `number`, and repair files that follow from the settings; return a message per repair."""
        columns = self._columns(experiment, fed)
        lines = b"".join(line + b"\n" for line in self._whole_lines(len(columns))[:number])
        self.checksum = zlib.crc32(lines)
        first, clients = csv_lines([columns]), csv_lines([client_header(fed), *client_rows(fed)])
        repaired = (
            [] if self._content().startswith(first) else [f"{self.rounds}: the damaged first line has been repaired"]
        )
        write(self.rounds, first + lines)
        if not self.clients.exists() or content_of(self.clients) != clients:
            write(self.clients, clients)
            repaired.append(f"{self.clients}: was missing or damaged, and has been repaired")
        if self.histograms.exists():
            kept = [line for line in content_of(self.histograms).split(b"\n") if _round_of(line) <= number]
            write(self.histograms, b"".join(line + b"\n" for line in kept))
        if fed.policy is not None:
            content = content_of(self.uplinks) if self.uplinks.exists() else b""
            rows = whole_lines(content.split(b"\n")[1:-1], len(UPLINK_COLUMNS))
            before = [row for row in rows if row[0].isdecimal() and int(row[0]) <= number]
            write(self.uplinks, csv_lines([UPLINK_COLUMNS, *before]))
        return repaired

    def add(self, experiment: Experiment, fed: Federation, outcome: Outcome) -> None:
        pairs = zip(header(experiment, fed), row(experiment, fed, outcome), strict=True)
        line = csv_lines([[cell for name, cell in pairs if self.estimates or name not in ESTIMATES]])
        self._append(self.rounds, line)
        self.checksum = zlib.crc32(line, self.checksum)
        if lines := client_score_lines(experiment, fed, outcome):
            write(self.path / CLIENT_SCORES, csv_lines(lines))
        if outcome.histograms:
            texts = [json.dumps({"round": outcome.number} | h._asdict()) + "\n" for h in outcome.histograms]
            self._append(self.histograms, "".join(texts).encode())
        if outcome.uplinks:
            self._append(self.uplinks, csv_lines(uplink_rows(outcome)))

    def finish(self, params: Params, identity: RunIdentity) -> None:
        """Write the final model and remove checkpoints."""
        parts, digest = seal(params, {})
        identity._replace(model=digest).write(self.path)  # first, so that the model is recognized
        write(self.model, *parts, sync=True)
        self.tidy()

    def tidy(self) -> None:
        """Remove checkpoints and the memory of clients."""
        remove(self.path, "checkpoint.*.*.safetensors*")
        remove(self.path / "memory", "*.*.*.safetensors*")
        with suppress(OSError):  # missing, or contains other files
            (self.path / "memory").rmdir()

    def _append(self, path: Path, content: bytes) -> None:
        try:
            with open(path, "ab", buffering=0, opener=no_link) as file:
                before = os.fstat(file.fileno()).st_size
                if file.write(content) != len(content):
                    file.truncate(before)
                    raise OSError(28, "No space left on device")
        except OSError as problem:
            raise RunError(f"{path}: cannot be written: {problem.strerror or problem}") from None

    def _content(self) -> bytes:
        return content_of(self.rounds)

    def _whole_lines(self, columns: int) -> list[bytes]:
        _, *lines = self._content().split(b"\n")
        whole = []
        for number, line in enumerate(lines[:-1], 1):
            found = cells(line.decode("utf-8", errors="replace"))
            if len(found) != columns or found[0] != str(number):
                break
            whole.append(line)
        return whole


def begun(path: Path) -> bool:
    """True if the folder contains a run."""
    return (path / SETTINGS).exists()


def leftover(path: Path) -> str:
    """Name of a file that shows that a run has trained in the folder, or ''."""
    found = [*path.glob("checkpoint.*.*.safetensors"), *path.glob(MODEL), *path.glob("memory")]
    with suppress(OSError):
        found += [path / ROUNDS] if (path / ROUNDS).read_bytes().count(b"\n") > 1 else []
    return found[0].name if found else ""


def settings_of(path: Path) -> Experiment:
    """Settings of the run in a folder; SettingsError names the file."""
    raw = read(path / SETTINGS)
    try:
        return Experiment(**raw)
    except SettingsError as problem:
        raise SettingsError(f"{path / SETTINGS}: {problem}") from None


def finished(path: Path) -> bool:
    """True if the final model is complete and belongs to the run."""
    if not (path / MODEL).exists():
        return False
    try:
        _, digest = unseal(path / MODEL, content_of(path / MODEL))
    except RunError:
        return False
    known = RunIdentity.read(path)
    return known is None or known.model == digest


def about(folder: Path) -> dict[str, Any]:
    """Versions, commit and machine; {} if they cannot be read."""
    try:
        found = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _round_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["round"])
    except (ValueError, LookupError, TypeError, RecursionError, OverflowError):
        return math.inf
