"""Attention with a residual behind a norm, norm(x_N + attention(X)), by linear algebra alone.

Statement.  y = gain * n + bias, n = z / sqrt(mean z^2 + epsilon), z = x_N + offset + Σ_h M_h Σ_i
            w_hi x_i (mean-free for a LayerNorm). The residual has coefficient one: that makes
            scale, sign and epsilon known. Invisible are the means of M_h x and of the offset.
            B = I + Σ_h M_h. Everything below is in a basis of what the norm keeps (p numbers).
Queries.    1  d + 6 single tokens, most of them huge           -> gain, bias, B and offset up to λ
            2  many huge tokens before one anchor, patterns of moves -> which token each head takes
            3  these tokens, moved along a basis, each head along its own share -> M_h, and λ
            4  one or two tokens where z nearly vanishes          -> epsilon
            5  [a + τu_1 … a + τu_m; a] at d + 1 anchors or more  -> scores and key biases
Algebra.    The length of z is unknown in every answer. Where a query is an affine combination of
            others, so is its z: the lengths are the null vector of a linear system (1), or a least
            squares solution (2, 3). With hard attention z is affine in the moves; responses to
            random patterns have the rank of the number of heads, and their row space names the
            tokens in use. M_h has a small range, and the heads' sum is known from 1: that splits
            it. In 5 all weights w_hi are linear in one answer, and log w_hi / w_hN = τ u_i . key_h.
Fails.      Two heads on one token look like one head (another draw of tokens is tried); heads that
            attend to all tokens alike select none.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.block.box import ANSWER, NotThisBlock, Unclear
from keyhole.learners.block.scores import (
    Scores,
    Soft,
    Span,
    ask_scores,
    seen_rank,
    solve_scores,
)
from keyhole.linalg.rank import count_above, noise_edge
from keyhole.measurement.asker import Asker
from keyhole.models.attention import Attention, Head
from keyhole.models.block import Block
from keyhole.models.norm import Norm, kept_plane
from keyhole.stages.epsilon import epsilons_behind, find_epsilon


@dataclass(frozen=True)
class HardOptions:
    """What a person might tune of the search for selected tokens."""

    candidates: int = 2048  # huge tokens of which each head selects one
    size: float = 1e5  # of their length, at least: the best score is then far above the second
    step: float = 0.12  # length of a move of a selected token, relative to the token
    first_step: float = 5e-3  # of all candidates, among which the gaps are narrower
    shorter: float = 0.4  # by which the moves are shortened where a head jumped to another token
    narrow: int = 16  # width up to which an answer has few numbers: one more is asked each time
    draws: int = 6  # of candidate tokens, before the search is given up
    patterns: int = 6  # of moves at first: enough to tell up to four heads
    spare: int = 2  # patterns beyond the number of heads that name the tokens without doubt
    extra: int = 2  # combinations of moves beyond those that would just do
    named: float = 1e-6  # distance of a token's pattern from the responses' row space that is none
    chance: float = 0.01  # of naming a token that no head takes
    soft: float = 1e-10  # what the weights of all other tokens may add to an answer
    roundings: float = 256.0  # of a box, that a direction may be off by


HARD = HardOptions()


# --- 1: the norm and the sum of all maps --------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Singles:
    """Single tokens: a huge frame, one anchor, and combinations of these."""

    frame: Float[Array, "d d"]  # columns, of length one
    size: float  # of the huge tokens
    anchor: Float[Array, " d"]
    mixed: Float[Array, "e d"]  # coefficients of the other tokens in the frame
    huge: Array  # whether the combination is of the huge tokens
    answers: Float[Array, "n d"] = field(metadata=ANSWER)  # frame, anchor, combinations


@dataclass(frozen=True, eq=False)
class Projected:
    """The norm, and B and the offset up to one factor, in the norm's plane."""

    norm: Norm  # epsilon is not known yet
    whole: Float[Array, "p d"]
    offset: Float[Array, " p"]

    def directions(self, answers: Float[Array, "n d"]) -> Float[Array, "n p"]:
        """Unit vectors along z."""
        found = ((answers - self.norm.bias) / self.norm.gain) @ self.norm.plane
        return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True))


