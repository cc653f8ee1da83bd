"""A network with one hidden layer of ReLUs, from its values alone.

Statement.  f(x) = offset + skip . x + Σ_j output_j relu(weight_j . x + bias_j) is recovered as a
            function, with the number of neurons unknown, at little more than one query per
            unknown: m(d-1) for the gradients, about four and a half per kink for the line.
Queries.  Length one. A random line crosses every plane once (kinks, line_search); the
            gradients of the cells along it (gradients); a few random points to validate.
Algebra.    Jumps of the gradient are output_j weight_j. Narrow cells are corrected by least
            squares on random points (relu_corrections), with `exact` all parameters are.
            Which side of a plane is on is decided where it can be (learners/mlp/orientation).
Fails.      A box that bends or jumps is refused along the line, one that is piecewise affine but
            not one hidden layer by validation (WrongFamily, with a counterexample). Answers with
            few digits hide close or weak kinks (IllConditioned). Planes that miss a bounded domain
            cannot be seen, and are not needed there.
Source.     Milli et al. 2019; Jagielski et al. 2020; Carlini, Jagielski, Mironov 2020; Daniely,
            Granot 2021. The shared gradients, two-sided checks and corrections are ours.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import SINGLE_ROUNDOFF, TINY, real_number, whole_number
from keyhole.errors import WrongFamily
from keyhole.learners.base import Hypothesis
from keyhole.learners.mlp.domain import InputRegion
from keyhole.learners.mlp.orientation import Signs, decided_signs
from keyhole.learners.mlp.relu_answers import Answers
from keyhole.learners.mlp.relu_hypothesis import (
    ReluDiagnostics,
    derive_standard_errors,
    flat,
    notes_on,
    without_rounding,
)
from keyhole.learners.mlp.unbounded import NetworkSearch
from keyhole.measurement.asking import few_digits
from keyhole.models.relu_network import ReluNetwork
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.noise import NoiseModel

# measured queries: per unknown of a vector box; per unknown and per neuron (for its kink) of a
# scalar one
VECTOR_RATE = 2.3
SCALAR_RATE, EXACT_RATE, PER_KINK = 1.03, 2.4, 3.5
ROUGH_SCALAR_RATE, ROUGH_VECTOR_RATE, ROUGH_PER_KINK = 3.1, 2.4, 15  # the same with few digits


@dataclass(frozen=True)
class ReluNetworkLearner:
    """Learner for networks with one hidden layer of ReLUs (leaky ones included).

    `neurons` is a promise, not needed: a box with more planes is refused. `exact` spends about
    twice the queries to reach the last digits. `scale` is the size of the inputs of interest
    (taken from the domain where there is one). `signs=False` leaves the neurons' sides open.
    In a bounded domain a plane may cut off a corner that nothing was asked about: `unseen` is the
    share of the domain's edge for which that may be so; 3 / unseen queries are spent on it.

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
        box = Answers(oracle)
        search = NetworkSearch(box, region, rng, self.unseen)
        network = search.network()
        if self.exact and box.scalar and not box.rough:
            network = search.polish(network)
        if self.neurons is not None and network.neurons > self.neurons:
            raise WrongFamily(
                f"the box bends at {network.neurons} planes, more than the {self.neurons} neurons "
                "that were promised"
            )
        return result(search, network, self.signs)

    def expected_queries(self, spec: Spec) -> int | None:
        if self.neurons is None:
            return None
        answer = spec.outputs or 1
        floor = self.neurons * (spec.width + answer) + answer
        if few_digits(spec):
            rate = ROUGH_VECTOR_RATE if answer > 1 else ROUGH_SCALAR_RATE
            return int(self.neurons * (rate * spec.width + ROUGH_PER_KINK))
        if answer > 1:
            return int(VECTOR_RATE * floor / answer)
        return int((EXACT_RATE if self.exact else SCALAR_RATE) * floor + PER_KINK * self.neurons)


def result(search: NetworkSearch, network: ReluNetwork, signs: bool) -> Hypothesis:
    """The network with its sides decided, errors and notes."""
    box, region = search.box, search.region
    answer = network.output.shape[1]
    error = search.error
    if len(error) != network.neurons:  # planes were merged: the worst speaks for all
        error = np.full(network.neurons, error.max(initial=0.0))
    accuracy = float(np.linalg.norm(error)) + search.affine_error
    decided = Signs(network, False, "not asked")
    if signs:
        decided = decided_signs(network, accuracy)
    model = flat(decided.network) if box.scalar else decided.network
    errors = derive_standard_errors(model, error, search.affine_error, region.scale)
    digits = box.unit / max(box.scale, TINY)
    model = without_rounding(model, errors, box.scale, region.scale, digits)
    floor = (network.neurons * (network.width + answer) + answer) / answer
    diagnostics = ReluDiagnostics(
        function_error=max(search.agreement, float(np.linalg.norm(error))),
        scale=box.scale,
        neurons=network.neurons,
        orientation=decided.method,
        orientation_certified=decided.certified,
        validation_difference=search.agreement,
        rounding=box.unit,
        lines=search.passes_run,
        leak=decided.leak,
        radius=region.radius,
    )
    precision = NoiseModel(SINGLE_ROUNDOFF) if box.single else None
    notes = (*notes_on(decided), *search.notes)
    return Hypothesis(model, errors, floor, notes, noise=precision, diagnostics=diagnostics)
