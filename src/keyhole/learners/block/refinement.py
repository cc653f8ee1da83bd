"""All parameters of a block, refined together on all answers.

Statement.  From a start that is off by up to a tenth in every weight, damped Gauss-Newton steps
            converge to the block that explains the answers to their rounding.
Queries.    None: tokens and answers are given, at least 1.3 numbers per unknown, of all sizes.
Algebra.    The exact forward model (fitting/forward/block.py) in coordinates of what the norms
            keep, scores and values in factors, whose gauge no step follows: `fitting.structured`.
            Each answer in units of its rounding: of its own size, of its last token's where the
            residual passes by the norm, and enlarged where a norm divides by what nearly cancels.
Fails.      At a residual above rounding: `Refined.level` tells.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve

from keyhole.arrays import UNIT_ROUNDOFF, Array, Float
from keyhole.fitting.bootstrap import smooth_errors
from keyhole.fitting.conjugate_gradients import Ending
from keyhole.fitting.forward.block import Form, Parts, pad_queries, run_block
from keyhole.fitting.gauss_newton import Blocks
from keyhole.fitting.solver import Stopping
from keyhole.fitting.structured import FEW, Network, find_doubts, fit_structured, settle
from keyhole.learners.block.box import NotThisBlock
from keyhole.linalg.rank import count_above_share, find_fall
from keyhole.models.attention import Attention, Head
from keyhole.models.block import Block
from keyhole.models.mlp import Mlp, outer_table
from keyhole.models.norm import kept_plane

Pairs = Sequence[tuple[Array, Array]]  # queries (n, length, d) and answers (n, d)


@dataclass(frozen=True, eq=False)
class Refined:
    """The block, its standard errors (scores multiplied out), and what is left of the answers: root
    mean square in units of their rounding."""

    block: Block
    errors: Block
    level: float


# --- the block in coordinates of what the norms keep ----------------------------------------------


def form_of(block: Block, parts: Parts) -> Form:
    heads = () if block.attention is None else block.attention.heads
    return Form(
        block.norm,
        block.kind,
        block.width,
        tuple(parts[f"left{h}"].shape[1] for h in range(len(heads))),
        tuple(parts[f"value{h}"].shape[0] for h in range(len(heads))),
        None if block.mlp is None else block.mlp.activation,
        block.mlp is not None and block.mlp.gated,
        block.parallel,
    )


def clear_rank(sizes: Float[Array, " n"]) -> int:
    """The rank behind which singular values fall most: what was found to a few digits has weak
    directions of its own, that would make the fit of a product of factors singular."""
    strong = max(1, count_above_share(sizes, 1e-6))
    return find_fall(sizes[:strong]) or strong


def split_block(block: Block) -> Parts:
    """The matrices that are fitted, by name. The network has no linear part; where there is none,
    what it adds at every token is the attention's offset."""
    plane, pre = kept_plane(block.width, block.kind), block.norm == "pre"
    parts: Parts = {"epsilons": np.log(np.maximum(block.epsilons, 1e-300))}
    if block.attention is not None:
        offset = block.attention.offset if pre else plane.T @ block.attention.offset
        parts |= split_heads(block, plane, offset)
    if block.mlp is not None:
        parts |= split_network(block, block.mlp, plane)
    if not pre:
        parts |= {"last_gain": block.gain[-1], "last_bias": block.bias[-1]}
        if len(block.norms) > 1:
            parts["gain"] = block.gain[0]
    return parts


def split_heads(block: Block, plane: Float[Array, "d k"], offset: Array) -> Parts:
    parts: Parts = {}
    read, out, pre = [], [], block.norm == "pre"
    assert block.attention is not None
    for h, head in enumerate(block.attention.heads):
        left, right = factors_of(head)
        value, key = head.value.T, head.key_bias
        if pre:  # in front of the heads is a norm, without gain and bias here
            gain, bias = block.norms[0].gain[:, None], block.norms[0].bias
            offset = offset + value @ bias
            key = key + left @ (right @ bias)
            left, right, value = plane.T @ (gain * left), (right * gain.T) @ plane, value * gain.T
            value, key = value @ plane, plane.T @ (gain[:, 0] * key)
        else:
            value = plane.T @ value
        axes, sizes, rows = np.linalg.svd(value, full_matrices=False)
        rank = clear_rank(sizes)
        root = np.sqrt(sizes[:rank])
        bias, *_ = np.linalg.lstsq(left, key, rcond=None)
        parts |= {f"left{h}": left, f"value{h}": root[:, None] * rows[:rank]}
        read.append(np.column_stack([right, bias]))
        out.append(axes[:, :rank] * root)
    return parts | {"read": np.concatenate(read), "out": np.column_stack([*out, offset])}


