import numpy as np
import pytest

from keyhole.learners.block.box import NotThisBlock, Paid, SearchLimit, Unclear, open_block
from keyhole.models.random import attention, block
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle


def test_single_precision_is_seen_and_tokens_are_rounded_like_the_box_does():
    secret = block(np.random.default_rng(0), 6, heads=2).astype(np.float32)
    box = open_block(FunctionOracle(secret, Spec(6)))
    tokens = np.random.default_rng(1).standard_normal((4, 3, 6))
    box(tokens, "test")
    assert box.noise.format == "float32"
    assert np.array_equal(box.representable(tokens), tokens.astype(np.float32))


def test_a_scalar_box_is_no_block():
    box = open_block(FunctionOracle(attention(np.random.default_rng(0), 6), Spec(6)))
    with pytest.raises(NotThisBlock, match="vector of its width"):
        box(np.ones((1, 2, 6)), "test")


def test_all_short_queries_are_kept_by_their_length():
    secret = block(np.random.default_rng(0), 6, heads=2)
    paid = Paid(FunctionOracle(secret, Spec(6)), 3)
    box, rng = open_block(paid), np.random.default_rng(1)
    for count, length in ((2, 3), (1, 1), (4, 3), (1, 4)):
        box(rng.standard_normal((count, length, 6)), "test")
    shapes = [tokens.shape for tokens, _ in paid.pairs()]
    assert shapes == [(1, 1, 6), (6, 3, 6)]
    assert all(np.array_equal(answers, secret(tokens)) for tokens, answers in paid.pairs())


def test_a_search_ends_after_so_many_queries():
    oracle = FunctionOracle(block(np.random.default_rng(0), 6, heads=2), Spec(6))
    box = open_block(SearchLimit(oracle, 5))
    box(np.ones((5, 1, 6)), "test")
    with pytest.raises(Unclear, match="within 5 queries"):
        box(np.ones((1, 1, 6)), "test")
