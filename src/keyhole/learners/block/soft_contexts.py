"""Scores of a block that is known but for them, from none: a fit to contexts of near tokens.

Statement.  Values, network and norms are known to a few digits: what contexts do to answers tells
            the scores and key biases of all heads.
Queries.    Random anchors, each behind as many near tokens as an answer tells weights for: half
            as many weights more than scores of full rank have entries; a few that no fit sees.
Algebra.    Tokens so near that log-odds are a third of one: there attention is nearly linear in
            scores of full rank, and a fit through the known block goes from zero to the true ones.
            Of each score as much is kept as explains the unseen answers best: what it has beyond
            its rank is error. The fit goes on in factors.
When it fails. A block that is not known: the fit leaves of the answers what it lacks.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.learners.block.refinement import (
    Pairs,
    clear_rank,
    misfit_of,
    settle_block,
    trim_scores,
    with_attention,
)
from keyhole.measurement.asker import Asker
from keyhole.models.attention import Attention, Head
from keyhole.models.block import Block


@dataclass(frozen=True)
class ContextOptions:
    """What a person might tune.

    odds: log-odds of the contexts, root mean square: with larger ones attention is less linear,
    smaller ones hardly show. share: of the numbers of an answer, that weights are told by at once:
    more would be ill-conditioned. plenty: weights per entry of scores. looks: contexts by which the
    size of log-odds is measured. rounds: of that, at most. unseen: contexts that no fit sees.
    products: of a step.
    """

    odds: float = 0.3
    share: float = 0.6
    plenty: float = 1.5
    looks: int = 4
    rounds: int = 8
    unseen: int = 16
    products: int = 100


def find_scores(
    box: Asker,
    known: Block,
    size: float,
    rng: np.random.Generator,
    options: ContextOptions | None = None,
) -> tuple[Block, Pairs]:
    """The block with its scores, and the contexts with their answers.

    Args:
        box: What is asked.
        known: The block, of whose attention values and offset count.
        size: Of an anchor's numbers, root mean square.
        rng: Draws anchors and tokens.
        options: What a person might tune.
    """
    options = ContextOptions() if options is None else options
    assert known.attention is not None
    width, layer = known.width, known.attention
    none = np.eye(width), np.zeros((width, width))
    even = [Head(none, np.zeros(width), head.value) for head in layer.heads]
    flat = with_attention(known, Attention(even, layer.offset))
    longest = count_weights(flat, box, options.share)
    near = find_distance(box, flat, size, longest, options, rng)
    count = int(options.plenty * width * (width + 1) / longest) + 1
    pairs = [ask_contexts(box, size, near, longest, count, rng)]
    unseen = [ask_contexts(box, size, near, longest, options.unseen, rng)]
    block = settle_block(flat, pairs, "read", steps=6, products=options.products)
    pairs = [*pairs, *unseen]
    block = settle_block(
        cut_scores(block, unseen), pairs, "left|read", steps=6, products=options.products
    )
    return trim_scores(block), pairs


def count_weights(flat: Block, box: Asker, share: float) -> int:
    """Tokens beside the anchor, for whose weights an answer has enough numbers: each head shows as
    many as its values have dimensions, all heads together as many as a norm leaves."""
    assert flat.attention is not None
    heads = flat.attention.heads
    narrow = min(clear_rank(np.linalg.svd(one.value, compute_uv=False)) for one in heads)
    longest = box.oracle.spec.domain.max_length or np.inf
    return max(1, int(min(share * flat.width / len(heads), share * narrow, longest - 1)))


def ask_contexts(
    box: Asker, size: float, near: float, length: int, count: int, rng: np.random.Generator
) -> tuple[Float[Array, "n length d"], Float[Array, "n d"]]:
    """Anchors behind so many tokens around them, as near as this, relative to them; answers."""
    anchors = size * rng.standard_normal((count, 1, box.width))
    beside = near * size * rng.standard_normal((count, length, box.width))
    tokens = box.representable(np.concatenate([anchors + beside, anchors], axis=1))
    return tokens, box(tokens, "scores")


def find_distance(
    box: Asker, flat: Block, size: float, length: int, options: ContextOptions,
    rng: np.random.Generator,
) -> float:  # fmt: skip
    """How near tokens are whose log-odds are of the wanted size. Random scores of that size say how
    far they move answers: what the box's do is compared with it."""
    near = 1.0
    for _ in range(options.rounds):
        tokens, answers = ask_contexts(box, size, near, length, options.looks, rng)
        even = flat(tokens)
        random = draw_scores(flat, tokens, options.odds, rng)
        moved, usual = (float(np.linalg.norm(one - even)) for one in (answers, random(tokens)))
        factor = float(np.clip(usual / max(moved, TINY), 0.25, 4.0))
        if 0.5 < factor < 2.0 or (factor > 1.0 and near >= 1.0):
            break
        near = min(near * factor, 1.0)
    return near


def draw_scores(
    flat: Block, tokens: Float[Array, "n length d"], odds: float, rng: np.random.Generator
) -> Block:
    """The block with random scores, whose log-odds have this root mean square."""
    assert flat.attention is not None
    width, layer = flat.width, flat.attention
    read = flat.norms[0](tokens) if flat.norm == "pre" else tokens
    steps, anchors = read[:, :-1] - read[:, -1:], read[:, -1]
    heads = []
    for head in layer.heads:
        left = rng.standard_normal((width, width))
        size = np.sqrt(np.mean(np.einsum("nld,de,ne->nl", steps, left, anchors) ** 2))
        heads.append(Head((odds * left / size, np.eye(width)), np.zeros(width), head.value))
    return with_attention(flat, Attention(heads, layer.offset))


def cut_scores(block: Block, unseen: Pairs) -> Block:
    """Every score cut to the rank with which the block explains these answers best."""
    assert block.attention is not None
    heads, offset = list(block.attention.heads), block.attention.offset
    for h, head in enumerate(heads):
        axes, sizes, rows = np.linalg.svd(head.score)
        root = np.sqrt(sizes)
        cuts, rest = list[Head](), list[float]()
        for rank in range(1, len(sizes) + 1):
            left = axes[:, :rank] * root[:rank]
            bias = left @ np.linalg.lstsq(left, head.key_bias, rcond=None)[0]
            cuts.append(Head((left, root[:rank, None] * rows[:rank]), bias, head.value))
            others = [*heads[:h], cuts[-1], *heads[h + 1 :]]
            rest.append(misfit_of(with_attention(block, Attention(others, offset)), unseen))
        heads[h] = cuts[int(np.argmin(rest))]
    return with_attention(block, Attention(heads, offset))
