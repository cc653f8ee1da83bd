"""Rotary positions fitted to all log-ratios of weights at once.

Statement.  Stage by stage, frequencies see a few signals only, keys one anchor, and queries inherit
            the errors of both: a pair that hardly turns loses most of its digits on the way. Least
            squares over all log-ratios that were paid for lose none of them.
Algebra.    A log-ratio is s(D; x, b) - log L, L the sum over the copies of the anchor b. Its
            derivatives are those of s, bilinear in keys and queries, less their mean over the
            copies. Heads share nothing but the frequencies: Gauss-Newton eliminates the unknowns of
            each head by a QR decomposition. The gauge is fixed by rows of their own: queries stay
            one at the first anchor, and what does not turn moves its keys outside of their span.
When it fails.  It does not leave the start by more than two or three steps; with angles rounded to
            float32 the frequencies are known exactly and stay.
Source.     Keyhole's own; docs/methods/positions.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.linalg import solve_triangular

from keyhole.arrays import TINY, Array, Float, Int
from keyhole.learners.positions.soft import Ratios


@dataclass(frozen=True, eq=False)
class Waves:
    """How pairs turn. `single`: angle, cosine and sine of every place are rounded to float32."""

    frequencies: Float[Array, " n"]
    single: bool = False

    def turn(self, distances: Array, last: int) -> Array:
        """e^{i t D}, (distances, n), before an anchor at the place `last`, counted from zero."""
        if not self.single:
            return np.exp(1j * np.outer(distances, self.frequencies))
        anchor, tokens = (self.round_waves(p) for p in (np.array([last]), last - distances))
        return np.asarray(anchor * tokens.conj())

    def round_waves(self, places: Array) -> Array:
        """Computed in float64 from the angle in float32: the box's own functions differ from that
        by an ulp here and there."""
        angles = np.multiply.outer(
            np.asarray(places, np.float32), self.frequencies.astype(np.float32)
        ).astype(np.float64)
        cos, sin = (wave(angles).astype(np.float32).astype(float) for wave in (np.cos, np.sin))
        return np.asarray(cos + 1j * sin)


@dataclass(frozen=True, eq=False)
class Rotary:
    """Keys and queries as rows of real and imaginary parts on [x; 1], as in models.Position."""

    frequencies: Float[Array, " n"]
    keys: Float[Array, "heads pairs e"]
    queries: Float[Array, "heads pairs e"]
    scores: Float[Array, "heads d e"] | None = None  # [W | c] of the dimensions that do not turn
    single: bool = False  # angles are those of float32


@dataclass(frozen=True, eq=False)
class Asked:
    """Tokens at distances before one anchor, all other places up to the farthest of them copies of
    it, and the log-ratios of their weights by query, head and token."""

    anchor: Float[Array, " d"]
    tokens: Float[Array, "n m d"]
    distances: Int[Array, " m"]
    ratios: Ratios

    @property
    def copies(self) -> Int[Array, " k"]:
        return np.setdiff1d(np.arange(int(self.distances.max()) + 1), self.distances)


@dataclass(frozen=True, eq=False)
class HeadUnknowns:
    """Keys and queries of one head that turn (real and imaginary parts in turn), and those that do
    not: keys (d, inner), queries (inner, e)."""

    keys: Float[Array, "p e"]
    queries: Float[Array, "p e"]
    still_keys: Float[Array, "d inner"]
    still_queries: Float[Array, "inner e"]

    def parts(self) -> tuple[Array, ...]:
        return self.keys, self.queries, self.still_keys, self.still_queries

    def split(self, flat: Array) -> list[Array]:
        """A vector of all unknowns in the shapes of the parts."""
        cuts = np.cumsum([part.size for part in self.parts()])[:-1]
        return [
            piece.reshape(part.shape)
            for piece, part in zip(np.split(flat, cuts), self.parts(), strict=True)
        ]

    def move(self, step: Array) -> "HeadUnknowns":
        pairs = zip(self.parts(), self.split(step), strict=True)
        return HeadUnknowns(*(part + change for part, change in pairs))


@dataclass(frozen=True, eq=False)
class HeadEquations:
    """Residuals of one head in standard errors, their derivatives by the head's own unknowns as
    Q R diag(scale), and by the frequencies."""

    residual: Float[Array, " n"]
    q: Float[Array, "n u"]
    r: Float[Array, "u u"]
    scale: Float[Array, " u"]
    by_frequency: Float[Array, "n f"]

    def project(self, rows: Array) -> Array:
        """What the head's own unknowns cannot explain."""
        return np.asarray(rows - self.q @ (self.q.T @ rows))

    def solve(self, rows: Array) -> Array:
        solved = np.asarray(solve_triangular(self.r, self.q.T @ rows))
        return (solved.T / self.scale).T


