from pathlib import Path
from typing import Any

import numpy as np
import pytest

import keyhole
from boxes import CountingBox, impostors
from keyhole.models.attention import Attention, Head
from keyhole.models.norm import Norm
from keyhole.models.random import attention
from keyhole.oracles.queries import QueryBatch
from keyhole.testing.learners import parameters

MODEL = attention(np.random.default_rng(0), 10, bias=True)


def test_a_recovery_holds_everything() -> None:
    recovery = keyhole.recover(learner=keyhole.SingleHead(), box=MODEL)
    assert recovery.outcome is keyhole.Outcome.RECOVERED
    assert keyhole.distance(recovery.model, MODEL) < 1e-13
    assert recovery.errors.to_arrays().keys() == recovery.model.to_arrays().keys()
    assert recovery.verdict is not None
    assert recovery.verdict.agrees
    assert recovery.ledger.floor == 10 * 10 + 2 * 10 + 1
    assert recovery.ledger.replayed == 0
    assert recovery.reason == ""
    assert set(recovery.ledger.by_purpose) == {
        "precision", "offset", "value", "key bias", "score", "verification", "recall",
    }  # fmt: skip


def test_the_seed_decides_the_queries_and_the_bits() -> None:
    first, same, other = (
        keyhole.recover(learner=keyhole.SingleHead(), box=MODEL, seed=seed) for seed in (0, 0, 1)
    )
    assert parameters(first) == parameters(same) != parameters(other)


def test_verification_can_be_left_out() -> None:
    box = CountingBox(MODEL, 10)
    recovery = keyhole.recover(learner=keyhole.SingleHead(), box=box, verify=False)
    assert recovery.outcome is keyhole.Outcome.UNVERIFIED
    assert recovery.verdict is None
    assert "verification" not in recovery.ledger.by_purpose
    assert recovery.ledger.paid == box.seen


def test_progress_counts_up_to_the_total() -> None:
    events: list[keyhole.Progress] = []
    recovery = keyhole.recover(learner=keyhole.SingleHead(), box=MODEL, progress=events.append)
    asked = [event.asked for event in events]
    assert asked == sorted(asked)
    assert asked[-1] == recovery.ledger.paid
    assert {event.stage for event in events} == set(recovery.ledger.by_purpose)
    assert all(event.seconds >= 0 for event in events)
    # what comes next is corrected on the way, and in the end it is what was asked
    assert all(abs(event.expected - recovery.ledger.paid) <= 0.1 * asked[-1] for event in events)
    assert events[-1].expected == recovery.ledger.paid


@pytest.mark.parametrize("budget", [1, 5, 50, 120])
def test_the_budget_is_hard(budget: int) -> None:
    box = CountingBox(MODEL, 10)
    recovery = keyhole.recover(learner=keyhole.SingleHead(), box=box, budget=budget, throw=False)
    assert recovery.outcome is keyhole.Outcome.BUDGET_EXHAUSTED
    assert recovery.ledger.paid == box.seen <= budget
    assert "journal" in recovery.reason
    with pytest.raises(keyhole.BudgetExhausted) as caught:
        keyhole.recover(learner=keyhole.SingleHead(), box=MODEL, budget=budget)
    assert caught.value.recovery.outcome is keyhole.Outcome.BUDGET_EXHAUSTED


@pytest.mark.parametrize("learner", [keyhole.SingleHead(), keyhole.MultiHead(heads=1)])
def test_a_budget_of_the_exact_cost_is_enough(learner: Any) -> None:
    """MultiHead leaves it to the verification to find out how exact the box is."""
    paid = keyhole.recover(MODEL, learner).ledger.paid
    assert keyhole.recover(MODEL, learner, budget=paid).outcome is keyhole.Outcome.RECOVERED
    fewer = keyhole.recover(MODEL, learner, budget=paid - 55)
    assert (fewer.outcome, fewer.verdict.queries) == (keyhole.Outcome.RECOVERED, 4)
    short = keyhole.recover(MODEL, learner, budget=paid - 56, throw=False)
    assert short.outcome is keyhole.Outcome.UNVERIFIED
    assert "verification" in short.reason
    assert short.model is not None  # learned; only its verification was not affordable


