"""What a recovery returns: outcome, model, errors, verdict and ledger. All frozen."""

import enum
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from keyhole.errors import Counterexample, FileFormatError, InvalidArgument
from keyhole.extras import need
from keyhole.linalg.decisions import Tally
from keyhole.models.base import multiply_out_scores
from keyhole.models.files import load_model, replacing, save_model
from keyhole.schema import WrongType, parse_json, read_record
from keyhole.text import clean, clean_all, html_table

VERIFYING = "verification"  # purpose, as oracles.queries names it, of queries that verify
RUN_FILE, RUN_FORMAT = "recovery.json", "keyhole-run-1"
# what a record that is not one raises (RecursionError: JSON nested without end)
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class Outcome(enum.Enum):
    """How a recovery ended; the value is the advice shown to the user."""

    RECOVERED = (
        "The model agrees with every answer compared; the verdict says how many, how closely, and "
        "what that leaves open."
    )
    REJECTED = (
        "The box is not a member of the assumed family, or not the same box all along: see the "
        "counterexample. Try another learner, or accept that the box is something else."
    )
    NOT_IDENTIFIABLE = "No number of queries can determine these parameters. The reason is given."
    BUDGET_EXHAUSTED = (
        "The budget was spent before the parameters were determined. Raise it, and pass the same "
        "journal to continue without paying twice, unless the learner plans with its budget."
    )
    ILL_CONDITIONED = (
        "The answers determine some parameters too weakly to be trusted. Read the error bars; a "
        "more precise box, a wider domain or more queries would help."
    )
    UNSUPPORTED = (
        "The box was recognised, and there is no learner for it as it stands. The reason says what "
        "it looks like and what can be opened instead."
    )
    UNVERIFIED = (
        "A model was fitted but not compared with fresh answers, or noise hides what they tell."
    )
    ORACLE_FAILED = (
        "The box failed to answer: the reason says how. Once it answers, the same call continues "
        "from its journal, if there is one."
    )
    INTERRUPTED = "Stopped on request. With a journal, the same call continues where it was."

    def __repr__(self) -> str:
        return f"Outcome.{self.name}"


class Portable:
    """Can be copied and pickled, although its mappings are read-only views."""

    def __reduce__(self) -> tuple[Any, ...]:
        values = (getattr(self, part.name) for part in fields(self))  # type: ignore[arg-type]
        return type(self), tuple(dict(v) if isinstance(v, MappingProxyType) else v for v in values)


@dataclass(frozen=True)
class Ledger(Portable):
    """Queries the box was paid for.

    Attributes:
        by_purpose: How many, for what.
        floor: The number of unknowns per number in an answer.
        replayed: Of these, answered from the journal of an earlier run.
        repeated: Sent again because the box or the way to it failed; not in `paid`.
        requests: Exchanges with an endpoint in this run: one may hold several queries.
        prompt_tokens: Of a language model: tokens in all prompts that were paid for.
    """

    by_purpose: Mapping[str, int] = field(default_factory=dict)
    floor: float | None = None
    replayed: int = 0
    repeated: int = 0
    requests: int = 0
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_purpose", MappingProxyType(dict(self.by_purpose)))
        counts = (self.replayed, self.repeated, self.requests, self.prompt_tokens)
        if min([*counts, *self.by_purpose.values()]) < 0:
            raise InvalidArgument("a ledger holds no negative numbers of queries")

    def money(self, price: float) -> float:
        """What a language model's answers cost at a price per million tokens: those of the prompts,
        and one for each answer."""
        return price * (self.prompt_tokens + self.paid) / 1e6

    @property
    def paid(self) -> int:
        return sum(self.by_purpose.values())

    @property
    def verifying(self) -> int:
        """Of these, fresh queries that compare the model with the box."""
        return self.by_purpose.get(VERIFYING, 0)

    @property
    def learning(self) -> int:
        """All others."""
        return self.paid - self.verifying

    def __str__(self) -> str:
        times = f" ({self.learning / self.floor:.2f} × the floor)" if self.floor else ""
        verify = f", {self.verifying:,} to verify" if self.verifying else ""
        return f"{self.learning:,} to learn{times}{verify}"


