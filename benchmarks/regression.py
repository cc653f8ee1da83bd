"""Fixed boxes of every family and number format: outcome, queries, error and time of each.

    python benchmarks/regression.py [--out table.json] [--processes 2] [--only SUBSTRING]
    python benchmarks/regression.py --compare before.json after.json

The table of two versions of the library shows what a change inside it did to what it finds. The
script uses public names alone and computes the answers of its boxes itself, with NumPy, so that it
runs unchanged beside either version. Names read family/box/learner seed; boxes below `impostor/`
belong to no family, or not to the one claimed, and must be rejected. Queries are those that learn:
how many verify is the caller's choice. Seconds are CPU time.
"""

import argparse
import json
import math
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from scipy.special import erf

import keyhole

SEEDS = (0, 1)  # of the learner, for every box
SECONDS_PER_BOX = 120.0  # CPU time after which a run is given up
QUERIES_APART = 0.01  # relative difference in queries that is reported
ERROR_FACTOR = 2.0  # an error this many times larger is worse
ERROR_FLOOR = 1e-13  # errors below this are rounding, and equal
OUT = Path("build/regression.json")
# from the best ending of an honest box to the worst; of an impostor's, REJECTED is the best
HONEST = (
    ("RECOVERED",),
    ("UNVERIFIED",),
    ("ILL_CONDITIONED", "NOT_IDENTIFIABLE", "BUDGET_EXHAUSTED"),
    ("REJECTED",),
)

Function = Callable[[np.ndarray], np.ndarray]


class OutOfTime(BaseException):
    """The box took more than its share. Not an Exception: nothing on the way may handle it."""


@dataclass(frozen=True)
class Case:
    """One run. `build` makes the box anew (some remember what they were asked) and the truth."""

    name: str
    build: Callable[[], tuple[Any, Any]]
    learner: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    def run(self) -> tuple[Any, Any]:
        """The recovery, and the truth (None: there is none)."""
        box, truth = self.build()
        found = keyhole.recover(box, self.learner(), seed=self.seed, throw=False, **self.options)
        return found, truth


class Examples(Case):
    """A run from labelled examples: the box is a pair (tokens, labels)."""

    def run(self) -> tuple[Any, Any]:
        (tokens, labels), truth = self.build()
        return keyhole.learn(tokens, labels, self.learner(), seed=self.seed, throw=False), truth


# -- the models behind the boxes ---------------------------------------------------------------


class Part(NamedTuple):
    """One head, multiplied out."""

    score: np.ndarray
    key_bias: np.ndarray
    value: np.ndarray


@dataclass(frozen=True, eq=False)
class Layer:
    """Attention heads and an offset, as NumPy arrays."""

    parts: tuple[Part, ...]
    offset: np.ndarray

    @property
    def truth(self) -> Any:
        return keyhole.Attention([keyhole.Head(*part) for part in self.parts], self.offset)

    def rounded(self, shorten: Function) -> "Layer":
        parts = tuple(Part(*(shorten(array) for array in part)) for part in self.parts)
        return Layer(parts, shorten(self.offset))

    def scores(self, tokens: np.ndarray) -> list[np.ndarray]:
        """Of every token to the last, per head."""
        last = tokens[:, -1]
        keys = (last @ part.score.T + part.key_bias for part in self.parts)
        return [(tokens @ key[:, :, None])[:, :, 0] for key in keys]

    def __call__(self, tokens: np.ndarray, change: Function = lambda scores: scores) -> np.ndarray:
        tokens = tokens.astype(self.offset.dtype, copy=False)
        answer = np.zeros(len(tokens), tokens.dtype) + self.offset[..., None]
        for part, scores in zip(self.parts, self.scores(tokens), strict=True):
            mean = (softmax(change(scores))[:, None] @ tokens)[:, 0]
            answer = answer + (mean @ part.value).T
        return np.ascontiguousarray(answer.T)


