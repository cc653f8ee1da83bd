"""A network with one hidden layer of ReLUs, from its values alone.

Statement.  f(x) = offset + skip . x + Σ_j output_j relu(weight_j . x + bias_j) is recovered as a
            function, with the number of neurons unknown, at little more than one query per
            unknown: m(d-1) for the gradients, about four and a half per breakpoint for the line.
Queries.    Length one. Free inputs and double precision: one random line, which crosses every
            hyperplane, and the gradients along it (unbounded). Answers with few digits: several
            lines and a fit (several_lines). Bounded inputs: rays from a centre (bounded).
Algebra.    Jumps of the gradient are output_j weight_j; with `exact` all parameters are fitted to
            random points (least_squares). On which side of its hyperplane a neuron is active
            is decided where it can be (orientation).
Fails.      A box that bends or jumps is refused along the line, one that is piecewise affine but
            not one hidden layer by validation (WrongFamily, with a counterexample). Answers with
            few digits hide close or weak breakpoints (IllConditioned). Hyperplanes that miss a
            bounded domain cannot be seen, and are not needed there.
Source.     Milli et al. 2019; Jagielski et al. 2020; Carlini, Jagielski, Mironov 2020; Daniely,
            Granot 2021. The shared gradients, two-sided checks and corrections are ours.
"""

from dataclasses import dataclass, replace

import numpy as np

from keyhole.arrays import real_number, whole_number
from keyhole.errors import IllConditioned, WrongFamily
from keyhole.learners.base import Attempt, Hypothesis, Inconclusive, Refuted
from keyhole.learners.mlp.relu.bounded import LEAST_ERROR, search_by_rays
from keyhole.learners.mlp.relu.domain import InputRegion
from keyhole.learners.mlp.relu.hypothesis import (
    Curved,
    FoundNetwork,
    NetworkBox,
    build_hypothesis,
)
from keyhole.learners.mlp.relu.least_squares import balance_points, fit_frozen_patterns
from keyhole.learners.mlp.relu.several_lines import search_several_lines
from keyhole.learners.mlp.relu.unbounded import FewDigits, search_one_line
from keyhole.measurement.asker import few_digits
from keyhole.oracles.base import Oracle, Spec


class NotPiecewiseLinear(WrongFamily):
    """The box is a curve where it was looked at, as networks with a smooth activation are."""


@dataclass(frozen=True)
class ReluNetworkLearner:
    """Learner for networks with one hidden layer of ReLUs (leaky ones included).

    Args:
        neurons: A promise, not needed: a box with more hyperplanes is refused.
        exact: Whether about twice the queries are spent to reach the last digits.
        scale: Size of the inputs of interest; None takes it from the domain, where there is one.
        signs: Whether the neurons' sides are found too.
        unseen: In a bounded domain a hyperplane may cut off a corner that nothing was asked about:
            the share of the domain's edge for which that may be so. 3 / unseen queries are spent on
            it.

    Example:
        >>> import numpy as np
        >>> from keyhole.oracles.base import Spec
        >>> from keyhole.oracles.function import FunctionOracle
        >>> box = FunctionOracle(lambda x: np.maximum(x[:, 0] @ np.ones(3) - 1, 0), Spec(width=3))
        >>> ReluNetworkLearner().learn(box, np.random.default_rng(0)).model
        ReluNetwork(width=3, neurons=1, outputs=scalar)
    """

    neurons: int | None = None
    exact: bool = False
    scale: float | None = None
    signs: bool = True
    unseen: float = 0.003

    def __post_init__(self) -> None:
        if self.neurons is not None:
            whole_number("neurons", self.neurons, 0)
        if self.scale is not None:
            real_number("scale", self.scale, 0.0)
        real_number("unseen", self.unseen, 0.0, 1.0)

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        region = InputRegion.of(oracle.spec.domain, oracle.spec.width, self.scale)
        box = NetworkBox.of(oracle, self.forecast_neurons)
        tried: tuple[Attempt, ...] = ()
        if region.unbounded:
            found = search_one_line(box, region, rng)
            if isinstance(found, FewDigits):
                tried = (Attempt("one line", found.reason),)
                found = search_several_lines(box, region, rng)
        else:
            # the search for corners that nothing was asked about, and a fifth for the neurons
            oracle.expect(int(1.2 * 3 / self.unseen))
            found = search_by_rays(box, region, rng, self.unseen)
        if isinstance(found, Curved):
            raise NotPiecewiseLinear(found.reason, found.counterexample)
        if isinstance(found, Refuted):
            raise WrongFamily(found.reason, found.counterexample)
        if isinstance(found, Inconclusive):
            raise IllConditioned(found.reason)
        if self.exact and box.scalar and box.clean and not found.exactness.low:
            found = fit_to_last_digits(box, region, found, rng)
        if self.neurons is not None and found.network.neurons > self.neurons:
            raise WrongFamily(
                f"the box bends at {found.network.neurons} hyperplanes, more than the "
                f"{self.neurons} neurons that were promised",
                stated=True,
            )
        return replace(build_hypothesis(found, box, region, orient=self.signs), tried=tried)

    def forecast_neurons(self, count: int, spec: Spec) -> int | None:
        """What so many neurons cost."""
        return replace(self, neurons=count).expected_queries(spec)

    def expected_queries(self, spec: Spec) -> int | None:
        """Measured: per unknown, and per neuron for its breakpoint."""
        if self.neurons is None:
            return None
        answer = spec.outputs or 1
        floor = self.neurons * (spec.width + answer) + answer
        if few_digits(spec):
            return int(self.neurons * ((2.4 if answer > 1 else 3.1) * spec.width + 15))
        if answer > 1:
            return int(2.3 * floor / answer)
        return int((2.4 if self.exact else 1.03) * floor + 3.5 * self.neurons)


def fit_to_last_digits(
    box: NetworkBox, region: InputRegion, found: FoundNetwork, rng: np.random.Generator
) -> FoundNetwork:
    """All parameters of a scalar box again, from 1.2 random points per unknown, as long as all
    queries together stay below 2.48 times the floor."""
    network = found.network
    unknowns = (network.neurons + 1) * (network.width + 1)
    floor = network.neurons * (network.width + 1) + 1
    count = min(int(1.2 * unknowns), int(2.48 * floor) - box.spent)
    points = region.points(rng, max(count, unknowns + 1))
    if region.unbounded:
        points = balance_points(network, points, int(1.5 * (network.width + 1)))
    answers = box.ask(points, "polish")
    best = fit_frozen_patterns(network, points, answers[:, 0])
    error = LEAST_ERROR * found.exactness.unit
    return replace(found, network=best, error=np.full(best.neurons, error), affine_error=error)
