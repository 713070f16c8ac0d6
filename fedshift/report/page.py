"""One HTML file that shows a report: opened from a disk, it asks nobody for anything."""

import base64
import hashlib
from html import escape
from importlib.resources import files
from string import Template

from fedshift import __version__
from fedshift.report.charts import Report
from fedshift.report.embedded import embedded
from fedshift.report.markup import Markup

STYLES = ["page.css", "legend.css", "charts.css"]
SCRIPTS = [  # in this order, as one script
    "base.js",
    "units.js",
    "scales.js",
    "lines.js",
    "legend.js",
    "tables.js",
    "tip.js",
    "frame.js",
    "paths.js",
    "seen.js",
    "ends.js",
    "curves.js",
    "readout.js",
    "zoom.js",
    "intervals.js",
    "points.js",
    "stacks.js",
    "heat.js",
    "histograms.js",
    "spots.js",
    "numbers.js",
    "figure.js",
    "start.js",
]


def render(report: Report) -> str:
    """The whole page. Its own style and script are allowed by their hashes, and no other is."""
    markup = Markup(report)
    style = "\n".join(map(_part, STYLES))
    script = '"use strict";\n(() => {\n' + "\n".join(map(_part, SCRIPTS)) + "})();\n"
    return Template(_part("page.html")).substitute(
        version=escape(__version__),
        title=escape(report.title),
        about=escape(report.about),
        warnings=markup.warnings(),
        contents=markup.contents(),
        legend=markup.legend(),
        sections=markup.sections(),
        data=embedded(report.lines, markup.charts),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
    )


def _part(name: str) -> str:
    return (files("fedshift.report") / "web" / name).read_text("utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
