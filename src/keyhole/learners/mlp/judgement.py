"""Is a refined network the box? What rounding explains, what contradicts it, what is reported.

Statement.  A network is taken for the box if it leaves of the answers that it was fitted to what
            their rounding explains, and contradicts no answer that was asked on the way by more
            than its standard errors; if the answers determine every neuron; and if enough of them
            lie where each neuron bends.
Queries.    None: all answers are there.
Algebra.    The residual against the size of the terms that an answer is the sum of; standard errors
            propagated by draws. Blocks of parameters that are zero within their errors, and would
            not matter, are zero; neurons are turned so that the linear part is zero, or the
            identity, where that is possible.
Fails.      Answers that leave several networks open: said so, another stage may settle it.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float
from keyhole.learners.base import Diagnostics, Hypothesis, Inconclusive, Result
from keyhole.learners.mlp.far_field import EXPLAINED
from keyhole.learners.mlp.options import MlpOptions
from keyhole.learners.mlp.refinement import RefinedNetwork
from keyhole.learners.mlp.thinning import rows_of
from keyhole.measurement.asker import Asker
from keyhole.measurement.evidence import Estimate, Evidence
from keyhole.models.mlp import ACTIVATIONS, Mlp, turned
from keyhole.network.weights import Weights, hidden_layer, with_one
from keyhole.oracles.noise import REJECTION, NoiseModel


@dataclass(frozen=True, eq=False, kw_only=True)
class MlpDiagnostics(Diagnostics):
    """The network, and how well it fits."""

    neurons: int
    activation: str
    gated: bool
    residual: float  # root mean square of what the network leaves of the answers
    steps: int  # of the refinement


def judge(
    box: Asker,
    refined: RefinedNetwork,
    points: Array,
    answers: Array,
    centre: Array,
    radius: float,
    options: MlpOptions,
) -> Result:
    """The hypothesis, unless the network does not explain the answers to their rounding. The
    fit was made at the points (x - centre) / radius."""
    allowed = explained_residual(box, refined, points, answers, options)
    if not refined.residual <= allowed:
        # one start of a fit: another, or one with more neurons, may be the right one
        return Inconclusive(
            f"no network with one hidden layer of {refined.weights.neurons} neurons was found "
            f"that fits: the best leaves {refined.residual:.1e}, where rounding explains "
            f"{allowed:.1e}"
        )
    known = options.known
    if refined.errors is None or not all(
        float(np.linalg.norm(error)) < known * float(np.linalg.norm(part))
        for part, error in (
            (refined.weights.inner, refined.errors.inner),
            (refined.weights.outer, refined.errors.outer),
        )
    ):
        return Inconclusive("the answers leave some neuron undetermined")
    if (stray := find_contradiction(box, refined, centre, radius, options)) is not None:
        return stray
    rows = rows_of(refined.weights)
    in_bend = (np.abs(with_one(points) @ rows.T) < options.bent).sum(axis=0)
    if (sharp := int((in_bend < options.seen).sum())) > 0:
        return Inconclusive(
            f"{sharp} of {len(rows)} neurons bend so sharply that no answer "
            "lies in the bend: another activation there, such as relu, would fit as well"
        )
    weights = moved_back(refined.weights, centre, radius)
    errors = moved_back(refined.errors, np.zeros_like(centre), radius)
    model, deviations = as_mlp(weights, box.scalar), as_mlp(errors, box.scalar)
    model, deviations, side = with_sides(model, deviations, options.certain)
    evidence = Evidence(box.noise)
    model = without_rounding(model, deviations, float(np.abs(answers).max()), evidence)
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
    note = (
        f"Single tokens act smoothly: a network with {weights.neurons} {gate}neurons and "
        f"{ACTIVATIONS[weights.activation].title}."
    )
    return Hypothesis(model, deviations, floor, (note, side), noise=noise, diagnostics=diagnostics)


def relative_error(box: Asker, answers: Array) -> float:
    """Of these answers: what they round, and what adds to them whatever their size."""
    return box.unit + box.additive / max(float(np.sqrt(np.mean(answers**2))), TINY)


def explained_residual(
    box: Asker, refined: RefinedNetwork, points: Array, answers: Array, options: MlpOptions
) -> float:
    """What rounding explains of a residual. A wrong network's terms may cancel too: where
    that would excuse a part of the answers as large as a wrong network leaves, the answers
    alone are the measure, and are also off by fewer roundings."""
    scale, roundings = terms(refined.weights, points), options.roundings
    cancelled = options.cancelled
    if roundings * cancelled * box.unit < EXPLAINED:
        scale = min(scale, cancelled * float(np.abs(answers).max()))
    else:
        scale, roundings = min(scale, float(np.sqrt(np.mean(answers**2)))), roundings / 8.0
    return roundings * box.unit * scale + REJECTION * box.additive


def find_contradiction(
    box: Asker, refined: RefinedNetwork, centre: Array, radius: float, options: MlpOptions
) -> Inconclusive | None:
    """Whether an answer that was asked on the way, and not for the fit, contradicts it by more
    than the standard errors: one of too many neurons explains whatever it was made from."""
    weights = moved_back(refined.weights, centre, radius)
    ((sequences, answers),) = box.pairs()
    points = sequences[:, 0]
    predicted = weights(points)
    off = np.linalg.norm(predicted - answers, axis=1)
    allowed = box.unit**options.half * sizes_of_terms(weights, points)
    allowed += REJECTION * box.additive * np.sqrt(answers.shape[1])
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


def unknowns(
    neurons: int, width: int, outputs: int, gated: bool | None, affine: bool = True
) -> float:
    """Parameters per number in an answer; a gated network may have no affine part."""
    rows = neurons * (width + 1) * (2 if gated else 1)
    return (rows + neurons * outputs + (outputs * (width + 1) if affine else 0)) / outputs


def terms(weights: Weights, points: Array) -> float:
    """Root mean square of the terms of which an answer is the sum."""
    homogeneous = with_one(points)
    hidden, _ = hidden_layer(weights, homogeneous)
    square = (hidden**2) @ (weights.outer**2).T + (homogeneous**2) @ (weights.affine**2).T
    return float(np.sqrt(square.mean()))


def sizes_of_terms(weights: Weights, points: Float[Array, "n d"]) -> Float[Array, " n"]:
    """Norm of the terms of which each answer is the sum."""
    homogeneous = with_one(points)
    hidden, _ = hidden_layer(weights, homogeneous)
    square = (hidden**2) @ (weights.outer**2).sum(axis=0)
    return np.asarray(np.sqrt(square + (homogeneous**2) @ (weights.affine**2).sum(axis=0)))


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


def without_rounding(model: Mlp, errors: Mlp, answers: float, evidence: Evidence) -> Mlp:
    """Biases, linear part and offset that cannot be told from zero, and would not matter beside
    arguments of order one and the answers, are zero."""
    parts, doubts = model.to_arrays(), errors.to_arrays()
    through = float(np.linalg.norm(np.atleast_2d(model.outer) @ model.inner))
    sizes = {"inner_bias": 1.0, "gate_bias": 1.0, "linear": through, "offset": answers}
    for name, yardstick in sizes.items():
        if name in parts and evidence.vanishes(Estimate(parts[name], doubts[name]), yardstick):
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
            beyond = np.atleast_2d(other.linear) - part
            if np.linalg.norm(beyond) <= certain * np.linalg.norm(outer @ model.inner) / 1e4:
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
