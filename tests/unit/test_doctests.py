"""Every example in a docstring runs."""

import doctest
import importlib
import pkgutil

import pytest

import keyhole

MODULES = [
    info.name
    for info in pkgutil.walk_packages(keyhole.__path__, "keyhole.")
    if not info.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples() -> None:
    attempted = sum(doctest.testmod(importlib.import_module(name)).attempted for name in MODULES)
    assert attempted > 10
