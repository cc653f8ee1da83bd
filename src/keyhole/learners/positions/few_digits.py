"""Positions of a layer that computes in half precision: scores from small random ones.

Statement.  Scores and what places add to them are found to the rounding of a box whose answers have
            two or three digits, from about ten times as many queries as there are unknowns per
            number in an answer. Nothing need be known of scores, nor of the law of the turns.
Queries.    Value maps from hard attention (`multi_head.measure_coarse_values`); pairs of tokens in
            both orders, which tell the kind; then random sequences of a size at which attention is
            soft, short ones mostly.
Algebra.    Weights of two tokens before an anchor are told by the value maps. If places add to
            scores, exchanging the two changes the logarithm of their ratio by the same number
            whatever they are; if places turn keys, it does not.
            With the value maps known to a few per cent, what makes the scores of a head is a matrix
            of low rank that is seen through linear forms, several times more than it has unknowns:
            damped Gauss-Newton steps find it from small random keys and queries, whatever turns
            them at the start. From there on it is the fit of the whole layer (`refinement`), with
            pairs that turn alike in all heads at the end.
When it fails.  A fit that leaves more than the rounding of the box is not believed: another start.
Source.     Keyhole's own; docs/methods/positions.md.
"""

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.base import Hypothesis, Inconclusive, Refuted
from keyhole.learners.multi_head import CoarseValues, measure_coarse_values, measure_rounding
from keyhole.learners.positions.candidate import Candidate, PositionDiagnostics
from keyhole.learners.positions.forward import (
    Answered,
    PlacedLayer,
    count_freedom,
    find_pairs,
    generate,
    name_pairs,
    to_model,
    turn_pairs,
)
from keyhole.learners.positions.judgement import (
    RANKS,
    choose_lengths,
    hold_turns,
    judge,
    measure_errors,
)
from keyhole.learners.positions.kinds import WORDS
from keyhole.learners.positions.refinement import (
    Doubts,
    draw_queries,
    refine,
    refine_held,
    search_layer,
)
from keyhole.measurement.asker import Asker
from keyhole.models.attention import Attention
from keyhole.models.position import Position
from keyhole.oracles.noise import DETECTION

FLOORS = 5.0  # random queries, in unknowns per number in an answer
STARTS = 3  # random scores that are tried
SMALL = 0.3  # size of keys and queries of a start, in that of the noise of their products
MISFIT = 2.0  # of a fit that is believed, in standard deviations of the rounding
PAIRS = 12  # of tokens that are exchanged
COPIES = 2  # of the anchor between two tokens that are exchanged, the second time


def learn_in_few_digits(
    ask: Asker, rng: np.random.Generator, longest: int | None
) -> Hypothesis | Refuted | Inconclusive:
    """A layer with positions, from its value maps on."""
    values = measure_coarse_values(ask, rng)
    if not isinstance(values, CoarseValues):
        return values
    trouble = Inconclusive("no start of random scores led to a fit")
    for kind in tell_kinds(ask, rng, values, longest):
        start = draw_start(values, kind, longest, rng)
        floor = count_freedom(start) / ask.outputs
        lengths = choose_lengths(ask, values.rank, None, kind == "vectors", RANKS)
        count = int(np.ceil(FLOORS * floor))
        drawn = draw_queries(ask, rng, count, values.size, lengths, "refinement")
        for _ in range(STARTS):
            found = fit_layer(ask, rng, start, drawn)
            if isinstance(found, Settled):
                return judge_settled(ask, rng, found, kind, floor)
            trouble, start = found, draw_start(values, kind, longest, rng)
    return trouble


# -- Which kind ---------------------------------------------------------------------------------


def tell_kinds(
    ask: Asker, rng: np.random.Generator, values: CoarseValues, longest: int | None
) -> tuple[str, ...]:
    """The kinds that are tried, the likeliest first."""
    token = values.size * rng.standard_normal((1, 1, ask.width))
    alone, twice = ask(token, "positions"), ask(np.repeat(token, 2, axis=1), "positions")
    visible = np.sqrt(ask.unit) * np.abs(alone).max()
    if longest is not None and (np.abs(alone - twice) > visible).any():
        return ("vectors",)
    near = exchange(ask, rng, values, 0)
    if near.spread > DETECTION:
        return ("rotary",)
    far = exchange(ask, rng, values, COPIES)
    times = COPIES + 1.0  # as far apart
    off = np.abs(far.change - times * near.change) / np.hypot(far.error, times * near.error)
    tables = ("linear bias", "bias by distance")
    return (*(tables if (off < DETECTION).all() else tables[::-1]), "rotary")


@dataclass(frozen=True, eq=False)
class Exchanged:
    """By how much exchanging two tokens changes log-ratios of their weights, head by head, on
    average, the standard error, and the spread over pairs of tokens in standard errors."""

    change: Float[Array, " heads"]
    error: Float[Array, " heads"]
    spread: float


def exchange(ask: Asker, rng: np.random.Generator, values: CoarseValues, copies: int) -> Exchanged:
    """Pairs of tokens before an anchor, so many copies of which stand between them."""
    first, second, anchor = values.size * rng.standard_normal((3, PAIRS, 1, ask.width))
    between = np.repeat(anchor, copies, axis=1)
    one, error = measure_log_ratios(ask, values, first, between, second, anchor)
    back, doubt = measure_log_ratios(ask, values, second, between, first, anchor)
    change, doubts = one + back, np.hypot(error, doubt)
    trust = 1.0 / doubts**2
    mean = (trust * change).sum(axis=0) / trust.sum(axis=0)
    spread = float(np.sqrt(np.mean(((change - mean) / doubts) ** 2)))
    return Exchanged(mean, max(1.0, spread) / np.sqrt(trust.sum(axis=0)), spread)


