"""Has it changed? A test that may be looked at every night, for as many nights as one likes.

Statement.  On night n, k of m fresh answers lie beyond their tolerance. Benign: whatever happened
            before, k is at most m p0 in the mean (p0: the benign rate). Nothing is assumed about
            how failures share a night: they may all come in a few bad nights. The probability that
            E ever reaches 1 / alpha is then at most alpha, whatever the number of nights.
Algebra.    e_j(k) = 1 - c_j + c_j k / (m p0) has a benign mean of at most 1 for 0 <= c_j <= 1 (a
            bet on k with the share c_j of the wealth). The change may have come on any night and
            have any size: M_j <- e_j(k) (M_j + w_j pi_n), E = sum_j M_j + 1 - sum_{i<=n} pi_i is a
            supermartingale, and Ville's inequality is the statement. c_j is the share that grows
            fastest where a fraction p_j of answers has changed.
            Where failures are known to be independent of each other, the likelihood ratio
            e_j(k) = (p_j / p0)^k ((1 - p_j) / (1 - p0))^(m - k) grows faster; failures that come
            in bad nights break it (a false alarm in most benign years).
Proof.      Let F_n be what is known after night n, and E_n = sum_j M_j,n + 1 - sum_{i<=n} pi_i.
            Benign, E[e_j(k_n) | F_{n-1}] = 1 - c_j + c_j E[k_n | F_{n-1}] / (m p0) <= 1. Hence
            E[sum_j M_j,n | F_{n-1}] <= sum_j (M_j,n-1 + w_j pi_n) = sum_j M_j,n-1 + pi_n, since the
            w_j sum to 1: E[E_n | F_{n-1}] <= E_{n-1}. E_0 = 1 and E_n >= 0 (the pi sum to at most
            1), and for such a process P(sup_n E_n >= 1 / alpha) <= alpha. Capping M_j only lowers
            it. Night lengths m may change, if they do not look at the answers to come.
Since when. The night n0 with the largest pi_n0 sum_j w_j prod_{n >= n0} e_j(k_n).
What is possible. 5% of changed answers leave a night of 30 queries clean with probability 0.95^30 =
            21%, so that three nights without a clean one have 48%. No test that keeps alpha for all
            benign years may alarm on three nights with a clean one, a and b failures in the others:
            where nights have a (or b) failures with probability m p0 / a each, such a pair comes in
            a year with probability 365 (m p0)^2 / (a b) = 33% / (a b) at p0 = 1e-3, and a b >= 33
            has a probability of 0.2%. Late in a year the median is therefore the fourth night, for
            every test; it is the third for failures that are known to be independent.
When it fails. A benign rate above p0 raises an alarm sooner or later, and rightly: tolerance or p0
            were too small.
Source.     Ville (1939); Shafer (2021), testing by betting; Waudby-Smith and Ramdas (2024), bets on
            means; Shin, Ramdas and Rinaldo (2024), e-detectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.stats import binom

from keyhole.arrays import Array, Float, real_number, whole_number
from keyhole.errors import InvalidArgument

ENOUGH = 1e150  # an E beyond which nobody counts: years after an alarm do not overflow


@dataclass(frozen=True)
class Alternatives:
    """What a change might be: shares of answers that it changes, with their weights, and when it
    might come: on the first night, in the first fortnight, in the first year, later."""

    shares: tuple[float, ...] = (0.005, 0.01, 0.02, 0.05, 0.2, 0.8)
    weights: tuple[float, ...] = (0.05, 0.1, 0.15, 0.5, 0.1, 0.1)
    first: float = 0.15  # so that a box which is another one on the first night is told at once
    fortnight: float = 0.2
    year: float = 0.6

    def __post_init__(self) -> None:
        if len(self.shares) != len(self.weights) or not np.isclose(sum(self.weights), 1.0):
            raise InvalidArgument("every share of changed answers has a weight, and they sum to 1")
        if min(*self.weights, self.first, self.fortnight, self.year) < 0.0:
            raise InvalidArgument("weights are not negative")
        if self.first + self.fortnight + self.year > 1.0 + 1e-12:
            raise InvalidArgument("the weights of the nights of change sum to more than 1")

    def weight_of_night(self, night: int) -> float:
        """pi_n: the weight of a change on this night, counted from 1. They sum to at most 1."""
        later = max(0.0, 1.0 - self.first - self.fortnight - self.year)
        if night > 365:  # sums to `later` over all nights to come
            return later * 366.0 / (night * (night + 1.0))
        early = self.first * (night == 1) + self.fortnight / 14.0 * (night <= 14)
        return float(early + self.year / 365.0)


ALWAYS = Alternatives(first=1.0, fortnight=0.0, year=0.0)  # there from the first night, or never


@dataclass(frozen=True)
class Night:
    """What one night showed."""

    asked: int
    bad: int  # answers beyond their tolerance

    def __post_init__(self) -> None:
        whole_number("asked", self.asked, 1)
        if whole_number("bad", self.bad, 0) > self.asked:
            raise InvalidArgument(f"{self.bad} bad answers of {self.asked}")


@dataclass(frozen=True)
class Monitor:
    """The test: its benign rate, and what it looks for."""

    benign: float = 1e-3  # p0: share of answers that may be beyond tolerance though nothing changed
    alpha: float = 0.01  # probability that an alarm is ever raised though nothing changed
    independent: bool = False  # whether benign failures are known not to come in bad nights
    alternatives: Alternatives = field(default_factory=Alternatives)

    def __post_init__(self) -> None:
        real_number("benign", self.benign, 0.0, 0.5)
        real_number("alpha", self.alpha, 0.0, 1.0)

    def follow(self, nights: Sequence[Night]) -> Float[Array, " nights"]:
        """E after each night."""
        wealth, unspent, curve = np.zeros(len(self.alternatives.shares)), 1.0, []
        weights = np.array(self.alternatives.weights)
        for number, night in enumerate(nights, start=1):
            share = self.alternatives.weight_of_night(number)
            unspent -= share
            wealth = np.minimum(self.factors(night) * (wealth + weights * share), ENOUGH)
            curve.append(float(wealth.sum()) + max(unspent, 0.0))
        return np.array(curve)

    def factors(self, night: Night) -> Float[Array, " j"]:
        """e_j of one night, for every alternative."""
        shares = np.array(self.alternatives.shares)
        if self.independent:
            good = night.asked - night.bad
            ratios = (shares / self.benign) ** night.bad
            return np.asarray(ratios * ((1.0 - shares) / (1.0 - self.benign)) ** good)
        expected = night.asked * self.benign
        bets = np.array([best_bet(share, night.asked, self.benign) for share in shares])
        return np.asarray(1.0 - bets + bets * night.bad / expected)

    def find_start(self, nights: Sequence[Night]) -> int:
        """The night (from 1) on which the change most likely came."""
        weights = np.array(self.alternatives.weights)
        tail, best, chosen = np.ones(len(weights)), -1.0, 1
        for number in range(len(nights), 0, -1):
            tail = np.minimum(tail * self.factors(nights[number - 1]), ENOUGH)
            likely = self.alternatives.weight_of_night(number) * float(weights @ tail)
            if likely > best:
                best, chosen = likely, number
        return chosen


_BETS: dict[tuple[float, int, float], float] = {}


def best_bet(share: float, asked: int, benign: float) -> float:
    """c: the share of the wealth to bet on many failures that grows fastest where this share of
    answers has changed.

    >>> round(best_bet(0.05, 30, 1e-3), 2)
    0.78
    """
    key = (share, asked, benign)
    if key not in _BETS:
        counts = np.arange(asked + 1)
        chances, odds = binom.pmf(counts, asked, share), counts / (asked * benign)

        def loss(bet: float) -> float:
            return -float(chances @ np.log(1.0 - bet + bet * odds))

        # all of the wealth is never bet: one night without a failure would end the game
        most = 1.0 - 1e-3
        _BETS[key] = float(minimize_scalar(loss, bounds=(0.0, most), method="bounded").x)
    return _BETS[key]
