"""Leaks are driven to where neurons of the template stand: to none, or to a neuron turned round.

Statement.  From a fit whose neurons a(z) + leak z have any leaks to one in which they are those of
            the template.
Queries.    None.
Algebra.    Behind a norm leaks are not determined: the norm's gains, and rotations that the layers
            before and behind it undo, make up for them, and most patterns of signs can be reached.
            So the leaks are pulled to 0 or -k (a(z) - a(-z) = k z), each to the nearer one, by
            residuals of their own beside those of the answers: the fit stays at the bottom of its
            valley and moves along it. Where a pattern cannot be reached, another one is drawn.
When it fails. No pattern that is tried can be reached: the fit stays above rounding.
"""

from collections.abc import Sequence

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.template.forward import Residuals
from keyhole.learners.template.widening import Neuron, Pair

PULL = 1e-3  # mean square of the residual of a leak that is off by k, over that of the answers
DOUBT = 0.1  # probability that a leak which is clear is drawn to the other side all the same


class Pulled(Residuals):
    """Residuals with one more for each of some weights: how far it is from where it should be."""

    def __init__(self, residuals: Residuals, places: Array, targets: Array) -> None:
        self.inner, self.places, self.targets = residuals, places, targets
        self.forward, self.data, self.size = residuals.forward, residuals.data, residuals.size
        self.numbers = residuals.numbers + len(places)
        self.stiffness = float(np.sqrt(PULL * self.size * residuals.numbers / len(places)))

    def __call__(self, vector: Float[Array, " unknowns"]) -> Float[Array, " numbers"]:
        pulls = self.stiffness * (vector[self.places] - self.targets)
        return np.concatenate([self.inner(vector), pulls])

    def jacobian(self, vector: Float[Array, " unknowns"]) -> Float[Array, "numbers unknowns"]:
        rows = np.zeros((len(self.places), len(vector)))
        rows[np.arange(len(rows)), self.places] = self.stiffness
        return np.concatenate([self.inner.jacobian(vector), rows])


def pull_leaks(
    residuals: Residuals,
    weights: Float[Array, " unknowns"],
    neurons: Sequence[Neuron],
    pairs: Sequence[Pair],
    rng: np.random.Generator | None,
) -> Residuals:
    """The residuals with a pull on all leaks: to the nearer side, or to sides that are drawn by how
    near they are. The same residuals where there are no leaks.

    Args:
        residuals: of the template with leaks.
        weights: where the fit is.
        neurons: those that are there.
        pairs: the hidden layers.
        rng: draws the sides; None for the nearer ones.
    """
    leaky = [one for one in neurons if pairs[one.pair].turn]
    if not leaky:
        return residuals
    places = np.array([one.incoming[-1] for one in leaky])
    turns = np.array([pairs[one.pair].turn for one in leaky])
    share = np.clip(-weights[places] / turns, DOUBT, 1.0 - DOUBT)
    turned = share > (0.5 if rng is None else rng.random(len(share)))
    return Pulled(residuals, places, np.where(turned, -turns, 0.0))
