"""How exact is this box?

Mostly read off answers that were paid for anyway: a box that computes in float32 (or less) gives
answers that are float32 numbers, whatever type it hands them over in, and the number of trailing
zero bits tells. `measure_precision` also asks the same question several times, for noise, and looks
for a rounding step; `examine` adds the lengths and norms that the box accepts.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import OracleError
from keyhole.oracles.base import UNIT_ROUNDOFF, Oracle, Precision
from keyhole.oracles.questions import Questions

FORMATS = (  # name, bits of the significand (with the hidden one)
    ("bfloat16", 8),
    ("float16", 11),
    ("float32", 24),
    ("float64", 53),
)
TELLING_ANSWERS = 1  # one irrational-looking answer is round by chance once in 2**29


@dataclass(frozen=True)
class Roundoff:
    """Unit roundoff of the box's arithmetic, and the number format it belongs to."""

    relative: float
    name: str


def roundoff(stated: Precision | None, answers: Array) -> Roundoff:
    """The stated precision, else what the type of the answers allows."""
    if stated is not None:
        return Roundoff(stated.relative, "stated")
    if answers.dtype == np.float16:
        return Roundoff(2.0**-11, "float16")
    if answers.dtype == np.float32:
        return Roundoff(2.0**-24, "float32")
    return Roundoff(UNIT_ROUNDOFF, "float64")


def observed(known: Roundoff, answers: Array) -> Roundoff:
    """`known`, or the coarser format that all these (irrational-looking) answers belong to."""
    numbers = np.asarray(answers, dtype=np.float64).ravel()
    numbers = numbers[numbers != 0]
    if known.name == "stated" or numbers.size < TELLING_ANSWERS:
        return known
    bits = int(significant_bits(numbers).max())
    for name, width in FORMATS:
        if bits <= width:
            coarser = Roundoff(2.0**-width, name)
            return coarser if coarser.relative > known.relative else known
    return known


def significant_bits(numbers: Array) -> Array:
    """How many bits of each number's significand are in use."""
    mantissa, _ = np.frexp(np.asarray(numbers, dtype=np.float64))
    integers = np.abs(mantissa * 2.0**53).astype(np.int64)
    lowest = integers & -integers
    trailing = np.where(integers == 0, 53, np.log2(np.maximum(lowest, 1)).astype(np.int64))
    return np.asarray(53 - trailing)


REPEATS = 4  # of one question: the scatter of the answers is the noise, to a factor of two
OTHERS = 4  # further questions: a rounding step must divide all answers
MOST_DECIMALS = 12  # rounding beyond this many decimals is not told from float64
LENGTHS = (2, 16, 128, 1024)  # that `examine` tries
NORMS = (1.0, 1e3, 1e6)
PURPOSE = "precision"


@dataclass(frozen=True)
class Measured:
    """How exact the answers are, and in which number format the box computes."""

    precision: Precision
    format: str
    deterministic: bool


def measure_precision(oracle: Oracle, rng: np.random.Generator) -> Measured:
    """Asks REPEATS + OTHERS questions of two tokens inside the domain."""
    tokens = _inside(oracle, rng.standard_normal((1 + OTHERS, 2, oracle.spec.width)), rng)
    batch = np.concatenate([np.repeat(tokens[:1], REPEATS, axis=0), tokens[1:]])
    answers = oracle.ask(Questions.of(batch, PURPOSE))
    repeats = np.asarray(answers[:REPEATS], dtype=np.float64).reshape(REPEATS, -1)
    kind = observed(roundoff(None, answers), answers)
    scatter = float(np.sqrt(np.mean(np.var(repeats, axis=0, ddof=1))))
    size = float(np.max(np.abs(repeats)))
    deterministic = scatter <= 4.0 * kind.relative * size  # batches may round differently
    precision = Precision(
        relative=kind.relative,
        additive=0.0 if deterministic else scatter,
        step=decimal_step(answers),
    )
    return Measured(precision, kind.name, deterministic)


def decimal_step(answers: Array) -> float:
    """10**-k if all answers are multiples of it, for the smallest such k; 0 if there is none."""
    numbers = np.asarray(answers, dtype=np.float64).ravel()
    for decimals in range(MOST_DECIMALS + 1):
        scaled = numbers * 10.0**decimals
        slack = 4.0 * np.finfo(float).eps * np.maximum(np.abs(scaled), 1.0)
        if (np.abs(scaled - np.round(scaled)) <= slack).all():
            return float(10.0**-decimals)
    return 0.0


def _inside(oracle: Oracle, tokens: Array, rng: np.random.Generator) -> Array:
    domain = oracle.spec.domain
    if domain.vocabulary is not None:
        return np.array(
            domain.vocabulary[rng.integers(len(domain.vocabulary), size=tokens.shape[:2])]
        )
    if domain.max_norm is not None:
        tokens = tokens * (domain.max_norm / np.linalg.norm(tokens, axis=2, keepdims=True))
    if domain.low is not None or domain.high is not None:
        tokens = np.clip(tokens, domain.low, domain.high)
    return tokens


def examine(oracle: Oracle, seed: int = 0) -> dict[str, Any]:
    """What `keyhole check` shows: about fifteen questions."""
    rng, spec = np.random.default_rng(seed), oracle.spec
    found: dict[str, Any] = {"width": spec.width}
    token = _inside(oracle, rng.standard_normal((1, 1, spec.width)), rng)
    one = oracle.ask(Questions.of(token, PURPOSE))
    found["outputs"] = "one number" if one.ndim == 1 else f"a vector of {one.shape[1]}"
    measured = measure_precision(oracle, rng)
    found["number_format"] = measured.format
    found["deterministic"] = measured.deterministic
    found["noise"] = measured.precision.additive
    found["rounding_step"] = measured.precision.step
    longest = spec.domain.max_length or LENGTHS[-1]
    sizes = [n for n in LENGTHS if n <= longest]
    found["accepts_lengths_up_to"] = _accepted(
        oracle,
        [_inside(oracle, rng.standard_normal((1, n, spec.width)), rng) for n in sizes],
        sizes,
    )
    if spec.domain.unbounded:
        unit = rng.standard_normal((1, 2, spec.width)) / np.sqrt(spec.width)
        found["accepts_norms_up_to"] = _accepted(oracle, [norm * unit for norm in NORMS], NORMS)
    return found


def _accepted(oracle: Oracle, trials: Any, labels: Any) -> Any:
    """The last label before the box fails or answers nonsense."""
    last = None
    for tokens, label in zip(trials, labels, strict=True):
        try:
            answer = oracle.ask(Questions.of(tokens, PURPOSE))
        except OracleError:
            break
        if not np.isfinite(answer).all():
            break
        last = label
    return last
