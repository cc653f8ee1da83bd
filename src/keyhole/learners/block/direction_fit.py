"""A network of which only the directions of its answers are seen, fitted from a random start.

Statement.  z(x) = affine(x) + Σ_j outer_j φ(inner_j . x + bias_j), and n = z / |z| is known at
            random points of a sphere. A network of more neurons than there are, fitted to n by
            damped Gauss-Newton steps, explains all directions; the needless neurons are then taken
            out. z is found up to one factor.
Queries.    None: points and directions are given, 1.7 numbers per unknown of the larger network.
Algebra.    With u = z / |z| and Π = 1 - u uᵀ the residual u - n has the derivatives Π F / |z| by
            the linear part and Π outer_j φ'_j x / |z| by the rows; the normal matrix is built from
            these products, never from the Jacobian. A small ridge on outer keeps neurons that do
            the same from working against each other. Neurons on one hyperplane become one. What
            taking out a neuron costs, all others moved, is c ((A⁻¹)_jj)⁻¹ c (optimal brain
            surgery).
Fails.      The fit stalls at a residual that tells: another start, or more neurons.
"""

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.fitting.solver import NormalSystem, Problem, Stopping, descend
from keyhole.learners.block.box import Unclear
from keyhole.models.mlp import ACTIVATIONS

SMOOTH = ("gelu", "silu", "gelu_tanh", "tanh")  # activations, in the order in which they are tried


@dataclass(frozen=True)
class DirectionOptions:
    """What a person might tune.

    ridge: of the first fit, relative to squared residuals. close: root mean square of the residual
    at which the first fit has found the network. starts: random ones for each number of neurons.
    growth: of the number of neurons from one attempt to the next. steps: of one fit, at most.
    rounds: of fresh points, before a network that does not explain them is given up. most: neurons
    for each number of z, and unknowns, beyond which the fit is given up.
    """

    ridge: float = 1e-6
    close: float = 5e-5
    starts: int = 3
    growth: float = 1.6
    steps: int = 200
    rounds: int = 2
    most: tuple[float, int] = (9.0, 4000)


@dataclass(frozen=True, eq=False)
class Directed:
    """z(x) = affine (x, 1) + outer φ(rows (x, 1)), up to one factor."""

    affine: Float[Array, "p e"]
    outer: Float[Array, "p m"]
    rows: Float[Array, "m e"]
    activation: str

    @property
    def neurons(self) -> int:
        return len(self.rows)

    def __call__(self, points: Float[Array, "n k"]) -> Float[Array, "n p"]:
        x = with_one(points)
        hidden = ACTIVATIONS[self.activation].value(x @ self.rows.T)
        return np.asarray(x @ self.affine.T + hidden @ self.outer.T)

    def slopes(self, points: Float[Array, "n k"]) -> Float[Array, "n p k"]:
        """Derivatives of z."""
        bend = ACTIVATIONS[self.activation].first(with_one(points) @ self.rows.T)
        inner = np.einsum("pm,nm,mk->npk", self.outer, bend, self.rows[:, :-1], optimize=True)
        return np.asarray(self.affine[:, :-1] + inner)


def with_one(points: Float[Array, "n k"]) -> Float[Array, "n e"]:
    return np.column_stack([points, np.ones(len(points))])


def lengths(rows: Float[Array, "n p"]) -> Float[Array, "n 1"]:
    return np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), TINY)


@dataclass(frozen=True, eq=False)
class Data:
    """Points with a one behind, and the directions seen there."""

    points: Float[Array, "n e"]
    seen: Float[Array, "n p"]


def residual_of(net: Directed, data: Data) -> tuple[float, Float[Array, "n p"]]:
    """Root mean square over all numbers, and the residuals."""
    z = net(data.points[:, :-1])
    rest = z / lengths(z) - data.seen
    return float(np.sqrt(np.mean(rest**2))), rest


# --- one fit --------------------------------------------------------------------------------------


