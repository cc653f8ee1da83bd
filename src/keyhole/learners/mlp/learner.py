"""Networks with one hidden layer of smooth or gated neurons, recovered exactly.

Statement.  y = linear x + offset + outer φ(inner x + inner_bias), φ any of the table's activations,
            is recovered with its number of neurons and its activation, from vector or scalar
            answers, with three to six times as many numbers as it has parameters in double
            precision, some ten times for gated networks and twenty in single precision.
Queries.    scale.py (which size of inputs shows the bends); far_field.py where inputs may be of any
            size and the network bends; then, or else, hessians.py on a sphere, that of the domain
            or one inside it; network/redundancy.py on random points for small networks, first
            where Hessians have no room or answers few digits.
Algebra.    The stages give every neuron to a few digits; refinement.py fits all answers near zero
            to their rounding, and its Fisher matrix tells the standard errors.
Fails.      A fit that does not reach the rounding of the answers is inconclusive: another way may
            find the network. Only a bend that no activation has, and a promise that the box does
            not keep, refute it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from keyhole.arrays import Array, Float, whole_number
from keyhole.errors import (
    Counterexample,
    IllConditioned,
    InvalidArgument,
    NotIdentifiable,
    Unsupported,
    WrongFamily,
)
from keyhole.learners.base import (
    Hypothesis,
    Inconclusive,
    Refuted,
    Result,
    run_strategies,
)
from keyhole.learners.mlp.far_field import (
    EXPLAINED,
    FAR,
    FarField,
    Unresolved,
    fit_scales,
    read_far_field,
)
from keyhole.learners.mlp.hessians import (
    NotEnough,
    Steps,
    likely_activations,
    read_sphere,
    room_for_neurons,
    weights_of,
)
from keyhole.learners.mlp.judgement import explained_residual, judge, relative_error, unknowns
from keyhole.learners.mlp.missing import add_missing, awakened
from keyhole.learners.mlp.options import THOROUGH, MlpOptions
from keyhole.learners.mlp.profile import find_strange_profile
from keyhole.learners.mlp.refinement import RefinedNetwork, RefinementOptions
from keyhole.learners.mlp.relu.learner import NotPiecewiseLinear, ReluNetworkLearner
from keyhole.learners.mlp.scale import (
    Scale,
    far_exponent,
    find_scale,
    is_smooth,
    widened,
)
from keyhole.learners.mlp.thinning import decided, refine_active, without_unseen
from keyhole.measurement.asker import Asker
from keyhole.models.mlp import ACTIVATIONS, Mlp, activation_named
from keyhole.models.relu_network import ReluNetwork
from keyhole.network.redundancy import fit_likely, repair
from keyhole.network.weights import chosen, with_one
from keyhole.oracles.base import Domain, Oracle, Spec, Wrapper
from keyhole.oracles.queries import QueryBatch


class SearchLimit(Wrapper):
    """Ends a search for a network that has asked more than a network of so many neurons takes."""

    def __init__(self, inner: Oracle, most: int, neurons: int) -> None:
        self.inner, self.most, self.neurons, self.asked = inner, most, neurons, 0

    def ask(self, queries: QueryBatch) -> Array:
        self.asked += len(queries)
        if self.asked > self.most:
            raise IllConditioned(
                f"no network was found within {self.most} queries, enough for {self.neurons} "
                "neurons: if there are more, MlpLearner(neurons=...) says so; if the answers are "
                "less exact than they look, state their precision"
            )
        return self.inner.ask(queries)


@dataclass(frozen=True)
class MlpLearner:
    """Learner for networks with one hidden layer of GELUs, SiLUs, tanhs or sigmoids, gated or not.

    GELU may be its tanh approximation; ReLUs are for `ReluNetworkLearner`. Classes that are one are
    named as one: sigmoid as tanh, quick GELU as SiLU.

    Args:
        activation: A promise, not needed: a box that breaks it is refused.
        neurons: So many at most, a promise too.
        gated: Whether each neuron is multiplied by a linear map, a promise too.
        options: Numbers of the search, documented at `MlpOptions`.

    Example:
        >>> import numpy as np
        >>> from keyhole.models.mlp import Mlp
        >>> from keyhole.oracles.base import Spec
        >>> from keyhole.oracles.function import FunctionOracle
        >>> rng = np.random.default_rng(0)
        >>> secret = Mlp(rng.standard_normal((6, 4)), np.ones(6), rng.standard_normal((4, 6)))
        >>> box = FunctionOracle(secret, Spec(width=4))
        >>> MlpLearner().learn(box, np.random.default_rng(1)).model
        Mlp(width=4, neurons=6, outputs=4, gelu)
    """

    activation: str | None = None
    neurons: int | None = None
    gated: bool | None = None
    options: MlpOptions = field(default=MlpOptions(), repr=False)

    def __post_init__(self) -> None:
        if self.activation is not None:
            activation_named(self.activation)
        if self.neurons is not None:
            whole_number("neurons", self.neurons, 1)
        if self.gated not in (None, True, False):
            raise InvalidArgument(f"gated must be True, False or None, got {self.gated!r}")

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        domain, width = oracle.spec.domain, oracle.spec.width
        if domain.vocabulary is not None:
            raise NotIdentifiable(
                "a finite vocabulary does not determine a network: it needs inputs that can be "
                "moved freely"
            )
        if self.activation == "relu" and not self.gated:
            return self._piecewise_linear(oracle, rng)
        box = Asker(oracle, rounding=True, recording=True)
        scale = self._find_scale(box, rng)
        if scale.affine:
            raise Unsupported(
                "the box is affine at every size of inputs that was tried: no neuron was found"
            )
        if not scale.smooth and self.activation is None and not self.gated:
            return self._piecewise_linear(oracle, rng)
        if not scale.smooth:
            raise WrongFamily("the box is piecewise linear: its activation is relu", stated=True)
        likely = replace(self, neurons=self._expected(width))
        oracle.expect(likely.expected_queries(replace(oracle.spec, outputs=box.outputs)))
        most = max(self._expected(width), self.options.expected * (width + 1))
        floor = unknowns(most, width, box.outputs, self.gated is not False)
        limited = SearchLimit(oracle, int(self.options.floors * floor), most)
        return run_strategies(self._list_strategies(replace(box, oracle=limited), scale, rng))

    def _find_scale(self, box: Asker, rng: np.random.Generator) -> Scale:
        """The size of inputs at which the box bends, that of its sphere where it has one."""
        domain, width = box.oracle.spec.domain, box.width
        centre, largest = region_of(domain, width)
        ask = asking_around(box, centre)
        if domain.sphere is not None:
            entry = domain.sphere / np.sqrt(width)
            box.points(domain.drawn_in(rng.standard_normal((1, width))), "scale")
            return Scale(entry, is_smooth(ask, width, entry, box.unit, rng, sphere=True))
        box.points(centre + np.zeros((1, width)), "scale")
        return find_scale(ask, width, box.unit, rng, largest, self.options.scale)

    def _list_strategies(
        self, box: Asker, scale: Scale, rng: np.random.Generator
    ) -> list[tuple[str, Callable[[], Result]]]:
        """What is tried, in this order: a path far away, where that shows the network; Hessians;
        redundant neurons, first where Hessians have no room, or are so blurred that they take
        many more queries."""
        domain, width = box.oracle.spec.domain, box.width
        centre, largest = region_of(domain, width)
        ask = asking_around(box, centre)
        afar = self._is_seen_from_afar(box, scale, rng)
        # a network that is one of ReLUs at infinity has neither gates nor tanh: Hessians are then
        # a second chance, and those of the sphere are the cheaper ones
        inside = domain.sphere is None and not afar
        size = widened(ask, width, scale.size, rng, largest) if inside else scale.size
        pool = RandomAnswers(box, centre, float(size * np.sqrt(width)), self.options.further)
        path = ("the ReLU network at infinity", lambda: self._from_afar(box, scale.size, rng))
        redundant = ("redundant neurons", lambda: self._with_redundancy(pool, rng))
        hessians = ("Hessians on a sphere", lambda: self._on_sphere(pool, inside, rng))
        frames = [hessians]
        blurred = Steps.of(box.unit, width).blurred
        if blurred:  # every try draws a frame, which may hide a neuron
            frames.append(("Hessians in another frame", hessians[1]))
        crowded = 2 * room_for_neurons(width) < self._expected(width)
        if afar and not blurred:  # a path says more than redundant neurons would
            return [path, *frames]
        if blurred or crowded:
            return [*([path] if afar else []), redundant, *frames]
        return [*frames, redundant]

    def _is_seen_from_afar(self, box: Asker, scale: Scale, rng: np.random.Generator) -> bool:
        """Whether inputs may be of any size, and the network bends there by more than rounding."""
        width, radius = box.width, self._far_radius(box.width, scale.size)
        bending = self.activation is None or ACTIVATIONS[self.activation].bends
        shown = box.unit * radius < EXPLAINED * scale.size
        if not (box.oracle.spec.domain.unbounded and bending and not self.gated and shown):
            return False
        return abs(far_exponent(box.points, width, radius, rng) - 1.0) < 0.25

    def _explained(
        self, box: Asker, refined: RefinedNetwork, points: Array, answers: Array
    ) -> float:
        return explained_residual(box, refined, points, answers, self.options)

    def _expected(self, width: int) -> int:
        return self.options.expected * (width + 1) if self.neurons is None else self.neurons

    def expected_queries(self, spec: Spec) -> int | None:
        if self.neurons is None:
            return None
        rate = 3.3 if spec.domain.unbounded and not self.gated else 9.0 if self.gated else 5.8
        return int(rate * unknowns(self.neurons, spec.width, spec.outputs or 1, self.gated))

    def _names(self) -> list[str]:
        """Activations to be tried, one of each class."""
        if self.activation is None:
            return ["gelu", "silu", "gelu_tanh", "tanh"]
        alias = ACTIVATIONS[self.activation].alias
        return [self.activation if alias is None else alias[0]]

    def _piecewise_linear(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        """Networks of ReLUs have a learner of their own."""
        try:
            relus = ReluNetworkLearner(neurons=self.neurons).learn(oracle, rng)
        except NotPiecewiseLinear as curved:
            if self.activation == "relu":
                raise
            raise IllConditioned(
                f"{curved}; but the size of inputs at which such a network would show its "
                "activation was not found"
            ) from curved
        return replace(relus, model=mlp_of_relus(relus.model), errors=mlp_of_relus(relus.errors))

    def _far_radius(self, width: int, size: float) -> float:
        expected = self.options.expected * width if self.neurons is None else self.neurons
        return float(FAR * expected * np.sqrt(width / 2.0) * size)

    def _from_afar(self, box: Asker, size: float, rng: np.random.Generator) -> Result:
        """Inputs may be of any size, and the network bends: paths far away until one is read."""
        width, radius = box.oracle.spec.width, self._far_radius(box.oracle.spec.width, size)
        result: Result = Inconclusive("no path was read")
        far: FarField | None = None
        points, answers = np.zeros((0, width)), np.zeros((0, box.outputs))
        for _ in range(self.options.paths):
            try:
                far = read_far_field(box.points, width, radius, size, box.unit, rng)
                if (broken := self._promise(len(far.jump))) is not None:
                    return broken
                result, points, answers = self._near_zero(box, far, size, points, answers, rng)
            except (Unresolved, np.linalg.LinAlgError) as failed:
                result = Inconclusive(str(failed))
            if isinstance(result, Hypothesis):
                return result
        if far is None:
            return result
        names = [name for name in self._names() if ACTIVATIONS[name].bends]
        strange = find_strange_profile(box.points, far, names, size, radius, rng)
        if strange is None:
            return result
        point, *rows = strange
        answer, guess = map(box.as_answered, rows)
        return Refuted(
            "the bends of its neurons are those of none of the activations "
            f"{', '.join(ACTIVATIONS[name].title for name in names)}",
            Counterexample(point[None], answer, guess, "a point across the plane of a neuron"),
        )

    def _near_zero(
        self,
        box: Asker,
        far: FarField,
        size: float,
        points: Float[Array, "n d"],
        answers: Float[Array, "n k"],
        rng: np.random.Generator,
    ) -> tuple[Result, Float[Array, "N d"], Float[Array, "N k"]]:
        """The scales of the neurons, and the refinement, from points of the network's own size:
        those that an earlier path has left, and as many more as are needed."""
        width, names = points.shape[1], [n for n in self._names() if ACTIVATIONS[n].bends]
        count = count_points(self.options.near, len(far.jump), width, far.jump.shape[1], False)
        wide = size
        for share in (0.3, 1.0):  # some at the size found first, the others at that of the rows
            missing = int(share * count) + 1 - len(points)
            if missing > 0:
                fresh = wide * rng.standard_normal((missing, width))
                points = np.concatenate([points, fresh])
                answers = np.concatenate([answers, box.points(fresh, "near zero")])
            weights, left = fit_scales(far, points, answers, names, wide)
            names = [weights.activation] if left < EXPLAINED else names
            rows = 1.5 / float(np.median(np.linalg.norm(weights.inner[:, :-1], axis=1)))
            wide = rows if size / 100.0 < rows < size * 100.0 else size
        relative = relative_error(box, answers)
        if left > EXPLAINED and len(weights.inner) * (width + 1) <= self.options.small:
            # a plane that passes by all points is that of a breakpoint that was misread
            bent = (np.abs(with_one(points) @ weights.inner.T) < self.options.bent).any(axis=0)
            weights = chosen(weights, bent) if bent.any() else weights
            weights = repair(weights, points, answers, relative, rng) or weights
        try:
            refined = refine_active(weights, points, answers, relative, self.options.idle, rng)
        except np.linalg.LinAlgError as failed:
            return Inconclusive(str(failed)), points, answers
        result = judge(box, refined, points, answers, np.zeros(width), 1.0, self.options)
        return result, points, answers

    def _on_sphere(self, pool: "RandomAnswers", inside: bool, rng: np.random.Generator) -> Result:
        """Hessians on a sphere around the pool's centre, or inside it."""
        box, width = pool.box, len(pool.centre)
        try:
            sketch = read_sphere(pool.ask, width, box.unit, rng, self.gated, inside)
        except (NotEnough, np.linalg.LinAlgError) as failed:
            return Inconclusive(str(failed))
        blocks, neurons, _ = sketch.rows.shape
        if (broken := self._promise(neurons)) is not None:
            return broken
        blurred = Steps.of(box.unit, width).blurred
        share = 2.0 if blurred else self.options.near  # rounding averages out
        large = sketch.rows.size > RefinementOptions().grams
        if large:  # conjugate gradients converge faster
            share = max(share, 1.4)
        count = count_points(share, neurons, width, len(sketch.outer), blocks == 2) + 1
        names = likely_activations(sketch, self._names())
        weights, which = weights_of(sketch, names[0])
        box.oracle.expect(max(0, count - len(pool.points)))
        rows = weights.inner if large and weights.gate is None else None
        points, answers = pool.take(count, rng, rows)
        fits: list[RefinedNetwork] = []
        for name in names:
            if name != names[0]:
                weights, which = weights_of(sketch, name)
            if len(points) <= len(which) + width + 1:
                return Inconclusive(
                    f"the second derivatives leave {len(which)} candidates for {neurons} neurons"
                )
            weights = decided(weights, which, points, answers, box.unit)
            whole = add_missing(
                weights, points, answers, lambda turned: pool.ask(turned, "missing neurons"), rng
            )
            weights, points, answers = whole.weights, whole.points, whole.answers
            relative = relative_error(box, answers)
            fits.append(refine_active(weights, points, answers, relative, self.options.idle, rng))
        refined = min(fits, key=lambda fit: fit.residual)
        if refined.residual <= self._explained(box, refined, points, answers):
            refined = without_unseen(refined, points, answers, box.unit, rng)
        return judge(box, refined, points, answers, pool.centre, pool.radius, self.options)

    def _with_redundancy(self, pool: "RandomAnswers", rng: np.random.Generator) -> Result:
        """Random points, and networks of more and more neurons, until one has enough."""
        box, width, gated = pool.box, len(pool.centre), bool(self.gated)
        usual = 1.5 * self._expected(width)  # half as many again as are expected
        result: Result = Inconclusive("the network is too large for random points alone")
        if usual * (width + 1) * (1 + gated) > self.options.small:
            return result
        most = int(self.options.plenty * unknowns(int(usual), width, box.outputs, gated))
        blurred = Steps.of(box.unit, width).blurred
        averaged = self.options.averaged if blurred or box.additive else self.options.near
        for share in self.options.redundant:
            neurons = int(share * usual) + 1
            count = int(self.options.plenty * unknowns(neurons, width, box.outputs, gated))
            points, answers = pool.take(count, rng)
            relative = relative_error(box, answers)
            network = fit_likely(points, answers, neurons, self._names(), gated, relative, rng)
            if network is None:
                result = Inconclusive(f"no network of {neurons} neurons explains random points")
                continue
            if (broken := self._promise(network.neurons)) is not None:
                return broken
            own = unknowns(network.neurons, width, box.outputs, gated)
            points, answers = pool.take(min(most, int(averaged * own)), rng)
            refined = refine_active(network, points, answers, relative, self.options.idle, rng)
            result = judge(box, refined, points, answers, pool.centre, pool.radius, self.options)
            if isinstance(result, Hypothesis):
                break
        return result

    def _promise(self, neurons: int) -> Refuted | None:
        if self.neurons is None or neurons <= self.neurons:
            return None
        return Refuted(
            f"the box has {neurons} neurons, more than the {self.neurons} that were promised",
            stated=True,
        )


