"""The site is built without a warning, from nothing but what is here, and all its links lead somewhere."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[1]
LOADED = {"script": "src", "img": "src", "link": "href", "source": "srcset", "iframe": "src"}
ADDRESS = re.compile(r"""(?:url\(|@import\s+)["']?(?:https?:)?//""")  # in a style
OUTSIDE = re.compile(r"""(?:src|href|srcset)=["'](?:https?:)?//|url\(["']?(?:https?:)?//""")  # in a picture


class Page(HTMLParser):
    """Files that a page loads, its links, and the places that can be linked to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places = {""}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        said = {name: value or "" for name, value in attrs}
        if tag in LOADED and said.get("rel") != "canonical":
            self.loads.append(said.get(LOADED[tag], ""))
        elif tag == "a" and "href" in said:
            self.links.append(said["href"])
        self.places |= {said[key] for key in ("id", "name") if key in said}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs")
    out = tmp_path_factory.mktemp("site")
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}


def test_nothing_is_loaded_from_another_address(site: Path, pages: dict[Path, Page]) -> None:
    assert len(pages) > 20
    for path, page in pages.items():
        assert page.loads
        assert not [url for url in page.loads if urlsplit(url).netloc], path
    for path in site.rglob("*.css"):
        assert not ADDRESS.search(path.read_text(encoding="utf-8")), path
    for path in site.rglob("*.svg"):
        assert not OUTSIDE.search(path.read_text(encoding="utf-8")), path


def inside(path: Path, urls: list[str]) -> Iterator[tuple[Path, str]]:
    """Files of the site that a page speaks of, and places in them."""
    for url in urls:
        parts = urlsplit(url)
        if not parts.scheme and not parts.netloc and not parts.path.startswith("/"):
            yield ((path.parent / unquote(parts.path)).resolve() if parts.path else path), unquote(parts.fragment)


def test_every_link_leads_somewhere(pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        if path.name == "404.html":  # whose addresses begin at the root of a server
            continue
        for target, place in inside(path, page.links):
            assert target.is_file(), f"{path}: {target}"
            if target in pages:
                assert place in pages[target].places | {"__skip"}, f"{path}: {target}#{place}"
        for target, _ in inside(path, page.loads):
            assert target.is_file(), f"{path}: {target}"


def test_links_of_the_readme_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text) + re.findall(r'(?:src|srcset)="([^"]+)"', text)
    assert len(links) > 20
    for link in links:
        assert (ROOT / link).exists(), link


def test_examples_stand_in_the_reference_as_code(site: Path) -> None:
    text = (site / "reference" / "frames.html").read_text(encoding="utf-8")
    assert text.count('<code><span class="gp">&gt;&gt;&gt; </span>') >= 5
    assert "<blockquote>" not in text
