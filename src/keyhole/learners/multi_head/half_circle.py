"""Pairs with one huge token: each head switches once on half a circle, and that names the heads.

Queries. [x + s T; x] with s enormous: head h attends to the first token if T . p_h(x) > 0, else
to the anchor, so f = x . V + s T . (sum of the values of the heads that do), exactly. T runs over
half a circle. Between switches the answer is linear in T, with two coefficients in the plane of
the circle; intervals whose ends differ are halved. Near a switch s is lowered until the head
attends to both tokens: two such answers give the angle and how sharply the head reacts.

Inversion. J_h, the change of the coefficients at a switch, is the value of head h: +J_h if the head
opens there, -J_h if it shuts. Pairs show J_h tanh(s T . p_h / 2) and cannot tell a head from its
mirror image (score, bias and value negated); only the sum of all values can.

When it fails. Two heads that switch at almost the same angle (nearly equal or nearly opposite
heads, or bad luck: another circle). A box whose attention never hardens switches everywhere.
"""

from dataclasses import dataclass, field

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import Counterexample, IllConditioned, WrongFamily
from keyhole.learners.multi_head.leaves import HARD, MOST_HEADS
from keyhole.measurement.asking import Asker

ARC_DOUBT = 30.0  # rounding errors by which an answer may be off
NARROW = 1e-4  # width, in radians, of an interval with one switch
SOFTER = 0.03  # factor on the scale until a head is seen in between
SEEN = 12.0  # log-odds from which on an answer is all one arc's
LOOKS = 40  # queries about one switch
CLOSEST = 30.0  # switches nearer than so many NARROW ones are not told apart
SAFE = 0.02  # move, relative to the distance from the next switch, that switches no head
CHECKS = 4  # ordinary tokens that the heads found must explain
SAFER, TRIES = 0.1, 3  # factor for the next try, and how many there are
PLAIN = 1e-3  # relative misfit with the circle's own coefficients that shows a head has switched


@dataclass
class Switches:
    """What the circle shows of each head, in the order of the angles."""

    tokens: Float[Array, "h d"]  # unit vectors at which the heads switch
    jumps: Float[Array, "h d outputs"]
    sharpness: Float[Array, " h"]  # log-odds per length of token and radian
    angles: Float[Array, " h"]
    inverse: Float[Array, "k n"]  # from relative errors of answers to errors of the jumps
    circle: "Circle"

    def counterexample(self, rng: np.random.Generator) -> Counterexample | None:
        """A pair with an ordinary token of the plane that is not answered as these heads, mirrored
        or not, answer it: V / 2 + sum of J_h tanh(log-odds / 2) / 2."""
        angles = rng.uniform(0, np.pi, CHECKS)
        scale = 1 / float(np.median(self.sharpness))
        tokens = self.circle.tokens(angles)
        odds = scale * np.sin(angles[:, None] - self.angles) * self.sharpness
        guess = tokens @ self.circle.total / 2
        guess += np.einsum("nh,nd,hdo->no", np.tanh(odds / 2) / 2, tokens, self.jumps)
        seen = self.circle.answers(tokens, scale)
        worst = int(np.argmax(np.abs(seen - guess).max(axis=1)))
        if np.abs(seen[worst] - guess[worst]).max() <= PLAIN * self.circle.loud:
            return None
        anchor = self.circle.anchor
        alone = anchor @ self.circle.total + self.circle.ask.offset
        return Counterexample(
            input=np.stack([anchor + scale * tokens[worst], anchor]),
            box_answer=np.squeeze(alone + scale * seen[worst]),
            model_answer=np.squeeze(alone + scale * guess[worst]),
            reason="the heads that huge tokens show, at an ordinary token",
        )


@dataclass(frozen=True, eq=False)
class Arc:
    """The answer between two switches, linear in the token."""

    angles: Float[Array, " n"]
    answers: Float[Array, "n outputs"]

    @property
    def plain(self) -> Float[Array, "two outputs"]:
        """Its coefficients in the plane."""
        return np.asarray(np.linalg.lstsq(compass(self.angles), self.answers, rcond=None)[0])

    @property
    def amplified(self) -> float:
        """Errors of the coefficients in units of those of the answers."""
        return 1 / float(np.sin(np.ptp(self.angles) / 2))

    def misses(self, angle: float, answer: Float[Array, " outputs"]) -> float:
        return float(np.abs(answer - compass(np.array([angle])) @ self.plain).max())

    def joined(self, angle: float, answer: Float[Array, " outputs"]) -> "Arc":
        """With one answer more: the farther apart, the better known."""
        return Arc(np.append(self.angles, angle), np.vstack([self.answers, answer]))

    def opposite(self, sum_: Float[Array, "two outputs"]) -> "Arc":
        """Half a circle further on, where every head is on the other side."""
        angles = self.angles + np.pi
        return Arc(angles, compass(angles) @ (sum_ - self.plain))


