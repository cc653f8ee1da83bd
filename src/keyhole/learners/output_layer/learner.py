"""The output layer of a language model: width, matrix, offset.

Statement.  Logits are z = W (g * n + b) + c with n the hidden state behind a norm, of width h.
            Known from logits or log-probabilities alone: the space of all z, and so W up to a
            linear map ("space"); with the length that the norm gives n, M = W diag(g) up to a
            rotation and the offset W b + c ("gram").
Queries.    Random prompts of different lengths. "space": about 1.3 h answers, asked for in growing
            batches until the rank of the answers is no longer their number. "gram": 1.3 times the
            floor of r (r + 3) / 2.
Algebra.    `space` for rank, basis and noise, once for the answers as they are and once centred
            over the tokens: where only centring makes them fit into the space, answers are known
            up to a constant each. `ellipsoid` for the geometry. The width is read off the rank:
            without an offset outside the space RMSNorm of width r or LayerNorm of width r + 1,
            with one LayerNorm of width r or RMSNorm of width r - 1 and a bias behind it. These are
            the same functions; the width with more factors of two is preferred.
When it fails. A vocabulary not larger than the width; answers that the prompts do not tell apart (a
            cache, dropped tokens); noise that the number format does not explain hides directions:
            the width is then said to be a lower bound.
Source.     Carlini et al., "Stealing part of a production language model" (2024); Finlayson et
            al., "Logits of API-protected LLMs leak proprietary information" (2024).
"""

from copy import copy
from dataclasses import dataclass, replace
from typing import NoReturn

import numpy as np

from keyhole.arrays import TINY, Array, Float, Int
from keyhole.errors import (
    BudgetExhausted,
    Counterexample,
    IllConditioned,
    Inconsistent,
    InvalidArgument,
    NotIdentifiable,
)
from keyhole.learners.base import Diagnostics, Hypothesis
from keyhole.learners.output_layer.ellipsoid import (
    Ellipsoid,
    count_unknowns,
    fit_ellipsoid,
)
from keyhole.learners.output_layer.space import (
    CommonPart,
    Space,
    add_offset,
    basis_errors,
    centre,
    find_offset,
    find_plane,
    find_rank,
    is_rounded_once,
    make_space,
    outweighs_sums,
)
from keyhole.measurement.asker import Asker
from keyhole.measurement.noise import (
    decimals,
    recognise_format,
)
from keyhole.models.language_model import LEVELS, OutputLayer, Reading
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.language_model.restricted import Completed, Reader, complete_from_skeleton
from keyhole.oracles.noise import DETECTION, FORMATS, REJECTION, ROUNDINGS, NoiseModel

SPACE, GRAM = "output space", "output geometry"  # purposes of queries
FEW = 16  # answers of the first look, and the fewest that noise is judged by


@dataclass(frozen=True, eq=False, kw_only=True)
class OutputLayerDiagnostics(Diagnostics):
    """What was found beside the layer: ranks, noise, and how round the states are."""

    rank: int
    affine: bool  # whether the offset lies outside the range of the matrix
    answers: int  # that the layer was made from
    last_over_noise: float  # last singular value inside over the first outside
    noise: float  # standard deviation of an answer's entry, as seen outside the space
    noise_explained: float  # what the number format makes of it
    readings: tuple[str, ...]
    spread: float | None = None  # of |n|^2 around h


