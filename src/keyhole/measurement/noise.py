"""How exact is this box?

Mostly read off answers that were paid for anyway: a box that computes in float32 (or less) gives
answers that are float32 numbers, whatever type it hands them over in, and the number of trailing
zero bits tells. `measure_noise` also asks the same queries several times, for noise that is
additive or relative; `examine` adds the lengths and norms that the box accepts.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from scipy.special import gammaincinv

from keyhole.arrays import SINGLE_ROUNDOFF, TINY, Array, random_stream
from keyhole.errors import OracleError
from keyhole.oracles.base import Oracle
from keyhole.oracles.noise import FORMATS, NoiseModel
from keyhole.oracles.queries import QueryBatch

DECIMAL = "decimal"  # answers rounded to decimals, behind the point or in all
A_FEW = 16  # answers that show the longest format, if it is that
TELLING_ANSWERS = 4  # so many different answers tell the shortest formats apart
SAME = 4.0  # roundoffs by which two answers to one query may differ (batches round differently)
REPEATS = 64  # of one query, once noise is seen: its level to 9%
FINE = SINGLE_ROUNDOFF  # a decimal rounding step is only looked for in formats at least this fine
SHORTER = (0.71, 0.37, 0.19, 2.0**-10, 2.0**-20)  # tokens for it, relative to the first one
PURPOSE = "precision"
LOOKS = 3  # repeats of one query that show whether the box is noisy
NOISY_REPEATS = 16  # repeats at each of two sizes of answers, where it is: to a factor of 4


def noise_of_type(stated: NoiseModel | None, answers: Array) -> NoiseModel:
    """The stated precision, else what the type of the answers allows."""
    if stated is not None:
        return stated
    bits, longest = dict(FORMATS), FORMATS[-1][0]
    kind = answers.dtype.name if answers.dtype.name in bits else longest
    return NoiseModel(2.0 ** -bits[kind], format=kind)


def recognise_format(known: NoiseModel, answers: Array) -> NoiseModel:
    """The noise model with the shortest number format that holds all these (irrational-looking)
    answers."""
    numbers = np.asarray(answers, dtype=np.float64).ravel()
    if is_settled(known) or not numbers.any():
        return known
    if known.format == FORMATS[-1][0] and significant_bits(numbers[:A_FEW]).max() > FORMATS[-2][1]:
        return known  # the longest format there is: no need to look at the others
    numbers = np.unique(numbers[numbers != 0])
    bits = int(significant_bits(numbers).max())
    if known.format == FORMATS[0][0] and bits <= FORMATS[0][1]:
        return known
    for name, width in FORMATS:
        # a few float16 answers may have eight bits by chance
        if bits <= width and (numbers.size >= TELLING_ANSWERS or width > FORMATS[0][1]):
            return replace(known, relative=2.0**-width, format=name)
    return known


def is_settled(noise: NoiseModel) -> bool:
    """Whether the noise was stated or found out by other means than the number format."""
    return noise.format in ("stated", DECIMAL) or not noise.repeatable


def significant_bits(numbers: Array) -> Array:
    """How many bits of each number's significand are in use."""
    mantissa, _ = np.frexp(np.asarray(numbers, dtype=np.float64))
    integers = np.abs(mantissa * 2.0**53).astype(np.int64)
    lowest = integers & -integers
    trailing = np.where(integers == 0, 53, np.log2(np.maximum(lowest, 1)).astype(np.int64))
    return np.asarray(53 - trailing)


