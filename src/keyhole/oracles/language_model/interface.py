"""What an interface to a language model tells, and what it lets one do."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import real_number, whole_number
from keyhole.errors import InvalidArgument
from keyhole.oracles.language_model.answers import name_logit_format
from keyhole.oracles.noise import FORMATS

BIAS = ("none", "sampling", "reported")  # what a bias on a token acts on, each including the former
# how log-probabilities are read, the cheapest way first
WHOLE, REFERENCE, FORCED, RACE, CLOSED = "whole", "reference", "forced", "race", "closed"
DECIMALS = " decimals"


def name_format(logprobs: Iterable[float]) -> str:
    """How exact the log-probabilities of one answer are: a few decimals, single precision, or that
    of the logits behind them, where they were normalised in double precision."""
    numbers = np.array(list(logprobs), dtype=np.float64)
    if not len(numbers):
        return "float64"
    for places in range(1, 7):
        if np.abs(numbers - np.round(numbers, places)).max() < 1e-12:
            return f"{places}{DECIMALS}"
    if (numbers == numbers.astype(np.float32)).all():
        return "float32"
    return name_logit_format(numbers[None]) or "float64"


@dataclass(frozen=True)
class Interface:
    """One request: a prompt, and a bias on some tokens. One answer: the token that was sampled
    (the likeliest, the bias counted in), and the log-probabilities of the likeliest ones."""

    vocabulary: int
    top: int  # log-probabilities in an answer, at most; 0: the sampled token alone
    bias: str = "none"  # "sampling": it steers what is sampled, "reported": log-probabilities too
    sampled: bool = False  # the sampled token's log-probability is told, even outside the top
    bias_entries: int = 300  # tokens that one request may bias
    max_bias: float = 100.0
    repeatable: bool = True  # asked again, it answers alike
    number_format: str = "float64"  # or a shorter one, or as in "4 decimals"
    echo: bool = False  # a request can tell log-probabilities of the prompt's own tokens
    heated: bool = False  # the temperature changes the log-probabilities that are told
    numbers: bool = True  # prompts are taken as numbers of tokens, not only as text

    def __post_init__(self) -> None:
        whole_number("vocabulary", self.vocabulary, 2)
        whole_number("top", self.top, 0)
        whole_number("bias_entries", self.bias_entries, 0)
        real_number("max_bias", self.max_bias, 0.0, with_low=True)
        if self.bias not in BIAS:
            raise InvalidArgument(f"bias must be one of {', '.join(BIAS)}, got {self.bias!r}")

    @property
    def answers(self) -> str:
        """The name of its answers."""
        if self.top >= self.vocabulary:
            return "logprobs"
        return "top_k" if self.top or self.sampled else "labels"

    @property
    def reading(self) -> str:
        """The cheapest way to the log-probabilities of all tokens."""
        if self.top >= self.vocabulary:
            return WHOLE
        if self.bias == "reported" and min(self.top, self.bias_entries) >= 2:
            return REFERENCE
        if self.bias == "none" or not self.bias_entries:
            return CLOSED
        return FORCED if self.sampled else RACE

    def questions(self, tokens: int) -> float | None:
        """Requests for the log-probabilities of so many tokens behind one prompt; None where no
        number of requests tells them."""
        at_once = min(self.top, self.bias_entries) - 1
        costs = {
            WHOLE: 1.0,
            REFERENCE: float(-(-(tokens - 1) // max(at_once, 1))),
            FORCED: float(tokens),
            RACE: 2.5 * tokens + 80.0,  # to 1e-4, as measured for 48 and for 300 tokens
        }
        return costs.get(self.reading)

    @property
    def step(self) -> float:
        """To whose multiples log-probabilities are rounded; zero where they are not."""
        if not self.number_format.endswith(DECIMALS):
            return 0.0
        return float(10.0 ** -int(self.number_format.removesuffix(DECIMALS)))

    @property
    def roundoff(self) -> float:
        """Unit roundoff of its numbers."""
        return float(2.0 ** -dict(FORMATS).get(self.number_format, dict(FORMATS)["float64"]))

    def sentences(self) -> tuple[str, ...]:
        """What it does, for readers."""
        told = (
            f"It tells the log-probabilities of all {self.vocabulary} tokens."
            if self.top >= self.vocabulary
            else f"It tells the log-probabilities of the {self.top} likeliest tokens."
            if self.top
            else "It tells no log-probabilities of the likeliest tokens."
        )
        acts = {
            "none": "A bias on tokens is refused or ignored.",
            "sampling": "A bias steers which token is sampled, and leaves log-probabilities alone.",
            "reported": "A bias acts on the log-probabilities that are told.",
        }[self.bias]
        if self.bias != "none":
            acts += f" A request may hold {self.bias_entries} of them, up to {self.max_bias:g}."
        found = [told, acts]
        if self.sampled and self.top < self.vocabulary:
            found.append("The sampled token's log-probability is told, whatever its rank.")
        if self.heated:
            found.append("The temperature changes the log-probabilities that are told.")
        if self.echo:
            found.append("It can tell log-probabilities of the prompt's own tokens (echo).")
        found.append(f"Its numbers have the format {self.number_format}.")
        if not self.repeatable:
            found.append("Asked again, it answers differently.")
        return tuple(found)