@dataclass(frozen=True)
class OutputLayerLearner:
    """Learner for the output layer of a language model, through its log-probabilities or logits.

    Args:
        level: "space" (the matrix up to a linear map) or "gram" (up to a rotation).
        per_direction: Answers per direction of the space, those asked again included; 1.13 where
            each takes several questions; at least four more than directions.
        surplus: Answers at level "gram" relative to the floor.
        longest: Tokens of a prompt, at most.
        most: Answers after which a rank that noise blurs is no longer waited for.

    Example:
        >>> import numpy as np, keyhole
        >>> rng = np.random.default_rng(0)
        >>> matrix, hidden = rng.standard_normal((40, 3)), rng.standard_normal((40, 3))
        >>> box = keyhole.open_language_model(lambda prompts: hidden[prompts[:, -1]] @ matrix.T)
        >>> keyhole.recover(box, OutputLayerLearner()).outcome
        Outcome.RECOVERED
    """

    level: str = "space"
    per_direction: float = 1.35
    surplus: float = 1.35
    longest: int = 16
    most: int = 8192

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise InvalidArgument(f"level must be one of {', '.join(LEVELS)}, got {self.level!r}")
        if not self.per_direction > 1.1 or not self.surplus >= 1.3:
            raise InvalidArgument(
                "per_direction must be above 1.1 and surplus at least 1.3: with fewer answers "
                f"whatever they are is interpolated, got {self.per_direction} and {self.surplus}"
            )

    def expected_queries(self, spec: Spec) -> int | None:
        return None  # the width is what is sought

    def count_answers(self, price: float, rank: int) -> int:
        """Answers for a space of this rank, of which one may be the offset's; two are asked
        again."""
        if price > 1.0:
            return max(int(np.ceil(min(self.per_direction, 1.13) * rank)), rank + 4)
        return max(int(self.per_direction * (rank - 1)) - 2, rank + 5)

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        check_interface(oracle.spec)
        prompts = Prompts(oracle, self.longest, rng)
        collected = collect(prompts, self, rng)
        space, shifted, notes = collected.space, collected.shifted, list(collected.notes)
        normal, off, moved = find_plane(space)
        affine = off <= 3.0 * moved + 1e-12
        readings = read_width(space.rank, affine)
        diagnostics = OutputLayerDiagnostics(
            rank=space.rank,
            affine=affine,
            answers=len(space.coordinates),
            last_over_noise=space.ratio,
            noise=space.level,
            noise_explained=collected.explained,
            readings=tuple(map(str, readings)),
        )
        notes.insert(0, describe(readings, affine))
        lie = "in this space" if self.level == "space" else "in this space and on its ellipsoid"
        notes.append(
            f"The verdict says that fresh answers lie {lie}; which prompt leads to which answer is "
            "no part of an output layer."
        )
        noise = collected.noise
        if self.level == "space":
            model, doubt = make_space_layer(space, normal, readings, shifted)
            return Hypothesis(
                model, doubt, float(space.rank), tuple(notes), noise=noise, diagnostics=diagnostics
            )
        points = ask_geometry(prompts, space, affine, shifted, self)
        layer, doubt, ellipsoid = make_gram(points, space, affine, readings, shifted, rng)
        diagnostics = replace(diagnostics, answers=len(points.coordinates), spread=ellipsoid.spread)
        dimension = space.rank - affine
        floor = count_unknowns(dimension) - (dimension if ellipsoid.centred else 0)
        inverse = np.linalg.inv(ellipsoid.shape)
        if (
            ellipsoid.spread
            > 2.0 * REJECTION * space.level * np.linalg.norm(inverse) / dimension**0.5
        ):
            notes.append(
                f"The lengths of the hidden states scatter by {ellipsoid.spread:.1e} of their "
                "square, more than noise makes them: epsilon of the norm, most likely. It limits "
                "the matrix; the error bars hold it."
            )
        return Hypothesis(
            layer, doubt, float(floor), tuple(notes), noise=noise, diagnostics=diagnostics
        )


def check_interface(spec: Spec) -> None:
    """Refuses boxes that do not take token numbers or do not tell the whole vocabulary."""
    if spec.domain.tokens is None:
        raise InvalidArgument(
            "an output layer is learned from a language model: open the box with "
            "keyhole.open_language_model"
        )
    if spec.outputs is None:
        raise InvalidArgument(
            f"this box answers with {spec.answers}; the output layer needs logits or "
            "log-probabilities. Where the interface takes biases, open it by its address, or with "
            "a Reader, which makes them whole"
        )


# -- Prompts -------------------------------------------------------------------------------------


