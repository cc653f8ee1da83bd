"""How many heads, and which: descents from random starts, number of heads by number of heads.

The work is done in chains (restarts): the first solved one in their order wins, so the result does
not depend on how many processes there are (unless time runs out).

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
from typing import Literal

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.fitting.attention_rows import Rows
from keyhole.fitting.fisher import estimate_information
from keyhole.fitting.initial_guess import solve_one_head
from keyhole.fitting.levenberg_marquardt import DescentOptions, descend, measure_label_power
from keyhole.fitting.variable_projection import DENSE_LIMIT, project
from keyhole.learners.examples.restarts import Chain, ChainRunner, RestartEffort

SETTLING_STARTS = 2  # independent starts that must reach the same minimum before it counts
HASTY = DescentOptions(stall_window=10, stall_share=0.1, conjugate_steps=60)  # most starts are vain

Ending = Literal["exact", "noise", "spent", "interrupted"]


@dataclass(frozen=True)
class SearchOptions:
    """The search's configuration.

    heads: their number, None to find it. most_heads: the largest number tried. restarts, seconds:
    the budget. workers: processes that share the restarts. solved: squared residual, relative to
    the labels, of an exact fit. noise: squared residual up to which a minimum may be noise.
    """

    heads: int | None
    most_heads: int
    restarts: int = 100_000
    seconds: float = 60.0
    workers: int = 1
    solved: float = 1e-18
    noise: float = 0.09


@dataclass(frozen=True)
class Progress:
    """What a progress callback is told after every chain."""

    heads: int  # being tried
    restarts: int  # chains so far
    residual: float  # best relative root-mean-square residual so far
    seconds: float


@dataclass(frozen=True, eq=False)
class Found:
    """The end of a search."""

    theta: Float[Array, "p m d"]
    relative: float  # squared residual relative to the labels
    ending: Ending
    restarts: int
    seconds: float
    hits: int  # independent chains that reached the best minimum
    residuals: dict[int, float]  # best relative squared residual by number of heads


def search_heads(
    rows: Rows,
    options: SearchOptions,
    rng: np.random.Generator,
    progress: Callable[[Progress], None] | None = None,
) -> Found:
    """The best fit that the budget allows."""
    with ChainRunner(rows, options.workers) as runner:
        return HeadSearch(rows, options, rng, runner, progress).run()


@dataclass
class HeadTally:
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
        """Independent chains that reached the best minimum, the same to six digits."""
        return sum(c <= self.relative * (1 + 1e-6) for c in self.chains)


class HeadSearch:
    """The tallies by number of heads, and what is tried next."""

    def __init__(
        self,
        rows: Rows,
        options: SearchOptions,
        rng: np.random.Generator,
        runner: ChainRunner,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.rows, self.options, self.rng = rows, options, rng
        self.runner, self.progress = runner, progress
        self.begin = time.monotonic()
        self.deadline = self.begin + options.seconds
        self.tallies: dict[int, HeadTally] = {}
        self.restarts = 0
        self.numbers = rows.counted * rows.outputs
        known = options.heads
        self.first, self.last = (1, options.most_heads) if known is None else (known, known)

    def run(self) -> Found:
        try:
            solved = self.sweep() or self.take_turns()
        except KeyboardInterrupt:
            if all(tally.theta is None for tally in self.tallies.values()):
                raise
            return self.conclude(self.best(), "interrupted")
        if solved is not None:
            return self.conclude(solved, "exact")
        best = self.best()
        return self.conclude(best, "noise" if self.is_settled(best) else "spent")

    def sweep(self) -> HeadTally | None:
        """Each number of heads once, until one is exact or cross-validation got worse twice."""
        hasty = replace(HASTY, deadline=self.deadline)
        for heads in self.ladder():
            tally = self.run_chains(heads, 1, 0, hasty)
            if self.is_exact(tally):
                return self.accept(tally)
            leader = min(self.tallies.values(), key=self.cross_validate)
            best = self.best()
            noisy = self.may_be_noise(best) and best.heads < heads
            if noisy or self.is_over() or leader.heads < heads - 1:
                break
        return None

    def ladder(self) -> Iterator[int]:
        """Numbers of heads in turn; with wide tokens, where a descent is dear, doubling."""
        heads = self.first
        wide = self.rows.anchors.shape[2] * self.rows.width >= 4096
        while heads < self.last:
            yield heads
            heads = 2 * heads if wide else heads + 1
        yield self.last

    def take_turns(self) -> HeadTally | None:
        """More and more chains, where they promise most."""
        turn, patient = 0, DescentOptions(deadline=self.deadline)
        hasty = replace(HASTY, deadline=self.deadline)
        while not self.is_over() and not self.is_settled(self.best()):
            undecided = self.find_undecided()
            if undecided is None:
                # every fourth turn is made of one more chain: work for more processes
                tally = self.run_chains(self.choose_heads(), 1 + turn // 4, 4, patient)
            else:
                tally = self.run_chains(undecided, 1, 0, hasty)
            if self.is_exact(tally) and (accepted := self.accept(tally)):
                return accepted
            turn += 1
        exact = [tally for tally in self.tallies.values() if self.is_exact(tally)]
        return self.prune(min(exact, key=attrgetter("heads"))) if exact else None

    def is_exact(self, tally: HeadTally) -> bool:
        return tally.relative <= self.options.solved

    def accept(self, tally: HeadTally) -> HeadTally | None:
        """An exact fit without the heads it does not need. None where it may be chance, with
        nearly as many unknowns as numbers, or is one of many: then fewer heads come first."""
        fewer = self.prune(tally)
        assert fewer.theta is not None
        if fewer.heads == self.first or fewer.theta.size > DENSE_LIMIT:
            return fewer
        spread = estimate_information(self.rows, project(self.rows, fewer.theta), self.rng)
        chance = self.rows.ratio(fewer.heads) < 1.2  # examples over the floor
        return None if chance or spread.deficient else fewer

    def find_undecided(self) -> int | None:
        """Where the rest may be noise: a number of heads that needs another start to tell."""
        best = self.best()
        if self.may_be_noise(best):
            for heads in (best.heads, min(best.heads + 1, self.last)):
                if heads not in self.tallies or len(self.tallies[heads].chains) < SETTLING_STARTS:
                    return heads
        return None

    def choose_heads(self) -> int:
        """The number of heads whose share of the work is most overdue."""
        unsolved = [tally for tally in self.tallies.values() if not self.is_exact(tally)]
        leader = min(unsolved, key=self.cross_validate).heads
        due = {}
        for heads in range(self.first, min(leader + 1, self.last) + 1):
            tally = self.tallies.get(heads, HeadTally(heads))
            if self.is_exact(tally):
                continue
            # the most promising gets three times the work of others; little is left to do where
            # three chains have reached the same minimum
            share = 0.1 if tally.hits >= 3 else 3.0 if heads == leader else 1.0
            due[heads] = tally.work / (share * self.estimate_hope(heads))
        return min(due, key=lambda heads: due[heads])

    def estimate_hope(self, heads: int) -> float:
        """How likely a descent ends at the bottom: most do at twice the floor, few near it."""
        return float(np.clip(self.rows.ratio(heads) - 1.0, 0.1, 1.0)) ** 2

    def is_over(self) -> bool:
        return time.monotonic() > self.deadline or self.restarts >= self.options.restarts

    def is_settled(self, best: HeadTally) -> bool:
        """Whether the rest is noise: one minimum from two starts, and more heads are no help."""
        if not self.may_be_noise(best) or best.hits < SETTLING_STARTS:
            return False
        above = self.tallies.get(best.heads + 1)
        tried = above is not None and len(above.chains) >= SETTLING_STARTS
        return best.heads >= self.last or tried

    def share_of_unknowns(self, tally: HeadTally) -> float:
        """Unknowns over numbers; below one, so that criteria stay finite."""
        return float(min(self.rows.unknowns(tally.heads) / self.numbers, 1 - 1e-6))

    def may_be_noise(self, tally: HeadTally) -> bool:
        """Whether what is left is no more than noise is allowed to be, unknowns taken off."""
        noise = self.options.noise * (1 - self.share_of_unknowns(tally))
        return not self.is_exact(tally) and tally.relative <= noise

    def weigh(self, tally: HeadTally) -> float:
        """Fit against size: a head must explain more than one that is fitted to noise does."""
        # per unknown; a head chosen to fit noise was seen to explain 2.4 numbers per unknown
        per_unknown = 4.0
        penalty = per_unknown + 2 * per_unknown / np.sqrt(self.rows.unknowns(1))
        fit = np.log(max(tally.relative, TINY))
        return float(fit - penalty * np.log(1 - self.share_of_unknowns(tally)))

    def cross_validate(self, tally: HeadTally) -> float:
        """Generalised cross-validation: what the fit would leave of labels it has not seen."""
        return tally.relative / (1 - self.share_of_unknowns(tally)) ** 2

    def best(self) -> HeadTally:
        return min(self.tallies.values(), key=self.weigh)

    def run_chains(self, heads: int, chains: int, hops: int, descent: DescentOptions) -> HeadTally:
        """Some chains with so many heads, until one is exact; the tally that is left of them."""
        tally = self.tallies.setdefault(heads, HeadTally(heads))
        known = None if hops else self.find_foundation(heads)
        effort = RestartEffort(hops, self.options.solved, descent, known)
        if heads == 1 and not tally.chains:
            start = solve_one_head(self.rows)
            if start is not None:
                end = descend(self.rows, start, descent)
                self.count(tally, Chain(end.at.theta, end.relative, float(end.iterations)))
                if self.is_exact(tally):
                    return tally
        chains = min(chains, max(self.options.restarts - self.restarts, 1))
        seeds = [int(s) for s in self.rng.integers(0, 2**63, chains)]
        for chain in self.runner.map(heads, seeds, effort):
            self.count(tally, chain)
            if self.is_exact(tally):
                break
        return self.slim(tally)

    def count(self, tally: HeadTally, chain: Chain) -> None:
        tally.add(chain)
        self.restarts += 1
        if self.progress is not None:
            residual = float(np.sqrt(min(t.relative for t in self.tallies.values())))
            seconds = time.monotonic() - self.begin
            self.progress(Progress(tally.heads, self.restarts, residual, seconds))

    def slim(self, tally: HeadTally) -> HeadTally:
        """What is left of a fit that does as well without some heads: with them, the descent's last
        part is long and flat."""
        fewer = tally if self.is_exact(tally) else self.prune(tally)
        if fewer.heads == tally.heads:
            return tally
        assert fewer.theta is not None
        other = self.tallies.setdefault(fewer.heads, HeadTally(fewer.heads))
        other.add(Chain(fewer.theta, fewer.relative, 0.0))
        return other

    def find_foundation(self, heads: int) -> Array | None:
        """A fit with one head less that is so good (three per cent of the labels are left) that a
        head is only added to it: from a fresh start, the way down to a noise that small is long
        and flat."""
        below = self.tallies.get(heads - 1)
        return below.theta if below is not None and below.relative <= 1e-3 else None

    def prune(self, tally: HeadTally) -> HeadTally:
        """A fit without the heads it does not need (only if their number was not given)."""
        smaller = True
        while smaller and tally.heads > self.first:
            smaller = False
            assert tally.theta is not None
            for i in range(tally.heads):
                fewer = np.delete(tally.theta, i, axis=1)
                # a head without which a hundredth of the labels is left is needed
                if project(self.rows, fewer).cost > 1e-4 * measure_label_power(self.rows):
                    continue
                trial = descend(self.rows, fewer, DescentOptions(iterations=40))
                if trial.relative <= max(self.options.solved, tally.relative):
                    theta, smaller = trial.at.theta, True
                    tally = replace(
                        tally, heads=theta.shape[1], theta=theta, relative=trial.relative
                    )
                    break
        return tally

    def conclude(self, best: HeadTally, ending: Ending) -> Found:
        assert best.theta is not None
        residuals = {heads: tally.relative for heads, tally in sorted(self.tallies.items())}
        seconds = time.monotonic() - self.begin
        return Found(
            best.theta, best.relative, ending, self.restarts, seconds, best.hits, residuals
        )