@dataclass(frozen=True, eq=False)
class Verdict(Portable):
    """Agreement with its bound, or a counterexample. Agreement is not equality.

    Attributes:
        agrees: Whether all answers that were compared agree.
        queries: Fresh answers compared.
        replayed: Answers paid for during learning, compared for free.
        worst: Largest deviation seen, in units of its tolerance (agreement: at most 1).
        tolerance: Median of the allowed deviations, relative to the size of ordinary answers. Where
            most answers are zero, those do not count.
        bound: What the agreements allow one to claim, in words.
        counterexample: A query on which box and model differ.
        precision: What the box's own rounding and noise allow, in the unit of `tolerance`.
        noticed: Smallest relative change of each block of parameters that one of the fresh answers
            would have shown.
        format: Number format of the answers, "stated" or "decimal" among them.
        difference: Largest |box − model| of a fresh answer over the size of that answer.
        absolute: Largest |box − model| of a fresh answer as it is.
        format_before: Number format when the model was recovered, where a run tells.
        contradicted: Of the replayed answers, those that are not the model's.
    """

    agrees: bool
    queries: int
    replayed: int
    worst: float
    tolerance: float
    bound: str
    counterexample: Counterexample | None = None
    precision: float = 0.0
    noticed: Mapping[str, float] = field(default_factory=dict)
    format: str = ""
    difference: float = 0.0
    absolute: float = 0.0
    format_before: str = ""
    contradicted: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "noticed", MappingProxyType(dict(self.noticed)))

    @property
    def word(self) -> str:
        """What the box does: without a counterexample it may still hide in its noise."""
        if self.agrees:
            return "agrees"
        return "hides in noise" if self.counterexample is None else "differs"

    @property
    def format_changed(self) -> bool:
        """Whether the box computes in another number format than when it was recovered."""
        return bool(self.format_before) and self.format != self.format_before

    @property
    def fraction(self) -> float:
        """Of queries drawn like these, the share that may be answered differently, with 95%
        confidence; 1 where nothing was compared or something differs."""
        return 1.0 - 0.05 ** (1.0 / self.queries) if self.agrees and self.queries else 1.0

    def __str__(self) -> str:
        return f"The box {self.word}. {self.bound}"

    def _repr_html_(self) -> str:
        rows = {
            "verdict": f"the box {self.word}",
            "fresh queries": f"{self.queries:,}",
            "answers compared again": f"{self.replayed:,}",
            "largest difference": f"{self.difference:.1e} of its answer's size",
            "tolerance (median)": f"{self.tolerance:.1e} of an ordinary answer's size",
            "largest difference / its tolerance": f"{self.worst:.2g}",
            "number format": self.format or "unknown",
        }
        if self.format_changed:
            rows["number format"] += f" (was {self.format_before})"
        return html_table(rows, self.bound)


@dataclass(frozen=True)
class Trace:
    """How far the finished model is from answers of the box, in the order they were asked: a
    sample spread over the run. Deviations are relative to the size of the answers."""

    asked: tuple[int, ...]  # number of the query in the run, from 1
    purpose: tuple[str, ...]
    deviation: tuple[float, ...]
    total: int  # queries of which these are the sample

    def __post_init__(self) -> None:
        if not len(self.asked) == len(self.purpose) == len(self.deviation):
            raise InvalidArgument("the columns of a trace must have one length")
        if min(self.asked, default=1) < 1 or self.total < max(self.asked, default=0):
            raise InvalidArgument("a trace numbers queries from 1 to their total")


@dataclass(frozen=True)
class RunDiagnostics:
    """How sure a run could be of what it decided.

    Args:
        decisions: Comparisons of an estimate with what errors may show: ranks, zeros, differences.
        closest_decision: The one whose estimate was nearest to its border, in words; "" where there
            was none.
        margin: By which factor it was above or below that border; near 1 another draw of queries
            might have decided otherwise.
    """

    decisions: int = 0
    closest_decision: str = ""
    margin: float | None = None

    @classmethod
    def of(cls, tally: Tally) -> "RunDiagnostics":
        """What was counted, for a record."""
        if tally.closest is None:
            return cls(tally.count)
        return cls(tally.count, str(tally.closest), tally.closest.margin)


