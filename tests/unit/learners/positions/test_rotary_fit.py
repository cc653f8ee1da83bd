"""Rotary positions fitted to synthetic log-ratios."""

import numpy as np
import pytest
from scipy.special import log_softmax

from keyhole.learners.positions.rotary_fit import Asked, Rotary, Waves, differentiate, fit_rotary
from keyhole.learners.positions.rotary_fit import split_head as split
from keyhole.learners.positions.soft import Ratios


def make_truth(rng: np.random.Generator, inner: int, width: int = 4) -> Rotary:
    """Two heads of two pairs, and so many dimensions that do not turn."""
    keys, queries = rng.standard_normal((2, 2, 4, width + 1))
    still = np.einsum(
        "hdi,hie->hde",
        rng.standard_normal((2, width, inner)),
        rng.standard_normal((2, inner, width + 1)),
    )
    return Rotary(np.array([1.0, 0.05]), keys, queries, still if inner else None)


def ask(truth: Rotary, inner: int, anchor: np.ndarray, moves: np.ndarray) -> Asked:
    """What exact answers tell, by the weights of all places."""
    distances = np.array([1, 2, 7, 30])
    waves, ratios = Waves(truth.frequencies), np.zeros((len(moves), 2, 4))
    copies = np.setdiff1d(np.arange(31), distances)
    for n, (some, h) in enumerate((some, h) for some in moves for h in range(2)):
        placed = np.concatenate([anchor + some, np.repeat(anchor[None], len(copies), axis=0)])
        every = np.concatenate([distances, copies])
        scores, _, _ = differentiate(split(truth, h, inner), waves, placed, anchor, every, 30)
        weights = log_softmax(scores)
        rest = np.log(np.exp(weights[4:]).sum())
        ratios[n // 2, h] = weights[:4] - rest
    return Asked(anchor, anchor + moves, distances, Ratios(ratios, np.full(ratios.shape, 1e-9)))


@pytest.mark.parametrize("inner", [0, 1])
def test_a_start_near_the_truth_is_led_to_it(inner: int) -> None:
    rng = np.random.default_rng(inner)
    truth = make_truth(rng, inner)
    first = ask(truth, inner, 0.3 * rng.standard_normal(4), 0.3 * rng.standard_normal((8, 4, 4)))
    others = [
        ask(truth, inner, 0.5 * rng.standard_normal(4), 0.3 * rng.standard_normal((3, 4, 4)))
        for _ in range(5)
    ]

    def stir(block: np.ndarray) -> np.ndarray:
        return np.asarray(block * (1.0 + 1e-4 * rng.standard_normal(block.shape)))

    scores = None if truth.scores is None else stir(truth.scores)
    start = Rotary(stir(truth.frequencies), stir(truth.keys), stir(truth.queries), scores)
    found, errors = fit_rotary(start, [first, *others], inner)
    assert np.abs(found.frequencies / truth.frequencies - 1.0).max() < 1e-7
    for h in range(2):  # keys and queries are known up to one complex factor per pair
        one, two = ((part[h][::2] + 1j * part[h][1::2]) for part in (found.keys, truth.keys))
        factors = one / two
        assert np.abs(factors / factors[:, :1] - 1.0).max() < 1e-6
    if inner:
        assert np.abs(found.scores - truth.scores).max() < 1e-6
    assert (errors.keys > 0).all()
    assert errors.keys.max() < 1e-6


def test_frequencies_of_float32_stay() -> None:
    rng = np.random.default_rng(5)
    truth = make_truth(rng, 0)
    groups = [
        ask(truth, 0, 0.3 * rng.standard_normal(4), 0.3 * rng.standard_normal((8, 4, 4)))
        for _ in range(6)
    ]
    start = Rotary(truth.frequencies, truth.keys, truth.queries, single=True)
    found, errors = fit_rotary(start, groups)
    assert np.array_equal(found.frequencies, truth.frequencies)
    assert not errors.frequencies.any()
