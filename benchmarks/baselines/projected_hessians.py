"""The published attempt at smooth networks: rank-one directions in the span of projected Hessians.

Hessians of one projection of the outputs (or of several) at random points, by differences on all
pairs of axes; the span of the leading m of them; power ascent from random starts for unit vectors
whose squares lie in it. The number of neurons is given; biases, outer weights and scales are not
looked for. Our own implementation, after Fornasier, Klock, Rauchensteiner (2021) and Kileel, Klock,
Pereira (2021), with steps of 1e-4 and four starts per neuron; neither was tuned.
"""

from dataclasses import dataclass

import numpy as np

from keyhole.models.mlp import Mlp


@dataclass(frozen=True)
class Found:
    """|cosine| of a neuron's row to the closest direction found, over all neurons."""

    mean: float
    least: float
    queries: int


def projected_hessians(
    secret: Mlp, neurons: int, queries: int, projections: int, rng: np.random.Generator
) -> Found:
    d, h, spent = secret.width, 1e-4, 0
    project = np.eye(secret.outputs or 1)
    if projections < len(project):
        project = rng.standard_normal((len(project), projections))
    first, second = np.triu_indices(d)
    axes = np.eye(d)
    steps = h * np.vstack([np.zeros(d), axes, axes[first] + axes[second]])
    stack = []
    while spent + len(steps) <= queries:
        values = secret(rng.standard_normal(d) + steps) @ project
        spent += len(steps)
        single, pairs = values[1 : d + 1], values[d + 1 :]
        hessian = np.zeros((d, d, project.shape[1]))
        hessian[first, second] = (pairs - single[first] - single[second] + values[0]) / h**2
        hessian[second, first] = hessian[first, second]
        stack.append(hessian.transpose(2, 0, 1))
    matrices = np.concatenate(stack).reshape(-1, d * d)
    _, _, right = np.linalg.svd(matrices, full_matrices=False)
    span = right[: min(neurons, len(right))]
    x = rng.standard_normal((4 * neurons, d))
    for _ in range(200):
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        square = (x[:, :, None] * x[:, None, :]).reshape(len(x), -1)
        x = (((square @ span.T) @ span).reshape(-1, d, d) @ x[:, :, None])[:, :, 0]
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    rows = secret.inner / np.linalg.norm(secret.inner, axis=1, keepdims=True)
    best = np.abs(rows @ x.T).max(axis=1)
    return Found(float(best.mean()), float(best.min()), spent)
