"""Several heads through scalar answers: hard attention, gates, and one head opened at a time.

Statement. f(X) = offset + sum_h sum_i softmax_i(x_i . (W_h x_N + c_h)) x_i . v_h is determined
up to the canonical form (equal heads merged, heads without value dropped, order free) by H(d² +
d) queries plus a few; with key biases and an offset H(d² + 2d) + 1.

Queries. (1) d of length one: the sum of the values. (2) Huge tokens at one anchor: who attends
where (hard_attention), and with small moves all v_h. (3) At the same anchor, each head
opened along d directions: p_h = W_h x + c_h. (4) Gates of least norm (separators), and the
same openings at d - 1 more anchors nearby, where the gates still hold.

Algebra. p_h at d anchors is W_h. A head whose columns stop growing in rank is opened along its
range alone from then on: H(2rd - r² + d). Errors are propagated by repeating the algebra on
perturbed answers.

When it fails. Bounded tokens (no hard attention). Nearly parallel p_h: digits are lost like the
square of their angle, and the error bars say so. Two random queries validate; a failure
starts over at another anchor, and after several the family is wrong.

Source. The canonical form: Kim, Kim, Guo, arXiv 2608.03294; non-identifiability beyond it:
Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with Queries", Proposition 7.1.
The method is Keyhole's.
"""

from collections.abc import Callable

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import IllConditioned, NotIdentifiable, WrongFamily
from keyhole.learners.base import Hypothesis
from keyhole.learners.multi_head.hypothesis import (
    DOUBT_LIMIT,
    Claims,
    fewer_than_claimed,
    validated,
)
from keyhole.learners.multi_head.mirror_images import FEWEST
from keyhole.learners.multi_head.scalar_attempt import attempt
from keyhole.learners.multi_head.soft_probe import Unexplained
from keyhole.learners.multi_head.state import Draft, Scalar
from keyhole.linalg.bases import random_directions
from keyhole.measurement.asking import Asker
from keyhole.models.attention import Attention, Head

UNBIASED = 50.0  # deviation, in rounding errors, that a box without biases may show
SMALL = 1e-4  # norm of the anchor without biases: it must lose against every gate
SMALLER = 1e-6  # the same where noise does not scale with the answer: tokens grow instead
SUSPICION = 0.1  # each new attempt looks so much closer for two heads in one
ALIKE = 1e3  # gate norm beyond which a failed validation may be a loss of digits
ALIKE_LOSS = 2.5e-10  # error that near-equal heads may cause, over their gates' squared norm
MOST_SLACK = 1e-3  # and at most
POOR = 2e9  # relative error bar, in rounding errors, that is worth a second anchor
USEFUL = 0.05  # the same, itself, whatever the box's rounding
RANK_DOUBT = 3.0  # error bars below which a singular value is nothing
CLOSE = 12.0  # gate norm beyond which two heads count as almost alike


def learn_scalar(
    ask: Asker,
    rng: np.random.Generator,
    claims: Claims,
    frame: Float[Array, "d d"],
    first: Float[Array, "one outputs"],
    pairs: bool = False,
) -> Hypothesis:
    """The whole recovery; `first` is the answer to the first row of `frame` alone. With `pairs`
    queries hold two tokens, where longer ones are not allowed."""
    total_answers = np.concatenate([first, ask(frame[1:, None], "values")])
    offset, bias = find_bias(ask, frame, total_answers, claims.bias, rng)
    ask.offset = offset
    size = float(np.linalg.norm(frame[0]))
    frame, centred = frame / size, (total_answers - offset) / size
    total = frame.T @ centred
    if claims.heads == 1 and np.abs(total).max() <= ask.noise / size:
        raise NotIdentifiable("every answer is zero: the head has no value, so its score is free")
    trouble: Exception | None = None
    best: Hypothesis | None = None
    for number in range(claims.attempts):
        reach = 1.0 if bias else SMALLER if ask.additive else SMALL
        state = Scalar(
            ask, rng, total, frame, centred, claims.heads, claims.rank,
            bias, reach, 1.0 if ask.coarse else SUSPICION**number, pairs,
        )  # fmt: skip
        try:
            draft = attempt(state)
        except NotIdentifiable as error:  # two circles must agree on that
            if not pairs or isinstance(trouble, NotIdentifiable):
                raise
            trouble = error
            continue
        except (IllConditioned, np.linalg.LinAlgError) as error:
            trouble = trouble if isinstance(trouble, WrongFamily) else error
            continue
        result = judged(state, draft, offset)
        if not isinstance(result, Hypothesis):
            trouble = result
            continue
        if best is not None:
            return min(best, result, key=doubtfulness)
        poor = min(POOR, USEFUL / ask.unit)
        if doubtfulness(result) <= poor or draft.gate_norm > CLOSE:
            return result
        best = result  # an unlucky anchor: one more is worth its queries
    if best is not None:
        return best
    raise no_model(trouble)


def no_model(trouble: Exception | None) -> Exception:
    """What to raise where no anchor led to a model, after the last trouble."""
    if isinstance(trouble, WrongFamily):
        return trouble
    message = f"no anchor led to a model: {trouble}"
    if isinstance(trouble, Unexplained):
        return WrongFamily(message, trouble.counterexample)
    return IllConditioned(message)


