"""A head from its labels: error, queries, error bars, codings, domains."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import keyhole
from boxes import CountingBox, in_float32
from keyhole.learners.label_only import LabelOnly
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from keyhole.models.sign_attention import Coding, LabelledAttention, normalised
from keyhole.oracles.wrappers.degrade import BITS, Labels
from keyhole.verification.tolerance import allow_labels


def with_value(model: Attention, value: np.ndarray) -> Attention:
    return Attention([Head(model.heads[0].score, None, value)])


def score_error(found: Any, truth: Attention) -> float:
    """Largest error of an entry of the score relative to the largest entry."""
    gap = np.abs(found.heads[0].score - truth.heads[0].score).max()
    return float(gap / np.abs(truth.heads[0].score).max())


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e2])
def test_twenty_bits_at_the_floor(scale: float, zeros: bool) -> None:
    secret = attention(np.random.default_rng(11), 16, scale=scale)
    if zeros:
        secret = with_value(secret, np.where(np.arange(16) % 3, 0.0, secret.heads[0].value))
    box = CountingBox(lambda x: np.sign(secret(x)), 16)
    found = keyhole.recover(box, LabelOnly(bits=20), seed=3)
    floor = 20 * (16 * 16 + 16 - 1)
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert found.ledger.paid == box.seen
    assert found.ledger.floor == floor
    assert found.errors.to_arrays().keys() == found.model.to_arrays().keys()
    assert box.seen <= 1.1 * floor
    assert score_error(found.model, secret) <= 3 * 2.0**-20
    direction = secret.heads[0].value / np.linalg.norm(secret.heads[0].value)
    assert np.abs(found.model.heads[0].value - direction).max() <= 2.0**-22
    assert keyhole.distance(found.model, secret) <= 8 * 2.0**-20


@pytest.mark.parametrize("bits", [8, 14, 32, 40])
def test_error_follows_the_bits(bits: int) -> None:
    secret = attention(np.random.default_rng(2), 6)
    found = LabelOnly(bits).learn(Labels(keyhole.open_oracle(secret)), np.random.default_rng(0))
    assert 2.0**-bits / 50 < score_error(found.model, secret) <= 4 * 2.0**-bits


CODINGS: dict[str, tuple[Callable[[np.ndarray], Any], Coding]] = {
    "-1, 0, 1": (np.sign, Coding(-1, 0, 1)),
    "-1, 1": (lambda f: np.where(f > 0, 1, -1), Coding(-1, -1, 1)),
    "0, 1": (lambda f: (f > 0).astype(np.int64), Coding(0, 0, 1)),
    "0, 1 with ties up": (lambda f: (f >= 0).astype(np.float32), Coding(0, 1, 1)),
    "False, True": (lambda f: f > 0, Coding(0, 0, 1)),
    "a column": (lambda f: np.sign(f)[:, None], Coding(-1, 0, 1)),
}


@pytest.mark.parametrize("name", [n for n in CODINGS if n != "a column"])
def test_the_coding_is_found(name: str) -> None:
    code, coding = CODINGS[name]
    secret = attention(np.random.default_rng(4), 5)
    box = keyhole.open_oracle(lambda x: code(secret(x)), width=5)
    found = keyhole.recover(box, LabelOnly(bits=16))
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert found.model.coding == coding
    assert score_error(found.model, secret) <= 4 * 2.0**-16
    fresh = np.random.default_rng(9).standard_normal((200, 5, 5))
    np.testing.assert_array_equal(found.model(fresh), np.asarray(code(secret(fresh)), dtype=float))


def test_a_column_of_labels_is_read_too() -> None:
    secret = attention(np.random.default_rng(4), 5)
    box = keyhole.open_oracle(lambda x: np.sign(secret(x))[:, None], width=5)
    found = LabelOnly(bits=12).learn(box, np.random.default_rng(0))
    assert score_error(found.model, secret) <= 4 * 2.0**-12


def test_error_bars_are_honest() -> None:
    inside, values = [], []
    for seed in range(8):
        secret = attention(np.random.default_rng(seed), 8, scale=10.0 ** (seed % 3 - 1))
        found = LabelOnly(bits=18).learn(
            Labels(keyhole.open_oracle(secret)), np.random.default_rng(seed)
        )
        truth, mine, error = (m.heads[0] for m in (normalised(secret), found.model, found.errors))
        inside.append(np.abs(mine.score - truth.score) <= 2 * error.score)
        values.append(np.abs(mine.value - truth.value) <= 2 * error.value)
    assert 0.90 <= np.mean(inside) <= 0.99
    assert np.mean(values) >= 0.90


@pytest.mark.parametrize("width", [1, 2, 3])
def test_narrow_boxes(width: int) -> None:
    secret = attention(np.random.default_rng(width), width)
    found = keyhole.recover(Labels(keyhole.open_oracle(secret)), LabelOnly())
    assert score_error(found.model, secret) <= 4 * 2.0**-20


def structured(name: str, width: int) -> Attention:
    rng = np.random.default_rng(8)
    if name == "rank one":
        return attention(rng, width, rank=1)
    if name == "identity":
        return Attention([Head(np.eye(width), None, rng.standard_normal(width))])
    if name == "one entry":
        score = np.zeros((width, width))
        score[1, 2] = 3.0
        return Attention([Head(score, None, np.ones(width))])
    return with_value(attention(rng, width), -2.0 * np.eye(width)[3])


@pytest.mark.parametrize("name", ["rank one", "identity", "one entry", "value along an axis"])
@pytest.mark.parametrize("coding", [Coding(), BITS], ids=["signs", "bits"])
def test_structure_does_no_harm(name: str, coding: Coding) -> None:
    secret = structured(name, 10)
    found = keyhole.recover(Labels(keyhole.open_oracle(secret), coding), LabelOnly())
    assert score_error(found.model, secret) <= 4 * 2.0**-20
    assert found.ledger.paid <= 1.2 * found.ledger.floor


def test_a_score_of_zero_is_bounded() -> None:
    secret = Attention([Head(np.zeros((6, 6)), None, np.arange(1.0, 7.0))])
    found = keyhole.recover(Labels(keyhole.open_oracle(secret)), LabelOnly())
    assert not found.model.heads[0].score.any()
    assert 0 < found.errors.heads[0].score.max() < 1e-12
    assert any("No score was seen" in note for note in found.notes)


@pytest.mark.parametrize(
    "domain",
    [{"max_norm": 1.0}, {"max_norm": 0.02}, {"low": -0.3, "high": 2.0}, {"max_length": 2}],
    ids=str,
)
def test_queries_stay_in_the_domain(domain: dict[str, Any]) -> None:
    secret = attention(np.random.default_rng(5), 6)

    def strict(tokens: np.ndarray) -> np.ndarray:
        assert tokens.shape[1] <= domain.get("max_length", 10**6)
        assert tokens.min() >= domain.get("low", -np.inf)
        assert tokens.max() <= domain.get("high", np.inf)
        longest = np.linalg.norm(tokens, axis=2).max()
        assert longest <= domain.get("max_norm", np.inf) * (1 + 1e-12)
        return np.sign(secret(tokens))

    box = keyhole.open_oracle(strict, width=6, **domain)
    found = keyhole.recover(box, LabelOnly())
    assert score_error(found.model, secret) <= 4 * 2.0**-20


def test_impossible_domains_are_refused_before_any_query() -> None:
    secret = attention(np.random.default_rng(5), 4)
    box = CountingBox(lambda x: np.sign(secret(x)), 4)
    words = np.random.default_rng(0).standard_normal((50, 4))
    for domain in ({"vocabulary": words}, {"low": 0.0, "high": 1.0}):
        with pytest.raises(keyhole.Unsupported):
            keyhole.recover(keyhole.open_oracle(box, **domain), LabelOnly())  # type: ignore[arg-type]
    with pytest.raises(keyhole.NotIdentifiable, match="one token"):
        keyhole.recover(keyhole.open_oracle(box, max_length=1), LabelOnly())
    assert box.seen == 0


@pytest.mark.parametrize("longest", [1e-3, 1e-5, 1e-6, 1e-7, 1e-9])
def test_short_tokens_show_less_of_the_score_and_that_is_said(longest: float) -> None:
    secret = attention(np.random.default_rng(5), 6)
    box = Labels(keyhole.open_oracle(secret, max_norm=longest))
    found = keyhole.recover(box, LabelOnly(), throw=False)
    if found.outcome is keyhole.Outcome.ILL_CONDITIONED:
        assert longest < 1e-6
        return
    assert found.outcome is keyhole.Outcome.RECOVERED
    gap = np.abs(found.model.heads[0].score - secret.heads[0].score)
    assert (gap <= 4 * found.errors.heads[0].score).all()
    assert longest < 1e-4 or score_error(found.model, secret) <= 4 * 2.0**-20
    assert longest > 1e-8 or any("No score was seen" in note for note in found.notes)


@pytest.mark.parametrize("bits", [12, 20, 26])
def test_a_float32_box_gets_honest_errors(bits: int) -> None:
    inside = []
    for seed in range(3):
        secret = attention(np.random.default_rng(seed), 8)
        single = in_float32(secret)
        box = keyhole.open_oracle(lambda x, f=single: np.sign(f(x)), width=8)
        found = keyhole.recover(box, LabelOnly(bits), seed=seed)
        gap = np.abs(found.model.heads[0].score - secret.heads[0].score)
        inside.append(gap <= 2 * found.errors.heads[0].score)
        assert score_error(found.model, secret) <= 4 * 2.0 ** -min(bits, 20)
    assert np.mean(inside) >= 0.9


def test_same_seed_same_queries() -> None:
    secret = attention(np.random.default_rng(6), 4)
    runs = []
    for seed in (1, 1, 2):
        seen: list[bytes] = []

        def box(x: np.ndarray, seen: list[bytes] = seen) -> np.ndarray:
            seen.append(x.tobytes())
            return np.sign(secret(x))

        keyhole.recover(keyhole.open_oracle(box, width=4), LabelOnly(10), seed=seed)
        runs.append(b"".join(seen))
    assert runs[0] == runs[1] != runs[2]


def test_the_forecast_is_close() -> None:
    secret = attention(np.random.default_rng(7), 12)
    learner, box = LabelOnly(), Labels(keyhole.open_oracle(secret))
    found = keyhole.recover(box, learner)
    assert learner.expected_queries(box.spec) == pytest.approx(found.ledger.paid, rel=0.05)


def test_bits_are_checked() -> None:
    for bits in (0, 41):
        with pytest.raises(keyhole.InvalidArgument, match="bits"):
            LabelOnly(bits)


def test_verification_of_labels_is_sharp() -> None:
    """A clearly wrong label is a counterexample even though labels look like bfloat16 numbers."""
    secret = attention(np.random.default_rng(3), 6)
    other = attention(np.random.default_rng(4), 6)
    box = Labels(keyhole.open_oracle(secret))
    assert keyhole.verify(box, LabelledAttention(secret, Coding())).agrees
    assert not keyhole.verify(box, LabelledAttention(other, Coding())).agrees


def test_the_step_of_labels_is_not_a_tolerance() -> None:
    """Labels are multiples of one; a margin of a third is still no tie."""
    model = LabelledAttention(attention(np.random.default_rng(3), 6), Coding())
    tokens = np.random.default_rng(0).standard_normal((200, 5, 6))
    allowed = allow_labels(
        model, None, tokens, keyhole.NoiseModel(2.0**-8, step=1.0), np.random.default_rng(1)
    )
    assert not allowed.any()
