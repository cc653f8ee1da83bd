"""Stacks of Transformer blocks, recovered exactly from the answers of the whole stack.

Statement.  A stack of pre-norm blocks, x + attention(norm(X)) and then + mlp(norm(x)) in each, is
            recovered with its number of blocks, heads, ranks, neurons and its activation.
Queries.    Huge tokens (shallow.py) make the stack one wide layer, whose heads (heads.py,
            scores.py) and neurons (neurons.py) are found all together; the next term of the series
            tells their blocks (order.py) and constants (biases.py); tokens with small streams the
            epsilons (epsilons.py); sequences of all sizes refine all of it (refinement.py).
Algebra.    One file per stage. Whether a position sees later ones is decided by which of the two
            stacks answers like the box. A norm at the end (final_norm.py) hides a part of every
            answer, which each stage does without; vectors that the box adds to its tokens
            (positions.py) are constants beside the anchor.
Fails.      Norms behind the residual: huge tokens then leave no layer that could be read, and the
            answer to one token is a network in a network. Such a box, and one that is none of
            these, ends as ill-conditioned with the stage that failed: never with a wrong model,
            since the refined stack must explain fresh answers to their rounding.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, whole_number
from keyhole.errors import NotIdentifiable
from keyhole.learners.base import (
    Diagnostics,
    Hypothesis,
    Inconclusive,
    Refuted,
    Result,
    run_strategies,
)
from keyhole.learners.block import (
    NotThisBlock,
    OtherShape,
    Unclear,
    find_kind,
    find_norm_place,
    fresh_sequences,
    open_block,
    sees_context,
    unknowns,
)
from keyhole.learners.stack.biases import find_offsets
from keyhole.learners.stack.epsilons import find_epsilons, rounded_size
from keyhole.learners.stack.final_norm import read_final_norm
from keyhole.learners.stack.heads import find_heads
from keyhole.learners.stack.neurons import NoNetwork, find_neurons
from keyhole.learners.stack.order import Order, find_order
from keyhole.learners.stack.positions import find_positions, has_positions
from keyhole.learners.stack.refinement import AnsweredSequences, RefinedStack, refine_stack
from keyhole.learners.stack.scores import WideHead, find_scores
from keyhole.learners.stack.shallow import Shallow, measure_doubt
from keyhole.measurement.asker import Asker
from keyhole.measurement.evidence import Estimate, Evidence
from keyhole.models.attention import Attention, Head
from keyhole.models.block import Block
from keyhole.models.mlp import Mlp, only, outer_table
from keyhole.models.norm import Norm, kept_plane
from keyhole.models.stack import Stack
from keyhole.oracles.base import Oracle, Spec


@dataclass(frozen=True, eq=False, kw_only=True)
class StackDiagnostics(Diagnostics):
    """What was found. `certificate`: distance of the order's entries from zero and one."""

    layers: int
    kind: str
    heads: tuple[int, ...]
    neurons: tuple[int, ...]
    causal: bool
    repeated: int  # times that one block is passed
    certificate: float
    misfit: float  # what is left of the answers, in units of their rounding


@dataclass(frozen=True)
class StackLearner:
    """Learner for stacks of pre-norm Transformer blocks, read at the last position.

    Args:
        layers: A promise, not needed: the number of blocks is found.

    Example:
        >>> StackLearner(layers=2)
        StackLearner(layers=2)
    """

    layers: int | None = None

    def __post_init__(self) -> None:
        if self.layers is not None:
            whole_number("layers", self.layers, 1)

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        if not oracle.spec.domain.unbounded:
            raise NotIdentifiable(
                "a stack is recovered with tokens of any size; this box limits its tokens"
            )
        return run_strategies([("pre-norm blocks", lambda: self._attempt(open_block(oracle), rng))])

    def expected_queries(self, spec: Spec) -> int | None:
        return None

    def _attempt(self, box: Asker, rng: np.random.Generator) -> Result:
        draws = 2  # sets of queries that are drawn before the stack is given up
        reason = ""
        for _ in range(draws):
            try:
                result = self._find(box, find_form(box, rng), rng)
            except NotThisBlock as refused:
                return Refuted(str(refused), stated=isinstance(refused, OtherShape))
            except NoNetwork as failed:
                return Inconclusive(str(failed))
            except (Unclear, np.linalg.LinAlgError, ArithmeticError) as failed:
                reason = str(failed)
                continue
            if not isinstance(result, Inconclusive):
                return result
            reason = result.reason
        return Inconclusive(reason)

    def _find(self, box: Asker, final: Norm | None, rng: np.random.Generator) -> Result:
        kind = find_kind(box, rng) if final is None else final.kind
        plane = kept_plane(box.width, kind)
        shallow = Shallow(box, plane, final, has_positions(box, rng))
        doubt = measure_doubt(shallow, rng)
        anchored = find_heads(shallow, doubt, rng)
        scores = find_scores(shallow, anchored, doubt, rng)
        union = find_neurons(shallow, anchored.maps.sum(axis=0), doubt, rng)
        places = find_positions(shallow, rng) if shallow.positions else None
        shift = None if places is None else places[scores.asked.context.shape[1]]
        order, alone = find_order(shallow, scores, union.network, rng, shift)
        layers = order.layers * order.repeated
        if self.layers is not None and self.layers != layers:
            wrong = f"the box has {layers} blocks, not {self.layers} as promised"
            return Refuted(wrong, stated=True)
        if shallow.positions:  # those of the order were not alone
            alone = shallow.ask_alone(shallow.points(rng, 4 * shallow.width), "biases")
        *offsets, first = find_offsets(shallow, scores.heads, order, union.asked + alone)
        start = assemble(scores.heads, order, offsets, plane, kind, final)
        start = start if places is None else start.replace(positions=places + first)
        start, small = find_epsilons(box, start, plane, 4, rng, order.repeated)
        start = decide_mask(box, start, rng)
        data = [AnsweredSequences(each.tokens, each.answers, each.enlarged) for each in small]
        data += ask_sequences(box, start, order.repeated, rng)
        refined = refine_stack(start, order.repeated, data, box.error, rng)
        if not refined.level < 8.0:
            return Inconclusive(
                f"the best stack of {layers} blocks leaves {refined.level:.1e} times the rounding "
                "of the answers"
            )
        return describe(refined, order, kind, box, rng)