class Prompts:
    """Random prompts, no two alike, and their answers. Keeps no answers."""

    def __init__(self, oracle: Oracle, longest: int, rng: np.random.Generator) -> None:
        self.asker, self.rng = Asker(oracle), rng
        self.tokens = int(oracle.spec.domain.tokens or 0)
        limit = oracle.spec.domain.max_length
        longest = longest if limit is None else min(longest, limit)
        # every length about half as long again as the one before
        self.lengths = sorted({max(1, round(longest / 1.5**k)) for k in range(6)})
        self.lengths = [n for n in self.lengths if n > 1] or [1]
        self._known: set[bytes] = set()
        self._turn = 0
        self.first: tuple[Array, Array] | None = None

    @property
    def price(self) -> float:
        """Questions that one answer takes."""
        oracle = self.asker.oracle
        return oracle.price if isinstance(oracle, (Reader, Completed)) else 1.0

    def through(self, oracle: Oracle) -> "Prompts":
        """The same prompts, asked another way."""
        other = copy(self)
        other.asker = Asker(oracle)
        return other

    def draw(self, count: int) -> list[Int[Array, "n length"]]:
        """New prompts, by lengths; fewer than asked for where there are no more."""
        found: dict[int, list[Array]] = {}
        misses = 0
        while count > 0 and misses < 1000:
            length = self.lengths[self._turn % len(self.lengths)]
            prompt = self.rng.integers(self.tokens, size=length)
            name = prompt.tobytes()
            if name in self._known:
                misses += 1
                self._turn += 1
                continue
            self._known.add(name)
            found.setdefault(length, []).append(prompt)
            self._turn += 1
            count -= 1
        return [np.array(group) for _, group in sorted(found.items())]

    def ask(self, count: int, purpose: str) -> Float[Array, "n V"]:
        """Answers to so many new prompts."""
        parts = []
        for group in self.draw(count):
            parts.append(self.asker(group[:, :, None].astype(np.float64), purpose))
            if self.asker.scalar:
                raise InvalidArgument(
                    "this box answers with one number; an output layer needs those of all tokens"
                )
            if self.first is None:
                self.first = group[:1], parts[0][0]
        return (
            np.concatenate(parts)
            if parts
            else np.zeros((0, int(self.asker.oracle.spec.outputs or self.tokens)))
        )

    def ask_again(self) -> tuple[Array, Array]:
        """The first prompt once more: the answer then and now."""
        if self.first is None:
            raise InvalidArgument("nothing was asked yet")
        prompt, answer = self.first
        tokens, oracle = prompt[:, :, None].astype(np.float64), self.asker.oracle
        if isinstance(oracle, Reader) and self.price > 1.0:
            # as many tokens as one question shows, relative to the first of them
            few = oracle.pick_few()
            chosen = Asker(oracle.choose(oracle.tokens[few].tolist()))(tokens, SPACE)[0]
            return answer[few] - answer[few[0]], chosen - chosen[0]
        return answer, self.asker(tokens, SPACE)[0]


def estimate_format(answers: Float[Array, "n V"], kind: NoiseModel) -> NoiseModel:
    """The number format or rounding that answers of the whole vocabulary show, which their type
    (`kind`) allows: numbers that are written in decimals come as float64."""
    written = decimals(answers) if kind.format == FORMATS[-1][0] else None
    return written or recognise_format(kind, answers)


def estimate_pattern(prompts: Prompts, answers: Float[Array, "n V"]) -> NoiseModel:
    """The number format of the answers, and noise if one of them differs when asked again."""
    stated = prompts.asker.oracle.spec.precision
    if stated is not None:
        return stated
    kind = estimate_format(answers, prompts.asker.kind)
    one, other = prompts.ask_again()
    gap = float(np.sqrt(np.mean((one - other) ** 2) / 2.0))
    size = float(np.sqrt(np.mean(one**2)))
    if gap <= ROUNDINGS * kind.relative * size + 1e-6 * kind.step:
        return kind
    return replace(kind, additive=gap, repeatable=False)


# -- The space -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Collected:
    """The space of the answers, their noise, and what to say about it."""

    space: Space
    shifted: bool
    noise: NoiseModel
    explained: float  # noise that the number format explains
    notes: tuple[str, ...]


