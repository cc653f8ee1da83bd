import numpy as np

import keyhole
from keyhole.models.random import attention
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.record import Kept
from keyhole.results import Trace
from keyhole.verification.residuals import POINTS, traced
from recoveries import recovery

MODEL = attention(np.random.default_rng(0), 5)
RNG = np.random.default_rng(1)


def asked(count: int, length: int = 2, purpose: str = "score") -> tuple[QueryBatch, np.ndarray]:
    queries = QueryBatch.of(RNG.standard_normal((count, length, 5)), purpose)
    return queries, MODEL(queries.tokens())


def trace_of(past: list[tuple[QueryBatch, np.ndarray]]) -> Trace | None:
    """Of batches of which everything was kept."""
    kept, total = [], 0
    for queries, answers in past:
        kept.append(Kept(np.arange(total, total + len(queries)), queries, answers))
        total += len(queries)
    return traced(MODEL, kept, total)


def test_deviations_are_those_of_the_answers() -> None:
    first, (queries, answers) = asked(4, 1, "value"), asked(6)
    wrong = answers.copy()
    wrong[2] += 0.5
    trace = trace_of([first, (queries, wrong)])
    assert trace is not None
    assert trace.asked == tuple(range(1, 11))
    assert trace.purpose == ("value",) * 4 + ("score",) * 6
    sizes = np.abs(np.concatenate([first[1], wrong]))
    expected = 0.5 / max(sizes[6], np.median(sizes))
    assert trace.deviation[6] == np.float64(expected)
    assert max(trace.deviation[:6] + trace.deviation[7:]) < 1e-15


def test_a_long_run_is_sampled_from_end_to_end() -> None:
    trace = trace_of([asked(900), asked(700)])
    assert trace is not None
    assert len(trace.asked) <= POINTS
    assert (trace.asked[0], trace.asked[-1], trace.total) == (1, 1600, 1600)


def test_a_batch_of_which_a_sample_was_kept() -> None:
    (queries, answers), places = asked(5), np.array([0, 300, 600, 900, 999])
    trace = traced(MODEL, [Kept(places, queries, answers)], 1000)
    assert trace is not None
    assert (trace.asked, trace.total) == ((1, 301, 601, 901, 1000), 1000)


def test_what_cannot_be_compared_has_no_trace() -> None:
    queries, answers = asked(3)
    assert trace_of([]) is None
    assert trace_of([(queries, answers[:, None])]) is None
    assert trace_of([(queries, np.full(3, np.inf))]) is None


def test_every_recovery_with_a_model_has_one_unless_it_speaks_in_labels() -> None:
    for kind in ("one head", "several heads", "transformer"):
        found = recovery(kind)
        assert found.trace is not None
        assert found.trace.total == found.ledger.paid
        assert max(found.trace.deviation) < 1e-6
    rejected = recovery("rejected").trace
    assert rejected is not None
    assert max(rejected.deviation) > 1e-4
    assert recovery("budget").trace is None
    assert recovery("labels").trace is None
    assert keyhole.recover(MODEL, budget=3, throw=False).run["budget"] == 3