def compass(angles: Float[Array, " n"]) -> Float[Array, "n two"]:
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


@dataclass
class Circle:
    """Half a circle of directions around one anchor."""

    ask: Asker
    anchor: Float[Array, " d"]
    total: Float[Array, "d outputs"]  # sum of the values of all heads
    plane: Float[Array, "two d"]
    loud: float = field(init=False)  # the largest answer so far, per size of token
    hard: float = field(init=False)  # size of huge tokens

    def __post_init__(self) -> None:
        self.hard = HARD / float(np.linalg.norm(self.anchor))
        self.loud = float(np.linalg.norm(self.total))

    @property
    def step(self) -> float:
        """Between the two queries that name an arc."""
        return float(self.ask.unit ** (1 / 3))

    def tokens(self, angles: Array) -> Float[Array, "n d"]:
        return compass(angles) @ self.plane

    def answers(self, tokens: Float[Array, "n d"], scale: float) -> Float[Array, "n outputs"]:
        """What tokens of that size add to the answer, per size."""
        last = np.broadcast_to(self.anchor, (len(tokens), 1, len(self.anchor)))
        pairs = np.concatenate([last + scale * tokens[:, None], last], axis=1)
        got = (self.ask(pairs, "switches") - self.anchor @ self.total) / scale
        self.loud = max(self.loud, float(np.linalg.norm(got, axis=1).max()))
        return np.asarray(got)

    def arc(self, angle: float, width: float) -> "Arc":
        """The answer around an angle, from two queries close to each other."""
        angles = angle + np.array([0.0, self.step * width])
        return Arc(angles, self.answers(self.tokens(angles), self.hard))

    def doubt(self, arc: Arc) -> float:
        """By how much an arc may be off."""
        noise = self.ask.unit * self.loud + self.ask.additive / self.hard
        return ARC_DOUBT * noise * arc.amplified

    def switches(self) -> list[tuple[float, float, Array]]:
        """Angle and sharpness of every head, and the arc before it switches."""
        first = self.arc(0.0, 1.0)
        last = first.opposite(self.plane @ self.total)
        todo, found = [(0.0, first, np.pi, last)], []
        while todo:
            left, before, right, after = todo.pop()
            if np.abs(before.plain - after.plain).max() <= self.doubt(before) + self.doubt(after):
                continue
            if right - left < NARROW:
                place = self.located(left, before.plain, right, after.plain)
                found.append((*place, before.plain))
                if len(found) > MOST_HEADS:
                    raise WrongFamily(
                        "the answers to huge tokens switch at every angle: attention never "
                        "settles on single tokens as softmax attention does"
                    )
                continue
            middle = (left + right) / 2
            seen = self.answers(self.tokens(np.array([middle])), self.hard)[0]
            gaps = [part.misses(middle, seen) for part in (before, after)]
            if gaps[0] > self.doubt(before) and gaps[1] > self.doubt(after):
                between = self.arc(middle, right - left)
                todo += [(left, before, middle, between), (middle, between, right, after)]
            elif gaps[0] <= gaps[1]:
                todo.append((middle, before.joined(middle, seen), right, after))
            else:
                todo.append((left, before, middle, after.joined(middle, seen)))
        return sorted(found, key=lambda part: part[0])

    def located(
        self, left: float, before: Array, right: float, after: Array
    ) -> tuple[float, float]:
        """The switch between two arcs, from two answers in which the head attends to both."""
        scale, seen = self.hard, []
        for _ in range(LOOKS):
            angle = (left + right) / 2
            odds = self.log_odds(angle, scale, before, after)
            if np.isfinite(odds) and abs(odds) < SEEN:
                seen.append((angle, odds / scale))
                if len(seen) == 2:
                    (a, u), (b, v) = seen
                    slope = (v - u) / (b - a)
                    if slope > 0:
                        return float(a - u / slope), float(slope)
                    break
            else:
                scale *= SOFTER
            left, right = (left, angle) if odds > 0 else (angle, right)
        raise IllConditioned("a switch between two linear pieces is no softmax of two scores")

    def everywhere(
        self,
        angle: float,
        safe: float,
        plain: Float[Array, "two outputs"],
        rng: np.random.Generator,
    ) -> tuple[Float[Array, "d outputs"], Float[Array, "d d"]]:
        """All coefficients of an arc, from moves up to `safe` off the plane, and the matrix that
        takes errors of answers to errors of them."""
        width = len(self.anchor)
        for number in range(TRIES):
            frame = np.linalg.qr(rng.standard_normal((width, width)))[0]
            rows = self.tokens(np.array([angle])) + safe * SAFER**number * frame
            inverse = np.linalg.inv(rows)
            found = inverse @ self.answers(rows, self.hard)
            if np.abs(self.plane @ found - plain).max() <= PLAIN * self.loud:
                return found, inverse
        raise IllConditioned("heads switch however short a move")

    def log_odds(self, angle: float, scale: float, before: Array, after: Array) -> float:
        """Of the arc on the right against the one on the left."""
        plain = compass(np.array([angle]))[0]
        got = self.answers(self.tokens(np.array([angle])), scale)[0] - plain @ before
        jump = plain @ (after - before)
        share = float(got @ jump / (jump @ jump))
        if not 0 < share < 1:
            return np.inf if share >= 1 else -np.inf
        return float(np.log(share / (1 - share)))