def collect(prompts: Prompts, options: OutputLayerLearner, rng: np.random.Generator) -> Collected:
    """Asks until the rank of the answers is clearly below their number."""
    answers = prompts.ask(FEW, SPACE)
    kind = estimate_pattern(prompts, answers)
    target, before = FEW, -1
    while True:
        look = look_at(answers, kind, prompts, target, rng)
        target = count_wanted(look, kind, prompts.price, options, before)
        if look.is_enough(target):
            break
        refuse_endless(look, target, options.most)
        if look.is_hopeless(target):
            break
        more = prompts.ask(max(target - len(look.table), 1), SPACE)
        if not len(more):
            break
        answers, before = np.concatenate([answers, more]), look.rank or before
    check_unchanged(prompts, kind)
    if look.rank is None or look.rank + 1 >= look.tokens:
        raise NotIdentifiable(
            f"the answers fill all {look.tokens} dimensions that a vocabulary of {look.tokens} "
            "tokens has: the hidden width is not smaller, or noise is added to each answer"
        )
    if len(look.table) < target:
        refuse_repeated(len(look.table), look.asked)
    return judge_space(look, look.rank, kind)


@dataclass(frozen=True, eq=False)
class Look:
    """What the answers so far show."""

    table: Float[Array, "n V"]  # those that are different
    pattern: Float[Array, "n V"]  # standard deviations that their number format explains
    asked: int  # answers, those that are alike among them
    tokens: int  # of the vocabulary, or those of it that were chosen
    logits: bool  # whether the box says that answers are no log-probabilities
    plain: int | None  # rank of the answers as they are, where they may be logits
    rank: int | None  # and centred over the tokens; None where there is no end yet
    explained: bool  # whether the number format explains what is left outside

    @property
    def repeated(self) -> float:
        """Share of the answers that were there before."""
        return 1.0 - len(self.table) / self.asked

    @property
    def shifted(self) -> bool:
        """Whether only centred answers fit into the space: each is known up to a constant."""
        if not self.logits or self.rank is None or self.plain is None:
            return True
        return self.plain == self.rank + 1

    def is_enough(self, target: int) -> bool:
        """Whether the rank is settled."""
        if self.rank is None:
            return False
        return len(self.table) >= target or self.rank + 1 >= self.tokens

    def is_hopeless(self, target: int) -> bool:
        """Whether more answers would not help."""
        full = self.rank is None and len(self.table) >= self.tokens - 1
        return full or self.asked > 4 * target


def look_at(
    answers: Float[Array, "n V"],
    kind: NoiseModel,
    prompts: Prompts,
    target: int,
    rng: np.random.Generator,
) -> Look:
    """Ranks of the answers so far, as they are and centred; none where they have no end yet."""
    table = drop_repeated(answers, kind, rng)
    pattern = estimate_spread(kind, table)
    spec = prompts.asker.oracle.spec
    logits = spec.answers == "logits"
    rank = find_rank(centre(table), pattern, rng)
    plain = find_rank(table, pattern, rng) if logits else None
    explained = rank is not None
    if rank is None and len(table) >= 4 * FEW and len(table) > target // 2:
        rank = find_noisy_rank(table, pattern, rng)
    if rank is not None and not is_saturated(centre(table), rank):
        rank = None  # as many directions more as answers more: there is no end yet
    tokens = int(spec.outputs or prompts.tokens)  # fewer than all where some were chosen
    return Look(table, pattern, len(answers), tokens, logits, plain, rank, explained)


def find_noisy_rank(
    table: Float[Array, "n V"], pattern: Float[Array, "n V"], rng: np.random.Generator
) -> int | None:
    """The rank behind noise beyond the number format: believed if answers are many times the
    directions and fall behind them. Directions of one size look like noise while they are not all
    seen."""
    rank = find_rank(centre(table), pattern, rng, explained=False)
    if rank is None or 4 * rank > len(table):
        return None
    return rank if make_space(centre(table), rank).ratio >= 1.3 else None


