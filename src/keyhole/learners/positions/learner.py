"""Attention in which the place of a token matters: recognised, then learned as what it is.

Statement.  The kind of positions is found with some 6 to 40 queries (kinds), the value maps by hard
            attention (values), and the scores by soft queries (rotary, partial_rotary, in few
            digits rotary_orbit; additive; vectors); together about as many queries as there are
            unknowns per number in an answer.
Queries.    Masked places are found first, and asked behind; a window shortens the sequences. Value
            maps come before scores, whatever the kind. What additive positions do not explain is
            tried as rotary. A sink is stated, not recognised here: it has values of single tokens.
Algebra.    One file per kind. A candidate is judged on fresh sequences, short and long; one that is
            not exact is fitted to all answers, and random ones more, and judged again.
When it fails.  Scalar answers, bounded tokens, bounded scores (caps, normalised queries and keys).
            A hypothesis that is far from fresh sequences, short and long, is WrongFamily; one that
            is near, or whose errors are large, is inconclusive.
Source.     Keyhole's own; docs/methods/positions.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import SINGLE_ROUNDOFF
from keyhole.errors import Counterexample, DomainError, KeyholeError, Unsupported
from keyhole.learners.base import Hypothesis, Inconclusive, Refuted, run_strategies
from keyhole.learners.positions.additive import learn_additive
from keyhole.learners.positions.candidate import (
    Candidate,
    PositionDiagnostics,
    assemble,
    assemble_errors,
    count_values,
    place_error,
    rotary_position,
    shorten_table,
)
from keyhole.learners.positions.few_digits import learn_in_few_digits
from keyhole.learners.positions.forward import Answered
from keyhole.learners.positions.judgement import conclude, judge
from keyhole.learners.positions.kinds import BAG, PositionKind, differ, recognise_positions
from keyhole.learners.positions.partial_rotary import learn_partial_rotary
from keyhole.learners.positions.rotary import (
    contradicts_rotation,
    learn_rotary,
    measure_first_anchor,
)
from keyhole.learners.positions.rotary_fit import Rotary
from keyhole.learners.positions.rotary_orbit import learn_orbits
from keyhole.learners.positions.sinks import learn_sinks, measure_biases
from keyhole.learners.positions.soft import Reader
from keyhole.learners.positions.value_fit import fit_values
from keyhole.learners.positions.values import NAMING, NOTHING, ValueMaps, measure_value_maps
from keyhole.learners.positions.vectors import measure_vectors
from keyhole.measurement.asker import Asker
from keyhole.models.attention import Attention, Head
from keyhole.models.position import Position
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.noise import ROUNDINGS, NoiseModel
from keyhole.oracles.wrappers.places import BehindMasked, WithoutPlaces


@dataclass(frozen=True)
class Positions:
    """Recovers `Attention` with a `position`, from vector answers and tokens of any size.

    sink: whether the weights of the tokens do not sum to one; then places are none.
    """

    sink: bool = False

    def expected_queries(self, spec: Spec) -> int | None:
        return 4 * spec.width + 26

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        domain = oracle.spec.domain
        if not domain.unbounded:
            raise DomainError("positions are learned with tokens of any size")
        ask, longest = Asker(oracle, rounding=True), domain.max_length
        if tells_nothing_alone(ask):
            return run_strategies([("few digits", lambda: learn_in_few_digits(ask, rng, longest))])
        if self.sink:
            beside = learn_beside_sink(ask, rng, longest)
            return run_strategies([("sink", lambda: excuse_few_digits(beside, ask))])
        kind = recognise_positions(ask, rng, longest)
        if ask.scalar:
            raise Unsupported("the order of tokens matters, and only vectors show how")
        if kind.masked:
            behind = BehindMasked(oracle, kind.masked)
            ask, longest = replace(ask, oracle=behind), behind.spec.domain.max_length
        if kind.window is not None:
            longest = min(kind.window, longest or kind.window)
        strategies = {
            "rotary": learn_as_rotary,
            "additive": learn_as_additive,
            "vectors": learn_as_vectors,
        }
        if kind.name not in strategies:
            raise Unsupported(f"{kind.sentence} There is no learner for these")

        def learn_behind_mask(kind: PositionKind) -> Hypothesis | Refuted | Inconclusive:
            found = strategies[kind.name](ask, rng, kind, longest)
            return add_mask(oracle, rng, found, kind.masked) if kind.masked else found

        def learn_with_fallback() -> Hypothesis | Refuted | Inconclusive:
            found = learn_behind_mask(kind)
            if kind.name != "additive" or not isinstance(found, Refuted):
                return found
            # where few pairs turn, tokens may win wherever they stand
            turned = learn_behind_mask(replace(kind, name="rotary"))
            few = longest is not None and longest <= BAG  # whose winners tell little
            if few and isinstance(turned, Inconclusive):
                return Inconclusive(f"{found.reason}; taken for rotary positions, {turned.reason}")
            return turned if isinstance(turned, Hypothesis) else found

        try:
            return run_strategies(
                [(kind.name, lambda: excuse_few_digits(learn_with_fallback(), ask))]
            )
        except KeyholeError as error:  # what was recognised is known, even if it was not learned
            error.findings = (*error.findings, kind.sentence)
            raise


def tells_nothing_alone(ask: Asker) -> bool:
    """Whether single answers have too few digits for any stage to decide by them."""
    stated = ask.oracle.spec.precision
    return stated is not None and ROUNDINGS**2 * stated.relative >= 1.0


def excuse_few_digits(
    found: Hypothesis | Refuted | Inconclusive, ask: Asker
) -> Hypothesis | Refuted | Inconclusive:
    """What was found. A stage that has no answer to show refutes the family only where answers have
    the digits that it decides by: moves of tokens are a small part of them, and what is left of the
    answers is rounded as the whole."""
    stage = isinstance(found, Refuted) and found.counterexample is None
    if stage and isinstance(found, Refuted) and ask.unit > NAMING * NOTHING:
        return Inconclusive(
            f"{found.reason}; with so few digits that says nothing against attention with positions"
        )
    return found


def add_mask(
    oracle: Oracle,
    rng: np.random.Generator,
    found: Hypothesis | Refuted | Inconclusive,
    masked: int,
) -> Hypothesis | Refuted | Inconclusive:
    """The hypothesis with the places at the start that it was learned behind; one token tells
    whether an anchor there sees itself."""
    if not isinstance(found, Hypothesis):
        return found
    ask, model, errors = Asker(oracle), found.model, found.errors
    token = rng.standard_normal((1, 1, model.width))
    answer = ask(token, "positions")
    for masked_anchor in (None, True):
        position = replace(model.position or Position(), masked=masked, masked_anchor=masked_anchor)
        if position.vectors is not None:  # of the places behind the mask; the others do not show
            hidden = np.zeros((masked, model.width))
            position = replace(position, vectors=np.concatenate([hidden, position.vectors]))
        placed = Attention(model.heads, model.offset, model.skip, position)
        if not differ(ask, placed(token)[0], answer[0]):
            doubt = errors.position
            if doubt is not None and doubt.vectors is not None:
                doubt = replace(doubt, vectors=np.concatenate([hidden, doubt.vectors]))
            bars = Attention(errors.heads, errors.offset, errors.skip, doubt)
            return replace(found, model=placed, errors=bars)
    reason = "an anchor at a masked place sees neither itself nor nothing"
    return Refuted(reason, Counterexample(token[0], answer[0], placed(token)[0], reason))


def learn_behind_values(
    ask: Asker,
    rng: np.random.Generator,
    longest: int | None,
    learn: Callable[[ValueMaps], Hypothesis | Refuted | Inconclusive],
    size: float = 1.0,
) -> Hypothesis | Refuted | Inconclusive:
    """What `learn` makes of the value maps. Where that is nothing, heads may have shared tokens, or
    an anchor was unlucky: another bag, and other anchors. `size`: entries of its anchor."""
    attempts = 3
    values: ValueMaps | None = None
    result: Hypothesis | Refuted | Inconclusive = Inconclusive("nothing was tried")
    for _ in range(attempts):
        found = measure_value_maps(ask, rng, longest, size, values)
        if not isinstance(found, ValueMaps):
            return found
        values = fit_values(found, rng)
        result = learn(values)
        if isinstance(result, Hypothesis):
            break
    return result


def learn_as_rotary(
    ask: Asker, rng: np.random.Generator, kind: PositionKind, longest: int | None
) -> Hypothesis | Refuted | Inconclusive:
    def learn(values: ValueMaps) -> Hypothesis | Refuted | Inconclusive:
        if lacks_digits(ask, values):
            return learn_from_orbits(ask, rng, values, kind)
        first = measure_first_anchor(ask, rng, values, longest)
        if isinstance(first, Refuted | Inconclusive):
            return first
        found = learn_rotary(first, rng)
        if isinstance(found, Inconclusive):
            partial = learn_partial_rotary(first, rng)
            if partial is None:
                odd = contradicts_rotation(first.at)
                return Refuted(found.reason) if odd else found
            found = partial
        return judge_rotary(ask, rng, values, kind, *found)

    return learn_behind_values(ask, rng, longest, learn)


def lacks_digits(ask: Asker, values: ValueMaps) -> bool:
    """Whether weights among so many copies of an anchor as far tokens need would have errors that
    hide slow pairs."""
    copies, clear = 4096, 1e-4  # of an anchor; error of a log-ratio that still shows slow pairs
    split = float(np.linalg.norm(np.linalg.pinv(np.concatenate(values.outs)), 2))
    return ask.unit * copies * split > clear


def learn_from_orbits(
    ask: Asker, rng: np.random.Generator, values: ValueMaps, kind: PositionKind
) -> Hypothesis | Refuted | Inconclusive:
    if values.ranks[0] % 2 or len(set(values.ranks)) > 1:
        return Inconclusive("rotary positions need heads of one even rank")
    reader = Reader(ask, values)
    found = learn_orbits(reader, rng)
    if isinstance(found, Inconclusive):
        return found
    start, error = found
    loss = max(30.0 * error, 0.1)  # of keys and queries, relative, before they are refined

    def doubt(rows: np.ndarray) -> np.ndarray:
        return np.full(rows.shape, loss * float(np.sqrt((rows**2).mean())))

    errors = Rotary(0.0 * start.frequencies, doubt(start.keys), doubt(start.queries))
    return judge_rotary(ask, rng, values, kind, start, errors, tuple(reader.answered))


def judge_rotary(
    ask: Asker,
    rng: np.random.Generator,
    values: ValueMaps,
    kind: PositionKind,
    best: Rotary,
    errors: Rotary,
    answered: tuple[Answered, ...] = (),
) -> Hypothesis | Refuted | Inconclusive:
    model = assemble(values, rotary_position(best, kind.window), best.scores)
    doubt = assemble_errors(ask, values, rotary_position(errors, None), errors.scores)
    notes = [kind.sentence]
    if best.single:
        notes.append("The box computes angles, cosines and sines in float32.")
    diagnostics = PositionDiagnostics(heads=values.heads, ranks=values.ranks, positions="rotary")
    pairs = len(best.frequencies)
    unknowns = values.heads * (2 * pairs * (2 * (ask.width + 1)) - 2 * pairs)
    if best.scores is not None:
        still = values.ranks[0] - 2 * pairs
        unknowns += values.heads * (still * (2 * ask.width + 1) - still**2)
        notes.append(f"{2 * pairs} of the {values.ranks[0]} dimensions of a head turn.")
    floor = count_values(values, ask) + unknowns / ask.outputs
    candidate = Candidate(model, doubt, floor, tuple(notes), diagnostics)
    result = conclude(ask, rng, candidate, values, answered, kind.window)
    if isinstance(result, Hypothesis) and best.single:
        noise = replace(ask.oracle.spec.precision or NoiseModel(), relative=SINGLE_ROUNDOFF)
        return replace(result, noise=noise)
    return result


def learn_beside_sink(
    ask: Asker, rng: np.random.Generator, longest: int | None
) -> Hypothesis | Refuted | Inconclusive:
    return learn_behind_values(ask, rng, longest, lambda values: learn_as_sink(ask, rng, values))


def learn_as_sink(
    ask: Asker, rng: np.random.Generator, values: ValueMaps
) -> Hypothesis | Refuted | Inconclusive:
    known = measure_biases(ask, rng, values)
    if isinstance(known, Inconclusive):
        return known
    found = learn_sinks(ask, rng, known)
    if isinstance(found, Inconclusive):
        return found
    plain, values, (best, errors) = values.offset, known.values, found
    lost = np.stack([-b @ out for b, out in zip(known.biases, values.outs, strict=True)])
    doubt = np.full(lost.shape, 8.0 * known.error)  # of differences of a few such answers
    sinks, sink_errors = best.sinks, errors.sinks
    constant = bool((np.abs(sinks[:, :-1]) <= ROUNDINGS * sink_errors[:, :-1]).all())
    if constant:
        sinks, sink_errors = sinks[:, -1], sink_errors[:, -1]
    biased = bool((np.abs(lost) > ROUNDINGS * doubt).any())
    if not biased:
        values = replace(values, offset=plain)  # a zero shows the offset alone
    model = assemble(
        values, Position(sinks=sinks, sink_values=lost if biased else None), best.scores
    )
    uncertain = Position(sinks=sink_errors, sink_values=doubt if biased else None)
    bars = assemble_errors(ask, values, uncertain, errors.scores)
    if biased:
        bars = Attention(bars.heads, doubt[0], None, uncertain)
    unknowns = sinks.size + biased * sum(values.ranks)
    unknowns += sum(r * (2 * ask.width + 1) - r**2 for r in values.ranks)
    floor = count_values(values, ask) + unknowns / ask.outputs
    notes = ["The weights of the tokens do not sum to one: every head has a sink."]
    diagnostics = PositionDiagnostics(heads=values.heads, ranks=values.ranks, positions="sink")
    candidate = Candidate(model, bars, floor, tuple(notes), diagnostics)
    return judge(ask, rng, candidate, None).result


def learn_as_additive(
    ask: Asker, rng: np.random.Generator, kind: PositionKind, longest: int | None
) -> Hypothesis | Refuted | Inconclusive:
    return learn_behind_values(
        ask, rng, longest, lambda values: learn_scores(ask, rng, values, kind, longest, None)
    )


def learn_as_vectors(
    ask: Asker, rng: np.random.Generator, kind: PositionKind, longest: int | None
) -> Hypothesis | Refuted | Inconclusive:
    def learn(values: ValueMaps) -> Hypothesis | Refuted | Inconclusive:
        if longest is None:
            return Inconclusive("how many places have a vector is not known: give max_length")
        measured = measure_vectors(ask, values, longest)
        if isinstance(measured, Inconclusive):
            return measured
        vectors, answered = measured
        values = replace(values, answered=values.answered + answered)
        return learn_scores(ask, rng, values, kind, longest, vectors)

    long_anchor = 30.0  # entries of an anchor beside which vectors of places are short
    return learn_behind_values(ask, rng, longest, learn, long_anchor)


def learn_scores(
    ask: Asker,
    rng: np.random.Generator,
    values: ValueMaps,
    kind: PositionKind,
    longest: int | None,
    vectors: np.ndarray | None,
) -> Hypothesis | Refuted | Inconclusive:
    """Scores to which places add; with `vectors`, which were found before, no place adds more."""
    plain_ask = ask
    if vectors is not None:
        plain_ask = replace(ask, oracle=WithoutPlaces(ask.oracle, vectors))
    found = learn_additive(plain_ask, rng, values, longest, flat=vectors is not None)
    if isinstance(found, Refuted | Inconclusive):
        return found
    slopes, table = found.slopes, found.table
    tells: float
    if vectors is not None:
        position = Position(vectors=vectors)
        name, tells = "vectors", vectors.size - ask.width
    elif found.flat:
        position = Position(window=kind.window)
        name, tells = "none", 0
    elif slopes is not None:
        position = Position(slopes=slopes, window=kind.window)
        name, tells = "linear bias", values.heads
    else:
        table = shorten_table(table)
        position = Position(bias=table, window=kind.window)
        name, tells = "bias by distance", sum(len(np.unique(row.round(6))) - 1 for row in table)
    heads, doubts = [], []
    rank = max(values.ranks)
    key_loss = 30.0  # standard error of a score or table entry, in those of a log-ratio
    for scores, value in zip(found.scores, values.maps, strict=True):
        u, s, vt = np.linalg.svd(scores[:, :-1])
        root = np.sqrt(s[:rank])
        heads.append(Head((u[:, :rank] * root, root[:, None] * vt[:rank]), scores[:, -1], value))
        doubt = np.full(scores.shape, key_loss * found.error)
        doubts.append(Head(doubt[:, :-1], doubt[:, -1], np.zeros(value.shape)))
    model = Attention(heads, values.offset, None, None if position.kind == "none" else position)
    plain = assemble_errors(ask, values, Position())
    doubts = [Head(a.score, a.key_bias, b.value) for a, b in zip(doubts, plain.heads, strict=True)]
    uncertain = Position(
        bias=None if position.bias is None else np.full(table.shape, key_loss * found.error),
        vectors=None if vectors is None else np.full(vectors.shape, place_error(ask, values)),
        slopes=None if position.slopes is None else np.full(len(slopes), found.error),  # type: ignore[arg-type]
    )
    errors = Attention(doubts, plain.offset, None, uncertain)
    unknowns = tells + sum(r * (2 * ask.width + 1) - r**2 for r in values.ranks)
    floor = count_values(values, ask) + unknowns / ask.outputs
    diagnostics = PositionDiagnostics(heads=values.heads, ranks=values.ranks, positions=name)
    answered = found.answered
    if vectors is not None:  # what the box was asked is less the vectors
        answered = tuple(
            replace(group, tokens=ask.representable(group.tokens - vectors[group.places]))
            for group in answered
        )
    candidate = Candidate(model, errors, floor, (kind.sentence,), diagnostics)
    return conclude(ask, rng, candidate, values, answered, kind.window)
