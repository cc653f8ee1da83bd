"""The wrapper that tells only signs."""

import numpy as np

import keyhole
from keyhole.models.random import attention
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.degrade import BITS, Labels


def test_labels_are_the_signs_of_the_answers() -> None:
    model = attention(np.random.default_rng(0), 3)
    tokens = np.concatenate(
        [np.random.default_rng(1).standard_normal((40, 4, 3)), 0 * np.ones((1, 4, 3))]
    )
    queries = QueryBatch.of(tokens, "test")
    signs = np.sign(model(tokens))
    np.testing.assert_array_equal(Labels(keyhole.open_oracle(model)).ask(queries), signs)
    bits = Labels(keyhole.open_oracle(model), BITS).ask(queries)
    np.testing.assert_array_equal(bits, (signs > 0).astype(float))
    assert {-1.0, 0.0, 1.0} == set(signs)


def test_the_label_of_a_vector_is_its_largest_position() -> None:
    model = attention(np.random.default_rng(0), 3, outputs=4)
    tokens = np.random.default_rng(1).standard_normal((9, 2, 3))
    found = Labels(keyhole.open_oracle(model)).ask(QueryBatch.of(tokens, "test"))
    np.testing.assert_array_equal(found, np.argmax(model(tokens), axis=1))
