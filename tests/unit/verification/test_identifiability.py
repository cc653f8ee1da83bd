"""A witness differs in its parameters and agrees in every answer; the report names what is free."""

import numpy as np
import pytest

from keyhole.errors import NotIdentifiable
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from keyhole.verification.identifiability import (
    free_score,
    gauge,
    identifiability,
    shifted_values,
    witness,
    witnesses,
)


def planted(seed: int) -> Attention:
    """A random layer with one degeneracy: equal heads, or a head without value."""
    rng = np.random.default_rng(seed)
    width, heads = int(rng.integers(2, 9)), int(rng.integers(1, 4))
    outputs = None if seed % 3 else int(rng.integers(1, 5))
    model = attention(rng, width, heads=heads, outputs=outputs, bias=bool(seed % 2))
    first = model.heads[0]
    if seed % 4 < 2:
        extra = Head(first.score, first.key_bias, rng.standard_normal(first.value.shape))
    else:
        score = rng.standard_normal((width, width))
        extra = Head(score, rng.standard_normal(width), np.zeros(first.value.shape))
    order = rng.permutation(heads + 1)
    members = [*model.heads, extra]
    return Attention([members[i] for i in order], model.offset)


def apart(a: Attention, b: Attention) -> float:
    """Largest difference of corresponding parameters, without any regard to symmetries."""
    assert len(a.heads) == len(b.heads)
    return max(
        max(
            np.abs(x.score - y.score).max(),
            np.abs(x.key_bias - y.key_bias).max(),
            np.abs(x.value - y.value).max(),
        )
        for x, y in zip(a.heads, b.heads, strict=True)
    )


@pytest.mark.parametrize("block", range(4))
def test_witness_of_a_planted_degeneracy(block: int) -> None:
    for seed in range(25 * block, 25 * block + 25):
        model = planted(seed)
        found = witness(model, np.random.default_rng(seed))
        assert found.kind in ("shifted values", "free score")
        assert apart(model, found.model) >= 0.1
        rng = np.random.default_rng(1000 + seed)
        for length in (1, 2, 5, 17):
            tokens = rng.standard_normal((250, length, model.width))
            difference = np.abs(model(tokens) - found.model(tokens)).max()
            assert difference <= 1e-12 * max(1.0, np.abs(model(tokens)).max())


def test_a_generic_layer_has_only_conventional_witnesses() -> None:
    model = attention(np.random.default_rng(0), 6, heads=3, rank=2)
    found = witnesses(model, np.random.default_rng(1))
    assert {w.kind for w in found} == {"gauge", "order", "split head"}
    tokens = np.random.default_rng(2).standard_normal((100, 7, 6))
    for other in found:
        np.testing.assert_allclose(other.model(tokens), model(tokens), rtol=0, atol=1e-12)
    factors = found[0].model.heads[0].score_factors
    mine = model.heads[0].score_factors
    assert factors is not None
    assert mine is not None
    assert np.abs(factors.left - mine.left).max() > 0.1


def test_report() -> None:
    rng = np.random.default_rng(3)
    base = attention(rng, 5, heads=2)
    twin = Head(base.heads[1].score, None, rng.standard_normal(5))
    dead = Head(rng.standard_normal((5, 5)), None, np.zeros(5))
    close = Head(base.heads[0].score * 1.001, None, rng.standard_normal(5))
    report = identifiability(Attention([*base.heads, twin, dead, close]))
    assert not report.identifiable
    assert report.merged == ((1, 2),)
    assert report.dead == (3,)
    assert [(pair.first, pair.second) for pair in report.near] == [(0, 4)]
    assert 1e-8 < report.near[0].error < 1e-4
    text = " ".join(report.sentences())
    assert "heads 1, 2 attend alike" in text
    assert "head 3 has no value" in text
    clean = identifiability(base)
    assert clean.identifiable
    assert clean.sentences()[0].startswith("every score and value")


def test_values_that_cancel_make_heads_dead() -> None:
    head = attention(np.random.default_rng(4), 4).heads[0]
    opposite = Head(head.score, None, -head.value)
    other = attention(np.random.default_rng(5), 4).heads[0]
    report = identifiability(Attention([head, opposite, other]))
    assert report.dead == (0, 1)
    assert report.merged == ()


def test_witnesses_refuse_what_is_determined() -> None:
    model = attention(np.random.default_rng(6), 4, heads=2)
    rng = np.random.default_rng(7)
    for attempt in (
        lambda: shifted_values(model, 0, 1, rng),
        lambda: free_score(model, 0, rng),
        lambda: gauge(model, 0, rng),
    ):
        with pytest.raises(NotIdentifiable):
            attempt()