def measure_log_ratios(
    ask: Asker,
    values: CoarseValues,
    first: Float[Array, "n 1 d"],
    between: Float[Array, "n copies d"],
    second: Float[Array, "n 1 d"],
    anchor: Float[Array, "n 1 d"],
) -> tuple[Float[Array, "n heads"], Float[Array, "n heads"]]:
    """The logarithms of the weight of the first token over that of the second, of every sequence
    and head, and standard errors: as much as the answers leave unexplained."""
    maps = np.array(values.maps)
    tokens = ask.representable(np.concatenate([first, between, second, anchor], axis=1))
    rest = ask(tokens, "positions") - values.offset - tokens[:, -1] @ maps.sum(axis=0)
    ratios, errors = np.empty((2, len(tokens), len(maps)))
    for n, (own, right) in enumerate(zip(tokens, rest, strict=True)):
        design = np.concatenate((own[[0, -2]] - own[-1]) @ maps)  # heads by tokens, outputs
        inverse = np.linalg.pinv(design)
        weights = right @ inverse
        left = right - weights @ design
        noise = np.sqrt((left**2).sum() / max(1, len(left) - len(weights)))
        weights = weights.reshape(-1, 2)
        doubts = noise * np.linalg.norm(inverse, axis=0).reshape(-1, 2)
        seen = np.maximum(weights, doubts)  # a logarithm of no less than an error
        ratios[n] = np.log(seen[:, 0] / seen[:, 1])
        errors[n] = np.linalg.norm(doubts / seen, axis=1)
    return ratios, errors


# -- The fit ------------------------------------------------------------------------------------


def draw_start(
    values: CoarseValues, kind: str, longest: int | None, rng: np.random.Generator
) -> PlacedLayer:
    """Small random keys and queries; places that add nothing, or turn pairs by any law."""
    heads, rank, width = len(values.maps), values.rank, len(values.maps[0])
    factors = [np.linalg.svd(part) for part in values.maps]
    keys, queries = SMALL / np.sqrt(width) * rng.standard_normal((2, heads, rank, width + 1))
    keys[..., -1] = 0.0
    parts = {
        "keys": keys,
        "queries": queries,
        "ins": np.array([u[:, :rank] * s[:rank] for u, s, _ in factors]),
        "outs": np.array([vt[:rank] for _, _, vt in factors]),
        "offset": values.offset,
    }
    if kind == "vectors" and longest is not None:
        parts["vectors"] = np.zeros((longest, width))
    if kind == "linear bias":
        parts["slopes"] = np.zeros(heads)
    if kind == "bias by distance":
        parts["table"] = np.zeros((heads, min(longest or np.inf, max(RANKS) * rank)))
    if kind == "rotary":
        constant = np.zeros((heads, 1, width + 1))
        parts["queries"] = np.concatenate([queries, constant], axis=1)
        constant[..., -1] = 1.0
        parts["keys"] = np.concatenate([keys, constant], axis=1)
        turns = np.zeros((heads, rank + 1, rank + 1))
        turns[:, :rank, :rank] = generate(1e4 ** (-np.arange(rank // 2) / (rank // 2)))
        parts["turns"] = turns
    return PlacedLayer(parts)


@dataclass(frozen=True, eq=False)
class Settled:
    """A layer at the rounding of the answers, and what these leave open."""

    layer: PlacedLayer
    doubts: Doubts


def fit_layer(
    ask: Asker, rng: np.random.Generator, start: PlacedLayer, drawn: list[Answered]
) -> Settled | Inconclusive:
    placed = "vectors" in start.parts  # whose places all must be seen
    short = drawn if placed else [min(drawn, key=lambda group: group.tokens.shape[1])]
    near = search_layer(start, short, rng.spawn(1)[0])
    some = short[0]
    rounding = measure_rounding(ask, rng, some.tokens, some.answers, tell(near))
    share = rounding / float(np.sqrt(np.mean(some.errors**2)))  # of a roundoff of the largest
    exact = [replace(group, errors=share * group.errors) for group in drawn]
    fit, settling = refine(near, exact, rng.spawn(1)[0])
    if "turns" in start.parts:
        fit, settling = refine_held(fit, settling, hold_turns(fit.layer, ask.noise))
    if fit.level > MISFIT:
        return Inconclusive(
            f"a layer with positions leaves {fit.level:.1f} times as much as rounding does"
        )
    return Settled(fit.layer, Doubts.of(fit, settling))


def tell(layer: PlacedLayer) -> Attention:
    """The layer as a model, in pairs that turn alike in all heads."""
    if "turns" in layer.parts:
        layer = name_pairs(turn_pairs(layer, find_pairs(layer)[1].imag.mean(axis=0)))
    return to_model(layer, Position())


def judge_settled(
    ask: Asker, rng: np.random.Generator, found: Settled, kind: str, floor: float
) -> Hypothesis | Refuted | Inconclusive:
    model = to_model(name_pairs(found.layer), Position())
    assert model.position is not None
    frequencies = model.position.frequencies
    known = None if frequencies is None else np.zeros(len(frequencies))
    errors = measure_errors(found.doubts, known, model)
    heads, rank = found.layer.parts["ins"].shape[::2]
    diagnostics = PositionDiagnostics(heads=heads, ranks=heads * (rank,), positions=kind)
    words = WORDS.get(kind, WORDS["additive"])
    notes = (f"Positions: {words}.", "The box computes in half precision.")
    result = judge(ask, rng, Candidate(model, errors, floor, notes, diagnostics), None).result
    if isinstance(result, Hypothesis):
        return replace(result, noise=ask.oracle.spec.precision or ask.noise)
    return result