def is_stack(oracle: Oracle, norm: str, rng: np.random.Generator) -> bool:
    """Whether a box with attention and norms that looks "pre" or "post" is a stack. Behind a norm
    at the end huge tokens show as they are. A pre-norm block alone reads the direction of a long
    token and forgets its length like epsilon / length^2; blocks before the last one add to the
    token, so that a stack forgets it like 1 / length."""
    box = open_block(oracle)
    tokens = rng.standard_normal((1, 3, box.width))
    box(tokens, "depth")  # tells the number format
    if norm == "post":
        return read_final_norm(box, rng, count=4) is not None
    lengths = box.error**-0.25 * np.array([1.0, 2.0])
    asked = np.tile(tokens, (2, 1, 1))
    asked[:, :-1] *= lengths[:, None, None]
    one, other = box(asked, "depth")
    return bool(np.abs(one - other).max() > np.sqrt(box.error) * np.abs(one).max())


def find_form(box: Asker, rng: np.random.Generator) -> Norm | None:
    """The norm at the end, if there is one; raises where the box is no stack of pre-norm blocks."""
    place, final = find_norm_place(box, rng), None
    if place == "post":
        final = read_final_norm(box, rng)
        if final is None:
            raise Unclear(
                "the answers stay bounded, and huge tokens show a network of their direction: "
                "norms behind the residual (a post-norm stack). They hide the size of the stream, "
                "and no stage here reads what is left"
            )
    if place == "none":
        raise Unclear("the answer beside the residual grows with the tokens: there are no norms")
    if not sees_context(box, rng):
        raise Unclear("tokens before the last one change nothing: there is no attention")
    return final


def assemble(
    heads: tuple[WideHead, ...],
    order: Order,
    offsets: list[Array],
    plane: Array,
    kind: str,
    final: Norm | None = None,
) -> Stack:
    """The stack from its parts; epsilons are a guess."""
    blocks = []
    for layer in range(order.layers):
        members = [
            Head((plane @ head.left, head.right @ plane.T), plane @ head.key_bias,
                 plane @ head.map.T / order.repeated)
            for head, own in zip(heads, order.heads, strict=True) if own == layer
        ]  # fmt: skip
        mine = only(order.network, order.neurons == layer)
        gate = None if mine.gate is None else mine.gate @ plane.T
        network = Mlp(
            mine.inner @ plane.T,
            mine.inner_bias,
            outer_table(mine) / order.repeated,
            activation=mine.activation,
            offset=offsets[1][layer] / order.repeated,
            gate=gate,
            gate_bias=mine.gate_bias,
        )
        attention = Attention(members, offsets[0][layer] / order.repeated)
        blocks.append(Block(attention, network, norm="pre", kind=kind))
    return Stack(blocks * order.repeated, final)


