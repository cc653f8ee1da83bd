"""A forward model made from a torch function: its derivatives are torch's (torch.func).

The function predicts the answer to one query from named parameters; queries of one shape are
batched (torch.func.vmap). Products with the Jacobian reuse one graph of the residual; the whole
Jacobian is taken query by query (vmap of jacrev), which is cheap where answers have few numbers.
torch is imported when a model is made; everything outside is NumPy in double precision.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.extras import need
from keyhole.fitting.gauss_newton import Blocks, Linearization


@dataclass(frozen=True, eq=False)
class Batch:
    """Queries of one shape, their answers, and the answers' standard errors."""

    queries: Float[Array, "n *query"]
    answers: Float[Array, "n *answer"]
    errors: Float[Array, " n"]


class TorchModel:
    """Predictions `function(parameters, query)` against answers, in standard errors.

    `function` maps tensors by name (as in `blocks`) and the tensor of one query to the tensor of
    its answer, in operations that torch.func can batch and differentiate.

    >>> x = np.linspace(0.0, 1.0, 20)[:, None]
    >>> data = Batch(x, np.exp(0.5 * x), np.ones(20))
    >>> blocks = Blocks.of({"rate": np.zeros(1)})
    >>> model = TorchModel(lambda p, x: (p["rate"] * x).exp(), blocks, [data])
    >>> from keyhole.fitting.gauss_newton import fit_least_squares
    >>> fit_least_squares(model, np.zeros(1)).point.round(8).tolist()
    [0.5]
    """

    def __init__(
        self, function: Callable[[dict[str, Any], Any], Any], blocks: Blocks, data: Sequence[Batch]
    ) -> None:
        self.torch: Any = need("torch", "torch", "a forward model in torch")
        self.function, self.blocks = function, blocks
        self.data = tuple(
            (
                self._tensor(batch.queries),
                self._tensor(batch.answers.reshape(len(batch.answers), -1)),
                self._tensor(batch.errors),
            )
            for batch in data
        )

    def _tensor(self, array: Array) -> Any:
        return self.torch.as_tensor(np.array(array, dtype=np.float64))

    def _one(self, vector: Any, query: Any, answer: Any, error: Any) -> Any:
        """Residual of one query."""
        return (self.function(self.blocks.split(vector), query).reshape(-1) - answer) / error

    def _all(self, vector: Any) -> Any:
        each = self.torch.func.vmap(self._one, (None, 0, 0, 0))
        return self.torch.cat([each(vector, *batch).reshape(-1) for batch in self.data])

    def residual(self, point: Float[Array, " unknowns"]) -> Float[Array, " numbers"]:
        with self.torch.no_grad():
            return np.asarray(self._all(self._tensor(point)).numpy())

    def linearize(self, point: Float[Array, " unknowns"]) -> Linearization:
        at = self._tensor(point).requires_grad_()
        residual = self._all(at)
        grad = self.torch.autograd.grad
        # v -> J^t v is linear in v, so its own gradient is J: both products reuse one graph.
        weights = self.torch.zeros_like(residual, requires_grad=True)
        pulled = grad(residual, at, weights, create_graph=True)[0]

        def jvp(step: Array) -> Array:
            return np.asarray(grad(pulled, weights, self._tensor(step), retain_graph=True)[0])

        def vjp(vector: Array) -> Array:
            return np.asarray(grad(residual, at, self._tensor(vector), retain_graph=True)[0])

        def jacobian() -> Array:
            return self._jacobian(at.detach())

        return Linearization(np.asarray(residual.detach()), len(point), jvp, vjp, jacobian)

    def retract(self, point: Array, step: Array) -> Array:
        return point + step

    def _jacobian(self, at: Any) -> Float[Array, "numbers unknowns"]:
        parts = []
        chunk_values = 2**24  # numbers of the Jacobian computed at once: 128 MB
        for batch in self.data:
            chunk = max(1, chunk_values // (len(at) * batch[1].shape[1]))
            each = self.torch.func.vmap(
                self.torch.func.jacrev(self._one), (None, 0, 0, 0), chunk_size=chunk
            )
            parts.append(each(at, *batch).reshape(-1, len(at)))
        return np.asarray(self.torch.cat(parts))