def fit_rotary(start: Rotary, asked: Sequence[Asked], inner: int = 0) -> tuple[Rotary, Rotary]:
    """The least squares solution near the start, and its standard errors. The queries are one at
    the first of the anchors. `inner`: dimensions of a head that do not turn."""
    waves = Waves(start.frequencies, start.single)
    if start.single:  # the box's own functions differ from ours by an ulp here and there
        asked = [replace(group, ratios=group.ratios.round_scores()) for group in asked]
    heads = [split_head(start, h, inner) for h in range(len(start.keys))]
    steps = 3  # of Gauss-Newton: the start is good to six digits or more
    for _ in range(steps):
        equations = [linearise(part, waves, asked, h) for h, part in enumerate(heads)]
        shift, _ = solve_frequencies(equations, waves)
        heads = [
            part.move(-own.solve(own.residual + own.by_frequency @ shift))
            for part, own in zip(heads, equations, strict=True)
        ]
        waves = Waves(waves.frequencies + shift, waves.single)
    best = join_heads(start, waves, heads)
    equations = [linearise(part, waves, asked, h) for h, part in enumerate(heads)]
    return best, estimate_errors(best, heads, equations, waves)


def split_head(found: Rotary, head: int, inner: int) -> HeadUnknowns:
    width = found.keys.shape[2] - 1
    left, right = np.zeros((width, 0)), np.zeros((0, width + 1))
    if found.scores is not None:
        u, s, vt = np.linalg.svd(found.scores[head], full_matrices=False)
        left, right = u[:, :inner], s[:inner, None] * vt[:inner]
    return HeadUnknowns(found.keys[head], found.queries[head], left, right)


def join_heads(start: Rotary, waves: Waves, heads: list[HeadUnknowns]) -> Rotary:
    still = np.array([part.still_keys @ part.still_queries for part in heads])
    return Rotary(
        waves.frequencies,
        np.array([part.keys for part in heads]),
        np.array([part.queries for part in heads]),
        None if start.scores is None else still,
        waves.single,
    )


def linearise(part: HeadUnknowns, waves: Waves, asked: Sequence[Asked], head: int) -> HeadEquations:
    """All log-ratios of one head, in standard errors, and the rows that fix the gauge."""
    residuals, rows, turns = [], [], []
    for group in asked:
        count, last = len(group.tokens), int(group.distances.max())
        tokens = group.tokens.reshape(-1, group.tokens.shape[2])
        distances = np.tile(group.distances, count)
        scores, own, turned = differentiate(part, waves, tokens, group.anchor, distances, last)
        copies = np.broadcast_to(group.anchor, (len(group.copies), len(group.anchor)))
        levels, around, turning = differentiate(
            part, waves, copies, group.anchor, group.copies, last
        )
        top = float(levels.max())
        weights = np.exp(levels - top)
        level = top + np.log(weights.sum())
        weights /= weights.sum()
        errors = group.ratios.errors[:, head].ravel()
        residuals.append((scores - level - group.ratios.ratios[:, head].ravel()) / errors)
        rows.append((own - weights @ around) / errors[:, None])
        turns.append((turned - weights @ turning) / errors[:, None])
    gauge = fix_gauge(part, asked[0].anchor) * np.abs(np.concatenate(rows)).max()
    derivative = np.concatenate([*rows, gauge])
    nothing = np.zeros((len(gauge), len(waves.frequencies)))
    scale = np.maximum(np.linalg.norm(derivative, axis=0), TINY)
    q, r = np.linalg.qr(derivative / scale)
    return HeadEquations(
        np.concatenate([*residuals, np.zeros(len(gauge))]),
        q,
        r,
        scale,
        np.concatenate([*turns, nothing]),
    )


