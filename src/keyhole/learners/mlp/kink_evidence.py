"""What two pieces of a line prove about the kinks between them, given how exact answers are.

With vector answers the lines live in R^k: two lines that meet are themselves the proof of a single
kink, and one value between two kinks fixes both. A caller trusts this only where the jumps seen
have shown to span at least three dimensions (`generic`).
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from keyhole.arrays import Array
from keyhole.learners.mlp.pieces import Piece, dense, well_inside

SAFETY = 40.0  # tolerance in units of the rounding error of one answer
PROOF = 1e-6  # a coincidence is proof where the tolerance is this small a part of the effect
GENERIC_RANK = 3  # dimensions the jumps must span before a meeting of lines proves anything
STEEPER = 10.0  # times the slopes on either side: an answer that moves faster has jumped
IMPLIED_STEP = 0.3  # length of a piece known by one answer, relative to the kinks' distance


@dataclass(frozen=True)
class LineEvidence:
    """`unit` is the error of an answer at t, divided by 1 + |t|."""

    unit: float
    bends: float = 0.0  # changes of slope below this are no kinks

    def noise(self, t: float) -> float:
        return SAFETY * self.unit * (1 + abs(t))

    def slack(self, piece: Piece, t: float) -> float:
        """Allowed distance of an answer at t from the line of a piece."""
        near, far = self.noise(piece.left), self.noise(piece.right)
        if t > piece.right:
            near, far = far, near
        beyond = max(piece.left - t, t - piece.right, 0.0)
        rounding = self.noise(t) + near + beyond / piece.span * (near + far)
        return rounding + self.bends * beyond

    def on(self, piece: Piece, t: float, value: Array) -> bool:
        return bool(np.linalg.norm(value - piece.at(t)) <= self.slack(piece, t))

    def agree(self, left: Piece, right: Piece) -> bool:
        """Whether both lines run through the other's nearest point: no kink between them."""
        return self.on(right, left.right, left.values[left.high]) and self.on(
            left, right.left, right.values[right.low]
        )

    def meet(self, left: Piece, right: Piece, t: float) -> bool:
        """Whether the two lines meet at t; numbers always do."""
        gap = float(np.linalg.norm(left.at(t) - right.at(t)))
        return bool(gap <= self.slack(left, t) + self.slack(right, t))

    def jump(self, left: Piece, right: Piece) -> float | None:
        """By how much the answers jump between two pieces that are next to a point, if they do."""
        gap = float(np.linalg.norm(left.at(right.left) - right.values[right.low]))
        steep = float(np.linalg.norm(left.slope) + np.linalg.norm(right.slope))
        allowed = self.slack(left, right.left) + STEEPER * steep * (right.left - left.right)
        return gap if gap > allowed else None

    def one_kink(self, left: Piece, right: Piece, t: float) -> bool:
        """Whether lines of vectors that meet at t leave no room for more than one kink."""
        room = min(t - left.right, right.left - t)
        effect = float(np.linalg.norm(right.slope - left.slope)) * room
        allowed = self.slack(left, t) + self.slack(right, t)
        return bool(allowed <= PROOF * effect) and dense(right.slope - left.slope)

    def two_kinks(self, left: Piece, right: Piece, s: float, value: Array) -> Piece | None:
        """The piece through one vector answer between two kinks, if two kinks explain it.

        The distances from the two lines point along the two jumps, and the jumps add up to the
        difference of the slopes: two unknown factors against k equations."""
        rise, fall = value - left.at(s), value - right.at(s)
        bend = right.slope - left.slope
        basis = np.stack([rise, fall], axis=1)
        factors, *_ = np.linalg.lstsq(basis, bend)
        if not (factors > 0).all():
            return None
        first, second = s - 1 / factors[0], s + 1 / factors[1]
        if not (well_inside(left.right, s, first) and well_inside(s, right.left, second)):
            return None
        off = float(np.linalg.norm(basis @ factors - bend))
        allowed = factors[0] * self.slack(left, s) + factors[1] * self.slack(right, s)
        for piece in (left, right):
            allowed += (self.noise(piece.left) + self.noise(piece.right)) / piece.span
        effect = min(np.linalg.norm(rise) * factors[0], np.linalg.norm(fall) * factors[1])
        if not off <= allowed <= PROOF * effect or not (dense(rise) and dense(fall)):
            return None
        slope = left.slope + factors[0] * rise
        step = IMPLIED_STEP * min(s - first, second - s)
        return Piece([s, s + step], [value, value + step * slope], implied=slope)


def crossing(left: Piece, right: Piece) -> float | None:
    """Where the two lines come closest; None where they are parallel."""
    bend = right.slope - left.slope
    size = float(bend @ bend)
    if size == 0:
        return None
    a = left.right
    return a + float((left.values[left.high] - right.at(a)) @ bend) / size


def generic(pieces: list[Piece]) -> bool:
    """Whether the jumps span enough dimensions for a meeting of two lines to be a proof."""
    rows = []
    for left, right in pairwise(pieces):
        rows += [right.slope - left.slope, left.at(0.0) - right.at(0.0)]
    table = np.array(rows)
    if table.shape[1] < GENERIC_RANK:
        return False
    norms = np.linalg.norm(table, axis=1)
    if not norms.all():
        return False
    values = np.linalg.svd(table / norms[:, None], compute_uv=False)
    return bool((values > PROOF).sum() >= GENERIC_RANK)
