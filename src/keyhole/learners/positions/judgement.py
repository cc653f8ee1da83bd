"""Whether a candidate is the layer: fresh sequences decide, after a fit to all answers if need be.

Statement.  A candidate that predicts fresh sequences, short and long, to the exactness of the box
            is the layer. One that misses them, from a box with few digits, is brought to the noise
            of all answers first, and judged again.
Queries.    One sequence of each of a few lengths; for a fit as many random ones as there are
            unknowns per number in an answer, as long as a head has dimensions, mostly, and longer.
Algebra.    The fit (`refinement`) leaves what turns keys free, head by head; its pairs then turn
            alike in all heads, by a law of few digits if that explains them, and the rest is fitted
            to these. What a candidate misses is held against what its standard errors explain.
When it fails.  Where the fit ends above the noise, the candidate's own verdict stands.
Source.     Keyhole's own; docs/methods/positions.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from keyhole.arrays import SINGLE_ROUNDOFF, Array
from keyhole.errors import Counterexample
from keyhole.learners.base import Hypothesis, Inconclusive, Refuted
from keyhole.learners.positions.candidate import Candidate, rotary_base
from keyhole.learners.positions.forward import (
    Answered,
    PlacedLayer,
    center_table,
    count_freedom,
    find_pairs,
    multiply_scores,
    multiply_values,
    name_keys,
    name_pairs,
    to_layer,
    to_model,
    turn_pairs,
)
from keyhole.learners.positions.refinement import (
    Doubts,
    draw_queries,
    find_natural_size,
    refine,
    refine_held,
)
from keyhole.learners.positions.values import ValueMaps
from keyhole.measurement.asker import Asker
from keyhole.measurement.evidence import Estimate, Evidence
from keyhole.models.attention import Attention, Head
from keyhole.models.base import perturb_model
from keyhole.models.factors import find_groups, tell_groups
from keyhole.models.position import Position
from keyhole.oracles.noise import DETECTION, REJECTION, ROUNDINGS, NoiseModel

LENGTHS = (7, 90, 400)  # tokens of fresh sequences
SIZE = 0.7  # entries of their tokens
EXACT = 1e-5  # deviation, relative to the answers, below which a hypothesis is as good as exact:
# at the farthest places angles in float32 are off by more
VAGUE = 1e-2  # deviation, relative to the answers, that standard errors may explain at most
RANKS = {1: 0.7, 4: 0.22, 16: 0.08}  # lengths of random sequences, in ranks of a head: shares
LENGTHS_OF_PLACES = 6  # lengths of random sequences where each place has a vector
NEARLY = 1e-2  # deviation, relative to the answers, below which stages have lost digits


def conclude(
    ask: Asker,
    rng: np.random.Generator,
    candidate: Candidate,
    values: ValueMaps,
    answered: Sequence[Answered],
    window: int | None,
) -> Hypothesis | Refuted | Inconclusive:
    """The hypothesis, if it predicts fresh sequences; where it misses them, the same refined on
    all answers (those of the value maps, and further ones that were `answered`) and as many random
    ones as there are unknowns per number in an answer."""
    first = judge(ask, rng, candidate, window)
    if first.exact or len(set(values.ranks)) > 1:
        return first.result
    better = refine_candidate(ask, rng, candidate, values, answered, window)
    if isinstance(better, Candidate):
        return judge(ask, rng, better, window).result
    if isinstance(first.result, Inconclusive):
        return Inconclusive(f"{first.result.reason}; {better.reason}")
    return first.result


def choose_lengths(
    ask: Asker, rank: int, window: int | None, vectors: bool, ranks: Mapping[int, float]
) -> dict[int, float]:
    """Tokens of random sequences and their shares, as they are given in ranks of a head; where each
    place has a vector of its own, every one in many, and in some as that of the anchor."""
    limit = min(ask.oracle.spec.domain.max_length or np.inf, window or np.inf)
    shares = {times * rank + (times == 1): share for times, share in ranks.items()}
    if vectors:
        several = np.linspace(min(rank + 1, limit), limit, LENGTHS_OF_PLACES).astype(int)
        shares = dict.fromkeys(several.tolist(), 1.0 / LENGTHS_OF_PLACES)
    lengths: dict[int, float] = {}
    for length, share in shares.items():
        fits = int(min(length, limit))
        lengths[fits] = lengths.get(fits, 0.0) + share
    return lengths


def refine_candidate(
    ask: Asker,
    rng: np.random.Generator,
    candidate: Candidate,
    values: ValueMaps,
    answered: Sequence[Answered],
    window: int | None,
) -> Candidate | Inconclusive:
    """The candidate at the noise of the answers, if a fit comes there."""
    start = to_layer(candidate.model, values.ins, values.outs)
    count = int(np.ceil(count_freedom(start) / ask.outputs))
    size = find_natural_size(start, rng.spawn(1)[0])
    lengths = choose_lengths(ask, values.ranks[0], window, "vectors" in start.parts, RANKS)
    drawn = draw_queries(ask, rng, count, size, lengths, "refinement")
    every = [*values.answered, *answered, *drawn]
    refined, settling = refine(start, every, rng.spawn(1)[0])
    if refined.level <= ROUNDINGS and "turns" in start.parts:
        held = hold_turns(refined.layer, ask.noise)
        refined, settling = refine_held(refined, settling, held)
    if refined.level > ROUNDINGS:
        return Inconclusive(
            f"the fit to all answers ends {refined.level:.0f} times above their rounding"
        )
    model = to_model(name_pairs(refined.layer), candidate.model.position)
    doubted = candidate.errors.position
    frequencies = None if doubted is None else doubted.frequencies
    errors = measure_errors(Doubts.of(refined, settling), frequencies, model)
    return replace(candidate, model=model, errors=errors)


def hold_turns(layer: PlacedLayer, noise: NoiseModel) -> PlacedLayer:
    """The layer with pairs that turn alike in all heads."""
    return turn_pairs(layer, name_frequencies(find_pairs(layer)[1], noise))


def name_frequencies(rates: Array, noise: NoiseModel) -> Array:
    """One list of frequencies for all heads: a law base^(-j / n) with a base of as few digits as
    explain them, else their means. `rates` (heads, n): growth + i frequency; nothing grows, so that
    growths show the errors, which do not depend on the frequency."""
    usual, count = rates.imag.mean(axis=0), rates.shape[1]
    off = np.concatenate([rates.real, rates.imag - usual])
    error = np.sqrt((off**2).mean() / max(1, len(rates) - 1))
    clear = usual > DETECTION * error
    if clear.sum() > 1:
        powers = np.arange(count)[clear] / count
        slope = np.polyfit(powers, np.log(usual[clear]), 1, w=usual[clear] / error)[0]
        digits = 3  # of the bases that people choose
        for some in range(digits):
            law = float(f"{np.exp(-slope):.{some}e}") ** (-np.arange(count) / count)
            rounded = np.hypot(error, SINGLE_ROUNDOFF * law)  # frequencies are float32 numbers
            if Evidence(noise).is_zero(Estimate(usual - law, rounded), "a law of frequencies"):
                return np.asarray(law)
    return np.asarray(usual)


def measure_errors(doubts: Doubts, frequencies: Array | None, model: Attention) -> Attention:
    """Standard errors in the structure of the model, those of the frequencies as they are given."""
    scores, values = doubts.spread(multiply_scores), doubts.spread(multiply_values)
    heads = [
        Head(score[:, :-1], score[:, -1], value)
        for score, value in zip(scores, values, strict=True)
    ]
    position, last = model.position, doubts.layer.turning - 1

    def spread(name: str) -> np.ndarray:
        return doubts.spread(lambda layer: layer.parts[name])

    if position is not None:
        position = Position(
            frequencies=frequencies,
            keys=None if position.keys is None else doubts.spread(name_keys),
            queries=None if position.keys is None else spread("queries")[:, :last],
            bias=None if position.bias is None else doubts.spread(center_table),
            slopes=None if position.slopes is None else spread("slopes"),
            vectors=None if position.vectors is None else spread("vectors"),
        )
    return Attention(heads, spread("offset"), None, position)


@dataclass(frozen=True, eq=False)
class Judged:
    """What became of a candidate; exact: whether it predicted all fresh sequences as well as one
    can ask, not only within its standard errors."""

    result: Hypothesis | Refuted | Inconclusive
    exact: bool


def judge(ask: Asker, rng: np.random.Generator, candidate: Candidate, window: int | None) -> Judged:
    """The hypothesis, if it predicts fresh sequences, short and long, within its standard errors;
    where these are so large that answers say little, nothing is said of the family."""
    model, errors, diagnostics = candidate.model, candidate.errors, candidate.diagnostics
    limit = ask.oracle.spec.domain.max_length
    tolerance = max(EXACT, ROUNDINGS * ask.unit)
    exact = True
    for length in LENGTHS:
        count = length if limit is None else min(length, limit)
        tokens = ask.representable(SIZE * rng.standard_normal((1, count, model.width)))
        answer, guess = ask(tokens, "validation")[0], model(tokens)[0]
        gap, scale = float(np.abs(answer - guess).max()), float(np.abs(answer).max())
        if gap <= tolerance * scale + ask.undetected:
            continue
        exact = False
        others = islice(perturb_model(model, errors, ask.unit, rng.spawn(1)[0]), 4)
        spread = REJECTION * max(float(np.abs(m(tokens)[0] - guess).max()) for m in others)
        if spread > VAGUE * scale:
            reason = (
                "the answers do not determine the scores: slow pairs turn too little within the "
                "longest sequence, or weights are too small"
            )
            return Judged(Inconclusive(reason), False)
        if gap > max(tolerance * scale, spread) + ask.undetected:
            if gap < NEARLY * scale:
                reason = (
                    f"the hypothesis misses a fresh query by {gap / scale:.1e} of its answer, more "
                    "than its standard errors explain: too close for another family, too far for "
                    "a recovery"
                )
                return Judged(Inconclusive(reason), False)
            reason = (
                "the hypothesis disagrees with the box on a fresh query: it is not attention with "
                f"{diagnostics.positions} positions"
            )
            shown = Counterexample(tokens[0], answer, guess, f"{count} random tokens")
            return Judged(Refuted(reason, shown), False)
    groups = find_groups(model)
    told = tell_groups(groups)
    if told:
        diagnostics = replace(diagnostics, key_value_groups=len(groups))
    notes = (*candidate.notes, *told)
    if model.position is not None and model.position.frequencies is not None:
        base = rotary_base(model.position.frequencies)
        diagnostics = replace(diagnostics, rotary_base=base)
        if base is not None:
            notes = (*notes, f"The frequencies follow the base {base:.6g}.")
    return Judged(Hypothesis(model, errors, candidate.floor, notes, diagnostics=diagnostics), exact)
