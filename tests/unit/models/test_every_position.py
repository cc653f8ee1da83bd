import numpy as np
import pytest
from jaxtyping import TypeCheckError

from keyhole.errors import InvalidArgument
from keyhole.models.every_position import every_position
from keyhole.models.random import attention


@pytest.mark.parametrize("outputs", [None, 3])
def test_each_position_is_a_query(outputs: int | None) -> None:
    rng = np.random.default_rng(0)
    model = attention(rng, 4, heads=2, outputs=outputs, bias=True)
    tokens = rng.standard_normal((5, 6, 4))
    answers = every_position(model, tokens)
    for position in range(6):
        order = [i for i in range(6) if i != position] + [position]
        np.testing.assert_allclose(answers[:, position], model(tokens[:, order]), rtol=1e-12)
    with pytest.raises((InvalidArgument, TypeCheckError)):
        every_position(model, tokens[0])
