"""The catalogue as data: every entry says what it must, and a new one is a few lines."""

import pytest

from keyhole.diagnosis.catalogue import CATALOGUE, GROUPS, Fault, Variant, variants
from keyhole.diagnosis.reference import open_reference
from suspects import small_bert, small_llama


@pytest.mark.parametrize("fault", CATALOGUE, ids=str)
def test_every_entry_is_complete(fault) -> None:
    assert fault.group in GROUPS
    assert fault.shown_by
    assert fault.advice
    assert ("{}" in fault.name) == bool(fault.parameter)


def test_names_are_unique() -> None:
    assert len({fault.name for fault in CATALOGUE}) == len(CATALOGUE)


@pytest.mark.parametrize("model", [small_bert(), small_llama()])
def test_variants_of_a_reference(model) -> None:
    found = variants(open_reference(model, "mean", True))
    assert len({v.key for v in found}) == len(found) > 60


def test_a_new_fault_is_an_entry() -> None:
    halved = Fault(
        "answers are halved",
        "readout",
        lambda bench, _: bench.read(factor=0.5),
        "any row",
        "do not",
    )
    assert variants(open_reference(small_llama()), [halved])[-1] == Variant(halved)
