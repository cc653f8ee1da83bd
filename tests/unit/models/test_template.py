from pathlib import Path

import numpy as np
import pytest
from tests.templates import AttentionHeads, randomise

import keyhole
from keyhole.models.base import replace_parameters
from keyhole.models.files import save_model
from keyhole.models.template import TemplateModel, digest_of


def test_saved_and_loaded_with_the_template(tmp_path: Path) -> None:
    model = TemplateModel.of(randomise(AttentionHeads(4, 2), 0), 4)
    path = save_model(model, tmp_path / "model.safetensors")
    tokens = np.random.default_rng(0).standard_normal((3, 2, 4))
    loaded = keyhole.load(path, template=AttentionHeads(4, 2))
    assert np.array_equal(loaded(tokens), model(tokens))
    alone = keyhole.load(path)
    assert alone.name == "AttentionHeads"
    assert alone.digest == digest_of(model.module)
    with pytest.raises(keyhole.InvalidArgument, match="template=module"):
        alone(tokens)
    with pytest.raises(keyhole.InvalidArgument, match="another template"):
        keyhole.load(path, template=AttentionHeads(4, 1, "sink"))


def test_other_weights_in_the_same_template() -> None:
    model = TemplateModel.of(randomise(AttentionHeads(4, 2), 0), 4)
    changed = replace_parameters(model, {"out.bias": np.array([5.0])})
    gap = changed(np.zeros((1, 2, 4))) - model(np.zeros((1, 2, 4)))
    assert gap[0, 0] == pytest.approx(5.0 - model.parameters["out.bias"][0])
    with pytest.raises(keyhole.InvalidArgument, match="names or shapes"):
        replace_parameters(model, {"out.bias": np.zeros(2)})
