"""Learners by name, for the command line and for `recover(box, "multi-head")`."""

from dataclasses import fields
from importlib import import_module
from typing import Any

from keyhole.errors import InvalidArgument
from keyhole.targets import suggest

LEARNERS = {  # name -> public name
    "auto": "Auto",
    "single-head": "SingleHead",
    "low-rank": "LowRank",
    "multi-head": "MultiHead",
    "label-only": "LabelOnly",
    "relu-network": "ReluNetworkLearner",
    "mlp": "MlpLearner",
    "transformer": "Transformer",
    "block": "BlockLearner",
    "stack": "StackLearner",
    "output-layer": "OutputLayerLearner",
}


def public_name(name: str) -> str:
    """The public name of a learner, given either of its names."""
    public = LEARNERS.get(name, name if name in LEARNERS.values() else None)
    if public is None:
        raise InvalidArgument(f"unknown learner {name!r}; {suggest(name, list(LEARNERS))}")
    return public


def make_learner(name: str, **options: Any) -> Any:
    """The learner of this name ("multi-head" or "MultiHead") with the options that it has."""
    public = public_name(name)
    kind = getattr(import_module("keyhole"), public)
    known = [part.name for part in fields(kind) if part.init]
    for option in options:
        if option not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise InvalidArgument(f"{public} has no option {option}; {has}")
    return kind(**options)
