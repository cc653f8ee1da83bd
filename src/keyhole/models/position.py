"""How attention depends on where a token stands: the `position` part of `Attention`.

The score of the token x at distance D before the anchor y (D = 0: the anchor itself) is

    x . (score y + key_bias)  +  sum_j Re( e^{i frequency_j D} k_j(x) q_j(y) )  +  bias(D) - slope D

with one sum of turning pairs (rotary positions), one table and one slope per head; k_j and q_j are
affine and complex, kept as real rows: `keys[h, 2j]`, `keys[h, 2j + 1]` are the real and imaginary
part of k_j on [x; 1], `queries` the same of q_j. Tokens at a distance of `window` or more are not
seen, nor are the first `masked` places, except by an anchor that stands there (with
`masked_anchor` it does not even see itself, and only the offset remains). A sink is a score that
belongs to no token, a number or affine in the anchor: its weight is taken from the others and adds
nothing, or its share of `sink_values`. `vectors[p]` is added to the token at place p (the first is
0) before anything else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float, finite_array, frozen
from keyhole.errors import InvalidArgument

PREFIX = "position."


@dataclass(frozen=True, eq=False)
class Position:
    """What the place of a token does; parts that are None do nothing.

    >>> import numpy as np
    >>> Position(slopes=np.array([0.5, 0.25])).kind
    'linear bias'
    """

    frequencies: Array | None = None  # (n,), radians per place
    keys: Array | None = None  # (H, 2n, d + 1)
    queries: Array | None = None  # (H, 2n, d + 1)
    bias: Array | None = None  # (H, m), of distances 0 ... m - 1; the last holds beyond
    slopes: Array | None = None  # (H,), subtracted once per place
    sinks: Array | None = None  # (H,), a score each, or (H, d + 1) on [anchor; 1]
    sink_values: Array | None = None  # (H, D), what the whole weight of a sink would add
    vectors: Array | None = None  # (P, d)
    window: int | None = None  # distances that are seen
    masked: int | None = None  # places at the start that are not seen
    masked_anchor: bool | None = None  # nor by themselves

    def __post_init__(self) -> None:
        shapes: dict[str, int | tuple[int, ...]] = {
            "frequencies": 1, "keys": 3, "queries": 3, "bias": 2, "slopes": 1, "sinks": (1, 2),
            "sink_values": 2, "vectors": 2,
        }  # fmt: skip
        for name, ndim in shapes.items():
            array = getattr(self, name)
            if array is not None:
                whole = frozen(finite_array(f"position {name}", array, ndim=ndim))
                object.__setattr__(self, name, whole)
        self._check_turning()
        if self.sink_values is not None and self.sinks is None:
            raise InvalidArgument("sink_values belong to sinks: give these as well")
        for name in ("window", "masked"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise InvalidArgument(f"{name} must be at least 1, got {number}")
        if self.masked_anchor and self.masked is None:
            raise InvalidArgument("masked_anchor is said of masked places: give masked as well")

    def _check_turning(self) -> None:
        turning = [self.frequencies, self.keys, self.queries]
        if any(part is None for part in turning) != all(part is None for part in turning):
            raise InvalidArgument("frequencies, keys and queries come together")
        if self.frequencies is not None and self.keys is not None and self.queries is not None:
            rows = 2 * len(self.frequencies)
            if self.keys.shape != self.queries.shape or self.keys.shape[1] != rows:
                raise InvalidArgument(
                    f"keys and queries of {len(self.frequencies)} frequencies must be (heads, "
                    f"{rows}, width + 1), got {self.keys.shape} and {self.queries.shape}"
                )

    @property
    def kind(self) -> str:
        """The parts by the names that the field has for them."""
        named = (
            ("rotary", self.frequencies),
            ("linear bias", self.slopes),
            ("bias by distance", self.bias),
            ("position vectors", self.vectors),
            ("window", self.window),
            ("masked start", self.masked),
            ("sink", self.sinks),
        )
        return ", ".join(name for name, part in named if part is not None) or "none"

    @property
    def longest(self) -> int | None:
        """The longest sequence there are vectors for."""
        return None if self.vectors is None else len(self.vectors)

    def place(self, tokens: Float[Array, "batch length d"]) -> Float[Array, "batch length d"]:
        """The tokens with the vectors of their places."""
        if self.vectors is None:
            return tokens
        if tokens.shape[1] > len(self.vectors):
            raise InvalidArgument(
                f"there are vectors for {len(self.vectors)} places, the sequence has "
                f"{tokens.shape[1]} tokens"
            )
        return np.asarray(tokens + self.vectors[: tokens.shape[1]].astype(tokens.dtype))

    def added(
        self,
        head: int,
        tokens: Float[Array, "batch length d"],
        anchor: Float[Array, "batch d"],
        distances: Array,
    ) -> Float[Array, "batch length"]:
        """What the places add to the scores of a head."""
        scores = np.zeros(tokens.shape[:2], tokens.dtype)
        if self.frequencies is not None and self.keys is not None and self.queries is not None:
            keys, queries = pairs(self.keys[head], tokens), pairs(self.queries[head], anchor)
            angles = np.outer(distances, self.frequencies)
            turned = keys * np.exp(1j * angles).astype(keys.dtype) * queries[:, None]
            scores += turned.real.sum(axis=2).astype(tokens.dtype)
        if self.bias is not None:
            row = self.bias[head]
            scores += row[np.minimum(distances, len(row) - 1)].astype(tokens.dtype)
        if self.slopes is not None:
            scores -= (self.slopes[head] * distances).astype(tokens.dtype)
        if self.window is not None:
            scores[:, distances >= self.window] = -np.inf
        if self.masked is not None:
            hidden = distances >= tokens.shape[1] - self.masked
            scores[:, hidden & (bool(self.masked_anchor) | (distances > 0))] = -np.inf
        return scores

    def score_at(self, head: int, distance: int, width: int) -> Float[Array, "e e"]:
        """What a distance adds to a head, as a matrix between [token; 1] and [anchor; 1]."""
        if self.frequencies is None or self.keys is None or self.queries is None:
            matrix = np.zeros((width + 1, width + 1))
        else:
            keys = self.keys[head, ::2] + 1j * self.keys[head, 1::2]
            queries = self.queries[head, ::2] + 1j * self.queries[head, 1::2]
            turn = np.exp(1j * self.frequencies * distance)
            matrix = np.asarray((keys.T * turn @ queries).real)
        constant = 0.0
        if self.bias is not None:
            constant += float(self.bias[head, min(distance, self.bias.shape[1] - 1)])
        if self.slopes is not None:
            constant -= float(self.slopes[head]) * distance
        matrix[-1, -1] += constant
        return matrix

    def sink_scores(self, head: int, anchor: Float[Array, "batch d"]) -> Float[Array, "batch one"]:
        """The score of a head's sink, anchor by anchor."""
        assert self.sinks is not None
        row = self.sinks[head].astype(anchor.dtype)
        constant = np.broadcast_to(row if row.ndim == 0 else row[-1], (len(anchor), 1))
        return np.asarray(constant if row.ndim == 0 else constant + anchor @ row[:-1, None])

    def to_arrays(self) -> dict[str, Array]:
        """Every part that is there, by name; `from_arrays` is the inverse."""
        named = {part.name: getattr(self, part.name) for part in fields(self)}
        return {
            PREFIX + name: np.asarray(array) for name, array in named.items() if array is not None
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array]) -> "Position | None":
        """The position among the arrays of a model; None where there is none."""
        own: dict[str, Any] = {
            name.removeprefix(PREFIX): array
            for name, array in arrays.items()
            if name.startswith(PREFIX)
        }
        unknown = set(own) - {part.name for part in fields(cls)}
        if unknown:
            raise InvalidArgument(f"unknown parts of a position: {', '.join(sorted(unknown))}")
        for name in {"window", "masked"} & set(own):
            own[name] = int(np.round(own[name]))
        if "masked_anchor" in own:
            own["masked_anchor"] = bool(np.round(own["masked_anchor"]))
        return cls(**own) if own else None

    def of_heads(self, numbers: Sequence[int]) -> "Position":
        """The same for a choice of the heads, in another order or repeated."""
        named = {part.name: getattr(self, part.name) for part in fields(self)}
        for name in ("keys", "queries", "bias", "slopes", "sinks", "sink_values"):
            if named[name] is not None:
                named[name] = named[name][list(numbers)]
        return Position(**named)

    def astype(self, dtype: Any) -> "Position":
        """The same in another precision; frequencies stay as they are, since angles grow."""
        named = {part.name: getattr(self, part.name) for part in fields(self)}
        for name in ("keys", "queries", "bias", "slopes", "sinks", "sink_values", "vectors"):
            if named[name] is not None:
                named[name] = named[name].astype(dtype)
        return Position(**named)


def pairs(rows: Float[Array, "m e"], tokens: Float[Array, "*n d"]) -> Array:
    """Complex affine forms of tokens from their real and imaginary rows."""
    values = tokens @ rows[:, :-1].T + rows[:, -1]
    return np.asarray(values[..., ::2] + 1j * values[..., 1::2])
