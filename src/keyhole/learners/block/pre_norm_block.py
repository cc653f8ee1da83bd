"""Attention and network, both behind norms: a = x_N + attention(norm(X)), y = a + mlp(norm(a)).

Statement.  A huge anchor freezes the network: with x_N = t a and a on the norm's sphere,
            y(X) - y([x_N]) = (I + L/t) (attention(X) - attention([x_N])) + O(1/t^2), L the same for
            all contexts. Tokens of the context are huge too: they cost no digits, since only
            their directions enter. All is in a basis of what the norm keeps (k numbers).
Queries.    1  contexts of three tokens before one anchor         -> heads and their M_h
            2  single tokens at two sizes, and huge ones          -> the offset of the attention
            3  single tokens t z                                  -> the network (learners/mlp)
            4  contexts of near tokens                            -> soft_contexts.py
            5  a small token of the context, a small stream       -> both epsilons
Algebra.    1: at one anchor a head is one key; given the keys, M_h is linear (variable projection).
            Heads come one at a time, until they explain the answers. 2: two tokens of one stream
            have one network. 3: the stream that is wanted has a token; what is wrong in M_h adds to
            the linear part of the network, and to the rest only by a 1/t-th. Then refinement.py.
            The anchor has two sizes, which take L out. In few digits ReLUs are found by a wide
            network (network/wide.py), since kinks would want more; activations that are nearly
            alike are told by what the refinement leaves.
Fails.      Heads that attend alike to every token.
Source.     Golub and Pereyra (1973) for variable projection; the rest is Keyhole's own.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq

from keyhole.arrays import Array, Float
from keyhole.errors import IllConditioned, NotIdentifiable, WrongFamily
from keyhole.fitting.attention_rows import Rows
from keyhole.fitting.levenberg_marquardt import (
    DescentEnd,
    DescentOptions,
    descend,
    measure_label_power,
)
from keyhole.learners.block.arcs import bends_smoothly
from keyhole.learners.block.box import Paid, Unclear
from keyhole.learners.block.direction_fit import SMOOTH, Directed, points_beside
from keyhole.learners.block.direction_fit import find_network as fit_to_directions
from keyhole.learners.block.pre_norm_mlp import find_kind, lift_network, share_of
from keyhole.learners.block.refinement import Pairs, settle_block
from keyhole.learners.block.relu_circles import Pool, SphereBox, find_neurons
from keyhole.learners.block.soft_contexts import find_scores
from keyhole.learners.block.wide_network import BENT, fit_wide, is_crowded, turn_neurons
from keyhole.learners.mlp import MlpLearner
from keyhole.measurement.asker import Asker, round_to_format
from keyhole.models.attention import Attention, Head
from keyhole.models.block import Block
from keyhole.models.mlp import Mlp, with_parts
from keyhole.models.norm import kept_plane
from keyhole.oracles.base import Domain, Oracle, Spec, Wrapper
from keyhole.oracles.noise import DETECTION, NoiseModel
from keyhole.oracles.queries import QueryBatch
from keyhole.stages.epsilon import epsilon_of_share, find_epsilon


@dataclass(frozen=True)
class AttentionOptions:
    """What a person might tune about the heads.

    context: tokens before the anchor at which heads are found. redundant: numbers of answers there
    per unknown. draws: random heads of which the best joins those found so far. steps: of its first
    fit. spare: answers beyond those that would just do.
    """

    context: int = 3
    redundant: float = 1.6
    draws: int = 3
    steps: int = 15
    spare: int = 3


ATTENTION_OFF = 20.0  # error of maps and offset together, in what the network adds to an answer
SMALL_STREAM = 0.1  # error of a small stream beside its size, at most
KINKS_APART = 1e-6  # error of the network's values up to which kinks of a circle are told apart


@dataclass(frozen=True)
class PreNormOptions:
    """What a person might tune.

    stream: size of the stream at which the network is asked: second derivatives want few roundings.
    circles: numbers that the
    norm keeps, from which kinks of a circle tell ReLUs faster than a fit does. frames: in which
    second derivatives are asked for, until one tells the network.
    """

    attention: AttentionOptions = AttentionOptions()
    stream: float = 10.0
    circles: int = 10
    frames: int = 4


# --- the frozen box -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Frozen:
    """The box with a huge anchor and huge tokens, in points of the norm's sphere."""

    box: Asker
    plane: Float[Array, "d k"]
    anchor_size: float
    unit: float  # error of an answer beside the residual, whose numbers are of order one

    @classmethod
    def measure(
        cls, box: Asker, plane: Float[Array, "d k"], rng: np.random.Generator, looks: int = 4
    ) -> "Frozen":
        """With the anchor whose answers differ least from those with one twice as huge, from that
        size on at which rounding and the curvature of a smooth network are alike: kinks want a
        larger one. The difference is the error."""
        frozen = cls(box, plane, box.error ** (-1.0 / 4.0), np.inf)
        context, anchor = frozen.points(rng, looks)[:, None], frozen.points(rng, 1)

        def changes(one: Frozen) -> Float[Array, "n d"]:
            alone = one.ask(context[:1, :0], anchor, "heads")
            return one.ask(context, np.repeat(anchor, looks, axis=0), "heads") - alone

        change = changes(frozen)
        while True:
            larger = replace(frozen, anchor_size=2.0 * frozen.anchor_size)
            after = changes(larger)
            # two sizes put together round sqrt((2 * 2)^2 + 1), or about 4, times as much
            rounding = 4.0 * box.error * frozen.anchor_size
            error = max(rounding, float(np.sqrt(np.mean((after - change) ** 2))))
            if not error < frozen.unit:
                return replace(frozen, anchor_size=frozen.anchor_size / 2.0)
            frozen, change = replace(larger, unit=error), after

    @property
    def doubt(self) -> float:
        """Part of the network that stays in an answer beside the residual."""
        return max(self.anchor_size**-2.0, self.unit)

    @property
    def far_stream(self) -> float:
        """Size of a stream beside which the error of the attention, which falls as one over it, and
        rounding are alike."""
        return float(np.sqrt(ATTENTION_OFF * self.doubt / self.box.error))

    @property
    def width(self) -> int:
        return self.plane.shape[1]

    def points(self, rng: np.random.Generator, count: int) -> Float[Array, "n k"]:
        found = rng.standard_normal((count, self.width))
        return np.asarray(found * np.sqrt(len(self.plane)) / norms(found))

    def ask(
        self, context: Float[Array, "n length k"], anchors: Float[Array, "n k"], purpose: str
    ) -> Float[Array, "n d"]:
        """Answers without the residual, with anchors of two sizes, which take out what falls as one
        over it: the slope of the network."""
        others = self.box.representable(self.box.error ** (-3.0 / 8.0) * context @ self.plane.T)
        found = []
        for size in (self.anchor_size, 2.0 * self.anchor_size):
            last = self.box.representable(size * anchors @ self.plane.T)
            tokens = np.concatenate([others, last[:, None]], axis=1)
            found.append(self.box(tokens, purpose) - last)
        return np.asarray(2.0 * found[1] - found[0])


