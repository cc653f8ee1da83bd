"""All parameters of a block, refined together on all answers.

Statement.  From a start that is off by up to a fifth in every weight, damped Gauss-Newton steps
            converge to the block that explains the answers to their rounding.
Queries.    None: tokens and answers are given, at least 1.3 numbers per unknown, of all sizes.
Algebra.    The exact forward model (forward.py), in coordinates of what the norms keep. Scores and
            values are in factors, whose gauge the damping holds. First all answers count alike,
            then in units of their rounding: weights by rounding, before the model is right, would
            let its errors drag what is known best. Standard errors: the least squares solutions
            for random roundings, as deviations of the parameters that are told.
Fails.      At a residual above rounding: `Refined.level` tells.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import cho_factor, cho_solve, qr

from keyhole.arrays import UNIT_ROUNDOFF, Array, Float
from keyhole.fitting.bootstrap import bootstrap_errors
from keyhole.fitting.gauss_newton import (
    Blocks,
    FitOptions,
    Linearization,
    fit_least_squares,
    form_jacobian,
    solve_linear,
)
from keyhole.learners.block.box import NotThisBlock
from keyhole.learners.block.forward import Batch, BlockModel, Form, GroupScaling, TriangleScaling
from keyhole.linalg.rank import count_above_share, find_fall
from keyhole.models.attention import Attention, Head
from keyhole.models.block import Block
from keyhole.models.mlp import Mlp, outer_table
from keyhole.models.norm import kept_plane

FEW = 800  # unknowns up to which singular values are cheap
Pairs = Sequence[tuple[Array, Array]]  # queries (n, length, d) and answers (n, d)


@dataclass(frozen=True, eq=False)
class Refined:
    """The block, its standard errors (scores multiplied out), and what is left of the answers: root
    mean square in units of their rounding."""

    block: Block
    errors: Block
    level: float


# --- the block in coordinates of what the norms keep ----------------------------------------------


def form_of(block: Block) -> Form:
    return Form(
        block.norm,
        block.kind,
        block.width,
        0 if block.attention is None else len(block.attention.heads),
        None if block.mlp is None else block.mlp.activation,
        block.parallel,
    )


def clear_rank(sizes: Float[Array, " n"]) -> int:
    """The rank behind which singular values fall most: what was found to a few digits has weak
    directions of its own, that would make the fit of a product of factors singular."""
    strong = max(1, count_above_share(sizes, 1e-6))
    return find_fall(sizes[:strong]) or strong


def split_block(block: Block) -> dict[str, Array]:
    """The parameters that are fitted, by name. The network has no linear part; where there is
    none, what it adds at every token is the attention's offset."""
    plane = kept_plane(block.width, block.kind)
    pre = block.norm == "pre"
    parts: dict[str, Array] = {"epsilons": np.log(np.maximum(block.epsilons, 1e-300))}
    if block.attention is None:
        assert block.mlp is not None
        network, outer = block.mlp, outer_table(block.mlp)
        return parts | {"inner": network.inner, "inner_bias": network.inner_bias,
                        "outer": plane.T @ outer, "added": plane.T @ network.offset,
                        "last_gain": block.gain[0], "last_bias": block.bias[0]}  # fmt: skip
    for h, head in enumerate(block.attention.heads):
        assert head.score_factors is not None
        left, right, value = head.score_factors.left, head.score_factors.right, head.value.T
        if pre:
            left, right, value = plane.T @ left, right @ plane, value @ plane
        else:
            value = plane.T @ value
        axes, sizes, rows = np.linalg.svd(value, full_matrices=False)
        rank = clear_rank(sizes)
        bias, *_ = np.linalg.lstsq(left, head.key_bias if not pre else plane.T @ head.key_bias,
                                   rcond=None)  # fmt: skip
        root = np.sqrt(sizes[:rank])
        parts |= {f"left{h}": left, f"right{h}": right, f"key{h}": bias}
        parts |= {f"out{h}": axes[:, :rank] * root, f"value{h}": root[:, None] * rows[:rank]}
    if block.mlp is None:
        if pre:
            return parts | {"added": block.attention.offset}
        return parts | {"added": plane.T @ block.attention.offset,
                        "last_gain": block.gain[0], "last_bias": block.bias[0]}  # fmt: skip
    network, outer = block.mlp, outer_table(block.mlp)
    parts["offset"] = plane.T @ block.attention.offset
    if pre:
        parts |= {"inner": network.inner @ plane, "inner_bias": network.inner_bias,
                  "outer": outer, "added": network.offset}  # fmt: skip
    else:
        gain, bias = block.gain[0], block.bias[0]
        parts |= {"inner": (network.inner * gain) @ plane,
                  "inner_bias": network.inner_bias + network.inner @ bias,
                  "outer": plane.T @ outer, "added": plane.T @ (network.offset + bias),
                  "gain": gain, "last_gain": block.gain[1], "last_bias": block.bias[1]}  # fmt: skip
    return parts


