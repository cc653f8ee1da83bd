"""The power of `keyhole.verify`: which lies it catches, and whether it wrongs honest boxes.

    python benchmarks/verifier.py [lies] [honest] [--count N] [--seeds N] [--every N] [--queries N]

A lie is a box that is nearly the model. Its size is its function error in units of the box's own
precision: root mean squares over a fixed broad distribution of queries (six lengths up to 200,
tokens from 0.3 to 10 natural lengths, 24 cells), the largest ratio of all cells. The box's
precision in a cell is what a unit roundoff of tokens and parameters, noise and rounding of answers
do there. The figures of docs/methods/verification.md come from here.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from keyhole.arrays import UNIT_ROUNDOFF
from keyhole.learners.multi_head.learner import MultiHead
from keyhole.learners.single_head import SingleHead
from keyhole.learners.transformer.learner import Transformer
from keyhole.models.attention import Attention, Head
from keyhole.models.base import perturb_model
from keyhole.models.random import attention
from keyhole.oracles.base import Oracle
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.open import open_oracle
from keyhole.oracles.wrappers.degrade import Noisy, Rounded, round_bits
from keyhole.recovery import recover
from keyhole.verification.verify import verify
from networks import layer

QUERIES = (10, 50, 200)
LENGTHS, SIZES, PER_CELL = (1, 2, 5, 16, 64, 200), (0.3, 1.0, 3.0, 10.0), 12
COPIES = 3
DECADES = (1, 10, 100, 1e3, 1e4, 1e6, 1e9, np.inf)
Function = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, eq=False)
class Truth:
    """A model, and how exactly boxes answer for it."""

    name: str
    model: Any
    precision: NoiseModel

    def box(self, function: Function) -> Oracle:
        """What answers with this function, as exactly as that."""
        kind = self.precision
        if kind.relative > UNIT_ROUNDOFF:
            bits = round(-np.log2(kind.relative))
            inner = function
            function = lambda x: round_bits(inner(x), bits)  # noqa: E731
        box = open_oracle(function, width=self.model.width)
        if kind.step:
            return Rounded(box, decimals=round(-np.log10(kind.step)))
        return Noisy(box, kind.additive) if kind.additive else box


def broad(model: Any) -> Iterator[np.ndarray]:
    """The fixed distribution, cell by cell."""
    rng = np.random.default_rng(2026)
    natural = getattr(model, "natural_length", lambda: model.width**0.5)()
    for length in LENGTHS:
        for size in SIZES:
            tokens = rng.standard_normal((PER_CELL, length, model.width))
            yield size * natural * tokens / np.sqrt(model.width)


def function_error(truth: Truth, function: Function) -> float:
    """Size of a lie in units of the box's precision."""
    rng, worst, exact = np.random.default_rng(7), 0.0, truth.precision
    others = list(islice(perturb_model(truth.model, None, exact.relative, rng), COPIES))
    for tokens in broad(truth.model):
        answers = truth.model(tokens)
        blurred = tokens * (1.0 + exact.relative * rng.standard_normal(tokens.shape))
        spread = np.mean([(other(blurred) - answers) ** 2 for other in others])
        spread += exact.error_floor**2 + exact.relative**2 * np.mean(answers**2)
        worst = max(worst, float(np.sqrt(np.mean((function(tokens) - answers) ** 2) / spread)))
    return worst


# -- the lies ------------------------------------------------------------------------------------


def off_parameters(model: Any, rng: np.random.Generator, exponents: range) -> Iterator[Any]:
    """One entry, one row or a whole block of parameters off by 10^-k of the block's typical."""
    arrays = {name: array for name, array in model.to_arrays().items() if np.any(array)}
    for k in exponents:
        for _ in range(2):
            name = str(rng.choice(list(arrays)))
            array = np.array(arrays[name])
            size, how = 10.0**-k * np.sqrt(np.mean(array**2)), rng.integers(3)
            step = size * rng.standard_normal(array.shape)
            if how == 0 or array.ndim == 0:
                place = tuple(rng.integers(n) for n in array.shape)
                array[place] += size
            elif how == 1:
                array[rng.integers(len(array))] += step[0]
            else:
                array += step
            made = type(model).from_arrays({**model.to_arrays(), name: array})
            yield f"a parameter off by 1e-{k}", made


def extra_heads(model: Attention, rng: np.random.Generator) -> Iterator[Any]:
    for k in range(2, 14, 2):
        score = rng.standard_normal((model.width, model.width)) / np.sqrt(model.width)
        value = 10.0**-k * rng.standard_normal(model.heads[0].value.shape)
        yield "an extra head", Attention([*model.heads, Head(score, None, value)], model.offset)


