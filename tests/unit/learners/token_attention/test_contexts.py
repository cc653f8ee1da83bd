import numpy as np

import keyhole
from keyhole.learners.token_attention.contexts import Contexts, CountedPrompts
from keyhole.measurement.asker import Asker


def test_contexts_become_prompts_with_the_anchor_last():
    contexts = Contexts.of([[(3, 1), (5, 2)], [(4, 2)]])
    assert [prompt.tolist() for prompt in contexts.sequences()] == [[5, 5, 3], [4, 4]]
    assert contexts.anchors.tolist() == [3, 4]
    both = contexts.joined(Contexts.of([[(1, 1), (2, 1), (0, 3)]]))
    assert [prompt.tolist() for prompt in both.sequences()][2] == [0, 0, 0, 2, 1]
    assert len(both) == 3


def test_answers_come_in_the_order_of_the_prompts_and_centred_where_they_are_shifted():
    def box(prompts: np.ndarray) -> np.ndarray:
        return np.stack([prompts.sum(axis=1), prompts[:, -1], 0 * prompts[:, 0]], axis=1) * 1.0

    oracle = keyhole.open_language_model(box, vocabulary=3, answers="logits")
    prompts = [np.array([1, 2]), np.array([0]), np.array([2, 1])]
    plain = CountedPrompts(Asker(oracle), False, keyhole.NoiseModel()).ask_sequences(
        prompts, "test"
    )
    assert plain.tolist() == [[3, 2, 0], [0, 0, 0], [3, 1, 0]]
    centred = CountedPrompts(Asker(oracle), True, keyhole.NoiseModel()).ask_sequences(
        prompts, "test"
    )
    assert np.allclose(centred.sum(axis=1), 0.0)
