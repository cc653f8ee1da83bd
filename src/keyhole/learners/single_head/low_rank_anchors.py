"""Anchors for the next crosses: random, but orthogonal to what is better not seen again."""

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.linalg.crosses import Crosses, Parted
from keyhole.linalg.range_finder import RangeFinder

SAME_SPACE = 1e-6  # a row this little outside the directions avoided adds none to them
AVOIDED_SHARE = 0.4  # anchors avoid the rows so far up to this share of the width
SMALLEST_WIDTH = 4  # below, there are no anchors besides a key bias and the value map


class FreshAnchors(Parted):
    """Orthonormal anchors without a column; `avoided` are two directions in which a column costs
    digits, a key bias and the value map (none without a key bias)."""

    def __init__(
        self,
        anchors: Float[Array, "d d"],
        key_bias: Float[Array, " d"],
        value: Float[Array, " d"],
    ) -> None:
        super().__init__(anchors)
        self.width = len(value)
        self.avoided = _span(key_bias, value)
        self.row_space = RangeFinder(self.width)  # and what is avoided
        self.row_space.become(self.avoided.T)

    def next(self, count: int, rank: int, skipped: int = 0) -> Float[Array, "n d"]:
        """Orthogonal to the rows so far while there is room."""
        last = len(self.left) - skipped
        anchors = self.left[max(last - count, 0) : max(last, 0)]
        if rank > AVOIDED_SHARE * self.width or not len(anchors):
            return anchors
        anchors = self.row_space.outside(anchors)
        sizes = np.linalg.norm(anchors, axis=1)
        there = sizes > SAME_SPACE
        return np.asarray(anchors[there] / sizes[there, None])

    def left_out(self, crosses: Crosses) -> Float[Array, "1 d"]:
        """A mixture of the directions that are avoided, orthogonal to the anchors before and, as
        far as they reach, to the rows so far."""
        anchor = self.avoided.sum(axis=0)
        before, _ = np.linalg.qr(np.vstack([crosses.omega, crosses.rows]).T)
        anchor = anchor - before @ (before.T @ anchor)
        return anchor[None] / np.linalg.norm(anchor)

    def avoid(self, rows: Float[Array, "k d"], rank: int) -> None:
        """The rows of the crosses just made."""
        if rank > AVOIDED_SHARE * self.width:
            self.row_space = RangeFinder(self.width)  # of no use any more
            return
        for row in rows:
            if np.linalg.norm(self.row_space.outside(row)) > SAME_SPACE * np.linalg.norm(row):
                self.row_space.add(row)


def _span(key_bias: Array, value: Array) -> Float[Array, "k d"]:
    """Orthonormal rows spanning a key bias and the value map; none where there is no key bias."""
    if not key_bias.any() or len(value) < SMALLEST_WIDTH:
        return np.zeros((0, len(value)))
    q, r = np.linalg.qr(np.column_stack([key_bias, value]))
    kept = np.abs(np.diag(r)) > SAME_SPACE * np.linalg.norm(value)
    return np.ascontiguousarray(q.T[: 2 if kept[1] else 1])
