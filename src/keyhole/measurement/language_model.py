"""What `keyhole check` says about a language model: what was found when it was opened, and a few
prompts that show whether it reads all of them and answers alike."""

from dataclasses import asdict
from typing import Any

import numpy as np

from keyhole.arrays import Array, Int, random_stream
from keyhole.measurement.noise import noise_of_type, recognise_format
from keyhole.oracles.base import Oracle
from keyhole.oracles.language_model.answers import log_total
from keyhole.oracles.language_model.interface import Interface
from keyhole.oracles.language_model.questions import pack
from keyhole.oracles.language_model.restricted import Reader
from keyhole.oracles.queries import QueryBatch

PURPOSE = "interface"


def examine_language_model(oracle: Oracle, seed: int = 0) -> dict[str, Any]:
    """Twelve questions beyond those of opening it: three prompts twice, once with another first
    token, and once with all other tokens. (To one of them a server may tell nothing, where it
    samples half a character.)"""
    rng, spec = random_stream(seed, "check"), oracle.spec
    tokens = int(spec.domain.tokens or 2)
    length = min(8, spec.domain.max_length or 8)
    prompts = rng.integers(tokens, size=(3, length))
    others = prompts.copy()
    others[:, 0] = (others[:, 0] + 1) % tokens
    rest = rng.integers(tokens, size=prompts.shape)
    rest[:, 0] = prompts[:, 0]
    first, again, changed, behind = (
        _ask(oracle, each) for each in (prompts, prompts, others, rest)
    )
    found: dict[str, Any] = {"tokens": tokens, "answers": spec.answers}
    interface: Interface | None = getattr(oracle, "interface", None)
    if interface is not None:
        facts = asdict(interface)
        del facts["vocabulary"]
        found |= facts
        found["questions_for_one_answer"] = interface.questions(tokens)
        found["reading"] = interface.reading
    else:
        found["number_format"] = recognise_format(noise_of_type(None, first), first).format
        if first.ndim == 2:
            found["sum_of_probabilities"] = (
                float(np.exp(log_total(first)[0])) if spec.answers == "logprobs" else None
            )
    found["repeatable"] = bool(np.array_equal(first, again))
    found["reads_the_first_token"] = not bool(np.array_equal(first, changed))
    found["reads_all_but_the_first"] = not bool(np.array_equal(first, behind))
    found["questions_asked"] = oracle.opening_queries + 4 * len(prompts)
    warnings = []
    if not found["repeatable"]:
        warnings.append("asked again, it answers differently: noise, or random sampling")
    if not found["reads_the_first_token"]:
        warnings.append(
            f"the first of {length} tokens changes nothing: it drops tokens, or a cache answers"
        )
    if not found["reads_all_but_the_first"]:
        warnings.append("nothing but the first token changes the answer: a cache answers")
    if interface is not None and interface.heated:
        warnings.append("the temperature scales what is told: the matrix is known up to that scale")
    found["warnings"] = warnings
    return found


def _ask(oracle: Oracle, prompts: Int[Array, "n length"]) -> Array:
    """Plain questions, however restricted the interface."""
    if oracle.spec.domain.bias is None and not isinstance(oracle, Reader):
        return np.asarray(
            oracle.ask(QueryBatch.of(prompts[:, :, None].astype(np.float64), PURPOSE))
        )
    box = oracle.inner if isinstance(oracle, Reader) else oracle
    nothing = np.zeros((len(prompts), 0))
    return np.asarray(box.ask(pack(prompts, nothing.astype(np.int64), nothing, PURPOSE)))
