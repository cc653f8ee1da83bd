"""What faults do to a model: the verbs that entries of the catalogue are made of.

Each function takes the bench and changes it; the bench puts everything back afterwards.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keyhole.diagnosis.anatomy import Projection, epsilon_name
from keyhole.diagnosis.simulate import Bench, Inputs


def set_epsilon(bench: Bench, value: float) -> None:
    """The number that norms add to a variance, in all of them."""
    for _, norm in bench.anatomy.norms:
        if (name := epsilon_name(norm)) is not None:
            bench.set(norm, name, float(value))


def set_activation(bench: Bench, value: str) -> None:
    """Another activation in every layer."""
    from transformers.activations import ACT2FN

    for holder, name in bench.anatomy.activations:
        bench.set(holder, name, ACT2FN[value])


def shift_gains(bench: Bench, value: float) -> None:
    """Adds to the gains of all norms: 1 + w in place of w, or the other way round."""
    for _, norm in bench.anatomy.norms:
        bench.edit(norm.weight).add_(value)


def pass_through(bench: Bench, module: Any) -> None:
    """Leaves a module out: it answers with what it is given."""
    bench.replace_forward(module, lambda states, *_, **__: states)


def bypass_layer(bench: Bench, index: int) -> None:
    """Leaves a layer out, whatever it is called with and answers with."""
    layer = bench.anatomy.layers[index].module
    tuples = type(layer).__name__ == "MPNetLayer"
    bench.replace_forward(layer, lambda states, *_, **__: (states,) if tuples else states)


def exchange_layers(bench: Bench, value: tuple[int, int]) -> None:
    """Two layers run in each other's place."""
    first, second = (bench.anatomy.layers[k].module for k in value)
    one, other = first.forward, second.forward
    bench.replace_forward(first, other)
    bench.replace_forward(second, one)


def silence(bench: Bench, projections: Sequence[Projection], bias_only: bool) -> None:
    """Sets biases to zero, and where not `bias_only`, matrices too."""
    for projection in projections:
        if projection.bias is not None:
            bench.edit(projection.module.bias)
            projection.bias.zero_()
        if not bias_only:
            bench.edit_projection(projection).zero_()


def scale_projections(bench: Bench, role: str, factor: float) -> None:
    """What projections of one kind answer, multiplied."""
    for projection in bench.anatomy.role(role):
        bench.edit_projection(projection).mul_(factor)
        if projection.bias is not None:
            bench.edit(projection.module.bias)
            projection.bias.mul_(factor)


def exchange_weights(bench: Bench, first: str, second: str) -> None:
    """Two projections of every layer in each other's place."""
    for layer in bench.anatomy.layers:
        a, b = layer.projections[first], layer.projections[second]
        bench.edit(a.module.weight)
        if b.module is not a.module:
            bench.edit(b.module.weight)
        kept = a.matrix.clone()
        a.matrix.copy_(b.matrix)
        b.matrix.copy_(kept)
        if a.bias is not None and b.bias is not None:
            bench.edit(a.module.bias)
            if b.module is not a.module:
                bench.edit(b.module.bias)
            bias = a.bias.clone()
            a.bias.copy_(b.bias)
            b.bias.copy_(bias)


def transpose_weights(bench: Bench, role: str) -> None:
    """Square weights of one kind, turned over."""
    for projection in bench.anatomy.role(role):
        matrix = bench.edit_projection(projection)
        matrix.copy_(matrix.T.clone())


def drop_residual(bench: Bench, role: str) -> None:
    """Takes the skip connection around attention ("output") or the network ("down") away, in
    layers that add it outside (pre-norm) or inside the module that holds the projection."""
    for layer in bench.anatomy.layers:
        projection = layer.projections[role]
        holder = _holder(layer.module, projection.module)
        if hasattr(holder, "LayerNorm") and hasattr(holder, "dense"):  # BERT: adds and normalises
            bench.replace_forward(
                holder, lambda states, _, holder=holder: holder.LayerNorm(holder.dense(states))
            )


def _holder(layer: Any, wanted: Any) -> Any:
    return next(m for m in layer.modules() if any(c is wanted for c in m.children()))


def center_norms(bench: Bench, mean: bool) -> None:
    """Norms that subtract the mean (True) or leave it (False), whatever they did."""
    import torch

    for _, norm in bench.anatomy.norms:
        name = epsilon_name(norm) or "eps"

        def forward(states: Any, norm: Any = norm, name: str = name) -> Any:
            centred = states - states.mean(-1, keepdim=True) if mean else states
            size = centred.pow(2).mean(-1, keepdim=True) + getattr(norm, name)
            scaled = centred * torch.rsqrt(size) * norm.weight
            bias = getattr(norm, "bias", None)
            return scaled if bias is None else scaled + bias

        bench.replace_forward(norm, forward)


