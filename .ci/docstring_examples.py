"""For the API reference: examples in docstrings (>>>) are shown as code, not as quotations."""

from typing import Any

import griffe


class Examples(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None or "\n>>> " not in f"\n{obj.docstring.value}":
            return
        lines = obj.docstring.value.splitlines()
        first = next(i for i, line in enumerate(lines) if line.startswith(">>> "))
        shown = [f"    {line}".rstrip() for line in lines[first:]]
        obj.docstring.value = "\n".join([*lines[:first], "Examples:", *shown])
