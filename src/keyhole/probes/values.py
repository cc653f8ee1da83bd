"""Questions of length one: with a single token the softmax is 1, so f([x]) = offset + x · value.

The zero token gives the offset, the multiples of the unit vectors the value map: 1 + d questions.
With an offset, tokens are made long, so that the offset subtracted from the answer costs no digits.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import Counterexample, WrongFamily
from keyhole.oracles.base import Oracle
from keyhole.oracles.questions import Questions
from keyhole.probes.precision import Roundoff, roundoff

LONG_TOKEN = 2.0**30  # an offset as large as the values then costs nothing in float64
ROUNDINGS = 3.0  # rounding errors of one answer, in units of the roundoff, at small width
NONLINEAR = 64.0  # rounding errors beyond which an answer is not linear in its token
BLOCKED_SUM = 32.0  # width from which the rounding of sums of products shows, as width**(1/4)


@dataclass(frozen=True, eq=False)
class LinearPart:
    """What questions of length one tell: answers are offset + x · value."""

    value: Float[Array, "d D"]
    offset: Float[Array, " D"]
    value_error: Float[Array, "d D"]
    offset_error: Float[Array, " D"]
    scalar: bool  # whether the box answers with numbers rather than vectors
    roundoff: Roundoff

    def at(self, tokens: Float[Array, "n d"]) -> Float[Array, "n D"]:
        return tokens @ self.value


def answer_noise(roundoff: Roundoff, width: int) -> float:
    """Standard error of an answer relative to the size of its terms (measured, see the tests of
    calibration: errors of a NumPy box grow about as the fourth root of the width)."""
    return float(ROUNDINGS * roundoff.relative * (1.0 + width / BLOCKED_SUM) ** 0.25)


def measure_values(oracle: Oracle) -> LinearPart:
    """Asks 1 + d questions of length one."""
    width = oracle.spec.width
    zero = oracle.ask(Questions.of(np.zeros((1, 1, width)), "offset"))
    scalar = zero.ndim == 1
    kind = roundoff(oracle.spec.precision, zero)
    offset = np.asarray(zero, dtype=np.float64).reshape(-1)
    size = LONG_TOKEN if offset.any() else 1.0
    if oracle.spec.domain.max_norm is not None:
        size = min(size, oracle.spec.domain.max_norm)
    tokens = size * np.eye(width)
    answers = oracle.ask(Questions.of(tokens[:, None, :], "value"))
    rows = np.asarray(answers, dtype=np.float64).reshape(width, -1)
    noise = answer_noise(kind, width)
    return LinearPart(
        value=(rows - offset) / size,
        offset=offset,
        value_error=noise * (np.abs(rows) + np.abs(offset)) / size,
        offset_error=noise * np.abs(offset),
        scalar=scalar,
        roundoff=kind,
    )


def refuse_nonlinear(oracle: Oracle, linear: LinearPart, rng: np.random.Generator) -> None:
    """Asks one random token: raises WrongFamily where the box is not linear in a single token."""
    size = oracle.spec.domain.max_norm or 1.0
    token = rng.standard_normal((1, oracle.spec.width))
    token *= size / np.linalg.norm(token)
    answer = np.asarray(oracle.ask(Questions.of(token[:, None, :], "value")), dtype=np.float64)
    predicted = (linear.offset + linear.at(token)).reshape(answer.shape)
    terms = np.abs(linear.offset) + np.abs(token) @ np.abs(linear.value)
    allowed = NONLINEAR * answer_noise(linear.roundoff, oracle.spec.width) * terms
    if (np.abs(answer - predicted) > allowed.reshape(answer.shape)).any():
        raise WrongFamily(
            "an attention head is linear in a sequence of one token, this box is not",
            Counterexample(token, answer[0], predicted[0], "not linear in a single token"),
        )
