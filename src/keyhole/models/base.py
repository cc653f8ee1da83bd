"""What every model is: a function with named parameters, and copies of it with others.

Standard errors have the structure of the model they belong to. Where a score is kept in factors,
its standard errors are either entrywise (the product is then multiplied out) or in factors too.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any, Protocol, runtime_checkable

import numpy as np

from keyhole.arrays import SINGLE_ROUNDOFF, Array, Float
from keyhole.errors import InvalidArgument
from keyhole.text import html_table

# how scores and values are to be read, wherever they are shown
ORIENTATION = (
    "Token t scores t · (score x + key_bias) with the last token x: rows belong to the token that "
    "is looked at, columns to the one that looks. score is KᵀQ/√(head width), the scale included; "
    "a token as a row times value is what the head adds, value = Vᵀ Oᵀ."
)


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


class Shown:
    """Shows itself in a notebook: its parameters by name, shape and norm, and how to read them."""

    def to_arrays(self) -> dict[str, Array]:
        raise NotImplementedError

    def _repr_html_(self) -> str:
        rows = {"model": repr(self)}
        for name, array in self.to_arrays().items():
            norm = float(np.linalg.norm(np.asarray(array, dtype=np.float64)))
            rows[name] = f"{' × '.join(map(str, np.shape(array))) or 'a number'}, norm {norm:.3g}"
        heads = any("score" in name for name in rows)
        return html_table(rows, ORIENTATION if heads else "")


def replace_parameters(model: Any, changed: Mapping[str, Array]) -> Any:
    """The model with some of its arrays exchanged."""
    return rebuild(model, {**model.to_arrays(), **changed})


def rebuild(model: Any, arrays: Mapping[str, Array]) -> Any:
    """A model of the same kind with these arrays; one that needs more than arrays does it."""
    return getattr(model, "rebuild", type(model).from_arrays)(arrays)


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


def with_scores(model: Any) -> dict[str, Array]:
    """All arrays of a model, scores multiplied out: their factors are not unique."""
    arrays: dict[str, Array] = model.to_arrays()
    for name in [name for name in arrays if name.endswith("score_left")]:
        other = name.replace("score_left", "score_right")
        arrays[name.replace("score_left", "score")] = arrays.pop(name) @ arrays.pop(other)
    return arrays


class NormalPool:
    """Disturbs arrays by normal numbers, a part at a time that stays in the processor's cache. The
    numbers are drawn once and read again, from another place each time: drawing one for every
    entry of a large array would take longer than asking the model."""

    def __init__(self, rng: np.random.Generator, part: int = 2**13) -> None:
        self.rng, self.part = rng, part
        self.numbers = rng.standard_normal(2 * part)

    def disturb(self, array: Array, relative: float, error: Array | None = None) -> Array:
        """The array off by a relative rounding and by standard errors, a new one."""
        flat = np.ascontiguousarray(array, dtype=np.float64).reshape(-1)
        errors = None if error is None else np.ascontiguousarray(error).reshape(-1)
        found = np.empty(array.shape)
        for start in range(0, flat.size, self.part):
            part = slice(start, min(start + self.part, flat.size))
            near = found.reshape(-1)[part]
            np.multiply(self._take(len(near)), relative, out=near)
            near += 1.0
            near *= flat[part]
            if errors is not None:  # independent of the rounding
                near += errors[part] * self._take(len(near))
        return found

    def _take(self, count: int) -> Float[Array, " n"]:
        """So many of the numbers, from a random place."""
        place = int(self.rng.integers(self.part))
        return self.numbers[place : place + count]


def perturb_model(
    model: Any,
    errors: Any,
    relative: float,
    rng: np.random.Generator,
    normals: NormalPool | None = None,
) -> Iterator[Any]:
    """The model with parameters off by their standard errors and by a relative rounding, again and
    again; a copy is forgotten here before the next is made. Large arrays take the numbers of
    `normals`, if given. Any callable may come here: one without parameters stays as it is."""
    if not hasattr(model, "to_arrays"):
        yield from repeat(model)
    uncertain = {} if errors is None else errors.to_arrays()
    parameters = multiply_out_scores(model.to_arrays(), uncertain)
    while True:
        drawn = {}
        for name, array in parameters.items():
            error = uncertain.get(name)
            # standard errors of a factor say how far the product is off, which is added below
            factor = name.endswith(("score_left", "score_right"))
            if factor or (error is not None and error.shape != array.shape):
                error = None
            if array.size <= 2**13:  # few numbers may decide: a disturbance of its own for each
                # angles of places are computed in float32, whatever they turn
                turns = name.endswith("frequencies")
                deviation = np.abs(array) * (min(relative, SINGLE_ROUNDOFF) if turns else relative)
                deviation = deviation if error is None else np.hypot(deviation, error)
                drawn[name] = np.asarray(rng.standard_normal(array.shape) * deviation + array)
            else:
                normals = normals or NormalPool(rng)
                drawn[name] = normals.disturb(array, relative, error)
            keep_possible(name, drawn[name])
            drawn[name].flags.writeable = False  # so that the model keeps it as it is
        for name, left in uncertain.items():
            if name.endswith("score_left") and name in drawn:
                # a random matrix in factors whose entries have these standard errors is added
                other = name.removesuffix("left") + "right"
                right = uncertain[other]
                drawn[name] = np.hstack([drawn[name], left * rng.standard_normal(left.shape)])
                drawn[other] = np.vstack([drawn[other], right * rng.standard_normal(right.shape)])
        yield rebuild(model, drawn)
        del drawn


def keep_possible(name: str, array: Array) -> None:
    """Makes a disturbed parameter one that a model can have: the epsilon of a norm is never below
    zero."""
    if name.rpartition(".")[2].startswith("epsilon"):
        np.abs(array, out=array)


def predict(model: Any, tokens: Array, answers: Array) -> Array:
    """What the model answers to these tokens. One that knows which answers are possible, and not
    to which query (an output layer), tells the possible ones that are `nearest` to those given."""
    if hasattr(model, "nearest"):
        return np.asarray(model.nearest(answers))
    return np.asarray(model(tokens))


def last_points(points: Array, width: int, dtype: Any) -> Float[Array, "n d"]:
    """The points that a network reads: given as such, or as the last tokens of sequences."""
    points = np.asarray(points, dtype=dtype)
    if points.ndim == 3 and points.shape[1] >= 1:
        points = points[:, -1, :]
    if points.ndim != 2 or points.shape[1] != width:
        raise InvalidArgument(
            f"expected points of shape (batch, {width}) or (batch, length, {width}), got "
            f"{points.shape}"
        )
    return points


HIDDEN_VALUES = 4 * 2**20  # activations of a hidden layer held at once: 32 MB


def answer_in_parts(
    answer: Callable[[Array], Array], points: Float[Array, "n d"], neurons: int
) -> Array:
    """The answers of a network, so many points at a time that the hidden layer fits into memory."""
    step = max(1, HIDDEN_VALUES // max(1, neurons))
    if len(points) <= step:
        return answer(points)
    return np.concatenate([answer(points[i : i + step]) for i in range(0, len(points), step)])


def check_shapes(arrays: Iterable[tuple[str, Array, tuple[int, ...]]]) -> None:
    """Raises InvalidArgument where a named array has another shape."""
    for name, array, shape in arrays:
        if array.shape != shape:
            raise InvalidArgument(f"{name} must have shape {shape}, got {array.shape}")


def natural_length(model: Any, width: int) -> float:
    """Length of ordinary tokens: the model's own, or that of normal ones where it says none."""
    own = getattr(model, "natural_length", None)
    return float(width) ** 0.5 if own is None else float(own())


def takes_numbers(model: Any) -> bool:
    """Whether tokens are numbers (in a vocabulary of `model.tokens`), which nothing rounds."""
    return getattr(model, "tokens", None) is not None
