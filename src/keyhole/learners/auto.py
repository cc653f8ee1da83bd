"""Which model is this? A handful of questions decide, the cheapest fitting learner does the rest.

Statement.  The family of a box is named from about ten questions beyond those that its learner
            asks anyway, and the box is then learned as a member of it; where the answers do not
            bear that out, as a member of the next larger family.
Questions.  Single tokens: labels only? linear (attention), or bent (a network)? Then, for a bent
            box, the same query after other tokens: does the rest of the sequence matter? For a
            linear one, one probe against one anchor at three lengths: the log-odds of a single
            head are affine in the length of the anchor, those of several heads are not.
Algebra.    Second differences.
Fails.      A box that is none of the families is rejected by the last learner tried, with its
            counterexample; `notes` tell what was found out.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import WrongFamily
from keyhole.learners.base import Learned, Learner
from keyhole.learners.labels import LabelOnly
from keyhole.learners.low_rank import LowRank
from keyhole.learners.multi_head import MultiHead
from keyhole.learners.pairs import learn_score
from keyhole.learners.relu_network import ReluNetworkLearner
from keyhole.learners.single_head import SingleHead, full_rank
from keyhole.learners.transformer import Transformer
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.questions import Questions
from keyhole.probes.precision import Measured, look
from keyhole.probes.values import LinearPart, measure_values

PURPOSE = "family"
LABELS = (-1.0, 0.0, 1.0)  # what label-only boxes answer with
LABEL_LOOKS = 12  # answers that must all be labels
LENGTHS = (1.0, 2.0, 3.0)  # of the anchor: equally spaced, for a second difference
TRIES = 6  # lengths of the pair at which a usable weight is looked for
USABLE = 0.02  # a weight this far from 0 and 1 has a logarithm worth comparing
AFFINE = 1e-5  # second difference of log-odds, beyond rounding, that one head cannot have
COARSE = 2.0**-20  # roundoff from which a rank cannot be told: every entry is measured instead
EXACTLY = 1e3  # roundoffs within which two answers are the same


@dataclass(frozen=True)
class Auto:
    """Finds out what the box is, then learns it.

    >>> import numpy as np
    >>> from keyhole.models.draw import attention
    >>> from keyhole.oracles.base import Spec
    >>> from keyhole.oracles.function import FunctionOracle
    >>> box = FunctionOracle(attention(np.random.default_rng(0), 5), Spec(width=5))
    >>> Auto().learn(box, np.random.default_rng(1)).details["family"]
    'single head'
    """

    def expected_questions(self, spec: Spec) -> int | None:
        return SingleHead().expected_questions(spec)

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Learned:
        domain = oracle.spec.domain
        if domain.vocabulary is not None or not domain.unbounded:
            return self._bounded(oracle, rng)
        found, questions, answers = look(oracle, rng)
        if self._labels_only(oracle, rng, answers):
            return named("label-only head", "every answer is a label", LabelOnly(), oracle, rng)
        if self._bent(oracle, rng, questions.tokens()[0], answers, found):
            return self._network(oracle, rng, found)
        try:
            linear = measure_values(oracle, rng, (found, questions, answers))
            single = self._one_head(oracle, linear, rng)
        except WrongFamily:
            return self._network(oracle, rng, found)
        if not single:
            reason = "single tokens act linearly, log-odds of pairs do not: several heads"
            return named("several heads", reason, MultiHead(), oracle, rng)
        coarse = linear.roundoff.relative > COARSE or linear.roundoff.additive > 0
        measure = full_rank if coarse else LowRank().measure
        learned = learn_score(oracle, rng, measure, linear)
        reason = "single tokens act linearly, log-odds of pairs are affine: one head"
        return labelled(learned, "single head", reason)

    def _bounded(self, oracle: Oracle, rng: np.random.Generator) -> Learned:
        reason = "in a bounded domain the smallest family is tried first"
        try:
            return named("single head", reason, SingleHead(), oracle, rng)
        except WrongFamily:
            if oracle.spec.domain.vocabulary is not None:
                raise
            return named("several heads", "one head does not explain it", MultiHead(), oracle, rng)

    @staticmethod
    def _labels_only(oracle: Oracle, rng: np.random.Generator, answers: Array) -> bool:
        if answers.ndim != 1 or not np.isin(answers, LABELS).all():
            return False
        tokens = rng.standard_normal((LABEL_LOOKS, 1, oracle.spec.width))
        return bool(np.isin(oracle.ask(Questions.of(tokens, PURPOSE)), LABELS).all())

    @staticmethod
    def _bent(
        oracle: Oracle, rng: np.random.Generator, token: Array, answers: Array, found: Measured
    ) -> bool:
        """Whether f([x]) is not affine along a line through a random token."""
        step = rng.standard_normal(token.shape)
        steps = np.array([-2.0, -1.0, 1.0, 2.0])[:, None, None] * step
        line = np.asarray(oracle.ask(Questions.of(token + steps, PURPOSE)), dtype=np.float64)
        middle = np.asarray(answers[0], dtype=np.float64)
        bend = np.abs(np.array([line[0] + line[3] - 2 * middle, line[1] + line[2] - 2 * middle]))
        size = np.max(np.abs(line)) + np.max(np.abs(middle))
        allowed = EXACTLY * found.precision.relative * size + 16.0 * found.precision.floor
        return bool((bend > allowed).any())

    def _network(self, oracle: Oracle, rng: np.random.Generator, found: Measured) -> Learned:
        tokens = rng.standard_normal((2, 3, oracle.spec.width))
        tokens[1, -1] = tokens[0, -1]
        answers = np.asarray(oracle.ask(Questions.of(tokens, PURPOSE)), dtype=np.float64)
        size = float(np.max(np.abs(answers)))
        allowed = EXACTLY * found.precision.relative * size + 16.0 * found.precision.floor
        if (np.abs(answers[0] - answers[1]) <= allowed).all():
            reason = "single tokens bend, the rest of a sequence does not matter"
            return named("ReLU network", reason, ReluNetworkLearner(), oracle, rng)
        reason = "single tokens bend, and the rest of a sequence matters"
        return named("Transformer", reason, Transformer(), oracle, rng)

    @staticmethod
    def _one_head(oracle: Oracle, linear: LinearPart, rng: np.random.Generator) -> bool:
        """Whether the log-odds of a probe are affine in the length of the anchor."""
        width = oracle.spec.width
        value = linear.value / np.linalg.norm(linear.value) if linear.value.any() else linear.value
        lean = value @ rng.standard_normal(value.shape[1])
        probe = rng.standard_normal(width) / np.sqrt(width) + lean
        anchor = rng.standard_normal(width)
        anchor -= value @ (value.T @ anchor) if linear.scalar else 0.0
        length = 1.0 / width**0.5
        for _ in range(TRIES):
            x = length * np.outer(LENGTHS, anchor)
            tokens = np.stack([x + probe, x], axis=1)
            answers = np.asarray(oracle.ask(Questions.of(tokens, PURPOSE)), dtype=np.float64)
            rest = answers.reshape(len(x), -1) - linear.offset - linear.at(x)
            swing = linear.at(probe[None])
            weight = rest @ swing[0] / (swing[0] @ swing[0])
            off = np.linalg.norm(rest - np.outer(weight, swing[0]), axis=1)
            if (off > AFFINE * np.linalg.norm(swing)).any():
                return False  # a vector answer off the line of its two values
            if (weight > USABLE).all() and (weight < 1.0 - USABLE).all():
                odds = np.log(weight / (1.0 - weight))
                if np.ptp(odds) > USABLE:
                    bend = abs(odds[0] - 2.0 * odds[1] + odds[2])
                    noise = linear.roundoff.relative + linear.roundoff.additive
                    return bool(bend <= AFFINE + EXACTLY * noise / USABLE)
                length *= 4.0
            elif (weight < -USABLE).any() or (weight > 1.0 + USABLE).any():
                return False
            else:
                length, probe = length / 4.0, probe / 2.0
        return True  # nothing against it: the single-head learner will see


def named(
    family: str, reason: str, learner: Learner, oracle: Oracle, rng: np.random.Generator
) -> Learned:
    return labelled(learner.learn(oracle, rng), family, reason)


def labelled(learned: Learned, family: str, reason: str) -> Learned:
    """The same hypothesis, with the family and why it was chosen."""
    return Learned(
        learned.model,
        learned.errors,
        learned.floor,
        (f"Taken for {family}: {reason}.", *learned.notes),
        {**learned.details, "family": family, "family_reason": reason},
        learned.precision,
    )
