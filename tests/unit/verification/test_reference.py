"""Box against box: honest copies agree, changed ones differ, and the sentence says what was seen."""

import copy

import numpy as np
import pytest
import torch

from embedding_server import served
from keyhole.errors import InvalidArgument
from keyhole.models.random import attention
from keyhole.oracles.open import open_oracle
from keyhole.oracles.rows import CallableRows, RowBox, RowSpec
from keyhole.oracles.token_models import open_token_model
from keyhole.verification.reference import (
    is_target,
    measure_deviations,
    read_format,
    verify_boxes,
)
from sentence_folders import TOKENS, write_classifier, write_plain, write_sentence


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sentence(tmp_path_factory.mktemp("sentence"))


def engine(folder, change=lambda model: None, **options):
    """A function on token numbers around a model of its own."""
    model = open_token_model(folder, **options)
    model.module = copy.deepcopy(model.module)
    change(model)

    def embed(tokens, attention_mask=None):
        mask = np.ones_like(tokens) if attention_mask is None else attention_mask
        rows = [row[: int(m.sum())] for row, m in zip(tokens, mask, strict=True)]
        return model.ask(rows)

    return embed


@pytest.mark.parametrize("seed", range(3))
def test_an_honest_copy_agrees(folder, seed):
    verdict = verify_boxes(engine(folder), f"hf:{folder}", seed=seed)
    assert verdict.agrees, verdict.bound
    assert verdict.queries == 59
    assert "59 fresh queries (rows of token numbers: a few tokens alone" in verdict.bound
    assert "With 95% confidence at most 5% of ordinary queries are answered differently" in str(
        verdict
    )
    assert 1e-6 < verdict.tolerance < 1e-4


def scale_a_weight(model):
    with torch.no_grad():
        next(model.module.encoder.layer[1].attention.parameters()).mul_(1.001)


@pytest.mark.parametrize(
    "change", [scale_a_weight, lambda model: setattr(model.module.config, "layer_norm_eps", 1e-3)]
)
def test_a_changed_model_differs(folder, change):
    def changed(model):
        change(model)
        for part in model.module.modules():
            if isinstance(part, torch.nn.LayerNorm):
                part.eps = model.module.config.layer_norm_eps

    verdict = verify_boxes(engine(folder, changed), f"hf:{folder}")
    assert not verdict.agrees
    assert verdict.counterexample.input.shape[1] == 1
    assert verdict.worst > 1.0
    assert "are answered otherwise than the reference answers them" in verdict.bound


def test_a_mask_that_is_ignored_in_batches_is_not_taken_for_rounding(folder):
    model = open_token_model(folder)

    def embed(tokens, attention_mask=None):
        return model.ask(list(tokens))  # padding becomes tokens

    verdict = verify_boxes(embed, f"hf:{folder}")
    assert not verdict.agrees
    assert "together" in verdict.bound or "beside" in verdict.bound
    assert "a few tokens alone" not in verdict.bound  # rows alone are right


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_the_same_weights_in_16_bits_agree_and_say_so(folder, name):
    verdict = verify_boxes(engine(folder, dtype=name), f"hf:{folder}")
    assert verdict.agrees, verdict.bound
    assert (verdict.format, verdict.format_before) == (name, "float32")
    assert verdict.format_changed
    assert f"The box computes in {name}" in verdict.bound


def test_quantised_weights_differ(folder):
    def quantise(model):
        with torch.no_grad():
            for weight in model.module.parameters():
                if weight.ndim == 2:
                    step = weight.abs().amax() / 127
                    weight.copy_((weight / step).round() * step)

    assert not verify_boxes(engine(folder, quantise), f"hf:{folder}").agrees


def test_an_endpoint_of_numbers(folder):
    with served(engine(folder), dialects=("tei",)) as server:
        assert verify_boxes(server.url, f"hf:{folder}", queries=20).agrees
        # rows went out as requests, not one by one
        assert max(map(len, server.requests)) >= 5


def test_an_endpoint_of_texts(folder):
    model = open_token_model(folder)
    options = {"encode": model.encode, "takes": ("text",)}
    with served(engine(folder), **options) as server:
        verdict = verify_boxes(server.url, f"hf:{folder}", queries=20)
        assert verdict.agrees, verdict.bound
        assert "texts" in verdict.bound
    options["encode"] = lambda text: model.encode(f"a{text}")
    with served(engine(folder), **options) as server:
        assert not verify_boxes(server.url, f"hf:{folder}", queries=20).agrees


