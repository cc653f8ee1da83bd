"""Sublayers without a norm, x + attention(X) and x + mlp(x): the residual is taken out, and the
learner of what is left does the rest. Both parts together are not solved here."""

from dataclasses import replace

import numpy as np

from keyhole.learners.base import Hypothesis
from keyhole.learners.mlp import MlpLearner
from keyhole.learners.multi_head import MultiHead
from keyhole.measurement.asker import Asker
from keyhole.models.attention import Attention
from keyhole.models.block import Block
from keyhole.oracles.wrappers.skip import WithoutSkip


def learn_without_norm(box: Asker, context: bool, rng: np.random.Generator) -> Hypothesis:
    """The sublayer as a block; `context` says whether it has attention."""
    rest = WithoutSkip(box.oracle, np.eye(box.width))
    found = (MultiHead() if context else MlpLearner()).learn(rest, rng)

    def wrap(part: object) -> Block:
        if isinstance(part, Attention):
            return Block(part, None, norm="none")
        return Block(None, part, norm="none")  # type: ignore[arg-type]

    model = wrap(found.model)
    return replace(
        found,
        model=model,
        errors=wrap(found.errors),
        notes=(f"The box is {model}.", *found.notes),
    )
