"""Attention on normalised tokens beside a residual, x_N + attention(norm(X)), by algebra.

Statement.  y = x_N + offset + Σ_h M_h Σ_i w_hi n_i with n_i = x_i / sqrt(mean x_i^2 + epsilon),
            mean-free for a LayerNorm; w_h the softmax of n_i . (W_h n_N + c_h). Gain and bias of
            the norm are inside the maps. Epsilon makes every n of the open ball of radius sqrt(d)
            reachable. Everything below is in a basis of what the norm keeps (k numbers).
Queries.    1  zero, one token at three sizes, one shifted         -> offset, kind, epsilon
            2  k single tokens                                     -> M = Σ_h M_h
            3  lines [a + t v (n times), a - t'v (n' times), a]    -> p_h . v and M_h v of each head
            4  [a + τu_1 … a + τu_m; a]                            -> scores and key biases
Algebra.    On a line the answers are Σ_h f_j(p_h . v) M_h v, f_j(λ) the mean of the steps, weighed
            by n e^(λt): a matrix of rank H. The numbers p_h . v are those λ for which the vector
            f(λ) lies in its column space (MUSIC), and are refined together by variable projection.
            Lines that are close to each other tell which head is which; a few of them span the
            range of each M_h, and the ranges split M. This tells the keys at the anchor; the same
            with lines along the keys, where the heads are far apart, tells M_h to many digits.
            Then `scores`.
Fails.      Heads that attend alike along every line; weights below the noise.
Source.     Schmidt (1986) for MUSIC; the rest is Keyhole's own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy.optimize import least_squares, linear_sum_assignment

from keyhole.arrays import TINY, Array, Float, Int
from keyhole.learners.block.box import ANSWER, NotThisBlock, Unclear
from keyhole.learners.block.scores import (
    Ask,
    Scores,
    Soft,
    Span,
    ask_scores,
    draw_context,
    full_keys,
    read_at_once,
    seen_rank,
    solve_scores,
)
from keyhole.linalg.rank import count_above, find_fall, noise_edge
from keyhole.measurement.asker import Asker
from keyhole.models.attention import Attention, Head
from keyhole.models.block import Block
from keyhole.models.norm import kept_plane
from keyhole.stages.epsilon import find_epsilon


@dataclass(frozen=True)
class LineOptions:
    """What a person might tune of the lines."""

    anchor: float = 0.65  # of the ball's radius: length of the anchor of the lines
    copies: tuple[int, ...] = (1, 3, 9, 27)  # times that a token may occur in a query
    spare: int = 3  # queries on a line beyond the number of heads
    first_line: int = 12  # queries on the first line
    apart: float = 0.5  # how far the direction of a line lies from the first one
    fitted: float = 1e-12  # residual of a line, relative, at which its heads are told apart
    steepest: float = 40.0  # largest log-odds looked for at the end of a line
    lines: int = 6  # first lines tried, and three times as many where none shows all heads well
    digits: float = 1e-3  # relative error of the heads' values on a first line that is good
    off: float = 0.1  # relative error of the maps from which on a fit finds the rest
    draws: int = 3  # anchors tried


TUNED = LineOptions()
SOLVED = 1e-11  # relative residual that the search for rates may leave


# --- 1: norm, offset, epsilon ---------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Sizes:
    """Zero, one direction at several sizes, and the last once more with another mean."""

    tokens: Float[Array, "n d"]
    answers: Float[Array, "n d"] = field(metadata=ANSWER)


@dataclass(frozen=True, eq=False)
class Ball:
    """Tokens by what the norm makes of them: points of an open ball."""

    plane: Float[Array, "d k"]
    epsilon: float
    kind: str

    @property
    def radius(self) -> float:
        return float(np.sqrt(len(self.plane)))

    def tokens(self, points: Float[Array, "*any k"]) -> Float[Array, "*any d"]:
        """Tokens that the norm takes to these points."""
        rest = 1.0 - np.sum(points**2, axis=-1, keepdims=True) / len(self.plane)
        return np.asarray((points * np.sqrt(self.epsilon / rest)) @ self.plane.T)

    def points(self, tokens: Float[Array, "*any d"]) -> Float[Array, "*any k"]:
        inside = tokens @ self.plane
        square = np.sum(inside**2, axis=-1, keepdims=True) / len(self.plane)
        return np.asarray(inside / np.sqrt(square + self.epsilon))


def ask_sizes(box: Asker, rng: np.random.Generator) -> Sizes:
    width = box.width
    heading = rng.standard_normal(width)
    heading -= heading.mean()
    heading /= np.sqrt(np.mean(heading**2))
    # so large that epsilon is nothing beside it, and its rounding nothing beside what it adds
    large = float(np.clip(box.error ** (-1.0 / 5.0), 30.0, 1e3))
    tokens = [box.representable(token) for token in (0.0 * heading, large * heading, heading + 2.0)]
    zero, far, shifted = (box(token[None, None], "norm")[0] for token in tokens)
    if not np.isfinite(zero).all():
        raise Unclear("the norm has no epsilon: a token of size zero has no answer")
    seen: list[Sizes] = []

    def look(size: float) -> float:
        near = box.representable(size * heading)
        asked = np.array([tokens[0], tokens[1], near, tokens[2]])
        answers = np.array([zero, far, box(near[None, None], "norm")[0], shifted])
        seen.append(Sizes(asked, answers))
        return max(solve_sizes(seen[-1], box.error)[0], 0.0)

    if find_epsilon(look) is None:
        raise Unclear("epsilon is too small to be seen")
    return seen[-1]


def solve_sizes(data: Sizes, unit: float) -> tuple[float, str, Float[Array, " d"]]:
    """Epsilon, the kind of norm, the offset. Along one direction the answers beside the residual
    are offset + M n, n of length r(s) = s / sqrt(s^2 + epsilon)."""
    beside = data.answers - data.tokens
    offset = beside[0]
    far, near, shifted = beside[1:] - offset
    large, small = (float(np.mean(token**2)) for token in data.tokens[1:3])
    share = float(near @ far / (far @ far))
    if not 0 < share < 2:
        raise NotThisBlock("beside the residual, the answer does not depend on the token's size")
    epsilon = (1.0 / share**2 - 1.0) / (1.0 / small - 1.0 / (large * share**2))
    # a LayerNorm does not see the mean: the shifted token looks like one of size one
    seen = shifted / np.sqrt(1.0 / (1.0 + epsilon)) - far / np.sqrt(large / (large + epsilon))
    doubt = 1e4 * unit * float(np.abs(data.answers).max()) + 1e-6 * np.linalg.norm(far)
    kind = "layer" if np.linalg.norm(seen) < doubt else "rms"
    return float(epsilon), kind, offset


# --- 2: the sum of the value maps -----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Singles:
    """Single tokens by their points."""

    points: Float[Array, "n k"]
    answers: Float[Array, "n d"] = field(metadata=ANSWER)  # without the residual


def ask_points(
    box: Asker, ball: Ball, points: Float[Array, "n length k"], purpose: str
) -> Float[Array, "n d"]:
    """Answers without the residual."""
    tokens = box.representable(ball.tokens(points))
    return box(tokens, purpose) - tokens[:, -1]


def solve_singles(data: Singles, offset: Float[Array, " d"]) -> Float[Array, "d k"]:
    found, *_ = np.linalg.lstsq(data.points, data.answers - offset, rcond=None)
    return np.asarray(found.T)


# --- 3: lines -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Line:
    """Queries [a + t v, n times; a - t' v, n' times; a]."""

    direction: Float[Array, " k"]
    steps: Float[Array, "j 2"]  # t and -t'
    copies: Int[Array, "j 2"]  # n and n'
    answers: Float[Array, "j d"] = field(metadata=ANSWER)  # without the residual

    def shapes(self, rates: Float[Array, " h"]) -> Float[Array, "j h"]:
        """What a head with λ = p_h . v makes of M_h v in each answer: the mean step, weighed."""
        odds = self.steps[:, :, None] * rates
        top = np.maximum(odds.max(axis=1), 0.0)
        weight = self.copies[:, :, None] * np.exp(odds - top[:, None])
        total = weight.sum(axis=1) + np.exp(-top)
        return np.asarray((weight * self.steps[:, :, None]).sum(axis=1) / total)


def ask_line(
    box: Asker,
    ball: Ball,
    anchor: Float[Array, " k"],
    direction: Float[Array, " k"],
    count: int,
    rng: np.random.Generator,
) -> Line:
    """Steps towards both ends of the chord through the anchor, the tokens in various numbers."""
    along, inside = float(anchor @ direction), 0.98 * ball.radius
    root = np.sqrt(along**2 + inside**2 - float(anchor @ anchor))
    steps = np.array([root - along, -root - along]) * rng.uniform(0.6, 1.0, (count, 2))
    longest = box.oracle.spec.domain.max_length
    most = 2 * max(TUNED.copies) if longest is None else longest - 1
    pairs = [(n, m) for n in TUNED.copies for m in TUNED.copies if n + m <= most]
    pairs = pairs or [(1, 1)]
    copies = np.array(pairs)[rng.permutation(np.arange(count) % len(pairs))]
    answers = np.empty((count, box.width))
    for length in sorted(set(copies.sum(axis=1))):
        (chosen,) = np.nonzero(copies.sum(axis=1) == length)
        points = line_points(Line(direction, steps, copies, answers), anchor, chosen)
        answers[chosen] = ask_points(box, ball, points, "lines")
    return Line(direction, steps, copies, answers)


def line_points(
    line: Line, anchor: Float[Array, " k"], chosen: Array
) -> Float[Array, "n length k"]:
    """The chosen queries, which are of one length."""
    length = int(line.copies[chosen[0]].sum())
    points = np.tile(anchor, (len(chosen), length + 1, 1))
    for row, j in enumerate(chosen):
        points[row, :-1] += np.repeat(line.steps[j], line.copies[j])[:, None] * line.direction
    return np.asarray(points)


def line_response(line: Line, alone: Float[Array, " d"]) -> Float[Array, "j d"]:
    """Σ_h shape(λ_h) M_h v, from answers and that to the anchor alone."""
    return np.asarray(line.answers - alone)


def line_noise(line: Line, unit: float) -> float:
    """Root mean square of what rounding leaves in all of the response."""
    size = float(np.abs(line.answers).max())
    return float(4.0 * unit * size * np.sqrt(line.answers.size))


def count_heads(line: Line, alone: Float[Array, " d"], unit: float) -> int:
    values = np.linalg.svd(line_response(line, alone), compute_uv=False)
    return count_above(values, 8.0 * line_noise(line, unit))


def separate_heads(
    line: Line, alone: Float[Array, " d"], heads: int
) -> tuple[Float[Array, " h"], Float[Array, "h d"], float]:
    """λ_h = p_h . v in increasing order, M_h v, and the residual of the answers."""
    response = line_response(line, alone)
    axes, sizes, _ = np.linalg.svd(response, full_matrices=False)
    space = axes[:, :heads]
    main = space * sizes[:heads] / np.linalg.norm(sizes)  # all of it but noise, in few numbers
    reach = float(np.abs(line.steps).max())
    grid = np.sinh(np.linspace(-1.0, 1.0, 6001) * np.arcsinh(TUNED.steepest)) / reach

    def misfit(rates: Array) -> Array:
        shapes = line.shapes(rates)
        shapes /= np.linalg.norm(shapes, axis=0)
        return np.asarray(np.linalg.norm(shapes - space @ (space.T @ shapes), axis=0))

    left = misfit(grid)
    (low,) = np.nonzero((left[1:-1] < left[:-2]) & (left[1:-1] <= left[2:]))
    low += 1
    low = low[np.argsort(left[low])][:heads]

    def rest(rates: Array) -> Array:
        shapes = line.shapes(rates)
        values, *_ = np.linalg.lstsq(shapes, main, rcond=None)
        return np.asarray(main - shapes @ values).ravel()

    def fit(start: Array) -> tuple[float, Array]:
        found = least_squares(
            rest, start, x_scale=1.0 / reach, method="lm", xtol=1e-15, ftol=1e-15, gtol=1e-15
        )
        return float(np.linalg.norm(found.fun)), np.sort(found.x)

    near = 0.03 / reach
    best = fit(grid[low]) if len(low) == heads else (np.inf, grid[low])
    if best[0] > TUNED.fitted and heads > 1:
        # two heads at almost the same rate share one minimum
        sure = grid[low[: heads - 1]]
        for k in range(len(sure) if len(sure) == heads - 1 else 0):
            pair = np.array([sure[k] - near, sure[k] + near])
            best = min(best, fit(np.concatenate([np.delete(sure, k), pair])), key=lambda f: f[0])
            if best[0] < TUNED.fitted:
                break
    if len(best[1]) < heads:
        raise Unclear("the heads do not show on a line")
    values, *_ = np.linalg.lstsq(line.shapes(best[1]), response, rcond=None)
    return best[1], np.asarray(values), best[0]


def read_line(
    line: Line, alone: Float[Array, " d"], heads: int, unit: float
) -> tuple[Array, Array] | None:
    """Rates and M_h v, if so many heads explain the answers on a line up to their rounding."""
    try:
        rates, values, rest = separate_heads(line, alone, heads)
    except Unclear:
        return None
    noise = line_noise(line, unit) / float(np.linalg.norm(line_response(line, alone)))
    return (rates, values) if rest < max(noise, SOLVED) else None


@dataclass(frozen=True, eq=False)
class Lines:
    """Lines through one anchor; the first is near all others."""

    anchor: Float[Array, " k"]
    heads: int
    lines: tuple[Line, ...]


def label_heads(parts: list[tuple[Array, Array]]) -> list[Int[Array, " h"]]:
    """On every line, the places of the heads in the order of the first line."""
    rates, values = parts[0]
    found = [np.arange(len(values))]
    spread = max(float(np.ptp(rates)), 1e-3 * float(np.abs(rates).max(initial=0.0)), 1e-300)
    size = float(np.linalg.norm(values, axis=1).mean())
    for other_rates, other_values in parts[1:]:
        cost = np.abs(rates[:, None] - other_rates) / spread
        cost = cost + np.linalg.norm(values[:, None] - other_values, axis=2) / size
        _, order = linear_sum_assignment(cost)
        found.append(order)
    return found


def value_errors(line: Line, rates: Float[Array, " h"], unit: float) -> Float[Array, " h"]:
    """Standard error of a number of M_h v, that of the rates in it: large where two heads are at
    almost one rate."""
    shapes = line.shapes(rates)
    inverse = np.linalg.pinv(shapes)
    near = 1e-4 / float(np.abs(line.steps).max())
    slopes = (line.shapes(rates + near) - line.shapes(rates - near)) / (2.0 * near)
    # a rate is known by what its slope has beside all shapes, as well as that is seen
    beside = np.linalg.norm(slopes - shapes @ (inverse @ slopes), axis=0)
    by_rates = (inverse @ slopes) / np.maximum(beside, TINY)
    noise = max(line_noise(line, unit), SOLVED * float(np.linalg.norm(line.answers)))
    entry = noise / np.sqrt(line.answers.size)
    square = np.sum(inverse**2, axis=1) + np.sum(by_rates**2, axis=1)
    return np.asarray(entry * np.sqrt(square))


def weigh_values(
    lines: Sequence[Line], parts: list[tuple[Array, Array]], unit: float
) -> Float[Array, "h l d"]:
    """M_h v on every line in units of its error: lines on which a head is hard to tell from another
    count for little."""
    found = []
    for line, (rates, values), order in zip(lines, parts, label_heads(parts), strict=True):
        errors = np.maximum(value_errors(line, rates, unit), TINY)
        found.append((values / errors[:, None])[order])
    return np.array(found).transpose(1, 0, 2)


def ask_lines(
    box: Asker, ball: Ball, offset: Array, whole: Float[Array, "d k"], rng: np.random.Generator
) -> Lines:
    """Lines close to a first one on which all heads are apart, until the ranges are seen."""
    k = len(ball.plane.T)
    anchor = TUNED.anchor * ball.radius * unit_vector(rng, k)
    alone = offset + whole @ anchor
    best: tuple[float, int, Line] | None = None  # relative error of the values, heads, the line
    count, heads, close = TUNED.first_line, 0, True
    for tried in range(3 * TUNED.lines):
        if best is not None and best[0] < TUNED.digits and (not close or tried >= TUNED.lines):
            break
        line = ask_line(box, ball, anchor, unit_vector(rng, k), count, rng)
        seen = count_heads(line, alone, box.error)
        if seen >= count - 1:
            count *= 2
            if count > 4 * box.width + TUNED.first_line:
                raise NotThisBlock("no small number of heads explains the answers on a line")
            continue
        heads = max(heads, seen)
        if seen < 1:
            raise Unclear("no head changes the answers on a line")
        read = read_line(line, alone, seen, box.error)
        if read is None:
            continue
        rates, values = read
        apart = 1.0 if seen == 1 else float(np.diff(rates).min() / np.abs(rates).max())
        doubt = value_errors(line, rates, box.error) / np.sqrt(np.mean(values**2, axis=1))
        if seen == heads and (best is None or best[1] < heads or doubt.max() < best[0]):
            best, close = (float(doubt.max()), seen, line), apart <= 0.1 / heads
    if best is None:
        raise Unclear("no line shows the heads")
    found = Lines(anchor, heads, (best[2],))
    least = seen_rank(np.linalg.svd(whole, compute_uv=False), box.error)
    return found if heads == 1 else add_lines(box, ball, found, alone, None, rng, least)


def add_lines(
    box: Asker,
    ball: Ball,
    data: Lines,
    alone: Float[Array, " d"],
    keys: Float[Array, "h k"] | None,
    rng: np.random.Generator,
    least: int,
) -> Lines:
    """Lines close to the first, until the ranges of all heads are seen: together they have no fewer
    dimensions (`least`) than the sum of the maps. Where keys are known
    roughly, the lines lie along them, and the heads are far apart."""
    k, heads, first = len(data.anchor), data.heads, data.lines[0]
    # many heads have shapes that are hard to tell apart
    count = heads + TUNED.spare if heads <= 4 else 2 * heads + TUNED.spare
    target = -(-k // heads) + 2
    start = read_line(first, alone, heads, box.error)
    if start is None:
        raise Unclear("the answers on a line are not those of separate heads")
    parts = [start]
    while True:
        fresh: list[Line] = []
        tries = 2 * target
        while len(data.lines) + len(fresh) < min(target, k):
            heading = first.direction + TUNED.apart * unit_vector(rng, k)
            if keys is not None:  # the same log-odds on every line, all else at random
                other = unit_vector(rng, k)
                share, *_ = np.linalg.lstsq(keys.T, other, rcond=None)
                heading = first.direction + TUNED.apart * (other - keys.T @ share)
            heading /= np.linalg.norm(heading)
            line = ask_line(box, ball, data.anchor, heading, count, rng)
            read = read_line(line, alone, heads, box.error)
            if read is not None:
                fresh.append(line)
                parts.append(read)
            tries -= 1
            if not tries:
                raise Unclear("the answers on a line are not those of separate heads")
        data = replace(data, lines=(*data.lines, *fresh))
        ranges, off = find_ranges(weigh_values(data.lines, parts, box.error))
        if target >= k or (off < TUNED.off and sum(part.shape[1] for part in ranges) >= least):
            return data
        target = 2 * target


def steep_lines(
    box: Asker,
    ball: Ball,
    rough: Lines,
    alone: Float[Array, " d"],
    weights: "PreNormWeights",
    ask: Ask,
    rng: np.random.Generator,
) -> Lines:
    """Lines along the keys, which are read at the anchor with the maps as they are known."""
    heads = len(weights.maps)
    tokens = draw_context(weights, read_at_once(weights, box.error), rng, whole=True)
    size = 0.3 * ball.radius
    soft = ask(np.repeat(rough.anchor[None], len(tokens), axis=0), size * tokens)
    keys = np.array([own[:, 0] for own in full_keys(weights, soft, len(tokens))])
    if not np.isfinite(keys).all():
        return rough
    best, apart = None, 0.0
    for _ in range(200):  # log-odds of the heads as far apart as the keys allow
        wanted = rng.permutation(np.linspace(-1.0, 1.0, heads)) if heads > 1 else np.ones(1)
        heading, *_ = np.linalg.lstsq(keys, wanted, rcond=None)
        length = float(np.linalg.norm(heading))
        if best is None or 1.0 / length > apart:
            best, apart = heading / length, 1.0 / length
    assert best is not None
    count = heads + TUNED.spare if heads <= 4 else 2 * heads + TUNED.spare
    first = ask_line(box, ball, rough.anchor, best, count, rng)
    least = seen_rank(np.linalg.svd(weights.whole, compute_uv=False), box.error)
    return add_lines(box, ball, replace(rough, lines=(first,)), alone, keys, rng, least)


def line_rank(values: Float[Array, "l d"]) -> int:
    """Rank of M_h v over the lines, in units of their errors: where the singular values fall most,
    to what errors make."""
    sizes = np.linalg.svd(values, compute_uv=False)
    edge = noise_edge(1.0, (values.shape[0], values.shape[1]))
    return find_fall(sizes, 1.0, min(1.0, edge / max(float(sizes[0]), TINY))) or len(sizes)


def find_ranges(weighed: Float[Array, "h l d"]) -> tuple[list[Float[Array, "d r"]], float]:
    """Orthonormal bases of what each head can add, from its values in units of their errors, and by
    how much the maps are then off: errors over the weakest direction of a range, enlarged where
    ranges are nearly dependent. More lines show the weakest direction better."""
    ranges, off = [], 0.0
    for part in weighed:
        axes, sizes, _ = np.linalg.svd(part.T, full_matrices=False)
        rank = line_rank(part)
        ranges.append(axes[:, :rank])
        off = max(off, float(sizes[rank] / sizes[rank - 1]) if rank < len(sizes) else 1.0)
    joint = np.hstack(ranges)
    least = float(np.linalg.svd(joint, compute_uv=False)[-1])
    return ranges, np.inf if joint.shape[1] > len(joint) else off / max(least, TINY)


def unit_vector(rng: np.random.Generator, width: int) -> Float[Array, " k"]:
    vector = rng.standard_normal(width)
    return np.asarray(vector / np.linalg.norm(vector))


def split_maps(
    data: Lines, alone: Array, whole: Float[Array, "d k"], unit: float
) -> Float[Array, "h d k"]:
    """M_h from their ranges and their sum."""
    if data.heads == 1:
        return whole[None]
    parts = [separate_heads(line, alone, data.heads)[:2] for line in data.lines]
    ranges, _ = find_ranges(weigh_values(data.lines, parts, unit))
    joint = np.hstack(ranges)
    sizes = np.linalg.svd(joint, compute_uv=False)
    if joint.shape[1] > len(whole) or sizes[-1] < 1e-5:
        raise Unclear("the heads' values share a range: they cannot be split")
    shares, *_ = np.linalg.lstsq(joint, whole, rcond=None)
    ends = np.cumsum([0, *(part.shape[1] for part in ranges)])
    return np.array([ranges[h] @ shares[ends[h] : ends[h + 1]] for h in range(data.heads)])


# --- 4: scores ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PreNormWeights:
    """Reads attention weights off an answer, all of which is known beside them."""

    maps: Float[Array, "h d k"]
    whole: Float[Array, "d k"]
    offset: Float[Array, " d"]

    @property
    def readable(self) -> int:
        return self.maps.shape[1]

    def equations(self, soft: Soft) -> tuple[Float[Array, "n d u"], Float[Array, "n d"]]:
        right = soft.answers - self.offset - soft.anchor @ self.whole.T
        return np.zeros((*right.shape, 0)), right


# --- all of it ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Answers:
    """All that was asked, in the order of the steps."""

    sizes: Sizes
    singles: Singles
    lines: Lines
    scores: Scores
    ball: Ball

    def pairs(self) -> Iterator[tuple[Float[Array, "n length d"], Float[Array, "n d"]]]:
        """Queries and answers that the finished model must explain."""
        yield self.sizes.tokens[:, None], self.sizes.answers
        for points, answers in self.points():
            tokens = self.ball.tokens(points)
            yield tokens, answers + tokens[:, -1]

    def points(self) -> Iterator[tuple[Float[Array, "n length k"], Float[Array, "n d"]]]:
        """The same in points of the ball, without the residual."""
        yield self.singles.points[:, None], self.singles.answers
        for line in self.lines.lines:
            for length in sorted(set(line.copies.sum(axis=1))):
                (chosen,) = np.nonzero(line.copies.sum(axis=1) == length)
                yield line_points(line, self.lines.anchor, chosen), line.answers[chosen]
        for soft in self.scores.parts:
            context = soft.anchor[:, None] + soft.tokens
            yield np.concatenate([context, soft.anchor[:, None]], axis=1), soft.answers


def ask_pre_norm_attention(box: Asker, rng: np.random.Generator) -> Answers:
    """Asks everything; raises NotThisBlock or Unclear."""
    sizes = ask_sizes(box, rng)
    epsilon, kind, offset = solve_sizes(sizes, box.error)
    ball = Ball(kept_plane(box.width, kind), epsilon, kind)
    k = ball.plane.shape[1]
    frame, _ = np.linalg.qr(rng.standard_normal((k, k)))
    points = 0.9 * ball.radius * frame
    singles = Singles(points, ask_points(box, ball, points[:, None], "value maps"))
    whole = solve_singles(singles, offset)

    def ask_soft(anchor: Array, tokens: Array) -> Soft:
        context = np.concatenate([anchor[:, None] + tokens, anchor[:, None]], axis=1)
        return Soft(anchor, tokens, ask_points(box, ball, context, "scores"))

    reason = "no anchor showed the heads"
    for _ in range(TUNED.draws):
        try:
            lines = ask_lines(box, ball, offset, whole, rng)
            alone = offset + whole @ lines.anchor
            rough = PreNormWeights(split_maps(lines, alone, whole, box.error), whole, offset)
            if lines.heads > 1:
                lines = steep_lines(box, ball, lines, alone, rough, ask_soft, rng)
            maps = split_maps(lines, alone, whole, box.error)
            widest = max(seen_rank(np.linalg.svd(m, compute_uv=False), box.error) for m in maps)
            weights = PreNormWeights(maps, whole, offset)
            base = 0.3 * ball.radius * unit_vector(rng, k)
            span = Span(base, 0.3 * ball.radius, 0.2 * ball.radius)
            scores = ask_scores(weights, ask_soft, span, widest, box.error, rng)
        except (Unclear, NotThisBlock) as failed:
            reason = str(failed)
            continue
        return Answers(sizes, singles, lines, scores, ball)
    raise Unclear(reason)


def solve_pre_norm_attention(data: Answers, unit: float) -> Block:
    """The sublayer from all answers; a pure function of them."""
    epsilon, kind, offset = solve_sizes(data.sizes, unit)
    whole = solve_singles(data.singles, offset)
    maps = split_maps(data.lines, offset + whole @ data.lines.anchor, whole, unit)
    plane = data.ball.plane
    heads = [
        Head((plane @ left, right @ plane.T), plane @ bias, plane @ part.T)
        for (left, right, bias), part in zip(
            solve_scores(data.scores, PreNormWeights(maps, whole, offset)), maps, strict=True
        )
    ]
    return Block(Attention(heads, offset), None, norm="pre", kind=kind, epsilons=[epsilon])
