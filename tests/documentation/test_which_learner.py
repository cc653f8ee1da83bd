"""Every row of the table in docs/guide/choosing.md: a box of that kind, its learner, its queries."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.templates import AttentionHeads, randomise

import keyhole
from keyhole.models.mlp import Mlp
from keyhole.models.random import attention, block, stack
from keyhole.models.relu_network import ReluNetwork
from keyhole.oracles.wrappers.degrade import Labels

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "choosing.md"
ROW = re.compile(r"^\| (.+?) \| \[`(.+?)`\]\(.+?\).*? \| (.+) \|$", re.M)
FAMILY = 15  # queries around the counted ones: number format, offset, biases, a last look


@dataclass(frozen=True)
class Claim:
    """A box as the row describes it, and the most queries that the row allows it, with slack."""

    box: Callable[[np.random.Generator], Any]
    learner: Any
    most: float
    options: dict[str, Any] | None = None
    budget: int | None = None


def draw_relu(rng: np.random.Generator) -> ReluNetwork:
    return ReluNetwork(rng.standard_normal((6, 4)), rng.standard_normal(6), rng.standard_normal(6))


def draw_gelu(rng: np.random.Generator) -> Mlp:
    return Mlp(rng.standard_normal((8, 8)), np.ones(8), rng.standard_normal((8, 8)) / 3)


def draw_layer(rng: np.random.Generator) -> keyhole.TransformerModel:
    network = ReluNetwork(rng.standard_normal((5, 3)), np.ones(5), rng.standard_normal(5))
    return keyhole.TransformerModel(rng.standard_normal((3, 3)), None, network)


def draw_noisy(rng: np.random.Generator) -> Any:
    secret = attention(rng, 6)
    return keyhole.open_oracle(
        lambda x: secret(x) + 1e-5 * rng.standard_normal(len(x)), width=6, max_norm=3.0
    )


def draw_words(rng: np.random.Generator) -> Any:
    return keyhole.open_oracle(attention(rng, 4), vocabulary=rng.standard_normal((40, 4)))


def draw_real(width: int) -> Any:
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    return keyhole.from_torch(torch.nn.MultiheadAttention(width, 2, batch_first=True).double())


def draw_apart(rng: np.random.Generator) -> keyhole.Attention:
    """Two heads, one in the first six dimensions and one in the last six."""
    heads = []
    for part in (slice(0, 6), slice(6, 12)):
        score, value = np.zeros((12, 12)), np.zeros(12)
        score[part, part], value[part] = rng.standard_normal((6, 6)) / 2, rng.standard_normal(6)
        heads.append(keyhole.Head(score, None, value))
    return keyhole.Attention(heads)


# in the order of the table; the figures are the row's, at this size
CLAIMS = [
    Claim(lambda r: attention(r, 8), keyhole.SingleHead(), 8**2 + 8 + FAMILY),
    Claim(lambda r: attention(r, 16, rank=2), keyhole.LowRank(), 2 * 2 * 16 - 4 + 16 + FAMILY),
    Claim(
        lambda r: attention(r, 8, rank=1), keyhole.LowRank("convex", rank=1), 1.2 * 6 * 8 + FAMILY
    ),
    Claim(draw_noisy, keyhole.SingleHead(), 200, budget=200),
    Claim(draw_words, keyhole.SingleHead(), 2 * (4**2 + 4) + FAMILY),
    Claim(
        lambda r: Labels(keyhole.open_oracle(attention(r, 3))),
        keyhole.LabelOnly(bits=20),
        1.6 * 20 * 12,
    ),
    Claim(lambda r: attention(r, 8, heads=2), keyhole.MultiHead(), 1.4 * 2 * (8**2 + 8) + FAMILY),
    Claim(
        lambda r: draw_real(16),
        keyhole.MultiHead(),
        2.2 * (4 * 16 - 2 * 8) + FAMILY,
    ),
    Claim(
        draw_apart,
        keyhole.OrthogonalHeads([np.eye(12)[:, :6], np.eye(12)[:, 6:]]),
        2 * (6**2 + 6) + 3 * FAMILY,
    ),
    Claim(draw_relu, keyhole.ReluNetworkLearner(), 2.5 * (6 * 4 + 6 + 6) + 4 * FAMILY),
    Claim(draw_gelu, keyhole.MlpLearner(), 6 * (8 * 8 + 8 + 64) / 8 + 4 * FAMILY),
    Claim(draw_layer, keyhole.Transformer(), 4 * (5 * 3 + 10) + 3**2 + 8 * FAMILY),
    Claim(lambda r: block(r, 8, heads=2), keyhole.BlockLearner(), 5 * (4 * 8 - 2 * 4) + 2 * FAMILY),
    Claim(lambda r: stack(r, 8, layers=2, heads=2, neurons=8), keyhole.StackLearner(), 25 * 130),
    Claim(
        lambda r: randomise(AttentionHeads(4, 2, "linear"), 0),
        keyhole.FromTemplate(AttentionHeads(4, 2, "linear")),
        6 * 65,
    ),
]


def read_rows() -> list[tuple[str, str, str]]:
    table = PAGE.read_text().split("Two queries decide")[0]
    return ROW.findall(table)


def test_every_row_has_a_box_and_every_box_a_row() -> None:
    named = [learner.partition("(")[0] for _, learner, _ in read_rows()]
    assert named == [type(claim.learner).__name__ for claim in CLAIMS] + ["keyhole.learn"]


@pytest.mark.parametrize("number", range(len(CLAIMS)), ids=lambda n: read_rows()[n][0][:40])
def test_the_learner_recovers_the_box_with_about_as_many_queries(number: int) -> None:
    claim = CLAIMS[number]
    box = claim.box(np.random.default_rng(0))
    found = keyhole.recover(box, claim.learner, budget=claim.budget, throw=False)
    assert found.outcome is keyhole.Outcome.RECOVERED, found.reason
    assert found.ledger.learning <= claim.most, found.ledger.by_purpose


def test_examples_need_no_query() -> None:
    rng = np.random.default_rng(0)
    X = rng.standard_normal((40, 3, 4))
    scores = np.exp(X @ rng.standard_normal((4, 4)) @ X.transpose(0, 2, 1))
    found = keyhole.learn(X, scores / scores.sum(axis=2, keepdims=True) @ X)
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert found.ledger.paid == 0
