"""A network on a normalised token beside a residual, x + mlp(norm(x)).

Statement.  Beside the residual the answer is a network on n = x / sqrt(mean x^2 + epsilon), which
            lies on a sphere for all tokens of one size. A network is known from its answers on a
            sphere (learners/mlp), up to what the norm forgets: the mean of its rows. Gain and bias
            of the norm are inside its weights.
Queries.    One token and the same with another mean (kind of the norm); those of learners/mlp with
            tokens of mean square one; a few tokens that get smaller (epsilon).
Algebra.    At mean square one n has length sqrt(d / (1 + epsilon)), and N(u) = mlp(u / sqrt(1 +
            epsilon)) is what was learned. At size s the answer is N(ρ u), ρ^2 (s^2 + epsilon) =
            s^2 (1 + epsilon): ρ by Gauss-Newton in one unknown, then epsilon, then the weights.
Fails.      Where learners/mlp does: few inputs for many neurons, ReLUs on a sphere.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.learners.base import Hypothesis
from keyhole.learners.block.box import Unclear
from keyhole.learners.mlp import MlpLearner
from keyhole.measurement.asker import Asker
from keyhole.models.block import Block
from keyhole.models.mlp import Mlp, outer_table, with_parts
from keyhole.models.norm import kept_plane
from keyhole.oracles.base import Domain, Oracle, Spec, Wrapper
from keyhole.oracles.queries import QueryBatch
from keyhole.stages.epsilon import epsilon_of_share, find_epsilon


@dataclass(frozen=True, eq=False)
class OnSphere(Wrapper):
    """A sublayer without its residual, on points of the norm's plane."""

    inner: Oracle
    plane: Float[Array, "d k"]

    @property
    def spec(self) -> Spec:  # type: ignore[override]
        width, kept = self.plane.shape
        known = self.inner.spec
        sphere = Domain(max_length=known.domain.max_length, sphere=float(np.sqrt(width)))
        return replace(known, width=kept, outputs=width, domain=sphere)

    def ask(self, queries: QueryBatch) -> Array:
        tokens = queries.tokens() @ self.plane.T
        answers = np.asarray(self.inner.ask(QueryBatch.of(tokens, queries.purpose)))
        return np.asarray(answers - tokens[:, -1].astype(answers.dtype))


def learn_pre_norm_mlp(box: Asker, rng: np.random.Generator) -> Hypothesis:
    """The hypothesis of the network, as a block; raises Unclear and what learners/mlp raises."""
    kind = find_kind(box, rng)
    plane = kept_plane(box.width, kind)
    found = MlpLearner().learn(OnSphere(box.oracle, plane), rng)
    epsilon = measure_epsilon(box, found.model, plane, rng)
    model = lift_network(found.model, plane, np.sqrt(1.0 + epsilon))
    doubts = lift_errors(found.errors, plane)
    block = Block(None, model, norm="pre", kind=kind, epsilons=[epsilon])
    # epsilon is read off one answer: its relative error is about that of the network
    unsure = float(np.linalg.norm(doubts.inner) / np.linalg.norm(model.inner)) + 1e2 * box.error
    errors = Block(
        None,
        doubts,
        norm="pre",
        kind=kind,
        epsilons=[unsure * epsilon],
        gain=np.zeros((1, box.width)),
    )
    notes = (f"The box is {block}.", *found.notes)
    return replace(found, model=block, errors=errors, notes=notes, floor=found.floor + 1.0)


def find_kind(box: Asker, rng: np.random.Generator) -> str:
    """Whether another mean of the token changes the answer beside the residual."""
    token = box.representable(rng.standard_normal(box.width))
    tokens = box.representable(np.array([token, token + 2.0]))
    beside = box(tokens[:, None], "norm") - tokens
    gap, size = float(np.linalg.norm(beside[1] - beside[0])), float(np.linalg.norm(tokens))
    return "layer" if gap < 1e4 * box.error * size else "rms"


def measure_epsilon(box: Asker, network: Mlp, plane: Array, rng: np.random.Generator) -> float:
    """Epsilon, from tokens so small that it matters."""
    point = rng.standard_normal(plane.shape[1])
    point *= np.sqrt(len(plane)) / np.linalg.norm(point)

    def look(size: float) -> float:
        token = box.representable(size * (plane @ point))
        beside = box(token[None, None], "epsilon")[0] - token
        share = share_of(lambda part: network(part[:, None] * point), beside)
        # the sphere on which the network is known is that of tokens of size one
        return epsilon_of_share(share, size) / max(1.0 - (size / share) ** 2, TINY)

    epsilon = find_epsilon(look)
    if epsilon is None:
        raise Unclear("epsilon is too small or too large to be seen")
    return epsilon


def share_of(curve: Callable[[Array], Array], answer: Float[Array, " d"]) -> float:
    """The share at which a curve from zero to one passes an answer."""
    grid = np.linspace(0.0, 1.0, 401)
    share = float(grid[np.argmin(np.linalg.norm(curve(grid) - answer, axis=1))])
    for _ in range(20):
        at, above, below = curve(np.array([share, share + 1e-5, share - 1e-5]))
        slope = (above - below) / 2e-5
        share += float(slope @ (answer - at) / (slope @ slope))
    return share


def lift_network(network: Mlp, plane: Float[Array, "d k"], scale: float) -> Mlp:
    """The network on normalised tokens, from that on points which are longer by a factor."""
    gate = None if network.gate is None else scale * network.gate @ plane.T
    return Mlp(
        scale * network.inner @ plane.T,
        network.inner_bias,
        outer_table(network),
        activation=network.activation,
        linear=scale * network.linear @ plane.T,
        offset=network.offset,
        gate=gate,
        gate_bias=network.gate_bias,
    )


def lift_errors(errors: Mlp, plane: Float[Array, "d k"]) -> Mlp:
    """Standard errors add up by their squares."""
    square = (plane**2).T
    parts = {"inner": np.sqrt(errors.inner**2 @ square)}
    if errors.gate is not None:
        parts["gate"] = np.sqrt(errors.gate**2 @ square)
    wide = lift_network(errors, plane, 1.0)
    return with_parts(wide, **parts, linear=np.sqrt(errors.linear**2 @ square))
