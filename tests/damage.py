"""Damaged run folders: each is resumed to the model of an undisturbed run, or refused in a sentence and left as it is.

python -m tests.damage --count 300 --seed 7
"""

import argparse
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedshift.core.files import RunError
from fedshift.experiment.toml import SettingsError
from fedshift.runs.record import finished
from fedshift.runs.run import resume
from tests.runs import DERIVED, DISK, FEDAVG, FEEDBACK, digits, everything, go, record, rewrite, small, stopped

KINDS: dict[str, list[dict[str, Any]]] = {"fedavg": [FEDAVG], "scaffold": [DERIVED], "feedback": [FEEDBACK, DISK]}
SHORT = {"train": {"rounds": 5, "cohort": 3}, "data": {"clients": 6}}


class Subject(NamedTuple):
    """Folders of one kind of run, which are copied before they are damaged."""

    parts: list[Path]  # stopped after some rounds, and finished
    others: list[Path]  # stopped: the same settings once more, and another seed
    whole: dict[str, Any]  # what an undisturbed run records


def subjects(folder: Path, more: dict[str, Any] = SHORT) -> dict[str, Subject]:
    made = {}
    for kind, changes in KINDS.items():
        here = folder / kind
        experiment = small(*changes, more)
        parts = [here / "early", here / "part", here / "whole"]
        stopped(parts[0], *changes, more, after=1)
        stopped(parts[1], *changes, more, after=experiment.train.rounds - 2)
        go(experiment, parts[2])
        others = [here / "again", here / "seed"]
        for seed, out in enumerate(others):
            stopped(out, *changes, more, {"seed": seed}, after=experiment.train.rounds - 2)
        made[kind] = Subject(parts, others, record(parts[2]))
    return made


# one damage each: it may find nothing to damage, and tells what it did


def flip(folder: Path, other: Path, draw: random.Random) -> str:
    path, content = drawn(folder, draw)
    if content:
        at = draw.randrange(len(content))
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :])
    return path.name


def cut(folder: Path, other: Path, draw: random.Random) -> str:
    path, content = drawn(folder, draw)
    path.write_bytes(content[: draw.randrange(len(content) + 1)])
    return path.name


def empty(folder: Path, other: Path, draw: random.Random) -> str:
    path, content = drawn(folder, draw)
    path.write_bytes(bytes(draw.choice([0, len(content)])))
    return path.name


def delete(folder: Path, other: Path, draw: random.Random) -> str:
    path, _ = drawn(folder, draw)
    path.unlink()
    return path.name


def lengthen(folder: Path, other: Path, draw: random.Random) -> str:
    path, content = drawn(folder, draw)
    at = draw.randrange(len(content) + 1)
    path.write_bytes(content[:at] + draw.choice([b"[" * 100_000, b"1" * 200_000, draw.randbytes(50)]) + content[at:])
    return path.name


def letter(folder: Path, other: Path, draw: random.Random) -> str:
    """Change a character of the settings."""
    path = folder / "settings.toml"
    text = path.read_text()
    at = draw.randrange(len(text))
    path.write_text(text[:at] + draw.choice("0123456789.=abcdef") + text[at + 1 :])
    return path.name


def swap(folder: Path, other: Path, draw: random.Random) -> str:
    """Swap the contents of two files of a run."""
    (one, content), (two, second) = drawn(folder, draw), drawn(folder, draw)
    one.write_bytes(second)
    two.write_bytes(content)
    return f"{one.name} and {two.name}"


def swap_names(folder: Path, other: Path, draw: random.Random) -> str:
    """Swap the names of two files of tensors, except their checksums."""
    files = tensors(folder, draw)
    if len(files) < 2:
        return delete(folder, other, draw)
    (one, stem), (two, stem_two) = ((path, path.name.rsplit(".", 2)[0]) for path in draw.sample(files, 2))
    contents = one.read_bytes(), two.read_bytes()
    names = one.name.replace(stem, stem_two, 1), two.name.replace(stem_two, stem, 1)
    one.unlink()
    two.unlink()
    for path, name, content in zip((one, two), names, contents, strict=True):
        (path.parent / name).write_bytes(content)
    return f"{one.name} and {two.name}"


def rename(folder: Path, other: Path, draw: random.Random) -> str:
    """Rename a file of tensors to that of another client or round."""
    files = tensors(folder, draw)
    if not files:
        return delete(folder, other, draw)
    path = draw.choice(files)
    parts = path.name.split(".")
    place = draw.choice([0, 1]) if parts[0].isdecimal() else 1
    parts[place] = f"{int(parts[place]) + draw.choice([-1, 1]):0{len(parts[place])}d}"
    path.rename(path.with_name(".".join(parts)))
    return path.name


