"""One line through the box, from the first answers to fitted pieces and kinks."""

from dataclasses import dataclass

import numpy as np

from keyhole.arrays import TINY, Array, Float
from keyhole.learners.mlp.kink_evidence import LineEvidence, generic
from keyhole.learners.mlp.kinks import STEP, Search
from keyhole.learners.mlp.pieces import Ask, Piece, Rougher, measured_rounding

NEAR, FAR = 1e3, 1e8  # ends of the line, in units of the input scale: a random plane is crossed
# beyond NEAR with p < 1e-3 (found at a few queries more), beyond FAR with p < 1e-8 (missed)
SHORT = 3e-3  # a line known over a shorter stretch gets one more answer (vector boxes)
LONGER = 4.0  # if that makes the stretch this much longer
INSET = 0.05  # how far from the ends of a piece that answer stays
ROUGH = 6.0  # a second difference beyond this many rounding errors asks for a measurement


@dataclass(frozen=True, eq=False)
class Line:
    """The answers along one line: kinks with their jumps of slope, and the affine pieces."""

    kinks: Float[Array, " n"]
    jumps: Float[Array, "n k"]
    slopes: Float[Array, "pieces k"]
    anchors: Float[Array, " pieces"]  # a time in each piece at which its value is known best
    values: Float[Array, "pieces k"]
    spans: Float[Array, " pieces"]  # length over which each piece's slope was measured
    unit: float  # rounding error of one answer, per 1 + |t|
    scale: float  # how much the answers vary, per 1 + |t|
    reach: tuple[float, float]
    batches: int

    def at(self, piece: Array, t: Array) -> Float[Array, "n k"]:
        """Values of the given pieces' lines at the given times."""
        rise = self.slopes[piece] * (t - self.anchors[piece])[:, None]
        return np.asarray(self.values[piece] + rise)


def trace(
    ask: Ask,
    relative: float,
    floor: float,
    reach: tuple[float, float],
    *,
    trusting: bool = True,
    step: float = STEP,
    bends: float = 0.0,
    reliable: float = 0.0,
) -> Line:
    """Finds all kinks between the ends of `reach`; if `trusting`, lines of vectors that meet are
    taken as proof of a single kink, which parallel jumps can feign.

    `relative` is the stated (or best possible) rounding error of an answer relative to the scale
    of the answers, `floor` an absolute error per 1 + |t| below which nothing is a kink. Boxes with
    few digits need longer tangents (`step`), and trust lines no further than `reliable` times
    their lengths. Changes of slope up to `bends` are errors of what was taken off the answers."""
    low, high = reach
    near = min(1.0, NEAR / FAR if max(-low, high) >= FAR else 1 - step)
    inner = step * min(1.0, -low, high)
    times = np.array([low, low * near, -inner, 0.0, inner, high * near, high])
    values = ask(times)
    scale = float((np.abs(values).max(axis=1) / (1 + np.abs(times))).max())
    moves = np.linalg.norm(values - values[3], axis=1) / (1 + np.abs(times))
    bend = float(np.abs(values[2] - 2 * values[3] + values[4]).max())
    if bend > ROUGH * max(relative * scale, floor):
        relative = max(relative, measured_rounding(ask, inner) / max(scale, TINY))
    noise = max(relative * scale, floor, TINY)
    try:
        search = Search(ask, LineEvidence(noise, bends), reach, step, reliable)
        resolve(search, times, values, trusting)
    except Rougher as rougher:
        search = Search(
            ask, LineEvidence(rougher.noise, bends), reach, step, reliable, measured=True
        )
        resolve(search, times, values, trusting)
    line = fitted(search, float(moves.max()), reach)
    if search.trusted and lengthen(search, line):
        line = fitted(search, float(moves.max()), reach)
    return line


def resolve(search: Search, times: Array, values: Array, trusting: bool) -> None:
    """Settles all intervals between the first three pieces."""
    start = Piece(times[3:5].tolist(), list(values[3:5]))
    if search.evidence.on(start, times[2], values[2]):
        start.add(float(times[2]), values[2])
    first, last = (Piece(times[i : i + 2].tolist(), list(values[i : i + 2])) for i in (0, 5))
    search.pieces = [first, start, last]
    search.trusted = trusting and generic(search.pieces)
    search.run([(first, start), (start, last)])


