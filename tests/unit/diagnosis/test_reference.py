"""References: folders, modules on token numbers, modules on vectors."""

import pytest
import torch

from keyhole.diagnosis.reference import open_reference
from keyhole.errors import InvalidArgument
from sentence_folders import write_plain, write_sentence
from suspects import small_bert, small_llama


def test_a_folder_of_sentence_transformers_states_its_readout(tmp_path) -> None:
    reference = open_reference(f"hf:{write_sentence(tmp_path / 'm', 'cls_token')}")
    assert (reference.readout.pooling, reference.readout.normalize) == ("cls", True)
    assert reference.stated
    assert (reference.start, reference.end) == ((2,), (3,))
    assert reference.max_length == 48
    assert {0, 1, 2, 3} <= reference.forbidden


def test_a_plain_folder_is_told_how_it_is_read(tmp_path) -> None:
    folder = write_plain(tmp_path / "m")
    assert not open_reference(f"hf:{folder}").stated
    told = open_reference(folder, "cls", True)
    assert told.stated
    assert (told.readout.pooling, told.readout.normalize) == ("cls", True)


def test_the_callers_module_stays_as_it_is() -> None:
    model = small_llama().to(torch.float64)
    reference = open_reference(model)
    assert reference.readout.pooling == "last"
    assert reference.model is not model
    assert next(model.parameters()).dtype == torch.float64
    assert next(model.parameters()).requires_grad


def test_a_module_on_vectors() -> None:
    reference = open_reference(torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    assert not reference.tokens
    assert reference.width == 8


@pytest.mark.parametrize("wrong", [3, "nowhere:nothing", lambda x: x])
def test_what_is_no_reference_is_refused(wrong) -> None:
    with pytest.raises(InvalidArgument):
        open_reference(wrong)


def test_parts_of_models_are_refused(tmp_path) -> None:
    with pytest.raises(InvalidArgument, match="whole models"):
        open_reference("hf:somewhere#encoder")


def test_positions_of_the_longest_row() -> None:
    assert open_reference(small_bert()).max_length == 96
