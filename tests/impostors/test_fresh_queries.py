"""Boxes that give themselves away on one kind of fresh query alone: all kinds must be compared,
also by learners that do not know how exact the box is."""

from collections.abc import Callable

import numpy as np
import pytest

import keyhole
from keyhole.models.random import attention
from networks import layer

Function = Callable[[np.ndarray], np.ndarray]
WIDTH = 6


def merging_repeats(model: Function) -> Function:
    """Tokens that come three times or more count once."""

    def box(tokens: np.ndarray) -> np.ndarray:
        answers = np.array(model(tokens))
        for k, sequence in enumerate(tokens):
            different, counts = np.unique(sequence[:-1], axis=0, return_counts=True)
            if counts.max(initial=0) >= 3:
                answers[k] = model(np.concatenate([different, sequence[-1:]])[None])[0]
        return answers

    return box


def another_at(lengths: Callable[[int], bool]) -> Callable[[Function], Function]:
    """Sequences of some lengths lose their first token."""
    return lambda model: (
        lambda tokens: model(
            tokens[:, 1:] if tokens.shape[1] > 2 and lengths(tokens.shape[1]) else tokens
        )
    )


def is_prime(number: int) -> bool:
    return number > 1 and all(number % k for k in range(2, int(number**0.5) + 1))


LENGTHS: dict[str, tuple[Callable[[int], bool], int]] = {  # and in how many of ten runs it is seen
    "17 to 95": (lambda n: 17 <= n <= 95, 10),
    "odd beyond 8": (lambda n: n > 8 and n % 2 == 1, 10),
    "12 to 20": (lambda n: 12 <= n <= 20, 5),
    "primes beyond 8": (lambda n: n > 8 and is_prime(n), 7),
    "multiples of 8": (lambda n: n % 8 == 0, 6),
}


RNG = np.random.default_rng(0)
CASES = {
    "several heads": (attention(RNG, WIDTH, heads=2), keyhole.MultiHead()),
    "a layer": (attention(RNG, WIDTH, heads=2, outputs=WIDTH), keyhole.MultiHead()),
    "a Transformer": (layer(0, WIDTH, 5), keyhole.Transformer()),
}


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_fresh_query_is_compared(case: str) -> None:
    model, learner = CASES[case]
    box = keyhole.open_oracle(merging_repeats(model), width=WIDTH)
    recovery = keyhole.recover(box, learner, throw=False)
    assert recovery.outcome is keyhole.Outcome.REJECTED
    honest = keyhole.recover(model, learner)
    assert honest.verdict is not None
    asked, ledger = honest.ledger.by_purpose, honest.ledger
    assert honest.verdict.queries == asked["verification"] == ledger.verifying == 59
    assert ledger.learning + ledger.verifying == ledger.paid
    assert honest.verdict.bound.startswith("All 59 fresh answers agree")
    assert honest.verdict.replayed == ledger.learning - asked["recall"] - asked.get("precision", 0)


@pytest.mark.parametrize(("fresh", "share"), [(12, "23%"), (59, "5%"), (299, "1%")])
def test_the_sentence_follows_the_number_of_fresh_queries(fresh: int, share: str) -> None:
    model = attention(np.random.default_rng(4), 4)
    found = keyhole.recover(model, fresh=fresh)
    assert found.verdict.queries == found.ledger.verifying == fresh
    assert f"at most {share} of ordinary queries" in found.verdict.bound
    named = keyhole.recover(model, keyhole.SingleHead(), fresh=fresh)
    assert named.ledger.learning <= 1.01 * named.ledger.floor + 6  # what is promised of one head


@pytest.mark.parametrize("which", LENGTHS)
def test_a_box_that_is_another_model_at_some_lengths_is_not_safe_from_all_seeds(which: str) -> None:
    lengths, least = LENGTHS[which]
    model = attention(np.random.default_rng(3), WIDTH)
    box = keyhole.open_oracle(another_at(lengths)(model), width=WIDTH)
    endings = [keyhole.recover(box, seed=seed, throw=False).outcome for seed in range(10)]
    assert sum(outcome is keyhole.Outcome.REJECTED for outcome in endings) >= least


class EveryFiftieth:
    """Answers every fiftieth query it is sent with zero."""

    def __init__(self, model: Function) -> None:
        self.model, self.seen = model, 0

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        answers = np.array(self.model(tokens))
        numbers = np.arange(self.seen, self.seen + len(tokens))
        answers[numbers % 50 == 49] = 0.0
        self.seen += len(tokens)
        return answers


def lying_at_zero(model: Function) -> Function:
    """Sequences that hold a zero token are answered by something else."""

    def box(tokens: np.ndarray) -> np.ndarray:
        answers = np.array(model(tokens))
        answers[(tokens == 0).all(axis=2).any(axis=1)] -= 0.5
        return answers

    return box


@pytest.mark.parametrize("lie", [EveryFiftieth, lying_at_zero])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_no_model_is_recovered_against_an_answer_of_its_own_run(
    lie: Callable[[Function], Function], heads: int, seed: int
) -> None:
    model = attention(np.random.default_rng(seed), WIDTH, heads=heads, outputs=WIDTH)
    box = keyhole.open_oracle(lie(model), width=WIDTH)
    found = keyhole.recover(box, seed=seed, throw=False)
    assert found.outcome is not keyhole.Outcome.RECOVERED


def test_answers_that_depend_on_their_batch_are_told() -> None:
    model = attention(np.random.default_rng(1), WIDTH)

    def box(tokens: np.ndarray) -> np.ndarray:
        answers = np.array(model(tokens))
        return answers + (1e-3 * answers.mean() if len(tokens) in (2, 3, 4, 5, 6) else 0.0)

    found = keyhole.recover(keyhole.open_oracle(box, width=WIDTH), throw=False)
    assert found.outcome is not keyhole.Outcome.RECOVERED
