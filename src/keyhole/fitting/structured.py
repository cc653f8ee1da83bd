"""All matrices of a network refined on all answers, by products in units of their structure.

Statement.  From a start that is off by up to a few hundredths in every weight, the parameters
            follow that leave of the answers no more than their noise; with standard errors. Time
            and memory are those of a few hundred products, a few numbers per query and neuron.
Queries.    None: they are given, at least 1.3 numbers per unknown; those that were asked for some
            algebra's sake are ill-conditioned for a fit, random ones of the network's own size are
            not.
Algebra.    Damped Gauss-Newton steps (`solver`), each by conjugate gradients
            (`conjugate_gradients`) in Kronecker units (`kronecker`) with products in single
            precision and residuals in double. First with weights of equal leverage, since while the
            residual is no noise the weights are free, then with those of the answers' noise.
            Standard errors: the steps that residuals with random signs and random noise ask for;
            roundings are not independent, and noise alone would be too small.
When it fails. At a residual above the noise: `Structured.level` shows it.
Source.     Martens, Grosse (2015); Wu (1986) for random signs.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.fitting.conjugate_gradients import Ending, ProductSystem, Scaled, solve_cgls
from keyhole.fitting.forward.block import Batch, Parts
from keyhole.fitting.gauss_newton import Blocks
from keyhole.fitting.kronecker import Probed, Units, equal_leverage, find_units
from keyhole.fitting.solver import (
    JacobianSystem,
    Problem,
    Stopping,
    System,
    column_norms,
    descend,
)

FEW = 800  # unknowns up to which singular values are cheap
HIDDEN = 1e-11  # singular value, relative to the largest, of a direction that does not show
SHORTER = (1.0, 0.5, 0.2, 0.05, 0.01)  # parts of a step that are tried, until the cost falls


@runtime_checkable
class Pass(Protocol):
    """One pass through a network: its answers, and products with steps."""

    @property
    def answers(self) -> Float[Array, "n d"]: ...

    @property
    def reads(self) -> dict[str, Array]: ...

    def astype(self, dtype: type) -> "Pass": ...

    def push(self, moves: Parts) -> Float[Array, "n d"]: ...

    def pull(self, vector: Float[Array, "n d"]) -> Parts: ...


@dataclass(frozen=True, eq=False)
class Network:
    """What is fitted: how the network answers, how parameters move by a step, the queries with
    their answers, and one over the answers' noise. `freedom`: unknowns that show."""

    run: Callable[[Parts, Batch], Pass]
    move: Callable[[Parts, Parts], Parts]
    batches: Sequence[Batch]
    weights: Sequence[Array]
    blocks: Blocks
    freedom: float

    @property
    def numbers(self) -> int:
        return sum(one.answers.size for one in self.batches)

    def residuals(self, parts: Parts) -> list[Array]:
        return [self.run(parts, one).answers - one.answers for one in self.batches]

    def weigh(self, residuals: Sequence[Array]) -> Float[Array, " numbers"]:
        rows = zip(residuals, self.weights, strict=True)
        return np.concatenate([(one * weight[:, None]).ravel() for one, weight in rows])

    @property
    def few(self) -> bool:
        """Whether the unknowns are so few that singular values are cheap."""
        return self.blocks.size <= FEW

    def jacobian(self, parts: Parts) -> Float[Array, "numbers unknowns"]:
        """Of the weighted answers; for few unknowns."""
        rows = []
        for one, weight in zip(self.batches, self.weights, strict=True):
            at, unit = self.run(parts, one), np.zeros_like(one.answers)
            table = np.zeros((*one.answers.shape, self.blocks.size))
            for k in range(unit.shape[1]):
                unit[:, k - 1], unit[:, k] = 0.0, weight
                for name, g in at.pull(unit).items():
                    a = at.reads.get(name)
                    found = g if a is None else g[:, :, None] * a[:, None]
                    table[:, k, self.blocks.slices[name]] = found.reshape(len(g), -1)
            rows.append(table.reshape(-1, self.blocks.size))
        return np.concatenate(rows)

    def evened(self, parts: Parts, rng: np.random.Generator) -> "Network":
        """The same fit with weights of equal leverage."""
        probed = self.linearize(parts).probe(2, rng)
        return replace(self, weights=equal_leverage(probed, self.weights))

    def linearize(self, parts: Parts) -> "Linear":
        passes = [self.run(parts, one).astype(np.float32) for one in self.batches]
        return Linear(passes, [weight.astype(np.float32) for weight in self.weights], self.blocks)


