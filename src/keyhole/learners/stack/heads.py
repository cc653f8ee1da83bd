"""The heads of all blocks at one anchor.

Statement.  At a fixed anchor a the wide layer is linear but for one key p_h per head:
            c_0(Z) - c_0([a]) = Σ_h M_h Σ_i w_hi (z_i - a), w_h the softmax of z_i . p_h. Heads
            with different keys are found, their number included; there may be more of them than
            an answer has numbers.
Queries.    Random contexts of three tokens, twice as many numbers as unknowns.
Algebra.    Variable projection: M_h is eliminated, Levenberg-Marquardt steps (Kaufman's Jacobian)
            move the keys. Heads come one at a time, the best of a few random ones; when the
            answers are explained, heads that coincide are merged. Behind a norm at the end M_h
            lacks its part along the anchor: the keys followed to a second anchor, with the maps
            free again, and both together tell M_h whole.
Fails.      Heads that attend almost alike; more heads than the contexts can carry.
Source.     Golub and Pereyra (1973), Kaufman (1975).
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.fitting.solver import JacobianSystem, Problem, Stopping, descend
from keyhole.learners.block import Unclear
from keyhole.learners.stack.shallow import Shallow, Terms, repeat_terms
from keyhole.linalg.softmax import softmax


@dataclass(frozen=True)
class HeadOptions:
    """What a person might tune.

    tokens: of a context. redundant: numbers per unknown. draws: random heads of which the best
    joins. steps: of a fit with a new head; long_steps: before a number of heads is given up.
    most: heads looked for. explained: residual of the answers in units of their error.
    """

    tokens: int = 3
    redundant: float = 2.0
    draws: int = 3
    steps: int = 12
    long_steps: int = 80
    most: int = 24
    explained: float = 30.0


@dataclass(frozen=True, eq=False)
class AnchoredHeads:
    """Keys at one anchor or two, and the value maps; what was asked, and for each of these contexts
    the answer to its anchor alone."""

    anchors: Float[Array, "a k"]
    keys: Float[Array, "a h k"]
    maps: Float[Array, "h d k"]
    alone: Terms
    asked: Terms


def softmax_means(
    context: Float[Array, "n m k"], anchors: Float[Array, "n k"], keys: Float[Array, "n k"]
) -> tuple[Float[Array, "n t"], Float[Array, "n t k"]]:
    """Attention weights of all tokens, the anchor last, and the tokens."""
    tokens = np.concatenate([context, anchors[:, None]], axis=1)
    return softmax(np.einsum("ntk,nk->nt", tokens, keys)), tokens


class KeyProjection:
    """The value maps eliminated at these keys: features, maps, residual."""

    def __init__(
        self,
        keys: Float[Array, "h k"],
        context: Float[Array, "n m k"],
        anchor: Float[Array, " k"],
        answers: Float[Array, "n d"],
    ) -> None:
        self.keys, self.context, self.anchor, self.answers = keys, context, anchor, answers
        steps = context - anchor
        scores = np.concatenate(
            [np.einsum("nmk,hk->nhm", steps, keys), np.zeros((len(context), len(keys), 1))], axis=2
        )
        self.weights = softmax(scores)[:, :, :-1]
        self.features = np.einsum("nhm,nmk->nhk", self.weights, steps)
        table = self.features.reshape(len(context), -1)
        self.basis, triangle = np.linalg.qr(table)
        inside = self.basis.T @ answers
        # heads that coincide leave a triangle without inverse: the shortest maps then
        self.linear = np.linalg.lstsq(triangle, inside, rcond=1e-12)[0]
        self.residual = answers - self.basis @ inside
        self.cost = float((self.residual**2).sum())

    @property
    def maps(self) -> Float[Array, "h d k"]:
        heads, width = self.keys.shape
        return self.linear.reshape(heads, width, -1).transpose(0, 2, 1)

    def jacobian(self) -> Float[Array, "numbers unknowns"]:
        """Kaufman's: the features move, the maps stay."""
        heads, width = self.keys.shape
        steps = self.context - self.anchor
        parts = []
        for h in range(heads):
            weighed = self.weights[:, h, :, None] * steps
            spread = np.einsum("nmk,nmc->nkc", weighed, steps)
            spread -= self.features[:, h, :, None] * self.features[:, h, None, :]
            parts.append(np.einsum("nkc,kd->ndc", spread, self.linear[h * width : (h + 1) * width]))
        tall = np.concatenate(parts, axis=2)  # (n, d, h k)
        flat = tall.reshape(len(tall), -1)
        flat = flat - self.basis @ (self.basis.T @ flat)
        return np.asarray(-flat.reshape(-1, heads * width))


def fit_keys(
    keys: Float[Array, "h k"],
    context: Array,
    anchor: Array,
    answers: Array,
    steps: int,
    target: float,
) -> KeyProjection:
    """Damped steps of the keys; `target`: root mean square residual that is as good as zero."""
    problem = Problem(
        lambda state: state.cost,
        lambda state: JacobianSystem(state.residual.ravel(), state.jacobian()),
        lambda state, step: KeyProjection(
            state.keys + step.reshape(keys.shape), context, anchor, answers
        ),
    )
    stopping = Stopping(steps=steps, target=target**2 * answers.size, window=7, share=0.2)
    return descend(problem, KeyProjection(keys, context, anchor, answers), stopping).state