def normal_equations(net: Directed, data: Data) -> tuple[Array, Array]:
    """The normal matrix and the gradient: affine and outer (output by output), then the rows."""
    phi, x = ACTIVATIONS[net.activation], data.points
    arguments = x @ net.rows.T
    bend = phi.first(arguments)
    columns = np.column_stack([x, phi.value(arguments)])
    z = columns @ np.column_stack([net.affine, net.outer]).T
    size = lengths(z)
    u = z / size
    rest = u - data.seen
    p, (count, q) = z.shape[1], columns.shape
    m, e = net.rows.shape
    scaled = columns / size
    moved = (net.outer - u[:, :, None] * (u @ net.outer)[:, None, :]) / size[:, :, None]
    moved = moved * bend[:, None, :]  # (n, p, m)
    across = rest - u * np.sum(rest * u, axis=1, keepdims=True)
    normal = np.empty((p * q + m * e, p * q + m * e))
    whole = scaled.T @ scaled
    for a in range(p):
        for b in range(a + 1):
            part = -(scaled * (u[:, a] * u[:, b])[:, None]).T @ scaled
            if a == b:
                part = part + whole
            normal[a * q : (a + 1) * q, b * q : (b + 1) * q] = part
            normal[b * q : (b + 1) * q, a * q : (a + 1) * q] = part
        mixed = scaled.T @ (moved[:, a, :, None] * x[:, None, :]).reshape(count, m * e)
        normal[a * q : (a + 1) * q, p * q :] = mixed
        normal[p * q :, a * q : (a + 1) * q] = mixed.T
    pairs = (moved.transpose(0, 2, 1) @ moved).reshape(count, m * m)
    squares = (x[:, :, None] * x[:, None, :]).reshape(count, e * e)
    own = (pairs.T @ squares).reshape(m, m, e, e).transpose(0, 2, 1, 3)
    normal[p * q :, p * q :] = own.reshape(m * e, m * e)
    by_row = np.einsum("np,npm->nm", rest, moved).T @ x
    gradient = np.concatenate([(across.T @ scaled).ravel(), by_row.ravel()])
    return normal, gradient


def join(net: Directed) -> Float[Array, " unknowns"]:
    linear = np.column_stack([net.affine, net.outer])
    return np.concatenate([linear.ravel(), net.rows.ravel()])


def split(vector: Float[Array, " unknowns"], like: Directed) -> Directed:
    p, e = like.affine.shape
    linear, rows = np.split(vector, [p * (e + like.neurons)])
    linear = linear.reshape(p, -1)
    return Directed(linear[:, :e], linear[:, e:], rows.reshape(-1, e), like.activation)


def balanced(net: Directed) -> Directed:
    """The same directions with z of order one; rows of ReLUs, whose length means nothing, too."""
    size = np.linalg.norm(net.affine) / np.sqrt(len(net.affine))
    net = replace(net, affine=net.affine / size, outer=net.outer / size)
    if net.activation != "relu":
        return net
    length = lengths(net.rows[:, :-1])
    return replace(net, rows=net.rows / length, outer=net.outer * length.T)


def fit_directions(
    net: Directed, data: Data, steps: int, ridge: float = 0.0, target: float = 0.0
) -> tuple[Directed, float]:
    """Damped Gauss-Newton steps from a start, so many that help, until the residual is below the
    target or they stall; the network and its residual."""
    weight = np.zeros(len(join(net)))
    p, e = net.affine.shape
    table = weight[: p * (e + net.neurons)].reshape(p, -1)
    table[:, e:] = ridge

    def cost(one: Directed) -> float:
        return float(np.sum(residual_of(one, data)[1] ** 2) + ridge * np.sum(one.outer**2))

    def linearize(net: Directed) -> NormalSystem:
        normal, gradient = normal_equations(net, data)
        normal[np.diag_indices(len(normal))] += weight
        return NormalSystem(normal, -gradient - weight * join(net))

    def move(net: Directed, step: Array) -> Directed:
        return balanced(split(join(net) + step, net))

    stopping = Stopping(
        steps=2 * steps,  # about half of them help
        target=target**2 * data.seen.size,
        window=12,
        share=1e-3,
        damping=1e-2 if ridge else 1e-5,
        eager=True,
    )
    net = descend(Problem(cost, linearize, move), balanced(net), stopping).state
    return net, residual_of(net, data)[0]


# --- all of it ------------------------------------------------------------------------------------


