"""A block that predicts, where answers do not tell its parameters apart.

Statement.  Where a network bends nearly alike at all tokens, as libraries initialise it, it is a
            linear map and a quadratic form for each number of the answer, and hardly anything else;
            attention is nearly even. Answers determine the block as a function long before they
            tell its neurons and heads: any block of the form that explains them predicts the box.
Queries.    Ten tokens on a great circle tell whether the network is such a one. Then random
            sequences of some lengths, some numbers per number of a quadratic form; a few that no
            fit sees. Behind the first norm only the direction of a token counts: in front of it
            tokens are as small as what the block adds, which then shows to more digits.
Algebra.    The fitted network has as many neurons as a quadratic form has numbers, with random rows
            so small that they bend as forms do: their outer weights are linear in the answers. Its
            linear part stands apart from them (`Form.apart`), so that no large part hides a small
            one. From small random scores, the matrices behind which nothing bends are solved for,
            which is linear; then damped steps by products on heads and outer weights, rows last.
When it fails. The fit predicts fresh sequences no better than to a part of their spread: then no
            block is offered. More heads than are fitted, where their scores show.
"""

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import Array
from keyhole.fitting.conjugate_gradients import Ending
from keyhole.fitting.forward.block import Form, Parts, pad_queries, run_block
from keyhole.fitting.gauss_newton import Blocks
from keyhole.fitting.solver import Stopping
from keyhole.fitting.structured import Network, settle
from keyhole.learners.base import Diagnostics, Hypothesis, Inconclusive, Result
from keyhole.learners.block.post_norm_attention import huge_size
from keyhole.learners.block.pre_norm_mlp import find_kind
from keyhole.learners.block.refinement import (
    Pairs,
    form_of,
    freedom_of,
    join_block,
    misfit_of,
    move_parts,
    split_block,
)
from keyhole.learners.block.wide_network import EXPECTED
from keyhole.linalg.decisions import margin_of, note_decision
from keyhole.measurement.asker import Asker
from keyhole.models.attention import Attention, Head
from keyhole.models.block import Block
from keyhole.models.mlp import ACTIVATIONS, Mlp, with_parts
from keyhole.oracles.noise import DETECTION
from keyhole.stages.epsilon import USUAL

ANGLES = 10  # of a great circle: four harmonics, and the fifth beside them
LINEAR = ("out", "skip", "outer", "last_bias")  # behind which nothing bends, but for a norm
ACTIVATION = "gelu"  # of the fitted network; that of the box hardly shows


@dataclass(frozen=True)
class PredictionOptions:
    """What a person might tune.

    heads: of the block that is fitted; together they have as many dimensions as a token has
    numbers. spare: factor by which neurons are more than the numbers of a quadratic form. plenty:
    queries, relative to these numbers and those of the other maps, per number in an answer.
    scores: their size at the start. bent: size of the neurons' arguments at the start, so small
    that they bend as quadratic forms do. begun: share of what the block adds that its heads add at
    the start; the neurons add a third of it. added: what a post-norm block is taken to add at the
    start. sizes: of the random tokens behind the residual; in front of a norm they are `powers` of
    what the block adds. lengths: of the sequences. fresh: sequences that no fit sees. linear,
    steps, last: of the linear matrices, of all but rows and epsilons, of all; products: of a step.
    offered: part of the spread of fresh answers that a block may be off by, to be offered.
    """

    heads: int = 4
    spare: float = 1.15
    plenty: float = 2.0
    scores: float = 0.1
    bent: float = 0.03
    begun: float = 0.3
    added: float = 0.1
    sizes: tuple[float, ...] = (0.5, 1.0, 1.5)
    powers: tuple[float, ...] = (0.5, 0.25, 0.0)
    lengths: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12)
    fresh: int = 60
    linear: int = 2
    steps: int = 10
    last: int = 4
    products: int = 30
    offered: float = 1e-2

    def neurons_for(self, width: int) -> int:
        """More than a quadratic form of the width has numbers: any form is a sum of theirs."""
        return int(self.spare * width * (width + 1) / 2) + 1

    def queries_for(self, width: int, attention: bool) -> float:
        """By the numbers of one form, of the linear part and, per output, of the heads."""
        return self.plenty * (width * (width + 1) / 2 + (6 if attention else 2) * width)


@dataclass(frozen=True, eq=False, kw_only=True)
class PredictionDiagnostics(Diagnostics):
    """How well a block predicts of which no more is claimed: root mean square of what fresh answers
    are off by, over their spread."""

    predicts: float


