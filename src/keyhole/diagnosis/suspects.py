"""The suspect: whatever can be asked, behind one method.

Rows given together are asked in one call, so that faults of batches and padding show. What was
asked is counted here and nowhere else.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from keyhole.arrays import Array
from keyhole.diagnosis.reference import Reference
from keyhole.diagnosis.simulate import Row
from keyhole.errors import BudgetExhausted, InvalidArgument, KeyholeError, OracleError
from keyhole.oracles.base import Oracle
from keyhole.oracles.embeddings import open_embedding_endpoint
from keyhole.oracles.rows import NUMBERS, RowBox
from keyhole.oracles.token_models import open_token_model
from keyhole.oracles.torch import is_module


@runtime_checkable
class Suspect(Protocol):
    """Something that answers rows."""

    def ask(self, rows: Sequence[Row]) -> Array:
        """Answers (rows, outputs) to rows asked together in one call."""


@dataclass
class Counted:
    """A suspect with a budget: checks answers, counts rows, remembers none."""

    suspect: Suspect
    budget: int
    asked: int = 0

    def __post_init__(self) -> None:
        self.asked = int(getattr(self.suspect, "opening_queries", 0))

    def ask(self, rows: Sequence[Row]) -> Array:
        """Answers as float64 (rows, outputs).

        Raises:
            BudgetExhausted: these rows would exceed the budget; they were not asked.
            OracleError: the suspect failed or its answer has another shape.
        """
        if self.asked + len(rows) > self.budget:
            raise BudgetExhausted(
                f"{self.asked} queries were asked, and {len(rows)} more would exceed the budget of "
                f"{self.budget}: pass a larger budget= (--budget)"
            )
        self.asked += len(rows)
        try:
            answers = np.asarray(self.suspect.ask(rows))
        except (KeyholeError, KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except Exception as error:
            raise OracleError(
                f"the suspect raised {type(error).__name__} on {len(rows)} rows: {str(error)[:300]}"
            ) from error
        if answers.dtype.kind not in "fiu" or answers.ndim != 2 or len(answers) != len(rows):
            raise OracleError(
                f"the suspect answered {len(rows)} rows with an array of shape {answers.shape} and "
                f"type {answers.dtype}; expected numbers of shape ({len(rows)}, outputs)"
            )
        if not np.all(np.isfinite(answers)):
            raise OracleError(
                "the suspect answered with NaN or infinity: numbers that no model sends on purpose"
            )
        return answers.astype(np.float64)


@dataclass(frozen=True)
class TokenFunction:
    """A callable (tokens, attention_mask) -> (rows, outputs); padded at the end."""

    function: Callable[..., Any]
    filler: int

    def ask(self, rows: Sequence[Row]) -> Array:
        longest = max(len(row) for row in rows)
        tokens = np.full((len(rows), longest), self.filler, dtype=np.int64)
        mask = np.zeros((len(rows), longest), dtype=np.int64)
        for k, row in enumerate(rows):
            tokens[k, : len(row)] = row
            mask[k, : len(row)] = 1
        answers = self.function(tokens, attention_mask=mask)
        return as_numbers(answers)


@dataclass(frozen=True)
class VectorOracle:
    """An oracle on vectors."""

    oracle: Oracle

    def ask(self, rows: Sequence[Row]) -> Array:
        from keyhole.oracles.queries import QueryBatch

        answers = np.asarray(self.oracle.ask(QueryBatch.of(np.stack(list(rows)), "doctor")))
        return answers.reshape(len(rows), -1)


@dataclass
class ModuleSuspect:
    """A module of transformers on token numbers, pooled as the reference is."""

    module: Any
    reference: Reference
    filler: int = field(init=False)

    def __post_init__(self) -> None:
        self.filler = self.reference.pad

    def ask(self, rows: Sequence[Row]) -> Array:
        import torch

        from keyhole.diagnosis.simulate import Inputs, pad
        from keyhole.oracles.torch import evaluating, first_tensor

        ids, mask = pad(Inputs(list(rows)), self.filler)
        with evaluating(self.module), torch.no_grad():
            states = first_tensor(self.module(input_ids=ids, attention_mask=mask.long()))
            return as_numbers(self.reference.readout(states.float(), mask))


def as_numbers(answers: Any) -> Array:
    """An answer of torch or NumPy as an array."""
    if hasattr(answers, "detach"):
        answers = answers.detach().cpu()
        answers = (answers.float() if answers.dtype.itemsize < 4 else answers).numpy()
    return np.asarray(answers)


@dataclass(frozen=True)
class EndpointSuspect:
    """An embedding endpoint, asked token numbers where it takes them and texts otherwise."""

    box: RowBox
    words: dict[int, str] | None  # for texts: token numbers and the words that they are
    joint: str = " "  # between words

    @property
    def opening_queries(self) -> int:
        """Rows that were asked to find out what it takes."""
        return self.box.opening_queries

    def close(self) -> None:
        """Lets go of the connection."""
        self.box.close()

    def ask(self, rows: Sequence[Row]) -> Array:
        if self.words is None:
            return self.box.ask(list(rows))
        texts = [
            self.joint.join(self.words[n] for n in row.tolist() if n in self.words) for row in rows
        ]
        return self.box.ask(texts)


def adapt_box(box: RowBox, reference: Reference) -> Suspect:
    """A box of rows, such as an embedding endpoint."""
    if NUMBERS in box.spec.takes:
        return EndpointSuspect(box, None)
    if reference.tokenizer is None:
        raise InvalidArgument(
            f"{box.spec.identity} takes texts alone, and the reference has no tokenizer: save the "
            "tokenizer into the reference's folder"
        )
    words, joint = find_words(reference.tokenizer)
    return EndpointSuspect(box, words, joint)


def find_words(tokenizer: Any, enough: int = 2000) -> tuple[dict[int, str], str]:
    """Words that are one token each, wherever they stand in a text, and what to put between them.

    Raises:
        InvalidArgument: the tokenizer has hardly any.
    """
    plain = [
        (number, word)
        for word, number in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
        if word.isascii() and word.isalnum() and word == word.lower()
    ]
    step = max(1, len(plain) // enough)
    plain = plain[::step]
    for joint in (" ", ""):
        framed = [tokenizer(f"{w}{joint}{w}", add_special_tokens=False)["input_ids"]
                  for _, w in plain]  # fmt: skip
        words = {n: w for (n, w), ids in zip(plain, framed, strict=True) if ids == [n, n]}
        if len(words) >= 8:
            text = joint.join(words.values())
            if tokenizer(text, add_special_tokens=False)["input_ids"] == list(words):
                return words, joint
    raise InvalidArgument(
        "the tokenizer has too few words of one token to ask an endpoint that takes texts alone"
    )


def _is_suspect(target: Any) -> bool:
    return hasattr(target, "ask") and not isinstance(target, (Oracle, str))


def _open_vector_suspect(target: Any, reference: Reference) -> Suspect:
    if _is_suspect(target):
        return target
    from keyhole.oracles.open import open_oracle

    return VectorOracle(
        target if isinstance(target, Oracle) else open_oracle(target, width=reference.width)
    )


def open_suspect(target: Any, reference: Reference, **options: Any) -> Suspect:
    """The suspect behind a target.

    Args:
        target: a Suspect; for token models a callable (tokens, attention_mask=None), a module of
            transformers, `hf:FOLDER`, `package.module:attribute` or the URL of an embedding
            endpoint; for modules on vectors, whatever `keyhole.open_oracle` opens.
        reference: what it is compared with.
        options: of an embedding endpoint.

    Raises:
        InvalidArgument: the target is none of these.
    """
    if not reference.tokens:
        return _open_vector_suspect(target, reference)
    if isinstance(target, str):
        if re.match(r"https?://", target, re.IGNORECASE):
            return adapt_box(open_embedding_endpoint(target, **options), reference)
        if target.startswith("hf:"):
            return ModuleSuspect(open_token_model(target).module, reference)
        from keyhole.oracles.open import load_named
        from keyhole.targets import check_target

        check_target(target)
        target = load_named(target)
    if isinstance(target, RowBox):
        return adapt_box(target, reference)
    if _is_suspect(target):
        return target
    if is_module(target) and hasattr(target, "config"):
        return ModuleSuspect(target, reference)
    if callable(target):
        return TokenFunction(target, reference.pad)
    raise InvalidArgument(
        f"the suspect must be a callable (tokens, attention_mask=None) -> (rows, outputs), a "
        f"module, the URL of an endpoint or package.module:attribute; got a "
        f"{type(target).__name__}"
    )