def foreign(folder: Path, other: Path, draw: random.Random) -> str:
    """Replace a file by one of another run, or add it."""
    path = draw.choice([path for path in other.rglob("*") if path.is_file() and path.name != ".lock"])
    stem = path.relative_to(other).with_name(path.name.split(".")[0])
    if draw.random() < 0.5:
        for own in folder.glob(f"{stem}.{'.'.join(path.name.split('.')[1:-2])}*"):
            own.unlink()
    (folder / path.relative_to(other)).parent.mkdir(exist_ok=True)
    shutil.copy(path, folder / path.relative_to(other))
    return path.name


def forge(folder: Path, other: Path, draw: random.Random) -> str:
    """Change tensors, with valid checksums."""
    files = [path for path in tensors(folder, draw) if path.name.startswith("checkpoint")]
    if not files:
        return delete(folder, other, draw)
    ways: list[Callable[[Tensor], Tensor]] = [torch.Tensor.int, lambda x: x / 0, lambda x: x[:-1]]
    how = draw.choice(ways)
    path = draw.choice(files)
    rewrite(
        path, lambda params: {name: how(x) if x.ndim and x.is_floating_point() else x for name, x in params.items()}
    )
    return path.name


def several(folder: Path, other: Path, draw: random.Random) -> str:
    """Delete or damage all files of a kind."""
    pattern = draw.choice(["checkpoint.*", "memory/*", "*.json", "*.csv", "*.toml"])
    for path in folder.glob(pattern):
        path.unlink() if draw.random() < 0.5 else path.write_bytes(path.read_bytes()[:-7])
    return pattern


Damage = Callable[[Path, Path, random.Random], str]
DAMAGES: Sequence[Damage] = (
    *(flip, flip, cut, empty, delete, lengthen, letter),
    *(swap, swap_names, rename, foreign, foreign, forge, several),
)


def drawn(folder: Path, draw: random.Random) -> tuple[Path, bytes]:
    path = folder / draw.choice(sorted(everything(folder)))
    return path, path.read_bytes()


def tensors(folder: Path, draw: random.Random) -> list[Path]:
    """Checkpoints, or files of clients' memory."""
    patterns = ["checkpoint.*.safetensors", "memory/*.safetensors"]
    draw.shuffle(patterns)
    return next((sorted(files) for pattern in patterns if (files := list(folder.glob(pattern)))), [])


def check(folder: Path, whole: dict[str, Any]) -> str:
    """Resume a damaged folder: 'resumed', 'warned', 'finished' or 'refused'; anything else is a failure."""
    before, warnings, refused = everything(folder), list[str](), ""
    try:
        list(resume(folder, data=digits(), tell=warnings.append))
    except (RunError, SettingsError) as problem:
        refused = str(problem)
    if refused:
        assert len(refused.splitlines()) == 1, refused
        assert everything(folder) == before, f"changed, although it says: {refused}"
        if not finished(folder):
            return "refused"
        assert (folder / "model.safetensors").read_bytes() == whole["model"], "finished, with another model"
        return "finished"
    found = record(folder)
    assert found["model"] == whole["model"], "another model"
    assert warnings or found["rounds"] == whole["rounds"], "the record differs without a warning"
    assert finished(folder)
    return "warned" if warnings else "resumed"


def run(seed: int, count: int, folder: Path, more: dict[str, Any] = SHORT) -> Counter[str]:
    """Numbers of damaged folders that were resumed (with and without a warning), found finished, and refused."""
    draw, seen, made = random.Random(seed), Counter[str](), subjects(folder, more)
    for i in range(count):
        kind = draw.choice(sorted(made))
        subject, out = made[kind], folder / f"damaged {i}"
        part = draw.choices(subject.parts, [1, 4, 1])[0]
        shutil.copytree(part, out)
        done = []
        for _ in range(draw.choice([1, 1, 1, 2])):
            if not everything(out):
                break
            damage = draw.choice(DAMAGES)
            done.append(f"{damage.__name__} {damage(out, draw.choice(subject.others), draw)}")
        try:
            seen[check(out, subject.whole)] += 1
        except BaseException:
            print(f"seed {seed}, damage {i}: {kind}, {part.name}: {', '.join(done)}")  # noqa: T201
            raise
        shutil.rmtree(out)
    return seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        print(dict(run(arguments.seed, arguments.count, Path(place))))  # noqa: T201
