"""One Transformer layer: softmax attention followed by a network of ReLUs.

Statement.  f(X) = network(Σ_i softmax_i(x_i · (score x_N + key_bias)) x_i) is recovered with the
            queries of any learner of networks plus about one per entry of the score.
Queries.    Length one: the network is an oracle of its own (oracles/wrappers/restrict), any
            `FfnLearner` learns it. Then, method "segment": pairs [x + u ; x], read off the known
            network along the segment from x to x + u (score_from_segments). Method "antisymmetric":
            f(X) − f(−X) is an attention head (learners/published/antisymmetric) for any learner of
            attention: two queries per entry, networks without biases only.
Algebra.    With probes and anchors orthonormal, the log-odds over the lengths are P score Ωᵀ.
            An anchor that goes around the attention is recovered too (residual).
Fails.      A network that does not change along any segment hides the score (NotIdentifiable).
            Several heads or another activation fail validation (WrongFamily).
Source.     Section 4 of Bhattamishra, Shah, Hahn, Kanade, "Provably Learning Attention with
            Queries" (2026); reading the known network along segments is ours.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float
from keyhole.errors import (
    Counterexample,
    DomainError,
    IllConditioned,
    InvalidArgument,
    NotIdentifiable,
    WrongFamily,
)
from keyhole.learners.base import (
    Attempt,
    Diagnostics,
    Hypothesis,
    Inconclusive,
    Learner,
    Refuted,
    Result,
)
from keyhole.learners.mlp import (
    InputRegion,
    NetworkDiagnostics,
    ReluNetworkLearner,
    derive_standard_errors,
)
from keyhole.learners.published.antisymmetric import Antisymmetric
from keyhole.learners.transformer.ffn import FfnLearner
from keyhole.learners.transformer.residual import ResidualProbe
from keyhole.learners.transformer.score_from_segments import learn_score
from keyhole.measurement.asker import Asker
from keyhole.measurement.evidence import Estimate, Evidence
from keyhole.models.attention import Attention
from keyhole.models.relu_network import ReluNetwork
from keyhole.models.transformer import TransformerModel
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.wrappers.restrict import SingleToken

VALID = 1e-6  # how much a sequence may be off, relative to the answers, behind an exact network
NETWORK_GAIN = 1000.0  # how much more a sequence may be off than the network, relative to it
RESIDUAL_NOTE = (
    "The anchor goes around the attention (a residual connection). Seen are only products: "
    "mixed_weight is the first layer times the value map, and mixed_skip what the linear part "
    "makes of the attended tokens. If the anchor is added unscaled before the network, weight - "
    "mixed_weight is the first layer, up to the scale of each neuron, and the value map follows "
    "where that has full column rank; whether it is unscaled, the answers do not tell. What is "
    "added after the network is part of skip - mixed_skip."
)
UNSTATED_NOTE = (
    "The learner of the network states no errors. Those reported follow from the largest "
    "difference between its network and the box at {points} fresh points, {error:.1g}."
)


@dataclass(frozen=True, eq=False, kw_only=True)
class TransformerDiagnostics(Diagnostics):
    """What was found out beside the layer."""

    network: Diagnostics  # of the learner of the network
    network_error: float  # largest error of the network, in units of its answers
    key_bias: bool
    residual: bool

    def as_dict(self) -> dict[str, Any]:
        """The fields by their names, those about the network among them."""
        own = {name: getattr(self, name) for name in ("network_error", "key_bias", "residual")}
        return {**self.network.as_dict(), **own}


@dataclass(frozen=True, eq=False)
class KnownNetwork:
    """The network of one token, its standard errors and how far it is off."""

    model: ReluNetwork
    errors: ReluNetwork
    error: float  # largest difference to the box, in units of the answers
    scale: float  # how much the answers vary
    hypothesis: Hypothesis  # of the learner of the network
    notes: tuple[str, ...]

    @property
    def relative_error(self) -> float:
        return self.error / max(self.scale, TINY)


@dataclass(frozen=True)
class Transformer:
    """Learner for one layer: a head of attention, then a network.

    Args:
        ffn: Learns the network. Its errors reach the score tenfold, so it is learned to the last
            digits by default; `ReluNetworkLearner()` takes half the queries and leaves errors of
            about 1e-9.
        method: "segment" (one query per entry of the score, any network) or "antisymmetric" (the
            paper's reduction: two per entry, networks without biases).
        attention: Learns the head with "antisymmetric"; None for a `SingleHead`.

    Example:
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
        longest, width = oracle.spec.domain.max_length, oracle.spec.width
        if longest is not None and longest < 2:
            raise DomainError("with queries of length one only, attention cannot be seen")
        region = InputRegion.of(oracle.spec.domain, oracle.spec.width, None)
        network = learn_network(
            SingleToken(oracle, self._count_score(width)), self.ffn, region, rng
        )
        oracle.expect(self._count_score(width))
        if self.method == "antisymmetric":
            found = learn_by_antisymmetry(oracle, network, self.attention, rng)
            if (refuted := validate(oracle, found.model, region, rng)) is not None:
                raise WrongFamily(refuted.reason, refuted.counterexample)
            return found
        plain = learn_plain_layer(oracle, network, region, rng)
        if isinstance(plain, Hypothesis):
            return plain
        around = learn_residual_layer(oracle, network, region, rng)
        if isinstance(around, Hypothesis):
            return replace(around, tried=(Attempt("a layer without residual", plain.reason),))
        if not isinstance(plain, Refuted):
            raise NotIdentifiable(plain.reason)
        if NETWORK_GAIN * network.relative_error > VALID:
            # one answer misread behind this network may have spoilt the score of an honest layer
            raise IllConditioned(
                f"{plain.reason}. But the box's answers have so few digits that the score may have "
                "been misread; the same box in double precision would tell"
            )
        raise WrongFamily(plain.reason, plain.counterexample)

    def expected_queries(self, spec: Spec) -> int | None:
        inner = self.ffn.expected_queries(spec)
        if inner is None:
            return None
        return inner + self._count_score(spec.width)

    def _count_score(self, width: int) -> int:
        """Queries for the score, once the network is known."""
        per_entry = 1 if self.method == "segment" else 2
        return per_entry * width**2 + width


def learn_network(
    oracle: Oracle, learner: FfnLearner, region: InputRegion, rng: np.random.Generator
) -> KnownNetwork:
    """The network of one token. An error that its learner does not state is measured."""
    found = learner.learn(oracle, rng)
    network = found.model
    if not isinstance(network, ReluNetwork):
        raise InvalidArgument(
            f"the ffn learner returned a {type(network).__name__}; a ReluNetwork is needed"
        )
    stated = found.diagnostics
    if isinstance(stated, NetworkDiagnostics):
        error, scale = stated.function_error, stated.scale
        return KnownNetwork(network, found.errors, error, scale, found, found.notes)
    network_checks = 16  # fresh points at which a network of unknown error is compared with the box
    points = region.points(rng, network_checks)
    answers = Asker(oracle).points(points, "validation")
    gaps = answers - network(points).reshape(answers.shape)
    error = float(np.linalg.norm(gaps, axis=1).max())
    scale = float(np.linalg.norm(np.std(answers, axis=0)))
    # error of a network, relative to its answers, behind which no score is read
    poorest_network = 1e-4
    if error > poorest_network * scale:
        raise IllConditioned(
            f"the network that the ffn learner returned is off by {error:.2g} at a fresh point, "
            f"where answers vary by {scale:.2g}: too far to read a score behind it. It must agree "
            "with the box at least to single precision"
        )
    error = max(error, 4 * UNIT_ROUNDOFF * scale)
    errors, notes = found.errors, found.notes
    if not states_errors(errors):
        errors = derive_standard_errors(
            network, np.full(network.neurons, error), error, region.scale
        )
        notes = (*notes, UNSTATED_NOTE.format(points=network_checks, error=error))
    return KnownNetwork(network, errors, error, scale, found, notes)


def states_errors(errors: Any) -> bool:
    """Whether standard errors of a network are there and not all zero."""
    if not isinstance(errors, ReluNetwork):
        return False
    return any(part.any() for part in errors.to_arrays().values())


def learn_plain_layer(
    oracle: Oracle, network: KnownNetwork, region: InputRegion, rng: np.random.Generator
) -> Result:
    """A layer whose network sees the attended mean and nothing else."""
    exactness = max(network.error, 4 * UNIT_ROUNDOFF * network.scale)
    try:
        found = learn_score(oracle, network.model, region, exactness, rng)
    except NotIdentifiable as hidden:
        return Inconclusive(str(hidden))
    model = TransformerModel(found.score, found.key_bias, network.model)
    errors = TransformerModel(found.score_error, found.key_bias_error, network.errors)
    refuted = validate(oracle, model, region, rng, network.relative_error)
    return refuted or build_hypothesis(model, errors, network)


def learn_residual_layer(
    oracle: Oracle, network: KnownNetwork, region: InputRegion, rng: np.random.Generator
) -> Result:
    """A layer whose anchor also goes around the attention."""
    probe = ResidualProbe(Asker(oracle), network.model, region, rng)
    residual_error = 1e-8  # relative error of what is read off small steps, a generous bound
    try:
        score, key_bias = probe.measure_score()
        if float(np.linalg.norm(key_bias)) <= residual_error * float(np.linalg.norm(score)):
            key_bias = np.zeros_like(key_bias)
        mixed, skip = probe.measure_mixed(score, key_bias)
    except NotIdentifiable as hidden:
        return Inconclusive(str(hidden))
    relative = max(residual_error, NETWORK_GAIN * network.relative_error)
    if np.abs(skip).max(initial=0.0) <= 10 * relative * network.scale / region.scale:
        skip = np.zeros_like(skip)  # within ten errors of none
    model = TransformerModel(score, key_bias, network.model, mixed, skip)
    if (refuted := validate(oracle, model, region, rng)) is not None:
        return refuted
    off = relative * float(np.linalg.norm(score)) / model.width
    errors = TransformerModel(
        np.full_like(score, off),
        np.full_like(key_bias, off * region.size if key_bias.any() else 0.0),
        network.errors,
        np.full_like(mixed, relative * float(np.abs(mixed).max(initial=TINY))),
        np.full_like(skip, relative * network.scale / region.size if skip.any() else 0.0),
    )
    return build_hypothesis(model, errors, network, (RESIDUAL_NOTE,))


def learn_by_antisymmetry(
    oracle: Oracle, network: KnownNetwork, learner: Learner | None, rng: np.random.Generator
) -> Hypothesis:
    """The paper's reduction: f(X) − f(−X) is an attention head."""
    bias = Estimate(network.model.bias, network.errors.bias)
    evidence = Evidence(NoiseModel(max(network.relative_error, UNIT_ROUNDOFF)))
    if not evidence.vanishes(bias, float(np.linalg.norm(network.model.weight))):
        raise NotIdentifiable(
            "the network has biases, so f(X) − f(−X) is no attention head; use "
            'method="segment", which needs no symmetry'
        )
    if learner is None:
        from keyhole.learners.single_head import SingleHead

        learner = SingleHead()
    found = learner.learn(Antisymmetric(oracle), rng)
    if not isinstance(found.model, Attention) or len(found.model.heads) != 1:
        raise InvalidArgument("the attention learner must return one attention head")
    head, spread = found.model.heads[0], found.errors.heads[0]
    model = TransformerModel(head.score, head.key_bias, network.model)
    errors = TransformerModel(spread.score, spread.key_bias, network.errors)
    return build_hypothesis(model, errors, network, found.notes)


def build_hypothesis(
    model: TransformerModel,
    errors: TransformerModel,
    network: KnownNetwork,
    notes: tuple[str, ...] = (),
) -> Hypothesis:
    unknowns = model.width**2 + (model.width if model.key_bias.any() else 0)
    if model.mixed_weight is not None and model.mixed_skip is not None:
        unknowns += model.mixed_weight.size + model.mixed_skip.size
    inner = network.hypothesis
    return Hypothesis(
        model,
        errors,
        inner.floor + unknowns / (model.outputs or 1),
        (*network.notes, *notes),
        inner.details,
        inner.noise,
        TransformerDiagnostics(
            network=inner.diagnostics,
            network_error=network.error,
            key_bias=bool(model.key_bias.any()),
            residual=model.residual,
        ),
        inner.tried,
    )


def validate(
    oracle: Oracle,
    model: TransformerModel,
    region: InputRegion,
    rng: np.random.Generator,
    known: float = 0.0,
) -> Refuted | None:
    """Random sequences: what neither pairs nor single tokens can show. `known` is the error of
    the network, relative to its answers."""
    valid = max(VALID, NETWORK_GAIN * known)
    ask, longest = Asker(oracle), oracle.spec.domain.max_length
    validation_lengths = (3, 5, 8)  # of the random sequences that are compared at the end
    for length in validation_lengths:
        if longest is not None and length > longest:
            continue
        tokens: Float[Array, "n d"] = region.points(rng, length)
        answer = ask.as_answered(ask(tokens[None], "validation")[0])
        predicted = model(tokens[None])[0]
        spread = float(np.linalg.norm(np.std(model(tokens[:, None, :]), axis=0)))
        gap = float(np.linalg.norm(answer - predicted))
        # where single tokens are answered alike, a tenth of the answer stands for the spread
        if gap > valid * max(spread, 0.1 * float(np.linalg.norm(answer))):
            return Refuted(
                f"not one head of attention followed by a network: a random sequence of length "
                f"{length} is answered {gap:.2g} apart",
                Counterexample(tokens, answer, predicted, "a random sequence"),
            )
    return None
