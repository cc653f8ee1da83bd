"""Is the endpoint still the model that was signed off? A few fresh queries every night tell.

Put `keyhole.watch`, or the command of that name, into a scheduled job: one call is one night. The
test may be looked at every night; here the endpoint is a function, and an address such as
"https://host/v2/models/head" works alike.
"""

import numpy as np

import keyhole
from keyhole.models.random import attention


def main() -> None:
    deployed = attention(np.random.default_rng(0), 12)
    signed_off = keyhole.recover(deployed).save("signed_off")

    for _ in range(3):
        night = keyhole.watch(lambda tokens: deployed(tokens), str(signed_off), "watch.json")
        print(night)

    def retrained(tokens: np.ndarray) -> np.ndarray:
        return deployed(tokens * (1 + 1e-6))  # somebody changed the scale of the tokens a little

    while not night.alarm:
        night = keyhole.watch(retrained, str(signed_off), "watch.json")
        print(night)
    print(f"What tonight alone says: {night.verdict}")


if __name__ == "__main__":
    main()
