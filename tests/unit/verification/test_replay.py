from typing import Any

import numpy as np
import pytest

from keyhole.models.attention import Attention
from keyhole.models.random import attention
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import ArrayBank, ProbeAnchorBank, QueryBatch, UnitVectorBank
from keyhole.verification import replay as module
from keyhole.verification.replay import predict_pairs, read_portions, replay
from keyhole.verification.tolerance import Past

WIDTH = 6
EXACT = NoiseModel()


def pairs(count: int, probes: int, seed: int = 0) -> QueryBatch:
    """Queries [probe + anchor; …; anchor] over unit vectors and random anchors."""
    rng = np.random.default_rng(seed)
    anchors = ArrayBank(rng.standard_normal((4, WIDTH)))
    bank = ProbeAnchorBank(UnitVectorBank(WIDTH, 0.5), anchors, WIDTH, 4)
    anchor = rng.integers(4, size=(count, 1))
    probe = rng.integers(WIDTH, size=(count, probes))
    return QueryBatch(bank, np.hstack([probe * 4 + anchor, WIDTH * 4 + anchor]), "pairs")


@pytest.mark.parametrize("outputs", [None, 3])
@pytest.mark.parametrize("probes", [1, 3])
def test_pairs_are_answered_without_their_tokens(outputs: int | None, probes: int) -> None:
    rng = np.random.default_rng(1)
    model = attention(rng, WIDTH, heads=2, outputs=outputs, bias=True)
    skip = rng.standard_normal(model.heads[0].value.shape)
    model = Attention(model.heads, model.offset, skip)
    queries = pairs(50, probes)
    np.testing.assert_allclose(
        predict_pairs(model, queries), model(queries.tokens()), rtol=1e-12, atol=1e-14
    )


def past_of(model: Any) -> Past:
    rng = np.random.default_rng(2)
    batches = [pairs(40, 1), pairs(3, 2)]
    for length, count in ((1, 5), (4, 30), (4, 1), (2, 7)):
        tokens = rng.standard_normal((count, length, WIDTH))
        batches.append(QueryBatch.of(tokens, "listed"))
    return [(batch, model(batch.tokens())) for batch in batches]


@pytest.mark.parametrize("portion", [1, 2**10, 2**22])
def test_every_answer_is_compared_whatever_is_made_at_once(
    portion: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PORTION", portion)
    model = attention(np.random.default_rng(3), WIDTH)
    past = past_of(model)
    total = sum(len(answers) for _, answers in past)
    assert sum(len(a) for part in read_portions(model, past) for _, a in part) == total
    found = replay(model, None, past, EXACT, np.random.default_rng(0), [np.ones(1)])
    assert (found.compared, found.contradiction) == (total, None)


@pytest.mark.parametrize("batch", range(6))
def test_one_wrong_answer_among_all_is_found_with_its_query(batch: int) -> None:
    model = attention(np.random.default_rng(3), WIDTH)
    past = past_of(model)
    queries, answers = past[batch]
    wrong = answers.copy()
    wrong[-1] += 1e-6
    past[batch] = queries, wrong
    found = replay(model, None, past, EXACT, np.random.default_rng(0), [np.ones(1)])
    assert found.contradiction is not None
    example = found.contradiction
    assert example is not None
    np.testing.assert_array_equal(example.input, queries[len(queries) - 1 :].tokens()[0])
    assert example.box_answer == wrong[-1]
