"""Whole Transformer blocks and their sublayers: residuals, norms, attention, networks."""

from keyhole.learners.block.box import NotThisBlock, OtherShape, Unclear, open_block
from keyhole.learners.block.learner import (
    BlockLearner,
    count_block_queries,
    find_norm_place,
    fresh_sequences,
    name_block,
    sees_context,
    unknowns,
)
from keyhole.learners.block.pre_norm_mlp import find_kind
from keyhole.learners.block.refinement import inverse_of

__all__ = [
    "BlockLearner",
    "NotThisBlock",
    "OtherShape",
    "Unclear",
    "count_block_queries",
    "find_kind",
    "find_norm_place",
    "fresh_sequences",
    "inverse_of",
    "name_block",
    "open_block",
    "sees_context",
    "unknowns",
]
