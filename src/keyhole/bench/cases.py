"""The suites: which boxes are hidden, which learner opens them, and what the papers would do.

Every box is drawn from a seed by the generators of models/random. Sizes are small enough that a
suite runs in minutes; the figures of whole series are those of the scripts in benchmarks/.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import InvalidArgument, KeyholeError
from keyhole.learners.block import BlockLearner
from keyhole.learners.examples import FromExamples
from keyhole.learners.label_only import LabelOnly
from keyhole.learners.mlp import MlpLearner, ReluNetworkLearner
from keyhole.learners.multi_head import MultiHead
from keyhole.learners.output_layer import OutputLayerLearner
from keyhole.learners.published.rational_interpolation import find_logistic_terms
from keyhole.learners.published.theorem_6_1 import learn_as_published
from keyhole.learners.single_head import LowRank, SingleHead
from keyhole.learners.stack import StackLearner
from keyhole.learners.token_attention import TokenAttentionLearner
from keyhole.models.attention import Attention, Head
from keyhole.models.language_model import OutputLayer
from keyhole.models.mlp import Mlp
from keyhole.models.random import attention, block, stack, token_attention
from keyhole.models.relu_network import ReluNetwork
from keyhole.models.sign_attention import Coding, LabelledAttention
from keyhole.oracles.base import Oracle
from keyhole.oracles.language_model.open import open_language_model
from keyhole.oracles.open import open_oracle
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.degrade import Labels, Noisy
from keyhole.recovery import recover

Sequences = Callable[[np.random.Generator, int], Array]
Published = Callable[[Oracle, "Secret", int], tuple[int, Any, str]]  # queries, model, how it ended


@dataclass(frozen=True, eq=False)
class Secret:
    """A hidden model, the box that answers for it, and random queries of a natural size."""

    model: Any
    open: Callable[[int], Oracle]
    sequences: Sequences
    examples: tuple[Array, Array] | None = None  # where there is no box to ask


@dataclass(frozen=True, eq=False)
class Case:
    """Boxes of one kind and size, found where the relative error of the parameters is at most
    `solved`."""

    name: str
    draw: Callable[[int], Secret]
    learner: Any
    solved: float = 1e-6
    published: Mapping[str, Published] = field(default_factory=dict)
    budget: int | None = None
    labels: bool = False
    students: bool = True


@dataclass(frozen=True, eq=False)
class Growth:
    """How a figure of Keyhole's row grows with one of a case's sizes, and what theory says."""

    what: str
    sizes: tuple[float, ...]
    case: Callable[[Any], Case]
    theory: float  # exponent
    figure: str = "queries"  # or "parameters", the error


@dataclass(frozen=True, eq=False)
class Suite:
    """Cases, growth, and rows that are quoted from papers because their code does not run here."""

    title: str
    cases: tuple[Case, ...]
    growth: tuple[Growth, ...] = ()
    quoted: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Size:
    """Of a layer with scalar answers."""

    width: int = 12
    heads: int = 2

    def __post_init__(self) -> None:
        if self.width < 2 or self.heads < 1:
            raise InvalidArgument(f"width must be at least 2 and heads at least 1, got {self}")

    @property
    def unknowns(self) -> int:
        return self.heads * (self.width**2 + self.width)


# -- attention ------------------------------------------------------------------------------------


def hide(
    model: Any, sequences: Sequences, *, additive: float = 0.0, max_norm: float | None = None
) -> Secret:
    """The model behind a function, its answers noisy where `additive` is given."""

    def opened(seed: int) -> Oracle:
        box = open_oracle(model, width=model.width, max_norm=max_norm)
        return Noisy(box, additive, seed=seed) if additive else box

    def inside(rng: np.random.Generator, count: int) -> Array:
        tokens = sequences(rng, count)
        norms = np.linalg.norm(tokens, axis=-1, keepdims=True)
        return tokens if max_norm is None else tokens * np.minimum(1.0, max_norm / norms)

    return Secret(model, opened, inside)


def natural_sequences(model: Attention, length: int = 4) -> Sequences:
    """Random sequences of tokens at which scores are of order one."""
    size = model.natural_length() / np.sqrt(model.width)
    return lambda rng, count: size * rng.standard_normal((count, length, model.width))


def attention_case(name: str, learner: Any, solved: float = 1e-6, **options: Any) -> Case:
    """A layer of models/random, with the options of `attention` there, of `hide`, and a budget."""
    budget, published = options.pop("budget", None), options.pop("published", {})
    limits = {name: options.pop(name) for name in ("additive", "max_norm") if name in options}

    def draw(seed: int) -> Secret:
        model = attention(np.random.default_rng([seed, 3]), **options)
        return hide(model, natural_sequences(model), **limits)

    return Case(name, draw, learner, solved, published, budget)


def layer_case(width: int, heads: int, single: bool = False) -> Case:
    """A layer as frameworks have it: biases, vector answers, heads of rank width / heads."""

    def draw(seed: int) -> Secret:
        drawn = block(np.random.default_rng([seed, 3]), width, heads=heads, norm="none")
        model: Any = drawn.attention
        model = model.astype(np.float32) if single else model
        return hide(model, natural_sequences(model))

    kind = "float32" if single else "float64"
    return Case(f"d = {width}, H = {heads}, {kind}", draw, MultiHead(), 1e-3 if single else 1e-6)


def run_theorem_6_1(box: Oracle, secret: Secret, seed: int) -> tuple[int, Any, str]:
    """The algorithm is told the norm of the score, which it needs."""
    bound = float(np.linalg.norm(secret.model.heads[0].score, 2))
    width = secret.model.width
    return width * width + width, learn_as_published(box, bound).model, "as published"


def run_theorem_5_1(box: Oracle, secret: Secret, seed: int) -> tuple[int, Any, str]:
    found = recover(box, LowRank("convex"), seed=seed, throw=False, verify=False)
    return found.ledger.learning, found.model, found.outcome.name


def run_rational_interpolation(box: Oracle, secret: Secret, seed: int) -> tuple[int, Any, str]:
    """Log-odds of all heads from 2H numbers of copies, at d² pairs of directions. Granted: the
    number of heads, their values, and which log-odds belong to which head (the published method
    asks 4Hd² − 2H + 1 queries with that; these are counted)."""
    model, rng = secret.model, np.random.default_rng([seed, 5])
    heads, width = len(model.heads), model.width
    copies = np.arange(1, 2 * heads + 1)
    basis = np.linalg.qr(rng.standard_normal((width, width)))[0]
    total = np.sum([head.value for head in model.heads], axis=0)
    scores = np.zeros((heads, width, width))
    for i, probe in enumerate(2.0 * basis):
        for j, anchor in enumerate(basis):
            sequences = [np.vstack([np.tile(probe + anchor, (int(n), 1)), anchor]) for n in copies]
            answers = np.array([_ask_one(box, tokens) for tokens in sequences]) - anchor @ total
            try:
                odds = find_logistic_terms(copies.astype(float), answers, heads)[0]
            except KeyholeError:
                odds = np.zeros(heads)
            real = [probe @ head.score @ anchor for head in model.heads]
            scores[np.argsort(real), i, j] = odds
    found = [np.linalg.solve(2.0 * basis, table) @ np.linalg.inv(basis.T) for table in scores]
    members = [Head(s, None, head.value) for s, head in zip(found, model.heads, strict=True)]
    return 4 * heads * width**2 - 2 * heads + 1, Attention(members), "as published"


def _ask_one(box: Oracle, tokens: Array) -> float:
    return float(box.ask(QueryBatch.of(tokens[None], "bench"))[0])


def labels_case(width: int, bits: int) -> Case:
    coding = Coding()

    def draw(seed: int) -> Secret:
        model = attention(np.random.default_rng([seed, 3]), width)
        hidden = LabelledAttention(model, coding)

        def opened(seed: int) -> Oracle:
            return Labels(open_oracle(model, width=width), coding)

        return Secret(hidden, opened, natural_sequences(model))

    # the labels are asked until entries are known to 2^-bits of the largest
    return Case(
        f"d = {width}, {bits} bits", draw, LabelOnly(bits=bits), 2.0 ** (3 - bits), labels=True
    )


def examples_case(width: int, heads: int, tokens: int, ratio: float) -> Case:
    """`ratio` times as many examples as the floor, answers at the last position."""

    def draw(seed: int) -> Secret:
        rng = np.random.default_rng([seed, 3])
        members = [
            Head(score / np.linalg.norm(score), None, rng.standard_normal((width, width)))
            for score in rng.standard_normal((heads, width, width))
        ]
        model = Attention(members, np.zeros(width))
        sequences = natural_sequences(model, tokens)
        inputs = sequences(rng, int(np.ceil(ratio * 2 * heads * width)))
        return Secret(
            model, lambda seed: open_oracle(model, width=width), sequences, (inputs, model(inputs))
        )

    return Case(f"d = {width}, H = {heads}, {ratio:g} × floor", draw, FromExamples(), 1e-6)


# -- networks and blocks --------------------------------------------------------------------------


def network_case(width: int, neurons: int, activation: str, gated: bool = False) -> Case:
    """Vector answers of the tokens' width; linear part and offset unknown."""

    def draw(seed: int) -> Secret:
        rng = np.random.default_rng([seed, 3])
        inner, gate = rng.standard_normal((2, neurons, width)) / np.sqrt(width)
        bias, gate_bias = 0.5 * rng.standard_normal((2, neurons))
        outer = rng.standard_normal((width, neurons)) / np.sqrt(neurons)
        model: Any
        if activation == "relu":
            model = ReluNetwork(inner, bias, outer.T)
        else:
            model = Mlp(
                inner, bias, outer, activation=activation, offset=rng.standard_normal(width),
                linear=None if gated else rng.standard_normal((width, width)) / np.sqrt(width),
                gate=gate if gated else None, gate_bias=gate_bias if gated else None,
            )  # fmt: skip
        return hide(model, lambda rng, count: rng.standard_normal((count, 1, width)))

    learner = ReluNetworkLearner() if activation == "relu" else MlpLearner()
    kind = f"gated {activation}" if gated else activation
    return Case(f"{kind}, d = {width}, m = {neurons}", draw, learner)


