"""Heads that live in known, pairwise orthogonal subspaces: one single head after the other.

Statement. If head h reads and weighs only the part of a token inside a known subspace S_h, and the
S_h are pairwise orthogonal, then the layer restricted to S_h is head h alone: inside S_h the other
heads have value zero. The layer is determined by sum_h (k_h² + k_h) queries, k_h = dim S_h.

Queries. Those of a single head, tokens inside S_h. Algebra: as for a single head.

When it fails. A head with a part outside its subspace: the validation at the end uses tokens of
the whole space and rejects it.

Source. The positive result on multi-head attention in Bhattamishra, Shah, Hahn, Kanade, "Provably
Learning Attention with Queries".
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, finite_array
from keyhole.errors import InvalidArgument, WrongFamily
from keyhole.learners.base import Hypothesis
from keyhole.learners.multi_head.learner import MultiHead
from keyhole.learners.multi_head.validation import MultiHeadDiagnostics, find_counterexample
from keyhole.measurement.asker import Asker
from keyhole.models.attention import Attention, Head
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.wrappers.restrict import Subspace


@dataclass(frozen=True, eq=False)
class OrthogonalHeads:
    """Learner for a layer with scalar answers whose heads live in known orthogonal subspaces.

    Args:
        bases: Of each head, a basis (d, k_h) of its subspace.

    Example:
        >>> import numpy as np
        >>> OrthogonalHeads([np.eye(4)[:, :2], np.eye(4)[:, 2:]]).bases[0].shape
        (4, 2)
    """

    bases: Sequence[Array]

    def __post_init__(self) -> None:
        if not self.bases:
            raise InvalidArgument("OrthogonalHeads needs the basis of at least one head")
        stacked = np.concatenate([finite_array("basis", b, ndim=2) for b in self.bases], axis=1)
        gap = np.abs(stacked.T @ stacked - np.eye(stacked.shape[1])).max()
        if gap > 1e-10:
            raise InvalidArgument(
                f"the bases must be orthonormal and pairwise orthogonal; they deviate by {gap:.1e}"
            )

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        heads, bars, floor = [], [], 0.0
        for basis in self.bases:
            inside = MultiHead(heads=1, bias=False).learn_heads(Subspace(oracle, basis), rng)
            floor += inside.floor
            heads.append(lift_head(inside.model.heads[0], basis))
            bars.append(lift_head(inside.errors.heads[0], np.abs(basis)))
        model, errors = Attention(heads), Attention(bars)
        counterexample = find_counterexample(Asker(oracle), model, errors, rng)
        if counterexample is not None:
            raise WrongFamily("the heads do not live in the given subspaces alone", counterexample)
        diagnostics = MultiHeadDiagnostics(heads=len(heads))
        return Hypothesis(model, errors, floor, diagnostics=diagnostics)

    def expected_queries(self, spec: Spec) -> int | None:
        return sum(int(b.shape[1] ** 2 + b.shape[1] + 2) for b in self.bases) + 2


def lift_head(head: Head, basis: Array) -> Head:
    """The head in the coordinates of the whole space."""
    return Head((basis @ head.score, basis.T), basis @ head.key_bias, basis @ head.value)
