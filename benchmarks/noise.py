"""The figures on noise, measured in one run: the unit ball, error bars, intervals, formats.

    python benchmarks/noise.py [--quick]

Columns: relative Frobenius error of the score (median), the same for the published design
(Theorem 6.1) on the same boxes, error over the Cramér–Rao bound, share of entries within two
standard errors, queries.
"""

import argparse
from collections.abc import Callable

import numpy as np

import keyhole
from keyhole.models.attention import Attention, Head
from keyhole.oracles.wrappers.degrade import round_bits

Box = Callable[[np.ndarray], np.ndarray]


def drawn(width: int, seed: int, norm: float = 1.0) -> Attention:
    rng = np.random.default_rng([width, seed])
    score, value = rng.standard_normal((width, width)), rng.standard_normal(width)
    return Attention(
        [Head(score / np.linalg.norm(score, 2), None, norm * value / np.linalg.norm(value))]
    )


def noisy(model: Attention, level: float, seed: int) -> Box:
    rng = np.random.default_rng([seed, 1])
    return lambda tokens: model(tokens) + level * rng.standard_normal(len(tokens))


def error(recovery: keyhole.Recovery, model: Attention) -> float:
    truth = model.heads[0].score
    return float(np.linalg.norm(recovery.model.heads[0].score - truth) / np.linalg.norm(truth))


def covered(recovery: keyhole.Recovery, model: Attention, factor: float = 2.0) -> float:
    gap = np.abs(recovery.model.heads[0].score - model.heads[0].score)
    return float(np.mean(gap <= factor * recovery.errors.heads[0].score))


def ball(widths: tuple[int, ...], boxes: int) -> None:
    print("unit ball, additive noise 1e-6, spectral norm 1")
    for width in widths:
        ours, paper, ratio, inside, paid = [], [], [], [], []
        for seed in range(boxes):
            model = drawn(width, seed)
            box = keyhole.open_oracle(noisy(model, 1e-6, seed), width=width, max_norm=1.0)
            found = keyhole.recover(box, keyhole.SingleHead(), throw=False)
            ours.append(error(found, model))
            ratio.append(ours[-1] / found.details["cramer_rao"])
            inside.append(covered(found, model))
            paid.append(found.ledger.paid)
            other = keyhole.recover(
                box, keyhole.SingleHead(method="paper"), verify=False, throw=False
            )
            paper.append(error(other, model))
        print(
            f"  d={width}: error {np.median(ours):.1e}  published {np.median(paper):.1e}  "
            f"error/bound {np.median(ratio):.2f}  within two {min(inside):.3f}–{max(inside):.3f}  "
            f"queries {max(paid)} (unknowns {width * width + width})"
        )


def budget(width: int, boxes: int) -> None:
    factors = []
    for seed in range(boxes):
        model = drawn(width, seed)
        once, often = (
            error(
                keyhole.recover(
                    keyhole.open_oracle(noisy(model, 1e-6, seed), width=width, max_norm=1.0),
                    keyhole.SingleHead(),
                    budget=spend,
                    throw=False,
                ),
                model,
            )
            for spend in (None, 20 * (width * width + width))
        )
        factors.append(once / often)
    print(f"20 times the queries, d={width}: error falls by {np.median(factors):.2f}")


def models(width: int, boxes: int) -> None:
    print(f"error bars, d={width}: share within two standard errors, median error")
    kinds: dict[str, tuple[Callable[[Attention, int], Box], dict[str, float]]] = {
        "additive, ball": (lambda m, s: noisy(m, 1e-4, s), {"max_norm": 4.0}),
        "additive, free": (lambda m, s: noisy(m, 1e-3, s), {}),
        "4 decimals, ball": (lambda m, s: lambda x: np.round(m(x), 4), {"max_norm": 4.0}),
        "2 decimals, ball": (lambda m, s: lambda x: np.round(m(x), 2), {"max_norm": 4.0}),
        "4 decimals, free": (lambda m, s: lambda x: np.round(m(x), 4), {}),
        "whole numbers, free": (lambda m, s: lambda x: np.round(300 * m(x)), {}),
        "3 digits, free": (lambda m, s: lambda x: digits(m(x), 3), {}),
        "6 digits, free": (lambda m, s: lambda x: digits(m(x), 6), {}),
        "6 digits, ball": (lambda m, s: lambda x: digits(m(x), 6), {"max_norm": 4.0}),
        "relative 1e-6": (lambda m, s: relative(m, 1e-6, s), {}),
        "float32": (lambda m, s: m.astype(np.float32), {}),
        "11 bits": (lambda m, s: lambda x: round_bits(m(round_bits(x, 11)), 11), {}),
        "8 bits": (lambda m, s: lambda x: round_bits(m(round_bits(x, 8)), 8), {}),
    }
    for name, (make, domain) in kinds.items():
        shares, errors = [], []
        for seed in range(boxes):
            model = drawn(width, seed, norm=5.0)
            box = keyhole.open_oracle(make(model, seed), width=width, **domain)
            found = keyhole.recover(box, keyhole.SingleHead(), throw=False)
            if found.model is not None:
                shares.append(covered(found, model))
                errors.append(error(found, model))
        print(f"  {name:<20} {np.mean(shares):.3f}  {np.median(errors):.1e}  ({len(shares)} boxes)")


def digits(numbers: np.ndarray, count: int) -> np.ndarray:
    """Rounded to so many significant digits."""
    return np.array([float(f"{x:.{count - 1}e}") for x in numbers])


def relative(model: Attention, level: float, seed: int) -> Box:
    rng = np.random.default_rng([seed, 2])
    return lambda tokens: model(tokens) * (1 + level * rng.standard_normal(len(tokens)))


def intervals(width: int, boxes: int, tolerance: float = 1e-4) -> None:
    held = refused = 0
    for seed in range(boxes):
        model, rng = drawn(width, seed, norm=3.0), np.random.default_rng([seed, 3])

        def box(tokens: np.ndarray, m=model, r=rng, worst=seed % 2) -> np.ndarray:
            off = r.uniform(-1, 1, len(tokens))
            return m(tokens) + tolerance * (np.sign(off) if worst else off)

        found = keyhole.recover(
            keyhole.open_oracle(
                box, width=width, max_norm=4.0, precision=keyhole.NoiseModel(tolerance=tolerance)
            ),
            keyhole.SingleHead(),
            throw=False,
        )
        refused += found.model is None
        held += found.model is not None and covered(found, model, 1.0) == 1.0
    print(
        f"intervals hold in {held} of {boxes} boxes, {refused} refused as unbounded (half of the "
        "boxes have worst-case errors)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small widths, few boxes")
    quick = parser.parse_args().quick
    ball((24,) if quick else (64, 128), 3 if quick else 5)
    if not quick:
        ball((32,), 20)
    budget(16 if quick else 64, 1 if quick else 3)
    models(16 if quick else 32, 2 if quick else 10)
    intervals(6, 20 if quick else 200)


if __name__ == "__main__":
    main()
