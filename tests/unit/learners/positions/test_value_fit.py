"""Value maps at the noise of their answers, where heads can hardly be kept apart."""

import numpy as np

import keyhole
from keyhole.learners.positions.value_fit import fit_values
from keyhole.learners.positions.values import ValueMaps, measure_value_maps
from keyhole.measurement.asker import Asker
from keyhole.models.attention import Attention, Head
from placed_layers import placed_layer


def nearly_dependent(seed: int) -> Attention:
    """Heads that share out the width, one direction of the last nearly in the others' ranges."""
    made, rng = placed_layer("rotary", 16, 4, seed), np.random.default_rng(seed)
    outs = np.linalg.qr(rng.standard_normal((16, 16)))[0]
    outs[15] = outs[:15].sum(axis=0) / 4.0 + 1e-2 * outs[15]
    ins = rng.standard_normal((4, 16, 4)) / 4.0
    heads = [
        Head(head.score, None, own @ outs[4 * h : 4 * h + 4])
        for h, (head, own) in enumerate(zip(made.heads, ins, strict=True))
    ]
    return Attention(heads, made.offset, None, made.position)


def find_misses(values: ValueMaps, truth: Attention) -> float:
    """The largest relative error of the maps, each beside the true one that is nearest."""
    true = [head.value for head in truth.heads]
    return max(
        min(float(np.linalg.norm(own - value) / np.linalg.norm(value)) for value in true)
        for own in values.maps
    )


def test_heads_that_are_hard_to_tell_apart() -> None:
    misses, fitted = [], []
    for seed in range(3):
        truth = nearly_dependent(seed)
        ask = Asker(keyhole.open_oracle(truth.astype(np.float32)))
        values = measure_value_maps(ask, np.random.default_rng(seed), None)
        assert isinstance(values, ValueMaps)
        found = fit_values(values, np.random.default_rng(1))
        misses.append(find_misses(values, truth))
        fitted.append(find_misses(found, truth))
        assert all(np.allclose(out @ out.T, np.eye(4), atol=1e-6) for out in found.outs)
        assert fitted[-1] < 10.0 * found.error
    assert max(fitted) < 1e-4
    assert np.median(fitted) < 0.2 * np.median(misses)


def test_maps_at_the_noise_are_left_as_they_are() -> None:
    ask = Asker(keyhole.open_oracle(placed_layer("linear bias", 8, 2, 0)))
    values = measure_value_maps(ask, np.random.default_rng(0), None)
    assert isinstance(values, ValueMaps)
    found = fit_values(values, np.random.default_rng(1))
    assert found is values or found.error < 1e-12
