"""plan(): what a recovery will cost, before paying for it: queries, time, expected error.

Queries come from the learners' own forecasts; of layers that `benchmarks/map.py` recovered, from
what that took, and so does the time of computing. The box's time follows from its speed, which is
measured with a few queries. The expected error is rehearsed, not derived: the learner recovers a
random model of its family, of a small width, behind answers as exact as those of the box.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from keyhole.arrays import SINGLE_ROUNDOFF, UNIT_ROUNDOFF, random_stream, whole_number
from keyhole.errors import KeyholeError, OracleError
from keyhole.learners.auto import judge_family
from keyhole.learners.base import Learner
from keyhole.learners.block import BlockLearner, count_block_queries
from keyhole.learners.label_only import LabelOnly
from keyhole.learners.mlp.learner import MlpLearner
from keyhole.learners.mlp.relu.learner import ReluNetworkLearner
from keyhole.learners.multi_head.learner import MultiHead
from keyhole.learners.positions import Positions
from keyhole.learners.single_head import LowRank, SingleHead
from keyhole.learners.transformer.learner import Transformer
from keyhole.measured import Price, forecast
from keyhole.measurement.families import Family, Kind
from keyhole.measurement.family import Facts, examine_family
from keyhole.measurement.limits import Within
from keyhole.measurement.noise import estimate_noise, inside
from keyhole.models.attention import Attention
from keyhole.models.canonical import distance
from keyhole.models.mlp import Mlp
from keyhole.models.random import attention
from keyhole.models.relu_network import ReluNetwork
from keyhole.models.transformer import TransformerModel
from keyhole.oracles.base import Domain, Oracle, Spec
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.open import opened
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.batch import CHUNK_QUERIES
from keyhole.oracles.wrappers.count import QueryCounter
from keyhole.oracles.wrappers.degrade import Labels, Noisy, Rounded
from keyhole.oracles.wrappers.validate import Validator
from keyhole.recovery import recover

PURPOSE = "plan"


@dataclass(frozen=True)
class Size:
    """What the user knows of the box beforehand."""

    heads: int | None = None
    rank: int | None = None
    neurons: int | None = None

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            if number is not None:
                whole_number(name, number, 1)


@dataclass(frozen=True)
class Survey:
    """What a few queries told about the box; `asked` is their number."""

    spec: Spec
    precision: NoiseModel
    format: str
    # attention, network, smooth network, layer, labels, positions, block; "" where nothing was
    # asked
    kind: Kind | None  # None: not surveyed
    latency: float | None = None  # seconds of a query on its own
    each: float | None = None  # seconds of a further query in the same batch
    asked: int = 0
    family: Family | None = None  # as `check` and `recover` name it

    def seconds(self, queries: int) -> float | None:
        if self.latency is None or self.each is None:
            return None
        stages = 12  # batches that wait for each other, beyond those that are full
        return self.latency * (stages + queries // CHUNK_QUERIES) + self.each * queries


@dataclass(frozen=True)
class CostEstimate:
    """The forecast for one learner."""

    learner: str  # its name on the command line
    assumes: str
    queries: int | None  # None: depends on what is not known
    depends: str  # what would tell
    seconds: float | None  # of the box
    error: float | None  # relative, of the rehearsal
    rehearsal: str  # how the rehearsal ended
    measured: Price | None = None  # what boxes like it took, computing included


def survey(box: Any, seed: int = 0) -> Survey:
    """Some forty queries: precision, family, speed."""
    seed = whole_number("seed", seed, 0)
    with opened(box) as oracle:
        return _survey_box(QueryCounter(Validator(oracle)), seed)


def _survey_box(oracle: QueryCounter, seed: int) -> Survey:
    """The family is named by the same queries as in a recovery, where tokens around zero may be
    asked; elsewhere the smallest family is assumed."""
    domain: Domain = oracle.spec.domain
    family: Family | None = None
    rng, learning = random_stream(seed, "planning"), random_stream(seed, "learning")
    latency, each = _measure_speed(oracle, rng)
    if domain.vocabulary is not None or domain.radius <= 0:
        noise, _, answers = estimate_noise(oracle, rng)
        kind, outputs = Kind.ATTENTION, None if answers.ndim == 1 else int(answers.shape[1])
    else:
        facts, domain = examine_within_limits(oracle, learning.spawn(1)[0])
        kind, noise, outputs = facts.kind, facts.noise, facts.outputs
        if facts.smooth and kind is Kind.NETWORK:
            kind = Kind.SMOOTH_NETWORK
        family, _ = judge_family(oracle, facts, learning)
        if family is not None and family.has_norm:
            kind = Kind.BLOCK
        elif family is Family.POSITIONS:
            kind = Kind.POSITIONS
    number_format = "labels" if kind is Kind.LABELS else noise.format
    spec = replace(oracle.spec, outputs=oracle.spec.outputs or outputs, domain=domain)
    return Survey(spec, noise, number_format, kind, latency, each, oracle.paid, family)


def examine_within_limits(oracle: Oracle, rng: np.random.Generator) -> tuple[Facts, Domain]:
    """The family, and the domain that the box answers."""
    within = Within(oracle)
    while True:
        try:
            return examine_family(within, rng), within.spec.domain
        except OracleError:
            narrower = within.narrow(rng)
            if narrower is None:
                raise
            within = narrower


def _measure_speed(oracle: Oracle, rng: np.random.Generator) -> tuple[float, float]:
    """Seconds of a call and seconds per further query."""
    length = min(2, oracle.spec.domain.max_length or 2)
    timed = 8  # queries of the batch that is timed
    tokens = inside(oracle, rng.standard_normal((timed, length, oracle.spec.width)), rng)
    times = []
    for count in (1, 1, timed):  # the first call of all may set things up
        start = time.perf_counter()
        oracle.ask(QueryBatch.of(tokens[:count], PURPOSE))
        times.append(time.perf_counter() - start)
    each = max(0.0, (times[2] - times[1]) / (timed - 1))
    return max(0.0, times[1] - each), each


@dataclass(frozen=True)
class Candidate:
    """A learner, what it assumes, and a random box that it should be able to recover."""

    learner: Learner
    assumes: str
    depends: str
    kinds: tuple[Kind, ...]  # of a survey for which it comes into question
    draw: Callable[[np.random.Generator, int], Any] | None = None  # None: no rehearsal
    forecast: Callable[[Spec], int | None] | None = None  # None: the learner's own


@dataclass(frozen=True)
class Draws:
    """Random models of the given sizes, for a rehearsal at any width."""

    size: Size
    outputs: int | None

    def answer(self, width: int) -> int | None:
        return None if self.outputs is None else min(self.outputs, width)

    def layer(
        self, rng: np.random.Generator, width: int, heads: int = 1, low_rank: bool = False
    ) -> Attention:
        usual_share = 4  # width per rank, where nothing is known
        rank = min(self.size.rank or max(1, width // usual_share), width) if low_rank else None
        return attention(rng, width, outputs=self.answer(width), heads=heads, rank=rank)

    def network(self, rng: np.random.Generator, width: int) -> ReluNetwork:
        count, out = min(self.size.neurons or 2 * width, 2 * width), self.answer(width)
        shape = (count,) if out is None else (count, out)
        weight, bias = rng.standard_normal((count, width)), rng.standard_normal(count)
        return ReluNetwork(weight, bias, rng.standard_normal(shape))

    def smooth_network(self, rng: np.random.Generator, width: int) -> Mlp:
        relus = self.network(rng, width)
        return Mlp(relus.weight, relus.bias, relus.output.T)

    def transformer(self, rng: np.random.Generator, width: int) -> TransformerModel:
        score = rng.standard_normal((width, width)) / np.sqrt(width)
        return TransformerModel(score, None, self.network(rng, width))


def candidates(
    size: Size, outputs: int | None, family: Family | None = None
) -> Mapping[str, Candidate]:
    usual_heads = 2  # where nothing is known
    heads, draws = size.heads or usual_heads, Draws(size, outputs)
    hidden = ReluNetworkLearner(neurons=size.neurons)
    assumed = f"{heads} heads" + ("" if size.heads else " (assumed)")
    return {
        "single-head": Candidate(
            SingleHead(), "one attention head", "", (Kind.ATTENTION,), draws.layer
        ),
        "low-rank": Candidate(
            LowRank(rank=size.rank),
            "one head of low rank",
            "give --rank",
            (Kind.ATTENTION,),
            partial(draws.layer, low_rank=True),
        ),
        "multi-head": Candidate(
            MultiHead(heads=heads, rank=size.rank),
            assumed,
            "",
            (Kind.ATTENTION,),
            partial(draws.layer, heads=heads, low_rank=size.rank is not None),
        ),
        "label-only": Candidate(LabelOnly(), "one head, sign only", "", (Kind.LABELS,), attention),
        "relu-network": Candidate(
            hidden,
            "one hidden layer of ReLUs",
            "give --neurons",
            (Kind.NETWORK,),
            draws.network,
        ),
        "mlp": Candidate(
            MlpLearner(neurons=size.neurons),
            "one hidden layer of GELUs, SiLUs, tanhs, gated or not",
            "give --neurons",
            (Kind.SMOOTH_NETWORK,),
            draws.smooth_network,
        ),
        "transformer": Candidate(
            Transformer(ffn=hidden),
            "attention, then ReLUs",
            "give --neurons",
            (Kind.LAYER,),
            draws.transformer,
        ),
        "block": Candidate(
            BlockLearner(),
            family or "a block with norms, or half of it",
            "neurons are counted on the way",
            (Kind.BLOCK,),
            forecast=lambda spec: count_block_queries(family, spec.width),
        ),
        "auto": Candidate(Positions(), family or "attention with positions", "", (Kind.POSITIONS,)),
    }


def plan(
    target: Survey | Spec, size: Size | None = None, *, seed: int = 0, rehearse: bool = True
) -> list[CostEstimate]:
    """A forecast for every learner that comes into question.

    >>> [(e.learner, e.queries) for e in plan(Spec(width=64), Size(rank=4), rehearse=False)][:2]
    [('single-head', 4164), ('low-rank', 572)]
    """
    if isinstance(target, Spec):
        known = target.precision or NoiseModel()
        target = Survey(target, known, "taken for float64", None)
    size = Size() if size is None else size
    spec, found = replace(target.spec, precision=target.precision), []
    for name, candidate in candidates(size, target.spec.outputs, target.family).items():
        if target.kind and target.kind not in candidate.kinds:
            continue
        queries = (candidate.forecast or candidate.learner.expected_queries)(spec)
        price = None
        if target.family is not None:
            price = forecast(target.family, target.format, spec.width)
        if queries is None and price is not None:
            queries = price.queries
        error, ending = None, "not rehearsed"
        if rehearse:
            error, ending = _rehearse(name, size, target, seed)
        found.append(
            CostEstimate(
                name,
                candidate.assumes,
                queries,
                candidate.depends if queries is None else "",
                None if queries is None else target.seconds(queries),
                error,
                ending,
                price,
            )
        )
    return found


def _rehearse(name: str, size: Size, target: Survey, seed: int) -> tuple[float | None, str]:
    """The learner on a random box of its family, as exact as the real one."""
    rehearsed = 12  # width of the rehearsal, at most: a moment's work
    width = min(target.spec.width, rehearsed)
    small = Size(
        size.heads,
        None if size.rank is None else min(size.rank, width),
        None if size.neurons is None else min(size.neurons, 2 * width),
    )
    if target.spec.domain.vocabulary is not None:
        return None, "not rehearsed: the answer depends on the words"
    candidate = candidates(small, target.spec.outputs)[name]
    if candidate.draw is None:
        return None, "not rehearsed"
    rng = random_stream(seed, "planning network")
    secret = candidate.draw(rng, width)
    spec = Spec(width, domain=target.spec.domain, identity="rehearsal")
    box = _blur(secret, spec, target.precision, name == "label-only", seed)
    try:
        recovery = recover(box, candidate.learner, seed=seed, throw=False)
    except KeyholeError as error:  # the learner does not take such a box at all
        return None, str(error)
    ending = recovery.outcome.name
    if recovery.model is None:
        return None, ending
    return float(distance(recovery.model, secret)), ending


def _blur(secret: Any, spec: Spec, precision: NoiseModel, labels: bool, seed: int) -> Oracle:
    """A random model behind answers of this precision."""
    dtype = np.float32 if precision.relative > UNIT_ROUNDOFF else np.float64
    box: Oracle = FunctionOracle(secret.astype(dtype), spec)
    if labels:
        return Labels(box)
    if precision.additive > 0:
        box = Noisy(box, precision.additive, seed=seed)
    if precision.step > 0:
        box = Rounded(box, decimals=max(0, round(-math.log10(precision.step))))
    if dtype is np.float32 and precision.relative > SINGLE_ROUNDOFF:
        box = Rounded(box, bits=max(1, round(-math.log2(precision.relative))))
    return box
