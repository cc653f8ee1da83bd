"""Extra stage of scalar_outputs for coarse boxes: what undesigned gates measured is
measured again with designed ones, which are a hundred times smaller and so a hundred times less
loud. Costs H d queries for the first column and (H - 1) d for the values."""

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.errors import IllConditioned
from keyhole.learners.multi_head.base_anchor import odds_doubt
from keyhole.learners.multi_head.columns import lean, lengths, open_many, redesign
from keyhole.learners.multi_head.separators import margins
from keyhole.learners.multi_head.soft_probe import Readings, fan
from keyhole.learners.multi_head.state import TILT, Columns, Scalar
from keyhole.linalg.bases import random_directions

KEPT = 0.5  # share of every margin that a moved gate leaves
DOUBLED, STRONG = 2, 2.0  # openings that are doubled for each head; log-odds they may have had
SINGLE, VALUE_DOUBT = 2.0, 30.0  # misfit in standard errors; rounding errors a value now carries
FARTHEST = 2.0  # length of a move, in norms of the largest gate


def refine(state: Scalar) -> None:
    """Values and first columns once more, where the box is coarse and has gates."""
    if not state.ask.coarse or state.chamber.gates is None:
        return
    if state.uniform is None and len(state.values) > 1:
        values_again(state)
    column_again(state)
    if state.heads is None or len(state.values) < state.heads:
        check_single(state)
    redesign(state)


def check_single(state: Scalar) -> None:
    """The openings of each head that tell most, doubled: two heads behind one gate would answer
    otherwise. The same queries before the gates were designed cannot tell heads that differ
    little."""
    plans, odds_before, doubts = [], [], []
    for head, record in enumerate(state.records):
        odds = record.moves[0] @ record.keys[0]
        best = np.argsort(-np.where(np.abs(odds) <= STRONG, np.abs(odds), 0.0))[:DOUBLED]
        moves = record.moves[0][best]
        plans.append(2 * moves)
        odds_before.append(odds[best])
        first = Readings(moves, np.zeros(len(moves)), odds[best])
        rounding = 3 * score_noise(state, head)
        doubts.append(2 * odds_doubt(state, head, first, VALUE_DOUBT) + rounding)
    got = open_many(state, state.chamber, plans, [(0, len(plan)) for plan in plans])
    for head, (moves, _, odds) in enumerate(got):
        used = np.linalg.norm(moves, axis=1) / np.linalg.norm(plans[head], axis=1)
        reading = Readings(moves, np.zeros(len(moves)), odds)
        allowed = doubts[head] + odds_doubt(state, head, reading, VALUE_DOUBT)
        if (np.abs(odds - 2 * used * odds_before[head]) > SINGLE * allowed).any():
            raise IllConditioned("two heads share a gate")


def score_noise(state: Scalar, head: int) -> float:
    """Rounding of the scores themselves, which are large at the gates."""
    gates = state.chamber.gates
    loudest = 0.0 if gates is None else float(np.linalg.norm(gates, axis=1).max())
    return state.ask.unit * loudest * float(np.linalg.norm(state.records[head].keys[0]))


def column_again(state: Scalar) -> None:
    """p_h at the anchor, with moves whose effect is known roughly: none disturbs a gate."""
    plans = []
    for head, record in enumerate(state.records):
        rows = fan(np.zeros((state.ask.width, 0)), state.values[head], state.rng)
        rows = rows + TILT * lean(state, head, record)
        far = 2 * state.anchor  # lets no direction count as unseen
        plans.append(rows * lengths(state, head, rows, far)[:, None])
    got = open_many(state, state.chamber, plans, [(0, len(rows)) for rows in plans])
    for head, (moves, changes, odds) in enumerate(got):
        old = state.records[head]
        doubts = state.doubt(state.chamber, np.full(len(moves), head), moves)
        state.records[head] = Columns(
            [state.anchor],
            [moves],
            [changes],
            [doubts],
            [np.linalg.solve(moves, odds)],
            old.rank,
            old.searching,
        )
    state.correct_leaks(0)


def values_again(state: Scalar) -> None:
    """Every gate but the last moved along all directions, as far as all heads stay shut; the last
    head has what the others leave of the sum."""
    gates, width = state.chamber.gates, state.ask.width
    if gates is None:
        return
    keys = np.stack([record.keys[0] for record in state.records])
    rows = np.linalg.qr(random_directions(state.rng, width, width))[0]
    loudest = float(np.linalg.norm(gates, axis=1).max())
    spare = (1 - KEPT) * margins(gates, keys, state.anchor)
    lengths = np.min(spare / np.maximum(np.abs(rows @ keys.T), TINY), axis=1)
    lengths = np.minimum(lengths, FARTHEST * loudest)
    heads = len(gates)
    moved = np.repeat(gates[None], (heads - 1) * width, axis=0)
    for head in range(heads - 1):
        moved[head * width : (head + 1) * width, head] += lengths[:, None] * rows
    tokens = np.concatenate([gates[None], moved])
    last = np.broadcast_to(state.anchor, (len(tokens), 1, width))
    answers = state.ask(np.concatenate([tokens, last], axis=1), "values")
    slopes = (answers[1:] - answers[0]).reshape(heads - 1, width, -1) / lengths[:, None]
    found = np.einsum("id,hio->hdo", rows, slopes)
    blocks = np.concatenate([found, (state.total - found.sum(axis=0))[None]])
    state.set_values(blocks, errors_of(rows * (loudest / lengths)[:, None], heads))
    state.chamber = state.chamber_at(state.anchor, gates, state.chamber.base)


def errors_of(rows: Float[Array, "n d"], heads: int) -> Float[Array, "k m"]:
    """The matrix from errors of answers to errors of values."""
    each = rows.T
    measured: Array = np.kron(np.eye(heads - 1), each)
    return np.concatenate([measured, -np.tile(each, (1, heads - 1))])
