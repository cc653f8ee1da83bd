"""Makes the helpers beside this file importable from every test, Hypothesis repeatable, and checks of
shapes cheap."""

import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

import costs
import typechecking

typechecking.install()

# the same examples on every machine; a busy one may take its time
settings.register_profile("keyhole", derandomize=True, deadline=None, database=None)
settings.load_profile("keyhole")


def pytest_configure(config):
    if costs.wants_measuring():
        config.pluginmanager.register(costs.Costs())


def pytest_ignore_collect(collection_path, config):
    """What is not quick as a whole is not even read for `-m quick`."""
    return True if config.option.markexpr == "quick" and costs.is_apart(collection_path) else None


def pytest_collection_modifyitems(items):
    costs.mark_quick(items)


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    """A token that the machine happens to have changes what the tests of HTTP see."""
    monkeypatch.delenv("KEYHOLE_TOKEN", raising=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    typechecking.Clock.test += 1
