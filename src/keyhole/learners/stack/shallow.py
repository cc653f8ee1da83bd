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
            A vector that the box adds to the token at each place is one more constant beside the
            anchor, another one for every length.
            Behind a norm at the end (final_norm.py) the series is that of c_⊥ t / (t + c_∥): the
            terms lack their parts along the anchor, and c_1 comes with -c_0⊥ c_0∥.
Fails.      Where the answers are no such series: norms behind the residual, kinks at every size.
Source.     Richardson (1911) for the extrapolation; the rest is Keyhole's own.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.learners.block import Unclear
from keyhole.learners.stack.final_norm import unnorm
from keyhole.measurement.asker import Asker
from keyhole.models.norm import Norm


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


def repeat_terms(terms: Terms, count: int) -> Terms:
    return Terms(*(np.repeat(getattr(terms, name), count, axis=0)
                   for name in ("context", "anchors", "limit", "first")))  # fmt: skip


@dataclass(frozen=True, eq=False)
class Shallow:
    """The box with huge tokens."""

    box: Asker
    plane: Float[Array, "d k"]
    final: Norm | None = None
    positions: bool = False  # whether the box adds vectors to its tokens

    @property
    def width(self) -> int:
        return self.plane.shape[1]

    @property
    def numbers(self) -> int:
        """Numbers that a term tells."""
        return len(self.plane) if self.final is None else self.width - 1

    def size(self, order: int = 4) -> float:
        """The smallest size of an anchor, where it is asked at so many sizes."""
        return float(self.box.error ** (-1.0 / (order + 1.0)))

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
        others = self.box.representable(self.box.error ** (-5.0 / 6.0) * context @ self.plane.T)
        tokens = np.concatenate(
            [np.broadcast_to(others, (order, *others.shape)), last[:, :, None]], axis=2
        )
        answers = self.box(tokens.reshape(-1, *tokens.shape[2:]), purpose)
        answers = answers.reshape(last.shape)
        if self.final is None:
            beside = answers - last
        else:
            exact = last @ self.plane / sizes[:, None, None]
            beside = unnorm(answers, exact, sizes, self.final)
        table = np.vander(1.0 / shares, increasing=True)
        terms = np.linalg.solve(table, beside.reshape(order, -1)).reshape(last.shape)
        return Terms(context, anchors, terms[0], terms[1] * sizes[0])

    def show(self, anchors: Float[Array, "n k"], parts: Array) -> Array:
        """What a norm at the end shows of vectors (n, d, ...) beside these anchors: not their mean,
        where it is a LayerNorm, and nothing along the anchor. Without one, all of them."""
        if self.final is None:
            return parts
        kept = np.tensordot(parts, self.plane, axes=(1, 0))  # (n, ..., k)
        along = np.einsum("n...k,nk->n...", kept, anchors) / len(self.plane)
        kept = kept - np.einsum("n...,nk->n...k", along, anchors)
        return np.asarray(np.moveaxis(kept @ self.plane.T, -1, 1))

    def hidden(self, anchors: Float[Array, "n k"]) -> Float[Array, "n d"] | None:
        """Unit vectors along which terms beside these anchors are not shown, if there are any."""
        if self.final is None:
            return None
        return np.asarray(anchors @ self.plane.T / np.sqrt(len(self.plane)))

    def second_terms(self, terms: Terms, limit: Float[Array, "n d"]) -> Float[Array, "n d"]:
        """c_1 as far as it is shown, where the whole of c_0 is known."""
        if self.final is None:
            return terms.first
        along = np.einsum("nk,nk->n", limit @ self.plane, terms.anchors) / len(self.plane)
        return np.asarray(terms.first + along[:, None] * terms.limit)

    def ask_bare(
        self, context: Float[Array, "n m k"], anchors: Float[Array, "n k"], purpose: str
    ) -> Terms:
        """Each anchor with nothing beside it to see: alone or, where places matter, as far back as
        behind its context, among copies of itself."""
        if not self.positions:
            return self.ask_alone(anchors, purpose)
        return self.ask(np.broadcast_to(anchors[:, None], context.shape), anchors, purpose)

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
    return max(gap, 8.0 * shallow.size() * shallow.box.error)
