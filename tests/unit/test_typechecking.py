"""The first calls of every function are checked, in every test anew."""

import functools

import jaxtyping
import numpy as np
import pytest

from keyhole.arrays import Array, Float
from typechecking import CALLS, Clock, check_first_calls, checked

make_strict = functools.partial(jaxtyping._decorator.jaxtyped, typechecker=checked)


def trace(matrix: Float[Array, "n n"]) -> float:
    return float(np.trace(matrix))


def test_the_first_calls_are_checked_and_the_next_test_starts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watched = check_first_calls(trace, make_strict)
    wrong = np.ones((2, 3))
    for _ in range(CALLS):
        with pytest.raises(jaxtyping.TypeCheckError):
            watched(wrong)
    assert watched(wrong) == 2.0
    monkeypatch.setattr(Clock, "test", Clock.test + 1)
    with pytest.raises(jaxtyping.TypeCheckError):
        watched(wrong)


def test_functions_and_dataclasses_of_the_package_are_watched(
    request: pytest.FixtureRequest,
) -> None:
    if not request.config.getoption("--jaxtyping-packages"):
        pytest.skip("the checks are off: run with --jaxtyping-packages, as make test does")
    from keyhole.linalg.softmax import softmax
    from keyhole.oracles.noise import NoiseModel

    with pytest.raises(jaxtyping.TypeCheckError):
        softmax("no array")
    with pytest.raises(jaxtyping.TypeCheckError):
        NoiseModel(relative="much")
