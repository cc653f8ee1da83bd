"""What nobody can know about a layer: other parameters with exactly the same answers.

Statement. Two heads with the same score and key bias only show the sum of their values; a head
without value hides its score; the order of heads, and of a factored score everything but the
product, is convention. A witness makes this concrete: a second parameter set, different from
the first, with the same function. What remains, the canonical form, is identifiable, but near
the degenerate cases only just: at relative distance t between two heads, parameters carry
errors of about `near_loss` times the box's rounding error over t².

Source. Proposition 7.1 of Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with
Queries"; docs/methods/identifiability.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from keyhole.arrays import UNIT_ROUNDOFF, Array
from keyhole.errors import NotIdentifiable
from keyhole.models.attention import Attention, Factors, Head
from keyhole.models.canonical import (
    MERGE_TOLERANCE,
    relative,
    same_attention,
    score_gap,
    score_norm,
)


@dataclass(frozen=True, eq=False)
class Witness:
    """Other parameters with the same function, and how they come about."""

    model: Attention
    kind: str  # "shifted values" | "free score" | "gauge" | "order" | "split head"
    reason: str


@dataclass(frozen=True)
class NearPair:
    """Two heads that attend almost alike."""

    first: int
    second: int
    distance: float  # of their scores and key biases, relative
    error: float  # relative error of these scores that a float64 box allows at best


@dataclass(frozen=True)
class Identifiability:
    """Which parameters of a layer can be known from its answers."""

    heads: int
    merged: tuple[tuple[int, ...], ...]  # groups that attend alike: only their summed value shows
    dead: tuple[int, ...]  # heads without value: their score is free
    near: tuple[NearPair, ...]
    factored: tuple[int, ...]  # heads whose score is held as a product: only the product shows

    @property
    def identifiable(self) -> bool:
        """Whether every score and value is determined (up to the order of heads)."""
        return not self.merged and not self.dead

    def sentences(self) -> tuple[str, ...]:
        """The report, one finding per sentence."""
        said = [
            f"heads {', '.join(str(h) for h in group)} attend alike: only the sum of their values "
            "can be known"
            for group in self.merged
        ]
        said += [f"head {head} has no value: its score cannot be known" for head in self.dead]
        said += [
            f"heads {pair.first} and {pair.second} differ by {pair.distance:.1e}: their scores can "
            f"be known to about {pair.error:.0e}"
            for pair in self.near
        ]
        if self.factored:
            names = ", ".join(str(h) for h in self.factored)
            which = "head" if len(self.factored) == 1 else "heads"
            said.append(f"of {which} {names} only the product of query and key maps can be known")
        if self.heads > 1:
            said.append("the order of heads is a convention")
        if self.identifiable:
            said.insert(0, "every score and value is determined by the answers")
        return tuple(said)


def identifiability(model: Attention) -> Identifiability:
    """Which parameters of this layer nobody can know, and which only just.

    Args:
        model: A layer of attention.

    Returns:
        Groups of heads that attend alike, heads without value, pairs that nearly agree, and a
        sentence for each.

    Example:
        >>> import numpy as np
        >>> from keyhole.models.attention import Attention, Head
        >>> head = Head(np.eye(3), None, np.ones(3))
        >>> identifiability(Attention([head, head])).merged
        ((0, 1),)
    """
    heads = model.heads
    groups = _group_by_attention(heads)
    largest = max(float(np.abs(head.value).max(initial=0.0)) for head in heads)
    sums = [sum(heads[i].value for i in group) for group in groups]
    silent = [float(np.abs(total).max(initial=0.0)) <= MERGE_TOLERANCE * largest for total in sums]
    dead = tuple(i for group, quiet in zip(groups, silent, strict=True) if quiet for i in group)
    live = [group for group, quiet in zip(groups, silent, strict=True) if not quiet]
    return Identifiability(
        heads=len(heads),
        merged=tuple(tuple(group) for group in live if len(group) > 1),
        dead=dead,
        near=tuple(_list_near(heads, [group[0] for group in live])),
        factored=tuple(i for i, head in enumerate(heads) if head.score_factors is not None),
    )


def _group_by_attention(heads: Sequence[Head]) -> list[list[int]]:
    """Numbers of the heads, those that attend alike together."""
    groups: list[list[int]] = []
    for i, head in enumerate(heads):
        alike = [group for group in groups if same_attention(head, heads[group[0]])]
        if alike:
            alike[0].append(i)
        else:
            groups.append([i])
    return groups


def _list_near(heads: Sequence[Head], live: list[int]) -> Iterator[NearPair]:
    """Pairs of these heads that nearly agree."""
    near_loss = 1e4  # error of a score, in rounding errors, times the squared distance of two heads
    for first, second in combinations(live, 2):
        apart = attention_distance(heads[first], heads[second])
        if apart < 0.3:  # relative: heads this near are reported
            error = min(1.0, near_loss * UNIT_ROUNDOFF / apart**2)
            yield NearPair(first, second, apart, error)


def attention_distance(a: Head, b: Head) -> float:
    """Relative distance of what two heads attend to."""
    scale = max(score_norm(a), score_norm(b))
    bias = max(float(np.linalg.norm(a.key_bias)), float(np.linalg.norm(b.key_bias)))
    gap = float(np.hypot(score_gap(a, b), np.linalg.norm(a.key_bias - b.key_bias)))
    return relative(gap, float(np.hypot(scale, bias)))


def witness(model: Attention, rng: np.random.Generator) -> Witness:
    """Other parameters with the same function: the most telling kind that this model allows.

    A single dense head with a value has no witness with as many heads; it is then shown as two
    heads that attend alike.

    Args:
        model: A layer of attention.
        rng: What is drawn from.

    Returns:
        The other model, of what kind it is, and why it answers the same.

    Example:
        >>> import numpy as np
        >>> from keyhole.models.random import attention
        >>> witness(attention(np.random.default_rng(0), 3), np.random.default_rng(1)).kind
        'split head'
    """
    found = witnesses(model, rng)
    return found[0]


def witnesses(model: Attention, rng: np.random.Generator) -> tuple[Witness, ...]:
    """All kinds of witnesses around a model, the most telling first."""
    report = identifiability(model)
    found = [shifted_values(model, group[0], group[1], rng) for group in report.merged]
    blank = [h for h in report.dead if not np.abs(model.heads[h].value).max(initial=0.0)]
    found += [free_score(model, head, rng) for head in blank]
    found += [gauge(model, head, rng) for head in report.factored]
    if len(model.heads) > 1:
        found.append(order(model))
    found.append(split_head(model, rng))
    return tuple(found)


def replaced(model: Attention, changes: dict[int, Head]) -> Attention:
    """The model with some heads exchanged."""
    return model.with_heads([changes.get(i, h) for i, h in enumerate(model.heads)])


def unlike(array: Array, rng: np.random.Generator) -> Array:
    """A random array of the same shape and size (of size one where it is zero)."""
    sample = rng.standard_normal(array.shape)
    size = float(np.linalg.norm(array)) or 1.0
    return np.asarray(sample * size / np.linalg.norm(sample))


def shifted_values(model: Attention, first: int, second: int, rng: np.random.Generator) -> Witness:
    """Value moved from one of two equal heads to the other."""
    a, b = model.heads[first], model.heads[second]
    if not same_attention(a, b):
        raise NotIdentifiable(f"heads {first} and {second} attend differently: values are fixed")
    move = unlike(a.value, rng)
    changes = {
        first: Head(a.score_factors or a.score, a.key_bias, a.value + move),
        second: Head(b.score_factors or b.score, b.key_bias, b.value - move),
    }
    return Witness(
        replaced(model, changes),
        "shifted values",
        f"heads {first} and {second} attend alike: value moved from one to the other",
    )


def free_score(model: Attention, head: int, rng: np.random.Generator) -> Witness:
    """Another score behind a value of zero."""
    old = model.heads[head]
    if np.abs(old.value).max(initial=0.0) != 0.0:
        raise NotIdentifiable(f"head {head} has a value: its score shows")
    new = Head(unlike(old.score, rng), unlike(old.key_bias, rng), old.value)
    return Witness(
        replaced(model, {head: new}), "free score", f"head {head} has no value: any score will do"
    )


def gauge(model: Attention, head: int, rng: np.random.Generator) -> Witness:
    """Other query and key maps with the same product."""
    old = model.heads[head]
    factors = old.score_factors
    if factors is None:
        raise NotIdentifiable(f"head {head} holds its score as one matrix: nothing to exchange")
    rank = factors.left.shape[1]
    turn = np.linalg.qr(rng.standard_normal((rank, rank)))[0] if rank > 1 else -np.eye(1)
    # the sizes of the factors change as well as their directions
    new = Factors(factors.left @ (2.0 * turn), 0.5 * turn.T @ factors.right)
    changed = replaced(model, {head: Head(tuple(new), old.key_bias, old.value)})
    return Witness(changed, "gauge", f"head {head}: other query and key maps, same product")


def order(model: Attention) -> Witness:
    """The same heads in another order."""
    heads = [*model.heads[1:], model.heads[0]]
    numbers = [*range(1, len(model.heads)), 0]
    return Witness(model.with_heads(heads, numbers), "order", "the same heads in another order")


def split_head(model: Attention, rng: np.random.Generator) -> Witness:
    """One head more: the first one twice, its value divided between the two at will."""
    old = model.heads[0]
    move = unlike(old.value, rng)
    twins = [
        Head(old.score_factors or old.score, old.key_bias, old.value - move),
        Head(old.score_factors or old.score, old.key_bias, move),
    ]
    return Witness(
        model.with_heads([*twins, *model.heads[1:]], [0, *range(len(model.heads))]),
        "split head",
        "one head more: head 0 twice, its value divided between the two at will",
    )
