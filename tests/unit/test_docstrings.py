"""Public names explain themselves: `help()` and the reference page show nothing else.

One convention (Google's; ruff checks its form): what it is or does, Args, Returns or Yields, Raises
and an Example that the doctests run.
"""

import dataclasses
import inspect
import re
from typing import Any

import pytest

import keyhole

NAMES = [name for name in keyhole.__all__ if name != "__version__"]
# nothing that they are given is refused
HARMLESS = ("choose_tokens", "identifiability", "witness")
SECTION = re.compile(r"^(Args|Returns|Raises|Example|Attributes):$", re.M)


def find(name: str) -> Any:
    return getattr(keyhole, name)


def read_sections(documented: Any) -> dict[str, str]:
    """Section -> its text; the opening under the empty name."""
    parts = SECTION.split(inspect.getdoc(documented) or "")
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def list_entries(section: str) -> list[str]:
    """Names at the section's own indentation."""
    return re.findall(r"^ {4}\*{0,2}(\w+)(?: \([^)]*\))?:", section, re.M)


FUNCTIONS = [name for name in NAMES if inspect.isfunction(find(name))]
LEARNERS = [
    name
    for name in NAMES
    if inspect.isclass(find(name)) and (hasattr(find(name), "learn") or hasattr(find(name), "fit"))
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_says_what_it_is(name: str) -> None:
    opening = read_sections(find(name))[""].strip()
    assert len(opening.split()) >= 3
    assert opening.split("\n\n")[0].endswith((".", "?", ":"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_explains_every_argument_what_comes_back_and_what_may_go_wrong(
    name: str,
) -> None:
    sections = read_sections(find(name))
    assert list_entries(sections.get("Args", "")) == list(inspect.signature(find(name)).parameters)
    assert sections["Returns"].strip()
    assert list_entries(sections.get("Raises", "")) or name in HARMLESS
    assert ">>> " in sections["Example"]
    for error in list_entries(sections.get("Raises", "")):
        assert issubclass(find(error), keyhole.KeyholeError)


@pytest.mark.parametrize("name", LEARNERS)
def test_a_learner_explains_every_option_and_shows_itself_at_work(name: str) -> None:
    sections = read_sections(find(name))
    kind = find(name)
    parts = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()  # or a protocol
    options = [part.name for part in parts if part.init]
    assert list_entries(sections.get("Args", "")) == options
    assert ">>> " in sections["Example"]


def test_the_kinds_cover_the_names() -> None:
    assert len(FUNCTIONS) >= 18
    assert len(LEARNERS) >= 14
