"""A layer whose tokens are bounded or given: random queries, and the learner from examples.

Statement. Where no token may be long, no head can be isolated; but random queries inside the
domain show a layer like any examples do (learners/examples), scalar answers included, at
several times as many numbers as it has unknowns.

Queries. A few pairs to find the length of tokens at which attention is neither uniform nor hard;
then random sequences of LENGTH tokens, enough for two heads (or as many as claimed), and twice as
many whenever they do not suffice.

Algebra. Variable projection and Levenberg-Marquardt from random starts, number of heads found on
the way: learners/examples.

When it fails. Heads that differ only at high order in a small domain are told apart badly
(inconclusive); more heads than are fitted, or another family, do not end in an exact fit (refuted).

Source. Keyhole's own; docs/methods/multi_head.md.
"""

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.errors import Counterexample, NotIdentifiable
from keyhole.learners.base import Hypothesis, Inconclusive, Refuted, Result
from keyhole.learners.examples import FromExamples
from keyhole.learners.multi_head.hard_attention import HUGE_TOKENS
from keyhole.learners.multi_head.token_pairs import FEWEST, MIRRORED, explain_ambiguity
from keyhole.learners.multi_head.validation import PriorKnowledge, note_missing_heads
from keyhole.measurement.asker import Asker
from keyhole.measurement.noise import estimate_noise, inside
from keyhole.models.attention import Attention
from keyhole.oracles.noise import ROUNDINGS
from keyhole.oracles.wrappers.restrict import WithPrior

LENGTH = 4  # tokens in a query: with two most descents fail, with more nothing is gained
NEARLY_EXPLAINED = 1e-3  # share of the answers left over by a layer that may lack a similar head


def learn_random(
    ask: Asker, rng: np.random.Generator, prior: PriorKnowledge, most_heads: int = 8
) -> Result:
    """The whole recovery from random queries, with up to so many heads (or as many as claimed)."""
    noise, _, _ = estimate_noise(ask.oracle, rng)
    ask = replace(ask, oracle=WithPrior(ask.oracle, noise))
    domain = ask.oracle.spec.domain
    free = domain.vocabulary is None and domain.radius > 0  # tokens may be made shorter
    outputs = ask(draw_tokens(ask, rng, 1, 1), "values").shape[1]
    size = choose_size(ask, rng) if free else 1.0
    if isinstance(size, Refuted):
        return size
    length = min(LENGTH, domain.max_length or LENGTH)
    examples = Examples(
        ask, size, length, free, np.zeros((0, length, ask.width)), np.zeros((0, outputs))
    )
    biases: tuple[bool, ...] = (False, True)  # key biases and an offset, the likelier first
    if prior.bias is not None:
        biases = (prior.bias,)
    elif free:
        biases = (has_bias(ask, size, rng),)
    heads = prior.heads or 2
    trouble: NotIdentifiable | Refuted | None = None
    while heads <= max(most_heads, prior.heads or 0):
        needed = count_random_queries(ask.width, heads, outputs, length)
        examples = examples.extend(needed, rng)
        for bias in biases:
            try:
                result = fit_examples(examples, heads, bias, prior, rng)
            except NotIdentifiable as error:
                trouble = error
                continue
            if not isinstance(result, Refuted):
                return result
            trouble = result
        heads *= 2
    if isinstance(trouble, NotIdentifiable):
        raise trouble
    assert trouble is not None
    return trouble if trouble.conclusive else Inconclusive(trouble.reason)


def count_random_queries(width: int, heads: int, outputs: int, length: int = LENGTH) -> int:
    """Random queries asked for so many heads, biases included."""
    unknowns = heads * width * (width + 1 + outputs) + outputs
    numbers = max(unknowns / outputs, width * (width + 1) / (length - 1))
    redundancy = 2.2  # numbers asked per unknown: most descents succeed, and a share is kept aside
    return int(np.ceil(redundancy * numbers))


def draw_tokens(
    ask: Asker, rng: np.random.Generator, count: int, length: int
) -> Float[Array, "count length d"]:
    tokens = rng.standard_normal((count * length, 1, ask.width))
    return inside(ask.oracle, tokens, rng).reshape(count, length, -1)


def estimate_answer_error(ask: Asker, answers: Array) -> float:
    """Standard error of answers of this size."""
    return ask.unit * float(np.abs(answers).max()) + ask.additive


def choose_size(ask: Asker, rng: np.random.Generator) -> float | Refuted:
    """Share of the domain's length at which pairs are answered neither by the mean nor by one of
    their tokens. Single tokens act linearly: they are asked at one length."""
    count = 8
    pairs = draw_tokens(ask, rng, count, 2)
    alone = ask(pairs.reshape(-1, 1, ask.width), "values").reshape(count, 2, -1)
    zero = ask(np.zeros((1, 1, ask.width)), "values")
    mean, apart = alone.mean(axis=1) - zero, float(np.linalg.norm(alone[:, 0] - alone[:, 1]))
    half = ask(pairs[:, :1] / 2, "values") - (alone[:, 0] + zero) / 2
    odd = np.abs(half).max(axis=1) > ROUNDINGS * estimate_answer_error(ask, alone)
    if odd.any():
        k, reason = int(np.argmax(odd)), "single tokens do not act linearly"
        linear = (alone[k, 0] + zero[0]) / 2
        return Refuted(reason, Counterexample(pairs[k, :1] / 2, linear + half[k], linear, reason))
    size = 1.0
    for _ in range(24):
        off = float(np.linalg.norm(ask(size * pairs, "values") - zero - size * mean))
        hardness = 2 * off / max(size * apart, TINY)  # 0: the mean; 1: one of the tokens
        if hardness < 0.05 and ask.oracle.spec.domain.unbounded:
            size *= 2.5
            continue
        if hardness < 0.4:
            break
        size *= 0.6 if hardness < 0.8 else 0.3
    return size


