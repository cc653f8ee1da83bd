"""Rotary positions that turn a part of each head only: n pairs turn, the other dimensions do not.

Statement.  s_h(D) = sum_j Re( e^{i t_j D} k_hj(x) q_hj(y) ) + x . (W_h y + c_h), rank W_h = r - 2n,
            is recovered behind what rotary measured at the first anchor; n is not known.
Queries.    Tokens in all directions before r - 2n + 1 further anchors, at distances that reach far:
            over a few places a slow pair looks like what does not turn. r tokens before the others.
Algebra.    Over distances, scores have rank 2n + 1: beside cosines and sines, the constants lie in
            their span. At the first anchor, where q_h = 1, least squares over the distances gives
            k_h, and the key of what does not turn as well. A further anchor is linear in q_h and in
            that key, whose range is known after a few anchors. The copies of the anchor change
            every log-ratio alike, as a constant key does: one unknown more.
When it fails.  As rotary does; and where nothing but one direction does not turn, which the span
            of a slow pair hides.
Source.     Keyhole's own; docs/methods/positions.md.
"""

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.positions.rotary import (
    AtAnchor,
    FirstAnchor,
    find_frequencies,
    query_equations,
    recognise_rounding,
    wave_table,
)
from keyhole.learners.positions.rotary_fit import Asked, Rotary, Waves, fit_rotary
from keyhole.learners.positions.soft import Reader, Saturated
from keyhole.linalg.token_frames import spread_tokens