@dataclass(frozen=True, eq=False)
class Linear:
    """The derivative of the weighted answers at one point, in single precision."""

    passes: Sequence[Pass]
    weights: Sequence[Array]
    blocks: Blocks

    @cached_property
    def ends(self) -> Array:
        return np.cumsum([one.answers.size for one in self.passes])[:-1]

    def probe(self, count: int, rng: np.random.Generator) -> list[Probed]:
        """Random signs, pulled back without the weights."""
        found = []
        for one in self.passes:
            signs = [np.float32(1.0) - 2 * rng.integers(2, size=one.answers.shape, dtype=np.int8)
                     for _ in range(count)]  # fmt: skip
            found.append(Probed([one.pull(sign.astype(np.float32)) for sign in signs], one.reads))
        return found

    def push(self, moves: Parts) -> Float[Array, " numbers"]:
        rows = [one.push(moves) * weight[:, None]
                for one, weight in zip(self.passes, self.weights, strict=True)]  # fmt: skip
        return np.concatenate([row.ravel() for row in rows])

    def pull(self, vector: Float[Array, " numbers"]) -> Parts:
        total = {name: np.zeros(shape, np.float32) for name, shape in self.blocks.shapes}
        split = np.split(vector, self.ends)
        for one, weight, part in zip(self.passes, self.weights, split, strict=True):
            for name, g in one.pull(part.reshape(one.answers.shape) * weight[:, None]).items():
                a = one.reads.get(name)
                total[name] += g.sum(axis=0) if a is None else g.T @ a
        return total

    def scaled(self, units: Units) -> Scaled:
        blocks = self.blocks

        def push(z: Array) -> Array:
            return self.push(unscale(z, units, blocks))

        def pull(vector: Array) -> Array:
            pulled = self.pull(vector)
            return blocks.join({name: units[name].adjoint(part) if name in units else 0 * part
                                for name, part in pulled.items()})  # fmt: skip

        return Scaled(push, pull)


def unscale(z: Array, units: Units, blocks: Blocks) -> Parts:
    """A step of all parameters; those that no answer shows stay."""
    return {name: units[name].apply(part) if name in units else np.zeros_like(part)
            for name, part in blocks.split(z).items()}  # fmt: skip


@dataclass(frozen=True, eq=False)
class State:
    """Parameters, their weighted residual, and the share of it that the next step leaves."""

    parts: Parts
    residual: Float[Array, " numbers"]
    share: float

    @property
    def cost(self) -> float:
        return float(self.residual @ self.residual)


def settle(
    network: Network,
    start: Parts,
    stopping: Stopping,
    ending: Ending,
    rng: np.random.Generator,
    probes: int = 4,
    names: Collection[str] | None = None,
    steady: bool = False,
) -> State:
    """Damped steps from a start, with the network's weights, of the parameters of these names.
    Where what matrices read hardly changes (`steady`), the units of the first step do for all."""
    held = np.concatenate([np.full(int(np.prod(shape)), names is not None and name not in names)
                           for name, shape in network.blocks.shapes])  # fmt: skip

    known: Units = {}

    def linearize(state: State) -> System:
        if network.few:
            jacobian = network.jacobian(state.parts)
            jacobian[:, held] = 0.0
            return JacobianSystem(state.residual, jacobian)
        at = network.linearize(state.parts)
        if not known or not steady:
            probed = at.probe(probes, rng)
            if names is not None:
                probed = [one.only(names) for one in probed]
            known.update(find_units(probed, at.weights))
        units = dict(known)

        def to_step(z: Array) -> Array:
            return network.blocks.join(unscale(z, units, network.blocks)).astype(np.float64)

        enough = replace(ending, share=state.share if ending.share else 0.0)
        return ProductSystem(at.scaled(units), state.residual, to_step, enough)

    def move(state: State, step: Array) -> State:
        moves, best = network.blocks.split(step), state
        for part in SHORTER:
            parts = network.move(state.parts, {name: part * one for name, one in moves.items()})
            residual = network.weigh(network.residuals(parts))
            share = float(residual @ residual) / max(state.cost, TINY)
            best = State(parts, residual, float(np.clip(0.5 * share, 1e-3, 0.3)))
            if share < 1.0:
                break
        return best

    first = State(start, network.weigh(network.residuals(start)), ending.share)
    return descend(Problem(lambda state: state.cost, linearize, move), first, stopping).state


