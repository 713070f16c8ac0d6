"""A report's lines and charts as JSON that can stand inside a page, in few bytes."""

import json
import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

from fedshift.report.charts import Chart, Curves, Line

DIGITS = 6  # significant ones: more than any chart can show
ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def embedded(lines: Sequence[Line], charts: Sequence[Chart]) -> str:
    """No text of a user's can end the script element, or begin a comment in it."""
    shared: dict[tuple[float, ...], int] = {}
    drawn = [_chart(chart, shared) for chart in charts]
    whole = {"lines": plain(lines), "charts": drawn, "shared": [list(x) for x in shared]}
    text = json.dumps(whole, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character, escape in ESCAPES.items():
        text = text.replace(character, escape)
    return text.encode("utf-8", "backslashreplace").decode()  # half a surrogate, as in a name that is no UTF-8


def plain(noun: Any) -> Any:
    """
    >>> plain([1 / 3, float("nan"), 5.0, 1e300, True, {"a": (None, "b")}])
    [0.333333, None, 5, 1e+300, True, {'a': [None, 'b']}]
    """
    if noun is None or isinstance(noun, str | bool):
        return noun
    if isinstance(noun, Integral):
        return int(noun)
    if isinstance(noun, Real):
        return _rounded(float(noun))
    if hasattr(noun, "_asdict"):
        return {name: plain(value) for name, value in noun._asdict().items()}
    if isinstance(noun, dict):
        return {str(name): plain(value) for name, value in noun.items()}
    return [plain(value) for value in noun]


def _rounded(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None  # as where nothing was measured
    if value.is_integer() and abs(value) < 2**53:
        return int(value)
    return float(f"{value:.{DIGITS}g}")


def _chart(chart: Chart, shared: dict[tuple[float, ...], int]) -> dict[str, Any]:
    """Many curves have the same x: those are told once, and curves name their place."""
    whole: dict[str, Any] = {"kind": type(chart).__name__, **plain(chart)}
    if isinstance(chart, Curves):
        for panel in whole["panels"]:
            panel["curves"] = [_curve(curve, shared) for curve in panel["curves"]]
    return whole


def _curve(curve: dict[str, Any], shared: dict[tuple[float, ...], int]) -> dict[str, Any]:
    said = {name: value for name, value in curve.items() if value}
    return {"line": "", "label": "", "y": [], **said, "x": shared.setdefault(tuple(curve["x"]), len(shared))}
