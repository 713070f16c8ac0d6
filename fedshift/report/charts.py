"""The nouns of a report: what is said, tabled and drawn. The page and the figures on paper draw the same ones."""

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple

Numbers = Sequence[float | None]  # None where nothing was measured
Dash = Literal["", "dashed", "dotdash"]  # of a line; dots are for what a line was before


class LegendLine(NamedTuple):
    """Runs that differ in nothing but their seed: one entry of the legend, shown or hidden as a whole."""

    key: str
    label: str  # 'fedprox, 32+4 bits, shift per filter'
    settings: dict[str, str]  # those in which lines differ: what a reader may choose by
    colour: int  # of the palette
    dash: Dash  # dashed: without the shift; dotdash: per layer, beside lines per filter
    runs: list[str]


class Axis(NamedTuple):
    label: str
    unit: str = ""  # '%': a fraction, shown in percent; 'B': bytes; 's': seconds
    log: bool = False


class Curve(NamedTuple):
    line: str  # key of the line it belongs to, '' for one that is always shown
    x: Sequence[float]
    y: Numbers
    low: Numbers = ()  # of a band around it
    high: Numbers = ()
    label: str = ""  # what it is besides its line: 'before the shift'
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
    level: float | None = None  # a line across, at what is to be expected
    apart: bool = False  # each panel has an upright axis of its own: layers differ by powers of ten
    rate: float | None = None  # x is seconds at so many bytes a second; a reader may choose another


class Interval(NamedTuple):
    line: str
    mean: float
    spread: float | None  # the standard deviation over seeds
    seeds: dict[int, float]


class Band(NamedTuple):
    """A row of intervals that are to be compared."""

    label: str
    intervals: list[Interval]


class Intervals(NamedTuple):
    name: str
    title: str
    caption: str
    x: Axis
    bands: list[tuple[str, list[Band]]]  # under headings
    lower: bool = False  # whether lower values are better


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
    """Lines as single points, and the front of those that no other beats in both directions."""

    name: str
    title: str
    caption: str
    x: Axis
    y: Axis
    fields: list[Field]
    lower: bool = False  # whether lower values of y are better


class Stack(NamedTuple):
    line: str
    values: Sequence[float]  # one for each part


class Stacks(NamedTuple):
    """A bar for each line, made of parts."""

    name: str
    title: str
    caption: str
    x: Axis
    parts: list[str]
    stacks: list[Stack]


class Heat(NamedTuple):
    """A field of values: rows from the top, columns from the left."""

    name: str
    title: str
    caption: str
    value: Axis
    columns: list[str]
    rows: list[str]
    values: list[Numbers]
    lines: list[str]  # the line that each row belongs to, or ''
    marks: list[str]  # a word for each column, such as the group a label belongs to, or ''


class HistogramPanel(NamedTuple):
    """Histograms with bins in common: the first one filled, others as outlines."""

    title: str
    edges: Sequence[float]  # one more than counts
    counts: list[tuple[str, Sequence[float]]]  # each with what it is: 'before the quantizer'


class Histograms(NamedTuple):
    name: str
    title: str
    caption: str
    x: Axis
    panels: list[HistogramPanel]


Chart = Curves | Intervals | Points | Stacks | Heat | Histograms


class Choice(NamedTuple):
    """Charts of the same kind, of which a reader looks at one."""

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
    folded: bool = False  # only its title is shown until it is asked for
    caption: str = ""


class Section(NamedTuple):
    name: str
    title: str  # a question
    answer: list[str]  # sentences
    parts: list[Table | Chart | Choice]


class Report(NamedTuple):
    title: str
    about: str  # '9 runs of 150 rounds, seeds 0, 1, 2'
    warnings: list[str]  # what is unfinished, broken or damaged
    lines: list[LegendLine]
    sections: list[Section]


def to_json(value: Any, number: Callable[[Any], Any] = lambda value: value) -> Any:
    """The nouns of a report as JSON has them, charts, choices and tables with their kind; `number` changes numbers.

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
