"""What one would do otherwise: fit a model of the right shape to random queries.

A student is told the family, every size (heads, ranks, neurons, activation) and the scale of each
block of parameters, and gets as many answers as Keyhole paid for, to random queries of a natural
size. Epsilons of norms are granted. It then has a fixed processor time. Three students: SciPy's
least squares with derivatives by differences, and gradient descent (Adam, L-BFGS) on the model as a
torch module.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import InvalidArgument
from keyhole.models.language_model import TokenAttention
from keyhole.models.sign_attention import LABELS, LabelledAttention

GRANTED = "epsilon"  # part of the name of an array that a student need not find


@dataclass(frozen=True, eq=False)
class Lesson:
    """What a student gets: `shape` is a model of the right shape whose blocks have the right scale,
    and `labels` says that the answers are signs."""

    tokens: Array
    answers: Array
    shape: Any
    seconds: float
    labels: bool = False

    def start(self, rng: np.random.Generator) -> dict[str, Array]:
        """First parameters: attention nearly uniform, all else of the right scale."""
        found = {}
        for name, array in self.shape.to_arrays().items():
            scale = float(np.sqrt(np.mean(np.square(array)))) if array.size else 0.0
            # scores a tenth of the truth's attend nearly uniformly
            share = 0.1 if "score" in name or "qk" in name else 1.0
            drawn = np.asarray(share * scale * rng.standard_normal(array.shape))
            found[name] = np.array(array) if fixed(name, array) else drawn
        return found


@dataclass(frozen=True, eq=False)
class Taught:
    """A student's model (None: it diverged) and how its time ended."""

    model: Any
    ended: str


Student = Callable[[Lesson, np.random.Generator], Taught]


def fixed(name: str, array: Array) -> bool:
    """Whether an array is structure or granted, not something to be found."""
    structure = array.size == 0 or not np.issubdtype(array.dtype, np.floating)
    return structure or name == LABELS or GRANTED in name


def students() -> dict[str, Student]:
    """Those that can run here: gradient descent needs torch."""
    found: dict[str, Student] = {"least squares (SciPy)": fit_least_squares}
    if find_spec("torch") is not None:
        found["student (Adam)"] = lambda lesson, rng: train(lesson, rng, "Adam")
        found["student (L-BFGS)"] = lambda lesson, rng: train(lesson, rng, "L-BFGS")
    return found


class _TimeIsUp(Exception):
    pass


def fit_least_squares(lesson: Lesson, rng: np.random.Generator) -> Taught:
    """SciPy's trust-region fit of all parameters, derivatives by differences."""
    from scipy.optimize import least_squares

    start = lesson.start(rng)
    names = [name for name, array in start.items() if not fixed(name, array)]
    sizes = np.cumsum([start[name].size for name in names])[:-1]
    deadline = time.process_time() + lesson.seconds
    best: dict[str, Any] = {
        "cost": np.inf,
        "at": np.concatenate([start[name].ravel() for name in names]),
    }

    def model(packed: Array) -> Any:
        parts = zip(names, np.split(packed, sizes), strict=True)
        changed = {name: part.reshape(start[name].shape) for name, part in parts}
        return type(lesson.shape).from_arrays({**start, **changed})

    def residual(packed: Array) -> Array:
        if time.process_time() > deadline:
            raise _TimeIsUp
        gap: Array = np.ravel(np.asarray(model(packed)(lesson.tokens)) - lesson.answers)
        cost = float(gap @ gap)
        if cost < best["cost"]:
            best.update(cost=cost, at=packed.copy())
        return gap

    try:
        last = 1e-15  # tolerances of least squares: on to the last digit
        least_squares(residual, best["at"], xtol=last, ftol=last, gtol=last)
        ended = "settled"
    except _TimeIsUp:
        ended = "time was up"
    return Taught(model(best["at"]), ended)


def train(lesson: Lesson, rng: np.random.Generator, kind: str) -> Taught:
    """The model as a torch module, trained until the time is up."""
    import torch

    start = lesson.start(rng)
    net, read = _make_module(lesson, start)
    parameters = [p for p in net.parameters() if p.requires_grad]
    integers = np.issubdtype(lesson.tokens.dtype, np.integer)
    tokens = torch.as_tensor(lesson.tokens, dtype=torch.int64 if integers else torch.float64)
    answers = torch.as_tensor(np.array(lesson.answers, dtype=np.float64))
    # torch's own advice is 1e-3; ten times that is better on every size tried here
    optimiser: Any = torch.optim.Adam(parameters, lr=1e-2)
    if kind == "L-BFGS":
        memory = 50  # gradients that L-BFGS remembers
        optimiser = torch.optim.LBFGS(
            parameters, history_size=memory, line_search_fn="strong_wolfe"
        )

    def loss() -> Any:
        optimiser.zero_grad()
        said = net(tokens)
        if lesson.labels:
            wanted = (answers > 0).to(said.dtype)
            gap = torch.nn.functional.binary_cross_entropy_with_logits(said, wanted)
        else:
            gap = (said - answers).square().mean()
        gap.backward()  # type: ignore[no-untyped-call]
        return gap

    deadline = time.process_time() + lesson.seconds  # what torch imports is no student's time
    while time.process_time() < deadline:
        optimiser.step(loss)
    found = read()
    if not all(np.isfinite(array).all() for array in found.values()):
        return Taught(None, "diverged")
    return Taught(type(lesson.shape).from_arrays({**start, **found}), "time was up")


def _make_module(
    lesson: Lesson, start: dict[str, Array]
) -> tuple[Any, Callable[[], dict[str, Array]]]:
    """A module with these parameters, and a function that reads the trainable ones back."""
    from keyhole.models.export_torch import to_module

    shape = type(lesson.shape).from_arrays(start)
    if isinstance(shape, TokenAttention):
        net = _token_module(start, len(shape.heads))
    else:
        net = to_module(shape.model if isinstance(shape, LabelledAttention) else shape)
    held = {name.rpartition("parameters_by_name.")[2]: p for name, p in net.named_parameters()}
    pairs = {name: held[place] for name in start if (place := name.replace(".", "_")) in held}
    missing = [n for n, a in start.items() if not fixed(n, a) and n not in pairs]
    if missing:
        raise InvalidArgument(f"the torch module has no parameters {', '.join(missing)}")
    for name, parameter in pairs.items():
        parameter.requires_grad_(not fixed(name, start[name]))

    def read() -> dict[str, Array]:
        return {
            name: np.array(parameter.detach().numpy(), dtype=np.float64).reshape(start[name].shape)
            for name, parameter in pairs.items()
        }

    return net, read


def _token_module(start: dict[str, Array], heads: int) -> Any:
    """Attention on token numbers (models/language_model) as a torch module."""
    import torch

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, array in start.items():
                tensor = torch.tensor(np.array(array, dtype=np.float64))
                self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(tensor))

        def table(self, name: str) -> tuple[Any, Any]:
            return getattr(self, f"{name}_left"), getattr(self, f"{name}_right")

        def forward(self, prompts: Any) -> Any:
            last = prompts[:, -1]
            left, right = self.table("direct")
            answer = left[last] @ right
            for head in range(heads):
                left, right = self.table(f"heads_{head}_qk")
                scores = torch.einsum("nr,nlr->nl", left[last], right.T[prompts])
                weights = scores.softmax(-1)
                left, right = self.table(f"heads_{head}_ov")
                answer = answer + torch.einsum("nl,nlr->nr", weights, left[prompts]) @ right
            return answer

    return Module()
