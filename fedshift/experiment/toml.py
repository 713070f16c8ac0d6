"""Settings as text: TOML files, `key=value` of the command line, and merging of both."""

import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

from fedshift.core.names import printable
from fedshift.rounds.uplinks import QUANTIZERS, REPLACED, expanded, expanded_down

VALUES = ("bits", "bandwidth", "metrics")  # settings whose value may be a table
LINKS: dict[str, Callable[[str], dict[str, Any]]] = {"uplink": expanded, "downlink": expanded_down}  # by name
NAMED = ("codec", "optimizer", "policy")  # tables that may be written as their name alone
EXCLUSIVE = {"steps": "epochs", "epochs": "steps"}  # settings of training, of which the later one is kept
LISTED = 5  # differences named in a message


class SettingsError(ValueError):
    """Invalid setting; the message has its name, its value and the allowed values."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


def read(path: Path) -> dict[str, Any]:
    """Read a TOML file; SettingsError if it is not readable."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # with or without a byte-order mark
    except UnicodeDecodeError:
        raise SettingsError(f"{path}: not a text file in UTF-8") from None
    except ValueError as problem:  # also raised for numbers with too many digits
        raise SettingsError(f"{path}: not TOML: {problem}") from None
    except RecursionError:
        raise SettingsError(f"{path}: not settings: its values are nested too deeply") from None
    except OSError as problem:
        raise SettingsError(f"{path}: cannot be read: {problem.strerror}") from None


def assign(raw: dict[str, Any], assignment: str) -> None:
    """Set one `table.key=value` of the command line in the settings; a value that is not TOML is text.

    >>> raw = {}
    >>> assign(raw, "uplink.bits={32=0.5, 4=0.5}"); assign(raw, "algorithm.name=scaffold"); raw
    {'uplink': {'bits': {'32': 0.5, '4': 0.5}}, 'algorithm': {'name': 'scaffold'}}
    """
    key, equals, text = assignment.partition("=")
    if not equals or not key.strip():
        raise SettingsError(f"--set {assignment}: must be key=value, for example train.lr=0.1")
    try:
        parsed = tomllib.loads(f"value = {text}")
        value = parsed["value"] if len(parsed) == 1 else text.strip()  # further lines must not set other keys
    except ValueError:
        value = text.strip()
    except RecursionError:
        raise SettingsError(f"--set {key.strip()}: its value is nested too deeply") from None
    put(raw, key.strip(), value)


