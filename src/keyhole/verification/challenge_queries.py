"""Fresh queries off the learner's design: where would another box give itself away?

This file is the one place that says which queries are called ordinary: `KINDS` lists them, and
`explain_distribution` prints the list (`keyhole verify --explain`). A verdict speaks of queries
drawn like these and of no others.

Everything is drawn from the seed, each decade as likely: sizes and lengths around those at which
a kind tells most, and now and then any length that the box accepts. A box that is another model at
some lengths, sizes or inputs cannot be safe from all seeds. Sizes of the first round through the
kinds lie closer to those that tell most than the sizes of later rounds.

Lengths are spread over the declared range: of a few that are drawn for a query, the one is taken
of whose classes (odd ones beyond 8, multiples of 5, 32 to 63 …) the fewest were met by an earlier
query. A box that is another model on such a class is met sooner than by chance.

The query on which one changed parameter shows is the most telling of a few candidates: one number
of one random block of the parameters is changed, and the candidate whose answer moves most, in
units of what its own rounding may do, is asked. Blocks that random queries hardly see (a neuron
that is rarely on, a weak head) get their queries this way. It takes the model only.

Most queries are asked alone, some together with others in one call, and the first comes again
later: an answer that depends on its batch, or on the time, shows. A longer verification starts with
the queries of a shorter one.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, count, islice
from typing import Any

import numpy as np

from keyhole.arrays import TINY, Array, Float, Int
from keyhole.errors import InvalidArgument
from keyhole.models.base import NormalPool, replace_parameters, takes_numbers
from keyhole.oracles.base import Spec

LONGEST = 2048  # tokens of the longest sequence, where the box states no limit
CHANGE = 2.0**-10  # change of a parameter, relative to its block, by which candidates are compared


@dataclass(frozen=True)
class SizeRange:
    """Sizes of one kind of tokens: the round that must tell alone, and the wider one of later."""

    first: tuple[float, float]
    later: tuple[float, float]


@dataclass(frozen=True)
class QueryKind:
    """One kind of ordinary query."""

    reason: str  # why such a query is asked, in the words of a report
    lengths: tuple[int, int]  # most of them have so many tokens
    draw: str  # method of the designer that draws one
    together: int = 1  # so many are asked in one call


TELLING = QueryKind("tokens on which a change of one parameter shows", (2, 16), "draw_telling")
KINDS = (
    QueryKind("plain tokens", (17, LONGEST), "draw_plain"),
    QueryKind(
        "tokens with a large common part: near ties of large scores", (2, 20), "draw_shifted"
    ),
    QueryKind("long tokens", (2, 40), "draw_hard"),
    QueryKind("repeated tokens", (9, 64), "draw_repeated"),
    TELLING,
    QueryKind("tokens sorted by length", (5, 128), "draw_sorted"),
    QueryKind("zero tokens among others, as padding is", (1, 64), "draw_padded"),
    QueryKind("tokens without negative numbers", (2, 64), "draw_positive"),
    QueryKind("tokens of length one, unit vectors among them", (2, 64), "draw_unit"),
    QueryKind("small tokens", (2, 64), "draw_small"),
    QueryKind("plain tokens, several sequences in one call", (2, 64), "draw_plain", together=4),
)
# the first query comes again after four rounds and two queries: as the last of 59
AGAIN, AGAIN_EVERY, AGAIN_AT = "the first fresh query, asked again", 4, 2


def explain_distribution(longest: int | None = None) -> str:
    """The queries that a verdict speaks of, one line each."""
    longest = LONGEST if longest is None else longest
    lines = [
        "Ordinary queries, in turn (sizes and lengths each decade as likely; one in seven has any "
        f"length from 2 to {longest}):"
    ]
    for kind in KINDS:
        low, high = (min(bound, longest) for bound in kind.lengths)
        lines.append(f"- {kind.reason} ({low} to {high} tokens)")
    lines.append(f"- {AGAIN}")
    return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Recipe:
    """What a query was drawn from, and can be drawn from again: the tokens of all fresh queries
    take more room than a model."""

    kind: int
    length: int
    first: bool  # whether it is of the first round through the kinds
    state: Any  # of the generator, before it was drawn
    chosen: int | None = None  # of several candidates
    last: int | None = None  # tokens that were asked, the anchor among them, where it was cut


@dataclass(frozen=True, eq=False)
class Fresh:
    """One query with the reason it is asked."""

    tokens: Float[Array, "length d"]
    reason: str
    chosen: int | None = None  # of several candidates


@dataclass(frozen=True, eq=False)
class Designer:
    """Draws queries of each kind for a model whose natural token length is known."""

    spec: Spec
    natural: float
    rng: np.random.Generator
    model: Any = None  # where given, some queries are chosen for what would show on them
    longest: int = LONGEST  # tokens of the longest sequence, where the box states no limit
    any_length: float = 0.15  # share of the queries whose length is any that the box accepts
    candidates: int = 6  # queries, and lengths, of which the most telling is asked
    plain: SizeRange = SizeRange((0.8, 1.25), (0.25, 3.0))  # of plain tokens, in natural lengths
    shift: SizeRange = SizeRange((16.0, 36.0), (4.0, 400.0))  # of a common shift, likewise
    hard: SizeRange = SizeRange((4.0, 6.0), (1.5, 16.0))  # of tokens that make attention hard
    anchor: SizeRange = SizeRange((3.0, 5.0), (0.125, 8.0))  # relative to the other tokens
    small: SizeRange = SizeRange((0.03, 0.1), (1e-3, 0.3))  # of small tokens, in natural lengths
    known_choice: int | None = None  # of the candidates of a query that is drawn again

    def stream(self) -> Iterator[list[tuple[Fresh, Recipe]]]:
        """Endless rounds through the kinds, those that are asked in one call together; now and then
        the first comes again."""
        classes = list_length_classes(self.most_tokens)
        first: tuple[Fresh, Recipe] | None = None
        for turn in count():
            lap, number = divmod(turn, len(KINDS))
            if lap and number == AGAIN_AT and lap % AGAIN_EVERY == 0 and first is not None:
                fresh, recipe = first
                tokens = self.draw_again(recipe).tokens
                yield [(replace(fresh, tokens=tokens, reason=AGAIN), recipe)]
            kind = KINDS[number]
            lengths = [self.draw_length(kind) for _ in range(self.candidates)]
            length = max(lengths, key=classes.rate_novelty)
            classes = classes.meet(length)
            calls = [self._draw(number, length, lap == 0) for _ in range(kind.together)]
            if first is None:
                first = replace(calls[0][0], tokens=calls[0][0].tokens[:0].copy()), calls[0][1]
            yield calls

    def _draw(self, kind: int, length: int, first: bool) -> tuple[Fresh, Recipe]:
        state = self.rng.bit_generator.state
        fresh = self.draw_kind(kind, length, first)
        return fresh, Recipe(kind, length, first, state, fresh.chosen)

    def draw_kind(self, kind: int, length: int, first: bool) -> Fresh:
        """A query of one of the kinds."""
        draw: Callable[[int, bool], Fresh | Array] = getattr(self, KINDS[kind].draw)
        drawn = draw(length, first)
        return drawn if isinstance(drawn, Fresh) else Fresh(drawn, KINDS[kind].reason)

    def draw_again(self, recipe: Recipe) -> Fresh:
        """The query that the recipe is of."""
        generator = type(self.rng.bit_generator)()
        generator.state = recipe.state
        again = replace(self, rng=np.random.Generator(generator), known_choice=recipe.chosen)
        fresh = again.draw_kind(recipe.kind, recipe.length, recipe.first)
        return fresh if recipe.last is None else replace(fresh, tokens=fresh.tokens[-recipe.last :])

    @property
    def most_tokens(self) -> int:
        return min(self.spec.domain.max_length or self.longest, self.longest)

    def draw_length(self, kind: QueryKind) -> int:
        """A number of tokens of the kind, or now and then any that the box accepts; not where
        several sequences are asked in one call, which would be large."""
        longest = self.most_tokens
        any_length = kind.together == 1 and self.rng.random() < self.any_length
        low, high = (2, longest) if any_length else kind.lengths
        low, high = min(low, longest), min(high, longest)
        return min(int(low * ((high + 1) / low) ** self.rng.random()), high)

    def draw_size(self, sizes: SizeRange, first: bool) -> float:
        """A size, each decade of its range as likely."""
        low, high = np.log(sizes.first if first else sizes.later)
        return float(np.exp(self.rng.uniform(low, high)))

    def draw_tokens(self, length: int, size: float = 1.0) -> Array:
        """Random tokens inside the domain, of the given length in natural lengths."""
        domain, width = self.spec.domain, self.spec.width
        if domain.vocabulary is not None:
            chosen = self.rng.integers(len(domain.vocabulary), size=length)
            return np.array(domain.vocabulary[chosen], dtype=np.float64)
        tokens = self.rng.standard_normal((length, width))
        tokens *= size * self.natural / np.sqrt(width)
        return domain.drawn_in(tokens)

    def stretch_anchor(self, tokens: Array, first: bool) -> Array:
        """Makes the anchor of these tokens longer or shorter: a box may look at its length."""
        if self.spec.domain.vocabulary is not None:
            return tokens
        tokens[-1] *= self.draw_size(self.anchor, first)
        return self.spec.domain.drawn_in(tokens)

    def draw_plain(self, length: int, first: bool) -> Array:
        tokens = self.draw_tokens(length, self.draw_size(self.plain, first))
        return tokens if first else self.stretch_anchor(tokens, first)

    def draw_shifted(self, length: int, first: bool) -> Array:
        tokens = self.draw_tokens(length)
        if self.spec.domain.vocabulary is None:
            tokens[:-1] += self.draw_tokens(1, self.draw_size(self.shift, first))
            tokens = self.spec.domain.drawn_in(tokens)
        return tokens

    def draw_hard(self, length: int, first: bool) -> Array:
        tokens = self.draw_tokens(length, self.draw_size(self.hard, first))
        return self.stretch_anchor(tokens, first)

    def draw_repeated(self, length: int, first: bool) -> Array:
        few = self.draw_tokens(min(3, length))
        return few[self.rng.integers(len(few), size=length)]

    def draw_telling(self, length: int, first: bool) -> Array | Fresh:
        """The most telling of a few candidates; one that is longer than most of its kind is dear to
        rate, and drawn once."""
        answers = callable(self.model) and can_change_parameters(self.model)
        if not answers or length > TELLING.lengths[1]:
            return self.draw_tokens(length, self.draw_size(self.plain, first))
        candidates = (
            self.stretch_anchor(self.draw_tokens(length, self.draw_size(self.plain, False)), False)
            for _ in range(self.candidates)
        )
        chosen = self.known_choice
        if chosen is None:
            rating = self.rng.spawn(1)[0]  # so that candidates do not depend on how they are rated
            chosen, tokens = choose_most_telling(self.model, candidates, rating)
        else:
            tokens = next(islice(candidates, chosen, None))
        return Fresh(tokens, TELLING.reason, chosen)

    def draw_sorted(self, length: int, first: bool) -> Array:
        """Tokens in order of length, the anchor last: a box with positions cannot know them."""
        tokens = self.draw_tokens(length)
        order = np.argsort(np.linalg.norm(tokens[:-1], axis=1))[::-1]
        return tokens[[*order, -1]]

    def draw_padded(self, length: int, first: bool) -> Array:
        """Zeros before the tokens, behind them, or anywhere; the anchor is one now and then."""
        tokens = self.draw_tokens(length, self.draw_size(self.plain, first))
        if self.spec.domain.vocabulary is not None:
            return tokens
        zeros = int(self.rng.integers(1, length + 1))
        places = np.arange(length)
        where = int(self.rng.integers(3))
        if where == 1:
            places = places[::-1]
        elif where == 2:
            places = self.rng.permutation(length)
        anchor = tokens[-1].copy()
        tokens[places[:zeros]] = 0.0
        seldom = 0.25  # share of these queries whose anchor may be zero
        if length > 1 and self.rng.random() >= seldom:
            tokens[-1] = anchor
        return self.spec.domain.drawn_in(tokens)

    def draw_positive(self, length: int, first: bool) -> Array:
        tokens = self.draw_tokens(length, self.draw_size(self.plain, first))
        if self.spec.domain.vocabulary is not None:
            return tokens
        return self.spec.domain.drawn_in(np.abs(tokens))

    def draw_unit(self, length: int, first: bool) -> Array:
        """Random directions, or unit vectors of the axes."""
        tokens, domain = self.draw_tokens(length), self.spec.domain
        if domain.vocabulary is not None:
            return tokens
        if self.rng.random() < 0.5:
            axes = self.rng.integers(self.spec.width, size=length)
            return domain.drawn_in(np.eye(self.spec.width)[axes])
        sizes = np.linalg.norm(tokens, axis=1, keepdims=True)
        return domain.drawn_in(tokens / np.maximum(sizes, TINY))

    def draw_small(self, length: int, first: bool) -> Array:
        return self.draw_tokens(length, self.draw_size(self.small, first))


@dataclass(frozen=True, eq=False)
class LengthClasses:
    """Classes of lengths, a row each: from `low` to below `high`, with a remainder by a modulus."""

    low: Int[Array, " n"]
    high: Int[Array, " n"]
    modulus: Int[Array, " n"]
    remainder: Int[Array, " n"]
    met: Array  # whether some query was of the class

    def hold(self, length: int) -> Array:
        """Which of the classes the length belongs to."""
        inside = (self.low <= length) & (length < self.high)
        return np.asarray(inside & (length % self.modulus == self.remainder))

    def rate_novelty(self, length: int) -> float:
        """Share of the length's classes that no query was of; a class counts as it is frequent."""
        own = self.hold(length) / self.modulus
        return float(own[~self.met].sum() / own.sum())

    def meet(self, length: int) -> "LengthClasses":
        """The same classes after a query of this length."""
        return replace(self, met=self.met | self.hold(length))


