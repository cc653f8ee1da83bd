"""One head through a vocabulary of random tokens: error, queries, calibration.

python benchmarks/vocabulary.py [--quick]
"""

import argparse

import numpy as np

import keyhole
from keyhole.learners.base import Hypothesis
from keyhole.learners.single_head.vocabulary import learn_from_vocabulary
from keyhole.models.random import attention
from keyhole.oracles.base import Oracle, Spec

CASES = (  # name, width, tokens, length of the tokens, key bias and offset, outputs, float32
    ("1000 tokens", 48, 1000, 1.0, False, None, False),
    ("key bias, offset", 48, 1000, 1.0, True, None, False),
    ("few tokens", 48, 60, 0.5, False, None, False),
    ("short tokens", 48, 1000, 0.1, False, None, False),
    ("vector answers", 24, 500, 1.0, True, 4, False),
    ("float32 box", 48, 1000, 0.4, False, None, True),
    ("many tokens", 64, 20000, 0.7, False, None, False),
)


class Learner:
    def learn(self, oracle: Oracle, rng: np.random.Generator) -> Hypothesis:
        return learn_from_vocabulary(oracle, rng)

    def expected_queries(self, spec: Spec) -> int | None:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one box per case")
    seeds = 1 if parser.parse_args().quick else 10
    print(
        f"{'case':18} {'d':>3} {'m':>6} {'median err':>11} {'worst':>9} {'asked/floor':>11} "
        f"{'worst':>6} {'2 s.e.':>7} recovered"
    )
    for name, width, count, size, bias, outputs, single in CASES:
        errors, ratios, inside, good = [], [], [], 0
        for seed in range(seeds):
            rng = np.random.default_rng([seed, width])
            secret = attention(rng, width, bias=bias, outputs=outputs)
            words = size * rng.standard_normal((count, width))
            low = secret.astype(np.float32)
            function = (lambda x, m=low: m(x.astype(np.float32))) if single else secret
            box = keyhole.open_oracle(function, width=width, vocabulary=words)
            found = keyhole.recover(box, Learner(), seed=seed, throw=False)
            good += found.outcome is keyhole.Outcome.RECOVERED
            asked = found.ledger.paid - found.ledger.by_purpose.get("verification", 0)
            ratios.append(asked / found.ledger.floor)
            errors.append(keyhole.distance(found.model, secret))
            gap = np.abs(found.model.heads[0].score - secret.heads[0].score)
            inside.append(np.mean(gap < 2 * found.errors.heads[0].score))
        print(
            f"{name:18} {width:3} {count:6} {np.median(errors):11.1e} {max(errors):9.1e} "
            f"{np.median(ratios):11.4f} {max(ratios):6.3f} {np.mean(inside):7.1%} {good}/{seeds}",
            flush=True,
        )


if __name__ == "__main__":
    main()
