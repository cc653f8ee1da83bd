"""One attempt of scalar_outputs: its stages, from one anchor to parameters."""

import numpy as np

from keyhole.errors import IllConditioned
from keyhole.learners.multi_head.base_anchor import first_column, partition
from keyhole.learners.multi_head.columns import other_columns, redesign
from keyhole.learners.multi_head.refinement import refine
from keyhole.learners.multi_head.replicates import all_uniform, conclude
from keyhole.learners.multi_head.short_sequences import (
    first_column_by_pairs,
    partition_by_pairs,
    redesign_by_pairs,
    values_by_pairs,
)
from keyhole.learners.multi_head.state import Columns, Draft, Flat, Scalar
from keyhole.linalg.bases import random_directions


def attempt(state: Scalar) -> Draft:
    """Runs all stages from a random anchor."""
    width, outputs = state.total.shape
    state.mix = np.ones(1)
    if outputs > 1:
        state.mix = np.asarray(state.rng.standard_normal(outputs))
    state.anchor = state.reach * random_directions(state.rng, 1, width)[0]
    if state.heads == 1:
        state.set_values(state.total[None], np.zeros((width, 0)))
        state.chamber = state.chamber_at(state.anchor, None)
    elif state.pairs:
        partition_by_pairs(state)
    else:
        partition(state)
    if not len(state.values):
        return all_uniform(state)
    state.records = [Columns(rank=state.rank, searching=state.rank is None) for _ in state.values]
    if state.pairs and not state.chamber.alone:
        first_column_by_pairs(state)
        values_by_pairs(state)
        redesign_by_pairs(state)
        other_columns(state)
        return conclude(state)
    try:
        first_column(state)
    except Flat:
        if len(state.values) > 1:
            raise IllConditioned("a head does not react to any opening") from None
        return all_uniform(state)
    redesign(state)
    refine(state)
    other_columns(state)
    return conclude(state)
