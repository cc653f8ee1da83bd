"""Where torch and onnxruntime first round differently: single operations on the same numbers, one
thread, no graph optimisations; then a whole attention model as a torch module and as the ONNX file
that torch exports from it. Shown: how many numbers differ, and by how many units in the last place
of the largest number in the result (sums that cancel would otherwise look worse than they are).
Last, what recovery makes of it: queries asked of each, and how far the parameters are apart.

    python benchmarks/engines.py
"""

import io
import itertools
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnx import helper

import keyhole
from keyhole.models.export import to_torch
from keyhole.models.random import attention

WIDTHS, BATCH, LENGTH = (6, 12, 64, 128), 37, 5
OPERATIONS: dict[
    str, tuple[list[tuple[str, list[str], str, dict[str, Any]]], Callable[..., Any]]
] = {
    "x W": ([("MatMul", ["x", "w"], "y", {})], lambda x, w: x @ w),
    "x xᵀ": (
        [("Transpose", ["x"], "t", {"perm": [0, 2, 1]}), ("MatMul", ["x", "t"], "y", {})],
        lambda x, w: x @ x.transpose(1, 2),
    ),
    "exp": ([("Exp", ["x"], "y", {})], lambda x, w: x.exp()),
    "softmax": ([("Softmax", ["x"], "y", {"axis": -1})], lambda x, w: x.softmax(-1)),
}


def session(model: bytes) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def by_onnxruntime(steps: Any, feeds: dict[str, np.ndarray]) -> np.ndarray:
    kind = helper.np_dtype_to_tensor_dtype(feeds["x"].dtype)
    nodes = [helper.make_node(name, inputs, [out], **more) for name, inputs, out, more in steps]
    used = {name for _, inputs, _, _ in steps for name in inputs} & set(feeds)
    ports = [helper.make_tensor_value_info(k, kind, feeds[k].shape) for k in sorted(used)]
    graph = helper.make_graph(nodes, "one", ports, [helper.make_tensor_value_info("y", kind, None)])
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()
    (found,) = session(model).run(["y"], {name: feeds[name] for name in used})
    return np.asarray(found)


def exported(module: Any, tokens: np.ndarray) -> bytes:
    """By torch's own exporter, as a user would."""
    file, axes = io.BytesIO(), {"x": {0: "batch", 1: "length"}, "y": {0: "batch"}}
    names = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": axes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(module, (torch.from_numpy(tokens),), file, dynamo=False, **names)
    return file.getvalue()


def whole_model(dtype: Any, width: int, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    module = to_torch(attention(np.random.default_rng(0), width), dtype)
    with torch.inference_mode():
        here = module(torch.from_numpy(tokens)).numpy()
    return here, session(exported(module, tokens)).run(["y"], {"x": tokens})[0]


def recovered_twice(dtype: Any, width: int, folder: Path, **more: Any) -> str:
    module = to_torch(attention(np.random.default_rng(1), width, **more), dtype)
    file = folder / "model.onnx"
    file.write_bytes(exported(module, np.zeros((2, 3, width), dtype)))
    here, there = (keyhole.recover(box, keyhole.SingleHead()) for box in (module, str(file)))
    apart = keyhole.distance(here.model, there.model)
    return f"{here.ledger.paid:6} {there.ledger.paid:6}   {apart:.1e}"


def difference(here: np.ndarray, there: np.ndarray) -> str:
    units = np.abs(here - there).max() / np.spacing(np.abs(here).max())
    return f"{(here != there).mean():6.0%} by {units:3.1f}"


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, onnxruntime {onnxruntime.__version__}")
    print(f"{'format':8} {'operation':10}", *(f"{f'width {width}':>14}" for width in WIDTHS))
    for dtype in (np.float64, np.float32):
        rows: dict[str, list[str]] = {name: [] for name in (*OPERATIONS, "the model")}
        for width in WIDTHS:
            rng = np.random.default_rng(width)
            feeds = {
                "x": rng.standard_normal((BATCH, LENGTH, width)).astype(dtype),
                "w": rng.standard_normal((width, width)).astype(dtype),
            }
            for name, (steps, by_torch) in OPERATIONS.items():
                here = by_torch(*map(torch.from_numpy, feeds.values())).numpy()
                rows[name].append(difference(here, by_onnxruntime(steps, feeds)))
            rows["the model"].append(difference(*whole_model(dtype, width, feeds["x"])))
        for name, cells in rows.items():
            print(f"{dtype.__name__:8} {name:10}", *(f"{cell:>14}" for cell in cells))
    print("format   width  model      queries asked   parameters apart")
    kinds: dict[str, dict[str, Any]] = {
        "scalar": {},
        "vector": {"outputs": 2},
        "biased": {"bias": True},
    }
    with tempfile.TemporaryDirectory() as folder:
        for dtype, width, kind in itertools.product((np.float64, np.float32), (12, 32), kinds):
            line = recovered_twice(dtype, width, Path(folder), **kinds[kind])
            print(f"{dtype.__name__:8} {width:5}  {kind:8} {line}")


if __name__ == "__main__":
    main()