def windows(model: Any, rng: np.random.Generator) -> Iterator[Any]:
    for last in (2, 8, 30, 60, 100, 150):
        yield "a mask at long lengths", lambda x, last=last: model(x[:, -last:])


def with_scores(model: Attention, change: Callable[[np.ndarray], np.ndarray]) -> Function:
    def box(x: np.ndarray) -> np.ndarray:
        answer = np.broadcast_to(model.offset, (len(x), *model.offset.shape)).copy()
        for head in model.heads:
            scores = change(np.einsum("nld,nd->nl", x, head.keys(x[:, -1])))
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            answer += np.einsum("nl,nld,d...->n...", weights, x, head.value)
        return answer

    return box


def caps(model: Attention, rng: np.random.Generator) -> Iterator[Any]:
    for cap in (5.0, 20.0, 50.0, 100.0):
        yield "a score cap", with_scores(model, lambda s, cap=cap: np.clip(s, -cap, cap))
        smooth = with_scores(model, lambda s, cap=cap: cap * np.tanh(s / cap))
        yield "a smooth score cap", smooth


def other_formats(model: Any, rng: np.random.Generator) -> Iterator[Any]:
    for bits in (8, 11, 24):
        short = {name: round_bits(a, bits) for name, a in model.to_arrays().items()}
        yield "weights in a shorter format", type(model).from_arrays(short)
        yield "tokens in a shorter format", lambda x, bits=bits: model(round_bits(x, bits))


def lies(truth: Truth, seed: int) -> Iterator[tuple[str, Function]]:
    rng, model = np.random.default_rng([seed, 3]), truth.model
    yield from off_parameters(model, rng, range(1, 15))
    yield from windows(model, rng)
    yield from other_formats(model, rng)
    if isinstance(model, Attention):
        yield from extra_heads(model, rng)
        yield from caps(model, rng)


def truths(seed: int) -> Iterator[Truth]:
    rng = np.random.default_rng([seed, 5])
    models = {
        "one head": attention(rng, 8),
        "one head, biases": attention(rng, 16, bias=True),
        "one head, rank 2": attention(rng, 24, rank=2),
        "three heads": attention(rng, 8, heads=3),
        "a layer": attention(rng, 12, heads=3, rank=4, outputs=12, bias=True),
        "Transformer": layer(seed, 6, 10, key_bias=True),
    }
    kinds = {
        "float64": NoiseModel(),
        "float32": NoiseModel(relative=2.0**-24),
        "four decimals": NoiseModel(step=1e-4),
        "noise 1e-3": NoiseModel(additive=1e-3),
    }
    for name, model in models.items():
        for kind, precision in kinds.items():
            yield Truth(f"{name}, {kind}", model, precision)


def power(count: int, every: int, counts: list[int]) -> None:
    """Detection rate by size of the lie, kind and number of queries, of every n-th lie."""
    by_size: dict[Any, list[bool]] = defaultdict(list)
    by_kind: dict[Any, list[bool]] = defaultdict(list)
    by_truth: dict[Any, list[bool]] = defaultdict(list)
    for seed in range(count):
        for truth in truths(seed):
            for kind, function in islice(lies(truth, seed), seed % every, None, every):
                size = function_error(truth, function)
                decade = next(i for i, d in enumerate(DECADES) if size < d)
                for queries in counts:
                    box = truth.box(function)
                    stated = truth.precision
                    verdict = verify(box, truth.model, queries=queries, precision=stated, seed=seed)
                    by_size[decade, queries].append(not verdict.agrees)
                    if size < 1 and not verdict.agrees and queries == counts[-1]:
                        print(f"  below: {truth.name}: {kind}, size {size:.3g}", flush=True)
                    if size > 100:
                        by_kind[kind.split(" by")[0], queries].append(not verdict.agrees)
                        by_truth[truth.name, queries].append(not verdict.agrees)
                        if verdict.agrees and queries == counts[-1]:
                            print(f"  missed: {truth.name}: {kind}, size {size:.3g}", flush=True)
    print("\nsize of the lie     boxes " + "".join(f"{q:>9d}" for q in counts))
    for i, top in enumerate(DECADES):
        low = DECADES[i - 1] if i else 0
        show(f"{low:.0e} to {top:.0e}", [by_size[i, q] for q in counts])
    print("\nlies beyond 100 precisions, by kind")
    for table in (by_kind, by_truth):
        for name in sorted({key for key, _ in table}):
            show(name, [table[name, q] for q in counts])
        print()
    columns = [[v for (_, k), vs in by_kind.items() if k == q for v in vs] for q in counts]
    show("all", columns)


