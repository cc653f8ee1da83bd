"""What a diagnosis says: the same or not, the causes, the evidence, what was ranked below them."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.diagnosis.localise import Change
from keyhole.text import clean_all


@dataclass(frozen=True)
class Cause:
    """One thing that is wrong with the suspect.

    Attributes:
        name: what is wrong, in words.
        parameter: the value of its free parameter, or None.
        module: the part of the model it belongs to, by its dotted name where it has one.
        size: the largest relative change of an answer that it makes by itself.
        certainty: how sure: decades between the residual without this cause and with it, on the
            row that shows it best; 0 is not sure at all.
        explains: "everything" within the number format, or "a part".
        advice: what to do about it.
        error: standard error of the parameter, where it is a number that was fitted.
    """

    name: str
    parameter: Any
    module: str
    size: float
    certainty: float
    explains: str
    advice: str
    error: float | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, eq=False)
class ProbeEvidence:
    """A query that decides, and both answers.

    Attributes:
        purpose: why it was asked.
        rows: what was asked together, token numbers or vectors.
        row: the row of that call which is shown.
        reference: the reference's answer.
        suspect: the suspect's answer.
        residual: their relative difference.
        explained: the same under the causes that were named.
    """

    purpose: str
    rows: tuple[Array, ...]
    row: int
    reference: Array
    suspect: Array
    residual: float
    explained: float


@dataclass(frozen=True)
class Ranked:
    """A hypothesis and what it leaves over."""

    causes: tuple[str, ...]
    left_over: float
    score: float

    def __str__(self) -> str:
        return ", and ".join(self.causes) or "nothing: the reference as it is"


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """What differs between a reference and a suspect.

    Attributes:
        same: whether the suspect is the reference within its number format.
        causes: what is wrong, each confirmed on fresh queries; empty where nothing is, or where
            no cause is known.
        evidence: the queries that decide, with both answers.
        ranking: hypotheses by how much they leave over, the best first.
        tolerance: the relative difference up to which a row counts as explained.
        queries: rows the suspect was asked.
        format: the number format that the suspect computes or answers in.
        difference: the largest relative difference between suspect and reference.
        left_over: the same under the causes named.
        suspicion: where no cause is known, where the change most likely is.
        notes: what else a reader should know, as what is too small to be seen.
        change: the change of weights that explains the answers best, where no fault does.
        layer: near which the difference arises, where no cause is known and a place is.
    """

    same: bool
    causes: tuple[Cause, ...]
    evidence: tuple[ProbeEvidence, ...]
    ranking: tuple[Ranked, ...]
    tolerance: float
    queries: int
    format: str = "float32"
    difference: float = 0.0
    left_over: float = 0.0
    suspicion: str = ""
    notes: tuple[str, ...] = field(default_factory=tuple)
    change: Change | None = None
    layer: int | None = None

    def __str__(self) -> str:
        within = f"within {self.tolerance:.0e} ({self.format}), {self.queries} queries"
        if self.same:
            return f"The suspect answers as the reference does, {within}."
        named = ", and ".join(cause.name for cause in self.causes)
        if named and all(cause.explains == "everything" for cause in self.causes):
            return (
                f"The suspect differs: {named}; this explains all of {self.queries} queries down "
                f"to {self.left_over:.0e} ({self.format})."
            )
        if named:
            rest = f"; {self.suspicion}" if self.suspicion else ""
            return (
                f"The suspect differs by up to {self.difference:.0e}: {named}; this explains a "
                f"part, {self.left_over:.0e} is left{rest} ({self.queries} queries)."
            )
        place = f", {self.suspicion}" if self.suspicion else ""
        return (
            f"The suspect differs by up to {self.difference:.0e}, cause not in the catalogue"
            f"{place} ({self.queries} queries)."
        )

    def to_record(self) -> dict[str, Any]:
        """Everything as plain numbers, words, lists and mappings."""
        record = {
            "same": self.same,
            "sentence": str(self),
            "causes": [asdict(cause) for cause in self.causes],
            "evidence": [asdict(item) for item in self.evidence],
            "ranking": [asdict(item) for item in self.ranking],
            "tolerance": self.tolerance,
            "queries": self.queries,
            "format": self.format,
            "difference": self.difference,
            "left_over": self.left_over,
            "suspicion": self.suspicion,
            "layer": self.layer,
            "notes": list(self.notes),
            "change": None if self.change is None else self.change.to_record(),
        }
        plain: dict[str, Any] = clean_all(json.loads(json.dumps(record, default=_plain)))
        return plain


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    return str(value)
