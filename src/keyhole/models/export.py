"""Recovered models for other programs: PyTorch, ONNX, safetensors.

Further kinds of models register with `to_torch.register` and `to_onnx.register`.
"""

from functools import singledispatch
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.errors import InvalidArgument
from keyhole.extras import need
from keyhole.models.attention import Attention
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


@singledispatch
def to_torch(model: Any, dtype: Any = None) -> Any:
    """A torch module on (batch, length, width) that computes what the model computes."""
    from keyhole.models.export_torch import to_torch as network_to_torch

    module = network_to_torch(model).eval()
    return module if dtype is None else module.to(torch_dtype(dtype))


@to_torch.register
def _(model: Attention, dtype: Any = None) -> Any:
    need("torch", "torch", "a PyTorch module")
    from keyhole.models.attention_module import AttentionModule

    return AttentionModule(model, torch_dtype(model.dtype if dtype is None else dtype)).eval()


def torch_dtype(dtype: Any) -> Any:
    """Torch's own name of a number format."""
    torch = need("torch", "torch", "a PyTorch module")
    if isinstance(dtype, torch.dtype):
        return dtype
    name = np.dtype(dtype).name
    if name not in ("float16", "float32", "float64"):
        raise InvalidArgument(f"dtype must be float16, float32 or float64, got {name}")
    return getattr(torch, name)


@singledispatch
def to_onnx(model: Any, dtype: Any = None) -> Any:
    """An ONNX model with the input `tokens` (batch, length, width) and the output `answers`."""
    need("onnx", "onnx", "an ONNX file")
    from keyhole.models.export_onnx import proto_of

    return proto_of(model, dtype)
