"""Untrusted text is escaped before it reaches a terminal."""

import io
import os
import pty
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from fedshift.core.files import RunError
from fedshift.core.names import named, printable
from fedshift.data.catalog import DataError
from fedshift.experiment.build import build
from fedshift.experiment.settings import Experiment
from fedshift.experiment.toml import SettingsError
from fedshift.rounds.engine import Job, Upload, describe
from fedshift.rounds.loop import OpenRound, Ram
from fedshift.runs.progress import Bars, Json, LineDisplay, Silent, strict_json
from fedshift.track.loading import sentence
from tests.runs import COMMAND, SMALL, digits, fedshift, file_of, small

HOSTILE = "\x1b]0;owned\x07\x1b[2J\r\x08\x7f\x9b31m\u202ered\u2066\u2028x\udc80[red]:bomb:"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x0d\x08\x7f\x9b31m\u202ered\u2066\u2028x\udc80[red]:bomb:"


def test_control_characters_are_escaped_and_other_text_is_unchanged() -> None:
    controls = [*range(0x20), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A), 0xD800, 0xDFFF]
    for code in controls:
        assert printable(f"a{chr(code)}b") == (f"a\\x{code:02x}b" if code < 256 else f"a\\u{code:04x}b")
    for text in ("", "plain [bold] text", "größe 大小 حجم 👩‍🔬 a\xa0b\\x1b", "é" * 1000):
        assert printable(text) == text
    assert printable(HOSTILE) == printable(printable(HOSTILE)) == SHOWN
    assert printable("a\nb\tc\r", keep="\n\t") == "a\nb\tc\\x0d"


@pytest.mark.parametrize("kind", [SettingsError, DataError, RunError])
def test_errors_contain_no_control_characters(kind: type[Exception]) -> None:
    assert str(kind(f"{HOSTILE}: is wrong")) == f"{SHOWN}: is wrong"


def test_errors_of_user_code_are_reported_as_printable_text() -> None:
    for text in (describe(ValueError(HOSTILE)), sentence(OSError(HOSTILE))):
        assert text == printable(text)
        assert r"\x1b]0;owned\x07" in text


def test_failures_of_clients_are_recorded_as_printable_text() -> None:
    fed = build(small(), data=digits())
    opened = OpenRound(fed, fed.start(), Ram())
    assert isinstance(opened.job, Job)
    failures = [Upload(client, b"", b"", {}, [], 0.0, (0.0, 0.0), HOSTILE) for client in opened.job.clients]
    opened.take(failures)
    _, outcome = opened.end(None)
    assert set(outcome.failed.values()) == {SHOWN}


@pytest.mark.parametrize("terminal", [False, True])
def test_displays_show_hostile_text_escaped_and_without_markup(terminal: bool) -> None:
    displays: dict[type[Silent], Callable[[Console, Console, Callable[[str], None]], Silent]] = {
        Silent: lambda errors, console, write: Silent(errors),
        LineDisplay: lambda errors, console, write: LineDisplay(errors, console),
        Bars: lambda errors, console, write: Bars(errors, console),
        Json: lambda errors, console, write: Json(errors, write),
    }
    for kind, made in displays.items():
        shown, errors, lines = io.StringIO(), io.StringIO(), list[str]()
        to = Console(file=errors, width=500), Console(file=shown, width=500, force_terminal=terminal, color_system=None)
        display = made(*to, lines.append)
        with display:
            run = display.add(HOSTILE, 1, Path())
            display.round(run, 1, 0.5, 0.1, 10)
            display.tell(HOSTILE)
            display.failed(run, HOSTILE)
        text = shown.getvalue() + errors.getvalue() + "".join(lines)
        assert SHOWN in text, kind
        ours = ("\x1b[?25l", "\x1b[?25h", "\x1b[2K", "\x1b[1A", "\r")  # a bar is redrawn in its place
        for code in ours if kind is Bars and terminal else ():
            text = text.replace(code, "")
        assert printable(text, keep="\n") == text, kind


def test_json_escapes_delete_too() -> None:
    assert strict_json({"name": "a\x7f\x1b\x9b"}) == r'{"name": "a\u007f\u001b\u009b"}'


def terminal(*arguments: str | Path) -> str:
    """Output of a command on a terminal of 1000 columns without colours."""
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "dumb", "COLUMNS": "1000", "NO_COLOR": "1"}
    with subprocess.Popen(
        [COMMAND, *map(str, arguments)], stdin=slave, stdout=slave, stderr=slave, env=environment
    ) as process:
        os.close(slave)
        written = b""
        while True:
            try:
                piece = os.read(master, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            written += piece
        process.wait()
    os.close(master)
    return written.decode().replace("\r\n", "\n")


def test_no_control_character_of_settings_or_files_reaches_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDSHIFT_DATA", str(tmp_path / "data"))
    name = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e[red]"
    inside = name.replace("\x1b", r"\u001b").replace("\x07", r"\u0007").replace("\x9b", r"\u009b")
    folder = tmp_path / f"{name}\r"
    folder.mkdir()
    (folder / "key.toml").write_text(f'[train]\n"{inside}" = 1\n')
    (folder / "value.toml").write_text(f'[model]\nname = "{inside}"\n')
    (folder / "data.toml").write_text(f'[data]\nname = "{inside}:{inside}"\n')
    (folder / "name.toml").write_text(f'name = "{inside}"\n')
    experiment = Experiment(**SMALL | {"name": "\x9b31m\u202e[red]", "train": SMALL["train"] | {"rounds": 1}})
    file_of(folder / "good.toml", experiment)
    written = [
        fedshift("run", folder / "key.toml"),
        fedshift("run", folder / "value.toml"),
        fedshift("run", folder / "data.toml"),
        fedshift("run", folder / "name.toml"),
        fedshift("run", folder / "no.toml"),
        fedshift("resume", folder),
        fedshift("data", name),
        fedshift("data", "cifar10", "--from", folder),
        fedshift("run", folder / "good.toml", "--out", folder / "piped"),
        fedshift("run", folder / "good.toml", "--out", folder / "piped"),
        fedshift("report", folder / "piped"),
    ]
    for shown in [*(done.output for done in written), terminal("run", folder / "good.toml", "--out", folder / "out")]:
        assert printable(shown, keep="\n\t") == shown
        assert r"\x1b]0;owned" in shown
        assert "[red]" in shown


def test_a_similar_function_of_a_module_is_suggested_wherever_it_is() -> None:
    with pytest.raises(ValueError, match=r"no function 'RMSProp' in torch\.optim; did you mean 'RMSprop'"):
        named("torch.optim:RMSProp")