def random_network(
    affine: Float[Array, "p e"], neurons: int, activation: str, rng: np.random.Generator
) -> Directed:
    """Weak random neurons beside this affine part."""
    numbers, width = affine.shape[0], affine.shape[1] - 1
    rows = rng.standard_normal((neurons, width))
    rows = rows / lengths(rows) * rng.uniform(0.5, 1.5, (neurons, 1))
    rows = np.column_stack([rows, 0.5 * rng.standard_normal(neurons)])
    outer = 0.1 * rng.standard_normal((numbers, neurons)) / np.sqrt(neurons)
    return Directed(affine, outer, rows, activation)


@runtime_checkable
class Source(Protocol):
    """Where points of the sphere and directions come from."""

    def grow(self, count: int) -> None:
        """So many random points, at least."""
        ...

    def grow_beside(self, net: Directed) -> None:
        """More points on that side of a neuron's hyperplane where there are few."""
        ...

    def read(self, known: Directed | None) -> tuple[Float[Array, "n k"], Float[Array, "n p"]]:
        """All points and directions; a network that explains them nearly may make them more
        exact."""
        ...


def points_beside(
    net: Directed, points: Float[Array, "n k"], radius: float, rng: np.random.Generator
) -> Float[Array, "more k"]:
    """Points of the sphere near the hyperplanes of neurons, on the side where there are too few to
    tell a neuron: it has one unknown more than two directions have numbers."""
    width = points.shape[1]
    need = int(1.4 * (width + 1)) + 2
    found = [np.zeros((0, width))]
    for row in net.rows:
        size = max(float(np.linalg.norm(row[:-1])), TINY)
        heading, place = row[:-1] / size, -row[-1] / size
        if abs(place) >= radius:
            continue  # the sphere lies on one side
        for side in (-1.0, 1.0):
            more = need - int(np.sum(side * (points @ heading - place) > 0))
            if more <= 0:
                continue
            room = radius - side * place
            height = place + side * room * rng.uniform(0.0, 1.0, more) ** 2
            around = rng.standard_normal((more, width))
            around -= np.outer(around @ heading, heading)
            around *= np.sqrt(np.maximum(radius**2 - height**2, 0.0))[:, None] / lengths(around)
            found.append(height[:, None] * heading + around)
    return np.concatenate(found)


def points_wanted(width: int, numbers: int, neurons: int, share: float = 1.7) -> int:
    """Points that a fit of so many neurons needs, with this many numbers per unknown."""
    unknowns = numbers * (width + 1 + neurons) + neurons * (width + 1)
    return int(share * unknowns / (numbers - 1)) + 4


def merge_neurons(net: Directed, alike: float = 0.995) -> Directed:
    """Neurons on one hyperplane become one, also where one of them is turned around."""
    phi = ACTIVATIONS[net.activation]
    directions = net.rows / lengths(net.rows)
    strength = np.linalg.norm(net.outer, axis=0) * lengths(net.rows)[:, 0]
    left = list(np.argsort(-strength))
    kept, outer, affine = [], [], net.affine.copy()
    while left:
        first = left[0]
        near = directions[left] @ directions[first]
        group = [j for j, cos in zip(left, near, strict=True) if abs(cos) > alike]
        left = [j for j in left if j not in group]
        total = np.zeros(len(net.outer))
        for j in group:
            ratio = np.linalg.norm(net.rows[j]) / np.linalg.norm(net.rows[first])
            turned = directions[j] @ directions[first] < 0
            total = total + net.outer[:, j] * ratio * (phi.sign if turned else 1.0)
            if turned:
                affine += np.outer(net.outer[:, j] * ratio, phi.slope * net.rows[first])
        kept.append(net.rows[first])
        outer.append(total)
    return replace(net, affine=affine, outer=np.array(outer).T, rows=np.array(kept))


def removal_costs(net: Directed, data: Data) -> Float[Array, " m"]:
    """What the sum of squares grows by where a neuron is taken out and all others are moved."""
    normal, _ = normal_equations(net, data)
    diagonal = np.diag_indices(len(normal))
    normal[diagonal] += 1e-9 * normal[diagonal] + 1e-13 * normal[diagonal].max()
    p, e = net.affine.shape
    q = e + net.neurons
    # the length of z is not seen, nor is that of a ReLU's row beside its outer: both stay
    most = float(normal[diagonal].max())
    whole = join(net)[: p * q] / np.linalg.norm(join(net)[: p * q])
    normal[: p * q, : p * q] += most * np.outer(whole, whole)
    for j, row in enumerate(net.rows / lengths(net.rows) if net.activation == "relu" else ()):
        place = slice(p * q + j * e, p * q + (j + 1) * e)
        normal[place, place] += most * np.outer(row, row)
    inverse = np.linalg.inv(normal)
    found = np.empty(net.neurons)
    for j in range(net.neurons):
        own = np.arange(p) * q + e + j
        found[j] = net.outer[:, j] @ np.linalg.solve(inverse[np.ix_(own, own)], net.outer[:, j])
    return found


