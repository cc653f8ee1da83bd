"""One cell of an audit: a protection, a number of queries, a repetition; and how to run it.

A cell depends on the model, the plan and its own name alone: its seeds are made from these, so that
it comes out the same in any order, in any process and on any machine.
"""

import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import numpy as np

from keyhole.arrays import TINY, Array, random_stream, real_number
from keyhole.audit.protections import DEFAULT, Protection, change
from keyhole.errors import InvalidArgument, KeyholeError
from keyhole.learners.base import Learner
from keyhole.learners.single_head import SingleHead
from keyhole.models.attention import Attention
from keyhole.models.canonical import distance
from keyhole.oracles.base import Domain, Spec
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.queries import QueryBatch
from keyhole.recovery import recover
from keyhole.results import Recovery


@dataclass(frozen=True)
class Cell:
    protection: str
    bounded: bool  # whether tokens are limited to the plan's max_norm
    multiple: int  # queries in units of the unknowns
    repeat: int

    @property
    def key(self) -> str:
        domain = "bounded" if self.bounded else "unbounded"
        return f"{domain}/{self.protection}/{self.multiple}/{self.repeat}"


@dataclass(frozen=True)
class Plan:
    """What to try. `max_norm=None` stands for the model's natural length."""

    protections: tuple[str, ...] = DEFAULT
    multiples: tuple[int, ...] = (1, 4, 16)
    repeats: int = 1
    max_norm: float | None = None
    unbounded: bool = True  # show tokens of any size as well
    seed: int = 0

    def __post_init__(self) -> None:
        for text in self.protections:
            Protection.parse(text)
        if not self.protections or not self.multiples:
            raise InvalidArgument("an audit needs at least one protection and one multiple")
        if min(self.multiples) < 1 or self.repeats < 1:
            raise InvalidArgument("multiples and repeats must be at least 1")
        if self.max_norm is not None:
            real_number("max_norm", self.max_norm, 0.0)

    def cells(self, model: Attention) -> tuple[list[Cell], list[str]]:
        """The cells that make sense for a model, the longest first, and notes on what does not."""
        notes, names = [], list(self.protections)
        if "label" in names and model.outputs is not None:
            names.remove("label")
            notes.append("label: left out, the model answers with a vector.")
        elif "label" in names and _labels() is None:
            names.remove("label")
            notes.append("label: left out, this installation has no learner for labels.")
        # labels: one multiple of the unknowns buys one bit; fewer are not worth showing
        fewest_bits = 4
        most_bits = 40
        return [
            Cell(name, bounded, multiple, repeat)
            for multiple in sorted(self.multiples, reverse=True)
            for name in names
            if name != "label" or fewest_bits <= multiple <= most_bits
            for bounded in ((True, False) if self.unbounded else (True,))
            for repeat in range(self.repeats)
        ], notes

    def to_json(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


def _labels() -> Any:
    """The label-only learner, where this installation has one."""
    try:
        return import_module("keyhole.learners.label_only").LabelOnly
    except ImportError:
        return None


def run_cell(arrays: Mapping[str, Array], plan: Plan, cell: Cell) -> dict[str, Any]:
    """Attacks the model behind a protection; the result in plain types."""
    model, protection = Attention.from_arrays(arrays), Protection.parse(cell.protection)
    seed = zlib.crc32(f"{plan.seed}/{cell.key}".encode())
    norm = plan.max_norm or model.natural_length()
    tokens = honest_tokens(model, norm, plan.seed)
    honest = np.asarray(model(tokens), dtype=np.float64)
    scale = float(np.sqrt(np.mean(honest**2)))
    domain = Domain(max_norm=norm if cell.bounded else None)
    spec = Spec(model.width, model.outputs, domain, protection.precision(scale), cell.key)
    if protection.kind == "label":
        spec = Spec(model.width, None, domain, None, cell.key)
    box = protection.wrap(FunctionOracle(model, spec), scale, seed)
    treated = protection.wrap(FunctionOracle(model, spec), scale, seed + 1)
    cost = change(honest, treated.ask(QueryBatch.of(tokens, "honest")))
    found, queries, outcome, reason = attack(box, model, cell, seed)
    result = {
        **asdict(cell),
        "key": cell.key,
        "queries": queries,
        "outcome": outcome,
        "reason": reason,
        "parameter_error": None,
        "function_error": None,
        "cost": cost,
    }
    if found is not None:
        result["parameter_error"] = finite(distance(found, model))
        copy = getattr(found, "model", found)  # a labelled model wraps the layer it found
        answers = np.asarray(copy(tokens), dtype=np.float64)
        if protection.kind == "label":  # the scale is not in the labels: it is given away here
            answers = answers * float(np.sum(answers * honest) / max(np.sum(answers**2), TINY))
        gap = float(np.sqrt(np.mean((answers - honest) ** 2)))
        result["function_error"] = finite(gap / scale if scale > 0 else gap)
    return result


def finite(number: float) -> float | None:
    return float(number) if np.isfinite(number) else None


def honest_tokens(model: Attention, norm: float, seed: int) -> Array:
    """Random sequences that stand for honest use, the same for every cell of a plan."""
    rng = random_stream(seed, "audit")
    sequences, length = 512, 8
    tokens = rng.standard_normal((sequences, length, model.width)) / np.sqrt(model.width)
    lengths = np.linalg.norm(tokens, axis=2, keepdims=True)
    size = min(norm, model.natural_length())
    return np.asarray(tokens * size * np.minimum(1.0, 1.0 / np.maximum(lengths, TINY)))


def learner_for(model: Attention, protection: Protection, multiple: int) -> Learner:
    if protection.kind == "label":
        learner: Learner = _labels()(bits=multiple)
        return learner
    if len(model.heads) == 1:
        return SingleHead()
    try:
        several: Learner = import_module("keyhole.learners.multi_head.learner").MultiHead(
            heads=len(model.heads)
        )
    except ImportError as error:
        raise InvalidArgument(
            f"the model has {len(model.heads)} heads, and this version audits one head only"
        ) from error
    return several


def attack(box: Any, model: Attention, cell: Cell, seed: int) -> tuple[Any, int, str, str]:
    """What the queries of a cell buy: model, queries asked, outcome, reason.

    A learner that needs fewer queries than it may ask is sent again with other queries, and
    the models are averaged: rounding errors differ from run to run.
    """
    learner = learner_for(model, Protection.parse(cell.protection), cell.multiple)
    labels = cell.protection == "label"
    unit = max(learner.expected_queries(box.spec) or 0, unknowns(model))
    overhead = 40  # queries of an attack beside the unknowns: precision, offset, verification
    fresh = 12  # an attacker needs no more, and the audit knows the truth
    budget = None if labels else cell.multiple * unit + model.width + overhead
    runs: list[Recovery] = []
    spent, outcome, reason = 0, "", ""
    precise_enough = 1e-9  # relative standard error below which nobody would pay for another run
    while True:
        left = None if budget is None else budget - spent
        try:
            run = recover(
                box, learner, budget=left, seed=seed + len(runs), fresh=fresh, throw=False
            )
        except (KeyholeError, ArithmeticError, np.linalg.LinAlgError) as error:
            if not outcome:
                outcome, reason = type(error).__name__, str(error)
            break
        spent += run.ledger.paid
        if not outcome:
            outcome, reason = run.outcome.name, run.reason
        if run.model is None:
            break
        runs.append(run)
        enough = run.errors is None or loosest(run) < precise_enough or len(model.heads) > 1
        if enough or budget is None or spent + run.ledger.paid > budget:
            break
    return (averaged(runs) if runs else None), spent, outcome, reason


def loosest(run: Recovery) -> float:
    """Largest relative standard error of a parameter block."""
    errors, worst = run.errors.to_arrays(), 0.0
    for name, block in run.model.to_arrays().items():
        size = float(np.linalg.norm(block))
        if size > 0 and name in errors:
            worst = max(worst, float(np.linalg.norm(errors[name])) / size)
    return worst


def unknowns(model: Attention) -> int:
    """Parameters per number in an answer."""
    total = sum(array.size for array in model.to_arrays().values() if array.any())
    return -(-total // (model.outputs or 1))


def averaged(runs: list[Recovery]) -> Any:
    """Block by block, weighted by the standard errors that the runs themselves report."""
    if len(runs) == 1:
        return runs[0].model
    names = runs[0].model.to_arrays().keys()
    sums: dict[str, Array] = {}
    for name in names:
        blocks = [run.model.to_arrays()[name] for run in runs]
        errors = [float(np.linalg.norm(run.errors.to_arrays()[name])) for run in runs]
        if any(error == 0.0 for error in errors):
            errors = [1.0] * len(runs)
        weights = np.array([min(errors) / error for error in errors]) ** 2
        sums[name] = np.asarray(
            sum(w * b for w, b in zip(weights, blocks, strict=True)) / weights.sum()
        )
    return Attention.from_arrays(sums)
