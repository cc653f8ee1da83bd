"""Second stage of learners/multi_head/scalar_outputs: p_h at the anchors around the anchor."""

import numpy as np

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float
from keyhole.errors import IllConditioned
from keyhole.learners.multi_head.separators import gate_tokens
from keyhole.learners.multi_head.soft_probe import Chamber, Unexplained, fan, open_heads
from keyhole.learners.multi_head.state import TARGET, TILT, Columns, Scalar

SHUT = 80.0  # margin, in log-odds, by which the gates hold at the first anchor
CAUTION = 0.3  # the first column next to the anchor is asked this much closer
EASE = (0.02, 2.0)  # later ones by what the columns before have shown, within these bounds
STEP = 0.5  # distance of the other anchors, relative to the anchor:
WIDE, LARGE = 8, 4  # less below this root of the width, and with larger gates
LOSS, TAIL = 0.8, 2.5  # share of a margin that may be lost, at so many standard deviations
RETREAT, RETREATS = 0.25, 8  # a column whose gates gave way is asked closer, so often
STRETCH = 30.0  # log-odds an opening may reach in a head that is to stay shut
WITHIN = 200.0  # misfit, in standard errors, of a column that lies in the range so far
SPARE_COARSE, WITHIN_COARSE = 3, 20.0  # coarse boxes need more openings, and a closer fit, for that
MOSTLY, LOUDEST = 0.9, 3.0  # share of a row in the range so far that sees more of p_h, and how much
LOWER = 1e-7  # relative size of a column outside the range so far that counts as rank reached


def redesign(state: Scalar) -> None:
    """Gates that hold around the anchor, from the measured p_h."""
    state.gate_norm, state.step = 0.0, 1.0
    if state.chamber.gates is None:
        return
    width = state.ask.width
    keys = np.stack([record.keys[0] for record in state.records])
    gates = gate_tokens(keys)
    state.gate_norm = float(np.linalg.norm(gates, axis=1).max())
    smallest = float(np.linalg.norm(keys, axis=1).min())
    own = np.einsum("hd,hd->h", keys, gates)
    shut = SHUT * digits(state)
    itself = float(((shut + keys @ state.anchor) / own).max())
    scale = max(shut / smallest, itself)  # the anchor must lose against the gates as well
    state.chamber = state.measured_base(state.anchor, gates * scale)
    state.step = STEP * min(1.0, np.sqrt(width) / WIDE) / max(1.0, state.gate_norm / LARGE)


def digits(state: Scalar) -> float:
    """Digits of the box, as a share of float64's: margins need no more than the box can see."""
    return float(np.log(state.ask.unit) / np.log(UNIT_ROUNDOFF))


def other_columns(state: Scalar) -> None:
    """p_h at the remaining anchors, closer to the first where the gates demand it."""
    width = state.ask.width
    frame = fan((state.anchor / np.linalg.norm(state.anchor))[:, None], state.anchor, state.rng)
    if state.chamber.alone:
        others = list(state.reach * frame[1:])
        if state.bias:
            others.append(np.zeros(width))
    else:
        rows = frame if state.bias else frame[1:]
        others = [state.anchor + state.step * state.reach * row for row in rows]
    state.gave_way = IllConditioned("the gates do not hold at any other anchor")
    for anchor in others:
        far = ease(state)
        near = state.anchor + far * (anchor - state.anchor)
        for _ in range(RETREATS):
            if column(state, near):
                break
            near = state.anchor + RETREAT * (near - state.anchor)
        else:
            raise state.gave_way


def ease(state: Scalar) -> float:
    """How far the next anchor may lie from the first, in planned steps: as far as the gates
    can be expected to hold, judged by how much keys have moved so far."""
    if state.chamber.alone:
        return 1.0
    worst = TINY
    for head, record in enumerate(state.records):
        if len(record.keys) < 2:
            return CAUTION
        first = record.keys[0]
        moved = [
            np.linalg.norm(key - first) / np.linalg.norm(anchor - state.anchor)
            for key, anchor in zip(record.keys[1:], record.anchors[1:], strict=True)
        ]
        spread = state.chamber.spread(head)
        share = record.rank or min(len(record.keys), state.ask.width)
        keys = np.stack([r.keys[0] for r in state.records])
        margin = float(state.chamber.margins(keys)[head])
        typical = float(np.sqrt(np.mean(np.square(moved)))) * state.step * state.reach
        worst = max(worst, typical * spread / (margin * np.sqrt(share)))
    return float(np.clip(LOSS / (TAIL * worst), *EASE))


