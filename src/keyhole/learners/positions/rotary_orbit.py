"""Rotary positions of a box with few digits: keys, queries and frequencies from near tokens alone.

Statement.  s_h(D) = k_h(x)^T N_h^D q_h(y), k and q affine in r dimensions, N_h similar to the turns
            of one step. All of it is found well enough for a fit to all answers to start from, by
            about 4d + 6r queries behind the value maps, none of them longer than r + 1 tokens:
            among thousands of copies of an anchor, weights would have no digits left.
Queries.    (1) At r + r/8 anchors, alone and before them tokens in all directions F_k, each at one
            distance D_k, and again each at D_k + 2; one block of them turned around as well. (2) At
            the other anchors, alone, one token at each distance, and its opposite.
Algebra.    Half the difference of opposite moves is F_k . K^T N^(D_k) q(a): over anchors a matrix
            of rank r, G_k q(a), which gives G and q up to an invertible matrix. The same two steps
            farther is G_k N^2 q(a): N^2 by least squares. What it turns visibly are pairs; they
            follow a law of frequencies, which the other dimensions, in any order, are taken to
            follow as well. Then F K^T = G_k N^(-D_k). Half the sums of opposite moves,
            k(a)^T (N^D - 1) q(a), tell the constant part of the keys, and with (2) q at the other
            anchors: the r tokens of (2) alone would hardly show some of it.
When it fails.  Where fewer than two pairs turn visibly within r places. Slow pairs are mixed as far
            as noise hides their difference.
Source.     Keyhole's own; docs/methods/positions.md.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array, Float, Int
from keyhole.learners.base import Inconclusive
from keyhole.learners.positions.rotary_fit import Rotary
from keyhole.learners.positions.soft import Reader, Saturated
from keyhole.linalg.token_frames import spread_tokens
from keyhole.oracles.noise import DETECTION, REJECTION

HALVINGS = 12  # times that tokens come nearer to the anchors until no weight vanishes
ANCHOR = 0.5  # entries of the anchors
TYPICAL = 0.2  # standard deviation of a log-ratio in its stated error, which is a bound


STEPS = (
    2  # by which tokens stand farther away the second time: the fastest pair turns by less than pi
)


@dataclass(frozen=True, eq=False)
class NearScores:
    """What (1) and (2) told: derivatives of the scores along directions at anchors, and what a copy
    of the anchor has at a distance more than at its place.

    slopes: along F_k at D_k = 1 + k mod r before the full anchors. farther: the same at
    D_k + STEPS, where that is no more than r. few: along `steps` at the distances 1 ... r before
    the other anchors. levels: of all anchors, at the distances.
    """

    frame: Float[Array, "k d"]
    steps: Float[Array, "r d"]
    anchors: Float[Array, "n d"]
    slopes: Float[Array, "heads full k"]
    farther: Float[Array, "heads full k"]
    few: Float[Array, "heads rest r"]
    levels: Float[Array, "heads n r"]

    @property
    def own(self) -> Int[Array, " k"]:
        """The distance of every direction."""
        return 1 + np.arange(len(self.frame)) % len(self.steps)


@dataclass(frozen=True, eq=False)
class Factored:
    """One head: scores of directions before full anchors as met @ found.T, and the turn of STEPS
    steps in these coordinates."""

    met: Float[Array, "k r"]
    found: Float[Array, "full r"]
    turn: Float[Array, "r r"]

    @classmethod
    def of(cls, seen: NearScores, head: int) -> "Factored":
        rank = len(seen.steps)
        u, s, vt = np.linalg.svd(seen.slopes[head], full_matrices=False)
        found, met = u[:, :rank] * s[:rank], vt[:rank].T
        later = np.linalg.lstsq(found, seen.farther[head], rcond=None)[0].T
        rows = seen.own + STEPS <= rank
        turn = np.linalg.lstsq(met[rows], later[rows], rcond=None)[0]
        return cls(met, found, turn)

    @property
    def angles(self) -> Float[Array, " n"]:
        """By which pairs turn in one step, as far as that is seen."""
        values = np.linalg.eigvals(self.turn)
        return np.asarray(np.sort(np.abs(np.angle(values[values.imag > 0])))[::-1] / STEPS)


def learn_orbits(reader: Reader, rng: np.random.Generator) -> tuple[Rotary, float] | Inconclusive:
    """Keys, queries and frequencies, and the standard error of a log-ratio."""
    size = reader.first_size
    for _ in range(HALVINGS):
        try:
            seen, error = measure_near_scores(reader, rng, size)
            break
        except Saturated:
            size *= 0.5
    else:
        return Inconclusive("no tokens are so near to the anchors that every weight shows")
    heads = [Factored.of(seen, head) for head in range(reader.values.heads)]
    pairs = reader.values.ranks[0] // 2
    angles = np.zeros((len(heads), pairs))
    for row, head in zip(angles, heads, strict=True):
        row[: len(head.angles)] = head.angles[:pairs]
    frequencies = fit_law(angles, pairs)
    if frequencies is None:
        return Inconclusive("near tokens show no turns")
    parts = [solve_head(seen, n, head, frequencies, error) for n, head in enumerate(heads)]
    keys, queries = (np.array(part) for part in zip(*parts, strict=True))
    return Rotary(frequencies, keys, queries), error


def measure_near_scores(
    reader: Reader, rng: np.random.Generator, size: float
) -> tuple[NearScores, float]:
    values, width = reader.values, reader.ask.width
    rank = values.ranks[0]
    bases = [np.linalg.qr(ins)[0] for ins in values.ins]
    blocks = -(-width // rank)
    frame = size * spread_tokens(bases, rank, blocks, rng).T
    parts = frame.reshape(blocks, rank, width)
    distances = np.arange(1, rank + 1)
    full = min(width + 1, rank + max(1, rank // 8))
    turned = np.linalg.qr(rng.standard_normal((width, width)))[0]
    anchors = min(size, 1.0) * ANCHOR * np.sqrt(width) * np.vstack([turned, -turned.mean(axis=0)])
    anchors = reader.ask.representable(anchors)
    alone = reader.ask(anchors[:, None], "scores")
    steps = spread_tokens(bases, rank, 1, rng).T[:rank] * size
    later = np.roll(parts, STEPS, axis=1)
    slopes, farther, few, levels, errors = [], [], [], [], []
    for n, anchor in enumerate(anchors):
        if n < full:
            moves = np.concatenate([parts, -parts[:1], later])
        else:
            moves = np.stack([steps, -steps])
        found = reader.log_ratios(anchor, alone[n], anchor + moves, distances)
        ratios = found.ratios.transpose(1, 0, 2)  # heads, queries, distances
        level = 0.5 * (ratios[:, 0] + ratios[:, blocks if n < full else 1])
        along = ratios - level[:, None]
        levels.append(level)
        errors.append(np.median(found.errors))
        if n < full:
            slopes.append(along[:, :blocks].reshape(len(along), -1))
            back = np.roll(along[:, blocks + 1 :], -STEPS, axis=2)
            farther.append(back.reshape(len(along), -1))
        else:
            few.append(along[:, 0])
    by_head = [np.array(part).transpose(1, 0, 2) for part in (slopes, farther, few, levels)]
    return NearScores(frame, steps, anchors, *by_head), float(np.median(errors))


def solve_head(
    seen: NearScores, number: int, head: Factored, frequencies: Float[Array, " n"], error: float
) -> tuple[Float[Array, "p e"], Float[Array, "p e"]]:
    """Keys and queries of a head, pair by pair, by their real and imaginary parts."""
    rank = len(seen.steps)
    basis = choose_basis(head.turn, frequencies)
    inverse = np.linalg.inv(basis)
    powers = [basis @ rotate(frequencies, d) @ inverse for d in range(-rank, rank + 1)]
    along = np.array([head.met[k] @ powers[rank - d] for k, d in enumerate(seen.own)])  # F K^T
    keys = np.linalg.lstsq(seen.frame, along, rcond=None)[0].T  # (r, d)
    turns = np.array([powers[rank + i + 1] for i in range(rank)])
    full = len(head.found)
    constant = solve_constant(seen, number, keys, turns, head.found, error)
    near = np.einsum("id,dp,ipq->iq", seen.steps, keys.T, turns)
    others = []
    for anchor, few, level in zip(
        seen.anchors[full:], seen.few[number], seen.levels[number, full:], strict=True
    ):
        own = (keys @ anchor + constant) @ (turns - np.eye(rank))
        rows, right = np.concatenate([near, own]), np.concatenate([few, level])
        others.append(solve_held(rows, right[:, None], error, head.found)[:, 0])
    every = np.concatenate([head.found, np.reshape(others, (-1, rank))])
    places = np.column_stack([seen.anchors, np.ones(len(seen.anchors))])
    queries = np.linalg.solve(places, every).T
    constant = solve_constant(seen, number, keys, turns, every, error)
    return balance(basis.T @ np.column_stack([keys, constant]), inverse @ queries)


def solve_constant(
    seen: NearScores,
    number: int,
    keys: Float[Array, "r d"],
    turns: Float[Array, "r r r"],
    queries: Float[Array, "n r"],
    error: float,
) -> Float[Array, " r"]:
    """What keys have beside the tokens, as far as it turns, from the first anchors' queries."""
    count, rank = queries.shape
    lines = np.einsum("ipq,nq->nip", turns - np.eye(rank), queries)
    rest = seen.levels[number, :count] - np.einsum(
        "nd,pd,nip->ni", seen.anchors[:count], keys, lines
    )
    cut = max(10.0 * error, 1e-6)
    found = np.linalg.lstsq(lines.reshape(-1, rank), rest.ravel(), rcond=cut)[0]
    return np.asarray(found)


