import numpy as np
import pytest

from keyhole.learners.block.box import open_block
from keyhole.learners.block.refinement import with_attention
from keyhole.learners.block.soft_contexts import count_weights, find_scores
from keyhole.models.attention import Attention, Head
from keyhole.models.canonical import canonical_block
from keyhole.models.random import block
from keyhole.oracles.base import Domain, Spec
from keyhole.oracles.function import FunctionOracle


def without_scores(secret):
    none = np.zeros((secret.width, 1))
    heads = [Head((none, none.T), none[:, 0], head.value) for head in secret.attention.heads]
    return with_attention(secret, Attention(heads, secret.attention.offset))


@pytest.mark.parametrize(
    ("norm", "activation", "size"), [("post", "gelu", 1.0), ("pre", "relu", 10.0)]
)
def test_scores_from_none(norm, activation, size):
    secret = block(np.random.default_rng(3), 12, heads=2, neurons=16, norm=norm,
                   activation=activation)  # fmt: skip
    secret = canonical_block(secret)
    box = open_block(FunctionOracle(secret, Spec(12)))
    found, pairs = find_scores(box, without_scores(secret), size, np.random.default_rng(0))
    plane = secret.norms[0].plane
    for mine, head in zip(found.attention.heads, secret.attention.heads, strict=True):
        assert mine.rank_bound == 6
        right = plane @ plane.T if norm == "pre" else np.eye(12)
        off = right @ (mine.score - head.score) @ right
        assert np.linalg.norm(off) < 1e-2 * np.linalg.norm(head.score)
    assert sum(len(tokens) for tokens, _ in pairs) < 120


def test_contexts_are_as_long_as_the_box_takes():
    secret = block(np.random.default_rng(3), 12, heads=2, neurons=4, norm="pre")
    for longest, weights in ((None, 3), (3, 2)):
        box = open_block(FunctionOracle(secret, Spec(12, domain=Domain(max_length=longest))))
        assert count_weights(secret, box, 0.6) == weights