def single_tokens(data: Singles) -> Float[Array, "n d"]:
    """The tokens in the order of the answers."""
    size = np.where(data.huge, data.size, 1.0)[:, None]
    rest = 1.0 - np.where(data.huge, 1.0, 1.0 / data.size) * data.mixed.sum(axis=1)
    mixed = size * (data.mixed @ data.frame.T) + rest[:, None] * data.anchor
    return np.concatenate([data.size * data.frame.T, data.anchor[None], mixed])


def ask_singles(box: Asker, rng: np.random.Generator) -> Singles:
    width = box.width
    frame, _ = np.linalg.qr(rng.standard_normal((width, width)))
    few = 1 + HARD.narrow // width
    count = 1 + width // 64 + few
    mixed = rng.standard_normal((count + few, width)) / np.sqrt(width)
    huge = np.arange(count + few) < count
    anchor = rng.standard_normal(width)
    # the first answer tells the number format, on which the size depends
    first = box(anchor[None, None], "norm")
    data = Singles(frame, huge_size(box), anchor, mixed, huge, first)
    tokens = single_tokens(data)
    frames = box(tokens[:width, None], "norm")
    rest = box(tokens[width + 1 :, None], "norm")
    return replace(data, answers=np.concatenate([frames, first, rest]))


def huge_size(box: Asker) -> float:
    """Length of tokens beside which epsilon vanishes: 1e6 in double precision, 500 in single."""
    return float(box.error ** (-3.0 / 8.0))


def fit_layer_norm(answers: Float[Array, "n d"]) -> tuple[Norm, float]:
    """Gain and bias from answers whose z is huge, and how far they are from a hyperplane.

    1 / gain is the normal of the hyperplane of the answers; in it they lie on a sphere.
    """
    centre = answers.mean(axis=0)
    inverse = np.ones(answers.shape[1])
    off = 0.0
    if not np.ptp(answers, axis=0).all():
        return Norm(inverse, None, 0.0), np.inf
    for _ in range(3):  # in coordinates of equal size the normal keeps all its digits
        _, size, axes = np.linalg.svd((answers - centre) * inverse)
        inverse = inverse * axes[-1] * np.sqrt(len(inverse))
        off = float(size[len(inverse) - 1] / size[0])
    plane = kept_plane(answers.shape[1], "layer")
    flat = ((answers - centre) * inverse) @ plane
    system = np.column_stack([2.0 * flat, -np.ones(len(flat))])
    square = np.sum(flat**2, axis=1)
    if not square.max() > 0:  # nothing is left beside the mean
        return Norm(np.ones(answers.shape[1]), None, 0.0), np.inf
    solution, *_ = np.linalg.lstsq(system, square, rcond=None)
    middle = solution[:-1]
    radius = float(middle @ middle - solution[-1])
    off = max(off, float(np.abs(system @ solution - square).max() / square.max()))
    if not radius > 0 or not np.all(inverse != 0):
        return Norm(np.ones(answers.shape[1]), None, 0.0), np.inf
    gain = np.sqrt(radius / len(inverse)) / inverse
    gain = gain if np.median(gain) > 0 else -gain
    return Norm(gain, centre + (plane @ middle) / inverse, 0.0), off


def fit_rms_norm(answers: Float[Array, "n d"]) -> tuple[Norm, float]:
    """Gain from answers whose z is huge: they lie on an ellipsoid around zero."""
    width = answers.shape[1]
    weight, *_ = np.linalg.lstsq(answers**2, np.ones(len(answers)), rcond=None)
    off = float(np.abs((answers**2) @ weight - 1.0).max())
    if not np.all(weight > 0):
        return Norm(np.ones(width), None, 0.0, "rms"), np.inf
    return Norm(1.0 / np.sqrt(width * weight), None, 0.0, "rms"), off


