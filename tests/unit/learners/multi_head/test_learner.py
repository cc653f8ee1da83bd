"""Several heads: counts against the floor, errors against the bars, degenerate layers."""

import numpy as np
import pytest

import keyhole
from keyhole.errors import InvalidArgument, NotIdentifiable
from keyhole.learners.multi_head.learner import MultiHead
from keyhole.models.attention import Attention, Head
from keyhole.models.canonical import distance
from keyhole.models.random import attention
from keyhole.oracles.base import Domain, Spec
from keyhole.oracles.noise import NoiseModel
from multi_head_boxes import (
    ask_all,
    layer_box,
    layer_truth,
    pairs,
    random_layer,
    worst_bar,
)

ALLOWED = {8: 1.10, 16: 1.02, 32: 1.02}  # queries over the floor, heads given
ALLOWED_UNKNOWN = {8: 1.15, 16: 1.05, 32: 1.05}


def drawn(width: int, heads: int, seed: int, **kind: object) -> Attention:
    return attention(np.random.default_rng([seed, width, heads]), width, heads=heads, **kind)  # type: ignore[arg-type]


@pytest.mark.parametrize(("heads", "width"), [(1, 8), (2, 8), (4, 8), (1, 16), (2, 16), (8, 16)])
def test_scalar_heads_given(heads: int, width: int) -> None:
    ratios, errors = [], []
    for seed in range(5):
        secret = drawn(width, heads, seed)
        learned, oracle = ask_all(secret, width, MultiHead(heads=heads), seed)
        assert learned.floor == heads * (width**2 + width)
        ratios.append(oracle.paid / learned.floor)
        errors.append(distance(learned.model, secret))
        assert worst_bar(learned, secret) < 3
    assert np.median(ratios) <= ALLOWED[width]
    assert np.median(errors) < 1e-9
    assert max(errors) < 1e-7


@pytest.mark.parametrize(("heads", "width"), [(1, 16), (3, 8), (4, 16), (8, 16)])
def test_scalar_heads_unknown(heads: int, width: int) -> None:
    ratios, errors = [], []
    for seed in range(3):
        secret = drawn(width, heads, 10 + seed)
        learned, oracle = ask_all(secret, width, MultiHead(), seed)
        assert len(learned.model.heads) == heads
        ratios.append(oracle.paid / learned.floor)
        errors.append(distance(learned.model, secret))
    assert np.median(ratios) <= ALLOWED_UNKNOWN[width]
    assert max(errors) < 1e-7


def test_one_head_costs_what_a_single_head_costs() -> None:
    secret = drawn(12, 1, 0)
    learned, oracle = ask_all(secret, 12, MultiHead(heads=1, bias=False))
    assert oracle.paid <= 12**2 + 12 + 4  # validation, and now and then a longer first opening
    assert distance(learned.model, secret) < 1e-13


@pytest.mark.parametrize(("rank", "heads", "width"), [(4, 4, 16), (2, 3, 12)])
def test_low_rank_is_found_and_saves_queries(rank: int, heads: int, width: int) -> None:
    ratios = []
    for seed in range(5):
        secret = drawn(width, heads, seed, rank=rank)
        learned, oracle = ask_all(secret, width, MultiHead(), seed)
        assert learned.diagnostics.ranks == (rank,) * heads
        assert learned.floor == heads * (2 * rank * width - rank**2 + width)
        assert learned.model.heads[0].score_factors is not None
        assert distance(learned.model, secret) < 1e-6
        ratios.append(oracle.paid / learned.floor)
    assert np.median(ratios) < 1.15


def test_key_biases_and_offset_are_found() -> None:
    secret = drawn(10, 3, 1, bias=True)
    learned, oracle = ask_all(secret, 10, MultiHead())
    assert learned.floor == 3 * (10**2 + 2 * 10) + 1
    assert oracle.paid <= 1.1 * learned.floor
    assert distance(learned.model, secret) < 1e-7


@pytest.mark.parametrize("claim", [None, 3])
def test_key_biases_do_not_count_towards_the_rank(claim: int | None) -> None:
    """The keys W x + c span one dimension more than W; a claimed rank is that of W."""
    secret = drawn(8, 2, 1, rank=3, bias=True)
    learned, _ = ask_all(secret, 8, MultiHead(rank=claim))
    unknowns = 2 * (2 * 3 * 8 - 3**2 + 8 + 8) + 1  # score, key bias, value; offset
    assert learned.floor == unknowns == 111
    assert learned.diagnostics.ranks == (3, 3)
    assert learned.diagnostics.key_ranks == (4, 4)
    assert learned.model.heads[0].score_factors[0].shape == (8, 3)
    assert distance(learned.model, secret) < 1e-8


