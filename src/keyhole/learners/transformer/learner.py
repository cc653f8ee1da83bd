"""One Transformer layer: softmax attention followed by a network of ReLUs.

Statement.  f(X) = network(Σ_i softmax_i(x_i · (score x_N + key_bias)) x_i) is recovered with the
            queries of any learner of networks plus about one per entry of the score.
Queries.  Length one: the network is an oracle of its own (oracles/wrappers/single_token), any
            `FfnLearner` learns it. Then, method "segment": pairs [x + u ; x], read off the known
            network along the segment from x to x + u (segments). Method "antisymmetric":
            f(X) − f(−X) is an attention head (learners/published/antisymmetric) for any learner of
            attention: two queries per entry, networks without biases only.
Algebra.    With probes and anchors orthonormal, the log-odds over the lengths are P score Ωᵀ.
            An anchor that goes around the attention is recovered too (residual).
Fails.      A network that does not change along any segment hides the score (NotIdentifiable).
            Several heads or another activation fail validation (WrongFamily).
Source.     Section 4 of Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with
            Anchors" (2026); reading the known network along segments is ours.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float
from keyhole.errors import (
    Counterexample,
    DomainError,
    InvalidArgument,
    NotIdentifiable,
    WrongFamily,
)
from keyhole.learners.base import Hypothesis, Learner
from keyhole.learners.mlp.domain import InputRegion
from keyhole.learners.mlp.relu_learner import ReluNetworkLearner
from keyhole.learners.published.antisymmetric import Antisymmetric
from keyhole.learners.transformer.ffn import FfnLearner
from keyhole.learners.transformer.residual import ResidualProbe
from keyhole.learners.transformer.score_segments import ScoreSegments
from keyhole.models.attention import Attention
from keyhole.models.relu_network import ReluNetwork
from keyhole.models.transformer import TransformerModel
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.single_token import SingleToken

VALIDATION_LENGTHS = (3, 5, 8)  # of the random sequences that are compared at the end
VALID = 1e-6  # difference to the box there, relative to how much its answers vary
LEAST_SPREAD = 0.1  # of the answer itself, where single tokens are answered alike
RESIDUAL_ERROR = 1e-8  # relative error of what is read off small steps, a generous bound
NO_SKIP = 10.0  # errors of a mixed skip that cannot be told from none
NO_KEY_BIAS = 1e-8  # a key bias below this, relative to the score, is rounding
RESIDUAL_NOTE = (
    "The anchor goes around the attention (a residual connection). Seen are only products: "
    "mixed_weight is the first layer times the value map, and mixed_skip what the linear part "
    "makes of the attended tokens. If the anchor is added unscaled before the network, weight - "
    "mixed_weight is the first layer, up to the scale of each neuron, and the value map follows "
    "where that has full column rank; whether it is unscaled, the answers do not tell. What is "
    "added after the network is part of skip - mixed_skip."
)
NETWORK_GAIN = 1000.0  # how much more a sequence may be off than the network, relative to it
BIAS_FREE = 1e-6  # biases below this, relative to the rows of the network, are rounding


@dataclass(frozen=True)
class Transformer:
    """Learner for one layer: a head of attention, then a network that `ffn` learns.

    The network's errors reach the score tenfold, so it is learned to the last digits by default;
    `ffn=ReluNetworkLearner()` takes half the queries and leaves errors of about 1e-9.

    `method` is "segment" (one query per entry of the score, any network) or "antisymmetric"
    (the paper's reduction: two per entry, networks without biases; `attention` learns the head,
    a `SingleHead` unless another learner of attention is given).

    >>> import numpy as np
    >>> from keyhole.models.relu_network import ReluNetwork
    >>> from keyhole.oracles.base import Spec
    >>> from keyhole.oracles.function import FunctionOracle
    >>> rng = np.random.default_rng(0)
    >>> network = ReluNetwork(rng.standard_normal((5, 3)), np.ones(5), rng.standard_normal(5))
    >>> secret = TransformerModel(rng.standard_normal((3, 3)), None, network)
    >>> found = Transformer().learn(FunctionOracle(secret, Spec(width=3)), rng)
    >>> bool(np.abs(found.model.score - secret.score).max() < 1e-8)
    True
    """

    ffn: FfnLearner = field(default_factory=lambda: ReluNetworkLearner(exact=True))
    method: Literal["segment", "antisymmetric"] = "segment"
    attention: Learner | None = None

    def __post_init__(self) -> None:
        if self.method not in ("segment", "antisymmetric"):
            raise InvalidArgument(
                f'method must be "segment" or "antisymmetric", got {self.method!r}'
            )
        if isinstance(self.ffn, type) or not isinstance(self.ffn, FfnLearner):
            raise InvalidArgument(
                f"ffn must have learn(oracle, rng) and expected_queries(spec), got {self.ffn!r}"
            )
        if isinstance(self.attention, type) or not isinstance(self.attention, Learner | None):
            raise InvalidArgument(
                f"attention must be a learner such as SingleHead(), got {self.attention!r}"
            )

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        longest = oracle.spec.domain.max_length
        if longest is not None and longest < 2:
            raise DomainError("with queries of length one only, attention cannot be seen")
        inner = self.ffn.learn(SingleToken(oracle), rng)
        network = inner.model
        if not isinstance(network, ReluNetwork):
            raise InvalidArgument(
                f"the ffn learner returned a {type(network).__name__}; a ReluNetwork is needed"
            )
        if self.method == "antisymmetric":
            found = self._by_antisymmetry(oracle, network, inner, rng)
            validate(oracle, found.model, rng)
            return found
        try:
            found = self._by_segments(oracle, network, inner, rng)
            validate(oracle, found.model, rng, rounding_of(inner))
        except (WrongFamily, NotIdentifiable) as refused:
            around = self._around(oracle, network, inner, rng)
            if around is None:
                raise refused
            return around
        return found

    def expected_queries(self, spec: Spec) -> int | None:
        inner = self.ffn.expected_queries(spec)
        if inner is None:
            return None
        per_entry = 1 if self.method == "segment" else 2
        return inner + per_entry * spec.width**2 + spec.width

    def _by_segments(
        self, oracle: Oracle, network: ReluNetwork, inner: Hypothesis, rng: np.random.Generator
    ) -> Hypothesis:
        region = InputRegion.of(oracle.spec.domain, network.width, None)
        exactness = inner.details.get("function_error", 0.0)
        scale = inner.details.get("scale", 1.0)
        exactness = max(exactness, 4 * UNIT_ROUNDOFF * scale)
        work = ScoreSegments.design(oracle, network, region, exactness, rng)
        key_bias, bias_error = work.key_bias(rng)
        score, error = work.score(key_bias)
        model = TransformerModel(score, key_bias, network)
        errors = TransformerModel(error, bias_error, inner.errors)
        return learned(model, errors, inner, ())

    def _around(
        self, oracle: Oracle, network: ReluNetwork, inner: Hypothesis, rng: np.random.Generator
    ) -> Hypothesis | None:
        """A layer with a residual connection, if the box is one."""
        region = InputRegion.of(oracle.spec.domain, network.width, None)
        probe = ResidualProbe(oracle, network, region, rng)
        try:
            score, key_bias = probe.score()
            if float(np.linalg.norm(key_bias)) <= NO_KEY_BIAS * float(np.linalg.norm(score)):
                key_bias = np.zeros_like(key_bias)
            mixed, skip = probe.mixed(score, key_bias)
            length = np.sqrt(network.width) * region.scale
            scale = float(inner.details.get("scale", 1.0))
            relative = max(RESIDUAL_ERROR, NETWORK_GAIN * rounding_of(inner))
            if np.abs(skip).max(initial=0.0) <= NO_SKIP * relative * scale / region.scale:
                skip = np.zeros_like(skip)
            model = TransformerModel(score, key_bias, network, mixed, skip)
            validate(oracle, model, rng)
        except (WrongFamily, NotIdentifiable):
            return None
        off = relative * float(np.linalg.norm(score)) / network.width
        errors = TransformerModel(
            np.full_like(score, off),
            np.full_like(key_bias, off * length if key_bias.any() else 0.0),
            inner.errors,
            np.full_like(mixed, relative * float(np.abs(mixed).max(initial=TINY))),
            np.full_like(skip, relative * scale / length if skip.any() else 0.0),
        )
        return learned(model, errors, inner, (RESIDUAL_NOTE,))

    def _by_antisymmetry(
        self, oracle: Oracle, network: ReluNetwork, inner: Hypothesis, rng: np.random.Generator
    ) -> Hypothesis:
        rows = np.linalg.norm(network.weight, axis=1)
        if (np.abs(network.bias) > BIAS_FREE * rows).any():
            raise NotIdentifiable(
                "the network has biases, so f(X) − f(−X) is no attention head; use "
                'method="segment", which needs no symmetry'
            )
        learner = self.attention
        if learner is None:
            from keyhole.learners.single_head.learner import SingleHead

            learner = SingleHead()
        found = learner.learn(Antisymmetric(oracle), rng)
        if not isinstance(found.model, Attention) or len(found.model.heads) != 1:
            raise InvalidArgument("the attention learner must return one attention head")
        head, spread = found.model.heads[0], found.errors.heads[0]
        model = TransformerModel(head.score, head.key_bias, network)
        errors = TransformerModel(spread.score, spread.key_bias, inner.errors)
        return learned(model, errors, inner, found.notes)


def rounding_of(inner: Hypothesis) -> float:
    """Error of the network relative to how much its answers vary."""
    scale = float(inner.details.get("scale", 1.0))
    return float(inner.details.get("function_error", 0.0)) / max(scale, TINY)


def learned(
    model: TransformerModel, errors: TransformerModel, inner: Hypothesis, notes: tuple[str, ...]
) -> Hypothesis:
    answer = model.outputs or 1
    unknowns = model.width**2 + (model.width if model.key_bias.any() else 0)
    if model.mixed_weight is not None and model.mixed_skip is not None:
        unknowns += model.mixed_weight.size + model.mixed_skip.size
    return Hypothesis(
        model,
        errors,
        inner.floor + unknowns / answer,
        (*inner.notes, *notes),
        {**inner.details, "key_bias": bool(model.key_bias.any()), "residual": model.residual},
        inner.noise,
    )


def validate(
    oracle: Oracle, model: TransformerModel, rng: np.random.Generator, known: float = 0.0
) -> None:
    """Random sequences: what neither pairs nor single tokens can show. `known` is the error of
    the network, relative to its answers."""
    valid = max(VALID, NETWORK_GAIN * known)
    region = InputRegion.of(oracle.spec.domain, model.width, None)
    longest = oracle.spec.domain.max_length
    for length in VALIDATION_LENGTHS:
        if longest is not None and length > longest:
            continue
        tokens: Float[Array, "n d"] = region.points(rng, length)
        answer = oracle.ask(QueryBatch.of(tokens[None], "validation"))[0]
        predicted = model(tokens[None])[0]
        spread = float(np.linalg.norm(np.std(model(tokens[:, None, :]), axis=0)))
        gap = float(np.linalg.norm(answer - predicted))
        if gap > valid * max(spread, LEAST_SPREAD * float(np.linalg.norm(answer))):
            raise WrongFamily(
                f"not one head of attention followed by a network: a random sequence of length "
                f"{length} is answered {gap:.2g} apart",
                Counterexample(tokens, answer, predicted, "a random sequence"),
            )
