"""Layers with positions that compute in bfloat16: kinds, and scores from small random ones."""

import copy

import numpy as np
import pytest
import torch

import keyhole
from keyhole.learners.multi_head import CoarseValues
from keyhole.learners.positions.few_digits import draw_start, exchange, tell_kinds
from keyhole.learners.positions.forward import count_freedom
from keyhole.measurement.asker import Asker
from keyhole.oracles.noise import DETECTION
from placed_layers import placed_layer

WIDTH, HEADS = 16, 4


class Turned(torch.nn.Module):
    """Attention whose keys and queries turn by their places, the waves computed in float32."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        sizes = 1.4 * WIDTH**-0.5
        self.maps = torch.nn.ParameterList(sizes * torch.randn(WIDTH, WIDTH) for _ in range(4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        count, length, _ = tokens.shape
        queries, keys, values = (
            (tokens @ part).view(count, length, HEADS, -1).transpose(1, 2) for part in self.maps[:3]
        )
        half = queries.shape[-1] // 2
        places = torch.arange(length, dtype=torch.float32)
        angles = torch.outer(places, 1e4 ** (-torch.arange(half) / half))
        cos, sin = (torch.cat([w(angles)] * 2, dim=1).to(tokens.dtype) for w in WAVES)

        def turn(rows: torch.Tensor) -> torch.Tensor:
            return rows * cos + torch.cat([-rows[..., half:], rows[..., :half]], dim=3) * sin

        seen = torch.nn.functional.scaled_dot_product_attention(
            turn(queries)[:, :, -1:], turn(keys), values
        )
        return seen.transpose(1, 2).reshape(count, WIDTH) @ self.maps[3]


WAVES = (torch.cos, torch.sin)


def test_rotary_in_bfloat16_is_recovered_to_its_rounding() -> None:
    exact = Turned(1).double()
    served = copy.deepcopy(exact).bfloat16()
    exact = copy.deepcopy(served).double()
    found = keyhole.recover(keyhole.open_oracle(served, width=WIDTH), seed=1, throw=False)
    assert found.outcome is keyhole.Outcome.RECOVERED
    tokens = torch.randn(60, 12, WIDTH).bfloat16()
    with torch.no_grad():
        truth, told = exact(tokens.double()).numpy(), served(tokens).double().numpy()
    off = found.model(tokens.double().numpy()) - truth
    assert np.linalg.norm(off) < 2.0 * np.linalg.norm(told - truth)
    assert found.ledger.paid < 14 * found.ledger.floor


def know_values(kind: str) -> tuple[Asker, CoarseValues, int | None]:
    truth = placed_layer(kind, WIDTH, HEADS, 3)
    longest = 24 if kind == "position vectors" else None
    box = Asker(keyhole.open_oracle(truth, max_length=longest))
    maps, offset = tuple(head.value for head in truth.heads), truth.offset
    if truth.position is not None and truth.position.vectors is not None:
        offset = offset + truth.position.vectors[0] @ sum(maps)
    return box, CoarseValues(np.asarray(offset), maps, 1.0), longest


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        ("rotary", "rotary"),
        ("linear bias", "linear bias"),
        ("bias by distance", "bias by distance"),
        ("position vectors", "vectors"),
    ],
)
def test_the_likeliest_kind_is_that_of_the_layer(layer: str, kind: str) -> None:
    box, values, longest = know_values(layer)
    rng = np.random.default_rng(0)
    assert tell_kinds(box, rng, values, longest)[0] == kind
    start = draw_start(values, kind, longest, rng)
    assert 0 < count_freedom(start) < sum(part.size for part in start.parts.values())


def test_exchanging_tokens_tells_slopes() -> None:
    box, values, _ = know_values("linear bias")
    found = exchange(box, np.random.default_rng(1), values, copies=2)
    # farther by three places: three slopes less for the one, and three more for the other
    assert np.allclose(np.abs(found.change), 6.0 * 2.0 ** -np.arange(1.0, HEADS + 1), atol=1e-6)
    assert found.spread < DETECTION
