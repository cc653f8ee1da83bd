"""First stage of learners/multi_head/scalar_outputs: heads, values, and p_h at the anchor."""

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.errors import Counterexample
from keyhole.learners.multi_head.hard_attention import find_leaves
from keyhole.learners.multi_head.leaf_splitting import split
from keyhole.learners.multi_head.leaves import Leaves, measure_values
from keyhole.learners.multi_head.soft_probe import Chamber, Readings, Unexplained, fan, open_heads
from keyhole.learners.multi_head.state import TARGET, TILT, Flat, Scalar

WIDE = 1e4  # size of the first, undesigned gates in units of a head's soft length
TOO_WIDE = 30.0  # first gates this much too large are made again
GROWTH, GROWTHS = 30.0, 6  # first gates that do not hold grow, so often
GATE_DOUBT = 1e4  # deviation of the gates' answer, in rounding errors, that is not rounding
VALUE_DOUBT = 1e4  # rounding errors a value may carry after its own measurement
WEAK, FLAT = 0.02, 1e-9  # log-odds worth a longer opening; log-odds of no reaction at all
LONGEST = 1e10  # and how much longer at the most
SINGLE = 1e2  # misfit of a second opening, in standard errors, that betrays two heads


def partition(state: Scalar) -> None:
    """Leaves, all values, and first gates; leaves with several heads are split."""
    leaves = find_leaves(state.ask, state.anchor, state.total, state.heads, state.rng)
    shared = np.repeat(state.total_rows[:, None], leaves.blocks, axis=1)
    leaves.equations.add(shared, state.total_answers)
    state.checked = 0
    while True:
        measure_values(state.ask, leaves)
        state.set_values(*leaves.equations.solve(), leaves.uniform)
        if not len(leaves):
            return
        shut(state, leaves)
        if state.heads is not None and leaves.blocks >= state.heads:
            return
        crowded = first_crowded(state)
        if crowded is None:
            return
        if split(state.ask, leaves, crowded, state.rng):
            state.begun.pop(crowded, None)
        else:
            state.checked = crowded + 1


def shut(state: Scalar, leaves: Leaves) -> None:
    """Gates around the anchor; none where one head is alone."""
    if len(leaves) == 1 and not leaves.uniform:
        state.chamber = state.chamber_at(state.anchor, None)
        return
    guess = scale_of(state, 0)
    state.chamber = first_gates(state, leaves, guess)
    begin(state, 0)
    if state.sizes[0] > TOO_WIDE * guess:  # gates far larger than needed cost digits
        del state.begun[0]
        state.chamber = first_gates(state, leaves, state.sizes[0])


def first_gates(state: Scalar, leaves: Leaves, size: float) -> Chamber:
    """The leaves as gates, as small as they still hold."""
    tokens = leaves.tokens * (WIDE / size)
    for _ in range(GROWTHS):
        chamber = state.measured_base(state.anchor, tokens)
        expected = float(np.einsum("hd,hd->", tokens, state.values))
        loudness = float(np.linalg.norm(tokens, axis=1) @ np.linalg.norm(state.values, axis=1))
        allowed = GATE_DOUBT * state.ask.unit * loudness + state.ask.noise
        if np.abs(chamber.base - expected).max() <= allowed:
            return chamber
        tokens = tokens * GROWTH
    raise Unexplained(
        "the gates do not hold at any size that was tried",
        Counterexample(
            input=np.concatenate([tokens / GROWTH, state.anchor[None]]),
            box_answer=np.asarray(chamber.base[0]),
            model_answer=np.asarray(expected),
            reason="huge tokens: each head should attend to one of them alone",
        ),
    )


def scale_of(state: Scalar, head: int) -> float:
    """Estimate of |p_h| at the first anchor, from other heads where this one is unknown."""
    return state.sizes.get(head, float(np.median(list(state.sizes.values()) or [state.reach])))


def begin(state: Scalar, head: int) -> None:
    """The first opening of a head, which also tells its scale."""
    if head in state.begun:
        return
    width, value = state.ask.width, state.values[head]
    rows = fan(np.zeros((width, 0)), value, state.rng)
    rows = rows + TILT * value / np.linalg.norm(value)
    which = np.array([head])
    moves = rows[:1] * (TARGET * np.sqrt(width) / scale_of(state, head))
    got = open_heads(state.ask, state.chamber, which, moves, "first column")
    if abs(got.log_odds[0]) < WEAK:
        longer = min(TARGET / max(abs(float(got.log_odds[0])), TINY), LONGEST)
        got = open_heads(state.ask, state.chamber, which, longer * got.moves, "first column")
    if abs(got.log_odds[0]) < FLAT:
        raise Flat
    state.begun[head] = (rows, got)
    seen = abs(float(got.log_odds[0])) / float(np.linalg.norm(got.moves[0]))
    state.sizes[head] = seen * np.sqrt(width)


def first_crowded(state: Scalar) -> int | None:
    """The first leaf that answers unlike a single head when the same opening is doubled."""
    for head in range(state.checked, len(state.values)):
        begin(state, head)
        reading = state.begun[head][1]
        which = np.array([head])
        factor = 2.0 if abs(reading.log_odds[0]) < 3 else 0.5
        second = open_heads(state.ask, state.chamber, which, factor * reading.moves, "single?")
        used = float(np.linalg.norm(second.moves[0]) / np.linalg.norm(reading.moves[0]))
        misfit = abs(float(second.log_odds[0] - used * reading.log_odds[0]))
        doubts = odds_doubt(state, head, second) + used * odds_doubt(state, head, reading)
        allowed = float(doubts[0])
        if misfit > SINGLE * state.suspicion * allowed:
            return head
    return None


def odds_doubt(
    state: Scalar, head: int, reading: Readings, value_doubt: float = VALUE_DOUBT
) -> Float[Array, " n"]:
    """Standard errors of the log-odds of openings of one head."""
    which = np.full(len(reading.moves), head)
    doubt = state.doubt(state.chamber, which, reading.moves)
    weight = np.abs(reading.moves @ state.values[head])
    fading = np.exp(-np.abs(reading.log_odds))
    slope = fading / (1 + fading) ** 2
    own = value_doubt * state.ask.unit * weight
    return np.asarray((doubt + own) / (weight * slope))


def first_column(state: Scalar) -> None:
    """p_h at the anchor: d openings per head, their length found on the way."""
    width = state.ask.width
    for head in range(len(state.records)):
        begin(state, head)
        rows, got = state.begun[head]
        which = np.full(width, head)
        for stop in sorted({min(3, width), width} - {1}):
            seen = np.abs(got.log_odds) / np.linalg.norm(got.moves, axis=1)
            length = TARGET / float(np.sqrt(np.mean(np.square(seen))))
            start = len(got.moves)
            asked = rows[start:stop] * min(length, TARGET * np.sqrt(width) / seen.max())
            more = open_heads(state.ask, state.chamber, which[start:stop], asked, "first column")
            got = Readings(
                np.concatenate([got.moves, more.moves]),
                np.concatenate([got.changes, more.changes]),
                np.concatenate([got.log_odds, more.log_odds]),
            )
        state.enter_first(head, got)
    state.correct_leaks(0)