def decide_mask(box: Asker, stack: Stack, rng: np.random.Generator) -> Stack:
    """Whether a position sees later ones: the way that answers like the box."""
    if len(stack.blocks) == 1:
        return stack
    tokens = box.representable(rng.standard_normal((4, 3, box.width)))
    answers = box(tokens, "mask")
    ways = [stack.replace(causal=causal) for causal in (True, False)]
    gaps = [float(np.abs(way(tokens) - answers).max()) for way in ways]
    if min(gaps) > 0.1 * max(gaps):
        raise Unclear("neither causal nor bidirectional blocks answer like the box")
    return ways[int(np.argmin(gaps))]


def ask_sequences(
    box: Asker, stack: Stack, passes: int, rng: np.random.Generator
) -> list[AnsweredSequences]:
    """Random sequences of several lengths and sizes, half as many numbers more than unknowns."""
    width = box.width
    distinct = stack.blocks[:1] if passes > 1 else stack.blocks
    count = int(1.5 * sum(unknowns(block) for block in distinct) / width) + 16
    batches = []
    kinds = [(length, size, count // 6 + 1) for length, size in
             ((1, 1.0), (2, 1.0), (3, 2.0), (4, 1.0), (3, 10.0), (1, 5.0))]  # fmt: skip
    if stack.positions is not None:  # each of them as the last, twice
        kinds += [(length, 1.0, 2) for length in range(1, len(stack.positions) + 1)]
    for length, size, number in kinds:
        tokens = box.representable(size * rng.standard_normal((number, length, width)))
        answers = box(tokens, "refinement")
        batches.append(AnsweredSequences(tokens, answers, np.ones(len(tokens))))
    return batches


def set_zeros(model: Stack, errors: Stack, evidence: Evidence) -> tuple[Stack, Stack]:
    """Biases that are zero within small standard errors become zero: many networks have none."""
    parts, doubts = model.to_arrays(), errors.to_arrays()
    known = 1e-4  # norm of the standard errors of a block from which on it is left as it is
    for name, array in parts.items():
        bias = name in doubts and name.endswith(("bias", "offset"))
        if not bias or not np.linalg.norm(doubts[name]) < known:
            continue
        if evidence.vanishes(Estimate(array, doubts[name])):
            parts[name], doubts[name] = np.zeros_like(array), np.zeros_like(array)
    return Stack.from_arrays(parts), Stack.from_arrays(doubts)


def describe(
    refined: RefinedStack, order: Order, kind: str, box: Asker, rng: np.random.Generator
) -> Result:
    """The hypothesis, if the stack explains answers that no fit has seen."""
    model, errors = set_zeros(refined.stack, refined.errors, Evidence(box.noise))
    batches = [fresh_sequences(box.width, rng)]
    if model.positions is not None:
        batches.append(rng.standard_normal((4, *model.positions.shape)))
    worst = 0.0
    for fresh in map(box.representable, batches):
        answers = box(fresh, "refinement")
        rounding = box.error * rounded_size(model, fresh, answers)
        worst = max(worst, float((np.abs(model(fresh) - answers).max(axis=1) / rounding).max()))
    if not worst <= 1e6:
        return Inconclusive(
            f"fresh answers differ from the stack's by {worst:.1e} times their rounding"
        )
    blocks = model.blocks
    diagnostics = StackDiagnostics(
        layers=len(blocks),
        kind=kind,
        heads=tuple(len(b.attention.heads) for b in blocks if b.attention is not None),
        neurons=tuple(b.mlp.neurons for b in blocks if b.mlp is not None),
        causal=model.causal,
        repeated=order.repeated,
        certificate=order.certificate,
        misfit=refined.level,
    )
    notes = [f"The box is {model}."]
    if order.repeated > 1:
        notes.append(f"It is one block, passed {order.repeated} times with shared weights.")
    if kind == "layer" and model.final_norm is not None:
        notes.append("Behind a LayerNorm at the end no mean of what is added shows: all are zero.")
    elif kind == "layer":
        notes.append(
            "LayerNorms do not see the mean of the stream: of the means of all biases only the sum "
            "is known, and the last network has it."
        )
    floor = count_floor(model, order.repeated)
    return Hypothesis(model, errors, floor, tuple(notes), noise=box.noise, diagnostics=diagnostics)


def count_floor(model: Stack, passes: int) -> float:
    """Unknowns per independent number of an answer."""
    distinct = model.blocks[:1] if passes > 1 else model.blocks
    total, numbers = sum(unknowns(block) for block in distinct), model.width
    if model.final_norm is not None:
        numbers = model.final_norm.plane.shape[1]
        hidden = model.width - numbers  # no mean is an unknown
        total += 2 * model.width + 1
        for block in distinct:
            heads = () if block.attention is None else block.attention.heads
            total -= hidden * sum(int(np.linalg.matrix_rank(head.value)) for head in heads)
            total -= hidden * (0 if block.mlp is None else block.mlp.neurons + 1)
    if model.positions is not None:
        total += len(model.positions) * numbers
    return total / numbers
