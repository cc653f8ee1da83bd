"""The space in which all answers of a language model lie: its dimension, a basis, their errors.

Statement.  Answers are z = M n + m, n the normalised hidden state (h numbers), M (V, h). All of
            them lie in a linear space of dimension r, or of an affine one of r - 1 where the
            offset m is not in the range of M. Answers that are known up to a constant each
            (log-probabilities) are centred over the tokens first.
Queries.    None: a table of answers to different prompts, of which some 1.25 r are needed.
Algebra.    The dimension is the smallest r for which the rest, after the r leading singular
            vectors are taken away, looks like noise. What noise looks like is imitated: the part
            of rank r, rounded again by as much as these answers are rounded, entry by entry, and
            decomposed again. Compared is the largest singular value of the rest relative to its
            norm, so that the size of the noise need not be known, only its pattern.
            The space is affine if some w has w.q = 1 for the coordinates q of every answer: a
            least-squares problem with as many equations as answers. An offset that is weaker than
            the noise of single answers is common to all of them: it shows in their sum, weighted
            so that the coordinates cancel (a matched filter).
            Standard errors: the noise is what is left outside the space, row by row of M; the
            coordinates' second moments carry it into the basis.
When it fails. A direction that the noise hides is not counted. Where the last direction is not
            much larger than the noise, `ratio` says so; where more is left than one rounding
            explains, `level` does.
Source.     Carlini et al., "Stealing part of a production language model" (2024) for the rank of
            the answers; the imitation of the noise is a parametric bootstrap.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import SINGLE_ROUNDOFF, TINY, Array, Float
from keyhole.oracles.noise import REJECTION, ROUNDINGS, NoiseModel


@dataclass(frozen=True, eq=False)
class Space:
    """`basis` (V, r) orthonormal, the coordinates of all answers, and what noise does to them."""

    basis: Float[Array, "V r"]
    coordinates: Float[Array, "n r"]
    singular: Float[Array, " k"]  # values of the whole table
    noise: Float[Array, " V"]  # standard deviation of an answer's entries, by token
    ratio: float  # of the last singular value inside to the first outside

    @property
    def rank(self) -> int:
        return int(self.basis.shape[1])

    @property
    def level(self) -> float:
        """Root mean square of the noise."""
        return float(np.sqrt(np.mean(self.noise**2)))


def centre(answers: Float[Array, "n V"]) -> Float[Array, "n V"]:
    """The answers without what is common to all tokens."""
    return np.asarray(answers - answers.mean(axis=1, keepdims=True))


def outweighs_sums(noise: NoiseModel) -> bool:
    """Whether errors of the answers are larger than the roundings of the sums that they are, which
    are in single precision at least."""
    return noise.relative > SINGLE_ROUNDOFF or noise.error_floor > 0.0


def is_rounded_once(noise: NoiseModel) -> bool:
    """Whether each answer is off by one rounding, whose size is known, and by nothing else."""
    return outweighs_sums(noise) and noise.repeatable and not noise.tolerance


def find_rank(
    answers: Float[Array, "n V"],
    pattern: Float[Array, "n V"],
    rng: np.random.Generator,
    *,
    explained: bool = True,
) -> int | None:
    """The smallest number of singular vectors beyond which there is only noise of this pattern;
    None where all answers are needed. `pattern` are standard deviations that the number format
    explains: the rest may be so many roundings larger (`explained`), or of any size."""
    left, singular, right = np.linalg.svd(answers, full_matrices=False)
    rest = np.sqrt(np.cumsum((singular**2)[::-1])[::-1])  # norm of what r vectors leave
    own = np.finfo(float).eps * singular[0] * np.sqrt(max(answers.shape))  # of this decomposition
    size = float(np.linalg.norm(pattern))
    # what sums round by in single precision adds up; a larger rounding is the last, and alone
    summed = size <= 4.0 * SINGLE_ROUNDOFF * float(np.linalg.norm(answers))
    roundings = ROUNDINGS if summed else 2.0
    # behind a direction that is no noise the values fall by more than a little
    falls = singular[:-1] / np.maximum(singular[1:], TINY)
    draws = 4  # imitations of the noise for each dimension that is tried
    for rank in (np.flatnonzero(falls > 1.02) + 1).tolist():
        outside = _share_outside(answers.shape, rank)
        if explained and rest[rank] > max(roundings * size * outside, own):
            continue
        if rest[rank] <= own:
            return int(rank)
        if rank > len(singular) - 3:
            break
        kept = (left[:, :rank] * singular[:rank]) @ right[:rank]
        noise = pattern * (rest[rank] / max(size * outside, TINY))
        shares = np.array([_imitate(kept, noise, rank, rng) for _ in range(draws)])
        # the largest of k singular values of noise scatters by about 0.3 k^(-2/3) of itself
        scatter = 0.3 * (len(singular) - rank) ** (-2.0 / 3.0) * shares.mean()
        # and more than that is needed to doubt a rank behind which the values fall far
        doubt = 6.0 if falls[rank - 1] > 30.0 else 4.0
        allowed = shares.mean() + doubt * max(float(shares.std()), scatter)
        if singular[rank] / rest[rank] <= allowed:
            return int(rank)
    return None


def _share_outside(shape: tuple[int, ...], rank: int) -> float:
    """How much of a noise of this shape is left (in norm) when `rank` directions are fitted."""
    return float(np.sqrt((1.0 - rank / shape[0]) * max(1.0 - rank / shape[1], 0.0)))


def _imitate(
    kept: Float[Array, "n V"], noise: Float[Array, "n V"], rank: int, rng: np.random.Generator
) -> float:
    """Largest singular value behind `rank` relative to the norm of the rest, for the part of that
    rank with fresh noise of these standard deviations."""
    drawn = kept + noise * rng.standard_normal(noise.shape)
    beyond = np.linalg.svd(drawn, compute_uv=False)[rank:]
    return float(beyond[0] / max(float(np.linalg.norm(beyond)), TINY))


def make_space(answers: Float[Array, "n V"], rank: int) -> Space:
    """The leading `rank` directions of these answers, with the noise that is left outside."""
    left, singular, right = np.linalg.svd(answers, full_matrices=False)
    n, tokens = answers.shape
    coordinates = left[:, :rank] * singular[:rank]
    rest = answers - coordinates @ right[:rank]
    freedom = max((n - rank) * (1.0 - rank / tokens), 0.5)
    noise = np.sqrt(np.sum(rest**2, axis=0) / freedom)
    after = singular[rank] if rank < len(singular) else 0.0
    ratio = float(singular[rank - 1] / max(after, TINY)) if rank else 1.0
    return Space(right[:rank].T, coordinates, singular, noise, ratio)


@dataclass(frozen=True)
class CommonPart:
    """What all answers have in common outside a space."""

    strength: float  # times its own noise; zero where it is no more than noise makes of nothing
    smallest: float  # root mean square, over the tokens, from which it would have been seen


def find_offset(answers: Float[Array, "n V"], space: Space) -> CommonPart:
    """The offset of these answers outside the space; none where the space is affine already."""
    left, _ = np.linalg.qr(space.coordinates)
    weights = 1.0 - left @ left.sum(axis=0)  # their sum cancels all coordinates
    size = float(np.linalg.norm(weights))
    squares = space.noise**2
    noise = float(np.sqrt(squares.sum() * (1.0 - space.rank / len(squares))))
    _, off, moved = find_plane(space)
    common = float(np.linalg.norm(weights @ answers))
    rounded = ROUNDINGS * np.finfo(float).eps * float(np.linalg.norm(answers))  # of this sum
    if off <= 3.0 * moved or common <= rounded:
        return CommonPart(0.0, 0.0)
    strength = common / (size * max(noise, TINY))
    scatter = np.sqrt(2.0 * np.sum(squares**2)) / squares.sum()  # of the square, relative
    least = np.sqrt(REJECTION * scatter)
    smallest = least * noise / (size * np.sqrt(len(squares)))
    return CommonPart(strength if strength**2 > 1.0 + least**2 else 0.0, float(smallest))


def add_offset(answers: Float[Array, "n V"], space: Space) -> Space:
    """The space with one direction more: that in which its answers are off zero."""
    middle = answers.mean(axis=0)
    _, singular, right = np.linalg.svd(answers - middle, full_matrices=False)
    inside = right[: space.rank]
    off = middle - (middle @ inside.T) @ inside
    basis = np.vstack([inside, off / np.linalg.norm(off)]).T
    coordinates = answers @ basis
    rank = space.rank + 1
    rest = answers - coordinates @ basis.T
    freedom = max((len(answers) - rank) * (1.0 - rank / answers.shape[1]), 0.5)
    noise = np.sqrt(np.sum(rest**2, axis=0) / freedom)
    after = singular[space.rank] if space.rank < len(singular) else 0.0
    ratio = float(singular[space.rank - 1] / max(after, TINY))
    return Space(basis, coordinates, space.singular, noise, ratio)


def basis_errors(space: Space) -> Float[Array, "V r"]:
    """Standard errors of the basis: noise of each token's entries over the coordinates' spread."""
    spread = np.sqrt(np.diag(np.linalg.inv(space.coordinates.T @ space.coordinates)))
    outside = np.sqrt(1.0 - np.mean(np.sum(space.basis**2, axis=1)))  # errors inside are none
    return np.asarray(outside * space.noise[:, None] * spread)


def find_plane(space: Space) -> tuple[Float[Array, " r"], float, float]:
    """The w with w.q = 1 on all coordinates as nearly as can be; how far the answers are from it
    (root mean square); and how far noise takes them."""
    q = space.coordinates
    normal, *_ = np.linalg.lstsq(q, np.ones(len(q)), rcond=None)
    off = float(np.sqrt(np.sum((q @ normal - 1.0) ** 2) / max(len(q) - space.rank, 1)))
    return normal, off, float(np.linalg.norm((space.basis @ normal) * space.noise))
