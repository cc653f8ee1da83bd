"""Networks with one hidden layer of smooth or gated neurons, recovered exactly.

Statement.  y = linear x + offset + outer φ(inner x + inner_bias), φ any of the table's activations,
            is recovered with its number of neurons and its activation, from vector or scalar
            answers, with three to six times as many numbers as it has parameters.
Queries.    scale.py (which size of inputs shows the bends); far_field.py where inputs may be of any
            size and the network bends; else hessians.py on a sphere (that of the domain, or one
            inside it; for networks too small for that, redundancy.py on random points.
Algebra.    The stages give every neuron to a few digits; refinement.py fits all answers near zero
            to their rounding, and its Fisher matrix tells the standard errors.
Fails.      A fit that does not reach the rounding of the answers is no member of the family: the
            worst answer is the counterexample.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float, Int, whole_number
from keyhole.errors import (
    Counterexample,
    IllConditioned,
    InvalidArgument,
    NotIdentifiable,
    Unsupported,
    WrongFamily,
)
from keyhole.learners.base import (
    Diagnostics,
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
from keyhole.learners.mlp.missing import add_missing, awakened, other_bends
from keyhole.learners.mlp.profile import find_strange_profile
from keyhole.learners.mlp.redundancy import fit_with_redundancy, repair
from keyhole.learners.mlp.refinement import (
    Refined,
    RefinementOptions,
    descend,
    refine,
)
from keyhole.learners.mlp.relu_learner import NotPiecewiseLinear, ReluNetworkLearner
from keyhole.learners.mlp.scale import (
    Scale,
    ScaleOptions,
    far_exponent,
    find_scale,
    is_smooth,
    widened,
)
from keyhole.measurement.asker import Asker
from keyhole.models.mlp import ACTIVATIONS, Mlp, activation_named, turned
from keyhole.models.relu_network import ReluNetwork
from keyhole.network.redundancy import Data, costs_of_leaving
from keyhole.network.weights import Weights, chosen, hidden_layer, with_one
from keyhole.oracles.base import Domain, Oracle, Spec
from keyhole.oracles.noise import REJECTION, NoiseModel


@dataclass(frozen=True)
class MlpOptions:
    """expected: neurons per entry of the input, before any was counted. paths: far away that are
    tried. near: answers for the refinement, relative to the number of unknowns in them. further:
    how far out they are asked where inputs are free, relative to the Hessians. small:
    unknowns up to which redundant neurons are tried. roundings: of the terms of an answer, that the
    finished fit may leave; cancelled: how much larger than the answers these terms are believed to
    be. bent: argument beyond which φ is a line, to rounding; seen: answers that must lie where a
    neuron bends. idle: part of a neuron in the answers, relative to the others, that is none.
    scale: how the size of inputs is looked for. half: of the digits that answers have, with which a
    finished network must also explain answers that were not fitted. known: standard error of the
    neurons, relative to them, below which they are. certain: distance from a whole number below
    which the side of a neuron is decided. zero: standard errors within which a block of parameters
    counts as zero."""

    expected: int = 4
    paths: int = 2
    near: float = 1.2
    further: float = 3.0
    small: int = 2000
    roundings: float = 300.0
    cancelled: float = 30.0
    bent: float = 8.0
    seen: int = 3
    idle: float = 1e-7
    certain: float = 0.05
    zero: float = 12.0
    scale: ScaleOptions = field(default=ScaleOptions())
    half: float = 0.5
    known: float = 0.1


# for a box that does not bend at the sizes that are looked at first
THOROUGH = MlpOptions(scale=ScaleOptions(looks=12, patient=True))


@dataclass(frozen=True, eq=False, kw_only=True)
class MlpDiagnostics(Diagnostics):
    """What was found, and how well it fits."""

    neurons: int
    activation: str
    gated: bool
    residual: float  # root mean square of what the network leaves of the answers
    steps: int  # of the refinement


@dataclass(frozen=True)
class MlpLearner:
    """Learner for networks with one hidden layer of GELUs, SiLUs, tanhs or sigmoids, gated or not.

    GELU may be its tanh approximation; ReLUs are for `ReluNetworkLearner`. Classes that are one are
    named as one: sigmoid as tanh, quick GELU as SiLU.

    Args:
        activation: A promise, not needed: a box that breaks it is refused.
        neurons: Their number, a promise too.
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
        centre, largest = region_of(domain, width)

        def ask(points: Array, purpose: str) -> Array:
            return box.points(centre + points, purpose)

        if domain.sphere is not None:
            entry = domain.sphere / np.sqrt(width)
            box.points(domain.drawn_in(rng.standard_normal((1, width))), "scale")
            scale = Scale(entry, is_smooth(ask, width, entry, box.unit, rng, sphere=True))
        else:
            box.points(centre + np.zeros((1, width)), "scale")
            scale = find_scale(ask, width, box.unit, rng, largest, self.options.scale)
        if scale.affine:
            raise Unsupported(
                "the box is affine at every size of inputs that was tried: no neuron was found"
            )
        if not scale.smooth and self.activation is None and not self.gated:
            return self._piecewise_linear(oracle, rng)
        if not scale.smooth:
            raise WrongFamily("the box is piecewise linear: its activation is relu", stated=True)
        likely = replace(self, neurons=self._expected(width))
        outputs = box.outputs
        oracle.expect(likely.expected_queries(replace(oracle.spec, outputs=outputs)))
        strategies = []
        bending = self.activation is None or ACTIVATIONS[self.activation].bends
        radius = self._far_radius(width, scale.size)
        shown = box.unit * radius < EXPLAINED * scale.size  # bends outweigh rounding far away
        possible = domain.unbounded and bending and not self.gated and shown
        if possible and abs(far_exponent(ask, width, radius, rng) - 1.0) < 0.25:
            strategies.append(
                ("the ReLU network at infinity", lambda: self._from_afar(box, scale.size, rng))
            )
        # a network that is one of ReLUs at infinity has neither gates nor tanh: Hessians are then
        # a second chance, and those of the sphere are the cheaper ones
        inside = domain.sphere is None and not strategies
        size = widened(ask, width, scale.size, rng, largest) if inside else scale.size
        on_sphere = [
            ("Hessians on a sphere", lambda: self._on_sphere(box, centre, size, inside, rng)),
        ]
        if Steps.of(box.unit, width).blurred:  # a neuron may be hidden in one frame alone
            on_sphere.append(
                (
                    "Hessians in another frame",
                    lambda: self._on_sphere(box, centre, size, inside, rng),
                )
            )
        if not strategies:  # a path far away says more than redundant neurons would
            on_sphere.append(
                ("redundant neurons", lambda: self._with_redundancy(box, centre, size, rng))
            )
            if 2 * room_for_neurons(width) < self._expected(width):
                on_sphere.reverse()
        return run_strategies(strategies + on_sphere)

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
            found = ReluNetworkLearner(neurons=self.neurons).learn(oracle, rng)
        except NotPiecewiseLinear as curved:
            if self.activation == "relu":
                raise
            raise IllConditioned(
                f"{curved}; but the size of inputs at which such a network would show its "
                "activation was not found"
            ) from curved
        return replace(found, model=mlp_of_relus(found.model), errors=mlp_of_relus(found.errors))

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
        if left > EXPLAINED and len(weights.inner) * (width + 1) <= self.options.small:
            # a plane that passes by all points is that of a breakpoint that was misread
            bent = (np.abs(with_one(points) @ weights.inner.T) < self.options.bent).any(axis=0)
            weights = chosen(weights, bent) if bent.any() else weights
            weights = repair(weights, points, answers, box.unit, rng) or weights
        try:
            refined = without_idle(weights, points, answers, box.unit, self.options.idle, rng)
        except np.linalg.LinAlgError as failed:
            return Inconclusive(str(failed)), points, answers
        result = self._judge(box, refined, points, answers, np.zeros(width), 1.0)
        return result, points, answers

    def _on_sphere(
        self, box: Asker, centre: Array, size: float, inside: bool, rng: np.random.Generator
    ) -> Result:
        """Answers on a sphere around `centre`, whose points have entries of this size, or inside
        it."""
        domain, width = box.oracle.spec.domain, len(centre)
        radius = float(size * np.sqrt(width))

        def ask(points: Array, purpose: str) -> Array:
            return box.points(centre + radius * points, purpose)

        try:
            sketch = read_sphere(ask, width, box.unit, rng, self.gated, inside)
        except (NotEnough, np.linalg.LinAlgError) as failed:
            return Inconclusive(str(failed))
        blocks, neurons, _ = sketch.rows.shape
        if (broken := self._promise(neurons)) is not None:
            return broken
        blurred = Steps.of(box.unit, width).blurred
        share = 2.0 if blurred else self.options.near  # rounding averages out
        if sketch.rows.size > RefinementOptions().grams:  # conjugate gradients converge faster
            share = max(share, 1.4)
        count = count_points(share, neurons, width, len(sketch.outer), blocks == 2) + 1
        names = likely_activations(sketch, self._names())
        weights, which = weights_of(sketch, names[0])
        points = self._draw(domain, count, width, rng)
        if sketch.rows.size > RefinementOptions().grams and weights.gate is None:
            points = awakened(points, weights.inner, rng)  # so many have some that hardly ever fire
        box.oracle.expect(count)
        answers = ask(points, "refinement")
        fits: list[Refined] = []
        for name in names:
            if name != names[0]:
                weights, which = weights_of(sketch, name)
            if count <= len(which) + width + 1:
                return Inconclusive(
                    f"the second derivatives leave {len(which)} candidates for {neurons} neurons"
                )
            weights = decided(weights, which, points, answers, box.unit)
            whole = add_missing(
                weights, points, answers, lambda turned: ask(turned, "missing neurons"), rng
            )
            weights, points, answers = whole.weights, whole.points, whole.answers
            known = any(fit.residual <= self._allowed(box, fit, points, answers) for fit in fits)
            fits.append(self._fit_all(box, weights, points, answers, rng, thorough=not known))
        refined = min(fits, key=lambda fit: fit.residual)
        if refined.residual <= self._allowed(box, refined, points, answers):
            refined = without_unseen(refined, points, answers, box.unit, rng)
        return self._judge(box, refined, points, answers, centre, radius)

    def _fit_all(
        self,
        box: Asker,
        weights: Weights,
        points: Array,
        answers: Array,
        rng: np.random.Generator,
        thorough: bool,
    ) -> Refined:
        """The refined network; if `thorough`, where plain steps do not lead to the answers'
        rounding, damped ones from the start, and in small networks redundant neurons for those that
        are wrong."""
        idle = self.options.idle
        refined = without_idle(weights, points, answers, box.unit, idle, rng)
        unknown = weights.inner.size * (1 if weights.gate is None else 2)
        if not thorough or unknown > RefinementOptions().grams:
            return refined
        refined = self._with_other_bends(box, refined, points, answers, rng)
        if refined.residual > self._allowed(box, refined, points, answers):
            level = box.unit * float(np.sqrt(np.mean(answers**2)))
            damped, _ = descend(weights, points, answers, ridge=1e-17, steps=60, target=level)
            again = without_idle(damped, points, answers, box.unit, idle, rng)
            refined = min(refined, again, key=lambda fit: fit.residual)
        if (
            unknown <= self.options.small
            and refined.residual > self._allowed(box, refined, points, answers)
            and (found := repair(refined.weights, points, answers, box.unit, rng)) is not None
        ):
            refined = without_idle(found, points, answers, box.unit, idle, rng)
        return refined

    def _with_other_bends(
        self, box: Asker, refined: Refined, points: Array, answers: Array, rng: np.random.Generator
    ) -> Refined:
        """Neurons whose bends were misread, one by one: look-alikes of the bend take their place
        while that takes off at least half of what is left."""
        while refined.residual > self._allowed(box, refined, points, answers):
            least = refined.residual
            for other in other_bends(refined.weights, points, answers):
                found = refine(other, points, answers, box.unit, errors=False)
                if found.residual < 0.5 * least:
                    idle = self.options.idle
                    refined = without_idle(found.weights, points, answers, box.unit, idle, rng)
                    break
            else:
                break
        return refined

    def _with_redundancy(
        self, box: Asker, centre: Array, size: float, rng: np.random.Generator
    ) -> Result:
        """Random points, and networks of more neurons than expected."""
        width, radius = len(centre), float(size * np.sqrt(len(centre)))
        outputs = box.outputs
        gated = bool(self.gated)
        expected = self._expected(width)
        points, answers = np.zeros((0, width)), np.zeros((0, outputs))
        for neurons in (int(1.5 * expected), int(2.2 * expected)):
            if neurons * (width + 1) * (1 + gated) > self.options.small:
                break
            count = int(2.0 * unknowns(neurons, width, outputs, gated)) - len(points)
            fresh = self._draw(box.oracle.spec.domain, count, width, rng)
            points = np.concatenate([points, fresh])
            answers = np.concatenate([answers, box.points(centre + radius * fresh, "refinement")])
            names = self._names()
            found = fit_with_redundancy(points, answers, neurons, names, gated, box.unit, rng)
            if found is None:
                continue
            if (broken := self._promise(found.neurons)) is not None:
                return broken
            refined = without_idle(found, points, answers, box.unit, self.options.idle, rng)
            return self._judge(box, refined, points, answers, centre, radius)
        return Inconclusive(
            f"no network of few more neurons than the {expected} expected explains random points"
        )

    def _draw(
        self, domain: Domain, count: int, width: int, rng: np.random.Generator
    ) -> Float[Array, "n d"]:
        """Points of the unit sphere, or of a shell where the domain is no sphere: inside it, or
        further out where inputs are free, for neurons that bend little."""
        points = rng.standard_normal((count, width))
        points /= np.linalg.norm(points, axis=1, keepdims=True)
        if domain.sphere is None:
            further = self.options.further if domain.unbounded else 1.0
            points *= rng.uniform(0.5, further, (count, 1))
        return points

    def _promise(self, neurons: int) -> Refuted | None:
        if self.neurons is None or neurons <= self.neurons:
            return None
        return Refuted(
            f"the box has {neurons} neurons, more than the {self.neurons} that were promised",
            stated=True,
        )

    def _allowed(self, box: Asker, refined: Refined, points: Array, answers: Array) -> float:
        """What rounding explains of a residual. A wrong network's terms may cancel too: where
        that would excuse a part of the answers as large as a wrong network leaves, the answers
        alone are the measure, and are also off by fewer roundings."""
        scale, roundings = terms(refined.weights, points), self.options.roundings
        cancelled = self.options.cancelled
        if roundings * cancelled * box.unit < EXPLAINED:
            scale = min(scale, cancelled * float(np.abs(answers).max()))
        else:
            scale, roundings = min(scale, float(np.sqrt(np.mean(answers**2)))), roundings / 8.0
        return roundings * box.unit * scale + 6.0 * box.additive

    def _contradict(
        self, box: Asker, refined: Refined, centre: Array, radius: float
    ) -> Inconclusive | None:
        """Whether an answer that was asked on the way, and not for the fit, contradicts it by more
        than the standard errors: one of too many neurons explains whatever it was made from."""
        weights = moved_back(refined.weights, centre, radius)
        ((sequences, answers),) = box.pairs()
        points = sequences[:, 0]
        predicted = weights(points)
        off = np.linalg.norm(predicted - answers, axis=1)
        allowed = box.unit**self.options.half * sizes_of_terms(weights, points)
        allowed += 6.0 * box.additive * np.sqrt(answers.shape[1])
        if refined.errors is not None and (off > allowed).any():
            errors = moved_back(refined.errors, np.zeros_like(centre), radius)
            rng = np.random.default_rng(0)
            spread = np.zeros(len(points))
            for _ in range(4):
                moved = disturbed(weights, errors, rng)(points)
                spread = np.maximum(spread, np.linalg.norm(moved - predicted, axis=1))
            allowed += REJECTION * spread
        worst = int(np.argmax(off / np.maximum(allowed, TINY)))
        if not off[worst] > allowed[worst]:
            return None
        return Inconclusive(
            f"a network of {weights.neurons} neurons explains the answers that it was fitted to, "
            f"and not another one, by {off[worst]:.1e}: these answers leave several networks open"
        )

    def _judge(
        self,
        box: Asker,
        refined: Refined,
        points: Array,
        answers: Array,
        centre: Array,
        radius: float,
    ) -> Result:
        """The hypothesis, unless the network does not explain the answers to their rounding. The
        fit was made at the points (x - centre) / radius."""
        allowed = self._allowed(box, refined, points, answers)
        if not refined.residual <= allowed:
            # one start of a fit: another, or one with more neurons, may be the right one
            return Inconclusive(
                f"no network with one hidden layer of {refined.weights.neurons} neurons was found "
                f"that fits: the best leaves {refined.residual:.1e}, where rounding explains "
                f"{allowed:.1e}"
            )
        known = self.options.known
        if refined.errors is None or not all(
            float(np.linalg.norm(error)) < known * float(np.linalg.norm(part))
            for part, error in (
                (refined.weights.inner, refined.errors.inner),
                (refined.weights.outer, refined.errors.outer),
            )
        ):
            return Inconclusive("the answers leave some neuron undetermined")
        if (stray := self._contradict(box, refined, centre, radius)) is not None:
            return stray
        rows = rows_of(refined.weights)
        seen = (np.abs(with_one(points) @ rows.T) < self.options.bent).sum(axis=0)
        if (sharp := int((seen < self.options.seen).sum())) > 0:
            return Inconclusive(
                f"{sharp} of {len(rows)} neurons bend so sharply that no answer "
                "lies in the bend: another activation there, such as relu, would fit as well"
            )
        weights = moved_back(refined.weights, centre, radius)
        errors = moved_back(refined.errors, np.zeros_like(centre), radius)
        model, deviations = as_mlp(weights, box.scalar), as_mlp(errors, box.scalar)
        model, deviations, side = with_sides(model, deviations, self.options.certain)
        model = without_rounding(
            model, deviations, float(np.abs(answers).max()), box.unit, self.options.zero
        )
        width, outputs = points.shape[1], answers.shape[1]
        gated = weights.gate is not None
        affine = not gated or bool(model.linear.any())
        floor = unknowns(weights.neurons, width, outputs, gated, affine)
        diagnostics = MlpDiagnostics(
            neurons=weights.neurons,
            activation=weights.activation,
            gated=gated,
            residual=refined.residual,
            steps=refined.steps,
        )
        noise = NoiseModel(box.unit) if box.unit > UNIT_ROUNDOFF else None
        gate = "gated " if gated else ""
        found = (
            f"Single tokens act smoothly: a network with {weights.neurons} {gate}neurons and "
            f"{ACTIVATIONS[weights.activation].title}."
        )
        return Hypothesis(
            model, deviations, floor, (found, side), noise=noise, diagnostics=diagnostics
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


def moved_back(weights: Weights, centre: Array, radius: float) -> Weights:
    """The network of x, from that of (x - centre) / radius."""

    def rows(table: Array) -> Array:
        part = table[:, :-1] / radius
        return np.column_stack([part, table[:, -1] - part @ centre])

    return Weights(
        rows(weights.inner),
        weights.outer,
        rows(weights.affine),
        weights.activation,
        None if weights.gate is None else rows(weights.gate),
    )


def decided(
    weights: Weights, which: Int[Array, " c"], points: Array, answers: Array, unit: float
) -> Weights:
    """Of several candidates for one neuron, the one that takes the larger part in a fit."""
    for _ in range(4):
        numbers, counts = np.unique(which, return_counts=True)
        if (counts == 1).all():
            break
        found = refine(
            weights,
            points,
            answers,
            unit,
            options=RefinementOptions(steps=4 if weights.inner.size < 60000 else 0),
            errors=False,
        ).weights
        part = np.linalg.norm(weights.inner if weights.gate is None else weights.gate, axis=1)
        part = part * np.linalg.norm(found.outer, axis=0)
        rivals = [np.flatnonzero(which == number) for number in numbers[counts > 1]]
        weakest = [rows[np.argmin(part[rows])] for rows in rivals]
        kept = np.setdiff1d(np.arange(len(which)), weakest)
        weights, which = chosen(weights, kept), which[kept]
    return weights


def without_idle(
    weights: Weights,
    points: Array,
    answers: Array,
    unit: float,
    idle: float,
    rng: np.random.Generator,
) -> Refined:
    """The refined network, neurons that change no answer left out."""
    while True:
        refined = refine(weights, points, answers, unit, rng=rng)
        found = refined.weights
        size = np.linalg.norm(found.outer, axis=0)
        size = size * np.linalg.norm(found.inner if found.gate is None else found.gate, axis=1)
        kept = (size > idle * np.median(size)) & first_of_each(found)
        if kept.all():
            return refined
        weights = chosen(found, kept)


def without_unseen(
    refined: Refined, points: Array, answers: Array, unit: float, rng: np.random.Generator
) -> Refined:
    """The network without the neurons that explain no more of the answers than their numbers would
    explain of rounding, each within six standard errors."""
    while True:
        weights = refined.weights
        costs, left = costs_of_leaving(weights, Data(with_one(points), answers))
        own = points.shape[1] + 1 + answers.shape[1]
        if weights.gate is not None:
            own += points.shape[1] + 1
        surplus = max(answers.size - own * weights.neurons, 1)
        unseen = costs <= 36.0 * own * left / surplus
        if not unseen.any() or unseen.all():
            return refined
        refined = refine(chosen(weights, ~unseen), points, answers, unit, rng=rng)


def rows_of(weights: Weights) -> Float[Array, "m e"]:
    """The arguments of φ."""
    return weights.inner if weights.gate is None else weights.gate


def first_of_each(weights: Weights, same: float = 1e-10) -> Array:
    """Which neurons are not the same as an earlier one."""
    rows = rows_of(weights)
    lengths = np.maximum(np.linalg.norm(rows, axis=1), TINY)
    unit = rows / lengths[:, None]
    parallel = np.abs(unit @ unit.T) > 1.0 - same
    alike = np.abs(np.log(lengths[:, None] / lengths)) < np.sqrt(same)
    return ~np.tril(parallel & alike, -1).any(axis=1)


def unknowns(
    neurons: int, width: int, outputs: int, gated: bool | None, affine: bool = True
) -> float:
    """Parameters per number in an answer; a gated network may have no affine part."""
    rows = neurons * (width + 1) * (2 if gated else 1)
    return (rows + neurons * outputs + (outputs * (width + 1) if affine else 0)) / outputs


def count_points(share: float, neurons: int, width: int, outputs: int, gated: bool) -> int:
    """Points for a fit with so many times as many numbers as unknowns. Answers of few neurons lie
    in a space of as many dimensions: beyond the linear part, which takes a point for each of its
    columns, a point has no more numbers than that."""
    blocks = 2 if gated else 1
    inside = blocks * neurons * (width + 1) / min(neurons, outputs)
    least = int(np.ceil(share * inside)) + neurons + width + 3
    return max(int(share * unknowns(neurons, width, outputs, gated)), least)


def terms(weights: Weights, points: Array) -> float:
    """Root mean square of the terms of which an answer is the sum."""
    homogeneous = with_one(points)
    hidden, _ = hidden_layer(weights, homogeneous)
    square = (hidden**2) @ (weights.outer**2).T + (homogeneous**2) @ (weights.affine**2).T
    return float(np.sqrt(square.mean()))


def disturbed(weights: Weights, errors: Weights, rng: np.random.Generator) -> Weights:
    """The network with numbers drawn by their standard errors."""

    def draw(part: Array, error: Array) -> Array:
        known = np.where(np.isfinite(error), np.abs(error), 0.0)
        return np.asarray(part + known * rng.standard_normal(part.shape))

    gate = None
    if weights.gate is not None and errors.gate is not None:
        gate = draw(weights.gate, errors.gate)
    return Weights(
        draw(weights.inner, errors.inner),
        draw(weights.outer, errors.outer),
        draw(weights.affine, errors.affine),
        weights.activation,
        gate,
    )


def sizes_of_terms(weights: Weights, points: Float[Array, "n d"]) -> Float[Array, " n"]:
    """Norm of the terms of which each answer is the sum."""
    homogeneous = with_one(points)
    hidden, _ = hidden_layer(weights, homogeneous)
    square = (hidden**2) @ (weights.outer**2).sum(axis=0)
    return np.asarray(np.sqrt(square + (homogeneous**2) @ (weights.affine**2).sum(axis=0)))


def as_mlp(weights: Weights, scalar: bool) -> Mlp:
    outer, affine = weights.outer, weights.affine
    gate = weights.gate
    return Mlp(
        weights.inner[:, :-1],
        weights.inner[:, -1],
        outer[0] if scalar else outer,
        activation=weights.activation,
        linear=affine[0, :-1] if scalar else affine[:, :-1],
        offset=affine[0, -1] if scalar else affine[:, -1],
        gate=None if gate is None else gate[:, :-1],
        gate_bias=None if gate is None else gate[:, -1],
    )


def without_rounding(model: Mlp, errors: Mlp, answers: float, unit: float, zero: float) -> Mlp:
    """Biases, linear part and offset that cannot be told from zero, and would not matter beside
    arguments of order one and the answers, are zero."""
    parts, doubts = model.to_arrays(), errors.to_arrays()
    through = float(np.linalg.norm(np.atleast_2d(model.outer) @ model.inner))
    sizes = {"inner_bias": 1.0, "gate_bias": 1.0, "linear": through, "offset": answers}
    for name, yardstick in sizes.items():
        if name in parts:
            size, doubt = (float(np.linalg.norm(each[name])) for each in (parts, doubts))
            if size <= min(zero * doubt, max(1e-8, 100.0 * unit) * yardstick):
                parts[name] = np.zeros_like(parts[name])
    return Mlp.from_arrays(parts)


def with_sides(model: Mlp, errors: Mlp, certain: float) -> tuple[Mlp, Mlp, str]:
    """Neurons turned so that the linear part is zero, or the identity, where that is possible:
    linear = Σ s_j outer_j inner_jᵀ + what is known, s_j zero or one."""
    parts, doubts = model.to_arrays(), errors.to_arrays()
    kind = ACTIVATIONS[model.activation]
    outer, linear = np.atleast_2d(model.outer), np.atleast_2d(model.linear)
    normal = (outer.T @ outer) * (model.inner @ model.inner.T)
    known = {"zero": np.zeros_like(linear)}
    if linear.shape[0] == linear.shape[1]:
        known["the identity"] = np.eye(len(linear))
    if kind.bends and not model.gated and linear.size >= model.neurons:
        for name, part in known.items():
            right = np.einsum("kj,kd,jd->j", outer, part - linear, model.inner, optimize=True)
            share, *_ = np.linalg.lstsq(normal, right, rcond=1e-14)
            near = np.abs(share - np.round(share)).max(initial=0.0)
            back = np.round(share)
            if near > certain or not np.isin(back, (0.0, 1.0)).all():
                continue
            other = turned(model, back == 1.0)
            rest = np.atleast_2d(other.linear) - part
            if np.linalg.norm(rest) <= certain * np.linalg.norm(outer @ model.inner) / 1e4:
                parts, doubts = other.to_arrays(), dict(doubts)
                parts["linear"] = part.reshape(model.linear.shape)
                doubts["linear"] = np.zeros_like(doubts["linear"])
                text = f"The linear part beside the neurons is {name}, which tells their sides."
                return Mlp.from_arrays(parts), Mlp.from_arrays(doubts), text
    if not kind.bends or model.gated:
        return model, errors, "The linear part beside the neurons was learned."
    return (
        model,
        errors,
        (
            "The box has a linear part beside its neurons. Which way each neuron is turned was not "
            "decided: the linear part holds the difference, the function is the same."
        ),
    )
