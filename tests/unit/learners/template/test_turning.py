import numpy as np
from tests.templates import Encoder, randomise

from keyhole.learners.template.descent import fit
from keyhole.learners.template.forward import Answered, Forward, Residuals
from keyhole.learners.template.turning import Pulled, pull_leaks
from keyhole.learners.template.widening import embed, find_neurons, find_pairs, narrow, widen


def make_residuals() -> tuple[Forward, Forward, Residuals]:
    template = Forward.of(randomise(Encoder(3, 4, 2, 3, 2), 0))
    wide = widen(template, find_pairs(template, 3, 2), 1.0)
    tokens = np.random.default_rng(0).standard_normal((150, 2, 3))
    answers = template.predict(template.weights, tokens)
    data = [Answered(tokens, answers, np.full(answers.shape, 1e-15))]
    return template, wide, Residuals(wide, data)


def test_leaks_become_signs_and_the_answers_stay() -> None:
    template, wide, residuals = make_residuals()
    pairs = find_pairs(template, 3, 2)
    neurons = find_neurons(wide, pairs)
    start = embed(template, wide, template.weights)
    start[[one.incoming[-1] for one in neurons]] = [-0.2, 0.1, 0.3]
    start = fit(residuals, start, steps=100, target=1e10).weights
    pulled = pull_leaks(residuals, start, neurons, pairs, None)
    weights = fit(pulled, start, steps=200, target=1e2).weights
    back = narrow(template, wide, pairs, weights, neurons)
    tokens = residuals.data[0].tokens
    assert np.allclose(template.predict(back, tokens), residuals.data[0].answers, atol=1e-9)


def test_the_pull_and_its_slope() -> None:
    template, wide, residuals = make_residuals()
    pairs = find_pairs(template, 3, 2)
    weights = embed(template, wide, template.weights)
    pulled = pull_leaks(residuals, weights, find_neurons(wide, pairs), pairs, None)
    assert isinstance(pulled, Pulled)
    assert np.allclose(pulled(weights), residuals(weights).tolist() + [0.0] * 3)
    moved = np.random.default_rng(0).standard_normal(len(weights))
    ahead, back = (pulled(weights + sign * moved)[-3:] for sign in (1.0, -1.0))
    assert np.allclose((ahead - back) / 2.0, (pulled.jacobian(weights) @ moved)[-3:])


def test_without_leaks_nothing_is_pulled() -> None:
    _, _, residuals = make_residuals()
    assert pull_leaks(residuals, np.zeros(3), [], [], None) is residuals
