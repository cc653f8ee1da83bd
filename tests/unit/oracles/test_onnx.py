import pickle

import numpy as np
import pytest

import keyhole
from keyhole.models.export import export
from keyhole.models.random import attention

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from onnx import TensorProto, helper  # noqa: E402

TOKENS = np.random.default_rng(0).standard_normal((5, 3, 4))
ASKED = keyhole.QueryBatch.of(TOKENS, "test")


def saved(path, inputs, outputs, nodes):
    """A file with the given (name, type, shape) ports."""
    ports = [[helper.make_tensor_value_info(*port) for port in side] for side in (inputs, outputs)]
    graph = helper.make_graph(nodes, "test", *ports)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), path)
    return str(path)


def mean(path, shape, kind=TensorProto.DOUBLE, rank=3):
    """The mean over the tokens; the shape of the input is as given."""
    node = helper.make_node("ReduceMean", ["x"], ["y"], axes=[rank - 2], keepdims=0)
    return saved(path, [("x", kind, shape)], [("y", kind, None)], [node])


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("more", [{}, {"outputs": 3, "bias": True}, {"heads": 2, "rank": 2}])
def test_round_trip_of_an_export(tmp_path, more, dtype):
    secret = attention(np.random.default_rng(0), 4, **more)
    box = keyhole.open_oracle(export(secret, tmp_path / "model.onnx", dtype))
    answers = box.ask(ASKED)
    assert (answers.dtype, box.spec.width) == (dtype, 4)
    np.testing.assert_allclose(answers, secret(TOKENS), rtol=0, atol=100 * np.finfo(dtype).eps)


@pytest.mark.parametrize("batch", [1, 2, 8])
def test_a_fixed_batch_is_filled_up(tmp_path, batch):
    box = keyhole.open_oracle(mean(tmp_path / "m.onnx", [batch, "length", 4]))
    np.testing.assert_allclose(box.ask(ASKED), TOKENS.mean(axis=1), rtol=1e-12)


def test_a_fixed_length_is_a_limit_and_an_error(tmp_path):
    box = keyhole.open_oracle(mean(tmp_path / "m.onnx", ["batch", 3, 4]))
    assert box.spec.domain.max_length == 3
    assert box.ask(ASKED).shape == (5, 4)
    with pytest.raises(keyhole.OracleError, match="3 tokens"):
        box.ask(keyhole.QueryBatch.of(TOKENS[:, :2], "test"))


def test_a_sequence_of_answers_is_read_at_the_last_position(tmp_path):
    node = helper.make_node("Neg", ["x"], ["y"])
    port = [("b", TensorProto.FLOAT, ["n", "l", 4])]
    path = saved(
        tmp_path / "m.onnx",
        [("x", *port[0][1:])],
        [("y", *port[0][1:])],
        [node],
    )
    np.testing.assert_array_equal(
        keyhole.open_oracle(path).ask(ASKED), -TOKENS[:, -1].astype(np.float32)
    )


def test_width_where_the_file_does_not_tell(tmp_path):
    path = mean(tmp_path / "m.onnx", ["batch", "length", "width"])
    with pytest.raises(keyhole.InvalidArgument, match="width="):
        keyhole.open_oracle(path)
    assert keyhole.open_oracle(path, width=4).ask(ASKED).shape == (5, 4)
    with pytest.raises(keyhole.InvalidArgument, match="width 4"):
        keyhole.open_oracle(mean(tmp_path / "m.onnx", ["batch", "length", 4]), width=5)


def test_several_outputs_are_chosen_by_name(tmp_path):
    nodes = [helper.make_node(kind, ["x"], [kind]) for kind in ("Neg", "Abs")]
    shape = (TensorProto.DOUBLE, ["n", "l", 4])
    path = saved(tmp_path / "m.onnx", [("x", *shape)], [("Neg", *shape), ("Abs", *shape)], nodes)
    with pytest.raises(keyhole.InvalidArgument, match="Neg, Abs"):
        keyhole.open_oracle(path)
    box = keyhole.open_oracle(path, output="Abs", input="x")
    np.testing.assert_array_equal(box.ask(ASKED), np.abs(TOKENS[:, -1]))


def test_several_inputs_cannot_be_asked(tmp_path):
    shape = (TensorProto.DOUBLE, ["n", "l", 4])
    node = helper.make_node("Add", ["a", "b"], ["y"])
    path = saved(tmp_path / "m.onnx", [("a", *shape), ("b", *shape)], [("y", *shape)], [node])
    with pytest.raises(keyhole.InvalidArgument, match="a, b"):
        keyhole.open_oracle(path)
    with pytest.raises(keyhole.InvalidArgument, match="together"):
        keyhole.open_oracle(path, input="a")


@pytest.mark.parametrize("shape", [["batch", 4], ["batch", 3, 8, 8]])
def test_a_file_that_is_no_sequence_model(tmp_path, shape):
    with pytest.raises(keyhole.FileFormatError, match="not a sequence model"):
        keyhole.open_oracle(mean(tmp_path / "m.onnx", shape, rank=len(shape)))


def test_a_file_on_token_numbers(tmp_path):
    node = helper.make_node("Identity", ["x"], ["y"])
    port = (TensorProto.INT64, ["n", "l"])
    path = saved(tmp_path / "m.onnx", [("x", *port)], [("y", *port)], [node])
    with pytest.raises(keyhole.FileFormatError, match="token numbers"):
        keyhole.open_oracle(path)


@pytest.mark.parametrize("content", [None, b"", b"nothing of the kind", "half"])
def test_a_file_that_is_not_onnx(tmp_path, content):
    path = tmp_path / "m.onnx"
    if content == "half":
        whole = export(attention(np.random.default_rng(0), 8), path).read_bytes()
        content = whole[: len(whole) // 2]
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(keyhole.FileFormatError, match=r"m\.onnx"):
        keyhole.open_oracle(str(path))


def test_it_travels_as_its_path(tmp_path):
    secret = attention(np.random.default_rng(0), 4)
    box = keyhole.open_oracle(export(secret, tmp_path / "model.onnx"))
    again = pickle.loads(pickle.dumps(box))
    np.testing.assert_array_equal(again.ask(ASKED), box.ask(ASKED))
    assert again.spec.identity == box.spec.identity