def find_switches(
    ask: Asker,
    anchor: Float[Array, " d"],
    total: Float[Array, "d outputs"],
    rng: np.random.Generator,
) -> Switches:
    """All heads, and their values up to the sign."""
    plane = np.linalg.qr(rng.standard_normal((len(anchor), 2)))[0].T
    circle = Circle(ask, anchor, total, plane)
    switches = circle.switches()
    angles, sharpness = np.array([part[:2] for part in switches]).reshape(-1, 2).T
    heads = len(angles)
    if not heads:
        return Switches(plane[:0], total[None][:0], sharpness, angles, np.zeros((0, 0)), circle)
    before = np.append(angles[-1] - np.pi, angles[:-1])
    if (angles - before < CLOSEST * NARROW).any():
        raise IllConditioned("two heads switch at almost the same angle")
    middles = (before + angles) / 2
    safe = SAFE * np.abs(np.sin(middles[:, None] - angles)).min(axis=1)
    measured = [
        circle.everywhere(middle, reach, plain, rng)
        for middle, reach, (*_, plain) in zip(middles, safe, switches, strict=True)
    ]
    arcs, inverses = zip(*measured, strict=True)
    steps = np.eye(heads, k=1) - np.eye(heads)
    steps[-1, 0] -= 1.0  # what follows the last switch is the first arc reversed
    jumps = np.einsum("hk,kdo->hdo", steps, np.stack(arcs))
    jumps[-1] += total
    inverse = np.block([[s * part for s, part in zip(row, inverses, strict=True)] for row in steps])
    return Switches(circle.tokens(angles), jumps, sharpness, angles, inverse, circle)


def uniform_value(
    ask: Asker,
    anchor: Float[Array, " d"],
    total: Float[Array, "d outputs"],
    rng: np.random.Generator,
) -> Float[Array, "d outputs"] | None:
    """The value of a head that attends to all tokens alike; None where there is none. A huge token
    twice instead of once moves two thirds of such a head instead of a half, and no other head."""
    width, hard = len(anchor), HARD / float(np.linalg.norm(anchor))
    rows = np.linalg.qr(rng.standard_normal((width, width)))[0]
    found: list[Array] = []
    for part in (rows[:1], rows[1:]):
        last = np.broadcast_to(anchor, (len(part), 1, width))
        huge = last + hard * part[:, None]
        once = ask(np.concatenate([huge, last], axis=1), "uniform head?") / hard
        twice = ask(np.concatenate([huge, huge, last], axis=1), "uniform head?") / hard
        loud = float(np.abs(once).max() + np.linalg.norm(total))
        noise = ARC_DOUBT * (ask.unit * loud + ask.additive / hard)
        if not found and np.abs(twice - once).max() <= noise:
            return None
        found.append(6 * (twice - once))
    return np.asarray(rows.T @ np.concatenate(found))
