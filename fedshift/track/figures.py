"""Values of a round: the cells of its line in the record, with slashes in their names, by which dashboards group them.

test/accuracy  test/loss  predicted/3  uplink/error  uplink/share  clients/arrived  seconds/train
bytes/codes  bytes/up  bytes/up_total  bytes/down  bytes/down_total  layers/step/fc1.weight
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fedshift.runs.columns import LAYER
from fedshift.runs.sheet import PARTS, cells, whole_lines

GROUPS = {"accuracy": "test", "loss": "test", "metric": "test", "error": "uplink", "share": "uplink"}
GROUPS |= dict.fromkeys(("arrived", "dropped", "failed"), "clients")
LONGEST = 240  # characters of a name; MLflow allows 250


def name(column: str) -> str:
    """
    >>> name("accuracy"), name("metric.auc"), name("bytes.down"), name("step.fc1.weight")
    ('test/accuracy', 'test/metric.auc', 'bytes/down', 'layers/step/fc1.weight')
    """
    first, dot, rest = column.partition(".")
    rest = rest.replace("/", "-")
    if first in LAYER:
        return f"layers/{first}/{rest}"
    return f"{GROUPS[first]}/{first}{dot}{rest}" if first in GROUPS else f"{first}{'/' if dot else ''}{rest}"


def legal(names: Iterable[str]) -> list[str]:
    """Names that all trackers allow and that remain distinct.

    >>> legal(["layers/step/a:b", "layers/step/a;b"])
    ['layers/step/a-b', 'layers/step/a-b-']
    """
    found: list[str] = []
    for name in names:
        plain = re.sub(r"[^\w./ -]", "-", name, flags=re.ASCII)[:LONGEST]
        while plain in found:
            plain += "-"
        found.append(plain)
    return found


class Figures:
    """Reader of a growing record: rounds with their values, and bytes since the first round."""

    def __init__(self, rounds: Path) -> None:
        self.path, self.offset = rounds, 0
        self.names: list[str] = []
        self.up = self.down = 0.0

    def new(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Rounds recorded since the last call; damaged lines are left out."""
        with open(self.path, "rb") as file:
            file.seek(self.offset)
            whole, end, _ = file.read().rpartition(b"\n")
        self.offset += len(whole + end)
        lines = whole.split(b"\n") if end else []
        if lines and not self.names:
            self.names = legal(map(name, cells(lines.pop(0).decode())))
        for line in whole_lines(lines, len(self.names)):
            yield int(line[0]), self._of(line)

    def _of(self, line: Sequence[str]) -> dict[str, float]:
        texts = dict(zip(self.names, line, strict=True))
        del texts["round"]
        texts["clients/failed"] = str(len(texts["clients/failed"].split()))  # the record lists client numbers
        figures = {key: float(cell) for key, cell in texts.items() if cell}  # empty: not measured
        up = sum(figures[name(part)] for part in PARTS)
        self.up, self.down = self.up + up, self.down + figures["bytes/down"]
        return figures | {"bytes/up": up, "bytes/up_total": self.up, "bytes/down_total": self.down}
