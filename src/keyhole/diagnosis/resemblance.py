"""Near which layer a difference arises that no fault of the catalogue explains.

Statement: a fault that is in no catalogue resembles those that are: an ELU is between the ReLU and
the SiLU of its layer. The layer whose own faults, added up with the weights that fit best, predict
the difference on rows that the weights were not fitted to is the layer that it arises in.
Queries: none beyond those already answered.
Algebra: d_i is what the i-th fault of one layer alone changes, r the suspect minus the reference,
both in units of |r| row by row. For each row x, w minimises |r - sum_i w_i d_i| over the other
rows, and the share predicted of x is 1 - |r(x) - sum_i w_i d_i(x)|^2. The best layer is named where
its share is above zero, and above the next layer's, by many standard errors over rows.
When it fails: a difference that resembles nothing, as a random update of a weight, has no share in
any layer, and none is named.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array
from keyhole.diagnosis.catalogue import Variant
from keyhole.diagnosis.experiment import Experiment

SIGNIFICANT = 4.0  # standard errors over rows
ALIKE = 1e-2  # faults of a layer that differ by less, relatively, are one direction


@dataclass(frozen=True)
class Resemblance:
    """A layer whose faults predict a difference.

    Attributes:
        layer: its number.
        share: of the squared difference that its faults predict, on rows left out.
        error: standard error of the share, over rows.
        nearest: the one fault of the layer that leaves least over.
    """

    layer: int
    share: float
    error: float
    nearest: Variant

    def describe(self) -> str:
        """Where, in words."""
        return (
            f"most likely near layer {self.layer}, whose faults resemble it (they predict "
            f"{self.share:.0%} ± {self.error:.0%} of rows left out; the nearest: {self.nearest})"
        )


def find_resemblance(
    experiment: Experiment, local: Sequence[Variant], rows: Sequence[int], tolerance: float
) -> Resemblance | None:
    """The layer whose faults predict the difference on rows left out, where one clearly does.

    Args:
        experiment: rows and answers.
        local: faults that one layer has by itself.
        rows: that the difference is looked at on.
        tolerance: the residual up to which a row shows no difference.
    """
    residuals = experiment.residuals((), rows)
    shown = [n for n, residual in zip(rows, residuals, strict=True) if residual > tolerance]
    if not local or len(shown) < 3:  # a standard error wants a few rows
        return None
    base = experiment.simulate((), shown)
    rest = experiment.answers[shown] - base
    unit = np.linalg.norm(rest, axis=1)[:, None]
    layers = sorted({v.layer for v in local if v.layer is not None})
    shares, nearest = [], []
    for layer in layers:
        own = [v for v in local if v.layer == layer]
        moves = np.stack([(experiment.simulate((v,), shown) - base) / unit for v in own])
        finite = np.all(np.isfinite(moves), axis=(1, 2)) & np.any(moves, axis=(1, 2))
        left = np.sum((moves - rest / unit) ** 2, axis=(1, 2))
        nearest.append(own[int(np.argmin(np.where(finite, left, np.inf)))])
        shares.append(predict_left_out(moves[finite], rest / unit))
    order = np.argsort([-np.mean(share) for share in shares])
    best = shares[order[0]]
    ahead = [best] if len(order) == 1 else [best, best - shares[order[1]]]
    if any(np.mean(values) < SIGNIFICANT * _error(values) for values in ahead):
        return None
    first = int(order[0])
    return Resemblance(layers[first], float(np.mean(best)), _error(best), nearest[first])


def predict_left_out(moves: Array, rest: Array) -> Array:
    """The share of each row (rows, outputs) that a sum of moves (faults, rows, outputs) predicts
    with weights that were fitted to the other rows."""
    if not len(moves):
        return np.zeros(len(rest))
    moves = moves / np.sqrt(np.sum(moves**2, axis=(1, 2), keepdims=True))
    shares = []
    for row in range(len(rest)):
        others = [k for k in range(len(rest)) if k != row]
        fitted = moves[:, others].reshape(len(moves), -1).T
        weights = np.linalg.lstsq(fitted, rest[others].ravel(), rcond=ALIKE)[0]
        shares.append(1 - np.sum((rest[row] - np.tensordot(weights, moves[:, row], 1)) ** 2))
    return np.array(shares)


def _error(values: Array) -> float:
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))
