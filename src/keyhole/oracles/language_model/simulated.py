"""A language model at hand behind the limits of an interface: to test and to audit."""

from collections.abc import Callable
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.oracles.base import Domain, Oracle, Spec
from keyhole.oracles.language_model.function import call
from keyhole.oracles.language_model.interface import Interface
from keyhole.oracles.language_model.questions import reply, unpack
from keyhole.oracles.queries import QueryBatch


class Simulated(Oracle):
    """Answers questions as an interface would: `decimals` rounds log-probabilities, `noise` is
    the standard deviation of what is added to logits, anew for every question."""

    def __init__(
        self,
        logits: Callable[[Array], Any],
        interface: Interface,
        *,
        max_length: int | None = None,
        decimals: int | None = None,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.logits, self.interface = logits, interface
        self.decimals, self.noise = decimals, noise
        self._rng = np.random.default_rng(seed)
        domain = Domain(max_length, tokens=interface.vocabulary, bias=interface.max_bias)
        self.spec = Spec(2, 2 + 2 * interface.top, domain, None, "simulated", interface.answers)

    def ask(self, queries: QueryBatch) -> Array:
        questions = list(unpack(queries))
        prompts = np.array([question.prompt for question in questions])
        unique, which = np.unique(prompts, axis=0, return_inverse=True)
        logits = np.asarray(call(self.logits, unique), dtype=np.float64)[which.ravel()]
        return np.array(
            [
                self._answer(row, question.bias)
                for row, question in zip(logits, questions, strict=True)
            ]
        )

    def _answer(self, logits: Float[Array, " V"], bias: dict[int, float]) -> Float[Array, " k"]:
        interface = self.interface
        if self.noise:
            logits = logits + self.noise * self._rng.standard_normal(len(logits))
        biased = logits.copy()
        if bias and interface.bias != "none":
            biased[list(bias)] += list(bias.values())
        sampled = int(np.argmax(biased))
        told = biased if interface.bias == "reported" else logits
        largest = told.max()
        logprobs = told - (largest + np.log(np.exp(told - largest).sum()))
        if self.decimals is not None:
            logprobs = np.round(logprobs, self.decimals)
        top = min(interface.top, len(logits) - 1)
        best = np.argpartition(-logprobs, top)[:top] if interface.top < len(logits) else None
        best = np.arange(len(logits)) if best is None else best
        logprob = float(logprobs[sampled]) if interface.sampled else None
        return reply(interface.top, sampled, logprob, {int(t): float(logprobs[t]) for t in best})
