"""A torch module with recovered weights. The module is given: files hold weights and a digest."""

import copy
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import InvalidArgument
from keyhole.extras import need
from keyhole.models.base import Shown


@dataclass(frozen=True, eq=False)
class TemplateModel(Shown):
    """A template with weights, callable like every keyhole model.

    Args:
        module: The template with these weights, in double precision; None where a file was loaded
            without its template.
        parameters: The weights by their names in the module.
        width: Numbers in a token.
        name: Of the template's class.
        digest: Of the template's structure: what its parts are, and the shapes of its weights.

    Example:
        >>> import torch
        >>> class Mean(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.out = torch.nn.Linear(3, 1)
        ...     def forward(self, tokens):
        ...         return self.out(tokens.mean(1))
        >>> model = TemplateModel.of(Mean(), 3)
        >>> model, model(np.zeros((2, 4, 3))).shape
        (TemplateModel(Mean, 4 weights), (2, 1))
    """

    module: Any
    parameters: Mapping[str, Array]
    width: int
    name: str = ""
    digest: str = ""
    outputs: int | None = None

    @classmethod
    def of(
        cls, module: Any, width: int, parameters: Mapping[str, Array] | None = None
    ) -> "TemplateModel":
        """A copy of the module with these weights, or with its own."""
        torch: Any = need("torch", "torch", "a model from a template")
        own = copy.deepcopy(module).double().cpu().eval()
        weights = dict(own.named_parameters())
        if parameters is not None:
            shapes = {name: tuple(part.shape) for name, part in weights.items()}
            if shapes != {name: np.shape(part) for name, part in parameters.items()}:
                raise InvalidArgument(
                    f"these are not the weights of the template {type(module).__name__}: names or "
                    "shapes differ. Give the template that the model was recovered with"
                )
            with torch.no_grad():
                for name, part in parameters.items():
                    weights[name].copy_(torch.as_tensor(np.array(part, dtype=np.float64)))
        arrays = {name: part.detach().numpy().copy() for name, part in weights.items()}
        for part in own.parameters():
            part.requires_grad_(False)
        with torch.no_grad():
            answer = own(torch.zeros(1, 1, width, dtype=torch.float64))
        outputs = None if answer.ndim == 1 else int(answer[0].numel())
        return cls(own, arrays, width, type(module).__name__, digest_of(module), outputs)

    def __repr__(self) -> str:
        count = sum(np.size(part) for part in self.parameters.values())
        return f"TemplateModel({self.name or 'template not given'}, {count:,} weights)"

    def __call__(self, tokens: Array) -> Array:
        if self.module is None:
            raise InvalidArgument(
                f"this model was loaded without its template ({self.name}): "
                "keyhole.load(path, template=module), or model.with_template(module)"
            )
        torch: Any = need("torch", "torch", "a model from a template")
        with torch.no_grad():
            return np.asarray(
                self.module(torch.as_tensor(np.array(tokens, dtype=np.float64))).numpy()
            )

    def with_template(self, module: Any) -> "TemplateModel":
        """The same weights in this module.

        Raises:
            InvalidArgument: It is another template than the one that was recovered.
        """
        if self.digest and digest_of(module) != self.digest:
            raise InvalidArgument(
                f"the model was recovered with another template ({self.name}, digest "
                f"{self.digest[:12]}), not with this {type(module).__name__} "
                f"({digest_of(module)[:12]})"
            )
        return TemplateModel.of(module, self.width, self.parameters)

    def to_arrays(self) -> dict[str, Array]:
        return dict(self.parameters)

    def rebuild(self, arrays: Mapping[str, Array]) -> "TemplateModel":
        """The same template with other weights."""
        if self.module is None:
            return TemplateModel(None, dict(arrays), self.width, self.name, self.digest)
        return TemplateModel.of(self.module, self.width, arrays)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> "TemplateModel":
        """The weights alone, without the template."""
        return cls(None, dict(arrays), width=1)

    def to_metadata(self) -> dict[str, str]:
        """What a file holds beside the weights."""
        return {"template": self.name, "digest": self.digest, "width": str(self.width)}

    @classmethod
    def from_file(cls, arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> "TemplateModel":
        """The model in a file, still without its template."""
        width = int(metadata.get("width", "1"))
        name, digest = metadata.get("template", ""), metadata.get("digest", "")
        return cls(None, dict(arrays), width, name, digest)


def digest_of(module: Any) -> str:
    """SHA-256 of a module's structure: its text, the names and shapes of its weights."""
    shapes = [(name, tuple(part.shape)) for name, part in module.named_parameters()]
    return hashlib.sha256(f"{module!r}{shapes!r}".encode()).hexdigest()
