"""The algorithm of Chen and Li: sculpt a convex body around the scores out of agreeing examples.

Statement. Where all heads attend alike, a row shows their common pattern, and the pattern is a
linear statement about every score: y_a = x_b (W_1 + ... + W_m) says that every head, read at x_a,
prefers x_b to all other tokens of the example. Such inequalities hold for any consistent layer:
they are a result of their own, `Certificates`.

Queries. None; Boolean examples, at most two heads, outputs at every position.

Algebra. The paper's phases, each a function: `estimate_values` (regression of summed outputs on
summed inputs), `find_agreement` and `refine_values` (trimmed alternation on the rows where heads
agree), `certify`, `find_proxy` (the minimum-norm point of the body), `find_open_directions` (those
that the body leaves open), `bound_direction` (linear programs over the body), `build_net`
(candidates inside these bounds), then regression for the values, validation and refinement.

When it fails. Agreement gets rare with more heads, more tokens and weak attention: at scores of
standard deviation 5 next to nothing can be certified, and a hundred times more examples are needed
than the descent of examples/learner needs. Without certificates only the refinement is left.

Source. Chen, Li, "Provably learning a multi-head attention layer", STOC 2025 (arXiv 2402.04084).
"""

import itertools
import time
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog, nnls

from keyhole.arrays import Array, Float
from keyhole.errors import InvalidArgument
from keyhole.fitting.attention_rows import Rows, average_tokens, compute_patterns
from keyhole.fitting.initial_guess import draw_start
from keyhole.fitting.levenberg_marquardt import DescentOptions, descend, measure_label_power
from keyhole.fitting.variable_projection import project

GRID_HEADS = 2  # the net is a grid over pairs of points of the hull


@dataclass(frozen=True, eq=False)
class Certificates:
    """Read at `anchors`, every head of any consistent layer gives `preferred` a higher score than
    `others`: anchors . theta (preferred - others) > 0, row by row."""

    anchors: Float[Array, "n d"]
    preferred: Float[Array, "n d"]
    others: Float[Array, "n d"]

    def __len__(self) -> int:
        return len(self.anchors)

    def margins(self, score: Float[Array, "d d"]) -> Float[Array, " n"]:
        """Score differences under a head's `score` (keyhole's: x_i . score x_q); true if > 0."""
        return np.asarray(
            np.einsum("np,pq,nq->n", self.preferred - self.others, score, self.anchors)
        )

    def normals(self) -> Float[Array, "n dd"]:
        """The inequalities as vectors against theta = score^t, evenly thinned if many."""
        largest_body = 1500  # inequalities that take part in programs; all are reported
        keep = np.linspace(0, len(self) - 1, min(largest_body, len(self))).astype(int)
        steps = self.preferred[keep] - self.others[keep]
        return np.asarray((self.anchors[keep, :, None] * steps[:, None, :]).reshape(len(keep), -1))


@dataclass(frozen=True, eq=False)
class Agreement:
    """For every row: the token whose image is nearest, how near, and the next best distance."""

    token: Array  # (n, k)
    distance: Array
    runner_up: Array


@dataclass(frozen=True, eq=False)
class Sculpted:
    """What the phases left: the summed values, crude and refined, and the certificates."""

    crude: Float[Array, "d D"]
    values: Float[Array, "d D"]
    certificates: Certificates


@dataclass(frozen=True, eq=False)
class SculptedSearch:
    """The best fit after refinement, and what the phases before it left."""

    theta: Float[Array, "d m d"]
    relative: float  # squared residual relative to the labels
    restarts: int
    seconds: float
    residuals: dict[int, float]  # best relative squared residual by number of heads
    sculpted: Sculpted


def estimate_values(rows: Rows) -> Float[Array, "d D"]:
    """Phase 1: the sum of the heads' values, from summed outputs and summed inputs."""
    live = rows.weights[:, :, None]
    sums = rows.tokens.sum(axis=1)
    return np.asarray(np.linalg.lstsq(sums, _sum_outputs(rows, live), rcond=None)[0])


def _sum_outputs(rows: Rows, live: Array) -> Array:
    """Summed outputs, rows kept aside replaced by the mean of the example's others."""
    count = np.maximum(live.sum(axis=1), 1.0)
    return np.asarray((rows.targets * live).sum(axis=1) * rows.weights.shape[1] / count)


