"""Rows, answers and simulated answers side by side."""

import numpy as np
import pytest

from keyhole.diagnosis.catalogue import Variant, local_variants, variants
from keyhole.diagnosis.experiment import Experiment, double_floor, in_order, measure_chaos, relative
from keyhole.diagnosis.probes import Call
from keyhole.diagnosis.reference import open_reference
from keyhole.diagnosis.simulate import Bench, read_states
from suspects import serve_bert, small_bert

MODEL = small_bert()
ROWS = (np.array([5, 9, 7]), np.array([11, 4, 8, 30, 17]))


def experiment(**faults) -> Experiment:
    asked = Experiment(Bench(open_reference(MODEL, "mean", True)))
    serve = serve_bert(MODEL, **faults)
    tokens, mask = np.array([[5, 9, 7, 0, 0], ROWS[1]]), np.array([[1, 1, 1, 0, 0], [1] * 5])
    asked.add(Call(ROWS, "together"), serve(tokens, mask))
    return asked


def variant(asked, words) -> Variant:
    return next(v for v in variants(asked.bench.reference) if words in str(v))


def test_a_healthy_suspect_is_simulated_to_rounding() -> None:
    assert np.max(experiment().residuals(())) < 3e-6


def test_company_is_simulated_call_by_call() -> None:
    asked = experiment(no_mask=True)
    ignored = variant(asked, "mask is ignored")
    assert asked.residuals(())[0] > 1e-2
    assert np.max(asked.residuals((ignored,))) < 3e-6


def test_states_are_kept_and_readouts_are_free() -> None:
    asked = experiment(pooling="cls")
    asked.simulate(())
    asked.bench.run = None  # type: ignore[method-assign,assignment]
    assert np.max(asked.residuals((variant(asked, "pooling is cls"),))) < 3e-6


def test_a_hypothesis_without_an_answer_is_infinitely_far() -> None:
    assert relative(np.ones((1, 2)), np.full((1, 2), np.nan)).tolist() == [np.inf]


def test_the_floor_is_single_precision() -> None:
    assert 1e-8 < double_floor(experiment(), (), [0, 1]) < 2e-6


def test_layers_before_a_fault_are_not_computed_again() -> None:
    asked = experiment()
    late = [v for v in (*variants(asked.bench.reference), *local_variants(asked.bench.reference))
            if v.begins > 0]  # fmt: skip
    assert len({v.begins for v in late}) == asked.bench.reference.layers - 1
    for v in late:
        with asked.bench.applied((v,)):
            whole = asked.bench.run(ROWS)
        assert np.array_equal(asked.simulate((v,)), read_states(whole, asked.bench.readout)), str(v)


def test_rounded_activations_are_chaotic_and_weights_come_back() -> None:
    asked = experiment()
    int8 = variant(asked, "activations are int8 (int8 per tensor), with one scale for all")
    long = tuple(np.random.default_rng(0).integers(5, 120, (8, 80)))  # many numbers to round
    rows = asked.add(Call(long, "long"), np.ones((8, 32)))
    before = [p.clone() for p in asked.bench.model.parameters()]
    plain, rounded = (measure_chaos(asked, h, rows) for h in ((), (int8,)))
    assert plain < 1e-5 < 1e-4 < rounded
    after = asked.bench.model.parameters()
    assert all(bool((p == q).all()) for p, q in zip(before, after, strict=True))


def test_faults_are_applied_in_the_order_of_groups() -> None:
    asked = experiment()
    pair = (variant(asked, "pooling is cls"), variant(asked, "shifted by 1"))
    assert [v.fault.group for v in in_order(pair)] == ["input", "readout"]
    assert asked.simulate(pair) == pytest.approx(asked.simulate(pair[::-1]))
