import numpy as np

from keyhole.learners.mlp.relu_fit import Data, fitted, gains, remaining_errors, rescaled
from keyhole.learners.mlp.relu_hypothesis import only, unflat
from keyhole.models.relu_network import ReluNetwork
from networks import network

NOISE = 1e-6


def sample(secret, count=600, seed=0):
    rng = np.random.default_rng(seed)
    points = rng.standard_normal((count, secret.width))
    noise = np.full(count, NOISE)
    return Data(points, secret(points) + NOISE * rng.standard_normal((count, 1)), noise)


def moved(secret, size, seed=1):
    rng = np.random.default_rng(seed)
    shift = size * rng.standard_normal(secret.weight.shape)
    return ReluNetwork(secret.weight + shift, secret.bias, secret.output)


def test_a_network_that_is_off_by_percents_is_fitted_to_the_noise():
    secret = unflat(network(0, 8, 12))
    data = sample(secret)
    found = fitted(moved(secret, 0.02), data)
    assert 0.5 < data.misfit(found) < 1.5
    fresh = sample(secret, seed=5)
    assert fresh.misfit(found) < 3


def test_errors_are_those_that_repetition_shows():
    secret = unflat(network(0, 6, 5))
    entries = []
    for seed in range(30):
        found = fitted(secret, sample(secret, 200, seed))
        entries.append(found.output * found.weight)
    seen = np.sqrt(np.mean(np.var(entries, axis=0), axis=1))
    data = sample(secret, 200)
    claimed = remaining_errors(fitted(secret, data), data)[1:]
    assert np.all((claimed > 0.5 * seen) & (claimed < 3 * seen))


def test_outputs_tell_wrong_neurons_from_right_ones():
    secret, other = unflat(network(0, 8, 6)), unflat(network(3, 8, 2))
    mixed = ReluNetwork(
        *(
            np.concatenate([getattr(net, name) for net in (secret, other)])
            for name in ("weight", "bias", "output")
        )
    )
    best, kept = rescaled(mixed, sample(secret))
    assert np.abs(kept[:6] - 1).max() < 1e-4
    assert np.abs(kept[6:]).max() < 1e-4
    assert np.abs(best.skip).max() < 1e-5


def test_the_missing_neuron_helps_most():
    secret, other = unflat(network(0, 8, 6)), unflat(network(3, 8, 4))
    data = sample(secret)
    known, _ = rescaled(only(secret, np.arange(5)), data)
    missing = only(secret, np.array([5]))
    assert gains(known, missing, data)[0] > 3 * gains(known, other, data).max()
