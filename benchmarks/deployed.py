"""Attention as it is deployed: skip connections and positions, recovered with nothing given.

    python benchmarks/deployed.py [--seeds 5] [--first 1000] [--only SUBSTRING]

Boxes are NumPy functions of their own (keys and queries 1.4/sqrt d, biases 0.5, frequencies rounded
to float32 as real models do). A row: how many runs ended RECOVERED; queries of the whole run over
the floor, and without recognition and verification; the largest relative error of the visible score
matrix with all its terms over the distances 0 ... 16, and at distance 100000. Median (worst).
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

import keyhole

RECOGNITION = ("family", "precision", "positions", "validation", "verification", "recall")
NEAR, FAR = range(17), (100_000,)


@dataclass
class Layer:
    """One attention layer with biases; `positions` names what the places of tokens do."""

    rng: np.random.Generator
    width: int
    heads: int
    positions: str = "none"
    groups: int | None = None  # of heads that share keys and values
    base: float = 1e4
    frequencies: np.ndarray | None = None
    slowdown: float = 1.0  # interpolated positions
    places: int = 32
    window: int | None = None
    skip: str | None = None  # "identity" | "random"
    scalar: bool = False

    def __post_init__(self) -> None:
        rng, d, count = self.rng, self.width, self.heads
        r, groups = d // count, self.groups or count
        shared = [h * groups // count for h in range(count)]
        keys = 1.4 * rng.standard_normal((groups, r, d + 1)) / d**0.5
        keys[:, :, -1] = 0.5 * rng.standard_normal((groups, r))
        queries = 1.4 * rng.standard_normal((count, r, d + 1)) / d**0.5
        queries[:, :, -1] = 0.5 * rng.standard_normal((count, r))
        self.keys, self.queries, self.inner = keys[shared], queries, r
        into = rng.standard_normal((groups, d, r)) / d**0.5
        outs = rng.standard_normal((count, r, 1 if self.scalar else d)) / r**0.5
        self.values = np.stack([into[g] @ out for g, out in zip(shared, outs, strict=True)])
        self.offset = 0.5 * rng.standard_normal(outs.shape[2])
        if self.frequencies is None:
            pairs = r // 2
            self.frequencies = self.base ** (-np.arange(pairs) / max(pairs, 1))
        self.frequencies = np.float32(self.frequencies / self.slowdown).astype(float)
        self.slopes = 2.0 ** (-8.0 * np.arange(1, count + 1) / count)
        self.table = rng.standard_normal((count, 32))
        self.vectors = 0.5 * rng.standard_normal((self.places, d))
        past = rng.standard_normal((d, outs.shape[2])) / d**0.5
        self.past = np.eye(d) if self.skip == "identity" else past

    def bucket(self, distance: np.ndarray) -> np.ndarray:
        """T5's buckets: sixteen of one distance each, sixteen growing ones up to 128."""
        large = 16 + (np.log(np.maximum(distance, 1) / 16) / np.log(8.0) * 16).astype(int)
        return np.where(distance < 16, distance, np.minimum(large, 31))

    def score(self, head: int, distance: int) -> np.ndarray:
        """Between [token; 1] and [anchor; 1], all terms."""
        keys, queries, half = self.keys[head], self.queries[head], self.inner // 2
        if self.positions == "rotary":
            angle = self.frequencies * distance
            first, second = keys[:half], keys[half:]
            cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
            keys = np.concatenate([first * cos + second * sin, second * cos - first * sin])
        matrix = keys.T @ queries / self.inner**0.5
        if self.positions == "linear bias":
            matrix[-1, -1] -= self.slopes[head] * distance
        if self.positions == "buckets":
            matrix[-1, -1] += self.table[head][self.bucket(np.array(distance))]
        return matrix

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        length = tokens.shape[1]
        if self.positions == "vectors":
            tokens = tokens + self.vectors[:length]
        distances = np.arange(length)[::-1]
        whole = np.concatenate([tokens, np.ones((*tokens.shape[:2], 1))], axis=2)
        answer = np.zeros((len(tokens), len(self.offset))) + self.offset
        if self.skip:
            answer += tokens[:, -1] @ self.past
        half = self.inner // 2
        angles = np.outer(distances, self.frequencies)
        for h in range(self.heads):
            keys, query = whole @ self.keys[h].T, whole[:, -1] @ self.queries[h].T
            if self.positions == "rotary":
                first, second = keys[..., :half], keys[..., half:]
                cos, sin = np.cos(angles), np.sin(angles)
                turned = (first * cos + second * sin, second * cos - first * sin)
                keys = np.concatenate(turned, axis=2)
            scores = np.einsum("bnr,br->bn", keys, query) / self.inner**0.5
            if self.positions == "linear bias":
                scores = scores - self.slopes[h] * distances
            if self.positions == "buckets":
                scores = scores + self.table[h][self.bucket(distances)]
            if self.window:
                scores[:, distances >= self.window] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            answer += np.einsum("bn,bnd->bd", weights, tokens) @ self.values[h]
        return answer[:, 0] if self.scalar else answer

    def error(self, model: keyhole.Attention, distances: tuple[int, ...] | range) -> float:
        """Largest relative error of a visible score; infinite for another number of heads."""
        if len(model.heads) != self.heads:
            return float("inf")
        model = keyhole.models.canonical.canonical(model) if self.positions == "vectors" else model
        worst, start = 0.0, np.zeros(self.width + 1)
        if self.positions == "vectors":  # the first vector belongs to the key bias
            start[:-1] = self.vectors[0]
        for h in range(self.heads):
            values = self.values[h][:, 0] if self.scalar else self.values[h]
            gaps = [np.linalg.norm(head.value - values) for head in model.heads]
            found = int(np.argmin(gaps))
            for distance in distances:
                true, own = self.score(h, distance), model.score_at(found, distance)
                true[:, -1] += true @ start
                true[-1] -= self.score(h, 0)[-1] if self.positions != "rotary" else 0.0
                own[-1] -= model.score_at(found, 0)[-1] if self.positions != "rotary" else 0.0
                if self.positions == "vectors":
                    true, own = true[:-1], own[:-1]
                worst = max(worst, float(np.linalg.norm(true - own) / np.linalg.norm(true)))
        return worst