def test_key_biases_inside_the_range_of_the_scores() -> None:
    base = drawn(8, 2, 1, rank=3)
    heads = [Head(h.score, h.score @ np.arange(8.0), h.value) for h in base.heads]
    secret = Attention(heads, 1.0)
    learned, _ = ask_all(secret, 8, MultiHead())
    assert learned.diagnostics.ranks == learned.diagnostics.key_ranks == (3, 3)
    assert learned.floor == 2 * (3 * (2 * 8 + 1) - 3**2 + 8) + 1
    assert distance(learned.model, secret) < 1e-6


def test_equal_heads_merge_and_dead_heads_vanish() -> None:
    base = drawn(8, 3, 2)
    extra = np.random.default_rng(5)
    twin = Head(base.heads[0].score, None, extra.standard_normal(8))
    dead = Head(extra.standard_normal((8, 8)), None, np.zeros(8))
    secret = Attention([*base.heads, twin, dead])
    learned, _ = ask_all(secret, 8, MultiHead(heads=5))
    assert len(learned.model.heads) == 3
    assert any("5 heads were claimed, 3" in note for note in learned.notes)
    assert distance(learned.model, secret) < 1e-8


def test_a_uniform_head_is_found() -> None:
    base = drawn(8, 2, 3)
    flat = Head(np.zeros((8, 8)), None, np.random.default_rng(6).standard_normal(8))
    secret = Attention([*base.heads, flat])
    for claim in (3, None):
        learned, oracle = ask_all(secret, 8, MultiHead(heads=claim))
        assert sum(not head.score.any() for head in learned.model.heads) == 1
        assert distance(learned.model, secret) < 1e-8
        assert oracle.paid <= 1.15 * learned.floor


@pytest.mark.parametrize("claim", [1, None])
def test_only_uniform_heads(claim: int | None) -> None:
    secret = Attention([Head(np.zeros((6, 6)), None, np.arange(1.0, 7.0))])
    learned, oracle = ask_all(secret, 6, MultiHead(heads=claim))
    assert distance(learned.model, secret) < 1e-14
    assert oracle.paid < 20


@pytest.mark.parametrize("claim", [1, 2, None])
def test_a_silent_box_is_not_identifiable(claim: int | None) -> None:
    secret = Attention([Head(np.eye(4), None, np.zeros(4))])
    with pytest.raises(NotIdentifiable):
        ask_all(secret, 4, MultiHead(heads=claim))


@pytest.mark.parametrize("gap", [1e-1, 1e-2, 1e-3])
def test_near_equal_heads_lie_within_their_error_bars(gap: float) -> None:
    for seed in range(3):
        base = drawn(8, 3, 20 + seed)
        other = np.random.default_rng(seed).standard_normal((8, 8)) / np.sqrt(8)
        near = Head(base.heads[0].score + gap * other, None, base.heads[1].value)
        secret = Attention([base.heads[0], near, base.heads[2]])
        learned, _ = ask_all(secret, 8, MultiHead(heads=3), seed)
        for found, true, bar in pairs(learned, secret):
            assert np.linalg.norm(found.score - true.score) <= 3 * np.linalg.norm(bar.score)
            assert np.linalg.norm(found.value - true.value) <= 3 * np.linalg.norm(bar.value)


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_the_scale_of_scores_does_not_matter(scale: float) -> None:
    secret = drawn(8, 3, 4, scale=scale)
    learned, oracle = ask_all(secret, 8, MultiHead(heads=3))
    assert distance(learned.model, secret) < 1e-7
    assert oracle.paid <= 1.15 * learned.floor


def test_additive_noise_is_outgrown() -> None:
    secret, noise = drawn(8, 2, 5), np.random.default_rng(0)

    def box(tokens: np.ndarray) -> np.ndarray:
        return secret(tokens) + 1e-6 * noise.standard_normal(len(tokens))

    precision = NoiseModel(additive=1e-6)
    learned, _ = ask_all(box, 8, MultiHead(heads=2, bias=False), precision=precision)
    assert max(np.linalg.norm(a.score - b.score) for a, b, _ in pairs(learned, secret)) < 1e-7


def test_more_heads_than_dimensions() -> None:
    secret = drawn(4, 7, 6)
    learned, _ = ask_all(secret, 4, MultiHead())
    assert distance(learned.model, secret) < 1e-6