def is_smooth_at_its_scale(oracle: Oracle, rng: np.random.Generator) -> bool:
    """Whether the box is a smooth function of one token at the size at which it bends, whatever
    that size is. Twelve to sixty queries."""
    domain, width = oracle.spec.domain, oracle.spec.width
    if domain.vocabulary is not None or domain.sphere is not None:
        return False
    box = Asker(oracle, rounding=True)
    centre, largest = region_of(domain, width)
    box.points(centre + np.zeros((1, width)), "scale")
    if box.additive > 0:
        return False

    def ask(points: Array, purpose: str) -> Array:
        return box.points(centre + points, purpose)

    return find_scale(ask, width, box.unit, rng, largest, THOROUGH.scale).smooth


@dataclass(eq=False)
class RandomAnswers:
    """Answers at random points, which every strategy adds to and uses: points of the unit sphere
    around the centre, in units of the radius, or of a shell where the domain is no sphere: inside
    it, or up to `further` out where inputs are free, for neurons that bend little."""

    box: Asker
    centre: Float[Array, " d"]
    radius: float
    further: float
    points: Array = field(init=False)
    answers: Array = field(init=False)

    def __post_init__(self) -> None:
        self.points = np.zeros((0, len(self.centre)))
        self.answers = np.zeros((0, self.box.outputs))

    def ask(self, points: Float[Array, "n d"], purpose: str) -> Float[Array, "n k"]:
        return self.box.points(self.centre + self.radius * points, purpose)

    def take(
        self, count: int, rng: np.random.Generator, rows: Array | None = None
    ) -> tuple[Float[Array, "n d"], Float[Array, "n k"]]:
        """All points and answers, at least so many; `rows`: neurons that fresh points are to show
        on either side of their bends."""
        domain, missing = self.box.oracle.spec.domain, max(0, count - len(self.points))
        points = rng.standard_normal((missing, len(self.centre)))
        points /= np.linalg.norm(points, axis=1, keepdims=True)
        if domain.sphere is None:
            points *= rng.uniform(0.5, self.further if domain.unbounded else 1.0, (missing, 1))
        if rows is not None:
            points = awakened(points, rows, rng)  # so many have some that hardly ever fire
        if missing:
            self.points = np.concatenate([self.points, points])
            self.answers = np.concatenate([self.answers, self.ask(points, "refinement")])
        return self.points, self.answers


