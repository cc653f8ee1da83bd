"""Auto on a zoo of boxes (tests/zoo.py): family, outcome, queries against the right learner.

    python benchmarks/auto.py [--only WORD] [--seeds N]

The figures of docs/methods/auto.md come from here. An impostor is named
right where it is rejected; its queries are compared with nothing.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from keyhole.errors import KeyholeError
from keyhole.learners.auto import Auto
from keyhole.learners.base import Learner
from keyhole.models.canonical import distance
from keyhole.recovery import recover
from keyhole.results import Outcome, Recovery
from zoo import Specimen, everything

FACTOR, MORE = 1.1, 50  # of the right learner's queries that Auto may ask


def run(specimen: Specimen, learner: Learner, seed: int) -> Recovery | KeyholeError:
    try:
        return recover(specimen.build(), learner, seed=seed, throw=False)
    except KeyholeError as error:
        return error


def told(specimen: Specimen, found: Recovery | KeyholeError) -> bool:
    """Whether the family is named right; an impostor must be refused."""
    if isinstance(found, KeyholeError):
        return False
    if specimen.family is None:
        return found.outcome is Outcome.REJECTED
    return found.details.get("family") == specimen.family


def row(specimen: Specimen, seed: int) -> tuple[bool, bool, bool]:
    """Prints one line; named right, false recovery, too many queries."""
    start = time.process_time()
    found = run(specimen, Auto(), seed)
    seconds = time.process_time() - start
    right = told(specimen, found)
    family = specimen.family or "impostor"
    if isinstance(found, KeyholeError):
        print(f"{family:16s} {specimen.name:28s} WRONG {type(found).__name__}: {found}", flush=True)
        return False, False, False
    paid = found.ledger.paid
    alone, dear, gap = "", False, ""
    if specimen.learner is not None:
        other = run(specimen, specimen.learner, seed)
        if isinstance(other, KeyholeError):
            alone = f"{type(other).__name__}"
        else:
            dear = paid > FACTOR * other.ledger.paid + MORE
            alone = f"{other.ledger.paid:7d} {other.outcome.name:10s}"
            if found.outcome is Outcome.RECOVERED and other.outcome is Outcome.RECOVERED:
                gap = f"{distance(found.model, other.model):.0e}"
    false = specimen.family is None and found.outcome is Outcome.RECOVERED
    print(
        f"{family:16s} {specimen.name:28s} {'right' if right else 'WRONG'} {found.outcome.name:16s}"
        f" {paid:7d} {alone} {'DEAR' if dear else ''} {gap} {seconds:5.1f}s"
        f"{'' if right and found.outcome is not Outcome.REJECTED else '  ' + found.reason[:110]}",
        flush=True,
    )
    return right, false, dear


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="boxes whose name or family holds this word")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    rows = [
        row(specimen, seed)
        for seed in range(options.seeds)
        for specimen in everything()
        if options.only in f"{specimen.family or 'impostor'} {specimen.name}"
    ]
    right, false, dear = (sum(column) for column in zip(*rows, strict=True))
    print(f"\n{right} of {len(rows)} named right; impostors recovered: {false}; too dear: {dear}")


if __name__ == "__main__":
    main()
