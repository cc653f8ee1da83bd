"""Is a bend that of a known activation? One neuron of a network, looked at by itself.

Statement.  Far from zero all neurons but one are lines, so that the answers along a short segment
            across its plane are a + b t + jump φ(α (t + c)) / α. If no activation of the table has
            such a, b, c, α for two neurons, the box is no network of these, whatever its
            parameters are.
Queries.    Thirteen points across the plane of each of two neurons, where other planes are far; as
            many again, closer or wider, where the bend is much narrower or wider than these.
Algebra.    Least squares of four unknowns for each activation.
Fails.      Two neurons with one plane are taken for one: then nothing is said. Nothing is said
            either where no point of a plane is far from all others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from keyhole.arrays import TINY, Array, Float
from keyhole.learners.mlp.far_field import FarField
from keyhole.models.mlp import ACTIVATIONS

Ask = Callable[[Array, str], Array]


@dataclass(frozen=True, eq=False)
class Profile:
    """Answers across one plane, along the jump of its neuron."""

    points: Float[Array, "n d"]
    answers: Float[Array, "n k"]
    distance: Float[Array, " n"]  # from the plane, in units of the size at which the network bends
    height: Float[Array, " n"]  # of the answers, in units of `jump`
    jump: Float[Array, " k"]  # of the slope across the plane, times that size

    def fit(self, name: str) -> "ProfileFit":
        """The activation that comes closest to the bend, over its width and its place."""
        phi = ACTIVATIONS[name]
        line = np.column_stack([np.ones_like(self.distance), self.distance])

        def rest(unknowns: Array) -> Array:
            alpha = np.exp(unknowns[0])
            bend = phi.value(alpha * (self.distance + unknowns[1])) / alpha
            return project_out(line, self.height - bend)

        # from bends wider than the segment to kinks that lie between two of its points
        starts = [np.array([log, 0.0]) for log in np.log([0.1, 0.5, 2.0, 10.0, 50.0, 250.0])]
        fits = [least_squares(rest, start, x_scale=[1.0, 0.3], xtol=1e-14) for start in starts]
        best = min(fits, key=lambda fit: float(fit.cost))
        left = rest(best.x)
        bend = float(np.linalg.norm(project_out(line, self.height)))
        share = float(np.linalg.norm(left)) / max(bend, TINY)
        return ProfileFit(share, self.height - left, float(np.exp(best.x[0])))


@dataclass(frozen=True, eq=False)
class ProfileFit:
    """What a known activation makes of a profile."""

    left: float  # share of the bend that it does not explain
    height: Float[Array, " n"]
    steepness: float  # α, in units of one over the profile's distances


def project_out(columns: Float[Array, "n c"], vector: Float[Array, " n"]) -> Float[Array, " n"]:
    """What is left of a vector beside its best combination of the columns."""
    q, _ = np.linalg.qr(columns)
    return np.asarray(vector - q @ (q.T @ vector))


def read_profile(
    ask: Ask, far: FarField, neuron: int, size: float, radius: float, rng: np.random.Generator
) -> Profile | None:
    """Answers across the plane of a neuron, at a point of it that other planes are far from; no
    farther out than that takes, where a plane is known less well."""
    width = far.direction.shape[1]
    radius = min(radius, 1e5 * size)
    lengths = np.maximum(np.linalg.norm(far.direction, axis=1), TINY)
    normal = far.direction[neuron] / lengths[neuron]
    foots = radius * rng.standard_normal((64, width)) / np.sqrt(width)
    foots -= np.outer(foots @ normal + far.bias[neuron] / lengths[neuron], normal)
    others = np.delete((foots @ far.direction.T + far.bias) / lengths, neuron, axis=1)
    reach = size * np.sqrt(width)
    room = np.abs(others).min(axis=1, initial=np.inf) / reach
    best, apart = int(np.argmax(room)), 100.0  # reaches within which another plane may bend
    if room[best] < apart:
        return None
    steps = np.array([0.1, 0.3, 0.7, 1.5, 3.0, 6.0])
    distance = np.concatenate([-steps[::-1], [0.0], steps])
    points = foots[best] + reach * np.outer(distance, normal)
    answers = ask(points, "profiles")
    jump = far.jump[neuron] * lengths[neuron] * reach
    along = (answers - points @ far.linear.T) @ jump / max(float(jump @ jump), TINY)
    return Profile(points, answers, distance, along, jump)


def read_resolved_profile(
    ask: Ask,
    far: FarField,
    neuron: int,
    names: Sequence[str],
    size: float,
    radius: float,
    rng: np.random.Generator,
) -> tuple[Profile, ProfileFit] | None:
    """A profile whose points are as far apart as its bend is wide, and the closest activation."""
    for _ in range(4):  # the width that a fit finds may itself be rough at first
        profile = read_profile(ask, far, neuron, size, radius, rng)
        if profile is None:
            return None
        fit = min((profile.fit(name) for name in names), key=lambda one: one.left)
        if 0.3 < fit.steepness < 3.0:  # most of the thirteen points lie in the bend
            return profile, fit
        size /= fit.steepness
    return None


def find_strange_profile(
    ask: Ask,
    far: FarField,
    names: Sequence[str],
    size: float,
    radius: float,
    rng: np.random.Generator,
) -> tuple[Array, Array, Array] | None:
    """A point across a plane, its answer and that of the nearest known activation, if the bends of
    two neurons are those of none."""
    strange = 1e-4  # share of a bend that is left by another activation; rounding leaves 1e-7
    order = np.argsort(-np.linalg.norm(far.jump, axis=1) * np.linalg.norm(far.direction, axis=1))
    shown: tuple[Array, Array, Array] | None = None
    looked = 0
    for neuron in order:
        found = read_resolved_profile(ask, far, int(neuron), names, size, radius, rng)
        if found is None:
            continue
        profile, fit = found
        if fit.left < strange:
            return None
        worst = int(np.argmax(np.abs(fit.height - profile.height)))
        moved = (fit.height[worst] - profile.height[worst]) * profile.jump
        answer = profile.answers[worst]
        shown = shown or (profile.points[worst], answer, answer + moved)
        looked += 1
        if looked == 2:
            return shown
    return None
