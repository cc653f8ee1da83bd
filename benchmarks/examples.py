"""Learning a layer from examples, measured.

    python benchmarks/examples.py recovery   --instances 200   fresh layers at r times the floor
    python benchmarks/examples.py baselines  --instances 20    against L-BFGS and Adam, equal time
                                             (--gaussian: other inputs, here and in recovery)
    python benchmarks/examples.py noise      --instances 60    error over the Cramer-Rao bound
    python benchmarks/examples.py floor      --instances 100   near and below the floor
    python benchmarks/examples.py sculpting  --instances 50    certificates and summed values
    python benchmarks/examples.py hard                         exponential dependence on the heads
    python benchmarks/examples.py large                        width 64, 8 heads
    python benchmarks/examples.py starts                       success per start, one thread or all

`--quick` shrinks every part to a minute. r is the number of examples over the floor
max(2 m d / k, d^2 / (k (k - 1))); sc the Frobenius norm of a score matrix, on Boolean inputs the
standard deviation of a score. Times are CPU seconds of this process. A budget of --seconds is CPU
time: the learner, which looks at the clock on the wall, is allowed PATIENCE times as many, and what
took more CPU time than the budget is not counted as solved.
"""

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
from scipy.optimize import linear_sum_assignment, minimize
from threadpoolctl import threadpool_limits

from keyhole.fitting.attention_rows import Rows, average_tokens, compute_patterns, pull
from keyhole.fitting.fisher import estimate_information
from keyhole.fitting.initial_guess import draw_start
from keyhole.fitting.levenberg_marquardt import descend, measure_label_power
from keyhole.fitting.variable_projection import project
from keyhole.learners.examples.learner import FromExamples
from keyhole.learners.examples.restarts import draw_led_start
from keyhole.learners.published.chen_li_sculpting import sculpt
from keyhole.models.attention import Attention, Head, every_position
from keyhole.models.canonical import distance
from keyhole.models.random import high_order
from keyhole.recovery import learn
from keyhole.results import Recovery

SOLVED = 1e-18  # squared residual, relative to the labels, that only an exact fit reaches
CONTESTS = [  # d, k, m, sc, r
    (8, 4, 2, 0.3, 2.0), (8, 4, 2, 1.0, 2.0), (8, 4, 2, 5.0, 2.0),
    (8, 4, 2, 0.3, 4.0), (8, 4, 2, 1.0, 4.0), (8, 4, 2, 5.0, 4.0),
    (8, 8, 4, 1.0, 4.0), (8, 8, 4, 5.0, 4.0), (8, 2, 3, 1.0, 4.0),
    (8, 4, 2, 20.0, 8.0), (16, 8, 3, 1.0, 4.0),
]  # fmt: skip
PATIENCE = 2.5  # seconds on the wall per CPU second on a machine that does other things too


def layer(rng: np.random.Generator, d: int, heads: int, sc: float) -> Attention:
    members = []
    for _ in range(heads):
        score = rng.standard_normal((d, d))
        value = rng.standard_normal((d, d)) / np.sqrt(d)
        members.append(Head(sc * score / np.linalg.norm(score), None, value))
    return Attention(members, np.zeros(d))


def examples_needed(d: int, k: int, m: int, r: float) -> int:
    return int(np.ceil(r * max(2 * m * d / k, d * d / (k * (k - 1)))))


def inputs(rng: np.random.Generator, n: int, k: int, d: int, gaussian: bool = False) -> np.ndarray:
    if gaussian:
        return rng.standard_normal((n, k, d))
    return rng.choice([-1.0, 1.0], (n, k, d))


def error(found: Recovery, truth: Attention) -> float:
    return np.inf if found.model is None else distance(found.model, truth)


def timed(X: np.ndarray, Y: np.ndarray, learner: FromExamples) -> tuple[Recovery, float]:
    begin = time.process_time()
    found = learn(X, Y, learner, throw=False)
    return found, time.process_time() - begin


def cells(args: argparse.Namespace) -> list[tuple[int, int, int, float]]:
    scs = [args.sc] if args.sc else [0.3, 1.0, 5.0]
    return list(itertools.product(args.widths, [2, 4, 8, 16], [1, 2, 3, 4], scs))


