"""For the API reference: examples in docstrings (>>>) are shown as code, not as quotations."""

from typing import Any

import griffe


class Examples(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None or ">>> " not in obj.docstring.value:
            return
        lines = obj.docstring.value.splitlines()
        if "Example:" in lines:  # the section as the parser calls it
            lines[lines.index("Example:")] = "Examples:"
        elif any(line.startswith(">>> ") for line in lines):  # without a heading
            first = next(i for i, line in enumerate(lines) if line.startswith(">>> "))
            shown = [f"    {line}".rstrip() for line in lines[first:]]
            lines = [*lines[:first], "Examples:", *shown]
        obj.docstring.value = "\n".join(lines)
