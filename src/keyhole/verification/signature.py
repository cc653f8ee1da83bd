"""A signature of behaviour: queries, the answers of a box, and how far an honest copy may be off.

Whoever has the file can check later, without the box that was signed, whether another one still
behaves so. Queries come from one seed, which is in the file: they can be drawn again, so that
nobody chose the ones that suit him. The noise is measured when it is signed: the same request
again, and every row in other company.

Evidence is the other half: a verdict with the queries, both answers, the seed and the digests, so
that a third party can check it without asking anybody (`check_evidence`).
"""

import hashlib
import platform
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from keyhole import __version__
from keyhole.arrays import Array, Float, Int, random_stream, whole_number
from keyhole.errors import FileFormatError, InvalidArgument
from keyhole.oracles.base import Domain, Spec
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.rows import NUMBERS, VECTORS
from keyhole.results import Verdict, plain
from keyhole.verification.language_models import (
    Speaker,
    Spoken,
    SpokenCompared,
    compare_spoken,
    draw_prompts,
    make_spoken_verdict,
    open_predictor,
)
from keyhole.verification.records import (
    holds_record,
    pack_array,
    pack_row,
    read_record,
    unpack_array,
    unpack_row,
    write_record,
)
from keyhole.verification.reference import (
    FRESH,
    SIGNED,
    STREAM,
    Compared,
    Expected,
    Sides,
    compare,
    draw_from,
    judge_answers,
    make_verdict,
    measure_box_noise,
    measure_spread,
    open_one,
    open_sides,
    read_format,
)
from keyhole.verification.requests import RowRequest
from keyhole.verification.spoken_evidence import PromptPlan, describe_spoken, judge_again
from keyhole.verification.spoken_signature import PROMPTS, Talk, compare_talk, hear, open_talker

SIGNATURE, EVIDENCE = "keyhole-signature-1", "keyhole-evidence-1"
TALK = ("told", "sampled")
DAMAGED = (KeyError, TypeError, ValueError, AttributeError, IndexError)


@dataclass(frozen=True)
class Plan:
    """What queries are drawn from: kind, seed, number, and what the box accepts."""

    kind: str  # "numbers", "text" or "vectors"; "prompts" of a language model
    seed: int
    queries: int
    tokens: int = 0
    longest: int = 0
    reserved: tuple[int, ...] = ()
    width: int = 0
    domain: tuple[tuple[str, float], ...] = ()  # of vectors, what is stated of it

    @classmethod
    def of(cls, sides: Sides, seed: int, queries: int) -> "Plan":
        if sides.kind == VECTORS:
            assert sides.oracle is not None
            spec = sides.oracle.spec
            if spec.domain.vocabulary is not None:
                raise InvalidArgument("a box with a vocabulary of vectors cannot be signed")
            names = ("max_length", "max_norm", "low", "high", "sphere")
            stated = {name: getattr(spec.domain, name) for name in names}
            told = tuple((name, value) for name, value in stated.items() if value is not None)
            return cls(sides.kind, seed, queries, width=spec.width, domain=told)
        tokens, longest, reserved = sides.limits()
        return cls(sides.kind, seed, queries, tokens, longest, tuple(sorted(reserved)))

    def draw(self) -> list[RowRequest]:
        """The queries: the same plan draws the same ones."""
        rng = random_stream(self.seed, STREAM)
        if self.kind == PROMPTS:
            prompts = draw_prompts(self.queries, self.tokens, self.longest or None, rng)
            return [RowRequest((prompt,), "an ordinary prompt") for prompt in prompts]
        if self.kind == VECTORS:
            domain: dict[str, Any] = dict(self.domain)
            if "max_length" in domain:
                domain["max_length"] = int(domain["max_length"])
            return draw_from(self.queries, rng, spec=Spec(self.width, domain=Domain(**domain)))
        tokens = self.tokens if self.kind == NUMBERS else 0
        return draw_from(
            self.queries,
            rng,
            tokens=tokens,
            longest=self.longest,
            reserved=frozenset(self.reserved),
        )


def commit_to(seed: int) -> str:
    """What may be shown before anything is asked: it fixes the seed and does not reveal it."""
    return hashlib.sha256(f"keyhole seed {seed}".encode()).hexdigest()


