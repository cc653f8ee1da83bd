"""Is the model behind the labels? Rows that the fit has not seen decide, where nothing can be asked.

Three tests, any of which rejects: a held-out row off by more than noise and the parameters'
uncertainty allow; a share of the labels left unexplained that is too large to be called noise; and
residuals that cluster on some rows, which independent noise does not do (labels of a second model
among those of the first do).
"""

import numpy as np
from scipy.stats import f as f_distribution
from scipy.stats import norm

from keyhole.arrays import Array, Float
from keyhole.errors import Counterexample
from keyhole.results import Verdict

ERROR_RATE = 1e-6  # chance of rejecting a right model, per test
NOISE_CEILING = 0.3  # unexplained share of the labels, root mean square, still called noise
CLUSTERING = 2.5  # times the spread of independent Gaussian noise that row residuals may show
EXACT_TOLERANCE = 1e-6  # deviation, relative to the labels' size, in fits that are exact
CONFIDENCE = 0.95


def held_out_verdict(
    inputs: list[Array],
    answers: Float[Array, "rows D"],
    predictions: Float[Array, "rows D"],
    residuals: Float[Array, "fitted D"],
    *,
    noise: float,
    power: float,
    numbers: int,
    unknowns: int,
    roundoff: float,
) -> Verdict:
    """`inputs`: the tokens behind each held-out row, its query last. `noise`: standard deviation
    estimated from the fitted rows, `power`: root mean square of all labels."""
    deviation = answers - predictions
    extra = 1.0 + unknowns / max(numbers - unknowns, 1)  # an unseen row carries the fit's errors
    level = max(noise * np.sqrt(extra), roundoff * power)
    exact = noise <= EXACT_TOLERANCE * power / 10
    tails = norm.isf(ERROR_RATE / (2 * max(deviation.size, 1)))
    row_limit = max(tails * level, EXACT_TOLERANCE * power if exact else 0.0)
    mean_limit = f_distribution.isf(ERROR_RATE, max(deviation.size, 1), max(numbers - unknowns, 1))
    square = float(np.mean(deviation**2)) if deviation.size else 0.0
    ratios = {
        "a held-out row": float(np.abs(deviation).max(initial=0.0)) / row_limit,
        "the held-out rows together": 0.0 if exact else float(np.sqrt(square / level**2 / mean_limit)),
        "the unexplained share": max(noise, np.sqrt(square)) / (NOISE_CEILING * power),
        "clustering of residuals": 0.0 if exact else clustering(residuals) / CLUSTERING,
    }
    test, worst = max(ratios.items(), key=lambda item: item[1])
    agrees = worst <= 1.0
    return Verdict(
        agrees=agrees,
        queries=len(answers),
        replayed=len(residuals),
        worst=worst,
        tolerance=row_limit / power,
        bound=_bound(len(answers), test, agrees),
        counterexample=None if agrees else _counterexample(inputs, answers, predictions, test),
    )


def clustering(residuals: Float[Array, "rows D"]) -> float:
    """Spread of the rows' squared residuals, in units of what independent Gaussian noise shows."""
    if len(residuals) < 8:
        return 0.0
    sizes = np.einsum("rd,rd->r", residuals, residuals)
    mean = float(sizes.mean())
    if mean == 0.0:
        return 0.0
    expected = 2.0 / residuals.shape[1]  # variance over squared mean of a chi-square
    scatter = 1.0 + 6.0 * np.sqrt(24.0 / (len(sizes) * residuals.shape[1]))  # of a sample variance
    return float(sizes.var() / mean**2 / expected / scatter)


def _bound(rows: int, test: str, agrees: bool) -> str:
    if not agrees:
        return f"The model does not explain the labels: {test} is beyond what noise allows."
    share = 1.0 - (1.0 - CONFIDENCE) ** (1.0 / max(rows, 1))
    return (
        f"A fit to the other rows agrees with all {rows} rows kept aside: of rows drawn like these, "
        f"at most {share:.2%} can differ by more than the tolerance, with {CONFIDENCE:.0%} "
        "confidence. Inputs of another kind were not tested."
    )


def _counterexample(
    inputs: list[Array], answers: Array, predictions: Array, test: str
) -> Counterexample | None:
    if not len(answers):
        return None
    worst = int(np.argmax(np.abs(answers - predictions).max(axis=1)))
    return Counterexample(inputs[worst], answers[worst], predictions[worst], test)
