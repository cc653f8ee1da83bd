"""Every learner keeps the contract, and the contract notices when one does not."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import keyhole
from boxes import impostors
from keyhole.learners.base import Hypothesis
from keyhole.learners.single_head import SingleHead
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from keyhole.oracles.base import Oracle, Spec
from keyhole.testing import ContractBroken, check_learner

MODEL = attention(np.random.default_rng(3), 9, bias=True)
VECTOR = attention(np.random.default_rng(4), 9, outputs=4)


@pytest.mark.parametrize("model", [MODEL, VECTOR], ids=["scalar", "vector"])
def test_single_head_keeps_the_contract(model: Any) -> None:
    others = impostors(9)
    named = tuple(keyhole.open_oracle(others[name], width=9) for name in ("two heads", "a GRU"))
    recovery = check_learner(SingleHead(), lambda: model, impostors=named)
    assert keyhole.distance(recovery.model, model) < 1e-12


@dataclass(frozen=True)
class Around:
    """SingleHead with one vice."""

    def expected_queries(self, spec: Spec) -> int | None:
        return SingleHead().expected_queries(spec)

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        return SingleHead().learn(oracle, rng)


@dataclass
class Thawed:
    """Can be changed while it runs."""

    expected_queries = Around.expected_queries
    learn = Around.learn


@dataclass(frozen=True)
class Moody(Around):
    """Draws its queries from the system's entropy."""

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        return SingleHead().learn(oracle, np.random.default_rng())


@dataclass(frozen=True)
class Boastful(Around):
    """Errors in another structure than the model."""

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        learned = SingleHead().learn(oracle, rng)
        other = Attention([Head(np.zeros((9, 9)), None, np.zeros((9, 4)))], 0.0)
        return replace(learned, errors=other)


@dataclass(frozen=True)
class Swallowing(Around):
    """Hides that the box failed behind an old model."""

    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        try:
            return SingleHead().learn(oracle, rng)
        except keyhole.OracleError:
            return Hypothesis(MODEL, None, floor=1.0)


@dataclass(frozen=True)
class Hopeful(Around):
    """Forecasts nonsense."""

    def expected_queries(self, spec: Spec) -> int | None:
        return 0


@pytest.mark.parametrize(
    ("learner", "words"),
    [
        (Thawed(), "frozen"),
        (Moody(), "same queries"),
        (Boastful(), "structure"),
        (Swallowing(), "swallowed|ORACLE_FAILED"),
        (Hopeful(), "expected_queries"),
        ("single head", "learn"),
    ],
)
def test_the_contract_notices(learner: Any, words: str) -> None:
    with pytest.raises(ContractBroken, match=words):
        check_learner(learner, lambda: MODEL)


def test_an_impostor_that_passes_breaks_the_contract() -> None:
    with pytest.raises(ContractBroken, match="RECOVERED"):
        check_learner(SingleHead(), lambda: MODEL, impostors=(VECTOR,))
