"""ONNX files on token numbers."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from keyhole.errors import InvalidArgument, OracleError
from keyhole.oracles.onnx_rows import open_onnx_rows
from keyhole.oracles.token_models import TokenReading

TABLE = np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32)
ROWS = [np.array([3, 1]), np.array([5, 5, 9])]


def write(path, pooled, first="input_ids"):
    """Looks up vectors of tokens; `pooled` sums them over those that the mask keeps."""
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "length"])
        for name in (first, "attention_mask")
    ]
    nodes = [helper.make_node("Gather", ["table", first], ["states"])]
    shape = ["batch", "length", 4]
    if pooled:
        nodes += [
            helper.make_node("Cast", ["attention_mask"], ["mask"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["mask", "last"], ["column"]),
            helper.make_node("Mul", ["states", "column"], ["kept"]),
            helper.make_node("ReduceSum", ["kept", "one"], ["vectors"], keepdims=0),
        ]
        shape = ["batch", 4]
    graph = helper.make_graph(
        nodes,
        "lookup",
        inputs,
        [helper.make_tensor_value_info("vectors" if pooled else "states", 1, shape)],
        [
            numpy_helper.from_array(TABLE, "table"),
            numpy_helper.from_array(np.array([2]), "last"),
            numpy_helper.from_array(np.array([1]), "one"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, path)
    return path


def test_a_vector_for_each_row(tmp_path):
    box = open_onnx_rows(write(tmp_path / "a.onnx", pooled=True), tokens=20)
    assert box.spec.tokens == 20
    expected = [TABLE[row].sum(axis=0) for row in ROWS]
    np.testing.assert_allclose(box.ask(ROWS), expected, rtol=1e-5)


def test_states_are_read_as_the_reference_says(tmp_path):
    path = write(tmp_path / "a.onnx", pooled=False)
    box = open_onnx_rows(path, reading=TokenReading("mean"))
    expected = [TABLE[row].mean(axis=0) for row in ROWS]
    np.testing.assert_allclose(box.ask(ROWS), expected, rtol=1e-5)
    with pytest.raises(OracleError, match="answers at every position"):
        open_onnx_rows(path).ask(ROWS)


def test_a_file_on_something_else_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="takes pixels"):
        open_onnx_rows(write(tmp_path / "a.onnx", pooled=True, first="pixels"))