def lengths(state: Scalar, head: int, rows: Array, anchor: Array) -> Float[Array, " n"]:
    """How far to open along each row at a new anchor, from what p_h is expected to be."""
    record = state.records[head]
    width = state.ask.width
    if state.chamber.alone:
        spread = float(np.mean([np.linalg.norm(key) for key in record.keys])) / np.sqrt(width)
        inside = np.linalg.norm(rows @ state.range_of(record), axis=1)
        share = np.sqrt(max(1, width / max(1, len(record.keys))))
        expected = spread * np.where(inside > MOSTLY, min(share, LOUDEST), 1.0)
        return np.asarray(TARGET / expected)
    first = record.keys[0]
    slopes = [
        np.linalg.norm(key - first) / np.linalg.norm(other - state.anchor)
        for key, other in zip(record.keys[1:], record.anchors[1:], strict=True)
    ]
    slope = (
        float(np.sqrt(np.mean(np.square(slopes))))
        if slopes
        else (float(np.linalg.norm(first)) / state.reach)
    )
    step = float(np.linalg.norm(anchor - state.anchor))
    count = record.rank or width
    expected = np.abs(rows @ first) + slope * step / np.sqrt(min(width, count))
    keys = np.stack([other.keys[0] for other in state.records])
    reach = np.abs(rows @ keys.T)
    reach[:, head] = 0.0
    stretch = STRETCH * digits(state)
    return np.asarray(np.minimum(TARGET / expected, stretch / (reach.max(axis=1) + TINY)))


def column(state: Scalar, anchor: Array) -> bool:
    """One more anchor for every head; False where the gates did not hold there."""
    chamber = state.chamber_near(anchor)
    plans, firsts = [], []
    for head, record in enumerate(state.records):
        known = state.range_of(record)
        count = known.shape[1]
        rows = fan(turned(state, known), state.values[head], state.rng)
        rows = rows + TILT * lean(state, head, record)
        rows = rows * lengths(state, head, rows, anchor)[:, None]
        plans.append(rows)
        if record.rank is not None and count >= record.rank:
            firsts.append(record.rank)
        else:
            spare = SPARE_COARSE if state.ask.coarse else 1
            firsts.append(min(count + spare, state.ask.width) if record.searching else len(rows))
    try:
        got = open_many(state, chamber, plans, [(0, first) for first in firsts])
    except Unexplained as error:  # the gates gave way
        state.gave_way = error
        return False
    rest = []
    for head, record in enumerate(state.records):
        done = record.rank is not None and len(record.keys) >= record.rank
        if not done and record.searching and explained(state, head, got[head]):
            record.rank = state.range_of(record).shape[1]
            done = True
        rest.append((firsts[head], firsts[head] if done else len(plans[head])))
    try:
        more = open_many(state, chamber, plans, rest)
    except Unexplained as error:
        state.gave_way = error
        return False
    joined = [
        tuple(np.concatenate([a, b]) for a, b in zip(x, y, strict=True))
        for x, y in zip(got, more, strict=True)
    ]
    keys = [state.key(head, moves, odds) for head, (moves, _, odds) in enumerate(joined)]
    if not chamber.holds(np.stack(keys)):
        return False
    for head, (moves, changes, _) in enumerate(joined):
        state.enter(head, anchor, chamber, moves, changes, keys[head])
    state.correct_leaks(-1)
    return True


def turned(state: Scalar, known: Float[Array, "d k"]) -> Float[Array, "d k"]:
    """The known directions, those after the first in a random rotation; for a single head,
    which has no gates to respect, all of them."""
    start = 0 if state.chamber.alone else 1
    count = known.shape[1] - start
    if count < 2:
        return known
    turn = np.linalg.qr(state.rng.standard_normal((count, count)))[0]
    return np.concatenate([known[:, :start], known[:, start:] @ turn], axis=1)


def lean(state: Scalar, head: int, record: Columns) -> Float[Array, " d"]:
    """The value's direction without its part along the first key, which would saturate."""
    value = state.values[head] / np.linalg.norm(state.values[head])
    if not state.chamber.alone:
        first = record.keys[0] / np.linalg.norm(record.keys[0])
        value = value - first * (first @ value)
    return np.asarray(value)


def open_many(
    state: Scalar, chamber: Chamber, plans: list[Array], parts: list[tuple[int, int]]
) -> list[tuple[Array, Array, Array]]:
    """Openings of several heads in one batch: moves, changes and log-odds per head."""
    counts = [stop - start for start, stop in parts]
    which = np.repeat(np.arange(len(plans)), counts)
    moves = np.concatenate([p[a:b] for p, (a, b) in zip(plans, parts, strict=True)])
    if not len(moves):
        return [(moves, np.zeros(0), np.zeros(0)) for _ in plans]
    rounds = 40 if chamber.alone else 3
    got = open_heads(state.ask, chamber, which, moves, "columns", rounds)
    cuts = np.cumsum(counts)[:-1]
    return list(
        zip(
            np.split(got.moves, cuts),
            np.split(got.changes, cuts),
            np.split(got.log_odds, cuts),
            strict=True,
        )
    )


def explained(state: Scalar, head: int, got: tuple[Array, Array, Array]) -> bool:
    """Whether a column lies in the range of those before it, judged by more openings than that
    range has dimensions."""
    record = state.records[head]
    moves, _, odds = got
    known = state.range_of(record)
    if len(moves) <= known.shape[1]:
        return False
    seen = odds if state.chamber.alone else odds - moves @ record.keys[0]
    fit = np.linalg.lstsq(moves @ known, seen, rcond=None)[0]
    weights = np.abs(moves @ state.values[head])
    noise = state.doubt(state.chamber, np.full(len(moves), head), moves) / weights
    times = WITHIN_COARSE if state.ask.coarse else WITHIN
    allowed = LOWER * np.linalg.norm(seen) + times * np.linalg.norm(noise)
    return bool(np.linalg.norm(moves @ known @ fit - seen) <= allowed)