@dataclass(frozen=True, eq=False)
class Recovery(Portable):
    """Everything a recovery found out.

    Attributes:
        outcome: How it ended; its value is advice.
        model: What was recovered, callable like the box; None where nothing was.
        errors: Standard errors, in the structure of the model.
        verdict: What the comparison with fresh answers came to; None where there was none.
        ledger: Queries paid, by purpose.
        reason: Why it ended so, in words.
        notes: Sentences for the reader.
        details: Numbers that the learner left for the reader.
        run: Box, learner, seed and what else repeats it.
        trace: How far the model is from the answers, in the order they were asked.
        diagnostics: How many decisions were taken, and how close the closest was.
    """

    outcome: Outcome
    model: Any
    errors: Any
    verdict: Verdict | None
    ledger: Ledger
    reason: str = ""
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)  # box, learner, seed …: how to repeat it
    trace: Trace | None = field(default=None, repr=False)  # pages of numbers
    diagnostics: RunDiagnostics = field(default_factory=RunDiagnostics)

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", clean(self.reason))
        object.__setattr__(self, "notes", tuple(clean(note) for note in self.notes))
        object.__setattr__(self, "details", MappingProxyType(clean_all(dict(self.details))))
        object.__setattr__(self, "run", MappingProxyType(clean_all(dict(self.run))))

    def __str__(self) -> str:
        what = self.reason or repr(self.model)
        return f"{self.outcome.name} after {self.ledger.paid:,} queries, {self.ledger}: {what}"

    def _repr_html_(self) -> str:
        rows = {
            "outcome": self.outcome.name,
            "model": "none" if self.model is None else repr(self.model),
            "queries": f"{self.ledger.paid:,}: {self.ledger}",
            "floor": "unknown" if self.ledger.floor is None else f"{self.ledger.floor:,.0f}",
            "learner": str(self.run.get("learner", "")) or "unknown",
            "seed": str(self.run.get("seed", "")) or "unknown",
        }
        said = self.reason or ("" if self.verdict is None else self.verdict.bound)
        return html_table(rows, " ".join([said, *self.notes]))

    def to_dataframe(self) -> Any:
        """Every parameter with its standard error, a row each, where pandas is installed."""
        pandas = need("pandas", "tables", "a data frame")
        values = {} if self.model is None else self.model.to_arrays()
        errors = {} if self.errors is None else self.errors.to_arrays()
        values = multiply_out_scores(values, errors)
        columns: dict[str, list[Any]] = {
            "block": [],
            "place": [],
            "value": [],
            "standard error": [],
        }
        for name, array in values.items():
            error = errors.get(name)
            columns["block"] += [name] * array.size
            columns["place"] += list(np.ndindex(array.shape))
            columns["value"] += array.ravel().tolist()
            if error is None or error.shape != array.shape:
                columns["standard error"] += [None] * array.size
            else:
                columns["standard error"] += error.ravel().tolist()
        return pandas.DataFrame(columns)

    def save(self, folder: str | Path) -> Path:
        """Writes the run to a folder: model and errors as safetensors, the rest as JSON."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in (("model", self.model), ("errors", self.errors)):
            path = folder / f"{name}.safetensors"
            if part is not None:
                save_model(part, path)
            else:
                path.unlink(missing_ok=True)  # of an earlier run in the same folder
        with replacing(folder / RUN_FILE) as temporary:
            temporary.write_text(json.dumps(self.to_json(), indent=2) + "\n")
        return folder

    def to_json(self) -> dict[str, Any]:
        """Everything but the parameters, in plain types."""
        verdict = None if self.verdict is None else plain(vars(self.verdict))
        return {
            "format": RUN_FORMAT,
            "outcome": self.outcome.name,
            "advice": self.outcome.value,
            "reason": self.reason,
            "ledger": {
                "paid": self.ledger.paid,
                "learning": self.ledger.learning,
                "verifying": self.ledger.verifying,
                "floor": self.ledger.floor,
                "replayed": self.ledger.replayed,
                "repeated": self.ledger.repeated,
                "requests": self.ledger.requests,
                "prompt_tokens": self.ledger.prompt_tokens,
                "by_purpose": dict(self.ledger.by_purpose),
            },
            "verdict": verdict,
            "notes": list(self.notes),
            "details": plain(dict(self.details)),
            "run": plain(dict(self.run)),
            "diagnostics": plain(vars(self.diagnostics)),
            "trace": None if self.trace is None else plain(vars(self.trace)),
        }


def plain(value: Any) -> Any:
    """Arrays, mappings and records as what JSON knows; text is cleaned."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {clean(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, Counterexample):
        return plain(vars(value))
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no infinity
    return value


