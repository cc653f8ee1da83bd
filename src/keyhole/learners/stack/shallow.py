"""A stack of pre-norm blocks as one wide layer: what is left when all tokens are huge.

Statement.  With the anchor t z, |z|^2 = d, and a context so long that its streams are its tokens,
            y - t z = c_0 + c_1 / t + c_2 / t^2 + ...: every norm sees the direction of the input.
            c_0 = Σ_l attention_l(Z) + mlp_l(z) is one layer with the heads and neurons of all
            blocks side by side; c_1 tells which of them reads which.
Queries.    Each sequence with its anchor at four sizes, one twice as large as the other; two sizes
            give c_0 with fewer digits.
Algebra.    Richardson: c_0 and c_1 are the first coefficients of the polynomial in 1/t through the
            four answers. Rounding enters c_0 as 8 t units, the fifth term as t^-4: t = unit^(-1/5);
            with two sizes, t = unit^(-1/3).
            How far c_0 comes out alike from other sizes is its error, `doubt`.
Fails.      Where the answers are no such series: norms behind the residual, kinks at every size.
Source.     Richardson (1911) for the extrapolation; the rest is Keyhole's own.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.block import Box, Unclear


@dataclass(frozen=True, eq=False)
class Terms:
    """Queries in points of the norm's sphere, and the first two terms of their answers."""

    context: Float[Array, "n m k"]
    anchors: Float[Array, "n k"]
    limit: Float[Array, "n d"]
    first: Float[Array, "n d"]

    def __add__(self, other: "Terms") -> "Terms":
        return Terms(*(np.concatenate([getattr(self, name), getattr(other, name)])
                       for name in ("context", "anchors", "limit", "first")))  # fmt: skip


@dataclass(frozen=True, eq=False)
class Shallow:
    """The box with huge tokens."""

    box: Box
    plane: Float[Array, "d k"]

    @property
    def width(self) -> int:
        return self.plane.shape[1]

    def size(self, order: int = 4) -> float:
        """The smallest size of an anchor, where it is asked at so many sizes."""
        return float(self.box.unit ** (-1.0 / (order + 1.0)))

    def points(self, rng: np.random.Generator, *shape: int) -> Float[Array, "*any k"]:
        found = rng.standard_normal((*shape, self.width))
        return self.onto_sphere(found)

    def onto_sphere(self, points: Float[Array, "*any k"]) -> Float[Array, "*any k"]:
        lengths = np.linalg.norm(points, axis=-1, keepdims=True)
        return np.asarray(points * np.sqrt(len(self.plane)) / lengths)

    def ask(
        self,
        context: Float[Array, "n m k"],
        anchors: Float[Array, "n k"],
        purpose: str,
        stretch: float = 1.0,
        order: int = 4,
    ) -> Terms:
        """The first two terms; `stretch`: of all sizes of the anchor, of which there are `order`
        (with two of them the second term is rough)."""
        shares = 2.0 ** np.arange(order)
        sizes = stretch * self.size(order) * shares
        last = self.box.representable(sizes[:, None, None] * (anchors @ self.plane.T))
        # streams of the context move by a rounding of themselves
        others = self.box.representable(self.box.unit ** (-5.0 / 6.0) * context @ self.plane.T)
        tokens = np.concatenate(
            [np.broadcast_to(others, (order, *others.shape)), last[:, :, None]], axis=2
        )
        answers = self.box.ask(tokens.reshape(-1, *tokens.shape[2:]), purpose)
        beside = answers.reshape(last.shape) - last
        table = np.vander(1.0 / shares, increasing=True)
        terms = np.linalg.solve(table, beside.reshape(order, -1)).reshape(last.shape)
        return Terms(context, anchors, terms[0], terms[1] * sizes[0])

    def ask_alone(self, anchors: Float[Array, "n k"], purpose: str, order: int = 4) -> Terms:
        return self.ask(np.zeros((len(anchors), 0, self.width)), anchors, purpose, order=order)


def measure_doubt(shallow: Shallow, rng: np.random.Generator) -> float:
    """Root mean square error of the limit, from how much other sizes change it."""
    context, anchors = shallow.points(rng, 4, 3), shallow.points(rng, 4)
    one, other = (shallow.ask(context, anchors, "sizes", stretch) for stretch in (1.0, 1.6))
    gap = float(np.sqrt(np.mean((one.limit - other.limit) ** 2)))
    scale = float(np.abs(one.limit).max())
    if not np.isfinite(gap) or gap > 1e-3 * scale:
        raise Unclear(
            "the answers beside huge tokens have no limit: this is no stack of pre-norm blocks "
            "with smooth activations"
        )
    return max(gap, 8.0 * shallow.size() * shallow.box.unit)
