"""First half of learners/multi_head/vector_outputs: heads and value maps through hard attention."""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import UNIT_ROUNDOFF, Array, Float
from keyhole.errors import IllConditioned, WrongFamily
from keyhole.learners.multi_head.leaves import Leaves, ask_hard
from keyhole.learners.multi_head.vector_leaves import Overcomplete, find_vector_leaves
from keyhole.linalg.linear_system import Equations
from keyhole.measurement.asking import Asker

GAP = 1e-4  # ratio of neighbouring singular values that ends a spectrum
SMALL = 1e-5  # singular value, relative to the largest, from which on such a gap is believed
NOISE = 30.0  # singular values below this many times the norm of the noise are noise
WEAK = 0.02  # smallest singular value, relative to the largest, of rows that determine a range
TWICE = 1.5  # ranks, in medians, from which a leaf may hold two heads
JUMP = 3.0  # response, in medians, of a head that has left its token
RETREAT = 0.1  # such a move is asked again, so much shorter
EXTRA = 0.4  # extra bags may cost so many queries per dimension
CLEAN = 0.05  # misfit of the check that every head kept its gate
SAME = 1e-5  # relative difference within which two responses belong to the same head


@dataclass(frozen=True)
class Care:
    """How much is asked beyond the minimum, by the precision of the box."""

    reach: float  # move of a leaf, relative to its size
    bags: int  # bags of tokens whose winners are added up to gates that allow longer moves
    spare: float  # directions and anchors beyond the rank, as a share of it
    share: float  # tokens in a soft query, as a share of the rank
    groups: int  # groups of heads whose value maps are told apart by moving them together
    peak: float  # largest log-odds aimed at in a soft query
    anchor: float  # size of an entry of the anchors

    def beyond(self, rank: int) -> int:
        return rank + max(1, int(rank * self.spare))


# a box in float64 needs no spare queries; one in float32 does
EXACT = Care(reach=0.03, bags=1, spare=0.125, share=1.0, groups=1, peak=2.0, anchor=1.0)
COARSE = Care(reach=0.1, bags=3, spare=0.4, share=0.5, groups=2, peak=1.5, anchor=0.5)


@dataclass(frozen=True, eq=False)
class Values:
    """What hard attention and single tokens say, the offset subtracted."""

    frame: Float[Array, "d d"]  # orthonormal directions
    singles: Float[Array, "n outputs"]  # answers to the first rows of the frame, alone
    moved: list[Array]  # per head, (e, outputs): responses to the last rows of the frame
    grouped: list[Array]  # per group but the last: to the first rows
    members: list[list[int]]  # heads of each group
    ranks: list[int]
    reach: float  # the move that was used

    def maps(self) -> tuple[list[Array], list[Array], Float[Array, "d outputs"], float]:
        """V_h, O_h (orthonormal rows), M = sum of V_h O_h, and the worst condition of the O of
        a group."""
        count = len(self.frame) - len(self.singles)
        tails = [moved[len(moved) - count :] for moved in self.moved]
        outs = [
            np.linalg.svd(moved, full_matrices=False)[2][:rank]
            for moved, rank in zip(self.moved, self.ranks, strict=True)
        ]
        total = self.frame.T @ np.concatenate([self.singles, np.sum(tails, axis=0)])
        left, worst = total, 1.0
        ins: list[Array] = [np.zeros(0)] * len(outs)
        for place, heads in enumerate(self.members):
            part = left
            if place < len(self.grouped):
                tail = np.sum([tails[h] for h in heads], axis=0)
                part = self.frame.T @ np.concatenate([self.grouped[place], tail])
                left = left - part
            stacked = np.concatenate([outs[h] for h in heads])
            if len(stacked) > stacked.shape[1]:
                raise Overcomplete
            u, s, vt = np.linalg.svd(stacked, full_matrices=False)
            worst = max(worst, float(s[0] / s[-1]))
            cuts = np.cumsum([self.ranks[h] for h in heads])[:-1]
            for h, columns in zip(
                heads, np.split(part @ (vt.T / s) @ u.T, cuts, axis=1), strict=True
            ):
                ins[h] = columns
        return ins, outs, total, worst