def recovery(args: argparse.Namespace) -> None:
    rng = np.random.default_rng(args.seed)
    grid = cells(args)
    order = rng.permutation(len(grid))
    tally: Counter[tuple[int, float]] = Counter()
    times, failures = [], []
    for i in range(args.instances):
        d, k, m, sc = grid[order[i % len(grid)]]
        truth = layer(rng, d, m, sc)
        X = inputs(rng, examples_needed(d, k, m, args.r), k, d, args.gaussian)
        learner = FromExamples(seconds=PATIENCE * args.seconds)
        found, seconds = timed(X, every_position(truth, X), learner)
        good = error(found, truth) <= 1e-9 and found.outcome.name == "RECOVERED"
        good = good and seconds <= args.seconds
        tally[d, sc, "solved" if good else "failed"] += 1
        times.append(seconds)
        if not good:
            failures.append((d, k, m, sc, found.outcome.name))
            how = f"{found.outcome.name}, {seconds:.0f} s"
            print(f"  failed: d={d} k={k} m={m} sc={sc}: {how}", flush=True)
    print(f"r={args.r} {'Gaussian' if args.gaussian else 'Boolean'} inputs, heads not given")
    print("  d    sc   solved")
    for d, sc in sorted({(d, sc) for d, sc, _ in tally}):
        solved, failed = tally[d, sc, "solved"], tally[d, sc, "failed"]
        print(f"{d:4d} {sc:5} {solved:4d}/{solved + failed}")
    total = args.instances - len(failures)
    print(
        f"parameter error <= 1e-9: {total}/{args.instances}; CPU seconds median "
        f"{np.median(times):.2f}, mean {np.mean(times):.2f}, largest {max(times):.1f}"
    )


def joint(rows: Rows, heads: int, vector: np.ndarray) -> tuple[float, np.ndarray]:
    """Squared residual of scores and values together, and its gradient."""
    d, size = rows.width, rows.queries.shape[2] * heads * rows.width
    theta = vector[:size].reshape(-1, heads, d)
    values = vector[size:].reshape(heads * d, -1)
    pattern = compute_patterns(rows, theta)
    mixed = average_tokens(rows, pattern)
    residual = mixed @ values - rows.targets.reshape(len(mixed), -1)
    slope = np.concatenate(
        [pull(rows, pattern, values, residual).ravel(), (mixed.T @ residual).ravel()]
    )
    power = measure_label_power(rows)
    return float((residual**2).sum()) / power, 2 * slope / power


def start(rows: Rows, heads: int, rng: np.random.Generator) -> np.ndarray:
    """Small random scores, values of the usual size. (Values by regression would be a trap: with
    nearly uniform attention all heads look alike, and regression makes them huge.)"""
    values = rng.standard_normal((heads * rows.width, rows.outputs)) / np.sqrt(rows.width)
    return np.concatenate([draw_start(rows, heads, rng).ravel(), values.ravel()])


def lbfgs(rows: Rows, heads: int, seconds: float, rng: np.random.Generator) -> np.ndarray:
    """Joint L-BFGS from small random starts, restarted; the best residual wins."""
    end = time.process_time() + seconds
    best, chosen = np.inf, start(rows, heads, rng)

    class Late(Exception):
        pass

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal best, chosen
        value, slope = joint(rows, heads, x)
        if value < best:
            best, chosen = value, x.copy()
        if time.process_time() > end:
            raise Late
        return value, slope

    options = {"maxiter": 20000, "maxfun": 40000, "maxcor": 20, "ftol": 0.0, "gtol": 1e-15}
    try:
        while best > 1e-20:
            minimize(
                objective, start(rows, heads, rng), jac=True, method="L-BFGS-B", options=options
            )
    except Late:
        pass
    return chosen