@dataclass(frozen=True, eq=False)
class Signature:
    """What a box answered when it was signed.

    Attributes:
        identity: Of the box.
        plan: How the requests were drawn.
        requests: Those that were sent.
        answers: One row per request.
        spread: What other company and last digits do to an answer, relative to its size.
        noise: Of the box.
        made: When, in ISO format.
        versions: Of the software that made it.
        digest: SHA-256 of the file.
        told: Of a language model: the tokens whose log-probabilities the answers are.
        sampled: Of a language model: the tokens that it chose.
    """

    identity: str
    plan: Plan
    requests: tuple[RowRequest, ...]
    answers: Float[Array, "n out"]
    spread: Float[Array, " n"]
    noise: NoiseModel
    made: str
    versions: tuple[tuple[str, str], ...]
    digest: str = ""
    told: Int[Array, "n out"] | None = None
    sampled: Int[Array, " n"] | None = None

    @property
    def talk(self) -> Talk | None:
        """What a language model told; None of any other box."""
        if self.told is None or self.sampled is None:
            return None
        return Talk(Spoken(self.sampled, self.told, self.answers), self.noise)

    def __str__(self) -> str:
        return (
            f"Signature of {self.identity}: {len(self.answers)} queries ({self.plan.kind}), made "
            f"{self.made}, sha256 {self.digest}"
        )

    def expect(self) -> Expected:
        """The answers as what another box is compared with."""
        return Expected(self.answers, self.spread, self.noise, self.plan.kind)


def list_versions() -> tuple[tuple[str, str], ...]:
    """What took part."""
    found = [("keyhole", __version__), ("python", platform.python_version())]
    for name in ("numpy", "torch", "transformers", "onnxruntime"):
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)


def sign(
    box: Any, path: str | Path, *, queries: int = FRESH, seed: int | None = None, **options: Any
) -> Signature:
    """Signs the behaviour of a box: asks queries and writes them down with the answers.

    Args:
        box: Any target: an Oracle, a module of torch, `hf:FOLDER`, an address, a keyhole model,
            a function on token numbers with its vocabulary (`CallableRows`).
        path: The file to write, as in "model.keyhole", readable by its owner alone.
        queries: How many; 59 that agree later mean that at most 5% of ordinary queries are
            answered differently, with 95% confidence.
        seed: Draws the queries; a random one unless stated. It is in the file.
        **options: Of an embedding endpoint (dialect, model, tokens, request, answer, …).

    Returns:
        The signature. `keyhole.verify(other, path)` compares another box with it.

    Raises:
        InvalidArgument: Something that cannot be asked, or an option that it does not have.
        OracleError: The box did not answer.

    Example:
        >>> import numpy as np, tempfile, keyhole
        >>> from keyhole.models.random import attention
        >>> model = attention(np.random.default_rng(0), 4)
        >>> path = tempfile.mkdtemp() + "/model.keyhole"
        >>> len(keyhole.sign(model, path).answers), keyhole.verify(model, path).agrees
        (59, True)
    """
    count = whole_number("queries", queries, 1)
    number = secrets.randbits(62) if seed is None else whole_number("seed", seed, 0)
    speaker = open_talker(box, None, options)
    if speaker is not None:
        return _sign_talk(box, speaker, path, count, number)
    with open_one(box, **options) as sides:
        check_reading(sides.box)
        plan = Plan.of(sides, number, count)
        requests = plan.draw()
        raw = np.concatenate([np.asarray(sides.box.ask(one.rows)) for one in requests])
        shown, answers = read_format(raw), raw.astype(np.float64)
        noise, _ = measure_box_noise(sides.box, requests, shown)
        rng = random_stream(number, "other company")
        spread = measure_spread(sides, requests, answers, shown.relative, rng)
        if not noise.repeatable:  # what scatters by itself is in the noise, once
            spread = np.zeros_like(spread)
        identity = sides.box.spec.identity
    made = datetime.now(UTC).isoformat(timespec="seconds")
    signature = Signature(
        identity, plan, tuple(requests), answers, spread, noise, made, list_versions()
    )
    return replace(signature, digest=write_record(path, SIGNATURE, _describe(signature)))


def check_reading(box: Any) -> None:
    """Raises where a folder does not say what its model answers with: a guess is not signed."""
    reading = getattr(box, "reading", None)
    if reading is not None and not reading.stated:
        raise InvalidArgument(
            "this folder does not say how one vector is made of a row (it has no modules.json): "
            "sign the endpoint that serves it, or a function that pools as it should"
        )


