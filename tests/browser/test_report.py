"""The report in a real browser: drawn, silent, alone, and usable without a mouse or eyes."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import recoveries
from keyhole.report.html import write_report
from recoveries import recovery

playwright = pytest.importorskip(
    "playwright.sync_api",
    reason="the browser tests need playwright: pip install 'keyhole-ml[test]'",
)

NAMES = (os.environ.get("KEYHOLE_BROWSER", "chromium"), "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: apt-get install chromium, or set KEYHOLE_BROWSER"
)
# no sandbox: it is not available to root; the rest keeps the browser from calling home
QUIET = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
KINDS = (
    "one head",
    "low rank",
    "several heads",
    "network",
    "transformer",
    "labels",
    "rejected",
    "budget",
    "not identifiable",
    "wide",
    "wider",
)
FIELD = "[data-map='map-1-1']"
VALUE = "#map-1-1-value"

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield running
        running.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens the report of a kind of recovery; complains at the end about noise and requests."""
    contexts, noise, requests = [], [], []

    def open_report(kind: str, width: int = 1400, scheme: str = "light", **options: Any) -> Any:
        path = write_report(recovery(kind), tmp_path / "report.html")
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, **options
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(120_000)  # the machine may be busy
        page.on("console", lambda message: noise.append(message.text))
        page.on("pageerror", lambda error: noise.append(str(error)))
        page.on("dialog", lambda dialog: (noise.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        return page

    yield open_report
    for context in contexts:
        context.close()
    assert noise == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_drawn(kind: str, opened: Open) -> None:
    page = opened(kind)
    assert page.locator("h1").count() == 1
    fields = page.locator("[data-map]")
    assert (fields.count() > 0) == (recovery(kind).model is not None)
    for canvas in page.locator("[data-map] canvas").all():
        assert canvas.evaluate(
            "c => new Set(c.getContext('2d').getImageData(0, 0, c.width, c.height).data).size > 3"
        )


def test_colours_tell_the_sign(opened: Open) -> None:
    page = opened("one head")
    score = recovery("one head").model.heads[0].score
    pixels = page.locator(f"{FIELD} canvas").evaluate(
        "c => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data]"
    )
    red, _, blue, _ = np.moveaxis(np.array(pixels).reshape(*score.shape, 4), 2, 0)
    strong = np.abs(score) > 0.2 * np.abs(score).max()
    assert (np.sign(red - blue)[strong] == np.sign(score)[strong]).all()


def stated(text: str) -> tuple[str, float, float]:
    """row 2, column 3: −0.25 ± 1e−16"""
    place, _, numbers = text.replace("−", "-").partition(": ")
    value, _, error = numbers.partition(" ± ")
    return place, float(value), float(error)


def point_at(page: Any, down: float, across: float) -> None:
    field = page.locator(FIELD)
    area = field.bounding_box()
    field.hover(position={"x": area["width"] * across, "y": area["height"] * down})


def test_the_pointer_shows_a_value_and_its_error(opened: Open) -> None:
    page = opened("one head")
    found = recovery("one head")
    point_at(page, 2.5 / 12, 3.5 / 12)
    place, value, error = stated(page.locator(VALUE).inner_text())
    assert place == "row 2, column 3"
    assert value == pytest.approx(found.model.heads[0].score[2, 3], rel=1e-5)
    assert error == pytest.approx(found.errors.heads[0].score[2, 3], rel=0.1)
    assert page.locator(f"{FIELD} .cursor").is_visible()


def test_a_cell_of_many_entries_shows_the_largest(opened: Open) -> None:
    page = opened("wide")
    point_at(page, 4.5 / 256, 10.5 / 256)
    place, value, _ = stated(page.locator(VALUE).inner_text())
    assert place == "row 8–9, column 20–21"
    cell = recovery("wide").model.heads[0].score[8:10, 20:22]
    assert value == pytest.approx(cell.flat[np.argmax(np.abs(cell))], rel=1e-5)


def test_arrow_keys_walk_over_the_cells(opened: Open) -> None:
    page = opened("one head", 400)
    for _ in range(40):  # by Tab alone, as somebody without a mouse gets there
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.dataset.map") == "map-1-1":
            break
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    place, value, _ = stated(page.locator(VALUE).inner_text())
    assert place == "row 2, column 3"
    assert value == pytest.approx(recovery("one head").model.heads[0].score[2, 3], rel=1e-5)
    for key in ("End", "PageDown", "PageDown", "ArrowDown"):
        page.keyboard.press(key)
    assert stated(page.locator(VALUE).inner_text())[0] == "row 11, column 11"
    assert page.locator(VALUE).get_attribute("aria-live") == "polite"


def test_a_vector_has_values_too(opened: Open) -> None:
    page = opened("one head")
    field = page.locator("[data-map='map-1-v2']")
    field.focus()
    page.keyboard.press("End")
    place, value, _ = stated(page.locator("#map-1-v2-value").inner_text())
    assert place == "entry 11"
    assert value == pytest.approx(recovery("one head").model.heads[0].value[11], rel=1e-5)


PAINT = "canvas => canvas.toDataURL()"


def test_light_and_dark_by_system_and_by_button(opened: Open) -> None:
    page = opened("one head", scheme="dark")
    backdrop = "getComputedStyle(document.body).backgroundColor"
    canvas, button = page.locator(f"{FIELD} canvas"), page.locator("#theme")
    dark = (page.evaluate(backdrop), canvas.evaluate(PAINT))
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    light = (page.evaluate(backdrop), canvas.evaluate(PAINT))
    assert button.get_attribute("aria-pressed") == "false"
    assert dark[0] != light[0]
    assert dark[1] != light[1]
    button.click()
    assert (page.evaluate(backdrop), canvas.evaluate(PAINT)) == dark
    assert opened("one head").evaluate(backdrop) == light[0]


def test_prints(opened: Open) -> None:
    page = opened("several heads", scheme="dark")
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = false; })")
    assert page.pdf().startswith(b"%PDF")
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("#theme").is_visible()


@pytest.mark.parametrize("kind", ["one head", "several heads", "transformer", "rejected", "budget"])
def test_axe_finds_nothing(kind: str, opened: Open) -> None:
    page = opened(kind, bypass_csp=True)  # the page itself lets no script in
    page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
    page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text())
    for width, scheme in ((1400, "light"), (1400, "dark"), (400, "light"), (400, "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
        assert len(found["passes"]) > 20
        wrong = {
            rule["id"]: [node["html"] for node in rule["nodes"]] for rule in found["violations"]
        }
        assert wrong == {}, (width, scheme)


def test_a_name_that_is_a_script_stays_a_name(opened: Open, monkeypatch: Any) -> None:
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7*7 }}"
    hostile = replace(
        recovery("rejected"),
        reason=evil,
        notes=(evil,),
        details={evil: evil, "precision": evil},
        run={"box": evil, "learner": evil, "command": evil, "seed": 0},
    )
    monkeypatch.setitem(recoveries.KINDS, "hostile", lambda: hostile)
    page = opened("hostile")
    assert page.locator("img").count() == 0
    assert page.get_by_text("{{ 7*7 }}").count() > 0
