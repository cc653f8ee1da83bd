"""Last stage of learners/multi_head/scalar_outputs: from openings to parameters with error bars."""

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.multi_head.state import Columns, Draft, Scalar

REPLICATES = 8  # repetitions of the algebra on perturbed answers for the error bars
BARS = 1.0  # error bars, in units of the spread of the replicates


def conclude(state: Scalar) -> Draft:
    """Parameters, and their spread over replicates with perturbed answers."""
    scores, biases = parameters(state, state.values, None)
    score_spread, bias_spread = np.zeros_like(scores), np.zeros_like(biases)
    value_spread = np.zeros_like(state.blocks)
    for _ in range(REPLICATES):
        blocks = perturbed_blocks(state)
        other = parameters(state, (blocks @ state.mix)[: len(state.values)], state.rng)
        value_spread += (blocks - state.blocks) ** 2
        score_spread += (other[0] - scores) ** 2
        bias_spread += (other[1] - biases) ** 2
    width = state.ask.width
    ranks = tuple(width if r.rank is None else r.rank for r in state.records)
    return Draft(
        scores,
        biases,
        state.blocks,
        smoothed(BARS * np.sqrt(score_spread / REPLICATES)),
        smoothed(BARS * np.sqrt(bias_spread / REPLICATES)),
        smoothed(BARS * np.sqrt(value_spread / REPLICATES)),
        state.uniform is not None,
        ranks,
        [low_rank_factors(s, r) for s, r in zip(scores, ranks, strict=True)],
        state.gate_norm,
    )


def perturbed_blocks(state: Scalar) -> Float[Array, "b d outputs"]:
    """The values, had the answers been rounded otherwise."""
    loud = float(np.linalg.norm(state.blocks, axis=1).sum(axis=0).max())
    shape = state.blocks.shape
    if not state.inverse.size:
        level = state.ask.unit * loud + state.ask.additive
        return np.asarray(state.blocks + level * state.rng.standard_normal(shape))
    noise = state.rng.standard_normal((state.inverse.shape[1], shape[2]))
    change = state.ask.unit * loud * (state.inverse @ noise)
    return np.asarray(state.blocks + change.reshape(shape))


def parameters(
    state: Scalar, values: Float[Array, "h d"], rng: np.random.Generator | None
) -> tuple[Float[Array, "h d d"], Float[Array, "h d"]]:
    """Scores and key biases; with `rng`, from answers perturbed by their errors."""
    scores, biases = [], []
    for head, record in enumerate(state.records):
        keys: list[Array] = []
        shared = 0.0 if rng is None else rng.standard_normal()
        for j, moves in enumerate(record.moves):
            odds = moves @ record.keys[j]
            if rng is not None:
                # First order around what was measured: later leaks stay corrected.
                weights = moves @ state.values[head]
                ratio = 1 / (1 + np.exp(-odds))
                slope = weights * ratio * (1 - ratio)
                noise = record.doubts[j] * (rng.standard_normal(len(moves)) + shared)
                tilt = state.chamber.tilt(head, moves, ratio, values - state.values)
                odds = odds + (noise + tilt) / slope
                odds = odds + score_noise(state, record, j) * rng.standard_normal(len(moves))
            keys.append(solved(state, record, j, odds, keys))
        stack = np.stack(keys, axis=1)
        design = np.stack(record.anchors, axis=1)
        if state.bias:
            design = np.vstack([design, np.ones(design.shape[1])])
        map_ = np.linalg.solve(design.T, stack.T).T
        scores.append(map_[:, : state.ask.width])
        biases.append(map_[:, state.ask.width] if state.bias else np.zeros(state.ask.width))
    return np.stack(scores), np.stack(biases)


def score_noise(state: Scalar, record: Columns, column: int) -> float:
    """Rounding of the scores themselves, which are large at the gates."""
    size = max(float(np.linalg.norm(record.anchors[column])), state.chamber.far)
    return state.ask.unit * size * float(np.linalg.norm(record.keys[column]))


def solved(state: Scalar, record: Columns, column: int, odds: Array, keys: list[Array]) -> Array:
    """The key of one column, given the columns before it."""
    moves = record.moves[column]
    if len(moves) == state.ask.width:
        return np.asarray(np.linalg.solve(moves, odds))
    full = [k for k, m in zip(keys, record.moves, strict=False) if len(m) == state.ask.width]
    gated = not state.chamber.alone
    stack = np.stack([full[0], *(k - full[0] if gated else k for k in full[1:])], axis=1)
    known = np.linalg.qr(stack / np.linalg.norm(stack, axis=0))[0]
    start = full[0] if gated else np.zeros(state.ask.width)
    rest = np.linalg.lstsq(moves @ known, odds - moves @ start, rcond=None)[0]
    return np.asarray(start + known @ rest)


def all_uniform(state: Scalar) -> Draft:
    """Nobody chooses between tokens: one head with score zero holds all the value."""
    width = state.ask.width
    none, blocks = np.zeros((0, width, width)), state.total[None]
    noise = state.ask.unit * np.abs(blocks).max() + state.ask.additive
    return Draft(
        none,
        none[:, 0],
        blocks,
        none,
        none[:, 0],
        np.full(blocks.shape, noise),
        True,
        (),
        [],
        0.0,
    )


def low_rank_factors(score: Array, rank: int | None) -> tuple[Array, Array] | None:
    """The score in factors where its rank is known to be smaller than the width."""
    if rank is None or rank >= len(score):
        return None
    u, s, vt = np.linalg.svd(score)
    root = np.sqrt(s[:rank])
    return u[:, :rank] * root, root[:, None] * vt[:rank]


def smoothed(errors: Array) -> Array:
    """Each error at least the root mean square over its block: few replicates make single
    entries look better than they are."""
    flat = errors.reshape(len(errors), -1)
    level = np.sqrt((flat**2).mean(axis=1))
    return np.asarray(np.maximum(flat, level[:, None]).reshape(errors.shape))
