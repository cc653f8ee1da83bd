"""`Attention` as a PyTorch module: same formula, trainable parameters, same names as in our files.

Imports torch at the top: reach it through models/export.py, which explains a missing torch.
"""

from typing import Any

import torch
from torch import nn

from keyhole.models.attention import Attention


class AttentionModule(nn.Module):
    """Softmax attention read at the last position, on (batch, length, width)."""

    def __init__(self, model: Attention, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.outputs, self.count = model.width, model.outputs, len(model.heads)
        self.factored = [head.score_factors is not None for head in model.heads]
        arrays = model.to_arrays()
        self.parameters_by_name = nn.ParameterDict()
        for name, array in arrays.items():
            tensor = torch.tensor(array, dtype=dtype)
            self.parameters_by_name[name.replace(".", "_")] = nn.Parameter(tensor)

    def _get(self, head: int, name: str) -> Any:
        return self.parameters_by_name[f"heads_{head}_{name}"]

    def _keys(self, head: int, query: torch.Tensor) -> torch.Tensor:
        if self.factored[head]:
            inner = query @ self._get(head, "score_right").T
            keys = inner @ self._get(head, "score_left").T
        else:
            keys = query @ self._get(head, "score").T
        answer: torch.Tensor = keys + self._get(head, "key_bias")
        return answer

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        query = tokens[:, -1, :]
        answer: torch.Tensor = self.parameters_by_name["offset"]
        for head in range(self.count):
            scores = (tokens @ self._keys(head, query).unsqueeze(-1)).squeeze(-1)
            weights = torch.softmax(scores, dim=1)
            mean = (weights.unsqueeze(1) @ tokens).squeeze(1)
            answer = answer + mean @ self._get(head, "value")
        return answer
