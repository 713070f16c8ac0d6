"""The page in a real browser: charts with little or no data."""

import pytest

from fedshift.report.charts import (
    Axis,
    Band,
    Chart,
    Choice,
    Curve,
    Curves,
    Heat,
    HistogramPanel,
    Histograms,
    Interval,
    Intervals,
    Panel,
    Report,
    Section,
    Stack,
    Stacks,
    Table,
)
from tests.report.conftest import Open
from tests.report.test_browser import DRAW_ALL

NAN = float("nan")
X, Y = Axis("x"), Axis("y", log=True)
STRANGE: list[Chart] = [
    Curves("none", "none", "", X, Y, []),
    Curves("empty", "empty", "", X, Y, [Panel("", [Curve("", [], [])])]),
    Curves("missing", "missing", "", X, Y, [Panel("", [Curve("", [1, 2], [None, NAN])])], level=0.5),
    Curves("zero", "zero on a logarithmic axis", "", Axis("x", log=True), Y, [Panel("", [Curve("", [0, 1], [0, 1])])]),
    Curves(
        "flat", "flat", "", X, Axis("y", "s"), [Panel("", [Curve("", [1, 2], [0, 0]), Curve("", [2], [0])])], rate=1
    ),
    Curves(
        "below", "below nothing", "", X, X, [Panel("", [Curve("", [-2, -1], [-3e9, -1e-9], [-4e9, None], [0, None])])]
    ),
    Intervals("no-rows", "no rows", "", X, []),
    Intervals(
        "no-mean", "no mean", "", X, [("", [Band("", [Interval("", NAN, None, {}), Interval("", 1, None, {3: 1})])])]
    ),
    Stacks("no-bars", "no bars", "", X, [], []),
    Stacks("nothing", "nothing sent", "", Axis("x", "B"), ["a"], [Stack("", [0])]),
    Heat("no-cells", "no cells", "", X, [], [], [], [], []),
    Heat("no-values", "no values", "", Axis("x", "%"), ["a", "b"], ["r"], [[None, None]], [""], ["", ""]),
    Heat("thousand", "a thousand labels", "", X, [str(n) for n in range(1000)], ["r"], [[1] * 1000], [""], [""] * 1000),
    Histograms("no-panels", "no panels", "", X, []),
    Histograms(
        "no-counts", "no counts", "", X, [HistogramPanel("", [0, 1], [("", [0])]), HistogramPanel("", [0, 1], [])]
    ),
]


@pytest.mark.parametrize("width", [375, 1280])
def test_charts_with_little_or_no_data_are_drawn_without_errors(open_page: Open, width: int) -> None:
    parts = [*STRANGE, Choice("of-none", "of none", []), Table("no-table", "no table", [], [])]
    page = open_page(Report("strange", "", [], [], [Section("s", "s", [], parts)]), width)
    page.evaluate(DRAW_ALL)
    assert page.locator("figure .plot > svg[aria-label]").count() == len(STRANGE)
    assert "NaN" not in page.evaluate("document.body.innerHTML")
    for plot in page.locator(".plot").all():
        plot.focus()
        for key in ("ArrowRight", "ArrowDown", "End", "+", "ArrowRight", "-"):
            page.keyboard.press(key)
    page.evaluate("document.querySelectorAll('.numbers').forEach(each => (each.open = true))")
