"""What a verification allows one to say, in a sentence for whoever has to rely on it."""

from keyhole.errors import Counterexample

CONFIDENCE = 0.95
FEW = 20  # answers below which a share "at most" says nothing that anyone would want to know
OFTEN, SELDOM = 0.5, 0.01  # of the queries: what a box must differ on to be caught by few
ENOUGH = 200  # queries that one is advised to ask


def in_words(
    count: int, replayed: int, example: Counterexample | None, hidden: bool = False
) -> str:
    """The claim behind `count` fresh answers that agree, or what was found against it."""
    if example is not None:
        return f"The box and the model differ: {example.reason}."
    if hidden:
        return (
            "Noise hides the box: what it allows an answer to be off is more than the answers "
            f"differ among themselves, so that other models would agree as well ({count} fresh "
            "answers). More queries are needed, longer tokens, or answers that are averaged."
        )
    old = f" (and so do {replayed} answers given while learning)" if replayed else ""
    agree = f"All {count} fresh answers agree within the box's precision{old}."
    if count == 1:
        agree = f"The one fresh answer agrees within the box's precision{old}."
    if count < FEW:
        often, seldom = (1.0 - (1.0 - share) ** count for share in (OFTEN, SELDOM))
        return (
            f"{agree} So few queries catch a box that differs on every second query like "
            f"these ({often:.0%} of the time), hardly one that differs on one in a hundred "
            f"({seldom:.0%} of the time): verify with {ENOUGH} queries to rely on it. Nothing is "
            "claimed about queries of other kinds."
        )
    share = 1.0 - (1.0 - CONFIDENCE) ** (1.0 / count)
    return (
        f"{agree} With {CONFIDENCE:.0%} confidence, at most {share:.1%} of queries drawn like "
        f"these (one in {int(1.0 / share)}) are answered differently; nothing is claimed about "
        "queries of other kinds."
    )