def test_same_seed_same_queries() -> None:
    secret, seen = drawn(6, 2, 7), []

    def box(tokens: np.ndarray) -> np.ndarray:
        seen.append(tokens.copy())
        return secret(tokens)

    ask_all(box, 6, MultiHead(), 3)
    half = len(seen)
    ask_all(box, 6, MultiHead(), 3)
    assert half * 2 == len(seen)
    for one, two in zip(seen[:half], seen[half:], strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(("width", "heads", "allowed"), [(32, 2, 1.5), (32, 8, 1.5), (64, 4, 1.15)])
def test_torch_layer_with_heads_and_width_unknown(width: int, heads: int, allowed: float) -> None:
    ratios = []
    for seed in range(3):
        layer = random_layer(width, heads, seed)
        truth = layer_truth(layer)
        learned, oracle = ask_all(layer_box(layer), width, MultiHead(), seed)
        inner = width // heads
        assert learned.floor == 4 * width + 2 - 2 * inner
        assert learned.diagnostics.value_ranks == (inner,) * heads
        ratios.append(oracle.paid / learned.floor)
        for found, true, bar in pairs(learned, truth):
            gap = np.linalg.norm(found.score - true.score)
            assert gap <= 1e-8 * np.linalg.norm(true.score)
            assert gap <= 3 * np.linalg.norm(bar.score)
            off = np.linalg.norm(found.value - true.value)
            assert off <= 1e-9 * np.linalg.norm(true.value)
    assert np.median(ratios) <= allowed


def test_vector_answers_that_do_not_separate_the_heads() -> None:
    secret = drawn(6, 3, 8, outputs=2, bias=True)
    learned, _ = ask_all(secret, 6, MultiHead())
    assert distance(learned.model, secret) < 1e-7
    (before,) = learned.tried
    assert "vector answers" in before.strategy
    assert "do not keep the heads apart" in before.ending
    recovery = keyhole.recover(secret, MultiHead())
    assert any(before.ending in note for note in recovery.notes)


@pytest.mark.parametrize(("width", "heads", "rank", "outputs"), [(8, 2, 4, 8), (12, 3, 2, 5)])
def test_overcomplete_layers_are_not_rejected(
    width: int, heads: int, rank: int, outputs: int
) -> None:
    for seed in range(3):
        secret = drawn(width, heads, seed, rank=rank, outputs=outputs)
        recovery = keyhole.recover(secret, MultiHead(), seed=seed)
        assert recovery.outcome is keyhole.Outcome.RECOVERED
        assert distance(recovery.model, secret) < 1e-6


def test_a_layer_without_biases_is_recovered() -> None:
    for seed in range(2):
        base = drawn(16, 3, seed, rank=4)
        rng = np.random.default_rng(seed)
        maps = [rng.standard_normal((16, 4)) @ rng.standard_normal((4, 16)) for _ in base.heads]
        secret = Attention(
            [Head(tuple(h.score_factors), None, m) for h, m in zip(base.heads, maps, strict=True)]
        )
        recovery = keyhole.recover(secret, MultiHead(), seed=seed)
        assert recovery.outcome is keyhole.Outcome.RECOVERED
        assert not any(head.key_bias.any() for head in recovery.model.heads)
        assert distance(recovery.model, secret) < 1e-8


def test_one_output_keeps_its_shape() -> None:
    secret = drawn(6, 2, 9, outputs=1)
    learned, _ = ask_all(secret, 6, MultiHead(heads=2))
    assert learned.model.outputs == 1
    assert distance(learned.model, secret) < 1e-7


def test_layer_narrower_than_its_width() -> None:
    rng = np.random.default_rng(0)
    heads = []
    for rank in (3, 4):
        left, right = rng.standard_normal((20, rank)), rng.standard_normal((rank, 20))
        value = rng.standard_normal((20, rank)) @ rng.standard_normal((rank, 12))
        heads.append(Head((left / 4, right / 4), left @ rng.standard_normal(rank), value))
    secret = Attention(heads, rng.standard_normal(12))
    learned, _ = ask_all(secret, 20, MultiHead())
    assert sorted(learned.diagnostics.value_ranks) == [3, 4]
    assert distance(learned.model, secret) < 1e-7


def test_claims_are_checked() -> None:
    with pytest.raises(InvalidArgument):
        MultiHead(heads=0)
    with pytest.raises(InvalidArgument):
        MultiHead(rank=-1)
    with pytest.raises(InvalidArgument):
        ask_all(drawn(4, 1, 0), 4, MultiHead(rank=5))
    assert MultiHead(heads=2).expected_queries(Spec(8)) == 2 * 72 + 12
    assert MultiHead().expected_queries(Spec(64, outputs=64)) is not None


def test_a_layer_with_bounded_tokens() -> None:
    layer = random_layer(24, 3, 0)
    domain = Domain(max_norm=8.0)
    learned, oracle = ask_all(layer_box(layer), 24, MultiHead(), domain=domain)
    assert learned.diagnostics.value_ranks == (8, 8, 8)
    assert oracle.paid <= 4 * learned.floor
    for found, true, bar in pairs(learned, layer_truth(layer)):
        gap = np.linalg.norm(found.score - true.score)
        assert gap <= 1e-4 * np.linalg.norm(true.score)
        assert gap <= 3 * np.linalg.norm(bar.score)
        off = np.linalg.norm(found.value - true.value)
        assert off <= 1e-5 * np.linalg.norm(true.value)


def test_a_vocabulary_that_spans_too_little_is_not_identifiable() -> None:
    with pytest.raises(NotIdentifiable, match="span"):
        ask_all(drawn(6, 2, 0), 6, MultiHead(), domain=Domain(vocabulary=np.eye(6)))


def test_float32_layer() -> None:
    layer = random_layer(32, 4, 1).float()
    learned, oracle = ask_all(layer_box(layer), 32, MultiHead())
    assert oracle.paid <= 2.8 * learned.floor
    errors = []
    for found, true, bar in pairs(learned, layer_truth(layer)):
        gap = np.linalg.norm(found.score - true.score)
        assert gap <= 3 * np.linalg.norm(bar.score)
        errors.append(gap / np.linalg.norm(true.score))
        off = np.linalg.norm(found.value - true.value)
        assert off <= 2e-5 * np.linalg.norm(true.value)
    assert np.median(errors) <= 2e-5


@pytest.mark.parametrize("seed", [20002, 20003, 20008, 20015])
def test_float32_layers_have_no_bad_head(seed: int) -> None:
    """Heads of small width, two of them behind one token, ranks misread, tokens seen badly."""
    layer = random_layer(32, 8, seed).float()
    truth = layer_truth(layer)
    learned, oracle = ask_all(layer_box(layer), 32, MultiHead(), seed)
    assert learned.diagnostics.ranks == (4,) * 8
    assert oracle.paid <= 3.0 * learned.floor
    for found, true, bar in pairs(learned, truth):
        gap = np.linalg.norm(found.score - true.score)
        assert gap <= 2e-3 * np.linalg.norm(true.score)
        assert gap <= 3 * np.linalg.norm(bar.score)


def test_float32_layer_with_heads_of_several_widths() -> None:
    rng, width = np.random.default_rng(0), 16
    heads = []
    for rank in (6, 3, 3):
        score = rng.standard_normal((width, 4)) @ rng.standard_normal((4, width)) / 8
        value = rng.standard_normal((width, rank)) @ rng.standard_normal((rank, width))
        heads.append(Head(score, None, value))
    secret = Attention(heads)
    learned, _ = ask_all(secret.astype(np.float32), width, MultiHead())
    assert sorted(learned.diagnostics.value_ranks) == [3, 3, 6]
    assert distance(learned.model, secret) < 1e-3


@pytest.mark.parametrize(("heads", "width", "allowed"), [(2, 8, 1.5), (4, 8, 1.5), (4, 16, 1.3)])
def test_float32_scalar_answers(heads: int, width: int, allowed: float) -> None:
    ratios, errors = [], []
    for seed in range(4):
        secret = drawn(width, heads, 30 + seed)
        learned, oracle = ask_all(secret.astype(np.float32), width, MultiHead(), seed)
        assert len(learned.model.heads) == heads
        assert worst_bar(learned, secret) < 3
        ratios.append(oracle.paid / learned.floor)
        errors.append(distance(learned.model, secret))
    assert np.median(ratios) <= allowed
    assert max(errors) < 1e-2
    assert np.median(errors) < 1e-3


def test_two_heads_behind_one_separator_are_told_apart_in_float32() -> None:
    secret = drawn(8, 8, 115)  # two of its heads attend to the same token of the first candidates
    recovery = keyhole.recover(secret.astype(np.float32), MultiHead(), seed=15)
    assert recovery.outcome is keyhole.Outcome.RECOVERED
    assert len(recovery.model.heads) == 8


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("width", "outputs"), [(1, 1), (2, 2), (4, 4), (8, 8), (8, 4), (8, 16)])
def test_one_head_with_vector_answers(width: int, outputs: int, bias: bool, single: bool) -> None:
    secret = drawn(width, 1, 0, outputs=outputs, bias=bias)
    box = secret.astype(np.float32) if single else secret
    recovery = keyhole.recover(box, MultiHead())
    assert recovery.outcome is keyhole.Outcome.RECOVERED
    assert len(recovery.model.heads) == 1
    assert distance(recovery.model, secret) < (1e-2 if single else 1e-9)


@pytest.mark.parametrize(("width", "heads", "outputs"), [(1, 2, 2), (2, 2, None), (2, 3, 2)])
def test_narrow_tokens(width: int, heads: int, outputs: int | None) -> None:
    secret = drawn(width, heads, 0, outputs=outputs, bias=True)
    recovery = keyhole.recover(secret, MultiHead())
    assert recovery.outcome is keyhole.Outcome.RECOVERED
    assert distance(recovery.model, secret) < 1e-6
