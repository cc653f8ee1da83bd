"""From the last hidden states to an answer: which tokens count, and at which length.

An endpoint's answer is a pooled, often normalised, hidden state. The readout is kept apart from the
model: states that were computed once are read in every way there is, at no cost.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Readout:
    """How an answer is read from hidden states (rows, length, width)."""

    pooling: str | None = "mean"  # None: answers are taken as they are
    normalize: bool = False
    dense: tuple[Any, ...] = ()  # modules of torch between pooling and normalisation
    factor: float = 1.0
    padding: bool = False  # padded places count as tokens
    specials: bool = True  # the first and the last token count
    shift: int = 0  # of the place that "last" and "cls" look at
    dimensions: int | None = None  # answers cut to so many numbers

    def __call__(self, states: Any, mask: Any) -> Any:
        """The answers (rows, outputs) of states with a mask (rows, length), true for tokens."""
        import torch

        if self.pooling is None:
            answers = states
        else:
            counted = torch.ones_like(mask) if self.padding else mask
            if not self.specials:
                counted = _without_ends(counted)
            answers = self._pool(states, counted)
        for layer in self.dense:
            answers = layer(answers)
        if self.dimensions is not None:
            answers = answers[:, : self.dimensions]
        if self.normalize:
            answers = torch.nn.functional.normalize(answers, dim=-1)
        return answers * self.factor if self.factor != 1 else answers

    def _pool(self, states: Any, counted: Any) -> Any:
        import torch

        weights = counted[..., None].to(states.dtype)
        if self.pooling in ("mean", "sqrt"):
            count = weights.sum(1).clamp(min=1e-9)
            return (states * weights).sum(1) / (count if self.pooling == "mean" else count.sqrt())
        if self.pooling == "weighted":
            weights = weights * torch.arange(1, states.shape[1] + 1)[:, None]
            return (states * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        if self.pooling == "max":
            return states.masked_fill(~counted[..., None], -torch.inf).amax(1)
        place = torch.arange(counted.shape[1])
        edge = place * counted if self.pooling == "last" else (place - len(place)) * counted
        at = edge.argmax(1) if self.pooling == "last" else edge.argmin(1)
        at = (at + self.shift).clamp(0, counted.shape[1] - 1)
        return states[torch.arange(len(at)), at]


def _without_ends(mask: Any) -> Any:
    """The mask without each row's first and last token; rows of less than three stay."""
    import torch

    place = torch.arange(mask.shape[1])
    first = (mask * (len(place) - place)).argmax(1)
    last = (mask * (place + 1)).argmax(1)
    inner = mask & (place > first[:, None]) & (place < last[:, None])
    return torch.where((mask.sum(1) > 2)[:, None], inner, mask)