def solve_singles(data: Singles, unit: float, kind: str | None = None) -> Projected:
    """The norm, then B and the offset up to one factor."""
    width = len(data.anchor)
    far = np.concatenate([data.answers[:width], data.answers[width + 1 :][data.huge]])
    doubt = 3e5 * unit
    norm, off = fit_layer_norm(far)
    if kind == "rms" or (kind is None and off > doubt):
        norm, off = fit_rms_norm(far)
    if not off < doubt:
        raise NotThisBlock("the answers to huge tokens lie on no sphere of a norm")
    plane = norm.plane
    n = Projected(norm, plane.T, plane[0]).directions(data.answers)
    frame, anchor, mixed = n[:width], n[width], n[width + 1 :]
    count = len(mixed)
    # unknown: lengths of z at the frame (over the size), at the anchor, at the combinations
    system = np.zeros((count, plane.shape[1], width + 1 + count))
    system[:, :, :width] = np.einsum("ek,kp->epk", data.mixed, frame)
    total = data.mixed.sum(axis=1) / data.size
    rest = np.where(data.huge, 1.0 / data.size - total, 1.0 - total)
    system[:, :, width] = rest[:, None] * anchor
    for e in range(count):
        system[e, :, width + 1 + e] = -mixed[e]
    triangle = np.linalg.qr(system.reshape(-1, system.shape[2]), mode="r")
    _, size, axes = np.linalg.svd(triangle)
    lengths = axes[-1, : width + 1]
    lengths = lengths if lengths.sum() > 0 else -lengths
    if len(size) >= system.shape[2] and not size[-1] < 1e3 * unit * size[0] / 1e-2:
        raise NotThisBlock("z is no affine function of a single token")
    if not (lengths > 0).all():
        raise NotThisBlock("z is no affine function of a single token")
    z, at_anchor = frame * lengths[:width, None], anchor * lengths[width]
    inside = data.frame.T @ data.anchor  # z_k = B f_k + c / size, z_a = B a + c
    moved = (z - at_anchor / data.size).T
    along = moved @ np.linalg.inv(np.eye(width) - np.outer(inside, np.ones(width)) / data.size)
    return Projected(norm, along @ data.frame.T, at_anchor - along @ inside)


# --- 2: which token each head takes --------------------------------------------------------------


def calibrate(
    base: Float[Array, " p"],
    moved: Float[Array, "k p"],
    mixed: Float[Array, "c p"],
    shares: Float[Array, "c k"],
) -> tuple[Float[Array, "k p"], float]:
    """What each move adds to z, in units of the length of z at the base, from directions alone:
    the combinations of moves (rows of shares) add up. Also the residual of these equations."""
    count, extra = len(moved), len(mixed)
    system = np.zeros((extra, len(base), count + extra))
    system[:, :, :count] = -np.einsum("ck,kp->cpk", shares, moved)
    for c in range(extra):
        system[c, :, count + c] = mixed[c]
    right = (1.0 - shares.sum(axis=1))[:, None] * base
    table = system.reshape(-1, count + extra)
    lengths, *_ = np.linalg.lstsq(table, right.ravel(), rcond=None)
    rest = float(np.abs(table @ lengths - right.ravel()).max())
    if not (lengths[:count] > 0).all():
        return moved - base, np.inf
    return moved * lengths[:count, None] - base, rest