def norms(rows: Float[Array, "*any d"]) -> Float[Array, "*any 1"]:
    return np.asarray(np.linalg.norm(rows, axis=-1, keepdims=True))


# --- 1: heads and their value maps ----------------------------------------------------------------


def find_maps(
    frozen: Frozen, options: AttentionOptions, rng: np.random.Generator
) -> Float[Array, "h d k"]:
    """M_h of all heads, from contexts before one anchor: heads come one at a time, until they
    explain the answers; raises Unclear."""
    anchor = frozen.points(rng, 1)[0]
    alone = frozen.ask(np.zeros((1, 0, frozen.width)), anchor[None], "heads")[0]
    target = DETECTION * frozen.unit
    rows: Rows | None = None
    keys = np.zeros((1, 0, frozen.width))
    for heads in range(1, len(alone) + 1):
        rows = ask_contexts(frozen, anchor, alone, heads, rows, options, rng)
        # squares relative to those of the answers, as a descent counts them
        enough = target**2 * rows.targets.size / measure_label_power(rows)
        if enough > 1.0:
            raise Unclear("no head changes the answers")
        brief = DescentOptions(iterations=options.steps, finished=0.01 * enough)
        trials = []
        for _ in range(options.draws):
            key = rng.standard_normal((1, 1, frozen.width)) / np.sqrt(frozen.width)
            start = np.concatenate([keys, rng.uniform(0.3, 2.0) * key], axis=1)
            trials.append(descend(rows, start, brief))
        best = min(trials, key=lambda trial: trial.relative)
        best = descend(rows, best.at.theta, replace(brief, iterations=10 * options.steps))
        keys = best.at.theta
        if best.relative < enough:
            best = drop_heads(rows, best, enough, brief)
            found = best.at.values.reshape(-1, frozen.width, len(alone))
            return np.asarray(found.transpose(0, 2, 1))
    raise Unclear("no number of heads explains the answers at one anchor")