def show(name: str, columns: list[list[bool]]) -> None:
    if columns[0]:
        rates = "".join(f"{np.mean(column):9.1%}" for column in columns)
        print(f"{name:32s} {len(columns[0]):5d} {rates}")


# -- honest boxes --------------------------------------------------------------------------------


def single(model: Any) -> Function:
    parts = {name: array.astype(np.float32) for name, array in model.to_arrays().items()}
    short = type(model).from_arrays(parts)
    return lambda x: short(x.astype(np.float32))


def half(model: Any) -> Function:
    """bfloat16: tokens, parameters and answers; sums in float32."""
    parts = {n: round_bits(a, 8).astype(np.float32) for n, a in model.to_arrays().items()}
    short = type(model).from_arrays(parts)
    return lambda x: round_bits(short(round_bits(x, 8).astype(np.float32)), 8)


def honest_boxes(model: Any) -> dict[str, Callable[[], Oracle]]:
    width = model.width
    return {
        "float64": lambda: open_oracle(model),
        "float64, another order of sums": lambda: open_oracle(
            lambda x: model(np.concatenate([x[:, -2::-1], x[:, -1:]], axis=1)), width=width
        ),
        "float32": lambda: open_oracle(single(model), width=width),
        "float32 as float64": lambda: open_oracle(
            lambda x: single(model)(x).astype(np.float64), width=width
        ),
        "bfloat16": lambda: open_oracle(half(model), width=width),
        "three decimals": lambda: Rounded(open_oracle(model), decimals=3),
        "noise 1e-3": lambda: Noisy(open_oracle(model), 1e-3),
        "noise 1e-6": lambda: Noisy(open_oracle(model), 1e-6),
        "relative noise 1e-4": lambda: Noisy(open_oracle(model), relative=1e-4),
    }


def honest_models(seed: int) -> dict[str, tuple[Any, Any]]:
    rng = np.random.default_rng([seed, 11])
    scale = float(rng.choice([0.1, 1.0, 10.0]))
    return {
        "one head": (attention(rng, int(rng.integers(3, 20)), scale=scale), SingleHead()),
        "one head, biases": (attention(rng, 12, bias=True, scale=scale), SingleHead()),
        "heads": (attention(rng, 6, heads=2), MultiHead()),
        "a layer": (attention(rng, 12, heads=3, rank=4, outputs=12), MultiHead()),
        "Transformer": (layer(seed, 5, 8, key_bias=bool(seed % 2)), Transformer()),
    }


def false_alarms(count: int) -> None:
    """Honest boxes, against the model itself and against the model recovered from the box."""
    rows: dict[Any, list[bool]] = defaultdict(list)
    worst: dict[Any, float] = defaultdict(float)
    total = 0
    for seed in range(10**6):
        for name, (model, learner) in honest_models(seed).items():
            for kind, build in honest_boxes(model).items():
                claimed, errors, precision = model, None, None
                recovered = seed % 2 == 1 and kind in ("float64", "float32")
                if recovered and not (name == "Transformer" and kind == "float32"):
                    found = recover(build(), learner, seed=seed, throw=False)
                    if found.outcome.name != "RECOVERED":
                        continue
                    claimed, errors = found.model, found.errors
                verdict = verify(
                    build(), claimed, errors=errors, queries=200, precision=precision, seed=seed
                )
                key = f"{kind}{', recovered' if claimed is not model else ''}"
                rows[key].append(not verdict.agrees)
                worst[key] = max(worst[key], verdict.worst)
                if not verdict.agrees:
                    print(f"  wronged: {name}, {key}, {seed}: {verdict.worst:.3g} {verdict.bound}")
                total += 1
                if total == count:
                    break
            if total == count:
                break
        if total == count:
            break
    print("\nhonest boxes                        boxes wronged   worst deviation in tolerances")
    for key, alarms in rows.items():
        print(f"{key:34s} {len(alarms):6d} {sum(alarms):7d}   {worst[key]:.3f}")
    print(f"all {total}, wronged {sum(map(sum, rows.values()))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", help="lies, honest; default both")
    parser.add_argument("--count", type=int, default=500, help="honest boxes")
    parser.add_argument("--seeds", type=int, default=3, help="models of each kind")
    parser.add_argument("--every", type=int, default=1, help="every n-th lie alone")
    parser.add_argument("--queries", type=int, nargs="+", default=list(QUERIES), help="fresh ones")
    options = parser.parse_args()
    jobs = options.jobs or ["lies", "honest"]
    start = time.process_time()
    if "lies" in jobs:
        power(options.seeds, options.every, options.queries)
    if "honest" in jobs:
        false_alarms(options.count)
    print(f"{time.process_time() - start:.0f} s of one core")


if __name__ == "__main__":
    main()