def lengthen(search: Search, line: Line) -> bool:
    """One more answer on each short line, as far from its others as the kinks allow.

    Kinks that are proven by lines that meet leave lines which are known by two answers close
    together; everything that follows would inherit their error."""
    wanted: list[tuple[Piece, float]] = []
    groups = grouped(search)
    for i, group in enumerate(groups):
        t = further(line, i, group, last=len(groups) - 1)
        if t is not None:
            wanted.append((group[0], t))
    if not wanted:
        return False
    answers = search.ask(np.array([t for _, t in wanted]))
    search.batches += 1
    for (piece, t), answer in zip(wanted, answers, strict=True):
        if not search.evidence.on(piece, t, answer):
            continue
        if piece.implied is not None:
            piece.times, piece.values, piece.implied = piece.times[:1], piece.values[:1], None
            piece.low = piece.high = 0
        piece.add(t, answer)
    return True


def further(line: Line, i: int, group: list[Piece], last: int) -> float | None:
    """Where to ask once more about piece i, if that is worth a query."""
    if i in (0, last) or len(group) > 1:
        return None
    piece, (a, b) = group[0], line.kinks[i - 1 : i + 1]
    known = piece.span
    if piece.implied is not None:
        s = piece.times[0]
        known = min(s - a, b - s)
        far = b - INSET * (b - a) if b - s > s - a else a + INSET * (b - a)
        length = abs(far - s)
    else:
        ends = a + INSET * (b - a), b - INSET * (b - a)
        far = ends[0] if piece.right - ends[0] > ends[1] - piece.left else ends[1]
        length = max(piece.right - far, far - piece.left)
    return float(far) if known < SHORT and length > LONGER * known else None


def fitted(search: Search, scale: float, reach: tuple[float, float]) -> Line:
    """Each piece's line through all its answers, kinks where neighbouring lines cross."""
    groups = grouped(search)
    lines = [weighted_line(group) for group in groups]
    for i, group in enumerate(groups):
        if len(group) == 1 and group[0].implied is not None and 0 < i < len(groups) - 1:
            lines[i] = implied_line(group[0], lines[i - 1], lines[i + 1])
    anchors = np.array([line[0] for line in lines])
    values = np.array([line[1] for line in lines])
    slopes = np.array([line[2] for line in lines])
    spans = np.array([known_length(group) for group in groups])
    jumps = np.diff(slopes, axis=0)
    kinks = np.zeros(len(jumps))
    for i, jump in enumerate(jumps):
        a = max(piece.right for piece in groups[i])
        b = min(piece.left for piece in groups[i + 1])
        gap = values[i] + slopes[i] * (a - anchors[i])
        gap = gap - values[i + 1] - slopes[i + 1] * (a - anchors[i + 1])
        size = float(jump @ jump)
        t = a + float(gap @ jump) / size if size > 0 else a
        kinks[i] = min(max(t, a), b)
    return Line(
        kinks,
        jumps,
        slopes,
        anchors,
        values,
        spans,
        search.evidence.unit,
        scale,
        reach,
        search.batches,
    )


def known_length(group: list[Piece]) -> float:
    return max(piece.right for piece in group) - min(piece.left for piece in group)


def grouped(search: Search) -> list[list[Piece]]:
    """Pieces in order, those between which no kink was found taken together."""
    ordered = sorted(search.pieces, key=lambda piece: piece.left)
    joined = {(id(a), id(b)) for a, b in search.merged}
    groups: list[list[Piece]] = []
    for piece in ordered:
        if groups and (id(groups[-1][-1]), id(piece)) in joined:
            groups[-1].append(piece)
        else:
            groups.append([piece])
    return groups


LineFit = tuple[float, Array, Array]  # anchor, value there, slope


def weighted_line(group: list[Piece]) -> LineFit:
    """Least squares with errors that grow like 1 + |t|."""
    times = np.array([t for piece in group for t in piece.times])
    values = np.array([value for piece in group for value in piece.values])
    weights = 1 / (1 + np.abs(times)) ** 2
    weights /= weights.sum()
    anchor = float(weights @ times)
    centred = times - anchor
    slope = (weights * centred) @ (values - weights @ values) / float(weights @ centred**2)
    return anchor, weights @ values, slope


def implied_line(piece: Piece, left: LineFit, right: LineFit) -> LineFit:
    """The line through one answer between two kinks, from its neighbours' fitted lines."""
    s, value = piece.times[0], piece.values[0]
    rise = value - left[1] - left[2] * (s - left[0])
    fall = value - right[1] - right[2] * (s - right[0])
    factors, *_ = np.linalg.lstsq(np.stack([rise, fall], axis=1), right[2] - left[2])
    ends = left[2] + factors[0] * rise, right[2] - factors[1] * fall
    return s, value, (ends[0] + ends[1]) / 2