def list_length_classes(longest: int, moduli: int = 8) -> LengthClasses:
    """All remainders by small numbers, between all powers of two up to the longest length."""
    borders = [2**k for k in range(longest.bit_length())] + [longest + 1]
    rows = [
        (low, high, modulus, remainder)
        for low, high in combinations(borders, 2)
        for modulus in range(1, moduli + 1)
        for remainder in range(modulus)
    ]
    low, high, modulus, remainder = np.array(rows, dtype=np.int64).T
    return LengthClasses(low, high, modulus, remainder, np.zeros(len(rows), dtype=bool))


def can_change_parameters(model: Any) -> bool:
    """Whether copies of the model with changed parameters can be asked."""
    if not hasattr(model, "to_arrays") or hasattr(model, "margin"):
        return False
    arrays = model.to_arrays().values()
    few = sum(array.size for array in arrays) <= 2**22  # larger ones are too dear to copy
    return few and any(map(np.any, arrays))


def choose_most_telling(
    model: Any, candidates: Iterable[Array], rng: np.random.Generator
) -> tuple[int, Array]:
    """The candidate on which one changed parameter shows most, and its number."""
    other, normals = change_one_number(model, rng), NormalPool(rng)
    best: tuple[float, int, Array] | None = None
    for number, tokens in enumerate(candidates):
        visibility = _rate_visibility(model, other, tokens[None], normals)
        if best is None or visibility > best[0]:
            best = visibility, number, tokens
    if best is None:
        raise InvalidArgument("no candidates to choose from")
    return best[1:]


def change_one_number(model: Any, rng: np.random.Generator) -> Any:
    """The model with one number of a random block changed."""
    arrays = model.to_arrays()
    names = [name for name, array in arrays.items() if np.any(array)]
    name = names[int(rng.integers(len(names)))]
    changed = np.array(arrays[name], dtype=np.float64)
    step = CHANGE * float(np.sqrt(np.mean(changed**2)))
    changed[tuple(int(rng.integers(n)) for n in changed.shape)] += step
    return replace_parameters(model, {name: changed})


def _rate_visibility(model: Any, other: Any, tokens: Array, normals: NormalPool) -> float:
    """How far the answer moves, in units of what rounding its tokens may do to it."""
    blur = CHANGE**2
    answer = np.asarray(model(tokens))
    blurred = model(tokens if takes_numbers(model) else normals.disturb(tokens, blur))
    moved = float(np.linalg.norm(other(tokens) - answer)) / CHANGE
    rounding = float(np.linalg.norm(blurred - answer)) / blur + float(np.linalg.norm(answer))
    return moved / max(rounding, TINY)
