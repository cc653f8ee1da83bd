"""A layer whose tokens are bounded or given: random queries, and the learner from examples.

Statement. Where no token may be long, no head can be opened by itself; but random queries inside
the domain show a layer like any examples do (examples/learner), scalar answers included, at
REDUNDANCY times as many numbers as it has unknowns.

Queries. A few pairs to find the length of tokens at which attention is neither uniform nor hard;
then random sequences of LENGTH tokens, enough for two heads (or as many as claimed), and twice as
many whenever they do not suffice.

Algebra. Variable projection and Levenberg-Marquardt from random starts, number of heads found on
the way: learners/examples/head_count.

When it fails. Heads that differ only at high order in a small domain are told apart badly
(IllConditioned); more than MOST_HEADS, or another family, do not end in an exact fit (WrongFamily).

Source. Keyhole's own; docs/learners/multi_head/learner.md.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.errors import IllConditioned, NotIdentifiable, WrongFamily
from keyhole.learners.base import Hypothesis
from keyhole.learners.examples.hypothesis import Fitted
from keyhole.learners.examples.learner import FromExamples
from keyhole.learners.multi_head.hypothesis import Claims, fewer_than_claimed
from keyhole.learners.multi_head.mirror_images import FEWEST, MIRRORED, why_ambiguous
from keyhole.measurement.asking import Asker
from keyhole.measurement.noise import estimate_noise, inside
from keyhole.oracles.wrappers.known import WithPrior

REDUNDANCY = 2.2  # numbers asked per unknown: most descents succeed, and a share is kept aside
LENGTH = 4  # tokens in a query: with two most descents fail, with more nothing is gained
FIRST_HEADS, MOST_HEADS = 2, 8  # the first number of heads asked for, and the last
RESTARTS = 2  # starts of a search, per head, before more is asked
PATIENCE = 120.0  # seconds of a search, at most
PAIRS = 8  # asked to see how hard attention is at a length
HARD, SHORTER = 0.4, 0.6  # share of the way to hard attention that is too far; the next length then
HARDER, MUCH_SHORTER = 0.8, 0.3  # the same where there is far to go
LOOKS = 24  # lengths tried
ROUNDINGS = 64.0  # of an answer, or standard deviations of its noise: more is an offset
SHORTEST = 0.5  # tokens of a query are between this and the whole of that length
LOUD = 0.5  # noise over answers beyond which it is all the same
ABOVE_NOISE = 1.5  # times the noise that a fit may leave
AMPLIFIED = 1e6  # relative error of parameters per relative error of answers: nothing is known


def learn_random(ask: Asker, rng: np.random.Generator, claims: Claims) -> Hypothesis:
    """The whole recovery from random queries."""
    return _Sampling(ask, rng, claims).run()


def queries_for(width: int, heads: int, outputs: int, length: int = LENGTH) -> int:
    """Random queries asked for so many heads, biases included."""
    unknowns = heads * width * (width + 1 + outputs) + outputs
    numbers = max(unknowns / outputs, width * (width + 1) / (length - 1))
    return int(np.ceil(REDUNDANCY * numbers))


@dataclass
class _Sampling:
    ask: Asker
    rng: np.random.Generator
    claims: Claims
    asked: list[tuple[Array, Array]] = field(default_factory=list)

    def run(self) -> Hypothesis:
        longest = self.ask.oracle.spec.domain.max_length or LENGTH
        domain = self.ask.oracle.spec.domain
        self.free = domain.vocabulary is None and domain.radius > 0  # tokens may be made shorter
        self.length = min(LENGTH, longest)
        noise, _, _ = estimate_noise(self.ask.oracle, self.rng)
        self.ask.oracle = WithPrior(self.ask.oracle, noise)
        self.outputs = self.ask(self._drawn(1, 1), "values").shape[1]
        self.size = self._size()
        heads = self.claims.heads or FIRST_HEADS
        trouble: Exception | None = None
        biases = self._biases()
        while heads <= max(MOST_HEADS, self.claims.heads or 0):
            self._more(heads)
            for bias in biases:
                try:
                    learned = self._learned(self._fitted(heads, bias), bias)
                except (WrongFamily, NotIdentifiable) as error:
                    trouble = error
                else:
                    return self._told_by_pairs(learned) if self.length == 2 else learned
            heads *= 2
        assert trouble is not None
        raise trouble

    def _biased(self) -> bool:
        """Whether there is an offset, which zero is answered with, or a key bias: an anchor of zero
        then prefers one token to another."""
        token, zero = self.size * self._drawn(1, 1), np.zeros((1, 1, self.ask.width))
        alone = self.ask(np.concatenate([token, zero]), "values")
        pair = self.ask(np.concatenate([token, zero], axis=1), "values")
        off = np.concatenate([alone[1:], pair - alone.mean(axis=0)])
        return bool((np.abs(off) > ROUNDINGS * self._noise(alone)).any())

    def _noise(self, answers: Array) -> float:
        """Error of such answers."""
        return self.ask.unit * float(np.abs(answers).max()) + self.ask.additive

    def _size(self) -> float:
        """Share of the domain's length at which pairs are answered neither by the mean nor by one
        of their tokens. Single tokens act linearly: they are asked at one length."""
        if not self.free:
            return 1.0
        pairs = self._drawn(PAIRS, 2)
        alone = self.ask(pairs.reshape(-1, 1, self.ask.width), "values").reshape(PAIRS, 2, -1)
        zero = self.ask(np.zeros((1, 1, self.ask.width)), "values")
        mean, apart = alone.mean(axis=1) - zero, float(np.linalg.norm(alone[:, 0] - alone[:, 1]))
        half = self.ask(pairs[:, :1] / 2, "values") - (alone[:, 0] + zero) / 2
        if (np.abs(half) > ROUNDINGS * self._noise(alone)).any():
            raise WrongFamily("single tokens do not act linearly")
        size = 1.0
        for _ in range(LOOKS):
            off = float(np.linalg.norm(self.ask(size * pairs, "values") - zero - size * mean))
            hardness = 2 * off / max(size * apart, TINY)
            if hardness < HARD:
                break
            size *= SHORTER if hardness < HARDER else MUCH_SHORTER
        return size

    def _drawn(self, count: int, length: int) -> Float[Array, "count length d"]:
        tokens = self.rng.standard_normal((count * length, 1, self.ask.width))
        return inside(self.ask.oracle, tokens, self.rng).reshape(count, length, -1)

    def _more(self, heads: int) -> None:
        """Enough answers for so many heads."""
        needed = queries_for(self.ask.width, heads, self.outputs, self.length)
        missing = needed - sum(len(t) for t, _ in self.asked)
        if missing > 0:
            tokens = self._drawn(missing, self.length)
            if self.free:
                tokens *= self.size * self.rng.uniform(SHORTEST, 1.0, (missing, self.length, 1))
            self.asked.append((tokens, self.ask(tokens, "random")))

    def _biases(self) -> tuple[bool, ...]:
        """With key biases and an offset or without, the likelier first."""
        if self.claims.bias is not None:
            return (self.claims.bias,)
        return (self._biased(),) if self.free else (False, True)

    def _fitted(self, heads: int, bias: bool) -> Fitted:
        tokens = np.concatenate([t for t, _ in self.asked])
        answers = np.concatenate([a for _, a in self.asked])
        scale = max(float(np.sqrt(np.mean(answers**2))), TINY)
        self.level = self.ask.additive / scale
        learner = FromExamples(
            restarts=RESTARTS * heads,
            seconds=PATIENCE,
            most_heads=heads,
            bias=bias,
            noise=min(self.level, LOUD),
        )
        labels = answers.astype(np.float32) if self.ask.coarse else answers
        return learner.fit(tokens, labels[:, 0] if self.ask.scalar else labels, self.rng)

    def _learned(self, fitted: Fitted, bias: bool) -> Hypothesis:
        found = fitted.diagnostics
        if found.ending == "spent" and found.residual > ABOVE_NOISE * self.level:
            raise WrongFamily(
                f"no layer of up to {max(found.residual_by_heads)} heads reproduces the "
                f"answers to {found.examples} random queries (the best leaves "
                f"{found.residual:.1e} of them)"
            )
        if found.deficient or found.amplification > AMPLIFIED:
            raise IllConditioned(
                "in this domain the heads cannot be told apart: relative errors of the answers are "
                f"amplified {found.amplification:.1e} times"
            )
        note = f"Found from {found.examples} random queries inside the domain."
        notes = (note, *fewer_than_claimed(self.claims.heads, found.heads))
        unknowns = found.heads * self.ask.width * (self.ask.width + bias + self.outputs)
        floor = unknowns / self.outputs + bias
        return replace(fitted.learned, floor=floor, notes=notes)

    def _told_by_pairs(self, learned: Hypothesis) -> Hypothesis:
        """The layer, unless queries of two tokens leave others possible."""
        why = why_ambiguous(learned.model)
        if why is not None:
            raise NotIdentifiable(MIRRORED.format(why=why))
        return replace(learned, notes=(*learned.notes, FEWEST))