@dataclass(frozen=True, eq=False)
class Structured:
    """The parameters, what is left of the answers in units of their noise (degrees of freedom taken
    off), and their residual with the network's weights."""

    parts: Parts
    level: float
    residual: Float[Array, " numbers"]


def fit_structured(network: Network, start: Parts, rng: np.random.Generator) -> Structured:
    """From a rough start to the noise of the answers."""
    even = network.evened(start, rng)
    rough = Stopping(steps=20, tolerance=0.1, damping=0.0)
    state = settle(even, start, rough, Ending(0.1, 25, 0.1), rng)
    spare = max(network.numbers - network.freedom, 1.0)
    least = 0.002 * network.freedom / max(spare, network.freedom)
    fine = Stopping(steps=8, tolerance=0.04, damping=0.0)
    state = settle(network, state.parts, fine, Ending(0.0, 20, least), rng)
    if network.few:  # weak directions, too
        step = -invert(network.jacobian(state.parts)) @ state.residual
        parts = network.move(state.parts, network.blocks.split(step))
        residual = network.weigh(network.residuals(parts))
        if residual @ residual < 2.0 * state.cost:
            state = State(parts, residual, state.share)
    return Structured(state.parts, float(np.sqrt(state.cost / spare)), state.residual)


def invert(jacobian: Float[Array, "numbers unknowns"]) -> Float[Array, "unknowns numbers"]:
    """Gives the least squares solution; directions that do not show stay where they are."""
    norms = column_norms(jacobian)
    return np.asarray(np.linalg.pinv(jacobian / norms, rcond=HIDDEN) / norms[:, None])


def find_doubts(
    network: Network, fitted: Structured, rng: np.random.Generator, probes: int = 2
) -> list[Parts]:
    """Steps that roundings of the answers might have caused, one per probe."""
    solve = solver_at(network, fitted.parts, rng)
    inflate = float(np.sqrt(network.numbers / max(network.numbers - network.freedom, 1.0)))
    found = []
    for _ in range(probes):
        wild = [np.repeat(rng.choice([-1.0, 1.0], len(one.answers)), one.answers.shape[1])
                for one in network.batches]  # fmt: skip
        noise = fitted.level * rng.standard_normal(network.numbers)
        right = inflate * fitted.residual * np.concatenate(wild) + noise
        found.append(network.blocks.split(solve(right)))
    return found


def solver_at(network: Network, parts: Parts, rng: np.random.Generator) -> Callable[[Array], Array]:
    """The least squares solution as a function of the right side."""
    if network.few:
        inverse = invert(network.jacobian(parts))
        return lambda right: np.asarray(inverse @ right)
    at = network.linearize(parts)
    units = find_units(at.probe(4, rng), at.weights)
    scaled, ending = at.scaled(units), Ending(growth=0.02, window=20)

    def solve(right: Array) -> Array:
        size = float(np.linalg.norm(right)) + TINY
        z = solve_cgls(scaled, (right / size).astype(np.float32), ending).z
        step = network.blocks.join(unscale(z, units, network.blocks))
        return np.asarray(size * step.astype(np.float64))

    return solve
