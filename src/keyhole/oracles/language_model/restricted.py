"""Log-probabilities of chosen tokens through an interface that tells few of them.

Statement.  A prompt has logits z. An interface tells the K largest log-probabilities, or only the
            sampled token, and lets one add a bias to some logits first.
Questions.  Reference token: K - 1 tokens and one reference get the same large bias, so that the K
            likeliest tokens are these; differences to the reference are exact. (V - 1) / (K - 1)
            questions a prompt. Forced token: a large bias makes a token the sampled one; where its
            log-probability is told without the bias, that is one token a question. Race: nothing
            but the sampled token is told (`races`), some 2.2 questions a token to 0.01.
Algebra.    Where all tokens are read, logits are normalised to log-probabilities; of chosen tokens
            differences to the first are told. `complete_from_skeleton` reads the tokens whose
            logits fix all others, once the space of the answers is known: further prompts then
            cost some 1.2 r tokens each.
When it fails. No bias at all: K equations an answer, r - 1 new unknowns with each prompt: where
            K < r, no number of answers determines the rest. An interface that does not do what it
            said (a biased token is not in the answer) is an error that names the token.
Source.     Carlini et al. (2024), Finlayson et al. (2024): bias and top-K; the forced token:
            lm-evaluation-harness, issue 1433.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
from scipy.linalg import qr

from keyhole.arrays import UNIT_ROUNDOFF, Array, Float, Int
from keyhole.errors import InvalidArgument, NotIdentifiable, OracleError
from keyhole.oracles.base import Domain, Oracle, Spec, Wrapper
from keyhole.oracles.language_model.answers import check_sums
from keyhole.oracles.language_model.function import token_numbers
from keyhole.oracles.language_model.interface import (
    CLOSED,
    FORCED,
    RACE,
    REFERENCE,
    WHOLE,
    Interface,
)
from keyhole.oracles.language_model.questions import UNTOLD, Replies, pack
from keyhole.oracles.language_model.races import run_races
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import QueryBatch

ATTEMPTS = 6  # questions about a token that the interface left out, each beside other tokens


@dataclass(frozen=True, eq=False)
class Reader(Wrapper):
    """Takes prompts, asks questions, answers with log-probabilities: one row per prompt, of all
    tokens, or of those `chosen` up to a constant in each row."""

    inner: Oracle
    interface: Interface
    chosen: tuple[int, ...] | None = None

    @property
    def spec(self) -> Spec:  # type: ignore[override]
        asked = self.inner.spec
        domain = Domain(asked.domain.max_length, tokens=self.interface.vocabulary)
        known = self.interface
        precision = asked.precision
        if precision is None and known.repeatable and known.roundoff > UNIT_ROUNDOFF:
            # of the logits, which the server normalised and printed with more digits
            precision = NoiseModel(known.roundoff, format=known.number_format)
        return replace(asked, width=1, outputs=len(self.tokens), domain=domain, precision=precision)

    @property
    def tokens(self) -> Int[Array, " k"]:
        """Those that are told."""
        everything = range(self.interface.vocabulary)
        return np.array(everything if self.chosen is None else self.chosen, dtype=np.int64)

    @property
    def price(self) -> float:
        """Questions a prompt."""
        return self.interface.questions(len(self.tokens)) or np.inf

    @property
    def remaining(self) -> int | None:
        left = self.inner.remaining
        return None if left is None else int(left / self.price)

    def over(self, inner: Oracle) -> "Reader":
        """The same around another oracle that answers the same questions."""
        return replace(self, inner=inner)

    def choose(self, tokens: Sequence[int]) -> "Reader":
        """Of these tokens alone: fewer questions."""
        return replace(self, chosen=tuple(int(token) for token in tokens))

    def pick_few(self) -> Int[Array, " k"]:
        """Places of as many tokens, spread over all that are told, as a question or two tell."""
        each = len(self.tokens) / self.price  # tokens a question
        count = int(np.clip(each, 2, min(32, len(self.tokens))))
        return np.unique(np.linspace(0, len(self.tokens) - 1, count).astype(np.int64))

    def ask(self, queries: QueryBatch) -> Float[Array, "n k"]:
        if not len(queries):
            return np.zeros((0, len(self.tokens)))
        return self.read(token_numbers(queries), queries.purpose)

    @abstractmethod
    def read(self, prompts: Int[Array, "n length"], purpose: str) -> Float[Array, "n k"]:
        """Log-probabilities of the tokens behind these prompts."""

    def _ask(self, prompts: Array, tokens: Array, bias: Array, purpose: str) -> Replies:
        return Replies(np.asarray(self.inner.ask(pack(prompts, tokens, bias, purpose))))

    def _normalised(self, logits: Float[Array, "n k"]) -> Float[Array, "n k"]:
        """Log-probabilities of all tokens, or differences to the first of those chosen."""
        if self.chosen is not None:
            return np.asarray(logits - logits[:, :1])
        return normalise(logits)


class WholeReader(Reader):
    """The interface tells all tokens at once."""

    def read(self, prompts: Int[Array, "n length"], purpose: str) -> Float[Array, "n k"]:
        tokens, count = self.tokens, len(prompts)
        found = np.full((count, len(tokens)), UNTOLD)
        for attempt in range(ATTEMPTS if self.interface.bias == "sampling" else 1):
            rows = np.flatnonzero((found == UNTOLD).all(axis=1))
            if not len(rows):
                break
            # a server may tell nothing because of the token it sampled (one that is no whole
            # character): another is sampled, which changes nothing of what is told
            rng = np.random.default_rng([len(rows), attempt])
            other = rng.integers(self.interface.vocabulary, size=(len(rows), min(attempt, 1)))
            bias = np.full(other.shape, self.interface.max_bias)
            replies = self._ask(prompts[rows], other, bias, purpose)
            found[rows] = replies.told(np.broadcast_to(tokens, (len(rows), len(tokens))))
        untold = (found == UNTOLD).sum(axis=1)
        if untold.any():
            raise OracleError(
                f"the interface leaves out {untold.max()} of {len(tokens)} tokens in an answer: "
                "name the size of the vocabulary (vocabulary=) that it answers with, or the tokens "
                "that it tells (keyhole.choose_tokens)"
            )
        if self.chosen is None:
            check_sums(found)
        return found


class ReferenceReader(Reader):
    """K - 1 tokens and a reference, all with the largest bias: logits are rounded at its size."""

    @property
    def spec(self) -> Spec:  # type: ignore[override]
        unit, step = self.interface.roundoff, self.interface.step
        noise = NoiseModel(unit, step=step, tolerance=self.interface.max_bias * unit)
        return replace(super().spec, precision=noise)

    def read(self, prompts: Int[Array, "n length"], purpose: str) -> Float[Array, "n k"]:
        tokens, size = self.tokens, min(self.interface.top, self.interface.bias_entries) - 1
        found = np.full((len(prompts), len(tokens)), np.nan)
        found[:, 0] = 0.0  # the first token is the reference
        groups = -(-(len(tokens) - 1) // size)
        # the last group is filled up with tokens of the one before
        ends = np.minimum(1 + size * (1 + np.arange(groups)), len(tokens))
        size = min(size, len(tokens) - 1)
        places = ends[:, None] - size + np.arange(size)
        rows, columns = (
            np.repeat(np.arange(len(prompts)), groups),
            np.tile(places, (len(prompts), 1)),
        )
        less = np.zeros((len(rows), 1 + size))
        speaking: set[int] = set()  # columns of tokens that were sampled in answers that told
        for attempt in range(1, ATTEMPTS):
            speaking |= self._differences(prompts, rows, columns, less, found, purpose)
            missing = np.argwhere(np.isnan(found))
            if not len(missing):
                return self._normalised(found)
            rows, columns, less = self._choose_again(found, size, attempt, speaking)
        token = int(tokens[missing[0, 1]])
        raise OracleError(
            f"the interface does not tell token {token}, biased by {self.interface.max_bias:g}, "
            f"among its {self.interface.top} likeliest: its bias does not act on what it tells, "
            "or is too small"
        )

    def _choose_again(
        self, found: Array, size: int, attempt: int, speaking: set[int]
    ) -> tuple[Array, Array, Array]:
        """Further questions about what was not told. A server may tell nothing because of the
        token it sampled (one that is no whole character): one token, of those that were sampled in
        a full answer or at least told if there are any, keeps its bias, and the others, with the
        reference, get less, so that it is sampled instead."""
        rng = np.random.default_rng([int(np.isnan(found).sum()), attempt])
        questions = []
        for row in np.flatnonzero(np.isnan(found).any(axis=1)):
            lost, known = (
                np.flatnonzero(np.isnan(found[row])),
                np.flatnonzero(~np.isnan(found[row])),
            )
            for start in range(0, len(lost), max(size - 1, 1)):
                part = lost[start : start + max(size - 1, 1)]
                heard = np.intersect1d(known[1:], sorted(speaking))
                told = heard if len(heard) else known[1:]
                lead = int(rng.choice(told if len(told) else part))
                part = part if size == 1 else part[part != lead]
                columns = part if size == 1 else np.append(part, lead)
                questions.append((row, np.resize(columns, size), lead))
        rows = np.array([row for row, _, _ in questions])
        columns = np.array([columns for _, columns, _ in questions])
        leads = np.array([lead for _, _, lead in questions])
        leading = columns == leads[:, None]
        held = leading.any(axis=1, keepdims=True)  # else the reference keeps its bias
        full = np.hstack([~held, leading])
        return rows, columns, np.where(full, 0.0, 0.08 * attempt * self.interface.max_bias)

    def _differences(
        self, prompts: Array, rows: Array, columns: Array, less: Array, found: Array, purpose: str
    ) -> set[int]:
        """Fills in z - z of the reference where the answers tell both; the reference and the
        tokens get so much `less` bias. The columns of tokens that were sampled in full answers."""
        asked = np.hstack([np.zeros((len(rows), 1), dtype=np.int64), columns])
        tokens = self.tokens[asked]
        replies = self._ask(prompts[rows], tokens, self.interface.max_bias - less, purpose)
        told = replies.told(tokens)
        told[told == UNTOLD] = np.nan
        logits = told + less
        values = logits[:, 1:] - logits[:, :1]
        seen = ~np.isnan(values)
        found[np.broadcast_to(rows[:, None], columns.shape)[seen], columns[seen]] = values[seen]
        sampled = set(np.asarray(replies.sampled)[seen.any(axis=1)].tolist())
        return {place for place, token in enumerate(self.tokens.tolist()) if token in sampled}


class ForcedReader(Reader):
    """One token a question: a large bias makes it the sampled one."""

    def read(self, prompts: Int[Array, "n length"], purpose: str) -> Float[Array, "n k"]:
        tokens = self.tokens
        found = np.full((len(prompts), len(tokens)), UNTOLD)
        for attempt in range(ATTEMPTS):
            rows, columns = np.nonzero(found == UNTOLD)
            if not len(rows):
                break
            asked = tokens[columns][:, None]
            # a slightly smaller bias is another question
            bias = np.full(asked.shape, self.interface.max_bias * (1.0 - attempt / 64.0))
            replies = self._ask(prompts[rows], asked, bias, purpose)
            obeyed = replies.sampled == asked[:, 0]
            found[rows[obeyed], columns[obeyed]] = replies.sampled_logprob[obeyed]
        if (found == UNTOLD).any():
            token = int(tokens[np.argwhere(found == UNTOLD)[0, 1]])
            raise OracleError(
                f"the interface does not sample token {token}, biased by "
                f"{self.interface.max_bias:g}, or does not tell its log-probability: leave such "
                "tokens out (keyhole.choose_tokens)"
            )
        if self.chosen is not None:
            return np.asarray(found - found[:, :1])
        check_sums(found)
        return found


@dataclass(frozen=True, eq=False)
class RaceReader(Reader):
    """Nothing but the sampled token: tokens race against each other, to within `epsilon`."""

    epsilon: float = 1e-2

    @property
    def spec(self) -> Spec:  # type: ignore[override]
        return replace(super().spec, precision=NoiseModel(tolerance=self.epsilon))

    def read(self, prompts: Int[Array, "n length"], purpose: str) -> Float[Array, "n k"]:
        def ask(which: Array, tokens: Array, bias: Array) -> Array:
            rows = np.asarray(self.inner.ask(pack(prompts[which], tokens, bias, purpose)))
            return (rows if rows.ndim == 1 else rows[:, 0]).astype(np.int64)

        entries = self.interface.bias_entries
        logits = run_races(
            ask, len(prompts), self.tokens, self.epsilon, entries, self.interface.max_bias
        )
        return self._normalised(logits)


READERS: dict[str, type[Reader]] = {
    WHOLE: WholeReader,
    REFERENCE: ReferenceReader,
    FORCED: ForcedReader,
    RACE: RaceReader,
}


def read_logprobs(box: Oracle, interface: Interface, **options: Any) -> Reader:
    """The cheapest reader for an interface."""
    if interface.reading == CLOSED:
        refuse_closed(box)
    return READERS[interface.reading](box, interface, **options)


def refuse_closed(box: Oracle) -> NoReturn:
    """Where an interface takes no bias, and tells few tokens."""
    told = ((box.spec.outputs or 2) - 2) // 2
    raise NotIdentifiable(
        f"this interface tells {told or 'no'} log-probabilities and takes no bias: each prompt "
        "brings as many unknowns as a hidden state has numbers, so that the rest of the answers is "
        "not determined, however many are asked for (unless it tells at least as many as the "
        "hidden state has)"
    )


def choose_tokens(oracle: Oracle, tokens: Sequence[int]) -> Oracle:
    """Restricts a language model's answers to some of its tokens.

    Args:
        oracle: The language model.
        tokens: Numbers of the tokens that are of interest.

    Returns:
        The same language model, answering for these tokens alone.

    Example:
        >>> import numpy as np
        >>> from keyhole.oracles.language_model.open import open_language_model
        >>> table = np.random.default_rng(0).standard_normal((50, 50))
        >>> box = open_language_model(lambda prompts: table[prompts[:, -1]])
        >>> choose_tokens(box, [3, 7, 9]).spec.outputs
        3
    """
    return oracle.choose(tokens) if isinstance(oracle, Reader) else ChosenTokens(oracle, tokens)


@dataclass(frozen=True, eq=False)
class ChosenTokens(Wrapper):
    """Some columns of the answers."""

    inner: Oracle
    tokens: Sequence[int]

    @property
    def spec(self) -> Spec:  # type: ignore[override]
        return replace(self.inner.spec, outputs=len(self.tokens))

    def ask(self, queries: QueryBatch) -> Float[Array, "n k"]:
        return np.asarray(self.inner.ask(queries))[:, np.asarray(self.tokens, dtype=np.int64)]


def pick_skeleton(
    basis: Float[Array, "V r"], count: int | None = None
) -> tuple[Int[Array, " k"], Float[Array, "k V"]]:
    """Tokens whose logits, known up to a constant, fix all others in the space of `basis` (pivoted
    QR; 1.2 r of them where the number is not given), and the matrix that carries their logits,
    centred, to those of all tokens."""
    rank = basis.shape[1]
    count = min(len(basis), -(-6 * rank // 5) + 2) if count is None else count
    if not rank < count <= len(basis):
        raise InvalidArgument(f"count must lie in {rank + 1} … {len(basis)}, got {count}")
    first = qr(basis.T, pivoting=True, mode="r")[1][:rank]
    rest = np.setdiff1d(np.arange(len(basis)), first)
    # further tokens: those that the first ones fix worst
    leverage = np.linalg.norm(basis[rest] @ np.linalg.pinv(basis[first]), axis=1)
    chosen = np.concatenate([first, rest[np.argsort(-leverage)[: count - rank]]])
    centred = basis[chosen] - basis[chosen].mean(axis=0)
    return chosen, np.asarray(np.linalg.pinv(centred).T @ basis.T)


@dataclass(frozen=True, eq=False)
class Completed(Wrapper):
    """Few tokens are read, all are told: those that were read as they are, and the others as the
    space of former answers fixes them."""

    inner: Reader  # of the chosen tokens
    carry: Float[Array, "k V"]

    @property
    def spec(self) -> Spec:  # type: ignore[override]
        return replace(self.inner.spec, outputs=self.carry.shape[1])

    @property
    def price(self) -> float:
        """Questions that one answer takes."""
        return self.inner.price

    def ask(self, queries: QueryBatch) -> Float[Array, "n V"]:
        told = np.asarray(self.inner.ask(queries))
        told = told - told.mean(axis=1, keepdims=True)
        logits, chosen = np.asarray(told @ self.carry), self.inner.tokens
        logits[:, chosen] = told + logits[:, chosen].mean(axis=1, keepdims=True)
        return normalise(logits)


def complete_from_skeleton(oracle: Oracle, basis: Float[Array, "V r"]) -> Oracle:
    """The same language model for less, once the space of its answers is known; as it is where
    all tokens are told at once."""
    if not isinstance(oracle, Reader) or oracle.price <= 1 or oracle.chosen is not None:
        return oracle
    chosen, carry = pick_skeleton(basis)
    return Completed(oracle.choose(chosen.tolist()), carry)


def choose_for_check(
    reader: Reader, basis: Float[Array, "V r"], rng: np.random.Generator
) -> Reader:
    """The reader for as many tokens as a fresh answer is checked on: a skeleton, which fixes the
    hidden state, and a few tokens at random beyond it. All of them where that is not cheaper."""
    if reader.price <= 1 or reader.chosen is not None:
        return reader
    chosen, _ = pick_skeleton(basis)
    rest = np.setdiff1d(np.arange(len(basis)), chosen)
    few = reader.choose(np.append(chosen, rng.permutation(rest)[:4]).tolist())
    return few if few.price < reader.price else reader


def normalise(logits: Float[Array, "n k"]) -> Float[Array, "n k"]:
    """Log-probabilities."""
    largest = logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(logits - largest).sum(axis=1, keepdims=True))
    return np.asarray(logits - largest - total)