def bends_alike(box: Asker, norm: str, rng: np.random.Generator) -> bool:
    """Whether a network bends, but so nearly alike at all tokens that second derivatives do not
    tell its neurons apart.

    On a great circle the second harmonic of the answers is what bends alike, the fourth the change
    of it. Second differences of the best step are off by the geometric mean of this change and the
    roundings; and of m random directions the least seen one shows by one over the root of m.
    """
    first, second = np.linalg.qr(rng.standard_normal((box.width, 2)))[0].T
    angles = 2.0 * np.pi * np.arange(ANGLES) / ANGLES
    circle = np.outer(np.cos(angles), first) + np.outer(np.sin(angles), second)
    size = np.sqrt(box.width) if norm == "pre" else huge_size(box)
    tokens = box.representable(size * circle)
    answers = box(tokens[:, None], "network")
    beside = answers - tokens if norm == "pre" else answers
    waves = np.linalg.norm(np.fft.rfft(beside, axis=0), axis=1) / ANGLES
    rounding = box.error * float(np.linalg.norm(answers, axis=1).mean())
    if waves[2] < DETECTION * rounding / np.sqrt(ANGLES):
        return False
    change = 4.0 * waves[4] / waves[2]  # second derivatives weigh harmonics by their squares
    noise = np.sqrt(6.0) * rounding / (4.0 * waves[2])  # of a second difference of step one
    off = 2.0 * np.sqrt(noise * 4.0 / 3.0 * change)
    border = float(DETECTION * np.sqrt(EXPECTED * box.width) * off)
    alike = bool(change <= border)
    note_decision("a network bends alike everywhere", alike, margin_of(change, border))
    return alike


def predict_block(
    box: Asker,
    norm: str,
    attention: bool,
    alike: bool,
    rng: np.random.Generator,
    options: PredictionOptions | None = None,
) -> Result:
    """A block that predicts, as a hypothesis that falls short of a recovery.

    Args:
        box: Answers as a block with a norm does.
        norm: "pre" or "post".
        attention: Whether there is attention beside the network.
        alike: Whether its network `bends_alike`; else other ways were tried.
        rng: Draws sequences and the start.
        options: What a person might tune.
    """
    options = PredictionOptions() if options is None else options
    added, sizes = options.added, options.sizes
    if norm == "pre":
        added = size_added(box, rng)
        sizes = tuple(min(1.0, added) ** power for power in options.powers)
    kind = find_kind(box, rng) if norm == "pre" else "layer"
    form, start = draw_start(box.width, norm, kind, attention, added, options, rng)
    count = options.queries_for(box.width, attention)
    pairs = ask_sequences(box, attention, count, sizes, options, rng)
    fresh = ask_sequences(box, attention, options.fresh, options.sizes, options, rng)
    model = join_apart(fit_apart(form, start, pairs, box.error, options, rng), form)
    spread = np.concatenate([answers - answers.mean(axis=0) for _, answers in fresh])
    off = float(np.sqrt(misfit_of(model, fresh)) / np.sqrt(np.mean(spread**2)))
    if not off <= options.offered:
        return Inconclusive(f"a block from a random start is off by {off:.1e} of fresh answers")
    return Hypothesis(
        model,
        nothing_known(model),
        # a usual block of this width: heads that share it out, and neurons as most layers have
        (2 * EXPECTED + (4 if attention else 0)) * box.width,
        noise=box.noise,
        diagnostics=PredictionDiagnostics(predicts=off),
        shortfall=tell_shortfall(alike, attention, off),
        refutes=False,
    )


def tell_shortfall(alike: bool, attention: bool, off: float) -> str:
    """What is not determined, why, and what is."""
    parts = "its neurons and heads" if attention else "its neurons"
    reason = (
        "the network bends so nearly alike at all tokens that second derivatives, in the "
        f"precision of the answers, do not tell {parts} apart"
        if alike
        else f"no way told {parts} apart"
    )
    return (
        f"{reason}: their number and weights are not determined by what was asked. The function "
        "is: the model, a block fitted to random sequences, predicts fresh answers to "
        f"{off:.1e} of their spread (root mean square)"
    )


def nothing_known(model: Block) -> Block:
    """Standard errors as large as the parameters."""
    sizes = {
        name: np.full_like(part, np.sqrt(np.sum(part**2) / max(part.size, 1)))
        for name, part in model.to_arrays().items()
    }
    return Block.from_arrays(sizes)


# --- the fit --------------------------------------------------------------------------------------


