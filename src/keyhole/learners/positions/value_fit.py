"""Value maps at the noise of all answers of hard attention.

Statement.  Value maps that were measured one direction after the other are brought to what the same
            answers determine together, with the errors that their noise leaves.
Queries.    None: those of the maps themselves.
Algebra.    y = offset + sum_h x_h A_h B_h of the tokens x_h in use, by the fit of whole layers
            (`refinement`) with scores and offset held. Ranges of single heads carry the rounding of
            a few answers, and where the ranges of all heads are nearly dependent, as in a square
            output projection, what keeps heads apart magnifies it by as much as they are.
When it fails.  Where the fit stays above the noise the maps are left as they were measured.
Source.     Keyhole's own; docs/methods/positions.md.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.positions.forward import PlacedLayer, multiply_values
from keyhole.learners.positions.refinement import Doubts, Fit, refine
from keyhole.learners.positions.values import ValueMaps
from keyhole.oracles.noise import ROUNDINGS


def fit_values(values: ValueMaps, rng: np.random.Generator) -> ValueMaps:
    """The maps at the noise of the answers that told them, where they were not there already."""
    if len(set(values.ranks)) > 1:
        return values
    width = len(values.ins[0])
    silent = np.zeros((values.heads, 1, width + 1))  # scores that no hard answer shows
    parts = {
        "keys": silent,
        "queries": silent,
        "ins": np.array(values.ins),
        "outs": np.array(values.outs),
        "offset": np.array(values.offset),
    }
    start = PlacedLayer(parts, frozenset({"keys", "queries", "offset"}))
    if Fit.of(start, values.answered).level <= ROUNDINGS:
        return values
    own = rng.spawn(1)[0]
    # the ranges are known far better than what keeps heads apart: first what is linear
    known = replace(start, held=start.held | {"outs"})
    near = refine(known, values.answered, own)[0].layer
    fit, settling = refine(replace(near, held=start.held), values.answered, own)
    if fit.level > ROUNDINGS:
        return values
    doubts = Doubts.of(fit, settling)
    ins, outs = [], []
    for left, right in zip(fit.layer.parts["ins"], fit.layer.parts["outs"], strict=True):
        q, r = np.linalg.qr(right.T)
        ins.append(left @ r.T)
        outs.append(q.T)
    return replace(
        values,
        ins=tuple(ins),
        outs=tuple(outs),
        error=find_error(doubts, multiply_values),
        total_error=find_error(doubts, add_values),
    )


def add_values(layer: PlacedLayer) -> Float[Array, "one d D"]:
    """What all heads add that attend to one token."""
    return np.asarray(multiply_values(layer).sum(axis=0, keepdims=True))


def find_error(doubts: Doubts, measure: Callable[[PlacedLayer], Float[Array, "h d D"]]) -> float:
    """Of the map that is known worst, relative to its size."""
    size = np.linalg.norm(measure(doubts.layer), axis=(1, 2))
    return float((np.linalg.norm(doubts.spread(measure), axis=(1, 2)) / size).max())
