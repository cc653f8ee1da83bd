"""The epsilon of every norm of a stack.

Statement.  Epsilon of a norm shows where the stream it reads is small. For a single token x the
            stream before a norm is x plus something bounded and continuous, so every small vector
            is reached by some x (Brouwer).
Queries.    For each norm, in order: a token whose stream there is small; a few of them until its
            size and the root of epsilon are alike. Then some more for the refinement.
Algebra.    The token by Newton's method on the blocks so far, with the epsilons so far, from random
            starts; where those fail, along the path on which the stream points one way, from a huge
            token. Epsilon by a search in one unknown: the one with which the stack answers what the
            box did.
Fails.      Where epsilon is so small that the errors of the blocks so far hide it.
Source.     Paths of solutions: Allgower and Georg (1990); the rest is Keyhole's own.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from scipy.optimize import minimize_scalar, root

from keyhole.arrays import TINY, Array, Float
from keyhole.learners.block import Unclear
from keyhole.measurement.asker import Asker
from keyhole.models.block import Block
from keyhole.models.stack import Stack
from keyhole.stages.epsilon import find_epsilon


@dataclass(frozen=True, eq=False)
class Small:
    """Single tokens whose streams are small before some norm, the box's answers, and by how much
    that norm enlarges roundings."""

    tokens: Float[Array, "n 1 d"]
    answers: Float[Array, "n d"]
    enlarged: Float[Array, " n"]


def with_epsilons(stack: Stack, epsilons: Float[Array, " n"]) -> Stack:
    """The stack with other epsilons, two per block, and one for a norm at the end; fewer are those
    of blocks passed again."""
    distinct, final = len(epsilons) // 2, stack.final_norm
    if final is not None:
        final = replace(final, epsilon=float(epsilons[-1]))
    blocks = [
        Block(
            block.attention,
            block.mlp,
            norm=block.norm,
            kind=block.kind,
            epsilons=epsilons[: 2 * distinct].reshape(distinct, 2)[number % distinct],
            gain=block.gain,
            bias=block.bias,
            parallel=block.parallel,
        )
        for number, block in enumerate(stack.blocks)
    ]
    return stack.replace(blocks=blocks, final_norm=final)


def stream_before(stack: Stack, place: int, tokens: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """What a norm (two per block, in order, then that at the end) reads where each token is
    alone."""
    stream = stack.place(tokens[:, None])
    for block in stack.blocks[: place // 2]:
        stream = block(stream)[:, None]
    if place % 2:
        block = stack.blocks[place // 2]
        assert block.attention is not None
        stream = stream + block.attention(block.norms[0](stream))[:, None]
    return np.asarray(stream[:, 0])


def token_with(
    stack: Stack, place: int, wanted: Float[Array, " k"], plane: Array, rng: np.random.Generator
) -> Float[Array, " d"] | None:
    """A token whose stream before the norm is this one, in the norm's plane, if one is found."""

    def read(points: Array) -> Array:
        return np.asarray(stream_before(stack, place, points @ plane.T) @ plane)

    def solve(start: Array) -> Array | None:
        found = root(lambda x: read(x[None])[0] - wanted, start, method="hybr", tol=1e-13).x
        return found if np.abs(read(found[None])[0] - wanted).max() < 1e-10 else None

    length = float(np.linalg.norm(wanted))
    starts = (rng.uniform(0.1, 2.0) * rng.standard_normal(len(wanted)) for _ in range(6))
    for start in chain(starts, follow_path(read, wanted / length, length)):
        found = solve(start)
        if found is not None:
            return np.asarray(plane @ found)
    return None


def heading(size: int, rng: np.random.Generator) -> Float[Array, " k"]:
    found = rng.standard_normal(size)
    return np.asarray(found / np.linalg.norm(found))


def follow_path(
    read: Callable[[Array], Array], way: Float[Array, " k"], length: float
) -> Iterator[Float[Array, " k"]]:
    """Points near which read(x) = length way, along the path of all (x, s) with read(x) = s way. At
    both ends of it, where x is huge, s = |x| and s = -|x|: s passes every length on the way, though
    it may turn back."""
    size, most = 30.0 * np.sqrt(len(way)), 1500

    def gaps(points: Array) -> Array:
        return read(points[:, :-1]) - points[:, -1:] * way

    def slopes(point: Array) -> Array:
        step = 1e-7 * (1.0 + np.abs(point).max())
        around = point + step * np.vstack([np.eye(len(point)), -np.eye(len(point))])
        ahead, behind = np.split(gaps(around), 2)
        return np.asarray((ahead - behind).T / (2.0 * step))

    def correct(point: Array) -> Array | None:
        for _ in range(6):
            gap = gaps(point[None])[0]
            if np.abs(gap).max() < 1e-9 * (1.0 + np.abs(point).max()):
                return point
            move = np.linalg.lstsq(slopes(point), -gap, rcond=None)[0]
            point = point + move
        return None

    start = correct(size * np.append(way, 1.0))
    if start is None:
        return
    point, tangent, stride = start, np.append(-way, -1.0), 0.1 * size
    for _ in range(most):
        if point[-1] < -size or np.abs(point).max() > 3.0 * size:
            return
        across = np.linalg.svd(slopes(point))[2][-1]
        tangent = across if across @ tangent > 0 else -across
        while stride > 1e-9 * size:
            ahead = correct(point + stride * tangent)
            # a step that bends much may have left the path
            if ahead is not None and np.linalg.norm(ahead - point) < 1.5 * stride:
                gap = np.linalg.norm(ahead - point - stride * tangent)
                if gap < 0.2 * stride:
                    break
            stride *= 0.4
        else:
            return
        assert ahead is not None
        if (point[-1] - length) * (ahead[-1] - length) <= 0:
            share = (point[-1] - length) / (point[-1] - ahead[-1] + TINY)
            yield point[:-1] + share * (ahead - point)[:-1]
        point, stride = ahead, min(1.6 * stride, 0.1 * size)


