"""Against what a user would otherwise pick: a student fitted to as many random queries.

Everything is measured side by side in one run: a model is drawn, Keyhole recovers it, and each
baseline gets as many answers of the same box and the time that was granted. Holds the truth, which
is what the copies are compared with.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from keyhole.arrays import Array, real_number
from keyhole.errors import InvalidArgument
from keyhole.models.attention import Attention, Head
from keyhole.models.canonical import distance
from keyhole.models.random import attention
from keyhole.recovery import recover

LENGTH = 4  # tokens in a query of the baselines
TEST = 1000  # fresh sequences on which answers are compared
START = 0.1  # size of a student's first scores, relative to the truth's: nearly uniform attention
ADAM_RATE = 1e-2  # torch's own advice is 1e-3; ten times that is better on every size tried here
LAST = 1e-15  # tolerances of least squares: on to the last digit
MEMORY = 50  # gradients that L-BFGS remembers


@dataclass(frozen=True)
class Size:
    """The model to hide."""

    width: int = 12
    heads: int = 2

    def __post_init__(self) -> None:
        if self.width < 2 or self.heads < 1:
            raise InvalidArgument(f"width must be at least 2 and heads at least 1, got {self}")

    @property
    def unknowns(self) -> int:
        return self.heads * (self.width**2 + self.width)


@dataclass(frozen=True)
class Row:
    """How one method did."""

    method: str
    queries: int
    parameters: float  # largest relative error of a parameter block
    answers: float  # root mean square on fresh sequences, relative
    seconds: float
    ended: str


def run_bench(
    size: Size, *, seconds: float = 5.0, seed: int = 0, told: Callable[[str], None] | None = None
) -> list[Row]:
    """Keyhole first, then every baseline that is installed, on the same box.

    `seconds` is the time that each baseline may take; `told` hears the name of each method.
    """
    real_number("seconds", seconds, 0.0, finite=False)
    rng = np.random.default_rng([seed, 3])
    secret = attention(rng, size.width, heads=size.heads)
    hear = told or (lambda name: None)
    hear("Keyhole")
    start = time.perf_counter()
    found = recover(secret, seed=seed, throw=False)
    spent = time.perf_counter() - start
    rows = [_row("Keyhole", found.ledger.paid, found.model, secret, spent, found.outcome.name)]
    tokens = _natural(rng, secret, found.ledger.paid)
    data = _Data(tokens, secret(tokens), size, seconds, secret.natural_length())
    for name, fit in baselines().items():
        hear(name)
        start = time.perf_counter()
        model, ended = fit(data, np.random.default_rng([seed, 4]))
        rows.append(_row(name, len(tokens), model, secret, time.perf_counter() - start, ended))
    return rows


def _row(
    name: str, asked: int, model: Attention | None, secret: Attention, seconds: float, ended: str
) -> Row:
    if model is None:
        return Row(name, asked, float("inf"), float("inf"), seconds, ended)
    tokens = _natural(np.random.default_rng(TEST), secret, TEST)
    wanted = secret(tokens)
    gap = float(np.linalg.norm(model(tokens) - wanted) / np.linalg.norm(wanted))
    return Row(name, asked, float(distance(model, secret)), gap, seconds, ended)


def _natural(rng: np.random.Generator, model: Attention, count: int) -> Array:
    """Random sequences of tokens at which scores are of order one."""
    size = model.natural_length() / np.sqrt(model.width)
    return size * rng.standard_normal((count, LENGTH, model.width))


@dataclass(frozen=True, eq=False)
class _Data:
    """What a baseline gets."""

    tokens: Array
    answers: Array
    size: Size
    seconds: float
    natural: float

    def start(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """First scores and values: attention nearly uniform, values of order one."""
        heads, width = self.size.heads, self.size.width
        score = rng.standard_normal((heads, width, width)) * START / self.natural**2
        return score, rng.standard_normal((heads, width))

    def model(self, score: Array, value: Array) -> Attention:
        return Attention([Head(s, None, v) for s, v in zip(score, value, strict=True)])


def baselines() -> dict[str, Callable[[_Data, np.random.Generator], tuple[Attention, str]]]:
    """Least squares with SciPy, and gradient descent where PyTorch is installed."""
    found: dict[str, Any] = {"least squares": _least_squares}
    if find_spec("torch") is not None:
        import_module("torch")  # now, not in the time of the first student
        found["student (Adam)"] = lambda data, rng: _student(data, rng, "Adam")
        found["student (L-BFGS)"] = lambda data, rng: _student(data, rng, "L-BFGS")
    return found


class _TimeIsUp(Exception):
    pass


def _least_squares(data: _Data, rng: np.random.Generator) -> tuple[Attention, str]:
    """SciPy's trust-region fit of all parameters, derivatives by differences."""
    from scipy.optimize import least_squares

    score, value = data.start(rng)
    shape, deadline = score.shape, time.perf_counter() + data.seconds
    best: dict[str, Any] = {"cost": np.inf, "at": np.concatenate([score.ravel(), value.ravel()])}

    def model(packed: Array) -> Attention:
        return data.model(
            packed[: score.size].reshape(shape), packed[score.size :].reshape(-1, shape[1])
        )

    def residual(packed: Array) -> Array:
        if time.perf_counter() > deadline:
            raise _TimeIsUp
        gap: Array = model(packed)(data.tokens) - data.answers
        cost = float(gap @ gap)
        if cost < best["cost"]:
            best.update(cost=cost, at=packed.copy())
        return gap

    try:
        least_squares(residual, best["at"], xtol=LAST, ftol=LAST, gtol=LAST)
        ended = "settled"
    except _TimeIsUp:
        ended = "time was up"
    return model(best["at"]), ended


def _student(data: _Data, rng: np.random.Generator, kind: str) -> tuple[Attention, str]:
    """A layer of the same shape, trained until the time is up."""
    import torch

    deadline = time.perf_counter() + data.seconds
    score, value = (torch.tensor(part, requires_grad=True) for part in data.start(rng))
    tokens, answers = torch.tensor(data.tokens), torch.tensor(data.answers)
    optimiser: Any = torch.optim.Adam([score, value], lr=ADAM_RATE)
    if kind == "L-BFGS":
        optimiser = torch.optim.LBFGS(
            [score, value], history_size=MEMORY, line_search_fn="strong_wolfe"
        )

    def loss() -> Any:
        optimiser.zero_grad()
        scores = torch.einsum("nld,hde,ne->nhl", tokens, score, tokens[:, -1])
        said = torch.einsum("nhl,nld,hd->n", scores.softmax(-1), tokens, value)
        gap = (said - answers).square().mean()
        gap.backward()  # type: ignore[no-untyped-call]
        return gap

    while time.perf_counter() < deadline:
        optimiser.step(loss)
    found = (score.detach().numpy(), value.detach().numpy())
    if not all(np.isfinite(part).all() for part in found):
        return data.model(*data.start(rng)), "diverged"
    return data.model(*found), "time was up"
