"""Log-ratios of weights, read off the answers of a layer that is known."""

import numpy as np

from keyhole.learners.positions.soft import Reader
from keyhole.learners.positions.values import ValueMaps
from keyhole.measurement.asker import Asker
from keyhole.oracles.base import Spec
from keyhole.oracles.function import FunctionOracle
from placed_layers import placed_layer


def test_log_ratios_are_scores_minus_those_of_the_copies() -> None:
    truth = placed_layer("rotary", 8, 2, 6)
    factors = [np.linalg.svd(head.value) for head in truth.heads]
    outs = tuple(vt[:4] for _, _, vt in factors)
    ins = tuple(head.value @ out.T for head, out in zip(truth.heads, outs, strict=True))
    reader = Reader(
        Asker(FunctionOracle(truth, Spec(8))),
        ValueMaps(truth.offset, ins, outs, 1e-15, 1e-15, np.zeros((2, 8)), np.zeros(8)),
    )
    rng = np.random.default_rng(1)
    anchor, distances = 0.3 * rng.standard_normal(8), np.array([1, 4, 9, 30])
    tokens = anchor + 0.5 * rng.standard_normal((2, 4, 8))
    found = reader.log_ratios(anchor, None, tokens, distances)
    own = np.append(anchor, 1.0)
    for h in range(2):
        copies = [d for d in range(31) if d not in distances]
        total = np.log(sum(np.exp(own @ truth.score_at(h, d) @ own) for d in copies))
        for n in range(2):
            for i, distance in enumerate(distances):
                score = np.append(tokens[n, i], 1.0) @ truth.score_at(h, int(distance)) @ own
                gap = abs(found.ratios[n, h, i] - (score - total))
                assert gap < 1e-9
                assert gap < 100 * found.errors[n, h, i]
