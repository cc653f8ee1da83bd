"""ReLU networks and Transformer layers: queries, success, error and time, against baselines.

    python benchmarks/relu_network.py --quick          a few networks of each kind
    python benchmarks/relu_network.py                  500 networks, as quoted in the docs
    python benchmarks/relu_network.py --only art       one part: bounded single single_layers
                                                       scalar exact vector large signs
                                                       transformer trained student art

Random networks have A ~ N(0, 1/d), b ~ 0.5 N, w ~ N(0, 1/m); the number of neurons is not given.
`error` is the largest difference at 20 000 normal points over the standard deviation there,
`success` an error below 1e-9 with the right number of neurons. Queries are per unknown.

Reference lines, measured elsewhere on networks of the same sizes: the public code of Carlini,
Jagielski, Mironov (2020) needs 60 to 122 queries per unknown (10-15-1: 19 000 queries; 64-64-1:
283 000) and fails from 32-64-1 on, where it would enumerate 2^64 sign patterns.

The ART part needs `pip install adversarial-robustness-toolbox` (in an environment of its own). Its
FunctionallyEquivalentExtraction silently works in float32 (ART_NUMPY_DTYPE), in which it never
succeeds; the benchmark overrides that with float64, the best case for it.
"""

import argparse
import time
from collections import Counter
from typing import Literal

import numpy as np

from keyhole.errors import KeyholeError
from keyhole.learners.mlp.relu.learner import ReluNetworkLearner
from keyhole.learners.transformer.learner import Transformer
from keyhole.models.relu_network import ReluNetwork
from keyhole.models.transformer import TransformerModel
from keyhole.oracles.base import Domain
from keyhole.recovery import recover
from keyhole.results import Outcome, Recovery
from relu_baselines import art, student
from relu_boxes import Box, function_error, random_network

Method = Literal["segment", "antisymmetric"]
GRID = ((16, 16, 110), (16, 64, 130), (32, 32, 110), (32, 128, 120), (64, 256, 30))
SUCCESS = 1e-9
SINGLE_SUCCESS = 1e-5
CARLINI = "Carlini et al.: 60-122 queries per unknown (published code, same sizes)"


def run(
    learner: ReluNetworkLearner, d: int, m: int, k: int | None, count: int, limit: float = SUCCESS
) -> str:
    ratios, errors, batches, seconds, sides, failures = [], [], [], [], [], []
    numbers = k or 1
    unknowns = m * (d + numbers) + numbers
    for seed in range(count):
        secret = random_network(seed, d, m, k)
        box = Box(secret, d)
        start = time.process_time()
        try:
            found = learner.learn(box, np.random.default_rng([2, seed]))
        except KeyholeError as error:
            failures.append(f"{seed}: {type(error).__name__}")
            continue
        seconds.append(time.process_time() - start - box.seconds)
        error = function_error(found.model, secret, d, seed)
        if error > limit or found.model.neurons != m:
            failures.append(f"{seed}: {error:.1e}")
        ratios.append(box.queries * numbers / unknowns)
        errors.append(error)
        batches.append(box.batches)
        sides.append(found.diagnostics.orientation_certified)
    return (
        f"{d:4d} {m:4d} {numbers:4d} | {count - len(failures):4d}/{count:<4d} | "
        f"{np.median(ratios):6.3f} {np.max(ratios):6.3f} | {np.median(errors):8.1e} "
        f"{np.max(errors):8.1e} | {np.max(batches):4d} | {np.median(seconds):7.3f} s | "
        f"{np.mean(sides):5.0%} | {', '.join(failures[:4])}"
    )


HEADER = (
    "   d    m    k |  success  | per unknown   | error             | most | CPU time  | sides\n"
    "               |           | median   max  | median      max   | batch| median    | known"
)


