"""Labels that no layer gives must never get a clean verdict."""

import numpy as np
import pytest

from keyhole.learners.examples.learner import FromExamples
from keyhole.models.attention import Attention, Head, every_position
from keyhole.recovery import TELLING_STARTS, learn
from keyhole.results import Outcome

RNG = np.random.default_rng(0)
D, K, N = 6, 4, 30


def layer(rng: np.random.Generator, heads: int) -> Attention:
    members = []
    for _ in range(heads):
        score = rng.standard_normal((D, D))
        members.append(Head(score / np.linalg.norm(score), None, rng.standard_normal((D, D))))
    return Attention(members, np.zeros(D))


X = RNG.choice([-1.0, 1.0], (N, K, D))
Y = every_position(layer(RNG, 2), X)
OTHER = every_position(layer(RNG, 2), X)


def causal() -> np.ndarray:
    model = layer(np.random.default_rng(1), 2)
    return np.stack([model(X[:, : a + 1]) for a in range(K)], axis=1)


IMPOSTORS = {
    "shuffled": lambda: Y[np.random.default_rng(2).permutation(N)],
    "shifted by one": lambda: np.roll(Y, 1, axis=0),
    "positions shifted": lambda: np.roll(Y, 1, axis=1),
    "two models, half each": lambda: np.where(np.arange(N)[:, None, None] % 2, Y, OTHER),
    "two models, one in ten": lambda: np.where(np.arange(N)[:, None, None] % 10, Y, OTHER),
    "one foreign label": lambda: np.where(np.arange(N)[:, None, None] != 7, Y, OTHER),
    "behind a ReLU": lambda: np.maximum(Y, 0.0),
    "behind a tanh": lambda: np.tanh(Y),
    "a skip connection": lambda: Y + X,
    "causal mask": causal,
    "pure noise": lambda: np.random.default_rng(3).standard_normal(Y.shape),
}


FOREIGN = ("shuffled", "shifted by one", "pure noise")  # not near any layer


@pytest.mark.parametrize("name", IMPOSTORS)
def test_is_not_recovered(name: str) -> None:
    found = learn(X, IMPOSTORS[name](), FromExamples(restarts=TELLING_STARTS), throw=False)
    assert found.outcome is not Outcome.RECOVERED
    assert found.reason
    if name not in FOREIGN:
        return
    assert found.outcome is Outcome.REJECTED
    assert found.verdict is not None
    assert not found.verdict.agrees
    example = found.verdict.counterexample
    assert example is not None
    assert example.input.shape == (K, D)
    assert np.abs(example.box_answer - example.model_answer).max() > 0.1


def test_the_honest_labels_are_recovered() -> None:
    assert learn(X, Y).outcome is Outcome.RECOVERED


@pytest.mark.parametrize("labels", [Y, OTHER])
def test_a_search_that_hardly_began_rejects_nothing(labels: np.ndarray) -> None:
    found = learn(X, labels, FromExamples(restarts=1), throw=False)
    assert found.outcome is Outcome.BUDGET_EXHAUSTED
