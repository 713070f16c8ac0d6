"""The README's Python runs and prints what its comments say."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS)
def test_an_example_prints_what_it_says(
    code: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(code, {"__name__": "__main__"})
    printed = capsys.readouterr().out.splitlines()
    said = [line.strip() for line in re.findall(r"print\(.*# ([\d. ]+)", code)]
    assert printed
    assert [line for line in printed if line in said] == said
    if "run(" in code:
        assert (tmp_path / "runs" / "mine" / "model.safetensors").exists()
        assert float(printed[-1].split()[2].rstrip(",")) > 0.6