def judged(state: Scalar, draft: Draft, offset: Array) -> Hypothesis | IllConditioned | WrongFamily:
    """The hypothesis, if fresh queries agree with it; else why not."""
    ask, heads = state.ask, state.heads
    model, errors = assembled(draft, offset, ask)
    slack = float(np.clip(ALIKE_LOSS * draft.gate_norm**2, DOUBT_LIMIT, MOST_SLACK))
    counterexample = validated(ask, model, errors, state.rng, slack=slack)
    if counterexample is None:
        return finished(ask, model, errors, draft, state.bias, heads)
    if draft.gate_norm > ALIKE:
        return IllConditioned(
            f"two heads attend almost alike (angle about {2 / draft.gate_norm:.0e}): the "
            "answers do not determine their parameters"
        )
    return WrongFamily(
        "the hypothesis disagrees with the box on a fresh query: it is not attention with "
        "this many heads" + ("" if heads is None else f" (heads={heads} was claimed)"),
        counterexample,
    )


def doubtfulness(result: Hypothesis) -> float:
    """The worst relative error bar of a score, in units of the box's rounding error."""
    pairs = zip(result.model.heads, result.errors.heads, strict=True)
    unit = float(result.details["unit"])
    worst = [
        float(np.linalg.norm(bar.score) / np.linalg.norm(head.score)) / unit
        for head, bar in pairs
        if head.score.any()
    ]
    return max(worst, default=0.0)


def find_bias(
    ask: Asker, frame: Array, answers: Array, claimed: bool | None, rng: np.random.Generator
) -> tuple[Float[Array, " outputs"], bool]:
    """The offset, and whether there are key biases: at the anchor 0 all scores vanish without them,
    and two tokens count half each."""
    nothing = np.zeros(answers.shape[1])
    if claimed is False:
        return nothing, False
    width = len(frame)
    if claimed is None:
        token = random_directions(rng, 1, width)[0] * np.sqrt(width)
        pair = np.stack([token, np.zeros(width)])[None]
        half = 0.5 * (frame @ token) @ answers / float(frame[0] @ frame[0])
        scale = float(np.abs(answers).max() / np.linalg.norm(frame[0])) * np.sqrt(width)
        noise = UNBIASED * (ask.unit * scale * np.sqrt(width) + ask.additive)
        if np.abs(ask(pair, "bias?")[0] - half).max() <= noise:
            return nothing, False
    return ask(np.zeros((1, 1, width)), "bias?")[0], True


def assembled(draft: Draft, offset: Array, ask: Asker) -> tuple[Attention, Attention]:
    """The model, and its standard errors in the same structure."""
    heads, errors = [], []
    count = len(draft.scores)
    squeeze: Callable[[Array], Array] = (lambda a: a[:, 0]) if ask.scalar else (lambda a: a)
    for h in range(count):
        score = draft.factors[h] if draft.factors[h] is not None else draft.scores[h]
        heads.append(Head(score, draft.biases[h], squeeze(draft.values[h])))
        errors.append(
            Head(draft.score_errors[h], draft.bias_errors[h], squeeze(draft.value_errors[h]))
        )
    if draft.uniform:
        blank = np.zeros((ask.width, ask.width))
        heads.append(Head(blank, None, squeeze(draft.values[count])))
        errors.append(Head(blank, None, squeeze(draft.value_errors[count])))
    constant = offset[0] if ask.scalar else offset
    doubt = np.abs(constant) * ask.unit + ask.additive
    return Attention(heads, constant), Attention(errors, doubt)


def finished(
    ask: Asker,
    model: Attention,
    errors: Attention,
    draft: Draft,
    bias: bool,
    heads: int | None,
) -> Hypothesis:
    """The result with its floor and what the reader should know."""
    width, outputs, found = model.width, model.outputs or 1, len(model.heads)
    value_ranks = [
        value_rank(head, bar) for head, bar in zip(model.heads, errors.heads, strict=True)
    ]
    unknowns = sum(2 * r * width - r * r + bias * width for r in draft.ranks) + bias * outputs
    unknowns += sum(r * (width + outputs - r) for r in value_ranks)
    notes = [*fewer_than_claimed(heads, found)]
    if ask.oracle.spec.domain.max_length == 2:
        notes.append(FEWEST)
    if draft.uniform:
        notes.append("one head attends to all tokens alike (score zero)")
    if draft.gate_norm > CLOSE:
        notes.append(
            f"two heads attend almost alike (angle about {2 / draft.gate_norm:.1e}): their "
            "parameters are known only as well as the error bars say"
        )
    details = {
        "heads": found,
        "ranks": draft.ranks,
        "value_ranks": tuple(value_ranks),
        "gate_norm": draft.gate_norm,
        "unit": ask.unit,
    }
    return Hypothesis(model, errors, unknowns / outputs, tuple(notes), details)


def value_rank(head: Head, bar: Head) -> int:
    """Rank of a head's value map, as far as it is above its error."""
    if head.value.ndim == 1:
        return 1
    noise = RANK_DOUBT * float(np.linalg.norm(bar.value))
    return max(1, int((np.linalg.svd(head.value, compute_uv=False) > noise).sum()))
