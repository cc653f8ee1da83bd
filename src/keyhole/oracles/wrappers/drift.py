"""Is it still the same box? A few old queries, asked again as the run goes on.

Sits above the counter: a query asked again is paid for and stands in the ledger as "recall".
When it looks depends on the number of queries alone, so a resumed run looks at the same places
and finds what it asked in its journal.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array
from keyhole.errors import Counterexample, Inconsistent, InvalidArgument
from keyhole.oracles.base import Oracle, Wrapper
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import VERIFICATION, QueryBatch

PURPOSE = "recall"
RECALLED = 3  # old queries asked again at a time
KEPT = 8  # old queries that can be asked again: the oldest of every kind
FIRST = 2048  # new queries before the first look
REPEATS = 12  # of a query whose answer differs, to tell noise from another box
CHANGED = (
    "the box changed while it was asked: it answers an old query differently than before. With "
    "new weights or another replica, what was learned mixes two models: start again with another "
    "journal. Where an answer depends on the rest of its batch, ask with batch=1 (--batch 1)"
)
REASON = "the box answered this query differently before"


def roundoff_of_type(answers: Array) -> float:
    """Unit roundoff of the answers' own type."""
    kind = answers.dtype if answers.dtype.kind == "f" else np.dtype(np.float64)
    return float(np.finfo(kind).eps) / 2.0


@dataclass(eq=False)
class OldQuery:
    """A query and what the box said to it at first."""

    query: QueryBatch
    answer: Array
    scale: float  # largest answer of its batch: what cancelled in this one was of that size
    different: int  # tokens of the query


def _different(kept: OldQuery | None) -> int:
    return 0 if kept is None else kept.different


