"""Models to and from other programs: PyTorch (export_torch, import_torch), ONNX (export_onnx),
GGUF (import_gguf), safetensors."""

from pathlib import Path
from typing import Any

from keyhole.errors import InvalidArgument
from keyhole.extras import need
from keyhole.models.files import replacing, save_model

SUFFIXES = ".safetensors, .onnx or .pt"


def export(model: Any, path: str | Path, dtype: Any = None) -> Path:
    """Writes the model to a file whose suffix says how: .safetensors (Keyhole's own format),
    .onnx, or .pt (a state dict for the module that `to_torch` makes)."""
    path = Path(path)
    if path.suffix == ".safetensors":
        if dtype is not None:
            model = model.astype(dtype)
        return save_model(model, path)
    if path.suffix == ".onnx":
        proto = to_onnx(model, dtype)
        with replacing(path) as temporary:
            temporary.write_bytes(proto.SerializeToString())
        return path
    if path.suffix == ".pt":
        torch = need("torch", "torch", "a state dict")
        with replacing(path) as temporary:
            torch.save(to_torch(model, dtype).state_dict(), temporary)
        return path
    raise InvalidArgument(f"cannot export to {path.name!r}: its suffix must be {SUFFIXES}")


def to_torch(
    model: Any, dtype: Any = None, *, positions: str = "last", causal: bool = False
) -> Any:
    """A torch module on (batch, length, width) that computes what the model computes. Of attention,
    `positions="all"` answers at every position: from the tokens up to it (`causal`) or from all."""
    if positions not in ("last", "all"):
        raise InvalidArgument(f"positions must be 'last' or 'all', got {positions!r}")
    need("torch", "torch", "a PyTorch module")
    from keyhole.models.export_torch import to_module

    return to_module(model, dtype, positions == "all", causal)


def to_onnx(model: Any, dtype: Any = None) -> Any:
    """An ONNX model with the input `tokens` (batch, length, width) and the output `answers`."""
    need("onnx", "onnx", "an ONNX file")
    from keyhole.models.export_onnx import to_proto

    return to_proto(model, dtype)


def from_torch(module: Any) -> Any:
    """The true model of a torch module, from its weights: `nn.MultiheadAttention`,
    `nn.TransformerEncoderLayer`, and attention, networks and blocks built as in BERT, GPT-2, Llama
    or ViT. `distance`, `verify` and `audit` work on it as on a recovered one."""
    need("torch", "torch", "a PyTorch module")
    from keyhole.models.import_torch import from_torch as read

    return read(module)


def from_hf(model: Any, layer: int | str = 0) -> Any:
    """The true model of one part of a `transformers` model: a block by its number, or any part by
    its dotted name ("encoder.layer.0.attention.self")."""
    need("torch", "torch", "a transformers model")
    from keyhole.models.import_torch import from_hf as read

    return read(model, layer)


def from_gguf(path: str | Path, part: str = "") -> Any:
    """The true model in the weights of a GGUF file of a Llama or Qwen 2: a block ("blk.0"), its
    attention ("blk.0.attn") or network ("blk.0.ffn"), or all blocks and the last norm."""
    from keyhole.models.import_gguf import from_gguf as read

    return read(path, part)
