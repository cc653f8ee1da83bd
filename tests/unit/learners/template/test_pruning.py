import numpy as np
from tests.templates import Encoder, randomise

from keyhole.learners.template.descent import Fitted, fit
from keyhole.learners.template.forward import Answered, Forward, Residuals
from keyhole.learners.template.pruning import count_surplus, prune
from keyhole.learners.template.widening import embed, find_neurons, find_pairs, widen


def test_surplus_neurons_go_and_the_fit_stays() -> None:
    template = Forward.of(randomise(Encoder(3, 4, 2, 3, 2), 0))
    pairs = find_pairs(template, 3, 2)
    wide = widen(template, pairs, 2.0)
    rng = np.random.default_rng(0)
    data = []
    for length in (1, 2, 3):
        tokens = rng.standard_normal((80, length, 3))
        answers = template.predict(template.weights, tokens)
        data.append(Answered(tokens, answers, np.full(answers.shape, 1e-15)))
    residuals = Residuals(wide, data)
    start = embed(template, wide, template.weights)
    start += 1e-3 * rng.standard_normal(len(start))  # the added neurons have part in the answers

    def refit(weights: np.ndarray, free: np.ndarray, deep: bool) -> Fitted:
        return fit(residuals, weights, steps=60, target=100.0, free=free)

    neurons = find_neurons(wide, pairs)
    fitted = refit(start, np.ones(len(start), dtype=bool), True)
    pruned = prune(residuals, fitted, neurons, pairs, refit, lambda: False)
    assert count_surplus(neurons, pairs) == {0: 3}
    assert count_surplus(pruned.neurons, pairs) == {}
    assert len(pruned.neurons) == 3
    assert pruned.fitted.loss <= 1e9  # of noise; that of the answers is 1e30
    gone = [one for one in neurons if all(one is not kept for kept in pruned.neurons)]
    assert not pruned.free[np.concatenate([one.all for one in gone])].any()
    assert not np.any(pruned.fitted.weights[np.concatenate([one.all for one in gone])])


def test_without_time_the_cheapest_go_without_a_fit() -> None:
    template = Forward.of(randomise(Encoder(3, 4, 2, 3, 2), 0))
    pairs = find_pairs(template, 3, 2)
    wide = widen(template, pairs, 2.0)
    tokens = np.random.default_rng(0).standard_normal((200, 2, 3))
    answers = template.predict(template.weights, tokens)
    residuals = Residuals(wide, [Answered(tokens, answers, np.ones_like(answers))])
    start = Fitted(embed(template, wide, template.weights), 0.0, 0, False)
    pruned = prune(
        residuals, start, find_neurons(wide, pairs), pairs,
        lambda weights, free, deep: Fitted(weights, 0.0, 0, False), lambda: True,
    )  # fmt: skip
    assert len(pruned.neurons) == 3
    assert np.allclose(wide.predict(pruned.fitted.weights, tokens), answers)