def without(net: Directed, out: Array) -> Directed:
    kept = np.setdiff1d(np.arange(net.neurons), out)
    return replace(net, outer=net.outer[:, kept], rows=net.rows[kept])


def prune_neurons(net: Directed, data: Data, level: float) -> tuple[Directed, float]:
    """The network without the neurons that it does not need to stay at this residual."""
    net, rest = fit_directions(merge_neurons(net), data, 30, target=level)
    many = max(1, net.neurons // 8)  # neurons taken out at once, first
    while net.neurons > 1:
        costs = removal_costs(net, data)
        order = np.argsort(costs)[:many]
        fewer, left = fit_directions(without(net, order), data, 40, target=level)
        if left < max(3.0 * rest, level):
            net, rest = fewer, left
        elif many == 1:
            break
        else:
            many = max(1, many // 2)
    return net, rest


def find_network(
    source: Source,
    affine: Float[Array, "p e"],
    activations: tuple[str, ...],
    level: float,
    rng: np.random.Generator,
    options: DirectionOptions | None = None,
) -> Directed:
    """`affine`: with which the fit begins. `level`: residual that the errors of exact directions
    explain. Raises Unclear."""
    options = DirectionOptions() if options is None else options
    numbers, width = affine.shape[0], affine.shape[1] - 1
    neurons, least = 2 * numbers, np.inf
    share, unknowns = options.most
    while neurons <= share * (numbers + 1) and neurons * (numbers + width) <= unknowns:
        nearest = np.inf  # residual of the first activation: others that bend are nearly as good
        for activation in activations:
            if activation != activations[0] and nearest > 20.0 * options.close:
                break
            more = 1.6 if activation == "relu" else 1.0  # kinks are seen by the points beside them
            count = int(more * points_wanted(width, numbers, neurons))
            for _ in range(options.starts):
                source.grow(count)
                points, seen = source.read(None)
                data = Data(with_one(points), seen)
                start = random_network(affine, neurons, activation, rng)
                net, rest = fit_directions(start, data, options.steps, options.ridge)
                least, nearest = min(least, rest), min(nearest, rest)
                if rest < options.close:
                    found = confirm_network(net, len(points), source, level, rng, options)
                    if found is not None:
                        return found
                elif rest > 10.0 * options.close:
                    break  # too few neurons
        neurons = int(options.growth * neurons) + 1
    raise Unclear(f"no network explains the directions of the answers: {least:.1e} is left")


def confirm_network(
    net: Directed,
    count: int,
    source: Source,
    level: float,
    rng: np.random.Generator,
    options: DirectionOptions,
) -> Directed | None:
    """The network without needless neurons, once it explains fresh points; points that it does not
    explain join the others, and a few more neurons do the fit again."""
    p = len(net.affine)
    for _ in range(options.rounds):
        points, seen = source.read(net)
        net, rest = prune_neurons(net, Data(with_one(points), seen), level)
        if rest > 3.0 * level:
            return None
        count += max(64, count // 4)
        source.grow(count)
        source.grow_beside(net)
        points, seen = source.read(net)
        _, off = residual_of(net, Data(with_one(points), seen))
        wrong = int(np.sum(np.linalg.norm(off, axis=1) > 30.0 * level * np.sqrt(p)))
        if not wrong:
            return net
        more = random_network(net.affine, net.neurons // 2 + 4, net.activation, rng)
        net = replace(
            net,
            outer=np.column_stack([net.outer, more.outer]),
            rows=np.concatenate([net.rows, more.rows]),
        )
        net, rest = fit_directions(net, Data(with_one(points), seen), options.steps, options.ridge)
        if rest > options.close:
            return None
    return None
