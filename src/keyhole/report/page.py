"""What the report says, in plain types. The template only lays it out."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from keyhole.models.base import ORIENTATION
from keyhole.report.blocks import Block, Matrix, blocks_of, reduced
from keyhole.report.charts import trace_chart
from keyhole.report.pictures import PARTS_SHOWN, SIDE, parts, picture
from keyhole.report.rows import (
    answers_apart,
    box_rows,
    detail_rows,
    error_rows,
    floor,
    neuron_rows,
    purposes,
    sequence_size,
    worst_error,
)
from keyhole.results import Outcome, Recovery

CONSTRUCTOR = re.compile(r"\b([A-Z]\w*)\(")  # a learner in the text of another
FAIR = ("UNVERIFIED", "ILL_CONDITIONED", "UNSUPPORTED", "INTERRUPTED", "BUDGET_EXHAUSTED")
TONES = {Outcome.RECOVERED: "good", **{Outcome[name]: "fair" for name in FAIR}}
HEADLINES = {
    Outcome.RECOVERED: "The box is {model}.",
    Outcome.UNVERIFIED: "A model was fitted: {model}. It was not compared with fresh answers.",
    Outcome.REJECTED: "The box is something else.",
    Outcome.NOT_IDENTIFIABLE: "The parameters cannot be known.",
    Outcome.BUDGET_EXHAUSTED: "The budget ended before the parameters were known.",
    Outcome.ILL_CONDITIONED: "The answers determine some parameters too weakly.",
    Outcome.UNSUPPORTED: "The box was recognised; there is no learner for it.",
    Outcome.ORACLE_FAILED: "The box failed to answer.",
    Outcome.INTERRUPTED: "The run was stopped.",
}


def page(recovery: Recovery) -> dict[str, Any]:
    """Everything the template needs."""
    blocks = [] if recovery.model is None else blocks_of(recovery.model, recovery.errors)
    name = described(recovery.model) if recovery.model is not None else ""
    errors = error_rows(blocks)
    return {
        "recovery": recovery,
        "rejected": recovery.outcome is Outcome.REJECTED,
        "tone": TONES.get(recovery.outcome, "bad"),
        "kind": "recovery report",
        "badge": recovery.outcome.name.replace("_", " ").lower(),
        "title": title(recovery, name),
        "headline": HEADLINES[recovery.outcome].format(model=name),
        "model": name,
        "lead": lead(recovery),
        "facts": facts(recovery, blocks),
        "parts": parts(blocks),
        "orientation": ORIENTATION if any("score" in block.name for block in blocks) else "",
        "hidden_parts": max(0, len({b.part for b in blocks}) - PARTS_SHOWN),
        "neurons": neuron_rows(recovery.model),
        "errors": errors,
        "purposes": purposes(recovery),
        "floor": floor(recovery),
        "trace": None if recovery.trace is None else trace_chart(recovery.trace, recovery.run),
        "box": box_rows(recovery),
        "example": example(recovery),
        "repeat": repeat(recovery),
        "details": detail_rows(recovery),
    }


def described(model: Any) -> str:
    """one attention head of width 32 that answers with one number"""
    outputs = getattr(model, "outputs", None)
    answer = "one number" if outputs is None else f"{outputs:,} numbers"
    kind = type(model).__name__
    heads = getattr(model, "heads", None)
    if heads:
        count = "one attention head" if len(heads) == 1 else f"{len(heads)} attention heads"
        answer = "a label" if kind == "LabelledAttention" else answer
        return f"{count} of width {model.width:,} answering with {answer}"
    if kind == "TransformerModel":
        neurons = model.network.neurons
        residual = " with a residual connection" if model.residual else ""
        return (
            f"a Transformer layer of width {model.width:,} with {neurons:,} hidden units{residual}"
        )
    if kind == "Mlp":
        gate = "gated " if model.gated else ""
        return (
            f"a network of width {model.width:,} with {model.neurons:,} {gate}hidden units "
            f"({model.activation}) answering with {answer}"
        )
    if kind == "ReluNetwork":
        return f"a ReLU network of width {model.width:,} with {model.neurons:,} hidden units"
    if kind == "OutputLayer":
        known = "a linear map" if model.level == "space" else "a rotation"
        return (
            f"a language model of {model.tokens:,} tokens whose hidden state has {model.width:,} "
            f"numbers; its output matrix is known up to {known}"
        )
    if kind == "Block":
        return f"a Transformer block: {str(model).removeprefix('Block(').removesuffix(')')}"
    if kind == "Stack":
        return f"a stack of blocks: {str(model).removeprefix('Stack(').removesuffix(')')}"
    return str(model)


def title(recovery: Recovery, model: str) -> str:
    """Of the browser's window."""
    outcome = recovery.outcome.name.replace("_", " ").capitalize()
    return f"{outcome}: {model}" if model else outcome


