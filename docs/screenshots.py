"""The README's pictures, from the version that is installed: `make screenshots`.

The demo runs in a pseudo-terminal as a user would see it; the last screen becomes terminal.svg, and its report,
opened in Chromium, report.png and report-dark.png.
"""

import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import termios
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

IMAGES = Path(__file__).parent / "images"
FEDSHIFT = str(Path(sys.executable).with_name("fedshift"))
WIDTH, HEIGHT, PAGE = 100, 40, (1200, 1400)  # of the terminal in characters, and of the page in pixels
TITLE = "Digits: lean uplinks beside full precision and the paper"
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"  # the reader's own


def seen(command: list[str], cwd: Path) -> str:
    """All that a command writes to a terminal of this size."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    env = os.environ | {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    process = subprocess.Popen(command, cwd=cwd, env=env, stdin=its, stdout=its, stderr=its, close_fds=True)
    os.close(its)
    chunks = []
    while chunk := _read(ours):
        chunks.append(chunk)
    os.close(ours)
    if code := process.wait():
        raise SystemExit(f"{' '.join(command)}: ended with {code}")
    return b"".join(chunks).decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the other end is closed
        return b""


def last_screen(written: str) -> str:
    """The bars as they were drawn last, and what came after them: to draw them again, each line is erased first."""
    return re.sub(r"\x1b\[\?25[hl]|\r", "", written.rpartition("\x1b[2K")[2])


def terminal(written: str, to: Path) -> None:
    console = Console(record=True, width=WIDTH, file=StringIO())
    console.print(Text.from_ansi(f"$ fedshift run\n{last_screen(written)}".rstrip()))
    drawn = console.export_svg(title="fedshift run", theme=MONOKAI, unique_id="demo")
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)  # which would come from another address
    to.write_text(drawn.replace("Fira Code, monospace", FONT).replace("Fira Code", FONT), encoding="utf-8")


def report(page: Path) -> None:
    with sync_playwright() as play:
        found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        browser = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        for scheme, name in (("light", "report.png"), ("dark", "report-dark.png")):
            size = {"width": PAGE[0], "height": PAGE[1]}
            tab = browser.new_page(viewport=size, color_scheme=scheme, device_scale_factor=1.5)
            tab.goto(page.as_uri())
            tab.wait_for_load_state("networkidle")
            tab.screenshot(path=IMAGES / name)
        browser.close()


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder:
        written = seen([FEDSHIFT, "run", "--out", "demo", *sys.argv[1:]], Path(folder))
        terminal(written, IMAGES / "terminal.svg")
        subprocess.run([FEDSHIFT, "report", "demo", "--title", TITLE], cwd=folder, check=True)
        report(Path(folder) / "demo" / "report.html")


if __name__ == "__main__":
    main()
