"""How often the nightly test raises a false alarm in a year, and how soon it finds a change.

    python benchmarks/watch.py [--years 1000] [--seed 0]

Benign years of 365 nights, 30 queries a night, at a mean rate of 1e-3 answers beyond tolerance:
independent of each other, and in bad nights in which 5 … 80% of answers fail. Changes of 5, 2 and
1% of answers, on the first night and later (5e-4 benign failures before). The same for the form
that takes failures for independent, and the number of queries that it needs where the change is
there from the first night or never.
"""

import argparse

import numpy as np

from keyhole.verification.sequential import ALWAYS, ENOUGH, Monitor, Night

ASKED, RATE = 30, 1e-3


def follow_many(monitor, counts, asked=ASKED):
    """E after each night of many years at once: `Monitor.follow`, by table."""
    table = np.array([monitor.factors(Night(asked, k)) for k in range(asked + 1)])
    weights = np.array(monitor.alternatives.weights)
    wealth, unspent = np.zeros((len(counts), len(weights))), 1.0
    curve = np.zeros(counts.shape)
    for night in range(counts.shape[1]):
        share = monitor.alternatives.weight_of_night(night + 1)
        unspent -= share
        wealth = np.minimum(table[counts[:, night]] * (wealth + weights * share), ENOUGH)
        curve[:, night] = wealth.sum(axis=1) + max(unspent, 0.0)
    return curve


def alarms(monitor, counts):
    """The night of each alarm, from 1; a large number where there is none."""
    crossed = follow_many(monitor, counts) >= 1.0 / monitor.alpha
    return np.where(crossed.any(axis=1), crossed.argmax(axis=1) + 1, 10**9)


def benign(rng, years, share):
    """Failures of benign years; `share` of answers fails in a bad night (None: independent)."""
    if share is None:
        return rng.binomial(ASKED, RATE, (years, 365))
    bad = rng.random((years, 365)) < RATE / share
    return np.where(bad, rng.binomial(ASKED, share, (years, 365)), 0)


def delays(monitor, rng, years, start, share):
    """Nights until the alarm, of a change that comes after `start` healthy nights."""
    before = rng.binomial(ASKED, RATE / 2, (years, start))
    after = rng.binomial(ASKED, share, (years, 400))
    found = alarms(monitor, np.concatenate([before, after], axis=1))
    return found[found > start] - start


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--years", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = np.random.default_rng([given.seed, 31])
    for form in (Monitor(), Monitor(independent=True)):
        print(f"\n{'independent failures' if form.independent else 'failures of any kind'}")
        for share in (None, 0.05, 0.1, 0.2, 0.5, 0.8):
            found = alarms(form, benign(rng, given.years, share)) <= 365
            name = "independent" if share is None else f"bad nights of {share:.0%}"
            print(f"  benign years, {name:18s} false alarms {found.mean():.2%}")
        for share in (0.05, 0.02, 0.01):
            for start in (0, 7, 30, 180):
                waited = delays(form, rng, given.years, start, share)
                middle, late = np.quantile(waited, [0.5, 0.95])
                soon = np.mean(waited <= 3)
                print(
                    f"  {share:.0%} changed after {start:3d} nights: {middle:.0f} nights in the "
                    f"median, {late:.0f} in 95%; within three nights {soon:.0%}"
                )
    ceiling = (1.0 - 0.95**ASKED) ** 3
    print(
        f"\n5% changed leave none of three nights clean in {ceiling:.0%}: what a test that holds "
        "for failures of any kind can reach within three nights, late in a year"
    )
    single = Monitor(independent=True, alternatives=ALWAYS)
    failed = (rng.random((given.years, 400)) < 0.05).astype(np.int64)
    crossed = follow_many(single, failed, asked=1) >= 1.0 / single.alpha
    asked = crossed.argmax(axis=1) + 1
    print(
        f"\n5% changed from the first night, query by query: {np.median(asked):.0f} queries in the "
        f"median, {asked.mean():.0f} in the mean"
    )


if __name__ == "__main__":
    main()