def differentiate(
    part: HeadUnknowns,
    waves: Waves,
    tokens: Float[Array, "n d"],
    anchor: Float[Array, " d"],
    distances: Int[Array, " n"],
    last: int,
) -> tuple[Float[Array, " n"], Float[Array, "n u"], Float[Array, "n f"]]:
    """Scores of tokens before an anchor at the place `last`, and their derivatives by the unknowns
    of the head and by the frequencies."""
    with_one, anchored = np.column_stack([tokens, np.ones(len(tokens))]), np.append(anchor, 1.0)
    turns = waves.turn(distances, last)
    keys, queries = with_one @ part.keys.T, part.queries @ anchored
    turned_keys = turns * (keys[:, ::2] + 1j * keys[:, 1::2])
    turned_queries = turns * (queries[::2] + 1j * queries[1::2])
    terms = turned_keys * (queries[::2] + 1j * queries[1::2])
    by_key = np.einsum("np,ne->npe", take_parts(turned_queries), with_one)
    by_query = np.einsum("np,e->npe", take_parts(turned_keys), anchored)
    still, answer = tokens @ part.still_keys, part.still_queries @ anchored
    blocks = (
        by_key,
        by_query,
        np.einsum("nd,i->ndi", tokens, answer),
        np.einsum("ni,e->nie", still, anchored),
    )
    flat = np.concatenate([block.reshape(len(tokens), -1) for block in blocks], axis=1)
    return terms.real.sum(axis=1) + still @ answer, flat, -distances[:, None] * terms.imag


def take_parts(numbers: Array) -> Array:
    """Derivatives of Re(number z) by the real and imaginary parts of z, in turn."""
    parts = np.empty((len(numbers), 2 * numbers.shape[1]))
    parts[:, ::2], parts[:, 1::2] = numbers.real, -numbers.imag
    return parts


def fix_gauge(part: HeadUnknowns, anchor: Float[Array, " d"]) -> Float[Array, "k u"]:
    """Rows that keep the turning queries at the first anchor, and the span of the still keys."""
    pairs, inner = len(part.queries), part.still_keys.shape[1]
    before, anchored = part.keys.size, np.append(anchor, 1.0)
    queries = np.kron(np.eye(pairs), anchored)
    still = np.kron(part.still_keys.T, np.eye(inner))
    rows = np.zeros((pairs + inner**2, sum(block.size for block in part.parts())))
    rows[:pairs, before : before + queries.shape[1]] = queries
    start = before + part.queries.size
    rows[pairs:, start : start + still.shape[1]] = still
    return rows


def solve_frequencies(
    equations: list[HeadEquations], waves: Waves
) -> tuple[Float[Array, " f"], Float[Array, "f f"]]:
    """The step of the frequencies, and their covariance."""
    count = len(waves.frequencies)
    if waves.single:
        return np.zeros(count), np.zeros((count, count))
    rows = np.concatenate([own.project(own.by_frequency) for own in equations])
    rest = np.concatenate([own.project(own.residual) for own in equations])
    scale = np.maximum(np.linalg.norm(rows, axis=0), TINY)
    inverse = np.linalg.pinv(rows / scale) / scale[:, None]
    return -inverse @ rest, inverse @ inverse.T


def estimate_errors(
    best: Rotary, heads: list[HeadUnknowns], equations: list[HeadEquations], waves: Waves
) -> Rotary:
    """Standard errors of the parts; none is smaller than the usual one of its row."""
    _, covariance = solve_frequencies(equations, waves)
    root = np.linalg.cholesky(covariance) if covariance.any() else covariance
    found: list[list[Array]] = []
    for part, own in zip(heads, equations, strict=True):
        inverse = solve_triangular(own.r, np.eye(len(own.r))) / own.scale[:, None]
        pulled = own.solve(own.by_frequency @ root)
        spread = np.sqrt((inverse**2).sum(axis=1) + (pulled**2).sum(axis=1))
        found.append(part.split(spread))
    # standard errors of log-ratios are bounds: they may be too wide, and are not narrowed
    rows = sum(len(own.residual) for own in equations)
    unknowns = sum(own.r.shape[0] for own in equations)
    cost = sum(float(own.residual @ own.residual) for own in equations)
    factor = np.sqrt(max(1.0, cost / max(1, rows - unknowns)))
    keys, queries, left, right = (
        np.array([factor * parts[place] for parts in found]) for place in range(4)
    )
    keys, queries = (
        np.maximum(s, np.sqrt((s**2).mean(axis=2, keepdims=True))) for s in (keys, queries)
    )
    scores = None
    if best.scores is not None:
        scores = np.array(
            [
                np.sqrt(a**2 @ part.still_queries**2 + part.still_keys**2 @ b**2)
                for part, a, b in zip(heads, left, right, strict=True)
            ]
        )
    frequencies = factor * np.sqrt(np.diag(covariance))
    return Rotary(frequencies, keys, queries, scores)
