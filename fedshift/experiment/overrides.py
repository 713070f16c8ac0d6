"""Settings of a preset or file, overridden by the command line; errors name the origin of a wrong setting."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from fedshift.experiment import grid as grids
from fedshift.experiment.presets import PRESETS
from fedshift.experiment.settings import check_quantized, check_used, downlink_name, uplink_name
from fedshift.experiment.toml import LINKS, SettingsError, assign, dotted, merge, read


def settings(file: Path | None, preset: str | None, assignments: Sequence[str]) -> dict[str, Any]:
    """Merge preset, file and command line; later ones take precedence. Errors name the origin of a setting."""
    if preset is not None and preset not in PRESETS:
        raise SettingsError(f"--preset {preset}: no such preset; known are {', '.join(PRESETS)}")
    raw = PRESETS[preset] if preset else {}
    given = read(file) if file else {}
    if file and not given and not assignments:
        raise SettingsError(f"{file}: contains no settings; to train the demo, run `fedshift run` without a file")
    raw = merge(raw, given)
    return changed(raw, str(file) if file else f"--preset {preset}", assignments)


def changed(raw: Mapping[str, Any], where: str, assignments: Sequence[str]) -> dict[str, Any]:
    """Override settings of a file or preset by the command line; errors name the origin of a setting."""
    with placed(where):
        check_quantized(grids.given(raw), grids.expand(raw))
    base, raw, given = raw, dict(raw), dict[str, Any]()
    for assignment in assignments:
        change: dict[str, Any] = {}
        assign(change, assignment)
        given |= dotted(change)
        raw = merge(raw, change)  # one after another: the name of an uplink replaces earlier settings of it
        key = assignment.partition("=")[0].strip()
        if swept := [name for name in grids.keys(base) if overlap(key, name)]:
            hint = f"change it with --set 'sweep.{swept[0] if swept[0] in grids.axes(base) else 'runs'}=[...]'"
            subject = "it" if f"{key}.".startswith(f"{swept[0]}.") else swept[0]
            raise SettingsError(f"--set {key}: the sweep sets {subject} for each run; {hint}")
    for key in given:
        if not any(overlap(key, kept) for kept in dotted(raw)):
            raise SettingsError(f"--set {key}: has no effect, because a later --set replaces it; leave one of them out")
    with placed("--set"):
        experiments = grids.expand(raw)
        check_quantized(given, experiments)
    with placed(where, assignments):
        check_used(experiments)
    return raw


def overlap(first: str, second: str) -> bool:
    """True if two settings are the same or one is a table that contains the other.

    >>> overlap("uplink", "uplink.bits"), overlap("uplink.bits", "uplink.bits"), overlap("uplink.rate", "uplink.bits")
    (True, True, False)
    """
    return f"{first}.".startswith(f"{second}.") or f"{second}.".startswith(f"{first}.")


def listed(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings with a sweep; SettingsError if they have none."""
    if "sweep" not in raw:
        raise SettingsError(
            "has no table named sweep with the settings that differ between runs; `fedshift run` trains one run"
        )
    return raw


def named_uplinks(raw: Mapping[str, Any]) -> list[str]:
    """A line for each named uplink and downlink in these settings: its name and its settings.

    >>> named_uplinks({"uplink": "lean"})  # doctest: +ELLIPSIS
    ['uplink lean: quantizer = "step-random", rate = ..., coder = "range", biases = true, ...']
    """
    runs = grids.expand(raw)
    found = [("uplink", name) for name in dict.fromkeys(uplink_name(run.uplink) for run in runs)]
    found += [("downlink", name) for name in dict.fromkeys(downlink_name(run.downlink) for run in runs)]
    named = [(link, name, LINKS[link](name)) for link, name in found if name and name != "exact"]
    return [f"{link} {name}: {', '.join(tomli_w.dumps(settings).splitlines())}" for link, name, settings in named]


@contextmanager
def placed(where: str, assignments: Sequence[str] = ()) -> Iterator[None]:
    """Name the origin of a wrong setting in errors: the command line, or else the file or preset."""
    try:
        yield
    except SettingsError as problem:
        assigned = [assignment.partition("=")[0].strip() for assignment in assignments]
        overridden = any(str(problem).startswith(key) for key in assigned)
        raise SettingsError(f"{'--set' if overridden else where}: {problem}") from None
