"""Language models for the tests: an output layer behind an arbitrary network, bad interfaces, and
attention on tokens. They hold the truth."""

from collections.abc import Callable
from typing import Any

import numpy as np

import keyhole
from keyhole.models.language_model import TokenAttention
from keyhole.models.random import token_attention


def round_to(answers: np.ndarray, format: str) -> np.ndarray:
    """The answers in a number format: "float64", "float32", "float16", "bfloat16", "2 decimals"."""
    if format == "bfloat16":
        bits = np.asarray(answers, dtype=np.float32).view(np.uint32)
        bits = (bits + ((bits >> 16) & 1) + 0x7FFF) & 0xFFFF0000
        return bits.astype(np.uint32).view(np.float32).astype(np.float64)
    if format.endswith("decimals"):
        return np.round(answers, int(format.split()[0]))
    return np.asarray(answers, dtype=format).astype(np.float64)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


class LanguageModel:
    """A random network on tokens with an output layer: logits W (g * norm(u) + b) + c."""

    def __init__(
        self,
        seed: int,
        *,
        tokens: int = 200,
        width: int = 24,
        norm: str = "rms",
        bias: str = "none",  # "norm": b, "output": c
        epsilon: float = 0.0,
        slope: float = 0.5,  # how unequal the directions of hidden states are
        format: str = "float64",
        logprobs: bool = False,
    ) -> None:
        rng = np.random.default_rng(seed)
        self.tokens, self.width, self.norm, self.epsilon = tokens, width, norm, epsilon
        self.format, self.logprobs = format, logprobs
        self.output = 0.3 * rng.standard_normal((tokens, width))
        self.gain = np.exp(0.2 * rng.standard_normal(width))
        self.bias = (0.3 if bias == "norm" else 0.0) * rng.standard_normal(width)
        self.added = (1.0 if bias == "output" else 0.0) * rng.standard_normal(tokens)
        self.embedding = rng.standard_normal((tokens, width))
        self.places = rng.standard_normal((64, width))
        self.inner = rng.standard_normal((width, 4 * width)) / np.sqrt(width)
        self.outer = rng.standard_normal((4 * width, width)) / np.sqrt(4 * width)
        turn = np.linalg.qr(rng.standard_normal((width, width)))[0]
        self.axes = (turn * np.exp(-slope * np.linspace(0.0, 3.0, width))).T

    def __call__(self, prompts: np.ndarray) -> np.ndarray:
        length = prompts.shape[1]
        x = self.embedding[prompts] + self.places[np.arange(length) % 64]
        x = (x * np.linspace(0.5, 1.5, length)[:, None]).sum(axis=1)
        u = (x + np.tanh(x @ self.inner) @ self.outer) @ self.axes
        if self.norm == "layer":
            u = u - u.mean(axis=1, keepdims=True)
        n = u / np.sqrt(np.mean(u**2, axis=1, keepdims=True) + self.epsilon)
        logits = (n * self.gain + self.bias) @ self.output.T + self.added
        return round_to(log_softmax(logits) if self.logprobs else logits, self.format)

    @property
    def truth(self) -> keyhole.OutputLayer:
        matrix, offset = self.output * self.gain, self.output @ self.bias + self.added
        if self.norm == "layer":
            matrix = matrix - matrix.mean(axis=1, keepdims=True)
        if self.logprobs:
            matrix, offset = matrix - matrix.mean(axis=0), offset - offset.mean()
        return keyhole.OutputLayer(matrix, offset, level="gram", shifted=self.logprobs)

    def box(self) -> keyhole.Oracle:
        return keyhole.open_language_model(self, max_length=32)


Interface = Callable[[np.ndarray], np.ndarray]


def bad_interfaces(model: LanguageModel) -> dict[str, Interface]:
    """What APIs do to their answers; none of these may end with a wrong width and no warning."""
    other = LanguageModel(99, tokens=model.tokens, width=model.width + 5)
    state: dict[str, Any] = {"asked": 0, "cache": {}, "rng": np.random.default_rng(5)}

    def changes(prompts: np.ndarray) -> np.ndarray:
        state["asked"] += len(prompts)
        return (model if state["asked"] < 25 else other)(prompts)

    def drops(prompts: np.ndarray) -> np.ndarray:
        return model(prompts[:, -1:] % 12)

    def unsummed(prompts: np.ndarray) -> np.ndarray:
        answers = log_softmax(model(prompts))
        return np.asarray(answers + 0.1 * np.cos(prompts.sum(axis=1, keepdims=True)))

    def heats(prompts: np.ndarray) -> np.ndarray:
        return np.asarray(model(prompts) / state["rng"].uniform(0.5, 2.0, (len(prompts), 1)))

    def watermarks(prompts: np.ndarray) -> np.ndarray:
        answers = model(prompts)
        for row, prompt in zip(answers, prompts, strict=True):
            green = np.random.default_rng(int(prompt[-1])).random(model.tokens) < 0.5
            row += 0.2 * green
        return answers

    def noisy(prompts: np.ndarray) -> np.ndarray:
        answers = model(prompts)
        return np.asarray(answers + 0.05 * state["rng"].standard_normal(answers.shape))

    def caches(prompts: np.ndarray) -> np.ndarray:
        return model(prompts[:, :1] % 16)

    def clips(prompts: np.ndarray) -> np.ndarray:
        return np.maximum(model(prompts), -0.5)

    return {
        "another model from the 25th answer on": changes,
        "all but the last token dropped": drops,
        "probabilities that do not sum": unsummed,
        "a temperature per answer": heats,
        "a watermark": watermarks,
        "noise": noisy,
        "a cache by first token": caches,
        "clipped answers": clips,
    }


def attention_on_tokens(
    seed: int,
    *,
    tokens: int = 40,
    width: int = 8,
    heads: int = 2,
    head_width: int = 4,
    tied: bool = False,
    logprobs: bool = False,
) -> TokenAttention:
    """Random embedding, attention and unembedding; scores of about one."""
    rng = np.random.default_rng(seed)
    return token_attention(rng, tokens, width, heads, head_width, tied=tied, logprobs=logprobs)


def open_tokens(model: TokenAttention) -> keyhole.Oracle:
    return keyhole.open_language_model(model, max_length=64)
