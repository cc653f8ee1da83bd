"""Optional dependencies: imported when first needed, with the command that installs them."""

from importlib import import_module
from types import ModuleType

from keyhole.errors import MissingExtra


def need(module: str, extra: str, purpose: str) -> ModuleType:
    """The module, or a MissingExtra that says how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtra(
            f"{purpose} needs {module.split('.')[0]}, which is not installed: "
            f"pip install 'keyhole-ml[{extra}]'"
        ) from error
