"""A real layer whose tokens are bounded in norm: no hard attention, so heads show as eigenvalues.

Statement. Layers with H heads of width r >= 3, H r = d = D and an invertible total value map M
are recovered from about 5d vector answers with tokens of any bounded norm.

Queries. (1) Length one: offset and M. (2) Pairs [x + u; x] around two points u: the Jacobian
J of F(u) = out([x + u; x]) - out([x]) by one-sided differences, 2d + 2. (3) Soft queries as
in learners/multi_head/vector_outputs, kept short.

Algebra. J M^-1 = sum_h s_h P_h + (rank H), P_h the projector onto the range of V_h along the
others and s_h = sigma(u . p_h): eigenvalue s_h with an eigenspace of dimension r - 1 inside the
range of V_h. Two points give the whole range; O = V^-1 M. The error of the differences is then
removed by defect correction: the model found predicts it, and the algebra is repeated on the
corrected Jacobian, without further queries.

When it fails. r < 3, H r < d, or heads whose s_h coincide at the points chosen (another pair of
points is tried); scalar answers. All these are left to learners/multi_head/random_queries.

Source. Keyhole's own; docs/learners/multi_head/learner.md.
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import Array, Float
from keyhole.errors import IllConditioned, WrongFamily
from keyhole.learners.base import Hypothesis
from keyhole.learners.multi_head.hypothesis import Claims, validated
from keyhole.learners.multi_head.value_maps import EXACT
from keyhole.learners.multi_head.vector_attempt import Vector
from keyhole.learners.multi_head.vector_outputs import assembled, finished, rms, without_noise
from keyhole.linalg.bases import random_directions
from keyhole.measurement.asking import Asker
from keyhole.models.attention import Attention, Head

STEP = 1e-4  # of the differences, relative to the radius: their error is corrected afterwards
SHORTER = 0.1  # steps of the next attempt: less to correct, which then settles, at a loss of digits
THIRD = 1 / 3  # anchor, point and tokens share the radius
NARROWEST = 3  # head width below which eigenspaces of two points cannot be matched
SINGULAR = 1e10  # condition of the total value map that leaves differences no digits
TIGHT = 0.05  # spread of a cluster of eigenvalues, relative to their range, that is still one head
CORRECTIONS = 15  # rounds of defect correction
SETTLED = 1e-11  # relative change of the scores at which it ends
RESTLESS = 1e-5  # relative change after the last round that means it never will
REPLICATES = 4


@dataclass
class Point:
    """A point u next to the anchor, and the differences of the answers around it."""

    at: Float[Array, " d"]
    slopes: Float[Array, "d outputs"]  # (F(u + h e_i) - F(u)) / h, i over the frame


def learn_bounded(ask: Asker, rng: np.random.Generator, claims: Claims) -> Hypothesis:
    """The whole recovery of a layer with bounded tokens."""
    radius, width = ask.oracle.spec.domain.radius, ask.width
    if not radius > 0:
        raise IllConditioned("the domain holds no ball around zero")
    frame = np.linalg.qr(rng.standard_normal((width, width)))[0]
    offset = ask(np.zeros((1, 1, width)), "values")[0]
    ask.offset = offset
    if ask.scalar or len(offset) != width:
        raise IllConditioned("answers are not vectors of the tokens' width")
    total = frame.T @ ask(radius * frame[:, None], "values") / radius
    if np.linalg.cond(total) > SINGULAR:
        raise IllConditioned(
            "the total value map is singular: bounded tokens cannot separate heads"
        )
    trouble: Exception | None = None
    for number in range(claims.attempts):
        try:
            step = STEP * SHORTER**number * radius
            attempt = Bounded(ask, rng, frame, total, radius, claims, step)
            model, errors = attempt.run(offset)
        except (IllConditioned, np.linalg.LinAlgError) as error:
            trouble = trouble if isinstance(trouble, WrongFamily) else error
            continue
        counterexample = validated(ask, model, errors, rng, radius)
        if counterexample is None:
            return finished(attempt.soft, model, errors, claims.heads)
        trouble = WrongFamily("the hypothesis disagrees with the box", counterexample)
    if isinstance(trouble, WrongFamily):
        raise trouble
    raise IllConditioned(f"bounded tokens did not separate the heads: {trouble}")


@dataclass
class Bounded:
    """One attempt around one anchor."""

    ask: Asker
    rng: np.random.Generator
    frame: Float[Array, "d d"]
    total: Float[Array, "d d"]
    radius: float
    claims: Claims
    step: float  # of the differences

    def run(self, offset: Array) -> tuple[Attention, Attention]:
        self.width, self.inverse = self.ask.width, np.linalg.inv(self.total)
        self.anchor = THIRD * self.radius * random_directions(self.rng, 1, self.width)[0]
        self.points = [self.point() for _ in range(2)]
        ranges = self.first_ranges([p.slopes for p in self.points])
        self.soft = self.prepared(ranges)
        self.soft.design()
        self.soft.wide_columns()
        self.soft.narrow_columns()
        scores, biases = self.soft.parameters()
        for _ in range(CORRECTIONS):
            slopes = [self.corrected(p, scores, biases) for p in self.points]
            ranges = self.next_ranges(slopes, ranges)
            before = scores
            scores, biases = self.reread(self.soft, ranges)
            change = float(np.linalg.norm(scores - before) / np.linalg.norm(scores))
            if not change > SETTLED:
                break
        if not change <= RESTLESS:
            raise IllConditioned("the correction of the differences does not settle")
        model = assembled(self.soft, scores, biases, offset)
        errors = self.error_bars(slopes, ranges, scores, biases, offset)
        return without_noise(model, errors)

    def point(self) -> Point:
        """Differences of F around a random point, by one-sided steps."""
        at = THIRD * self.radius * random_directions(self.rng, 1, self.width)[0]
        moved = np.concatenate([at[None], at + self.step * self.frame])
        last = np.broadcast_to(self.anchor, (len(moved), 1, self.width))
        tokens = np.concatenate([last + moved[:, None], last], axis=1)
        answers = self.ask(tokens, "slopes")
        return Point(at, self.frame.T @ ((answers[1:] - answers[0]) / self.step))

    def first_ranges(self, slopes: list[Array]) -> list[Array]:
        """Ranges of the V_h from the eigenspaces at both points, heads unknown."""
        spaces = [self.clusters(part @ self.inverse) for part in slopes]
        if len(spaces[0]) != len(spaces[1]):
            raise IllConditioned("the two points show different numbers of heads")
        overlap = np.array([[np.linalg.norm(a.T @ b) ** 2 for b in spaces[1]] for a in spaces[0]])
        rows, columns = linear_sum_assignment(-overlap)
        return [joined(spaces[0][i], spaces[1][j]) for i, j in zip(rows, columns, strict=True)]

    def clusters(self, matrix: Float[Array, "d d"]) -> list[Array]:
        """Eigenspaces of H equal groups of r - 1 eigenvalues, for the widest heads possible."""
        values, vectors = np.linalg.eig(matrix)
        order = np.argsort(values.real, kind="stable")
        values, vectors = values[order].real, vectors[:, order]
        counts = [self.claims.heads] if self.claims.heads else range(1, self.width // NARROWEST + 1)
        for heads in counts:
            if self.width % heads or self.width // heads < NARROWEST:
                continue
            size = self.width // heads - 1
            starts = disjoint_windows(values, size, heads)
            if starts is not None:
                return [orthonormal(vectors[:, s : s + size], size) for s in starts]
        raise IllConditioned("the eigenvalues form no clusters of equal size")

    def next_ranges(self, slopes: list[Array], ranges: list[Array]) -> list[Array]:
        """The same after correction: eigenspaces are those closest to the ranges known."""
        updated = []
        solved = [np.linalg.eig(part @ self.inverse) for part in slopes]
        duals = np.linalg.inv(np.concatenate(ranges, axis=1))
        cuts = np.cumsum([part.shape[1] for part in ranges])[:-1]
        for base, dual in zip(ranges, np.split(duals, cuts), strict=True):
            size = base.shape[1] - 1
            spaces = []
            for _, vectors in solved:
                inside = np.linalg.norm(base @ (dual @ vectors), axis=0)
                outside = np.linalg.norm(vectors - base @ (dual @ vectors), axis=0)
                best = np.argsort(outside / inside, kind="stable")[:size]
                spaces.append(orthonormal(vectors[:, best], size))
            updated.append(joined(*spaces))
        return updated

    def prepared(self, ranges: list[Array]) -> Vector:
        """The soft stage, with value maps from the ranges."""
        soft = Vector(self.ask, self.rng, self.frame, np.zeros((1, self.width)), None, None)
        soft.width, soft.care, soft.radius, soft.rough = self.width, EXACT, self.radius, True
        soft.ranks = [part.shape[1] for part in ranges]
        self.place(soft, ranges)
        return soft

    def place(self, soft: Vector, ranges: list[Array]) -> None:
        stacked = np.concatenate(ranges, axis=1)
        outs = np.linalg.solve(stacked, self.total)
        soft.ins, soft.total = ranges, self.total
        soft.outs = np.split(outs, np.cumsum(soft.ranks)[:-1])
        soft.condition = float(np.linalg.cond(stacked))
        soft.maps = np.stack([a @ b for a, b in zip(soft.ins, soft.outs, strict=True)])

    def reread(self, soft: Vector, ranges: list[Array]) -> tuple[Array, Array]:
        """The soft answers once more, with better value maps."""
        self.place(soft, ranges)
        soft.readers = [soft.weight_reader(group) for group in soft.groups]
        return soft.parameters()

    def corrected(self, point: Point, scores: Array, biases: Array) -> Float[Array, "d outputs"]:
        """The slopes, less the error that differences of this size make on the model."""
        keys = scores @ self.anchor + biases
        maps = self.soft.maps
        odds = keys @ point.at
        share = 1 / (1 + np.exp(-odds))
        values = np.einsum("d,hdo->ho", point.at, maps)
        exact = np.einsum("h,hdo->do", share, maps)
        exact += np.einsum("h,hd,ho->do", share * (1 - share), keys, values)
        steps = keys @ self.frame.T * self.step  # (h, d): change of the log-odds per step
        # sigma(a + e) - sigma(a) without cancellation
        change = share[:, None] * (1 - share[:, None]) * np.expm1(steps)
        change = change / (1 + share[:, None] * np.expm1(steps))
        moved = np.einsum("id,hdo->hio", self.frame, maps)
        crude = np.einsum("hi,ho->io", change / self.step, values)
        crude += np.einsum("hi,hio->io", share[:, None] + change, moved)
        return np.asarray(point.slopes + exact - self.frame.T @ crude)

    def error_bars(
        self, slopes: list[Array], ranges: list[Array], scores: Array, biases: Array, offset: Array
    ) -> Attention:
        """Spread over repetitions with perturbed slopes and answers."""
        loud = float(np.linalg.norm(self.total)) / np.sqrt(self.width) * self.radius
        level = np.hypot(self.ask.unit * loud, self.ask.additive)
        best = (scores, biases, self.soft.maps.copy())
        spread = [np.zeros_like(part) for part in best]
        for _ in range(REPLICATES):
            noisy = [s + 2 * level / self.step * self.rng.standard_normal(s.shape) for s in slopes]
            other = self.prepared(self.next_ranges(noisy, ranges))
            other.groups, other.wide = self.soft.groups, self.soft.wide
            other.score_ranks = self.soft.score_ranks
            other.blocks = [
                [
                    replace(b, answer=b.answer + level * self.rng.standard_normal(self.width))
                    for b in column
                ]
                for column in self.soft.blocks
            ]
            other.readers = [other.weight_reader(group) for group in other.groups]
            found = (*other.parameters(), other.maps)
            for total, a, b in zip(spread, found, best, strict=True):
                total += np.nan_to_num((a - b) ** 2, nan=np.inf)
        bars = [np.sqrt(part / REPLICATES) for part in spread]
        bars = [np.maximum(part, rms(part)) for part in bars]
        doubt = self.ask.unit * np.abs(offset) + self.ask.additive
        return Attention([Head(s, c, m) for s, c, m in zip(*bars, strict=True)], doubt)


def disjoint_windows(values: Float[Array, " n"], size: int, count: int) -> list[int] | None:
    """Starts of `count` disjoint windows of `size` neighbouring values, each tight; None where
    there are not so many."""
    spreads = values[size - 1 :] - values[: len(values) - size + 1]
    allowed = TIGHT * float(values[-1] - values[0]) / count
    chosen: list[int] = []
    for start in np.argsort(spreads, kind="stable"):
        if spreads[start] > allowed or len(chosen) == count:
            break
        if all(abs(int(start) - other) >= size for other in chosen):
            chosen.append(int(start))
    return sorted(chosen) if len(chosen) == count else None


def orthonormal(vectors: Array, size: int) -> Float[Array, "d k"]:
    """Real orthonormal basis of the span of (possibly complex) eigenvectors."""
    parts = np.concatenate([vectors.real, vectors.imag], axis=1)
    return np.asarray(np.linalg.svd(parts, full_matrices=False)[0][:, :size])


def joined(a: Float[Array, "d k"], b: Float[Array, "d k"]) -> Float[Array, "d r"]:
    """The space of dimension k + 1 that two spaces of dimension k span together."""
    both = np.concatenate([a, b], axis=1)
    return np.asarray(np.linalg.svd(both, full_matrices=False)[0][:, : a.shape[1] + 1])
