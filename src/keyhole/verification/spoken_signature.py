"""What a signature of a language model holds, and how a box is compared with it.

Prompts are ordinary ones, asked one by one; kept is what the interface told: the sampled token and
some or all log-probabilities. Another interface of the same model may tell other tokens: those that
both told are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import SINGLE_ROUNDOFF, Array
from keyhole.errors import InvalidArgument
from keyhole.measurement.noise import decimal_step
from keyhole.oracles.base import Oracle
from keyhole.oracles.noise import ROUNDINGS, NoiseModel
from keyhole.verification.language_models import (
    Predictor,
    Speaker,
    Spoken,
    SpokenCompared,
    check_told,
    measure_server_noise,
    open_speaker,
    speaks,
    tell_hidden,
)
from keyhole.verification.reference import SIGNED

PROMPTS = "prompts"  # kind of query


@dataclass(frozen=True, eq=False)
class Talk:
    """What a language model told, and how exact it is, in nats."""

    spoken: Spoken
    noise: NoiseModel

    def at(self, places: Array) -> "Talk":
        """What was told to some of the prompts."""
        told = self.spoken
        some = Spoken(told.sampled[places], told.tokens[places], told.logprobs[places])
        return Talk(some, self.noise)


def nobody(tokens: int) -> Predictor:
    """A reference that only says how many tokens there are: a signature is all there is."""
    known = Predictor()
    known.tokens = tokens
    return known


def open_talker(box: Any, tokens: int | None, options: dict[str, Any]) -> Speaker | None:
    """The box as a language model; None where it is none."""
    if not (speaks(box) or (tokens is not None and not hasattr(box, "ask"))):
        return None
    oracle = open_speaker(box, nobody(tokens or count_tokens(box)), options)
    return Speaker(oracle, nobody(tokens_of(oracle)))


def count_tokens(box: Any) -> int:
    """Of a language model that is at hand."""
    if isinstance(box, Oracle):
        return tokens_of(box)
    from keyhole.verification.language_models import open_predictor

    return open_predictor(box).tokens


def tokens_of(oracle: Oracle) -> int:
    interface = getattr(oracle, "interface", None)
    known = oracle.spec.domain.tokens if interface is None else interface.vocabulary
    return int(known or 0)


def hear(speaker: Speaker, prompts: Sequence[Array]) -> Talk:
    """Asks the prompts, and one of them twice more."""
    spoken = speaker.ask(prompts)
    check_told(spoken)
    told = spoken.logprobs[spoken.tokens >= 0]
    noise = NoiseModel(SINGLE_ROUNDOFF, format="stated")
    if told.size:
        scatter = measure_server_noise(speaker, prompts[0], spoken)
        step = decimal_step(told)
        repeatable = scatter <= SINGLE_ROUNDOFF * float(np.abs(told).max())
        additive = 0.0 if repeatable else scatter
        noise = NoiseModel(SINGLE_ROUNDOFF, additive, step, repeatable=repeatable)
    return Talk(spoken, noise)


def compare_talk(
    speaker: Speaker, prompts: Sequence[Array], signed: Talk, made: str
) -> SpokenCompared:
    """What the box tells now beside what was told when it was signed."""
    now = hear(speaker, prompts)
    told = [s.logprobs[s.tokens >= 0] for s in (now.spoken, signed.spoken)]
    largest = max((float(np.abs(part).max()) for part in told if part.size), default=0.0)
    additive = float(np.hypot(now.noise.additive, signed.noise.additive))
    step = max(now.noise.step, signed.noise.step)
    bound = NoiseModel(additive=additive, step=step).bound
    allowed = ROUNDINGS * SINGLE_ROUNDOFF * largest + bound
    deviations, compared = np.zeros(len(prompts)), 0
    expected = np.full((len(prompts), speaker.reference.tokens), -np.inf)
    for place in range(len(prompts)):
        gap, count = compare_one(now.spoken, signed.spoken, place)
        deviations[place], compared = gap, compared + count
        known = signed.spoken.tokens[place] >= 0
        names = signed.spoken.tokens[place][known]
        expected[place, names] = signed.spoken.logprobs[place][known]
        if not len(names) and signed.spoken.sampled[place] >= 0:
            expected[place, signed.spoken.sampled[place]] = 0.0
    if not compared:
        raise InvalidArgument("the box tells nothing that was told when it was signed")
    note = f"The prompts are those of the signature of {made[:10]}."
    return SpokenCompared(
        tuple(prompts),
        len(prompts),
        deviations,
        max(allowed, SINGLE_ROUNDOFF),
        compared,
        now.spoken,
        expected,
        (tell_hidden(speaker), note),
        what=SIGNED,
    )


def compare_one(now: Spoken, signed: Spoken, place: int) -> tuple[float, int]:
    """The largest difference of what both told to one prompt, in nats, and how many numbers were
    compared; of labels alone, infinite where they differ."""
    values = [
        dict(zip(s.tokens[place].tolist(), s.logprobs[place].tolist(), strict=True))
        for s in (now, signed)
    ]
    shared = [token for token in values[0] if token >= 0 and token in values[1]]
    if shared:
        return max(abs(values[0][t] - values[1][t]) for t in shared), len(shared)
    labels = int(now.sampled[place]), int(signed.sampled[place])
    if min(labels) < 0:
        return 0.0, 0
    return (0.0 if labels[0] == labels[1] else float("inf")), 1
