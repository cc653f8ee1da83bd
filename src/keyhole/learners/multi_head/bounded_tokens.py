"""A real layer whose tokens are bounded in norm: no hard attention, so heads show as eigenvalues.

Statement. Layers with H heads of width r >= 3, H r = d = D and an invertible total value map M
are recovered from about 5d vector answers with tokens of any bounded norm.

Queries. (1) Length one: offset and M. (2) Pairs [x + u; x] around two points u: the Jacobian
J of F(u) = out([x + u; x]) - out([x]) by one-sided differences, 2d + 2. (3) Soft queries as
in joint_heads, kept short.

Algebra. J M^-1 = sum_h s_h P_h + (rank H), P_h the projector onto the range of V_h along the
others and s_h = sigma(u . k_h): eigenvalue s_h with an eigenspace of dimension r - 1 inside the
range of V_h. Two points give the whole range; O = V^-1 M. The error of the differences is then
removed by defect correction: the model found predicts it, and the algebra is repeated on the
corrected Jacobian, without further queries.

When it fails. r < 3, H r < d, or heads whose s_h coincide at the points chosen (another pair of
points is tried); scalar answers. All these are left to random_queries.

Source. Keyhole's own; docs/methods/multi_head.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment

from keyhole.arrays import Array, Float
from keyhole.errors import IllConditioned
from keyhole.fitting.bootstrap import bootstrap_errors
from keyhole.learners.base import Inconclusive, Result
from keyhole.learners.multi_head.joint_heads import (
    FEWEST,
    SoftAnswers,
    ValueMaps,
    assemble_heads,
    drop_spurious_biases,
    measure_soft_answers,
    report_layer,
    with_offset,
)
from keyhole.learners.multi_head.validation import (
    PriorKnowledge,
    find_counterexample,
)
from keyhole.linalg.bases import random_directions
from keyhole.measurement.asker import Asker
from keyhole.models.attention import Attention


def learn_bounded(ask: Asker, rng: np.random.Generator, prior: PriorKnowledge) -> Result:
    """The whole recovery of a layer with bounded tokens; inconclusive for layers of other kinds."""
    radius, width = ask.oracle.spec.domain.radius, ask.width
    if not radius > 0:
        return Inconclusive("the domain holds no ball around zero")
    frame = np.linalg.qr(rng.standard_normal((width, width)))[0]
    offset = ask(np.zeros((1, 1, width)), "values")[0]
    ask = ask.subtracting(offset)
    if ask.scalar or len(offset) != width:
        return Inconclusive("answers are not vectors of the tokens' width")
    total = frame.T @ ask(radius * frame[:, None], "values") / radius
    singular = 1e10  # condition of the total value map that leaves differences no digits
    if np.linalg.cond(total) > singular:
        return Inconclusive("the total value map is singular")
    trouble: object = None
    for number in range(prior.attempts):
        # a shorter step leaves less to correct, which then settles, at a loss of digits
        step = 1e-4 * 0.1**number * radius
        # anchor, point and tokens share the radius
        anchor = radius / 3 * random_directions(rng, 1, width)[0]
        box = BoundedProblem(ask, frame, total, radius, anchor, step)
        try:
            model, errors, maps, answers = attempt_with_eigenvalues(box, prior.heads, rng)
        except (IllConditioned, np.linalg.LinAlgError) as error:
            trouble = error
            continue
        if find_counterexample(ask, model, errors, rng, radius) is None:
            return report_layer(maps, answers, model, errors, prior.heads)
        trouble = "the hypothesis disagrees with the box"
    return Inconclusive(f"bounded tokens did not separate the heads: {trouble}")


@dataclass(frozen=True, eq=False)
class BoundedProblem:
    """What one attempt starts from; the offset is subtracted from all answers."""

    ask: Asker
    frame: Float[Array, "d d"]
    total: Float[Array, "d d"]
    radius: float
    anchor: Float[Array, " d"]
    step: float  # of the differences


@dataclass(frozen=True, eq=False)
class Point:
    """A point u next to the anchor, and the differences of the answers around it."""

    at: Float[Array, " d"]
    slopes: Float[Array, "d outputs"]  # (F(u + h e_i) - F(u)) / h, i over the frame


def attempt_with_eigenvalues(
    box: BoundedProblem, heads: int | None, rng: np.random.Generator
) -> tuple[Attention, Attention, ValueMaps, SoftAnswers]:
    """All stages around one anchor: the model, its standard errors, and what they come from."""
    ask, inverse = box.ask, np.linalg.inv(box.total)
    points = [measure_slopes(box, rng) for _ in range(2)]
    ranges = find_ranges([point.slopes @ inverse for point in points], heads)
    maps = ValueMaps.of_ranges(ranges, box.total)
    answers = measure_soft_answers(
        ask, maps, box.frame, FEWEST, rng, radius=box.radius, expect_ranks=True
    )
    scores, biases = answers.solve_keys(maps)
    corrections = 15  # rounds of defect correction
    for _ in range(corrections):
        slopes = [correct_slopes(box, point, scores, biases, maps) for point in points]
        ranges = update_ranges([part @ inverse for part in slopes], ranges)
        maps, before = ValueMaps.of_ranges(ranges, box.total), scores
        scores, biases = answers.solve_keys(maps)
        change = float(np.linalg.norm(scores - before) / np.linalg.norm(scores))
        if not change > 1e-11:
            break
    if not change <= 1e-5:
        raise IllConditioned("the correction of the differences does not settle")

    scale = float(np.linalg.norm(box.total)) / np.sqrt(ask.width)
    level = np.hypot(ask.unit * scale * box.radius, ask.additive)

    def sample() -> tuple[Array, ...]:
        noisy = [s + 2 * level / box.step * rng.standard_normal(s.shape) for s in slopes]
        other = ValueMaps.of_ranges(
            update_ranges([part @ inverse for part in noisy], ranges), box.total
        )
        return (*answers.perturb(lambda _: level, rng).solve_keys(other), other.products)

    best = (scores, biases, maps.products)
    bootstrap_samples = 4
    bars = bootstrap_errors(best, sample, bootstrap_samples)
    layer = assemble_heads(scores, biases, maps, answers.score_ranks)
    return *drop_spurious_biases(*with_offset(ask, layer, bars)), maps, answers


def measure_slopes(box: BoundedProblem, rng: np.random.Generator) -> Point:
    """Differences of F around a random point, by one-sided steps."""
    width = box.ask.width
    at = box.radius / 3 * random_directions(rng, 1, width)[0]
    moved = np.concatenate([at[None], at + box.step * box.frame])
    last = np.broadcast_to(box.anchor, (len(moved), 1, width))
    answers = box.ask(np.concatenate([last + moved[:, None], last], axis=1), "slopes")
    return Point(at, box.frame.T @ ((answers[1:] - answers[0]) / box.step))


def correct_slopes(
    box: BoundedProblem, point: Point, scores: Array, biases: Array, maps: ValueMaps
) -> Float[Array, "d outputs"]:
    """The slopes, less the error that differences of this size make on the model."""
    keys, products = scores @ box.anchor + biases, maps.products
    odds = keys @ point.at
    share = 1 / (1 + np.exp(-odds))
    values = np.einsum("d,hdo->ho", point.at, products)
    exact = np.einsum("h,hdo->do", share, products)
    exact += np.einsum("h,hd,ho->do", share * (1 - share), keys, values)
    steps = keys @ box.frame.T * box.step  # (h, d): change of the log-odds per step
    # sigma(a + e) - sigma(a) without cancellation
    change = share[:, None] * (1 - share[:, None]) * np.expm1(steps)
    change = change / (1 + share[:, None] * np.expm1(steps))
    moved = np.einsum("id,hdo->hio", box.frame, products)
    crude = np.einsum("hi,ho->io", change / box.step, values)
    crude += np.einsum("hi,hio->io", share[:, None] + change, moved)
    return np.asarray(point.slopes + exact - box.frame.T @ crude)


# --- eigenspaces ----------------------------------------------------------------------------------


def find_ranges(matrices: Sequence[Array], heads: int | None) -> list[Float[Array, "d r"]]:
    """Ranges of the V_h from the eigenspaces at both points."""
    first, second = (cluster_eigenvectors(matrix, heads) for matrix in matrices)
    if len(first) != len(second):
        raise IllConditioned("the two points show different numbers of heads")
    overlap = np.array([[np.linalg.norm(a.T @ b) ** 2 for b in second] for a in first])
    rows, columns = linear_sum_assignment(-overlap)
    return [join_spaces(first[i], second[j]) for i, j in zip(rows, columns, strict=True)]


def cluster_eigenvectors(
    matrix: Float[Array, "d d"], heads: int | None
) -> list[Float[Array, "d k"]]:
    """Eigenspaces of H equal groups of r - 1 eigenvalues, for the widest heads possible."""
    width = len(matrix)
    values, vectors = np.linalg.eig(matrix)
    order = np.argsort(values.real, kind="stable")
    values, vectors = values[order].real, vectors[:, order]
    narrowest = 3  # head width below which eigenspaces of two points cannot be matched
    for count in [heads] if heads else range(1, width // narrowest + 1):
        if width % count or width // count < narrowest:
            continue
        size = width // count - 1
        starts = find_disjoint_windows(values, size, count)
        if starts is not None:
            return [orthonormalise(vectors[:, s : s + size], size) for s in starts]
    raise IllConditioned("the eigenvalues form no clusters of equal size")


def update_ranges(matrices: Sequence[Array], ranges: list[Array]) -> list[Float[Array, "d r"]]:
    """The ranges after correction: eigenspaces are those closest to the ranges known."""
    updated = []
    solved = [np.linalg.eig(matrix)[1] for matrix in matrices]
    duals = np.linalg.inv(np.concatenate(ranges, axis=1))
    cuts = np.cumsum([part.shape[1] for part in ranges])[:-1]
    for base, dual in zip(ranges, np.split(duals, cuts), strict=True):
        size = base.shape[1] - 1
        spaces = []
        for vectors in solved:
            inside = np.linalg.norm(base @ (dual @ vectors), axis=0)
            outside = np.linalg.norm(vectors - base @ (dual @ vectors), axis=0)
            best = np.argsort(outside / inside, kind="stable")[:size]
            spaces.append(orthonormalise(vectors[:, best], size))
        updated.append(join_spaces(*spaces))
    return updated


def find_disjoint_windows(values: Float[Array, " n"], size: int, count: int) -> list[int] | None:
    """Starts of `count` disjoint windows of `size` neighbouring values, each tight; None where
    there are not so many."""
    widths = values[size - 1 :] - values[: len(values) - size + 1]
    tight = 0.05  # width of a cluster of eigenvalues, relative to their range, of one head
    allowed = tight * float(values[-1] - values[0]) / count
    chosen: list[int] = []
    for start in np.argsort(widths, kind="stable"):
        if widths[start] > allowed or len(chosen) == count:
            break
        if all(abs(int(start) - other) >= size for other in chosen):
            chosen.append(int(start))
    return sorted(chosen) if len(chosen) == count else None


def orthonormalise(vectors: Array, size: int) -> Float[Array, "d k"]:
    """Real orthonormal basis of the span of (possibly complex) eigenvectors."""
    parts = np.concatenate([vectors.real, vectors.imag], axis=1)
    return np.asarray(np.linalg.svd(parts, full_matrices=False)[0][:, :size])


def join_spaces(a: Float[Array, "d k"], b: Float[Array, "d k"]) -> Float[Array, "d r"]:
    """The space of dimension k + 1 that two spaces of dimension k span together."""
    both = np.concatenate([a, b], axis=1)
    return np.asarray(np.linalg.svd(both, full_matrices=False)[0][:, : a.shape[1] + 1])
