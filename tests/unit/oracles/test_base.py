from typing import Any

import numpy as np
import pytest

from keyhole.errors import DomainError, InvalidArgument
from keyhole.oracles.base import Domain, Oracle, Spec
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.wrappers.validate import Validator

WORDS = np.array([[0.0, 1.0], [1.0, 0.0], [-0.0, 2.0]])


def test_a_domain_without_limits_is_unbounded() -> None:
    assert Domain().unbounded
    assert Domain(max_length=3).unbounded
    for limits in ({"max_norm": 1.0}, {"low": 0.0}, {"high": 0.0}, {"vocabulary": WORDS}):
        assert not Domain(**limits).unbounded  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "inside", "outside", "words"),
    [
        ({"max_length": 2}, np.ones((1, 2, 2)), np.ones((1, 3, 2)), "max_length=2"),
        ({"max_norm": 5.0}, [[[3.0, 4.0]]], [[[0.0, 0.0], [3.0, 4.1]]], "max_norm=5.0"),
        ({"low": -1.0}, [[[-1.0, 9.0]]], [[[0.0, -1.5]]], "-1.5 lies below low=-1.0"),
        ({"high": 1.0}, [[[-9.0, 1.0]]], [[[1.25, 0.0]]], "1.25 lies above high=1.0"),
        ({"vocabulary": WORDS}, [[[1.0, 0.0], [0.0, 2.0]]], [[[1.0, 1.0]]], "vocabulary"),
        ({"vocabulary": WORDS}, [[[1.0, -0.0]]], [[[0.0, 1.0 + 1e-15]]], "vocabulary"),
    ],
)
def test_the_domain_is_checked(limits: Any, inside: Any, outside: Any, words: str) -> None:
    domain = Domain(**limits)
    domain.check(np.array(inside, dtype=float))
    with pytest.raises(DomainError, match=words):
        domain.check(np.array(outside, dtype=float))


def test_rounding_of_a_norm_is_no_violation() -> None:
    Domain(max_norm=1.0).check(np.full((1, 1, 3), (1 + 1e-15) / np.sqrt(3.0)))


@pytest.mark.parametrize(
    "limits",
    [
        {"max_length": 0},
        {"max_norm": 0.0},
        {"max_norm": np.inf},
        {"low": 1.0, "high": 1.0},
        {"vocabulary": np.array([[np.nan]])},
    ],
)
def test_impossible_domains_are_refused(limits: Any) -> None:
    with pytest.raises(InvalidArgument):
        Domain(**limits)


@pytest.mark.parametrize(
    "level",
    [
        {"relative": 0.0},
        {"relative": -1e-16},
        {"relative": np.nan},
        {"additive": -1.0},
        {"step": np.inf},
    ],
)
def test_impossible_precisions_are_refused(level: Any) -> None:
    with pytest.raises(InvalidArgument, match=next(iter(level))):
        NoiseModel(**level)


def test_a_spec_is_consistent() -> None:
    with pytest.raises(InvalidArgument, match="width"):
        Spec(0)
    with pytest.raises(InvalidArgument, match="vocabulary's tokens have width 2, the box 3"):
        Spec(3, domain=Domain(vocabulary=WORDS))


def test_closing_reaches_the_box_through_its_wrappers() -> None:
    class Closing(FunctionOracle):
        closed = []  # noqa: RUF012 - a log

        def close(self) -> None:
            self.closed.append(True)

    box = Closing(lambda tokens: tokens[:, 0, 0], Spec(1))
    with Validator(box) as wrapped:
        assert isinstance(wrapped, Oracle)
        assert wrapped.spec is box.spec
    assert box.closed == [True]


def test_a_sphere_takes_tokens_of_one_norm():
    domain = Domain(sphere=2.0)
    tokens = domain.drawn_in(np.random.default_rng(0).standard_normal((3, 2, 4)))
    domain.check(tokens)
    assert np.allclose(np.linalg.norm(tokens, axis=2), 2.0)
    assert np.isfinite(domain.drawn_in(np.zeros((1, 1, 4)))).all()
    assert not domain.unbounded
    with pytest.raises(DomainError, match="sphere"):
        domain.check(1.01 * tokens)
    with pytest.raises(InvalidArgument, match="leave out"):
        Domain(sphere=2.0, max_norm=3.0)
