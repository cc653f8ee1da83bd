"""The contract of a learner: repeatable, counted, stoppable, and honest when the box fails."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import BudgetExhausted, KeyholeError, OracleError
from keyhole.learners.base import Learner
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.open import open_oracle
from keyhole.oracles.queries import VERIFICATION, QueryBatch
from keyhole.oracles.wrappers.drift import PURPOSE as RECALL
from keyhole.recovery import recover
from keyhole.results import Outcome, Recovery
from keyhole.testing.contract import ContractBroken, require


class _Watched(Wrapper):
    """A box that keeps its own count and the digests of what it was asked, and can be broken."""

    def __init__(self, inner: Oracle, breaks_after: int | None = None) -> None:
        self.inner, self.breaks_after = inner, breaks_after
        self.seen, self.calls_to_learn = 0, 0
        self.verifying = False
        self.digests: list[bytes] = []

    def ask(self, queries: QueryBatch) -> Array:
        if self.breaks_after is not None and self.calls_to_learn >= self.breaks_after:
            raise OracleError("the box is broken on purpose")
        self.seen += len(queries)
        self.verifying = self.verifying or queries.purpose == VERIFICATION
        self.calls_to_learn += not self.verifying and queries.purpose != RECALL
        self.digests.append(queries.digest())
        return self.inner.ask(queries)


def check_learner(
    learner: Any, make_box: Callable[[], Any], *, impostors: tuple[Any, ...] = (), seed: int = 0
) -> Recovery:
    """Recovers the box some six times; raises `ContractBroken` for the first broken rule.

    `make_box` returns a fresh box (anything `open_oracle` takes) that the learner can recover,
    `impostors` are boxes that it must not call RECOVERED. Returns the plain recovery, for checks
    of one's own.
    """
    require(isinstance(learner, Learner), "a learner has learn(oracle, rng), expected_queries()")
    settings = getattr(type(learner), "__dataclass_params__", None)
    require(
        settings is not None and settings.frozen,
        "a learner must be a frozen dataclass: its configuration names the run",
    )
    forecast = learner.expected_queries(open_oracle(make_box()).spec)
    require(forecast is None or forecast > 0, "expected_queries must be positive or None")
    first = _recovers(learner, make_box, seed)
    _is_repeatable(learner, make_box, seed, *first)
    recovery, box = first
    _keeps_the_budget(learner, make_box, seed, recovery)
    _survives_a_broken_box(learner, make_box, seed, box.calls_to_learn)
    _resumes(learner, make_box, seed, recovery)
    for impostor in impostors:
        found = recover(open_oracle(impostor), learner, seed=seed, throw=False)
        require(found.outcome is not Outcome.RECOVERED, f"{impostor} was called RECOVERED")
    return recovery


def parameters(recovery: Recovery) -> bytes:
    """All parameters and their errors, to the last bit."""
    parts = []
    for model in (recovery.model, recovery.errors):
        arrays = {} if model is None else model.to_arrays()
        parts += [name.encode() + arrays[name].tobytes() for name in sorted(arrays)]
    return b"".join(parts)


def _recovers(
    learner: Learner, make_box: Callable[[], Any], seed: int
) -> tuple[Recovery, _Watched]:
    box = _Watched(open_oracle(make_box()))
    recovery = recover(box, learner, seed=seed, throw=False)
    _require_structure(recovery)
    require(recovery.outcome is Outcome.RECOVERED, f"the outcome is {recovery.outcome.name}")
    require(recovery.ledger.paid == box.seen, "the ledger must equal what the box saw")
    require((recovery.ledger.floor or 0) > 0, "the floor must be stated")
    model = recovery.model
    answer = np.asarray(model(np.zeros((3, 2, box.spec.width))))
    require(answer.shape[0] == 3, "the model must be callable on (batch, length, width)")
    return recovery, box


def _is_repeatable(
    learner: Learner, make_box: Callable[[], Any], seed: int, before: Recovery, asked: _Watched
) -> None:
    state = str(np.random.get_state())  # noqa: NPY002 - the global state must stay untouched
    again, box = _recovers(learner, make_box, seed)
    require(box.digests == asked.digests, "the same seed must ask the same queries")
    require(parameters(again) == parameters(before), "the same seed must find the same parameters")
    untouched = str(np.random.get_state()) == state  # noqa: NPY002
    require(untouched, "a learner must draw from the rng it is given, never from global state")


def _keeps_the_budget(
    learner: Learner, make_box: Callable[[], Any], seed: int, whole: Recovery
) -> None:
    spent = whole.ledger.by_purpose
    others = (VERIFICATION, RECALL)
    learning = sum(count for purpose, count in spent.items() if purpose not in others)
    box, budget = _Watched(open_oracle(make_box())), max(1, learning // 2)
    stopped = recover(box, learner, budget=budget, seed=seed, throw=False)
    require(stopped.outcome is Outcome.BUDGET_EXHAUSTED, "half the budget must not be enough")
    require(box.seen <= budget, "no query may be asked beyond the budget")
    require(stopped.ledger.paid == box.seen, "the ledger must equal what the box saw")


def _survives_a_broken_box(
    learner: Learner, make_box: Callable[[], Any], seed: int, calls: int
) -> None:
    for limit in {0, calls // 2, calls - 1}:
        box = _Watched(open_oracle(make_box()), breaks_after=limit)
        try:
            recover(box, learner, seed=seed, verify=False)  # verification would meet the error
        except OracleError as error:
            failed = error.recovery.outcome is Outcome.ORACLE_FAILED
            require(failed, "a broken box must end as ORACLE_FAILED")
        else:
            raise ContractBroken("an error of the box must not be swallowed")


def _resumes(learner: Learner, make_box: Callable[[], Any], seed: int, whole: Recovery) -> None:
    with tempfile.TemporaryDirectory() as folder:
        journal, total = Path(folder) / "run.journal", 0
        for budget in (whole.ledger.paid // 3, 2 * whole.ledger.paid // 3, None):
            box = _Watched(open_oracle(make_box()))
            try:
                done = recover(box, learner, budget=budget or None, seed=seed, journal=journal)
            except BudgetExhausted:
                total += box.seen
                continue
            except KeyholeError as error:
                raise ContractBroken(f"a stopped run could not be resumed: {error}") from error
            total += box.seen
            if done.ledger.paid == whole.ledger.paid:  # else little was left for verification
                break
        require(parameters(done) == parameters(whole), "a resumed run must find the same bits")
        require(done.ledger.paid == whole.ledger.paid, "a resumed run must cost the same in total")
        require(total == whole.ledger.paid, "no query may be paid twice")


def _require_structure(recovery: Recovery) -> None:
    """Errors name the parameters of the model; factors of a score may have another inner size."""
    if recovery.errors is None or recovery.model is None:
        return
    known, errors = recovery.model.to_arrays(), recovery.errors.to_arrays()
    same = known.keys() == errors.keys() and all(
        known[name].shape == errors[name].shape or "score_" in name for name in known
    )
    require(same, "errors must have the structure of the model")
    require(
        all((array >= 0).all() and np.isfinite(array).all() for array in errors.values()),
        "standard errors must be finite and not negative",
    )
