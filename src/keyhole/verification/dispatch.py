"""Which comparison a reference needs: a model that is at hand, another box, a signature."""

from pathlib import Path
from typing import Any

from keyhole.oracles.open import load_named
from keyhole.results import Verdict, load
from keyhole.verification.reference import is_target, verify_boxes


def read_reference(reference: Any) -> Any:
    """What a reference stands for: a run or a model where a string names one that was saved, what
    `package.module:attribute` holds, and any other target as it is."""
    if not isinstance(reference, (str, Path)) or is_target(str(reference)):
        return str(reference) if isinstance(reference, Path) else reference
    path = Path(reference)
    return load(path) if path.exists() else load_named(str(reference))


def verify_target(box: Any, reference: Any, queries: int | None, seed: int) -> Verdict | None:
    """The verdict where the reference is a box of its own; None where it is a model or a run, which
    `verify` compares."""
    if is_target(reference):
        return verify_boxes(box, reference, queries=queries, seed=seed)
    return None
