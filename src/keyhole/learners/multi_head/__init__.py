"""Attention with several heads.

What happens, in order: hard_attention (which token each head selects), separators (one separating
token per head), soft_probe (one head probed, the others isolated); with these isolated_heads and
joint_heads recover layers whose tokens may be of any size, and token_pairs those that take
only a few tokens. bounded_tokens and random_queries are for bounded domains, least_squares refines
with the rest of a budget, skip finds a skip connection beside the heads, known_subspaces is for
heads whose subspaces are given.
"""

from keyhole.learners.multi_head.half_precision import (
    CoarseValues,
    measure_coarse_values,
    measure_rounding,
)
from keyhole.learners.multi_head.known_subspaces import OrthogonalHeads
from keyhole.learners.multi_head.learner import MultiHead
from keyhole.learners.multi_head.validation import MultiHeadDiagnostics, find_counterexample

__all__ = [
    "CoarseValues",
    "MultiHead",
    "MultiHeadDiagnostics",
    "OrthogonalHeads",
    "find_counterexample",
    "measure_coarse_values",
    "measure_rounding",
]
