"""Whole models from a template: the architecture is given as a torch module, the weights are found.

Statement.  A box that computes what some torch module computes is recovered as a function: weights
            of the module with which it answers like the box, to the box's rounding.
Queries.    Random sequences of a few lengths: short tokens, which starts are made with, or
            ordinary ones where there are hidden layers; long ones; some that no fit sees. Four or
            five numbers per unknown at first, up to eight where fresh answers are not explained.
            More starts cost no query.
Algebra.    Least squares (`descent.py`) from many short starts (`search.py`).
Fails.      Where no start reaches rounding in the time given. Then the model is returned with the
            error it makes on fresh answers, as ill-conditioned; never is the template refuted, for
            fits of right templates stick too.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.linalg import svd

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float, whole_number
from keyhole.errors import InvalidArgument, Unsupported
from keyhole.learners.base import Diagnostics, Hypothesis
from keyhole.learners.template.forward import Answered, Forward, Residuals, check_module
from keyhole.learners.template.search import EXPLAINED, Effort, Search, find_parts, search
from keyhole.learners.template.widening import Pair, find_dead, find_pairs
from keyhole.measurement.asker import Asker
from keyhole.models.template import TemplateModel, digest_of
from keyhole.oracles.base import Oracle, Spec

SHORT = ((0.5, 2.5), (1.0, 1.0), (2.0, 0.5))  # sizes of tokens; numbers asked per unknown
ORDINARY = ((1.0, 5.0), (2.0, 0.5))  # where there are hidden layers, which short tokens hide
LENGTHS = (1, 2, 3, 5)
SINGLE, PLAIN = 3.0, 2.0  # single tokens over sequences of another length: with hidden layers, none
MOST = 8.0  # numbers asked per unknown, at most
LONGEST = 16  # length up to which it is found out what the template takes


@dataclass(frozen=True, eq=False, kw_only=True)
class TemplateDiagnostics(Diagnostics):
    """How the fit ended. level: root mean square residual of the fitted answers over their
    rounding. held_out: largest difference of a fresh answer over the spread of the answers.
    undetermined: directions of the weights that no answer shows (symmetries); by_tensor: how many
    of them lie in each tensor, shares of directions that several tensors have part in. surplus:
    parts of the template that are zero in the model, neurons or heads by their layer."""

    weights: int
    starts: int
    rounds: int
    level: float
    held_out: float
    undetermined: int
    by_tensor: dict[str, float]
    surplus: dict[str, int]


@dataclass(frozen=True, repr=False)
class FromTemplate:
    """Learner for whole models whose architecture is given as a torch module.

    Args:
        module: Takes (batch, length, width) and answers (batch,) or (batch, outputs). Its own
            weights are ignored, and it is not changed.
        starts: Short fits in a round; the best of a round is carried on. More find the right place
            more often, and take longer.
        seconds: Of computing (CPU time of the process) after which the best fit so far is returned.
        widths: "at most" where the template may have more neurons between its `nn.Linear` layers,
            or more heads in its `nn.MultiheadAttention`, than the box: those that are not needed
            are zero in the model, and `details["surplus"]` says how many there are.

    Example:
        >>> import torch
        >>> class Mean(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.out = torch.nn.Linear(3, 1)
        ...     def forward(self, tokens):
        ...         return torch.tanh(self.out(tokens.mean(1)))
        >>> import keyhole
        >>> keyhole.recover(Mean().double(), FromTemplate(Mean())).outcome
        Outcome.RECOVERED
    """

    module: object = field(compare=False)
    starts: int = 8
    seconds: float = 600.0
    widths: str = "exact"

    def __post_init__(self) -> None:
        check_module(self.module)
        whole_number("starts", self.starts, 1)
        if self.widths not in ("exact", "at most"):
            raise InvalidArgument(f"widths must be 'exact' or 'at most', got {self.widths!r}")
        if not self.seconds > 0:
            raise InvalidArgument(f"seconds must be positive, got {self.seconds!r}")

    def __repr__(self) -> str:
        """The template alone: a run that is continued with more starts or seconds is the same."""
        return f"FromTemplate({type(self.module).__name__} {digest_of(self.module)[:12]})"

    def expected_queries(self, spec: Spec) -> int | None:
        forward = Forward.of(self.module)
        lengths = find_lengths(forward, spec)
        sizes = ORDINARY if find_pairs(forward, spec.width, lengths[0]) else SHORT
        numbers = sum(rows for _, rows in sizes) * forward.unknowns
        rounded_up = len(lengths) * len(sizes)
        return int(numbers / count_outputs(forward, spec.width, lengths[0])) + rounded_up

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        domain = oracle.spec.domain
        if domain.vocabulary is not None or domain.tokens is not None:
            raise Unsupported(
                "a template is fitted to answers to tokens of all directions and sizes; this box "
                "takes the tokens of a vocabulary only"
            )
        until = time.process_time() + self.seconds
        forward = Forward.of(self.module)
        lengths = find_lengths(forward, oracle.spec)
        ask = Asker(oracle, rounding=True)
        pairs = find_pairs(forward, ask.width, lengths[0])
        sizes = ORDINARY if pairs else SHORT
        box = _Answers(ask, forward, lengths, rng, SINGLE if pairs else PLAIN)
        oracle.expect(self.expected_queries(oracle.spec))
        short, *others = (box.ask(size, rows) for size, rows in sizes)
        data = [*short, *(one for part in others for one in part)]
        fresh = box.ask_fresh()
        at_most = self.widths == "at most"

        def watch(loss: float) -> None:
            oracle.note(f"answers explained to {np.sqrt(loss):.1e} roundings")

        effort = Effort(until, starts=self.starts, at_most=at_most, watch=watch)
        starts = rng.spawn(1)[0]  # how many are drawn depends on the time, queries must not
        best = search(forward, pairs, box.weigh(short), box.weigh(data), effort, starts)
        while best.explained and not box.explains(best, fresh):
            if box.asked >= MOST * forward.unknowns:
                break
            data, fresh = [*data, *fresh, *box.ask(1.0, 1.0)], box.ask_fresh()
            best = search(
                forward, pairs, box.weigh(data), box.weigh(data), effort, starts, best.weights
            )
        return describe(
            self.module, forward, box, best, data, fresh, count_dead(forward, pairs, best)
        )


@dataclass(eq=False)
class _Answers:
    """Asks random sequences of the lengths that box and template take, so many times as many
    single tokens as sequences of another length, and counts the numbers."""

    box: Asker
    forward: Forward
    lengths: tuple[int, ...]
    rng: np.random.Generator
    single: float
    asked: int = 0

    def ask(self, size: float, rows: float) -> list[Answered]:
        """Sequences with so many numbers per unknown in their answers."""
        outputs = count_outputs(self.forward, self.box.width, self.lengths[0])
        shares = np.array([self.single if length == 1 else 1.0 for length in self.lengths])
        each = rows * self.forward.unknowns / outputs * shares / shares.sum()
        counts = np.ceil(each).astype(int)
        return [
            self._ask(size, count, length, "template")
            for count, length in zip(counts.tolist(), self.lengths, strict=True)
        ]

    def ask_fresh(self) -> list[Answered]:
        """A few sequences of other sizes, for no fit to see."""
        return [self._ask(1.5, 6, length, "held out") for length in self.lengths]

    def _ask(self, size: float, count: int, length: int, purpose: str) -> Answered:
        tokens = size * self.rng.standard_normal((count, length, self.box.width))
        tokens = self.box.representable(self.box.oracle.spec.domain.drawn_in(tokens))
        answers = self.box(tokens, purpose)
        wanted = count_outputs(self.forward, self.box.width, length)
        if answers.shape[1] != wanted:
            raise InvalidArgument(
                f"the template answers with {wanted} numbers, the box with {answers.shape[1]}: "
                "change the last layer or the pooling of the template"
            )
        self.asked += answers.size
        return Answered(tokens, answers, np.ones_like(answers))

    def weigh(self, data: Sequence[Answered]) -> list[Answered]:
        """The same with the standard errors of the answers, as their noise is known by now."""
        squares = np.concatenate([np.ravel(one.answers) for one in data]) ** 2
        usual = max(float(np.sqrt(squares.mean())), TINY)
        noise = self.box.noise
        return [
            Answered(one.tokens, one.answers, noise.sigma(np.maximum(np.abs(one.answers), usual)))
            for one in data
        ]

    def explains(self, best: Search, fresh: Sequence[Answered]) -> bool:
        residual = Residuals(self.forward, self.weigh(fresh))(best.weights)
        return bool(np.mean(residual**2) <= EXPLAINED)


def find_lengths(forward: Forward, spec: Spec) -> tuple[int, ...]:
    """Lengths that are asked: those that the template computes, up to what the box accepts; the
    longest that the template takes among them, where it has one."""
    width, most = spec.width, spec.domain.max_length or LONGEST
    weights, possible, reason = forward.weights, [], ""
    for length in range(1, min(most, LONGEST) + 1):
        try:
            answers = forward.predict(weights, np.zeros((2, length, width)))
        except Exception as error:  # the caller's own code, which may raise anything
            reason = f"{type(error).__name__}: {error}"
            continue
        if answers.ndim not in (1, 2) or len(answers) != 2:
            raise InvalidArgument(
                f"the template answers (2, {length}, {width}) with shape {answers.shape}, expected "
                "(2,) or (2, outputs): read one position or pool them, as the box does"
            )
        possible.append(length)
    if not possible:
        raise InvalidArgument(
            f"the template does not take tokens of width {width}, as the box does: {reason}"
        )
    chosen = {length for length in LENGTHS if length in possible}
    if possible[-1] < LONGEST:
        chosen.add(possible[-1])
    return tuple(sorted(chosen or possible))


def count_outputs(forward: Forward, width: int, length: int) -> int:
    """Numbers in an answer of the template."""
    return int(forward.predict(forward.weights, np.zeros((1, length, width))).size)


def count_dead(forward: Forward, pairs: Sequence[Pair], best: Search) -> dict[str, int]:
    """How many neurons or heads are zero, by the layer that makes them."""
    first = forward.split(np.arange(forward.unknowns))
    dead = find_dead(find_parts(forward, pairs), best.weights)
    names = [next(name for name, part in first.items() if one.incoming[0] in part) for one in dead]
    return {name: names.count(name) for name in dict.fromkeys(names)}


def find_errors(
    forward: Forward, best: Search, data: Sequence[Answered]
) -> tuple[Float[Array, " unknowns"], Float[Array, "undetermined unknowns"]]:
    """Standard errors of the weights across the directions that answers determine, and the
    directions that they do not: those that rounding hides in the Jacobian, or along which the
    weights could move by their own size within the noise."""
    tall = Residuals(forward, data).jacobian(best.weights)
    _, values, right = svd(tall, full_matrices=False, check_finite=False)
    usual = float(np.sqrt(np.mean(best.weights**2)))
    hidden = UNIT_ROUNDOFF * max(tall.shape) * float(values[0])
    noise = max(1.0, float(np.sqrt(best.loss)))
    determined = (values > hidden) & (values * max(usual, TINY) > noise)
    scaled = right[determined] / values[determined, None]
    return noise * np.sqrt(np.sum(scaled**2, axis=0)), right[~determined]


def describe(
    module: object,
    forward: Forward,
    box: _Answers,
    best: Search,
    data: Sequence[Answered],
    fresh: Sequence[Answered],
    surplus: dict[str, int],
) -> Hypothesis:
    """The model, what is known of its weights, and why it is no recovery where it is none."""
    width = box.box.width
    errors, hidden = find_errors(forward, best, box.weigh(data))
    arrays = {name: np.array(part) for name, part in forward.split(best.weights).items()}
    model = TemplateModel.of(module, width, arrays)
    doubts = model.rebuild(forward.split(errors))
    answers = np.concatenate([one.answers for one in fresh])
    spread = max(float(np.sqrt(np.mean(np.var(answers, axis=0)))), TINY)
    gaps = [
        np.abs(forward.predict(best.weights, one.tokens).reshape(one.answers.shape) - one.answers)
        for one in fresh
    ]
    held_out = float(max(gap.max() for gap in gaps)) / spread
    level = float(np.sqrt(best.loss))
    parts = forward.split(np.sum(hidden**2, axis=0))
    diagnostics = TemplateDiagnostics(
        weights=forward.unknowns,
        starts=best.starts,
        rounds=best.rounds,
        level=level,
        held_out=held_out,
        undetermined=len(hidden),
        by_tensor={name: round(float(part.sum()), 2) for name, part in parts.items()},
        surplus=surplus,
    )
    shortfall = ""
    if not (best.explained and box.explains(best, fresh)):
        shortfall = (
            f"the template was fitted to the answers up to {level:.1e} times their rounding, and "
            f"fresh answers differ by up to {held_out:.1e} of their spread: the model is there and "
            "predicts that well. That is nothing against the template, since fits of the right one "
            f"end like this too ({best.starts} starts). More seconds= or starts= with the same "
            "journal= ask nothing again; another seed starts elsewhere"
        )
    notes = (
        f"{len(hidden)} of {forward.unknowns} directions of the weights leave no trace in the "
        "answers (symmetries of the template): along them the weights are one choice of many.",
    )
    floor = (forward.unknowns - len(hidden)) / answers.shape[1]
    return Hypothesis(
        model,
        doubts,
        floor,
        notes,
        noise=box.box.noise,
        diagnostics=diagnostics,
        shortfall=shortfall,
        refutes=False,
    )