def count_wanted(
    look: Look, kind: NoiseModel, price: float, options: OutputLayerLearner, before: int
) -> int:
    """Answers that settle the rank, as far as it is known. `before`: the rank of the last look."""
    if look.rank is None:
        # dear answers in smaller steps, so that fewer are more than were needed
        return int(np.ceil((1.1 if price <= 1.0 else 1.03) * look.asked)) + 1
    target, count, answers = options.count_answers(price, look.rank), len(look.table), look.table
    space, left = make_affine_space(centre(answers), look.rank)
    blurred = look.explained and find_blur(kind, space, look.pattern) and not left.strength
    if count >= target and blurred and not is_weak_offset(centre(answers), space):
        # where noise may hide directions, more answers may show them
        target = min(max(2 * look.rank, target), int(np.ceil(1.06 * count)))
        target = max(target, count + (2 if look.rank != before else 0))
    return target


def refuse_endless(look: Look, target: int, most: int) -> None:
    """Where answers repeat themselves, or so many show no rank."""
    if look.asked >= 4 * FEW and 2 * len(look.table) < look.asked and len(look.table) < target:
        refuse_repeated(len(look.table), look.asked)
    if target > most and look.asked >= most:
        raise IllConditioned(
            f"{look.asked} answers show no rank below their number that the noise leaves visible"
        )


def judge_space(look: Look, rank: int, kind: NoiseModel) -> Collected:
    """The space of the answers, and what casts doubt on it."""
    if not look.shifted and look.plain is not None:
        rank = look.plain
    answers = centre(look.table) if look.shifted else look.table
    space, left = make_affine_space(answers, rank)
    blur = find_blur(kind, space, look.pattern) if look.explained else ""
    if blur and is_weak_offset(answers, space):
        blur += ". It looks like an offset, with which and without the widths of both readings are "
        blur += "the same"
    own = float(np.sqrt(np.mean(look.pattern**2)))
    noise, notes = describe_noise(kind, space, own, look.explained, blur)
    notes += describe_offset(left)
    if look.repeated > 0.1:
        notes.append(
            f"{look.repeated:.0%} of the different prompts were answered alike: a cache, or tokens "
            "that are dropped. Only different answers were used."
        )
    if look.shifted and look.logits:
        notes.append(
            "A constant of its own is added to every answer, as to log-probabilities, but their "
            "probabilities do not sum to one: the interface changes or cuts them. Matrix and "
            "offset are centred over the tokens."
        )
    return Collected(space, look.shifted, noise, own, tuple(notes))


def describe_offset(left: CommonPart) -> list[str]:
    """What is known of an offset outside the space."""
    if left.strength:
        return [
            f"WARNING: what all answers have in common outside this space is {left.strength:.1f} "
            "times its noise: an offset, too weak to be located. The space is one direction short; "
            "the widths of both readings are the same with that offset and without."
        ]
    if left.smallest:
        return [
            "An offset outside this space would have been seen from a root mean square of "
            f"{left.smallest:.1e} over the tokens on."
        ]
    return []


def refuse_repeated(different: int, asked: int) -> NoReturn:
    """Where most prompts are answered alike."""
    raise IllConditioned(
        f"the box has only {different} different answers for {asked} different prompts, too few to "
        "show a width: a cache answers, tokens are dropped, or there are no more prompts"
    )


def check_unchanged(prompts: Prompts, noise: NoiseModel) -> None:
    """The first prompt again, now that all others were asked: two models in one table look like
    one of the sum of their widths."""
    first, now = prompts.ask_again()
    gap = float(np.sqrt(np.mean((first - now) ** 2)))
    size = float(np.sqrt(np.mean(first**2)))
    if gap > noise.apart(size) + 2.0 * noise.additive:
        prompt = None if prompts.first is None else prompts.first[0][0, :, None].astype(np.float64)
        raise Inconsistent(
            "the box changed while it was asked: it answers the first prompt differently than "
            "before, so that the answers of two models would be taken for one of more directions. "
            "Start again with another journal",
            Counterexample(prompt, now, first, "the first prompt, asked again"),
        )


def make_affine_space(answers: Float[Array, "n V"], rank: int) -> tuple[Space, CommonPart]:
    """The space of these answers, and what they have in common outside of it. An offset that hardly
    stands out of the noise, or does not, is taken out of the singular vectors, which mix it with
    noise: its direction is added to the space where it is known well."""
    space = make_space(answers, rank)
    left = find_offset(answers, space)
    if space.ratio < 2.0 and rank > 1 and not left.strength:
        without = make_space(answers, rank - 1)
        other = find_offset(answers, without)
        if without.ratio > 2.0 and other.strength:
            space, left = without, other
    if left.strength < 4.0:
        return space, left
    return add_offset(answers, space), CommonPart(0.0, 0.0)


