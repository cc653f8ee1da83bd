"""More neurons than the template has, so that starts end in the right valley; and back again.

Statement.  A template with hidden layers, wider and with a leak for each neuron, has next to no
            wrong valleys; where it explains the answers, surplus neurons can be taken away and the
            leaks become signs, until the template itself explains them.
Queries.    None.
Algebra.    A hidden layer is a pair of linear layers with an elementwise function between them:
            recognised by what passes through (permuting the first layer's answers permutes the
            second's inputs), not by names. A neuron a(z) becomes a(z) + leak z. GELU, SiLU and ReLU
            obey a(z) - a(-z) = k z: a neuron that points the wrong way round is off by a linear
            function, which costs a fit two neurons or ends it, while with a leak both signs are
            one valley; at the end a leak is 0, or -k and the neuron is turned round (`turning.py`).
            ReLU, whose kinks hide from derivatives, is gelu(b z) / b with growing b.
When it fails. The layers are written as bare parameters, or another function stands between: then
            the pair is not found, and the template is fitted as it is.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.template.forward import Forward, plain_kernels


@dataclass(frozen=True)
class Pair:
    """A hidden layer: the linear layers before and behind it, its neurons, and how its activation
    a behaves: turn is k of a(z) - a(-z) = k z, zero where there is none; kinked where a is ReLU."""

    inner: str
    outer: str
    neurons: int
    turn: float
    kinked: bool


@dataclass(frozen=True, eq=False)
class Neuron:
    """Where the weights of a neuron stand in the vector: bias and leak are `incoming` too."""

    pair: int
    incoming: Array
    outgoing: Array

    @cached_property
    def all(self) -> Array:
        return np.concatenate([self.incoming, self.outgoing])


def find_pairs(forward: Forward, width: int, length: int) -> list[Pair]:
    """The hidden layers of a template that may be widened."""
    torch: Any
    with plain_kernels() as torch:
        linear = {
            name: part
            for name, part in forward.module.named_modules()
            if isinstance(part, torch.nn.Linear) and part.bias is not None and name
        }
    pairs: list[Pair] = []
    for inner, first in linear.items():
        for outer, second in linear.items():
            if inner != outer and first.out_features == second.in_features:
                pair = _examine(forward, inner, outer, width, length)
                if pair is not None and not any(pair.outer == other.outer for other in pairs):
                    pairs.append(pair)
                    break
    return pairs


def _examine(forward: Forward, inner: str, outer: str, width: int, length: int) -> Pair | None:
    """The pair, where an elementwise function that is not linear leads from one to the other and
    more neurons with no outgoing weights change nothing."""
    rng = np.random.default_rng(0)
    neurons = forward.shapes[inner + ".weight"][0]
    values, order = rng.standard_normal(neurons), rng.permutation(neurons)
    tokens = rng.standard_normal((2, length, width))

    def through(bias: Array) -> Array | None:
        return _hidden(forward, inner, outer, bias, tokens)

    plain, permuted = through(values), through(values[order])
    back, double, zero = through(-values), through(2 * values), through(0 * values)
    if plain is None or permuted is None or back is None or double is None or zero is None:
        return None
    if not np.allclose(plain[order], permuted, atol=1e-12):
        return None
    if np.allclose(plain + back, 2 * zero) and np.allclose(double - zero, 2 * (plain - zero)):
        return None
    turns = (plain - back) / values
    turn = float(turns.mean()) if np.allclose(turns, turns.mean(), atol=1e-9) else 0.0
    pair = Pair(inner, outer, neurons, turn, bool(np.array_equal(plain, np.maximum(values, 0))))
    wide = widen(forward, [pair], 2.0)
    weights = forward.draw(rng)
    try:
        same = np.allclose(
            wide.predict(embed(forward, wide, weights), tokens),
            forward.predict(weights, tokens),
            atol=1e-9,
        )
    except (RuntimeError, ValueError):  # the module insists on its own widths
        return None
    return pair if same else None


def _hidden(forward: Forward, inner: str, outer: str, bias: Array, tokens: Array) -> Array | None:
    """What the outer layer sees where the inner one answers with the bias alone."""
    seen: list[Any] = []
    hook = forward.module.get_submodule(outer).register_forward_pre_hook(
        lambda _, inputs: seen.append(inputs[0])
    )
    arrays = forward.split(forward.draw(np.random.default_rng(1)))
    arrays[inner + ".weight"] = np.zeros(forward.shapes[inner + ".weight"])
    arrays[inner + ".bias"] = bias
    try:
        forward.predict(forward.join(arrays), tokens)
    finally:
        hook.remove()
    if len(seen) != 1 or seen[0].shape[-1] != len(bias):
        return None
    rows = np.asarray(seen[0].reshape(-1, len(bias)).numpy())
    return rows[0] if np.array_equal(rows, np.broadcast_to(rows[0], rows.shape)) else None


def widen(
    forward: Forward, pairs: Sequence[Pair], factor: float, sharpness: float = 0.0
) -> Forward:
    """The template with so many times its neurons, and a leak for each where it can be turned.

    Args:
        forward: the template.
        pairs: its hidden layers.
        factor: neurons beside the template's, rounded up.
        sharpness: b of gelu(b z) / b, which stands for ReLU; 0 for ReLU itself.
    """
    torch: Any
    with plain_kernels() as torch:
        module = copy.deepcopy(forward.module)
        replaced: dict[str, Any] = {}
        for pair in pairs:
            for name in (pair.inner, pair.outer):
                if name not in replaced:
                    replaced[name] = _hidden_layer(torch, module.get_submodule(name))
                    owner, _, own = name.rpartition(".")
                    setattr(module.get_submodule(owner), own, replaced[name])
            outer = replaced[pair.outer]
            outer.before = (replaced[pair.inner],)
            outer.sharpness = sharpness if pair.kinked else 0.0
            if pair.turn:
                outer.leak = torch.nn.Parameter(
                    torch.zeros(pair.neurons, dtype=torch.float64), requires_grad=False
                )
    wide = Forward(module.eval())
    for pair in pairs:
        neurons = int(np.ceil(factor * pair.neurons))
        before, behind = wide.shapes[pair.inner + ".weight"], wide.shapes[pair.outer + ".weight"]
        # pairs that share a layer each change one side of it
        wide.shapes[pair.inner + ".weight"] = (neurons, *before[1:])
        wide.shapes[pair.inner + ".bias"] = (neurons,)
        wide.shapes[pair.outer + ".weight"] = (behind[0], neurons)
        if pair.turn:
            wide.shapes[pair.outer + ".leak"] = (neurons,)
    return wide


def _hidden_layer(torch: Any, linear: Any) -> Any:
    """A linear layer that keeps its answer, and reads what stands before the activation too."""

    class HiddenLayer(torch.nn.Linear):  # type: ignore[misc]
        before: Any = None
        sharpness = 0.0

        def forward(self, inputs: Any) -> Any:
            if self.before is not None:
                plain = self.before[0].answer
                if self.sharpness:
                    gelu = torch.nn.functional.gelu(self.sharpness * plain)
                    inputs = gelu / self.sharpness
                if self.leak is not None:
                    inputs = inputs + self.leak * plain
            self.answer = super().forward(inputs)
            return self.answer

    layer = HiddenLayer(linear.in_features, linear.out_features, dtype=torch.float64)
    layer.register_parameter("leak", None)
    return layer.requires_grad_(False)


def find_neurons(wide: Forward, pairs: Sequence[Pair]) -> list[Neuron]:
    """All neurons of the hidden layers, by where their weights stand."""
    index = wide.split(np.arange(wide.unknowns))
    neurons = []
    for number, pair in enumerate(pairs):
        weight, bias = index[pair.inner + ".weight"], index[pair.inner + ".bias"]
        leak = index.get(pair.outer + ".leak")
        for one in range(len(bias)):
            extra = [] if leak is None else [leak[one]]
            incoming = np.array([*weight[one], bias[one], *extra])
            neurons.append(Neuron(number, incoming, index[pair.outer + ".weight"][:, one]))
    return neurons


def find_heads(forward: Forward, first: int) -> list[list[Neuron]]:
    """The heads of every `nn.MultiheadAttention`, as parts that may be surplus; the first of these
    layers has the number `first` as its pair."""
    index = forward.split(np.arange(forward.unknowns))
    layers: list[list[Neuron]] = []
    for name, part in forward.module.named_modules():
        if type(part).__name__ == "MultiheadAttention" and part.in_proj_weight is not None:
            stacked, out = index[f"{name}.in_proj_weight"], index[f"{name}.out_proj.weight"]
            size, width = part.head_dim, part.embed_dim
            bias = index.get(f"{name}.in_proj_bias")
            heads = []
            for start in range(0, width, size):
                rows = np.concatenate([np.arange(size) + start + k * width for k in range(3)])
                added = [] if bias is None else bias[rows]
                incoming = np.concatenate([stacked[rows].ravel(), added]).astype(int)
                columns = out[:, start : start + size].ravel()
                heads.append(Neuron(first + len(layers), incoming, columns))
            layers.append(heads)
    return layers


def find_dead(parts: Sequence[Neuron], weights: Float[Array, " unknowns"]) -> list[Neuron]:
    """Parts of which nothing is left."""
    return [part for part in parts if not weights[part.all].any()]


def draw_wide(wide: Forward, rng: np.random.Generator) -> Float[Array, " unknowns"]:
    """A start: leaks are those of plain neurons."""
    arrays = wide.split(wide.draw(rng))
    for name, part in arrays.items():
        if name.endswith(".leak"):
            part[...] = 0.0
    return wide.join(arrays)


def embed(forward: Forward, wide: Forward, weights: Array) -> Float[Array, " unknowns"]:
    """Weights of the template as those of the wider one; added neurons have no outgoing weights."""
    arrays = {name: np.zeros(shape) for name, shape in wide.shapes.items()}
    for name, part in forward.split(weights).items():
        arrays[name][tuple(slice(size) for size in part.shape)] = part
    return wide.join(arrays)


def narrow(
    forward: Forward,
    wide: Forward,
    pairs: Sequence[Pair],
    weights: Float[Array, " wide"],
    kept: Sequence[Neuron],
) -> Float[Array, " unknowns"]:
    """Weights of the template: the kept neurons, turned round where their leak says so."""
    arrays = {name: np.array(part) for name, part in wide.split(weights).items()}
    index = wide.split(np.arange(wide.unknowns))
    for number, pair in enumerate(pairs):
        first = index[pair.outer + ".weight"][0]
        chosen = [int(np.flatnonzero(first == one.outgoing[0])[0]) for one in kept
                  if one.pair == number]  # fmt: skip
        rest = [one for one in range(len(first)) if one not in chosen]
        order = [*chosen, *rest][: pair.neurons]
        weight, bias = arrays[pair.inner + ".weight"], arrays[pair.inner + ".bias"]
        outgoing = arrays[pair.outer + ".weight"]
        if pair.turn:
            leak = arrays.pop(pair.outer + ".leak")
            turned = leak / pair.turn < -0.5
            # a(z) + leak z = a(-z) + (k + leak) z, of which the last is next to nothing
            arrays[pair.outer + ".bias"] = arrays[pair.outer + ".bias"] + outgoing @ (
                (leak + np.where(turned, pair.turn, 0.0)) * bias
            )
            sign = np.where(turned, -1.0, 1.0)
            weight, bias = sign[:, None] * weight, sign * bias
        arrays[pair.inner + ".weight"], arrays[pair.inner + ".bias"] = weight[order], bias[order]
        arrays[pair.outer + ".weight"] = outgoing[:, order]
    return forward.join(arrays)