def has_bias(ask: Asker, size: float, rng: np.random.Generator) -> bool:
    """Whether there is an offset, which zero is answered with, or a key bias: an anchor of zero
    then prefers one token to another."""
    token, zero = size * draw_tokens(ask, rng, 1, 1), np.zeros((1, 1, ask.width))
    alone = ask(np.concatenate([token, zero]), "values")
    pair = ask(np.concatenate([token, zero], axis=1), "values")
    off = np.concatenate([alone[1:], pair - alone.mean(axis=0)])
    return bool((np.abs(off) > ROUNDINGS * estimate_answer_error(ask, alone)).any())


@dataclass(frozen=True, eq=False)
class Examples:
    """Random queries of one length, and their answers."""

    ask: Asker
    size: float  # share of the domain's length that tokens have at most
    length: int
    free: bool  # whether tokens may be made shorter
    tokens: Float[Array, "n length d"]
    answers: Float[Array, "n outputs"]

    def extend(self, count: int, rng: np.random.Generator) -> "Examples":
        """At least so many."""
        missing = count - len(self.tokens)
        if missing <= 0:
            return self
        tokens = draw_tokens(self.ask, rng, missing, self.length)
        if self.free:
            tokens *= self.size * rng.uniform(0.5, 1.0, (missing, self.length, 1))
        return replace(
            self,
            tokens=np.concatenate([self.tokens, tokens]),
            answers=np.concatenate([self.answers, self.ask(tokens, "random")]),
        )


def fit_examples(
    examples: Examples, heads: int, bias: bool, prior: PriorKnowledge, rng: np.random.Generator
) -> Result:
    """The layer of up to so many heads that reproduces the examples."""
    ask, answers = examples.ask, examples.answers
    level = ask.additive / max(float(np.sqrt(np.mean(answers**2))), TINY)
    restarts = 2  # starts of a search, per head, before more is asked
    seconds = 120.0  # that a search may take
    learner = FromExamples(
        restarts=restarts * heads,
        seconds=seconds,
        most_heads=heads,
        bias=bias,
        noise=min(level, 0.5),  # beyond, noise is all the same
    )
    labels = answers if ask.affords(HUGE_TOKENS) else answers.astype(np.float32)
    fit = learner.fit(examples.tokens, labels[:, 0] if ask.scalar else labels, rng)
    found = fit.diagnostics
    if found.ending == "spent" and found.residual > 1.5 * level:
        if found.residual < NEARLY_EXPLAINED and explains_longer(examples, fit.learned.model, rng):
            return Refuted(
                f"a layer of {found.heads} heads explains all but {found.residual:.1e} of the "
                f"answers to {found.examples} random queries: nearly equal heads, or attention "
                "with a small part of another kind, which these answers do not tell apart",
                conclusive=False,
            )
        return Refuted(
            f"no layer of up to {max(found.residual_by_heads)} heads reproduces the "
            f"answers to {found.examples} random queries (the best leaves "
            f"{found.residual:.1e} of them)"
        )
    if not explains_longer(examples, fit.learned.model, rng):
        return Refuted("a layer that explains short random queries does not explain longer ones")
    # relative error of parameters per relative error of answers: nothing is known
    amplification = 1e6
    if found.deficient or found.amplification > amplification:
        return Inconclusive(
            "in this domain the heads cannot be told apart: relative errors of the answers are "
            f"amplified {found.amplification:.1e} times"
        )
    notes = (
        f"Found from {found.examples} random queries inside the domain.",
        *note_missing_heads(prior.heads, found.heads),
    )
    outputs = answers.shape[1]
    floor = found.heads * ask.width * (ask.width + bias + outputs) / outputs + bias
    return check_mirror_images(replace(fit.learned, floor=floor, notes=notes), examples.length)


def explains_longer(examples: Examples, model: Attention, rng: np.random.Generator) -> bool:
    """Whether the layer nearly explains a query that is much longer than the examples: a window or
    a mask does not show in those. Only asked where tokens may be of any size."""
    ask, domain = examples.ask, examples.ask.oracle.spec.domain
    length = min(300, domain.max_length or 300)
    if not domain.unbounded or length <= examples.length:
        return True
    tokens = examples.size * rng.standard_normal((1, length, ask.width))
    answer = ask(tokens, "random")
    off = np.linalg.norm(answer - model(tokens).reshape(answer.shape))
    typical = np.linalg.norm(examples.answers) / np.sqrt(len(examples.answers))
    return bool(off <= 10.0 * NEARLY_EXPLAINED * typical)


def check_mirror_images(found: Hypothesis, length: int) -> Hypothesis:
    """The layer, unless queries of two tokens leave others possible."""
    if length != 2:
        return found
    why = explain_ambiguity(found.model)
    if why is not None:
        raise NotIdentifiable(MIRRORED.format(why=why))
    return replace(found, notes=(*found.notes, FEWEST))
