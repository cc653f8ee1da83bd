"""Scores and key biases of all heads, from their keys at several anchors.

Statement.  The value maps are the same at every anchor, and the key of a head is p_h = W_h x + c_h:
            keys at k + 1 anchors tell W_h and c_h, and their rank is that of W_h.
Queries.    At each of a few anchors more than the k + 1 needed: the anchor alone, and contexts, 1.6
            times as many numbers as the keys there have.
Algebra.    Gauss-Newton steps for the keys of all heads at one anchor, from what the anchors so far
            tell. Anchors lie near the first one, so that the start is good; one at which
            the answers are not explained is drawn again, nearer. Then linear least squares, and
            singular values for the range of W_h, in which c_h lies.
Fails.      Where keys turn so fast that no step is small enough.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.fitting.solver import JacobianSystem, Problem, Stopping, descend
from keyhole.learners.block import Unclear
from keyhole.learners.stack.heads import AnchoredHeads, show_maps
from keyhole.learners.stack.shallow import Shallow, Terms, repeat_terms
from keyhole.linalg.rank import count_above
from keyhole.linalg.softmax import softmax


@dataclass(frozen=True)
class KeyOptions:
    """What a person might tune: tokens of a context, numbers per unknown, anchors beyond those
    needed, how far they lie from the first one (relative to it), steps of a fit, residual in units
    of the answers' error that explains them."""

    tokens: int = 3
    redundant: float = 1.6
    spare: int = 3
    reach: float = 0.5
    steps: int = 25
    explained: float = 100.0


@dataclass(frozen=True, eq=False)
class WideHead:
    """A head in coordinates of what the norm keeps: score in factors, key bias, value map."""

    left: Float[Array, "k r"]
    right: Float[Array, "r k"]
    key_bias: Float[Array, " k"]
    map: Float[Array, "d k"]

    def keys(self, anchors: Float[Array, "n k"]) -> Float[Array, "n k"]:
        return np.asarray(anchors @ self.right.T @ self.left.T + self.key_bias)


@dataclass(frozen=True, eq=False)
class WideScores:
    """All heads, and what was asked: contexts, and for each of them its anchor alone."""

    heads: tuple[WideHead, ...]
    asked: Terms
    alone: Terms


def predict_change(
    keys: Float[Array, "h k"], maps: Float[Array, "h d k"], context: Array, anchor: Array
) -> tuple[Float[Array, "n d"], Float[Array, "n d hk"]]:
    """What a context changes in the limit, and its derivative by the keys."""
    steps = context - anchor
    scores = np.einsum("nmk,hk->nhm", steps, keys)
    weights = softmax(np.concatenate([scores, np.zeros((*scores.shape[:2], 1))], axis=2))[..., :-1]
    means = np.einsum("nhm,nmk->nhk", weights, steps)
    spread = np.einsum("nhm,nmk,nmc->nhkc", weights, steps, steps, optimize=True)
    spread -= means[..., :, None] * means[..., None, :]
    slopes = np.einsum("hdk,nhkc->ndhc", maps, spread, optimize=True)
    change = np.einsum("hdk,nhk->nd", maps, means, optimize=True)
    return change, slopes.reshape(*slopes.shape[:2], -1)


def solve_keys(
    start: Float[Array, "h k"],
    maps: Float[Array, "h d k"],
    context: Array,
    anchor: Array,
    answers: Float[Array, "n d"],
    options: KeyOptions,
) -> tuple[Float[Array, "h k"], float]:
    """Keys at an anchor, and the root mean square residual."""

    def move(keys: Array) -> tuple[Array, Array, Array]:
        change, slopes = predict_change(keys, maps, context, anchor)
        return keys, (change - answers).ravel(), slopes.reshape(answers.size, -1)

    problem = Problem(
        lambda state: float(state[1] @ state[1]),
        lambda state: JacobianSystem(*state[1:]),
        lambda state, step: move(state[0] + step.reshape(start.shape)),
    )
    stopping = Stopping(steps=options.steps, tolerance=0.01)
    end = descend(problem, move(start), stopping)
    return end.state[0], float(np.sqrt(end.cost / answers.size))


def find_scores(
    shallow: Shallow,
    found: AnchoredHeads,
    doubt: float,
    rng: np.random.Generator,
    options: KeyOptions | None = None,
) -> WideScores:
    """Scores of all heads; raises Unclear."""
    options = KeyOptions() if options is None else options
    _, heads, width = found.keys.shape
    count = int(options.redundant * heads * width / shallow.numbers) + 2
    anchors, keys = list(found.anchors), list(found.keys)
    kept: list[tuple[Terms, Terms]] = []
    reach = options.reach
    for _ in range(4 * (width + 1 + options.spare)):
        if len(anchors) == width + 1 + options.spare:
            break
        near = shallow.onto_sphere(found.anchors[0] + reach * shallow.points(rng, 1)[0])
        context = shallow.points(rng, count, options.tokens)
        alone = shallow.ask_bare(context[:1], near[None], "scores")
        asked = shallow.ask(context, np.tile(near, (count, 1)), "scores")
        start = extrapolate_keys(np.array(anchors), np.array(keys), near)
        maps = show_maps(shallow, near, found.maps)
        own, rest = solve_keys(start, maps, context, near, asked.limit - alone.limit, options)
        if rest > options.explained * doubt:
            reach = max(0.5 * reach, 0.02)
            continue
        anchors.append(near)
        keys.append(own)
        kept.append((asked, repeat_terms(alone, count)))
    else:
        raise Unclear("the keys of the heads were not followed from one anchor to others")
    table = np.column_stack([np.array(anchors), np.ones(len(anchors))])
    wide = []
    for h in range(heads):
        own = np.array([each[h] for each in keys])
        solution, *_ = np.linalg.lstsq(table, own, rcond=None)
        wide.append(split_score(solution[:-1].T, solution[-1], found.maps[h], reach, doubt))
    asked, alone = (sum_terms([pair[i] for pair in kept]) for i in (0, 1))
    return WideScores(tuple(wide), asked + found.asked, alone + found.alone)


def extrapolate_keys(
    anchors: Float[Array, "n k"], keys: Float[Array, "n h k"], near: Float[Array, " k"]
) -> Float[Array, "h k"]:
    """The smallest affine change that explains the keys so far, at another anchor."""
    steps = anchors[1:] - anchors[0]
    if not len(steps):
        return np.asarray(keys[0])
    share, *_ = np.linalg.lstsq(steps.T, near - anchors[0], rcond=1e-6)
    return np.asarray(keys[0] + np.einsum("n,nhk->hk", share, keys[1:] - keys[0]))


def split_score(
    score: Float[Array, "k k"], bias: Array, map_: Float[Array, "d k"], reach: float, doubt: float
) -> WideHead:
    """The head with its score in as many factors as stand out of the errors."""
    axes, sizes, rows = np.linalg.svd(score)
    # errors of the keys, a hundred times those of the answers, divided by the reach of the anchors
    least = max(1e3 * doubt / reach, 1e-7 * sizes[0])
    rank = max(1, count_above(sizes, least))
    left = axes[:, :rank]
    return WideHead(left, sizes[:rank, None] * rows[:rank], left @ (left.T @ bias), map_)


def sum_terms(parts: list[Terms]) -> Terms:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