@dataclass(frozen=True)
class _HowRun:
    """What `Recovery.run` holds, as far as reports read it."""

    version: str = ""
    box: str = ""
    width: int | None = None
    domain: Mapping[str, float] = field(default_factory=dict)
    learner: str = ""
    seed: int = 0
    budget: int | None = None
    journal: str | None = None
    seconds: float = 0.0
    precision: Mapping[str, bool | float | str | None] | None = None
    command: str = ""


@dataclass(frozen=True)
class _SavedRun:
    """recovery.json: a record of which every part is of its type."""

    format: str
    outcome: str
    reason: str
    ledger: Ledger
    verdict: Verdict | None
    notes: tuple[str, ...]
    details: Mapping[str, Any]
    run: Mapping[str, Any] = field(default_factory=dict)
    trace: Trace | None = None  # runs saved by earlier versions have none
    diagnostics: RunDiagnostics = field(default_factory=RunDiagnostics)


def load(path: str | Path, *, template: Any = None) -> Any:
    """Loads what was saved: the `Recovery` in a run's folder, the model in a model file.

    Args:
        path: The folder that `Recovery.save` or `--out` wrote, or a `.safetensors` file.
        template: The torch module that a `TemplateModel` was recovered from, of which files hold
            the weights alone; without it the model cannot be called.

    Returns:
        The `Recovery`, or the model.

    Raises:
        FileFormatError: Nothing that Keyhole wrote, or damaged.

    Example:
        >>> import tempfile
        >>> import numpy as np, keyhole
        >>> from keyhole.models.random import attention
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = keyhole.recover(attention(np.random.default_rng(0), 4)).save(folder)
        ...     load(saved).outcome
        Outcome.RECOVERED
    """
    path = Path(path)
    if not path.is_dir():
        return load_model(path, template)
    try:
        record = parse_json((path / RUN_FILE).read_text("utf-8"))
        saved = read_record(_SavedRun, record, "the run")
        if saved.format != RUN_FORMAT or saved.outcome not in Outcome.__members__:
            raise WrongType(f"format {saved.format!r}, outcome {saved.outcome!r}")
        read_record(_HowRun, dict(saved.run), "run")
        verdict = saved.verdict and _with_arrays(saved.verdict)
        parts = {
            name: _saved_model(path / f"{name}.safetensors", template)
            for name in ("model", "errors")
        }
        if parts["errors"] is not None and type(parts["errors"]) is not type(parts["model"]):
            raise WrongType("errors.safetensors does not belong to model.safetensors")
        return Recovery(
            outcome=Outcome[saved.outcome],
            verdict=verdict,
            ledger=saved.ledger,
            reason=saved.reason,
            notes=saved.notes,
            details=saved.details,
            run=saved.run,
            trace=saved.trace,
            diagnostics=saved.diagnostics,
            **parts,
        )
    except UNREADABLE as error:
        raise FileFormatError(
            f"{path} is not the folder of a keyhole run ({RUN_FILE}: {error})"
        ) from error


def _saved_model(path: Path, template: Any) -> Any:
    return load_model(path, template) if path.exists() else None


def _with_arrays(verdict: Verdict) -> Verdict:
    """The verdict, its counterexample as arrays again."""
    example = verdict.counterexample
    if example is None:
        return verdict
    tokens = np.array(example.input, dtype=np.float64)
    if tokens.ndim != 2 or not tokens.size:
        raise WrongType(f"the counterexample has shape {tokens.shape}, not (length, width)")
    answers = (example.box_answer, example.model_answer)
    box, model = (None if a is None else np.array(a, dtype=np.float64) for a in answers)
    return replace(verdict, counterexample=Counterexample(tokens, box, model, example.reason))
