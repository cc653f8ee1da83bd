"""Attention of which only the sign is told: the hypothesis of the label-only learner.

A positive factor on value and offset changes no label, so the model is kept with a value of norm
one and compared after that normalisation.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import InvalidArgument
from keyhole.models.attention import Attention, Head
from keyhole.models.base import Shown

LABELS = "labels"  # name of the coding among the parameters


@dataclass(frozen=True)
class Coding:
    """The numbers that stand for a negative answer, an exact tie and a positive answer.

    >>> Coding(0.0, 0.0, 1.0).encode(np.array([-2.0, 0.0, 3.0]))
    array([0., 0., 1.])
    """

    negative: float = -1.0
    tie: float = 0.0
    positive: float = 1.0

    def __post_init__(self) -> None:
        if self.negative == self.tie == self.positive == 0.0:
            return  # the errors of labels: there are none
        if not self.negative < self.positive or not self.negative <= self.tie <= self.positive:
            raise InvalidArgument(
                "labels must be ordered negative <= tie <= positive with negative < positive, "
                f"got {self.negative}, {self.tie}, {self.positive}"
            )

    def encode(self, numbers: Float[Array, "*n"]) -> Float[Array, "*n"]:
        signs = np.sign(numbers)
        return np.where(signs > 0, self.positive, np.where(signs < 0, self.negative, self.tie))

    def signs(self, labels: Float[Array, " n"]) -> Float[Array, " n"]:
        """-1, 0 (only where a tie has a label of its own) or 1; NaN for an unknown label."""
        known = np.full(labels.shape, np.nan)
        known[labels == self.tie] = 0.0
        known[labels == self.negative] = -1.0
        known[labels == self.positive] = 1.0
        return known


NO_ERROR = Coding(0.0, 0.0, 0.0)  # in place of a coding among standard errors


class LabelledAttention(Shown):
    """The sign of an attention layer's answer, in the coding of the box.

    >>> model = Attention([Head(np.zeros((2, 2)), None, np.array([1.0, 0.0]))])
    >>> LabelledAttention(model, Coding())(np.array([[[1.0, 0.0], [-3.0, 0.0]]]))
    array([-1.])
    """

    def __init__(self, model: Attention, coding: Coding) -> None:
        if model.outputs is not None:
            raise InvalidArgument("labels are defined for a layer that answers with one number")
        self.model, self.coding = model, coding

    @property
    def heads(self) -> tuple[Head, ...]:
        return self.model.heads

    @property
    def width(self) -> int:
        return self.model.width

    @property
    def outputs(self) -> None:
        return None

    def margin(self, tokens: Float[Array, "n length d"]) -> Float[Array, " n"]:
        """The number whose sign is the answer."""
        return self.model(tokens)

    def __call__(self, tokens: Float[Array, "n length d"]) -> Float[Array, " n"]:
        return self.coding.encode(self.margin(tokens))

    def natural_length(self) -> float:
        return self.model.natural_length()

    def to_arrays(self) -> dict[str, Array]:
        """Every parameter by name; `from_arrays` is the inverse."""
        coding = self.coding
        labels = np.array([coding.negative, coding.tie, coding.positive])
        return {**self.model.to_arrays(), LABELS: labels}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> "LabelledAttention":
        if LABELS not in arrays or np.shape(arrays[LABELS]) != (3,):
            raise InvalidArgument("a labelled model needs `labels`: negative, tie, positive")
        negative, tie, positive = (float(label) for label in arrays[LABELS])
        return cls(Attention.from_arrays(arrays), Coding(negative, tie, positive))

    def __repr__(self) -> str:
        return f"LabelledAttention(width={self.width}, heads={len(self.heads)})"


def normalised(model: Attention) -> Attention:
    """The layer divided by the joint norm of its values: what its sign can tell."""
    size = float(np.sqrt(sum(np.sum(head.value**2) for head in model.heads)))
    if size == 0.0:
        return model
    heads = [Head(h.score_factors or h.score, h.key_bias, h.value / size) for h in model.heads]
    skip = None if model.skip is None else model.skip / size
    return Attention(heads, model.offset / size, skip, model.position)
