"""The bench: it is the reference, and it is the reference again after every fault."""

import numpy as np
import pytest
import torch

from keyhole.diagnosis.catalogue import Variant, local_variants, variants
from keyhole.diagnosis.reference import open_reference
from keyhole.diagnosis.simulate import Bench, Inputs, pad, read_states
from suspects import serve_bert, serve_llama, small_bert, small_llama

ROWS = [np.array([5, 9, 7]), np.array([11, 4, 8, 30, 17])]


def answers(bench, rows=ROWS):
    return read_states(bench.run(rows), bench.readout)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_the_bench_is_the_reference(family) -> None:
    model = small_bert() if family == "bert" else small_llama()
    serve = serve_bert if family == "bert" else serve_llama
    bench = Bench(open_reference(model, "mean", True))
    tokens = np.array([[5, 9, 7, 0, 0], [11, 4, 8, 30, 17]])
    mask = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    expected = serve(model, pooling="mean", normalize=True)(tokens, attention_mask=mask)
    assert np.allclose(answers(bench), expected, atol=3e-6)


@pytest.mark.parametrize("make", [small_bert, small_llama])
def test_every_fault_is_undone(make) -> None:
    reference = open_reference(make(), "mean", False)
    bench = Bench(reference)
    before = answers(bench)
    state = {k: v.clone() for k, v in reference.model.state_dict().items()}
    changed = 0
    every = [*variants(reference), *local_variants(reference)]
    for variant in every:
        with bench.applied((variant,)):
            changed += not np.allclose(answers(bench), before, atol=1e-7, equal_nan=True)
        assert np.array_equal(answers(bench), before), str(variant)
    assert all(torch.equal(v, state[k]) for k, v in reference.model.state_dict().items())
    assert changed > 0.7 * len(every)


def test_padding_on_both_sides() -> None:
    ids, mask = pad(Inputs(list(ROWS), multiple=4), 1)
    assert ids.shape == (2, 8)
    assert ids[0].tolist() == [5, 9, 7, 1, 1, 1, 1, 1]
    left, _ = pad(Inputs(list(ROWS), left=True), 1)
    assert left[0].tolist() == [1, 1, 5, 9, 7]
    assert mask.sum(1).tolist() == [3, 5]


def test_the_place_of_a_row_in_its_call_does_not_matter() -> None:
    bench = Bench(open_reference(small_llama()))
    assert np.allclose(answers(bench)[:1], answers(bench, ROWS[:1]), atol=1e-6)
    assert Variant  # the type that hypotheses are made of