def fit_apart(
    form: Form,
    start: Parts,
    pairs: Pairs,
    unit: float,
    options: PredictionOptions,
    rng: np.random.Generator,
) -> Parts:
    """The matrices behind which nothing bends, then all parameters, to the roundings of the answers
    or as far as steps gain; all queries have the same leverage."""
    batches = list(pad_queries(pairs))
    rounding = [
        unit * np.maximum(*(np.abs(part).max(axis=1) for part in (one.tokens[:, -1], one.answers)))
        for one in batches
    ]
    network = Network(
        lambda parts, one: run_block(form, parts, one.tokens, one.real),
        move_parts,
        batches,
        [1.0 / size for size in rounding],
        Blocks.of(start),
        freedom_of(start, form),
    ).evened(start, rng)
    noise = np.concatenate(network.weights) * np.concatenate(rounding)
    stopping = Stopping(
        steps=options.steps, target=form.width * float(noise @ noise), tolerance=1e-3,
        window=10, share=0.3, damping=0.0,
    )  # fmt: skip
    few = options.products
    linear, ending = Ending(0.01, 20, 0.1, 3 * few), Ending(0.1, 20, 0.1, few)
    brief = replace(stopping, steps=options.linear)
    state = settle(network, start, brief, linear, rng, 2, LINEAR, steady=True)
    # what is not right yet would bend rows, and carry an epsilon, which hardly shows, far away
    held = [name for name in start if name not in ("inner", "epsilons")]
    state = settle(network, state.parts, stopping, ending, rng, 2, held, steady=True)
    brief = replace(stopping, steps=options.last)
    return settle(network, state.parts, brief, ending, rng, 2).parts


def join_apart(parts: Parts, form: Form) -> Block:
    """The block with these parameters, whose network has a linear part of its own."""
    bare = replace(form, apart=False)
    block = join_block(parts, bare)
    half = 0.5 * ACTIVATIONS[ACTIVATION].slope
    skip = parts["skip"] - half * parts["outer"][:, :-1] @ parts["inner"]
    # as neurons that do not bend: what stands before and behind them is then taken out alike
    straight = {**parts, "inner": skip, "outer": np.eye(len(skip), len(skip) + 1)}
    added = join_block(straight, bare).mlp
    assert block.mlp is not None
    assert added is not None
    offset = block.mlp.offset + added.outer @ added.inner_bias
    return Block(
        block.attention,
        with_parts(block.mlp, linear=added.outer @ added.inner, offset=offset),
        norm=block.norm,
        kind=block.kind,
        epsilons=block.epsilons,
        gain=block.gain,
        bias=block.bias,
        parallel=block.parallel,
    )


def size_added(box: Asker, rng: np.random.Generator) -> float:
    """What the block adds to single tokens of size one, root mean square."""
    tokens = box.representable(rng.standard_normal((8, 1, box.width)))
    return float(np.sqrt(np.mean((box(tokens, "refinement") - tokens[:, 0]) ** 2)))


def draw_start(
    width: int,
    norm: str,
    kind: str,
    attention: bool,
    added: float,
    options: PredictionOptions,
    rng: np.random.Generator,
) -> tuple[Form, Parts]:
    """Small random scores, heads and neurons that add about as much as the box does."""
    rank, small = max(1, width // options.heads), options.begun * added
    layer = None
    if attention:
        heads = []
        for _ in range(options.heads):
            left, right = rng.standard_normal((2, width, rank)) * options.scores / width**0.25
            value = rng.standard_normal((width, rank)) @ rng.standard_normal((rank, width))
            heads.append(
                Head((left, right.T), np.zeros(width), small * value / np.sqrt(rank * width))
            )
        layer = Attention(heads, np.zeros(width))
    neurons = options.neurons_for(width)
    inner = options.bent * rng.standard_normal((neurons, width)) / np.sqrt(width)
    bend = np.sqrt(2.0 / np.pi) * options.bent**2  # of a neuron, about
    outer = small / 3.0 / bend * rng.standard_normal((width, neurons)) / np.sqrt(neurons)
    mlp = Mlp(inner, np.zeros(neurons), outer, activation=ACTIVATION, offset=np.zeros(width))
    epsilons = [USUAL] * (1 + int(attention))
    block = Block(layer, mlp, norm=norm, kind=kind, epsilons=epsilons)
    parts = split_block(block)
    form = replace(form_of(block, parts), apart=True)
    skip = np.zeros((len(parts["outer"]), parts["inner"].shape[1]))
    return form, parts | {"skip": skip}


def ask_sequences(
    box: Asker,
    attention: bool,
    count: float,
    sizes: tuple[float, ...],
    options: PredictionOptions,
    rng: np.random.Generator,
) -> Pairs:
    """So many random sequences of these sizes, of all lengths alike."""
    longest = box.oracle.spec.domain.max_length or max(options.lengths)
    lengths = [
        length for length in options.lengths if length <= longest and (attention or length == 1)
    ]
    found: list[tuple[Array, Array]] = []
    for length in lengths:
        number = int(count / len(lengths)) + 1
        chosen = rng.choice(sizes, number)[:, None, None]
        tokens = box.representable(chosen * rng.standard_normal((number, length, box.width)))
        found.append((tokens, box(tokens, "refinement")))
    return found