def softmax(scores: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return weights / weights.sum(axis=-1, keepdims=True)


def draw(
    seed: int,
    width: int,
    outputs: int | None = None,
    *,
    heads: int = 1,
    rank: int | None = None,
    value_rank: int | None = None,
    scale: float = 1.0,
    value_scale: float = 1.0,
    bias: str = "",
) -> Layer:
    """Random heads; `bias` holds "key", "offset", both or neither."""
    rng = np.random.default_rng([seed, width, heads])
    shape = () if outputs is None else (outputs,)
    parts = []
    for _ in range(heads):
        if rank is None:
            score = rng.standard_normal((width, width))
        else:
            left, right = rng.standard_normal((width, rank)), rng.standard_normal((rank, width))
            score = left @ right / np.sqrt(rank)
        if value_rank is None:
            value = rng.standard_normal((width, *shape))
        else:
            inner = rng.standard_normal((width, value_rank))
            value = inner @ rng.standard_normal((value_rank, *shape)) / np.sqrt(value_rank)
        key_bias = scale * rng.standard_normal(width) * ("key" in bias)
        parts.append(Part(scale * score / np.sqrt(width), key_bias, value_scale * value))
    offset = value_scale * rng.standard_normal(shape) * ("offset" in bias)
    return Layer(tuple(parts), np.asarray(offset))


def multihead_attention(seed: int, width: int, heads: int, *, bias: bool = True) -> Layer:
    """What torch.nn.MultiheadAttention computes, as products of its maps."""
    rng, inner = np.random.default_rng([seed, width, heads, 1]), width // heads
    maps = rng.uniform(-1, 1, (4, width, width)) * np.sqrt(6 / (4 * width))
    q, k, v, out = maps
    bq, _, bv, bo = 0.5 * rng.standard_normal((4, width)) * bias
    parts = []
    for h in range(heads):
        s = slice(h * inner, (h + 1) * inner)
        score, key_bias = k[s].T @ q[s], k[s].T @ bq[s]
        value = v[s].T @ out[:, s].T
        parts.append(Part(score / np.sqrt(inner), key_bias / np.sqrt(inner), value))
    return Layer(tuple(parts), bo + out @ bv)


@dataclass(frozen=True, eq=False)
class Network:
    """Hidden ReLUs with a linear skip."""

    weight: np.ndarray
    bias: np.ndarray
    output: np.ndarray
    skip: np.ndarray

    @property
    def truth(self) -> Any:
        return keyhole.ReluNetwork(self.weight, self.bias, self.output, self.skip)

    def rounded(self, shorten: Function) -> "Network":
        return Network(*(shorten(array) for array in vars(self).values()))

    def __call__(self, tokens: np.ndarray, activation: Function | None = None) -> np.ndarray:
        return self.at(tokens[:, -1].astype(self.weight.dtype, copy=False), activation)

    def at(self, points: np.ndarray, activation: Function | None = None) -> np.ndarray:
        hidden = points @ self.weight.T + self.bias
        hidden = np.maximum(hidden, 0) if activation is None else activation(hidden)
        return hidden @ self.output + points @ self.skip


def draw_network(
    seed: int,
    width: int,
    neurons: int,
    outputs: int | None = None,
    *,
    bias: bool = True,
    skip: bool = False,
) -> Network:
    rng = np.random.default_rng([seed, width, neurons])
    shape = () if outputs is None else (outputs,)
    return Network(
        rng.standard_normal((neurons, width)) / np.sqrt(width),
        0.5 * rng.standard_normal(neurons) * bias,
        rng.standard_normal((neurons, *shape)) / np.sqrt(neurons),
        rng.standard_normal((width, *shape)) * skip,
    )


@dataclass(frozen=True, eq=False)
class Block:
    """One head, then a network; with a `value` map the query is added before the network."""

    score: np.ndarray
    key_bias: np.ndarray
    network: Network
    value: np.ndarray | None = None

    @property
    def truth(self) -> Any:
        net = self.network
        if self.value is None:
            return keyhole.TransformerModel(self.score, self.key_bias, net.truth)
        seen = net.weight @ self.value
        both = keyhole.ReluNetwork(net.weight + seen, net.bias, net.output)
        return keyhole.TransformerModel(self.score, self.key_bias, both, seen)

    def rounded(self, shorten: Function) -> "Block":
        value = None if self.value is None else shorten(self.value)
        net = self.network.rounded(shorten)
        return Block(shorten(self.score), shorten(self.key_bias), net, value)

    def mean(self, tokens: np.ndarray) -> np.ndarray:
        keys = tokens[:, -1] @ self.score.T + self.key_bias
        return (softmax((tokens @ keys[:, :, None])[:, :, 0])[:, None] @ tokens)[:, 0]

    def __call__(self, tokens: np.ndarray, activation: Function | None = None) -> np.ndarray:
        tokens = tokens.astype(self.score.dtype, copy=False)
        mean = self.mean(tokens)
        entering = mean if self.value is None else tokens[:, -1] + mean @ self.value.T
        return self.network.at(entering, activation)


def draw_block(
    seed: int,
    width: int,
    neurons: int,
    outputs: int | None = None,
    *,
    bias: bool = True,
    key_bias: bool = False,
    residual: bool = False,
) -> Block:
    rng = np.random.default_rng([seed, width, neurons, 2])
    score = rng.standard_normal((width, width)) / np.sqrt(width)
    lean = 0.5 * rng.standard_normal(width) * key_bias
    value = rng.standard_normal((width, width)) / np.sqrt(width) if residual else None
    return Block(score, lean, draw_network(seed, width, neurons, outputs, bias=bias), value)


# -- number formats ----------------------------------------------------------------------------


def round_bits(numbers: np.ndarray, bits: int) -> np.ndarray:
    mantissa, exponent = np.frexp(numbers)
    return np.asarray(np.ldexp(np.round(np.ldexp(mantissa, bits)), exponent - bits))


def round_digits(numbers: np.ndarray, digits: int) -> np.ndarray:
    """To so many significant decimal digits, as a program prints them."""
    flat = [float(f"{number:.{digits - 1}e}") for number in np.ravel(numbers)]
    return np.reshape(flat, np.shape(numbers))


def single(numbers: np.ndarray) -> np.ndarray:
    return np.asarray(numbers, np.float32)


def brain(numbers: np.ndarray) -> np.ndarray:
    return round_bits(single(numbers), 8)


def half(numbers: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.asarray(numbers, np.float16)


def answering(model: Any, form: str) -> tuple[Function, Any]:
    """The box that the model is in this number format, and the parameters it then has."""
    kind, _, places = form.partition(" ")
    if kind == "float64":
        return lambda tokens: model(tokens), model.truth
    if kind == "decimals":
        return lambda tokens: np.round(model(tokens), int(places)), model.truth
    if kind == "digits":
        return lambda tokens: round_digits(model(tokens), int(places)), model.truth
    if kind == "noise":
        rng, size = np.random.default_rng(1), float(places)

        def noisy(tokens: np.ndarray) -> np.ndarray:
            answers = model(tokens)
            return answers + size * rng.standard_normal(answers.shape)

        return noisy, model.truth
    shorten = {"float32": single, "bfloat16": brain, "float16": half}[kind]
    short = model.rounded(lambda array: single(shorten(array)))
    truth = model.rounded(lambda array: np.asarray(shorten(array), np.float64)).truth
    return lambda tokens: shorten(short(single(shorten(tokens)))), truth


# -- the table of runs -------------------------------------------------------------------------

LEARNERS: dict[str, Callable[[], Any]] = {
    "Auto": lambda: keyhole.Auto(),
    "SingleHead": lambda: keyhole.SingleHead(),
    "LowRank": lambda: keyhole.LowRank(),
    "MultiHead": lambda: keyhole.MultiHead(),
    "LabelOnly": lambda: keyhole.LabelOnly(),
    "ReluNetwork": lambda: keyhole.ReluNetworkLearner(),
    "Transformer": lambda: keyhole.Transformer(),
}


def cases_of(
    name: str,
    model: Any,
    learners: str | dict[str, Callable[[], Any]],
    width: int,
    *,
    form: str = "float64",
    see: Function = lambda answers: answers,
    run: dict[str, Any] | None = None,
    **domain: Any,
) -> Iterator[Case]:
    """One run per learner ("Auto SingleHead"); `see`: what the box tells of its answer."""

    def build() -> tuple[Any, Any]:
        box, truth = answering(model, form)
        oracle = keyhole.open_oracle(lambda tokens: see(box(tokens)), width=width, **domain)
        return oracle, truth

    if isinstance(learners, str):
        learners = {word: LEARNERS[word] for word in learners.split()}
    for word, learner in learners.items():
        yield Case(f"{name}/{word}", build, learner, run or {})


BOTH = "SingleHead Auto"
BIASES = ("", "key", "offset", "key offset")


def shape_of(outputs: int | None) -> str:
    return "scalar" if outputs is None else f"D={outputs}"


def single_heads() -> Iterator[Case]:
    for width in (4, 8, 16):
        for outputs in (None, width // 2, width, width + 3):
            for bias in BIASES:
                model = draw(1, width, outputs, bias=bias)
                name = f"single/d={width} {shape_of(outputs)} bias={bias or 'none'}"
                yield from cases_of(name, model, BOTH if width == 8 else "SingleHead", width)
    for outputs in (None, 4, 32):
        for bias in ("", "key offset"):
            name = f"single/d=32 {shape_of(outputs)} bias={bias or 'none'}"
            yield from cases_of(name, draw(2, 32, outputs, bias=bias), BOTH, 32)
    for scale in (1e-4, 1e-3, 1e-2, 0.1, 10.0, 100.0, 1e3):
        for outputs in (None, 6):
            model = draw(3, 8, outputs, scale=scale, bias="key offset" if outputs else "")
            name = f"single/scores x {scale:g} {shape_of(outputs)}"
            yield from cases_of(name, model, BOTH if outputs is None else "SingleHead", 8)
    for size in (1e-6, 1e6):
        model = draw(4, 8, value_scale=size, bias="offset")
        yield from cases_of(f"single/values x {size:g}", model, BOTH, 8)


def number_formats() -> Iterator[Case]:
    forms = ("float32", "float16", "bfloat16", "decimals 3", "decimals 4", "decimals 6")
    for form in (*forms, "decimals 9", "digits 4", "digits 6", "digits 9"):
        for outputs, bias in ((None, ""), (None, "key offset"), (5, ""), (8, "key offset")):
            model = draw(5, 8, outputs, bias=bias)
            name = f"format/{form} {shape_of(outputs)} bias={bias or 'none'}"
            learners = BOTH if not bias else "SingleHead"
            yield from cases_of(name, model, learners, 8, form=form)
    for form in ("float32", "decimals 6"):
        yield from cases_of(f"format/{form} d=32", draw(6, 32), BOTH, 32, form=form)
    for noise in (1e-5, 1e-3):
        name = f"format/noise {noise:g} unbounded"
        yield from cases_of(name, draw(7, 8), BOTH, 8, form=f"noise {noise}")


def noisy_balls() -> Iterator[Case]:
    unknowns = 8 * 8 + 8
    for noise in (1e-4, 1e-3):
        for stated in (False, True):
            precision = keyhole.NoiseModel(additive=noise) if stated else None
            for times in (None, 20):
                run = {} if times is None else {"budget": times * unknowns + 100}
                name = f"ball/noise {noise:g} stated={stated} budget={times or 'none'}"
                yield from cases_of(
                    name, draw(8, 8), BOTH, 8, form=f"noise {noise}", run=run,
                    max_norm=2.0, precision=precision,
                )  # fmt: skip
    few = {"budget": unknowns}
    yield from cases_of(
        "ball/noise, as many queries as unknowns", draw(9, 8), BOTH, 8, form="noise 1e-4", run=few,
        max_norm=1.0, precision=keyhole.NoiseModel(additive=1e-4),
    )  # fmt: skip
    for bias in ("key", "offset"):
        yield from cases_of(
            f"ball/noise bias={bias}", draw(10, 8, bias=bias), BOTH, 8, form="noise 1e-5",
            run={"budget": 3000}, max_norm=2.0,
        )  # fmt: skip
    for form in ("decimals 3", "decimals 5"):
        yield from cases_of(f"ball/{form}", draw(11, 8), BOTH, 8, form=form, max_norm=3.0)
    yield from cases_of(
        "ball/tolerance", draw(12, 8), BOTH, 8, form="decimals 4", max_norm=2.0,
        precision=keyhole.NoiseModel(tolerance=5e-5),
    )  # fmt: skip
    accurate = {"accuracy": lambda: keyhole.SingleHead(accuracy=1e-3)}
    yield from cases_of(
        "ball/noise until accurate", draw(13, 8), accurate, 8, form="noise 1e-4", max_norm=2.0
    )
    paper = {"paper": lambda: keyhole.SingleHead(method="paper")}
    yield from cases_of("ball/published method", draw(14, 8), paper, 8, max_norm=2.0)


def bounded() -> Iterator[Case]:
    domains: dict[str, dict[str, Any]] = {
        "norm 0.5": {"max_norm": 0.5},
        "norm 2": {"max_norm": 2.0},
        "norm 10": {"max_norm": 10.0},
        "entries -1 to 0.5": {"low": -1.0, "high": 0.5},
        "entries 0.1 to 1": {"low": 0.1, "high": 1.0},
        "pairs": {"max_length": 2},
        "length 3": {"max_length": 3},
        "pairs, norm 2": {"max_length": 2, "max_norm": 2.0},
    }
    for word, domain in domains.items():
        for outputs, bias in ((None, ""), (None, "key offset"), (5, "key")):
            model = draw(15, 8, outputs, bias=bias)
            name = f"domain/{word} {shape_of(outputs)} bias={bias or 'none'}"
            learners = BOTH if outputs is None and not bias else "SingleHead"
            yield from cases_of(name, model, learners, 8, **domain)
    for word in ("norm 2", "pairs"):
        model = draw(16, 8)
        name = f"domain/{word} float32"
        yield from cases_of(name, model, BOTH, 8, form="float32", **domains[word])
    for words, width, outputs, bias in (
        (40, 6, None, ""), (40, 6, None, "key offset"), (60, 6, 3, ""), (200, 8, None, ""),
        (30, 8, 8, "key"),
    ):  # fmt: skip
        table = np.random.default_rng(17).standard_normal((words, width))
        name = f"vocabulary/{words} words {shape_of(outputs)} bias={bias or 'none'}"
        model = draw(17, width, outputs, bias=bias)
        yield from cases_of(name, model, BOTH, width, vocabulary=table)
    table = np.random.default_rng(18).standard_normal((40, 6))
    yield from cases_of(
        "vocabulary/float32", draw(18, 6), BOTH, 6, form="float32", vocabulary=table
    )


def low_rank() -> Iterator[Case]:
    for width, rank, outputs, bias in (
        (12, 1, None, ""), (16, 2, None, ""), (24, 3, None, "key offset"), (32, 2, None, ""),
        (16, 2, 4, ""), (16, 2, 16, "key"), (24, 1, 3, ""),
    ):  # fmt: skip
        known: dict[str, Callable[[], Any]] = {
            "LowRank": lambda: keyhole.LowRank(),
            "LowRank given": lambda rank=rank: keyhole.LowRank(rank=rank),
            "SingleHead given": lambda rank=rank: keyhole.SingleHead(rank=rank),
            "SingleHead unknown": lambda: keyhole.SingleHead(rank="unknown"),
            "Auto": lambda: keyhole.Auto(),
        }
        name = f"low rank/{rank} of {width} {shape_of(outputs)} bias={bias or 'none'}"
        yield from cases_of(name, draw(19, width, outputs, rank=rank, bias=bias), known, width)
    for word, options in (
        ("float32", {"form": "float32"}),
        ("norm 2", {"max_norm": 2.0}),
        ("pairs", {"max_length": 2}),
        ("decimals 8", {"form": "decimals 8"}),
        ("noise in a ball", {"form": "noise 1e-5", "max_norm": 2.0}),
    ):
        yield from cases_of(f"low rank/2 of 16 {word}", draw(20, 16, rank=2), "LowRank Auto", 16,
                            **options)  # fmt: skip
    one_too_few = {"LowRank": lambda: keyhole.LowRank(rank=2)}
    yield from cases_of("impostor/rank 3, 2 given", draw(21, 12, rank=3), one_too_few, 12)


def several_heads() -> Iterator[Case]:
    for heads in (1, 2, 3, 4):
        learners = {
            "MultiHead": lambda: keyhole.MultiHead(),
            "MultiHead given": lambda heads=heads: keyhole.MultiHead(heads=heads),
            "Auto": lambda: keyhole.Auto(),
        }
        yield from cases_of(f"heads/{heads} scalar", draw(22, 6, heads=heads), learners, 6)
        model = draw(23, 8, 8, heads=heads, rank=2, value_rank=2)
        yield from cases_of(f"heads/{heads} D=8 rank 2", model, learners, 8)
    some = "MultiHead Auto"
    for outputs in (None, 6):
        model = draw(24, 6, outputs, heads=2, bias="key offset")
        yield from cases_of(f"heads/2 {shape_of(outputs)} biases", model, some, 6)
    yield from cases_of("heads/2 D=3", draw(25, 6, 3, heads=2), some, 6)
    yield from cases_of("heads/2 scalar rank 2 of 10", draw(26, 10, heads=2, rank=2), some, 10)
    for word, options in (
        ("float32", {"form": "float32"}),
        ("norm 2", {"max_norm": 2.0}),
        ("entries -1 to 1", {"low": -1.0, "high": 1.0}),
        ("pairs", {"max_length": 2}),
        ("length 3", {"max_length": 3}),
        ("length 6", {"max_length": 6}),
        ("bfloat16", {"form": "bfloat16"}),
        ("decimals 6", {"form": "decimals 6"}),
    ):
        yield from cases_of(f"heads/2 scalar {word}", draw(27, 6, heads=2), some, 6, **options)
        model = draw(28, 6, 6, heads=2, rank=2, value_rank=3)
        yield from cases_of(f"heads/2 D=6 {word}", model, some, 6, **options)
    for width, heads in ((8, 2), (12, 3), (16, 4), (32, 8)):
        model = multihead_attention(29, width, heads)
        yield from cases_of(f"layer/{heads} heads of {width}", model, some, width)
    yield from cases_of("heads/3 scalar d=16", draw(29, 16, heads=3), some, 16)
    model = multihead_attention(30, 12, 3, bias=False)
    yield from cases_of("layer/no biases", model, some, 12)
    model = multihead_attention(31, 8, 2)
    yield from cases_of("layer/float32", model, some, 8, form="float32")
    yield from cases_of("layer/norm 2", model, some, 8, max_norm=2.0)
    yield from cases_of("layer/length 4", model, some, 8, max_length=4)
    weak = draw(32, 8, heads=2)
    weak = Layer((weak.parts[0], weak.parts[1]._replace(value=1e-4 * weak.parts[1].value)),
                 weak.offset)  # fmt: skip
    yield from cases_of("heads/one weak", weak, some, 8)


def orthogonal_heads() -> Iterator[Case]:
    for widths in ((3, 5), (3, 5, 4), (6,), (2, 2, 2, 2)):
        width = sum(widths)
        frame = np.linalg.qr(np.random.default_rng(33).standard_normal((width, width)))[0]
        bases = np.split(frame, np.cumsum(widths)[:-1], axis=1)
        small = [draw(34 + i, w).parts[0] for i, w in enumerate(widths)]
        parts = [
            Part(b @ p.score @ b.T, b @ p.key_bias, b @ p.value)
            for b, p in zip(bases, small, strict=True)
        ]
        learner = {"OrthogonalHeads": lambda bases=bases: keyhole.OrthogonalHeads(bases)}
        model = Layer(tuple(parts), np.zeros(()))
        name = "orthogonal/" + "+".join(map(str, widths))
        yield from cases_of(name, model, learner, width)
        if len(widths) == 3:
            yield from cases_of(f"{name} float32", model, learner, width, form="float32")
            first = parts[0]._replace(score=parts[0].score + 0.1 * np.eye(width))
            outside = Layer((first, *parts[1:]), np.zeros(()))
            yield from cases_of("impostor/outside its subspace", outside, learner, width)


def bits_of(answers: np.ndarray) -> np.ndarray:
    return (answers > 0).astype(np.float64)


def labels() -> Iterator[Case]:
    both = "LabelOnly Auto"
    for width in (3, 4, 6, 8):
        yield from cases_of(f"labels/signs d={width}", draw(40, width), both, width, see=np.sign)
        yield from cases_of(f"labels/bits d={width}", draw(41, width), both, width, see=bits_of)
    yield from cases_of("labels/float32", draw(42, 4), "LabelOnly", 4, see=np.sign, form="float32")
    yield from cases_of("labels/norm 2", draw(43, 4), both, 4, see=np.sign, max_norm=2.0)
    few = {"12 bits": lambda: keyhole.LabelOnly(bits=12), "30 bits": lambda: keyhole.LabelOnly(30)}
    yield from cases_of("labels/accuracy", draw(44, 6), few, 6, see=np.sign)
    for word, model in (
        ("key bias", draw(45, 6, bias="key")),
        ("offset", draw(45, 6, bias="offset")),
        ("two heads", draw(45, 6, heads=2)),
    ):
        yield from cases_of(f"impostor/labels, {word}", model, both, 6, see=np.sign)


def networks() -> Iterator[Case]:
    both = "ReluNetwork Auto"
    for width, neurons, outputs in (
        (4, 3, None), (6, 8, None), (8, 12, None), (6, 8, 3), (8, 16, 8),
        (12, 10, None), (16, 32, None), (16, 24, 4),
    ):  # fmt: skip
        model = draw_network(50, width, neurons, outputs)
        name = f"network/d={width} m={neurons} {shape_of(outputs)}"
        yield from cases_of(name, model, both, width)
    yield from cases_of("network/no biases", draw_network(51, 6, 8, bias=False), both, 6)
    yield from cases_of("network/skip", draw_network(52, 6, 8, skip=True), both, 6)
    for word, options in (
        ("norm 2", {"max_norm": 2.0}),
        ("entries -1 to 1", {"low": -1.0, "high": 1.0}),
        ("float32", {"form": "float32"}),
        ("decimals 6", {"form": "decimals 6"}),
    ):
        for outputs in (None, 3):
            model = draw_network(53, 5, 6, outputs)
            yield from cases_of(f"network/{word} {shape_of(outputs)}", model, both, 5, **options)
    more = {
        "exact": lambda: keyhole.ReluNetworkLearner(exact=True),
        "given": lambda: keyhole.ReluNetworkLearner(neurons=8),
    }
    yield from cases_of("network/d=6 m=8 options", draw_network(54, 6, 8), more, 6)
    fewer = {"ReluNetwork": lambda: keyhole.ReluNetworkLearner(neurons=7)}
    yield from cases_of("impostor/8 neurons, 7 claimed", draw_network(54, 6, 8), fewer, 6)


@dataclass(frozen=True, eq=False)
class Smooth:
    """One hidden layer of smooth neurons beside a linear part, gated or not."""

    parts: dict[str, np.ndarray]
    activation: str

    @property
    def truth(self) -> Any:
        return keyhole.Mlp(**self.parts, activation=self.activation)

    def rounded(self, shorten: Function) -> "Smooth":
        return Smooth({k: shorten(part) for k, part in self.parts.items()}, self.activation)

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        p = self.parts
        points = tokens[:, -1].astype(p["inner"].dtype, copy=False)
        hidden = points @ p["inner"].T + p["inner_bias"]
        if "gate" in p:
            hidden = hidden * ACTIVATIONS[self.activation](points @ p["gate"].T + p["gate_bias"])
        else:
            hidden = ACTIVATIONS[self.activation](hidden)
        return np.asarray(hidden @ p["outer"].T + points @ p["linear"].T + p["offset"])


def draw_smooth(
    seed: int, width: int, neurons: int, outputs: int | None = None, activation: str = "gelu",
    *, gated: bool = False, scale: float = 1.0, spread: float = 0.3,
) -> Smooth:  # fmt: skip
    """`spread`: of the sizes of the rows, lognormal."""
    rng = np.random.default_rng([seed, width, neurons, 5])
    shape = () if outputs is None else (outputs,)

    def rows() -> np.ndarray:
        sizes = scale * np.exp(spread * rng.standard_normal((neurons, 1)))
        return sizes * rng.standard_normal((neurons, width)) / np.sqrt(width)

    parts = {
        "inner": rows(),
        "inner_bias": 0.5 * rng.standard_normal(neurons),
        "outer": rng.standard_normal((*shape, neurons)) / np.sqrt(neurons),
        "linear": scale * rng.standard_normal((*shape, width)) / np.sqrt(width) * (not gated),
        "offset": np.asarray(rng.standard_normal(shape)),
    }
    if gated:
        parts |= {"gate": rows(), "gate_bias": 0.5 * rng.standard_normal(neurons)}
    return Smooth(parts, activation)


def smooth_networks() -> Iterator[Case]:
    """Networks of smooth neurons over their activations, sizes, formats and domains."""
    mlp = {"Mlp": lambda: keyhole.MlpLearner()}

    def cases(name: str, model: Smooth, width: int, form: str = "float64", **how: Any) -> Any:
        return cases_of(f"smooth/{name} {form}", model, mlp, width, form=form, **how)

    domains: dict[str, dict[str, Any]] = {
        "free": {},
        "sphere": {"sphere": 8**0.5},
        "ball": {"max_norm": 3.0},
    }
    for word, domain in domains.items():
        for form in ("float64", "float32"):
            for activation in ("gelu", "silu", "tanh"):
                model = draw_smooth(130, 8, 24, 8, activation)
                yield from cases(f"{activation} d=8 m=24 {word}", model, 8, form, **domain)
            for neurons in (2, 8, 32):
                model = draw_smooth(131, 8, neurons, 8)
                yield from cases(f"gelu d=8 m={neurons} {word}", model, 8, form, **domain)
            yield from cases(f"gelu d=6 m=6 k=3 {word}", draw_smooth(132, 6, 6, 3), 6, form,
                             **domain)  # fmt: skip
    for form in ("float64", "float32"):
        yield from cases("gelu d=6 m=6 scalar", draw_smooth(133, 6, 6), 6, form)
        yield from cases("gelu d=10 m=10 scalar", draw_smooth(134, 10, 10), 10, form)
        for word, domain in (("free", {}), ("sphere", {"sphere": 4.0})):
            for neurons in (16, 48):
                model = draw_smooth(135, 16, neurons, 16)
                yield from cases(f"gelu d=16 m={neurons} {word}", model, 16, form, **domain)
            model = draw_smooth(136, 16, 16, 16, "silu", gated=True)
            yield from cases(f"gated silu d=16 m=16 {word}", model, 16, form, **domain)
        yield from cases("gelu, rows of all sizes", draw_smooth(137, 8, 16, 8, spread=1.5), 8, form)
        yield from cases("gelu d=24 m=48 free", draw_smooth(138, 24, 48, 24), 24, form)
        entries = {"low": -1.0, "high": 2.0}
        yield from cases("gelu d=8 m=12 box", draw_smooth(139, 8, 12, 8), 8, form, **entries)
    for scale in (1e-6, 1e6):
        yield from cases(f"gelu, rows x {scale:g}", draw_smooth(140, 8, 16, 8, scale=scale), 8)
    for form, error in (("noise 1e-11", 1e-11), ("noise 1e-8", 1e-8), ("decimals 6", 5e-7)):
        stated = {"precision": keyhole.NoiseModel(additive=error)}
        model = draw_smooth(141, 8, 16, 8)
        yield from cases("gelu d=8 m=16 free", model, 8, form, **stated)
        yield from cases("gelu d=8 m=16 sphere", model, 8, form, sphere=8**0.5, **stated)


def transformers() -> Iterator[Case]:
    both = "Transformer Auto"
    yield from cases_of("transformer/d=4 m=5", draw_block(60, 4, 5), both, 4)
    yield from cases_of("transformer/d=5 m=8", draw_block(61, 5, 8), both, 5)
    yield from cases_of("transformer/key bias", draw_block(62, 5, 8, key_bias=True), both, 5)
    yield from cases_of("transformer/D=3", draw_block(63, 5, 8, 3), both, 5)
    yield from cases_of("transformer/norm 3", draw_block(64, 4, 5), both, 4, max_norm=3.0)
    yield from cases_of("transformer/float32", draw_block(65, 4, 5), both, 4, form="float32")
    yield from cases_of("transformer/residual", draw_block(66, 5, 6, residual=True), both, 5)
    yield from cases_of("transformer/d=8 m=16", draw_block(68, 8, 16), both, 8)
    turned = {
        "segment": lambda: keyhole.Transformer(),
        "antisymmetric": lambda: keyhole.Transformer(method="antisymmetric"),
        "Auto": lambda: keyhole.Auto(),
    }
    yield from cases_of("transformer/no biases", draw_block(67, 5, 8, bias=False), turned, 5)


def every_position(layer: Layer, tokens: np.ndarray) -> np.ndarray:
    """The layer's answers with each position as the query."""
    count = tokens.shape[1]
    orders = [[*(j for j in range(count) if j != i), i] for i in range(count)]
    return np.stack([layer(tokens[:, order]) for order in orders], axis=1)


def examples() -> Iterator[Case]:
    def case(
        name: str,
        layer: Layer,
        count: int,
        length: int,
        see: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda tokens, labels: labels,
        last: bool = False,
        boolean: bool = False,
        **options: Any,
    ) -> Examples:
        def build() -> tuple[Any, Any]:
            rng = np.random.default_rng([crc32(name.encode())])
            shape = (count, length, len(layer.parts[0].score))
            tokens = rng.choice([-1.0, 1.0], shape) if boolean else rng.standard_normal(shape)
            labels = layer(tokens) if last else every_position(layer, tokens)
            return (tokens, see(tokens, labels)), layer.truth

        def learner() -> Any:  # the clock must not decide: only the number of restarts does
            return keyhole.FromExamples(**{"restarts": 200, "seconds": 1e6, **options})

        return Examples(name, build, learner)

    for heads in (1, 2, 3):
        layer = draw(70, 4, 4, heads=heads)
        yield case(f"examples/{heads} heads", layer, 40 * heads, 4)
        yield case(f"examples/{heads} heads given", layer, 40 * heads, 4, heads=heads)
    yield case("examples/boolean", draw(71, 6, 6, heads=2, scale=0.5), 60, 4, boolean=True)
    yield case("examples/last position", draw(72, 4, 4), 120, 4, last=True)
    yield case("examples/scalar", draw(73, 4), 160, 4, last=True)
    yield case("examples/biases", draw(74, 4, 4, bias="key offset"), 60, 4, bias=True)

    def blurred(tokens: np.ndarray, labels: np.ndarray) -> np.ndarray:
        return labels + 1e-3 * np.random.default_rng(75).standard_normal(labels.shape)

    yield case("examples/noise", draw(75, 4, 4, heads=2), 120, 4, blurred)
    yield case("examples/float32", draw(76, 4, 4), 60, 4, lambda _, labels: single(labels))
    yield case("examples/too few", draw(77, 6, 6, heads=2), 4, 4, restarts=20)
    fakes: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
        "shuffled": lambda _, labels: labels[np.random.default_rng(2).permutation(len(labels))],
        "shifted": lambda _, labels: np.roll(labels, 1, axis=0),
        "noise": lambda _, labels: np.random.default_rng(3).standard_normal(labels.shape),
    }
    for word, see in fakes.items():
        yield case(
            f"impostor/examples, {word}", draw(78, 6, 6, heads=2), 30, 4, see, boolean=True,
            restarts=10,
        )  # fmt: skip


# -- what people serve: sixteen and thirty-two bits --------------------------------------------

ACTIVATIONS: dict[str, Function] = {
    "relu": lambda a: np.maximum(a, 0),
    "gelu": lambda a: a * (1 + erf(a / np.sqrt(2))) / 2,
    "silu": lambda a: a / (1 + np.exp(-a)),
    "tanh": np.tanh,
}


@dataclass(frozen=True, eq=False)
class Whole:
    """Attention, a network, or both, with residual and norm or without; its truth is itself, as a
    function: the error of a model is that of its answers."""

    attention: Layer | None = None
    network: Network | None = None
    activation: str = "gelu"
    gate: np.ndarray | None = None
    residual: bool = True
    norm: str = "none"  # "pre", "post"
    gains: np.ndarray = field(default_factory=lambda: np.ones((2, 1)))
    biases: np.ndarray = field(default_factory=lambda: np.zeros((2, 1)))

    @property
    def truth(self) -> Any:
        return self

    def rounded(self, shorten: Function) -> "Whole":
        return Whole(
            None if self.attention is None else self.attention.rounded(shorten),
            None if self.network is None else self.network.rounded(shorten),
            self.activation,
            None if self.gate is None else shorten(self.gate),
            self.residual, self.norm, shorten(self.gains), shorten(self.biases),
        )  # fmt: skip

    def normalise(self, stream: np.ndarray, place: int) -> np.ndarray:
        centred = stream - stream.mean(axis=-1, keepdims=True)
        variance = (centred * centred).mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt(variance + stream.dtype.type(1e-5))
        return np.asarray(scaled * self.gains[place] + self.biases[place], stream.dtype)

    def sublayer(self, stream: np.ndarray, act: Function, place: int) -> np.ndarray:
        """`act` sees all tokens and answers at the last."""
        answer = act(self.normalise(stream, place) if self.norm == "pre" else stream)
        if self.residual:
            answer = stream[:, -1] + answer
        return self.normalise(answer, place) if self.norm == "post" else answer

    def feed_forward(self, tokens: np.ndarray) -> np.ndarray:
        assert self.network is not None
        net, points = self.network, tokens[:, -1]
        hidden = ACTIVATIONS[self.activation](points @ net.weight.T + net.bias)
        if self.gate is not None:
            hidden = hidden * (points @ self.gate.T)
        return np.asarray(hidden @ net.output + points @ net.skip, tokens.dtype)

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        stream = tokens.astype(self.gains.dtype, copy=False)
        if self.attention is not None:
            stream = self.sublayer(stream, self.attention, 0)[:, None]
        if self.network is not None:
            stream = self.sublayer(stream, self.feed_forward, 1)[:, None]
        return np.ascontiguousarray(stream[:, 0])


def draw_whole(
    seed: int, width: int, parts: str, norm: str, activation: str = "gelu", neurons: int = 0,
    *, heads: int = 2, gated: bool = False, residual: bool = True,
) -> Whole:  # fmt: skip
    rng = np.random.default_rng([seed, width, neurons, 3])
    network = draw_network(seed, width, neurons, width) if "network" in parts else None
    return Whole(
        multihead_attention(seed, width, heads) if "attention" in parts else None,
        network,
        activation,
        rng.standard_normal((neurons, width)) / np.sqrt(width) if gated else None,
        residual, norm,
        1 + 0.3 * rng.standard_normal((2, width)),
        0.3 * rng.standard_normal((2, width)),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class Positioned:
    """Heads that see where tokens stand: turned by their places, or farther ones scored less."""

    queries: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    outputs: np.ndarray
    kind: str  # "rotary", "linear bias"

    @property
    def truth(self) -> Any:
        return self

    def rounded(self, shorten: Function) -> "Positioned":
        maps = (self.queries, self.keys, self.values, self.outputs)
        return Positioned(*(shorten(one) for one in maps), self.kind)

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        tokens = tokens.astype(self.queries.dtype, copy=False)
        heads, inner, _ = self.queries.shape
        places = np.arange(tokens.shape[1])
        queries = np.einsum("hrd,nd->nhr", self.queries, tokens[:, -1])
        keys = np.einsum("hrd,nld->nhlr", self.keys, tokens)
        if self.kind == "rotary":
            keys = self.turn(keys, places)
            queries = self.turn(queries[:, :, None], places[-1:])[:, :, 0]
        scores = np.einsum("nhlr,nhr->nhl", keys, queries) / np.sqrt(inner).astype(tokens.dtype)
        if self.kind == "linear bias":
            slopes = 2.0 ** -(8.0 * np.arange(1, heads + 1) / heads)
            scores = scores - (slopes[:, None] * (places[-1] - places)).astype(tokens.dtype)
        mixed = np.einsum("nhl,nld->nhd", softmax(scores), tokens)
        values = np.einsum("hrd,nhd->nhr", self.values, mixed)
        return np.ascontiguousarray(np.einsum("nhr,hrd->nd", values, self.outputs))

    @staticmethod
    def turn(vectors: np.ndarray, places: np.ndarray) -> np.ndarray:
        half = vectors.shape[-1] // 2
        angles = np.outer(places, 1e4 ** -(np.arange(half) / half))
        cosines, sines = (f(angles).astype(vectors.dtype) for f in (np.cos, np.sin))
        first, second = vectors[..., :half], vectors[..., half:]
        turned = (first * cosines - second * sines, second * cosines + first * sines)
        return np.concatenate(turned, axis=-1)


def draw_positioned(seed: int, width: int, heads: int, kind: str) -> Positioned:
    rng = np.random.default_rng([seed, width, heads, 4])
    maps = rng.standard_normal((4, heads, width // heads, width)) / np.sqrt(width)
    return Positioned(*maps, kind)


def deployed() -> Iterator[Case]:
    """Every family in the formats in which models are saved and served."""
    auto = "Auto"
    for form in ("float32", "bfloat16"):

        def cases(name: str, model: Any, width: int, learners: Any = auto, **how: Any) -> Any:
            return cases_of(f"{form}/{name}", model, learners, width, form=form, **how)  # noqa: B023

        yield from cases("single d=16 scalar", draw(100, 16), 16)
        yield from cases("single d=16 D=16", draw(101, 16, 16, bias="key offset"), 16)
        yield from cases("single d=32 D=8", draw(102, 32, 8), 32)
        for scale in (0.03, 0.3, 10.0):
            yield from cases(f"single scores x {scale:g}", draw(103, 8, 8, scale=scale), 8)
        yield from cases("low rank 2 of 16", draw(104, 16, rank=2), 16, "LowRank")
        yield from cases("low rank 2 of 24 D=4", draw(105, 24, 4, rank=2), 24, "LowRank")
        yield from cases("heads 2 scalar d=8", draw(106, 8, heads=2), 8)
        yield from cases("heads 2 D=8", draw(107, 8, 8, heads=2, rank=4, value_rank=4), 8)
        yield from cases("heads 3 D=12", draw(108, 12, 12, heads=3, rank=4, value_rank=4), 12)
        for width, heads in ((8, 2), (16, 4), (32, 4), (32, 8), (64, 4)):
            layer = multihead_attention(109, width, heads)
            yield from cases(f"layer {heads} heads of {width}", layer, width)
        yield from cases("layer no biases", multihead_attention(110, 16, 2, bias=False), 16)
        yield from cases("layer in a ball", multihead_attention(111, 8, 2), 8, max_norm=4.0)
        for width in (8, 16):
            yield from cases(f"skip d={width}", draw_whole(112, width, "attention", "none"), width)
        for kind in ("rotary", "linear bias"):
            for width, heads in ((8, 2), (16, 2)):
                model = draw_positioned(113, width, heads, kind)
                yield from cases(f"{kind} d={width} H={heads}", model, width)
        for width, neurons, outputs in ((6, 8, None), (8, 16, 8)):
            model = draw_network(114, width, neurons, outputs)
            yield from cases(f"relu d={width} m={neurons} {shape_of(outputs)}", model, width)
        for activation, width, neurons, gated in (
            ("gelu", 6, 6, False), ("gelu", 12, 24, False), ("silu", 8, 8, False),
            ("tanh", 6, 6, False), ("silu", 8, 8, True),
        ):  # fmt: skip
            model = draw_whole(115, width, "network", "none", activation, neurons, gated=gated,
                               residual=False)  # fmt: skip
            gate = " gated" if gated else ""
            yield from cases(f"network {activation}{gate} d={width} m={neurons}", model, width)
        yield from cases("transformer d=4 m=5", draw_block(116, 4, 5), 4)
        yield from cases("transformer residual", draw_block(117, 5, 6, residual=True), 5)
        block = {"Block": lambda: keyhole.BlockLearner()}
        for norm in ("post", "pre"):
            for width in (8, 16):
                model = draw_whole(118, width, "attention", norm)
                yield from cases(f"{norm}-norm attention d={width}", model, width, block)
            for activation, width, neurons in (
                ("gelu", 8, 8), ("relu", 8, 8), ("gelu", 12, 24),
            ):  # fmt: skip
                model = draw_whole(119, width, "network", norm, activation, neurons)
                name = f"{norm}-norm {activation} d={width} m={neurons}"
                yield from cases(name, model, width, block)
            for activation in ("gelu", "relu"):
                model = draw_whole(120, 8, "attention network", norm, activation, 12)
                yield from cases(f"{norm}-norm block {activation} d=8 m=12", model, 8, block)
        yield from cases("single in a ball", draw(123, 8), 8, max_norm=3.0)
        yield from cases("labels d=6", draw(121, 6), 6, see=np.sign)
        words = np.random.default_rng(122).standard_normal((60, 6))
        yield from cases("vocabulary", draw(122, 6), 6, vocabulary=brain(words))


# -- impostors ---------------------------------------------------------------------------------

WIDTH = 8


def mask_every_third(scores: np.ndarray) -> np.ndarray:
    scores = scores.copy()
    scores[:, 1:-1:3] = -np.inf
    return scores


def window(scores: np.ndarray) -> np.ndarray:
    scores = scores.copy()
    scores[:, :-10] = -np.inf
    return scores


def warm_first(scores: np.ndarray) -> np.ndarray:
    scores = scores.copy()
    scores[:, 0] *= 1.3
    return scores


CHANGES: dict[str, Function] = {
    "every third token masked": mask_every_third,
    "window of ten": window,
    "capped scores": lambda scores: 30 * np.tanh(scores / 30),
    "position bias": lambda scores: scores + 0.05 * np.arange(scores.shape[1]),
    "temperature at one position": warm_first,
}


def linear_attention(tokens: np.ndarray) -> np.ndarray:
    layer = draw(80, WIDTH)
    (scores,) = layer.scores(tokens)
    return np.einsum("nl,nl->n", scores, tokens @ layer.parts[0].value)


def mlp_of_mean(tokens: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(81)
    hidden = tokens.mean(axis=1) @ rng.standard_normal((WIDTH, 16)) / 3
    return np.tanh(hidden) @ rng.standard_normal(16)


def gru(tokens: np.ndarray) -> np.ndarray:
    rng = np.random.default_rng(82)
    maps, value = rng.standard_normal((3, 2, WIDTH, WIDTH)) / 3, rng.standard_normal(WIDTH)
    state = np.zeros((len(tokens), WIDTH))
    for t in range(tokens.shape[1]):
        update, reset = (
            0.5 * (1 + np.tanh((tokens[:, t] @ maps[k, 0] + state @ maps[k, 1]) / 2))
            for k in (0, 1)
        )
        new = np.tanh(tokens[:, t] @ maps[2, 0] + (reset * state) @ maps[2, 1])
        state = (1 - update) * state + update * new
    return state @ value


def normalised(tokens: np.ndarray) -> np.ndarray:
    mixed = multihead_attention(83, WIDTH, 2)(tokens) + tokens[:, -1]
    centred = mixed - mixed.mean(axis=1, keepdims=True)
    return centred / centred.std(axis=1, keepdims=True)


def gelu(hidden: np.ndarray) -> np.ndarray:
    return hidden * 0.5 * (1 + erf(hidden / np.sqrt(2)))


def two_hidden_layers(tokens: np.ndarray) -> np.ndarray:
    first, second = draw_network(84, WIDTH, 10), draw_network(85, 10, 6)
    return second.at(np.maximum(tokens[:, -1] @ first.weight.T + first.bias, 0))


def first_token_added(tokens: np.ndarray) -> np.ndarray:
    block = draw_block(86, WIDTH, 10)
    return block.network.at(block.mean(tokens) + 0.5 * tokens[:, 0])


def network_over_two_heads(tokens: np.ndarray) -> np.ndarray:
    first, second = draw_block(87, WIDTH, 10), draw_block(88, WIDTH, 10)
    return first.network.at((first.mean(tokens) + second.mean(tokens)) / 2)


def hidden_step(tokens: np.ndarray) -> np.ndarray:
    return draw(89, WIDTH)(tokens) + 0.1 * (np.linalg.norm(tokens[:, -1], axis=1) > 9.0)


def drifting() -> Function:
    """Its value grows with every query."""
    model, asked = draw(90, WIDTH), [0]

    def box(tokens: np.ndarray) -> np.ndarray:
        asked[0] += len(tokens)
        return model(tokens) * (1 + 1e-7 * asked[0])

    return box


def impostors() -> Iterator[Case]:
    def fake(name: str, make: Callable[[], Function], learners: str, **how: Any) -> Iterator[Case]:
        def build() -> tuple[Any, Any]:
            return keyhole.open_oracle(make(), width=WIDTH, **how), None

        for word in learners.split():
            yield Case(f"impostor/{name}/{word}", build, LEARNERS[word])

    for heads in (1, 2):
        learners = "SingleHead LowRank Auto" if heads == 1 else "MultiHead Auto"
        for word, change in CHANGES.items():
            model = draw(91, WIDTH, heads=heads)
            yield from fake(
                f"{word}, {heads} heads",
                lambda model=model, change=change: lambda tokens: model(tokens, change),
                learners,
            )
    attention = "SingleHead MultiHead Auto"
    yield from fake("linear attention", lambda: linear_attention, attention)
    yield from fake("network over the mean", lambda: mlp_of_mean, attention)
    yield from fake("GRU", lambda: gru, attention)
    yield from fake("layer norm", lambda: normalised, "MultiHead Auto")
    yield from fake("drift", drifting, "SingleHead Auto")
    yield from fake("a hidden step", lambda: hidden_step, "SingleHead Auto")
    network = draw_network(92, WIDTH, 10)
    yield from fake("GELU", lambda: lambda tokens: network(tokens, gelu), "ReluNetwork Auto")
    yield from fake("two hidden layers", lambda: two_hidden_layers, "ReluNetwork Auto")
    block = draw_block(93, WIDTH, 10)
    smooth = "Transformer Auto"
    yield from fake("GELU after attention", lambda: lambda tokens: block(tokens, gelu), smooth)
    yield from fake("first token added", lambda: first_token_added, smooth)
    yield from fake("network over two heads", lambda: network_over_two_heads, smooth)
    yield from fake("two heads as one", lambda: draw(94, WIDTH, heads=2), "SingleHead LowRank")
    yield from fake(
        "more noise than stated",
        lambda: answering(draw(95, WIDTH), "noise 1e-3")[0],
        "SingleHead Auto",
        precision=keyhole.NoiseModel(additive=1e-6),
    )
    for heads in (2, 3, 4):
        one_less = {"MultiHead": lambda heads=heads: keyhole.MultiHead(heads - 1)}
        model = draw(96, WIDTH, heads=heads)
        name = f"impostor/{heads} heads, {heads - 1} claimed"
        yield from cases_of(name, model, one_less, WIDTH)
    model = multihead_attention(97, 12, 3)
    two = {"MultiHead": lambda: keyhole.MultiHead(2)}
    yield from cases_of("impostor/layer of 3 heads, 2 claimed", model, two, 12)


@cache
def table() -> dict[str, Case]:
    families = (
        single_heads, number_formats, noisy_balls, bounded, low_rank, several_heads,
        orthogonal_heads, labels, networks, smooth_networks, transformers, examples,
        impostors, deployed,
    )  # fmt: skip
    boxes = [case for family in families for case in family()]
    listed = [replace(c, name=f"{c.name} {seed}", seed=seed) for c in boxes for seed in SEEDS]
    named = {case.name: case for case in listed}
    assert len(named) == len(listed), "two runs of one name"
    return named


# -- running -----------------------------------------------------------------------------------


def out_of_time(*_: Any) -> None:
    raise OutOfTime


def measure(name: str) -> dict[str, Any]:
    """One row of the table."""
    case = table()[name]
    row: dict[str, Any] = {"name": name, "outcome": "", "queries": None, "floor": None}
    row |= {"error": None, "seconds": 0.0, "reason": ""}
    signal.signal(signal.SIGPROF, out_of_time)
    start = time.process_time()
    try:
        signal.setitimer(signal.ITIMER_PROF, SECONDS_PER_BOX)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            found, truth = case.run()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        row["seconds"] = round(time.process_time() - start, 3)
        row |= {"outcome": found.outcome.name, "reason": found.reason[:200]}
        learning = found.ledger.paid - found.ledger.by_purpose.get("verification", 0)
        row |= {"queries": learning, "floor": found.ledger.floor}
        if found.model is not None and truth is not None:
            row["error"] = error_of(found.model, truth)
    except OutOfTime:
        row["outcome"] = "TIMEOUT"
    except keyhole.KeyholeError as error:
        row |= {"outcome": type(error).__name__, "reason": str(error)[:200]}
    except Exception as error:
        row |= {"outcome": "CRASH", "reason": f"{type(error).__name__}: {error}"[:200]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    row["seconds"] = row["seconds"] or round(time.process_time() - start, 3)
    return row


def error_of(model: Any, truth: Any) -> float:
    """Infinite where the two are of different kinds. Where the truth is a function alone: the
    largest error of an answer to ordinary queries, over the spread of the answers."""
    if isinstance(truth, (Whole, Positioned)):
        tokens = np.random.default_rng(0).standard_normal((200, 5, model.width))
        answers, guesses = truth(tokens), np.asarray(model(tokens))
        return float(np.abs(guesses - answers).max() / answers.std())
    try:
        return float(keyhole.distance(model, truth))
    except keyhole.KeyholeError:
        return math.inf


def run(only: str, processes: int, out: Path) -> None:
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")  # read by the processes that are started below
    names = [name for name in table() if only in name]
    rows = []
    try:
        with get_context("spawn").Pool(processes) as pool:
            for row in pool.imap(measure, names):
                rows.append(row)
                print(line(row), flush=True)
    finally:  # a table that is stopped holds what was measured
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
    summarise(rows)
    print(f"{len(rows)} runs, in {out}")


def line(row: dict[str, Any]) -> str:
    error = "" if row["error"] is None else f"{row['error']:.1e}"
    unexpected = "" if grade(row) == 0 else "  " + row["reason"][:80]
    return (
        f"{row['name']:60s} {row['outcome']:16s} {row['queries'] or 0:7d} {error:8s}"
        f" {row['seconds']:7.2f}s{unexpected}"
    )


def grade(row: dict[str, Any]) -> int:
    """0 for the ending that the box ought to have, more for worse ones."""
    outcome = row["outcome"]
    order = HONEST
    if row["name"].startswith("impostor/"):
        order = (("REJECTED",), (*HONEST[1], *HONEST[2]), HONEST[0])
    return next((place for place, group in enumerate(order) if outcome in group), len(order))


def summarise(rows: list[dict[str, Any]]) -> None:
    """Endings by family, and the totals."""
    families: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        families.setdefault(row["name"].partition("/")[0], []).append(row)
    print(f"\n{'family':14s} {'runs':>5s} {'queries':>9s} {'seconds':>8s}  outcomes")
    for family, members in [*families.items(), ("all", rows)]:
        outcomes = Counter(row["outcome"] for row in members).most_common()
        paid, spent = totals(members)
        ended = ", ".join(f"{outcome} {count}" for outcome, count in outcomes)
        print(f"{family:14s} {len(members):5d} {paid:9d} {spent:8.1f}  {ended}")


def totals(rows: list[dict[str, Any]]) -> tuple[int, float]:
    return sum(row["queries"] or 0 for row in rows), sum(row["seconds"] for row in rows)


# -- comparing ---------------------------------------------------------------------------------


def compare(before: Path, after: Path) -> int:
    """Prints what changed; the number of things that are worse."""
    old, new = ({r["name"]: r for r in json.loads(p.read_text())} for p in (before, after))
    pairs = [(old[name], new[name]) for name in old if name in new]
    worse = [(a, b) for a, b in pairs if grade(b) > grade(a)]
    better = [(a, b) for a, b in pairs if grade(b) < grade(a)]
    other = [(a, b) for a, b in pairs if grade(b) == grade(a) and b["outcome"] != a["outcome"]]
    for title, changed in (("worse", worse), ("better", better), ("other, as good", other)):
        print(f"outcomes that are {title}: {len(changed)}")
        for a, b in changed:
            print(f"  {a['name']}: {a['outcome']} -> {b['outcome']}  {b['reason'][:100]}")
    apart = [(a, b) for a, b in pairs if differs(a["queries"], b["queries"])]
    print(f"queries that differ by more than {QUERIES_APART:.0%}: {len(apart)}")
    for a, b in apart:
        print(f"  {a['name']}: {a['queries']} -> {b['queries']}")
    off = [(a, b) for a, b in pairs if less_exact(a["error"], b["error"])]
    print(f"errors worse by more than a factor {ERROR_FACTOR:g}: {len(off)}")
    for a, b in off:
        print(f"  {a['name']}: {a['error']:.1e} -> {b['error']:.1e}")
    gone = [name for name in old if name not in new]
    print(f"runs that are missing: {len(gone)}, new: {len(new) - len(pairs)}")
    for name in gone:
        print(f"  {name}")
    print("\nin both:       before      after")
    (paid, spent), (paid_now, spent_now) = (
        totals([pair[side] for pair in pairs]) for side in (0, 1)
    )
    right, right_now = (sum(grade(pair[side]) == 0 for pair in pairs) for side in (0, 1))
    print(f"runs      {len(pairs):11d} {len(pairs):10d}")
    print(f"as wished {right:11d} {right_now:10d}")
    print(f"queries   {paid:11d} {paid_now:10d}")
    print(f"seconds   {spent:11.1f} {spent_now:10.1f}")
    dearer = [pair for pair in apart if (pair[1]["queries"] or 0) > (pair[0]["queries"] or 0)]
    return len(worse) + len(off) + len(gone) + len(dearer)


def differs(before: int | None, after: int | None) -> bool:
    if before is None or after is None:
        return before is not after
    return abs(after - before) > QUERIES_APART * before


def less_exact(before: float | None, after: float | None) -> bool:
    """A model that is no longer there shows in the outcome."""
    if before is None or after is None:
        return False
    return max(after, ERROR_FLOOR) > ERROR_FACTOR * max(before, ERROR_FLOOR)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", default="", help="runs whose name holds this")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.compare:
        sys.exit(1 if compare(*options.compare) else 0)
    run(options.only, options.processes, options.out)


if __name__ == "__main__":
    main()