def _sign_talk(box: Any, speaker: Speaker, path: str | Path, count: int, seed: int) -> Signature:
    """The signature of a language model: what it told to ordinary prompts."""
    domain = speaker.oracle.spec.domain
    plan = Plan(PROMPTS, seed, count, speaker.reference.tokens, domain.max_length or 0)
    requests = plan.draw()
    try:
        talk = hear(speaker, [request.rows[0] for request in requests])
    finally:
        if speaker.oracle is not box:
            speaker.oracle.close()
    signature = Signature(
        speaker.oracle.spec.identity,
        plan,
        tuple(requests),
        talk.spoken.logprobs,
        np.zeros(len(requests)),
        talk.noise,
        datetime.now(UTC).isoformat(timespec="seconds"),
        list_versions(),
        told=talk.spoken.tokens,
        sampled=talk.spoken.sampled,
    )
    return replace(signature, digest=write_record(path, SIGNATURE, _describe(signature)))


def compare_talk_with_signature(
    box: Any, signature: Signature, queries: int | None, seed: int, **options: Any
) -> SpokenCompared:
    """A language model beside what was signed, on prompts of the signature."""
    requests, places = choose_requests(signature, queries, seed)
    talk = signature.talk
    assert talk is not None
    speaker = open_talker(box, signature.plan.tokens, options)
    if speaker is None:
        raise InvalidArgument("a language model was signed, and the box is none")
    try:
        prompts = [request.rows[0] for request in requests]
        return compare_talk(speaker, prompts, talk.at(places), signature.made)
    finally:
        if speaker.oracle is not box:
            speaker.oracle.close()


def _describe(signature: Signature) -> dict[str, Any]:
    """The signature as JSON."""
    return {
        "identity": signature.identity,
        "plan": _describe_plan(signature.plan),
        "commitment": commit_to(signature.plan.seed),
        "requests": _describe_requests(signature.requests),
        "answers": pack_array(signature.answers),
        "spread": pack_array(signature.spread),
        "noise": asdict(signature.noise),
        "made": signature.made,
        "versions": dict(signature.versions),
        "told": None if signature.told is None else pack_array(signature.told),
        "sampled": None if signature.sampled is None else pack_array(signature.sampled),
    }


def _describe_plan(plan: Plan) -> dict[str, Any]:
    return {**asdict(plan), "reserved": list(plan.reserved), "domain": dict(plan.domain)}


def _describe_requests(requests: Sequence[RowRequest]) -> list[dict[str, Any]]:
    return [{"rows": [pack_row(r) for r in one.rows], "reason": one.reason} for one in requests]


def _read_plan(body: dict[str, Any]) -> Plan:
    known = dict(body)
    known["reserved"] = tuple(int(token) for token in known["reserved"])
    known["domain"] = tuple((str(k), float(v)) for k, v in dict(known["domain"]).items())
    return Plan(**known)


def _read_requests(body: list[Any]) -> tuple[RowRequest, ...]:
    return tuple(
        RowRequest(tuple(unpack_row(row) for row in one["rows"]), str(one["reason"]))
        for one in body
    )


def is_signature(path: Any) -> bool:
    """Whether a path names a file of a signature."""
    return isinstance(path, (str, Path)) and holds_record(path, SIGNATURE)


def load_signature(path: str | Path) -> Signature:
    """The signature in a file; a FileFormatError where a byte was altered, or where its queries
    are not those of its seed (drawn by the same version)."""
    body, digest = read_record(path, SIGNATURE)
    try:
        signature = Signature(
            str(body["identity"]),
            _read_plan(body["plan"]),
            _read_requests(body["requests"]),
            unpack_array(body["answers"]),
            unpack_array(body["spread"]),
            NoiseModel(**body["noise"]),
            str(body["made"]),
            tuple((str(k), str(v)) for k, v in body["versions"].items()),
            digest,
            *(None if body[name] is None else unpack_array(body[name]) for name in TALK),
        )
        rows = sum(len(request.rows) for request in signature.requests)
        if not rows == len(signature.answers) == len(signature.spread):
            raise ValueError("queries and answers differ in number")
        if body["commitment"] != commit_to(signature.plan.seed):
            raise ValueError("the seed is not the one that was committed to")
    except DAMAGED as error:
        raise FileFormatError(f"{path} holds no signature: {error}") from error
    if not drawn_from_seed(signature.plan, signature.requests, dict(signature.versions)):
        raise FileFormatError(f"{path}: the queries are not those that its seed draws")
    return signature


def same_versions(versions: dict[str, str]) -> bool:
    """Whether what draws queries from a seed is what it was."""
    now = {"keyhole": __version__, "numpy": metadata.version("numpy")}
    return all(versions.get(name) == version for name, version in now.items())