def measure_noise(oracle: Oracle, rng: np.random.Generator) -> NoiseModel:
    """Asks REPEATS queries: two tokens of different lengths, again and again."""
    one = inside(oracle, rng.standard_normal((1, 1, oracle.spec.width)), rng)
    small = oracle.spec.domain.vocabulary is None
    # how much longer the second of two tokens is, to see what grows with the answer
    larger = 2.0**10
    other = one * (larger if oracle.spec.domain.unbounded else 1.0 / larger) if small else one
    batch = np.repeat(np.concatenate([one, other]), REPEATS // 2, axis=0)
    answers = oracle.ask(QueryBatch.of(batch, PURPOSE))
    numbers = np.asarray(answers, dtype=np.float64).reshape(2, REPEATS // 2, -1)
    kind = recognise_format(noise_of_type(None, answers), answers)
    scatter = np.sqrt(np.mean(np.var(numbers, axis=1, ddof=1), axis=1))
    sizes = np.sqrt(np.mean(numbers**2, axis=(1, 2)))
    deterministic = bool((scatter <= SAME * kind.relative * sizes).all())
    relative, additive = kind.relative, 0.0
    if not deterministic:
        # the part of the scatter that grew with the answer is relative, the rest additive
        low, high = np.argsort(sizes)
        growth = max(scatter[high] ** 2 - scatter[low] ** 2, 0.0)
        proportional = 8.0  # growth of the scatter from which it counts as relative
        if scatter[high] > proportional * scatter[low]:
            relative = max(relative, float(np.sqrt(growth)) / sizes[high])
            additive = 0.0 if scatter[low] < 2.0 * relative * sizes[low] else float(scatter[low])
        else:
            additive = float(np.sqrt(np.mean(scatter**2)))
    step = _step(kind, answers)
    return NoiseModel(relative, additive, step, format=kind.format, repeatable=deterministic)


def _step(kind: NoiseModel, answers: Array) -> float:
    """A rounding step, in formats long enough to tell it from the format's own."""
    return decimal_step(answers) if kind.relative <= FINE else 0.0


def estimate_noise(
    oracle: Oracle, rng: np.random.Generator
) -> tuple[NoiseModel, QueryBatch, Array]:
    """One random token, asked twice: number format, rounding step, and whether there is noise,
    which is then measured with further queries."""
    token = inside(oracle, rng.standard_normal((1, 1, oracle.spec.width)), rng)
    queries = QueryBatch.of(np.repeat(token, 2, axis=0), PURPOSE)
    answers = oracle.ask(queries)
    stated = oracle.spec.precision
    if stated is not None:
        return replace(stated, repeatable=stated.additive == 0), queries, answers
    kind = recognise_format(noise_of_type(None, answers), answers)
    gap = np.max(np.abs(np.asarray(answers[0], dtype=np.float64) - answers[1]))
    if gap > SAME * kind.relative * np.max(np.abs(answers)):
        return measure_noise(oracle, rng), queries, answers
    domain = oracle.spec.domain
    if _looks_decimal(answers) and domain.vocabulary is None and domain.radius > 0:
        rounded = _rounded(oracle, token, answers)
        if rounded is not None:
            return rounded, queries, answers
    return replace(kind, step=_step(kind, answers)), queries, answers


def _rounded(oracle: Oracle, token: Array, answers: Array) -> NoiseModel | None:
    """Decimals behind the point, or digits in all? Shorter tokens tell."""
    shorter = np.concatenate([token * size for size in SHORTER])
    few = oracle.ask(QueryBatch.of(shorter, PURPOSE))
    return decimals(np.concatenate([answers[:1], few]))


def decimals(answers: Array) -> NoiseModel | None:
    """The rounding of answers that are written with few decimal digits: so many behind the point,
    if large numbers have more digits than small ones, else so many in all. None where answers are
    not decimal, or may be so by chance."""
    numbers = np.asarray(answers, dtype=np.float64).ravel()[:A_FEW]
    seen = numbers[numbers != 0]
    if not _looks_decimal(answers) or (whole(numbers) and _whole_by_chance(numbers)):
        return None
    many = len(np.unique(seen)) >= TELLING_ANSWERS
    coarsest_step = 3  # rounding to thousands
    step = decimal_step(numbers, coarsest_step if many else 0)
    digits = decimal_digits(seen)
    behind = np.floor(np.log10(np.abs(seen) / step)) + 1 if step else np.zeros(len(seen))
    fits = int((digits == behind).sum()), int((digits == digits.max()).sum())
    if step and (fits[0] >= fits[1] or len(seen) < len(numbers)):
        return NoiseModel(step=step, format=DECIMAL)
    # relative standard deviation of rounding to one digit (leading digits as usual)
    digit_spread = 0.134
    return NoiseModel(digit_spread * 10.0 ** (1 - digits.max()), format=DECIMAL)


def _looks_decimal(answers: Array) -> bool:
    """Whether the answers have few decimal digits, and not because they have few binary ones."""
    numbers = np.asarray(answers, dtype=np.float64).ravel()[:A_FEW]
    single = answers.dtype.kind == "f" and answers.dtype.itemsize < numbers.itemsize
    labels = (-1.0, 0.0, 1.0)  # whole numbers that are no rounded ones
    if single or np.isin(numbers, labels).all():
        return False
    if not whole(numbers) and significant_bits(numbers).max() <= FORMATS[-2][1]:
        return False
    most_digits = 9  # a number in double precision has as few by chance once in ten million
    return bool(decimal_digits(numbers).max() <= most_digits)


def whole(numbers: Array) -> bool:
    return bool(np.array_equal(numbers, np.round(numbers)))


def _whole_by_chance(numbers: Array) -> bool:
    """Whether numbers of the shortest format that holds them might all be whole: large ones are.
    (Of none can zero be expected.)"""
    bits = significant_bits(numbers).max()
    width = next(width for _, width in FORMATS if bits <= width)
    _, exponents = np.frexp(numbers[numbers != 0])
    chance_bits = 10  # what happens by chance once in a thousand times is not taken for chance
    return bool((numbers != 0).all() and np.minimum(exponents - width, 0).sum() > -chance_bits)


def decimal_digits(numbers: Array) -> Array:
    """How many decimal digits each number needs."""
    shortest = (np.format_float_scientific(abs(x), trim="-") for x in numbers.tolist())
    return np.array([len(text.split("e")[0].replace(".", "")) for text in shortest])


def decimal_step(answers: Array, coarsest: int = 0) -> float:
    """10**-k if all answers are multiples of it, for the smallest such k from -coarsest on; 0 if
    there is none. Multiples of a step that is as fine as the numbers' own digits are so by chance,
    as large answers are."""
    numbers = np.asarray(answers, dtype=np.float64).ravel()
    by_chance = 1e-6  # probability that numbers of double precision are taken for rounded ones
    most_decimals = 9  # rounding beyond this many decimals is not told from float64 by one answer
    for places in range(-coarsest, most_decimals + 1):
        scaled = numbers * 10.0**places
        slack = 4.0 * np.finfo(float).eps * np.abs(scaled)  # what is next to zero is no zero
        if (np.abs(scaled - np.round(scaled)) <= slack).all():
            shares = 2.0 * slack[slack > 0]  # of all numbers of this size, within the slack
            chance = float(np.prod(np.minimum(shares, 1.0)))
            return float(10.0**-places) if chance < by_chance or not len(shares) else 0.0
    return 0.0


def bound_noise(oracle: Oracle, tokens: Array, answers: list[Array], purpose: str) -> NoiseModel:
    """The noise of a box that is being verified, at the upper end of what is possible: an honest
    box must not be wronged. The answers given so far show number format and rounding step, these
    tokens, asked again, the noise."""
    numbers = np.concatenate([np.ravel(a) for a in answers])
    kind = recognise_format(noise_of_type(None, answers[0]), numbers)
    again = _ask_again(oracle, tokens, LOOKS, purpose)
    noisy = bool(np.max(np.ptp(again, axis=0)) > kind.apart(float(np.max(np.abs(again)))))
    if not noisy and (rounded := decimals(numbers)) is not None:
        return rounded
    relative, additive = _bound_scatter(oracle, tokens, purpose) if noisy else (0.0, 0.0)
    return NoiseModel(
        max(kind.relative, relative),
        additive,
        decimal_step(numbers),
        format=kind.format,
        repeatable=not noisy,
    )


def _ask_again(oracle: Oracle, tokens: Array, times: int, purpose: str) -> Array:
    answers = oracle.ask(QueryBatch.of(np.repeat(tokens[None], times, axis=0), purpose))
    return np.asarray(answers, dtype=np.float64).reshape(times, -1)


def _bound_scatter(oracle: Oracle, tokens: Array, purpose: str) -> tuple[float, float]:
    """Relative and additive noise, from small and from large answers."""
    domain = oracle.spec.domain
    # sizes of tokens whose answers show whether noise grows with them
    sizes = (1.0, 1.0) if domain.vocabulary is not None else (2.0**-6, 2.0**6)
    low, high = (
        _ask_again(
            oracle,
            tokens if size == 1.0 else domain.drawn_in(size * tokens),
            NOISY_REPEATS,
            purpose,
        )
        for size in sizes
    )
    scales = [max(float(np.sqrt(np.mean(part**2))), TINY) for part in (low, high)]
    scatter = [float(np.sqrt(np.mean(np.var(part, axis=0, ddof=1)))) for part in (low, high)]
    growth = scales[1] / scales[0]
    telling = 4.0  # growth of the answers from which noise that grows with them can be told
    grows = growth < telling or scatter[1] > np.sqrt(growth) * scatter[0]
    relative = upper_level(high) / scales[1] if grows else 0.0
    if grows and growth >= telling:
        return relative, upper_level(low)
    return relative, max(upper_level(low), upper_level(high))


def upper_level(repeats: Array) -> float:
    """Standard deviation of repeated answers, as high as it may be."""
    freedom = (len(repeats) - 1) * repeats.shape[1]
    square = float(np.mean(np.var(repeats, axis=0, ddof=1)))
    misjudged = 1e-6  # chance that the level of the noise is taken too low
    low = 2.0 * gammaincinv(freedom / 2.0, misjudged)  # quantile of chi square
    return float(np.sqrt(square * freedom / low))


def inside(oracle: Oracle, tokens: Array, rng: np.random.Generator) -> Array:
    domain = oracle.spec.domain
    if domain.vocabulary is not None:
        return np.array(
            domain.vocabulary[rng.integers(len(domain.vocabulary), size=tokens.shape[:2])]
        )
    if domain.unbounded:
        return tokens
    if domain.radius > 0:
        return tokens * (domain.radius / np.linalg.norm(tokens, axis=2, keepdims=True))
    low = -1.0 if domain.low is None else domain.low
    high = low + 1.0 if domain.high is None else domain.high
    return domain.drawn_in(low + (high - low) * rng.random(tokens.shape))


def examine(oracle: Oracle, seed: int = 0) -> dict[str, Any]:
    """What `keyhole check` shows: about fifteen queries."""
    rng, spec = random_stream(seed, "check"), oracle.spec
    found: dict[str, Any] = {"width": spec.width}
    token = inside(oracle, rng.standard_normal((1, 1, spec.width)), rng)
    one = oracle.ask(QueryBatch.of(token, PURPOSE))
    found["outputs"] = "one number" if one.ndim == 1 else f"a vector of {one.shape[1]}"
    noise, _, _ = estimate_noise(oracle, rng)
    found["number_format"] = noise.format
    found["deterministic"] = noise.repeatable
    found["noise"] = noise.additive
    found["rounding_step"] = noise.step
    lengths = (2, 16, 128, 1024)
    longest = spec.domain.max_length or lengths[-1]
    sizes = sorted({*(n for n in lengths if n < longest), min(longest, lengths[-1])})
    found["accepts_lengths_up_to"] = _accepted(
        oracle,
        [inside(oracle, rng.standard_normal((1, n, spec.width)), rng) for n in sizes],
        sizes,
    )
    if spec.domain.unbounded:
        unit = rng.standard_normal((1, 2, spec.width)) / np.sqrt(spec.width)
        norms = (1.0, 1e3, 1e6)
        found["accepts_norms_up_to"] = _accepted(oracle, [norm * unit for norm in norms], norms)
    return found


def _accepted(oracle: Oracle, trials: Any, labels: Any) -> Any:
    """The last label before the box fails or answers nonsense."""
    last = None
    for tokens, label in zip(trials, labels, strict=True):
        try:
            answer = oracle.ask(QueryBatch.of(tokens, PURPOSE))
        except OracleError:
            break
        if not np.isfinite(answer).all():
            break
        last = label
    return last
