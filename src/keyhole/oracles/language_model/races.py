"""Logits from labels: tokens race against each other, with handicaps that are biases.

Statement.  An interface samples the token with the largest logit plus bias, and tells no more. Find
            the logits of tokens relative to the likeliest one, to within epsilon.
Questions.  One without bias names the likeliest token, the reference. Then up to n tokens race
            against it: a token whose logit lies lo ... hi below gets the bias -(lo + q (hi - lo)),
            with q chosen so that the reference wins against all m tokens once in m + 1 times.
Algebra.    The winner w tells z_t - z_w <= bias_w - bias_t for every token t. Such bounds are kept
            closed under shortest paths, so that one answer sharpens many.
When it fails. Bounds that contradict each other: the interface samples at random, or changed.
Source.     Own; compare the simultaneous search and one-of-n of Carlini et al. (2024).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import Array, Float, Int
from keyhole.errors import Inconsistent, OracleError

# (which prompts, tokens, biases) -> the tokens that were sampled
Ask = Callable[[Int[Array, " n"], Int[Array, "n k"], Float[Array, "n k"]], Int[Array, " n"]]


@dataclass
class Race:
    """The tokens of one prompt that race together: the explicit accumulator of this algorithm.
    bounds[a, b] >= z_a - z_b; the reference is the first."""

    prompt: int
    tokens: Int[Array, " n"]  # the reference first
    epsilon: float
    limit: float  # of a bias
    # logits below the likeliest that a token has at first; doubled where that is too few
    reach: float = 20.0
    bounds: Float[Array, "n n"] = field(init=False)
    floor: Float[Array, " n"] = field(init=False)  # below which tokens were not looked for yet

    def __post_init__(self) -> None:
        count = len(self.tokens)
        self.reach = min(self.reach, self.limit)
        self.bounds = np.full((count, count), self.reach)
        self.bounds[:, 0] = 0.0  # the reference is the likeliest
        np.fill_diagonal(self.bounds, 0.0)
        self.floor = np.full(count, -self.reach)

    @property
    def low(self) -> Float[Array, " n"]:
        return np.asarray(-self.bounds[0])

    @property
    def high(self) -> Float[Array, " n"]:
        return np.asarray(self.bounds[:, 0])

    def unresolved(self) -> Int[Array, " m"]:
        """Tokens that are not known to epsilon yet. Those that lie at the lower end of what was
        looked at may lie below: the range is doubled."""
        open_ends = np.flatnonzero(self.high - self.low > 2.0 * self.epsilon)
        if len(open_ends) or self.reach >= self.limit:
            return open_ends
        below = (self.low <= self.floor + 1e-12) & (np.arange(len(self.tokens)) > 0)
        if not below.any():
            return open_ends
        self.reach = min(2.0 * self.reach, self.limit)
        self.floor[below] = -self.reach
        self.bounds[:, below] += self.reach  # what was concluded from the lower end is void
        np.fill_diagonal(self.bounds, 0.0)
        self._close()
        return np.flatnonzero(self.high - self.low > 2.0 * self.epsilon)

    def handicaps(self, racing: Int[Array, " m"]) -> Float[Array, " m"]:
        """Biases with which the reference wins once in m + 1 times."""
        count = len(racing)
        share = (1.0 / (count + 1.0)) ** (1.0 / count)
        low, high = self.low[racing], self.high[racing]
        return np.asarray(-(low + share * (high - low)))

    def learn(self, racing: Int[Array, " m"], bias: Float[Array, " m"], winner: int) -> None:
        """The bounds after a race that this token won."""
        given = np.full(len(self.tokens), np.nan)
        given[0], given[racing] = 0.0, bias
        (place,) = np.nonzero(self.tokens == winner)
        if not len(place) or np.isnan(given[place[0]]):
            raise OracleError(
                f"the interface sampled token {winner}, which neither was biased nor is the "
                "likeliest: it does not sample the likeliest token, or its bias has a limit"
            )
        w = int(place[0])
        ran = np.flatnonzero(~np.isnan(given))
        told = given[w] - given[ran]  # z_t - z_w at most
        towards = np.minimum(self.bounds[:, w], (self.bounds[:, ran] + told).min(axis=1))
        if towards[w] < -self.epsilon:
            raise Inconsistent(
                "the interface contradicts itself: the token it samples does not follow from one "
                "set of logits. It samples at random (set its temperature to zero), or changed"
            )
        towards[w] = 0.0
        self.bounds = np.minimum(self.bounds, towards[:, None] + self.bounds[w])

    def _close(self) -> None:
        """Shortest paths through the reference again."""
        self.bounds = np.minimum(self.bounds, self.bounds[:, :1] + self.bounds[:1])


def run_races(
    ask: Ask,
    prompts: int,
    tokens: Int[Array, " k"],
    epsilon: float,
    entries: int,
    limit: float,
) -> Float[Array, "prompts k"]:
    """Logits of the tokens behind each prompt, relative to its likeliest token. Races of all
    prompts advance together, so that many questions go out at a time."""
    nobody = np.zeros((prompts, 0))
    likeliest = ask(np.arange(prompts), nobody.astype(np.int64), nobody)
    found = np.full((prompts, len(tokens)), np.nan)
    races = []
    for prompt in range(prompts):
        others = tokens[tokens != likeliest[prompt]]
        for start in range(0, len(others), entries):
            group = others[start : start + entries]
            races.append(
                Race(
                    prompt, np.concatenate([likeliest[prompt : prompt + 1], group]), epsilon, limit
                )
            )
        found[prompt, tokens == likeliest[prompt]] = 0.0
    running = races
    while running:
        racing = [race.unresolved() for race in running]
        running = [race for race, some in zip(running, racing, strict=True) if len(some)]
        racing = [some for some in racing if len(some)]
        if not running:
            break
        # questions of one batch have one length: shorter ones repeat an entry
        size = max(map(len, racing))
        numbers, bias = (
            np.zeros((len(running), size), dtype=np.int64),
            np.zeros((len(running), size)),
        )
        for k, (race, some) in enumerate(zip(running, racing, strict=True)):
            numbers[k, : len(some)] = race.tokens[some]
            bias[k, : len(some)] = race.handicaps(some)
        which = np.array([race.prompt for race in running])
        for k, winner in enumerate(ask(which, numbers, bias)):
            running[k].learn(racing[k], bias[k, : len(racing[k])], int(winner))
    for race in races:
        middle = 0.5 * (race.low + race.high)
        place = {int(token): float(value) for token, value in zip(race.tokens, middle, strict=True)}
        told = np.isin(tokens, race.tokens[1:])
        found[race.prompt, told] = [place[int(token)] for token in tokens[told]]
    return found
