"""Tied embeddings: from the output matrix to the vectors that tokens are as inputs."""

import numpy as np
import pytest

import keyhole
from keyhole import OutputLayerLearner
from keyhole.learners.output_layer.dictionary import find_output, recover_dictionary

TOKENS, WIDTH = 60, 8


class Tied:
    """x + mlp(norm(x)), summed over the prompt, behind a norm; tokens and vectors."""

    def __init__(self, seed: int, tied: bool = True, norm: str = "rms") -> None:
        rng = np.random.default_rng(seed)
        self.embedding = rng.standard_normal((TOKENS, WIDTH))
        self.output = self.embedding if tied else rng.standard_normal((TOKENS, WIDTH))
        self.gain = np.exp(0.3 * rng.standard_normal(WIDTH))
        self.inner, self.outer = rng.standard_normal((2, WIDTH, WIDTH)) / np.sqrt(WIDTH)
        self.norm = norm

    def normalise(self, x):
        x = x - x.mean(axis=-1, keepdims=True) if self.norm == "layer" else x
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)

    def embedded(self, vectors):
        x = vectors.sum(axis=1)
        x = x + np.tanh(self.normalise(x) @ self.inner) @ self.outer
        return (self.gain * self.normalise(x)) @ self.output.T

    def logits(self, prompts):
        return self.embedded(self.embedding[prompts])

    def boxes(self):
        return (
            keyhole.open_oracle(self.embedded, width=WIDTH),
            keyhole.open_language_model(self.logits, max_length=16),
        )


def learn_layer(model):
    return keyhole.recover(model.boxes()[1], OutputLayerLearner()).model


@pytest.mark.parametrize("seed", [0, 1])
def test_tied_tokens_become_vectors(seed):
    model = Tied(seed)
    found = recover_dictionary(*model.boxes(), learn_layer(model), seed=seed)
    assert np.abs(found.vectors - model.embedding).max() < 1e-3
    assert np.abs(found.output - model.embedding * model.gain).max() < 1e-3
    assert found.misfit < 1e-4


def test_long_vectors_show_the_output_matrix_in_their_own_basis():
    model = Tied(2)
    found = find_output(model.boxes()[0], 1e6)
    wanted = model.output * model.gain
    assert np.abs(found - (wanted - wanted.mean(axis=0))).max() < 1e-6


def test_embeddings_of_their_own_are_refused():
    model = Tied(3, tied=False)
    with pytest.raises(keyhole.KeyholeError, match="embeddings of their own"):
        recover_dictionary(*model.boxes(), learn_layer(model))


def test_boxes_of_one_kind_are_refused_with_advice():
    vectors, tokens = Tied(4).boxes()
    with pytest.raises(keyhole.InvalidArgument, match="open_language_model"):
        recover_dictionary(vectors, vectors, learn_layer(Tied(4)))
    with pytest.raises(keyhole.InvalidArgument, match="open_oracle"):
        recover_dictionary(tokens, tokens, learn_layer(Tied(4)))
