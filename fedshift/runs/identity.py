"""Identity of a run, in `identity.json`: its id, settings, data, partition, and initial model.

Each checkpoint contains the same, so that files of different runs are not mixed up, and a run is resumed only with the
settings, data, partition and model it was started with.
"""

import json
import secrets
import tomllib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedshift.codecs import Codec
from fedshift.core.files import RunError, digest_of, hash_of, write
from fedshift.data.datasets import Dataset
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import SettingsError, differences
from fedshift.rounds.federation import Federation
from fedshift.wire.registry import codec_bytes

IDENTITY, SETTINGS = "identity.json", "settings.toml"
OBJECTS = {  # arguments of `run`, and the settings they replace
    "model": ("model.name", "model.args"),
    "data": ("data.name",),
    "loss": ("train.loss",),
    "metric": ("train.metric",),
    "algorithm": ("algorithm.name",),
    "partition": (),
    "uplink": ("uplink.codec.name",),
    "optimizer": ("train.optimizer.name",),
    "policy": ("uplink.policy.name",),
}


class RunIdentity(NamedTuple):
    run: str  # random id
    settings: str  # TOML
    data: str  # checksum, classes and normalization
    start: str  # digest of the initial tensors
    fixed: str  # digest of the tensors that no round changes
    given: tuple[str, ...]  # arguments of `run` that cannot be rebuilt from the settings: 'model', 'data', ...
    model: str = ""  # digest of the final model, or ''
    partition: str = ""  # digest of the training examples of each client; '' in records of earlier versions
    codecs: str = ""  # the codecs of all uplinks and the downlink; '' as above

    @classmethod
    def of(cls, experiment: Experiment, fed: Federation, given: Sequence[str]) -> "RunIdentity":
        """Identity of a new run."""
        start, fixed = digest_of(fed.start().out.params), digest_of(fed.task.fixed)
        made = cls(secrets.token_hex(8), experiment.toml(), data_id(fed.task.data), start, fixed, tuple(given))
        partition = digest_of({"order": fed.partition.order, "start": fed.partition.start})
        links = [*(group.uplink for group in fed.groups), fed.downlink]
        return made._replace(partition=partition, codecs=" ".join(_codec(link.codec) for link in links))

    @classmethod
    def parse(cls, raw: Any) -> "RunIdentity":
        """Parse JSON values; ValueError if they are not an identity."""
        if not isinstance(raw, dict) or (raw := {"partition": "", "codecs": ""} | raw).keys() != set(cls._fields):
            raise ValueError("not the identity of a run")
        given, texts = raw["given"], [raw[name] for name in cls._fields if name != "given"]
        if not isinstance(given, list) or not all(isinstance(text, str) for text in (*texts, *given)):
            raise ValueError("not the identity of a run")
        return cls(**raw | {"given": tuple(given)})

    @classmethod
    def read(cls, folder: Path) -> "RunIdentity | None":
        """Read `identity.json`; None if it is missing or damaged."""
        try:
            raw = json.loads((folder / IDENTITY).read_bytes())
            digest = raw.pop("digest")
            return cls.parse(raw) if digest == _digest(raw) else None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None

    def write(self, folder: Path) -> None:
        raw = self._asdict()
        write(folder / IDENTITY, json.dumps(raw | {"digest": _digest(raw)}, indent=2).encode() + b"\n")

    def compare_settings(self, now: Experiment, folder: Path, objects: Collection[str]) -> None:
        """Raise RunError if the settings differ from those the run was started with.

        `objects` are the arguments that are passed as objects: only the last part of their names is compared, because
        a module may be imported under another name.
        """
        then = _with_defaults(self.settings)
        if changed := differences(then, now.toml(), {key for name in objects for key in OBJECTS[name]}):
            raise RunError(
                f"{folder / SETTINGS}: the settings are not those the run was started with ({changed}); restore them "
                f"to resume it, or start a new run in another folder from the changed file"
            )

    def compare(self, now: "RunIdentity", folder: Path) -> None:
        """Raise RunError if data, partition, codecs or frozen part of the model differ from those at the start."""
        if self.data != now.data:
            raise RunError(f"{folder}: the data are not those the run was started with")
        if self.partition and self.partition != now.partition:
            raise RunError(
                f"{folder}: the examples of the clients are not those the run was started with; a partition must be "
                "the same each time, so draw from its key"
            )
        if self.codecs and self.codecs != now.codecs:
            raise RunError(
                f"{folder}: the codecs are not those the run was started with: their numbers, parameters or "
                "the tensors that they encode differ; "
                "restore your codec to resume it, or start a new run in another folder"
            )
        if self.fixed != now.fixed:
            raise RunError(
                f"{folder}: the model's frozen weights or buffers are not those the run was started with; "
                "pass the same model, or start a new run in another folder"
            )


def _with_defaults(settings: str) -> str:
    """Settings with defaults for those that an earlier version did not have."""
    try:
        return Experiment(**tomllib.loads(settings)).toml()
    except SettingsError:  # not valid in this version: compared as text
        return settings


def _codec(codec: Codec) -> str:
    """Numbers and parameters of the parts, and which tensors are encoded: a resumed run must have the same."""
    return f"{codec_bytes(codec).hex()}-{codec.min_axes}-{int(codec.integers)}"


def data_id(data: Dataset) -> str:
    return f"{data.checksum} {data.classes} {data.mean} {data.std}"


def _digest(raw: dict[str, Any]) -> str:
    return hash_of(json.dumps(raw, sort_keys=True).encode())