def combinations(
    base: Float[Array, " p"], moved: Float[Array, "k p"], unit: float, rng: np.random.Generator
) -> Float[Array, "c k"]:
    """Orthonormal combinations of moves, as many as calibration needs: each gives as many
    equations as the moves span dimensions."""
    count, spanned = len(moved), moved_rank(base, moved, unit)
    extra = -(-count // max(1, spanned)) + HARD.extra
    if extra >= count:
        return np.asarray(rng.standard_normal((extra, count)) / np.sqrt(count))
    basis, _ = np.linalg.qr(rng.standard_normal((count, extra)))
    return np.asarray(basis.T)


def moved_rank(base: Float[Array, " p"], moved: Float[Array, "k p"], unit: float) -> int:
    """Dimensions that moves add to the direction of the base, seen without their lengths."""
    off = moved - np.outer(moved @ base, base)
    values = np.linalg.svd(off, compute_uv=False)
    return count_above(values, max(1e-8 * float(values.max(initial=0.0)), edge_of(off, unit)))


def edge_of(moved: Float[Array, "k p"], unit: float) -> float:
    """The largest singular value that roundings of directions make."""
    entry = 4.0 * unit / np.sqrt(moved.shape[1])  # of numbers whose squares sum to one
    return noise_edge(entry, moved.shape)


def doubt_of(unit: float, step: float) -> float:
    """What moves may leave of answers that are affine in them: more is a jump."""
    return HARD.soft / step + HARD.roundings * unit


@dataclass(frozen=True, eq=False)
class Selected:
    """The tokens that the heads select with this anchor."""

    anchor: Float[Array, " d"]
    tokens: Float[Array, "k d"]
    size: float


def select_tokens(
    box: Asker, known: Projected, step: float, least: int, rng: np.random.Generator
) -> Selected | None:
    """Huge tokens of which each head takes one, or None where this draw does not tell."""
    width, size = box.width, max(huge_size(box), HARD.size)
    plane = len(known.offset)
    longest = box.oracle.spec.domain.max_length
    candidates = HARD.candidates if longest is None else min(HARD.candidates, longest - 1)
    anchor = rng.standard_normal(width)
    tokens = size * unit_rows(rng, candidates, width)
    step = max(step, box.error**0.25)
    moves = step * size * unit_rows(rng, 1, width)[0]
    sequence = np.concatenate([tokens, anchor[None]])
    base = known.directions(box(sequence[None], "selected tokens"))[0]
    pattern, n = np.zeros((0, candidates)), np.zeros((0, plane))
    count = max(HARD.patterns, least + HARD.spare)

    def ask(rows: Float[Array, "n k"]) -> Float[Array, "n p"]:
        asked = np.repeat(sequence[None], len(rows), axis=0)
        asked[:, :-1] += rows[:, :, None] * moves
        return known.directions(box(asked, "selected tokens"))

    while True:
        fresh = rng.uniform(-1.0, 1.0, (count - len(pattern), candidates))
        pattern, n = np.concatenate([pattern, fresh]), np.concatenate([n, ask(fresh)])
        heads = moved_rank(base, n, box.error)
        if heads <= count - HARD.spare:
            break
        if heads >= min(plane - 1, 32):
            return None
        count = 2 * count
    shares = combinations(base, n, box.error, rng)
    response, rest = calibrate(base, n, ask(shares @ pattern), shares)
    if rest > doubt_of(box.error, step):
        return None
    axes, values, _ = np.linalg.svd(response, full_matrices=False)
    kept = axes[:, :heads]
    off = np.linalg.norm(pattern - kept @ (kept.T @ pattern), axis=0)
    # the weakest head's response is known least; lengths of z, too, carry roundings
    doubt = max(HARD.named, HARD.roundings * edge_of(response, box.error) / values[heads - 1])
    chance = (HARD.chance / candidates) ** (1.0 / (count - heads))  # one of so many comes so near
    (used,) = np.nonzero(off < min(doubt, chance) * np.linalg.norm(pattern, axis=0))
    if len(used) != heads:
        return None
    return Selected(anchor, tokens[used], size)


def unit_rows(rng: np.random.Generator, count: int, width: int) -> Float[Array, "n d"]:
    rows = rng.standard_normal((count, width))
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


# --- 3: value maps --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Moves:
    """Selected tokens moved one by one along a basis, in combinations, and all alike."""

    selected: Selected
    step: float
    basis: Float[Array, "d d"]  # columns
    batches: tuple["Batch", ...]
    joint: Float[Array, "j d"]  # moves of all tokens at once
    base: Float[Array, " d"] = field(metadata=ANSWER)
    joint_answers: Float[Array, "j d"] = field(metadata=ANSWER)


@dataclass(frozen=True, eq=False)
class Batch:
    """Moves that are calibrated together: (head, column of the basis) each."""

    head: Array
    column: Array
    shares: Float[Array, "c k"]
    moved: Float[Array, "k d"] = field(metadata=ANSWER)
    mixed: Float[Array, "c d"] = field(metadata=ANSWER)


@dataclass(frozen=True, eq=False)
class Values:
    """λ (of B and the offset), the sign of the gains, and M_h in the norm's plane."""

    known: Projected  # B and offset with their scale
    maps: Float[Array, "h p d"]


def ask_batch(
    box: Asker,
    selected: Selected,
    step: float,
    basis: Array,
    base: Float[Array, " d"],
    known: Projected,
    wanted: list[tuple[int, int]],
    rng: np.random.Generator,
) -> Batch:
    heads = len(selected.tokens)
    head, column = (np.array(part, dtype=int) for part in zip(*wanted, strict=True))
    moves = np.zeros((len(wanted), heads + 1, box.width))
    moves[np.arange(len(wanted)), head] = step * selected.size * basis[:, column].T
    sequence = np.concatenate([selected.tokens, selected.anchor[None]])
    moved = box(sequence + moves, "value maps")
    n = known.directions(np.concatenate([base[None], moved]))
    # every token may move as far in a combination as it does alone
    shares = np.sqrt(heads) * combinations(n[0], n[1:], box.error, rng)
    mixed = box(sequence + np.tensordot(shares, moves, 1), "value maps")
    return Batch(head, column, shares, moved, mixed)


def ask_moves(
    box: Asker, selected: Selected, known: Projected, step: float, rng: np.random.Generator
) -> Moves | None:
    """Every head's token along its own share of a basis and a few directions more, until the
    ranks of all value maps are seen and the sum of the maps splits; None after a jump."""
    width, plane, heads = box.width, len(known.offset), len(selected.tokens)
    basis, _ = np.linalg.qr(rng.standard_normal((width, width)))
    sequence = np.concatenate([selected.tokens, selected.anchor[None]])
    joint = step * selected.size * unit_rows(rng, 1 + HARD.narrow // width, width)
    asked = np.repeat(sequence[None], 1 + len(joint), axis=0)
    asked[1:, :-1] += joint[:, None]
    answers = box(asked, "value maps")
    if jumps(box, selected, answers[0], known, step, rng):
        return None
    data = Moves(selected, step, basis, (), joint, answers[0], answers[1:])
    share = -(-width // heads)
    per_head = [0] * heads
    target = [min(width, share + max(1, share // 8))] * heads
    while True:
        wanted = []
        for h in range(heads):
            first = round(h * width / heads)
            wanted += [(h, (first + k) % width) for k in range(per_head[h], target[h])]
            per_head[h] = target[h]
        batch = ask_batch(box, selected, step, basis, answers[0], known, wanted, rng)
        data = replace(data, batches=(*data.batches, batch))
        responses, rest = all_responses(data, known)
        if rest > doubt_of(box.error, step):
            return None
        ranks = [
            seen_rank(np.linalg.svd(np.array(list(own.values())), compute_uv=False), box.error)
            for own in responses
        ]
        more = [
            h for h in range(heads) if ranks[h] >= min(per_head[h], plane) and per_head[h] < width
        ]
        if not more:
            break
        for h in more:
            target[h] = min(width, 2 * per_head[h])
    wanted = unsplit_moves(responses, width, box.error)
    if wanted:
        batch = ask_batch(box, selected, step, basis, answers[0], known, wanted, rng)
        data = replace(data, batches=(*data.batches, batch))
        if all_responses(data, known)[1] > doubt_of(box.error, step):
            return None
    return data


def jumps(
    box: Asker,
    selected: Selected,
    base: Float[Array, " d"],
    known: Projected,
    step: float,
    rng: np.random.Generator,
    margin: float = 1.5,
) -> bool:
    """Whether some head takes another token when all are moved at random, a bit farther: told by
    a few queries before as many as the width are paid. In a narrow box these few are no less."""
    heads, width = selected.tokens.shape
    count = width // 64
    if count < 2:
        return False
    moves = np.zeros((count, heads + 1, width))
    apart = unit_rows(rng, count * heads, width).reshape(count, heads, width)
    moves[:, :-1] = margin * step * selected.size * apart
    shares, _ = np.linalg.qr(rng.standard_normal((count, count)))
    sequence = np.concatenate([selected.tokens, selected.anchor[None]])
    both = np.concatenate([moves, np.tensordot(shares, moves, 1)])
    n = known.directions(np.concatenate([base[None], box(sequence + both, "value maps")]))
    _, rest = calibrate(n[0], n[1 : 1 + count], n[1 + count :], shares)
    return rest > doubt_of(box.error, step)


def all_responses(data: Moves, known: Projected) -> tuple[list[dict[int, Array]], float]:
    """For each head, what a move along a column of the basis adds to z; and the worst residual."""
    base = known.directions(data.base[None])[0]
    found: list[dict[int, Array]] = [{} for _ in data.selected.tokens]
    worst = 0.0
    for batch in data.batches:
        n, mixed = known.directions(batch.moved), known.directions(batch.mixed)
        added, rest = calibrate(base, n, mixed, batch.shares)
        worst = max(worst, rest)
        for head, column, one in zip(batch.head, batch.column, added, strict=True):
            found[head][int(column)] = one
    return found, worst


def value_ranges(responses: list[dict[int, Array]], unit: float) -> list[Array]:
    """Orthonormal bases (p, r) of what each head can add to z."""
    ranges = []
    for own in responses:
        axes, values, _ = np.linalg.svd(np.array(list(own.values())).T, full_matrices=False)
        ranges.append(axes[:, : seen_rank(values, unit)])
    return ranges


def unsplit_moves(
    responses: list[dict[int, Array]], width: int, unit: float
) -> list[tuple[int, int]]:
    """Moves still needed so that, for every column of the basis, the heads that were not moved
    along it have independent ranges."""
    ranges = value_ranges(responses, unit)
    wanted = []
    for still, columns in group_columns(responses, width):
        kept: list[Array] = []
        for h in still:
            values = np.linalg.svd(np.hstack([*kept, ranges[h]]), compute_uv=False)
            tall = sum(part.shape[1] for part in kept) + ranges[h].shape[1] <= len(ranges[h])
            if tall and values[-1] > 1e-3:
                kept.append(ranges[h])
            else:
                wanted += [(h, column) for column in columns]
    return wanted


def group_columns(
    responses: list[dict[int, Array]], width: int
) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """Heads that were not moved along a column of the basis, with all columns for which it is
    these."""
    found: dict[tuple[int, ...], list[int]] = {}
    for column in range(width):
        still = tuple(h for h, own in enumerate(responses) if column not in own)
        found.setdefault(still, []).append(column)
    yield from found.items()


def solve_moves(data: Moves, known: Projected, unit: float) -> Values:
    """The scale of B, then every M_h."""
    n = known.directions(np.concatenate([data.base[None], data.joint_answers]))
    count = len(data.joint)
    plane = known.norm.plane
    # s_j n_j - first B w_j + second w_j = n_0 for moves w_j of all tokens at once
    system = np.zeros((count, len(known.offset), count + 2))
    for j in range(count):
        system[j, :, j] = n[1 + j]
    along = data.joint / (data.step * data.selected.size)
    system[:, :, count] = -along @ known.whole.T
    system[:, :, count + 1] = along @ plane
    table = system.reshape(-1, count + 2)
    right = np.tile(n[0], count)
    solution, *_ = np.linalg.lstsq(table, right, rcond=None)
    rest = float(np.abs(table @ solution - right).max())
    if rest > 10.0 * doubt_of(unit, data.step):
        raise Unclear("the moves of all selected tokens do not add up to the sum of the maps")
    first, second = solution[count], solution[count + 1]
    if not first > 0 or second == 0:
        raise Unclear("the residual connection was not seen")
    norm = known.norm
    if second < 0:  # all gains have the other sign, and so have all directions
        norm = Norm(-norm.gain, norm.bias, norm.epsilon, norm.kind)
    scale = first / second
    whole = Projected(norm, scale * known.whole, scale * known.offset)
    responses, _ = all_responses(data, known)
    factor = 1.0 / second  # length of z at the base, over that of a move
    total = whole.whole @ data.basis - plane.T @ data.basis
    ranges = value_ranges(responses, unit)
    heads, width = len(responses), len(data.basis)
    maps = np.zeros((heads, len(known.offset), width))
    for h, own in enumerate(responses):
        for column, one in own.items():
            maps[h, :, column] = ranges[h] @ (ranges[h].T @ one) * factor
    left = total - maps.sum(axis=0)
    for still, columns in group_columns(responses, width):
        if still:
            joint = np.hstack([ranges[h] for h in still])
            share, *_ = np.linalg.lstsq(joint, left[:, columns], rcond=None)
            ends = np.cumsum([0, *(ranges[h].shape[1] for h in still)])
            for h, (start, stop) in zip(still, pairwise(ends), strict=True):
                maps[h][:, columns] = ranges[h] @ share[start:stop]
    return Values(whole, maps @ data.basis.T)


# --- 4: epsilon -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Near:
    """Single tokens where z is small, and the answers."""

    tokens: Float[Array, "n d"]
    answers: Float[Array, "n d"] = field(metadata=ANSWER)


def ask_epsilon(box: Asker, values: Values, rng: np.random.Generator) -> Near:
    """Tokens whose z has a mean square near epsilon, which is found on the way."""
    known, width = values.known, box.width
    centre, *_ = np.linalg.lstsq(known.whole, -known.offset, rcond=None)
    heading = unit_rows(rng, 1, width)[0]
    per_step = float(np.mean((known.norm.plane @ (known.whole @ heading)) ** 2))
    tokens, answers = [], []

    def look(size: float) -> float:
        token = box.representable(centre + size / np.sqrt(per_step) * heading)
        tokens.append(token)
        answers.append(box(token[None, None], "epsilon")[0])
        return solve_epsilon(values, Near(np.array(tokens[-1:]), np.array(answers[-1:])))

    find_epsilon(look)
    return Near(np.array(tokens), np.array(answers))


def solve_epsilon(values: Values, near: Near) -> float:
    """Of several answers, from the one that shows it best."""
    z = near.tokens @ values.known.whole.T + values.known.offset
    found, clear = epsilons_behind(values.known.norm, z, near.answers)
    return float(max(0.0, found[int(np.argmax(clear))]))


# --- 5: scores ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PostNormWeights:
    """Reads attention weights off an answer of which only the direction of z is known."""

    values: Values

    @property
    def maps(self) -> Float[Array, "h p d"]:
        return self.values.maps

    @property
    def readable(self) -> int:
        return self.maps.shape[1] - 1  # the length of z is unknown, too

    def equations(self, soft: Soft) -> tuple[Float[Array, "n p u"], Float[Array, "n p"]]:
        """s n - Σ w_hi M_h τ u_i = B a + c, in the unknowns (w, s)."""
        known = self.values.known
        n = known.directions(soft.answers)
        return -n[:, :, None], -(soft.anchor @ known.whole.T + known.offset)


# --- all of it ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Answers:
    """All that was asked, in the order of the steps."""

    singles: Singles
    moves: Moves
    near: Near
    scores: Scores

    def pairs(self) -> Iterator[tuple[Float[Array, "n length d"], Float[Array, "n d"]]]:
        """Queries and answers that the finished model must explain."""
        yield single_tokens(self.singles)[:, None], self.singles.answers
        yield self.near.tokens[:, None], self.near.answers
        for soft in self.scores.parts:
            context = soft.anchor[:, None] + soft.tokens
            yield np.concatenate([context, soft.anchor[:, None]], axis=1), soft.answers


def ask_post_norm_attention(box: Asker, rng: np.random.Generator) -> Answers:
    """Asks everything; raises NotThisBlock or Unclear."""

    def ask_soft(anchor: Array, tokens: Array) -> Soft:
        anchor = box.representable(anchor)
        context = box.representable(anchor[:, None] + tokens)
        asked = np.concatenate([context, anchor[:, None]], axis=1)
        return Soft(anchor, context - anchor[:, None], box(asked, "scores"))

    singles = ask_singles(box, rng)
    known = solve_singles(singles, box.error)
    first, step, least = HARD.first_step, HARD.step, 0
    reason = "no draw of huge tokens showed which token each head selects"
    for _ in range(HARD.draws):
        selected = select_tokens(box, known, first, least, rng)
        if selected is None:
            first *= HARD.shorter
            continue
        if len(selected.tokens) < least:
            continue
        moves = ask_moves(box, selected, known, step, rng)
        if moves is None:
            step *= HARD.shorter
            continue
        try:
            values = solve_moves(moves, known, box.error)
            near = ask_epsilon(box, values, rng)
            widest = max(
                seen_rank(np.linalg.svd(m, compute_uv=False), box.error) for m in values.maps
            )
            span = Span(unit_rows(rng, 1, box.width)[0], 1.0, np.inf)
            scores = ask_scores(PostNormWeights(values), ask_soft, span, widest, box.error, rng)
        except (Unclear, NotThisBlock) as failed:
            reason = str(failed)
            least = max(least, len(selected.tokens))
            continue
        return Answers(singles, moves, near, scores)
    raise Unclear(reason)


def solve_post_norm_attention(data: Answers, unit: float, kind: str | None = None) -> Block:
    """The sublayer from all answers; a pure function of them."""
    known = solve_singles(data.singles, unit, kind)
    values = solve_moves(data.moves, known, unit)
    epsilon = solve_epsilon(values, data.near)
    norm = values.known.norm
    plane = norm.plane
    heads = [
        Head((left, right), bias, (plane @ part).T)
        for (left, right, bias), part in zip(
            solve_scores(data.scores, PostNormWeights(values)), values.maps, strict=True
        )
    ]
    return Block(
        Attention(heads, plane @ values.known.offset),
        None,
        norm="post",
        kind=norm.kind,
        epsilons=[epsilon if np.isfinite(epsilon) else 0.0],
        gain=norm.gain[None],
        bias=norm.bias[None],
    )