def asking_around(box: Asker, centre: Float[Array, " d"]) -> Callable[[Array, str], Array]:
    """Asks points by where they lie from the centre."""
    return lambda points, purpose: box.points(centre + points, purpose)


def region_of(domain: Domain, width: int) -> tuple[Float[Array, " d"], float]:
    """Centre and radius of a ball inside the domain."""
    centre, radius = np.zeros(width), np.inf if domain.max_norm is None else domain.max_norm
    if domain.sphere is not None:
        return centre, domain.sphere
    if domain.low is not None or domain.high is not None:
        half = 1.0 + abs(domain.low or 0.0) + abs(domain.high or 0.0)
        if domain.low is not None and domain.high is not None:
            half = (domain.high - domain.low) / 2
        low = domain.low if domain.low is not None else (domain.high or 0.0) - 2 * half
        centre = np.full(width, low + half)
        radius = min(radius - float(np.linalg.norm(centre)), half)
        if radius <= 0:
            raise NotIdentifiable("the domain holds no ball in which a network could be looked at")
    return centre, 0.98 * radius  # rounding must not leave the domain


def mlp_of_relus(network: ReluNetwork) -> Mlp:
    return Mlp(
        network.weight,
        network.bias,
        network.output.T,
        activation="relu",
        linear=network.skip.T,
        offset=network.offset,
    )


def count_points(share: float, neurons: int, width: int, outputs: int, gated: bool) -> int:
    """Points for a fit with so many times as many numbers as unknowns. Answers of few neurons lie
    in a space of as many dimensions: beyond the linear part, which takes a point for each of its
    columns, a point has no more numbers than that."""
    blocks = 2 if gated else 1
    inside = blocks * neurons * (width + 1) / min(neurons, outputs)
    least = int(np.ceil(share * inside)) + neurons + width + 3
    return max(int(share * unknowns(neurons, width, outputs, gated)), least)
