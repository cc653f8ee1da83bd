"""A hypothesis of a layer with positions before it is judged, put together from what stages found.

The score of a head is in the position where it turns, and in the head's own matrix where it does
not; the value maps are those of hard attention. Standard errors have the same structure.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.learners.base import Diagnostics
from keyhole.learners.positions.rotary_fit import Rotary
from keyhole.learners.positions.values import ValueMaps
from keyhole.measurement.asker import Asker
from keyhole.models.attention import Attention, Head
from keyhole.models.position import Position


@dataclass(frozen=True, eq=False, kw_only=True)
class PositionDiagnostics(Diagnostics):
    """What was found beside the layer."""

    heads: int
    ranks: tuple[int, ...]
    positions: str
    rotary_base: float | None = None
    key_value_groups: int | None = None  # sets of keys and values, where heads share them


@dataclass(frozen=True, eq=False)
class Candidate:
    """A hypothesis before it is judged."""

    model: Attention
    errors: Attention
    floor: float
    notes: tuple[str, ...]
    diagnostics: PositionDiagnostics


def assemble(values: ValueMaps, position: Position, scores: np.ndarray | None = None) -> Attention:
    """The layer; heads whose score knows places alone have the score zero beside it. Scores that
    know none are given as [W | c] of every head."""
    width = len(values.ins[0])
    found = np.zeros((values.heads, width, width + 1)) if scores is None else scores
    heads = [
        Head(keys[:, :-1], keys[:, -1], value)
        for keys, value in zip(found, values.maps, strict=True)
    ]
    return Attention(heads, values.offset, None, position)


def assemble_errors(
    ask: Asker, values: ValueMaps, position: Position, scores: np.ndarray | None = None
) -> Attention:
    """Standard errors in the same structure; those of the values from their condition."""
    width = len(values.ins[0])
    found = np.zeros((values.heads, width, width + 1)) if scores is None else scores
    value_loss = 10.0  # relative error of a value map, in that of what all maps predict together
    loss = value_loss * values.error
    heads = [
        Head(keys[:, :-1], keys[:, -1], np.full(v.shape, loss * np.sqrt(np.mean(v**2))))
        for keys, v in zip(found, values.maps, strict=True)
    ]
    return Attention(heads, ask.unit * np.abs(values.offset), None, position)


def count_values(values: ValueMaps, ask: Asker) -> float:
    """Unknowns of the values and the offset, per number in an answer."""
    unknowns = sum(r * (ask.width + ask.outputs) - r**2 for r in values.ranks) + ask.outputs
    return unknowns / ask.outputs


def place_error(ask: Asker, values: ValueMaps) -> float:
    """Standard error of the vectors: that of what the value maps say of the anchor."""
    total = values.total
    size = values.error * float(np.linalg.norm(values.anchor @ total))
    return size * float(np.linalg.norm(np.linalg.pinv(total), 2)) / ask.width**0.5


def shorten_table(table: np.ndarray) -> np.ndarray:
    """The table without the distances at its end over which it is constant, up to the first."""
    last = table[:, -1:]
    equal = 1e-6  # relative difference of two entries of a table that are one bucket
    same = (np.abs(table - last) <= equal * np.abs(table).max()).all(axis=0)
    constant = int(np.argmin(same[::-1])) if not same.all() else len(same)
    return table[:, : table.shape[1] - constant + 1] if constant > 1 else table


def rotary_position(found: Rotary, window: int | None) -> Position:
    return Position(found.frequencies, found.keys, found.queries, window=window)


def rotary_base(frequencies: np.ndarray) -> float | None:
    """The base of frequencies base^(-j / n), j = 0 ... n - 1, times one number; None where they
    are another list."""
    count = len(frequencies)
    power_law = 1e-6  # relative deviation of frequencies that follow one base
    if count == 2 and abs(frequencies[0] - 1.0) < power_law:  # else two are no law
        return float(frequencies[1] ** -2.0)
    if count < 3 or frequencies.min() <= 0.0:  # a fit may end at a frequency that is none
        return None
    slope, start = np.polyfit(np.arange(count), np.log(frequencies), 1)
    off = np.abs(np.log(frequencies) - start - slope * np.arange(count)).max()
    return float(np.exp(-slope * count)) if off < power_law else None
