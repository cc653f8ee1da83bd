"""The site builds without a warning, is complete, and needs no network."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import keyhole
from code_blocks import ROOT

pytest.importorskip("mkdocs", reason="the site is built with the extra `docs`")


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
    import os
    import subprocess
    import sys

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


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        parser = Addresses()
        parser.feed(page.read_text())
        assert not [a for a in parser.found if re.match(r"(https?:)?//", a)], page
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(https?:)?//", sheet.read_text()), sheet


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text()
    missing = [n for n in keyhole.__all__ if not re.search(rf"\.{n}$", page, re.M) and n[0] != "_"]
    assert not missing
    assert "Recovers the model behind a box" in (site / "reference" / "api.html").read_text()
