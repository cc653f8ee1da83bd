"""Evidence for a verdict on a language model: what a third party needs to check it offline.

Kept are the prompts, all that the box told, and of the reference what that is compared with: the
log-probabilities of the tokens that were told, of the sampled token and of the likeliest one (of a
signature, all that it holds). From these the deviations and the verdict follow again. The seed
draws the ordinary prompts, and the pool from which those that tell were chosen.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from keyhole.arrays import Array, random_stream
from keyhole.verification.language_models import (
    Spoken,
    SpokenCompared,
    draw_comparison,
    judge_race,
    judge_spoken,
    measure_told,
)
from keyhole.verification.records import pack_array, unpack_array
from keyhole.verification.reference import SIGNED
from keyhole.verification.spoken_signature import compare_one


@dataclass(frozen=True)
class PromptPlan:
    """What prompts are drawn from; of a signature, the seed alone, and the rest is there."""

    seed: int
    queries: int = 0
    tokens: int = 0
    longest: int = 0

    def draws(self, prompts: tuple[Array, ...], ordinary: int) -> bool:
        """Whether the first prompts are those that the seed draws, and the others of its pool."""
        rng = random_stream(self.seed, "language models")
        plain, pool = draw_comparison(self.queries, self.tokens, self.longest, rng)
        if len(plain) != ordinary or len(prompts) != self.queries:
            return False
        drawn = {prompt.tobytes() for prompt in pool}
        return all(map(np.array_equal, plain, prompts[:ordinary])) and all(
            prompt.astype(np.int64).tobytes() in drawn for prompt in prompts[ordinary:]
        )


def describe_spoken(found: SpokenCompared, signed: Spoken | None = None) -> dict[str, Any]:
    """A comparison as JSON; `signed` is what a signature holds for these prompts."""
    every = np.arange(len(found.prompts))
    likeliest = found.expected.argmax(axis=1)
    sampled = np.where(found.spoken.sampled >= 0, found.spoken.sampled, likeliest)
    places = np.maximum(found.spoken.tokens, 0)
    return {
        "prompts": [pack_array(np.asarray(prompt)) for prompt in found.prompts],
        "ordinary": found.ordinary,
        "tokens": found.expected.shape[1],
        "allowed": found.allowed,
        "notes": list(found.notes),
        "format": found.format,
        "what": found.what,
        "box": describe_talk(found.spoken),
        "reference": {
            "likeliest": pack_array(likeliest),
            "best": pack_array(found.expected[every, likeliest]),
            "sampled": pack_array(found.expected[every, sampled]),
            "told": pack_array(found.expected[every[:, None], places]),
        },
        "signed": None if signed is None else describe_talk(signed),
        "raced": None if found.raced is None else [pack_array(side) for side in found.raced],
    }


def describe_talk(spoken: Spoken) -> dict[str, Any]:
    """What was told, as JSON."""
    names = ("sampled", "tokens", "logprobs")
    return {name: pack_array(getattr(spoken, name)) for name in names}


def read_talk(body: dict[str, Any]) -> Spoken:
    return Spoken(*(unpack_array(body[name]) for name in ("sampled", "tokens", "logprobs")))


def judge_again(body: dict[str, Any]) -> SpokenCompared:
    """The comparison that a file holds, with deviations that follow from what was told."""
    prompts = tuple(unpack_array(prompt) for prompt in body["prompts"])
    spoken, count = read_talk(body["box"]), len(prompts)
    expected = np.full((count, int(body["tokens"])), -np.inf)
    every, known = np.arange(count), {k: unpack_array(v) for k, v in body["reference"].items()}
    told = spoken.tokens >= 0
    rows = np.broadcast_to(every[:, None], told.shape)
    expected[rows[told], spoken.tokens[told]] = known["told"][told]
    heard = spoken.sampled >= 0
    expected[every[heard], spoken.sampled[heard]] = known["sampled"][heard]
    expected[every, known["likeliest"]] = known["best"]
    allowed, what, wrong = float(body["allowed"]), str(body["what"]), 0
    compared = int(told.sum()) or int(heard.sum())
    raced = None
    if body["raced"] is not None:
        said, winners = (unpack_array(side) for side in body["raced"])
        raced, compared = (said, winners), said.size
        deviations = judge_race(said, winners)
    elif what == SIGNED:
        signed = read_talk(body["signed"])
        both = [compare_one(spoken, signed, place) for place in range(count)]
        deviations, compared = np.array([gap for gap, _ in both]), sum(n for _, n in both)
    else:
        errors = measure_told(spoken, expected)
        deviations, wrong = judge_spoken(spoken, errors, expected, allowed)
        if body["format"]:
            deviations = np.where(np.isnan(errors), 0.0, np.abs(errors)).max(axis=1, initial=0.0)
    return SpokenCompared(
        prompts,
        int(body["ordinary"]),
        deviations,
        allowed,
        compared,
        spoken,
        expected,
        tuple(str(note) for note in body["notes"]),
        str(body["format"]),
        wrong,
        what,
        raced,
    )