def find_heads(
    shallow: Shallow,
    doubt: float,
    rng: np.random.Generator,
    options: HeadOptions | None = None,
) -> AnchoredHeads:
    """All heads at a random anchor; raises Unclear."""
    options = HeadOptions() if options is None else options
    anchor = shallow.points(rng, 1)[0]
    asked = ask_contexts(shallow, anchor, 0, options, rng)
    alone = shallow.ask_bare(asked.context[:1], anchor[None], "heads")
    keys = np.zeros((0, shallow.width))
    scale = float(np.sqrt(np.mean((asked.limit - alone.limit) ** 2)))
    if scale < options.explained * doubt:
        raise Unclear("no head changes the answers")
    target = options.explained * doubt
    best: KeyProjection | None = None
    while len(keys) < options.most:
        more = count_contexts(shallow, len(keys) + 1, options) - len(asked.anchors)
        if more > 0:
            asked = asked + ask_contexts(shallow, anchor, more, options, rng)
        problem = (asked.context, anchor, asked.limit - alone.limit)
        trials = []
        for _ in range(options.draws):
            new = rng.standard_normal((1, shallow.width)) / np.sqrt(shallow.width)
            start = np.concatenate([keys, rng.uniform(0.3, 2.0) * new])
            trials.append(fit_keys(start, *problem, options.steps, target))
        best = min(trials, key=lambda trial: trial.cost)
        best = fit_keys(best.keys, *problem, options.long_steps, 0.01 * target)
        keys = best.keys
        if best.cost <= target**2 * best.answers.size:
            break
    else:
        raise Unclear(f"no {options.most} heads explain the answers at one anchor")
    assert best is not None
    best = merge_heads(best, target, options)
    alone = repeat_terms(alone, len(asked.anchors))
    found = AnchoredHeads(anchor[None], best.keys[None], best.maps, alone, asked)
    return found if shallow.final is None else complete_maps(shallow, found, target, rng, options)


def complete_maps(
    shallow: Shallow,
    found: AnchoredHeads,
    target: float,
    rng: np.random.Generator,
    options: HeadOptions,
) -> AnchoredHeads:
    """The value maps with their parts along the anchor, from a second one near it."""
    anchor, keys = found.anchors[0], found.keys[0]
    for reach in (0.5, 0.25, 0.1, 0.04):
        near = shallow.onto_sphere(anchor + reach * shallow.points(rng, 1)[0])
        alone = shallow.ask_bare(found.asked.context[:1], near[None], "heads")
        count = count_contexts(shallow, len(keys), options)
        asked = ask_contexts(shallow, near, count, options, rng)
        other = fit_keys(keys, asked.context, near, asked.limit - alone.limit,
                         options.long_steps, 0.01 * target)  # fmt: skip
        if other.cost > target**2 * other.answers.size:
            continue
        # M_h + a uᵀ seen from the other anchor: one number per column of M_h is unknown
        first, second = (shallow.plane @ point for point in (anchor, near))
        missing = other.maps - show_maps(shallow, near, found.maps)
        across = first - second * (first @ second) / (second @ second)
        along = np.einsum("d,hdk->hk", across, missing) / (across @ across)
        maps = found.maps + first[:, None] * along[:, None]
        gap = np.abs(show_maps(shallow, near, maps) - other.maps).max()
        if gap > 1e-3 * np.abs(maps).max():  # another head took the place of one
            continue
        alone = found.alone + repeat_terms(alone, count)
        return AnchoredHeads(
            np.array([anchor, near]), np.array([keys, other.keys]), maps, alone,
            found.asked + asked,
        )  # fmt: skip
    raise Unclear("the heads behind the norm at the end were not followed to a second anchor")


def show_maps(
    shallow: Shallow, anchor: Float[Array, " k"], maps: Float[Array, "h d k"]
) -> Float[Array, "h d k"]:
    """The value maps as far as a norm at the end shows them at an anchor."""
    return np.asarray(shallow.show(np.tile(anchor, (len(maps), 1)), maps))


def count_contexts(shallow: Shallow, heads: int, options: HeadOptions) -> int:
    numbers = shallow.numbers
    return int(options.redundant * heads * shallow.width * (numbers + 1) / numbers) + 2


def ask_contexts(
    shallow: Shallow, anchor: Array, count: int, options: HeadOptions, rng: np.random.Generator
) -> Terms:
    """So many; none said, enough for four heads."""
    count = count or count_contexts(shallow, 4, options)
    context = shallow.points(rng, count, options.tokens)
    return shallow.ask(context, np.tile(anchor, (count, 1)), "heads")


def merge_heads(best: KeyProjection, target: float, options: HeadOptions) -> KeyProjection:
    """Heads that attend alike become one, heads without a value leave, while that explains the
    answers: softmax weights of different keys are independent, so no other head is spare."""
    while len(best.keys) > 1:
        gaps = np.linalg.norm(best.keys[:, None] - best.keys, axis=2)
        gaps[np.tril_indices(len(gaps))] = np.inf
        sizes = np.linalg.norm(best.maps, axis=(1, 2))
        nearest = np.unravel_index(np.argmin(gaps), gaps.shape)
        for h in (int(np.argmin(sizes)), int(nearest[0])):
            fewer = fit_keys(
                np.delete(best.keys, h, axis=0), best.context, best.anchor, best.answers,
                options.steps, 0.01 * target,
            )  # fmt: skip
            if fewer.cost <= target**2 * fewer.answers.size:
                best = fewer
                break
        else:
            return best
    return best
