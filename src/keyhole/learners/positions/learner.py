"""Attention in which the place of a token matters: recognised, then learned as what it is.

Statement.  The kind of positions is found with a dozen queries (kinds), the value maps by hard
            attention (values), and the scores by soft queries (rotary, additive, vectors); together
            about as many queries as there are unknowns per number in an answer.
When it fails.  Scalar answers, bounded tokens, bounded scores (caps, normalised queries and keys):
            the error says what was recognised. A hypothesis that does not predict fresh sequences,
            short and long, is WrongFamily.
Source.     Keyhole's own; docs/learners/positions.md.
"""

from dataclasses import dataclass, replace

import numpy as np

from keyhole.errors import Counterexample, DomainError, WrongFamily
from keyhole.learners.base import Diagnostics, Hypothesis, Inconclusive, Refuted, run_strategies
from keyhole.learners.positions.additive import learn_additive
from keyhole.learners.positions.kinds import PositionKind, recognise_positions
from keyhole.learners.positions.rotary import Rotary, learn_rotary
from keyhole.learners.positions.values import ValueMaps, measure_value_maps
from keyhole.learners.positions.vectors import measure_vectors
from keyhole.measurement.asking import Asker
from keyhole.models.attention import Attention, Head
from keyhole.models.position import Position
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.wrappers.places import WithoutPlaces

LENGTHS = (7, 90, 400)  # tokens of fresh sequences
LONG_ANCHOR = 30.0  # entries of an anchor beside which vectors of places are short
SIZE = 0.7  # entries of their tokens
TOLERANCE = 1e-5  # deviation, relative to the answers, that a hypothesis may show at most
VALUE_LOSS = 10.0  # relative error of a value map, in that of what all maps predict together
KEY_LOSS = 30.0  # standard error of a score or table entry, in those of a log-ratio
FLAT = 1e3  # size of a table, in standard errors of a log-ratio, that says nothing
SAME = 1e-6  # relative difference of two entries of a table that are one bucket
ATTEMPTS = 2  # anchors before which rotary positions are measured
POWER_LAW = 1e-6  # relative deviation of frequencies that follow one base


@dataclass(frozen=True, eq=False, kw_only=True)
class PositionDiagnostics(Diagnostics):
    """What was found beside the layer."""

    heads: int
    ranks: tuple[int, ...]
    positions: str
    rotary_base: float | None = None


@dataclass(frozen=True)
class Positions:
    """Recovers `Attention` with a `position`, from vector answers and tokens of any size."""

    def expected_queries(self, spec: Spec) -> int | None:
        return 4 * spec.width + 40

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        domain = oracle.spec.domain
        if not domain.unbounded:
            raise DomainError("positions are learned with tokens of any size")
        ask, longest = Asker(oracle), domain.max_length
        kind = recognise_positions(ask, rng, longest)
        if ask.scalar:
            raise WrongFamily("positions behind scalar answers are not learned")
        if kind.window is not None:
            longest = min(kind.window, longest or kind.window)
        strategies = {
            "rotary": learn_as_rotary,
            "additive": learn_as_additive,
            "vectors": learn_as_vectors,
        }
        if kind.name not in strategies:
            raise WrongFamily(f"{kind.sentence} These cannot be learned yet")
        learn = strategies[kind.name]
        return run_strategies([(kind.name, lambda: learn(ask, rng, kind, longest))])


def learn_as_rotary(
    ask: Asker, rng: np.random.Generator, kind: PositionKind, longest: int | None
) -> Hypothesis | Refuted | Inconclusive:
    values = measure_value_maps(ask, rng, longest)
    if isinstance(values, Inconclusive):
        return Refuted(values.reason)
    result: Hypothesis | Refuted = Refuted("no anchor was tried")
    for _ in range(ATTEMPTS):
        found = learn_rotary(ask, rng, values, longest)
        if isinstance(found, Inconclusive):
            result = Refuted(found.reason)
            continue
        result = judge_rotary(ask, rng, values, kind, *found)
        if isinstance(result, Hypothesis):
            break
    return result


def judge_rotary(
    ask: Asker,
    rng: np.random.Generator,
    values: ValueMaps,
    kind: PositionKind,
    best: Rotary,
    errors: Rotary,
) -> Hypothesis | Refuted:
    model = assemble(values, rotary_position(best, kind.window))
    doubt = assemble_errors(ask, values, rotary_position(errors, None))
    base = rotary_base(best.frequencies)
    notes = [kind.sentence]
    if base is not None:
        notes.append(f"The frequencies follow the base {base:.6g}.")
    diagnostics = PositionDiagnostics(
        heads=values.heads, ranks=values.ranks, positions="rotary", rotary_base=base
    )
    pairs = len(best.frequencies)
    unknowns = values.heads * (2 * pairs * (2 * (ask.width + 1)) - 2 * pairs)
    floor = count_values(values, ask) + unknowns / ask.outputs
    return judge(ask, rng, model, doubt, floor, notes, diagnostics, kind.window)


def learn_as_additive(
    ask: Asker, rng: np.random.Generator, kind: PositionKind, longest: int | None
) -> Hypothesis | Refuted | Inconclusive:
    values = measure_value_maps(ask, rng, longest)
    if isinstance(values, Inconclusive):
        return Refuted(values.reason)
    return learn_scores(ask, rng, values, kind, longest, None)


