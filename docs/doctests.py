"""Examples of docstrings as code: without a fence around it, Markdown takes >>> for a quotation."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^>>> .*\n(?:.+(?:\n|\Z))*)+", re.MULTILINE)  # up to the next blank line


def fenced(text: str) -> str:
    return EXAMPLE.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", f"{text}\n")


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