def put(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set a value by its dotted name."""
    *tables, last = key.split(".")
    if not all([*tables, last]):
        raise SettingsError(f"{key}: contains an empty name between dots")
    for table in tables:
        below, raw = raw, raw.setdefault(table, {})
        if isinstance(raw, str):
            raw = below[table] = _table(table, raw)
        if not isinstance(raw, dict):
            raise SettingsError(f"{key}: '{table}' is a setting, not a table")
    if tables and (tables[-1] in LINKS or (tables[:2] == ["uplink", "group"] and len(tables) == 3)):
        for replaced in _replaced({last: value}):
            raw.pop(replaced, None)
    if tables == ["train"]:
        raw.pop(EXCLUSIVE.get(last, ""), None)
    raw[last] = renamed(raw.get(last), value) if key == "uplink" and isinstance(value, str) else value


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables; values of `above` take precedence.

    >>> merge({"uplink": {"bits": 4, "coder": "zstd"}}, {"uplink": {"codec": "sign"}})  # a codec replaces a coder
    {'uplink': {'bits': 4, 'codec': 'sign'}}
    >>> merge({"uplink": {"codec": {"name": "qsgd", "s": 4}}}, {"uplink": {"codec": {"name": "topk", "keep": 0.1}}})
    {'uplink': {'codec': {'name': 'topk', 'keep': 0.1}}}
    >>> merge({"train": {"epochs": 5, "lr": 0.1}}, {"train": {"steps": 20}})
    {'train': {'lr': 0.1, 'steps': 20}}
    """
    joined = dict(below)
    if isinstance(above.get("train"), Mapping) and isinstance(below.get("train"), Mapping):
        replaced = {EXCLUSIVE.get(key) for key in above["train"]}
        joined["train"] = {key: value for key, value in below["train"].items() if key not in replaced}
    for key, value in above.items():
        if isinstance(joined.get(key), str) and isinstance(value, Mapping):
            joined[key] = _table(key, joined[key])
        elif key == "uplink" and isinstance(value, str):
            value = renamed(joined.pop(key, None), value)
        if key in LINKS and isinstance(value, Mapping) and isinstance(joined.get(key), Mapping):
            joined[key] = _kept(joined[key], value)
        both = isinstance(value, Mapping) and isinstance(joined.get(key), Mapping) and key not in VALUES
        if both and key in NAMED:  # arguments of another codec, optimizer or policy are not kept
            both = value.get("name", joined[key].get("name")) == joined[key].get("name")
        joined[key] = merge(joined[key], value) if both else value
    return joined


def renamed(before: Any, name: str) -> str | dict[str, Any]:
    """Named uplink that replaces the one before; its bandwidth is kept, since a name does not include one.

    >>> renamed({"bits": 4, "bandwidth": 1e6}, "exact"), renamed(None, "exact")
    ({'bandwidth': 1000000.0, 'bits': 32}, 'exact')
    """
    if not isinstance(before, Mapping) or before.get("bandwidth") is None:
        return name
    return {"bandwidth": before["bandwidth"]} | _named("uplink", name)


def _kept(link: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of an uplink and of its groups that later ones do not replace."""
    kept = {name: x for name, x in link.items() if name not in _replaced(later)}
    groups, changed = kept.get("group"), later.get("group")
    if isinstance(groups, Mapping) and isinstance(changed, Mapping):
        pairs = {name: (group, changed.get(name)) for name, group in groups.items()}
        kept["group"] = {
            name: _kept(group, new) if isinstance(group, Mapping) and isinstance(new, Mapping) else group
            for name, (group, new) in pairs.items()
        }
    return kept


def _replaced(link: Mapping[str, Any]) -> tuple[str, ...]:
    """Earlier settings of an uplink that these replace: a codec replaces quantizer and coder, a quantizer a codec."""
    return REPLACED if "codec" in link else ("codec",) if any(name in link for name in QUANTIZERS) else ()


def _table(key: str, name: str) -> Any:
    """Table that a text is short for; the text itself for settings that have no such form."""
    return _named(key, name) if key in LINKS else {"name": name} if key in NAMED else name


def _named(link: str, name: str) -> dict[str, Any]:
    """Settings of a named uplink or downlink."""
    try:
        return LINKS[link](name)
    except ValueError as problem:
        raise SettingsError(f"{link} = {name!r}: {problem}") from None


def plain(value: Any, leaf: Callable[[Any], Any] = lambda value: value) -> Any:
    """Convert keys to text and tuples to lists, as TOML and JSON require; `leaf` changes all other values."""
    if isinstance(value, Mapping):
        return {str(key): plain(part, leaf) for key, part in value.items()}
    return [plain(part, leaf) for part in value] if isinstance(value, (list, tuple)) else leaf(value)


def dotted(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name; a table that is one value, like bits, is not split.

    >>> dotted({"seed": 1, "uplink": {"bits": {"32": 1.0}, "send": "updates"}})
    {'seed': 1, 'uplink.bits': {'32': 1.0}, 'uplink.send': 'updates'}
    """
    result: dict[str, Any] = {}
    for key, value in tree.items():
        single = not isinstance(value, Mapping) or key in VALUES
        result |= {prefix + key: value} if single else dotted(value, f"{prefix}{key}.")
    return result


def _comparable(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name, with empty tables in model.args and the order of groups, which assigns clients.

    >>> _comparable({"model": {"args": {"norm": {}}}, "uplink": {"group": {"b": {"bits": 4}, "a": {"bits": 8}}}})
    {'uplink.group.b.bits': 4, 'uplink.group.a.bits': 8, 'model.args.norm': {}, 'order of uplink.group': ['b', 'a']}
    """
    empty: dict[str, Any] = {name: {} for name in _empty(tree.get("model", {}).get("args", {}), "model.args.")}
    return dotted(tree) | empty | {"order of uplink.group": list(tree.get("uplink", {}).get("group", {}))}


def _empty(tree: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Dotted names of the empty tables in a tree."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _empty(value, f"{prefix}{key}.") if value else [f"{prefix}{key}"]


def differences(then: str, now: str, by_end: Collection[str] = ()) -> str:
    """Differences between two texts of settings, '' for none; for keys in `by_end`, text before a colon is ignored.

    >>> differences("seed = 1\\n[model]\\nname = 'a:f'", "seed = 2\\n[model]\\nname = 'b:f'", ["model.name"])
    'seed: was 1, now 2'
    """
    if then == now:
        return ""
    before, after = (_comparable(tomllib.loads(text)) for text in (then, now))
    changes = []
    for key in dict.fromkeys([*before, *after]):
        old, new = (
            str(side.get(key)).rpartition(":")[2] if key in by_end else side.get(key) for side in (before, after)
        )
        if repr(old) != repr(new):  # 1, 1.0 and true are equal, and {32, 4} and {4, 32} assign different clients
            was, is_now = (shorten(repr(side[key]), 60) if key in side else "not set" for side in (before, after))
            changes.append(f"{key}: was {was}, now {is_now}")
    more = [f"and {len(changes) - LISTED} more"] if len(changes) > LISTED else []
    return "; ".join(changes[:LISTED] + more)