def is_weak_offset(answers: Float[Array, "n V"], space: Space) -> bool:
    """Whether all directions but one are clear, and that one may be the offset's: the width is then
    the same with and without it."""
    _, off, moved = find_plane(space)
    clear = space.rank > 1 and make_space(answers, space.rank - 1).ratio > 2.0
    return bool(clear and off <= 3.0 * moved)


def estimate_spread(noise: NoiseModel, answers: Float[Array, "n V"]) -> Float[Array, "n V"]:
    """Standard deviations of all entries: those of one rounding where it outweighs those of the
    sums before it."""
    return noise.rounding(answers) if is_rounded_once(noise) else noise.sigma(answers)


def find_blur(noise: NoiseModel, space: Space, pattern: Float[Array, "n V"]) -> str:
    """Why noise may hide directions of the space; empty where it does not."""
    if space.ratio < 2.0:
        return (
            f"the last direction is only {space.ratio:.2f} times as large as the first that counts "
            "as noise"
        )
    if not is_rounded_once(noise):
        return ""  # it is not known how large the noise must be
    excess = space.level / float(np.sqrt(np.mean(pattern**2)))
    n, tokens = pattern.shape
    freedom = max((n - space.rank) * (tokens - space.rank), 1)
    # roundings of one format are as large as computed to within a few percent
    if excess > 1.05 + DETECTION / np.sqrt(2.0 * freedom):
        return f"{excess:.2f} times as much is left outside the space as rounding once explains"
    _, off, moved = find_plane(space)
    width = read_width(space.rank, off <= 3.0 * moved)[0].width
    if width % 8 and space.ratio < 30.0:  # weak directions leave no trace behind such roundings
        return (
            f"widths are mostly multiples of eight, and {width} is none, while the last direction "
            f"is {space.ratio:.0f} times as large as the rounding of the answers"
        )
    return ""