def learn_partial_rotary(
    begun: FirstAnchor, rng: np.random.Generator
) -> tuple[Rotary, Rotary] | None:
    """Turning pairs and what does not turn, with standard errors; None where distances show no
    such parts."""
    reader, at, size = begun.reader, begun.at, begun.size
    rank, heads = len(at.near), reader.values.heads
    for pairs in range(rank // 2 - 1, 0, -1):
        frequencies = find_frequencies(at, pairs, constant=True)
        if frequencies is not None:
            break
    else:
        return None
    waves = recognise_rounding(at, frequencies, constant=True)
    keys, still = solve_keys(at, waves)
    inner, width = rank - 2 * pairs, reader.ask.width
    steps = np.linalg.qr(rng.standard_normal((width, width)))[0]
    asked: list[Asked] = []
    ranges: list[Array] = []
    for number, step in enumerate(steps):
        full = number < min(inner + 1, width)  # with the first anchor one more than the range has
        if number == inner + 1:
            seen = np.array([still, *(solve_anchor(q, waves, keys, None)[1] for q in asked)])
            ranges = [np.linalg.svd(seen[:, h])[2][:inner].T for h in range(heads)]
        spans = None if full else ranges
        found = ask_anchor(reader, rng, at, step, waves, keys, spans, size)
        if found is None:
            return None
        asked.append(found)
    start = solve_all(at, asked, waves, inner)
    return fit_rotary(start, [*at.asked(), *asked], inner)


def solve_keys(
    at: AtAnchor, waves: Waves
) -> tuple[Float[Array, "heads p e"], Float[Array, "heads d"]]:
    """Turning keys in units of the queries at the first anchor, and the key that does not turn."""
    table = np.column_stack([wave_table(waves, at.near, int(at.near.max())), np.ones(len(at.near))])
    inverse = np.linalg.pinv(table)
    linear = inverse @ at.slopes()  # (heads, 2n + 1, d)
    own = (at.constants() @ inverse.T)[:, :-1]  # the last belongs to the copies as well
    turning = linear[:, :-1]
    return np.concatenate([turning, (own - turning @ at.anchor)[..., None]], axis=2), linear[:, -1]


def ask_anchor(
    reader: Reader,
    rng: np.random.Generator,
    at: AtAnchor,
    step: Float[Array, " d"],
    waves: Waves,
    keys: Float[Array, "heads p e"],
    ranges: list[Array] | None,
    size: float,
) -> Asked | None:
    """Queries at one anchor: all directions at distances that reach far, or where the ranges of the
    keys are known, a few next to each other."""
    rank = reader.values.ranks[0]
    distances = at.near if ranges is None else np.arange(1, rank + 1)
    bases = [np.linalg.qr(ins)[0] for ins in reader.values.ins]
    reach, near = float(np.linalg.norm(at.anchor)), size
    for _ in range(12):
        anchor = at.anchor + reach * step
        if ranges is None:
            blocks = -(-len(anchor) // rank)
            frame = near * spread_tokens(bases, rank, blocks, rng).T
            moves = np.concatenate([frame, -frame[:rank]]).reshape(blocks + 1, rank, -1)
        else:
            moves = choose_moves(rng, bases, waves, keys, anchor, distances, ranges, near)
        # among thousands of copies weights are small, and the value maps do not tell enough
        alone = reader.ask(anchor[None, None], "scores")[0] if ranges is None else None
        try:
            ratios = reader.log_ratios(anchor, alone, anchor + moves, distances)
            return Asked(anchor, anchor + moves, distances, ratios)
        except Saturated:
            reach, near = -0.7 * reach, 0.7 * near
    return None


def choose_moves(
    rng: np.random.Generator,
    bases: list[Array],
    waves: Waves,
    keys: Float[Array, "heads p e"],
    anchor: Array,
    distances: Array,
    ranges: list[Array],
    size: float,
) -> Float[Array, "one m d"]:
    """Moves for which the equations of the worst head are conditioned best, of many drawn."""
    drawn = rng.standard_normal((100, len(anchor), len(distances)))
    steps = np.linalg.qr(drawn)[0].transpose(0, 2, 1)
    worst = np.ones(len(steps))
    for h, basis in enumerate(bases):
        turning = query_equations(waves, keys[h], anchor, anchor + size * steps, distances)
        rows = np.concatenate([turning, size * steps @ ranges[h]], axis=2)
        worst = np.maximum(worst, np.linalg.cond(rows) * np.linalg.cond(steps @ basis))
    return np.asarray(size * steps[np.argmin(worst)][None])


def solve_anchor(
    asked: Asked,
    waves: Waves,
    keys: Float[Array, "heads p e"],
    ranges: list[Array] | None,
) -> tuple[Float[Array, "heads p"], Float[Array, "heads d"]]:
    """Queries of the turning pairs, and the key that does not turn, at one anchor."""
    width, pairs = len(asked.anchor), keys.shape[1]
    tokens = asked.tokens.reshape(-1, width)
    distances = np.tile(asked.distances, len(asked.tokens))
    queries, still = [], []
    for h in range(len(keys)):
        span = np.eye(width) if ranges is None else ranges[h]
        turning = query_equations(waves, keys[h], asked.anchor, tokens, distances)
        rows = np.column_stack([turning, (tokens - asked.anchor) @ span])
        if ranges is None:  # the copies of the anchor add one number to all
            rows = np.column_stack([rows, np.ones(len(rows))])
        found = np.linalg.lstsq(rows, asked.ratios.ratios[:, h].ravel(), rcond=None)[0]
        queries.append(found[:pairs])
        still.append(span @ found[pairs : pairs + span.shape[1]])
    return np.array(queries), np.array(still)


def solve_all(at: AtAnchor, asked: list[Asked], waves: Waves, inner: int) -> Rotary:
    """Everything from the log-ratios, given the frequencies."""
    keys, first = solve_keys(at, waves)
    heads, parts, size = keys.shape
    full = [q for q in asked if len(q.tokens) > 1]
    few = [q for q in asked if len(q.tokens) == 1]
    solved = [solve_anchor(q, waves, keys, None) for q in full]
    seen = np.array([first, *(still for _, still in solved)])
    ranges = [np.linalg.svd(seen[:, h])[2][:inner].T for h in range(heads)]
    solved += [solve_anchor(q, waves, keys, ranges) for q in few]
    unit = np.zeros((heads, parts))
    unit[:, ::2] = 1.0  # the queries at the first anchor
    queries = np.array([unit, *(q for q, _ in solved)])
    still = np.array([first, *(s for _, s in solved)])
    places = np.array([at.anchor, *(q.anchor for q in [*full, *few])])
    places = np.column_stack([places, np.ones(len(places))])
    count = len(places)
    turning = np.linalg.lstsq(places, queries.reshape(count, -1), rcond=None)[0]
    fixed = np.linalg.lstsq(places, still.reshape(count, -1), rcond=None)[0]
    return Rotary(
        waves.frequencies,
        keys,
        turning.T.reshape(heads, parts, size),
        fixed.T.reshape(heads, size - 1, size),
        waves.single,
    )