def block_case(width: int, heads: int, neurons: int, norm: str) -> Case:
    def draw(seed: int) -> Secret:
        model = block(
            np.random.default_rng([seed, 3]), width, heads=heads, neurons=neurons, norm=norm
        )
        return hide(model, lambda rng, count: rng.standard_normal((count, 4, width)))

    parts = [f"H = {heads}"] * (heads > 0) + [f"m = {neurons}"] * (neurons > 0)
    return Case(f"{norm}-norm, d = {width}, {', '.join(parts)}", draw, BlockLearner())


def stack_case(width: int, heads: int, neurons: int, layers: int) -> Case:
    def draw(seed: int) -> Secret:
        model = stack(
            np.random.default_rng([seed, 3]), width, layers=layers, heads=heads, neurons=neurons
        )
        return hide(model, lambda rng, count: rng.standard_normal((count, 4, width)))

    name = f"L = {layers}, d = {width}, H = {heads}, m = {neurons}"
    return Case(name, draw, StackLearner())


# -- tokens ---------------------------------------------------------------------------------------


def token_attention_case(tokens: int, width: int, heads: int, tied: bool) -> Case:
    def draw(seed: int) -> Secret:
        rng = np.random.default_rng([seed, 3])
        model = token_attention(rng, tokens, width, heads, width // heads, tied=tied)
        return Secret(
            model,
            lambda seed: open_language_model(model, vocabulary=tokens, answers="logits"),
            lambda rng, count: rng.integers(tokens, size=(count, 4)),
        )

    name = f"attention, V = {tokens}, d = {width}, H = {heads}, {'tied' if tied else 'untied'}"
    return Case(name, draw, TokenAttentionLearner())


def output_layer_case(tokens: int, width: int) -> Case:
    """Hidden states of a random network behind an RMSNorm: only the output layer can be known."""

    def draw(seed: int) -> Secret:
        rng = np.random.default_rng([seed, 3])
        matrix = 0.3 * rng.standard_normal((tokens, width))
        embedding = rng.standard_normal((tokens, width))
        inner = rng.standard_normal((width, 4 * width)) / np.sqrt(width)
        outer = rng.standard_normal((4 * width, width)) / np.sqrt(4 * width)

        def answer(prompts: Array) -> Array:
            weights = np.linspace(0.5, 1.5, prompts.shape[1])[:, None]
            x = (embedding[prompts] * weights).sum(axis=1)
            u = x + np.tanh(x @ inner) @ outer
            return np.asarray(u / np.sqrt(np.mean(u**2, axis=1, keepdims=True)) @ matrix.T)

        return Secret(
            OutputLayer(matrix),
            lambda seed: open_language_model(answer, vocabulary=tokens, answers="logits"),
            lambda rng, count: rng.integers(tokens, size=(count, 8)),
        )

    name = f"output layer, V = {tokens}, h = {width}"
    published = {"SVD, largest gap": run_largest_gap}
    return Case(name, draw, OutputLayerLearner(), published=published, students=False, solved=1e-6)


def run_largest_gap(box: Oracle, secret: Secret, seed: int) -> tuple[int, Any, str]:
    """The published reading of the width: the largest gap between the logarithms of the singular
    values of as many answers as one expects to need."""
    count = secret.model.width + 64
    prompts = secret.sequences(np.random.default_rng([seed, 3]), count)
    answers = box.ask(QueryBatch.of(prompts[:, :, None].astype(np.float64), "bench"))
    values, right = np.linalg.svd(answers, full_matrices=False)[1:]
    rank = int(np.argmax(-np.diff(np.log(np.maximum(values, 1e-300))))) + 1
    return count, OutputLayer(right[:rank].T), f"width {rank}"


# -- the suites -----------------------------------------------------------------------------------

SUITES: dict[str, Suite] = {
    "single-head": Suite(
        "One head, scalar answers",
        tuple(
            attention_case(
                f"d = {width}",
                SingleHead(),
                width=width,
                published={"Theorem 6.1": run_theorem_6_1},
            )
            for width in (8, 16, 32)
        ),
        (
            Growth(
                "queries of one head, in d",
                (16, 32, 64, 128),
                lambda width: attention_case("", SingleHead(), width=width),
                2.0,
            ),
        ),
    ),
    "low-rank": Suite(
        "One head of low rank, rank unknown",
        tuple(
            attention_case(
                f"d = {width}, r = {rank}",
                LowRank(),
                width=width,
                rank=rank,
                published={"Theorem 5.1": run_theorem_5_1},
            )
            for width, rank in ((16, 2), (32, 2), (32, 4))
        ),
        (
            Growth(
                "queries at rank 2, in d",
                (64, 128, 256, 512),
                lambda width: attention_case("", LowRank(), width=width, rank=2),
                1.0,
            ),
            Growth(
                "queries at d = 512, in r",
                (4, 8, 16, 32),
                lambda rank: attention_case("", LowRank(), width=512, rank=rank),
                1.0,
            ),
        ),
    ),
    "noise": Suite(
        "One head behind noise of 1e-4, tokens no longer than 3, ten times the floor",
        tuple(
            attention_case(
                f"d = {width}",
                SingleHead(),
                1e-2,
                width=width,
                additive=1e-4,
                max_norm=3.0,
                budget=10 * (width * width + width),
                published={"Theorem 6.1": run_theorem_6_1},
            )
            for width in (6, 12)
        ),
        (
            Growth(
                "error of the parameters at d = 12, in the noise",
                (1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3),
                lambda noise: attention_case(
                    "",
                    SingleHead(),
                    width=12,
                    additive=noise,
                    max_norm=3.0,
                    budget=10 * (12 * 12 + 12),
                ),
                1.0,
                "parameters",
            ),
        ),
    ),
    "labels": Suite(
        "One head, labels only",
        (labels_case(4, 8), labels_case(4, 16), labels_case(8, 16)),
        (
            Growth(
                "labels to 16 bits, in d", (8, 16, 32), lambda width: labels_case(width, 16), 2.0
            ),
        ),
    ),
    "multi-head": Suite(
        "Several heads, scalar answers",
        tuple(
            attention_case(
                f"d = {width}, H = {heads}",
                MultiHead(),
                width=width,
                heads=heads,
                published={"rational interpolation": run_rational_interpolation},
            )
            for width, heads in ((6, 2), (12, 2), (12, 4))
        ),
        (
            Growth(
                "queries at d = 24, in H",
                (2, 4, 8),
                lambda heads: attention_case("", MultiHead(), width=24, heads=heads),
                1.0,
            ),
        ),
    ),
    "layers": Suite(
        "Layers with biases, vector answers",
        (layer_case(8, 2), layer_case(16, 4), layer_case(32, 4), layer_case(16, 4, single=True)),
        (
            Growth(
                "queries of layers with 4 heads, in d (unknowns per number in an answer: d)",
                (32, 64, 128),
                lambda width: layer_case(width, 4),
                1.0,
            ),
        ),
    ),
    "mlp": Suite(
        "Networks with one hidden layer, sizes and activation not given",
        (
            network_case(6, 12, "relu"),
            network_case(8, 32, "gelu"),
            network_case(8, 32, "silu"),
            network_case(32, 85, "silu", gated=True),
        ),
        (
            Growth(
                "queries of GELU networks at d = 16, in the neurons",
                (32, 64, 128),
                lambda neurons: network_case(16, neurons, "gelu"),
                1.0,
            ),
        ),
        quoted=(
            {
                "case": "relu, 100 000 parameters, several hidden layers",
                "method": "cryptanalytic extraction",
                "queries": 2**21.5,
                "quoted": "Carlini, Jagielski, Mironov 2020",
            },
            {
                "case": "gelu or silu, d = 64, m = 128",
                "method": "projected Hessians, mean cosine 0.92–0.94",
                "queries": 20193,
                "quoted": "the published method's figures; ours in benchmarks/mlp.py",
            },
        ),
    ),
    "block": Suite(
        "Transformer blocks and their sublayers",
        (
            block_case(8, 2, 0, "post"),
            block_case(8, 2, 0, "pre"),
            block_case(8, 0, 8, "post"),
            block_case(8, 2, 8, "pre"),
            block_case(8, 2, 8, "post"),
        ),
        (
            Growth(
                "queries of norm(x + attention(X)) with 2 heads, in d",
                (16, 32, 64),
                lambda width: block_case(width, 2, 0, "post"),
                1.0,
            ),
        ),
    ),
    "stack": Suite("Several pre-norm blocks at once", (stack_case(8, 2, 8, 2),)),
    "tokens": Suite(
        "Language-model interfaces",
        (
            output_layer_case(200, 24),
            output_layer_case(400, 64),
            token_attention_case(60, 8, 2, tied=False),
            token_attention_case(60, 8, 2, tied=True),
        ),
        (
            Growth(
                "queries for the width of the hidden state, in the width",
                (32, 64, 128),
                lambda width: output_layer_case(4 * width, width),
                1.0,
            ),
        ),
    ),
    "examples": Suite(
        "A layer from random examples, no queries",
        (examples_case(6, 2, 4, 4.0), examples_case(8, 2, 4, 4.0)),
    ),
}
