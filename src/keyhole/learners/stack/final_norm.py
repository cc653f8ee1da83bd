"""A norm behind the last block: what it shows of the stack, and what it hides.

Statement.  A norm at the end answers gain * n(x) + bias, n(x) the direction of the last stream: for
            a huge token, of the token itself. With z that direction for the anchor t a,
            t (z / (z . a / d) - a) = c_⊥ t / (t + c_∥), c = c_0 + c_1 / t + ... what the blocks
            add: again a series in 1 / t, whose limit is c_0 but for its part along a and its mean.
Queries.    24 single tokens, so huge that what the blocks add is less than a rounding.
Algebra.    Gain and bias of each number by least squares, for both kinds of norm; the kind that
            explains the answers.
            The part along a comes back stage by stage: value maps from a second anchor (heads.py),
            the network's answers by elimination (`network.observation`), c_1 once all of c_0 is
            known (order.py, biases.py). The epsilon is found with those of the blocks
            (epsilons.py).
Fails.      Norms behind every residual: huge tokens then show a network of their direction.
"""

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.measurement.asker import Asker
from keyhole.models.norm import Norm, kept_plane


def read_final_norm(box: Asker, rng: np.random.Generator, count: int = 24) -> Norm | None:
    """The norm at the end (its epsilon is not seen), or None where there is none; `count`: tokens
    that are asked."""
    # errors of the gain are enlarged by the size of an anchor: blocks must add less than a rounding
    size = box.error ** (-7.0 / 6.0)
    tokens = box.representable(size * rng.standard_normal((count, 1, box.width)))
    answers = box(tokens, "final norm")
    best, least = None, np.inf
    for kind in ("layer", "rms"):
        seen = Norm(np.ones(box.width), None, 0.0, kind).direction(tokens[:, 0])
        steps, changes = seen - seen.mean(axis=0), answers - answers.mean(axis=0)
        gain = (steps * changes).sum(axis=0) / (steps**2).sum(axis=0)
        bias = answers.mean(axis=0) - gain * seen.mean(axis=0)
        rest = float(np.abs(answers - gain * seen - bias).max() / np.abs(answers).max())
        if rest < least:
            best, least = Norm(gain, bias, 0.0, kind), rest
    # the stack turns the direction by about its size over that of the token
    return best if least < 1e4 * box.error + 1e3 / size else None


def unnorm(
    answers: Float[Array, "s n d"],
    anchors: Float[Array, "s n k"],
    sizes: Float[Array, " s"],
    norm: Norm,
) -> Float[Array, "s n d"]:
    """What the blocks add across anchors of these sizes, a series in 1 / size."""
    plane = kept_plane(norm.width, norm.kind)
    seen = ((answers - norm.bias) / norm.gain) @ plane
    share = (seen * anchors).sum(axis=-1, keepdims=True) / (anchors**2).sum(axis=-1, keepdims=True)
    return np.asarray((sizes[:, None, None] * (seen / share - anchors)) @ plane.T)
