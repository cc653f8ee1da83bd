"""What a verification allows one to say, in a sentence for whoever has to rely on it."""

import math
from collections.abc import Mapping

import numpy as np

from keyhole.errors import Counterexample

CONFIDENCE = 0.95


def state_verdict(count: int, replayed: int, tolerance: float, precision: float) -> str:
    """The claim behind `count` fresh answers that all agree, and `replayed` answers that were paid
    for while learning."""
    agree = f"All {count} fresh answers agree" if count > 1 else "The one fresh answer agrees"
    old = f", and so do all {replayed:,} answers given while learning" if replayed else ""
    return f"{agree} {state_tolerance(tolerance, precision)}{old}. {state_share(count)}"


def state_share(count: int) -> str:
    """What `count` agreements allow one to claim."""
    return (
        f"With {CONFIDENCE:.0%} confidence at most {percent(share_conceded(count))} of ordinary "
        "queries are answered differently (`keyhole verify --explain` lists them); nothing is "
        "claimed about others."
    )


def percent(share: float) -> str:
    """A share in percent with two digits, rounded up."""
    digits = 1 - math.floor(math.log10(100.0 * share))
    return f"{math.ceil(share * 10.0 ** (digits + 2) - 1e-9) / 10.0**digits:g}%"


def share_conceded(count: int) -> float:
    """Share of the queries, drawn like these, on which a box may differ and still agree on `count`
    of them once in 1 / (1 - CONFIDENCE) times."""
    return float(1.0 - (1.0 - CONFIDENCE) ** (1.0 / count))


def state_tolerance(tolerance: float, precision: float) -> str:
    """Within what: the box's own precision, or error bars that are wider."""
    if tolerance <= 8.0 * precision:  # a wider one is set by the model's error bars
        return f"within the box's precision ({tolerance:.1e} of the answers' size)"
    return (
        f"within {tolerance:.1e} of the answers' size (set by the model's error bars; the box's "
        f"own precision is {precision:.1e})"
    )


def state_noticed(noticed: Mapping[str, float]) -> str:
    """Of the block that is seen worst, the change below which nothing was seen to move enough."""
    if not noticed:
        return ""
    name, change = max(noticed.items(), key=lambda item: item[1])
    if math.isinf(change) or change > 1.0:
        return f"These answers say nothing about {name}: any change of it may go unnoticed."
    return f"Changes of {name} (seen worst) by less than {change:.1e} of it may go unnoticed."


def state_format(before: str, now: str) -> str:
    """Whether the box computes in another number format than when the model was recovered."""
    binary = ("bfloat16", "float16", "float32", "float64")
    if before == now or before not in binary or now not in binary:
        return ""
    return f"The box answers in {now}; when the model was recovered, it did so in {before}."


def state_difference(
    example: Counterexample, tolerance: float, differing: int, fresh: int, old: int, replayed: int
) -> str:
    """On which query, by how much beside what is allowed, and on how many of all: `differing` of
    the `fresh` answers, `old` of those `replayed`."""
    parts = [f"{differing} of {fresh} fresh answers"]
    if replayed:
        parts.append(f"{old:,} of {replayed:,} answers given while learning")
    return (
        f"The box and the model differ on {' and '.join(parts)}. The query shown: {example.reason}"
        f"{state_gap(example, tolerance)}."
    )


def state_gap(example: Counterexample, tolerance: float) -> str:
    """How far apart the two answers are, where they can be compared."""
    box, model = (np.asarray(part, float) for part in (example.box_answer, example.model_answer))
    if box.shape != model.shape or not (np.isfinite(box).all() and np.isfinite(model).all()):
        return ""
    size = float(np.max(np.abs([box, model]), initial=0.0))
    gap = float(np.max(np.abs(box - model), initial=0.0))
    share = gap / size if size > 0 else 0.0
    return f", {share:.1e} of the answer apart (ordinary ones may be {tolerance:.1e} apart)"


def state_contradiction() -> str:
    return (
        "The box contradicts itself: it answered a query while learning and answers the same query "
        "differently now."
    )


def state_hidden(count: int) -> str:
    return (
        "Noise hides the box: what it allows an answer to be off is more than the answers "
        f"differ among themselves, so that other models would agree as well ({count} fresh "
        "answers). More queries are needed, longer tokens, or answers that are averaged."
    )


def state_space() -> str:
    """What the verification of an output layer compares, and what it cannot notice."""
    return (
        "Only the space of answers was compared: that answers are ones this output layer can give, "
        "not which prompt leads to which. Changes below the output layer (a merged LoRA, another "
        "temperature or system prompt) go unnoticed: verify against the model itself."
    )
