"""Every code block of README and docs works as typed."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from code_blocks import ROOT, SHOWN, Block, blocks, pages, run_page

PAGES = [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages()]
BLOCKS = [pytest.param(block, id=str(block)) for page in pages() for block in blocks(page)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the reader stands; modules written there are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    written = [
        name
        for name, module in sys.modules.items()
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path))
    ]
    for name in written:
        del sys.modules[name]


@pytest.mark.parametrize("page", PAGES)
def test_page_works_as_typed(page: Path, folder: Path) -> None:
    state = np.random.get_state()  # noqa: NPY002 - pages must not rely on it
    run_page(page, folder)
    assert str(np.random.get_state()) == str(state)  # noqa: NPY002


@pytest.mark.parametrize("block", BLOCKS)
def test_block_is_of_a_known_kind(block: Block) -> None:
    """A block in no language, or left out without a test that stands for it, would not be run."""
    assert block.language in ("python", "sh", "yaml", *SHOWN), (
        f"{block}: fence it as python, sh or text"
    )
    if "not run" in block.comment:
        assert block.covered_by is not None, f"{block}: say which test covers it"
        assert (ROOT / block.covered_by).exists(), f"{block}: {block.covered_by} does not exist"


def test_most_blocks_are_run() -> None:
    runnable = [b for page in pages() for b in blocks(page) if b.language in ("python", "sh")]
    left_out = [b for b in runnable if b.covered_by is not None]
    assert len(runnable) > 40
    assert len(left_out) <= 0.2 * len(runnable), [str(block) for block in left_out]


def test_a_wrong_block_is_noticed(folder: Path) -> None:
    page = folder / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError):
        run_page(page, folder)
    page.write_text("```sh\necho '│ queries  98'\n```\n\n```text\n│ queries  96 │\n```\n")
    with pytest.raises(AssertionError, match="shows"):
        run_page(page, folder)
    page.write_text("```sh\nkeyhole recover nothing:here --width 3\n```\n")
    with pytest.raises(AssertionError, match="exit 2"):
        run_page(page, folder)
