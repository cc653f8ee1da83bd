"""What distance must not see, and what it must."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from keyhole.models.attention import Attention, Head
from keyhole.models.canonical import canonical, distance
from keyhole.models.random import attention

# strategies draw plain numbers; models are built in the tests, where their shapes are checked
plans = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "width": st.integers(1, 6),
        "heads": st.integers(1, 4),
        "rank": st.none() | st.integers(1, 3),
        "outputs": st.none() | st.integers(1, 3),
        "bias": st.booleans(),
        "scale": st.integers(-8, 8),
    }
)


def built(plan: dict[str, Any]) -> Attention:
    rank = None if plan["rank"] is None else min(plan["rank"], plan["width"])
    options = {**plan, "rank": rank, "scale": 10.0 ** plan["scale"]}
    return attention(np.random.default_rng(options.pop("seed")), options.pop("width"), **options)


def nudged(model: Attention, size: float, seed: int) -> Attention:
    """Every parameter off by a relative normal error."""
    rng = np.random.default_rng(seed)
    arrays = {
        name: np.asarray(array * (1.0 + size * rng.standard_normal(array.shape)))
        for name, array in model.to_arrays().items()
    }
    return Attention.from_arrays(arrays)


@given(plans, st.randoms())
def test_the_order_of_heads_does_not_matter(plan: dict[str, Any], random: object) -> None:
    model = built(plan)
    heads = list(model.heads)
    random.shuffle(heads)  # type: ignore[attr-defined]
    other = Attention(heads, model.offset)
    assert distance(other, model) < 1e-14
    assert distance(model, other) < 1e-14


@given(plans, st.integers(0, 3), st.floats(-3.0, 3.0))
def test_splitting_a_head_does_not_matter(plan: dict[str, Any], which: int, share: float) -> None:
    model = built(plan)
    head = model.heads[which % len(model.heads)]
    score = head.score_factors or head.score
    parts = [Head(score, head.key_bias, s * head.value) for s in (share, 1.0 - share)]
    rest = [h for h in model.heads if h is not head]
    assert distance(Attention([*parts, *rest], model.offset), model) < 1e-14


@given(plans)
def test_a_dead_head_does_not_matter(plan: dict[str, Any]) -> None:
    model = built(plan)
    dead = Head(np.ones((model.width, model.width)), None, np.zeros_like(model.heads[0].value))
    assert distance(Attention([dead, *model.heads], model.offset), model) < 1e-14


@given(plans)
def test_factors_and_their_product_are_one_score(plan: dict[str, Any]) -> None:
    model = built(plan)
    dense = [Head(h.score, h.key_bias, h.value) for h in model.heads]
    assert distance(Attention(dense, model.offset), model) < 1e-14


@given(plans, st.integers(0, 2**32), st.floats(-9.0, -3.0))
def test_distance_is_the_size_of_the_error_and_nearly_symmetric(
    plan: dict[str, Any], seed: int, exponent: float
) -> None:
    model = built(plan)
    other = nudged(model, 10.0**exponent, seed)
    there, back = distance(other, model), distance(model, other)
    assert there <= 20 * 10.0**exponent
    assert abs(there - back) <= 0.1 * there


@settings(max_examples=30)
@given(plans)
def test_the_canonical_form_is_the_same_function_and_its_own_canonical_form(
    plan: dict[str, Any],
) -> None:
    model = built(plan)
    doubled = Attention([*model.heads, *model.heads], model.offset)
    form = canonical(doubled)
    assert form is not None
    assert len(form.heads) == len(model.heads)
    tokens = np.random.default_rng(0).standard_normal((5, 3, model.width))
    np.testing.assert_allclose(form(tokens), doubled(tokens), rtol=1e-9, atol=1e-9)
    again = canonical(form)
    assert again is not None
    assert distance(again, form) < 1e-14