def test_an_interruption_keeps_the_ledger() -> None:
    calls: list[int] = []

    def stopped(tokens: np.ndarray) -> np.ndarray:
        calls.append(len(tokens))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return MODEL(tokens)

    with pytest.raises(keyhole.Interrupted, match="journal=") as caught:
        keyhole.recover(learner=keyhole.SingleHead(), box=keyhole.open_oracle(stopped, width=10))
    assert caught.value.recovery.outcome is keyhole.Outcome.INTERRUPTED
    assert caught.value.recovery.ledger.paid == sum(calls)


def test_a_failing_box_is_an_outcome(tmp_path: Path) -> None:
    calls: list[int] = []

    def failing(tokens: np.ndarray) -> np.ndarray:
        calls.append(len(tokens))
        if len(calls) > 3:
            raise ConnectionError("gone")
        return MODEL(tokens)

    recovery = keyhole.recover(
        learner=keyhole.SingleHead(), box=keyhole.open_oracle(failing, width=10), throw=False
    )
    assert recovery.outcome is keyhole.Outcome.ORACLE_FAILED
    assert "ConnectionError" in recovery.reason
    assert recovery.ledger.paid == sum(calls)


def test_a_rejected_box_brings_its_counterexample() -> None:
    recovery = keyhole.recover(
        learner=keyhole.SingleHead(),
        box=keyhole.open_oracle(impostors(10)["a GRU"], width=10),
        throw=False,
    )
    assert recovery.outcome is keyhole.Outcome.REJECTED
    assert recovery.verdict is not None
    assert recovery.verdict.counterexample is not None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"budget": 0}, "budget"),
        ({"box": 3}, "cannot open a int"),
        ({"box": lambda tokens: tokens}, "width"),
    ],
)
def test_nonsense_is_refused_before_anything_is_asked(arguments: Any, words: str) -> None:
    box = CountingBox(MODEL, 10)
    with pytest.raises(keyhole.InvalidArgument, match=words):
        keyhole.recover(**{"learner": keyhole.SingleHead(), "box": box, **arguments})
    assert box.seen == 0


def test_the_callers_objects_are_left_alone() -> None:
    before = {name: array.copy() for name, array in MODEL.to_arrays().items()}
    box = keyhole.open_oracle(MODEL)
    spec = box.spec
    keyhole.recover(learner=keyhole.SingleHead(), box=box)
    assert box.spec is spec
    assert all(np.array_equal(MODEL.to_arrays()[name], array) for name, array in before.items())


def test_a_journal_resumes_bit_for_bit_and_pays_nothing_twice(tmp_path: Path) -> None:
    whole = keyhole.recover(learner=keyhole.SingleHead(), box=MODEL)
    path, total = tmp_path / "run.journal", 0
    for budget in (3, 30, 90, None):
        box = CountingBox(MODEL, 10)
        oracle = keyhole.open_oracle(box)
        recovery = keyhole.recover(
            learner=keyhole.SingleHead(), box=oracle, budget=budget, journal=path, throw=False
        )
        total += box.seen
    assert recovery.outcome is keyhole.Outcome.RECOVERED
    assert parameters(recovery) == parameters(whole)
    assert recovery.ledger.by_purpose == whole.ledger.by_purpose
    assert total == whole.ledger.paid
    assert 0 < recovery.ledger.replayed < whole.ledger.paid


