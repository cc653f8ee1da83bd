"""From what a search found to what is reported: standard errors, zeros, notes."""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array
from keyhole.learners.base import Diagnostics
from keyhole.learners.mlp.domain import InputRegion
from keyhole.learners.mlp.orientation import Signs
from keyhole.models.relu_network import ReluNetwork

ZERO = 12.0  # standard errors within which a whole block of parameters counts as zero,
NEGLIGIBLE = 1e-8  # if it is as small as this beside inputs and answers
NEGLIGIBLE_ROUNDINGS = 100.0  # or this many roundings of the answers


@dataclass(frozen=True, eq=False, kw_only=True)
class NetworkDiagnostics(Diagnostics):
    """How far a network of one token is off: what a score behind it inherits."""

    function_error: float  # largest error, in units of the answers
    scale: float  # how much the answers vary


@dataclass(frozen=True, eq=False, kw_only=True)
class ReluDiagnostics(NetworkDiagnostics):
    """What the search for a ReLU network found out beside the network."""

    neurons: int
    orientation: str  # how the sides on which neurons are active were decided
    orientation_certified: bool
    validation_difference: float  # largest difference at the validation points
    rounding: float  # error of an answer, as met along the lines
    lines: int  # or rays, that were asked
    leak: float | None  # slope below zero, where neurons are leaky
    radius: float  # of the domain


def flat(network: ReluNetwork) -> ReluNetwork:
    """A scalar box's network, from answers kept as vectors of length one."""
    return ReluNetwork(
        network.weight, network.bias, network.output[:, 0], network.skip[:, 0], network.offset[0]
    )


def unflat(network: ReluNetwork) -> ReluNetwork:
    return ReluNetwork(
        network.weight,
        network.bias,
        network.output[:, None],
        network.skip[:, None],
        network.offset[None],
    )


def only(network: ReluNetwork, chosen: Array) -> ReluNetwork:
    """The network of the chosen neurons, affine part as it is."""
    return ReluNetwork(
        network.weight[chosen],
        network.bias[chosen],
        network.output[chosen],
        network.skip,
        network.offset,
    )


def joined(network: ReluNetwork, more: ReluNetwork) -> ReluNetwork:
    """The network with further neurons."""
    return ReluNetwork(
        np.concatenate([network.weight, more.weight]),
        np.concatenate([network.bias, more.bias]),
        np.concatenate([network.output, more.output]),
        network.skip,
        network.offset,
    )


def derive_standard_errors(
    model: ReluNetwork, error: Array, affine_error: float, scale: float
) -> ReluNetwork:
    """Errors in the model's own structure, from those of the products output_j weight_j."""
    length = np.sqrt(model.width) * scale
    size = np.linalg.norm(model.output_table, axis=1)
    size = np.maximum(size, TINY)
    rows = error / size
    weight = np.repeat((rows / length)[:, None], model.width, axis=1)
    output = np.zeros_like(model.output) + (error / length).reshape(
        -1, *([1] * (model.output.ndim - 1))
    )
    skip = np.full_like(model.skip, affine_error / length if model.skip.any() else 0.0)
    return ReluNetwork(weight, rows, output, skip, np.full_like(model.offset, affine_error))


def without_rounding(
    model: ReluNetwork, errors: ReluNetwork, answers: float, inputs: float, digits: float
) -> ReluNetwork:
    """Biases, skip and offset that cannot be told from zero, and would not matter, are zero.
    `digits` is the rounding of an answer relative to the answers."""
    negligible = max(NEGLIGIBLE, NEGLIGIBLE_ROUNDINGS * digits)
    parts = model.to_arrays()
    for name, yardstick in (("bias", inputs), ("skip", answers / inputs), ("offset", answers)):
        size = float(np.linalg.norm(parts[name]))
        doubt = float(np.linalg.norm(getattr(errors, name)))
        if size <= min(ZERO * doubt, negligible * yardstick):
            parts[name] = np.zeros_like(parts[name])
    return ReluNetwork.from_arrays(parts)


def notes_on(decided: Signs) -> tuple[str, ...]:
    network = decided.network
    notes = []
    if decided.leak is not None:
        notes.append(
            f"Below zero the neurons have slope {decided.leak:.6g} (leaky ReLUs; -1 means absolute "
            "values): the skip holds it."
        )
    elif not decided.certified:
        notes.append(
            f"Which side of its plane each neuron is on was not decided ({decided.method}); the "
            "function is known, the skip holds the difference."
        )
    elif network.skip.any():
        notes.append("The box has a linear part beside its neurons: the skip.")
    if network.neurons == 0:
        notes.append("The box is affine: it has no neurons that change the answer.")
    return tuple(notes)


def note_on_region(region: InputRegion, unseen: float, rough: bool, digits: float) -> str:
    """What the search did not look at."""
    limits = []
    if region.radius < np.inf:
        limits.append(f"points of norm up to {region.radius:.3g}")
    if region.half < np.inf:
        limits.append(f"entries within {region.half:.3g} of {region.centre[0]:.3g}")
    where = " and ".join(limits)
    note = (
        f"Planes were looked for among {where}; one that cuts off less than about {unseen:.1%} of "
        "the edge there may have been missed, and those beyond are part of skip and offset."
    )
    if rough:
        note += (
            f" The box's answers are exact to about {digits:.0e} of their size; neurons weaker "
            "than that are not seen either."
        )
    return note


def note_on_digits(lines: int, per_unknown: float, digits: float) -> str:
    """What few digits cost and hide."""
    return (
        f"The box's answers are exact to about {digits:.0e} of their size, and so is the network: "
        f"that took {lines} line{'s' if lines > 1 else ''} and {per_unknown:.1f} queries per "
        "unknown, where little more than one is enough for double precision; neurons weaker than "
        "that are not seen."
    )