def scalar(quick: bool) -> None:
    print("Scalar networks, m not given. Reference:", CARLINI)
    print(HEADER)
    for d, m, count in GRID:
        learner = ReluNetworkLearner(signs=False)  # sides: see below
        print(run(learner, d, m, None, max(2, count // 20) if quick else count), flush=True)


def exact(quick: bool) -> None:
    print("The same, exact=True (success: error below 1e-13)")
    print(HEADER)
    sizes = ((16, 16, 20), (16, 64, 10), (32, 32, 10), (32, 128, 3), (64, 256, 1))
    for d, m, count in sizes[: 3 if quick else None]:
        learner = ReluNetworkLearner(exact=True, signs=False)
        print(run(learner, d, m, None, 2 if quick else count, 1e-13), flush=True)


def vector(quick: bool) -> None:
    print("Vector answers (success: error below 1e-7)")
    print(HEADER)
    for d, m, k, count in ((8, 8, 8, 50), (16, 64, 16, 50), (32, 128, 32, 20), (64, 256, 64, 6)):
        print(run(ReluNetworkLearner(), d, m, k, 2 if quick else count, 1e-7), flush=True)


def large(quick: bool) -> None:
    print("A large one (success: error below 1e-8)")
    print(HEADER)
    d, m = (784, 32) if quick else (784, 128)
    print(run(ReluNetworkLearner(), d, m, None, 1, 1e-8))


def signs(quick: bool) -> None:
    print("Sides of the planes (last column: certified)")
    print(HEADER)
    for d, m, k in ((16, 16, None), (32, 32, None), (16, 32, None), (32, 64, None), (16, 64, 4)):
        print(run(ReluNetworkLearner(), d, m, k, 3 if quick else 30), flush=True)


def transformer(quick: bool) -> None:
    print("Transformer layers: score W, function on lengths 1-20, queries beyond the network")
    print("   d    m bias  method        exact |  W error | f error  | beyond FFN / d^2 | CPU time")
    for d in (8, 16) if quick else (8, 16, 32):
        for m in (d, 4 * d):
            for bias in (True, False):
                count = 1 if quick else 5
                transformer_rows(d, m, bias, "segment", ReluNetworkLearner(exact=True), count)
                transformer_rows(d, m, bias, "segment", ReluNetworkLearner(), count)
                if not bias:
                    transformer_rows(d, m, bias, "antisymmetric", ReluNetworkLearner(), count)


def transformer_rows(
    d: int, m: int, bias: bool, method: Method, ffn: ReluNetworkLearner, count: int
) -> None:
    rows = []
    for seed in range(count):
        network = random_network(seed, d, m)
        if not bias:
            network = ReluNetwork(network.weight, None, network.output)
        rng = np.random.default_rng([3, seed, d])
        secret = TransformerModel(rng.standard_normal((d, d)) / np.sqrt(d), None, network)
        box = Box(secret, d)
        start = time.process_time()
        found = Transformer(ffn, method).learn(box, np.random.default_rng([4, seed])).model
        own = time.process_time() - start - box.seconds
        gap = np.linalg.norm(found.score - secret.score) / np.linalg.norm(secret.score)
        spread = network(rng.standard_normal((2000, d))).std()
        worst = 0.0
        for length in range(1, 21):
            tokens = rng.standard_normal((50, length, d))
            worst = max(worst, float(np.abs(found(tokens) - secret(tokens)).max() / spread))
        single = Box(secret, d)
        ffn.learn(single, np.random.default_rng([4, seed]))
        rows.append((gap, worst, (box.queries - single.queries) / d**2, own))
    worst_row = np.max(rows, axis=0)
    print(
        f"{d:4d} {m:4d} {bias!s:5s} {method:13s} {ffn.exact!s:5s} | {worst_row[0]:8.1e} | "
        f"{worst_row[1]:8.1e} | {worst_row[2]:16.3f} | {worst_row[3]:6.2f} s",
        flush=True,
    )


def trained(quick: bool) -> None:
    """Networks trained on a task: two arms of a spiral, lifted to 16 inputs."""
    import torch

    print("Trained networks (PyTorch, Adam, a two-class spiral lifted to 16 inputs)")
    for seed in range(1 if quick else 5):
        torch.manual_seed(seed)
        rng = np.random.default_rng(seed)
        angle = rng.uniform(0, 4 * np.pi, 2000)
        label = rng.integers(0, 2, 2000) * 2.0 - 1
        spiral = np.stack([angle * np.cos(angle), angle * np.sin(angle)], axis=1) / 8
        lift = rng.standard_normal((2, 16))
        x = torch.tensor((label[:, None] * spiral) @ lift + 0.05 * rng.standard_normal((2000, 16)))
        y = torch.tensor(label)
        net = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)
        ).double()
        optimiser = torch.optim.Adam(net.parameters(), lr=1e-2)
        for _ in range(200 if quick else 1000):
            optimiser.zero_grad()
            torch.nn.functional.soft_margin_loss(net(x)[:, 0], y).backward()
            optimiser.step()
        parts = [p.detach().numpy() for p in net.parameters()]
        secret = ReluNetwork(parts[0], parts[1], parts[2][0], None, parts[3][0])
        box = Box(secret, 16)
        found = ReluNetworkLearner().learn(box, np.random.default_rng(seed)).model
        error = function_error(found, secret, 16, seed)
        share = box.queries / (64 * 17 + 1)
        print(f"  seed {seed}: {found.neurons} neurons, {share:.3f} per unknown, error {error:.1e}")


def bounded(quick: bool) -> None:
    """Balls and boxes. A network is right if it is right at all of 6000 points inside; rare: it is
    wrong at no more than the share of the edge that the result itself calls unseen."""
    print("Bounded domains, through recover() with its verification")
    domains = [Domain(max_norm=size) for size in (0.5, 1.0, 3.0, 9.0)]
    domains += [Domain(low=-1.0, high=1.0), Domain(low=0.0, high=1.0)]
    for d, m, k in ((4, 6, None), (8, 8, None), (8, 24, None), (8, 16, 3), (16, 16, None)):
        counts, asked = Counter[str](), []
        for domain in domains:
            for seed in range(2 if quick else 8):
                secret = random_network(seed, d, m, k)
                box = Box(secret, d, domain)
                found = recover(box, ReluNetworkLearner(), seed=seed, throw=False)
                counts[judged(found, secret, domain, d)] += 1
                asked.append(box.queries)
        print(f"  ({d}, {m}, {k or 1}): {dict(counts)}, median queries {np.median(asked):.0f}")


def judged(found: Recovery, secret: ReluNetwork, domain: Domain, d: int) -> str:
    if found.outcome is not Outcome.RECOVERED:
        return found.outcome.name
    rng = np.random.default_rng(7)
    points = rng.standard_normal((6000, d))
    points *= (domain.max_norm or 1) * (rng.random(6000) / np.linalg.norm(points, axis=1))[:, None]
    if domain.high is not None:
        points = rng.uniform(domain.low, domain.high, (6000, d))
    answers = secret(points)
    gaps = np.abs(found.model(points) - answers).reshape(6000, -1).max(axis=1)
    wrong = float((gaps > 1e-6 * (answers.std() or 1.0)).mean())
    return "right" if wrong == 0 else "rare" if wrong <= ReluNetworkLearner().unseen else "WRONG"


def single(quick: bool) -> None:
    """Boxes that compute in single precision, through recover() with its verification. `own` is
    the box's own rounding, `bars` the median error of a neuron in claimed standard errors."""
    print("Single precision (success: RECOVERED, m right, error below 1e-5)")
    print(
        "   d    m    k | success | per unknown   | error             | own      | bars | CPU time"
    )
    grid = ((8, 8, None), (16, 16, None), (8, 24, None), (32, 32, None), (16, 64, None))
    for d, m, k in (*grid, (16, 8, 4), (16, 32, 8)):
        rows, good, numbers, failures = [], 0, k or 1, Counter[str]()
        count = 2 if quick else 20 if m < 64 else 10
        for seed in range(count):
            secret = random_network(seed, d, m, k)
            rounded = secret.astype(np.float32)
            box = Box(rounded, d)
            start = time.process_time()
            found = recover(box, ReluNetworkLearner(), seed=seed, throw=False)
            seconds = time.process_time() - start - box.seconds
            if found.outcome is not Outcome.RECOVERED:
                failures[found.outcome.name] += 1
                continue
            error = function_error(found.model, secret, d, seed)
            right = error < SINGLE_SUCCESS and found.model.neurons == m
            good += right
            failures[f"{error:.0e}"] += not right
            own = function_error(rounded, secret, d, seed)
            share = box.queries * numbers / (m * (d + numbers) + numbers)
            rows.append((share, error, own, error_in_bars(found, secret), seconds))
        middle, most = np.median(rows, axis=0), np.max(rows, axis=0)
        print(
            f"{d:4d} {m:4d} {numbers:4d} | {good:3d}/{count:<3d} | {middle[0]:6.2f} {most[0]:6.2f} "
            f"| {middle[1]:8.1e} {most[1]:8.1e} | {most[2]:8.1e} | {middle[3]:4.2f} | "
            f"{middle[4]:5.1f} s | {dict(+failures)}",
            flush=True,
        )


def error_in_bars(found: Recovery, secret: ReluNetwork) -> float:
    """Median distance of output_j weight_j from the nearest true one, per entry, in claimed
    standard errors."""

    def neurons(network: ReluNetwork) -> np.ndarray:
        return network.output_table[:, None, :] * network.weight[:, :, None]

    mine, true = neurons(found.model)[:, None], neurons(secret)[None]
    gaps = np.minimum(
        np.linalg.norm(mine - true, axis=(2, 3)), np.linalg.norm(mine + true, axis=(2, 3))
    ).min(axis=1)
    claimed = np.linalg.norm(found.errors.output_table, axis=1) * np.sqrt(secret.width)
    return float(np.median(gaps / claimed))


def single_layers(quick: bool) -> None:
    """Transformer layers that compute in single precision, through recover()."""
    print("Transformer layers in single precision: score W beside its stated error")
    for d, m in ((4, 6), (8, 8), (8, 16), (16, 16)):
        outcomes, rows = Counter[str](), []
        for seed in range(2 if quick else 10):
            rng = np.random.default_rng([3, seed, d])
            score = rng.standard_normal((d, d)) / np.sqrt(d)
            secret = TransformerModel(score, None, random_network(seed, d, m))
            box = Box(secret.astype(np.float32), d)
            found = recover(box, Transformer(), seed=seed, throw=False)
            outcomes[found.outcome.name] += 1
            if found.outcome is Outcome.RECOVERED:
                size = np.linalg.norm(score)
                gap = np.linalg.norm(found.model.score - score) / size
                stated = np.linalg.norm(found.errors.score) / size
                rows.append((gap, stated, box.queries / (d * d + m * (d + 1) + 1)))
        worst = np.max(rows, axis=0)
        print(
            f"  ({d}, {m}): {dict(outcomes)}, W error up to {worst[0]:.1e} (stated "
            f"{worst[1]:.1e}), queries per unknown up to {worst[2]:.1f}",
            flush=True,
        )


PARTS = {
    part.__name__: part
    for part in (
        bounded,
        single,
        single_layers,
        scalar,
        exact,
        vector,
        large,
        signs,
        transformer,
        trained,
        student,
        art,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few networks of each kind")
    parser.add_argument("--only", choices=PARTS, nargs="+", help="these parts only")
    options = parser.parse_args()
    for name in options.only or PARTS:
        PARTS[name](options.quick)
        print(flush=True)


if __name__ == "__main__":
    main()