def drawn_from_seed(plan: Plan, requests: Sequence[RowRequest], versions: dict[str, str]) -> bool:
    """Whether these are the queries of the plan. Another version may draw others from the same
    seed: then nothing is said, and True returned."""
    if not same_versions(versions):
        return True
    drawn = plan.draw()
    if len(drawn) != len(requests):
        return False
    return all(
        one.reason == two.reason
        and len(one.rows) == len(two.rows)
        and all(np.array_equal(a, b) for a, b in zip(one.rows, two.rows, strict=True))
        for one, two in zip(drawn, requests, strict=True)
    )


def choose_requests(
    signature: Signature, queries: int | None, seed: int
) -> tuple[list[RowRequest], Array]:
    """All requests of a signature, or some of them that hold about so many queries; and the places
    of their rows among the answers."""
    sizes = [len(request.rows) for request in signature.requests]
    starts = np.concatenate([[0], np.cumsum(sizes)])
    order = list(range(len(sizes)))
    if queries is not None and queries < starts[-1]:
        random_stream(seed, "of a signature").shuffle(order)
        total = np.cumsum([sizes[number] for number in order])
        order = sorted(order[: int(np.searchsorted(total, queries)) + 1])
    places = [np.arange(starts[number], starts[number + 1]) for number in order]
    return [signature.requests[number] for number in order], np.concatenate(places)


def compare_with_signature(
    box: Any, signature: Signature, queries: int | None, seed: int, **options: Any
) -> Compared:
    """The box beside what was signed, on the queries of the signature."""
    requests, places = choose_requests(signature, queries, seed)
    plan = signature.plan
    known = {"tokens": plan.tokens or None, "max_length": plan.longest or None}
    with open_one(box, kind=plan.kind, width=plan.width or None, **known, **options) as sides:
        raw = [np.asarray(sides.box.ask(request.rows)) for request in requests]
        answered = np.concatenate(raw)
        if answered.shape[1:] != signature.answers.shape[1:]:
            raise InvalidArgument(
                f"the box answers with {answered.shape[1]} numbers, the one that was signed with "
                f"{signature.answers.shape[1]}"
            )
        whole = signature.expect()
        expected = replace(whole, answers=whole.answers[places], spread=whole.spread[places])
        return judge_answers(
            sides.box, requests, expected, answered.astype(np.float64), read_format(answered)
        )


def verify_signature(
    box: Any, signature: Signature, queries: int | None = None, seed: int = 0, **options: Any
) -> Verdict:
    """Whether a box still answers as the one that was signed."""
    if signature.talk is not None:
        spoken = compare_talk_with_signature(box, signature, queries, seed, **options)
        return make_spoken_verdict(spoken)
    found = compare_with_signature(box, signature, queries, seed, **options)
    verdict = make_verdict(found, what=SIGNED)
    days = f"The queries are those of the signature of {signature.made[:10]}: whoever has read it "
    return replace(verdict, bound=f"{verdict.bound} {days}could prepare for them.")


@dataclass(frozen=True)
class Evidence:
    """A verdict that anybody can check: what `check_evidence` found in a file.

    Attributes:
        verdict: As the file states it.
        sound: Whether digest, seed, queries, deviations and verdict fit together.
        reasons: What was checked, or what does not fit.
        digest: SHA-256 of the file.
    """

    verdict: Verdict
    sound: bool
    reasons: tuple[str, ...]
    digest: str

    def __str__(self) -> str:
        word = "The evidence is sound" if self.sound else "The evidence does NOT fit together"
        return f"{word}: {'; '.join(self.reasons)}. {self.verdict}"