def unbias_norms(bench: Bench) -> None:
    """Norms whose variance is divided by one less than the width."""
    import torch

    for _, norm in bench.anatomy.norms:
        name = epsilon_name(norm) or "eps"

        def forward(states: Any, norm: Any = norm, name: str = name) -> Any:
            mean = states.mean(-1, keepdim=True)
            size = states.var(-1, keepdim=True, unbiased=True) + getattr(norm, name)
            scaled = (states - mean) * torch.rsqrt(size) * norm.weight
            bias = getattr(norm, "bias", None)
            return scaled if bias is None else scaled + bias

        bench.replace_forward(norm, forward)


# -- rotary positions --------------------------------------------------------------------------


def set_rotary_base(bench: Bench, value: float) -> None:
    """Frequencies base^(-2i/d) with another base."""
    import torch

    for rotary in bench.anatomy.rotary:
        for name, buffer in rotary.named_buffers():
            if name.endswith("inv_freq") and "original" not in name:
                count = len(buffer)
                power = torch.arange(count, dtype=torch.float32) / count
                bench.edit(buffer).copy_(float(value) ** -power)


def scale_rotary(bench: Bench, value: float) -> None:
    """Positions divided by a number (linear scaling of rotary positions)."""
    for rotary in bench.anatomy.rotary:
        for name, buffer in rotary.named_buffers():
            if name.endswith("inv_freq") and "original" not in name:
                bench.edit(buffer).div_(value)


def share_rotary(bench: Bench, value: float) -> None:
    """Rotates only the first share of each head, pairs and frequencies within that share."""
    import torch

    width = bench.anatomy.head_width
    turned = round(width * value / 2) * 2
    half, inner = width // 2, turned // 2
    first = [*range(inner), *range(turned, turned + half - inner)]
    second = [*range(inner, turned), *range(turned + half - inner, width)]
    _permute_heads(bench, first + second)
    for rotary in bench.anatomy.rotary:
        for name, buffer in rotary.named_buffers():
            if name.endswith("inv_freq") and "original" not in name:
                data = bench.edit(buffer)
                base = float((data[0] / data[1]) ** half) if half > 1 else 1.0
                power = torch.arange(inner, dtype=torch.float32) / max(inner, 1)
                data.zero_()
                data[:inner] = base**-power


def interleave_rotary(bench: Bench) -> None:
    """Rotates neighbours (2i, 2i+1) in place of the two halves (i, i + d/2)."""
    width = bench.anatomy.head_width
    _permute_heads(bench, [*range(0, width, 2), *range(1, width, 2)])


def _permute_heads(bench: Bench, order: list[int]) -> None:
    """Permutes the numbers inside each head of queries and keys: the rotation then meets others."""
    width = bench.anatomy.head_width
    for role in ("query", "key"):
        for projection in bench.anatomy.role(role):
            matrix = bench.edit_projection(projection)
            rows = np.arange(matrix.shape[0]).reshape(-1, width)[:, order].ravel()
            matrix.copy_(matrix[rows].clone())
            if projection.bias is not None:
                bench.edit(projection.module.bias)
                projection.bias.copy_(projection.bias[rows].clone())


# -- number formats of weights -----------------------------------------------------------------


def round_symmetric(matrix: Any, bits: int, group: int | None, channel: bool) -> Any:
    """Whole numbers of so many bits times a scale: one for all, for each row, or for each group of
    neighbours in a row."""
    top = 2 ** (bits - 1) - 1
    if group is not None and matrix.shape[1] % group == 0:
        parts = matrix.reshape(matrix.shape[0], -1, group)
        scale = parts.abs().amax(-1, keepdim=True).clamp(min=1e-12) / top
        return ((parts / scale).round().clamp(-top - 1, top) * scale).reshape(matrix.shape)
    size = matrix.abs().amax(1, keepdim=True) if channel else matrix.abs().amax()
    scale = size.clamp(min=1e-12) / top
    return (matrix / scale).round().clamp(-top - 1, top) * scale


