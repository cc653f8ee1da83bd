"""Language models: unchanged ones agree, changed ones are noticed through what is told."""

import copy

import numpy as np
import pytest
import torch
import transformers

import keyhole
from completions_server import served
from keyhole.errors import InvalidArgument
from keyhole.oracles.language_model.interface import Interface
from keyhole.verification.language_models import (
    TorchPredictor,
    choose_prompts,
    draw_prompts,
    find_two,
    open_predictor,
    rate_movement,
    speaks,
    verify_language_models,
)

TOKENS = 60
NAMES = [f"t{token}" for token in range(TOKENS)]


def small_gpt(seed=0):
    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_embd=16, n_layer=1, n_head=2, n_positions=40, initializer_range=0.3,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


MODEL = small_gpt()


def logits_of(model, temperature=1.0, system=()):
    def logits(prompts):
        head = np.tile(np.array(system, dtype=np.int64), (len(prompts), 1))
        with torch.inference_mode():
            whole = torch.as_tensor(np.concatenate([head, prompts], axis=1))
            return model(whole).logits[:, -1].numpy() / temperature

    return logits


def rounded(bits):
    model = copy.deepcopy(MODEL)
    for weight in model.parameters():
        if weight.ndim == 2:
            step = weight.data.abs().max() / (2 ** (bits - 1) - 1)
            weight.data = (weight.data / step).round() * step
    return model


def with_lora():
    model = copy.deepcopy(MODEL)
    weight = model.transformer.h[0].attn.c_attn.weight
    update = torch.outer(torch.linspace(-1, 1, 16), torch.linspace(1, 2, 48))
    weight.data += update * (1e-2 * weight.norm() / update.norm())
    return model


CHANGES = {
    "lora": logits_of(with_lora()),
    "temperature": logits_of(MODEL, 1.3),
    "system prompt": logits_of(MODEL, system=(5, 6)),
    "8 bits": logits_of(rounded(8)),
    "4 bits": logits_of(rounded(4)),
}


def ask(logits, interface, queries=20, seed=0):
    with served(logits, interface, "ids") as server:
        box = keyhole.open_language_model(server.url, vocabulary=TOKENS, max_length=30, names=NAMES)
        opened = server.questions
        verdict = keyhole.verify(box, MODEL, queries=queries, seed=seed)
        box.close()
        return verdict, server.questions - opened


@pytest.mark.parametrize("top", [TOKENS, 5])
def test_unchanged_agrees_and_says_what_was_not_shown(top):
    verdict, asked = ask(logits_of(MODEL), Interface(TOKENS, top))
    assert verdict.agrees, verdict.bound
    assert asked == 22  # one question a prompt, and one of them twice more
    assert "20 fresh prompts (10 ordinary, 10 chosen to tell)" in verdict.bound
    assert ("the 5 likeliest tokens are told" in verdict.bound) == (top == 5)
    assert verdict.tolerance < 1e-3


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed_through_five_tokens(change):
    verdict, _ = ask(CHANGES[change], Interface(TOKENS, 5))
    assert not verdict.agrees
    assert verdict.counterexample.input.shape[1] == 1
    assert "are answered otherwise than the reference answers them" in verdict.bound


@pytest.mark.parametrize("change", ["lora", "temperature"])
def test_a_bias_makes_labels_tell_gaps(change):
    interface = Interface(TOKENS, 0, bias="sampling")
    verdict, asked = ask(logits_of(MODEL), interface)
    assert verdict.agrees, verdict.bound
    assert asked == 20  # ten prompts from both sides
    assert not ask(CHANGES[change], interface)[0].agrees


def test_the_sampled_token_alone():
    verdict, _ = ask(logits_of(MODEL), Interface(TOKENS, 0))
    assert verdict.agrees
    assert "a temperature, and whatever does not change the likeliest token" in verdict.bound
    assert not ask(CHANGES["system prompt"], Interface(TOKENS, 0))[0].agrees


def test_the_same_weights_in_16_bits_agree_and_say_so():
    half = copy.deepcopy(MODEL).to(torch.bfloat16)

    def logits(prompts):
        with torch.inference_mode():
            return half(torch.as_tensor(prompts)).logits[:, -1].float().numpy()

    box = keyhole.open_language_model(logits)
    verdict = keyhole.verify(box, MODEL)
    assert verdict.agrees, verdict.bound
    assert verdict.format == "bfloat16"


def test_a_function_as_the_reference():
    table = np.random.default_rng(0).standard_normal((30, 30))

    def logits(prompts):
        return table[prompts[:, -1]] + table[prompts[:, 0]]

    box = keyhole.open_language_model(lambda prompts: logits(prompts))
    assert keyhole.verify(box, logits).agrees
    other = keyhole.open_language_model(lambda prompts: 0.99 * logits(prompts))
    assert not keyhole.verify(other, logits).agrees


def test_a_folder_as_the_reference(tmp_path):
    MODEL.save_pretrained(tmp_path)
    assert speaks(f"hf:{tmp_path}")
    box = keyhole.open_language_model(logits_of(MODEL))
    assert keyhole.verify(box, f"hf:{tmp_path}", queries=10).agrees
    predictor = open_predictor(f"hf:{tmp_path}")
    assert isinstance(predictor, TorchPredictor)
    assert predictor.tokens == TOKENS


def test_prompts_that_tell_are_chosen():
    rng = np.random.default_rng(0)
    predictor = TorchPredictor(MODEL)
    pool = draw_prompts(64, TOKENS, 30, rng)
    chosen = choose_prompts(predictor, pool, pool, 6, 0, rng)
    assert len(set(chosen)) == 6
    every = predictor.predict(pool)
    first, second = find_two(every)
    rows = np.arange(64)
    gaps = every[rows, first] - every[rows, second]
    assert np.median(gaps[chosen]) < np.median(gaps)  # near ties
    moved = rate_movement(every, every / 1.1, TOKENS)
    assert moved.shape == (64,)
    assert (moved > 0).all()


def test_another_vocabulary_and_nameless_tokens_are_said():
    small = keyhole.open_language_model(lambda prompts: 3.0 * np.eye(7)[prompts[:, -1] % 7])
    with pytest.raises(InvalidArgument, match="has 60 tokens, the box 7"):
        verify_language_models(small, MODEL)
    with (
        served(logits_of(MODEL), Interface(TOKENS, 0), "ids") as server,
        keyhole.open_language_model(server.url, vocabulary=TOKENS) as box,
        pytest.raises(InvalidArgument, match="names tokens by their text"),
    ):
        keyhole.verify(box, MODEL, queries=4)


class Written:
    """A tokenizer whose tokens are whole numbers, written out."""

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [int(word) for word in text.split()]}

    def decode(self, numbers):
        return "".join(f"t{number}" for number in numbers)

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        return messages[0]["content"]


@pytest.mark.parametrize("habit", ["words", "chat"])
def test_servers_that_take_texts_are_read_by_the_tokenizer(habit):
    reference = TorchPredictor(MODEL, Written())
    with served(logits_of(MODEL), Interface(TOKENS, 5), habit) as server:
        verdict = verify_language_models(server.url, reference, queries=10)
        assert verdict.agrees, verdict.bound
    with served(CHANGES["temperature"], Interface(TOKENS, 5), habit) as server:
        assert not verify_language_models(server.url, reference, queries=10).agrees
