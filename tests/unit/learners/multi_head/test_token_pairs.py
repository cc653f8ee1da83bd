"""Sequences too short for a token per head: pairs, what they tell and what they cannot."""

import numpy as np
import pytest

import keyhole
from keyhole.errors import IllConditioned, NotIdentifiable, WrongFamily
from keyhole.learners.multi_head.learner import MultiHead
from keyhole.learners.multi_head.soft_probe import probe_heads
from keyhole.learners.multi_head.token_pairs import (
    FEWEST,
    LinearArc,
    PivotIsolation,
    build_unit_vectors,
    design_pivots,
    explain_ambiguity,
    find_signs,
    measure_uniform_value,
    sweep_angles,
)
from keyhole.models.attention import Attention, Head
from keyhole.models.canonical import distance
from keyhole.models.random import attention
from keyhole.oracles.base import Domain
from multi_head_boxes import ask_all, asker, layer_box, layer_truth, random_layer, worst_bar

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


# --- stages on exact inputs -----------------------------------------------------------------------


def keys_at(model: Attention, anchor: np.ndarray) -> np.ndarray:
    return np.stack([h.score @ anchor + h.key_bias for h in model.heads])


def test_an_arc_is_linear_in_the_token() -> None:
    coefficients = np.array([[1.0], [-2.0]])
    angles = np.array([0.1, 0.3])
    arc = LinearArc(angles, build_unit_vectors(angles) @ coefficients)
    np.testing.assert_allclose(arc.coefficients, coefficients, atol=1e-13)
    answer = build_unit_vectors(np.array([1.0]))[0] @ coefficients
    assert arc.measure_misfit(1.0, answer) < 1e-13
    assert arc.add(1.0, answer).amplification < arc.amplification
    total = np.array([[3.0], [3.0]])
    np.testing.assert_allclose(arc.reverse(total).coefficients, total - coefficients, atol=1e-12)


def test_the_sweep_finds_every_head_where_it_switches() -> None:
    model, anchor = drawn(3, 5), 1e-2 * np.random.default_rng(6).standard_normal(WIDTH)
    total = sum(h.value for h in model.heads)[:, None]
    found = sweep_angles(asker(model, WIDTH), anchor, total, np.random.default_rng(7))
    assert len(found.angles) == 3
    aside = np.abs(found.tokens @ keys_at(model, anchor).T)
    owners = aside.argmin(axis=1)  # a head switches where the token is at right angles to its key
    assert sorted(owners) == [0, 1, 2]
    assert aside.min(axis=1).max() < 1e-6 * np.linalg.norm(anchor)
    for jump, owner in zip(found.jumps, owners, strict=True):
        value = model.heads[owner].value
        assert min(np.abs(jump[:, 0] - value).max(), np.abs(jump[:, 0] + value).max()) < 1e-6
    assert found.find_counterexample(np.random.default_rng(8)) is None


def test_only_one_choice_of_signs_adds_up() -> None:
    values = np.random.default_rng(9).standard_normal((4, 6))
    signs = np.array([1.0, -1.0, -1.0, 1.0])
    np.testing.assert_array_equal(find_signs(values, signs @ values, 1e-9), signs[None])
    assert len(find_signs(values, np.ones(6), 1e-9)) == 0
    many = np.random.default_rng(10).standard_normal((20, 30))
    np.testing.assert_array_equal(find_signs(many, many.sum(axis=0), 1e-9), np.ones((1, 20)))


def test_pivots_leave_their_head_undecided_and_no_other() -> None:
    rng = np.random.default_rng(11)
    keys, values = rng.standard_normal((2, 4, WIDTH))
    pivots = design_pivots(keys, values, rng)
    seen = pivots @ (keys / np.linalg.norm(keys, axis=1, keepdims=True)).T
    assert np.abs(np.diag(seen)).max() < 1e-12
    assert np.abs(seen[~np.eye(4, dtype=bool)]).min() > 1 - 1e-12
    assert not design_pivots(keys[:1], values[:1], rng).any()


def test_a_probe_beside_a_pivot_is_read_as_one_head() -> None:
    model, anchor = drawn(2, 12), np.full(WIDTH, 0.1)
    keys, values = keys_at(model, anchor), np.stack([h.value for h in model.heads])
    pivots = 100 * design_pivots(keys, values, np.random.default_rng(13)) / np.linalg.norm(keys)
    sides = (pivots @ keys.T > 0).astype(float)
    np.fill_diagonal(sides, 0.0)
    total = values.sum(axis=0)
    setup = PivotIsolation(
        anchor, np.full(2, anchor @ total), values, None, np.ones(1), total, pivots, sides, 40.0
    )
    probes = 0.2 * np.eye(WIDTH) + 0.1 * values[0]
    got = probe_heads(asker(model, WIDTH), setup, np.zeros(WIDTH, int), probes, "test")
    np.testing.assert_allclose(np.linalg.solve(got.probes, got.log_odds), keys[0], atol=1e-9)
    assert setup.holds(keys)
    assert not setup.holds(-keys)


def test_three_tokens_measure_a_uniform_head() -> None:
    value, anchor = np.arange(6.0), np.full(WIDTH, 1e-2)
    model = with_uniform(drawn(2), value)
    total, rng = sum(h.value for h in model.heads)[:, None], np.random.default_rng(14)
    found = measure_uniform_value(asker(model, WIDTH), anchor, total, rng)
    assert found is not None
    np.testing.assert_allclose(found[:, 0], value, atol=1e-8)
    plain = drawn(2)
    total = sum(h.value for h in plain.heads)[:, None]
    assert measure_uniform_value(asker(plain, WIDTH), anchor, total, rng) is None
