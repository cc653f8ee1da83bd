"""Is the endpoint still the model that was signed off? A few queries, asked regularly, tell.

Put `check` into a scheduled job: it compares the endpoint with a saved model and says so.
Here the endpoint is a function; an address such as "https://host/v2/models/head" works alike.
"""

from pathlib import Path
from typing import Any

import numpy as np

import keyhole
from keyhole.models.random import attention


def check(endpoint: Any, signed_off: Path, day: int) -> str:
    """Asks queries that no other day asks, so that nobody can prepare for them."""
    run = keyhole.load(signed_off)
    box = keyhole.open_oracle(endpoint, run.model.width)
    verdict = keyhole.verify(box, run.model, errors=run.errors, queries=30, seed=day)
    word = "agrees" if verdict.agrees else "differs"
    return f"day {day}: {word}. {verdict.bound}"


def main() -> None:
    deployed = attention(np.random.default_rng(0), 12)
    signed_off = keyhole.recover(deployed).save("signed_off")
    print(check(lambda tokens: deployed(tokens), signed_off, day=1))

    def retrained(tokens: np.ndarray) -> np.ndarray:
        return deployed(tokens * (1 + 1e-6))  # somebody changed the scale of the tokens a little

    print(check(retrained, signed_off, day=2))


if __name__ == "__main__":
    main()
