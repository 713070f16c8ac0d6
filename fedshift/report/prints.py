"""Figures as files for a paper: SVG, PNG or PDF, the same bytes whenever they are drawn, and over nobody else's."""

import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedshift import __version__
from fedshift.core.extras import needs
from fedshift.core.files import RunError
from fedshift.experiment.toml import SettingsError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("svg", "png", "pdf")
MAKER = {"svg": "Creator", "png": "Software", "pdf": "Creator"}  # where a file says what drew it
UNDATED: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "png": {}, "pdf": {"CreationDate": None}}
SHARED: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "fedshift",  # names inside a file are drawn by chance otherwise
}


def check(formats: Sequence[str], who: str) -> None:
    """What is needed to draw is there, and these are formats."""
    if find_spec("matplotlib") is None:
        raise SettingsError(f"{who} {needs('matplotlib')}")
    for form in formats:
        if form not in FORMATS:
            raise SettingsError(f"--format {form}: must be among {', '.join(FORMATS)}")


def check_places(paths: Iterable[Path], maker: str, option: str) -> None:
    """Only files of the same maker are written over."""
    for path in paths:
        try:
            ours = not path.exists() or maker.encode() in path.read_bytes()
        except OSError as problem:
            raise RunError(f"{path}: cannot be read: {problem.strerror}") from None
        if not ours:
            raise RunError(f"{path}: is there already and was not drawn by {maker}; choose another {option}")


@contextmanager
def styled(style: dict[Any, Any]) -> Iterator[None]:
    """Everything in here looks alike, whatever a user has set; outside of it nothing is changed."""
    import matplotlib

    defaults: dict[Any, Any] = {key: x for key, x in matplotlib.rcParamsDefault.items() if key != "backend"}
    with matplotlib.rc_context(defaults | SHARED | style):
        yield


def content(figure: "Figure", kind: str, maker: str) -> bytes:
    """The file, which says in it what drew it."""
    file = io.BytesIO()
    figure.savefig(file, format=kind, metadata=UNDATED[kind] | {MAKER[kind]: f"{maker} {__version__}"})
    return file.getvalue()
