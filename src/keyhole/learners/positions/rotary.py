"""Rotary positions: keys, queries and frequencies of every head, nothing known of them.

Statement.  s_h(D) = sum_j Re( e^{i t_j D} k_hj(x) q_hj(y) ), k and q affine, is recovered with its
            frequencies t_j from about 2d + 2 + (r + 2) / H soft queries behind the value maps: up
            to one complex factor per pair and head, all that can be known.
Queries.    (1) At one anchor a, tokens a + F_k at r distances that reach far, every direction F_k
            at every distance. (2) Tokens at r other distances, moved by a few common vectors. (3)
            One query at each of d further anchors, tokens next to each other.
Algebra.    (1) gives p_h(D) = dS/dx at r distances: with q_h(a) = 1 it is the sum over j of
            cos(t_j D) Re k_j - sin(t_j D) Im k_j. (2) extends some functionals of p_h to 2r
            distances, where they have rank r: t is a frequency where cos(t D) and sin(t D) are
            orthogonal to what they leave out. Constants: the copies of a sum to L, an equation in
            one unknown with at most two roots, of which (2) names the right one. (3) is linear in
            q_h. Libraries compute angles, cosines and sines in float32, by place: where exact
            waves leave the span and rounded ones do not, the frequencies are float32 numbers, and
            the equations have the rounded waves.
When it fails.  Slow pairs turn too little within the longest sequence: digits are lost like the
            reciprocal of the angle that the slowest pair makes. Equal frequencies.
Source.     Keyhole's own; docs/methods/positions.md.
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import qr
from scipy.optimize import brentq, minimize_scalar
from scipy.special import logsumexp

from keyhole.arrays import SINGLE_ROUNDOFF, Array, Float, Int
from keyhole.learners.base import Inconclusive, Refuted
from keyhole.learners.positions.rotary_fit import Asked, Rotary, Waves, fit_rotary
from keyhole.learners.positions.soft import NEGATIVE, Ratios, Reader, Saturated
from keyhole.learners.positions.values import ValueMaps
from keyhole.linalg.token_frames import spread_tokens
from keyhole.measurement.asker import Asker

ANCHOR = 0.5  # entries of the first anchor
HALVINGS = 12  # times that tokens come nearer to each other until no weight vanishes


@dataclass(frozen=True, eq=False)
class AtAnchor:
    """Queries at the first anchor and what they told."""

    anchor: Float[Array, " d"]
    frame: Float[Array, "k d"]  # directions, in blocks of r
    near: Int[Array, " r"]  # distances with all directions
    near_ratios: Ratios  # of every block and every shift of it, and of one block turned around
    far: Int[Array, " r"]  # further distances
    moves: Float[Array, "n d"]
    far_ratios: Ratios  # of the first block, and of the same moved

    @property
    def shifts(self) -> Int[Array, "r r"]:
        """Which direction of a block stands where, shift by shift."""
        rank = len(self.near)
        return (np.arange(rank)[:, None] + np.arange(rank)) % rank

    def constants(self) -> Float[Array, "heads r"]:
        """s_h(D; a, a) - log L at the near distances."""
        return 0.5 * (self.near_ratios.ratios[0] + self.near_ratios.ratios[-1])

    def slopes(self) -> Float[Array, "heads r d"]:
        """p_h at the near distances."""
        rank, shifts, constants = len(self.near), self.shifts, self.constants()
        along = np.zeros((*constants.shape, len(self.frame)))
        for number, ratios in enumerate(self.near_ratios.ratios[:-1]):
            block, shift = divmod(number, rank)
            along[:, np.arange(rank), block * rank + shifts[shift]] = ratios - constants
        flat = along.reshape(-1, len(self.frame)).T
        found = np.linalg.lstsq(self.frame, flat, rcond=None)[0]
        return np.asarray(found.T.reshape(*constants.shape, -1))

    def asked(self) -> tuple[Asked, Asked]:
        """The queries with all that was asked, at the near and at the far distances."""
        rank = len(self.near)
        blocks = self.frame.reshape(-1, rank, len(self.anchor))
        near = [*blocks[:, self.shifts].reshape(-1, rank, len(self.anchor)), -self.frame[:rank]]
        far = (
            self.frame[:rank]
            + np.concatenate([np.zeros((1, len(self.anchor))), self.moves])[:, None]
        )
        return (
            Asked(self.anchor, self.anchor + np.array(near), self.near, self.near_ratios),
            Asked(self.anchor, self.anchor + far, self.far, self.far_ratios),
        )

    def far_slopes(self) -> Float[Array, "n heads r"]:
        """move . p_h at the far distances."""
        return np.asarray(self.far_ratios.ratios[1:] - self.far_ratios.ratios[0])


@dataclass(frozen=True, eq=False)
class FirstAnchor:
    """What was measured before the first anchor, and how far tokens are from anchors."""

    reader: Reader
    at: AtAnchor
    size: float


def measure_first_anchor(
    ask: Asker, rng: np.random.Generator, values: ValueMaps, longest: int | None
) -> FirstAnchor | Refuted | Inconclusive:
    """(1) and (2); `longest` is the longest sequence that may be asked."""
    rank = values.ranks[0]
    if rank % 2 or len(set(values.ranks)) > 1:
        return Inconclusive("rotary positions need heads of one even rank")
    # slow pairs come with many dimensions: 512 places for each of a head
    farthest = 4096  # distance that is asked at most
    reach = min(512 * rank, farthest, (longest or farthest + 1) - 1)
    if reach < 2 * rank:
        return Inconclusive("sequences are too short for as many distances as there are pairs")
    near, far = choose_distances(rank, reach, rng)
    reader, size, negative = Reader(ask, values), 1.0, True
    for _ in range(HALVINGS):
        try:
            return FirstAnchor(reader, measure_at_anchor(reader, rng, near, far, size), size)
        except Saturated as seen:
            size, negative = 0.5 * size, negative and seen.negative
    if negative:
        return Refuted(NEGATIVE)
    return Inconclusive("no tokens are so near to the anchor that every weight shows")


def learn_rotary(
    first: FirstAnchor, rng: np.random.Generator
) -> tuple[Rotary, Rotary] | Inconclusive:
    """Rotary positions of which all dimensions turn, and their standard errors."""
    reader, at, size = first.reader, first.at, first.size
    frequencies = find_frequencies(at, len(at.near) // 2)
    if frequencies is None:
        return Inconclusive("the scores over distances are no sum of as many rotations")
    waves = recognise_rounding(at, frequencies)
    keys = solve_keys(at, waves)
    others = measure_others(reader, rng, waves, keys, at.anchor, size)
    if others is None:
        return Inconclusive("no tokens are so near to the anchors that every weight shows")
    queries = solve_queries(at, others, waves, keys)
    start = Rotary(waves.frequencies, keys, queries, single=waves.single)
    return fit_rotary(start, [*at.asked(), *others])


def choose_distances(
    rank: int, reach: int, rng: np.random.Generator
) -> tuple[Int[Array, " r"], Int[Array, " r"]]:
    """Distances at which usual frequencies are told apart best, and as many others spread evenly
    over the decades, with all residues modulo small numbers."""
    usual_base = 1e4  # distances are chosen for its frequencies; others are found as well
    usual = usual_base ** (-np.arange(rank // 2) / (rank // 2))
    candidates = np.arange(1, reach + 1)
    turns = np.outer(usual, candidates)
    _, _, order = qr(np.concatenate([np.cos(turns), np.sin(turns)]), pivoting=True, mode="economic")
    near = np.sort(candidates[order[:rank]])
    left = np.setdiff1d(candidates, near)
    # distances that agree modulo one of these cannot tell mirrored frequencies
    residues = (2, 3, 4, 5)
    for _ in range(1000):
        share = np.exp(rng.uniform(0.0, np.log(reach), 8 * rank)).astype(int)
        far = np.unique(left[np.searchsorted(left, share).clip(0, len(left) - 1)])
        far = np.sort(rng.permutation(far)[:rank])
        every = np.concatenate([near, far])
        mixed = all(len(set(every % q)) == q for q in residues)
        if len(far) == rank and mixed:
            return near, far
    return near, np.sort(rng.permutation(left)[:rank])


def measure_at_anchor(
    reader: Reader, rng: np.random.Generator, near: Array, far: Array, size: float
) -> AtAnchor:
    """(1) and (2): all directions at the near distances, a few moves at the far ones."""
    values, rank = reader.values, len(near)
    width = reader.ask.width
    bases = [np.linalg.qr(ins)[0] for ins in values.ins]
    blocks = -(-width // rank)
    frame = size * spread_tokens(bases, rank, blocks, rng).T  # rows
    anchor = size * ANCHOR * rng.standard_normal(width)
    alone = reader.ask(anchor[None, None], "scores")[0]
    shifts = (np.arange(rank)[:, None] + np.arange(rank)) % rank
    tokens = [anchor + frame[b * rank : (b + 1) * rank][shifts] for b in range(blocks)]
    opposite = anchor - frame[:rank]
    near_ratios = reader.log_ratios(anchor, alone, np.concatenate([*tokens, opposite[None]]), near)
    spare = 2  # signals beyond their rank that show the rank
    count = -(-(rank + spare) // values.heads)
    moves = size * rng.standard_normal((count, width)) / np.sqrt(width)
    still = anchor + frame[:rank]
    moved = np.concatenate([still[None], still + moves[:, None]])
    far_ratios = reader.log_ratios(anchor, alone, moved, far)
    return AtAnchor(anchor, frame, near, near_ratios, far, moves, far_ratios)


def collect_signals(at: AtAnchor) -> Float[Array, "k m"]:
    """Functionals of the scores over all distances, of length one."""
    known = np.einsum("nd,hrd->nhr", at.moves, at.slopes())
    signals = np.concatenate([known, at.far_slopes()], axis=2).reshape(-1, 2 * len(at.near))
    scale = np.linalg.norm(signals, axis=1, keepdims=True)
    return np.asarray(signals / np.where(scale > 0, scale, 1.0))


def contradicts_rotation(at: AtAnchor) -> bool:
    """Whether scores over the distances have more dimensions than a head, or are constant though
    the order of the tokens matters: then no keys turn with their places alone."""
    signals = collect_signals(at)
    sizes = np.linalg.svd(signals, compute_uv=False)
    clear = 1e-4  # relative size of a dimension too many that neither noise nor float32 explains
    slopes = at.slopes()
    changing = np.abs(slopes - slopes.mean(axis=1, keepdims=True)).max()
    still = 1e-6  # relative change over the near distances that is none
    constant = changing < still * np.abs(slopes).max()
    return bool(sizes[len(at.near)] > clear * sizes[0] or constant)


def span_of_signals(at: AtAnchor, count: int, constant: bool) -> tuple[Array, Array]:
    """Distances, and what the scores over them leave out, given the number of pairs, and whether
    constants are among them."""
    _, _, vt = np.linalg.svd(collect_signals(at), full_matrices=True)
    return np.concatenate([at.near, at.far]).astype(float), vt[2 * count + constant :]


def find_frequencies(at: AtAnchor, count: int, constant: bool = False) -> Float[Array, " n"] | None:
    """Frequencies whose cosines and sines lie in what the signals span."""
    distances, outside = span_of_signals(at, count, constant)
    longest = float(distances.max())
    slow = np.exp(np.arange(np.log(1e-3 / longest), np.log(1.0 / longest), 0.1))
    step = 0.15  # of the search for frequencies, in radians at the longest distance
    grid = np.concatenate([slow, np.arange(1.0 / longest, np.pi, step / longest)])
    misfit = rotation_misfit(grid, distances, outside)
    inner = np.flatnonzero((misfit[1:-1] <= misfit[:-2]) & (misfit[1:-1] <= misfit[2:])) + 1
    low, high = grid[inner - 1], grid[inner + 1]
    refined = refine_frequencies(grid[inner], distances, outside, low, high)
    refined = refined[(low < refined) & (refined < high)]
    left = rotation_misfit(refined, distances, outside)
    order = np.argsort(left)
    if len(order) < count:
        return None
    clear = 1e-3  # misfit of a frequency, relative to the best that is none
    if len(order) > count and left[order[count - 1]] > clear * left[order[count]]:
        return None
    return np.sort(refined[order[:count]])[::-1]


def recognise_rounding(
    at: AtAnchor, frequencies: Float[Array, " n"], constant: bool = False
) -> Waves:
    """Whether angles are exact or those of float32: exact waves then leave the span by more than
    the noise of the log-ratios, and rounded ones by what two libraries differ."""
    distances, outside = span_of_signals(at, len(frequencies), constant)
    exact = float(rotation_misfit(frequencies, distances, outside).sum())
    doubt = np.median(at.far_ratios.errors) / np.median(np.abs(at.far_slopes()))
    ulp = SINGLE_ROUNDOFF**2 * len(frequencies)  # misfits are squares
    noisy = 1e2  # misfit that noise may cause, in that of one log-ratio, before it is squared
    if exact <= max(ulp / 16.0, (noisy * doubt) ** 2):
        return Waves(frequencies)
    rounded, misfit = round_frequencies(at, frequencies, constant)
    if misfit > 16.0 * ulp:
        return Waves(frequencies)
    law = follow_base(rounded.frequencies, int(max(at.near.max(), at.far.max())))
    if law is not None:  # one number explains them all, the slow ones too, which tell little
        lawful, misfit = round_frequencies(at, law, constant)
        rounded = lawful if misfit <= 16.0 * ulp else rounded
    return rounded


def follow_base(frequencies: Float[Array, " n"], reach: int) -> Float[Array, " n"] | None:
    """The law base^(-j / n) times one number that the frequencies follow, as far as those tell that
    turn within the distances up to `reach`; None where these are too few. Bases that people choose
    have few digits."""
    count = np.arange(len(frequencies))
    telling = np.minimum(1.0, (frequencies * reach) ** 2) ** 2
    if (telling > 0.5).sum() < 3:
        return None
    slope, start = np.polyfit(count, np.log(frequencies), 1, w=telling)
    round_base = float(f"{np.exp(-slope * len(count)):.3g}")
    rounded = -np.log(round_base) / len(count)
    rounding = 4.0 * SINGLE_ROUNDOFF  # relative, of frequencies that are float32 numbers
    if abs(start) <= rounding and abs(rounded - slope) <= rounding:
        slope, start = rounded, 0.0
    return np.asarray(np.exp(start + slope * count))


def round_frequencies(
    at: AtAnchor, frequencies: Float[Array, " n"], constant: bool
) -> tuple[Waves, float]:
    """The float32 numbers near the frequencies whose rounded waves lie in the span, and by how
    much all of them leave it."""
    _, outside = span_of_signals(at, len(frequencies), constant)
    # float32 numbers on both sides, the nearest first: slow frequencies tell them barely
    near = np.array(sorted(range(-8, 9), key=abs))
    chosen, total = [], 0.0
    for frequency in frequencies.astype(np.float32):
        candidates = frequency + near * np.spacing(frequency)
        waves = Waves(candidates.astype(float), single=True)
        turned = np.concatenate([waves.turn(d, int(d.max())) for d in (at.near, at.far)])
        misfits = np.zeros(len(near))
        for part in (turned.real, turned.imag):
            misfits += ((outside @ part) ** 2).sum(axis=0) / (part**2).sum(axis=0)
        # no farther away than an ulp of the waves, squared, is worth
        best = int(np.argmax(misfits <= misfits.min() + SINGLE_ROUNDOFF**2))
        chosen.append(waves.frequencies[best])
        total += float(misfits[best])
    return Waves(np.array(chosen), single=True), total


def rotation_misfit(
    frequencies: Float[Array, " n"], distances: Float[Array, " m"], outside: Float[Array, "k m"]
) -> Float[Array, " n"]:
    """How much of cos(t D) and of sin(t D) lies outside the span, each relative to its size."""
    total = np.zeros(len(frequencies))
    for start in range(0, len(frequencies), 4096):
        part = slice(start, start + 4096)
        angles = np.outer(frequencies[part], distances)
        for waves in (np.cos(angles), np.sin(angles)):
            left = ((waves @ outside.T) ** 2).sum(axis=1)
            total[part] += left / (waves**2).sum(axis=1)
    return total


def refine_frequencies(
    start: Float[Array, " n"],
    distances: Float[Array, " m"],
    outside: Float[Array, "k m"],
    low: Float[Array, " n"],
    high: Float[Array, " n"],
) -> Float[Array, " n"]:
    """Gauss-Newton in one unknown each, between bounds: cosine and sine leave the span."""
    found = start.copy()
    active = np.arange(len(found))
    for _ in range(20):
        angles = np.outer(found[active], distances)
        rest, slope = np.zeros((2, len(active), 2 * len(outside)))
        for place, wave, change in ((0, np.cos, lambda a: -np.sin(a)), (1, np.sin, np.cos)):
            own = slice(place * len(outside), (place + 1) * len(outside))
            waves = wave(angles)
            sizes = np.linalg.norm(waves, axis=1, keepdims=True)
            rest[:, own] = (waves @ outside.T) / sizes
            slope[:, own] = ((distances * change(angles)) @ outside.T) / sizes
        steps = (rest * slope).sum(axis=1) / (slope**2).sum(axis=1)
        found[active] = np.clip(found[active] - steps, low[active], high[active])
        active = active[np.abs(steps) > 1e-16 * np.abs(found[active])]
        if not len(active):
            break
    return found


def wave_table(waves: Waves, distances: Array, last: int) -> Float[Array, "m p"]:
    """Rows [cos, -sin, cos, -sin, ...]: a score is the row times the parts of k_j where q_j = 1.
    The anchor stands at the place `last`."""
    turned = waves.turn(distances, last)
    table = np.empty((len(distances), 2 * len(waves.frequencies)))
    table[:, ::2], table[:, 1::2] = turned.real, -turned.imag
    return table


def solve_keys(at: AtAnchor, waves: Waves) -> Float[Array, "heads p e"]:
    """Keys in units of the queries at the first anchor."""
    last, far_last = int(at.near.max()), int(at.far.max())
    inverse = np.linalg.inv(wave_table(waves, at.near, last))
    slopes, constants = at.slopes(), at.constants()
    filled, others = (np.setdiff1d(np.arange(d.max() + 1), d) for d in (at.near, at.far))
    copies = wave_table(waves, filled, last)
    far_copies, far = (wave_table(waves, d, far_last) for d in (others, at.far))
    growing = inverse @ np.ones(len(at.near))
    keys = []
    for h in range(len(slopes)):
        linear, fixed = inverse @ slopes[h], inverse @ constants[h]
        fits = []
        for level in copy_levels(copies @ fixed, copies @ growing):
            own = fixed + level * growing  # parts of k_j(a)
            moved = at.frame[: len(at.near)] @ linear.T + own
            expected = np.sum(far * moved, axis=1) - logsumexp(far_copies @ own)
            fits.append((float(np.abs(expected - at.far_ratios.ratios[0, h]).max()), own))
        own = min(fits, key=lambda fit: fit[0])[1]
        keys.append(np.column_stack([linear, own - linear @ at.anchor]))
    return np.array(keys)


def copy_levels(fixed: Float[Array, " n"], growing: Float[Array, " n"]) -> list[float]:
    """All t with t = log sum exp(fixed + t growing), which is convex in t: at most two."""

    def excess(level: float) -> float:
        return float(logsumexp(fixed + level * growing)) - level

    levels = 1e3  # size within which the logarithm of the copies' sum is sought
    lowest = float(minimize_scalar(excess, bounds=(-levels, levels), method="bounded").x)
    if excess(lowest) >= 0:  # the roots coincide within rounding
        return [lowest]
    return [
        float(brentq(excess, *sorted((lowest, end)), xtol=1e-14, rtol=1e-15))
        for end in (-levels, levels)
        if excess(end) > 0
    ] or [lowest]


def evaluate(rows: Float[Array, "p e"], tokens: Float[Array, "*n d"]) -> Array:
    """Parts of the affine forms at tokens."""
    return np.asarray(tokens @ rows[:, :-1].T + rows[:, -1])


def query_equations(
    waves: Waves, keys: Float[Array, "p e"], anchor: Array, tokens: Array, distances: Array
) -> Float[Array, "*sets m p"]:
    """Rows of score(token) - score(anchor) in the real and imaginary parts of q_j; no token stands
    before the farthest of these."""
    last = int(distances.max())
    parts = evaluate(keys, tokens)
    turned = (parts[..., ::2] + 1j * parts[..., 1::2]) * waves.turn(distances, last)
    own = evaluate(keys, anchor)
    turned = turned - (own[::2] + 1j * own[1::2]) * waves.turn(np.zeros(1), last)
    rows = np.empty((*tokens.shape[:-1], 2 * len(waves.frequencies)))
    rows[..., ::2], rows[..., 1::2] = turned.real, -turned.imag
    return rows


def measure_others(
    reader: Reader,
    rng: np.random.Generator,
    waves: Waves,
    keys: Float[Array, "heads p e"],
    first: Float[Array, " d"],
    size: float,
) -> list[Asked] | None:
    """(3): one query at each of d further anchors; None where weights vanish everywhere."""
    width, values = reader.ask.width, reader.values
    distances = np.arange(1, values.ranks[0] + 1)
    found = []
    for step in np.linalg.qr(rng.standard_normal((width, width)))[0]:
        reach, near = float(np.linalg.norm(first)), size
        for _ in range(HALVINGS):
            anchor = first + reach * step
            tokens = choose_tokens(reader, rng, waves, keys, anchor, distances, near)[None]
            try:
                ratios = reader.log_ratios(anchor, None, tokens, distances)
            except Saturated:
                reach, near = -0.7 * reach, 0.7 * near
                continue
            found.append(Asked(anchor, tokens, distances, ratios))
            break
        else:
            return None
    return found


def solve_queries(
    at: AtAnchor, others: list[Asked], waves: Waves, keys: Float[Array, "heads p e"]
) -> Float[Array, "heads p e"]:
    """The queries at every anchor, one at the first, and from them everywhere."""
    heads, parts, size = keys.shape
    found = np.zeros((len(others) + 1, heads, parts))
    found[0, :, ::2] = 1.0
    for n, asked in enumerate(others):
        for h in range(heads):
            rows = query_equations(waves, keys[h], asked.anchor, asked.tokens[0], asked.distances)
            found[n + 1, h] = np.linalg.solve(rows, asked.ratios.ratios[0, h])
    places = np.array([at.anchor, *(asked.anchor for asked in others)])
    places = np.column_stack([places, np.ones(len(places))])
    solved = np.linalg.solve(places, found.reshape(len(places), -1))
    return np.asarray(solved.T.reshape(heads, parts, size))


def choose_tokens(
    reader: Reader,
    rng: np.random.Generator,
    waves: Waves,
    keys: Array,
    anchor: Array,
    distances: Array,
    size: float,
) -> Float[Array, "m d"]:
    """Tokens near the anchor for which the equations of the worst head are conditioned best."""
    rotations = 150  # sets of tokens of which the best conditioned is asked
    steps = np.linalg.qr(rng.standard_normal((rotations, len(anchor), len(distances))))[0]
    tokens = anchor + size * steps.transpose(0, 2, 1)
    worst = np.ones(rotations)
    for h, ins in enumerate(reader.values.ins):
        rows = query_equations(waves, keys[h], anchor, tokens, distances)
        seen = np.linalg.cond(steps.transpose(0, 2, 1) @ ins)
        worst = np.maximum(worst, np.linalg.cond(rows) * seen)
    return np.asarray(tokens[np.argmin(worst)])
