"""Attention with positions is recovered, and what only looks like it is not."""

from dataclasses import replace

import numpy as np
import pytest

import keyhole
from keyhole.learners.base import Inconclusive, Refuted
from keyhole.learners.positions import Positions, learner
from keyhole.learners.positions.candidate import rotary_base, shorten_table
from keyhole.learners.positions.kinds import PositionKind, recognise_positions
from keyhole.learners.positions.learner import excuse_few_digits
from keyhole.measurement.asker import Asker
from placed_layers import placed_layer


@pytest.mark.parametrize("kind", ["rotary", "linear bias", "bias by distance"])
def test_every_kind_is_recovered(kind: str) -> None:
    truth = placed_layer(kind, 8, 2, 3)
    found = keyhole.recover(truth, seed=1)
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert found.model.position.kind == kind
    assert keyhole.distance(found.model, truth) < 1e-6
    assert found.details["family"] == "attention with positions"


def test_a_window_is_found_with_its_length() -> None:
    truth = placed_layer("none", 8, 2, 4, window=20)
    found = keyhole.recover(truth, seed=2)
    assert found.model.position.window == 20
    assert keyhole.distance(found.model, truth) < 1e-6


def test_masked_places_at_the_start_are_found() -> None:
    truth = placed_layer("none", 8, 2, 4, masked=2)
    found = keyhole.recover(truth, seed=2)
    assert found.model.position.masked == 2
    assert found.model.position.masked_anchor is None
    assert keyhole.distance(found.model, truth) < 1e-6


def test_a_masked_anchor_shows_the_offset_alone() -> None:
    plain = placed_layer("none", 8, 2, 4, masked=1)
    truth = keyhole.Attention(
        plain.heads, plain.offset, None, replace(plain.position, masked_anchor=True)
    )
    assert np.allclose(truth(np.ones((1, 1, 8))), plain.offset)
    found = keyhole.recover(truth, seed=2)
    assert found.model.position.masked_anchor
    assert keyhole.distance(found.model, truth) < 1e-6
    assert keyhole.distance(found.model, plain) == np.inf


def test_vectors_of_places_are_found() -> None:
    truth = placed_layer("position vectors", 8, 2, 6)
    found = keyhole.recover(keyhole.open_oracle(truth, max_length=24), seed=4)
    assert found.model.position.kind == "position vectors"
    assert keyhole.distance(found.model, truth) < 1e-6


def test_few_tokens_in_a_window_may_win_wherever_they_stand() -> None:
    truth = placed_layer("rotary", 8, 2, 5, window=12)
    kind = recognise_positions(Asker(keyhole.open_oracle(truth)), np.random.default_rng(5), None)
    assert kind.name == "additive"  # the winners of both bags did not change with the order
    found = keyhole.recover(truth, Positions(), seed=5)
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert found.model.position.kind == "rotary, window"


def test_turning_keys_are_found_where_winners_kept_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    truth = placed_layer("rotary", 8, 2, 3)
    monkeypatch.setattr(learner, "recognise_positions", lambda *_: PositionKind("additive"))
    found = keyhole.recover(truth, Positions(), seed=1)
    assert found.model.position.kind == "rotary"
    assert keyhole.distance(found.model, truth) < 1e-6


def test_rotary_extrapolates() -> None:
    truth = placed_layer("rotary", 8, 2, 5)
    found = keyhole.recover(truth, seed=3)
    far = [found.model.score_at(h, 100_000) for h in range(2)]
    true = [truth.score_at(h, 100_000) for h in range(2)]
    gaps = [min(np.linalg.norm(a - b) / np.linalg.norm(b) for a in far) for b in true]
    assert max(gaps) < 1e-4


def gated_order(tokens: np.ndarray) -> np.ndarray:
    """Attention whose score looks at the token before: content-dependent order."""
    rng = np.random.default_rng(0)
    score, value = rng.standard_normal((2, 6, 6)) / 2
    before = np.concatenate([np.zeros_like(tokens[:, :1]), tokens[:, :-1]], axis=1)
    scores = (tokens * before.sum(axis=2, keepdims=True)) @ (tokens[:, -1] @ score.T)[:, :, None]
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.asarray((weights * tokens).sum(axis=1) @ value)