def solve_held(
    rows: Float[Array, "n r"], right: Float[Array, "n k"], error: float, like: Float[Array, "m r"]
) -> Float[Array, "r k"]:
    """Least squares solutions for a right side with this standard error, of vectors whose entries
    are of the size of others like them: what rows hardly show stays small."""
    sizes = np.sqrt((like**2).mean(axis=0))
    held = np.concatenate([rows * sizes, TYPICAL * error * np.eye(rows.shape[1])])
    full = np.concatenate([right, np.zeros((rows.shape[1], right.shape[1]))])
    return np.asarray(sizes[:, None] * np.linalg.lstsq(held, full, rcond=None)[0])


def rotate(frequencies: Float[Array, " n"], distance: int) -> Float[Array, "r r"]:
    """The turn of so many steps in coordinates of pairs."""
    found = np.zeros((2 * len(frequencies), 2 * len(frequencies)))
    for n, angle in enumerate(frequencies * distance):
        cos, sin = np.cos(angle), np.sin(angle)
        found[2 * n : 2 * n + 2, 2 * n : 2 * n + 2] = [[cos, sin], [-sin, cos]]
    return found


def balance(
    keys: Float[Array, "p e"], queries: Float[Array, "p e"]
) -> tuple[Float[Array, "p e"], Float[Array, "p e"]]:
    """Parts of complex keys and queries of about one size."""
    queries = queries.copy()
    queries[1::2] *= -1.0
    sizes = [np.linalg.norm(part.reshape(len(part) // 2, -1), axis=1) for part in (queries, keys)]
    factors = np.repeat(np.sqrt(sizes[0] / np.maximum(sizes[1], TINY)), 2)[:, None]
    return keys * factors, queries / factors


def fit_law(angles: Float[Array, "heads n"], reach: int) -> Float[Array, " n"] | None:
    """Frequencies of all heads: the law start base^(-j / n) where the clear ones follow it; a base
    of few digits, if it explains them as well. None where a pair is not seen at all."""
    usual = np.median(angles, axis=0)
    spread = np.median(np.abs(angles - usual), axis=0) * 1.5 + 1e-3 / reach
    clear = usual > DETECTION * spread
    if clear.sum() < 2 or not clear[0]:
        return None
    count = np.arange(len(usual))
    doubt = (spread / np.maximum(usual, TINY))[clear]
    slope, start = np.polyfit(count[clear], np.log(usual[clear]), 1, w=1.0 / doubt)
    for digits in (1, 2, 3):
        base = float(f"{np.exp(-slope * len(count)):.{digits - 1}e}")
        law = base ** (-count / len(count))
        if (np.abs(law - usual)[clear] <= DETECTION * spread[clear]).all():
            return np.asarray(law)
    law = np.exp(start + slope * count)
    return np.asarray(law if (np.abs(law - usual) <= REJECTION * spread).all() else usual)


def choose_basis(turn: Float[Array, "r r"], frequencies: Float[Array, " n"]) -> Float[Array, "r r"]:
    """Coordinates in which the turn is one of pairs: the planes of the visible ones; the others
    share what is left in any order."""
    values, vectors = np.linalg.eig(turn)
    left = np.linalg.inv(vectors)
    free = [k for k in range(len(values)) if values[k].imag > 0]
    planes: dict[int, Array] = {}
    rows = []
    for number, frequency in enumerate(frequencies):
        gaps = [abs(np.angle(values[k]) / STEPS - frequency) for k in free]
        if not gaps or min(gaps) > 0.25 * frequency:
            break  # slower ones are seen no better
        k = free.pop(int(np.argmin(gaps)))
        planes[number] = np.column_stack([vectors[:, k].real, vectors[:, k].imag])
        rows += [left[k].real, left[k].imag]
    slow = np.linalg.svd(np.array(rows))[2][len(rows) :].T if rows else np.eye(len(turn))
    for place, number in enumerate(range(len(planes), len(frequencies))):
        planes[number] = slow[:, 2 * place : 2 * place + 2]
    return np.concatenate([planes[n] for n in range(len(frequencies))], axis=1)
