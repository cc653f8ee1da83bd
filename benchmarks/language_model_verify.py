"""Does `verify` notice what was done to a language model behind an OpenAI-style server?

    python benchmarks/language_model_verify.py [--runs 20] [--prompts 59] [--quick]

A small GPT-2 with random weights is served by tests/completions_server.py through four interfaces:
all log-probabilities, the twenty and the five likeliest, the sampled token alone (with and without
a bias). Unchanged it must agree, every time; a merged LoRA of rank 4 (1e-2 of the norm of every
attention matrix), a temperature of 1.3, a system prompt, weights in 8 and 4 bits must be noticed.
"""

import argparse
import copy
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import keyhole
from completions_server import served
from keyhole.oracles.language_model.interface import Interface

TOKENS, WIDTH, LAYERS = 300, 48, 3
INTERFACES = {
    "all tokens": (Interface(TOKENS, TOKENS), ("ids",)),
    "top 20": (Interface(TOKENS, 20), ("ids",)),
    "top 5": (Interface(TOKENS, 5), ("ids",)),
    "sampled token, with bias": (Interface(TOKENS, 0, bias="sampling"), ("ids",)),
    "sampled token alone": (Interface(TOKENS, 0), ("ids",)),
}


def make_model(seed):
    import torch
    import transformers

    torch.manual_seed(seed)
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_embd=WIDTH, n_layer=LAYERS, n_head=4, n_positions=64,
        initializer_range=0.15, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


def add_lora(model, size=1e-2, rank=4):
    import torch

    for name, weight in model.named_parameters():
        if "c_attn.weight" in name:
            update = torch.randn(weight.shape[0], rank) @ torch.randn(rank, weight.shape[1])
            weight.data += update * (size * weight.norm() / update.norm())


def quantise(model, bits):
    largest = 2 ** (bits - 1) - 1
    for weight in model.parameters():
        if weight.ndim == 2:
            step = weight.data.abs().amax(dim=0, keepdim=True) / largest
            weight.data = (weight.data / step).round() * step


def answer(model, temperature=1.0, system=()):
    import torch

    def logits(prompts):
        whole = np.concatenate(
            [np.tile(np.array(system, dtype=np.int64), (len(prompts), 1)), prompts], axis=1
        )
        with torch.inference_mode():
            return model(torch.as_tensor(whole)).logits[:, -1].numpy() / temperature

    return logits


def list_changes(model):
    """Name and what is served, beside the unchanged model."""
    lora, int8, int4 = (copy.deepcopy(model) for _ in range(3))
    add_lora(lora)
    quantise(int8, 8)
    quantise(int4, 4)
    return {
        "merged LoRA": answer(lora),
        "temperature 1.3": answer(model, 1.3),
        "system prompt": answer(model, system=(7, 8, 9)),
        "8 bits": answer(int8),
        "4 bits": answer(int4),
    }


def ask(logits, interface, habits, model, prompts, seed):
    with served(logits, interface, *habits) as server:
        names = [f"t{token}" for token in range(TOKENS)]  # as this server writes them
        box = keyhole.open_language_model(server.url, vocabulary=TOKENS, max_length=32, names=names)
        opened = server.questions
        verdict = keyhole.verify(box, model, queries=prompts, seed=seed)
        box.close()
        return verdict, server.questions - opened


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--prompts", type=int, default=59)
    parser.add_argument("--quick", action="store_true", help="one run of each")
    given = parser.parse_args()
    runs = 1 if given.quick else given.runs
    for name, (interface, habits) in INTERFACES.items():
        agreed, questions, noticed = 0, 0, {}
        for seed in range(runs):
            model = make_model(seed)
            verdict, asked = ask(answer(model), interface, habits, model, given.prompts, seed)
            agreed, questions = agreed + verdict.agrees, max(questions, asked)
            if seed < max(1, runs // 4):
                for change, logits in list_changes(model).items():
                    other, _ = ask(logits, interface, habits, model, given.prompts, seed)
                    noticed.setdefault(change, []).append(not other.agrees)
        said = ", ".join(f"{change} {sum(all_)}/{len(all_)}" for change, all_ in noticed.items())
        print(f"{name}: unchanged agrees {agreed}/{runs}; noticed: {said}; {questions} questions")


if __name__ == "__main__":
    main()
