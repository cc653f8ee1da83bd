"""Still the same, night after night? A few fresh queries each time, and one test over all nights.

The test is `sequential.Monitor`: it may be looked at every night, and the probability that it ever
raises an alarm though nothing changed is at most alpha, whatever the number of nights. A night is
one call. Its queries are drawn from a secret of the state file and from the number of the night, so
that nobody can prepare for them. A night on which the box fails to answer is no evidence, and is
not counted. After an alarm it stays an alarm until it is armed again.
"""

import hashlib
import json
import secrets
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import digest, random_stream, whole_number
from keyhole.errors import FileFormatError, InvalidArgument
from keyhole.models.base import takes_numbers
from keyhole.models.files import replacing
from keyhole.oracles.noise import REJECTION
from keyhole.oracles.open import name_of_box, open_oracle
from keyhole.oracles.rows import OracleRows
from keyhole.results import Recovery, Verdict
from keyhole.schema import WrongType, parse_json, read_record
from keyhole.verification.dispatch import compare_target, read_reference
from keyhole.verification.reference import (
    STREAM,
    Expected,
    Sides,
    ask_both,
    draw_requests,
    judge_answers,
    make_verdict,
    measure_scales,
    open_sides,
)
from keyhole.verification.sequential import Monitor, Night
from keyhole.verification.signature import Signature
from keyhole.verification.tolerance import allow
from keyhole.verification.verify import verify

FORMAT = "keyhole-watch-1"


@dataclass(frozen=True)
class NightRecord:
    """One night as it is kept."""

    when: str
    asked: int
    bad: int  # answers beyond their tolerance
    worst: float  # largest deviation, in units of its tolerance
    tolerance: float
    e_value: float  # after this night


@dataclass(frozen=True)
class WatchState:
    """What is kept between two nights."""

    format: str
    reference: str  # names it
    secret: str  # draws the queries
    benign: float
    alpha: float
    independent: bool
    armed: int = 0  # nights before the test was armed
    nights: tuple[NightRecord, ...] = ()


