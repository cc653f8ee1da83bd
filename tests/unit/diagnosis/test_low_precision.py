"""Suspects in sixteen bits: healthy ones stay healthy, faults above the noise are named."""

import pytest
import torch

import keyhole
from suspects import serve_llama, small_llama

MODEL = small_llama(1, num_hidden_layers=2)


def examine(dtype, **faults):
    return keyhole.doctor(MODEL, serve_llama(MODEL, dtype=dtype, **faults))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_healthy_suspect_says_what_its_format_hides(dtype) -> None:
    diagnosis = examine(dtype)
    assert diagnosis.same
    assert not diagnosis.causes
    assert diagnosis.format == str(dtype).removeprefix("torch.")
    assert "epsilon" in " ".join(diagnosis.notes)


def test_a_fault_is_named_in_bfloat16() -> None:
    diagnosis = examine(torch.bfloat16, neighbours=True)
    assert ["turn neighbours" in cause.name for cause in diagnosis.causes] == [True]


def test_a_fault_below_the_tolerance_is_named_by_its_amplitude() -> None:
    diagnosis = examine(torch.float16, eps=3e-4)
    assert ["epsilon" in cause.name for cause in diagnosis.causes] == [True]
    assert diagnosis.causes[0].parameter == pytest.approx(3e-4, rel=0.3)
