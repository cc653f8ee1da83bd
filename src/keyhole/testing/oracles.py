"""The contract of an oracle: one answer per query, in their order, whatever the batch."""

from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import ArrayBank, QueryBatch, ScaledBank
from keyhole.oracles.wrappers.validate import Validator
from keyhole.testing.contract import require

COUNT = 5  # queries per batch: odd, so that halves differ in size
PURPOSE = "contract"


def check_oracle(oracle: Any, *, seed: int = 0) -> None:
    """Asks some seventy queries; raises `ContractBroken` for the first rule that does not hold.

    Rules: the spec is true; a batch gets one finite real answer per query, of one shape for all
    lengths; each query's answer depends on the query alone, not on its batch or place; a
    described batch is answered like the plain one; queries are not written to.
    """
    require(isinstance(oracle, Oracle), f"{type(oracle).__name__} is not a keyhole Oracle")
    require(isinstance(oracle.spec, Spec), "oracle.spec must be a Spec")
    rng, longest = np.random.default_rng(seed), oracle.spec.domain.max_length
    shapes = set()
    lengths = (1, 2, 4)
    for length in lengths:
        if longest is None or length <= longest:
            shapes.add(_check_length(Validator(oracle), length, rng))
    require(len(shapes) == 1, f"answers change their shape with the length: {sorted(shapes)}")


def _check_length(oracle: Oracle, length: int, rng: np.random.Generator) -> tuple[int, ...]:
    tokens = _tokens(oracle.spec, length, rng)
    kept = tokens.copy()
    queries = QueryBatch.of(tokens, PURPOSE)
    answers = oracle.ask(queries)  # the border checks number, kind, finiteness and spec.outputs
    allowed = _allowed(answers, oracle.spec.precision)

    def same(other: Array, rule: str) -> None:
        require(other.shape == answers.shape, f"{rule}: shape {other.shape}, not {answers.shape}")
        require(bool((np.abs(other - answers) <= allowed).all()), rule)

    same(oracle.ask(queries), "the same batch must get the same answers again")
    backwards = QueryBatch(queries.bank, queries.index[::-1].copy(), PURPOSE)
    same(oracle.ask(backwards)[::-1], "answers must come in the order of the queries")
    single = [oracle.ask(queries[i : i + 1]) for i in range(COUNT)]
    same(np.concatenate(single), "a query alone must be answered as in a batch")
    same(oracle.ask(_described(tokens)), "a described batch must be answered like the plain one")
    require(np.array_equal(tokens, kept), "an oracle must not write to its queries")
    return tuple(answers.shape[1:])


def _described(tokens: Array) -> QueryBatch:
    """The same queries over a bank that is kept at another scale."""
    rows = tokens.reshape(-1, tokens.shape[2])
    bank = ScaledBank(ArrayBank(0.5 * rows), 2.0)
    return QueryBatch(bank, np.arange(len(rows)).reshape(tokens.shape[:2]), PURPOSE)


def _tokens(spec: Spec, length: int, rng: np.random.Generator) -> Array:
    domain = spec.domain
    if domain.vocabulary is not None:
        chosen = rng.integers(len(domain.vocabulary), size=(COUNT, length))
        return np.array(domain.vocabulary[chosen], dtype=np.float64)
    tokens = rng.standard_normal((COUNT, length, spec.width)) / np.sqrt(spec.width)
    return domain.drawn_in(tokens)


def _allowed(answers: Array, precision: NoiseModel | None) -> float:
    """How far two answers to one query may lie apart."""
    stated = precision or NoiseModel(relative=float(np.finfo(answers.dtype).eps))
    size = float(np.max(np.abs(answers), initial=0.0))
    roundings = 256.0  # roundoffs by which a batch may differ from single queries
    deviations = 10.0  # standard deviations of stated noise by which two answers may differ
    return (
        roundings * max(stated.relative, float(np.finfo(answers.dtype).eps)) * size
        + deviations * stated.additive
        + stated.step
    )