def adam(rows: Rows, heads: int, seconds: float, rng: np.random.Generator) -> np.ndarray:
    """One run of Adam with a cosine schedule over the whole time."""
    begin = time.process_time()
    x = start(rows, heads, rng)
    mean, square, steps = np.zeros_like(x), np.zeros_like(x), 0
    while (share := (time.process_time() - begin) / seconds) < 1.0:
        steps += 1
        _, slope = joint(rows, heads, x)
        mean = 0.9 * mean + 0.1 * slope
        square = 0.999 * square + 0.001 * slope**2
        rate = 0.03 * 0.5 * (1 + np.cos(np.pi * share))
        x = x - rate * mean / (1 - 0.9**steps) / (np.sqrt(square / (1 - 0.999**steps)) + 1e-12)
    return x


def as_layer(vector: np.ndarray, rows: Rows, heads: int) -> Attention:
    d = rows.width
    theta = vector[: d * heads * d].reshape(d, heads, d)
    values = vector[d * heads * d :].reshape(heads, d, -1)
    return Attention(
        [Head(theta[:, i].T, None, values[i]) for i in range(heads)], np.zeros(values.shape[2])
    )


def baselines(args: argparse.Namespace) -> None:
    grid = CONTESTS[1:3] if args.quick else CONTESTS
    print(f"solved (parameter error <= 1e-6) of {args.instances}, {args.seconds:g} CPU s each")
    print("  d  k  m    sc  r inputs    Adam L-BFGS keyhole   keyhole's CPU seconds")
    for d, k, m, sc, r in grid:
        counts: Counter[str] = Counter()
        spent = []
        for i in range(args.instances):
            rng = np.random.default_rng([args.seed, i])
            truth = layer(rng, d, m, sc)
            X = inputs(rng, examples_needed(d, k, m, r), k, d, args.gaussian)
            Y = every_position(truth, X)
            rows = Rows(X, X, None, np.ones(X.shape[:2]), Y)
            solvers: dict[str, Callable[..., np.ndarray]] = {"adam": adam, "lbfgs": lbfgs}
            for name, solver in solvers.items():
                end = solver(rows, m, args.seconds, np.random.default_rng([args.seed, i, 1]))
                counts[name] += distance(as_layer(end, rows, m), truth) <= 1e-6
            learner = FromExamples(heads=m, seconds=PATIENCE * args.seconds)
            found, seconds = timed(X, Y, learner)
            counts["keyhole"] += error(found, truth) <= 1e-6 and seconds <= args.seconds
            spent.append(seconds)
        print(
            f"{d:3d} {k:2d} {m:2d} {sc:5} {r:2g} {'Gauss  ' if args.gaussian else 'Boolean'} "
            f"{counts['adam']:5d} {counts['lbfgs']:6d} {counts['keyhole']:7d}   "
            f"median {np.median(spent):.2f}, largest {max(spent):.2f}",
            flush=True,
        )


def noise(args: argparse.Namespace) -> None:
    rng = np.random.default_rng(args.seed)
    print("sigma relative to the labels, r = 8; theta error over the Cramer-Rao bound")
    print("  sigma  heads right  error/bound (rms, largest)  within 2 s.e.  recovered")
    for sigma in (1e-6, 1e-4, 1e-2, 1e-1) if not args.quick else (1e-2,):
        ratios, within, right, clean = [], [], 0, 0
        for _ in range(args.instances):
            d, k = int(rng.choice([8, 16])), int(rng.choice([2, 4, 8, 16]))
            m, sc = int(rng.integers(1, 5)), float(rng.choice([0.3, 1.0, 5.0]))
            truth = layer(rng, d, m, sc)
            X = inputs(rng, examples_needed(d, k, m, 8), k, d)
            Y = every_position(truth, X)
            size = float(np.sqrt(np.mean(Y**2)))
            found, _ = timed(X, Y + sigma * size * rng.standard_normal(Y.shape), FromExamples())
            clean += found.outcome.name == "RECOVERED"
            if found.model is None or len(found.model.heads) != m:
                print(f"  wrong: {(d, k, m, sc)} {found.outcome.name}", flush=True)
                continue
            right += 1
            rows = Rows(X, X, None, np.ones(X.shape[:2]), Y)
            theta = np.stack([h.score.T for h in truth.heads], axis=1)
            bound = estimate_information(rows, project(rows, theta), rng).theta * sigma * size
            cost = [
                [np.linalg.norm(h.score - g.score) for g in found.model.heads] for h in truth.heads
            ]
            _, order = linear_sum_assignment(np.array(cost))
            gap = np.stack([found.model.heads[j].score.T for j in order], axis=1) - theta
            bars = np.stack([found.errors.heads[j].score.T for j in order], axis=1)
            ratios.append(np.linalg.norm(gap) / np.linalg.norm(bound))
            within.append(np.mean(np.abs(gap) < 2 * bars))
        print(
            f"{sigma:7g}  {right:4d}/{args.instances}       "
            f"{np.sqrt(np.mean(np.square(ratios))):.2f}, {max(ratios):.2f}"
            f"                  {np.mean(within):.1%}          {clean}",
            flush=True,
        )