class DriftWatch(Wrapper):
    """Asks RECALLED old queries again after `first`, twice that many, … and then after every
    `every` new ones. `roundoff` tells the unit roundoff of the box from a sample of answers."""

    def __init__(
        self,
        inner: Oracle,
        every: int = 4096,
        first: int | None = None,
        roundoff: Callable[[Array], float] = roundoff_of_type,
    ) -> None:
        if every < 1:
            raise InvalidArgument(f"every must be at least 1, got {every}")
        self.inner, self.every, self.roundoff = inner, every, roundoff
        self._wait = min(every, first or every)
        self._since = 0
        self._oldest: dict[str, OldQuery] = {}  # by purpose
        self._longest: OldQuery | None = None
        self._freshest: OldQuery | None = None  # the longest of a verification
        self._samples: list[Array] = []
        self._values: set[float] = set()  # that were answered; no more than tell labels apart
        self._measured: tuple[float, float] | None = None  # noise, and the scale it was seen at

    @property
    def remaining(self) -> int | None:
        """What the budget leaves beside the looks to come."""
        left = self.inner.remaining
        if left is None:
            return None
        looks, total, wait = 0, self._since + left, self._wait
        while total >= wait:
            looks, total, wait = looks + 1, total - wait, min(2 * wait, self.every)
        measuring = REPEATS if looks and self._measured is None else 0
        return max(0, left - looks * RECALLED - measuring)

    @property
    def labels(self) -> bool:
        """Whether the box has shown nothing but labels."""
        labels = 3  # a box that has shown no more different numbers answers with labels
        return len(self._values) <= labels

    @property
    def noisy(self) -> bool:
        """Whether looks saw noise: more than batches of different sizes round differently."""
        if self._measured is None:
            return False
        noise, scale = self._measured
        return NoiseModel(self.roundoff(np.concatenate(self._samples))).rejects(noise, scale)

    def ask(self, queries: QueryBatch) -> Array:
        answers = self.inner.ask(queries)
        if len(queries):
            self._keep(queries, answers)
        self._since += len(queries)
        if self._since >= self._wait:
            self._since, self._wait = 0, min(2 * self._wait, self.every)
            self.look()
        return answers

    def look(
        self, count: int = RECALLED, precision: NoiseModel | None = None, fresh: bool = False
    ) -> None:
        """Asks `count` old queries again; raises Inconsistent if the box is not what it was.

        The longest sequences say most about a model, the oldest queries about the past. `fresh`:
        one of a verification first, in which no token outweighs all others, so that every
        parameter has a part in its answer."""
        needed = 2 if self.labels else 1  # the label of a near tie may turn by rounding
        known = self._known()
        if fresh and self._freshest is not None:
            known = [self._freshest, *known]
        for kept in known[:count]:
            now = np.asarray(self.inner.ask(kept.query)[0])
            if self._same(kept, now, precision or self.spec.precision):
                continue
            needed -= 1
            if needed == 0:
                tokens = kept.query.tokens()[0]
                raise Inconsistent(CHANGED, Counterexample(tokens, now, kept.answer, REASON))

    def _keep(self, queries: QueryBatch, answers: Array) -> None:
        sample = 64  # answers of a batch that tell the number format
        if self.labels:
            self._values.update(np.asarray(answers, dtype=np.float64).ravel()[:sample].tolist())
        if len(self._samples) < KEPT:
            self._samples.append(np.array(answers[:sample]).ravel())
        # queries of a verification are among the last: of these, large ones are not worth holding
        if queries.purpose == VERIFICATION and 8 * queries.length * queries.width > 2**16:
            return
        most = _different(self._longest)
        longer = queries.length > most and queries.different > most
        new = queries.purpose not in self._oldest and len(self._oldest) < KEPT
        fresh = queries.purpose == VERIFICATION and queries.different > _different(self._freshest)
        if not (longer or new or fresh):
            return
        one = QueryBatch.of(queries[:1].tokens(), PURPOSE)  # lets go of the bank
        scale = float(np.max(np.abs(answers), initial=0.0))
        kept = OldQuery(one, np.array(answers[0]), scale, one.different)
        if new:
            self._oldest[queries.purpose] = kept
        if longer:
            self._longest = kept
        if fresh:
            self._freshest = kept

    def _known(self) -> list[OldQuery]:
        """What can be asked again: the oldest of the longest, then the oldest of every purpose."""
        known = [] if self._longest is None else [self._longest]
        return [*known, *(kept for kept in self._oldest.values() if kept not in known)][:KEPT]

    def _same(self, kept: OldQuery, now: Array, precision: NoiseModel | None) -> bool:
        """Whether two answers to one query can come from one box."""
        if now.shape != kept.answer.shape:
            return False
        gap = float(np.max(np.abs(np.asarray(now, dtype=np.float64) - kept.answer), initial=0.0))
        if precision is not None:
            return gap <= precision.apart(kept.scale)
        allowed = NoiseModel(self.roundoff(np.concatenate(self._samples))).apart(kept.scale)
        if gap <= allowed:
            return True
        # where larger terms cancelled, the last bit of an answer is many roundings
        alone = now[None] if gap <= 2.0**12 * allowed else now[None][:0]
        # deviations of noise, known from few repeats, that two answers may be apart
        return gap <= allowed + 14.0 * self._noise(kept, alone)

    def _noise(self, kept: OldQuery, alone: Array) -> float:
        """Standard deviation of its answers: from repeats of the first query that needed them,
        and larger in proportion for larger answers, as relative noise would be. The repeats are
        asked together; boxes may round what was asked `alone` differently."""
        if self._measured is None:
            index = np.repeat(kept.query.index, REPEATS, axis=0)
            again = self.inner.ask(QueryBatch(kept.query.bank, index, PURPOSE))
            together = np.concatenate([alone, again]).astype(np.float64)
            spread = np.std(together, axis=0, ddof=1)
            self._measured = float(np.max(spread, initial=0.0)), kept.scale
        noise, scale = self._measured
        return noise * max(1.0, kept.scale / max(scale, TINY))
