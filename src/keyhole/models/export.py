"""Recovered models for other programs: PyTorch, ONNX, safetensors.

Further kinds of models register with `to_torch.register` and `to_onnx.register`.
"""

from functools import singledispatch
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import InvalidArgument
from keyhole.extras import need
from keyhole.models.attention import Attention, Head
from keyhole.models.files import replacing, save_model

OPSET = 17  # of 2022: read by everything in use
IR_VERSION = 8
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
    raise InvalidArgument(f"a {type(model).__name__} cannot be exported to torch")


@to_torch.register
def _(model: Attention, dtype: Any = None) -> Any:
    torch = need("torch", "torch", "a PyTorch module")
    from keyhole.models.attention_module import AttentionModule

    names = {"float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
    if not isinstance(dtype, torch.dtype):
        dtype = names[np.dtype(model.dtype if dtype is None else dtype).name]
    return AttentionModule(model, dtype).eval()


@singledispatch
def to_onnx(model: Any, dtype: Any = None) -> Any:
    """An ONNX model with the input `tokens` (batch, length, width) and the output `answers`."""
    raise InvalidArgument(f"a {type(model).__name__} cannot be exported to ONNX")


@to_onnx.register
def _(model: Attention, dtype: Any = None) -> Any:
    need("onnx", "onnx", "an ONNX file")
    from onnx import checker, helper

    kind = np.dtype(model.dtype if dtype is None else dtype)
    if kind not in (np.float16, np.float32, np.float64):
        raise InvalidArgument(f"dtype must be float16, float32 or float64, got {kind}")
    graph = _Graph(kind)
    query = graph.node("Gather", ["tokens", graph.constant("last", np.array(-1))], axis=1)
    answer = graph.constant("offset", model.offset.astype(kind))
    for number, head in enumerate(model.heads):
        answer = graph.node("Add", [answer, _head(graph, head, query, f"heads.{number}")])
    graph.node("Identity", [answer], output="answers")
    element = helper.np_dtype_to_tensor_dtype(kind)
    shape: list[Any] = ["batch"] if model.outputs is None else ["batch", model.outputs]
    proto = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "attention",
            [helper.make_tensor_value_info("tokens", element, ["batch", "length", model.width])],
            [helper.make_tensor_value_info("answers", element, shape)],
            graph.constants,
        ),
        producer_name="keyhole",
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    checker.check_model(proto, full_check=True)
    return proto


class _Graph:
    """Nodes and constants in the making; every intermediate gets a number for a name."""

    def __init__(self, dtype: Any) -> None:
        self.dtype, self.nodes, self.constants = dtype, [], []  # type: ignore[var-annotated]

    def constant(self, name: str, array: Array) -> str:
        from onnx import numpy_helper

        self.constants.append(numpy_helper.from_array(np.array(array), name))
        return name

    def node(self, kind: str, inputs: list[str], output: str | None = None, **more: Any) -> str:
        from onnx import helper

        output = output or f"step.{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], **more))
        return output

    def axis(self, number: int) -> str:
        """The constant [number], made once."""
        name = f"axis.{number}"
        if all(constant.name != name for constant in self.constants):
            self.constant(name, np.array([number]))
        return name


def _head(graph: _Graph, head: Head, query: str, name: str) -> str:
    """softmax(tokens · (score query + key_bias)) · tokens · value"""

    def parameter(part: str, array: Array) -> str:
        return graph.constant(f"{name}.{part}", np.ascontiguousarray(array.astype(graph.dtype)))

    keys = query
    if head.score_factors is None:
        keys = graph.node("MatMul", [keys, parameter("score", head.score.T)])
    else:
        left, right = head.score_factors
        keys = graph.node("MatMul", [keys, parameter("score_right", right.T)])
        keys = graph.node("MatMul", [keys, parameter("score_left", left.T)])
    keys = graph.node("Add", [keys, parameter("key_bias", head.key_bias)])
    column = graph.node("Unsqueeze", [keys, graph.axis(2)])
    scores = graph.node("Squeeze", [graph.node("MatMul", ["tokens", column]), graph.axis(2)])
    weights = graph.node("Softmax", [scores], axis=1)
    row = graph.node("Unsqueeze", [weights, graph.axis(1)])
    mean = graph.node("Squeeze", [graph.node("MatMul", [row, "tokens"]), graph.axis(1)])
    return graph.node("MatMul", [mean, parameter("value", head.value)])
