"""Language models: hidden width, output space and geometry, and attention on tokens.

python benchmarks/tokens.py [--only KIND] [--seeds N] [--first N]

width: random networks of h = 24 ... 128, both norms, with and without biases, logits and
log-probabilities, six number formats. bad: interfaces that do not do what they should. trained:
two-layer models of this repository's own text, trained with torch, asked in all formats.
geometry: the matrix up to a rotation. top: the whole space through top-20 with bias, all questions
counted. labels: logits from the sampled token alone. attention: whole one-layer models in float64,
heads not given; single: in float32; steep: scores with a standard deviation of 4.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import keyhole
from keyhole.models.language_model import Table, TokenHead
from keyhole.models.random import token_attention
from keyhole.oracles.base import Wrapper
from keyhole.oracles.language_model.interface import Interface
from keyhole.oracles.language_model.restricted import read_logprobs
from keyhole.oracles.language_model.simulated import Simulated
from keyhole.oracles.queries import QueryBatch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from token_models import LanguageModel, bad_interfaces, log_softmax, round_to

FORMATS = ("float64", "float32", "float16", "bfloat16", "4 decimals", "2 decimals")
WIDTHS = (24, 32, 48, 64, 96, 128)
SHAPES = (  # tokens, width, heads, width of a head, tied
    (100, 16, 1, 16, False),
    (100, 16, 2, 8, False),
    (100, 16, 4, 4, False),
    (1000, 16, 4, 4, False),
    (1000, 16, 2, 8, True),
)


class RandomNetwork:
    """Hidden states of a random network behind a norm, and an output layer."""

    def __init__(self, rng: np.random.Generator, width: int, tokens: int) -> None:
        self.norm = str(rng.choice(["layer", "rms"]))
        self.bias = str(rng.choice(["none", "norm", "output"]))
        slope = float(rng.choice([0.0, 0.5, 1.0]))  # how unequal the directions are
        self.output = 0.3 * rng.standard_normal((tokens, width))
        self.gain = np.exp(0.2 * rng.standard_normal(width))
        self.added = (0.3 if self.bias == "norm" else 0.0) * rng.standard_normal(width)
        self.offset = (1.0 if self.bias == "output" else 0.0) * rng.standard_normal(tokens)
        self.embedding = rng.standard_normal((tokens, width))
        self.places = rng.standard_normal((64, width))
        self.inner = rng.standard_normal((width, 4 * width)) / np.sqrt(width)
        self.outer = rng.standard_normal((4 * width, width)) / np.sqrt(4 * width)
        turn = np.linalg.qr(rng.standard_normal((width, width)))[0]
        self.axes = (turn * np.exp(-slope * np.linspace(0.0, 3.0, width))).T

    def __call__(self, prompts: np.ndarray) -> np.ndarray:
        length = prompts.shape[1]
        x = self.embedding[prompts] + self.places[:length]
        x = (x * np.linspace(0.5, 1.5, length)[:, None]).sum(axis=1)
        u = (x + np.tanh(x @ self.inner) @ self.outer) @ self.axes
        u = u - u.mean(axis=1, keepdims=True) if self.norm == "layer" else u
        n = u / np.sqrt(np.mean(u**2, axis=1, keepdims=True))
        return np.asarray((n * self.gain + self.added) @ self.output.T + self.offset)

    @property
    def truth(self) -> tuple[np.ndarray, np.ndarray]:
        """Matrix and offset behind the norm."""
        matrix = self.output * self.gain
        matrix = matrix - matrix.mean(axis=1, keepdims=True) if self.norm == "layer" else matrix
        return matrix, self.output @ self.added + self.offset


def train_model(seed: int, width: int, norm: str, bias: bool, seconds: float) -> Any:
    """Logits of a two-layer Transformer in float64, trained on the documentation's bytes, and the
    truth about its output layer."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    text = "".join(p.read_text("utf-8") for p in sorted(Path("docs").rglob("*.md")))
    data = torch.tensor(list(text.encode("utf-8")), dtype=torch.long)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place = nn.Embedding(256, width), nn.Embedding(64, width)
            self.blocks = nn.ModuleList(
                nn.TransformerEncoderLayer(
                    width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
                )
                for _ in range(2)
            )
            self.norm = (
                nn.LayerNorm(width, eps=1e-5, bias=bias)
                if norm == "layer"
                else nn.RMSNorm(width, eps=1e-5)
            )
            self.output = nn.Linear(width, 256, bias=False)

        def forward(self, prompts: Any) -> Any:
            x = self.embed(prompts) + self.place(torch.arange(prompts.shape[1]))
            mask = nn.Transformer.generate_square_subsequent_mask(prompts.shape[1], dtype=x.dtype)
            for block in self.blocks:
                x = block(x, src_mask=mask)
            return self.output(self.norm(x))

    model = Model()
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        places = torch.randint(len(data) - 33, (32,))
        batch = torch.stack([data[k : k + 33] for k in places])
        logits = model(batch[:, :-1])
        loss = nn.functional.cross_entropy(logits.reshape(-1, 256), batch[:, 1:].reshape(-1))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model = model.double().eval()

    def answer(prompts: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(model(torch.as_tensor(prompts))[:, -1].numpy())

    matrix = (model.output.weight * model.norm.weight).detach().numpy()
    matrix = matrix - matrix.mean(axis=1, keepdims=True) if norm == "layer" else matrix
    shift = getattr(model.norm, "bias", None)
    offset = np.zeros(256)
    if shift is not None:
        offset = (model.output.weight @ shift).detach().numpy()
    return answer, (matrix, offset), float(loss.detach())


def make_truth(truth: tuple[np.ndarray, np.ndarray], shifted: bool) -> keyhole.OutputLayer:
    matrix, offset = truth
    if shifted:
        matrix, offset = matrix - matrix.mean(axis=0), offset - offset.mean()
    return keyhole.OutputLayer(matrix, offset, level="gram", shifted=shifted)


def recover_layer(
    function: Callable[[np.ndarray], np.ndarray],
    truth: tuple[np.ndarray, np.ndarray],
    kind: str,
    logprobs: bool,
    level: str,
    seed: int,
) -> tuple[keyhole.Recovery, float, float]:
    """The recovery, the true error of the matrix, and its error bar (both relative)."""

    def box(prompts: np.ndarray) -> np.ndarray:
        answers = function(prompts)
        return round_to(log_softmax(answers) if logprobs else answers, kind)

    oracle = keyhole.open_language_model(box, max_length=32)
    learner = keyhole.OutputLayerLearner(level=level)
    found = keyhole.recover(oracle, learner, seed=seed, throw=False)
    if found.model is None:
        return found, np.inf, np.inf
    wanted = make_truth(truth, logprobs)
    model = found.model
    if level == "gram":  # offsets have error bars of their own
        model, wanted = (keyhole.OutputLayer(m.matrix, level="gram") for m in (model, wanted))
    bar = np.linalg.norm(found.errors.matrix) / np.linalg.norm(found.model.matrix)
    return found, keyhole.distance(model, wanted), float(bar)


def measure_widths(seeds: int, first: int) -> None:
    right = warned = few = 0
    ratios, errors = [], []
    for seed in range(first, first + seeds):
        rng = np.random.default_rng(seed)
        width, tokens = int(rng.choice(WIDTHS)), int(rng.choice([300, 600]))
        kind, logprobs = FORMATS[seed % len(FORMATS)], bool(rng.random() < 0.5)
        network = RandomNetwork(rng, width, tokens)
        found, error, bar = recover_layer(network, network.truth, kind, logprobs, "space", seed)
        exact = found.model is not None and found.model.width == width
        warning = any("WARNING" in note for note in found.notes)
        asked = found.ledger.by_purpose.get("output space", 0)
        right, warned, few = right + exact, warned + warning, few + (asked <= 1.35 * width)
        short = any("one direction short" in note for note in found.notes)
        ratios.append(bar / error if kind != "float64" and not short else np.nan)
        errors.append(error)
        if not exact or found.outcome is not keyhole.Outcome.RECOVERED:
            got = None if found.model is None else found.model.width
            print(f"  seed {seed}: h {width}, {kind}, {network.norm}, {network.bias}: {got}, "
                  f"{found.outcome.name} {found.reason} {found.notes[1:]}")  # fmt: skip
    low, middle, high = np.nanquantile(ratios, [0.0, 0.5, 1.0])
    print(f"random: width exact {right} of {seeds}, {few} with at most 1.35 h answers, {warned} "
          f"with a warning; bar/true {low:.2f} ... {middle:.2f} ... {high:.2f}")  # fmt: skip


def measure_trained(seeds: int, first: int, seconds: float) -> None:
    right = total = few = warned = 0
    ratios = []
    for seed in range(first, first + seeds):
        width = (24, 32, 48, 64)[seed % 4]
        norm, bias = (("layer", True), ("rms", False), ("layer", False))[seed % 3]
        function, truth, loss = train_model(seed, width, norm, bias, seconds)
        widths = []
        for number, kind in enumerate(FORMATS):
            logprobs = bool((seed + number) % 2)
            found, error, bar = recover_layer(function, truth, kind, logprobs, "space", seed)
            got = None if found.model is None else found.model.width
            warning = any("WARNING" in note for note in found.notes)
            asked = found.ledger.by_purpose.get("output space", 0)
            total, right, warned = total + 1, right + (got == width), warned + warning
            few += asked <= 1.35 * width
            if kind != "float64" and np.isfinite(error) and got == width:
                ratios.append(bar / error)
            widths.append(f"{kind} {got}{' (warned)' if warning else ''}")
        print(f"  h {width} {norm}{' with bias' if bias else ''}, loss {loss:.2f}: "
              + ", ".join(widths))  # fmt: skip
    print(f"trained: width exact {right} of {total}, {few} with at most 1.35 h answers, {warned} "
          f"with a warning; bar/true {np.min(ratios):.2f} ... {np.median(ratios):.2f} ... "
          f"{np.max(ratios):.2f}")  # fmt: skip


def measure_bad(seeds: int, first: int) -> None:
    """Interfaces that do not do what they should: outcomes, widths, and whether it was said."""
    ended: dict[str, Counter[str]] = {}
    for seed in range(first, first + seeds):
        model = LanguageModel(seed, width=24, norm="rms" if seed % 2 else "layer")
        for name, answer in bad_interfaces(model).items():
            box = keyhole.open_language_model(answer, max_length=32)
            found = keyhole.recover(box, keyhole.OutputLayerLearner(), seed=seed, throw=False)
            width = "no width" if found.model is None else f"width {found.model.width}"
            warned = ", a warning" if any("WARNING" in note for note in found.notes) else ""
            ending = f"{found.outcome.name}, {width}{warned}"
            ended.setdefault(name, Counter())[ending] += 1
    for name, endings in ended.items():
        print(f"{name:40} " + "; ".join(f"{n} x {ending}" for ending, n in endings.items()))


def measure_geometry(seeds: int, first: int) -> None:
    print("  h  format      recovered  error (median)  worst  bar/true  asked/floor")
    for width, kinds in ((24, FORMATS), (32, FORMATS), (64, ("float64", "2 decimals"))):
        for kind in kinds:
            errors, ratios, costs, good = [], [], [], 0
            for seed in range(first, first + seeds):
                rng = np.random.default_rng(seed)
                network = RandomNetwork(rng, width, 300)
                found, error, bar = recover_layer(
                    network, network.truth, kind, bool(rng.random() < 0.5), "gram", seed
                )
                good += found.outcome is keyhole.Outcome.RECOVERED
                if found.model is not None:
                    errors.append(error)
                    ratios.append(bar / error)
                    costs.append(found.ledger.paid / found.ledger.floor)
            if errors:
                print(f"{width:4} {kind:11} {good:3} of {seeds:2} {np.median(errors):12.1e} "
                      f"{max(errors):9.1e}  {min(ratios):.2f} ... {max(ratios):.2f} "
                      f"{np.median(costs):8.2f}")  # fmt: skip


def measure_top(seeds: int, first: int) -> None:
    print("  h    V   width right  space error (worst)  questions/floor, verification included")
    for width, tokens in ((24, 300), (48, 600), (64, 1000)):
        right, errors, costs = 0, [], []
        for seed in range(first, first + seeds):
            rng = np.random.default_rng(seed)
            network = RandomNetwork(rng, width, tokens)
            interface = Interface(tokens, 20, "reported")
            box = read_logprobs(Simulated(network, interface, max_length=32), interface)
            learner = keyhole.OutputLayerLearner()
            found = keyhole.recover(box, learner, seed=seed, throw=False)
            if found.outcome is not keyhole.Outcome.RECOVERED:
                print(f"  seed {seed}: {found.outcome.name} {found.reason[:90]}")
                continue
            right += found.model.width == width
            answers = log_softmax(network(rng.integers(tokens, size=(2 * width, 8))))
            answers = answers - answers.mean(axis=1, keepdims=True)
            basis = np.linalg.qr(found.model.matrix - found.model.matrix.mean(axis=0))[0]
            basis = np.linalg.qr(np.column_stack([basis, found.model.offset]))[0]
            outside = answers - answers @ basis @ basis.T
            errors.append(np.linalg.norm(outside) / np.linalg.norm(answers))
            rank = int(np.linalg.matrix_rank(answers))
            costs.append(found.ledger.paid * 19.0 / (rank * (tokens - rank)))
        print(f"{width:3} {tokens:5} {right:6} of {seeds} {max(errors):12.1e} "
              f"{min(costs):12.2f} ... {max(costs):.2f}", flush=True)  # fmt: skip


def measure_labels(seeds: int, first: int) -> None:
    print("  V  epsilon  questions a logit  largest error")
    for epsilon in (1e-2, 1e-3):
        for tokens in (300, 1000):
            each, errors = [], []
            for seed in range(first, first + seeds):
                rng = np.random.default_rng(seed)
                network = RandomNetwork(rng, 48, tokens)
                interface = Interface(tokens, 0, "sampling", bias_entries=300)
                counted = CountedOracle(Simulated(network, interface, max_length=32))
                reader = read_logprobs(counted, interface, epsilon=epsilon)
                prompts = rng.integers(tokens, size=(2, 8, 1))
                read = reader.ask(QueryBatch.of(prompts.astype(np.float64), "labels"))
                truth = network(prompts[:, :, 0])
                gaps = (read - read.max(axis=1, keepdims=True)) - truth
                errors.append(np.abs(gaps + truth.max(axis=1, keepdims=True)).max())
                each.append(counted.asked / truth.size)
            print(f"{tokens:4} {epsilon:8} {min(each):8.2f} ... {max(each):.2f} "
                  f"{max(errors):12.1e}", flush=True)  # fmt: skip


class CountedOracle(Wrapper):
    """Counts the questions that go through."""

    def __init__(self, inner: keyhole.Oracle) -> None:
        self.inner, self.asked = inner, 0

    def ask(self, queries: QueryBatch) -> np.ndarray:
        self.asked += len(queries)
        return self.inner.ask(queries)


def scale_scores(model: keyhole.TokenAttention, factor: float) -> keyhole.TokenAttention:
    heads = [
        TokenHead(Table(factor * head.qk.left, head.qk.right), head.ov) for head in model.heads
    ]
    return keyhole.TokenAttention(model.direct, heads)


def measure_attention(seeds: int, first: int, kind: str) -> None:
    single = kind == "single"
    shapes = {"attention": SHAPES, "single": SHAPES[1:2], "steep": SHAPES[:3]}[kind]
    print("   V  d  H d_h tied   recovered  answers: median  worst  <=1e-7  asked/floor    each")
    for tokens, width, heads, each, tied in shapes:
        errors, costs, good, start = [], [], 0, time.perf_counter()
        for seed in range(first, first + seeds):
            rng = np.random.default_rng(seed)
            secret = token_attention(rng, tokens, width, heads, each, tied=tied)
            secret = scale_scores(secret, 4.0) if kind == "steep" else secret
            box: Any = secret
            if single:
                parts = {k: v.astype(np.float32) for k, v in secret.to_arrays().items()}
                box = keyhole.TokenAttention.from_arrays(parts)
            oracle = keyhole.open_language_model(box, max_length=64)
            learner = keyhole.TokenAttentionLearner()
            found = keyhole.recover(oracle, learner, seed=seed, throw=False)
            good += found.outcome is keyhole.Outcome.RECOVERED
            if found.model is None or found.outcome is not keyhole.Outcome.RECOVERED:
                print(f"  seed {seed}: {found.outcome.name} {found.reason[:90]}", flush=True)
            if found.model is not None:
                prompts = rng.integers(tokens, size=(200, 12))
                answers = secret(prompts)
                errors.append(np.abs(found.model(prompts) - answers).max() / np.abs(answers).max())
                costs.append(found.ledger.paid / found.ledger.floor)
        took = (time.perf_counter() - start) / seeds
        if not errors:
            continue
        close = sum(error <= (1e-4 if single else 1e-7) for error in errors)
        print(f"{tokens:5} {width} {heads:2} {each:3} {tied!s:5} {good:4} of {seeds:2} "
              f"{np.median(errors):12.1e} {max(errors):10.1e} {close:5} {np.median(costs):9.2f} "
              f"(worst {max(costs):.2f}) {took:5.1f} s", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    kinds = ("width", "bad", "trained", "geometry", "top", "labels", "attention", "single", "steep")
    parser.add_argument("--only", choices=kinds)
    parser.add_argument("--quick", action="store_true", help="one or two boxes per case")
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--first", type=int, default=9000, help="the first seed")
    parser.add_argument("--seconds", type=float, default=10.0, help="of training")
    options = parser.parse_args()
    counts = {"width": 100, "bad": 10, "trained": 6, "geometry": 5, "top": 5, "labels": 5}
    counts |= {"attention": 20, "single": 20, "steep": 20}
    for kind in [options.only] if options.only else kinds:
        seeds = options.seeds or (2 if options.quick else counts[kind])
        if kind == "width":
            measure_widths(seeds, options.first)
        elif kind == "bad":
            measure_bad(seeds, options.first)
        elif kind == "trained":
            measure_trained(seeds, options.first, options.seconds)
        elif kind == "geometry":
            measure_geometry(seeds, options.first)
        elif kind == "top":
            measure_top(seeds, options.first)
        elif kind == "labels":
            measure_labels(seeds, options.first)
        else:
            measure_attention(seeds, options.first, kind)


if __name__ == "__main__":
    main()
