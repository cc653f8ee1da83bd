"""How many heads, and which: descents from random starts, number of heads by number of heads.

The work is done in chains (restarts): the first solved one in their order wins, so the
result does not depend on how many processes there are (unless time runs out).

Sweep: M = 1, 2, ... until a fit is exact or generalised cross-validation got worse twice. Turns:
more chains, most of the work at the M that cross-validates best, the rest shared among the others,
little where examples are scarce for so many heads; until a fit is exact; or the labels are noisy
and the minimum that explains most for its size was reached from two independent starts; or the
budget is spent. An exact fit with more heads than needed is pruned; one that may be chance, or is
one of many, waits for what fewer heads can do.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.fitting.attention_rows import Rows
from keyhole.fitting.closed_form import one_head
from keyhole.fitting.fisher import information
from keyhole.fitting.levenberg_marquardt import DENSE_PRECISE, Limits, descend, label_power
from keyhole.fitting.variable_projection import project
from keyhole.learners.examples.restarts import Chain, Chains, Effort

HOPS = 4  # swaps of a head without gain after which a chain ends (one head: fresh starts)
HASTE = Limits(stall_window=10, stall_share=0.1, conjugate_steps=60)  # where most starts are vain
GOOD = 1e-3  # relative squared residual of a fit whose heads are kept when one more is tried
SAME = 1e-6  # relative difference of two costs that are the same minimum
NOISE_CEILING = 0.09  # squared residual share beyond which a minimum is not taken for noise
WIDE = 4096  # score entries per head from which the sweep doubles the number of heads
PRUNE_ITERATIONS = 40
REDUNDANT = 1e-4  # relative squared residual without a head beyond which that head is needed
FAVOUR = 3.0  # work given to the most promising number of heads, in units of the others'
EASY, FAINT = 2.0, 0.1  # examples over the floor where most descents succeed; least hope, near one
TELLING = 1.2  # examples over the floor from which on an exact fit is taken at once
CERTAIN, KNOWN = 3, 0.1  # a minimum reached so often is the best there is: little work goes there
TURNS_PER_CHAIN = 4  # turns after which a turn is made of one more chain: work for more processes
FULL = 1 - 1e-6  # share of unknowns at which a criterion is as bad as it gets, and still finite
PENALTY = 4.0  # per unknown; a head chosen to fit noise was seen to explain 2.4 numbers per unknown
SETTLED = 2  # independent starts that must reach the same minimum


@dataclass
class Tally:
    """Everything found with one number of heads."""

    heads: int
    theta: Array | None = None
    relative: float = np.inf
    chains: list[float] = field(default_factory=list)
    work: float = 0.0

    def add(self, chain: Chain) -> None:
        self.chains.append(chain.relative)
        self.work += chain.work
        if chain.relative < self.relative:
            self.theta, self.relative = chain.theta, chain.relative

    @property
    def hits(self) -> int:
        """Independent chains that reached the best minimum."""
        return sum(c <= self.relative * (1 + SAME) for c in self.chains)


@dataclass(frozen=True)
class Progress:
    """What a progress callback is told after every chain."""

    heads: int  # being tried
    restarts: int  # chains so far
    residual: float  # best relative root-mean-square residual so far
    seconds: float


@dataclass(frozen=True, eq=False)
class Found:
    """The end of a search. `ending`: "exact", "noise", "spent" or "interrupted"."""

    theta: Float[Array, "p m d"]
    relative: float
    ending: str
    restarts: int
    seconds: float
    hits: int
    residuals: dict[int, float]  # best relative squared residual by number of heads


@dataclass(frozen=True)
class Plan:
    """The search's configuration."""

    heads: int | None
    most_heads: int
    restarts: int
    seconds: float
    workers: int
    solved: float
    noise: float = NOISE_CEILING  # squared residual share up to which a minimum may be noise
    progress: Callable[[Progress], None] | None = None


def search(rows: Rows, plan: Plan, rng: np.random.Generator) -> Found:
    """The best fit that the budget allows."""
    return _Search(rows, plan, rng).run()