@dataclass
class ValueMaps:
    """The stage that measures `Values`."""

    ask: Asker
    rng: np.random.Generator
    frame: Float[Array, "d d"]
    first: Float[Array, "one outputs"]  # answer to the frame's first row alone
    loudness: float  # size of single tokens
    heads: int | None
    rank: int | None
    care: Care
    alike: bool
    reach: float = 0.0  # of a move; grows with the number of bags behind the gates

    def measure(self, anchor: Float[Array, " d"]) -> Values:
        width, self.reach = len(anchor), self.care.reach
        leaves, moved = self.distinct(anchor)
        ranks = [self.rank_of(responses) for responses in moved]
        if sum(ranks) > self.first.shape[1]:
            raise Overcomplete
        rows = self.frame[: max(1, width - min(len(responses) for responses in moved))]
        asked = self.ask(self.loudness * rows[1:, None], "values") / self.loudness
        singles = np.concatenate([self.first, asked])
        members = self.partition(len(moved))
        grouped = [self.together(leaves, heads, rows) for heads in members[:-1]]
        return Values(self.frame, singles, moved, grouped, members, ranks, self.reach)

    def partition(self, heads: int) -> list[list[int]]:
        """Heads in groups of about equal size."""
        groups = min(self.care.groups, heads)
        order = self.rng.permutation(heads)
        return [sorted(int(h) for h in part) for part in np.array_split(order, groups)]

    def distinct(self, anchor: Array) -> tuple[Leaves, list[Array]]:
        """Leaves and their responses; a leaf that two heads seem to share is looked at again
        with other tokens, and the responses of the other heads are kept."""
        shift = self.frame[-1]
        leaves, marks = find_vector_leaves(self.ask, anchor, self.heads, shift, self.rng)
        if not len(leaves):
            raise WrongFamily("no head answers to the tokens before the last one: no attention")
        leaves = self.strengthened(leaves, marks, anchor)
        moved = self.responses(leaves, list(range(len(leaves))))
        if not self.suspicious([self.rank_of(responses) for responses in moved]):
            return leaves, moved
        again, fresh = find_vector_leaves(self.ask, anchor, self.heads, shift, self.rng)
        if len(again) <= len(leaves):
            if self.alike:
                raise IllConditioned("two heads seem to share a token")
            return leaves, moved
        gaps = np.abs(fresh[:, None] - marks[None]).max(axis=2) / float(np.abs(fresh).max())
        same = self.same()
        known = {i: int(np.argmin(gaps[i])) for i in range(len(again)) if gaps[i].min() < same}
        rest = [i for i in range(len(again)) if i not in known]
        more = dict(zip(rest, self.responses(again, rest), strict=True))
        return again, [moved[known[i]] if i in known else more[i] for i in range(len(again))]

    def same(self) -> float:
        """Relative difference within which two responses belong to the same head."""
        return float(SAME * max(1.0, (self.ask.unit / UNIT_ROUNDOFF) ** (1 / 3)))

    def strengthened(self, leaves: Leaves, marks: Array, anchor: Array) -> Leaves:
        """Winners of several bags added up, head by head: what they have in common is the head's
        own direction, so moves may be longer before a head changes its mind."""
        affordable = int(EXTRA * len(anchor) / (len(leaves) + 3))
        sums, used = leaves.tokens.copy(), np.ones(len(leaves))
        for _ in range(min(self.care.bags - 1, affordable)):
            more, others = find_vector_leaves(
                self.ask, anchor, self.heads, self.frame[-1], self.rng
            )
            gaps = np.abs(marks[:, None] - others[None]).max(axis=2) / float(np.abs(marks).max())
            for head in np.flatnonzero(gaps.min(axis=1) < self.same()):
                sums[head] += more.tokens[int(np.argmin(gaps[head]))]
                used[head] += 1
        if used.min() < 2:
            return leaves
        tokens = sums / np.linalg.norm(sums, axis=1, keepdims=True)
        factors = self.rng.uniform(-1, 1, len(tokens))
        check = np.stack([tokens, tokens + self.reach * factors[:, None] * self.frame[-1]])
        base, changed = ask_hard(self.ask, check, anchor, leaves.scale, "leaves")
        misfit = np.abs((changed - base) / self.reach - factors @ marks).max()
        if misfit > CLEAN * np.abs(marks).max():
            return leaves
        equations = Equations(len(tokens), len(anchor))
        equations.add(tokens[None], base[None])
        self.reach = self.care.reach * float(used.min())
        return Leaves(anchor, tokens, leaves.reach, leaves.scale, equations, False)

    def suspicious(self, ranks: list[int]) -> bool:
        """Whether two heads may share a leaf: one is missing, or one leaf has twice the rank."""
        if self.heads is not None:
            return len(ranks) < self.heads
        return len(ranks) > 1 and max(ranks) > TWICE * float(np.median(ranks))

    def responses(self, leaves: Leaves, which: list[int]) -> list[Array]:
        """What single leaves answer to moves along the last rows of the frame, one row after the
        other until the answers' rank stops growing."""
        found: dict[int, list[Array]] = {leaf: [] for leaf in which}
        active = list(which)
        for row in self.frame[::-1]:
            answers = self.moved(leaves, active, row, self.reach)
            typical = float(np.median(np.linalg.norm(answers, axis=1)))
            for leaf, answer in zip(active, answers, strict=True):
                sizes = [float(np.linalg.norm(a)) for a in found[leaf]] or [typical]
                if np.linalg.norm(answer) > JUMP * float(np.median(sizes)):
                    answer = self.moved(leaves, [leaf], row, RETREAT * self.reach)[0]
                found[leaf].append(answer)
            active = [leaf for leaf in active if not self.enough(np.stack(found[leaf]))]
            if not active:
                break
        return [np.stack(found[leaf][::-1]) for leaf in which]

    def moved(self, leaves: Leaves, which: list[int], row: Array, reach: float) -> Array:
        """The answers, per unit of move, with one of the leaves moved along `row`."""
        tokens = np.repeat(leaves.tokens[None], len(which), axis=0)
        tokens[np.arange(len(which)), which] += reach * row
        answers = leaves.ask(self.ask, tokens, "value maps")
        return np.asarray((answers - leaves.equations.answers[0]) / reach)

    def together(self, leaves: Leaves, heads: list[int], rows: Array) -> Array:
        """The same with all leaves of a group moved at once."""
        found = self.moved_together(leaves, heads, rows, self.reach)
        sizes = np.linalg.norm(found, axis=1)
        jumped = np.flatnonzero(sizes > JUMP * np.median(sizes))
        if len(jumped):
            again = self.moved_together(leaves, heads, rows[jumped], RETREAT * self.reach)
            found[jumped] = again
        return found

    def moved_together(self, leaves: Leaves, heads: list[int], rows: Array, reach: float) -> Array:
        tokens = np.repeat(leaves.tokens[None], len(rows), axis=0)
        tokens[:, heads] += reach * rows[:, None]
        answers = leaves.ask(self.ask, tokens, "value maps")
        return np.asarray((answers - leaves.equations.answers[0]) / reach)

    def enough(self, responses: Array) -> bool:
        """Spare rows beyond the rank, and again as many where chance made the rows nearly
        dependent."""
        rank = self.rank if self.rank is not None else self.rank_of(responses)
        goal = self.care.beyond(rank)
        if len(responses) < goal:
            return False
        sizes = np.linalg.svd(responses, compute_uv=False)
        return bool(len(responses) >= 2 * goal - rank or sizes[rank - 1] > WEAK * sizes[0])

    def rank_of(self, responses: Array) -> int:
        sizes = np.linalg.svd(responses, compute_uv=False)
        count, outputs = responses.shape
        entry = self.ask.unit * float(np.sqrt((responses**2).mean())) * np.sqrt(len(self.frame))
        noise = entry / self.reach * (np.sqrt(count) + np.sqrt(outputs))
        return spectrum_end(sizes, noise)


def spectrum_end(sizes: Float[Array, " n"], noise: float) -> int:
    """How many singular values are real: up to a gap, or to where they drown in noise."""
    above = max(1, int((sizes > NOISE * noise).sum()))
    for k in range(1, len(sizes)):
        if sizes[k] < GAP * sizes[k - 1] and sizes[k] < SMALL * sizes[0]:
            return min(k, above)
    return above
