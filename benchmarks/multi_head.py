"""Multi-head attention: queries over the floor, errors, error bars and time.

    python benchmarks/multi_head.py [JOB ...] [--quick] [--models N] [--first SEED]
                                    [--widths D ...] [--heads H ...]

Every figure of docs/methods/multi_head.md comes from here.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from keyhole.errors import KeyholeError
from keyhole.learners.multi_head.learner import MultiHead
from keyhole.models.attention import Attention, Head
from keyhole.models.canonical import match_heads, score_gap, score_norm
from keyhole.models.random import attention
from keyhole.oracles.base import Domain
from multi_head_boxes import ask_all, layer_box, layer_truth, random_layer

FREE = Domain()


@dataclass(frozen=True)
class Plan:
    """How many models each cell gets, and which."""

    quick: bool
    models: int | None
    first: int
    widths: list[int] | None
    heads: list[int] | None

    def cells(self, widths: tuple[int, ...], heads: tuple[int, ...]) -> list[tuple[int, int]]:
        """Widths and numbers of heads, those of --widths and --heads where given."""
        return [
            (d, h)
            for d in widths
            for h in heads
            if d in (self.widths or widths) and h in (self.heads or heads)
        ]

    def seeds(self, few: int, many: int) -> range:
        """Seeds of a cell that has `few` models with --quick, else `many`, or at most --models."""
        count = few if self.quick else many if self.models is None else min(many, self.models)
        return range(self.first, self.first + count)


def measured(
    box: Callable[[np.ndarray], np.ndarray],
    truth: Attention,
    learner: MultiHead,
    seed: int,
    domain: Domain = FREE,
    budget: int | None = None,
) -> dict[str, float] | None:
    """One run: ratio to the floor, worst and median error of scores, worst of values, bars."""
    start = time.perf_counter()
    try:
        learned, oracle = ask_all(box, truth.width, learner, seed, budget, domain=domain)
    except KeyholeError as error:
        print(f"    seed {seed}: {type(error).__name__}: {error}")
        return None
    seconds = time.perf_counter() - start
    if len(learned.model.heads) != len(truth.heads):
        print(f"    seed {seed}: {len(learned.model.heads)} heads of {len(truth.heads)}")
        return None
    bars = dict(zip(map(id, learned.model.heads), learned.errors.heads, strict=True))
    pairs = match_heads(learned.model.heads, truth.heads)
    scores = [score_gap(a, b) / score_norm(b) for a, b in pairs]
    values = [np.linalg.norm(a.value - b.value) / np.linalg.norm(b.value) for a, b in pairs]
    within = [
        np.linalg.norm(a.score - b.score) / np.linalg.norm(bars[id(a)].score) for a, b in pairs
    ]
    return {
        "ratio": oracle.paid / learned.floor,
        "score": max(scores),
        "median": float(np.median(scores)),
        "value": float(max(values)),
        "bar": float(max(within)),
        "time": seconds,
    }


def table(name: str, runs: list[dict[str, float] | None]) -> None:
    good = [run for run in runs if run is not None]
    if not good:
        print(f"{name:28s} 0/{len(runs)}")
        return
    column = {key: np.array([run[key] for run in good]) for key in good[0]}
    print(
        f"{name:28s} {len(good)}/{len(runs)}  ratio {np.median(column['ratio']):.3f} "
        f"(max {column['ratio'].max():.2f})  W {np.median(column['score']):.1e} "
        f"(max {column['score'].max():.1e}, median head {np.median(column['median']):.1e})  "
        f"v {np.median(column['value']):.1e} (max {column['value'].max():.1e})  "
        f"error/bar {np.median(column['bar']):.2f} (max {column['bar'].max():.2f})  "
        f"{np.median(column['time']):.2f} s",
        flush=True,
    )


def scalar(plan: Plan, unknown: bool = False) -> None:
    for width, heads in plan.cells((8, 16, 32, 64), (1, 2, 4, 8)):
        learner = MultiHead() if unknown else MultiHead(heads=heads)
        runs = []
        for seed in plan.seeds(5, 100 if width <= 32 else 3):
            truth = attention(np.random.default_rng([seed, width, heads]), width, heads=heads)
            runs.append(measured(truth, truth, learner, seed))
        table(f"scalar d={width} H={'?' if unknown else ''}{heads}", runs)
    if not plan.quick and (32, 32) in plan.cells((32,), (32,)):
        truth = attention(np.random.default_rng(0), 32, heads=32)
        learner = MultiHead() if unknown else MultiHead(heads=32)
        table("scalar d=32 H=32", [measured(truth, truth, learner, 0)])


def coarse(plan: Plan) -> None:
    """Scalar answers computed in float32, heads not given."""
    for width, heads in plan.cells((8, 16, 32), (1, 2, 4, 8)):
        runs = []
        for seed in plan.seeds(5, 25 if width <= 16 else 5):
            truth = attention(np.random.default_rng([seed, width, heads]), width, heads=heads)
            runs.append(measured(truth.astype(np.float32), truth, MultiHead(), seed))
        table(f"scalar d={width} H=?{heads} f32", runs)


def rank(plan: Plan) -> None:
    for inner, heads, width in ((4, 4, 16), (2, 8, 16), (8, 8, 32), (8, 4, 64), (4, 8, 64)):
        runs = []
        for seed in plan.seeds(2, 5 if width == 64 else 20):
            rng = np.random.default_rng([seed, width, heads])
            truth = attention(rng, width, heads=heads, rank=inner)
            runs.append(measured(truth, truth, MultiHead(), seed))
        table(f"rank {inner} H=?{heads} d={width}", runs)


def near(plan: Plan) -> None:
    for gap in (1e-1, 1e-2, 1e-3, 1e-4):
        runs = []
        for seed in plan.seeds(3, 20):
            rng = np.random.default_rng(seed)
            base = attention(rng, 8, heads=3)
            score = base.heads[0].score + gap * rng.standard_normal((8, 8)) / np.sqrt(8)
            twin = Head(score, None, base.heads[1].value)
            truth = Attention([base.heads[0], twin, base.heads[2]])
            runs.append(measured(truth, truth, MultiHead(heads=3), seed))
        table(f"near-equal t={gap:g} H=3 d=8", runs)


def layers(plan: Plan, single: bool = False) -> None:
    for width, heads in plan.cells((32, 64, 128), (2, 4, 8)):
        runs = []
        for seed in plan.seeds(2, 20 if width < 128 else 5):
            layer = random_layer(width, heads, seed)
            if single:
                layer = layer.float()
            runs.append(measured(layer_box(layer), layer_truth(layer), MultiHead(), seed))
        table(f"layer d={width} H=?{heads}{' f32' if single else ''}", runs)


def budgets(plan: Plan) -> None:
    """Boxes in float32 with more queries than needed: least squares over all answers."""
    for width, heads, times in ((32, 4, 2.6), (32, 4, 4.0), (32, 8, 4.0), (64, 4, 4.0)):
        runs = []
        for seed in plan.seeds(1, 5):
            layer = random_layer(width, heads, seed).float()
            budget = int(times * (4 * width + 2 - 2 * width // heads))
            box, truth = layer_box(layer), layer_truth(layer)
            runs.append(measured(box, truth, MultiHead(), seed, budget=budget))
        table(f"layer d={width} H=?{heads} f32 {times:g}x", runs)
    for width, heads, times in ((8, 2, 2.0), (8, 2, 4.0), (8, 4, 3.0)):
        runs = []
        for seed in plan.seeds(1, 5):
            truth = attention(np.random.default_rng([seed, width, heads]), width, heads=heads)
            budget = int(times * heads * (width**2 + width))
            box = truth.astype(np.float32)
            runs.append(measured(box, truth, MultiHead(), seed, budget=budget))
        table(f"scalar d={width} H=?{heads} f32 {times:g}x", runs)


def bounded(plan: Plan) -> None:
    for width, heads, radius in ((32, 2, 10.0), (32, 4, 10.0), (64, 4, 12.0), (64, 8, 12.0)):
        runs = []
        for seed in plan.seeds(2, 10):
            layer = random_layer(width, heads, seed)
            domain = Domain(max_norm=radius)
            truth = layer_truth(layer)
            runs.append(measured(layer_box(layer), truth, MultiHead(), seed, domain))
        table(f"bounded d={width} H=?{heads} |x|<={radius:g}", runs)


def bounded_scalar(plan: Plan) -> None:
    """Scalar answers with bounded tokens: random queries."""
    for width, heads, radius in (
        (4, 2, 2.0), (8, 2, 1.0), (8, 2, 10.0), (8, 3, 2.0), (8, 4, 2.0),
        (16, 2, 2.0), (16, 3, 2.0),
    ):  # fmt: skip
        runs = []
        for seed in plan.seeds(1, 10 if width < 16 else 5):
            model = attention(np.random.default_rng(seed), width, heads=heads)
            runs.append(measured(model, model, MultiHead(), seed, Domain(max_norm=radius)))
        table(f"bounded scalar d={width} H=?{heads} |x|<={radius:g}", runs)


def short(plan: Plan) -> None:
    """Sequences of at most two tokens, or a few more, scalar answers and layers."""
    for width, heads in plan.cells((8, 16, 32), (1, 2, 4, 8)):
        runs = []
        for seed in plan.seeds(3, 30 if width <= 16 else 10):
            truth = attention(np.random.default_rng([seed, width, heads]), width, heads=heads)
            runs.append(measured(truth, truth, MultiHead(), seed, Domain(max_length=2)))
        table(f"pairs d={width} H=?{heads}", runs)
    for width, heads in plan.cells((8, 16), (2, 4)):
        runs = []
        for seed in plan.seeds(3, 20):
            truth = attention(np.random.default_rng([seed, width, heads]), width, heads=heads)
            box = truth.astype(np.float32)
            runs.append(measured(box, truth, MultiHead(), seed, Domain(max_length=2)))
        table(f"pairs d={width} H=?{heads} f32", runs)
    for heads, length in ((4, 3), (4, 5), (4, 7), (4, 10), (8, 8), (8, 12), (8, 16)):
        runs = []
        for seed in plan.seeds(2, 20):
            truth = attention(np.random.default_rng([seed, 16, heads]), 16, heads=heads)
            runs.append(measured(truth, truth, MultiHead(), seed, Domain(max_length=length)))
        table(f"at most {length} tokens d=16 H=?{heads}", runs)
    for heads, length in ((2, 2), (4, 2), (4, 4), (4, 6), (4, 8)):
        runs = []
        for seed in plan.seeds(2, 10):
            layer = random_layer(32, heads, seed)
            box, truth = layer_box(layer), layer_truth(layer)
            runs.append(measured(box, truth, MultiHead(), seed, Domain(max_length=length)))
        table(f"at most {length} tokens, layer d=32 H=?{heads}", runs)


def trained(plan: Plan) -> None:
    from multi_head_training import trained_layers

    for place, layer in enumerate(trained_layers(steps=30 if plan.quick else 1200)):
        run = measured(layer_box(layer), layer_truth(layer), MultiHead(), 0)
        table(f"trained d=384 H=?12 layer {place}", [run])


def baselines(plan: Plan) -> None:
    from multi_head_baselines import rational, student

    for heads, width in ((1, 8), (2, 8), (4, 8), (6, 8), (8, 8), (2, 16), (4, 16)):
        rng = np.random.default_rng([heads, width])
        truth = attention(rng, width, heads=heads)
        floor = heads * (width**2 + width)
        run = measured(truth, truth, MultiHead(heads=heads), 0)
        assert run is not None
        print(
            f"H={heads} d={width}: keyhole {run['ratio']:.2f} × floor, W {run['score']:.1e}, "
            f"{run['time']:.2f} s"
        )
        result = rational(truth, rng)
        ratio = result.queries / floor
        print(f"    rational {ratio:.2f} ×, W {result.error:.1e}, {result.seconds:.1f} s")
        for kind in ("adam", "lbfgs"):
            asked = round(run["ratio"] * floor)
            result = student(truth, asked, kind, rng, 3.0 if plan.quick else 20.0)
            ratio = result.queries / floor
            print(f"    {kind:8s} {ratio:.2f} ×, W {result.error:.1e}, {result.seconds:.1f} s")


def main() -> None:
    jobs: dict[str, Callable[[Plan], None]] = {
        "scalar": scalar,
        "unknown": lambda plan: scalar(plan, unknown=True),
        "scalar32": coarse,
        "rank": rank,
        "near": near,
        "layers": layers,
        "float32": lambda plan: layers(plan, single=True),
        "budgets": budgets,
        "bounded": bounded,
        "bounded-scalar": bounded_scalar,
        "short": short,
        "trained": trained,
        "baselines": baselines,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", help=f"of {', '.join(jobs)}; default: all")
    parser.add_argument("--quick", action="store_true", help="few models per cell")
    parser.add_argument("--models", type=int, help="at most so many models per cell")
    parser.add_argument("--first", type=int, default=0, help="seed of a cell's first model")
    parser.add_argument("--widths", type=int, nargs="+", help="of scalar answers and layers")
    parser.add_argument("--heads", type=int, nargs="+", help="of scalar answers and layers")
    arguments = parser.parse_args()
    options = vars(arguments)
    names = options.pop("jobs")
    plan = Plan(**options)
    for job in names or jobs:
        print(f"== {job}", flush=True)
        jobs[job](plan)


if __name__ == "__main__":
    main()
