"""A torch module as a function of one vector of weights: answers, residuals and Jacobian.

The module is a template: its architecture counts, its own weights are ignored. Derivatives are
torch's (`torch.func`), query by query, in double precision. Kernels that torch.func cannot batch
(flash attention, the fast path of encoder layers) are off while the module computes.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import InvalidArgument
from keyhole.extras import need

NORMS = ("LayerNorm", "RMSNorm", "GroupNorm")  # their weights start at one, not at random


@dataclass(frozen=True, eq=False)
class Answered:
    """Queries of one length, their answers as rows, and the standard errors of these numbers."""

    tokens: Float[Array, "n length d"]
    answers: Float[Array, "n outputs"]
    errors: Float[Array, "n outputs"]


@contextlib.contextmanager
def plain_kernels() -> Iterator[Any]:
    """torch, with kernels that it can batch and differentiate; afterwards as it was before."""
    torch: Any = need("torch", "torch", "a model from a template")
    backends = torch.backends
    enabled = backends.mha.get_fastpath_enabled()
    backends.mha.set_fastpath_enabled(False)
    try:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            yield torch
    finally:
        backends.mha.set_fastpath_enabled(enabled)


@dataclass(frozen=True, eq=False)
class Forward:
    """The template as a function of its weights, all of them in one vector.

    module: a copy of the template in double precision that evaluates (no dropout).
    """

    module: Any
    shapes: dict[str, tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        named = self.module.named_parameters()
        object.__setattr__(self, "shapes", {name: tuple(p.shape) for name, p in named})

    @classmethod
    def of(cls, module: Any) -> "Forward":
        """The function behind any module, which itself stays as it is."""
        own = copy.deepcopy(module).double().cpu().eval()
        for parameter in own.parameters():
            parameter.requires_grad_(False)
        return cls(own)

    @cached_property
    def places(self) -> dict[str, slice]:
        """Where each tensor stands in the vector."""
        ends = np.cumsum([int(np.prod(shape)) for shape in self.shapes.values()]).tolist()
        starts = [0, *ends[:-1]]
        return {name: slice(*ends) for name, *ends in zip(self.shapes, starts, ends, strict=True)}

    @property
    def unknowns(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes.values())

    def split(self, vector: Any) -> dict[str, Any]:
        """The tensors by name, of a vector of either library."""
        return {
            name: vector[self.places[name]].reshape(shape) for name, shape in self.shapes.items()
        }

    def join(self, arrays: dict[str, Array]) -> Float[Array, " unknowns"]:
        return np.concatenate([np.ravel(arrays[name]) for name in self.shapes])

    @property
    def weights(self) -> Float[Array, " unknowns"]:
        """Those that the module has."""
        return self.join({name: p.detach().numpy() for name, p in self.module.named_parameters()})

    def draw(self, rng: np.random.Generator, spread: float = 1.0) -> Float[Array, " unknowns"]:
        """Random weights that keep the size of what passes through them: matrices by their inputs,
        norms near one, biases small."""
        kinds = {
            f"{name}.weight" if name else "weight": type(part).__name__
            for name, part in self.module.named_modules()
        }
        drawn = {}
        for name, shape in self.shapes.items():
            noise = rng.standard_normal(shape)
            if kinds.get(name) in NORMS:
                drawn[name] = 1.0 + 0.1 * noise
            elif len(shape) > 1:
                drawn[name] = spread * noise / np.sqrt(shape[-1])
            else:
                drawn[name] = 0.1 * noise
        return self.join(drawn)

    def predict(self, vector: Array, tokens: Float[Array, "n length d"]) -> Array:
        """Answers of the template with these weights, in the shape that it gives them."""
        with plain_kernels() as torch, torch.no_grad():
            weights = self.split(torch.as_tensor(np.array(vector, dtype=np.float64)))
            inputs = torch.as_tensor(np.array(tokens, dtype=np.float64))
            answers = torch.func.functional_call(self.module, weights, (inputs,))
            return np.asarray(answers.numpy())


class Residuals:
    """Predictions less answers in standard errors, and their Jacobian, for one set of answers."""

    def __init__(self, forward: Forward, data: Sequence[Answered]) -> None:
        self.forward, self.data = forward, tuple(data)
        torch: Any = need("torch", "torch", "a model from a template")
        self.torch = torch
        self.batches = [
            tuple(torch.as_tensor(np.array(part, dtype=np.float64)) for part in
                  (one.tokens, one.answers, one.errors))
            for one in data
        ]  # fmt: skip
        self.numbers = sum(one.answers.size for one in data)
        squares = sum(float(np.sum((one.answers / one.errors) ** 2)) for one in data)
        self.size = squares / max(self.numbers, 1)  # mean square of the answers

    def _one(self, weights: Any, tokens: Any) -> Any:
        given = self.torch.func.functional_call(self.forward.module, weights, (tokens[None],))
        return given.reshape(-1)

    def __call__(self, vector: Float[Array, " unknowns"]) -> Float[Array, " numbers"]:
        parts = []
        with plain_kernels() as torch, torch.no_grad():
            weights = self.forward.split(torch.as_tensor(vector))
            for tokens, answers, errors in self.batches:
                given = torch.func.functional_call(self.forward.module, weights, (tokens,))
                parts.append((given.reshape(len(tokens), -1) - answers) / errors)
            return np.asarray(torch.cat([part.reshape(-1) for part in parts]).numpy())

    def jacobian(self, vector: Float[Array, " unknowns"]) -> Float[Array, "numbers unknowns"]:
        tall = np.empty((self.numbers, len(vector)))
        at_once = 2**23  # numbers of the Jacobian that are computed together: 64 MB
        done = 0
        with plain_kernels() as torch:
            # by tensors, not by the vector: the slopes of its slices would be as wide as itself
            weights, slopes = self.forward.split(torch.as_tensor(vector)), torch.from_numpy(tall)
            for tokens, answers, errors in self.batches:
                chunk = max(1, at_once // (len(vector) * answers.shape[1]))
                each = torch.func.vmap(torch.func.jacrev(self._one), (None, 0), chunk_size=chunk)
                rows = slopes[done : done + answers.numel()]
                for name, part in each(weights, tokens).items():
                    torch.div(
                        part.reshape(len(rows), -1),
                        errors.reshape(-1, 1),
                        out=rows[:, self.forward.places[name]],
                    )
                done += len(rows)
        return tall


def check_module(module: Any) -> None:
    """Raises where this is no torch module with parameters."""
    torch: Any = need("torch", "torch", "a model from a template")
    if isinstance(module, type) or not isinstance(module, torch.nn.Module):
        raise InvalidArgument(
            f"a template is a torch.nn.Module that takes (batch, length, width), got {module!r}. "
            "Write the architecture as a module; its weights do not matter"
        )
    if not any(True for _ in module.parameters()):
        raise InvalidArgument("the template has no parameters: there is nothing to recover")
