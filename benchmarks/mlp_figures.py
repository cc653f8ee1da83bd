"""The pictures of docs/methods/mlp.md, one per route, drawn from runs of the stages themselves.

python benchmarks/mlp_figures.py [--folder docs/methods]     needs matplotlib (keyhole-ml[pictures])
"""

import argparse
from pathlib import Path

import matplotlib as mpl
import numpy as np

from keyhole.arrays import SINGLE_ROUNDOFF, UNIT_ROUNDOFF
from keyhole.learners.mlp.far_field import FarFieldOptions, Segment
from keyhole.learners.mlp.hessians import HessianTable, Steps, spread_places
from keyhole.linalg.symmetric import flat
from keyhole.models.mlp import Mlp
from keyhole.network.redundancy import Data, PruningOptions, descend
from keyhole.network.weights import random_start, with_one

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "keyhole"  # the same file for the same picture

from matplotlib import pyplot as plt  # noqa: E402 - after the choice of what draws


def network(rng: np.random.Generator, width: int, neurons: int, outputs: int) -> Mlp:
    return Mlp(
        rng.standard_normal((neurons, width)) / np.sqrt(width),
        0.5 * rng.standard_normal(neurons),
        rng.standard_normal((outputs, neurons)) / np.sqrt(neurons),
        linear=rng.standard_normal((outputs, width)) / np.sqrt(width),
    )


def draw_far_field(path: Path) -> None:
    """Slope of one output along the path P -> Q -> -P, and the breakpoints that were found."""
    rng = np.random.default_rng(0)
    secret = network(rng, 4, 12, 4)
    plane, _ = np.linalg.qr(rng.standard_normal((4, 2)))
    corner, other = 1e6 * plane.T
    figure, axes = plt.subplots(figsize=(6.4, 2.6))
    found = 0
    for number, (start, stop) in enumerate(((corner, other), (other, -corner))):
        segment = Segment(
            lambda x, _: secret(x), start, stop, UNIT_ROUNDOFF, 1e-3, FarFieldOptions()
        )
        breakpoints = [b.at for b in segment.search()]
        times = np.linspace(0.0, 1.0, 4001)
        values = secret(segment.points(times))[:, 0]
        slopes = np.diff(values) / np.diff(times) / 1e6
        axes.plot(number + times[1:], slopes, color="black", linewidth=1.0)
        for at in breakpoints:
            axes.axvline(number + at, color="tab:red", linewidth=0.6, linestyle=":")
        found += len(breakpoints)
    axes.set_xlabel(f"place on the path P, Q, -P ({found} breakpoints found, 12 neurons)")
    axes.set_ylabel("slope of one output")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_span(path: Path) -> None:
    """Singular values of the Hessians on U: the number of neurons is where they drop."""
    figure, axes = plt.subplots(figsize=(6.4, 2.6))
    width, neurons = 16, 40
    for unit, name, colour in (
        (UNIT_ROUNDOFF, "float64", "black"),
        (SINGLE_ROUNDOFF, "float32", "tab:red"),
    ):
        rng = np.random.default_rng(1)
        secret = network(rng, width, neurons, 16)
        box = secret if name == "float64" else secret.astype(np.float32)
        frame = np.linalg.qr(rng.standard_normal((width, width)))[0].T

        def ask(points: np.ndarray, purpose: str, box: Mlp = box) -> np.ndarray:
            del purpose
            return np.asarray(box(4.0 * points), dtype=np.float64)

        table = HessianTable(ask, frame, 4, Steps.of(unit, width))
        table.grow(12, spread_places(4, 6, rng))
        stack = flat(table.hessians(12).reshape(-1, 12, 12))
        identity = flat(np.eye(12)[None])[0] / np.sqrt(12)
        stack = stack - np.outer(stack @ identity, identity)
        values = np.linalg.svd(stack, compute_uv=False)
        numbers = np.arange(1, len(values) + 1)
        axes.semilogy(numbers, values / values[0], ".", color=colour, markersize=4, label=name)
    axes.axvline(neurons + 0.5, color="grey", linewidth=0.6, linestyle=":")
    axes.set_ylim(1e-9, 2.0)
    axes.set_xlabel(f"number of the singular value ({neurons} neurons)")
    axes.set_ylabel("relative size")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw_redundancy(path: Path) -> None:
    """What networks of half as many neurons again leave, while the ridge is lowered."""
    rng = np.random.default_rng(2)
    secret = network(rng, 4, 9, 4)
    points = rng.standard_normal((110, 4))
    answers = secret(points)
    scale = float(np.sqrt(np.mean(answers**2)))
    ridges, data = PruningOptions().ridges, Data(with_one(points), answers)
    figure, axes = plt.subplots(figsize=(6.4, 2.6))
    for name in ("gelu", "silu", "gelu_tanh", "tanh"):
        weights = random_start(14, points, 4, name, False, np.random.default_rng(3))
        left = []
        for ridge in ridges:
            state = descend(weights, data, ridge, steps=100)
            weights = state.weights
            left.append(state.left / scale)
        axes.loglog(ridges, left, "o-", markersize=4, label=name)
    axes.invert_xaxis()
    axes.set_xlabel("ridge on the outer weights (the box has GELU)")
    axes.set_ylabel("left of the answers")
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("docs/methods"))
    folder = parser.parse_args().folder
    draw_far_field(folder / "mlp_far_field.svg")
    draw_span(folder / "mlp_span.svg")
    draw_redundancy(folder / "mlp_redundancy.svg")


if __name__ == "__main__":
    main()
