"""Uplinks as JSON, for a server that tells a client which one to use.

A frame contains only what a decoder needs. This form also has what only an encoder needs, such as a target rate. Parts
of a codec are sent by number and settings, so both ends must know their classes, also those of a user.
"""

import json
from dataclasses import fields, is_dataclass
from typing import Any

from fedshift.codecs.base import USERS, Coder, Groups, Numbered, Quantizer, Transform
from fedshift.codecs.codec import Codec
from fedshift.rounds.uplink import Uplink

KINDS: dict[str, type[Numbered]] = {kind.kind: kind for kind in (Quantizer, Coder, Groups, Transform)}
PLAIN = (bool, int, float, str, type(None))  # types of settings


def dumps(uplink: Uplink) -> str:
    """Uplink as JSON; ValueError for a codec whose settings are not numbers, texts or other parts.

    >>> from fedshift import Step
    >>> text = dumps(Uplink(Codec(Step(rate=0.5)), update=True))
    >>> loads(text) == Uplink(Codec(Step(rate=0.5)), update=True)
    True
    """
    return json.dumps({"codec": _settings(uplink.codec), "update": uplink.update, "feedback": uplink.feedback})


def loads(text: str) -> Uplink:
    """Uplink from JSON; ValueError if it is not one, or if a part is not known here."""
    try:
        found = json.loads(text)
        codec = Codec(**_parts(found["codec"]))
        return Uplink(codec, _flag(found["update"]), _flag(found["feedback"]))
    except (KeyError, TypeError, AttributeError, RecursionError, json.JSONDecodeError) as problem:
        raise ValueError(f"not an uplink: {problem!r}") from None


def _settings(part: object) -> dict[str, Any]:
    if not is_dataclass(part):
        raise ValueError(f"{part} cannot be named in a message; define its class as a dataclass")
    return {field.name: _value(part, field.name) for field in fields(part) if field.init}


def _value(part: object, name: str) -> Any:
    value = getattr(part, name)
    if isinstance(value, Numbered):
        if type(value).number is None:
            raise ValueError(f"{value} has no number in the wire format")
        return {"kind": value.kind, "number": type(value).number, "settings": _settings(value)}
    if not isinstance(value, PLAIN):
        raise ValueError(f"{part}: {name} is a {type(value).__name__}; only numbers and texts can be sent")
    return value


def _parts(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: _part(value) if isinstance(value, dict) else value for name, value in settings.items()}


def _part(found: dict[str, Any]) -> Numbered:
    number, known = found["number"], KINDS[found["kind"]].known
    if number not in known:
        where = "; import the module that defines it" if number >= USERS else ""
        raise ValueError(f"{found['kind']} {number} is not known here{where}")
    part: Numbered = known[number](**_parts(found["settings"]))
    return part


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"not an uplink: {value!r} is neither true nor false")
    return value
