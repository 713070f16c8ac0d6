"""Contents of a report: sentences, tables and charts, from which both the HTML page and the figure files are made."""

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple

Numbers = Sequence[float | None]  # None: not measured
Dash = Literal["", "dashed", "dotdash"]  # of a line; dots mark its second curve, such as the values before the shift


class LegendLine(NamedTuple):
    """Runs that differ only in their seed: one entry of the legend, shown or hidden as a whole."""

    key: str
    label: str  # 'fedprox, 32+4 bits, shift per filter'
    settings: dict[str, str]  # those in which lines differ, by which a reader selects lines
    colour: int  # of the palette
    dash: Dash  # dashed: without the shift; dotdash: per layer, if there are lines per filter
    runs: list[str]


class Axis(NamedTuple):
    label: str
    unit: str = ""  # '%': a fraction, shown in percent; 'B': bytes; 's': seconds
    log: bool = False


class Curve(NamedTuple):
    line: str  # key of the line it belongs to, '' for one that is always shown
    x: Sequence[float]
    y: Numbers
    low: Numbers = ()  # limits of a band around it
    high: Numbers = ()
    label: str = ""  # in addition to its line: 'before the shift'
    dashed: bool = False


class Panel(NamedTuple):
    """One of several drawings side by side."""

    title: str
    curves: list[Curve]


class Curves(NamedTuple):
    name: str
    title: str
    caption: str
    x: Axis
    y: Axis
    panels: list[Panel]
    level: float | None = None  # horizontal line at the expected value
    apart: bool = False  # each panel has its own y axis: layers differ by powers of ten
    rate: float | None = None  # if x is seconds: bytes per second, which a reader may change


class Interval(NamedTuple):
    line: str
    mean: float
    spread: float | None  # the standard deviation over seeds
    seeds: dict[int, float]


class Band(NamedTuple):
    """A row of intervals to be compared."""

    label: str
    intervals: list[Interval]


class Intervals(NamedTuple):
    name: str
    title: str
    caption: str
    x: Axis
    bands: list[tuple[str, list[Band]]]  # under headings
    lower: bool = False  # lower values are better


class Point(NamedTuple):
    line: str
    x: float
    y: float
    spread: float | None  # of y, the standard deviation over seeds
    front: bool  # Pareto-optimal: no other point has both a smaller x and a better y


class Field(NamedTuple):
    """Points to be compared with one another."""

    title: str
    points: list[Point]


class Points(NamedTuple):
    """Lines as single points, and the Pareto front."""

    name: str
    title: str
    caption: str
    x: Axis
    y: Axis
    fields: list[Field]
    lower: bool = False  # lower values of y are better


class Stack(NamedTuple):
    line: str
    values: Sequence[float]  # one per part


class Stacks(NamedTuple):
    """One stacked bar per line."""

    name: str
    title: str
    caption: str
    x: Axis
    parts: list[str]
    stacks: list[Stack]


class Heat(NamedTuple):
    """Heat map: rows from the top, columns from the left."""

    name: str
    title: str
    caption: str
    value: Axis
    columns: list[str]
    rows: list[str]
    values: list[Numbers]
    lines: list[str]  # line of each row, or ''
    marks: list[str]  # mark of each column, such as 'superior', or ''


class HistogramPanel(NamedTuple):
    """Histograms with common bins: the first one filled, others as outlines."""

    title: str
    edges: Sequence[float]  # one more than counts
    counts: list[tuple[str, Sequence[float]]]  # with labels: 'before the quantizer'


class Histograms(NamedTuple):
    name: str
    title: str
    caption: str
    x: Axis
    panels: list[HistogramPanel]


Chart = Curves | Intervals | Points | Stacks | Heat | Histograms


class Choice(NamedTuple):
    """Charts of the same kind, from which a reader selects one."""

    name: str
    title: str
    of: list[tuple[str, Chart]]


class TableRow(NamedTuple):
    line: str  # or ''
    cells: list[str]


class Table(NamedTuple):
    name: str
    title: str
    columns: list[str]
    rows: list[TableRow]
    folded: bool = False  # initially only its title is shown
    caption: str = ""


class Section(NamedTuple):
    name: str
    title: str  # a question
    answer: list[str]  # sentences
    parts: list[Table | Chart | Choice]


class Report(NamedTuple):
    title: str
    about: str  # '9 runs of 150 rounds, seeds 0, 1, 2'
    warnings: list[str]  # on runs that are unfinished, broken or damaged
    lines: list[LegendLine]
    sections: list[Section]


def to_json(value: Any, number: Callable[[Any], Any] = lambda value: value) -> Any:
    """Contents of a report as JSON values; charts, choices and tables have a "kind". `number` converts numbers.

    >>> to_json([0.5, True, {"a": (None, Axis("sent", "B"))}], round)
    [0, True, {'a': [None, {'label': 'sent', 'unit': 'B', 'log': False}]}]
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Real):
        return number(value)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        kind = {"kind": type(value).__name__} if isinstance(value, Chart | Choice | Table) else {}
        return kind | {name: to_json(part, number) for name, part in value._asdict().items()}
    if isinstance(value, dict):
        return {str(name): to_json(part, number) for name, part in value.items()}
    return [to_json(part, number) for part in value]
