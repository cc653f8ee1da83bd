"""Blocks as `transformers` and torch make them, with random weights or the library's own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

NEURONS = 4  # per number of a token


class LastToken(nn.Module):
    """The answer of a layer at the last position."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        answer = self.layer(tokens)
        return (answer[0] if isinstance(answer, tuple) else answer)[:, -1]


class NetworkBehindNorm(nn.Module):
    """x + mlp(norm(x)), the lower half of a pre-norm block."""

    def __init__(self, width: int, activation: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), feed_forward(width, activation)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens + self.mlp(self.norm(tokens))


class NetworkBeforeNorm(NetworkBehindNorm):
    """norm(x + mlp(x)), the lower half of a post-norm block."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(tokens + self.mlp(tokens))


def feed_forward(width: int, activation: type[nn.Module]) -> nn.Module:
    wide = NEURONS * width
    return nn.Sequential(nn.Linear(width, wide), activation(), nn.Linear(wide, width))


def heads_of(width: int) -> int:
    return 4 if width >= 32 else 2


def library_block(family: str, module: str, layer: str, **names: str) -> Callable[[int], nn.Module]:
    """A block of `transformers`; names: what its settings are called there."""

    def make(width: int) -> nn.Module:
        import importlib

        import transformers

        called = {"width": "hidden_size", "heads": "num_attention_heads"} | names
        called.setdefault("neurons", "intermediate_size")
        sizes = {"width": width, "heads": heads_of(width), "neurons": NEURONS * width}
        config = getattr(transformers, f"{family}Config")(
            **{called[part]: size for part, size in sizes.items()}
        )
        config._attn_implementation = "eager"
        home = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
        kind = getattr(home, layer)
        return kind(config, 0) if family == "GPT2" else kind(config)

    return make


def torch_encoder(width: int, activation: str = "gelu") -> nn.Module:
    return nn.TransformerEncoderLayer(
        width, heads_of(width), NEURONS * width, 0.0, activation, batch_first=True
    )


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "a network behind a LayerNorm": NetworkBehindNorm,
    "GPT-2": library_block("GPT2", "gpt2", "GPT2Block", width="n_embd", heads="n_head",
                           neurons="n_inner"),
    "ViT": library_block("ViT", "vit", "ViTLayer"),
    "OPT": library_block("OPT", "opt", "OPTDecoderLayer", neurons="ffn_dim"),
    "BERT": library_block("Bert", "bert", "BertLayer"),
    "DistilBERT": library_block("DistilBert", "distilbert", "TransformerBlock", width="dim",
                                heads="n_heads", neurons="hidden_dim"),
    "torch encoder": torch_encoder,
    "torch encoder, ReLU": partial(torch_encoder, activation="relu"),
    "a network behind a LayerNorm, ReLU": partial(NetworkBehindNorm, activation=nn.ReLU),
    "a network before a LayerNorm": NetworkBeforeNorm,
    "a network before a LayerNorm, ReLU": partial(NetworkBeforeNorm, activation=nn.ReLU),
}  # fmt: skip


def make_block(name: str, width: int, seed: int, initial: bool) -> nn.Module:
    """The layer in float64 whose weights are numbers of float32: matrices 1.4 / sqrt(inputs), gains
    1 ± 0.2, biases 0.3; `initial`: as the library initialises them."""
    torch.manual_seed(seed)
    layer = LAYERS[name](width).eval()
    if not initial:
        with torch.no_grad():
            for part in layer.modules():
                for kind, weight in part.named_parameters(recurse=False):
                    weight.copy_(draw(part, kind, weight))
    return LastToken(layer).double()


def draw(part: Any, kind: str, weight: torch.Tensor) -> torch.Tensor:
    drawn = torch.randn_like(weight)
    if weight.ndim == 2:
        inputs = weight.shape[0] if type(part).__name__ == "Conv1D" else weight.shape[1]
        return 1.4 * inputs**-0.5 * drawn
    return 1.0 + 0.2 * drawn if isinstance(part, nn.LayerNorm) and kind == "weight" else 0.3 * drawn
