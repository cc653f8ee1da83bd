"""Huge tokens: every head attends to exactly one token, and the box becomes linear.

Questions. At a fixed query x the box gets m tokens s t_i with s enormous. Head h picks the
token with the largest t_i . p_h(x) and answers with its value: f = sum_h s t_i(h) . v_h,
exactly. Moving token i by a_i delta changes the answer by sum_h a_i(h) (delta . v_h). The
patterns a = cos(k theta), sin(k theta) make these answers trigonometric moments, which name the
tokens in use (algebra/ trigonometric_moments). With vector answers a few random patterns do.

Inversion. The tokens in use, one per group of heads that attends to it (a leaf), plus all
answers as exact linear equations in the values. A head with score zero attends to all tokens
alike: it shifts the constant moment alone, and is recognised by that.

When it fails. Two heads on one token look like one: probes/leaf_splitting separates them. A box
whose attention never hardens (a cap on scores) explains no moments.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.algebra.linear_equations import Equations
from keyhole.algebra.trigonometric_moments import (
    Support,
    fitted,
    support_from_moments,
    support_from_vectors,
    trigonometric_patterns,
)
from keyhole.arrays import Array, Float
from keyhole.errors import Counterexample, DomainError, NotIdentifiable, WrongFamily
from keyhole.probes.asking import Asker

BAG = 256  # tokens offered: two heads share one in about H²/512 of all cases
SHORT = 3  # moments beyond the claimed number of heads before another bag is tried
SPARE = 24  # the same for the last bag, before the family is doubted
MOST_HEADS = 64  # unknown number of heads: where to stop looking
HARD = 1e10  # token size that makes attention hard for scores of ordinary scale
HARDER = 1e4  # factor for the next try
TRIES = 4
REACH = 3e-3  # relative move of a leaf that does not change who attends to it
NO_VALUE = "every answer is zero: no head has a value, so no score can be known"
SILENT = 1e-280  # answers that are zero
MOMENT_DOUBT = 1e3  # misfit of moments, in units of their rounding error, that is not rounding
COARSE = 1e-10  # rounding error from which on the leaves found are checked by a question
HALVING_STEP = 2e-3  # relative move of a group of tokens: rarely changes who attends where
HALVING_DOUBT = 30.0  # rounding errors of the loudest answer below which a group counts as silent


@dataclass
class Leaves:
    """One token per group of heads, and every equation in their values learned so far."""

    query: Float[Array, " d"]
    tokens: Float[Array, "h d"]  # of size one; hard when multiplied by `scale`
    reach: Float[Array, " h"]
    scale: float
    equations: Equations  # in units of `scale`; the last block is the uniform head, if any
    uniform: bool

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def blocks(self) -> int:
        return len(self) + int(self.uniform)

    def configuration(self, moves: Float[Array, "n b d"]) -> tuple[Array, Array]:
        """Sequences in which the leaves are moved, and the rows of their equations.

        A uniform head sees the mean of the sequence; a dummy token nobody else attends to moves
        it independently of the leaves.
        """
        count, heads = len(moves), len(self)
        leaves = self.tokens + moves[:, :heads]
        if not self.uniform:
            return leaves, leaves
        length = heads + 2  # leaves, dummy, query
        dummy = moves[:, heads] * length - moves[:, :heads].sum(axis=1)
        mean = (leaves.sum(axis=1) + dummy + self.query / self.scale) / length
        tokens = np.concatenate([leaves, dummy[:, None]], axis=1)
        return tokens, np.concatenate([leaves, mean[:, None]], axis=1).reshape(count, heads + 1, -1)

    def ask(self, ask: Asker, tokens: Float[Array, "n k d"], purpose: str) -> Array:
        return ask_hard(ask, tokens, self.query, self.scale, purpose)


def ask_hard(ask: Asker, tokens: Array, query: Array, scale: float, purpose: str) -> Array:
    """Answers, in units of `scale`, to sequences of scaled tokens with the query last."""
    last = np.broadcast_to(query, (len(tokens), 1, len(query)))
    return ask(np.concatenate([scale * tokens, last], axis=1), purpose) / scale


def directions(rng: np.random.Generator, count: int, width: int) -> Float[Array, "n d"]:
    """Random unit vectors."""
    sample = rng.standard_normal((count, width))
    return np.asarray(sample / np.linalg.norm(sample, axis=1, keepdims=True))


def find_leaves(
    ask: Asker,
    query: Float[Array, " d"],
    total: Float[Array, "d outputs"],
    heads: int | None,
    rng: np.random.Generator,
) -> Leaves:
    """The tokens in use out of a random bag; `total` is the sum of all values."""
    limit = ask.oracle.spec.domain.max_length
    size = BAG if limit is None else min(BAG, limit - 1)
    if size < 2 or (heads is not None and size < heads + 2):
        raise DomainError(
            f"finding {heads or 'several'} heads needs sequences longer than max_length={limit}"
        )
    scale = HARD / float(np.linalg.norm(query))
    if ask.coarse and not ask.additive:
        by_halves = halved_leaves(ask, query, total, heads, rng, size, scale)
        if by_halves is not None:
            return by_halves
    crowd: WrongFamily | None = None
    found: Leaves | Counterexample | WrongFamily
    for attempt in range(TRIES):
        patience = SPARE if attempt == TRIES - 1 else SHORT
        found = _one_bag(ask, query, total, heads, rng, size, scale, patience)
        if isinstance(found, Leaves):
            return found
        if isinstance(found, WrongFamily):
            if crowd is not None:  # two bags agree that there are more heads than claimed
                raise found
            crowd = found
        else:
            scale *= HARDER
    if isinstance(found, WrongFamily):
        raise found
    raise WrongFamily(
        "no number of heads explains the answers to huge tokens: attention never "
        "settles on single tokens as softmax attention does",
        found if isinstance(found, Counterexample) else None,
    )


def halved_leaves(
    ask: Asker,
    query: Array,
    total: Array,
    heads: int | None,
    rng: np.random.Generator,
    size: int,
    scale: float,
) -> Leaves | None:
    """The leaves by halving groups of tokens that are moved together, where answers have too few
    digits for moments: about log2(size) questions per head. None where no bag works out, as with a
    head that attends to all tokens alike."""
    width, outputs = total.shape
    mix = rng.standard_normal(outputs) if outputs > 1 else np.ones(1)
    for _ in range(TRIES):
        bag, shift = directions(rng, size, width), directions(rng, 1, width)[0]
        base = ask_hard(ask, bag[None], query, scale, "leaves")
        loud = max(float(np.abs(base @ mix).max()), float(np.linalg.norm(total @ mix)))
        silent = HALVING_DOUBT * ask.unit / HALVING_STEP * loud
        groups = [(np.arange(size), float(shift @ total @ mix))]
        asked, answers = np.zeros((0, size, width)), np.zeros((0, outputs))
        while len(groups) and max(len(group) for group, _ in groups) > 1:
            halves = [group[: -(-len(group) // 2)] for group, _ in groups]
            moved = np.repeat(bag[None], len(halves), axis=0)
            for place, half in enumerate(halves):
                moved[place, half] += HALVING_STEP * shift
            fresh = ask_hard(ask, moved, query, scale, "leaves")
            seen = (fresh - base) @ mix / HALVING_STEP
            asked, answers = np.concatenate([asked, moved]), np.concatenate([answers, fresh])
            parts: list[tuple[Array, float]] = []
            for (group, whole), half, part in zip(groups, halves, seen, strict=True):
                parts += [(half, float(part)), (group[len(half) :], whole - float(part))]
            groups = [(g, part) for g, part in parts if len(g) and abs(part) > silent]
            if len(groups) > (heads or MOST_HEADS):
                break
        nodes = np.sort(np.array([g[0] for g, _ in groups], dtype=int))
        if not len(nodes) or len(nodes) > (heads or MOST_HEADS) or len(groups[0][0]) > 1:
            continue
        equations = Equations(len(nodes), width)
        leaves = Leaves(query, bag[nodes], np.full(len(nodes), REACH), scale, equations, False)
        if not _complete(ask, leaves, base[0]):
            continue
        equations.add(bag[None][:, nodes], base)
        equations.add(asked[:, nodes], answers, bag[nodes])
        return leaves
    return None


def _one_bag(
    ask: Asker,
    query: Array,
    total: Array,
    heads: int | None,
    rng: np.random.Generator,
    size: int,
    scale: float,
    patience: int,
) -> Leaves | Counterexample | WrongFamily:
    """One random bag: the leaves, a question nobody explains, or too many heads."""
    width, outputs = total.shape
    bag, shift = directions(rng, size, width), directions(rng, 1, width)[0]
    mix = rng.standard_normal(outputs) if outputs > 1 else np.ones(1)
    angles = 2 * np.pi * np.arange(size) / size
    step = ask.unit**0.25  # balances rounding of the answer against switching tokens
    doubt = MOMENT_DOUBT * ask.unit / step
    base = ask_hard(ask, bag[None], query, scale, "leaves")
    order, most = (1, MOST_HEADS) if heads is None else (heads, heads + patience)
    suspicious = 2  # how often more heads than claimed must be seen before the claim is doubted
    most = min(most, (size - 1) // 2)
    answers = np.zeros((0, outputs))
    asked = np.zeros((0, size, width))
    while True:
        patterns = trigonometric_patterns(order, angles)[1 + len(answers) :]
        moved = bag + step * patterns[:, :, None] * shift
        fresh = ask_hard(ask, moved, query, scale, "leaves")
        asked, answers = np.concatenate([asked, moved]), np.concatenate([answers, fresh])
        moments = np.concatenate([[shift @ total @ mix], (answers - base) @ mix / step])
        silent = SILENT + 5 * ask.additive / (step * scale)
        if max(np.abs(moments).max(), np.abs(base).max()) <= silent:
            raise NotIdentifiable(NO_VALUE)
        support, uniform = _explained(moments, angles, doubt)
        if support.misfit <= doubt:
            if heads is None or len(support.nodes) + uniform <= heads or suspicious == 0:
                break
            suspicious -= 1
        order += 1
        if order > most:
            return _unexplained(asked, answers @ mix, query, scale, moments, support, angles, step)
    chosen = bag[support.nodes]
    count = len(chosen) + int(uniform)
    if heads is not None and count > heads:
        fewer = fewest(support, heads, angles, moments)
        return WrongFamily(
            f"{count} heads answer where {heads} were claimed: huge tokens are attended to in "
            f"{count} different ways. Pass heads={count}, or leave heads= out",
            _unexplained(asked, answers @ mix, query, scale, moments, fewer, angles, step),
        )
    equations = Equations(count, width)
    leaves = Leaves(query, chosen, np.full(len(chosen), REACH), scale, equations, uniform)
    origin = _rows(bag[None], support.nodes, uniform, query / scale)
    equations.add(origin, base)
    equations.add(_rows(asked, support.nodes, uniform, query / scale), answers, origin[0])
    return leaves


def fewest(support: Support, heads: int, angles: Array, moments: Array) -> Support:
    """The best explanation of the moments by the `heads` loudest nodes."""
    loudest = np.sort(np.argsort(-np.abs(support.weights), kind="stable")[:heads])
    patterns = trigonometric_patterns((len(moments) - 1) // 2, angles)
    return fitted(patterns, moments, support.nodes[loudest])


def _rows(tokens: Array, nodes: Array, uniform: bool, query: Array) -> Array:
    rows = tokens[:, nodes]
    if uniform:
        mean = (tokens.sum(axis=1) + query) / (tokens.shape[1] + 1)
        rows = np.concatenate([rows, mean[:, None]], axis=1)
    return rows


def _explained(moments: Array, angles: Array, doubt: float) -> tuple[Support, bool]:
    """The smallest support; where none fits, one next to a uniform head, whose weight is added
    to the constant moment alone and so shifts the whole spectrum of the Toeplitz matrix."""
    if np.abs(moments[1:]).max() <= doubt * abs(moments[0]):  # nobody chooses: all heads uniform
        return Support(np.zeros(0, int), np.zeros(0), 0.0), True
    support = support_from_moments(moments, angles, doubt)
    if support.misfit <= doubt or len(moments) < 5:
        return support, False
    free = support_from_moments(moments, angles, doubt, constant_known=False)
    return (free, True) if free.misfit <= doubt else (support, False)


def _unexplained(
    asked: Array,
    answers: Array,
    query: Array,
    scale: float,
    moments: Array,
    support: Support,
    angles: Array,
    step: float,
) -> Counterexample:
    """The question that the best support explains worst."""
    order = (len(moments) - 1) // 2
    patterns = trigonometric_patterns(order, angles)[1:]
    predicted = patterns[:, support.nodes] @ support.weights
    worst = int(np.argmax(np.abs(predicted - moments[1:])))
    answer = answers[worst] * scale
    change = (predicted[worst] - moments[1 + worst]) * step * scale
    return Counterexample(
        input=np.concatenate([scale * asked[worst], query[None]]),
        box_answer=np.asarray(answer),
        model_answer=np.asarray(answer + change),
        reason=f"best explanation by {len(support.nodes)} heads that each attend to one token",
    )


class Overcomplete(Exception):
    """There are more heads, or wider ones, than outputs: answers do not keep the heads apart."""


def find_vector_leaves(
    ask: Asker, query: Array, heads: int | None, shift: Array, rng: np.random.Generator
) -> tuple[Leaves, Float[Array, "h outputs"]]:
    """The same where answers are vectors: heads + 1 random patterns suffice. Returns also what
    each leaf answers to `shift`."""
    limit = ask.oracle.spec.domain.max_length
    size = BAG if limit is None else min(BAG, limit - 1)
    width, scale = len(query), HARD / float(np.linalg.norm(query))
    step = ask.unit ** (1 / 3)  # vectors need less signal than moments
    doubt = MOMENT_DOUBT * ask.unit / step
    counterexample = None
    for _ in range(TRIES):
        bag = directions(rng, size, width)
        base = ask_hard(ask, bag[None], query, scale, "leaves")
        most = min(size - 1, base.shape[1], MOST_HEADS)
        patterns = rng.standard_normal((most + 1, size))
        patterns /= np.abs(patterns).max(axis=1, keepdims=True)
        asked, answers = 0, np.zeros((0, base.shape[1]))
        goal = 2 if heads is None else heads + 1
        while True:
            moved = bag + step * patterns[asked:goal, :, None] * shift
            fresh = ask_hard(ask, moved, query, scale, "leaves") - base
            answers, asked = np.concatenate([answers, fresh / step]), goal
            support = support_from_vectors(answers, patterns[:asked], doubt)
            if (len(support.nodes) < asked and support.misfit <= doubt) or asked > most:
                break
            goal += 1
        if len(support.nodes) < asked and support.misfit <= doubt:
            nodes = support.nodes
            if heads is not None and len(nodes) > heads:
                loudest = np.argsort(-np.linalg.norm(support.weights, axis=1), kind="stable")
                fewer = fitted(patterns[:asked], answers, np.sort(nodes[loudest[:heads]]))
                guess = patterns[0, fewer.nodes] @ fewer.weights
                moved = bag + step * patterns[0][:, None] * shift
                raise WrongFamily(
                    f"{len(nodes)} heads answer where {heads} were claimed: huge tokens are "
                    f"attended to in {len(nodes)} different ways. Pass heads={len(nodes)}, or "
                    "leave heads= out",
                    Counterexample(
                        input=np.concatenate([scale * moved, query[None]]),
                        box_answer=(base[0] + step * answers[0]) * scale,
                        model_answer=(base[0] + step * guess) * scale,
                        reason=f"best explanation by {heads} heads",
                    ),
                )
            equations = Equations(len(nodes), width)
            equations.add(bag[None][:, nodes], base)
            reach = np.full(len(nodes), REACH)
            leaves = Leaves(query, bag[nodes], reach, scale, equations, False)
            if ask.unit < COARSE or _complete(ask, leaves, base[0]):
                return leaves, support.weights
            continue
        if len(support.nodes) >= base.shape[1]:
            raise Overcomplete
        worst = patterns[asked - 1][:, None] * shift
        counterexample = Counterexample(
            input=np.concatenate([scale * (bag + step * worst), query[None]]),
            box_answer=(base[0] + step * answers[-1]) * scale,
            model_answer=base[0] * scale,
            reason="no number of heads explains the answers to huge tokens",
        )
        scale *= HARDER
    raise WrongFamily(
        "no number of heads explains the answers to huge tokens: attention never settles on "
        "single tokens as softmax attention does",
        counterexample,
    )


def measure_values(ask: Asker, leaves: Leaves) -> None:
    """Asks the moves that are still missing to know every value; the leaves hold the answers."""
    missing = leaves.equations.unexplored()
    if not len(missing):
        return
    reach = leaves.reach if not leaves.uniform else np.append(leaves.reach, leaves.reach.min())
    sizes = np.linalg.norm(missing, axis=2)
    moves = missing * np.min(reach / np.maximum(sizes, 1e-12), axis=1)[:, None, None]
    tokens, rows = leaves.configuration(moves)
    answers = leaves.ask(ask, tokens, "values")
    still = leaves.configuration(np.zeros((1, leaves.blocks, ask.width)))
    if leaves.uniform:  # the sequence is shorter than the bag: its own origin must be asked
        leaves.equations.add(still[1], leaves.ask(ask, still[0], "values"))
    leaves.equations.add(rows, answers, still[1][0])


def _complete(ask: Asker, leaves: Leaves, base: Array) -> bool:
    """Whether every head still attends to its token when all others are left out."""
    answer = leaves.ask(ask, leaves.tokens[None], "leaves")[0]
    return bool(np.abs(answer - base).max() <= MOMENT_DOUBT * ask.unit * np.abs(base).max())
