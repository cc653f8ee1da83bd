import numpy as np
import pytest

from keyhole.errors import InvalidArgument
from keyhole.models.attention import Attention, Head
from keyhole.models.canonical import canonical, distance, product_norm
from keyhole.models.random import attention


def layer(seed: int = 0, **options: object) -> Attention:
    return attention(np.random.default_rng(seed), 6, bias=True, **options)  # type: ignore[arg-type]


def scaled(model: Attention, **factor: float) -> Attention:
    """Every head with score, key_bias or value times a factor, the offset too where named."""
    heads = [
        Head(
            factor.get("score", 1.0) * h.score,
            factor.get("key_bias", 1.0) * h.key_bias,
            factor.get("value", 1.0) * h.value,
        )
        for h in model.heads
    ]
    return Attention(heads, factor.get("offset", 1.0) * model.offset)


@pytest.mark.parametrize("block", ["score", "key_bias", "value", "offset"])
def test_distance_is_the_relative_error_of_the_worst_block(block: str) -> None:
    model = layer(heads=3)
    assert distance(model, model) == 0.0
    assert distance(scaled(model, **{block: 1.0 + 1e-6}), model) == pytest.approx(1e-6, rel=1e-6)


def test_heads_that_differ_in_their_key_bias_alone_are_matched() -> None:
    rng = np.random.default_rng(0)
    score, value = rng.standard_normal((4, 4)), rng.standard_normal(4)
    heads = [Head(score, bias, value) for bias in rng.standard_normal((3, 4))]
    assert distance(Attention(heads[::-1]), Attention(heads)) == 0.0


def test_a_zero_score_among_others_is_compared_in_their_units() -> None:
    rng = np.random.default_rng(1)
    big = Head(1e6 * rng.standard_normal((4, 4)), None, np.ones(4))
    zero, almost = (Head(s * np.eye(4), None, np.arange(4.0)) for s in (0.0, 1e-3))
    assert distance(Attention([big, almost]), Attention([big, zero])) < 1e-8
    alone = distance(Attention([almost]), Attention([zero]))
    assert alone == pytest.approx(2e-3)  # nothing to compare with: absolute


def test_equal_heads_act_as_one_and_dead_heads_do_not_count() -> None:
    (head,) = layer().heads
    halves = [Head(head.score, head.key_bias, 0.5 * head.value)] * 2
    dead = Head(np.ones((6, 6)), None, np.zeros(6))
    one = Attention([head], 1.0)
    assert distance(Attention([*halves, dead], 1.0), one) < 1e-15
    cancelled = Attention([head, Head(head.score, head.key_bias, -head.value)], 1.0)
    assert canonical(cancelled) is None
    assert distance(cancelled, Attention([dead], 1.0)) == 0.0
    assert distance(cancelled, one) == np.inf


def test_other_structures_are_infinitely_far() -> None:
    rng = np.random.default_rng(0)
    model = attention(rng, 4)
    others = [attention(rng, 5), attention(rng, 4, outputs=2), attention(rng, 4, heads=2)]
    assert [distance(model, other) for other in others] == [np.inf] * 3
    with pytest.raises(InvalidArgument, match="compare Attention with int"):
        distance(model, 3)
    with pytest.raises(InvalidArgument, match="no distance"):
        distance(3, model)


def test_the_gap_of_factored_scores_keeps_its_digits() -> None:
    rng = np.random.default_rng(3)
    left, right = rng.standard_normal((200, 3)), rng.standard_normal((3, 200))
    turn = np.linalg.qr(rng.standard_normal((3, 3)))[0]
    value = rng.standard_normal(200)
    a = Attention([Head((left, right), None, value)])
    b = Attention([Head((left @ turn, turn.T @ right), None, value)])
    assert distance(a, b) < 1e-14  # the same product from other factors
    nudged = Attention([Head((left * (1 + 1e-11), right), None, value)])
    assert distance(nudged, a) == pytest.approx(1e-11, rel=1e-3)
    dense = Attention([Head(left @ right, None, value)])
    assert distance(dense, a) < 1e-14


def test_product_norm() -> None:
    rng = np.random.default_rng(4)
    for rank in (1, 3, 9, 12):
        left, right = rng.standard_normal((9, rank)), rng.standard_normal((rank, 9))
        assert product_norm(left, right) == pytest.approx(float(np.linalg.norm(left @ right)))