def convolved(tokens: np.ndarray) -> np.ndarray:
    """A convolution over neighbours before attention."""
    rng = np.random.default_rng(1)
    score, value = rng.standard_normal((2, 6, 6)) / 2
    before = np.concatenate([tokens[:, :1], tokens[:, :-1]], axis=1)
    mixed = 0.7 * tokens + 0.3 * before
    scores = mixed @ (tokens[:, -1] @ score.T)[:, :, None]
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights /= weights.sum(axis=1, keepdims=True)
    return np.asarray((weights * mixed).sum(axis=1) @ value)


def convolved_keys(tokens: np.ndarray) -> np.ndarray:
    """A convolution over neighbours in the scores alone: tokens far apart do not show it."""
    rng = np.random.default_rng(2)
    left, right = rng.standard_normal((2, 2, 8, 4))
    into, out = rng.standard_normal((2, 2, 8, 4)) / 2
    before = np.concatenate([np.zeros_like(tokens[:, :1]), tokens[:, :-1]], axis=1)
    answer = np.zeros((len(tokens), 8))
    for h in range(2):
        query = tokens[:, -1] @ right[h] @ left[h].T / 8
        scores = (0.7 * tokens + 0.3 * before) @ query[:, :, None]
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        answer += (weights * tokens).sum(axis=1) @ into[h] @ out[h].T
    return answer


def gated_neighbours(tokens: np.ndarray) -> np.ndarray:
    """Tokens behind one with a larger first entry count for less: huge ones act as with rotary
    positions, near ones have weights that no heads have."""
    before = np.concatenate([tokens[:, :1, :1], tokens[:, :-1, :1]], axis=1)
    gate = np.where(before > tokens[:, :, :1], 0.5, 1.0)
    return np.asarray(placed_layer("none", 8, 2, 0)(gate * tokens))


def recurrent(tokens: np.ndarray) -> np.ndarray:
    """A linear recurrence over the tokens."""
    state = np.zeros((len(tokens), tokens.shape[2]))
    for step in range(tokens.shape[1]):
        state = 0.5 * state + tokens[:, step]
    return state


@pytest.mark.parametrize(
    ("box", "width"),
    [(gated_order, 6), (convolved, 6), (convolved_keys, 8), (gated_neighbours, 8), (recurrent, 6)],
)
def test_what_only_looks_like_positions_is_not_recovered(box: object, width: int) -> None:
    """Most of these fail in a stage that reads value maps or weights: no single answer of theirs is
    one that no attention with positions gives."""
    found = keyhole.recover(keyhole.open_oracle(box, width=width), seed=0, throw=False)
    assert found.outcome in (keyhole.Outcome.REJECTED, keyhole.Outcome.ILL_CONDITIONED)
    assert found.model is None or found.verdict.counterexample is not None


def test_bounded_tokens_are_refused() -> None:
    box = keyhole.open_oracle(placed_layer("rotary", 4, 2, 0), max_norm=1.0)
    with pytest.raises(keyhole.KeyholeError):
        keyhole.recover(box, Positions())


def test_the_base_of_frequencies() -> None:
    assert rotary_base(1e4 ** (-np.arange(4) / 4)) == pytest.approx(1e4)
    assert rotary_base(np.array([1.0, 0.01])) == pytest.approx(1e4)
    assert rotary_base(np.array([0.9, 0.01])) is None
    assert rotary_base(np.array([1.0, 0.3, 0.2, 0.01])) is None
    assert rotary_base(np.array([1.0, 0.3, 0.1, -1e-9])) is None


def test_a_constant_end_is_cut_off() -> None:
    table = np.array([[0.0, 1.0, 2.0, 3.0, 3.0, 3.0], [0.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    assert shorten_table(table).shape == (2, 4)
    assert shorten_table(table[:, :4]).shape == (2, 4)


def test_a_stage_refutes_nothing_with_fewer_digits_than_it_decides_by() -> None:
    refuted = Refuted("the tokens in use cannot be named")
    layer = placed_layer("rotary", 4, 2, 0)
    exact, single = (Asker(keyhole.open_oracle(box)) for box in (layer, layer.astype(np.float32)))
    for ask in (exact, single):
        ask(np.ones((1, 1, 4)), "test")
    assert excuse_few_digits(refuted, exact) is refuted
    assert isinstance(excuse_few_digits(refuted, single), Inconclusive)
    shown = Refuted("x", keyhole.errors.Counterexample(np.zeros((1, 2)), 1.0, 0.0))
    assert excuse_few_digits(shown, single) is shown
