import time

import numpy as np
from tests.templates import AttentionHeads, randomise

from keyhole.learners.template.forward import Answered, Forward
from keyhole.learners.template.search import Effort, search


def test_search_from_random_starts_explains_the_answers() -> None:
    rng = np.random.default_rng(0)
    forward = Forward.of(randomise(AttentionHeads(4, 1), 0))
    data = []
    for length in (1, 2, 3):
        tokens = 0.5 * rng.standard_normal((60, length, 4))
        answers = forward.predict(forward.weights, tokens)
        data.append(Answered(tokens, answers, np.full(answers.shape, 1e-16)))
    best = search(forward, data, data, Effort(), rng, time.monotonic() + 60.0)
    fresh = rng.standard_normal((20, 5, 4))
    gap = forward.predict(best.weights, fresh) - forward.predict(forward.weights, fresh)
    assert best.explained
    assert np.abs(gap).max() < 1e-11