@pytest.mark.parametrize("change", [{"seed": 1}, {"box": attention(np.random.default_rng(9), 10)}])
def test_a_journal_of_another_run_is_a_mismatch(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "run.journal"
    keyhole.recover(learner=keyhole.SingleHead(), box=MODEL, journal=path)
    with pytest.raises(keyhole.JournalMismatch, match="name another journal"):
        keyhole.recover(
            **{"learner": keyhole.SingleHead(), "box": MODEL, "journal": path, **change}
        )
    assert (
        keyhole.recover(learner=keyhole.SingleHead(), box=MODEL, journal=path).outcome
        is keyhole.Outcome.RECOVERED
    )


def test_two_functions_of_one_name_are_told_apart_by_one_query(tmp_path: Path) -> None:
    def make(model: Attention) -> Any:
        def box(tokens: np.ndarray) -> np.ndarray:
            return model(tokens)

        return keyhole.open_oracle(box, width=10)

    path, other = tmp_path / "run.journal", attention(np.random.default_rng(9), 10)
    keyhole.recover(learner=keyhole.SingleHead(), box=make(MODEL), journal=path)
    with pytest.raises(keyhole.JournalMismatch, match="another box"):
        keyhole.recover(learner=keyhole.SingleHead(), box=make(other), journal=path)
    assert (
        keyhole.recover(learner=keyhole.SingleHead(), box=make(MODEL), journal=path).ledger.replayed
        > 0
    )


@pytest.mark.parametrize("size", [1e-150, 1e-20, 1e140])
def test_answers_of_any_size(size: float) -> None:
    box = keyhole.open_oracle(lambda tokens: size * MODEL(tokens), width=10)
    found = keyhole.recover(box).model
    head, secret = found.heads[0], MODEL.heads[0]
    np.testing.assert_allclose(head.score, secret.score, atol=1e-12)
    np.testing.assert_allclose(head.value, size * secret.value, rtol=1e-12)


def test_where_the_arithmetic_breaks_down_the_run_is_kept() -> None:
    box = keyhole.open_oracle(lambda tokens: 1e-300 * MODEL(tokens), width=10)
    recovery = keyhole.recover(box, throw=False)
    assert recovery.outcome is keyhole.Outcome.ILL_CONDITIONED
    assert "scale tokens and answers to about one" in recovery.reason
    assert recovery.ledger.paid > 0


def test_parameters_that_are_hardly_determined_are_not_called_recovered() -> None:
    """A head whose score is far below what a float32 box can show."""
    drawn = attention(np.random.default_rng(0), 6)
    faint = Attention([Head(1e-30 * drawn.heads[0].score, None, drawn.heads[0].value)])
    single = faint.astype(np.float32)
    box = keyhole.open_oracle(lambda tokens: single(tokens.astype(np.float32)), width=6)
    recovery = keyhole.recover(learner=keyhole.SingleHead(), box=box, throw=False)
    if recovery.outcome is keyhole.Outcome.RECOVERED:
        assert not recovery.model.heads[0].score.any()  # "no query showed a score"
    else:
        assert recovery.outcome is keyhole.Outcome.ILL_CONDITIONED


def test_a_run_from_the_journal_alone_asks_one_query_and_counts_it(tmp_path: Path) -> None:
    box, path = CountingBox(MODEL, 10), tmp_path / "run.journal"
    first = keyhole.recover(box, keyhole.SingleHead(), journal=path)
    box.seen = 0
    again = keyhole.recover(box, keyhole.SingleHead(), journal=path)
    assert box.seen == 1
    assert again.ledger.by_purpose["recall"] == first.ledger.by_purpose["recall"] + 1
    assert again.ledger.paid == first.ledger.paid + 1
    assert again.ledger.replayed == first.ledger.paid
    box.seen = 0  # a hard budget is hard for the check too
    keyhole.recover(box, keyhole.SingleHead(), journal=path, budget=first.ledger.paid)
    assert box.seen == 0


class Changing:
    """A function box whose model can be exchanged, and whose answers may carry noise."""

    def __init__(self, model: Attention, noise: float = 0.0) -> None:
        self.model, self.noise, self.rng = model, noise, np.random.default_rng(5)

    def open(self, **options: Any) -> Any:
        def box(tokens: np.ndarray) -> np.ndarray:
            answers = self.model(tokens)
            return np.asarray(answers + self.noise * self.rng.standard_normal(answers.shape))

        return keyhole.open_oracle(box, width=self.model.width, **options)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stated", [{"precision": keyhole.NoiseModel(additive=1e-2)}, {}])
def test_a_noisy_box_may_read_its_own_journal_again(
    tmp_path: Path, seed: int, stated: dict[str, Any]
) -> None:
    box, path = Changing(attention(np.random.default_rng(0), 4), 1e-2), tmp_path / "run.journal"
    first, again = (
        keyhole.recover(
            box.open(max_norm=2.0, **stated),
            keyhole.SingleHead(),
            budget=500,
            journal=path,
            seed=seed,
            throw=False,
        )
        for _ in range(2)
    )
    assert again.ledger.replayed == first.ledger.paid
    assert again.outcome is first.outcome


def test_noise_that_nobody_measured_is_measured_beside_the_journal(tmp_path: Path) -> None:
    """MultiHead knows no noise. What is asked to compare the boxes is not recorded: another box
    in between leaves no trace."""
    box, path = Changing(attention(np.random.default_rng(0), 4), 1e-2), tmp_path / "run.journal"

    def run() -> keyhole.Recovery:
        return keyhole.recover(
            box.open(max_norm=2.0), keyhole.MultiHead(heads=1), journal=path, verify=False
        )

    first, own = run(), box.model
    assert run().ledger.replayed == first.ledger.paid
    box.model, box.noise = attention(np.random.default_rng(9), 4), 0.0
    with pytest.raises(keyhole.JournalMismatch, match="another box"):
        run()
    box.model, box.noise = own, 1e-2
    assert run().ledger.replayed == first.ledger.paid


@pytest.mark.parametrize("learner", [keyhole.SingleHead(), keyhole.MultiHead()])
def test_a_box_a_thousandth_off_is_not_answered_by_the_journal_of_another(
    tmp_path: Path, learner: Any
) -> None:
    box, path = Changing(attention(np.random.default_rng(0), 4)), tmp_path / "run.journal"
    keyhole.recover(box.open(), learner, journal=path)
    (head,) = box.model.heads
    box.model = Attention([Head(1.001 * head.score, None, head.value)], box.model.offset)
    with pytest.raises(keyhole.JournalMismatch, match="another box"):
        keyhole.recover(box.open(), learner, journal=path)


def test_labels_of_another_box_are_told_from_the_journals(tmp_path: Path) -> None:
    box, path = Changing(attention(np.random.default_rng(0), 3)), tmp_path / "run.journal"

    def labels() -> Any:
        return keyhole.open_oracle(lambda tokens: np.sign(box.model(tokens)), width=3)

    first = keyhole.recover(labels(), keyhole.LabelOnly(), journal=path)
    again = keyhole.recover(labels(), keyhole.LabelOnly(), journal=path)
    assert again.ledger.replayed == first.ledger.paid
    was = box.model
    box.model = lambda tokens: -was(tokens)
    with pytest.raises(keyhole.JournalMismatch, match="another box"):
        keyhole.recover(labels(), keyhole.LabelOnly(), journal=path)


class WithBars:
    """A learner that was told the model, with these standard errors of offset and value."""

    def __init__(self, model: Attention, offset: float, value: float) -> None:
        self.model, self.bars = model, (offset, value)

    def learn(self, oracle: keyhole.Oracle, rng: np.random.Generator) -> keyhole.Hypothesis:
        offset, value = self.bars
        errors = [
            Head(0 * head.score, None, np.full_like(head.value, value)) for head in self.model.heads
        ]
        bars = Attention(errors, np.full_like(self.model.offset, offset))
        return keyhole.Hypothesis(self.model, bars, floor=1.0)

    def expected_queries(self, spec: keyhole.Spec) -> int | None:
        return None


def test_an_offset_near_zero_is_judged_by_what_its_error_does_to_answers() -> None:
    heads = attention(np.random.default_rng(1), 4, heads=2, outputs=4).heads
    model = Attention(heads, np.full(4, 1e-14))
    found = keyhole.recover(model, WithBars(model, offset=1e-13, value=0.0))
    assert found.outcome is keyhole.Outcome.RECOVERED
    for offset, value in ((10.0, 0.0), (1e-13, 10.0)):  # a value is no block that may be zero
        loose = keyhole.recover(model, WithBars(model, offset, value), throw=False)
        assert loose.outcome is keyhole.Outcome.ILL_CONDITIONED


class Fails:
    """A learner that pays for an answer and then raises."""

    def __init__(self, action) -> None:
        self.action = action

    def learn(self, oracle: keyhole.Oracle, rng: np.random.Generator) -> keyhole.Hypothesis:
        oracle.ask(keyhole.QueryBatch.of(np.zeros((1, 1, 4)), "test"))
        return self.action(oracle)

    def expected_queries(self, spec: keyhole.Spec) -> int | None:
        return None


def test_a_fit_that_leads_to_no_model_is_an_outcome() -> None:
    box = attention(np.random.default_rng(1), 4)
    found = keyhole.recover(box, Fails(lambda _: Norm(np.ones(4), None, -5e-16)), throw=False)
    assert found.outcome is keyhole.Outcome.ILL_CONDITIONED
    assert "epsilon" in found.reason
    assert found.ledger.by_purpose["test"] == 1


def test_queries_beyond_the_domain_are_an_outcome() -> None:
    box = keyhole.open_oracle(attention(np.random.default_rng(1), 4), max_length=2)

    def ask_more(oracle: keyhole.Oracle) -> keyhole.Hypothesis:
        oracle.ask(keyhole.QueryBatch.of(np.zeros((1, 3, 4)), "test"))
        raise AssertionError

    found = keyhole.recover(box, Fails(ask_more), throw=False)
    assert found.outcome is keyhole.Outcome.UNSUPPORTED
    assert "max_length=2" in found.reason


class Refuses:
    """A learner that refutes every box, with or without an answer to show."""

    def __init__(self, example: keyhole.Counterexample | None = None, stated: bool = False) -> None:
        self.example, self.stated = example, stated

    def learn(self, oracle: Any, rng: np.random.Generator) -> Any:
        raise keyhole.WrongFamily("a stage found nothing", self.example, stated=self.stated)

    def expected_queries(self, spec: Any) -> int | None:
        return None


def test_a_box_is_rejected_for_an_answer_and_not_for_a_stage_that_failed() -> None:
    token = np.ones((1, MODEL.width))
    example = keyhole.Counterexample(token, MODEL(token[None])[0], 7.0, "no head says 7")
    endings = {
        keyhole.Outcome.ILL_CONDITIONED: Refuses(),
        keyhole.Outcome.REJECTED: Refuses(example),
    }
    for outcome, learner in endings.items():
        assert keyhole.recover(MODEL, learner, throw=False).outcome is outcome
    stated = keyhole.recover(MODEL, Refuses(stated=True), throw=False)
    assert stated.outcome is keyhole.Outcome.REJECTED


class FindsAnother:
    """A search that ends in another place each time, or always in the same."""

    def __init__(self, models: list[Any]) -> None:
        self.models = list(models)

    def learn(self, oracle: Any, rng: np.random.Generator) -> Any:
        oracle.ask(QueryBatch.of(rng.standard_normal((3, 2, MODEL.width)), "learning"))
        return keyhole.Hypothesis(self.models.pop(0), None, 100)

    def expected_queries(self, spec: Any) -> int | None:
        return None


def test_a_model_that_was_searched_for_refutes_a_box_if_another_search_finds_it_too() -> None:
    rng = np.random.default_rng(3)
    near, far = (attention(rng, MODEL.width, heads=2) for _ in range(2))
    box = keyhole.open_oracle(
        lambda tokens: (near if tokens.shape[1] < 9 else far)(tokens), width=MODEL.width
    )
    firm = keyhole.recover(box, FindsAnother([near, near]), throw=False)
    assert firm.outcome is keyhole.Outcome.REJECTED
    parted = keyhole.recover(box, FindsAnother([near, far]), throw=False)
    assert parted.outcome is keyhole.Outcome.ILL_CONDITIONED
    assert "came to another" in parted.reason
