"""Blocks as `transformers` and torch make them, with random weights or the library's own."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

NEURONS = 4  # per number of a token
# what a whole model has beside the layer: two layers, few words
FEW = {"num_hidden_layers": 2, "vocab_size": 20, "max_position_embeddings": 64}
SMALL = {
    "GPT2": {"n_layer": 2, "vocab_size": 20, "n_positions": 64},
    "Bert": FEW,
    "ViT": {"num_hidden_layers": 2, "image_size": 32, "patch_size": 16},
    "OPT": FEW,
    "DistilBert": {"n_layers": 2, "vocab_size": 20, "max_position_embeddings": 64},
}


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


class LibraryBlock:
    """A block of `transformers`; names: what its settings are called there."""

    def __init__(self, family: str, module: str, layer: str, **names: str) -> None:
        self.family, self.module, self.layer = family, module, layer
        self.called = {"width": "hidden_size", "heads": "num_attention_heads"} | names
        self.called.setdefault("neurons", "intermediate_size")

    def configure(self, width: int, **more: Any) -> Any:
        import transformers

        sizes = {"width": width, "heads": heads_of(width), "neurons": NEURONS * width}
        config = getattr(transformers, f"{self.family}Config")(
            **{self.called[part]: size for part, size in sizes.items()}, **more
        )
        config._attn_implementation = "eager"
        return config

    def __call__(self, width: int) -> nn.Module:
        import importlib

        home = importlib.import_module(f"transformers.models.{self.module}.modeling_{self.module}")
        kind, config = getattr(home, self.layer), self.configure(width)
        return kind(config, 0) if self.family == "GPT2" else kind(config)

    def initialised(self, width: int) -> nn.Module:
        """The first layer of a small model: a layer alone does not get the model's weights."""
        import transformers

        model = transformers.AutoModel.from_config(self.configure(width, **SMALL[self.family]))
        return next(part for part in model.modules() if type(part).__name__ == self.layer)


def torch_encoder(width: int, activation: str = "gelu") -> nn.Module:
    return nn.TransformerEncoderLayer(
        width, heads_of(width), NEURONS * width, 0.0, activation, batch_first=True
    )


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "a network behind a LayerNorm": NetworkBehindNorm,
    "GPT-2": LibraryBlock("GPT2", "gpt2", "GPT2Block", width="n_embd", heads="n_head",
                          neurons="n_inner"),
    "ViT": LibraryBlock("ViT", "vit", "ViTLayer"),
    "OPT": LibraryBlock("OPT", "opt", "OPTDecoderLayer", neurons="ffn_dim"),
    "BERT": LibraryBlock("Bert", "bert", "BertLayer"),
    "DistilBERT": LibraryBlock("DistilBert", "distilbert", "TransformerBlock", width="dim",
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
    make = LAYERS[name]
    whole = initial and isinstance(make, LibraryBlock)
    layer = (make.initialised(width) if whole else make(width)).eval()
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
