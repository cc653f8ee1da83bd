import numpy as np
import pytest

import keyhole
from keyhole.learners.block.box import NotThisBlock, open_block
from keyhole.learners.block.learner import (
    BlockLearner,
    drop_neurons,
    find_idle_neurons,
    find_norm_place,
    find_straight_neurons,
    refine_attention,
    unknowns,
    widen_scores,
)
from keyhole.learners.block.refinement import Refined, with_attention
from keyhole.models.attention import Attention, Head
from keyhole.models.block import Block
from keyhole.models.canonical import canonical_block
from keyhole.models.random import attention, block
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle

Outcome = keyhole.Outcome


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_two_tokens_tell_where_the_norm_is(norm):
    for seed in range(5):
        secret = block(np.random.default_rng(seed), 8, heads=2, neurons=8, norm=norm)
        box = open_block(FunctionOracle(secret, Spec(8)))
        assert find_norm_place(box, np.random.default_rng(seed)) == norm


@pytest.mark.parametrize(
    ("norm", "width", "heads"),
    [("post", 8, 2), ("post", 16, 4), ("post", 9, 1), ("pre", 8, 2), ("pre", 9, 1)],
)
def test_attention_with_a_residual_and_a_norm(norm, width, heads):
    secret = block(np.random.default_rng(1), width, heads=heads, norm=norm)
    found = keyhole.recover(secret, BlockLearner(), seed=1)
    assert found.outcome is Outcome.RECOVERED
    assert found.details["heads"] == heads
    kept = width - 1 if norm == "pre" else width  # numbers of a token that the scores see
    assert found.details["score_ranks"] == (min(width // heads, kept),) * heads
    assert keyhole.distance(found.model, secret) < 1e-10  # the algebra alone: 1e-8
    assert found.ledger.paid < 8.0 * found.ledger.floor


def test_a_torch_sublayer():
    torch = pytest.importorskip("torch")
    torch.manual_seed(3)

    class Sublayer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
            self.norm = torch.nn.LayerNorm(8)
            torch.nn.init.normal_(self.norm.bias)

        def forward(self, x):
            return self.norm(x + self.attention(x, x, x, need_weights=False)[0])

    module = Sublayer().double().eval()
    found = keyhole.recover(keyhole.open_oracle(module, width=8), BlockLearner())
    assert found.outcome is Outcome.RECOVERED
    fresh = np.random.default_rng(0).standard_normal((4, 5, 8))
    with torch.no_grad():
        answers = module(torch.tensor(fresh))[:, -1].numpy()
    assert np.allclose(found.model(fresh), answers, atol=1e-9)


def test_a_promise_that_is_not_kept():
    secret = block(np.random.default_rng(1), 8, heads=2)
    with pytest.raises(keyhole.WrongFamily, match="looks like a post-norm block"):
        keyhole.recover(secret, BlockLearner(norm="pre"))


def test_bad_promises_are_refused():
    with pytest.raises(keyhole.InvalidArgument, match="norm must be None or one of"):
        BlockLearner(norm="both")


def test_bounded_tokens_are_not_enough():
    secret = block(np.random.default_rng(1), 8, heads=2)
    with pytest.raises(keyhole.NotIdentifiable, match="tokens of any size"):
        keyhole.recover(keyhole.open_oracle(secret, max_norm=3.0), BlockLearner())


def noisy(model):
    rng = np.random.default_rng(0)
    return lambda x: model(x) * (1.0 + 1e-3 * rng.standard_normal((len(x), model.width)))


IMPOSTORS = {
    "dropout left on": noisy,
    "a window": lambda model: lambda x: model(x[:, -40:]),
    "clipped tokens": lambda model: lambda x: model(np.clip(x, -30.0, 30.0)),
    "a second sublayer": lambda model: lambda x: model.norms[0](model(x) + np.tanh(x[:, -1])),
}


@pytest.mark.parametrize("name", IMPOSTORS)
def test_impostors_are_not_recovered(name):
    secret = block(np.random.default_rng(4), 8, heads=2)
    box = keyhole.open_oracle(IMPOSTORS[name](secret), width=8)
    found = keyhole.recover(box, BlockLearner(), throw=False)
    assert found.outcome in (Outcome.REJECTED, Outcome.ILL_CONDITIONED)


def test_a_scalar_box_is_rejected():
    box = attention(np.random.default_rng(0), 8)
    found = keyhole.recover(box, BlockLearner(), throw=False)
    assert found.outcome is Outcome.REJECTED


def test_unknowns_of_a_post_norm_sublayer():
    secret = block(np.random.default_rng(0), 8, heads=2)
    # scores 2·4·8 - 16 + 4, values 4·15 - 16, offset 7, gain and bias 16, epsilon 1
    assert unknowns(secret) == 2 * (52 + 44) + 7 + 16 + 1


def test_neurons_without_a_part_in_the_answers_are_left_out():
    one = block(np.random.default_rng(5), 8, heads=2, neurons=6, norm="post", activation="gelu")
    parts = one.to_arrays()
    doubts = {name: np.full_like(part, 1e-9) for name, part in parts.items()}
    doubts |= {name: part for name, part in parts.items() if name.startswith("norm.")}
    errors = Block.from_arrays(doubts)
    assert not find_idle_neurons(Refined(one, errors, 1.0)).any()
    kept = np.arange(6) != 2
    parts["mlp.outer"] = parts["mlp.outer"] * kept + 1e-10 * ~kept
    idle = Block.from_arrays(parts)
    np.testing.assert_array_equal(find_idle_neurons(Refined(idle, errors, 1.0)), ~kept)
    fewer = drop_neurons(idle, ~kept)
    assert fewer.mlp.inner.shape == (5, 8)
    tokens = np.random.default_rng(6).standard_normal((4, 3, 8))
    np.testing.assert_allclose(fewer(tokens), idle(tokens), atol=1e-8)
    assert drop_neurons(idle, np.zeros(6, dtype=bool)) is None
    assert drop_neurons(idle, np.ones(6, dtype=bool)) is None


def test_neurons_that_hardly_bend_are_told():
    one = block(np.random.default_rng(5), 8, heads=2, neurons=6, norm="pre", activation="gelu")
    parts = one.to_arrays()
    assert not find_straight_neurons(one).any()
    straight = np.arange(6) == 4
    parts["mlp.inner"] = np.where(straight[:, None], 0.05, 1.0) * parts["mlp.inner"]
    np.testing.assert_array_equal(find_straight_neurons(Block.from_arrays(parts)), straight)


def rounded_queries(secret, count, lengths, rng):
    found = []
    for length in lengths:
        tokens = rng.standard_normal((count, length, secret.width)).astype(np.float32)
        answers = secret.astype(np.float32)(tokens)
        found.append((tokens.astype(float), answers.astype(float)))
    return found


def without_a_direction(secret):
    """The first head's score with one direction less."""
    first, *others = secret.attention.heads
    axes, sizes, rows = np.linalg.svd(first.score)
    rank = first.rank_bound - 1
    poor = Head((axes[:, :rank] * sizes[:rank], rows[:rank]), first.key_bias, first.value)
    return with_attention(secret, Attention([poor, *others], secret.attention.offset))


def test_a_score_of_too_small_a_rank_is_made_whole_by_random_queries():
    rng = np.random.default_rng(0)
    secret = canonical_block(block(rng, 8, heads=2))
    random = rounded_queries(secret, 25, (2, 3, 5, 8), rng)
    asked = rounded_queries(secret, 20, (1,), rng)
    start = without_a_direction(secret)
    wider = widen_scores(start, rng)
    assert [head.rank_bound for head in wider.attention.heads] == [4, 4]
    assert np.allclose(wider(random[1][0]), start(random[1][0]))
    found = refine_attention(start, asked, random, 2.0**-24, rng)
    assert found.level < 1.0
    assert keyhole.distance(found.block.attention, secret.attention) < 1e-4
    with pytest.raises(NotThisBlock):
        refine_attention(start, [*asked, *random], [], 2.0**-24, rng)


def test_attention_in_single_precision_asks_random_queries():
    secret = block(np.random.default_rng(2), 16, heads=4)
    found = keyhole.recover(secret.astype(np.float32), BlockLearner(), seed=2)
    assert found.outcome is Outcome.RECOVERED
    assert found.ledger.by_purpose["refinement"] > 0
    fresh = np.random.default_rng(3).standard_normal((50, 4, 16))
    assert np.abs(found.model(fresh) - secret(fresh)).max() < 1e-4
    exact = keyhole.recover(secret, BlockLearner(), seed=2)
    assert "refinement" not in exact.ledger.by_purpose
