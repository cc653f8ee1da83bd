"""Tokens a design may choose from: a vocabulary, or samples of a domain without room at zero."""

import numpy as np
from scipy.linalg import qr

from keyhole.arrays import TINY, Array, Float
from keyhole.errors import NotIdentifiable
from keyhole.oracles.base import Domain

POOL = 1024  # tokens considered for a design: more cost time and hardly improve it
FLAT = 1e-11  # of the tokens' extent: a direction they span no further is not spanned
BOX_DECADES = 10  # binary orders of distance to the middle of a domain, for sampled tokens


def token_pool(table: Float[Array, "m d"], rng: np.random.Generator) -> Float[Array, "n d"]:
    """Distinct tokens, at most about POOL, that span affinely; NotIdentifiable if none do."""
    table = np.unique(table + 0.0, axis=0)
    width = table.shape[1]
    centred = table - table.mean(axis=0)
    upper, order = qr(centred.T, mode="r", pivoting=True)
    depth = np.abs(np.diag(upper))
    dimension = int(np.sum(depth > FLAT * max(float(depth.max(initial=0.0)), TINY)))
    if dimension < width:
        raise NotIdentifiable(
            f"the {len(table)} distinct tokens of the vocabulary lie in a flat of dimension "
            f"{dimension} of {width}: scores between directions of that flat are determined, and "
            f"nothing is of the other {width - dimension}. {width + 1} affinely independent "
            "tokens are needed"
        )
    if len(table) <= POOL:
        return table
    chosen = np.union1d(order[: 2 * width], rng.choice(len(table), size=POOL, replace=False))
    return table[chosen]


def sampled_vocabulary(
    domain: Domain, width: int, rng: np.random.Generator, count: int
) -> Float[Array, "n d"]:
    """Random tokens inside a domain without room around zero, at many distances from each other.

    Half of them fill the domain, the others crowd around its middle: near tokens are what keeps
    scores in range where a box's tokens are long.
    """
    if domain.vocabulary is not None:
        return np.asarray(domain.vocabulary, dtype=np.float64)
    reach = domain.max_norm if domain.max_norm is not None else np.sqrt(width)
    low = domain.low if domain.low is not None else min(-reach, (domain.high or 0.0) - reach)
    high = domain.high if domain.high is not None else max(reach, low + reach)
    corner = np.full(width, np.clip(0.0, low, high))  # the token nearest to zero
    distance = np.ones(count)
    near = count // 2
    distance[:near] = 2.0 ** -rng.uniform(0.0, BOX_DECADES, size=near)
    middle = (corner + domain.drawn_in(np.full((1, width), (low + high) / 2))[0]) / 2
    spread = distance[:, None] * (rng.uniform(low, high, size=(count, width)) - middle)
    return domain.drawn_in(middle + spread)