def join_block(parts: dict[str, Array], form: Form) -> Block:
    """The block with these parameters."""
    plane, pre = form.plane, form.norm == "pre"
    heads = []
    for h in range(form.heads):
        left, right, value = parts[f"left{h}"], parts[f"right{h}"], parts[f"out{h}"]
        key = left @ parts[f"key{h}"]
        table = value @ parts[f"value{h}"]
        if pre:
            left, right, key, table = plane @ left, right @ plane.T, plane @ key, table @ plane.T
        else:
            table = plane @ table
        heads.append(Head((left, right), key, table.T))
    gain = bias = None
    if form.whole and not pre:
        gain = np.array([parts["gain"], parts["last_gain"]])
        bias = np.array([np.zeros(form.width), parts["last_bias"]])
    elif not pre:
        gain, bias = parts["last_gain"][None], parts["last_bias"][None]
    added = parts["added"] if pre else plane @ parts["added"]
    offset = plane @ parts["offset"] if form.whole else added
    network = None
    if form.activation is not None:
        inner, outer = parts["inner"], parts["outer"] if pre else plane @ parts["outer"]
        inner = inner @ plane.T if form.heads else inner
        inner = inner / parts["gain"] if "gain" in parts else inner
        network = Mlp(inner, parts["inner_bias"], outer, activation=form.activation, offset=added)
    return Block(
        Attention(heads, offset) if heads else None,
        network,
        norm=form.norm,
        kind=form.kind,
        epsilons=np.exp(parts["epsilons"]),
        gain=gain,
        bias=bias,
        parallel=form.parallel,
    )


def hold_gauge(parts: dict[str, Array], relu: bool) -> dict[str, Array]:
    """Ones at as many rows of the first factor of every product as it has columns, so that the
    second is determined; at one entry of every row of a ReLU, whose length is not seen; and at one
    gain, where the second epsilon tells no scale."""
    found = {name: np.zeros(np.shape(part)) for name, part in parts.items()}
    for name, part in parts.items():
        if name.startswith(("left", "out")) and name != "outer":
            _, _, order = qr(part.T, mode="economic", pivoting=True)
            found[name][order[: part.shape[1]]] = 1.0
    if relu:
        inner = parts["inner"]
        found["inner"][np.arange(len(inner)), np.argmax(np.abs(inner), axis=1)] = 1.0
    if "gain" in parts:
        found["gain"][np.argmax(np.abs(parts["gain"]))] = 1.0
    return found


def with_attention(block: Block, attention: Attention) -> Block:
    """The block with another attention."""
    return Block(
        attention,
        block.mlp,
        norm=block.norm,
        kind=block.kind,
        epsilons=block.epsilons,
        gain=block.gain if block.norms else None,
        bias=block.bias if block.norms else None,
        parallel=block.parallel,
    )


def misfit_of(block: Block, pairs: Pairs) -> float:
    """Mean square of what is left of the answers."""
    return float(np.mean([np.mean((block(tokens) - seen) ** 2) for tokens, seen in pairs]))


# --- the fit --------------------------------------------------------------------------------------


