"""Identity of the run in a folder: its id, its settings, its data and what the model began with, in `identity.json`.

Each checkpoint holds the same, so that the files of one run are not taken for those of another, and a run does not
resume with something else than it was started with.
"""

import json
import secrets
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedshift.core.files import RunError, digest_of, hash_of, write
from fedshift.data.datasets import Dataset
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import SettingsError, differences
from fedshift.rounds.federation import Federation

IDENTITY, SETTINGS = "identity.json", "settings.toml"
OBJECTS = {  # arguments of `run`, and the settings they stand in for
    "model": ("model.name", "model.args"),
    "data": ("data.name",),
    "loss": ("train.loss",),
    "metric": ("train.metric",),
}


class RunIdentity(NamedTuple):
    run: str  # an id drawn at the start
    settings: str  # TOML
    data: str  # checksum, and how a model sees it
    start: str  # digest of the tensors that the first round begins with
    fixed: str  # digest of the tensors that no round changes
    given: tuple[str, ...]  # arguments of `run` that cannot be rebuilt from the settings: 'model', 'data', ...
    model: str = ""  # digest of the final model, once there is one

    @classmethod
    def of(cls, experiment: Experiment, fed: Federation, given: Sequence[str]) -> "RunIdentity":
        """A new run."""
        start, fixed = digest_of(fed.start().out.params), digest_of(fed.task.fixed)
        return cls(secrets.token_hex(8), experiment.toml(), data_id(fed.task.data), start, fixed, tuple(given))

    @classmethod
    def parse(cls, raw: Any) -> "RunIdentity":
        """ValueError for what is no identity."""
        if not isinstance(raw, dict) or raw.keys() != set(cls._fields):
            raise ValueError("no identity of a run")
        given, texts = raw["given"], [raw[name] for name in cls._fields if name != "given"]
        if not isinstance(given, list) or not all(isinstance(text, str) for text in (*texts, *given)):
            raise ValueError("no identity of a run")
        return cls(**raw | {"given": tuple(given)})

    @classmethod
    def read(cls, folder: Path) -> "RunIdentity | None":
        """None where it is missing or damaged."""
        try:
            raw = json.loads((folder / IDENTITY).read_bytes())
            digest = raw.pop("digest")
            return cls.parse(raw) if digest == _digest(raw) else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None

    def write(self, folder: Path) -> None:
        raw = self._asdict()
        write(folder / IDENTITY, json.dumps(raw | {"digest": _digest(raw)}, indent=2).encode() + b"\n")

    def compare_settings(self, now: Experiment, folder: Path, own: Collection[str]) -> None:
        """RunError where a run is resumed with other settings than it was started with.

        `own` are the arguments that are given as objects now: of their names only the last part counts, because a
        module may be imported under another name.
        """
        then = _with_defaults(self.settings)
        if changed := differences(then, now.toml(), {key for name in own for key in OBJECTS[name]}):
            raise RunError(
                f"{folder / SETTINGS}: the settings are not those the run was started with ({changed}); put them "
                f"back to resume it, or start a new run in another folder from the changed file"
            )

    def compare(self, now: "RunIdentity", folder: Path) -> None:
        """RunError where a run is resumed with other data or another model than it was started with."""
        if self.data != now.data:
            raise RunError(f"{folder}: was run with other data than it is given now")
        if self.fixed != now.fixed:
            raise RunError(
                f"{folder}: the model's frozen weights or buffers are not those the run was started with; "
                "give it the same model, or start a new run in another folder"
            )


def _with_defaults(settings: str) -> str:
    """Settings with the defaults of those that the version which wrote them did not have."""
    try:
        return Experiment(**tomllib.loads(settings)).toml()
    except SettingsError:  # not settings of this version: compared as they are
        return settings


def data_id(data: Dataset) -> str:
    return f"{data.checksum} {data.classes} {data.mean} {data.std}"


def _digest(raw: dict[str, Any]) -> str:
    return hash_of(json.dumps(raw, sort_keys=True).encode())
