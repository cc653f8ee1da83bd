"""Is it the model behind the labels? Where nothing can be asked, rows kept aside decide.

Tests, any of which rejects: held-out rows off by more than noise and the parameters' uncertainty
allow; a share of the labels left unexplained that is too large to be called noise; residuals that
cluster on some rows, which independent noise does not do (labels of a second model among those of
the first do); residuals that follow a power of the predictions or the anchor token, which noise
cannot know (a nonlinearity or a skip connection behind the layer can; Ramsey's RESET test).
"""

from dataclasses import dataclass

import numpy as np
from scipy.special import chdtri, fdtri, ndtri  # quantiles; scipy.stats takes long to import

from keyhole.arrays import TINY, UNIT_ROUNDOFF, Array, Float
from keyhole.errors import Counterexample
from keyhole.results import Verdict
from keyhole.verification.statement import CONFIDENCE, share_conceded

ERROR_RATE = 1e-6  # chance of rejecting a right model, per test


@dataclass(frozen=True, eq=False)
class HeldOutAnswers:
    """What a fit leaves: of rows it has not seen, and of those it has."""

    inputs: list[Array]  # the tokens behind each held-out row, its anchor last
    answers: Float[Array, "rows D"]
    predictions: Float[Array, "rows D"]  # by the fit to the other rows
    refitted: Float[Array, "rows D"]  # residuals of the held-out rows once they are fitted too
    residuals: Float[Array, "fitted D"]
    fitted: Float[Array, "fitted D"]  # predictions for the rows that were fitted
    anchors: Float[Array, "fitted p"]  # and the tokens these were read at
    costs: tuple[float, float]  # squared residual of the fitted rows; of all once all are fitted
    noise: float  # standard deviation estimated from the fitted rows
    power: float  # root mean square of all labels
    freedom: int  # numbers fitted minus unknowns
    roundoff: float  # unit roundoff of the labels


def held_out_verdict(seen: HeldOutAnswers) -> Verdict:
    """Agreement of a fit with rows it has not seen, or the row on which they differ most."""
    # residuals below 1e-8 of the labels' size are those of doubles that are fitted exactly
    exact = seen.noise <= 1e-8 * max(seen.roundoff / UNIT_ROUNDOFF, 1.0) * seen.power
    ratios = _exact(seen) if exact else _noisy(seen)
    test, worst = max(ratios.items(), key=lambda item: item[1])
    agrees = worst <= 1.0
    return Verdict(
        agrees=agrees,
        queries=len(seen.answers),
        replayed=len(seen.residuals),
        worst=worst,
        tolerance=_exact_limit(seen) if exact else _noise_limit(seen) / seen.power,
        bound=_bound(len(seen.answers), test, agrees),
        counterexample=None if agrees else _counterexample(seen, test),
    )


def _exact_limit(seen: HeldOutAnswers) -> float:
    """Deviation of a held-out number that an exact fit may show."""
    return float(1e-6 * np.sqrt(max(seen.roundoff / UNIT_ROUNDOFF, 1.0)))


def _noise_limit(seen: HeldOutAnswers) -> float:
    """Deviation of one number that noise does not reach."""
    tails = -float(ndtri(ERROR_RATE / (2 * max(seen.refitted.size, 1))))
    return float(tails * max(seen.noise, seen.roundoff * seen.power))


def _exact(seen: HeldOutAnswers) -> dict[str, float]:
    deviation = float(np.abs(seen.answers - seen.predictions).max(initial=0.0))
    return {"a held-out row": deviation / (_exact_limit(seen) * seen.power)}


def _noisy(seen: HeldOutAnswers) -> dict[str, float]:
    """The predictive test of Chow: how much worse the fit gets once the held-out rows take part
    follows an F distribution, whatever their leverage."""
    level = max(seen.noise, seen.roundoff * seen.power)
    gained = (seen.costs[1] - seen.costs[0]) / max(seen.refitted.size, 1)
    limit = float(fdtri(max(seen.refitted.size, 1), max(seen.freedom, 1), 1.0 - ERROR_RATE))
    unexplained = np.sqrt(np.mean((seen.answers - seen.predictions) ** 2))
    return {
        "a held-out row": float(np.abs(seen.refitted).max(initial=0.0)) / _noise_limit(seen),
        "the held-out rows together": float(np.sqrt(max(gained, 0.0) / limit)) / level,
        # beyond 30% of the labels, root mean square, nobody would speak of noise
        "the unexplained share": float(max(seen.noise, unexplained)) / (0.3 * seen.power),
        # rows may spread 2.5 times as much as independent Gaussian noise
        "clustering of residuals": clustering(seen.residuals) / 2.5,
        "what follows a power of the predictions": _follows(
            seen.residuals.reshape(-1, 1), _powers(seen.fitted), seen.noise
        ),
        "what follows the anchor token": _follows(
            seen.residuals, np.hstack([seen.anchors, np.ones((len(seen.anchors), 1))]), seen.noise
        ),
    }


def _powers(fitted: Float[Array, "rows D"]) -> Float[Array, "numbers 2"]:
    flat = fitted.reshape(-1, 1) / max(float(np.sqrt(np.mean(fitted**2))), TINY)
    return np.hstack([flat**2, flat**3])


def _follows(
    residuals: Float[Array, "rows D"], features: Float[Array, "rows q"], noise: float
) -> float:
    """Share of the residuals that a regression on the features explains, over what chance allows
    (square root; the fit itself already took its part away, so chance allows a little less)."""
    basis, _ = np.linalg.qr(features)
    inside = basis.T @ residuals
    limit = float(chdtri(inside.size, ERROR_RATE))
    return float(np.sqrt((inside**2).sum() / limit) / max(noise, TINY))


def clustering(residuals: Float[Array, "rows D"]) -> float:
    """Spread of the rows' squared residuals, in units of what independent Gaussian noise shows."""
    if len(residuals) < 8:  # too few to cluster
        return 0.0
    sizes = np.einsum("rd,rd->r", residuals, residuals)
    mean = float(sizes.mean())
    if mean == 0.0:
        return 0.0
    expected = 2.0 / residuals.shape[1]  # variance over squared mean of a chi-square
    # six standard deviations of a sample variance are chance
    scatter = 1.0 + 6.0 * np.sqrt(24.0 / (len(sizes) * residuals.shape[1]))
    return float(sizes.var() / mean**2 / expected / scatter)


def _bound(rows: int, test: str, agrees: bool) -> str:
    if not agrees:
        return f"The model does not explain the labels: {test} is beyond what noise allows."
    share = share_conceded(max(rows, 1))
    return (
        f"A fit to the other rows agrees with all {rows} rows kept aside: of rows drawn like "
        f"these, at most {share:.2%} can differ by more than the tolerance, with {CONFIDENCE:.0%} "
        "confidence. Inputs of another kind were not tested."
    )


def _counterexample(seen: HeldOutAnswers, test: str) -> Counterexample | None:
    if not len(seen.answers):
        return None
    worst = int(np.argmax(np.abs(seen.answers - seen.predictions).max(axis=1)))
    return Counterexample(seen.inputs[worst], seen.answers[worst], seen.predictions[worst], test)
