"""Is this box that box? Fresh queries to both, compared answer by answer; no family is needed.

Queries.   Vectors as `challenge_queries` draws them, or rows of token numbers or texts as
           `requests` does, whichever both sides take.
Tolerance. How far an honest copy may be off, as a share of the size of an answer:
           REJECTION times what the reference itself does where nothing but rounding changes (tokens
           disturbed in their last digit; a row alone, in a batch, beside a longer one; a model of
           torch computed in double precision), ROUNDINGS roundoffs of the coarser number format of
           the two, half the step of answers that are rounded, and the box's own noise where it
           answers the same request differently. All of it is measured on the reference, but for
           the noise: a box that pads wrongly must not widen its own tolerance.
Formats.   A box that serves the same weights in 16 bits is told from another model by the pattern
           of its errors: the rounded weights are the same in every engine. What an honest engine
           is off in that format is computed from the reference.
Not shown. Queries of other kinds; differences below the tolerance.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from keyhole.arrays import SINGLE_ROUNDOFF, TINY, Array, Float, random_stream, whole_number
from keyhole.errors import Counterexample, InvalidArgument, OracleError
from keyhole.measurement.noise import (
    decimal_digits,
    decimals,
    noise_of_type,
    recognise_format,
    upper_level,
)
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.noise import DETECTION, FORMATS, REJECTION, ROUNDINGS, NoiseModel
from keyhole.oracles.open import open_oracle
from keyhole.oracles.rows import (
    NUMBERS,
    TEXT,
    VECTORS,
    CallableRows,
    OracleRows,
    Row,
    RowBox,
)
from keyhole.oracles.torch import is_module
from keyhole.oracles.wrappers.validate import Validator
from keyhole.results import Verdict
from keyhole.targets import FOLDER, split_gguf
from keyhole.verification.challenge_queries import Designer
from keyhole.verification.requests import LONGEST, Request, RowDesigner
from keyhole.verification.statement import CONFIDENCE, share_conceded, state_hidden
from keyhole.verification.tolerance import OTHER_SHAPE

FRESH = 59  # queries: at most one in twenty is answered differently, with 95% confidence
DRAWS = 6  # disturbed copies of a query
STREAM = "two boxes"  # of random numbers
REPEATS = 3  # of one request, to see whether the box answers alike
HALVES = ("float16", "bfloat16")
# of the errors with those of rounded weights: healthy engines in that format have 0.3 to 0.6,
# other faults less than 0.1 (benchmarks/doctor.py)
FINGERPRINT = 0.2


def is_address(target: Any) -> bool:
    return isinstance(target, str) and target.lower().startswith(("http://", "https://"))


def is_whole_folder(target: Any) -> bool:
    """Whether a string names a whole model of `transformers`, not a part of one."""
    return isinstance(target, str) and target.startswith(FOLDER) and "#" not in target


def is_target(reference: Any) -> bool:
    """Whether a reference is a box of its own, not a run or a model that `verify` compares."""
    if isinstance(reference, (Oracle, RowBox)) or is_module(reference):
        return True
    if not isinstance(reference, str):
        return False
    known = is_address(reference) or reference.startswith(FOLDER)
    return known or split_gguf(reference) is not None or reference.lower().endswith(".onnx")


@dataclass(frozen=True, eq=False)
class Sides:
    """Box and reference, opened for the same kind of rows."""

    box: RowBox
    reference: RowBox
    kind: str  # NUMBERS, TEXT or VECTORS
    oracle: Oracle | None = None  # the box, where it takes vectors
    notes: tuple[str, ...] = ()

    def limits(self) -> tuple[int, int, frozenset[int]]:
        """Size of the vocabulary (0 for texts), tokens of the longest row, tokens not drawn."""
        specs = [side.spec for side in (self.box, self.reference)]
        known = [spec.tokens for spec in specs if spec.tokens is not None]
        tokens = min(known) if self.kind == NUMBERS and known else 0
        longest = min(LONGEST, *(spec.max_length or LONGEST for spec in specs))
        return tokens, longest, getattr(self.reference, "reserved", frozenset())


@contextlib.contextmanager
def open_sides(box: Any, reference: Any, **options: Any) -> Iterator[Sides]:
    """Opens both, the reference first: what it takes says how the box is to be asked. What was
    opened here is closed at the end. `options` are those of an endpoint."""
    with contextlib.ExitStack() as stack:

        def own(opened: Any, given: Any) -> Any:
            if opened is not given:
                stack.callback(opened.close)
            return opened

        if takes_vectors(box, reference, options):
            if is_plain_function(reference):  # it does not say its width: the box may
                second = own(open_oracle(box), box)
                first = own(open_oracle(reference, second.spec.width), reference)
            else:
                first = own(open_oracle(reference), reference)
                width = first.spec.width if is_plain_function(box) else None
                second = own(open_oracle(box, width), box)
            checked = Validator(second)
            yield Sides(OracleRows(checked), OracleRows(Validator(first)), VECTORS, checked)
            return
        known = own(open_rows(reference, **options), reference)
        doubtful = own(open_rows(box, like=known, **options), box)
        yield _agree_on_kind(doubtful, known)


def is_plain_function(target: Any) -> bool:
    """Whether a target is a function that does not say how wide its tokens are."""
    known = isinstance(target, (Oracle, str)) or is_module(target) or hasattr(target, "width")
    return callable(target) and not known


def takes_vectors(box: Any, reference: Any, options: Mapping[str, Any]) -> bool:
    """Whether the two are boxes of vectors: they are, unless one says that it takes tokens. An
    address that says nothing is asked."""
    for side in (box, reference):
        if isinstance(side, RowBox):
            return side.spec.takes == (VECTORS,)
        if isinstance(side, Oracle):
            return side.spec.domain.tokens is None
    if is_whole_folder(reference) or is_whole_folder(box) or {*options} & {"tokens", "dialect"}:
        return False
    if any(_embeds_tokens(side) for side in (box, reference)):
        return False
    return not any(
        is_address(side) and serves_embeddings(side, options) for side in (box, reference)
    )


def serves_embeddings(url: str, options: Mapping[str, Any]) -> bool:
    """Whether an embedding server answers at an address: by its path, or by asking."""
    from keyhole.oracles.embeddings import DIALECTS, open_embedding_endpoint
    from keyhole.oracles.http.client import Forbidden, Unreachable

    path = urlsplit(url).path.rstrip("/")
    if "/v2" in path or "request" in options:
        return False
    if any(path.endswith(dialect.path) for dialect in DIALECTS.values()):
        return True
    try:
        open_embedding_endpoint(url, **options).close()
    except (Forbidden, Unreachable):
        raise
    except OracleError:
        return False
    return True


def _embeds_tokens(target: Any) -> bool:
    """Whether a target is a module of torch that is a whole model on token numbers."""
    return is_module(target) and hasattr(getattr(target, "config", None), "vocab_size")


def open_rows(target: Any, *, like: RowBox | None = None, **options: Any) -> RowBox:
    """A target as a box of rows; `like` is what it is to be compared with."""
    if isinstance(target, RowBox):
        return target
    if isinstance(target, Oracle):
        return OracleRows(target)
    spec = None if like is None else like.spec
    known = {} if spec is None else {"tokens": spec.tokens, "max_length": spec.max_length}
    if is_address(target):
        from keyhole.oracles.embeddings import open_embedding_endpoint

        return open_embedding_endpoint(target, **{"labels": list_labels(like), **known, **options})
    if is_whole_folder(target) or _embeds_tokens(target):
        from keyhole.oracles.token_models import open_token_model

        return open_token_model(target)
    if isinstance(target, (str, Path)) and not str(target).lower().endswith(".onnx"):
        from keyhole.oracles.open import load_named

        target = load_named(str(target))
        if _embeds_tokens(target):
            return open_rows(target)
    if isinstance(target, (str, Path)):
        from keyhole.oracles.onnx_rows import open_onnx_rows

        reading = getattr(like, "reading", None)
        return open_onnx_rows(target, reading=reading, **known)
    if callable(target) and not isinstance(target, type):
        given = {**known, **options}
        return CallableRows(target, tokens=given.get("tokens"), max_length=given.get("max_length"))
    raise InvalidArgument(
        f"cannot ask a {type(target).__name__} rows of tokens: expected hf:FOLDER, an embedding "
        "endpoint, an ONNX file, or a function (tokens, attention_mask) -> (batch, outputs)"
    )


def list_labels(reference: RowBox | None) -> tuple[str, ...]:
    """Labels of a classifier at hand, in the order of its logits."""
    config = getattr(getattr(reference, "module", None), "config", None)
    known = getattr(config, "id2label", None) or {}
    return tuple(str(known[number]) for number in sorted(known))


def _agree_on_kind(box: RowBox, reference: RowBox) -> Sides:
    """Token numbers where both take them and their number is known, else texts."""
    for kind in (NUMBERS, TEXT, VECTORS):
        if kind not in box.spec.takes or kind not in reference.spec.takes:
            continue
        if kind == NUMBERS and (reference.spec.tokens or box.spec.tokens) is None:
            continue
        return Sides(box, reference, kind)
    raise InvalidArgument(
        f"the box takes {' and '.join(box.spec.takes)}, the reference "
        f"{' and '.join(reference.spec.takes)}: nothing that both can be asked, or the size of "
        "the vocabulary is not known. A tokenizer in the reference's folder lets it take texts"
    )


def draw_requests(sides: Sides, count: int, rng: np.random.Generator) -> list[Request]:
    """Fresh queries that both sides take, `count` of them."""
    if sides.kind == VECTORS:
        assert sides.oracle is not None
        return draw_from(count, rng, spec=sides.oracle.spec)
    tokens, longest, reserved = sides.limits()
    return draw_from(count, rng, tokens=tokens, longest=longest, reserved=reserved)


def draw_from(
    count: int,
    rng: np.random.Generator,
    *,
    spec: Spec | None = None,
    tokens: int = 0,
    longest: int = LONGEST,
    reserved: frozenset[int] = frozenset(),
) -> list[Request]:
    """Queries of vectors for a box of this spec; else rows of token numbers, or texts where there
    are no tokens."""
    if spec is not None:
        stream, left = Designer(spec, spec.width**0.5, rng).stream(), count
        requests: list[Request] = []
        while left:
            calls = next(stream)[:left]
            together = tuple(query.tokens for query, _ in calls)
            requests.append(Request(together, calls[0][0].reason))
            left -= len(calls)
        return requests
    return list(RowDesigner(rng, tokens, longest, reserved).stream(count))


@contextlib.contextmanager
def open_one(
    box: Any, *, kind: str | None = None, width: int | None = None, **options: Any
) -> Iterator[Sides]:
    """One box on both sides, for what is asked of it alone. `kind` of rows and `width` where they
    are known from elsewhere."""
    vectors = takes_vectors(box, None, options) if kind is None else kind == VECTORS
    if vectors:
        oracle = open_oracle(box, width if is_plain_function(box) else None)
        checked = Validator(oracle)
        rows: RowBox = OracleRows(checked)
        sides = Sides(rows, rows, VECTORS, checked)
    else:
        rows = open_rows(box, **options)
        if kind is not None and kind not in rows.spec.takes:
            raise InvalidArgument(
                f"the box takes {' and '.join(rows.spec.takes)}; {kind} was signed"
            )
        sides = (
            replace(_agree_on_kind(rows, rows), kind=kind) if kind else _agree_on_kind(rows, rows)
        )
    try:
        yield sides
    finally:
        if rows is not box and not (vectors and oracle is box):
            rows.close()


@dataclass(frozen=True, eq=False)
class Compared:
    """Fresh answers of both, row by row, with how far they may be apart."""

    rows: tuple[Row, ...]
    reasons: tuple[str, ...]
    expected: Float[Array, "n out"]  # by the reference
    answered: Float[Array, "n out"]  # by the box
    allowed: Float[Array, " n"]  # relative to the scale of each answer
    noise: NoiseModel  # of the box
    kind: str
    format_before: str = ""  # of the reference
    notes: tuple[str, ...] = ()
    more: int = 0  # rows asked beside the fresh ones: repeats

    @property
    def scales(self) -> Float[Array, " n"]:
        """What an answer is judged against: its size, or that of an ordinary one where terms
        cancel."""
        return measure_scales(self.expected)

    @property
    def deviations(self) -> Float[Array, " n"]:
        """|box − reference| of each answer, relative to its scale."""
        return measure_deviations(self.answered, self.expected)

    @property
    def bad(self) -> Array:
        """Which answers are beyond their tolerance."""
        return np.asarray(self.deviations > self.allowed)


def measure_scales(expected: Float[Array, "n out"]) -> Float[Array, " n"]:
    sizes = np.linalg.norm(expected, axis=1)
    return np.asarray(np.maximum(np.maximum(sizes, np.median(sizes)), TINY))


def measure_deviations(
    answered: Float[Array, "n out"], expected: Float[Array, "n out"]
) -> Float[Array, " n"]:
    return np.asarray(np.linalg.norm(answered - expected, axis=1) / measure_scales(expected))


class OtherShape(OracleError):
    """The two answer with different numbers of numbers."""

    def __init__(self, message: str, example: Counterexample) -> None:
        super().__init__(message)
        self.example = example


def ask_both(
    sides: Sides, requests: Sequence[Request]
) -> tuple[Float[Array, "n out"], Float[Array, "n out"], tuple[NoiseModel, NoiseModel]]:
    """Answers of box and reference to the same requests, and the number formats of both."""
    answered, expected = [], []
    for request in requests:
        expected.append(np.asarray(sides.reference.ask(request.rows)))
        answered.append(np.asarray(sides.box.ask(request.rows)))
        if answered[-1].shape != expected[-1].shape:
            example = Counterexample(
                show_row(request.rows[0], sides), answered[-1][0], expected[-1][0], OTHER_SHAPE
            )
            raise OtherShape(
                f"the box answers with {answered[-1].shape[1]} numbers, the reference with "
                f"{expected[-1].shape[1]}",
                example,
            )
    box, reference = np.concatenate(answered), np.concatenate(expected)
    formats = read_format(box), read_format(reference)
    return box.astype(np.float64), reference.astype(np.float64), formats


def read_format(answers: Array) -> NoiseModel:
    """The number format that answers show. Single precision that was printed with as few digits
    as it takes, as many servers do, is no decimal rounding."""
    numbers = np.asarray(answers, dtype=np.float64).ravel()
    kind = recognise_format(noise_of_type(None, answers), answers)
    if kind.relative >= SINGLE_ROUNDOFF:
        return kind
    few = numbers[:: max(1, len(numbers) // 64)]
    short = np.array([float(str(number)) for number in few.astype(np.float32)])
    digits = 7  # that single precision takes to print; fewer are a rounding of its own
    if np.array_equal(short, few) and decimal_digits(few).max() >= digits:
        return NoiseModel(SINGLE_ROUNDOFF, format="float32")
    return decimals(numbers) or kind


def compare(sides: Sides, requests: Sequence[Request], rng: np.random.Generator) -> Compared:
    """Asks both, and says how far every answer may be off."""
    sides = _settle_reading(sides, requests)
    answered, expected, (shown, before) = ask_both(sides, requests)
    before = _format_of(sides.reference, before)
    unit = max(shown.relative, before.relative)
    spread = measure_spread(sides, requests, expected, unit, rng)
    signed = Expected(expected, spread, before, sides.kind, sides.notes)
    found = judge_answers(sides.box, requests, signed, answered, shown)
    return recognise_half(sides, requests, found) if found.bad.any() or shown.half else found


@dataclass(frozen=True, eq=False)
class Expected:
    """What the reference answers, and how far its answers move where only rounding changes."""

    answers: Float[Array, "n out"]
    spread: Float[Array, " n"]
    noise: NoiseModel  # its number format, and its own noise where it has some
    kind: str
    notes: tuple[str, ...] = ()


def judge_answers(
    box: RowBox,
    requests: Sequence[Request],
    expected: Expected,
    answered: Float[Array, "n out"],
    shown: NoiseModel,
) -> Compared:
    """The answers of a box beside those expected, once it is known whether it answers alike."""
    noise, more = measure_box_noise(box, requests, shown)
    unit = max(shown.relative, expected.noise.relative)
    additive = float(np.hypot(noise.additive, expected.noise.additive))
    step = max(shown.step, expected.noise.step)
    allowed = allow_deviations(expected.answers, expected.spread, unit, additive, step)
    return Compared(
        rows=tuple(row for request in requests for row in request.rows),
        reasons=tuple(request.reason for request in requests for _ in request.rows),
        expected=expected.answers,
        answered=answered,
        allowed=allowed,
        noise=noise,
        kind=expected.kind,
        format_before=expected.noise.format,
        notes=expected.notes,
        more=more,
    )


def _format_of(reference: RowBox, shown: NoiseModel) -> NoiseModel:
    """The number format of a model of torch, whatever its answers look like."""
    kind = getattr(reference, "dtype", None)
    name = str(kind).removeprefix("torch.")
    bits = dict(FORMATS).get(name)
    return shown if bits is None else NoiseModel(2.0**-bits, format=name)


def allow_deviations(
    expected: Float[Array, "n out"],
    spread: Float[Array, " n"],
    unit: float,
    additive: float,
    step: float,
) -> Float[Array, " n"]:
    """How far an honest answer may be off, relative to its scale: see the head of this file."""
    bound = NoiseModel(additive=additive, step=step).bound
    floor = bound * np.sqrt(expected.shape[1]) / measure_scales(expected)
    return np.asarray(REJECTION * spread + ROUNDINGS * unit + floor)


def measure_box_noise(
    box: RowBox, requests: Sequence[Request], shown: NoiseModel
) -> tuple[NoiseModel, int]:
    """Whether the box answers one request alike, and if not, how much it scatters; and how many
    rows that took. A request of several rows is repeated, where there is one."""
    request = max(requests[: len(requests) // 2 + 1], key=lambda one: len(one.rows))
    times, asked = REPEATS, 0
    answers: list[Array] = []
    while True:
        answers += [np.asarray(box.ask(request.rows), dtype=np.float64) for _ in range(times)]
        asked += times * len(request.rows)
        many = np.stack(answers).reshape(len(answers), -1)
        size = float(np.max(np.abs(many)))
        if np.max(np.ptp(many, axis=0)) <= shown.apart(size):
            return shown, asked
        if len(answers) > REPEATS:
            level = upper_level(many)
            return replace(shown, additive=level, repeatable=False), asked
        times = 4 * REPEATS  # the level of the noise to a fifth


def measure_spread(
    sides: Sides,
    requests: Sequence[Request],
    expected: Float[Array, "n out"],
    unit: float,
    rng: np.random.Generator,
) -> Float[Array, " n"]:
    """How far the answers of the reference move where nothing but rounding changes, relative to
    their scale: row by row for vectors, else at most."""
    if sides.kind == VECTORS:
        return _spread_of_vectors(sides.reference, requests, expected, unit, rng)
    moved = [_spread_of_batches(sides.reference, requests, expected)]
    if hasattr(sides.reference, "in_format"):
        exact = sides.reference.in_format("float64")
        answers = np.concatenate([exact.ask(request.rows) for request in requests])
        moved.append(measure_deviations(expected, answers.astype(np.float64)))
    return np.full(len(expected), float(np.max(moved)))


def _spread_of_vectors(
    reference: RowBox,
    requests: Sequence[Request],
    expected: Float[Array, "n out"],
    unit: float,
    rng: np.random.Generator,
) -> Float[Array, " n"]:
    spread = np.zeros(len(expected))
    rows = [np.asarray(row) for request in requests for row in request.rows]
    scales = measure_scales(expected)
    for place, row in enumerate(rows):
        shape = (DRAWS, *row.shape)
        near = row * (1.0 + unit * rng.standard_normal(shape))
        near = np.where(np.abs(near) > np.abs(row).max(), row, near)  # not out of the domain
        answers = np.asarray(reference.ask(list(near)), dtype=np.float64)
        moved = np.linalg.norm(answers - expected[place], axis=1)
        spread[place] = float(moved.max()) / scales[place]
    return spread


def _spread_of_batches(
    reference: RowBox, requests: Sequence[Request], expected: Float[Array, "n out"]
) -> Float[Array, " n"]:
    """Every row once more, in other company: alone where it was in a batch, else beside another.
    Where the reference is an endpoint, which may be paid for, a few of them."""
    from keyhole.oracles.embeddings import EmbeddingEndpoint

    most = 8 if isinstance(reference, EmbeddingEndpoint) else len(requests)
    moved, start, scales = np.zeros(len(expected)), 0, measure_scales(expected)
    beside = requests[0].rows[0]
    for number, request in enumerate(requests):
        stop = start + len(request.rows)
        if number < most:
            if len(request.rows) == 1:
                answers = reference.ask([request.rows[0], beside])[:1]
            else:
                answers = np.concatenate([reference.ask([row]) for row in request.rows])
            gap = np.linalg.norm(answers.astype(np.float64) - expected[start:stop], axis=1)
            moved[start:stop] = gap / scales[start:stop]
        start = stop
    return moved


def _settle_reading(sides: Sides, requests: Sequence[Request]) -> Sides:
    """Where the folder of the reference does not say how states become one vector: the way that
    fits the first answer best, which is said."""
    reading = getattr(sides.reference, "reading", None)
    if reading is None or reading.stated:
        return sides
    from keyhole.oracles.token_models import TokenModel, list_readings

    model = sides.reference
    assert isinstance(model, TokenModel)
    request = max(requests[:2], key=lambda one: len(one.rows))
    answered = np.asarray(sides.box.ask(request.rows), dtype=np.float64)
    numbers = [model.encode(r) if isinstance(r, str) else np.asarray(r) for r in request.rows]

    def distance(known: Any) -> float:
        answers = model.ask_as(numbers, known).astype(np.float64)
        if answers.shape != answered.shape:
            return np.inf
        return float(measure_deviations(answered, answers).max())

    best = min(list_readings(reading), key=distance)
    note = (
        f"The reference's folder does not say how one vector is made of a row: {best} fits the "
        "first answers best and was compared."
    )
    return replace(sides, reference=model.with_reading(best), notes=(*sides.notes, note))


def recognise_half(sides: Sides, requests: Sequence[Request], found: Compared) -> Compared:
    """The comparison with the tolerance of a 16-bit format, where the errors have its pattern."""
    reference = sides.reference
    if not hasattr(reference, "in_format") or sides.kind == VECTORS:
        return found
    errors = found.answered - found.expected
    for name in HALVES:
        rounded = reference.in_format(name, compute="float32")
        pattern = (
            np.concatenate([rounded.ask(r.rows) for r in requests]).astype(np.float64)
            - found.expected
        )
        sizes = np.linalg.norm(errors) * np.linalg.norm(pattern)
        likeness = float(np.sum(errors * pattern) / max(sizes, TINY))
        if likeness < FINGERPRINT and found.noise.format != name:
            continue
        engine = reference.in_format(name)
        answers = np.concatenate([engine.ask(r.rows) for r in requests]).astype(np.float64)
        honest = np.maximum(measure_deviations(answers, found.expected), TINY)
        # answers of engines in this format scatter about as these rows do
        logs = np.log(honest)
        limit = float(np.exp(logs.mean() + DETECTION * logs.std()))
        if measure_deviations(found.answered, found.expected).max() > limit:
            continue
        note = (
            f"The box computes in {name}: its errors have the pattern of weights rounded to it "
            f"(correlation {likeness:.2f}), and are no larger than those of an honest engine."
        )
        unit = NoiseModel(2.0 ** -dict(FORMATS)[name], format=name)
        return replace(
            found,
            allowed=np.full(len(found.allowed), limit),
            noise=unit,
            notes=(*found.notes, note),
        )
    return found


def show_row(row: Row, sides: Sides | None = None) -> Float[Array, "length d"]:
    """A row as the array that a counterexample holds: vectors, or a column of token numbers (of a
    text, those of the reference's tokenizer, or else its characters)."""
    if isinstance(row, str):
        encode = None if sides is None else getattr(sides.reference, "encode", None)
        numbers = encode(row) if encode is not None else [ord(letter) for letter in row]
        return np.asarray(numbers, dtype=np.float64)[:, None]
    array = np.asarray(row, dtype=np.float64)
    return array if array.ndim == 2 else array[:, None]


def verify_boxes(
    box: Any, reference: Any, *, queries: int | None = None, seed: int = 0, **options: Any
) -> Verdict:
    """The verdict of a comparison of two boxes on fresh queries.

    Args:
        box: What is in doubt: any target, a function on token numbers, an Oracle, a RowBox.
        reference: What it should be: any target.
        queries: Fresh ones, 59 unless stated.
        seed: The same seed asks the same queries.
        **options: Of an embedding endpoint (dialect, model, request, answer, timeout, …).

    Returns:
        A verdict whose `bound` says what was compared, what follows, and what does not.
    """
    count = FRESH if queries is None else whole_number("queries", queries, 1)
    rng = random_stream(whole_number("seed", seed, 0), STREAM)
    with open_sides(box, reference, **options) as sides:
        return judge_boxes(sides, draw_requests(sides, count, rng), rng)


def judge_boxes(sides: Sides, requests: Sequence[Request], rng: np.random.Generator) -> Verdict:
    """Both sides asked, and the verdict."""
    try:
        found = compare(sides, requests, rng)
    except OtherShape as error:
        return state_other_shape(error)
    return make_verdict(found, sides)


def state_other_shape(error: OtherShape) -> Verdict:
    """The verdict where the two answer with different numbers of numbers."""
    return Verdict(False, 1, 0, np.inf, 0.0, f"{error}.".capitalize(), error.example)


SIGNED = "box that was signed"
KINDS = {NUMBERS: "rows of token numbers", TEXT: "texts", VECTORS: "sequences of vectors"}


def make_verdict(found: Compared, sides: Sides | None = None, what: str = "reference") -> Verdict:
    """What the comparison allows one to say."""
    count = len(found.rows)
    worst = float(np.max(found.deviations / np.maximum(found.allowed, TINY)))
    tolerance = float(np.median(found.allowed))
    example = None
    if found.bad.any():
        place = int(np.argmax(found.deviations / np.maximum(found.allowed, TINY)))
        row, reason = found.rows[place], found.reasons[place]
        if isinstance(row, str):
            shown = row if len(row) <= 60 else f"{row[:60]}…"
            reason = f"{reason}: {shown!r}"
        example = Counterexample(
            show_row(row, sides), found.answered[place], found.expected[place], reason
        )
    numbers = found.expected
    scatter = float(np.sqrt(np.mean(np.var(numbers, axis=0)) * numbers.shape[1]))
    ordinary = float(np.median(measure_scales(numbers)))
    hidden = example is None and not found.noise.repeatable and tolerance * ordinary > scatter
    if example is not None:
        bound = state_other_box(found, what)
    elif hidden:
        bound = state_hidden(count)
    else:
        bound = state_same_box(found, what)
    return Verdict(
        agrees=example is None and not hidden,
        queries=count,
        replayed=0,
        worst=worst,
        tolerance=tolerance,
        bound=" ".join([bound, *found.notes]),
        counterexample=example,
        precision=found.noise.relative,
        format=found.noise.format,
        difference=float(found.deviations.max()),
        absolute=float(np.abs(found.answered - found.expected).max()),
        format_before=found.format_before,
    )


def state_same_box(found: Compared, what: str) -> str:
    """What was compared, what follows with which confidence, and what does not."""
    count = len(found.rows)
    share = share_conceded(count)
    return (
        f"{describe_queries(found, found.reasons, what)} were answered as the {what} answers them, "
        f"to {found.deviations.max():.1e} of an answer's size (allowed: "
        f"{float(np.median(found.allowed)):.1e}). With {CONFIDENCE:.0%} confidence at most "
        f"{share:.0%} of ordinary queries are answered differently. Not shown: smaller "
        "differences, and queries of other kinds."
    )


def state_other_box(found: Compared, what: str) -> str:
    """How many answers differ, on which kinds of queries, and by how much."""
    kinds = [reason for reason, bad in zip(found.reasons, found.bad, strict=True) if bad]
    return (
        f"{int(found.bad.sum())} of {describe_queries(found, kinds, what)} are answered otherwise "
        f"than the {what} answers them, by up to {found.deviations.max():.1e} of an answer's size "
        f"(allowed: {float(np.median(found.allowed)):.1e})."
    )


def describe_queries(found: Compared, reasons: Sequence[str], what: str) -> str:
    """How many queries of which kinds."""
    kinds = list(dict.fromkeys(reasons))
    most = 6  # that anyone reads in a sentence
    named = "; ".join(kinds[:most]) + (f"; {len(kinds) - most} more" if len(kinds) > most else "")
    fresh = "queries" if what == SIGNED else "fresh queries"
    return f"{len(found.rows)} {fresh} ({KINDS[found.kind]}: {named})"
