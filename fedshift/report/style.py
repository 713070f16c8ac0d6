"""Style and files of figures (SVG, PNG or PDF) for reports and for the paper.

Files are reproducible to the byte, and only files of the same maker are overwritten.
"""

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
MAKER = {"svg": "Creator", "png": "Software", "pdf": "Creator"}  # metadata key for the name of the program
UNDATED: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "png": {}, "pdf": {"CreationDate": None}}
SHARED: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "fedshift",  # ids inside a file are random otherwise
}
# colours that are distinct also for colour-blind readers (Okabe and Ito), in the order of lines
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


def style(text: float, axis: float, line: float, handle: float, dpi: int, more: dict[Any, Any]) -> dict[Any, Any]:
    """Common style with these sizes: points of text, axes and lines, length of legend handles, and `more` settings."""
    sizes = dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), text)
    widths = dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width"), axis)
    lines = {"lines.linewidth": line, "legend.handlelength": handle, "savefig.dpi": dpi}
    return SHARED | sizes | widths | lines | more


SMALL = 6.5  # points of the smaller text of a two-column page
REPORT = style(
    text=8,
    axis=0.6,
    line=1.2,
    handle=2.4,
    dpi=200,
    more={
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#dddddd",
        "grid.linewidth": 0.5,
        "figure.titlesize": 9,
        "svg.fonttype": "none",  # text stays text
        "pdf.fonttype": 42,
    },
)
PAPER = style(
    text=7.5,
    axis=0.5,
    line=1.0,
    handle=1.6,
    dpi=300,
    more={
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), SMALL),
        **dict.fromkeys(("xtick.minor.width", "ytick.minor.width"), 0.4),
        **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 2.5),
        **dict.fromkeys(("xtick.minor.size", "ytick.minor.size"), 1.5),
        "axes.titlelocation": "left",
        "patch.linewidth": 0.5,
        "mathtext.fontset": "dejavusans",
    },
)


def check(formats: Sequence[str], option: str) -> None:
    """Raise SettingsError where matplotlib is missing or a format is unknown."""
    if find_spec("matplotlib") is None:
        raise SettingsError(f"{option} {needs('matplotlib')}")
    for form in formats:
        if form not in FORMATS:
            raise SettingsError(f"--format {form}: must be among {', '.join(FORMATS)}")


def check_places(paths: Iterable[Path], maker: str, option: str) -> None:
    """Raise RunError if a path exists and was not written by the same maker."""
    for path in paths:
        try:
            ours = not path.exists() or maker.encode() in path.read_bytes()
        except OSError as problem:
            raise RunError(f"{path}: cannot be read: {problem.strerror}") from None
        if not ours:
            raise RunError(f"{path}: already exists and was not drawn by {maker}; choose another {option}")


@contextmanager
def styled(look: dict[Any, Any]) -> Iterator[None]:
    """Context in which matplotlib uses this style instead of the user's settings."""
    import matplotlib

    defaults: dict[Any, Any] = {key: x for key, x in matplotlib.rcParamsDefault.items() if key != "backend"}
    with matplotlib.rc_context(defaults | look):
        yield


def content(figure: "Figure", kind: str, maker: str) -> bytes:
    """Content of the file; its metadata name the maker."""
    file = io.BytesIO()
    figure.savefig(file, format=kind, metadata=UNDATED[kind] | {MAKER[kind]: f"{maker} {__version__}"})
    return file.getvalue()
