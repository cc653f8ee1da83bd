"""The tables of the report: errors by block, queries by purpose, what is known of the box."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import Counterexample
from keyhole.models.mlp import Mlp, outer_table
from keyhole.report.blocks import Block
from keyhole.results import Recovery, Verdict

LISTED = 4  # numbers of an answer that are written out


@dataclass(frozen=True)
class ErrorRow:
    block: str
    entries: str
    size: str
    error: str
    relative: str
    digits: float | None  # decimal digits known
    share: float  # of the bar


@dataclass(frozen=True)
class PurposeRow:
    purpose: str
    count: str
    percent: str
    share: float
    worst: str


def error_rows(blocks: list[Block]) -> list[ErrorRow]:
    rows = []
    full_bar = 16.0  # decimal digits of float64: a full bar
    for block in blocks:
        if block.errors is None:
            continue
        size = block.values.norm() / math.sqrt(block.entries)
        error = block.errors.norm() / math.sqrt(block.entries)
        digits = -math.log10(error / size) if size > 0 and error > 0 else None
        rows.append(
            ErrorRow(
                f"{block.part} {block.name}".strip(),
                f"{block.entries:,}",
                f"{size:.3g}",
                brief_number(error),
                brief_number(error / size) if size > 0 else "–",
                None if digits is None else max(0.0, digits),
                0.0 if digits is None else min(1.0, max(0.0, digits / full_bar)),
            )
        )
    return rows


def sequence_size(tokens: Array) -> str:
    """Of one query, in words; numbers of tokens have no width."""
    count = "1 token" if len(tokens) == 1 else f"{len(tokens):,} tokens"
    return count if tokens.shape[1] == 1 else f"{count} of width {tokens.shape[1]:,}"


def answers_apart(found: Counterexample) -> tuple[str, str]:
    """What the box and the model answer, written out where they differ most.

    Args:
        found: The query on which they differ.

    Returns:
        The box's answer and the model's, in a line each.
    """
    box, model = _numbers(found.box_answer), _numbers(found.model_answer)
    if box is None or model is None or box.size != model.size:
        return _line(found.box_answer, box), _line(found.model_answer, model)
    gaps = np.nan_to_num(np.abs(box - model), nan=np.inf)
    most = np.sort(np.argsort(-gaps, kind="stable")[:LISTED])
    where = f" … (entries {', '.join(map(str, most))} of {box.size:,})" if box.size > LISTED else ""
    return _written(box[most]) + where, _written(model[most]) + where


def _numbers(answer: Any) -> Array | None:
    try:
        return None if answer is None else np.atleast_1d(np.asarray(answer, dtype=float)).ravel()
    except (TypeError, ValueError):
        return None


def _line(answer: Any, numbers: Array | None) -> str:
    if numbers is None:
        return "none" if answer is None else str(answer)
    more = f" … ({numbers.size:,} numbers)" if numbers.size > LISTED else ""
    return _written(numbers[:LISTED]) + more


def _written(numbers: Array) -> str:
    return "  ".join(f"{x:.12g}" for x in numbers)


def worst_error(blocks: list[Block]) -> float | None:
    found = [error for block in blocks if (error := relative_error(block)) is not None]
    return max(found, default=None)


def relative_error(block: Block) -> float | None:
    if block.errors is None:
        return None
    size = block.values.norm()
    return block.errors.norm() / size if size > 0 else None


def purposes(recovery: Recovery) -> list[PurposeRow]:
    counts, trace = recovery.ledger.by_purpose, recovery.trace
    largest, total = max(counts.values(), default=1), max(1, recovery.ledger.paid)
    rows = []
    for purpose, count in counts.items():
        seen = []
        if trace is not None:
            pairs = zip(trace.purpose, trace.deviation, strict=True)
            seen = [deviation for name, deviation in pairs if name == purpose]
        worst = "–" if not seen else brief_number(max(seen))
        rows.append(
            PurposeRow(purpose, f"{count:,}", f"{count / total:.1%}", count / largest, worst)
        )
    return rows


def floor(recovery: Recovery) -> dict[str, Any] | None:
    """Paid against the floor, as two bars on one scale."""
    ledger = recovery.ledger
    if not ledger.floor or not ledger.paid:
        return None
    top = max(ledger.floor, ledger.paid)
    return {
        "paid": f"{ledger.paid:,}",
        "floor": f"{ledger.floor:,.0f}",
        "learning": f"{ledger.learning:,}",
        "verifying": f"{ledger.verifying:,}",
        "ratio": f"{ledger.learning / ledger.floor:.3f}",
        "paid_share": ledger.paid / top,
        "floor_share": ledger.floor / top,
        "replayed": f"{ledger.replayed:,}" if ledger.replayed else "",
    }


def box_rows(recovery: Recovery) -> list[tuple[str, str]]:
    """What was stated or found out about the box."""
    run, rows = recovery.run, []
    if run.get("box"):
        rows.append(("Name", str(run["box"])))
    if run.get("width"):
        rows.append(("Width of a token", f"{run['width']:,}"))
    precision = run.get("precision")
    kind = recovery.details.get("precision")
    if isinstance(kind, str):
        rows.append(("Arithmetic", kind))
    if isinstance(precision, Mapping):
        names = {
            "relative": "Relative rounding of an answer",
            "additive": "Noise (standard deviation)",
            "step": "Answers are multiples of",
            "tolerance": "Answers may be off by",
        }
        for key, name in names.items():
            if isinstance(precision.get(key), float) and precision[key]:
                rows.append((name, f"{precision[key]:.3g}"))
    for key, limit in (run.get("domain") or {}).items():
        rows.append((str(key).replace("_", " ").capitalize(), f"{limit:g}"))
    if recovery.ledger.repeated:
        rows.append(("Sent again after failures", f"{recovery.ledger.repeated:,} queries"))
    return rows if recovery.verdict is None else [*rows, *deviation_rows(recovery.verdict)]


def deviation_rows(verdict: Verdict) -> list[tuple[str, str]]:
    """How far apart the answers of box and model were, and might have been."""
    if not (math.isfinite(verdict.worst) and verdict.queries):
        return []
    rows = [
        ("Largest deviation seen", f"{verdict.worst:.2g} of what is allowed"),
        ("Allowed deviation", f"{verdict.tolerance:.2g} of the answers' size"),
        ("The box's own precision", f"{verdict.precision:.2g} of the answers' size"),
    ]
    for name, change in verdict.noticed.items():
        seen = f"{change:.2g}, relative" if change <= 1.0 else "not seen by these answers"
        rows.append((f"Smallest change noticed of {name}", seen))
    return rows


def detail_rows(recovery: Recovery) -> list[tuple[str, str]]:
    """Numbers that the learner left for the reader; long lists are drawn elsewhere."""
    rows = []
    for name, value in recovery.details.items():
        if isinstance(value, float):
            rows.append((name.replace("_", " "), f"{value:.6g}"))
        elif isinstance(value, (str, int, bool)):
            rows.append((name.replace("_", " "), str(value)))
    if recovery.diagnostics.closest_decision:
        rows.append(("decisions", f"{recovery.diagnostics.decisions:,}"))
        rows.append(("closest decision", recovery.diagnostics.closest_decision))
    return rows


@dataclass(frozen=True)
class NeuronRow:
    neuron: int
    norm: str  # of the row that is the argument of the activation
    bias: str
    distance: str  # of the plane where the argument is zero
    outer: str  # norm of the outer weights
    aligned: str  # largest |cosine| to another neuron's row


def neuron_rows(model: Any, most: int = 12) -> list[NeuronRow]:
    """The neurons of a network that act most, those with the largest product of norms first."""
    if not isinstance(model, Mlp):
        return []
    rows, bias = (model.inner, model.inner_bias)
    if model.gate is not None and model.gate_bias is not None:
        rows, bias = model.gate, model.gate_bias
    norms, outer = np.linalg.norm(rows, axis=1), np.linalg.norm(outer_table(model), axis=0)
    unit = rows / np.where(norms > 0, norms, 1.0)[:, None]
    shown = np.argsort(-norms * outer, kind="stable")[:most]
    cosines = np.abs(unit[shown] @ unit.T)
    cosines[np.arange(len(shown)), shown] = 0.0
    return [
        NeuronRow(
            int(j),
            f"{norms[j]:.3g}",
            f"{bias[j]:.3g}",
            f"{abs(bias[j]) / norms[j]:.3g}" if norms[j] > 0 else "–",
            f"{outer[j]:.3g}",
            f"{cosine.max(initial=0.0):.2f}",
        )
        for j, cosine in zip(shown, cosines, strict=True)
    ]


def brief_number(number: float) -> str:
    return "0" if number == 0 else f"{number:.1e}"