def ask_contexts(
    frozen: Frozen,
    anchor: Float[Array, " k"],
    alone: Float[Array, " d"],
    heads: int,
    known: Rows | None,
    options: AttentionOptions,
    rng: np.random.Generator,
) -> Rows:
    """Random contexts before the anchor and what they change, those that are known among them: a
    few numbers for each unknown of so many heads."""
    outputs, k = len(alone), frozen.width
    count = int(options.redundant * (heads * k * (outputs + 1) / outputs + 1)) + options.spare
    longest = frozen.box.oracle.spec.domain.max_length
    length = options.context if longest is None else min(options.context, longest - 1)
    fresh = count if known is None else count - len(known.tokens)
    context = frozen.points(rng, fresh * length).reshape(fresh, length, k)
    anchors = np.tile(anchor, (fresh, 1))
    change = frozen.ask(context, anchors, "heads") - alone
    tokens = np.concatenate([context, anchors[:, None]], axis=1)
    targets = change[:, None]
    if known is not None:
        tokens = np.concatenate([known.tokens, tokens])
        targets = np.concatenate([known.targets, targets])
    # the key at one anchor is a constant: that of an anchor of one number, one
    ones = np.ones((count, 1, 1))
    return Rows(ones, tokens, None, ones[:, :, 0], targets, offset=True)


def drop_heads(rows: Rows, best: DescentEnd, enough: float, options: DescentOptions) -> DescentEnd:
    """Heads without which the others still explain the answers leave: a descent that had ended
    elsewhere may have needed one more than there are."""
    heads = best.at.theta.shape[1]
    for h in range(heads if heads > 1 else 0):
        fewer = descend(rows, np.delete(best.at.theta, h, axis=1), options)
        if fewer.relative < enough:
            return drop_heads(rows, fewer, enough, options)
    return best


# --- 2: the offset --------------------------------------------------------------------------------