def factors_of(head: Head) -> tuple[Array, Array]:
    """Of the score, of about one size."""
    if head.score_factors is not None:
        left, right = head.score_factors
    else:
        axes, sizes, rows = np.linalg.svd(head.score)
        rank = max(1, count_above_share(sizes, UNIT_ROUNDOFF * len(sizes)))
        left, right = axes[:, :rank] * sizes[:rank], rows[:rank]
    first, second = float(np.linalg.norm(left)), float(np.linalg.norm(right))
    root = np.sqrt(second / first) if min(first, second) > 0 else 1.0
    return left * root, right / root


def split_network(block: Block, network: Mlp, plane: Float[Array, "d k"]) -> Parts:
    """In front of the network is a norm, without gain and bias here, or the token itself."""
    pre, alone = block.norm == "pre", block.attention is None
    outer, added = outer_table(network), network.offset
    norm = None if alone and not pre else block.norms[-1] if pre else block.norms[0]
    tables = {"inner": (network.inner, network.inner_bias)}
    if network.gate is not None and network.gate_bias is not None:
        tables["gate"] = (network.gate, network.gate_bias)
    found: Parts = {}
    for name, (table, bias) in tables.items():
        if norm is not None:
            table, bias = (table * norm.gain) @ plane, bias + table @ norm.bias
        found[name] = np.column_stack([table, bias])
    if not pre:
        if norm is not None:
            added = added + norm.bias
        outer, added = plane.T @ outer, plane.T @ added
    return found | {"outer": np.column_stack([outer, added])}


def join_block(parts: Parts, form: Form) -> Block:
    """The block with these parameters."""
    plane, pre = form.plane, form.norm == "pre"
    gain = bias = None
    if not pre:
        gain, bias = parts["last_gain"][None], parts["last_bias"][None]
        if form.whole:
            gain = np.concatenate([parts["gain"][None], gain])
            bias = np.concatenate([np.zeros_like(bias), bias])
    added = None
    if form.activation is not None:
        added = parts["outer"][:, -1]
    attention = None
    if form.heads:
        offset = parts["out"][:, -1]
        if pre and added is not None:  # no norm sees what the plane lacks: it is the network's
            seen = plane @ (plane.T @ offset)
            offset, added = seen, added + offset - seen
        attention = Attention(join_heads(parts, form), offset if pre else plane @ offset)
    network = None if added is None else join_network(parts, form, added if pre else plane @ added)
    return Block(
        attention,
        network,
        norm=form.norm,
        kind=form.kind,
        epsilons=np.exp(parts["epsilons"]),
        gain=gain,
        bias=bias,
        parallel=form.parallel,
    )


def join_heads(parts: Parts, form: Form) -> list[Head]:
    plane, pre, heads = form.plane, form.norm == "pre", []
    places = zip(form.slices(form.score_ranks), form.slices(form.value_ranks), strict=True)
    for h, (some, inside) in enumerate(places):
        left, right, bias = parts[f"left{h}"], parts["read"][some, :-1], parts["read"][some, -1]
        key, table = left @ bias, parts["out"][:, :-1][:, inside] @ parts[f"value{h}"]
        if pre:
            left, right, key, table = plane @ left, right @ plane.T, plane @ key, table @ plane.T
        else:
            table = plane @ table
        heads.append(Head((left, right), key, table.T))
    return heads


def join_network(parts: Parts, form: Form, offset: Array) -> Mlp:
    plane, found = form.plane, {}
    for name in ("inner", "gate") if form.gated else ("inner",):
        table = parts[name][:, :-1]
        if form.heads or form.norm == "pre":
            table = table @ plane.T
        found[name] = table / parts["gain"] if "gain" in parts else table
        found[f"{name}_bias"] = parts[name][:, -1]
    outer = parts["outer"][:, :-1]
    assert form.activation is not None
    return Mlp(found.pop("inner"), found.pop("inner_bias"),
               outer if form.norm == "pre" else plane @ outer,
               activation=form.activation, offset=offset, **found)  # fmt: skip


def freedom_of(parts: Parts, form: Form) -> float:
    """Entries less those directions that no answer shows: the gauge of every product of factors,
    the length of a ReLU's row, and one scale where no epsilon tells it."""
    total = float(sum(part.size for part in parts.values()))
    total -= sum(rank**2 for rank in (*form.score_ranks, *form.value_ranks))
    if form.activation == "relu":
        total -= len(parts["inner"])
    if form.gated:
        total -= len(parts["inner"])
    if form.whole and form.norm == "pre":
        total -= form.width - form.plane.shape[1]
    return total - (1.0 if "gain" in parts else 0.0)


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


def move_parts(parts: Parts, moves: Parts) -> Parts:
    """Parameters after a step. A step that follows errors of other unknowns would lose a tiny
    epsilon, which few answers show, for good: its logarithm moves by one at most."""
    found = {name: part + moves[name] for name, part in parts.items()}
    found["epsilons"] = parts["epsilons"] + np.clip(moves["epsilons"], -1.0, 1.0)
    return found


