"""The site builds without a warning, is complete, and needs no network."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import keyhole
from code_blocks import ROOT

NAMES = (os.environ.get("KEYHOLE_BROWSER", "chromium"), "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
pytest.importorskip("material", reason="the site is built with the extra `docs`")


class Addresses(HTMLParser):
    """Everything that a browser would fetch by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        known = dict(attributes)
        fetched = {"script": "src", "img": "src", "iframe": "src", "link": "href"}.get(tag)
        if fetched and known.get("rel") not in ("canonical", "edit") and known.get(fetched):
            self.found.append(str(known[fetched]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_there_and_in_the_menu(site: Path) -> None:
    home = (site / "index.html").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        address = page.relative_to(ROOT / "docs").with_suffix(".html").as_posix()
        assert (site / address).exists()
        assert f'href="{address}"' in home or address == "index.html"


def test_lists_and_tables_are_not_left_as_text(site: Path) -> None:
    """Where the line above is no empty one, Markdown takes them for the rest of a paragraph."""
    left = re.compile(r"<p>(?:(?!</p>).)*\n(?:- |\| |\d\. )(?:(?!</p>).)*</p>", re.DOTALL)
    for page in site.rglob("*.html"):
        found = left.search(page.read_text())
        assert found is None, f"{page.name}: {found[0][:200]}"


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        parser = Addresses()
        parser.feed(page.read_text())
        assert not [a for a in parser.found if re.match(r"(https?:)?//", a)], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(https?:)?//", sheet.read_text()), sheet


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: set KEYHOLE_BROWSER")
def test_site_is_read_from_the_disk_without_a_network(site: Path) -> None:
    """Formulas are typeset, the search finds, and no page is wider than a telephone."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra `test`")
    failed: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        narrow = {"width": 390, "height": 800}
        page = browser.new_context(viewport=narrow, offline=True, color_scheme="dark").new_page()

        def note(request: Any) -> None:
            if request.failure != "net::ERR_ABORTED":  # left behind when the next page was opened
                failed.append(request.url)

        page.on("requestfailed", note)
        page.on("pageerror", lambda error: failed.append(str(error)))
        for name in ("index", "methods/single_head", "guide/choosing", "reference/api"):
            page.goto((site / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), name
        page.goto((site / "methods" / "single_head.html").as_uri())
        page.wait_for_selector(".katex-display .katex-html")
        page.set_viewport_size({"width": 1400, "height": 900})
        page.keyboard.press("/")
        page.keyboard.type("breakpoint")
        page.wait_for_selector(".md-search-result__item a")
        browser.close()
    assert not failed


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    missing = [n for n in keyhole.__all__ if not re.search(rf"\.{n}$", page, re.M) and n[0] != "_"]
    assert not missing
    assert "Recovers the model behind a box" in (site / "reference" / "api.html").read_text()
