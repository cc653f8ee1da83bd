import numpy as np
import pytest

from keyhole.learners.block.refinement import (
    form_of,
    forward,
    join_block,
    multiplied,
    refine_block,
    split_block,
)
from keyhole.models.canonical import canonical_block, distance
from keyhole.models.random import block

torch = pytest.importorskip("torch")


def secret(norm, **options):
    return block(np.random.default_rng(0), 6, heads=2, neurons=5, norm=norm, **options)


def start_of(norm):
    """The block in the form that the algebra finds it."""
    one = secret(norm)
    return join_block(split_block(canonical_block(one)), form_of(one))


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_the_torch_model_is_the_block(norm, activation):
    one = canonical_block(secret(norm, activation=activation))
    parts = split_block(one)
    assert distance(join_block(parts, form_of(one)), one) < 1e-12
    tokens = np.random.default_rng(1).standard_normal((3, 4, 6))
    tensors = {name: torch.tensor(part) for name, part in parts.items()}
    function = forward(form_of(one))
    answers = np.array([function(tensors, torch.as_tensor(query)) for query in tokens])
    assert np.allclose(answers, one(tokens), atol=1e-13)


def test_from_a_rough_start_to_rounding():
    norm = "pre"
    rng = np.random.default_rng(2)
    one = start_of(norm)
    tokens = [
        size * rng.standard_normal((number, length, 6))
        for length, size, number in ((1, 1.0, 30), (2, 1.0, 40), (3, 4.0, 30), (2, 0.02, 20))
    ]
    pairs = [(queries, secret(norm)(queries)) for queries in tokens]
    parts = split_block(one)
    rough = {name: part * (1.0 + 0.01 * rng.standard_normal(part.shape))
             for name, part in parts.items()}  # fmt: skip
    found = refine_block(join_block(rough, form_of(one)), pairs, 2.0**-53, rng)
    assert found.level < 3.0
    assert distance(found.block, secret(norm)) < 1e-9
    errors, truth = found.errors.to_arrays(), multiplied(found.block)
    assert set(errors) == set(truth)
    assert 0 < np.abs(errors["mlp.inner"]).max() < 1e-9
