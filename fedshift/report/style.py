"""The look of all figures and their files: SVG, PNG or PDF, for reports and for the paper.

Files have the same bytes whenever they are drawn, and replace nobody else's.
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
MAKER = {"svg": "Creator", "png": "Software", "pdf": "Creator"}  # where a file says what drew it
UNDATED: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "png": {}, "pdf": {"CreationDate": None}}
SHARED: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "fedshift",  # names inside a file are drawn by chance otherwise
}
# colours that people of every eyesight tell apart (Okabe and Ito), in the order in which lines get them
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


def style(text: float, axis: float, line: float, handle: float, dpi: int, more: dict[Any, Any]) -> dict[Any, Any]:
    """One look in several sizes: points of text, of axes and of lines, the length of legend handles, and others."""
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


def check(formats: Sequence[str], who: str) -> None:
    """Raise SettingsError where matplotlib is missing or a format is unknown."""
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
def styled(look: dict[Any, Any]) -> Iterator[None]:
    """Everything in here looks alike, whatever a user has set; outside of it nothing is changed."""
    import matplotlib

    defaults: dict[Any, Any] = {key: x for key, x in matplotlib.rcParamsDefault.items() if key != "backend"}
    with matplotlib.rc_context(defaults | look):
        yield


def content(figure: "Figure", kind: str, maker: str) -> bytes:
    """The file, which says in it what drew it."""
    file = io.BytesIO()
    figure.savefig(file, format=kind, metadata=UNDATED[kind] | {MAKER[kind]: f"{maker} {__version__}"})
    return file.getvalue()