def learn_as_vectors(
    ask: Asker, rng: np.random.Generator, kind: PositionKind, longest: int | None
) -> Hypothesis | Refuted | Inconclusive:
    values = measure_value_maps(ask, rng, longest, LONG_ANCHOR)
    if isinstance(values, Inconclusive):
        return Refuted(values.reason)
    if longest is None:
        return Inconclusive("how many places have a vector is not known: give max_length")
    vectors = measure_vectors(ask, values, longest)
    if isinstance(vectors, Inconclusive):
        return vectors
    return learn_scores(ask, rng, values, kind, longest, vectors)


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
    if isinstance(found, Inconclusive):
        return Refuted(found.reason)
    slopes, table = found.slopes, found.table
    tells: float
    if vectors is not None:
        position = Position(vectors=vectors)
        name, tells = "vectors", vectors.size - ask.width
    elif np.abs(table).max() <= FLAT * found.error:
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
    for scores, value in zip(found.scores, values.maps, strict=True):
        u, s, vt = np.linalg.svd(scores[:, :-1])
        root = np.sqrt(s[:rank])
        heads.append(Head((u[:, :rank] * root, root[:, None] * vt[:rank]), scores[:, -1], value))
        doubt = np.full(scores.shape, KEY_LOSS * found.error)
        doubts.append(Head(doubt[:, :-1], doubt[:, -1], np.zeros(value.shape)))
    model = Attention(heads, values.offset, None, None if position.kind == "none" else position)
    plain = assemble_errors(ask, values, Position())
    doubts = [Head(a.score, a.key_bias, b.value) for a, b in zip(doubts, plain.heads, strict=True)]
    uncertain = Position(
        bias=None if position.bias is None else np.full(table.shape, KEY_LOSS * found.error),
        vectors=None if vectors is None else np.full(vectors.shape, place_error(ask, values)),
        slopes=None if position.slopes is None else np.full(len(slopes), found.error),  # type: ignore[arg-type]
    )
    errors = Attention(doubts, plain.offset, None, uncertain)
    unknowns = tells + sum(r * (2 * ask.width + 1) - r**2 for r in values.ranks)
    floor = count_values(values, ask) + unknowns / ask.outputs
    diagnostics = PositionDiagnostics(heads=values.heads, ranks=values.ranks, positions=name)
    return judge(ask, rng, model, errors, floor, [kind.sentence], diagnostics, kind.window)


def place_error(ask: Asker, values: ValueMaps) -> float:
    """Standard error of the vectors: that of what the value maps say of the anchor."""
    total = values.total
    size = values.error * float(np.linalg.norm(values.anchor @ total))
    return size * float(np.linalg.norm(np.linalg.pinv(total), 2)) / ask.width**0.5


def shorten_table(table: np.ndarray) -> np.ndarray:
    """The table without the distances at its end over which it is constant, up to the first."""
    last = table[:, -1:]
    same = (np.abs(table - last) <= SAME * np.abs(table).max()).all(axis=0)
    constant = int(np.argmin(same[::-1])) if not same.all() else len(same)
    return table[:, : table.shape[1] - constant + 1] if constant > 1 else table


def rotary_position(found: Rotary, window: int | None) -> Position:
    return Position(found.frequencies, found.keys, found.queries, window=window)


def rotary_base(frequencies: np.ndarray) -> float | None:
    """The base of frequencies base^(-j / n), j = 0 ... n - 1, times one number; None where they
    are another list."""
    count = len(frequencies)
    if count < 3:
        return None
    slope, start = np.polyfit(np.arange(count), np.log(frequencies), 1)
    off = np.abs(np.log(frequencies) - start - slope * np.arange(count)).max()
    return float(np.exp(-slope * count)) if off < POWER_LAW else None


def assemble(values: ValueMaps, position: Position) -> Attention:
    """The layer; heads without a score that knows no places have the score zero."""
    width = len(values.ins[0])
    blank = np.zeros((width, width))
    heads = [Head(blank, None, value) for value in values.maps]
    return Attention(heads, values.offset, None, position)


def assemble_errors(ask: Asker, values: ValueMaps, position: Position) -> Attention:
    """Standard errors in the same structure; those of the values from their condition."""
    width = len(values.ins[0])
    blank = np.zeros((width, width))
    loss = VALUE_LOSS * values.error
    heads = [
        Head(blank, None, np.full(v.shape, loss * np.sqrt(np.mean(v**2)))) for v in values.maps
    ]
    return Attention(heads, ask.unit * np.abs(values.offset), None, position)


def count_values(values: ValueMaps, ask: Asker) -> float:
    """Unknowns of the values and the offset, per number in an answer."""
    unknowns = sum(r * (ask.width + ask.outputs) - r**2 for r in values.ranks) + ask.outputs
    return unknowns / ask.outputs


def judge(
    ask: Asker,
    rng: np.random.Generator,
    model: Attention,
    errors: Attention,
    floor: float,
    notes: list[str],
    diagnostics: PositionDiagnostics,
    window: int | None,
) -> Hypothesis | Refuted:
    """The hypothesis, if it predicts fresh sequences, short and long."""
    limit = ask.oracle.spec.domain.max_length
    for length in LENGTHS:
        count = length if limit is None else min(length, limit)
        tokens = SIZE * rng.standard_normal((1, count, model.width))
        answer, guess = ask(tokens, "validation")[0], model(tokens)[0]
        gap = float(np.abs(answer - guess).max())
        if gap > TOLERANCE * float(np.abs(answer).max()) + ask.undetected:
            reason = f"{count} random tokens"
            return Refuted(
                "the hypothesis disagrees with the box on a fresh query: it is not attention with "
                f"{diagnostics.positions} positions",
                Counterexample(tokens[0], answer, guess, reason),
            )
    return Hypothesis(model, errors, floor, tuple(notes), diagnostics=diagnostics)
