"""Scores and key biases of heads whose value maps are known: all weights are linear in one answer.

Statement.  M_h known, the answer to [a + τu_1 … a + τu_m; a] is linear in the weights w_hi, and
            log w_hi / w_hN = τ u_i . key_h(a), key_h(a) = W_h a + c_h.
Queries.    At a base and along the first directions of an orthonormal basis all context tokens:
            this gives whole keys, hence the range of W_h and its rank. Along the other directions,
            in blocks, one set of context tokens at each of a few anchors more than directions.
Algebra.    Linear least squares throughout. Context tokens are the best conditioned of a few draws.
Fails.      Where the weights of all heads are more unknowns than an answer has numbers, or a weight
            is below the noise.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from scipy.linalg import solve_triangular

from keyhole.arrays import Array, Float
from keyhole.learners.block.box import ANSWER, NotThisBlock, Unclear
from keyhole.linalg.rank import count_above_share, find_fall


@dataclass(frozen=True)
class ScoreOptions:
    """What a person might tune of the reading of scores."""

    directions: float = 0.8  # context tokens per head's dimension, of one answer
    block: int = 16  # anchor directions that are solved for together
    wide: int = 128  # width from which on sets of tokens are conditioned alike
    redundant: float = 1.08  # equations per unknown: a square system would lose two digits
    readers: int = 24  # sets of context tokens tried, of which the best conditioned is asked
    furthest: float = 1.5  # distance of an anchor from the base, relative to the reach
    faint: float = 5e-3  # relative singular value of the keys that leaves a range unsure
    extra: int = 2  # anchors that are added for it
    shortest: float = 0.05  # context steps, of the reach or of the longest, that are the last tried
    unusual: float = 1e4  # times the median of what weights leave of answers: another one was read
    weak: float = 1e-7  # singular value, relative to the largest, that does not count for a rank
    hidden: float = 2e-3  # the same, where errors decide it, from which on they may hide a rank
    drop: float = 5.0  # of singular values, behind which they are errors


READING = ScoreOptions()


def seen_rank(values: Float[Array, " k"], unit: float) -> int:
    """Singular values that stand out of the noise."""
    return count_above_share(values, max(READING.weak, 1e5 * unit))


@dataclass(frozen=True, eq=False)
class Soft:
    """Queries [a + τ u_1 … a + τ u_m; a]: anchors, steps, and the answers."""

    anchor: Float[Array, "n d"]
    tokens: Float[Array, "n m d"]  # the steps τ u_i
    answers: Float[Array, "n k"] = field(metadata=ANSWER)

    def __add__(self, other: "Soft") -> "Soft":
        return Soft(*(np.concatenate([getattr(self, name), getattr(other, name)])
                      for name in ("anchor", "tokens", "answers")))  # fmt: skip

    def taken(self, which: Array | slice) -> "Soft":
        return Soft(self.anchor[which], self.tokens[which], self.answers[which])


@runtime_checkable
class Weights(Protocol):
    """What is known of the layer: Σ_hi w_hi maps_h τ u_i + table · unknowns = right side."""

    @property
    def maps(self) -> Float[Array, "h p d"]: ...

    @property
    def readable(self) -> int:
        """Weights that can be read off one answer, at most."""
        ...

    def equations(self, soft: Soft) -> tuple[Float[Array, "n p u"], Float[Array, "n p"]]:
        """The columns of unknowns beside the weights, and the right side."""
        ...


@dataclass(frozen=True, eq=False)
class Span:
    """Where anchors lie: around a base, so far; and how long context steps may be."""

    base: Float[Array, " d"]
    reach: float
    longest: float


def read_log_odds(
    weights: Weights, soft: Soft, off: float = np.inf
) -> tuple[Float[Array, "n h m"], float]:
    """log w_hi / w_hN of every query: NaN where a weight came out negative, and where an answer was
    misread: weights leave more than `off` of it, or far more than of the others. Also the largest
    residual of the equations, relative to their right sides."""
    heads = len(weights.maps)
    count, context, _ = soft.tokens.shape
    beside, right = weights.equations(soft)
    added = map_tokens(weights.maps, soft.tokens)
    tables = np.concatenate([added, beside], axis=2)
    found, rest = np.empty((count, heads, context)), np.empty(count)
    for k, table in enumerate(tables):
        scale = np.maximum(np.linalg.norm(table, axis=0), 1e-300)
        solution = solve_tall(table / scale, right[k])
        left = np.abs((table / scale) @ solution - right[k]).max()
        rest[k] = left / np.linalg.norm(right[k])
        share = (solution / scale)[: heads * context].reshape(heads, context)
        own = 1.0 - share.sum(axis=1, keepdims=True)
        with np.errstate(invalid="ignore", divide="ignore"):
            found[k] = np.where((share > 0) & (own > 0), np.log(share / own), np.nan)
    if np.isfinite(off):
        found[rest > usual_level(rest, off)] = np.nan
    return found, float(rest.max())


def map_tokens(
    maps: Float[Array, "h p d"], tokens: Float[Array, "n m d"]
) -> Float[Array, "n p hm"]:
    """M_h u_i of every head and token of a set, side by side."""
    flat = tokens.reshape(-1, tokens.shape[2]).T
    added = (maps.reshape(-1, maps.shape[2]) @ flat).reshape(*maps.shape[:2], *tokens.shape[:2])
    return np.asarray(added.transpose(2, 1, 0, 3).reshape(len(tokens), maps.shape[1], -1))


def solve_tall(table: Float[Array, "p u"], right: Float[Array, "p *k"]) -> Float[Array, "u *k"]:
    """Least squares by orthogonal columns, several times as quick as by singular values; by these
    where columns depend on each other."""
    if table.shape[0] >= table.shape[1]:
        columns, triangle = np.linalg.qr(table)
        sizes = np.abs(np.diag(triangle))
        if sizes.min(initial=np.inf) > 1e-12 * sizes.max(initial=0.0):
            return np.asarray(solve_triangular(triangle, columns.T @ right, check_finite=False))
    return np.asarray(np.linalg.lstsq(table, right, rcond=None)[0])


def usual_level(rest: Float[Array, " n"], most: float) -> float:
    """What weights may leave of an answer that was read at its own point."""
    return min(most, max(READING.unusual * float(np.median(rest)), READING.unusual * 2.0**-43))


def draw_context(
    weights: Weights, context: int, rng: np.random.Generator, whole: bool
) -> Float[Array, "g m d"]:
    """Context tokens in sets of m, best conditioned of a few draws: all directions if `whole`."""
    width = weights.maps.shape[2]
    best, least = np.zeros((1, context, width)), -1.0
    draws = READING.readers if width <= READING.wide else 1
    for _ in range(draws):
        basis, _ = np.linalg.qr(rng.standard_normal((width, width)))
        groups = [basis.T[k : k + context] for k in range(0, width if whole else context, context)]
        short = context - len(groups[-1])
        if short:  # the last set is filled up with directions that are known already
            groups[-1] = np.concatenate([groups[-1], basis.T[:short]])
        tokens = np.array(groups)
        if draws == 1:
            return tokens
        sizes = np.linalg.svd(map_tokens(weights.maps, tokens), compute_uv=False)
        worst = float((sizes[:, -1] / sizes[:, 0]).min())
        if worst > least:
            best, least = tokens, worst
    return best


@dataclass(frozen=True, eq=False)
class Scores:
    """What was asked: at the base and along the first directions with all context tokens, along
    the others with one set each; and the ranks that were seen."""

    span: Span
    basis: Float[Array, "d d"]  # columns: directions of the anchors
    full: Soft  # (1 + leading) * groups queries
    leading: int
    blocks: tuple[tuple[Array, Float[Array, "n g"], Soft], ...]  # columns, shares, answers
    ranks: tuple[int, ...]
    off: float  # what weights may leave of an answer

    @property
    def parts(self) -> tuple[Soft, ...]:
        return (self.full, *(part[2] for part in self.blocks))


Ask = Callable[[Array, Array], Soft]


def ask_scores(
    weights: Weights, ask: Ask, span: Span, guess: int, unit: float, rng: np.random.Generator
) -> Scores:
    """`guess`: of the scores' rank, with which the search for it begins."""
    width = weights.maps.shape[2]
    context = read_at_once(weights, unit)
    basis, _ = np.linalg.qr(rng.standard_normal((width, width)))
    tokens = draw_context(weights, context, rng, whole=True)
    base, reach = span.base, span.reach
    off = max(1e-4, 1e5 * unit)
    size, full, rest = find_size(weights, ask, span, base + reach * basis[:, 0], tokens, off)
    # what is known of the layer may be less exact than the answers; keys are off by tens of that
    unit = max(unit, 1e-3 * rest)
    groups, longest = len(tokens), size
    if groups > 1:
        full = full + ask(np.repeat(base[None], groups - 1, axis=0), size * tokens[1:])
    leading = 0
    target = min(guess, width)
    while True:
        anchors = np.array([base + reach * basis[:, k] for k in range(leading, target)])
        everywhere = np.tile(size * tokens, (len(anchors), 1, 1))
        full = full + ask(np.repeat(anchors, groups, axis=0), everywhere)
        leading = target
        keys = full_keys(weights, full, groups, off)
        if not np.isfinite(keys).all():
            if size < READING.shortest * longest:
                raise Unclear("some attention weights are below the noise of the answers")
            # keys are larger here than where the size was found, or an answer was misread
            size, leading, target = 0.3 * size, 0, min(guess, width)
            full = ask(np.repeat(base[None], groups, axis=0), size * tokens)
            continue
        sizes = [np.linalg.svd(k, compute_uv=False) for k in keys]
        ranks = [key_rank(values, unit, guess) for values in sizes]
        if leading == width:
            break
        if max(ranks) <= leading:
            faint = min(float(v[r - 1] / v[0]) for v, r in zip(sizes, ranks, strict=True))
            if faint > READING.faint or leading >= max(ranks) + READING.extra:
                break
            target = leading + 1  # one anchor more, so that the ranges are seen clearly
        else:
            target = min(width, 2 * leading)
    blocks = []
    for start in range(leading, width, READING.block):
        columns = np.arange(start, min(start + READING.block, width))
        count = -(-int(READING.redundant * len(columns) * max(ranks) + 1) // context)
        count += width < 2 * READING.block  # few directions: one answer more is many digits
        count = max(count, len(columns))
        shares = rng.standard_normal((count, len(columns))) / np.sqrt(len(columns))
        shares[: len(columns)] += np.eye(len(columns))
        shares *= np.minimum(1.0, READING.furthest / np.linalg.norm(shares, axis=1, keepdims=True))
        sets = [size * draw_context(weights, context, rng, whole=False)[0] for _ in range(count)]
        anchors = base + reach * shares @ basis[:, columns].T
        blocks.append((columns, shares, ask(anchors, np.array(sets))))
    return Scores(span, basis, full, leading, tuple(blocks), tuple(ranks), off)


def key_rank(values: Float[Array, " k"], unit: float, guess: int) -> int:
    """The rank of keys with these singular values. Errors that could hide a rank show by their own
    size: it is that behind which the values fall most, and the guess where they fall evenly."""
    if 1e5 * unit < READING.hidden:
        return max(1, seen_rank(values, unit))  # a zero score still has a key bias
    return find_fall(values, READING.drop) or min(guess, len(values))


def read_at_once(weights: Weights, unit: float) -> int:
    """Context tokens whose weights can be read off one answer, with some to spare."""
    heads = len(weights.maps)
    narrow = min(seen_rank(np.linalg.svd(m, compute_uv=False), unit) for m in weights.maps)
    context = max(
        1, min(int(READING.directions * narrow), int(READING.directions * weights.readable / heads))
    )
    if heads * context > weights.readable:
        raise Unclear(f"{heads} heads are too many to read their weights from one answer")
    return context


def find_size(
    weights: Weights, ask: Ask, span: Span, other: Float[Array, " d"], tokens: Array, off: float
) -> tuple[float, Soft, float]:
    """Length of context steps at which log-odds are of order one, at the base and at another
    anchor: one of the two may happen to have small keys. And the query at the base, and what
    weights leave of an answer that is read well. `off`: what they may leave; where weights are
    searched for, short steps are found more surely."""
    size, asked = min(1.0, span.longest), np.array([0, -1])
    for _ in range(30):
        soft = ask(np.array([span.base, other])[asked], size * tokens[asked])
        odds, rest = read_log_odds(weights, soft)
        if rest > off and size < READING.shortest * span.reach:
            raise NotThisBlock("no attention weights explain an answer")
        if rest > off:
            size *= 0.3
            continue
        largest = float(np.abs(odds).max()) if np.isfinite(odds).all() else np.inf
        if largest > 4.0:
            size *= 0.3 if not np.isfinite(largest) else 2.0 / largest
        elif largest < 2.0 and size < span.longest and len(asked) > 1:
            # errors of keys fall as its square grows; log-odds are in proportion to it
            factor = min(1e3, 3.0 / max(largest, 1e-4))
            size = min(size * factor, span.longest)
            asked = asked if factor == 1e3 else asked[:1]
        else:
            parts = [soft.taken(slice(k, k + 1)) for k in range(len(asked))]
            return size, parts[0], min(read_log_odds(weights, part)[1] for part in parts)
    raise Unclear("no size of tokens shows the attention weights")


def full_keys(
    weights: Weights, full: Soft, groups: int, off: float = np.inf
) -> list[Float[Array, "d n"]]:
    """Keys of every head at the anchors that were asked with all context tokens."""
    odds, _ = read_log_odds(weights, full, off)
    count, width = len(odds) // groups, full.anchor.shape[1]
    keys = np.empty((len(weights.maps), width, count))
    for k in range(count):
        part = slice(k * groups, (k + 1) * groups)
        right = odds[part].transpose(0, 2, 1).reshape(-1, len(keys))
        keys[:, :, k] = solve_tall(full.tokens[part].reshape(-1, width), right).T
    return list(keys)


def solve_scores(data: Scores, weights: Weights) -> list[tuple[Array, Array, Array]]:
    """For every head the score in factors (left, right) and the key bias."""
    groups = len(data.full.anchor) // (1 + data.leading)
    reach = data.span.reach
    keys = full_keys(weights, data.full, groups)
    read = [read_log_odds(weights, soft, data.off)[0] for _, _, soft in data.blocks]
    found = []
    for h, own in enumerate(keys):
        axes, _, _ = np.linalg.svd(own, full_matrices=False)
        left = axes[:, : data.ranks[h]]
        start = left.T @ own[:, 0]
        slopes = np.empty((data.ranks[h], len(data.basis)))
        slopes[:, : data.leading] = left.T @ (own[:, 1:] - own[:, :1]) / reach
        for (columns, shares, soft), odds in zip(data.blocks, read, strict=True):
            steps = soft.tokens @ left  # (n, m, r)
            right = (odds[:, h] - steps @ start) / reach
            table = np.einsum("nmr,ng->nmrg", steps, shares).reshape(right.size, -1)
            good = np.isfinite(right.ravel())
            part = solve_tall(table[good], right.ravel()[good])
            slopes[:, columns] = part.reshape(data.ranks[h], len(columns))
        right_factor = slopes @ data.basis.T
        found.append((left, right_factor, left @ (start - right_factor @ data.span.base)))
    return found
