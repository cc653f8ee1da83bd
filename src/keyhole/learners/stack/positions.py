"""Vectors that the box adds to its tokens, one for each place.

Statement.  The token t z at place p enters the stream as t z + e_p. Beside a huge anchor e_p is one
            constant more in the limit c_0: behind p - 1 copies of itself the anchor is answered as
            alone, but for e_p - e_1. Tokens before the anchor are so long that theirs do not show.
Queries.    For every place one anchor among copies of itself, at two sizes; two anchors where a
            norm at the end hides what is along each of them.
Algebra.    Differences. e_1 itself shows in the second term of the series (biases.py).
Fails.      Where the box does not tell how many places it has.
"""

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.block import Unclear
from keyhole.learners.stack.shallow import Shallow
from keyhole.measurement.asker import Asker


def has_positions(box: Asker, rng: np.random.Generator) -> bool:
    """Whether a token among copies of itself is answered otherwise than alone: without positions
    that are added to the tokens all streams are the same, whatever the weights."""
    token = box.representable(rng.standard_normal(box.width))
    alone, among = (box(np.tile(token, (1, count, 1)), "positions").ravel() for count in (1, 3))
    return bool(np.linalg.norm(among - alone) > 1e4 * box.error * np.linalg.norm(alone))


def find_positions(shallow: Shallow, rng: np.random.Generator) -> Float[Array, "places d"]:
    """e_p - e_1 for every place; raises Unclear."""
    places = shallow.box.oracle.spec.domain.max_length
    if places is None:
        raise Unclear(
            "vectors are added to the tokens inside the box, one for each place, and the box does "
            "not tell how many places there are (max_length)"
        )
    outputs = len(shallow.plane)
    anchors = shallow.points(rng, 1 if shallow.final is None else 2)
    shown = shallow.show(anchors, np.tile(np.eye(outputs), (len(anchors), 1, 1)))
    table = shown.reshape(-1, outputs)
    limits = []
    for place in range(places):
        copies = np.broadcast_to(anchors[:, None], (len(anchors), place, shallow.width))
        limits.append(shallow.ask(copies, anchors, "positions", order=2).limit.ravel())
    found, *_ = np.linalg.lstsq(table, (np.array(limits) - limits[0]).T, rcond=None)
    return np.asarray(found.T)