def refine_block(
    start: Block, pairs: Pairs, unit: float, rng: np.random.Generator, dense: int = 5000,
    close: float = 1e-2, many: int = 15000,
) -> Refined:  # fmt: skip
    """`unit`: relative rounding of the box. `dense`: unknowns up to which matrices are formed at
    every step. `close`: root mean square of what is left of the answers, from which on the
    Jacobian hardly changes. `many`: unknowns from which on their whole Gram matrix costs more than
    it saves."""
    form = form_of(start)
    parts = split_block(start)
    blocks = Blocks.of(parts)
    held = blocks.join(hold_gauge(parts, form.activation == "relu")) > 0

    def weighed(equal: bool) -> BlockModel:
        data = []
        for tokens, answers in pairs:
            # sums inside the block are of the size of its answer and its last token
            size = np.abs(answers).max(axis=1)
            if form.norm == "pre":
                size = np.maximum(size, np.abs(tokens[:, -1]).max(axis=1))
            rounding = 4.0 * unit * (1.0 + size) * cancellation(start, tokens)
            weight = cancellation(start, tokens) if equal else rounding
            data.append(Batch(tokens, answers, weight))
        return BlockModel(form, blocks, data, held)

    rough = FitOptions(steps=60, damping=1e-6, dense_unknowns=dense, probes=0, tolerance=1e-3,
                       target=10.0 * unit)  # fmt: skip
    # what few answers see is off by more than their residual tells: no target here
    fine = replace(rough, steps=2, target=0.0, damping=1e-12)
    model, point = weighed(True), blocks.join(parts)
    large, off = blocks.size > many, np.sqrt(np.mean(model.residual(point) ** 2))
    if large and off < np.sqrt(unit):  # the last digits alone are missing: no step is long
        exact = weighed(False)
        exact = replace(exact, scaling=exact.group_units(point, ridge=1e-8))
        fine = replace(fine, dense_unknowns=0, inner_steps=400, accuracy=1e-4)
    else:
        if large or off < close:
            model = precondition(model, point, large)
            rough = replace(rough, dense_unknowns=0, damping=1e-12)
            fine = replace(fine, dense_unknowns=0)
        if large:  # neurons and heads see each other: many products, for weak directions the most
            rough = replace(rough, inner_steps=1500, steps=8)
            fine = replace(fine, inner_steps=300, steps=1)
        point = fit_least_squares(model, point, rough, rng=rng, blocks=blocks).point
        exact = reweigh(model, weighed(False), point)
    last = fit_least_squares(exact, point, fine, rng=rng, blocks=blocks)
    point = last.point
    at = exact.linearize(point)
    few = at.unknowns <= FEW
    solve = inverse_of(form_jacobian(at)) if few else products_inverse(at, 1e-10)
    roughly = solve if few else products_inverse(at, 1e-3)  # standard errors need few digits
    moved = exact.retract(point, -solve(last.residual))
    if np.linalg.norm(exact.residual(moved)) < 2.0 * np.linalg.norm(last.residual):
        point = moved  # weak directions, too
    level = float(np.sqrt(np.mean(exact.residual(point) ** 2)))
    explained = 8.0  # what may be left of an answer, in its roundings
    if not level < explained:  # standard errors, too, would mean nothing
        raise NotThisBlock(f"the best block leaves {level:.1e} times the rounding of the answers")
    best = join_block(blocks.split(point), form)
    told = multiplied(best)
    names = [name for name, part in told.items() if part.size]

    def repeat() -> Sequence[Array]:
        """Parameters for answers that are rounded otherwise."""
        step = max(level, 1.0) * roughly(rng.standard_normal(len(at.residual)))
        other = multiplied(join_block(blocks.split(exact.retract(point, step)), form))
        return [other[name][None] for name in names]

    found = bootstrap_errors([told[name][None] for name in names], repeat, 3 if large else 8)
    errors = {name: part[0] for name, part in zip(names, found, strict=True)}
    return Refined(best, Block.from_arrays({**told, **errors}), level)


