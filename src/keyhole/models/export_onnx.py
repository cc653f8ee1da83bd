"""Models as ONNX graphs: the input `tokens` (batch, length, width), the output `answers`.

Reach it through models/export.py, which explains a missing onnx.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import checker, helper, numpy_helper

from keyhole.arrays import Array
from keyhole.errors import InvalidArgument
from keyhole.models.attention import Attention, Factors
from keyhole.models.block import Block
from keyhole.models.mlp import QUICK, ROOT_HALF, TANH_CUBIC, TANH_SLOPE, Mlp
from keyhole.models.norm import Norm
from keyhole.models.relu_network import ReluNetwork
from keyhole.models.transformer import TransformerModel

KINDS = (np.float16, np.float32, np.float64)


def to_proto(model: Any, dtype: Any = None) -> Any:
    """The model as an ONNX object."""
    builders: dict[type, Callable[[Graph, Any], str]] = {
        Attention: add_heads,
        Block: add_block,
        Mlp: add_mlp,
        ReluNetwork: add_network,
        TransformerModel: add_transformer,
    }
    if type(model) not in builders:
        raise InvalidArgument(f"a {type(model).__name__} cannot be exported to ONNX")
    kind = np.dtype(model.dtype if dtype is None else dtype)
    if kind not in KINDS:
        raise InvalidArgument(f"dtype must be float16, float32 or float64, got {kind}")
    graph = Graph(kind)
    graph.node("Identity", [builders[type(model)](graph, model)], output="answers")
    element = helper.np_dtype_to_tensor_dtype(kind)
    shape: list[Any] = ["batch"] if model.outputs is None else ["batch", model.outputs]
    opset = 17  # of 2022: read by everything in use
    ir_version = 8
    proto = helper.make_model(
        helper.make_graph(
            graph.nodes,
            type(model).__name__.lower(),
            [helper.make_tensor_value_info("tokens", element, ["batch", "length", model.width])],
            [helper.make_tensor_value_info("answers", element, shape)],
            graph.constants,
        ),
        producer_name="keyhole",
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=ir_version,
    )
    checker.check_model(proto, full_check=True)
    return proto


class Graph:
    """Nodes and constants in the making; every intermediate gets a number for a name."""

    def __init__(self, dtype: Any) -> None:
        self.dtype, self.nodes, self.constants = dtype, [], []  # type: ignore[var-annotated]

    def constant(self, name: str, array: Array) -> str:
        self.constants.append(numpy_helper.from_array(np.array(array), name))
        return name

    def parameter(self, name: str, array: Array) -> str:
        return self.constant(name, np.ascontiguousarray(array.astype(self.dtype)))

    def node(self, kind: str, inputs: list[str], output: str | None = None, **more: Any) -> str:
        output = output or f"step.{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], **more))
        return output

    def axis(self, number: int) -> str:
        """The constant [number], made once."""
        name = f"axis.{number}"
        if all(constant.name != name for constant in self.constants):
            self.constant(name, np.array([number]))
        return name

    def query(self, tokens: str = "tokens") -> str:
        """The last token of every sequence."""
        last = f"{tokens}.last"
        return self.node("Gather", [tokens, self.constant(last, np.array(-1))], axis=1)


def add_heads(graph: Graph, model: Attention, tokens: str = "tokens", prefix: str = "") -> str:
    if model.position is not None:
        raise InvalidArgument("a layer with positions cannot be exported to ONNX; to_module can")
    query = graph.query(tokens)
    answer = graph.constant(f"{prefix}offset", model.offset.astype(graph.dtype))
    if model.skip is not None:
        past = graph.node("MatMul", [query, graph.parameter(f"{prefix}skip", model.skip)])
        answer = graph.node("Add", [answer, past])
    for number, head in enumerate(model.heads):
        name = f"{prefix}heads.{number}."
        score = head.score_factors or head.score
        mean = add_attention(graph, query, score, head.key_bias, name, tokens)
        moved = graph.node("MatMul", [mean, graph.parameter(f"{name}value", head.value)])
        answer = graph.node("Add", [answer, moved])
    return answer


def add_attention(
    graph: Graph,
    query: str,
    score: Array | Factors,
    key_bias: Array,
    name: str,
    tokens: str = "tokens",
) -> str:
    """softmax(tokens · (score query + key_bias)) · tokens"""
    keys = query
    if isinstance(score, Factors):
        keys = graph.node("MatMul", [keys, graph.parameter(f"{name}score_right", score.right.T)])
        keys = graph.node("MatMul", [keys, graph.parameter(f"{name}score_left", score.left.T)])
    else:
        keys = graph.node("MatMul", [keys, graph.parameter(f"{name}score", score.T)])
    keys = graph.node("Add", [keys, graph.parameter(f"{name}key_bias", key_bias)])
    column = graph.node("Unsqueeze", [keys, graph.axis(2)])
    scores = graph.node("Squeeze", [graph.node("MatMul", [tokens, column]), graph.axis(2)])
    weights = graph.node("Softmax", [scores], axis=1)
    row = graph.node("Unsqueeze", [weights, graph.axis(1)])
    return graph.node("Squeeze", [graph.node("MatMul", [row, tokens]), graph.axis(1)])


def add_network(graph: Graph, model: ReluNetwork) -> str:
    point = graph.query()
    return add_relus(
        graph,
        model,
        multiply(graph, point, "weight", model.weight.T),
        multiply(graph, point, "skip", model.skip),
    )


def add_mlp(graph: Graph, model: Mlp, point: str | None = None, prefix: str = "") -> str:
    """At the last token, or at the point that is given."""
    point = graph.query() if point is None else point

    def argument(name: str, rows: Array, bias: Array) -> str:
        product = multiply(graph, point, prefix + name, rows.T)
        return graph.node("Add", [product, graph.parameter(f"{prefix}{name}_bias", bias)])

    hidden = argument("inner", model.inner, model.inner_bias)
    if model.gate is not None and model.gate_bias is not None:
        gate = argument("gate", model.gate, model.gate_bias)
        hidden = graph.node("Mul", [add_activation(graph, model.activation, gate), hidden])
    else:
        hidden = add_activation(graph, model.activation, hidden)
    straight = multiply(graph, point, f"{prefix}linear", model.linear.T)
    outer = multiply(graph, hidden, f"{prefix}outer", model.outer.T)
    answer = graph.node("Add", [outer, straight])
    offset = graph.constant(f"{prefix}offset", model.offset.astype(graph.dtype))
    return graph.node("Add", [answer, offset])


def add_norm(graph: Graph, x: str, norm: Norm, name: str) -> str:
    if norm.kind == "layer":
        mean = graph.node("ReduceMean", [x], axes=[-1], keepdims=1)
        x = graph.node("Sub", [x, mean])
    square = graph.node("ReduceMean", [graph.node("Mul", [x, x])], axes=[-1], keepdims=1)
    epsilon = graph.constant(f"{name}.epsilon", np.array(norm.epsilon, graph.dtype))
    size = graph.node("Sqrt", [graph.node("Add", [square, epsilon])])
    scaled = graph.node(
        "Mul", [graph.node("Div", [x, size]), graph.parameter(f"{name}.gain", norm.gain)]
    )
    return graph.node("Add", [scaled, graph.parameter(f"{name}.bias", norm.bias)])


def add_block(graph: Graph, model: Block) -> str:
    """The steps of models/block."""
    anchor = stream = graph.query()
    pre, norms = model.norm == "pre", list(model.norms)
    if model.attention is not None:
        norm = norms.pop(0) if norms else None
        if pre and norm is not None:
            seen = add_norm(graph, "tokens", norm, "norm.attention")
        else:
            seen = graph.node("Identity", ["tokens"])
        stream = graph.node("Add", [stream, add_heads(graph, model.attention, seen, "attention.")])
        if norm is not None and not pre:
            stream = add_norm(graph, stream, norm, "norm.attention")
    if model.mlp is not None:
        norm = norms.pop(0) if norms else None
        point = anchor if model.parallel else stream
        if pre and norm is not None:
            point = add_norm(graph, point, norm, "norm.mlp")
        stream = graph.node("Add", [stream, add_mlp(graph, model.mlp, point, "mlp.")])
        if norm is not None and not pre:
            stream = add_norm(graph, stream, norm, "norm.mlp")
    return stream


def add_activation(graph: Graph, name: str, argument: str) -> str:
    """φ of models/mlp, of operators that every opset has."""
    numbers = iter(range(9))

    def number(value: float) -> str:
        return graph.constant(f"phi.{next(numbers)}", np.array(value, graph.dtype))

    def times(a: str, b: str) -> str:
        return graph.node("Mul", [a, b])

    if name in ("relu", "tanh", "sigmoid"):
        return graph.node(name.capitalize(), [argument])
    if name in ("silu", "quick_gelu"):
        inside = argument if name == "silu" else times(argument, number(QUICK))
        return times(argument, graph.node("Sigmoid", [inside]))
    if name == "gelu":
        bent = graph.node("Erf", [times(argument, number(ROOT_HALF))])
    else:
        cube = times(times(times(argument, argument), argument), number(TANH_CUBIC))
        inside = times(graph.node("Add", [argument, cube]), number(TANH_SLOPE))
        bent = graph.node("Tanh", [inside])
    half = times(argument, number(0.5))
    return times(half, graph.node("Add", [bent, number(1.0)]))


def add_transformer(graph: Graph, model: TransformerModel) -> str:
    query, network = graph.query(), model.network
    mean = add_attention(graph, query, model.score, model.key_bias, "")
    if model.mixed_weight is None or model.mixed_skip is None:
        return add_relus(
            graph,
            network,
            multiply(graph, mean, "weight", network.weight.T),
            multiply(graph, mean, "skip", network.skip),
        )
    moved = graph.node("Sub", [mean, query])
    hidden, straight = (
        graph.node(
            "Add",
            [multiply(graph, query, name, own), multiply(graph, moved, f"mixed_{name}", mixed)],
        )
        for name, own, mixed in (
            ("weight", network.weight.T, model.mixed_weight.T),
            ("skip", network.skip, model.mixed_skip),
        )
    )
    return add_relus(graph, network, hidden, straight)


def multiply(graph: Graph, point: str, name: str, matrix: Array) -> str:
    return graph.node("MatMul", [point, graph.parameter(name, matrix)])


def add_relus(graph: Graph, network: ReluNetwork, hidden: str, straight: str) -> str:
    """output · relu(hidden + bias) + straight + offset"""
    active = graph.node("Add", [hidden, graph.parameter("bias", network.bias)])
    bent = multiply(graph, graph.node("Relu", [active]), "output", network.output)
    answer = graph.node("Add", [bent, straight])
    return graph.node("Add", [answer, graph.constant("offset", network.offset.astype(graph.dtype))])
