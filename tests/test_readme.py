"""The README's Python runs and prints what its comments say."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_the_example_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(code, {})
    printed = capsys.readouterr().out.splitlines()
    said = re.findall(r"print\(.*# ([\d. ]+)", code)
    assert [line.strip() for line in said] == printed
