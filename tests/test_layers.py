"""Who may import whom: only rooms further left."""

import ast
from pathlib import Path

import fedshift

ROOT = Path(fedshift.__file__).parent
LAYERS = [
    {"types", "names", "extras", "uplinks"},
    {"tree", "rng", "bounds"},
    {"algorithms", "codecs", "data", "models"},
    {"frame"},
    {"registry"},
    {"parts"},
    {"wire"},
    {"accumulate", "uplink", "evaluate"},
    {"engines"},
    {"federation", "toml"},
    {"events", "rates"},
    {"settings"},
    {"server", "links", "columns"},
    {"loop", "experiment"},
    {"files", "about"},
    {"memory", "identity"},
    {"checkpoint", "record"},
    {"journal", "progress", "recorded"},
    {"running"},
    {"flower", "grid", "interrupts", "packs", "presets", "summary", "track"},
    {"crew", "tradeoff"},
    {"report"},
    {"sweep", "terminal"},
    {"bench", "command"},
    {"frontier"},
    {"paper"},
    {"cli"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
# added to others' apps
ADDED = [
    "mod",
    "scaffold",
    "seeded",
    "strategy",
    "replies",
    "nested",
    "outcome",
    "saved",
    "arrays",
    "memory",
    "targets",
]


def imported(file: Path) -> set[str]:
    """The rooms of ours that a file imports from, and the libraries."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            library, *inside = (node.module or "").split(".")
            ours = inside[:1] or [alias.name for alias in node.names]
            found |= {f".{room}" for room in ours} if library == "fedshift" else {library}
    return found


def test_imports_point_left() -> None:
    for file in ROOT.rglob("*.py"):
        room = file.relative_to(ROOT).parts[0].removesuffix(".py")
        for other in (name[1:] for name in imported(file) if name.startswith(".") and room != "__init__"):
            allowed = other == room or other == "__version__" or LEVEL[other] < LEVEL[room]
            assert allowed, f"{file.relative_to(ROOT)} imports {other}, which is not to its left"


def test_a_report_reads_records_and_knows_nothing_of_training() -> None:
    training = {".engines", ".experiment", ".loop", ".running", ".crew", ".sweep", ".flower", "torch"}
    for file in (ROOT / "report").rglob("*.py"):
        assert not training & imported(file), file


def test_only_one_room_knows_flower() -> None:
    rooms = {file.relative_to(ROOT).parts[0] for file in ROOT.rglob("*.py") if {"flwr", "ray"} & imported(file)}
    assert rooms == {"flower"}


def test_what_is_added_to_somebodys_flower_app_knows_nothing_of_experiments() -> None:
    allowed = LEVEL["uplink"]
    for name in ADDED:
        rooms = {room[1:] for room in imported(ROOT / "flower" / f"{name}.py") if room.startswith(".")}
        assert all(LEVEL[room] <= allowed for room in rooms - {"flower", "files"}), name
