"""Keyhole says what is behind an endpoint, through its answers alone.

The public names are listed in `__init__.pyi`, which type checkers read; here a name is loaded from
where that list has it, on first use.
"""

import pkgutil
from importlib import import_module
from typing import Any

from keyhole.deprecation import warn_of_former_name

__version__ = "0.2.0"


def _read_names() -> dict[str, str]:
    """Public name -> the module that defines it, from the lines `from MODULE import NAME as NAME`
    of the list."""
    listed = pkgutil.get_data(__name__, "__init__.pyi")
    lines = [line.split() for line in (listed or b"").decode().splitlines()]
    return {words[3]: words[1] for words in lines if words[:1] == ["from"] and len(words) == 6}


_HOME = _read_names()
_FORMER = {  # names of 0.1, which go with 0.3
    "Precision": "NoiseModel",
    "Questions": "QueryBatch",
    "Patience": "RetryPolicy",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _FORMER:
        warn_of_former_name(f"keyhole.{name}", f"keyhole.{_FORMER[name]}", removed_in="0.3")
        return getattr(import_module(__name__), _FORMER[name])
    if name not in _HOME:
        raise AttributeError(f"module 'keyhole' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
