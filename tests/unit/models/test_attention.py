from typing import Any

import numpy as np
import pytest
from jaxtyping import TypeCheckError

from keyhole.errors import InvalidArgument
from keyhole.models.attention import Attention, Head, every_position
from keyhole.models.random import attention


def by_the_formula(model: Attention, sequence: np.ndarray) -> np.ndarray:
    """The definition, word for word, one sequence at a time."""
    answer = np.array(model.offset, dtype=float)
    for head in model.heads:
        scores = np.array([x @ (head.score @ sequence[-1] + head.key_bias) for x in sequence])
        weights = np.exp(scores) / np.exp(scores).sum()
        answer = answer + sum(w * (x @ head.value) for w, x in zip(weights, sequence, strict=True))
    return answer


@pytest.mark.parametrize("outputs", [None, 1, 3])
@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("heads", [1, 3])
def test_the_model_is_its_formula(heads: int, rank: int | None, outputs: int | None) -> None:
    rng = np.random.default_rng(5)
    model = attention(rng, 4, heads=heads, rank=rank, outputs=outputs, bias=True)
    tokens = rng.standard_normal((6, 5, 4))
    expected = np.array([by_the_formula(model, sequence) for sequence in tokens])
    np.testing.assert_allclose(model(tokens), expected, rtol=1e-13)
    assert model(tokens).shape == ((6,) if outputs is None else (6, outputs))


def test_one_token_is_linear_and_strong_scores_do_not_overflow() -> None:
    rng = np.random.default_rng(0)
    model = attention(rng, 4, bias=True, scale=1e8)
    token = rng.standard_normal((1, 1, 4))
    expected = model.offset + token[:, 0] @ model.heads[0].value
    np.testing.assert_allclose(model(token), expected, rtol=1e-14)
    assert np.isfinite(model(1e3 * rng.standard_normal((9, 7, 4)))).all()


def test_an_empty_batch_has_no_answers() -> None:
    assert attention(np.random.default_rng(0), 3)(np.zeros((0, 2, 3))).shape == (0,)


@pytest.mark.parametrize("shape", [(2, 3), (2, 0, 3), (2, 4, 5)])
def test_tokens_of_the_wrong_shape_are_refused(shape: tuple[int, ...]) -> None:
    model = attention(np.random.default_rng(0), 3)
    with pytest.raises(Exception, match=r"expected tokens of shape|[Tt]ype-check"):
        model(np.zeros(shape))


def test_factors_are_kept_and_multiply_out_to_the_score() -> None:
    left, right = np.random.default_rng(0).standard_normal((2, 5, 2))
    factored = Head((left, right.T), None, np.ones(5))
    dense = Head(left @ right.T, None, np.ones(5))
    assert factored.score_factors is not None
    assert (factored.rank_bound, dense.rank_bound) == (2, 5)
    np.testing.assert_array_equal(factored.score, dense.score)
    queries = np.random.default_rng(1).standard_normal((3, 5))
    np.testing.assert_allclose(factored.keys(queries), dense.keys(queries), rtol=1e-13)