def test_two_endpoints(folder, tmp_path):
    other = write_sentence(tmp_path, seed=5)
    with served(engine(folder)) as one, served(engine(folder)) as two, served(engine(other)) as bad:

        def opened(server):
            from keyhole.oracles.embeddings import open_embedding_endpoint

            return open_embedding_endpoint(server.url, tokens=TOKENS, max_length=40)

        with opened(one) as first, opened(two) as second, opened(bad) as third:
            assert verify_boxes(second, first, queries=20).agrees
            assert not verify_boxes(third, first, queries=20).agrees


def test_a_classifier_and_a_plain_folder(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    classifier = write_classifier(tmp_path / "a")
    assert verify_boxes(engine(classifier), f"hf:{classifier}", queries=20).agrees
    model = open_token_model(classifier)
    texts = {"encode": model.encode, "takes": ("text",), "dialects": ("predict",)}
    with served(engine(classifier), **texts) as server:
        assert verify_boxes(server.url, f"hf:{classifier}", queries=20).agrees
    plain = write_plain(tmp_path / "b")
    served_as = engine(plain, pooling="cls", normalize=True)
    verdict = verify_boxes(served_as, f"hf:{plain}", queries=20)
    assert verdict.agrees, verdict.bound
    assert "cls pooling, normalised fits the first answers best" in verdict.bound


def test_vectors_against_another_box():
    rng = np.random.default_rng(0)
    model = attention(rng, 6, outputs=3)
    single = model.astype(np.float32)
    box = open_oracle(lambda tokens: single(tokens.astype(np.float32)), width=6)
    verdict = verify_boxes(box, open_oracle(model))
    assert verdict.agrees, verdict.bound
    assert "sequences of vectors" in verdict.bound
    changed = open_oracle(lambda tokens: model(tokens * (1 + 1e-4)), width=6)
    assert not verify_boxes(changed, open_oracle(model)).agrees


def test_answers_of_another_shape():
    one = CallableRows(lambda tokens: np.ones((len(tokens), 2)), tokens=9, max_length=5)
    two = CallableRows(lambda tokens: np.ones((len(tokens), 3)), tokens=9, max_length=5)
    verdict = verify_boxes(one, two)
    assert not verdict.agrees
    assert verdict.bound == "The box answers with 2 numbers, the reference with 3."


def test_noise_widens_the_tolerance_and_may_hide_the_box(folder):
    exact, rng = engine(folder), np.random.default_rng(0)

    def noisy(tokens, attention_mask=None):
        answers = exact(tokens, attention_mask)
        return answers + 1e-4 * rng.standard_normal(answers.shape)

    verdict = verify_boxes(noisy, f"hf:{folder}", queries=20)
    assert verdict.agrees
    assert verdict.tolerance > 1e-4

    def drowned(tokens, attention_mask=None):
        answers = exact(tokens, attention_mask)
        return answers + 10.0 * rng.standard_normal(answers.shape)

    assert verify_boxes(drowned, f"hf:{folder}", queries=20).word == "hides in noise"


def test_printed_single_precision_is_no_decimal_rounding():
    numbers = np.random.default_rng(0).standard_normal(200).astype(np.float32)
    printed = np.array([float(str(number)) for number in numbers])
    assert read_format(printed).format == "float32"
    assert read_format(np.round(numbers.astype(float), 3)).step == pytest.approx(1e-3)
    assert read_format(np.random.default_rng(0).standard_normal(200)).format == "float64"


def test_small_answers_are_judged_by_ordinary_ones():
    expected = np.array([[1.0], [2.0], [1e-9]])
    moved = measure_deviations(expected + 1e-6, expected)
    assert moved[2] == pytest.approx(1e-6)


def test_what_cannot_be_compared_is_said(folder):
    class Sounds(RowBox):
        spec = RowSpec(("sound",))

        def ask(self, rows):
            return np.zeros((len(rows), 1))

    with pytest.raises(InvalidArgument, match="nothing that both can be asked"):
        verify_boxes(Sounds(), f"hf:{folder}")
    with pytest.raises(InvalidArgument, match="cannot ask a int"):
        verify_boxes(3, f"hf:{folder}")


def test_targets_are_told_from_models():
    assert is_target("http://host")
    assert is_target("hf:folder#part")
    assert is_target("a.onnx")
    assert not is_target("run")
    assert not is_target(attention(np.random.default_rng(0), 3))


def test_a_part_of_a_folder(folder):
    name = f"hf:{folder}#encoder.layer.1"
    assert verify_boxes(open_oracle(name), name, queries=20).agrees
    other = open_oracle(f"hf:{folder}#encoder.layer.0")
    assert not verify_boxes(other, name, queries=20).agrees
