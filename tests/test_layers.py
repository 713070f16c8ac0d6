"""Who may import whom: only rooms further left."""

import ast
from pathlib import Path

import fedshift

ROOT = Path(fedshift.__file__).parent
LAYERS = [
    {"types", "names"},
    {"tree", "rng"},
    {"algorithms", "codecs", "data", "models"},
    {"frame"},
    {"registry"},
    {"parts"},
    {"wire"},
    {"accumulate", "uplink", "evaluate"},
    {"engines"},
    {"federation", "toml"},
    {"settings"},
    {"server", "links", "columns"},
    {"loop", "experiment"},
    {"files", "about"},
    {"memory"},
    {"checkpoint", "record"},
    {"journal"},
    {"running"},
    {"presets", "progress", "summary"},
    {"sweep"},
    {"bench", "command"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}


def test_imports_point_left() -> None:
    for file in ROOT.rglob("*.py"):
        room = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedshift"):
                inside = (node.module or "").split(".")[1:2] or [alias.name for alias in node.names]
                for other in inside:
                    allowed = other == room or other == "__version__" or LEVEL[other] < LEVEL[room]
                    assert allowed, f"{file.relative_to(ROOT)} imports {other}, which is not to its left"
