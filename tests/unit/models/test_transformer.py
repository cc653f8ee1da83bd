import numpy as np
import pytest

from keyhole.errors import InvalidArgument
from keyhole.models.transformer import TransformerModel
from networks import layer, network


def test_single_token_sees_the_network_alone():
    model = layer(0, 4, 6, key_bias=True)
    tokens = np.random.default_rng(0).standard_normal((5, 1, 4))
    assert model(tokens) == pytest.approx(model.network(tokens[:, 0]), abs=1e-14)


def test_zero_score_means_the_plain_mean():
    model = TransformerModel(np.zeros((4, 4)), None, network(0, 4, 6))
    tokens = np.random.default_rng(0).standard_normal((5, 7, 4))
    assert model(tokens) == pytest.approx(model.network(tokens.mean(axis=1)), abs=1e-14)


def test_residual_with_equal_mixing_is_no_residual():
    plain = layer(0, 4, 6)
    mixed = TransformerModel(plain.score, None, plain.network, plain.network.weight)
    tokens = np.random.default_rng(0).standard_normal((5, 7, 4))
    assert mixed.residual
    assert mixed(tokens) == pytest.approx(plain(tokens), abs=1e-13)


@pytest.mark.parametrize("residual", [False, True])
def test_arrays_round_trip(residual):
    model = layer(0, 4, 6, key_bias=True)
    if residual:
        model = TransformerModel(
            model.score, model.key_bias, model.network, 2 * model.network.weight
        )
    again = TransformerModel.from_arrays(model.to_arrays())
    tokens = np.random.default_rng(0).standard_normal((5, 7, 4))
    assert np.array_equal(model(tokens), again(tokens))


def test_score_of_another_width_is_refused():
    with pytest.raises(InvalidArgument, match="score"):
        TransformerModel(np.eye(3), None, network(0, 4, 6))


def test_large_scores_do_not_overflow():
    model = TransformerModel(1e4 * np.eye(3), None, network(0, 3, 5))
    assert np.isfinite(model(np.full((1, 4, 3), 10.0))).all()