def test_parameters_cannot_be_written_to_and_are_the_callers_no_more() -> None:
    score, value = np.eye(3), np.ones(3)
    head = Head(score, None, value)
    score[0, 0] = value[0] = 7.0
    assert head.score[0, 0] == head.value[0] == 1.0
    for array in (head.score, head.key_bias, head.value, Attention([head]).offset):
        assert not array.flags.writeable


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((np.ones((2, 3)), None, np.ones(2)), "square"),
        ((np.eye(2), np.ones(3), np.ones(2)), "key_bias has 3 rows"),
        ((np.eye(2), None, np.ones(3)), "value has 3 rows"),
        ((np.eye(2), None, np.ones((2, 2, 2))), "dimension"),
        (((np.ones((3, 1)), np.ones((2, 3))), None, np.ones(3)), r"\(d, r\) and \(r, d\)"),
        ((np.full((2, 2), np.nan), None, np.ones(2)), "score holds NaN"),
        ((np.zeros((0, 0)), None, np.zeros(0)), "width"),
        ((np.eye(2), None, np.zeros((2, 0))), "value"),
    ],
)
def test_impossible_heads_are_refused(parts: Any, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        Head(*parts)


def test_impossible_layers_are_refused() -> None:
    scalar, vector = Head(np.eye(2), None, np.ones(2)), Head(np.eye(2), None, np.ones((2, 3)))
    with pytest.raises(InvalidArgument, match="at least one head"):
        Attention([])
    with pytest.raises(InvalidArgument, match="disagree"):
        Attention([scalar, vector])
    with pytest.raises(InvalidArgument, match="offset"):
        Attention([vector], np.ones(2))
    assert Attention([vector], 2.0).offset.shape == (3,)


def test_astype_computes_in_the_other_precision() -> None:
    rng = np.random.default_rng(0)
    model = attention(rng, 6, heads=2, rank=2, bias=True)
    single, tokens = model.astype(np.float32), rng.standard_normal((4, 3, 6))
    assert single.dtype == single(tokens).dtype == np.float32
    gap = np.abs(single(tokens) - model(tokens)).max()
    assert 0 < gap < 1e-5


@pytest.mark.parametrize("rank", [None, 2])
def test_arrays_by_name_and_back(rank: int | None) -> None:
    model = attention(np.random.default_rng(1), 5, heads=2, rank=rank, outputs=2, bias=True)
    arrays = model.to_arrays()
    again = Attention.from_arrays(arrays)
    assert again.to_arrays().keys() == arrays.keys()
    assert all(np.array_equal(again.to_arrays()[name], arrays[name]) for name in arrays)
    with pytest.raises(InvalidArgument, match=r"heads\.1\.key_bias"):
        Attention.from_arrays({k: v for k, v in arrays.items() if k != "heads.1.key_bias"})


def test_tokens_of_the_natural_length_make_scores_of_order_one() -> None:
    rng = np.random.default_rng(2)
    for scale in (1e-4, 1.0, 1e3):
        for rank in (None, 2):
            model = attention(rng, 64, scale=scale, rank=rank)
            tokens = rng.standard_normal((400, 64)) * model.natural_length() / 8.0
            scores = np.einsum("nd,nd->n", tokens[::2], model.heads[0].keys(tokens[1::2]))
            assert 0.3 < np.std(scores) < 3.0
    assert Attention([Head(np.zeros((4, 4)), None, np.ones(4))]).natural_length() == 2.0


@pytest.mark.parametrize("outputs", [None, 3])
def test_each_position_is_an_anchor(outputs: int | None) -> None:
    rng = np.random.default_rng(0)
    model = attention(rng, 4, heads=2, outputs=outputs, bias=True)
    tokens = rng.standard_normal((5, 6, 4))
    answers = every_position(model, tokens)
    for position in range(6):
        order = [i for i in range(6) if i != position] + [position]
        np.testing.assert_allclose(answers[:, position], model(tokens[:, order]), rtol=1e-12)
    with pytest.raises((InvalidArgument, TypeCheckError)):
        every_position(model, tokens[0])


def test_a_skip_adds_the_anchor() -> None:
    rng = np.random.default_rng(0)
    plain = Attention([Head(rng.standard_normal((3, 3)), None, rng.standard_normal((3, 2)))])
    skip = rng.standard_normal((3, 2))
    tokens = rng.standard_normal((4, 5, 3))
    model = Attention(plain.heads, plain.offset, skip)
    assert np.allclose(model(tokens), plain(tokens) + tokens[:, -1] @ skip)
    again = Attention.from_arrays(model.to_arrays())
    assert np.array_equal(again(tokens), model(tokens))
    assert model.astype(np.float32)(tokens).dtype == np.float32
    assert "skip" in repr(model)
    with pytest.raises(InvalidArgument, match="skip must have"):
        Attention(plain.heads, plain.offset, np.eye(3))
