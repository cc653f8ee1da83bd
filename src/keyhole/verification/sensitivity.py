"""Where would another model show? Of a few queries, the one on which a change shows most.

One number of one random block of the parameters is changed, and of a few candidates the one is
taken whose answer moves most, in units of what its own rounding may do. Blocks that random
queries hardly see (a neuron that is rarely on, a weak head) get their queries this way. It
takes the model only: nothing is asked.
"""

from typing import Any

import numpy as np

from keyhole.arrays import TINY, Array
from keyhole.models.base import replace_parameters

CHANGE = 2.0**-10  # of the parameter, relative to its block
BLUR = 2.0**-20  # of the tokens, to see what rounding does
LARGEST = 2**22  # parameters of a model from which changing copies of it is too dear


def can_tell(model: Any) -> bool:
    """Whether the model's parameters can be changed one by one."""
    if not hasattr(model, "to_arrays") or hasattr(model, "margin"):
        return False
    return sum(array.size for array in model.to_arrays().values()) <= LARGEST


def most_telling(model: Any, candidates: list[Array], rng: np.random.Generator) -> int:
    """Number of the candidate on which one changed parameter shows most."""
    other = change_one_number(model, rng)
    return int(np.argmax([_shows(model, other, tokens[None], rng) for tokens in candidates]))


def change_one_number(model: Any, rng: np.random.Generator) -> Any:
    """The model with one number of a random block changed."""
    arrays = model.to_arrays()
    names = [name for name, array in arrays.items() if np.any(array)]
    name = names[int(rng.integers(len(names)))]
    changed = np.array(arrays[name], dtype=np.float64)
    step = CHANGE * float(np.sqrt(np.mean(changed**2)))
    changed[tuple(int(rng.integers(n)) for n in changed.shape)] += step
    return replace_parameters(model, {name: changed})


def _shows(model: Any, other: Any, tokens: Array, rng: np.random.Generator) -> float:
    answer = np.asarray(model(tokens))
    blurred = model(tokens * (1.0 + BLUR * rng.standard_normal(tokens.shape)))
    moved = float(np.linalg.norm(other(tokens) - answer)) / CHANGE
    rounding = float(np.linalg.norm(blurred - answer)) / BLUR + float(np.linalg.norm(answer))
    return moved / max(rounding, TINY)
