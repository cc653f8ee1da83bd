"""A block that predicts, where answers do not tell its parameters apart.

Statement.  Where a network is nearly linear at all tokens, as libraries initialise it, and
            attention nearly even, answers determine the block as a function, but not its neurons
            and heads: any block of the form that explains them predicts the box.
Queries.    Random sequences of some lengths, some numbers per unknown of the block that is fitted,
            which has more neurons than most; a few that no fit sees.
Algebra.    From a random start of small scores, damped steps on all parameters by products
            (`refinement`), to the noise or as far as steps gain.
When it fails. The fit predicts fresh sequences no better than to a part of their spread: then no
            block is offered.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array
from keyhole.fitting.conjugate_gradients import Ending
from keyhole.fitting.solver import Stopping
from keyhole.fitting.structured import settle
from keyhole.learners.base import Hypothesis, Inconclusive, Result
from keyhole.learners.block.pre_norm_mlp import find_kind
from keyhole.learners.block.refinement import (
    Pairs,
    form_of,
    join_block,
    misfit_of,
    network_of,
    split_block,
)
from keyhole.measurement.asker import Asker
from keyhole.models.attention import Attention, Head
from keyhole.models.block import Block
from keyhole.models.mlp import Mlp
from keyhole.stages.epsilon import USUAL


@dataclass(frozen=True)
class PredictionOptions:
    """What a person might tune.

    heads: of the block that is fitted; together they have as many dimensions as a token has
    numbers. neurons: for each number of a token. plenty: numbers per unknown. small: size of the
    starting scores and of what heads and neurons add, relative to a token of size one. sizes: of
    the random tokens. lengths: of the sequences. steps, products: of the fit, and of each step.
    offered: part of the spread of fresh answers that a block may be off by, to be offered.
    """

    heads: int = 4
    neurons: int = 6
    plenty: float = 4.0
    small: float = 0.1
    sizes: tuple[float, ...] = (0.5, 1.0, 1.5)
    lengths: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12)
    steps: int = 100
    products: int = 60
    offered: float = 1e-2


def predict_block(
    box: Asker,
    norm: str,
    attention: bool,
    rng: np.random.Generator,
    options: PredictionOptions | None = None,
) -> Result:
    """A block that predicts, as a hypothesis that falls short of a recovery.

    Args:
        box: Answers as a block with a norm does.
        norm: "pre" or "post".
        attention: Whether there is attention beside the network.
        rng: Draws sequences and the start.
        options: What a person might tune.
    """
    options = PredictionOptions() if options is None else options
    kind = find_kind(box, rng) if norm == "pre" else "layer"
    start = draw_block(box.width, norm, kind, attention, options, rng)
    parts = split_block(start)
    unknowns = sum(part.size for part in parts.values())
    pairs = ask_sequences(box, attention, options.plenty * unknowns / box.width, options, rng)
    fresh = ask_sequences(box, attention, 60.0, options, rng)
    form, exact = form_of(start, parts), network_of(start, parts, pairs, box.error)
    even = exact.evened(parts, rng)  # whose weights have a mean square of one
    noise = even.numbers / float(np.mean(np.concatenate(exact.weights) ** 2))
    stopping = Stopping(
        steps=options.steps, target=noise, tolerance=1e-3, window=10, share=0.3, damping=0.0
    )
    end = settle(even, parts, stopping, Ending(0.1, 20, 0.1, options.products), rng)
    model = join_block(end.parts, form)
    spread = np.concatenate([answers - answers.mean(axis=0) for _, answers in fresh])
    off = float(np.sqrt(misfit_of(model, fresh)) / np.sqrt(np.mean(spread**2)))
    if not off <= options.offered:
        return Inconclusive(f"a block from a random start is off by {off:.1e} of fresh answers")
    sizes = {
        name: np.full_like(part, np.sqrt(np.sum(part**2) / max(part.size, 1)))
        for name, part in model.to_arrays().items()
    }
    return Hypothesis(
        model,
        Block.from_arrays(sizes),  # nothing is known of single parameters
        unknowns / box.width,
        noise=box.noise,
        shortfall=(
            "no way told single neurons and heads apart, as where a network is nearly linear at "
            "all tokens: a block fitted to random sequences predicts fresh answers to "
            f"{off:.1e} of their spread (root mean square), and says nothing of the parameters"
        ),
        refutes=False,
    )


def draw_block(
    width: int,
    norm: str,
    kind: str,
    attention: bool,
    options: PredictionOptions,
    rng: np.random.Generator,
) -> Block:
    """A random block of small scores, heads and neurons."""
    rank, small = max(1, width // options.heads), options.small
    layer = None
    if attention:
        heads = []
        for _ in range(options.heads):
            left, right = rng.standard_normal((2, width, rank)) * small / width**0.25
            value = rng.standard_normal((width, rank)) @ rng.standard_normal((rank, width))
            heads.append(Head((left, right.T), np.zeros(width), small * value / width))
        layer = Attention(heads, np.zeros(width))
    neurons = options.neurons * width
    inner = rng.standard_normal((neurons, width)) / np.sqrt(width)
    outer = small * rng.standard_normal((width, neurons)) / np.sqrt(neurons)
    mlp = Mlp(inner, np.zeros(neurons), outer, activation="gelu", offset=np.zeros(width))
    norms = 1 + int(attention)
    gain, bias = np.ones((norms, width)), np.zeros((norms, width))
    if norm == "pre":
        return Block(layer, mlp, norm=norm, kind=kind, epsilons=[USUAL] * norms)
    return Block(layer, mlp, norm=norm, epsilons=[USUAL] * norms, gain=gain, bias=bias)


def ask_sequences(
    box: Asker,
    attention: bool,
    count: float,
    options: PredictionOptions,
    rng: np.random.Generator,
) -> Pairs:
    """So many random sequences, of all lengths alike."""
    longest = box.oracle.spec.domain.max_length or max(options.lengths)
    lengths = [
        length for length in options.lengths if length <= longest and (attention or length == 1)
    ]
    found: list[tuple[Array, Array]] = []
    for length in lengths:
        number = int(count / len(lengths)) + 1
        sizes = rng.choice(options.sizes, number)[:, None, None]
        tokens = box.representable(sizes * rng.standard_normal((number, length, box.width)))
        found.append((tokens, box(tokens, "refinement")))
    return found