def find_offset(
    frozen: Frozen, whole: Float[Array, "d k"], rng: np.random.Generator
) -> Float[Array, " d"]:
    """What attention adds to every token, as far as the second norm sees it. A token t z has the
    stream t z + M z + off: the network gives what it gives to a huge token along this stream. The
    offset for which it does is found by Gauss-Newton steps, with derivatives along the sphere that
    are measured once."""
    box, plane = frozen.box, frozen.plane
    step = frozen.unit ** (1.0 / 3.0)  # of differences both ways
    points = frozen.points(rng, 4)
    slopes = []
    for point in points:
        tangent = np.linalg.svd(point[None])[2][1:]  # directions along the sphere
        ahead = np.cos(step) * point + np.sin(step) * np.linalg.norm(point) * tangent
        behind = np.cos(step) * point - np.sin(step) * np.linalg.norm(point) * tangent
        moved = network_beside(frozen, whole, ahead) - network_beside(frozen, whole, behind)
        slope = moved / (2.0 * np.sin(step) * np.linalg.norm(point))
        slopes.append(slope.T @ tangent)
    table = np.concatenate(slopes)
    found = np.zeros(frozen.width)
    # the shorter the token, the more the offset turns it
    for size in (box.error ** (-1.0 / 5.0), box.error ** (-1.0 / 10.0)):
        tokens = box.representable(size * points @ plane.T)
        seen = box(tokens[:, None], "offset") - tokens - points @ whole.T
        for _ in range(3):
            stream = (tokens + points @ whole.T) @ plane + found
            turned = stream * np.sqrt(len(plane)) / norms(stream)
            rest = seen - network_beside(frozen, whole, turned)
            change, *_ = np.linalg.lstsq(table, size * rest.ravel(), rcond=None)
            found = found + change
    return np.asarray(plane @ found)


def network_beside(
    frozen: Frozen, whole: Float[Array, "d k"], points: Float[Array, "n k"]
) -> Float[Array, "n d"]:
    """What the network gives at points of the sphere, and the offset."""
    none = np.zeros((len(points), 0, frozen.width))
    return np.asarray(frozen.ask(none, points, "offset") - points @ whole.T)


# --- 3: the network -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class BehindAttention(Wrapper):
    """What the network adds to a stream of this size, on points of the norm's sphere: the token
    that has this stream is found by iteration. `doubt`: of the attention. `noise`: of the box."""

    inner: Oracle
    known: Block
    plane: Float[Array, "d k"]
    size: float
    doubt: float
    noise: NoiseModel

    @property
    def spec(self) -> Spec:  # type: ignore[override]
        width, kept = self.plane.shape
        known = self.inner.spec
        sphere = Domain(max_length=known.domain.max_length, sphere=float(np.sqrt(width)))
        # what the attention is wrong by is smooth: only its size is told. Answers are small beside
        # the stream, whose size is that of the rounding
        noise = NoiseModel(self.unit, additive=self.doubt)
        return replace(known, width=kept, outputs=width, domain=sphere, precision=noise)

    @property
    def unit(self) -> float:
        """Rounding of an answer, whose numbers are of order one."""
        return max(self.noise.relative, self.noise.error_floor) * self.size

    def ask(self, queries: QueryBatch) -> Array:
        stream = self.size * queries.tokens()[:, -1] @ self.plane.T
        tokens = stream - attended(self.known, stream)
        for _ in range(60):
            moved = stream - attended(self.known, tokens)
            if np.abs(moved - tokens).max() <= 2.0**-52 * self.size:
                break
            tokens = moved
        tokens = moved
        tokens = round_to_format(tokens, self.noise.token_roundoff)  # as the box sees them
        stream = tokens + attended(self.known, tokens)  # to the last digit
        answers = np.asarray(self.inner.ask(QueryBatch.of(tokens[:, None], queries.purpose)))
        return np.asarray((answers.astype(np.float64) - stream).astype(answers.dtype))


