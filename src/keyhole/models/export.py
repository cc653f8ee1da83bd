"""Models to and from other programs: PyTorch (export_torch, import_torch), ONNX (export_onnx),
GGUF (import_gguf), safetensors."""

from pathlib import Path
from typing import Any

from keyhole.errors import InvalidArgument
from keyhole.extras import need
from keyhole.models.files import replacing, save_model

SUFFIXES = ".safetensors, .onnx or .pt"


def export(model: Any, path: str | Path, dtype: Any = None) -> Path:
    """Writes the model to a file whose suffix says how.

    Args:
        model: A keyhole model.
        path: `.safetensors` (Keyhole's own format, which `load` reads), `.onnx`, or `.pt` (a state
            dict for the module that `to_torch` makes).
        dtype: Number format; None for float64.

    Returns:
        The path.

    Raises:
        InvalidArgument: Another suffix, or a model without that form.
        MissingExtra: torch or onnx is not installed, where the suffix needs it.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from keyhole.models.random import attention
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export(attention(np.random.default_rng(0), 4), f"{folder}/model.safetensors").name
        'model.safetensors'
    """
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
    """Builds a torch module on (batch, length, width) that computes what the model computes.

    Args:
        model: A keyhole model.
        dtype: Number format, a torch type; None for float64.
        positions: "last" answers at the last position; of attention, "all" at every position.
        causal: With "all": from the tokens up to that position instead of from all.

    Returns:
        The module.

    Raises:
        InvalidArgument: A model or an option for which there is no module.
        MissingExtra: torch is not installed.

    Example:
        >>> import numpy as np, torch
        >>> from keyhole.models.random import attention
        >>> module = to_torch(attention(np.random.default_rng(0), 4, outputs=3))
        >>> module(torch.zeros(2, 5, 4, dtype=torch.float64)).shape
        torch.Size([2, 3])
    """
    if positions not in ("last", "all"):
        raise InvalidArgument(f"positions must be 'last' or 'all', got {positions!r}")
    need("torch", "torch", "a PyTorch module")
    from keyhole.models.export_torch import to_module

    return to_module(model, dtype, positions == "all", causal)


def to_onnx(model: Any, dtype: Any = None) -> Any:
    """Builds an ONNX model with the input `tokens` (batch, length, width) and the output `answers`.

    Args:
        model: A keyhole model.
        dtype: Number format; None for float64.

    Returns:
        The ONNX model (`onnx.ModelProto`).

    Raises:
        InvalidArgument: A model for which there is no such form.
        MissingExtra: onnx is not installed.

    Example:
        >>> import numpy as np
        >>> from keyhole.models.random import attention
        >>> to_onnx(attention(np.random.default_rng(0), 4)).graph.input[0].name
        'tokens'
    """
    need("onnx", "onnx", "an ONNX file")
    from keyhole.models.export_onnx import to_proto

    return to_proto(model, dtype)


def from_torch(module: Any) -> Any:
    """Reads the true model of a torch module from its weights.

    `distance`, `verify` and `audit` work on it as on a recovered one.

    Args:
        module: `nn.MultiheadAttention`, `nn.TransformerEncoderLayer`, or attention, a network or a
            block built as in BERT, GPT-2, Llama or ViT.

    Returns:
        The model.

    Raises:
        InvalidArgument: A module that cannot be read; the message says what it lacks.
        MissingExtra: torch is not installed.

    Example:
        >>> import torch
        >>> from_torch(torch.nn.MultiheadAttention(8, 2, batch_first=True))
        Attention(width=8, heads=2, outputs=8)
    """
    need("torch", "torch", "a PyTorch module")
    from keyhole.models.import_torch import from_torch as read

    return read(module)


def from_hf(model: Any, layer: int | str = 0) -> Any:
    """Reads the true model of one part of a `transformers` model from its weights.

    Args:
        model: The `transformers` model.
        layer: A block by its number, or any part by its dotted name
            ("encoder.layer.0.attention.self").

    Returns:
        The model.

    Raises:
        InvalidArgument: A part that is not there, or cannot be read.
        MissingExtra: torch is not installed.

    Example:
        >>> import transformers
        >>> sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
        >>> config = transformers.BertConfig(num_hidden_layers=1, vocab_size=9, **sizes)
        >>> from_hf(transformers.BertModel(config), "encoder.layer.0.attention.self")
        Attention(width=8, heads=2, outputs=8)
    """
    need("torch", "torch", "a transformers model")
    from keyhole.models.import_torch import from_hf as read

    return read(model, layer)


def from_gguf(path: str | Path, part: str = "") -> Any:
    """Reads the true model in the weights of a GGUF file of a Llama or Qwen 2.

    Args:
        path: The file.
        part: A block ("blk.0"), its attention ("blk.0.attn") or network ("blk.0.ffn"); empty for
            all blocks and the last norm.

    Returns:
        The model.

    Raises:
        FileFormatError: Not a GGUF file, or one in which something is missing.
        InvalidArgument: A part that is not there, or an architecture that is not read.
        MissingExtra: gguf is not installed.

    Example:
        >>> from_gguf("missing.gguf", "blk.0.attn")
        Traceback (most recent call last):
        ...
        keyhole.errors.FileFormatError: cannot read missing.gguf: No such file or directory
    """
    from keyhole.models.import_gguf import from_gguf as read

    return read(path, part)