def lead(recovery: Recovery) -> list[str]:
    """What to conclude, then what to do."""
    sentences = []
    if recovery.reason:
        sentences.append(sentence(recovery.reason))
    if recovery.verdict is not None and recovery.verdict.agrees:
        sentences.append(recovery.verdict.bound)
    if recovery.outcome is not Outcome.RECOVERED:
        sentences.append(recovery.outcome.value)
    return sentences


def sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."


def facts(recovery: Recovery, blocks: list[Block]) -> list[tuple[str, str, str]]:
    """The figures a reader wants first: name, number, what it is compared with."""
    ledger, rows = recovery.ledger, []
    if ledger.paid:
        rows.append(("Queries", f"{ledger.paid:,}", str(ledger)))
    elif isinstance(recovery.details.get("examples"), int):
        ratio = recovery.details.get("ratio")
        beside = f"{ratio:.3g} × the floor" if isinstance(ratio, float) else ""
        rows.append(("Examples", f"{recovery.details['examples']:,}", beside))
    worst = worst_error(blocks)
    if worst is not None and recovery.outcome is not Outcome.REJECTED:
        rows.append(("Relative error", f"{worst:.1e}", "standard error, worst block"))
    verdict = recovery.verdict
    if verdict is not None and verdict.queries:
        word = "agree" if verdict.agrees else "compared"
        beside = f"and {verdict.replayed:,} earlier answers" if verdict.replayed else ""
        rows.append(("Fresh queries", f"{verdict.queries:,} {word}", beside))
    return [*rows, *_noted_facts(recovery)]


def _noted_facts(recovery: Recovery) -> Iterator[tuple[str, str, str]]:
    """Those that a run has noted down, where it did."""
    details, seconds = recovery.details, recovery.run.get("seconds")
    if isinstance(details.get("precision"), str):
        yield "Box computes in", details["precision"], ""
    if "rank" in details and hasattr(recovery.model, "heads"):
        yield "Rank of the score", str(details["rank"]), ""
    if isinstance(details.get("money"), float):
        yield "Money", f"{details['money']:,.2g}", "at the price that was given"
    if isinstance(seconds, float):
        yield "Time", duration(seconds), "learning and verification"


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.2g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def example(recovery: Recovery) -> dict[str, Any] | None:
    """The query that shows the difference."""
    found = recovery.verdict.counterexample if recovery.verdict is not None else None
    if found is None:
        return None
    tokens = np.atleast_2d(np.asarray(found.input, dtype=np.float64))
    block = Block("", "counterexample", Matrix(None, tokens), None, False)
    box, model = answers_apart(found)
    return {
        "reason": sentence(found.reason) if found.reason else "",
        "tokens": sequence_size(tokens),
        "picture": picture(block, reduced(block, SIDE // 2, SIDE // 2)),
        "box": box,
        "model": model,
    }


def repeat(recovery: Recovery) -> dict[str, str]:
    """The command as typed, where there was one, and the call that does the same."""
    run = recovery.run
    if not run:
        return {}
    learner = str(run.get("learner") or "")
    arguments = [CONSTRUCTOR.sub(r"keyhole.\1(", learner)] if learner else []
    arguments += [
        f"{name}={run[name]!r}" for name in ("budget", "journal") if run.get(name) is not None
    ]
    arguments.append(f"seed={run.get('seed', 0)}")
    return {
        "command": str(run.get("command") or ""),
        "call": f"keyhole.recover(box, {', '.join(arguments)})" if learner else "",
        "version": str(run.get("version") or ""),
    }
