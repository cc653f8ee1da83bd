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
            self.width, self.outputs = model.width, model.outputs
            self.prefix = "network_" if isinstance(model, TransformerModel) else ""
            self.residual = isinstance(model, TransformerModel) and model.residual

        def part(self, name: str) -> Any:
            return getattr(self, self.prefix + name)

        def forward(self, tokens: Any) -> Any:
            query = point = tokens[:, -1, :]
            if self.prefix:
                keys = query @ self.score.T + self.key_bias
                weights = torch.softmax((tokens @ keys[:, :, None])[:, :, 0], dim=1)
                point = (weights[:, None, :] @ tokens)[:, 0, :]
            if self.residual:
                moved = point - query
                hidden = query @ self.part("weight").T + moved @ self.mixed_weight.T
                straight = query @ self.part("skip") + moved @ self.mixed_skip
            else:
                hidden, straight = point @ self.part("weight").T, point @ self.part("skip")
            bent = torch.relu(hidden + self.part("bias")) @ self.part("output")
            return bent + straight + self.part("offset")

    return Exported()


def imported_torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise MissingExtra(
            "PyTorch is needed to export a model: pip install 'keyhole[torch]'"
        ) from error
    return torch