@dataclass(frozen=True, eq=False)
class Watch:
    """What is known after a night.

    Attributes:
        alarm: Whether the box changed.
        since: When the change most likely came, where there is an alarm.
        e_value: Alarm from 1 / alpha on.
        nights: Counted since the test was armed.
        verdict: Of this night alone.
        asked: Queries of this night.
        bad: Of these, answers beyond tolerance.
        alpha: Probability of a false alarm, ever.
        first_alarm: The night on which it was raised.
        history: All nights so far.
    """

    alarm: bool
    since: str | None
    e_value: float
    nights: int
    verdict: Verdict
    asked: int
    bad: int
    alpha: float
    first_alarm: str | None = None
    history: tuple[NightRecord, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        tonight = f"{self.bad} of {self.asked} answers beyond tolerance tonight"
        level = f"e-value {self.e_value:.3g}, alarm from {1.0 / self.alpha:.3g} on"
        if self.alarm:
            return (
                f"ALARM: the box changed, most likely on {self.since} (night {self.nights} of the "
                f"watch; {tonight}; {level}). If nothing had changed, an alarm would ever be "
                f"raised with a probability of at most {self.alpha:g}."
            )
        alone = "" if self.verdict.agrees else " Tonight alone the box differs: look into it."
        return (
            f"No alarm after {self.nights} night(s): {tonight}; {level}.{alone} This does not show "
            "that nothing changed: small changes take many nights."
        )


def watch(
    box: Any,
    reference: Any,
    state: str | Path,
    *,
    queries: int = 30,
    alpha: float = 0.01,
    benign: float = 1e-3,
    independent: bool = False,
    rearm: bool = False,
    **options: Any,
) -> Watch:
    """One night of a watch: asks fresh queries, and adds what they show to what is known.

    Args:
        box: What is watched: any target.
        reference: What it should be: a run, a saved model, any target, or a signature (of which
            some queries are asked again: they are then not fresh).
        state: A JSON file that keeps the watch between two nights, made on the first one,
            readable by its owner alone.
        queries: Of this night.
        alpha: Probability that an alarm is ever raised though nothing changed.
        benign: Share of answers that may be beyond tolerance though nothing changed, at most.
        independent: Whether benign failures are known not to come in bad nights: changes are then
            found about a night sooner, and bad nights raise false alarms.
        rearm: Begin anew, after an alarm was looked into.
        **options: Of an embedding endpoint.

    Returns:
        The alarm, since when, the e-value and the number of nights; `verdict` is of this night
        alone and no test by itself.

    Raises:
        OracleError: The box failed to answer: the night is not counted.
        InvalidArgument: The state belongs to another reference or to other settings.

    Example:
        >>> import numpy as np, tempfile, keyhole
        >>> from keyhole.models.random import attention
        >>> model = attention(np.random.default_rng(0), 4)
        >>> path = tempfile.mkdtemp() + "/watch.json"
        >>> keyhole.watch(lambda tokens: model(tokens), model, path).alarm
        False
    """
    count = whole_number("queries", queries, 1)
    known = read_reference(reference)
    name = name_reference(known)
    monitor = Monitor(benign, alpha, independent)
    kept = read_state(state, name, monitor)
    if rearm:
        kept = replace(kept, armed=len(kept.nights))
    seed = draw_seed(kept.secret, len(kept.nights))
    verdict, asked, bad = ask_night(box, known, count, seed, options)
    when = datetime.now(UTC).isoformat(timespec="seconds")
    record = NightRecord(when, asked, bad, float(verdict.worst), verdict.tolerance, 0.0)
    kept = replace(kept, nights=(*kept.nights, record))
    curve = follow(kept, monitor)
    last = replace(record, e_value=float(curve[-1]))
    kept = replace(kept, nights=(*kept.nights[:-1], last))
    write_state(state, kept)
    return judge(kept, monitor, verdict)


def follow(state: WatchState, monitor: Monitor) -> Any:
    """E after each night since the test was armed."""
    return monitor.follow([Night(one.asked, one.bad) for one in state.nights[state.armed :]])


def judge(state: WatchState, monitor: Monitor, verdict: Verdict) -> Watch:
    """What the nights since the test was armed allow one to say."""
    armed = state.nights[state.armed :]
    curve = follow(state, monitor)
    crossed = np.flatnonzero(curve >= 1.0 / monitor.alpha)
    alarm, since, first = bool(len(crossed)), None, None
    if alarm:
        first = int(crossed[0])
        before = [Night(one.asked, one.bad) for one in armed[: first + 1]]
        since = armed[monitor.find_start(before) - 1].when
    last = armed[-1]
    return Watch(
        alarm,
        since,
        float(curve[-1]),
        len(armed),
        verdict,
        last.asked,
        last.bad,
        monitor.alpha,
        None if first is None else armed[first].when,
        state.nights,
    )


def draw_seed(secret: str, night: int) -> int:
    """The seed of a night, which nobody knows who does not have the secret."""
    return int.from_bytes(hashlib.sha256(f"{secret} {night}".encode()).digest()[:7], "big")


def name_reference(reference: Any) -> str:
    """What a state file knows its reference by."""
    if isinstance(reference, Recovery):
        reference = reference.model
    if isinstance(reference, Signature):
        return f"signature {reference.digest}"
    if hasattr(reference, "to_arrays"):
        return f"{type(reference).__name__} {digest(*reference.to_arrays().values()).hex()}"
    if isinstance(reference, str):
        return reference.split("?")[0]
    identity = getattr(getattr(reference, "spec", reference), "identity", None)
    return str(identity) if identity is not None else name_of_box(reference)


def ask_night(
    box: Any, reference: Any, queries: int, seed: int, options: dict[str, Any]
) -> tuple[Verdict, int, int]:
    """The verdict of one night, how many answers were compared, and how many are beyond their
    tolerance."""
    found = compare_target(box, reference, queries, seed, **options)
    if found is not None:
        return found
    if isinstance(reference, Recovery):
        model, errors = reference.model, reference.errors
    else:
        model, errors = reference, None
    if model is None:
        raise InvalidArgument("this run ended without a model")
    if not hasattr(model, "to_arrays") or takes_numbers(model) or hasattr(model, "margin"):
        verdict = verify(box, reference, queries=queries, seed=seed)
        # how many answers differ is not known: at least one
        return verdict, queries, int(not verdict.agrees)
    return _ask_model(box, model, errors, queries, seed)


def _ask_model(
    box: Any, model: Any, errors: Any, queries: int, seed: int
) -> tuple[Verdict, int, int]:
    """A box of vectors beside a model with its error bars."""
    rng = random_stream(seed, STREAM)
    with open_sides(box, open_oracle(model)) as sides:
        requests = draw_requests(sides, queries, rng)
        answered, expected, (shown, _) = ask_both(sides, requests)
        spread = _spread_of_model(model, errors, sides, requests, expected, shown, rng)
        known = Expected(expected, spread, shown, sides.kind)
        found = judge_answers(sides.box, requests, known, answered, shown)
        return make_verdict(found, sides, "model"), len(found.rows), int(found.bad.sum())


def _spread_of_model(
    model: Any,
    errors: Any,
    sides: Sides,
    requests: Any,
    expected: Any,
    shown: Any,
    rng: np.random.Generator,
) -> Any:
    """What rounding and error bars allow each answer to be off, in units of REJECTION."""
    assert isinstance(sides.reference, OracleRows)
    rows = [row for request in requests for row in request.rows]
    tokens = [np.asarray(row, dtype=np.float64)[None] for row in rows]
    limits = allow(model, errors, tokens, shown, rng)
    sizes = np.array([np.linalg.norm(np.asarray(limit)) for limit in limits])
    return sizes / measure_scales(expected) / REJECTION


def read_state(path: str | Path, reference: str, monitor: Monitor) -> WatchState:
    """The state in a file, or a new one; an error where it belongs to something else."""
    path = Path(path)
    if not path.exists():
        return WatchState(
            FORMAT,
            reference,
            secrets.token_hex(16),
            monitor.benign,
            monitor.alpha,
            monitor.independent,
        )
    try:
        state = read_record(WatchState, parse_json(path.read_text("utf-8")), "the watch")
        if state.format != FORMAT or not 0 <= state.armed <= len(state.nights):
            raise WrongType(f"format {state.format!r}, armed after {state.armed}")
    except (OSError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} is no state of a watch: {error}") from error
    if state.reference != reference:
        raise InvalidArgument(
            f"{path} watches {state.reference}, not {reference}: name another file with state= "
            "(--state)"
        )
    settings = (state.benign, state.alpha, state.independent)
    if settings != (monitor.benign, monitor.alpha, monitor.independent):
        raise InvalidArgument(
            f"{path} was begun with benign={state.benign:g}, alpha={state.alpha:g}, "
            f"independent={state.independent}: what they promise holds only if they stay. Begin "
            "another file with state= (--state)"
        )
    return state


def write_state(path: str | Path, state: WatchState) -> None:
    """Writes the state, whole or not at all."""
    path = Path(path)
    with replacing(path) as temporary:
        body = asdict(state)
        for night in body["nights"]:
            night["worst"] = night["worst"] if np.isfinite(night["worst"]) else None
        temporary.write_text(json.dumps(body, indent=1) + "\n", "utf-8")