def verify_with_evidence(
    box: Any,
    reference: Any,
    path: str | Path,
    *,
    queries: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Verdict:
    """The same comparison as `verify` of two boxes, or of a box with a signature, written down so
    that a third party can check it."""
    signed = load_signature(reference) if is_signature(reference) else reference
    if isinstance(signed, Signature) and signed.talk is not None:
        heard = compare_talk_with_signature(box, signed, queries, seed, **options)
        told = signed.talk.at(choose_requests(signed, queries, seed)[1]).spoken
        return _write_spoken(path, heard, PromptPlan(signed.plan.seed), signed.digest, told)
    if isinstance(signed, Signature):
        found = compare_with_signature(box, signed, queries, seed, **options)
        requests, _ = choose_requests(signed, queries, seed)
        plan, what, known = signed.plan, SIGNED, signed.digest
        verdict = make_verdict(found, what=what)
    else:
        count = FRESH if queries is None else whole_number("queries", queries, 1)
        with open_sides(box, signed, **options) as sides:
            plan = Plan.of(sides, whole_number("seed", seed, 0), count)
            requests, what, known = plan.draw(), "reference", sides.reference.spec.identity
            found = compare(sides, requests, random_stream(seed, "other company"))
            verdict = make_verdict(found, sides, what)
    write_record(
        path,
        EVIDENCE,
        {
            "reference": known,
            "what": what,
            "plan": _describe_plan(plan),
            "commitment": commit_to(plan.seed),
            "whole": not isinstance(signed, Signature),
            "requests": _describe_requests(requests),
            "expected": pack_array(found.expected),
            "answered": pack_array(found.answered),
            "allowed": pack_array(found.allowed),
            "noise": asdict(found.noise),
            "format_before": found.format_before,
            "notes": list(found.notes),
            "verdict": plain(vars(verdict)),
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": dict(list_versions()),
        },
    )
    return verdict


def speak_with_evidence(
    box: Any,
    reference: Any,
    path: str | Path,
    *,
    queries: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Verdict:
    """The verdict on a language model beside its reference, written down in the same way."""
    count = FRESH if queries is None else whole_number("queries", queries, 1)
    predictor = open_predictor(reference)
    heard = compare_spoken(box, predictor, count, whole_number("seed", seed, 0), options)
    plan = PromptPlan(seed, len(heard.prompts), heard.expected.shape[1], heard.longest)
    return _write_spoken(path, heard, plan, predictor.identity)


def _write_spoken(
    path: str | Path,
    found: SpokenCompared,
    plan: PromptPlan,
    reference: str,
    signed: Spoken | None = None,
) -> Verdict:
    verdict = make_spoken_verdict(found)
    write_record(
        path,
        EVIDENCE,
        {
            "reference": reference,
            "spoken": describe_spoken(found, signed),
            "plan": asdict(plan),
            "commitment": commit_to(plan.seed),
            "verdict": plain(vars(verdict)),
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": dict(list_versions()),
        },
    )
    return verdict


def _check_spoken(body: dict[str, Any]) -> tuple[Verdict, bool]:
    """The verdict that follows from what a language model told, and whether the seed draws its
    prompts."""
    found, plan = judge_again(body["spoken"]), PromptPlan(**body["plan"])
    drawn = found.what == SIGNED or not same_versions(dict(body["versions"]))
    return make_spoken_verdict(found), drawn or plan.draws(found.prompts, found.ordinary)


def _check_rows(body: dict[str, Any]) -> tuple[Verdict, bool]:
    """The same for rows."""
    plan, requests = _read_plan(body["plan"]), _read_requests(body["requests"])
    found = Compared(
        rows=tuple(row for request in requests for row in request.rows),
        reasons=tuple(request.reason for request in requests for _ in request.rows),
        expected=unpack_array(body["expected"]),
        answered=unpack_array(body["answered"]),
        allowed=unpack_array(body["allowed"]),
        noise=NoiseModel(**body["noise"]),
        kind=str(body["plan"]["kind"]),
        format_before=str(body["format_before"]),
        notes=tuple(str(note) for note in body["notes"]),
    )
    counts = {len(found.rows), len(found.expected), len(found.answered), len(found.allowed)}
    if len(counts) != 1:
        raise ValueError("queries and answers differ in number")
    verdict = make_verdict(found, what=str(body["what"]))
    return verdict, not body["whole"] or drawn_from_seed(plan, requests, dict(body["versions"]))


def check_evidence(path: str | Path) -> Evidence:
    """Checks a verdict from its file alone.

    The digest, that the seed is the one committed to and draws these queries, and that these
    answers and tolerances give this verdict.

    Args:
        path: The file that `keyhole verify --evidence` wrote.

    Returns:
        The evidence: queries, answers, tolerances and the verdict that follows from them.

    Raises:
        FileFormatError: The file was altered, or is none of evidence.

    Example:
        >>> check_evidence("nothing.json")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        keyhole.errors.FileFormatError: ...
    """
    body, digest = read_record(path, EVIDENCE)
    try:
        verdict, drawn = _check_spoken(body) if "spoken" in body else _check_rows(body)
        told = dict(body["verdict"])
        committed = body["commitment"] == commit_to(int(body["plan"]["seed"]))
    except DAMAGED as error:
        raise FileFormatError(f"{path} holds no evidence: {error}") from error
    checks = {
        "the digest": True,
        "the seed is the one committed to": committed,
        "the seed draws these queries": drawn,
        "the verdict follows from the answers": told.get("agrees") == verdict.agrees
        and told.get("queries") == verdict.queries,
    }
    wrong = tuple(f"not so: {name}" for name, good in checks.items() if not good)
    return Evidence(verdict, not wrong, wrong or tuple(checks), digest)