def find_agreement(rows: Rows, values: Float[Array, "d D"]) -> Agreement:
    """Phase 2: which rows look as if all heads attended to one token."""
    images = rows.tokens @ values
    cross = rows.targets @ images.transpose(0, 2, 1)
    own = np.einsum("nad,nad->na", rows.targets, rows.targets)
    theirs = np.einsum("nld,nld->nl", images, images)
    squares = np.maximum(own[:, :, None] - 2 * cross + theirs[:, None, :], 0.0)
    token = squares.argmin(axis=2)
    best = np.take_along_axis(squares, token[:, :, None], axis=2)
    same = (rows.tokens[:, :, None, :] == rows.tokens[:, None, :, :]).all(axis=3)
    twin = np.take_along_axis(same, token[:, :, None], axis=1)  # copies of the chosen token
    runner = np.where(twin, np.inf, squares).min(axis=2)
    chosen = np.take_along_axis(images, token[:, :, None], axis=1)
    exact = np.linalg.norm(rows.targets - chosen, axis=2)  # without the rounding of the expansion
    cancelled = 1e-6  # share of a squared output below which the expansion has too few digits
    distance = np.where(best[:, :, 0] < cancelled * own, exact, np.sqrt(best[:, :, 0]))
    distance = np.where(rows.weights > 0, distance, np.inf)
    return Agreement(token, distance, np.sqrt(runner))


def refine_values(rows: Rows, values: Float[Array, "d D"]) -> Float[Array, "d D"]:
    """Phase 3: alternate between the best rows for the values and the best values for the rows."""
    scale = float(np.sqrt(measure_label_power(rows) / max(rows.counted, 1)))
    exact_rows = 1e-10  # residual, relative to the outputs, at which trimming has found exact rows
    for share in (0.5, 0.3, 0.2, 0.1, 0.05, 0.02):  # of the rows
        for _ in range(10):
            seen = find_agreement(rows, values)
            cut = float(np.quantile(seen.distance[rows.weights > 0], share))
            if cut <= exact_rows * scale:
                return values
            fresh = _regress(rows, seen, seen.distance <= cut)
            if fresh is None:
                return values
            if np.allclose(fresh, values, rtol=0, atol=exact_rows * scale):
                break
            values = fresh
    return values


def _regress(rows: Rows, seen: Agreement, keep: Array) -> Array | None:
    """Values from the rows kept; None where their tokens do not span."""
    chosen = np.take_along_axis(rows.tokens, seen.token[:, :, None], axis=1)[keep]
    sizes = np.linalg.svd(chosen, compute_uv=False)
    # the singular values of a random design are about √n
    if len(chosen) < rows.width or sizes[-1] < 0.05 * np.sqrt(len(chosen)):
        return None
    return np.asarray(np.linalg.lstsq(chosen, rows.targets[keep], rcond=None)[0])


def certify(rows: Rows, values: Float[Array, "d D"]) -> Certificates:
    """Phase 2 again, with the refined values and a margin: what is certain about every head.

    The next token's image must be ten times as far. Nothing is certified unless two halves of the
    agreeing rows give the same summed values, to a hundredth.
    """
    seen = find_agreement(rows, values)
    size = float(np.linalg.norm(values)) / np.sqrt(values.shape[0])
    # distance of a certified row from its token's image, relative to the images' size
    clear_share = 1e-2
    clear = (seen.distance <= clear_share * size) & (seen.runner_up > 10.0 * clear_share * size)
    halves = []
    for part in (0, 1):
        keep = clear.copy()
        keep[part::2] = False
        halves.append(_regress(rows, seen, keep))
    first, second = halves
    d = rows.width
    if first is None or second is None:
        return Certificates(*(np.zeros((0, d)) for _ in range(3)))
    gap = max(float(np.linalg.norm(half - values)) for half in (first, second))
    if gap > 1e-2 * float(np.linalg.norm(values)):
        return Certificates(*(np.zeros((0, d)) for _ in range(3)))
    example, position = np.nonzero(clear)
    chosen = rows.tokens[example, seen.token[example, position]]
    lines = []
    for other in range(rows.tokens.shape[1]):
        rest = rows.tokens[example, other]
        differs = (rest != chosen).any(axis=1)
        anchor = rows.tokens[example, position]
        lines.append((anchor[differs], chosen[differs], rest[differs]))
    parts = (np.concatenate([line[i] for line in lines]) for i in range(3))
    return Certificates(*parts)


def find_proxy(body: Certificates) -> Float[Array, "d d"] | None:
    """Phase 4: the theta of least norm with all certified score differences at least one; None if
    there is none. Least-distance programming through non-negative least squares."""
    normals = body.normals()
    if not len(normals):
        return None
    system = np.vstack([normals.T, np.ones(len(normals))])
    target = np.zeros(len(system))
    target[-1] = 1.0
    multipliers, residual = nnls(system, target, maxiter=30 * system.shape[1])
    gap = system @ multipliers - target
    if residual <= 1e-9 or abs(gap[-1]) <= 1e-12:
        return None  # empty, or without a bound
    d = body.anchors.shape[1]
    return np.asarray((-gap[:-1] / gap[-1]).reshape(d, d))


