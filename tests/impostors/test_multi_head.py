"""Layers that are not what they claim must be rejected, with a counterexample."""

from collections.abc import Callable

import numpy as np
import pytest

import keyhole
from keyhole.errors import WrongFamily
from keyhole.learners.multi_head.learner import MultiHead
from keyhole.models.attention import Attention
from keyhole.models.random import attention
from multi_head_boxes import ask_all

WIDTH = 8


def altered(change: Callable[[np.ndarray], np.ndarray], outputs: int | None) -> Callable:
    """Two heads whose scores are changed before the softmax, as a function of position."""
    rank = None if outputs is None else 2
    model = attention(np.random.default_rng(0), WIDTH, heads=2, outputs=outputs, rank=rank)
    rng = np.random.default_rng(1)
    values = [h.value for h in model.heads]
    if outputs is not None:
        values = [rng.standard_normal((WIDTH, 2)) @ rng.standard_normal((2, outputs))] * 2

    def box(tokens: np.ndarray) -> np.ndarray:
        answer = 0.0
        for head, value in zip(model.heads, values, strict=True):
            scores = change(np.einsum("nld,nd->nl", tokens, head.keys(tokens[:, -1])))
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            answer = answer + np.einsum("nl,nld,d...->n...", weights, tokens, value)
        return np.asarray(answer)

    return box


def window(scores: np.ndarray) -> np.ndarray:
    """Only the last ten tokens are seen."""
    masked = scores.copy()
    masked[:, :-10] = -np.inf
    return masked


def every_third(scores: np.ndarray) -> np.ndarray:
    masked = scores.copy()
    masked[:, 1:-1:3] = -np.inf
    return masked


def cap(scores: np.ndarray) -> np.ndarray:
    return np.asarray(5 * np.tanh(scores / 5))


def alibi(scores: np.ndarray) -> np.ndarray:
    return np.asarray(scores + 0.05 * np.arange(scores.shape[1]))


def temperature(scores: np.ndarray) -> np.ndarray:
    changed = scores.copy()
    changed[:, 0] *= 1.3
    return changed


CHANGES = [window, every_third, cap, alibi, temperature]


@pytest.mark.parametrize("outputs", [None, WIDTH])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("claim", [2, None])
def test_altered_scores(change: Callable, outputs: int | None, claim: int | None) -> None:
    with pytest.raises(WrongFamily) as caught:
        ask_all(altered(change, outputs), WIDTH, MultiHead(heads=claim, attempts=2))
    example = caught.value.counterexample
    assert example is not None
    assert example.input.shape[1] == WIDTH
    assert not np.allclose(example.box_answer, example.model_answer, rtol=1e-11, atol=0)


@pytest.mark.parametrize("heads", [2, 3, 5])
def test_one_head_more_than_claimed(heads: int) -> None:
    for seed in range(3):
        secret = attention(np.random.default_rng(seed), WIDTH, heads=heads)
        with pytest.raises(WrongFamily) as caught:
            ask_all(secret, WIDTH, MultiHead(heads=heads - 1, attempts=2), seed)
        example = caught.value.counterexample
        assert example is not None
        assert not np.allclose(example.box_answer, example.model_answer, rtol=1e-12, atol=0)


def test_one_head_more_than_claimed_in_a_layer() -> None:
    rng = np.random.default_rng(3)
    model = attention(rng, 12, heads=3, rank=2)
    values = [rng.standard_normal((12, 2)) @ rng.standard_normal((2, 12)) for _ in range(3)]
    layer = Attention([type(h)(h.score, None, v) for h, v in zip(model.heads, values, strict=True)])
    with pytest.raises(WrongFamily):
        ask_all(layer, 12, MultiHead(heads=2, attempts=2))


@pytest.mark.parametrize("heads", [1, 2, None])
def test_not_attention_at_all(heads: int | None) -> None:
    rng = np.random.default_rng(0)
    hidden, out = rng.standard_normal((WIDTH, 16)), rng.standard_normal(16)

    def box(tokens: np.ndarray) -> np.ndarray:
        return np.asarray(np.tanh(tokens.mean(axis=1) @ hidden) @ out)

    with pytest.raises(WrongFamily) as caught:
        ask_all(box, WIDTH, MultiHead(heads=heads, attempts=2))
    assert caught.value.counterexample is not None


@pytest.mark.parametrize("length", [2, 3, 6])
@pytest.mark.parametrize("outputs", [None, WIDTH])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_altered_scores_in_short_sequences(
    change: Callable, outputs: int | None, length: int
) -> None:
    """Never a model that the box denies; what shows in longer sequences alone is no lie."""
    box = keyhole.open_oracle(altered(change, outputs), width=WIDTH, max_length=length)
    found = keyhole.recover(box, MultiHead(attempts=2), throw=False)
    if found.outcome is keyhole.Outcome.RECOVERED:
        tokens = np.random.default_rng(2).standard_normal((100, length, WIDTH))
        np.testing.assert_allclose(found.model(tokens), altered(change, outputs)(tokens), atol=1e-6)
    else:
        assert found.model is None or not found.verdict.agrees


def test_attention_over_a_memory_of_its_own_is_refused() -> None:
    """The box looks like a layer of width 8, but its keys and values are not its tokens."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True).double()
    memory = torch.randn(1, 4, 8, dtype=torch.float64)

    def box(tokens: np.ndarray) -> np.ndarray:
        kept = memory.expand(len(tokens), -1, -1)
        with torch.no_grad():
            return layer(torch.tensor(tokens[:, -1:]), kept, kept)[0][:, 0].numpy()

    for learner in (keyhole.Auto(), keyhole.MultiHead()):
        found = keyhole.recover(keyhole.open_oracle(box, width=8), learner, throw=False)
        assert found.outcome is not keyhole.Outcome.RECOVERED