def attended(known: Block, tokens: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """What attention adds to single tokens."""
    assert known.attention is not None
    return known.attention(known.norms[0](tokens)[:, None])


def behind_attention(frozen: Frozen, known: Block, size: float) -> BehindAttention:
    doubt = ATTENTION_OFF * frozen.doubt / size
    return BehindAttention(frozen.box.oracle, known, frozen.plane, size, doubt, frozen.box.noise)


def find_network(
    frozen: Frozen, known: Block, options: PreNormOptions, rng: np.random.Generator
) -> Mlp:
    """The network on normalised streams; its linear part is zero. In narrow blocks few neurons are
    looked for first: second derivatives tell them, where many need a fit to random points."""
    oracle = behind_attention(frozen, known, options.stream)
    sharp = behind_attention(frozen, known, frozen.far_stream)
    if has_kinks(oracle, rng):
        if sharp.doubt > KINKS_APART:
            return turn_neurons(fit_wide(oracle, ("relu",), oracle.unit, rng))
        if frozen.width >= options.circles:
            try:
                return turn_neurons(find_relus(sharp, frozen.box.error, rng))
            except Unclear:
                pass  # the fit may still find them
        return turn_neurons(fit_network(sharp, ("relu",), rng))
    narrow = frozen.width < 12
    if not narrow and is_crowded(oracle.spec.width):
        try:
            return turn_neurons(fit_wide(oracle, BENT, oracle.unit, rng))
        except Unclear:
            pass  # second derivatives may still tell it
    learner = MlpLearner(neurons=frozen.width + 1) if narrow else MlpLearner()
    # second derivatives in another frame are cheaper than redundant neurons, which come last
    quick = replace(learner, options=replace(learner.options, small=0))
    reason = ""
    for one in (learner,) if narrow else (quick,) * (options.frames - 1) + (learner,):
        try:
            return turn_neurons(one.learn(oracle, rng).model)
        except (
            Unclear, WrongFamily, IllConditioned, NotIdentifiable, np.linalg.LinAlgError,
        ) as failed:  # fmt: skip
            reason = str(failed)
    if narrow:
        return turn_neurons(fit_network(sharp, SMOOTH, rng))
    raise Unclear(f"the network behind the attention was not found: {reason}")


def has_kinks(oracle: BehindAttention, rng: np.random.Generator) -> bool:
    """Whether the network is affine between kinks: near points of a great circle then have answers
    a + b cos + c sin."""

    def ask(points: Float[Array, "n k"]) -> Float[Array, "n d"]:
        tokens = np.sqrt(len(oracle.plane)) * points[:, None]
        return np.asarray(oracle.ask(QueryBatch.of(tokens, "network")), dtype=np.float64)

    return not bends_smoothly(ask, oracle.spec.width, oracle.unit, rng)


@dataclass(eq=False)
class ValuesOnSphere:
    """Answers F of the network at points of the sphere, as directions of (F, size): a network, too,
    whose last number is constant and tells the scale."""

    oracle: BehindAttention
    rng: np.random.Generator
    points: Float[Array, "n k"]
    values: Float[Array, "n d"]
    size: float = 1.0
    drawn: int = 0

    @property
    def radius(self) -> float:
        return float(np.sqrt(len(self.oracle.plane)))

    def grow(self, count: int) -> None:
        """So many random points, at least."""
        more = self.rng.standard_normal((max(0, count - self.drawn), self.points.shape[1]))
        self.drawn = max(count, self.drawn)
        self.add(more * (self.radius / norms(more)))

    def grow_beside(self, net: Directed) -> None:
        """More points on that side of a neuron's hyperplane where there are few."""
        self.add(points_beside(net, self.points, self.radius, self.rng))

    def add(self, points: Float[Array, "more k"]) -> None:
        if not len(points):
            return
        values = self.oracle.ask(QueryBatch.of(points[:, None], "network"))
        self.points = np.concatenate([self.points, points])
        self.values = np.concatenate([self.values, values])

    def read(self, known: Directed | None) -> tuple[Float[Array, "n k"], Float[Array, "n p"]]:
        """All points and directions."""
        lifted = np.column_stack([self.values, np.full(len(self.values), self.size)])
        return self.points, np.asarray(lifted / norms(lifted))


def find_relus(oracle: BehindAttention, unit: float, rng: np.random.Generator) -> Mlp:
    """A network of ReLUs by the kinks of a great circle; raises Unclear. `unit`: relative rounding
    of the box."""
    width, outputs = oracle.spec.width, len(oracle.plane)

    def ask(points: Float[Array, "n k"]) -> Float[Array, "n d"]:
        answers = oracle.ask(QueryBatch.of(points[:, None], "network"))
        return np.asarray(answers, dtype=np.float64)

    radius = float(np.sqrt(outputs))
    box = SphereBox(ask, width, radius, 4.0 * unit * oracle.size, lengths=True, bend=oracle.doubt)
    pool = Pool(np.zeros((0, width)), np.zeros((0, outputs)))

    def draw(count: int) -> Pool:
        nonlocal pool
        points = rng.standard_normal((max(0, count // 2 - len(pool.points)), width))
        points *= radius / norms(points)
        pool = pool.joined(points, ask(points)) if len(points) else pool
        return pool

    net = find_neurons(box, draw, rng)
    return Mlp(
        net.rows[:, :-1],
        net.rows[:, -1],
        net.outer,
        activation="relu",
        linear=net.affine[:, :-1],
        offset=net.affine[:, -1],
    )


def fit_network(
    oracle: BehindAttention, activations: tuple[str, ...], rng: np.random.Generator
) -> Mlp:
    """A network on the sphere, by direction_fit.py; its linear part is what it is."""
    width, outputs = oracle.spec.width, len(oracle.plane)
    values = ValuesOnSphere(oracle, rng, np.zeros((0, width)), np.zeros((0, outputs)))
    values.grow(4 * outputs)
    values.size = float(np.sqrt(np.mean(np.sum(values.values**2, axis=1))))
    start = np.zeros((outputs + 1, width + 1))
    start[:-1, -1], start[-1, -1] = values.values.mean(axis=0), values.size
    net = fit_to_directions(values, start, activations, max(30.0 * oracle.doubt, 1e-9), rng)
    scale = net.affine[-1, -1] / values.size
    return Mlp(
        net.rows[:, :-1],
        net.rows[:, -1],
        net.outer[:-1] / scale,
        activation=net.activation,
        linear=net.affine[:-1, :-1] / scale,
        offset=net.affine[:-1, -1] / scale,
    )


# --- 4: the epsilons ------------------------------------------------------------------------------


def find_epsilons(frozen: Frozen, known: Block, rng: np.random.Generator) -> tuple[float, float]:
    """Of the norm of the tokens, from a small token of the context; of that of the stream, from
    a token whose stream is small."""
    layer, network = known.attention, known.mlp
    assert layer is not None
    assert network is not None
    box, plane, d = frozen.box, frozen.plane, len(frozen.plane)
    anchor, other = frozen.points(rng, 2)
    alone = frozen.ask(np.zeros((1, 0, frozen.width)), anchor[None], "epsilon")[0]
    last = box.representable(frozen.anchor_size * plane @ anchor)

    def change(share: Float[Array, " n"]) -> Float[Array, "n d"]:
        """What a token of this share of the sphere's radius adds."""
        pair = np.stack([share[:, None] * other, np.tile(anchor, (len(share), 1))], axis=1)
        return np.asarray(layer(pair @ plane.T) - layer(anchor[None, None] @ plane.T))

    def first(size: float) -> float:
        tokens = box.representable(np.array([size * plane @ other, last]))
        seen = box(tokens[None], "epsilon")[0] - last - alone
        return epsilon_of_share(share_of(change, seen), size)

    small = seen_epsilon(first)
    if frozen.doubt * np.sqrt(d) > SMALL_STREAM * np.sqrt(small):
        return small, small  # no stream is known to be small enough: the refinement begins alike
    whole = sum((head.value.T for head in layer.heads), np.zeros((d, d)))

    def second(size: float) -> float:
        heading = frozen.points(rng, 1)[0]
        start = plane.T @ layer.offset - size * heading
        token = plane @ token_of(plane.T @ whole @ plane, start, small, d)
        point = plane.T @ token
        added = layer.offset + whole @ (plane @ point / np.sqrt(point @ point / d + small))
        answer = box(box.representable(token)[None, None], "epsilon")[0] - token - added
        share = share_of(lambda share: network(share[:, None] * (plane @ heading)), answer)
        return epsilon_of_share(share, size)

    return small, seen_epsilon(second)


def seen_epsilon(look: Callable[[float], float]) -> float:
    """The epsilon that shows at some size; raises Unclear."""
    found = find_epsilon(look)
    if found is None:
        raise Unclear("epsilon is too small or too large to be seen")
    return found


def token_of(
    whole: Float[Array, "k k"], offset: Float[Array, " k"], epsilon: float, width: int
) -> Float[Array, " k"]:
    """The token x, in the norm's plane, with x + whole n(x) + offset = 0: x = c n, where
    (c + whole) n = -offset and |n|^2 = width (1 - epsilon / c^2)."""
    least = np.sqrt(epsilon)

    def point(c: float) -> Array:
        return np.linalg.solve(c * np.eye(len(whole)) + whole, -offset)

    def excess(c: float) -> float:
        n = point(c)
        return float(n @ n / width - (1.0 - epsilon / c**2))

    high = least + 10.0 * (np.linalg.norm(offset) + np.linalg.norm(whole))
    c = brentq(excess, least * (1.0 + 1e-9), high, xtol=1e-300, rtol=1e-15)
    return np.asarray(c * point(c))


# --- all of it ------------------------------------------------------------------------------------


def bends(box: Asker, rng: np.random.Generator) -> bool:
    """Whether a single token's answer beside the residual bends: attention alone adds an affine
    function of the normalised token, whose values at x and -x have one sum for all x."""
    points = rng.standard_normal((2, box.width))
    tokens = box.representable(np.concatenate([points, -points]))
    beside = box(tokens[:, None], "network") - tokens
    sums = beside[:2] + beside[2:]
    size = float(np.abs(tokens).max() * box.error + 1e-6 * np.abs(beside).max())
    return bool(np.abs(sums[0] - sums[1]).max() > 1e2 * size)


def find_pre_norm_block(
    box: Asker, rng: np.random.Generator, options: PreNormOptions | None = None
) -> tuple[list[Block], Pairs]:
    """The block to a few digits, and the queries and answers that refine it; raises Unclear."""
    options = PreNormOptions() if options is None else options
    paid = Paid(box.oracle, longest=1)
    box = replace(box, oracle=paid)
    kind = find_kind(box, rng)
    plane = kept_plane(box.width, kind)
    frozen = Frozen.measure(box, plane, rng)
    maps = find_maps(frozen, options.attention, rng)
    offset = find_offset(frozen, maps.sum(axis=0), rng)
    none = np.zeros((box.width, 1))
    heads = [Head((none, none.T), none[:, 0], plane @ part.T) for part in maps]
    known = Block(Attention(heads, offset), None, norm="pre", kind=kind)
    network = find_network(frozen, known, options, rng)
    wide = lift_network(network, plane, 1.0)
    singles = paid.singles_apart(1e5)
    wanted = 1.3 * wide.neurons * (plane.shape[1] + 1 + box.width) / box.width
    more = box.representable(
        rng.standard_normal((max(8, int(wanted - len(singles[0]) / 2)), 1, box.width))
    )
    pairs = [singles, (more, box(more, "refinement"))]
    single = Block(known.attention, wide, norm="pre", kind=kind)
    single = settle_block(single, pairs)
    block, contexts = find_scores(box, single, options.stream, rng)
    epsilons = find_epsilons(frozen, block, rng)
    small = box.representable(3.0 * epsilons[0] ** 0.5 * rng.standard_normal((8, 2, box.width)))
    pairs = [*pairs, *contexts, (small, box(small, "refinement"))]
    # activations that few digits do not tell apart
    alike = ("gelu", "gelu_tanh")
    names = alike if wide.activation in alike else (wide.activation,)
    assert block.mlp is not None
    networks = [with_parts(block.mlp, activation=name) for name in names]
    return [
        Block(block.attention, one, norm="pre", kind=kind, epsilons=epsilons) for one in networks
    ], pairs