def round_asymmetric(matrix: Any, bits: int, group: int | None) -> Any:
    """Whole numbers from 0 up, times a scale, plus an offset, for all or for each group."""
    whole = group is None or matrix.shape[1] % group != 0
    parts = matrix.reshape(1, -1) if whole else matrix.reshape(matrix.shape[0], -1, group)
    low = parts.amin(-1, keepdim=True).clamp(max=0)
    high = parts.amax(-1, keepdim=True).clamp(min=0)
    scale = (high - low).clamp(min=1e-12) / (2**bits - 1)
    zero = (-low / scale).round()
    return (
        (((parts / scale).round() + zero).clamp(0, 2**bits - 1) - zero)
        .mul(scale)
        .reshape(matrix.shape)
    )


def round_float(matrix: Any, name: str) -> Any:
    """The numbers a format of torch has, as in bfloat16 or float8_e4m3fn (scaled per tensor)."""
    import torch

    kind = getattr(torch, name)
    if not name.startswith("float8"):
        return matrix.to(kind).to(matrix.dtype)
    scale = matrix.abs().amax().clamp(min=1e-12) / torch.finfo(kind).max
    return (matrix / scale).to(kind).to(matrix.dtype) * scale


def round_weights(bench: Bench, value: tuple[str, bool]) -> None:
    """Rounds the weights of all projections, and where `value` says so, the embeddings."""
    kind, embeddings = value
    for projection in bench.anatomy.projections:
        bench.round_by(projection.module.weight, ROUNDINGS[kind], projection.cut)
    if embeddings:
        for _, module in bench.anatomy.embeddings:
            bench.round_by(module.weight, ROUNDINGS[kind])


ROUNDINGS: dict[str, Any] = {
    "int8 per tensor": lambda w: round_symmetric(w, 8, None, False),
    "int8 per channel": lambda w: round_symmetric(w, 8, None, True),
    "int8 in groups of 32": lambda w: round_symmetric(w, 8, 32, True),
    "uint8 per tensor": lambda w: round_asymmetric(w, 8, None),
    "int4 in groups of 32": lambda w: round_symmetric(w, 4, 32, True),
    "uint4 in groups of 64": lambda w: round_asymmetric(w, 4, 64),
    "float8 e4m3": lambda w: round_float(w, "float8_e4m3fn"),
}


def quantise_dynamically(bench: Bench, kind: str, by_row: bool) -> None:
    """Weights of int8, and what goes into every projection rounded to uint8, with one scale for all
    tokens of a request (as onnxruntime's dynamic quantisation does) or for those of each row.
    Embedding tables are uint8."""
    from keyhole.diagnosis.attention import current_padding

    def change(states: Any) -> Any:
        if not by_row:
            return round_asymmetric(states, 8, None)
        tokens = current_padding()
        rounded = states.clone()
        for k, row in enumerate(tokens):
            rounded[k, row] = round_asymmetric(states[k, row], 8, None)
        return rounded

    for _, module in bench.anatomy.embeddings:
        bench.round_by(module.weight, ROUNDINGS["uint8 per tensor"])
    for projection in bench.anatomy.projections:
        bench.round_by(projection.module.weight, ROUNDINGS[kind], projection.cut)
    for module in {id(p.module): p.module for p in bench.anatomy.projections}.values():
        bench.hook_input(module, change)


# -- rows --------------------------------------------------------------------------------------


def put_around(bench: Bench, start: tuple[int, ...], end: tuple[int, ...]) -> None:
    """Tokens in front of and behind every row."""

    def change(inputs: Inputs) -> None:
        inputs.rows = [np.concatenate([start, row, end]).astype(np.int64) for row in inputs.rows]

    bench.feed(change)


def take_off(bench: Bench, start: int, end: int) -> None:
    """Takes tokens off both ends of every row that has more."""

    def change(inputs: Inputs) -> None:
        inputs.rows = [
            row[start : len(row) - end] if len(row) > start + end else row for row in inputs.rows
        ]

    bench.feed(change)


def cut_rows(bench: Bench, length: int, keep: tuple[int, int] = (0, 0), left: bool = False) -> None:
    """Cuts rows to a length; `keep` tokens at both ends (special ones) stay."""
    first, last = keep

    def change(inputs: Inputs) -> None:
        for k, row in enumerate(inputs.rows):
            if len(row) <= length:
                continue
            head, tail = row[:first], row[len(row) - last :] if last else row[:0]
            body, room = row[first : len(row) - last], length - first - last
            body = body[len(body) - room :] if left else body[:room]
            inputs.rows[k] = np.concatenate([head, body, tail])

    bench.feed(change)
