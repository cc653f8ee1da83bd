"""Every oracle keeps the contract, and the contract notices when one does not."""

from typing import Any

import numpy as np
import pytest

from boxes import in_float32
from keyhole.models.random import attention
from keyhole.oracles.base import Domain, Oracle, Spec
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.open import open_oracle
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.batch import Batcher
from keyhole.oracles.wrappers.count import QueryCounter
from keyhole.oracles.wrappers.degrade import Noisy, Rounded
from keyhole.oracles.wrappers.record import AnswerRecord
from keyhole.oracles.wrappers.validate import Validator
from keyhole.testing import ContractBroken, check_oracle

MODEL = attention(np.random.default_rng(0), 5, bias=True)
VECTOR = attention(np.random.default_rng(1), 5, outputs=3)


def box(**domain: Any) -> Oracle:
    return open_oracle(MODEL, **domain)


KEEPERS = {
    "model": box(),
    "vector model": open_oracle(VECTOR),
    "float32 function": open_oracle(in_float32(MODEL), width=5),
    "short": box(max_length=2),
    "norm": box(max_norm=0.1),
    "entries": box(low=-0.2, high=0.1),
    "a corner": box(low=0.4, high=1.0, max_norm=1.0),
    "vocabulary": box(vocabulary=np.random.default_rng(2).standard_normal((7, 5))),
    "border": Validator(box()),
    "batching": Batcher(box(), chunk_queries=2),
    "counting": QueryCounter(box()),
    "memory": AnswerRecord(box()),
    "rounded": Rounded(box(), decimals=3),
    "noise, stated": Noisy(box(precision=NoiseModel(additive=0.1)), additive=0.1),
}


@pytest.mark.parametrize("name", KEEPERS)
def test_oracle_keeps_the_contract(name: str) -> None:
    check_oracle(KEEPERS[name])


def from_function(function: Any, **spec: Any) -> Oracle:
    return FunctionOracle(function, Spec(5, **spec))


def shuffled(tokens: np.ndarray) -> np.ndarray:
    return MODEL(tokens)[np.argsort(tokens[:, 0, 0])]


def batch_dependent(tokens: np.ndarray) -> np.ndarray:
    return MODEL(tokens) + 1e-6 * len(tokens)


def writing(tokens: np.ndarray) -> np.ndarray:
    answers = MODEL(tokens)
    tokens += 1.0
    return answers


def changing_shape(tokens: np.ndarray) -> np.ndarray:
    return MODEL(tokens) if tokens.shape[1] < 4 else VECTOR(tokens)


class Overwriting(Oracle):
    """Writes to the query's own bank, which a function cannot reach."""

    spec = Spec(5)

    def ask(self, queries: QueryBatch) -> np.ndarray:
        answers = MODEL(queries.tokens())
        queries.bank.table[:] *= -1.0  # type: ignore[attr-defined]
        return answers


def test_a_function_may_write_to_its_own_copy() -> None:
    check_oracle(from_function(writing))


@pytest.mark.parametrize(
    ("oracle", "words"),
    [
        (from_function(shuffled), "order"),
        (from_function(batch_dependent), "alone"),
        (from_function(changing_shape), "shape"),
        (Noisy(box(), additive=1e-3), "again"),
        (Overwriting(), "write|again"),
        (MODEL, "not a keyhole Oracle"),
    ],
)
def test_the_contract_notices(oracle: Any, words: str) -> None:
    with pytest.raises(ContractBroken, match=words):
        check_oracle(oracle)


def test_a_contract_stays_inside_the_domain() -> None:
    asked = []

    def recording(tokens: np.ndarray) -> np.ndarray:
        asked.append(tokens.copy())
        return MODEL(tokens)

    check_oracle(from_function(recording, domain=Domain(max_length=2, max_norm=0.3)))
    assert max(tokens.shape[1] for tokens in asked) == 2
    assert max(float(np.linalg.norm(tokens, axis=2).max()) for tokens in asked) <= 0.3 * (1 + 1e-9)
