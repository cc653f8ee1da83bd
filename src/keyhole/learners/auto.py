"""Which model is this? About twenty queries decide, the cheapest fitting learner does the rest.

Statement.  The family of a box is named from about twenty queries beyond those that its learner
            asks anyway, and the box is then learned as a member of it; where the answers do not
            bear that out, as a member of the next larger family.
Queries.  measurement/family: single tokens, a sequence reordered and repeated, pairs.
Algebra.    Second differences. How a score is measured (every entry, or only as many as its rank
            needs) depends on what a column costs: where one query tells a whole column, low
            rank saves nothing.
Fails.      A box that is none of the families is rejected, at once where the queries above say
            so, else by the learner; the error's `findings` tell what was found out.

A learner is imported where it is chosen: a run loads what it uses.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from keyhole.arrays import SINGLE_ROUNDOFF, random_stream
from keyhole.errors import (
    DomainError,
    IllConditioned,
    InvalidArgument,
    KeyholeError,
    OracleError,
    Unsupported,
    WrongFamily,
)
from keyhole.learners.base import Hypothesis, Learner
from keyhole.learners.multi_head import MultiHead, find_counterexample
from keyhole.learners.single_head import (
    RANK_SHOWN,
    RankSearch,
    SingleHead,
    fewest_queries,
    learn_head,
)
from keyhole.measurement.asker import Asker
from keyhole.measurement.families import Family
from keyhole.measurement.family import (
    Facts,
    examine_family,
    find_far_bend,
    resembles_whole_model,
)
from keyhole.measurement.noise import DECIMAL
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.wrappers.restrict import AffineSingles, WithPrior

BY_TEMPLATE = (
    "If the architecture is known, write it down as a torch module and its weights are fitted: "
    "keyhole recover TARGET --like package.module:make_model, or FromTemplate(module)"
)


@dataclass(frozen=True)
class Auto:
    """Finds out what the box is, then learns it.

    Example:
        >>> import numpy as np
        >>> from keyhole.models.random import attention
        >>> from keyhole.oracles.base import Spec
        >>> from keyhole.oracles.function import FunctionOracle
        >>> box = FunctionOracle(attention(np.random.default_rng(0), 5), Spec(width=5))
        >>> Auto().learn(box, np.random.default_rng(1)).details["family"]
        'single head'
    """

    finds_family: ClassVar[bool] = True  # nobody vouches for it: verified with more queries

    def expected_queries(self, spec: Spec) -> int | None:
        """Not known before the family is; then the learner that was chosen tells."""
        return None

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        domain = oracle.spec.domain
        if domain.tokens is not None:
            raise InvalidArgument(
                "this box takes the numbers of tokens: name what is to be learned of it, as in "
                "OutputLayerLearner() or TokenAttentionLearner()"
            )
        if domain.vocabulary is not None or domain.radius <= 0:
            return learn_among_given_tokens(oracle, rng)
        if has_tight_budget(oracle):
            reason = "the budget leaves no room to find out, so the smallest family is tried"
            return Choice((), Family.SINGLE_HEAD, reason).learn(SingleHead(), oracle, rng)
        # from a stream of its own: what is then asked is what the learner alone would ask
        facts = examine_family(oracle, rng.spawn(1)[0])
        oracle = WithPrior(oracle, choose_stated_noise(facts, oracle.spec.precision))
        family = name_family(oracle, facts, rng)
        if family in (Family.LABELS, Family.POSITIONS):
            return learn_named(oracle, rng, facts, family)
        if family.has_norm or family is Family.STACK:
            return learn_block(oracle, rng, facts, family)
        if family is Family.SINK:
            return learn_sink(oracle, rng, facts)
        if facts.bent:
            return learn_network(oracle, rng, facts)
        if computes_in_half(facts, oracle):
            return learn_in_half(oracle, rng, facts)
        return learn_linear(oracle, rng, facts)


def learn_named(
    oracle: Oracle, rng: np.random.Generator, facts: Facts, family: Family
) -> Hypothesis:
    """A family whose answers leave no doubt."""
    if family is Family.LABELS:
        from keyhole.learners.label_only import LabelOnly

        choice = Choice.of(facts, family, "every answer is a label")
        return choice.learn(LabelOnly(), oracle, rng)
    from keyhole.learners.positions import Positions

    reason = "single tokens act linearly, and the places of the others matter"
    return Choice.of(facts, family, reason).learn(Positions(), oracle, rng)


def learn_linear(oracle: Oracle, rng: np.random.Generator, facts: Facts) -> Hypothesis:
    """Heads; where they do not explain the answers, what single tokens may have hidden."""
    learn_heads = learn_several_heads if facts.several else learn_one_head
    try:
        return learn_heads(oracle, rng, facts)
    except (WrongFamily, IllConditioned, OracleError) as refused:
        if facts.half:
            return learn_in_half(oracle, rng, facts)
        if not isinstance(refused, WrongFamily):
            raise
        explain_bounded_scores(oracle, rng, facts, refused)
        return learn_bent_after_all(oracle, rng, facts, refused)


def name_family(oracle: Oracle, facts: Facts, rng: np.random.Generator) -> Family:
    """The family that the box is learned as, by the test that `check`, `plan` and `recover` share.

    Raises:
        Unsupported: The box was recognised, and there is no learner for it.
        WrongFamily: An answer contradicts every family.
    """
    if facts.labels:
        return Family.LABELS
    if in_order(facts, oracle):
        return Family.POSITIONS
    if computes_in_half(facts, oracle):
        return Family.SEVERAL_HEADS
    block = find_block(oracle, facts, rng.spawn(1)[0])
    if block:
        return block
    if facts.smooth and facts.sequence and is_with_sink(oracle, facts, rng.spawn(1)[0]):
        return Family.SINK
    refuse_unknown_families(oracle, facts)
    if facts.bent:
        if facts.smooth:
            return Family.SMOOTH_NETWORK
        return Family.TRANSFORMER if facts.sequence else Family.RELU_NETWORK
    return Family.SEVERAL_HEADS if facts.several else Family.SINGLE_HEAD


def explain_bounded_scores(
    oracle: Oracle, rng: np.random.Generator, facts: Facts, refused: WrongFamily
) -> None:
    """Raises what was refused with the reason, where that is scores that do not grow with the
    tokens: then no attention is hard."""
    if facts.outputs is None or facts.bent or not oracle.spec.domain.unbounded:
        return
    if oracle.remaining is not None and oracle.remaining < 40:  # queries that this may take
        return
    from keyhole.learners.positions import describe_bounded

    told = describe_bounded(Asker(oracle), rng.spawn(1)[0])
    if told is None:
        return
    message = f"attention is never hard: {told}. There is no learner for such scores"
    error = Unsupported(message)
    error.findings, error.family = refused.findings, refused.family
    raise error from refused


@dataclass(frozen=True)
class Choice:
    """A family, why it was chosen, and what else is known: goes into whatever comes of it."""

    findings: tuple[str, ...]
    family: Family
    reason: str
    precision: NoiseModel | None = None  # of the box, for learners that do not tell
    outputs: int | None = None  # numbers in an answer

    @classmethod
    def of(cls, facts: Facts, family: Family, reason: str) -> "Choice":
        precision = None if facts.labels else facts.noise
        return cls(facts.sentences, family, reason, precision, facts.outputs)

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"Taken for {self.family}: {self.reason}.", *self.findings)

    def learn(self, learner: Learner, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        known = oracle.spec
        spec = replace(
            known,
            outputs=known.outputs or self.outputs,
            precision=known.precision or self.precision,
        )
        oracle.expect(learner.expected_queries(spec))
        return self.annotate(lambda: learner.learn(oracle, rng))

    def annotate(self, learn: Callable[[], Hypothesis]) -> Hypothesis:
        """The hypothesis with the family and why it was chosen, or the error with them."""
        try:
            learned = learn()
        except DomainError as error:
            message = f"looks like {self.family}, which cannot be learned here: {error}"
            raise self.annotate_error(Unsupported(message)) from error
        except KeyholeError as error:
            raise self.annotate_error(error) from error.__cause__
        details = {**learned.details, "family": self.family.value, "family_reason": self.reason}
        return replace(
            learned,
            notes=(*self.notes, *learned.notes),
            details=details,
            noise=learned.noise or self.precision,
        )

    def annotate_error(self, error: KeyholeError) -> KeyholeError:
        error.findings = (*self.notes, *error.findings)
        error.family = error.family or self.family.value
        return error


def has_tight_budget(oracle: Oracle) -> bool:
    """Whether the budget is little more than the unknowns of one head in a bounded domain, where
    every query counts."""
    left, width = oracle.remaining, oracle.spec.width
    if left is None or np.isinf(oracle.spec.domain.radius):
        return False
    finding_out = 40  # queries that naming the family takes at most, noise apart
    return left < fewest_queries(width) + finding_out


def choose_stated_noise(facts: Facts, stated: NoiseModel | None) -> NoiseModel | None:
    """What was measured, where a learner would otherwise have to measure it again, or would not."""
    noise = facts.noise
    known = noise.format != DECIMAL  # to every learner, from the answers
    plain = known and noise.repeatable and noise.error_floor == 0
    return None if stated is not None or plain else noise


def computes_in_half(facts: Facts, oracle: Oracle) -> bool:
    """Whether the arithmetic of the box, not only its answers, has half precision: then tokens of
    ordinary size are all there is. (One head is learned with such tokens anyway.)"""
    stated = oracle.inner.spec.precision if isinstance(oracle, WithPrior) else None
    half = (facts.half and bool(facts.several)) or (stated is not None and stated.half)
    return half and not (facts.labels or facts.bent) and oracle.spec.domain.unbounded


def in_order(facts: Facts, oracle: Oracle) -> bool:
    """Whether the box may be attention in which the places of the tokens matter."""
    placed = facts.order or facts.copies
    return placed and not facts.bent and facts.outputs is not None and oracle.spec.domain.unbounded


def refuse_unknown_families(oracle: Oracle, facts: Facts) -> None:
    """Raises Unsupported where the box looks like a model that no learner takes, WrongFamily where
    an answer contradicts every family."""
    if facts.smooth and facts.sequence and not (facts.order or facts.copies):
        refuse_whole_model(oracle, facts)
        message = (
            "none of the families: one token is answered nonlinearly and smoothly and the rest of "
            "a sequence matters, but neither as attention sees it nor as a norm or a network lets "
            "it grow"
        )
    elif facts.order:
        message = (
            "none of the families: the order of the earlier tokens matters (positions, a mask or "
            "a recurrence?)"
        )
    elif facts.copies:
        message = (
            "none of the families: a sequence and the same sequence repeated are answered "
            "differently (a window, a sum instead of a mean?)"
        )
    elif facts.lone:
        error = Unsupported(
            "the answer is linear in the last token, and no other token is seen: a linear map, or "
            "attention so strong that every token sees itself alone. There is no learner for "
            "either: a linear map is read off the answers to unit vectors"
        )
        error.findings = facts.sentences
        raise error
    else:
        return
    refused = WrongFamily(f"{message}. {BY_TEMPLATE}", facts.against)
    refused.findings, refused.certain = facts.sentences, facts.against is not None
    raise refused


def refuse_whole_model(oracle: Oracle, facts: Facts) -> None:
    """Raises Unsupported for a model with attention and something smooth in it, the inputs or
    outputs of which are not those of a block."""
    if not resembles_whole_model(oracle, random_stream(0, "whole model"), facts.noise):
        return
    error = Unsupported(
        "looks like a model with attention and a norm or a smooth network in it (one token is "
        "answered nonlinearly and smoothly, and the rest of a sequence matters) whose inputs or "
        "outputs are not those of a block or a stack. No learner finds its architecture: open a "
        f"part by itself (its attention, its network, one block). {BY_TEMPLATE}"
    )
    error.findings = facts.sentences
    raise error


def find_block(oracle: Oracle, facts: Facts, rng: np.random.Generator) -> Family | None:
    """The block, stack or sublayer with a norm that the box may be, if any: answers are as wide as
    tokens, and single tokens act smoothly, as only a norm or a smooth activation does. A block
    without positions sees the earlier tokens as a set; causal blocks behind one another do not."""
    spec, repeatable = oracle.spec, facts.noise.repeatable and facts.noise.error_floor == 0
    if not (facts.bent and facts.outputs == spec.width and spec.domain.unbounded and repeatable):
        return None
    if spec.width < 2:  # a norm leaves nothing of a single number
        return None
    from keyhole.learners.block import name_block
    from keyhole.learners.stack import is_stack

    family, placed = name_block(oracle, rng), facts.order or facts.copies
    if family is None:
        return None
    norm = {Family.PRE_NORM_BLOCK: "pre", Family.POST_NORM_ATTENTION: "post"}.get(family)
    if (placed and family.is_whole_block) or (norm is not None and is_stack(oracle, norm, rng)):
        return Family.STACK
    return None if placed else family


def learn_block(
    oracle: Oracle, rng: np.random.Generator, facts: Facts, family: Family
) -> Hypothesis:
    """A block or a stack; what looks like a network and a norm may also be a network without
    one."""
    from keyhole.learners.block import BlockLearner
    from keyhole.learners.stack import StackLearner

    reason = "single tokens act smoothly, and huge ones as behind a norm"
    choice = Choice.of(facts, family, reason)
    if family is Family.STACK:
        return choice.learn(StackLearner(), oracle, rng)
    try:
        return choice.learn(BlockLearner(), oracle, rng)
    except (IllConditioned, WrongFamily) as refused:
        if facts.sequence:
            refused.findings = (*refused.findings, BY_TEMPLATE)
            raise
        return learn_network(oracle, rng, facts)


def is_with_sink(oracle: Oracle, facts: Facts, rng: np.random.Generator) -> bool:
    """Whether single tokens act smoothly because they share their weight with a sink."""
    from keyhole.learners.positions import has_sink

    vectors = facts.outputs is not None and oracle.spec.domain.unbounded
    if not vectors or not has_sink(Asker(oracle), rng):
        return False
    if facts.order:
        error = Unsupported("looks like attention with a sink and positions: no learner takes both")
        error.findings = facts.sentences
        raise error
    return True


def learn_sink(oracle: Oracle, rng: np.random.Generator, facts: Facts) -> Hypothesis:
    from keyhole.learners.positions import Positions

    reason = "single tokens act smoothly, and linearly once they are large"
    choice = Choice.of(facts, Family.SINK, reason)
    try:
        return choice.learn(Positions(sink=True), oracle, rng)
    except IllConditioned as refused:
        refused.findings = (*refused.findings, BY_TEMPLATE)
        raise
    except WrongFamily:
        refuse_unknown_families(oracle, facts)
        raise


def judge_family(
    oracle: Oracle, facts: Facts, rng: np.random.Generator
) -> tuple[Family | None, str]:
    """The family that a recovery with this stream starts from, or None and why there is none."""
    oracle = WithPrior(oracle, choose_stated_noise(facts, oracle.spec.precision))
    try:
        return name_family(oracle, facts, rng), ""
    except (WrongFamily, Unsupported) as refused:
        return None, str(refused)


def learn_network(oracle: Oracle, rng: np.random.Generator, facts: Facts) -> Hypothesis:
    from keyhole.learners.mlp.learner import MlpLearner
    from keyhole.learners.transformer.learner import Transformer

    if facts.smooth:
        reason = "single tokens act smoothly, the rest of a sequence does not matter"
        choice = Choice.of(facts, Family.SMOOTH_NETWORK, reason)
        return choice.learn(MlpLearner(), oracle, rng)
    if not facts.sequence:
        return learn_piecewise_linear(oracle, rng, facts)
    reason = "single tokens bend, and the rest of a sequence matters"
    return Choice.of(facts, Family.TRANSFORMER, reason).learn(Transformer(), oracle, rng)


def learn_piecewise_linear(oracle: Oracle, rng: np.random.Generator, facts: Facts) -> Hypothesis:
    """A ReLU network; what looks like one may have bends that are merely narrow, or wide, beside
    the tokens that were looked at: then it is learned at its own scale."""
    from keyhole.learners.mlp.learner import MlpLearner, is_smooth_at_its_scale
    from keyhole.learners.mlp.options import THOROUGH
    from keyhole.learners.mlp.relu.learner import NotPiecewiseLinear, ReluNetworkLearner

    reason = "single tokens bend, the rest of a sequence does not matter"
    choice = Choice.of(facts, Family.RELU_NETWORK, reason)
    try:
        return choice.learn(ReluNetworkLearner(scale=facts.far), oracle, rng)
    except (WrongFamily, IllConditioned) as refused:
        if not is_smooth_at_its_scale(oracle, rng.spawn(1)[0]):
            if isinstance(refused, NotPiecewiseLinear):
                raise choice.annotate_error(
                    IllConditioned(
                        f"{refused}; but the size of inputs at which such a network would show its "
                        "activation was not found"
                    )
                ) from refused
            raise
    reason = "single tokens act smoothly at the size at which they bend"
    choice = Choice.of(replace(facts, smooth=True), Family.SMOOTH_NETWORK, reason)
    return choice.learn(MlpLearner(options=THOROUGH), oracle, rng)


def learn_bent_after_all(
    oracle: Oracle, rng: np.random.Generator, facts: Facts, refused: WrongFamily
) -> Hypothesis:
    """No heads explain the box: before it is refused, single tokens are looked at once more. What
    looked linear along one chord may bend elsewhere."""
    far = find_far_bend(oracle, rng, facts.noise)
    if far is None:
        raise refused
    try:
        return learn_network(oracle, rng, replace(facts, bent=True, far=far))
    except (WrongFamily, Unsupported):
        raise refused from None


def learn_among_given_tokens(oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
    """A vocabulary, or a domain far from zero: one head, or several by random queries."""
    choice = Choice(
        (), Family.SINGLE_HEAD, "tokens are given, so the smallest family is tried first"
    )
    several = Choice((), Family.SEVERAL_HEADS, "one head does not explain the answers")
    try:
        learned = choice.learn(SingleHead(), oracle, rng)
    except WrongFamily:
        return several.learn(MultiHead(), oracle, rng)
    ask = Asker(WithPrior(oracle, learned.noise))
    if find_counterexample(ask, learned.model, learned.errors, rng) is None:
        return learned
    return several.learn(MultiHead(), oracle, rng)


def learn_several_heads(oracle: Oracle, rng: np.random.Generator, facts: Facts) -> Hypothesis:
    reason = "single tokens act linearly, pairs not as one head would have it"
    if facts.singles is not None and facts.noise.repeatable and not facts.noise.error_floor:
        oracle = AffineSingles(oracle, *facts.singles)
    choice = Choice.of(facts, Family.SEVERAL_HEADS, reason)
    return choice.learn(MultiHead(), oracle, rng)


def learn_in_half(oracle: Oracle, rng: np.random.Generator, facts: Facts) -> Hypothesis:
    """Heads of a box whose sums are rounded to 16 bits on the way."""
    reason = "single tokens act linearly, in half precision"
    choice = Choice.of(facts, Family.SEVERAL_HEADS, reason)
    return choice.learn(MultiHead(), WithPrior(oracle, facts.noise), rng)


def learn_one_head(oracle: Oracle, rng: np.random.Generator, facts: Facts) -> Hypothesis:
    """The cheapest way to learn one head; the larger families where that is not what it is."""
    reason = "single tokens act linearly, and pairs say nothing against one head"
    choice = Choice.of(facts, Family.SINGLE_HEAD, reason)
    try:
        learned = choice.annotate(lambda: learn_head_alone(oracle, rng, facts))
    except WrongFamily as error:
        if error.counterexample is not None and len(error.counterexample.input) == 1:
            facts = replace(facts, bent=True)  # not linear after all
            return learn_network(oracle, rng, facts)
        return learn_beyond_one_head(oracle, rng, facts, None, error)
    ask = Asker(WithPrior(oracle, learned.noise))
    example = find_counterexample(
        ask, learned.model, learned.errors, rng, oracle.spec.domain.radius
    )
    if example is None:
        return learned
    differs = WrongFamily("not one head: a fresh query is answered differently", example)
    return learn_beyond_one_head(oracle, rng, facts, learned, choice.annotate_error(differs))


def learn_head_alone(oracle: Oracle, rng: np.random.Generator, facts: Facts) -> Hypothesis:
    """Every entry of the score, or those that its rank needs: whichever can be cheaper."""
    if np.isinf(oracle.spec.domain.radius):
        spare = 0.08  # share of the queries that may be spent to have few rounds of them
        search = RankSearch(spare=spare, patient=False)
        return learn_head(oracle, rng, search, looked=(facts.noise, *facts.looked))
    return learn_head(oracle, rng, None)


def learn_beyond_one_head(
    oracle: Oracle,
    rng: np.random.Generator,
    facts: Facts,
    learned: Hypothesis | None,
    error: KeyholeError,
) -> Hypothesis:
    """Several heads; single tokens, if they are known, are not asked again. Not of a box that has
    changed meanwhile: what it was does not matter then."""
    if not facts.still(oracle):
        raise error
    if learned is not None and facts.noise.relative <= RANK_SHOWN:
        # in the type of the box's answers, from which their precision is told
        kind = np.float32 if facts.noise.relative >= SINGLE_ROUNDOFF else np.float64
        oracle = WithPrior(oracle, single=lambda tokens: learned.model(tokens).astype(kind))
    choice = Choice.of(facts, Family.SEVERAL_HEADS, "one head does not explain the answers")
    try:
        attempts = 2  # MultiHead has fewer where one head was tried first
        return choice.learn(MultiHead(attempts=attempts), oracle, rng)
    except WrongFamily as other:
        message = f"neither one head ({error}) nor several ({other})"
        neither = WrongFamily(
            f"none of the families: {message}", other.counterexample, searched=other.searched
        )
        neither.findings = (*facts.sentences, BY_TEMPLATE)
        raise neither from other
