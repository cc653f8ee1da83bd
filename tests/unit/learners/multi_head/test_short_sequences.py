"""Sequences too short for a token per head: pairs, what they tell and what they cannot."""

import numpy as np
import pytest

import keyhole
from keyhole.errors import IllConditioned, NotIdentifiable, WrongFamily
from keyhole.learners.multi_head.learner import MultiHead
from keyhole.learners.multi_head.short_sequences import FEWEST, explain_ambiguity
from keyhole.models.attention import Attention, Head
from keyhole.models.canonical import distance
from keyhole.models.random import attention
from keyhole.oracles.base import Domain
from multi_head_boxes import ask_all, layer_box, layer_truth, random_layer, worst_bar

WIDTH = 6
PAIRS = Domain(max_length=2)


def drawn(heads: int, seed: int = 0, width: int = WIDTH, **kind: object) -> Attention:
    return attention(np.random.default_rng([seed, width, heads]), width, heads=heads, **kind)  # type: ignore[arg-type]


def mirrored(head: Head) -> Head:
    return Head(-head.score, -head.key_bias, -head.value)


def with_uniform(model: Attention, value: np.ndarray) -> Attention:
    return Attention([*model.heads, Head(np.zeros((WIDTH, WIDTH)), None, value)])


@pytest.mark.parametrize(("heads", "width", "most"), [(2, 8, 1.6), (4, 16, 1.25), (8, 16, 1.25)])
def test_pairs_suffice(heads: int, width: int, most: float) -> None:
    for seed in range(3):
        secret = drawn(heads, seed, width)
        learned, oracle = ask_all(secret, width, MultiHead(), seed, domain=PAIRS)
        assert oracle.paid <= most * learned.floor
        assert learned.floor == heads * (width**2 + width)
        assert distance(learned.model, secret) < 1e-7
        assert worst_bar(learned, secret) < 3
        assert FEWEST in learned.notes


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6, 8, 12])
def test_every_length_is_served(length: int) -> None:
    """Where a token per head does not fit, pairs are asked."""
    secret = drawn(4)
    learned, _ = ask_all(secret, WIDTH, MultiHead(), domain=Domain(max_length=length))
    assert distance(learned.model, secret) < 1e-7


@pytest.mark.parametrize("length", [2, 3, 6])
def test_real_layers(length: int) -> None:
    layer = random_layer(8, 2, 0)
    truth, domain = layer_truth(layer), Domain(max_length=length)
    learned, _ = ask_all(layer_box(layer), 8, MultiHead(), domain=domain)
    assert distance(learned.model, truth) < 1e-6
    assert worst_bar(learned, truth) < 3
    assert learned.floor == pytest.approx(4 * 8 + 2 - 2 * 4, rel=0.05)


def test_pairs_with_biases_low_rank_and_few_digits() -> None:
    biased = drawn(3, bias=True)
    assert distance(ask_all(biased, WIDTH, MultiHead(), domain=PAIRS)[0].model, biased) < 1e-7
    narrow = drawn(2, rank=2)
    learned, _ = ask_all(narrow, WIDTH, MultiHead(), domain=PAIRS)
    assert learned.diagnostics.ranks == (2, 2)
    assert distance(learned.model, narrow) < 1e-7
    coarse = drawn(2, 1, 8)
    learned, _ = ask_all(coarse.astype(np.float32), 8, MultiHead(), domain=PAIRS)
    assert distance(learned.model, coarse) < 0.05
    assert worst_bar(learned, coarse) < 3


def test_mirror_images_answer_all_pairs_alike() -> None:
    """What the refusal below rests on: two layers, one answer to pairs, another to triples."""
    rng = np.random.default_rng(0)
    plain = with_uniform(drawn(2), rng.standard_normal(WIDTH))
    turned, uniform = plain.heads[0], plain.heads[2]
    other = Attention(
        [
            mirrored(turned),
            plain.heads[1],
            Head(uniform.score, None, uniform.value + 2 * turned.value),
        ]
    )
    pair, triple = rng.standard_normal((50, 2, WIDTH)), rng.standard_normal((50, 3, WIDTH))
    np.testing.assert_allclose(plain(pair), other(pair), atol=1e-12)
    assert np.abs(plain(triple) - other(triple)).max() > 0.1


def ambiguous() -> dict[str, Attention]:
    rng, base = np.random.default_rng(1), drawn(3)
    first, second, third = base.heads
    return {
        "uniform": with_uniform(base, rng.standard_normal(WIDTH)),
        "opposite": Attention([first, Head(-first.score, None, second.value), third]),
        "cancelling": Attention([first, Head(second.score, None, -first.value), third]),
    }


@pytest.mark.parametrize("kind", ["uniform", "opposite", "cancelling"])
def test_what_pairs_cannot_tell_is_said(kind: str) -> None:
    secret = ambiguous()[kind]
    with pytest.raises(NotIdentifiable, match="mirror image"):
        ask_all(secret, WIDTH, MultiHead(), domain=PAIRS)
    assert explain_ambiguity(secret) is not None
    assert explain_ambiguity(drawn(3)) is None
    longer, _ = ask_all(secret, WIDTH, MultiHead(), domain=Domain(max_length=8))
    assert distance(longer.model, secret) < 1e-7


def test_three_tokens_tell_a_uniform_head() -> None:
    secret = ambiguous()["uniform"]
    learned, _ = ask_all(secret, WIDTH, MultiHead(), domain=Domain(max_length=3))
    assert distance(learned.model, secret) < 1e-7
    with pytest.raises(IllConditioned, match="max_length=3"):
        ask_all(ambiguous()["opposite"], WIDTH, MultiHead(), domain=Domain(max_length=3))


def test_pairs_in_a_bounded_domain_cannot_tell_either() -> None:
    first, second, third = drawn(3, width=4).heads
    secret = Attention([first, Head(second.score, None, -first.value), third])
    with pytest.raises(NotIdentifiable, match="mirror image"):
        ask_all(secret, 4, MultiHead(), domain=Domain(max_length=2, max_norm=2.0))


def test_claims_and_single_tokens() -> None:
    with pytest.raises(WrongFamily):
        ask_all(drawn(2), WIDTH, MultiHead(heads=1), domain=PAIRS)
    learned, _ = ask_all(drawn(2), WIDTH, MultiHead(heads=3), domain=PAIRS)
    assert any("3 heads were claimed" in note for note in learned.notes)
    with pytest.raises(NotIdentifiable, match="single token"):
        ask_all(drawn(2), WIDTH, MultiHead(), domain=Domain(max_length=1))


def test_recover_with_pairs() -> None:
    secret = drawn(2)
    recovery = keyhole.recover(keyhole.open_oracle(secret, width=WIDTH, max_length=2), MultiHead())
    assert recovery.outcome is keyhole.Outcome.RECOVERED
    assert recovery.verdict.agrees
    assert keyhole.distance(recovery.model, secret) < 1e-7
