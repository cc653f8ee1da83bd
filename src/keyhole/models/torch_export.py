"""ReLU networks and Transformer layers as PyTorch modules (extra `torch`)."""

from typing import Any

import numpy as np

from keyhole.errors import InvalidArgument, MissingExtra
from keyhole.models.relu_network import ReluNetwork
from keyhole.models.transformer import TransformerModel


def to_torch(model: Any) -> Any:
    """A torch.nn.Module on tokens (batch, length, width) that answers like the model.

    Parameters are named as in `model.to_arrays()`, with underscores for dots, and can be trained
    on. Double precision; call `.float()` for single."""
    if not isinstance(model, (ReluNetwork, TransformerModel)):
        raise InvalidArgument(f"cannot export a {type(model).__name__} to torch")
    torch = imported_torch()

    class Exported(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            for name, array in model.to_arrays().items():
                value = torch.nn.Parameter(torch.from_numpy(np.array(array, dtype=np.float64)))
                setattr(self, name.replace(".", "_"), value)
            self.prefix = "network_" if isinstance(model, TransformerModel) else ""
            self.around = isinstance(model, TransformerModel) and model.residual

        def part(self, name: str) -> Any:
            return getattr(self, self.prefix + name)

        def forward(self, tokens: Any) -> Any:
            point = tokens[:, -1, :]
            if self.prefix:
                keys = point @ self.score.T + self.key_bias
                weights = torch.softmax((tokens @ keys[:, :, None])[:, :, 0], dim=1)
                point = (weights[:, None, :] @ tokens)[:, 0, :]
            before, linear = self.part("bias"), self.part("offset")
            if self.around:  # the query beside the mean
                query = tokens[:, -1, :]
                before = before + (point - query) @ self.mixed_weight.T
                linear = linear + (point - query) @ self.mixed_skip
                point = query
            hidden = torch.relu(point @ self.part("weight").T + before)
            return hidden @ self.part("output") + point @ self.part("skip") + linear

    return Exported()


def imported_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingExtra(
            "PyTorch is needed to export a model: pip install 'keyhole[torch]'"
        ) from error
    return torch