def find_open_directions(body: Certificates, heads: int) -> Float[Array, "directions d d"]:
    """Phase 4: the directions that the inequalities feel least; the scores differ along these."""
    d = body.anchors.shape[1]
    _, _, right = np.linalg.svd(body.normals(), full_matrices=True)
    return np.asarray(right[::-1][: heads - 1].reshape(-1, d, d))


def bound_direction(
    body: Certificates, centre: Float[Array, "d d"], direction: Float[Array, "d d"]
) -> tuple[float, float] | None:
    """Phase 5: least and largest <direction, theta> over the slice <centre, theta> = |centre|^2 of
    the body (a cone), by linear programs; None where the slice is unbounded that way."""
    normals = body.normals()
    slice_row = centre.reshape(1, -1)
    ends = []
    for sign in (1.0, -1.0):
        result = linprog(
            sign * direction.ravel(),
            A_ub=-normals,
            b_ub=np.zeros(len(normals)),
            A_eq=slice_row,
            b_eq=[float((centre**2).sum())],
            bounds=(None, None),
            method="highs",
        )
        if result.status != 0:
            return None
        ends.append(sign * float(result.fun))
    return ends[0], ends[1]


def build_net(body: Certificates, heads: int) -> list[Float[Array, "d m d"]]:
    """Phase 5: candidates for all scores at once, inside what the linear programs allow."""
    centre = find_proxy(body)
    if centre is None:
        return []
    points = [np.zeros_like(centre)]
    if heads > 1:
        direction = find_open_directions(body, heads)[0]
        reach = bound_direction(body, centre, direction)
        size = float(np.linalg.norm(centre))
        low, high = (-size, size) if reach is None else reach
        points = [t * direction for t in np.linspace(low, high, 9)]
    return [
        np.stack([scale * (centre + shift) for shift in shifts], axis=1)
        for scale in (0.5, 1.0, 2.0, 4.0)  # the proxy's margin of one is arbitrary
        for shifts in itertools.combinations(points, heads)
    ]


def sculpt(rows: Rows) -> Sculpted:
    """Phases 1 to 3 and the certificates."""
    crude = estimate_values(rows)
    values = refine_values(rows, crude)
    return Sculpted(crude, values, certify(rows, values))


def search_by_sculpting(
    rows: Rows, heads: int | None, solved: float, seconds: float, rng: np.random.Generator
) -> SculptedSearch:
    """All phases: certificates, net, regression, validation, refinement."""
    _check(rows, heads)
    begin = time.monotonic()
    limits = DescentOptions(deadline=begin + seconds)
    sculpted = sculpt(rows)
    best: tuple[float, Array] | None = None
    residuals: dict[int, float] = {}
    restarts = 0
    for m in range(1, GRID_HEADS + 1) if heads is None else (heads,):
        for start in _choose_finalists(rows, sculpted.certificates, m, rng):
            end = descend(rows, start, limits)
            restarts += 1
            residuals[m] = min(end.relative, residuals.get(m, np.inf))
            if best is None or end.relative < best[0]:
                best = end.relative, end.at.theta
            if end.relative <= solved or time.monotonic() > limits.deadline:
                break
        if best is not None and best[0] <= solved:
            break
    assert best is not None
    seconds = time.monotonic() - begin
    return SculptedSearch(best[1], best[0], restarts, seconds, residuals, sculpted)


def _choose_finalists(
    rows: Rows, body: Certificates, heads: int, rng: np.random.Generator
) -> list[Float[Array, "d m d"]]:
    """Regression and validation: the six candidates whose values explain other rows best."""
    candidates = build_net(body, heads) if len(body) else []
    other = rng.random(rows.weights.shape) < 0.5
    train, test = (rows.with_weights(rows.weights * part) for part in (other, ~other))
    scored = []
    for theta in candidates:
        at = project(train, theta)
        left = test.targets.reshape(len(at.residual), -1) * test.weights.reshape(-1, 1)
        missed = left - average_tokens(test, compute_patterns(test, theta)) @ at.values
        scored.append((float((missed**2).sum()), theta))
    scored.sort(key=lambda pair: pair[0])
    return [theta for _, theta in scored[:6]] or [draw_start(rows, heads, rng)]


def _check(rows: Rows, heads: int | None) -> None:
    if heads is not None and heads > GRID_HEADS:
        raise InvalidArgument(f'method="sculpting" knows at most {GRID_HEADS} heads, got {heads}')
    if rows.weights.shape[1] != rows.tokens.shape[1] or rows.padding is not None or rows.offset:
        raise InvalidArgument(
            'method="sculpting" needs outputs at every position, one length and bias=False'
        )
    if not (np.abs(rows.tokens) == 1.0).all():
        raise InvalidArgument('method="sculpting" needs Boolean inputs: every entry +1 or -1')