class _Search:
    def __init__(self, rows: Rows, plan: Plan, rng: np.random.Generator) -> None:
        self.rows, self.plan, self.rng = rows, plan, rng
        self.begin = time.monotonic()
        self.deadline = self.begin + plan.seconds
        self.tallies: dict[int, Tally] = {}
        self.restarts = 0
        self.numbers = rows.counted * rows.outputs
        self.first, self.last = (1, plan.most_heads) if plan.heads is None else (plan.heads,) * 2

    def run(self) -> Found:
        try:
            with Chains(self.rows, self.plan.workers) as pool:
                self.pool = pool
                solved = self._sweep() or self._turns()
                if solved is not None:
                    return self._found(solved, "exact")
        except KeyboardInterrupt:
            if all(tally.theta is None for tally in self.tallies.values()):
                raise
            return self._found(self._best(), "interrupted")
        best = self._best()
        ending = "noise" if self._settled(best) else "spent"
        return self._found(best, ending)

    def _sweep(self) -> Tally | None:
        """Each number of heads once, until one is exact or cross-validation got worse twice."""
        hasty = replace(HASTE, deadline=self.deadline)
        for heads in self._ladder():
            tally = self._try(heads, 1, 0, hasty)
            if self._exact(tally):
                return self._accepted(tally)
            leader = min(self.tallies.values(), key=self._cross_validation)
            best = self._best()
            noisy = self._may_be_noise(best) and best.heads < heads
            if noisy or self._over() or leader.heads < heads - 1:
                break
        return None

    def _ladder(self) -> Iterator[int]:
        heads = self.first
        wide = self.rows.anchors.shape[2] * self.rows.width >= WIDE
        while heads < self.last:
            yield heads
            heads = 2 * heads if wide else heads + 1
        yield self.last

    def _turns(self) -> Tally | None:
        """More and more chains, where they promise most."""
        turn, limits = 0, Limits(deadline=self.deadline)
        hasty = replace(HASTE, deadline=self.deadline)
        while not self._over() and not self._settled(self._best()):
            undecided = self._undecided()
            if undecided is None:
                tally = self._try(self._next(), 1 + turn // TURNS_PER_CHAIN, HOPS, limits)
            else:
                tally = self._try(undecided, 1, 0, hasty)
            if self._exact(tally) and (accepted := self._accepted(tally)):
                return accepted
            turn += 1
        exact = [tally for tally in self.tallies.values() if self._exact(tally)]
        return self._pruned(min(exact, key=attrgetter("heads"))) if exact else None

    def _exact(self, tally: Tally) -> bool:
        return tally.relative <= self.plan.solved

    def _accepted(self, tally: Tally) -> Tally | None:
        """An exact fit without the heads it does not need. None where it may be chance, with
        nearly as many unknowns as numbers, or is one of many: then fewer heads come first."""
        fewer = self._pruned(tally)
        assert fewer.theta is not None
        if fewer.heads == self.first or fewer.theta.size > DENSE_PRECISE:
            return fewer
        spread = information(self.rows, project(self.rows, fewer.theta), self.rng)
        chance = self.rows.ratio(fewer.heads) < TELLING
        return None if chance or spread.deficient else fewer

    def _undecided(self) -> int | None:
        """Where the rest may be noise: a number of heads that needs another start to tell."""
        best = self._best()
        if self._may_be_noise(best):
            for heads in (best.heads, min(best.heads + 1, self.last)):
                if heads not in self.tallies or len(self.tallies[heads].chains) < SETTLED:
                    return heads
        return None

    def _next(self) -> int:
        """The number of heads whose share of the work is most overdue."""
        unsolved = [tally for tally in self.tallies.values() if not self._exact(tally)]
        leader = min(unsolved, key=self._cross_validation).heads
        due = {}
        for heads in range(self.first, min(leader + 1, self.last) + 1):
            tally = self.tallies.get(heads, Tally(heads))
            if self._exact(tally):
                continue
            share = KNOWN if tally.hits >= CERTAIN else FAVOUR if heads == leader else 1.0
            due[heads] = tally.work / (share * self._hope(heads))
        return min(due, key=lambda heads: due[heads])

    def _hope(self, heads: int) -> float:
        """How likely a descent ends at the bottom, by the examples there are for so many heads."""
        return float(np.clip((self.rows.ratio(heads) - 1) / (EASY - 1), FAINT, 1.0)) ** 2

    def _over(self) -> bool:
        return time.monotonic() > self.deadline or self.restarts >= self.plan.restarts

    def _settled(self, best: Tally) -> bool:
        """Whether the rest is noise: one minimum from two starts, and more heads are no help."""
        if not self._may_be_noise(best) or best.hits < SETTLED:
            return False
        above = self.tallies.get(best.heads + 1)
        return best.heads >= self.last or (above is not None and len(above.chains) >= SETTLED)

    def _share(self, tally: Tally) -> float:
        """Unknowns over numbers."""
        return float(min(self.rows.unknowns(tally.heads) / self.numbers, FULL))

    def _may_be_noise(self, tally: Tally) -> bool:
        """Whether what is left is no more than noise is allowed to be, unknowns taken off."""
        noise = self.plan.noise * (1 - self._share(tally))
        return not self._exact(tally) and tally.relative <= noise

    def _criterion(self, tally: Tally) -> float:
        """Fit against size: a head must explain more than one that is fitted to noise does."""
        share = self._share(tally)
        penalty = PENALTY + 2 * PENALTY / np.sqrt(self.rows.unknowns(1))
        return float(np.log(max(tally.relative, TINY)) - penalty * np.log(1 - share))

    def _cross_validation(self, tally: Tally) -> float:
        """Generalised cross-validation: what the fit would leave of labels it has not seen."""
        return tally.relative / (1 - self._share(tally)) ** 2

    def _best(self) -> Tally:
        return min(self.tallies.values(), key=self._criterion)

    def _try(self, heads: int, chains: int, hops: int, limits: Limits) -> Tally:
        tally = self.tallies.setdefault(heads, Tally(heads))
        known = None if hops else self._foundation(heads)
        effort = Effort(hops, self.plan.solved, limits, known)
        if heads == 1 and not tally.chains:
            start = one_head(self.rows)
            if start is not None:
                end = descend(self.rows, start, limits)
                tally.add(Chain(end.at.theta, end.relative, float(end.iterations)))
                self._tell(heads)
                if self._exact(tally):
                    return tally
        chains = min(chains, max(self.plan.restarts - self.restarts, 1))
        seeds = [int(s) for s in self.rng.integers(0, 2**63, chains)]
        for chain in self.pool.map(heads, seeds, effort):
            tally.add(chain)
            self._tell(heads)
            if self._exact(tally):
                break
        return self._slimmed(tally)

    def _slimmed(self, tally: Tally) -> Tally:
        """What is left of a fit that does as well without some heads: with them, the descent's last
        part is long and flat."""
        fewer = tally if self._exact(tally) else self._pruned(tally)
        if fewer.heads == tally.heads:
            return tally
        assert fewer.theta is not None
        other = self.tallies.setdefault(fewer.heads, Tally(fewer.heads))
        other.add(Chain(fewer.theta, fewer.relative, 0.0))
        return other

    def _foundation(self, heads: int) -> Array | None:
        """A fit with one head less that is so good that a head is only added to it: from a fresh
        start, the way down to a noise that small is long and flat."""
        below = self.tallies.get(heads - 1)
        return below.theta if below is not None and below.relative <= GOOD else None

    def _tell(self, heads: int) -> None:
        self.restarts += 1
        if self.plan.progress is not None:
            residual = float(np.sqrt(min(t.relative for t in self.tallies.values())))
            seconds = time.monotonic() - self.begin
            self.plan.progress(Progress(heads, self.restarts, residual, seconds))

    def _pruned(self, tally: Tally) -> Tally:
        """A fit without the heads it does not need (only if their number was not given)."""
        limits = Limits(iterations=PRUNE_ITERATIONS)
        theta = tally.theta
        assert theta is not None
        smaller = True
        while smaller and theta.shape[1] > self.first:
            smaller = False
            for i in range(theta.shape[1]):
                fewer = np.delete(theta, i, axis=1)
                if project(self.rows, fewer).cost > REDUNDANT * label_power(self.rows):
                    continue
                trial = descend(self.rows, fewer, limits)
                if trial.relative <= max(self.plan.solved, tally.relative):
                    theta, smaller = trial.at.theta, True
                    tally = replace(tally, heads=theta.shape[1], theta=theta)
                    tally.relative = trial.relative
                    break
        return tally

    def _found(self, best: Tally, ending: str) -> Found:
        assert best.theta is not None
        residuals = {heads: tally.relative for heads, tally in sorted(self.tallies.items())}
        seconds = time.monotonic() - self.begin
        return Found(
            best.theta, best.relative, ending, self.restarts, seconds, best.hits, residuals
        )
