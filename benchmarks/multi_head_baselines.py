"""What a user would do otherwise: rational interpolation, or a student trained on queries."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from keyhole.errors import KeyholeError
from keyhole.learners.published.rational_interpolation import find_logistic_terms
from keyhole.models.attention import Attention, Head
from keyhole.models.canonical import match_heads, score_gap, score_norm


@dataclass(frozen=True)
class Result:
    queries: int
    error: float  # worst relative error of a score
    seconds: float


def worst_score(model: Attention, truth: Attention) -> float:
    """Largest relative error of a score after matching the heads."""
    return max(score_gap(a, b) / score_norm(b) for a, b in match_heads(model.heads, truth.heads))


def rational(truth: Attention, rng: np.random.Generator) -> Result:
    """Scores at d² pairs of directions, 2H queries each, heads matched by the truth (granted).

    The published method asks 4Hd² - 2H + 1 queries in all, matching included: that is counted.
    """
    start, heads, width = time.perf_counter(), len(truth.heads), truth.width
    copies = np.arange(1, 2 * heads + 1)
    scores = np.zeros((heads, width, width))
    basis = np.linalg.qr(rng.standard_normal((width, width)))[0]
    total = np.sum([head.value for head in truth.heads], axis=0)
    for i, u in enumerate(2.0 * basis):
        for j, x in enumerate(basis):
            answers = [
                float(truth(np.concatenate([np.tile(u + x, (n, 1)), x[None]])[None])[0])
                for n in copies
            ]
            try:
                odds, _ = find_logistic_terms(
                    copies.astype(float), np.array(answers) - x @ total, heads
                )
            except KeyholeError:
                odds = np.zeros(heads)
            real = np.array([u @ head.score @ x for head in truth.heads])
            scores[np.argsort(real), i, j] = odds
    found = [np.linalg.solve(2.0 * basis, s) @ np.linalg.inv(basis.T) for s in scores]
    pairs = zip(found, truth.heads, strict=True)
    error = max(np.linalg.norm(s - h.score) / score_norm(h) for s, h in pairs)
    return Result(4 * heads * width**2 - 2 * heads + 1, float(error), time.perf_counter() - start)


class Student(torch.nn.Module):
    """A layer of the same shape as the truth."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.score = torch.nn.Parameter(torch.randn(heads, width, width) / width)
        self.value = torch.nn.Parameter(torch.randn(heads, width) / heads**0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("nld,hde,ne->nhl", tokens, self.score, tokens[:, -1])
        return torch.einsum("nhl,nld,hd->n", scores.softmax(-1), tokens, self.value)

    def model(self) -> Attention:
        score, value = self.score.detach().numpy(), self.value.detach().numpy()
        return Attention([Head(s, None, v) for s, v in zip(score, value, strict=True)])


def student(
    truth: Attention, queries: int, kind: str, rng: np.random.Generator, seconds: float = 20.0
) -> Result:
    """Trained on as many random queries as keyhole asks, until the time is up."""
    start = time.perf_counter()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    width = truth.width
    size = np.sqrt(1.5 / np.median([score_norm(h) for h in truth.heads]))
    tokens = size * rng.standard_normal((queries, 4, width))
    x, y = torch.as_tensor(tokens), torch.as_tensor(truth(tokens))
    net = Student(width, len(truth.heads))
    steps: Callable[[], None]
    if kind == "adam":
        adam = torch.optim.Adam(net.parameters(), lr=1e-2)

        def steps() -> None:
            adam.zero_grad()
            torch.nn.functional.mse_loss(net(x), y).backward()
            adam.step()
    else:
        newton = torch.optim.LBFGS(
            net.parameters(), max_iter=20, history_size=50, line_search_fn="strong_wolfe"
        )

        def closure() -> torch.Tensor:
            newton.zero_grad()
            loss = torch.nn.functional.mse_loss(net(x), y)
            loss.backward()
            return loss

        def steps() -> None:
            newton.step(closure)

    while time.perf_counter() - start < seconds:
        steps()
    torch.set_default_dtype(torch.float32)
    return Result(queries, worst_score(net.model(), truth), time.perf_counter() - start)