def floor(args: argparse.Namespace) -> None:
    rng = np.random.default_rng(args.seed)
    tally: Counter[str] = Counter()
    wrong = 0
    for _ in range(args.instances):
        d, k, m = (
            int(rng.choice([4, 6, 8, 12])),
            int(rng.choice([2, 4, 8])),
            int(rng.integers(1, 4)),
        )
        sc, r = float(rng.choice([0.3, 1.0, 5.0])), float(rng.uniform(0.5, 1.1))
        truth = layer(rng, d, m, sc)
        X = inputs(rng, max(examples_needed(d, k, m, r), 1), k, d, bool(rng.integers(2)))
        heads = m if rng.integers(2) else None
        learner = FromExamples(heads=heads, seconds=args.seconds)
        found, _ = timed(X, every_position(truth, X), learner)
        right = error(found, truth) <= 1e-6
        tally[f"{found.outcome.name}, {'right' if right else 'wrong or none'}"] += 1
        wrong += found.outcome.name == "RECOVERED" and not right
    print(f"r from 0.5 to 1.1, {args.instances} instances, {args.seconds:g} s each")
    for name, count in tally.most_common():
        print(f"{count:5d}  {name}")
    print(f"clean verdicts for a wrong model: {wrong}")


def sculpting(args: argparse.Namespace) -> None:
    rng = np.random.default_rng(args.seed)
    violated = found_sum = certified = 0
    print("  k m  sc  sum of values: crude -> refined   certified  violated")
    for i in range(args.instances):
        k, m, sc = int(rng.choice([2, 3, 4])), 1 + i % 2, float(rng.choice([10.0, 20.0, 50.0]))
        truth = layer(rng, 8, m, sc)
        X = inputs(rng, 2000, k, 8)
        found = sculpt(Rows(X, X, None, np.ones(X.shape[:2]), every_position(truth, X)))
        total = sum(h.value for h in truth.heads)
        gaps = [
            np.linalg.norm(v - total) / np.linalg.norm(total) for v in (found.crude, found.values)
        ]
        broken = sum(int((found.certificates.margins(h.score) <= 0).sum()) for h in truth.heads)
        violated, found_sum = violated + broken, found_sum + (gaps[1] <= 1e-2)
        certified += len(found.certificates)
        if i < 12:
            count = len(found.certificates)
            print(f"{k:3d} {m} {sc:3g}  {gaps[0]:.2f} -> {gaps[1]:.0e} {count:20d} {broken:9d}")
    print(
        f"{args.instances} instances: {violated} of {certified} certified inequalities violated by "
        f"the truth; sum of values to 1e-2 in {found_sum}"
    )


def hard(args: argparse.Namespace) -> None:
    print("finite differences of one head (width 6, 4 tokens, step 0.5), r = 6, heads given")
    print("  m  solved  amplification of label errors  CPU seconds")
    for m in range(1, 5 if args.quick else 6):
        solved, spent, sizes = 0, [], []
        count = 3 if args.quick else 5
        for i in range(count):
            rng = np.random.default_rng([args.seed, i])
            truth = high_order(rng, 6, m)
            X = inputs(rng, examples_needed(6, 4, m, 6), 4, 6)
            Y = every_position(truth, X)
            found, seconds = timed(X, Y, FromExamples(heads=m, seconds=args.seconds))
            solved += error(found, truth) <= 1e-6
            spent.append(seconds)
            rows = Rows(X, X, None, np.ones(X.shape[:2]), Y)
            theta = np.stack([h.score.T for h in truth.heads], axis=1)
            bars = estimate_information(rows, project(rows, theta), rng).theta
            power = float(np.sqrt(np.mean(Y**2)))
            sizes.append(np.linalg.norm(bars) / np.linalg.norm(theta) * power)
        print(
            f"{m:3d}  {solved}/{count}   {np.median(sizes):22.1e}  {np.median(spent):20.2f}",
            flush=True,
        )