Make = Callable[[np.random.Generator], Layer]


def rows() -> Iterator[tuple[str, Make]]:
    for d, count in ((8, 1), (8, 2), (16, 4), (32, 4), (64, 8)):
        for kind in ("identity", "random"):
            name = f"skip {kind}, d={d} H={count}"
            yield name, lambda rng, d=d, h=count, k=kind: Layer(rng, d, h, skip=k)
    for d, count in ((8, 2), (16, 4)):
        name = f"skip, scalar answers, d={d} H={count}"
        yield name, lambda rng, d=d, h=count: Layer(rng, d, h, skip="random", scalar=True)
    shapes = ((16, 2, 2), (16, 4, 4), (16, 4, 2), (32, 2, 2), (32, 4, 4))
    for d, count, groups in shapes:
        name = f"rotary, d={d} H={count} G={groups}"
        yield name, lambda rng, d=d, h=count, g=groups: Layer(rng, d, h, "rotary", g)
    yield "rotary, base 5e5, d=16 H=2", lambda rng: Layer(rng, 16, 2, "rotary", base=5e5)
    yield (
        "rotary, a free list, d=16 H=2",
        lambda rng: Layer(
            rng, 16, 2, "rotary", frequencies=np.exp(rng.uniform(np.log(3e-3), np.log(3.0), 4))
        ),
    )
    yield "rotary, interpolated, d=16 H=2", lambda rng: Layer(rng, 16, 2, "rotary", slowdown=4.0)
    for kind in ("linear bias", "buckets", "vectors"):
        for d, count in ((16, 2), (16, 4), (32, 4)):
            name = f"{kind}, d={d} H={count}"
            yield name, lambda rng, d=d, h=count, k=kind: Layer(rng, d, h, k)
    yield "window of 24, d=16 H=2", lambda rng: Layer(rng, 16, 2, window=24)
    yield (
        "window of 64 and rotary, d=16 H=4",
        lambda rng: Layer(rng, 16, 4, "rotary", window=64),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=1000)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    print("| box | recovered | queries / floor | learning alone | W(0…16) | W(1e5) | seconds |")
    print("|---|---|---|---|---|---|---|")
    for name, make in rows():
        if options.only not in name:
            continue
        good, ratios, bare, near, far, seconds = 0, [], [], [], [], []
        for seed in range(options.first, options.first + options.seeds):
            layer = make(np.random.default_rng(seed))
            limit = layer.places if layer.positions == "vectors" else None
            box = keyhole.open_oracle(layer, width=layer.width, max_length=limit)
            start = time.process_time()
            found = keyhole.recover(box, seed=seed, throw=False)
            seconds.append(time.process_time() - start)
            if found.outcome is not keyhole.Outcome.RECOVERED:
                print(f"<!-- {name}, seed {seed}: {found.outcome.name}, {found.reason} -->")
                continue
            good += 1
            extra = sum(found.ledger.by_purpose.get(purpose, 0) for purpose in RECOGNITION)
            ratios.append(found.ledger.paid / found.ledger.floor)
            bare.append((found.ledger.paid - extra) / found.ledger.floor)
            reach = NEAR if layer.window is None else range(min(17, layer.window))
            near.append(layer.error(found.model, reach))
            far.append(layer.error(found.model, FAR if layer.window is None else reach))

        def show(numbers: list[float], form: str) -> str:
            if not numbers:
                return ""
            return f"{np.median(numbers):{form}} ({max(numbers):{form}})"

        cells = (show(ratios, ".2f"), show(bare, ".2f"), show(near, ".0e"), show(far, ".0e"))
        print(
            f"| {name} | {good}/{options.seeds} | {' | '.join(cells)} | {np.median(seconds):.1f} |"
        )


if __name__ == "__main__":
    main()
