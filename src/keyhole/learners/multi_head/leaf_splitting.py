"""Two heads that attend to one huge token, told apart by bisection.

Queries. The leaf w of hard_attention becomes w + eta, w - eta with eta turning in a random
plane. While all its heads choose the same side the answer changes by ± eta . value.

Inversion. Between the two angles at which the heads change sides it does not: such an angle makes
two leaves out of one.

When it fails. Heads whose directions agree to rounding are never separated: they count as one.
"""

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.multi_head.leaves import MOMENT_DOUBT, REACH, Leaves
from keyhole.measurement.asking import Asker

PIVOT = 0.02  # size of the two tokens a leaf is split into, relative to the leaf
WIDENINGS = (12.0, 4.0)  # larger pivots tried afterwards, for wider margins
SAME_SIDE = 1e-6  # relative deviation within which an answer counts as the expected one
SAFE = 2.5e-3  # share of a split's opening by which its halves may be moved
NARROWEST = 1e-9  # opening, in radians, below which the halves would have no room at all
BISECTIONS = 45  # halvings of an angle until two heads count as one


def split(ask: Asker, leaves: Leaves, leaf: int, rng: np.random.Generator) -> bool:
    """Separates two heads that attend to one leaf; False where they cannot be told apart.

    The leaf w becomes w + eta, w - eta with eta turning in a random plane. While all its heads
    choose the same side the answer changes by ± eta . value; between the two angles where they
    change sides it does not, and bisection finds such an angle.
    """
    values, _ = leaves.equations.solve()
    plane = np.linalg.qr(rng.standard_normal((ask.width, 2)))[0].T
    size = PIVOT * leaves.reach[leaf] / REACH
    low, high, sign = 0.0, np.pi, 0
    for _ in range(BISECTIONS):
        angle = 0.5 * (low + high) if sign else 0.0
        pivot = size * (np.cos(angle) * plane[0] + np.sin(angle) * plane[1])
        side, answer = _side(ask, leaves, leaf, pivot, values)
        if side == 0:
            _adopt(ask, leaves, leaf, pivot, high - low if sign else 1.0, answer, values)
            return True
        if sign == 0:
            sign = side
        elif side == sign:
            low = angle
        else:
            high = angle
    return False


def _pivoted(leaves: Leaves, leaf: int, pivot: Array) -> tuple[Array, Array]:
    """The sequence in which a leaf has become two, and its row with the new head after the
    other leaves."""
    heads = len(leaves)
    tokens, rows = leaves.configuration(np.zeros((1, leaves.blocks, len(pivot))))
    both = np.stack([leaves.tokens[leaf] + pivot, leaves.tokens[leaf] - pivot])
    tokens = np.insert(tokens, heads, both[1], axis=1)
    rows = np.insert(rows, heads, both[1], axis=1)
    tokens[0, leaf] = rows[0, leaf] = both[0]
    if leaves.uniform:
        mean = tokens[0].sum(axis=0) + leaves.anchor / leaves.scale
        rows[0, -1] = mean / (tokens.shape[1] + 1)
    return tokens, rows


def _side(
    ask: Asker, leaves: Leaves, leaf: int, pivot: Array, values: Array
) -> tuple[int, Float[Array, " outputs"]]:
    """+1 or -1 where all heads of the leaf choose the same side, 0 where they part; and by how
    much the answer exceeds the one with the leaf in the middle."""
    tokens, rows = _pivoted(leaves, leaf, pivot)
    answer = leaves.ask(ask, tokens, "splitting")[0]
    middle = np.delete(rows[0], len(leaves), axis=0)
    middle[leaf] = leaves.tokens[leaf]
    change = answer - np.einsum("bd,bdo->o", middle, values)
    expected = pivot @ values[leaf]
    size = float(np.linalg.norm(pivot) * np.linalg.norm(values[leaf]))
    allowed = SAME_SIDE * size + MOMENT_DOUBT * ask.unit * float(np.abs(values).max())
    if np.abs(change - expected).max() <= allowed:
        return 1, change
    if np.abs(change + expected).max() <= allowed:
        return -1, change
    return 0, change


def _adopt(
    ask: Asker,
    leaves: Leaves,
    leaf: int,
    pivot: Array,
    opening: float,
    change: Array,
    values: Array,
) -> None:
    """Makes the two halves leaves of their own, as far apart as their order allows."""
    for factor in WIDENINGS:
        _, wider = _side(ask, leaves, leaf, factor * pivot, values)
        size = float(np.abs(factor * change).max())
        if np.abs(wider - factor * change).max() <= SAME_SIDE * size:
            pivot, change = factor * pivot, wider
            break
    _, rows = _pivoted(leaves, leaf, pivot)
    middle = np.delete(rows[0], len(leaves), axis=0)
    middle[leaf] = leaves.tokens[leaf]
    answer = change + np.einsum("bd,bdo->o", middle, values)
    leaves.equations.split(leaf, len(leaves))
    leaves.equations.add(rows, answer[None])
    margin = SAFE * float(np.linalg.norm(pivot)) * max(opening, NARROWEST)
    leaves.tokens = np.concatenate([leaves.tokens, (leaves.tokens[leaf] - pivot)[None]])
    leaves.tokens[leaf] = leaves.tokens[leaf] + pivot
    leaves.reach = np.append(leaves.reach, margin)
    leaves.reach[leaf] = margin