def find_epsilons(
    box: Asker,
    stack: Stack,
    plane: Float[Array, "d k"],
    more: int,
    rng: np.random.Generator,
    passes: int = 1,
) -> tuple[Stack, list[Small]]:
    """The stack with its epsilons to a few digits, and `more` small streams for each norm. Blocks
    that are passed several times have one pair of epsilons."""
    distinct = len(stack.blocks) // passes
    places = list(range(2 * distinct))
    places += [] if stack.final_norm is None else [2 * len(stack.blocks)]
    epsilons, kept = np.full(len(places), 1e-5), []
    for number, place in enumerate(places):
        found, asked = search_epsilon(box, stack, number, place, epsilons, plane, more, rng)
        epsilons[number] = found
        kept.append(asked)
    whole = with_epsilons(stack, epsilons)
    return whole, [replace(each, enlarged=measure_enlarged(whole, each, rng)) for each in kept]


def rounded_size(stack: Stack, tokens: Array, answers: Float[Array, "n d"]) -> Float[Array, " n"]:
    """What an answer's rounding is relative to: beside a residual that of the token, too."""
    size = 1.0 + np.abs(answers).max(axis=1)
    if stack.final_norm is not None:
        return np.asarray(size)
    return np.maximum(size, 1.0 + np.abs(tokens[:, -1]).max(axis=1))


def measure_enlarged(stack: Stack, small: Small, rng: np.random.Generator) -> Float[Array, " n"]:
    """How much relative changes of the tokens are enlarged, and roundings with them: at least as
    much as by the one norm, more where other streams on the way are small, too."""
    step, draws = 1e-8, 4
    size = rounded_size(stack, small.tokens, small.answers)
    before, found = stack(small.tokens), small.enlarged
    for _ in range(draws):
        moved = small.tokens * (1.0 + step * rng.standard_normal(small.tokens.shape))
        change = np.abs(stack(moved) - before).max(axis=1)
        found = np.maximum(found, change / (step * size))
    return np.asarray(found)


def search_epsilon(
    box: Asker,
    stack: Stack,
    number: int,
    place: int,
    epsilons: Float[Array, " n"],
    plane: Float[Array, "d k"],
    more: int,
    rng: np.random.Generator,
) -> tuple[float, Small]:
    """Epsilon of one norm, the one of this number; those before it are known."""
    width, kept = plane.shape
    epsilons = epsilons.copy()

    def asked(size: float, count: int) -> tuple[Array, Array]:
        known = with_epsilons(stack, epsilons)
        tokens: list[Array] = []
        ways = 4 * count
        for _ in range(ways):
            wanted = size * np.sqrt(width) * heading(kept, rng)
            token = token_with(known, place, wanted, plane, rng)
            tokens += [] if token is None else [token]
            if len(tokens) == count:
                break
        else:
            raise Unclear("no token was found whose stream is small before some norm")
        found = box.representable(np.array(tokens))[:, None]
        return found, box(found, "epsilon")

    tokens, answers, doubt = np.zeros((0, 1, width)), np.zeros((0, width)), 0.0

    def look(size: float) -> float:
        """The epsilon with which the stack answers what the box did to two such streams."""
        nonlocal tokens, answers, doubt
        tokens, answers = asked(size, 2)

        def misfit(log: float) -> float:
            other = epsilons.copy()
            other[number] = np.exp(log)
            return float(np.sum((with_epsilons(stack, other)(tokens) - answers) ** 2))

        grid = np.log(size**2) + np.linspace(-9.0, 9.0, 73)
        best = int(np.argmin([misfit(log) for log in grid]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, len(grid) - 1)]
        found = minimize_scalar(misfit, bounds=(low, high), method="bounded",
                                options={"xatol": 1e-10})  # fmt: skip
        doubt = float(np.sqrt(found.fun / answers.size))
        return float(np.exp(found.x))

    epsilon = find_epsilon(look)
    if epsilon is None:
        raise Unclear("an epsilon is too small or too large to be seen")
    if doubt > 1e-3 * float(np.abs(answers).max()):
        raise Unclear(f"no epsilon explains answers to small streams ({doubt:.1e} is left)")
    epsilons[number] = epsilon
    extra, seen = asked(np.sqrt(epsilon), more)
    tokens, answers = np.concatenate([tokens, extra]), np.concatenate([answers, seen])
    return epsilon, Small(tokens, answers, np.full(len(tokens), 1.0 / np.sqrt(epsilon)))
