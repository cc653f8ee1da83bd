"""Single-head attention of low rank, rank unknown, at the floor 2rd − r² + d.

Statement.  A head whose score has rank r is recovered with 2rd − r² + d queries and one to three
            more a column, rank unknown; a key bias adds d. The score is returned in factors (in
            one piece if its rank is full), with its singular values, the rank and why that rank.
Queries.  Value and key bias as for a single head. A column is all probes against one anchor, a
            row one probe against all anchors, and what one tells the other does not ask again.
            Scalar boxes: blocks of columns and rows (low_rank_cross). Vector answers and large
            widths: all columns, then all rows (low_rank_sweep). Before each, probes outside the
            range found so far look at a few anchors: if they see nothing, the rank is found.
            `method="convex"`: a fixed set of random pairs (low_rank_convex).
Algebra.    With Y = score·Ω the columns and B = T·score the rows, score = Y (T Y)⁻¹ B; or, with Q
            an orthonormal basis of the columns, score = Q (Qᵀ score).
Fails.      Singular values below the box's precision cannot be seen: the rank found is a numerical
            rank. What lies outside it, or outside a tolerance or prescribed rank, is measured and
            added to the standard errors. A fixed set with too few measurements: IllConditioned.
Source.     Theorem 5.1 of Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with
            Anchors" (2026) for `method="convex"`. The adaptive methods are a cross approximation
            (Goreinov, Tyrtyshnikov, Zamarashkin 1997) and a randomised range finder (Halko,
            Martinsson, Tropp 2011), exact here because the rank is.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from keyhole.arrays import real_number, whole_number
from keyhole.errors import InvalidArgument
from keyhole.learners.base import Hypothesis, at_most_the_width
from keyhole.learners.published.convex_program import CONE_LIMIT, Convex, planned, refuse_too_few
from keyhole.learners.published.nuclear_norm import require_solver
from keyhole.learners.single_head.cross import Cross
from keyhole.learners.single_head.noise import noisy_in_ball
from keyhole.learners.single_head.pairs import Pairs, anchor_basis, learn_score
from keyhole.learners.single_head.range_sketch import Sweep
from keyhole.linalg.bases import DENSE_LIMIT
from keyhole.oracles.base import Oracle, Spec


@dataclass(frozen=True)
class LowRank:
    """Learner for one head of low rank. `rank=None`: the rank is found.

    `method="adaptive"` asks next to nothing beyond the floor. `method="convex"` asks a set of
    `measurements` that is fixed in advance (default 6 · rank · width, and enough for rank width/8
    where no rank is given), which is the choice where queries cannot depend on answers.

    `tolerance` stops the search once what is left of the score is below this fraction of it
    (default: what the box's precision can show).
    """

    method: Literal["adaptive", "convex"] = "adaptive"
    rank: int | None = None
    tolerance: float = 0.0
    measurements: int | None = None

    def __post_init__(self) -> None:
        if self.method not in ("adaptive", "convex"):
            raise InvalidArgument(f"method must be 'adaptive' or 'convex', got {self.method!r}")
        for name in ("rank", "measurements"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 1)
        real_number("tolerance", self.tolerance, 0.0, 1.0, with_low=True)
        if self.measurements is not None and self.method != "convex":
            raise InvalidArgument("measurements= belongs to method='convex'")

    def expected_queries(self, spec: Spec) -> int | None:
        at_most_the_width(self.rank, spec.width)
        if self.method == "convex":
            count = planned(spec.width, self.rank, self.measurements)
            return -(-count // min(spec.outputs or 1, spec.width)) + spec.width + 4
        if self.rank is None:
            return None
        r, d = self.rank, spec.width
        return -(-(2 * r * d - r * r) // (spec.outputs or 1)) + d + 2 * r + 4

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        at_most_the_width(self.rank, oracle.spec.width)
        if self.method == "convex":
            width = oracle.spec.width
            count = planned(width, self.rank, self.measurements)
            refuse_too_few(width, self.rank, count, count)
            if width <= CONE_LIMIT:
                require_solver()
        else:
            noisy = noisy_in_ball(oracle, rng, rank=self.rank or "unknown")
            if noisy is not None:
                return noisy
        return learn_score(oracle, rng, self.measure)

    def measure(self, pairs: Pairs, rng: np.random.Generator, spare: float = 0.0) -> Hypothesis:
        """The score, once value, key bias and scale are known. `spare`: share of the unknowns
        that may be asked for nothing where that is faster."""
        if self.method == "convex":
            return Convex(pairs, rng, self.rank, self.tolerance, self.measurements).run()
        scalar = pairs.group == 1 and pairs.probes.width <= DENSE_LIMIT
        if scalar:
            return Cross(
                pairs, anchor_basis(pairs, rng), rng, self.rank, self.tolerance, spare
            ).run()
        return Sweep(pairs, anchor_basis(pairs, rng), rng, self.rank, self.tolerance).run()
