"""What every model is: a function with named parameters, and copies of it with others.

Standard errors have the structure of the model they belong to. Where a score is kept in factors,
its standard errors are either entrywise (the product is then multiplied out) or in factors too.
"""

from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from keyhole.arrays import Array

M = TypeVar("M", bound="Model")


@runtime_checkable
class Model(Protocol):
    """A member of some family: callable like the box, its parameters arrays with names."""

    @property
    def width(self) -> int: ...

    @property
    def outputs(self) -> int | None:
        """None for a scalar answer, else the length of the answer's vector."""
        ...

    def __call__(self, tokens: Array) -> Array: ...

    def to_arrays(self) -> dict[str, Array]: ...

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> Any: ...


def replace_parameters(model: M, changed: Mapping[str, Array]) -> M:
    """The model with some of its arrays exchanged."""
    return type(model).from_arrays({**model.to_arrays(), **changed})


def multiply_out_scores(
    parameters: Mapping[str, Array], errors: Mapping[str, Array]
) -> dict[str, Array]:
    """The parameters, scores in factors multiplied out where their standard errors are entrywise:
    errors of the factors would say too little, since the factors' range is uncertain as well."""
    found = dict(parameters)
    for name in errors:
        left, right = f"{name}_left", f"{name}_right"
        if name.endswith("score") and name not in found and left in found:
            found[name] = found.pop(left) @ found.pop(right)
    return found


def perturb_model(
    model: Any, errors: Any, relative: float, rng: np.random.Generator
) -> Iterator[Any]:
    """The model with parameters off by their standard errors and by a relative rounding, again and
    again; a copy is forgotten here before the next is made. Any callable may come here: one
    without parameters stays as it is."""
    if not hasattr(model, "to_arrays"):
        yield from repeat(model)
    uncertain = {} if errors is None else errors.to_arrays()
    parameters = multiply_out_scores(model.to_arrays(), uncertain)
    deviations = {
        name: _deviation(name, array, uncertain.get(name), relative)
        for name, array in parameters.items()
    }
    while True:
        drawn = {}
        for name, array in parameters.items():
            drawn[name] = np.asarray(rng.standard_normal(array.shape))
            drawn[name] *= deviations[name]
            drawn[name] += array
            drawn[name].flags.writeable = False  # so that the model keeps it as it is
        for name, left in uncertain.items():
            if name.endswith("score_left") and name in drawn:
                # a random matrix in factors whose entries have these standard errors is added
                other = name.removesuffix("left") + "right"
                right = uncertain[other]
                drawn[name] = np.hstack([drawn[name], left * rng.standard_normal(left.shape)])
                drawn[other] = np.vstack([drawn[other], right * rng.standard_normal(right.shape)])
        yield type(model).from_arrays(drawn)
        del drawn


def _deviation(name: str, array: Array, error: Array | None, relative: float) -> Array:
    """Standard deviations of a block: its rounding, and its error unless that is of a product."""
    deviation = np.array(array, dtype=np.float64)
    np.abs(deviation, out=deviation)
    deviation *= relative
    factor = name.endswith(("score_left", "score_right"))
    if not factor and error is not None and error.shape == array.shape:
        np.hypot(deviation, error, out=deviation)
    return deviation
