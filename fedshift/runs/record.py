"""The run directory: what ran, one line a round, and the model at the end.

settings.toml       every setting, defaults included; `fedshift run settings.toml` repeats the run
identity.json       which run this is: its id, and digests of what it was started with and of its final model
about.json          versions, commit, machine, command; the names of the tensors that are shifted
clients.csv         once: each client's group, examples and labels
rounds.csv          one line a round, six significant digits
histograms.jsonl    every so often: a layer's weights before and after the quantizer
tensorboard/, wandb/, tracked.*.json    with --track: what trackers were told, and which run of theirs it is
checkpoint.*, memory/   the state to go on from, until the run is finished
model.safetensors   the final model; a run that has it whole is finished
report.html         the page to look at, written when the command ends
"""

import json
import math
import os
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from fedshift.core.files import LOCK, Lock, RunError, content_of, no_link, remove, seal, separate, unseal, write
from fedshift.core.types import Params
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import SettingsError, read
from fedshift.rounds.federation import Federation, Outcome
from fedshift.runs.columns import ESTIMATES, client_header, client_rows, header, row
from fedshift.runs.identity import SETTINGS as SETTINGS  # of a run directory like the names below
from fedshift.runs.identity import RunIdentity
from fedshift.runs.sheet import cells, csv_lines

SWEEP, ABOUT, MODEL, ROUNDS = "sweep.toml", "about.json", "model.safetensors", "rounds.csv"


class RunFolder:
    """A run directory that nobody else writes to while it is open."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.rounds = self.path / ROUNDS
        self.clients = self.path / "clients.csv"
        self.histograms = self.path / "histograms.jsonl"
        self.model = self.path / MODEL
        self.checksum = 0  # of the record's lines so far
        self.estimates = True  # False for a record begun without columns for estimated bytes, which resumes without
        self.known = (self.path / LOCK).exists()  # whether a run or a sweep was begun here before
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
        """The name of something that is no run's, '' for none; a run killed at its start leaves what is its own."""
        others = sorted(path.name for path in self.path.iterdir() if path.name != LOCK)
        return others[0] if others and not self.known else ""

    def leave(self) -> None:
        """Go as if never here."""
        if not self.known:
            (self.path / LOCK).unlink(missing_ok=True)
        self.close()

    def begin(self, experiment: Experiment, fed: Federation, about: dict[str, Any], identity: RunIdentity) -> None:
        """Write what is known before the first round; settings.toml comes last: it makes the folder a run's."""
        write(self.path / ABOUT, json.dumps(about, indent=2).encode() + b"\n")
        write(self.clients, csv_lines([client_header(fed), *client_rows(fed)]))
        write(self.rounds, csv_lines([header(experiment, fed)]))
        identity.write(self.path)
        write(self.path / SETTINGS, experiment.toml().encode())

    def _columns(self, experiment: Experiment, fed: Federation) -> list[str]:
        """Columns of the record; one that was begun before there were estimates keeps its own."""
        columns = header(experiment, fed)
        before = [name for name in columns if name not in ESTIMATES]
        first = self._content().partition(b"\n")[0] + b"\n"
        old = first == csv_lines([before]) or (first != csv_lines([columns]) and bool(self._whole_lines(len(before))))
        self.estimates = not (old and fed.variable)
        return columns if self.estimates else before

    def records(self, experiment: Experiment, fed: Federation) -> list[str]:
        """Checksums of the record after 0, 1, ... rounds: of whole lines, from round 1 on without a gap."""
        checksums = [0]
        for line in self._whole_lines(len(self._columns(experiment, fed))):
            checksums.append(zlib.crc32(line + b"\n", checksums[-1]))
        return [f"{checksum:08x}" for checksum in checksums]

    @property
    def record(self) -> str:
        """The checksum of the record's lines so far."""
        return f"{self.checksum:08x}"

    def rewind(self, number: int, experiment: Experiment, fed: Federation) -> list[str]:
        """Forget what was recorded after round `number`, and repair what follows from the settings; what that was."""
        columns = self._columns(experiment, fed)
        lines = b"".join(line + b"\n" for line in self._whole_lines(len(columns))[:number])
        self.checksum = zlib.crc32(lines)
        first, clients = csv_lines([columns]), csv_lines([client_header(fed), *client_rows(fed)])
        repaired = (
            [] if self._content().startswith(first) else [f"{self.rounds}: its first line was damaged, and is repaired"]
        )
        write(self.rounds, first + lines)
        if not self.clients.exists() or content_of(self.clients) != clients:
            write(self.clients, clients)
            repaired.append(f"{self.clients}: was missing or damaged, and is repaired")
        if self.histograms.exists():
            kept = [line for line in content_of(self.histograms).split(b"\n") if _round_of(line) <= number]
            write(self.histograms, b"".join(line + b"\n" for line in kept))
        return repaired

    def add(self, experiment: Experiment, fed: Federation, outcome: Outcome) -> None:
        pairs = zip(header(experiment, fed), row(experiment, fed, outcome), strict=True)
        line = csv_lines([[cell for name, cell in pairs if self.estimates or name not in ESTIMATES]])
        self._append(self.rounds, line)
        self.checksum = zlib.crc32(line, self.checksum)
        if outcome.histograms:
            texts = [json.dumps({"round": outcome.number} | h._asdict()) + "\n" for h in outcome.histograms]
            self._append(self.histograms, "".join(texts).encode())

    def finish(self, params: Params, identity: RunIdentity) -> None:
        """The model; what was only there to go on from goes."""
        content, digest = seal(separate(params), {})
        identity._replace(model=digest).write(
            self.path
        )  # first: a model that nobody knows of is not taken for the run's
        write(self.model, content, sync=True)
        self.tidy()

    def tidy(self) -> None:
        """Without what was only there to go on from."""
        remove(self.path, "checkpoint.*.*.safetensors*")
        remove(self.path / "memory", "*.*.*.safetensors*")
        with suppress(OSError):  # it is not there, or somebody else keeps something in it
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
    """True if there is a run in a folder."""
    return (path / SETTINGS).exists()


def remains(path: Path) -> str:
    """The name of something that only a run that has trained leaves in a folder, '' for none."""
    found = [*path.glob("checkpoint.*.*.safetensors"), *path.glob(MODEL), *path.glob("memory")]
    with suppress(OSError):
        found += [path / ROUNDS] if (path / ROUNDS).read_bytes().count(b"\n") > 1 else []
    return found[0].name if found else ""


def settings_of(path: Path) -> Experiment:
    """The settings of the run in a folder; SettingsError names the file."""
    raw = read(path / SETTINGS)
    try:
        return Experiment(**raw)
    except SettingsError as problem:
        raise SettingsError(f"{path / SETTINGS}: {problem}") from None


def finished(path: Path) -> bool:
    """True if the final model is complete and is the one the run ended with."""
    if not (path / MODEL).exists():
        return False
    try:
        _, digest = unseal(path / MODEL, content_of(path / MODEL))
    except RunError:
        return False
    known = RunIdentity.read(path)
    return known is None or known.model == digest


def about(folder: Path) -> dict[str, Any]:
    """Versions, commit and machine; nothing where that cannot be read."""
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
