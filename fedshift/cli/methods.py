"""Listing of algorithms, uplink policies and codecs, with the names that settings use."""

import inspect
import json
from collections.abc import Callable
from typing import Any

import typer
from rich.console import Console

from fedshift.algorithms.table import ALGORITHMS, described
from fedshift.codecs.named import CODECS, CODERS, QUANTIZERS, WIDTH
from fedshift.core.tables import Listing
from fedshift.policies.table import POLICIES


def methods(as_json: bool) -> None:
    """Print all algorithms, uplink policies, quantizers and coders."""
    found = catalog()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    console = Console()
    for listing in listings(found):
        console.print(listing.drawn())
    names = "algorithm.name, uplink.policy.name, uplink.quantizer, uplink.codec.name and uplink.coder"
    console.print(f"Settings: {names}; arguments go into the same table.")


def catalog() -> dict[str, list[dict[str, Any]]]:
    """Name, description and settings with their defaults of each; None for a setting without default."""
    return {
        "algorithms": [described(name)._asdict() for name in ALGORITHMS],
        "policies": [_described(name, make) for name, make in POLICIES.items()],
        "quantizers": [
            {"name": name, "line": quantizer.line, "settings": {"bits": WIDTH.get(name), **quantizer.sizes}}
            for name, quantizer in QUANTIZERS.items()
        ],
        "codecs": [_described(name, make) for name, make in CODECS.items()],
        "coders": [{"name": name, "line": _line(coder), "settings": {}} for name, coder in CODERS.items()],
    }


def _described(name: str, make: Callable[..., Any]) -> dict[str, Any]:
    """Description of a function, or of a class, from its docstring and that of its module."""
    reference = _line(inspect.getmodule(make))
    return {"name": name, "line": _line(make), "settings": _arguments(make), "reference": reference}


def _line(thing: object) -> str:
    """First line of a docstring."""
    return inspect.cleandoc(thing.__doc__ or "").partition("\n")[0]


def _arguments(make: Callable[..., Any]) -> dict[str, Any]:
    """Arguments of a function and their defaults."""
    return {name: found.default for name, found in inspect.signature(make).parameters.items()}


def listings(found: dict[str, list[dict[str, Any]]]) -> list[Listing]:
    """Tables of a catalog; algorithms and policies of one paper share a line of references."""
    tables = [
        Listing(
            kind.capitalize(),
            ("name", "description", "settings"),
            [(item["name"], item["line"], _settings(item["settings"])) for item in items],
            what=3,
        )
        for kind, items in found.items()
    ]
    papers: dict[str, list[str]] = {}
    for item in [*found["algorithms"], *found["policies"]]:
        papers.setdefault(item["reference"], []).append(item["name"])
    rows = [(", ".join(names), reference) for reference, names in papers.items()]
    return [tables[0], Listing("References", ("method", "reference"), rows, what=2), *tables[1:]]


def _settings(settings: dict[str, Any]) -> str:
    """Settings as in a file; only the name of those without a default."""
    return ", ".join(name if value is None else f"{name} = {json.dumps(value)}" for name, value in settings.items())
