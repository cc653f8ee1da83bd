"""What an attack found once is not found again; and the attack itself runs, one case of each part."""

import json
from pathlib import Path

import numpy as np
import pytest

from attack import campaign

CASES = sorted((Path(__file__).parent / "cases").glob("*.json"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_mended_case_stays_mended(path: Path) -> None:
    case = json.loads(path.read_text())
    assert case["found"]
    assert campaign.run_case(case["part"], case["spec"])[1] == []


@pytest.mark.parametrize("part", ["files", "endpoints", "boxes"])
def test_the_same_numbers_draw_the_same_case(part: str) -> None:
    module = campaign.PARTS[part]
    first, second = (json.dumps(module.draw(np.random.default_rng([5, 1]))) for _ in range(2))
    assert first == second
    counts, findings = campaign.run_case(part, json.loads(first))
    assert sum(counts.values()) > 0 or findings


def test_figures_become_a_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"Before\n{campaign.PAGE_START}\nold\n{campaign.PAGE_END}\nAfter\n")
    figures = {
        "minutes": 2,
        "seed": 3,
        "date": "today",
        "counts": {"files": {"cases": 4, "refused": 3, "read": 1}},
        "findings": [{"part": "files", "number": 1, "kind": "traceback", "what": "a | b"}],
    }
    campaign.write_page(page, figures)
    text = page.read_text()
    assert text.startswith("Before\n")
    assert text.endswith("\nAfter\n")
    assert "| damaged files | 4 | refused 3, read 1 | traceback 1 |" in text
    assert "old" not in text
