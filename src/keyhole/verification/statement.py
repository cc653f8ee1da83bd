"""What a verification allows one to say, in a sentence for whoever has to rely on it."""

import math
from collections.abc import Mapping

from keyhole.errors import Counterexample

CONFIDENCE = 0.95


def state_verdict(count: int, replayed: int, tolerance: float, precision: float) -> str:
    """The claim behind `count` fresh answers that all agree."""
    agree = f"All {count} fresh answers agree" if count > 1 else "The one fresh answer agrees"
    old = f" (and so do {replayed} answers given while learning)" if replayed else ""
    within = state_tolerance(tolerance, precision)
    if count < 20:  # a share "at most" would say nothing that anyone wants to know
        often, seldom = (1.0 - (1.0 - share) ** count for share in (0.5, 0.01))
        return (
            f"{agree} {within}{old}. So few queries catch a box that differs on every second query "
            f"like these ({often:.0%} of the time), hardly one that differs on one in a hundred "
            f"({seldom:.0%} of the time): verify with 200 queries to rely on it. Nothing is "
            "claimed about queries of other kinds."
        )
    share = share_conceded(count)
    return (
        f"{agree} {within}{old}. With {CONFIDENCE:.0%} confidence, at most {share:.1%} of queries "
        f"drawn like these (one in {int(1.0 / share)}) are answered differently; nothing is "
        "claimed about queries of other kinds."
    )


def share_conceded(count: int) -> float:
    """Share of the queries, drawn like these, on which a box may differ and still agree on `count`
    of them once in 1 / (1 - CONFIDENCE) times."""
    return float(1.0 - (1.0 - CONFIDENCE) ** (1.0 / count))


def state_tolerance(tolerance: float, precision: float) -> str:
    """Within what: the box's own precision, or error bars that are wider."""
    if tolerance <= 8.0 * precision:  # a wider one is set by the model's error bars
        return f"within the box's precision ({tolerance:.1e} of their size)"
    return (
        f"within {tolerance:.1e} of their size: the model's error bars set this tolerance, the "
        f"box's own precision is {precision:.1e}"
    )


def state_noticed(noticed: Mapping[str, float]) -> str:
    """Of the block that is seen worst, the smallest change that would have been noticed."""
    if not noticed:
        return ""
    name, change = max(noticed.items(), key=lambda item: item[1])
    if math.isinf(change) or change > 1.0:
        return f"These answers say nothing about {name}: any change of it would go unnoticed."
    return f"Changes of {name} (seen worst) by less than {change:.1e} would go unnoticed."


def state_format(before: str, now: str) -> str:
    """Whether the box computes in another number format than when the model was recovered."""
    binary = ("bfloat16", "float16", "float32", "float64")
    if before == now or before not in binary or now not in binary:
        return ""
    return f"The box answers in {now}; when the model was recovered, it did so in {before}."


def state_difference(example: Counterexample) -> str:
    return f"The box and the model differ: {example.reason}."


def state_hidden(count: int) -> str:
    return (
        "Noise hides the box: what it allows an answer to be off is more than the answers "
        f"differ among themselves, so that other models would agree as well ({count} fresh "
        "answers). More queries are needed, longer tokens, or answers that are averaged."
    )
