"""Attention of `transformers` in place, in the formats that people serve: nothing given.

    python benchmarks/library_attention.py [--seeds 5] [--first 2000] [--only SUBSTRING]
                                           [--formats float32,bfloat16] [--width 64] [--heads 4]

Layers of the library with random weights (matrices 1.4 / sqrt(width), biases 0.5; --initial: as the
library initialises them), called with their own position handling: Llama, Qwen 2, Mistral and Gemma
with their rotary embedding, T5 with its table, MPT with linear biases, GPT-2 with and without the
vectors of its places. A row: how many of the seeds ended RECOVERED, and how the others ended; of
those with a model the error of its answers on 60 fresh sequences of 4 to 64 tokens, over the spread
of the answers; the same over the error that the box itself makes against the layer in float64;
queries of the whole run over the floor; CPU seconds, those of the box included. Medians (worst).
"""

import argparse
import copy
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import keyhole

PLACES = 48  # of a box with vectors of its places


class Rotary(nn.Module):
    """Attention with the rotary embedding of its library."""

    def __init__(self, attention: nn.Module, embedding: nn.Module) -> None:
        super().__init__()
        self.attention, self.embedding = attention, embedding

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1])[None]
        turned = self.embedding(tokens, places)
        answers = [
            self.attention(one, position_embeddings=turned, attention_mask=None)[0][:, -1:]
            for one in tokens.split(max(1, 2**14 // tokens.shape[1]))
        ]
        return torch.cat(answers)


class Relative(nn.Module):
    """T5's self-attention with its own table."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.attention(tokens)[0]


class LinearBias(nn.Module):
    """MPT's attention with its biases and a causal mask."""

    def __init__(self, attention: nn.Module, heads: int) -> None:
        super().__init__()
        self.attention, self.heads = attention, heads

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

        length = tokens.shape[1]
        bias = build_mpt_alibi_tensor(self.heads, length).to(tokens.dtype)
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        return self.attention(tokens, bias, attention_mask=mask)[0]


class Learned(nn.Module):
    """GPT-2's attention, behind the vectors of its places if it has some."""

    def __init__(self, attention: nn.Module, places: nn.Embedding | None) -> None:
        super().__init__()
        self.attention, self.places = attention, places

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.places is not None:
            tokens = tokens + self.places(torch.arange(tokens.shape[1]))
        return self.attention(tokens)[0]


def rotary(
    family: str, groups: int, base: float, **settings: Any
) -> Callable[[int, int], nn.Module]:
    def make(width: int, heads: int) -> nn.Module:
        import importlib

        import transformers

        config = getattr(transformers, f"{family}Config")(
            hidden_size=width,
            num_attention_heads=heads,
            num_key_value_heads=min(groups, heads),
            head_dim=width // heads,
            rope_parameters={"rope_type": "default", "rope_theta": base},
            max_position_embeddings=8192,
            **settings,
        )
        config._attn_implementation = "sdpa"
        name = family.lower()
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        attention = getattr(module, f"{family}Attention")(config, 0)
        return Rotary(attention, getattr(module, f"{family}RotaryEmbedding")(config))

    return make


def relative(decoder: bool) -> Callable[[int, int], nn.Module]:
    def make(width: int, heads: int) -> nn.Module:
        from transformers import T5Config
        from transformers.models.t5.modeling_t5 import T5Attention

        config = T5Config(d_model=width, num_heads=heads, d_kv=width // heads, is_decoder=decoder)
        config._attn_implementation = "eager"
        return Relative(T5Attention(config, True, layer_idx=0, is_causal=decoder))

    return make


def linear_bias(width: int, heads: int) -> nn.Module:
    from transformers import MptConfig
    from transformers.models.mpt.modeling_mpt import MptAttention

    config = MptConfig(d_model=width, n_heads=heads)
    return LinearBias(MptAttention(config, 0), heads)


def learned(with_places: bool) -> Callable[[int, int], nn.Module]:
    def make(width: int, heads: int) -> nn.Module:
        from transformers import GPT2Config
        from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

        config = GPT2Config(n_embd=width, n_head=heads, n_positions=PLACES)
        config._attn_implementation = "sdpa"
        places = nn.Embedding(PLACES, width) if with_places else None
        return Learned(GPT2Attention(config, layer_idx=0), places)

    return make


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "Llama": rotary("Llama", 4, 1e4),
    "Llama, 2 groups, base 5e5": rotary("Llama", 2, 5e5),
    "Qwen2, 2 groups, base 1e6": rotary("Qwen2", 2, 1e6),
    "Mistral, 2 groups": rotary("Mistral", 2, 1e4, sliding_window=None),
    "Gemma, 1 group": rotary("Gemma", 1, 1e4),
    "T5 encoder": relative(False),
    "T5 decoder": relative(True),
    "MPT": linear_bias,
    "GPT-2": learned(False),
    "GPT-2 with places": learned(True),
}


def make_layer(name: str, seed: int, width: int, heads: int, initial: bool) -> nn.Module:
    """A layer in float64 whose weights are numbers of float32."""
    torch.manual_seed(seed)
    layer = LAYERS[name](width, heads).eval()
    if not initial:
        with torch.no_grad():
            for part_name, part in layer.named_parameters():
                size = 0.5 if part.ndim == 1 or "places" in part_name else 1.4 * width**-0.5
                if "relative_attention_bias" in part_name:
                    size = 1.0
                elif name.startswith("T5") and ".q." in part_name:
                    size *= (width / heads) ** -0.5  # it does not divide its scores
                part.copy_(size * torch.randn_like(part))
    return layer


def compare(
    layer: nn.Module, kind: torch.dtype, model: Any, seed: int, longest: int
) -> tuple[float, float]:
    """Error of the model's answers over their spread, and over the box's own error."""
    exact, box = copy.deepcopy(layer).to(kind).double(), copy.deepcopy(layer).to(kind)
    rng, width = np.random.default_rng(seed + 10**6), model.width
    off, own, answers = [], [], []
    for length in np.geomspace(4, min(64, longest), 6).astype(int):
        tokens = torch.tensor(rng.standard_normal((10, int(length), width))).to(kind)
        with torch.no_grad():
            true = exact(tokens.double())[:, -1].numpy()
            rounded = box(tokens)[:, -1].double().numpy()
        answers.append(true)
        off.append(model(tokens.double().numpy()) - true)
        own.append(rounded - true)
    every, error, rounding = (np.concatenate(part) for part in (answers, off, own))
    spread = np.sqrt(np.mean((every - every.mean(axis=0)) ** 2))
    size, level = (np.sqrt(np.mean(part**2)) for part in (error, rounding))
    return float(size / spread), float(size / level)


@dataclass(frozen=True)
class Run:
    """How one recovery ended, and what it found and took."""

    outcome: str
    seconds: float
    figures: tuple[float, float, float] | None  # error over spread, over rounding, floors

    @classmethod
    def of(cls, name: str, kind: torch.dtype, seed: int, options: argparse.Namespace) -> "Run":
        layer = make_layer(name, seed, options.width, options.heads, options.initial)
        longest = PLACES if "places" in name else None
        served = copy.deepcopy(layer).to(kind)
        box = keyhole.open_oracle(served, width=options.width, max_length=longest)
        start = time.process_time()
        end = keyhole.recover(box, seed=seed, throw=False)
        seconds = time.process_time() - start
        figures = None
        if end.model is not None:
            off = compare(layer, kind, end.model, seed, longest or 64)
            figures = (*off, end.ledger.paid / end.ledger.floor)
        said = f"{end.ledger.paid} queries; {end.reason or figures}"
        print(f"<!-- {name}, {kind}, seed {seed}: {end.outcome.name}, {seconds:.1f} s, {said} -->")
        return cls(end.outcome.name, seconds, figures)


def describe(name: str, kind: str, runs: list[Run]) -> str:
    """A row of the table."""
    endings = Counter(run.outcome for run in runs)
    recovered = endings.pop(keyhole.Outcome.RECOVERED.name, 0)
    others = "".join(f", {count} {ending}" for ending, count in endings.items())
    columns = list(zip(*(run.figures for run in runs if run.figures), strict=True)) or [()] * 3
    columns.append(tuple(run.seconds for run in runs))
    cells = [f"{np.median(part):.2g} ({max(part):.2g})" if part else "" for part in columns]
    return f"| {name} | {kind} | {recovered}/{len(runs)}{others} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=2000)
    parser.add_argument("--only", default="")
    parser.add_argument("--formats", default="float32,bfloat16")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--initial", action="store_true")
    options = parser.parse_args()
    print("| layer | format | recovered | error / spread | / rounding | queries / floor | CPU s |")
    print("|---|---|---|---|---|---|---|")
    seeds = range(options.first, options.first + options.seeds)
    for name in LAYERS:
        for kind in options.formats.split(",") if options.only in name else ():
            runs = [Run.of(name, getattr(torch, kind), seed, options) for seed in seeds]
            print(describe(name, kind, runs), flush=True)


if __name__ == "__main__":
    main()
