import numpy as np
import pytest

import keyhole
from keyhole.learners.token_attention.contexts import CountedPrompts
from keyhole.learners.token_attention.coordinates import find_coordinates
from keyhole.measurement.asker import Asker
from token_models import attention_on_tokens, open_tokens


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_tokens_alone_give_the_width_and_whether_embeddings_are_shared(tied, logprobs):
    model = attention_on_tokens(1, tied=tied, logprobs=logprobs)
    prompts = CountedPrompts(Asker(open_tokens(model)), logprobs, keyhole.NoiseModel())
    found = find_coordinates(prompts, np.random.default_rng(0))
    assert found.width == 8
    assert found.tied == tied
    assert len(found.asked) == (16 if tied else 40)
    alone = model(np.arange(40.0)[:, None, None])
    alone = alone - alone.mean(axis=1, keepdims=True) if logprobs else alone
    assert np.allclose(found.tokens @ found.basis.T, alone, atol=1e-12)


def test_a_vocabulary_below_the_width_is_not_identifiable():
    model = attention_on_tokens(2, tokens=20, width=24)
    prompts = CountedPrompts(Asker(open_tokens(model)), False, keyhole.NoiseModel())
    with pytest.raises(keyhole.NotIdentifiable):
        find_coordinates(prompts, np.random.default_rng(0))


def test_a_vocabulary_may_be_smaller_than_the_first_look():
    model = attention_on_tokens(3, tokens=12, width=4)
    prompts = CountedPrompts(Asker(open_tokens(model)), False, keyhole.NoiseModel())
    assert find_coordinates(prompts, np.random.default_rng(0)).width == 4
