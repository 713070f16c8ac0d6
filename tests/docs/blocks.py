"""The blocks of code in the README and in docs/, and what the comments above them say about their test.

    ```python title="mine.py"     a file of that name; without a title, Python to run
    ```bash                       commands
    ```toml                       settings; with a title, a file, too
    ```output                     what the block before it prints
    ```text                       a drawing, or figures that a machine had once

    <!-- test: slow, needs cifar10, in a copy, with --rounds 1 -->

The blocks of a page run from top to bottom in one folder, which is empty at first.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "bash", "toml", "output", "text"}
FENCE = re.compile(r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?$')
NOTE = re.compile(r"^<!-- test: (?P<words>.+) -->$")
WORDS = re.compile(r"slow|needs (gpu|cifar10)|in a copy|exits \d|only parsed, .+|in (an app, )?tests/\S+|with .+")


class Block(NamedTuple):
    page: Path
    line: int  # of its first line
    language: str
    title: str
    code: str
    note: tuple[str, ...] = ()  # what its comment says, in parts
    before: str = ""  # the text between it and the block above

    def says(self, word: str) -> str | None:
        """Text after this word in the note, '' if there is none; None if the note does not contain the word."""
        return next((part.removeprefix(word).strip() for part in self.note if part.startswith(word)), None)

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    found, above = [], ""
    number = begun = 0
    while number < len(lines):
        if opened := FENCE.match(lines[number]):
            end = lines.index("```", number + 1)
            code = "\n".join(lines[number + 1 : end]) + "\n"
            title, note = opened["title"] or "", parts(above, page, number)
            text = "\n".join(lines[begun:number])
            found.append(Block(page, number + 2, opened["language"], title, code, note, text))
            number = begun = end
        elif lines[number].lstrip().startswith("```"):
            raise ValueError(f"{page}:{number + 1}: a fence that is not understood: {lines[number]}")
        above = lines[number]
        number += 1
    return found


def parts(line: str, page: Path, number: int) -> tuple[str, ...]:
    """Those of a note; `with` and `only parsed` go to its end."""
    note = NOTE.match(line)
    words, found = note["words"] if note else "", []
    while words:
        whole = re.match(r"(?:with |only parsed,).*|in an app, \S+|[^,]+", words)
        if whole is None or not WORDS.fullmatch(whole[0]):
            raise ValueError(f"{page}:{number}: a note that is not understood: {words}")
        found.append(whole[0])
        words = words[whole.end() :].lstrip(", ")
    return tuple(found)


def indented(page: Path) -> list[int]:
    """Lines of code without a fence: nothing would run them."""
    outside, fenced, blank = [], False, True
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fenced ^= line.startswith("```")
        if not fenced and blank and line.startswith("    "):
            outside.append(number)
        blank = not line.strip()
    return outside
