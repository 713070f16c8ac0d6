"""Tables of text, for terminals, Markdown and JSON."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from fedshift.core.names import printable


def titled(title: str, padding: tuple[int, int, int, int] = (0, 1, 0, 1)) -> Table:
    """An empty table with a title, in the style of all tables."""
    return Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=padding)


class Listing(NamedTuple):
    """A table of text; the first columns say what, the others are figures."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    what: int = 1  # columns that say what

    def drawn(self) -> Table:
        """The table for a terminal."""
        table = titled(self.title, padding=(0, 0, 0, 1))
        for i, name in enumerate(self.columns):
            table.add_column(name, justify="left" if i < self.what else "right", no_wrap=i >= self.what)
        for cells in self.rows:
            table.add_row(*map(printable, cells))
        return table

    def markdown(self) -> str:
        """The table in Markdown, without its title.

        >>> print(Listing("Sizes", ("codec", "bytes"), [("K-means", "7")]).markdown())
        | codec | bytes |
        |---|---:|
        | K-means | 7 |
        """
        ruler = ["---" if i < self.what else "---:" for i in range(len(self.columns))]
        lines = [self.columns, *self.rows]
        text = [f"| {' | '.join(cells)} |" for cells in lines]
        return "\n".join([text[0], f"|{'|'.join(ruler)}|", *text[1:]])

    def as_dicts(self) -> list[dict[str, str]]:
        """Rows by column name, for JSON."""
        names = [column.replace("\n", " ") for column in self.columns]
        return [dict(zip(names, row, strict=True)) for row in self.rows]
