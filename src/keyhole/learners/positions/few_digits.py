"""Positions of a layer that computes in half precision: scores from small random ones.

Statement.  Keys, queries and what turns them are found to the rounding of a box whose answers have
            two or three digits, from about ten times as many queries as there are unknowns per
            number in an answer. Nothing need be known of scores, nor of the law of the turns.
Queries.    Value maps from hard attention (`multi_head.measure_coarse_values`); then random
            sequences of a size at which attention is soft, short ones mostly.
Algebra.    With the value maps known to a few per cent, what makes the scores of a head is a matrix
            of low rank that is seen through linear forms, several times more than it has unknowns:
            damped Gauss-Newton steps find it from small random keys and queries, whatever turns
            them at the start. From there on it is the fit of the whole layer (`refinement`), with
            pairs that turn alike in all heads at the end.
When it fails.  A fit that leaves more than the rounding of the box is not believed: another start.
Source.     Keyhole's own; docs/methods/positions.md.
"""

from dataclasses import replace

import numpy as np

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
from keyhole.learners.positions.judgement import hold_turns, judge, measure_errors
from keyhole.learners.positions.kinds import WORDS
from keyhole.learners.positions.refinement import (
    Doubts,
    Fit,
    draw_queries,
    refine,
    refine_held,
    search_layer,
)
from keyhole.measurement.asker import Asker
from keyhole.models.attention import Attention
from keyhole.models.position import Position

FLOORS = 5.0  # random queries, in unknowns per number in an answer
STARTS = 3  # random scores that are tried
SMALL = 0.3  # size of keys and queries of a start, in that of the noise of their products
MISFIT = 2.0  # of a fit that is believed, in standard deviations of the rounding


def learn_turns(
    ask: Asker, rng: np.random.Generator, longest: int | None
) -> Hypothesis | Refuted | Inconclusive:
    """A layer whose keys turn, from its value maps on."""
    values = measure_coarse_values(ask, rng)
    if not isinstance(values, CoarseValues):
        return values
    start = draw_start(values, ask, rng)
    floor = count_freedom(start) / ask.outputs
    rank = values.rank
    lengths: dict[int, float] = {}
    for length, share in {rank + 1: 0.85, 4 * rank: 0.12, 16 * rank: 0.03}.items():
        fits = min(length, longest or length)
        lengths[fits] = lengths.get(fits, 0.0) + share
    count = int(np.ceil(FLOORS * floor))
    drawn = draw_queries(ask, rng, count, values.size, lengths, "refinement")
    trouble = Inconclusive("no start of random scores led to a fit")
    for _ in range(STARTS):
        found = fit_turns(ask, rng, start, drawn)
        if isinstance(found, Inconclusive):
            trouble, start = found, draw_start(values, ask, rng)
            continue
        return judge_turns(ask, rng, *found, floor)
    return trouble


def draw_start(values: CoarseValues, ask: Asker, rng: np.random.Generator) -> PlacedLayer:
    """Small random keys and queries, turned by pairs of any law."""
    heads, rank, width = len(values.maps), values.rank, ask.width
    factors = [np.linalg.svd(part) for part in values.maps]
    keys, queries = SMALL / np.sqrt(width) * rng.standard_normal((2, heads, rank + 1, width + 1))
    keys[:, :, -1], keys[:, rank], queries[:, rank] = 0.0, 0.0, 0.0
    keys[:, rank, -1] = 1.0
    turns = np.zeros((heads, rank + 1, rank + 1))
    turns[:, :rank, :rank] = generate(1e4 ** (-np.arange(rank // 2) / (rank // 2)))
    return PlacedLayer(
        {
            "keys": keys,
            "queries": queries,
            "ins": np.array([u[:, :rank] * s[:rank] for u, s, _ in factors]),
            "outs": np.array([vt[:rank] for _, _, vt in factors]),
            "offset": values.offset,
            "turns": turns,
        }
    )


def fit_turns(
    ask: Asker, rng: np.random.Generator, start: PlacedLayer, drawn: list[Answered]
) -> tuple[Fit, Doubts] | Inconclusive:
    """The layer at the rounding of the answers, and what these leave open."""
    short = min(drawn, key=lambda group: group.tokens.shape[1])
    near = search_layer(start, [short], rng.spawn(1)[0])
    rounding = measure_rounding(ask, rng, short.tokens, short.answers, tell(near))
    share = rounding / float(np.sqrt(np.mean(short.errors**2)))  # of a roundoff of the largest
    exact = [replace(group, errors=share * group.errors) for group in drawn]
    fit, settling = refine(near, exact, rng.spawn(1)[0])
    fit, settling = refine_held(fit, settling, hold_turns(fit.layer, ask.noise))
    if fit.level > MISFIT:
        return Inconclusive(
            f"a layer whose keys turn leaves {fit.level:.1f} times as much as rounding does"
        )
    return fit, Doubts.of(fit, settling)


def tell(layer: PlacedLayer) -> Attention:
    """The layer as a model, in pairs that turn alike in all heads."""
    alike = find_pairs(layer)[1].imag.mean(axis=0)
    return to_model(name_pairs(turn_pairs(layer, alike)), Position())


def judge_turns(
    ask: Asker, rng: np.random.Generator, fit: Fit, doubts: Doubts, floor: float
) -> Hypothesis | Refuted | Inconclusive:
    model = to_model(name_pairs(fit.layer), Position())
    assert model.position is not None and model.position.frequencies is not None
    errors = measure_errors(doubts, np.zeros(len(model.position.frequencies)), model)
    heads = len(model.heads)
    ranks = heads * (fit.layer.turning - 1,)
    diagnostics = PositionDiagnostics(heads=heads, ranks=ranks, positions="rotary")
    notes = (WORDS["rotary"].join(("Positions: ", ".")), "The box computes in half precision.")
    found = judge(ask, rng, Candidate(model, errors, floor, notes, diagnostics), None).result
    if isinstance(found, Hypothesis):
        return replace(found, noise=ask.oracle.spec.precision or ask.noise)
    return found