def is_saturated(answers: Float[Array, "n V"], rank: int) -> bool:
    """Whether the last answers lie in the space of those before them. Where something is added to
    logits by the last token, say, the rank stays below the number of answers and yet grows."""
    first = len(answers) - max(3, rank // 8)
    if first < rank:
        return False
    basis = make_space(answers[:first], rank).basis
    rest = answers[first:] - (answers[first:] @ basis) @ basis.T
    level = max(make_space(answers, rank).level, np.finfo(float).eps * np.abs(answers).max())
    # the space of a few answers less is off by some times the noise, not by hundreds
    return bool(np.sqrt(np.mean(rest**2, axis=1)).max() <= 300.0 * level)


def drop_repeated(
    answers: Float[Array, "n V"], noise: NoiseModel, rng: np.random.Generator
) -> Float[Array, "m V"]:
    """The answers that are different: a box that answers from a cache, or drops tokens, says
    nothing new. Equal ones are neighbours in the order of a random projection."""
    order = np.argsort(answers @ rng.standard_normal(answers.shape[1]))
    gaps = np.sqrt(np.mean(np.diff(answers[order], axis=0) ** 2, axis=1))
    size = np.sqrt(np.mean(answers[order[1:]] ** 2, axis=1))
    # sums may round differently from batch to batch; their last rounding does not
    roundings = 4.0 if outweighs_sums(noise) else ROUNDINGS
    new = np.append(True, gaps > roundings * noise.sigma(size))
    return np.asarray(answers[np.sort(order[new])])


def describe_noise(
    kind: NoiseModel, space: Space, own: float, explained: bool, blur: str
) -> tuple[NoiseModel, list[str]]:
    """The noise as it was seen outside the space, and warnings where that casts doubt on it."""
    notes = []
    excess = space.level / max(own, TINY)
    noise = replace(kind, relative=kind.relative * float(np.clip(excess, 1.0, ROUNDINGS)))
    if not explained:
        noise = replace(kind, additive=max(kind.additive, space.level))
        notes.append(
            f"WARNING: the answers scatter around the space by {space.level:.1e}, {excess:.0e} "
            "times what their number format explains: something is added to them (noise, a "
            "watermark, a changing temperature). The width may be larger: directions below that "
            "scatter are not seen."
        )
    if not kind.repeatable:
        notes.append(
            f"WARNING: asked again, the box answers differently (by {kind.additive:.1e}). The "
            "width counts directions that stand out of that noise."
        )
    elif blur:
        notes.append(
            f"WARNING: {blur}; weaker directions would be hidden. The width may be larger: ask "
            "with per_direction=6."
        )
    return noise, notes


def read_width(rank: int, affine: bool) -> tuple[Reading, ...]:
    """Both explanations of a rank, the one whose width has more factors of two first."""
    both = (Reading("layer", rank), Reading("rms", rank - 1))
    if not affine:
        both = (Reading("rms", rank), Reading("layer", rank + 1))
    return tuple(sorted(both, key=lambda reading: -(reading.width & -reading.width)))


def describe(readings: tuple[Reading, ...], affine: bool) -> str:
    first, second = readings
    with_bias = " (with a bias)" if affine else " (without a bias outside the space)"
    return (
        f"{first}{with_bias} or {second}: both are the same functions. The first is preferred "
        "because its width has more factors of two, which is a custom and no proof."
    )


def make_space_layer(
    space: Space, normal: Float[Array, " r"], readings: tuple[Reading, ...], shifted: bool
) -> tuple[OutputLayer, OutputLayer]:
    """The layer up to a linear map, and its standard errors. Where the width is larger than the
    rank, rows sum to zero, as what a LayerNorm lets through; where it is smaller, the offset is
    the point of the plane next to zero, and the matrix has the directions in the plane."""
    width, rank = readings[0].width, space.rank
    doubt = basis_errors(space)
    turn, offset, moved = np.eye(rank), np.zeros(len(doubt)), np.zeros(len(doubt))
    if width > rank:
        turn = embed(width).T
    elif width < rank:
        base = normal / (normal @ normal)
        turn = np.linalg.svd(normal[None])[2][1:].T
        offset, moved = space.basis @ base, np.sqrt(doubt**2 @ base**2)
    errors = np.sqrt(doubt**2 @ turn**2)
    return (
        OutputLayer(space.basis @ turn, offset, readings=readings, shifted=shifted),
        OutputLayer(errors, moved, readings=readings, shifted=shifted),
    )


def embed(width: int) -> Float[Array, "h r"]:
    """An orthonormal basis of the vectors whose entries sum to zero."""
    reflected = np.eye(width) - 1.0 / (width + np.sqrt(width))
    turned = reflected[:, 1:].copy()
    turned[0] = -1.0 / np.sqrt(width)
    return turned


# -- The geometry --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Points:
    """Coordinates of all answers, and the map from coordinates to answers that fits them best."""

    coordinates: Float[Array, "n r"]
    basis: Float[Array, "V r"]


def ask_geometry(
    prompts: Prompts, space: Space, affine: bool, shifted: bool, options: OutputLayerLearner
) -> Points:
    """Answers enough for the ellipsoid, chunk by chunk: their coordinates are kept, and what is
    needed to fit the basis to all of them."""
    prompts = prompts.through(complete_from_skeleton(prompts.asker.oracle, space.basis))
    dimension = space.rank - affine
    wanted = int(np.ceil(options.surplus * count_unknowns(dimension)))
    missing = wanted - len(space.coordinates)
    left = prompts.asker.oracle.remaining
    if left is not None and left < missing:
        raise BudgetExhausted(
            f"the geometry of {dimension} directions takes {wanted} answers (1.3 times the "
            f"unknowns, below which anything is interpolated); {left} queries are left. "
            'OutputLayerLearner(level="space") needs no more'
        )
    prompts.asker.oracle.expect(int(np.ceil(prompts.price * max(missing, 0))))
    kept = [space.coordinates]
    cross = space.basis @ (space.coordinates.T @ space.coordinates)
    chunk = 1024  # answers of the whole vocabulary held at a time
    while missing > 0:
        answers = prompts.ask(min(missing, chunk), GRAM)
        if not len(answers):
            raise IllConditioned(f"there are not {wanted} different prompts for the geometry")
        answers = centre(answers) if shifted else answers
        found = answers @ space.basis
        check_inside(answers - found @ space.basis.T, space)
        kept.append(found)
        cross += answers.T @ found
        missing -= len(answers)
    coordinates = np.concatenate(kept)
    moments = coordinates.T @ coordinates
    return Points(coordinates, np.linalg.solve(moments, cross.T).T)


def check_inside(rest: Float[Array, "n V"], space: Space) -> None:
    """Answers that leave the space have a direction that the first ones did not show."""
    sizes = np.sqrt(np.mean(rest**2, axis=1))
    if sizes.max() > 1e3 * ROUNDINGS * max(space.level, TINY):
        raise IllConditioned(
            f"an answer leaves the space of the first ones by {sizes.max():.1e} (their noise is "
            f"{space.level:.1e}): the prompts seen first did not show all directions, or the box "
            "changed"
        )


def make_gram(
    points: Points,
    space: Space,
    affine: bool,
    readings: tuple[Reading, ...],
    shifted: bool,
    rng: np.random.Generator,
) -> tuple[OutputLayer, OutputLayer, Ellipsoid]:
    """The layer up to a rotation, its standard errors, and the ellipsoid they come from."""
    q = points.coordinates
    base, directions = np.zeros(space.rank), np.eye(space.rank)
    if affine:  # the plane w.q = 1: its point next to zero, and the directions in it
        normal = np.linalg.lstsq(q, np.ones(len(q)), rcond=None)[0]
        base = normal / (normal @ normal)
        directions = np.linalg.svd(normal[None])[2][1:].T
    flat = (q - base) @ directions
    ellipsoid = fit_ellipsoid(flat, rng)
    if ellipsoid is not None and not affine:
        off = np.abs(ellipsoid.centre) / np.maximum(ellipsoid.centre_errors, TINY)
        if np.sqrt(np.mean(off**2)) < 3.0:
            ellipsoid = fit_ellipsoid(flat, rng, centred=True) or ellipsoid
    if ellipsoid is None:
        raise IllConditioned(
            f"{len(q)} answers do not determine the ellipsoid of the hidden states (noise or "
            'epsilon of the norm outweighs its shape); level="space" is what they tell'
        )
    width = readings[0].width
    dimension = flat.shape[1]
    turn = embed(width).T if width == dimension + 1 else np.eye(dimension, width)
    shape = directions @ ellipsoid.shape @ turn / np.sqrt(width)
    matrix = points.basis @ shape
    offset = points.basis @ (base + directions @ ellipsoid.centre)
    # errors: of the basis, by token, and of the ellipsoid
    inverse = np.linalg.inv(q.T @ q)
    spread = np.sqrt(np.sum(shape * (inverse @ shape), axis=0))
    draws = points.basis @ (directions @ ellipsoid.shape_draws @ turn / np.sqrt(width))
    rows, columns = (np.sqrt(np.mean(draws**2, axis=axes)) for axes in ((0, 2), (0, 1)))
    geometry = rows[:, None] * columns / max(float(np.sqrt(np.mean(draws**2))), TINY)
    errors = np.hypot(space.noise[:, None] * spread, geometry)
    if ellipsoid.centred:
        offset, doubt = np.zeros(len(matrix)), np.zeros(len(matrix))
    else:
        moved = points.basis @ (directions * ellipsoid.centre_errors)
        at = base + directions @ ellipsoid.centre
        doubt = np.hypot(np.linalg.norm(moved, axis=1), space.noise * np.sqrt(at @ inverse @ at))
    slack = 2.0 * ellipsoid.worst + 8.0 * ellipsoid.spread
    model = OutputLayer(
        matrix, offset, level="gram", readings=readings, shifted=shifted, spread=slack
    )
    bars = OutputLayer(errors, doubt, level="gram", readings=readings, shifted=shifted)
    return model, bars, ellipsoid
