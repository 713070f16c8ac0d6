"""A real browser, which opens pages of invented reports from a disk."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedshift.report.charts import Report
from fedshift.report.page import render

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The Chromium of the system; nothing is downloaded."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium on the path")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Open a report; its page must cause no errors and no requests."""
    contexts: list[Any] = []
    problems: list[str] = []
    asked: list[str] = []

    file = tmp_path / "report.html"

    def opens(report: Report, width: int = 1280, **options: Any) -> Any:
        file.write_text(render(report), "utf-8")
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)  # milliseconds: for a busy machine
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        return page

    yield opens
    for context in contexts:
        context.close()
    assert problems == []
    assert set(asked) == {file.as_uri()}
