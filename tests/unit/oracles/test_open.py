from pathlib import Path

import numpy as np
import pytest

import boxes
from keyhole.errors import FileFormatError, InvalidArgument
from keyhole.models.draw import attention
from keyhole.models.files import save_model
from keyhole.oracles.open import open_oracle
from keyhole.oracles.questions import Questions

MODEL = attention(np.random.default_rng(0), 4, outputs=2)
TOKENS = np.random.default_rng(1).standard_normal((3, 2, 4))


def test_a_model_tells_its_width_and_outputs() -> None:
    box = open_oracle(MODEL)
    assert (box.spec.width, box.spec.outputs) == (4, 2)
    np.testing.assert_array_equal(box.ask(Questions.of(TOKENS, "")), MODEL(TOKENS))


def test_a_function_needs_a_width_from_somewhere() -> None:
    with pytest.raises(InvalidArgument, match="--width"):
        open_oracle(lambda tokens: tokens[:, 0, 0])
    assert open_oracle(lambda tokens: tokens[:, 0, 0], width=3).spec.width == 3
    assert open_oracle(boxes.CountingBox(MODEL, 4)).spec.width == 4
    assert open_oracle(lambda tokens: 0, vocabulary=np.eye(5)).spec.width == 5


def test_an_oracle_is_itself() -> None:
    box = open_oracle(MODEL)
    assert open_oracle(box) is box


def test_names_files_and_folders(tmp_path: Path) -> None:
    path = save_model(MODEL, tmp_path / "model.safetensors")
    for target in (path, str(path), tmp_path):
        np.testing.assert_array_equal(
            open_oracle(target).ask(Questions.of(TOKENS, "")), MODEL(TOKENS)
        )
    assert open_oracle("boxes:softmax", width=4).spec.identity == "boxes.softmax"


def test_the_domain_is_passed_on() -> None:
    domain = open_oracle(MODEL, max_length=3, max_norm=2.0, low=-1.0, high=1.0).spec.domain
    limits = (domain.max_length, domain.max_norm, domain.low, domain.high)
    assert limits == (3, 2.0, -1.0, 1.0)


def test_two_models_have_two_identities() -> None:
    other = attention(np.random.default_rng(9), 4, outputs=2)
    same = attention(np.random.default_rng(0), 4, outputs=2)
    assert open_oracle(MODEL).spec.identity == open_oracle(same).spec.identity
    assert open_oracle(MODEL).spec.identity != open_oracle(other).spec.identity


def test_what_cannot_be_opened_gets_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot open a int"):
        open_oracle(3, width=4)
    with pytest.raises(InvalidArgument, match="cannot import nowhere:box"):
        open_oracle("nowhere:box")
    with pytest.raises(InvalidArgument, match="cannot import boxes:nothing"):
        open_oracle("boxes:nothing")
    with pytest.raises(FileFormatError, match="does not exist"):
        open_oracle(tmp_path / "none.safetensors")