def settle_block(
    start: Block, pairs: Pairs, only: str = "", steps: int = 3, products: int = 200
) -> Block:
    """A block closer to these answers by a few Gauss-Newton steps, each of so many products. Where
    a pattern of names is given, all other parameters stay."""
    form, parts = form_of(start), split_block(start)
    blocks = Blocks.of(parts)
    still = {
        name: np.full(part.shape, float(not re.match(only, name))) for name, part in parts.items()
    }
    held = blocks.join(hold_gauge(parts, form.activation == "relu")) + blocks.join(still) > 0
    data = [Batch(tokens, answers, cancellation(start, tokens)) for tokens, answers in pairs]
    point = blocks.join(parts)
    model = BlockModel(form, blocks, data, held)
    model = replace(model, scaling=model.group_units(point))
    # what the other parameters are off by ends it: a step that gains little is the last one
    options = FitOptions(
        steps=steps, damping=1e-12, dense_unknowns=0, probes=0, inner_steps=products, tolerance=0.01
    )
    return join_block(blocks.split(fit_least_squares(model, point, options).point), form)


def precondition(
    model: BlockModel, point: Float[Array, " unknowns"], many: bool = False
) -> BlockModel:
    """The model in units in which its Jacobian at this point has orthonormal columns; where there
    are many unknowns, those of each head and each neuron."""
    if many:
        return replace(model, scaling=model.group_units(point))
    return replace(model, scaling=TriangleScaling.of(model.gram(point)))


def reweigh(known: BlockModel, model: BlockModel, point: Float[Array, " unknowns"]) -> BlockModel:
    """The same block with other standard errors of the answers: where these are nearly in
    proportion, so are the units of the unknowns."""
    ratios = np.concatenate(
        [new.errors / old.errors for new, old in zip(model.data, known.data, strict=True)]
    )
    if known.scaling is None or ratios.max() > 4.0 * ratios.min():
        return precondition(model, point, isinstance(known.scaling, GroupScaling))
    middle = float(np.sqrt(ratios.max() * ratios.min()))
    return replace(model, scaling=known.scaling.times(middle))


def cancellation(block: Block, tokens: Float[Array, "n length d"]) -> Float[Array, " n"]:
    """By how much the first norm of a post-norm block enlarges the rounding of what it reads, where
    token and attention nearly cancel."""
    if block.norm != "post" or block.attention is None:
        return np.ones(len(tokens))
    last, added = tokens[:, -1], block.attention(tokens)
    parts = np.abs(last).max(axis=1) + np.abs(added).max(axis=1)
    plane = block.norms[0].plane
    left = np.mean(((last + added) @ plane) ** 2, axis=1) + block.norms[0].epsilon
    return np.maximum(1.0, parts / np.sqrt(left) / 4.0)


def inverse_of(
    jacobian: Float[Array, "numbers unknowns"], few: int = FEW
) -> Callable[[Array], Array]:
    """The least squares solution as a function of the right side: by singular values where the
    unknowns are few, else by normal equations, which lose directions that hardly show. The gauge
    of the factors stays where it is."""
    sizes = np.linalg.norm(jacobian, axis=0)
    sizes = np.where(sizes > 0, sizes, 1.0)
    scaled = jacobian / sizes
    if jacobian.shape[1] <= few:
        inverse = np.linalg.pinv(scaled, rcond=1e-11)
        return lambda right: np.asarray(inverse @ right / sizes)
    normal = scaled.T @ scaled
    normal[np.diag_indices(len(normal))] += 1e2 * UNIT_ROUNDOFF * len(normal)
    factor = cho_factor(normal, check_finite=False)
    return lambda right: np.asarray(cho_solve(factor, scaled.T @ right) / sizes)


def products_inverse(
    at: Linearization, accuracy: float, steps: int = 100
) -> Callable[[Array], Array]:
    """The same by products with a Jacobian whose columns are nearly orthonormal, until the gradient
    has fallen to `accuracy`."""
    return lambda right: solve_linear(at, right, accuracy, steps).step


def multiplied(block: Block) -> dict[str, Array]:
    """All arrays, scores multiplied out: their factors are not unique."""
    arrays = block.to_arrays()
    for name in [name for name in arrays if name.endswith("score_left")]:
        other = name.replace("score_left", "score_right")
        arrays[name.replace("score_left", "score")] = arrays.pop(name) @ arrays.pop(other)
    return arrays
