"""Which comparison a reference needs: a model that is at hand, another box, a signature."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from keyhole.arrays import random_stream
from keyhole.oracles.open import load_named
from keyhole.oracles.rows import RowBox
from keyhole.results import Recovery, Verdict, load
from keyhole.verification.language_models import (
    compare_spoken,
    make_spoken_verdict,
    speaks,
    verify_language_models,
)
from keyhole.verification.reference import (
    SIGNED,
    STREAM,
    OtherShape,
    compare,
    draw_requests,
    is_address,
    is_target,
    make_verdict,
    open_sides,
    state_other_shape,
    verify_boxes,
)
from keyhole.verification.signature import (
    Signature,
    compare_talk_with_signature,
    compare_with_signature,
    is_signature,
    load_signature,
    verify_signature,
)

EMBEDDINGS = ("/embeddings", "/embed", "/predict")  # how addresses of embedding servers end


def read_reference(reference: Any) -> Any:
    """What a reference stands for: a run or a model where a string names one that was saved, what
    `package.module:attribute` holds, and any other target as it is."""
    if not isinstance(reference, (str, Path)) or is_target(str(reference)):
        return str(reference) if isinstance(reference, Path) else reference
    path = Path(reference)
    if is_signature(path):
        return load_signature(path)
    return load(path) if path.exists() else load_named(str(reference))


def is_language_pair(box: Any, reference: Any) -> bool:
    """Whether the two are language models: one of them plainly is, and the reference is no model
    that was recovered (which says how it is compared)."""
    if hasattr(reference, "to_arrays") or hasattr(reference, "nearest"):
        return False
    if isinstance(reference, Recovery) or serves_rows(box):
        return False
    return speaks(reference) or (speaks(box) and callable(reference))


def serves_rows(box: Any) -> bool:
    """Whether a box is plainly one of embeddings."""
    return isinstance(box, RowBox) or (
        is_address(box) and urlsplit(box).path.rstrip("/").endswith(EMBEDDINGS)
    )


def verify_target(
    box: Any, reference: Any, queries: int | None, seed: int, **options: Any
) -> Verdict | None:
    """The verdict where the reference is a box of its own or a signature; None where it is a model
    or a run, which `verify` compares."""
    if isinstance(reference, Signature):
        return verify_signature(box, reference, queries, seed, **options)
    if is_language_pair(box, reference):
        return verify_language_models(box, reference, queries=queries, seed=seed, **options)
    if is_target(reference):
        return verify_boxes(box, reference, queries=queries, seed=seed, **options)
    return None


def compare_target(
    box: Any, reference: Any, queries: int, seed: int, **options: Any
) -> tuple[Verdict, int, int] | None:
    """The same with the number of answers compared, and of those beyond their tolerance."""
    if isinstance(reference, Signature) and reference.talk is not None:
        talk = compare_talk_with_signature(box, reference, queries, seed, **options)
        return make_spoken_verdict(talk), len(talk.prompts), int(talk.bad.sum())
    if isinstance(reference, Signature):
        found = compare_with_signature(box, reference, queries, seed, **options)
        verdict = make_verdict(found, what=SIGNED)
        return verdict, len(found.rows), int(found.bad.sum())
    if is_language_pair(box, reference):
        spoken = compare_spoken(box, reference, queries, seed, options)
        return make_spoken_verdict(spoken), len(spoken.prompts), int(spoken.bad.sum())
    if not is_target(reference):
        return None
    rng = random_stream(seed, STREAM)
    with open_sides(box, reference, **options) as sides:
        requests = draw_requests(sides, queries, rng)
        try:
            found = compare(sides, requests, rng)
        except OtherShape as error:
            verdict = state_other_shape(error)
            return verdict, queries, queries
        return make_verdict(found, sides), len(found.rows), int(found.bad.sum())
