"""Number formats: fingerprints, noise, the matched filter."""

import numpy as np
import pytest
import torch

from keyhole.diagnosis.experiment import Experiment
from keyhole.diagnosis.formats import (
    computing_in,
    find_format,
    measure_amplitude,
    measure_noise,
)
from keyhole.diagnosis.probes import RowMaker, first_calls
from keyhole.diagnosis.reference import open_reference
from keyhole.diagnosis.simulate import Bench
from keyhole.diagnosis.suspects import TokenFunction
from suspects import serve_llama, small_llama

MODEL = small_llama(2)


def experiment(**faults) -> Experiment:
    reference = open_reference(MODEL)
    suspect = TokenFunction(serve_llama(MODEL, **faults), reference.pad)
    asked = Experiment(Bench(reference))
    for call in first_calls(RowMaker(reference, np.random.default_rng(0))):
        asked.add(call, suspect.ask(call.rows))
    return asked


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_an_engine_of_a_format_carries_its_fingerprint(name) -> None:
    asked = experiment(dtype=getattr(torch, name))
    rows = list(range(len(asked.rows)))
    assert find_format(asked, (), rows) == name
    format_, noise = measure_noise(asked, name, rows)
    assert noise.shape == asked.answers.shape
    with computing_in(asked.bench, name, compute=False):
        asked.forget()
        assert np.max(asked.residuals((), rows)) <= format_.tolerance


@pytest.mark.parametrize("faults", [{"eps": 1e-4}, {"temperature": 1.01}, {"gain": 0.01}])
def test_a_fault_carries_none(faults) -> None:
    asked = experiment(**faults)
    assert find_format(asked, (), list(range(len(asked.rows)))) is None


def test_weights_are_exact_again_afterwards() -> None:
    bench = Bench(open_reference(MODEL))
    before = {k: v.clone() for k, v in bench.model.state_dict().items()}
    with computing_in(bench, "bfloat16", compute=True):
        assert next(bench.model.parameters()).dtype == torch.bfloat16
    assert all(torch.equal(v, before[k]) for k, v in bench.model.state_dict().items())
    assert not bench.exact


def test_the_matched_filter_finds_what_is_below_the_noise() -> None:
    rng = np.random.default_rng(3)
    move = rng.standard_normal((20, 200)) * 0.2
    noise, other = rng.standard_normal((2, 20, 200))
    level = np.full(20, np.sqrt(200.0))
    there = measure_amplitude(move + noise, move, other, level)
    absent = measure_amplitude(noise, move, other, level)
    assert there.present
    assert there.value == pytest.approx(1, abs=4 * there.error)
    assert abs(absent.value) < 4 * absent.error
    assert not absent.present
    hidden = measure_amplitude(noise, move / 100, other, level)
    assert not hidden.visible