def network_of(start: Block, parts: Parts, pairs: Pairs, unit: float) -> Network:
    """The fit of these parameters to these answers, in units of their rounding."""
    form = form_of(start, parts)
    batches = list(pad_queries(pairs))
    weights = [1.0 / rounding_of(start, one.tokens, one.answers, unit) for one in batches]
    return Network(
        lambda parts, one: run_block(form, parts, one.tokens, one.real),
        move_parts,
        batches,
        weights,
        Blocks.of(parts),
        freedom_of(parts, form),
    )


def rounding_of(
    start: Block, tokens: Float[Array, "n length d"], answers: Float[Array, "n d"], unit: float
) -> Float[Array, " n"]:
    """About how far a box that computes with this relative error is off."""
    size = np.abs(answers).max(axis=1)
    if start.norm == "pre":  # sums inside the block are of the size of its last token
        size = np.maximum(size, np.abs(tokens[:, -1]).max(axis=1))
    return np.asarray(4.0 * unit * (1.0 + size) * cancellation(start, tokens))


def refine_block(start: Block, pairs: Pairs, unit: float, rng: np.random.Generator) -> Refined:
    """The block that explains the answers, with standard errors.

    Args:
        start: a block that is off by a few hundredths.
        pairs: queries and answers.
        unit: relative rounding of the box.
        rng: draws the probes.

    Raises:
        NotThisBlock: what is left of the answers is more than their rounding.
    """
    parts = split_block(start)
    network, form = network_of(start, parts, pairs, unit), form_of(start, parts)
    fitted = fit_structured(network, parts, rng)
    level = float(np.sqrt(np.mean(fitted.residual**2)))
    explained = 8.0  # what may be left of an answer, in its roundings
    if not level < explained:  # standard errors, too, would mean nothing
        raise NotThisBlock(f"the best block leaves {level:.1e} times the rounding of the answers")
    best = join_block(fitted.parts, form)
    values, squares = multiplied(best), dict[str, Array]()
    enough = 32  # numbers whose mean square is one of a row's errors
    doubts = find_doubts(network, fitted, rng, -(-enough // start.width))
    for step in doubts:
        other = multiplied(join_block(move_parts(fitted.parts, step), form))
        for name, part in values.items():
            squares[name] = squares.get(name, 0.0) + (other[name] - part) ** 2 / len(doubts)
    errors = {name: pooled_errors(square) for name, square in squares.items()}
    return Refined(best, Block.from_arrays({**values, **errors}), level)


def pooled_errors(squares: Array) -> Array:
    """Standard errors from few repetitions: of a matrix by the means of its rows and columns, of a
    vector no less than the mean."""
    if squares.ndim == 2 and squares.size and (mean := squares.mean()) > 0:
        rows, columns = squares.mean(axis=1, keepdims=True), squares.mean(axis=0, keepdims=True)
        return np.asarray(np.sqrt(rows * columns / mean))
    return smooth_errors(np.sqrt(squares)[None])[0] if squares.size else squares


def settle_block(
    start: Block, pairs: Pairs, only: str = "", steps: int = 3, products: int = 200,
    seed: int = 0,
) -> Block:  # fmt: skip
    """A block closer to these answers by a few Gauss-Newton steps, each of so many products. Where
    a pattern of names is given, all other parameters stay."""
    parts, rng = split_block(start), np.random.default_rng(seed)
    network = network_of(start, parts, pairs, 1.0)
    network = network.evened(parts, rng)
    names = [name for name in parts if re.match(only, name)]
    # what the other parameters are off by ends it: a step that gains little is the last one
    stopping = Stopping(steps=steps, damping=0.0, tolerance=0.01)
    ending = Ending(0.1, 20, 0.1, products)
    state = settle(network, parts, stopping, ending, rng, names=names)
    return join_block(state.parts, form_of(start, parts))


def trim_scores(block: Block) -> Block:
    """The block whose scores have the ranks behind which their singular values fall clearly: what
    was read with errors has weak directions of its own, which a fit shows to be none."""
    assert block.attention is not None
    heads = []
    for head in block.attention.heads:
        axes, sizes, rows = np.linalg.svd(head.score)
        rank = clear_rank(sizes)
        left = axes[:, :rank] * sizes[:rank]
        bias = left @ np.linalg.lstsq(left, head.key_bias, rcond=None)[0]
        heads.append(Head((left, rows[:rank]), bias, head.value))
    return with_attention(block, Attention(heads, block.attention.offset))


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


def multiplied(block: Block) -> dict[str, Array]:
    """All arrays, scores multiplied out: their factors are not unique."""
    arrays = block.to_arrays()
    for name in [name for name in arrays if name.endswith("score_left")]:
        other = name.replace("score_left", "score_right")
        arrays[name.replace("score_left", "score")] = arrays.pop(name) @ arrays.pop(other)
    return arrays