def large(args: argparse.Namespace) -> None:
    grid = [(64, 16, 8, 1.0)] if not args.quick else [(32, 16, 4, 1.0)]
    for d, k, m, sc in grid:
        for heads in (m, None):
            rng = np.random.default_rng(args.seed)
            truth = layer(rng, d, m, sc)
            X = inputs(rng, examples_needed(d, k, m, 4), k, d)
            learner = FromExamples(heads=heads, seconds=args.seconds)
            begin = time.monotonic()
            found, seconds = timed(X, every_position(truth, X), learner)
            print(
                f"d={d} k={k} m={m} sc={sc} r=4, heads {'given' if heads else 'not given'}: "
                f"{found.outcome.name}, error {error(found, truth):.1e}, {seconds:.0f} CPU s, "
                f"{time.monotonic() - begin:.0f} s",
                flush=True,
            )


def starts(args: argparse.Namespace) -> None:
    """Single descents with the right number of heads: random starts on one BLAS thread and on all,
    and those that are led by the labels (one head)."""
    ways = (
        ("random", draw_start, 1),
        ("all threads", draw_start, None),
        ("led", draw_led_start, 1),
    )
    print("  d  k  m   sc" + "".join(f"{name:>15}: solved, wall s" for name, _, _ in ways))
    for d, k, m, sc in ((16, 16, 1, 5.0), (8, 16, 1, 5.0), (8, 16, 2, 5.0), (16, 16, 3, 5.0)):
        print(f"{d:3d} {k:2d} {m:2d} {sc:4g}", end="")
        for _, start, threads in ways[: 3 if m == 1 else 2]:
            begin, solved = time.monotonic(), 0
            with threadpool_limits(threads, "blas"):
                for i in range(args.instances):
                    rng = np.random.default_rng([args.seed, i // 4])  # four starts a layer
                    truth, X = layer(rng, d, m, sc), inputs(rng, examples_needed(d, k, m, 4), k, d)
                    rows = Rows(X, X, None, np.ones(X.shape[:2]), every_position(truth, X))
                    theta = start(rows, m, np.random.default_rng([args.seed, i, 1]))
                    solved += descend(rows, theta).relative <= SOLVED
            spent = time.monotonic() - begin
            print(f"{solved:16d} of {args.instances:3d} {spent:9.1f}", end="", flush=True)
        print()


PARTS = {
    "recovery": recovery,
    "baselines": baselines,
    "noise": noise,
    "floor": floor,
    "sculpting": sculpting,
    "hard": hard,
    "large": large,
    "starts": starts,
}
DEFAULTS = {  # instances, seconds for each
    "baselines": (20, 8.0),
    "noise": (60, 60.0),
    "floor": (100, 4.0),
    "sculpting": (50, 60.0),
    "large": (1, 300.0),
    "hard": (5, 20.0),
    "starts": (100, 60.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=PARTS, help="default: all")
    parser.add_argument("--instances", type=int)
    parser.add_argument("--seconds", type=float, help="budget per instance")
    parser.add_argument("--r", type=float, default=4.0)
    parser.add_argument("--sc", type=float, help="one strength of attention only")
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--gaussian", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    for part in [asked.part] if asked.part else PARTS:
        args = argparse.Namespace(**vars(asked))
        count, seconds = DEFAULTS.get(part, (200, 60.0))
        args.instances = args.instances or (max(count // 10, 3) if args.quick else count)
        args.seconds = args.seconds or (min(seconds, 3.0) if args.quick else seconds)
        if args.quick:
            args.widths = [8]
        PARTS[part](args)


if __name__ == "__main__":
    main()
