"""What a language model's interface gives away of its output layer, for how many questions and how
much money.

Statement.  A model at hand is put behind six interfaces, or an endpoint is taken as it is. For each
            interface three levels are told: the hidden width, the output matrix up to a linear map
            (its space), and up to a rotation (lengths and angles of the tokens' rows).
Questions.  The model itself is asked first: width, space, geometry. Then each interface is
            attacked for real, on as many tokens as show the width; where that would take more than
            `most` questions, the price is computed and said to be.
Algebra.    `OutputLayerLearner` on what the readers make of the interface. Prices: 1.2 r + 1
            prompts show a width r; the space takes them for all tokens; the geometry takes 1.35
            r (r + 3) / 2 prompts, each on the 1.2 r tokens of a skeleton.
When it fails. An interface that tells K < r log-probabilities and takes no bias is not attacked:
            its answers do not determine more (a count of equations, no proof about the network).
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from keyhole.arrays import Array, Float, random_stream
from keyhole.errors import KeyholeError, NotIdentifiable
from keyhole.learners.output_layer import OutputLayerLearner
from keyhole.oracles.base import Oracle
from keyhole.oracles.language_model.interface import CLOSED, RACE, REFERENCE, WHOLE, Interface
from keyhole.oracles.language_model.restricted import Reader, choose_tokens, read_logprobs
from keyhole.oracles.language_model.simulated import Simulated
from keyhole.oracles.queries import QueryBatch
from keyhole.recovery import recover
from keyhole.results import Outcome, Recovery, plain

FORMAT = "keyhole-language-model-audit-1"


@dataclass(frozen=True)
class Level:
    """One level that an attacker may reach through an interface."""

    questions: float  # infinite: no number of questions leads there
    money: float
    measured: bool  # by an attack, not computed
    error: float | None = None  # of what was found, relative to the model's own

    @property
    def reachable(self) -> bool:
        return math.isfinite(self.questions)


@dataclass(frozen=True)
class Exposure:
    """What one interface gives away."""

    title: str
    reading: str
    width: Level
    space: Level
    geometry: Level
    found: int | None  # the width that the attack found
    outcome: str
    reason: str = ""

    @property
    def holds(self) -> bool:
        return self.outcome == "HOLDS"


@dataclass(frozen=True)
class LanguageModelAudit:
    """The finished audit."""

    box: str
    vocabulary: int
    width: int
    readings: tuple[str, ...]
    price: float  # money per million tokens
    interface: tuple[str, ...]  # what an endpoint does, in sentences; empty for a model at hand
    exposures: tuple[Exposure, ...]
    alarms: tuple[str, ...]
    advice: tuple[str, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **plain(asdict(self))}


def list_interfaces(vocabulary: int) -> tuple[tuple[str, Interface, int | None], ...]:
    """Six interfaces, from the most open to the most closed: title, interface, decimals."""
    few = min(20, vocabulary - 1)
    rounded = Interface(vocabulary, vocabulary, number_format="2 decimals")
    forced = Interface(vocabulary, min(5, few), "sampling", sampled=True)
    return (
        ("log-probabilities of all tokens", Interface(vocabulary, vocabulary), None),
        ("the same, rounded to 2 decimals", rounded, 2),
        (f"top {few}, bias changes them", Interface(vocabulary, few, "reported"), None),
        (f"top {forced.top} and the sampled token, bias only steers", forced, None),
        ("the sampled token alone, with bias", Interface(vocabulary, 0, "sampling"), None),
        (f"top {few}, no bias", Interface(vocabulary, few), None),
    )


def audit_language_model(
    box: Oracle,
    *,
    logits: Callable[[Array], Any] | None = None,
    price: float = 0.0,
    most: int = 20_000,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> LanguageModelAudit:
    """Attacks a language model behind interfaces. `logits` is the model itself, which is put
    behind six of them; without, `box` is an endpoint, attacked as it is, and prices of the six are
    computed."""
    start, tell = time.monotonic(), progress or (lambda _: None)
    interface = getattr(box, "interface", None)
    vocabulary = int(box.spec.domain.tokens or 0)
    tell("the model itself" if logits is not None else "the interface as it is")
    own = _attack_openly(box, most, seed)
    if own.model is None:
        raise NotIdentifiable(f"the model's own answers do not show its width: {own.reason}")
    width = int(own.model.width)
    exposures = []
    if logits is None and interface is not None:
        exposures.append(_expose_endpoint(box, own, interface, price, width))
    for title, limits, decimals in list_interfaces(vocabulary):
        tell(title)
        simulated = None
        if logits is not None:
            length = box.spec.domain.max_length
            simulated = Simulated(logits, limits, max_length=length, decimals=decimals, seed=seed)
        exposures.append(_expose(title, limits, simulated, box, width, price, most, seed))
    return LanguageModelAudit(
        box.spec.identity,
        vocabulary,
        width,
        tuple(str(reading) for reading in own.model.readings),
        price,
        () if interface is None else interface.sentences(),
        tuple(exposures),
        list_alarms(exposures),
        advise(exposures),
        round(time.monotonic() - start, 1),
    )


def _attack_openly(box: Oracle, most: int, seed: int) -> Recovery:
    """Width and space through all that the box tells; on some tokens where all are too dear."""
    if isinstance(box, Reader) and box.price > 1 and box.price * 64 > most:
        rng = random_stream(seed, "audit")
        some = rng.choice(box.interface.vocabulary, 512, replace=False)
        box = box.choose(np.sort(some).tolist())
    return recover(box, OutputLayerLearner(), seed=seed, throw=False, budget=20 * most)


def _expose_endpoint(
    box: Oracle, own: Recovery, interface: Interface, price: float, width: int
) -> Exposure:
    """The endpoint's own interface, as it was attacked."""
    paid = own.ledger.paid
    reached = Level(paid, own.ledger.money(price), True)
    whole = own.model is not None and own.model.tokens == interface.vocabulary
    computed = price_levels(interface, width, price)
    return Exposure(
        "this endpoint",
        interface.reading,
        reached,
        reached if whole else computed[1],
        computed[2],
        width,
        own.outcome.name,
        own.reason,
    )


def _expose(
    title: str,
    interface: Interface,
    simulated: Simulated | None,
    box: Oracle,
    width: int,
    price: float,
    most: int,
    seed: int,
) -> Exposure:
    levels = price_levels(interface, width, price)
    if interface.reading == CLOSED:
        reason = f"{interface.top} equations an answer, {width - 1} new unknowns"
        safe = interface.top <= width - 2
        return Exposure(title, CLOSED, *levels, None, "HOLDS" if safe else "NOT ATTACKED", reason)
    if simulated is None or levels[0].questions > most:
        return Exposure(title, interface.reading, *levels, None, "COMPUTED")
    rng = random_stream(seed, f"audit top {interface.top}")
    count = min(interface.vocabulary, math.ceil(1.3 * width) + 16)
    affordable = levels[1].questions <= most and interface.reading != RACE
    # a race to two more digits costs a fourth more questions
    options = {"epsilon": 1e-4} if interface.reading == RACE else {}
    reader: Oracle = read_logprobs(simulated, interface, **options)
    tokens = np.arange(interface.vocabulary)
    if not affordable:
        tokens = np.sort(rng.choice(interface.vocabulary, count, replace=False))
        reader = choose_tokens(reader, tokens.tolist())
    run = recover(reader, OutputLayerLearner(), seed=seed, throw=False, budget=4 * most)
    if run.model is None:
        return Exposure(title, interface.reading, *levels, None, run.outcome.name, run.reason)
    reached = Level(run.ledger.paid, run.ledger.money(price), True)
    error = _space_error(box, run.model.matrix, tokens, width, seed)
    space = Level(reached.questions, reached.money, True, error)
    if not affordable:
        space = replace(levels[1], error=error)
    geometry = levels[2]
    if interface.reading == WHOLE and levels[2].questions <= most:
        geometry = _attack_geometry(simulated, interface, levels[2], price, seed)
    found = int(run.model.width)
    doubts = [note for note in run.notes if "lower bound" in note or "noise" in note.lower()]
    reason = " ".join([run.reason, *doubts]).strip()
    if found != width:  # the model is at hand: what the attacker would believe is wrong
        reason = f"wrong, the width is {width}. {reason}".strip()
    return Exposure(
        title, interface.reading, reached, space, geometry, found, run.outcome.name, reason
    )


def _attack_geometry(
    simulated: Simulated, interface: Interface, computed: Level, price: float, seed: int
) -> Level:
    """Up to a rotation; the error is the learner's own bar."""
    reader = read_logprobs(simulated, interface)
    run = recover(reader, OutputLayerLearner(level="gram"), seed=seed, throw=False)
    if run.model is None or run.outcome is not Outcome.RECOVERED:
        return replace(computed, questions=np.inf, measured=True)
    error = None
    if run.errors is not None:
        size = float(np.linalg.norm(run.model.matrix))
        error = float(np.linalg.norm(run.errors.matrix)) / size
    return Level(run.ledger.paid, run.ledger.money(price), True, error)


def _space_error(
    box: Oracle, matrix: Float[Array, "k r"], tokens: Array, width: int, seed: int
) -> float | None:
    """Part of the model's own answers that lies outside the space that was found."""
    rng = random_stream(seed, "audit endpoint")
    longest = min(8, box.spec.domain.max_length or 8)
    prompts = rng.integers(int(box.spec.domain.tokens or 2), size=(2 * width, longest, 1))
    try:
        answers = np.asarray(box.ask(QueryBatch.of(prompts.astype(np.float64), "comparison")))
    except KeyholeError:
        return None
    if answers.shape[1] != box.spec.domain.tokens:
        return None
    rows = answers[:, tokens].astype(np.float64)
    rows = rows - rows.mean(axis=1, keepdims=True)
    basis = np.linalg.qr(matrix - matrix.mean(axis=0))[0]
    return float(np.linalg.norm(rows - rows @ basis @ basis.T) / np.linalg.norm(rows))


def price_levels(interface: Interface, width: int, price: float) -> tuple[Level, Level, Level]:
    """Questions and money for width, space and geometry, computed."""
    some = min(interface.vocabulary, math.ceil(1.3 * width) + 16)
    prompts = math.ceil(1.2 * width) + 1
    skeleton = min(interface.vocabulary, math.ceil(1.2 * width) + 1)
    many = math.ceil(1.35 * width * (width + 3) / 2)
    counts = ((prompts, some), (prompts, interface.vocabulary), (many, skeleton))
    levels = []
    mean_prompt = 8.0  # tokens of a prompt, where a price is computed
    for number, tokens in counts:
        each = interface.questions(tokens)
        questions = np.inf if each is None else number * each
        if number == many and each is not None and interface.reading != WHOLE:
            questions += prompts * (interface.questions(interface.vocabulary) or 0.0)
        levels.append(Level(questions, price * questions * (mean_prompt + 1.0) / 1e6, False))
    return levels[0], levels[1], levels[2]


def list_alarms(exposures: list[Exposure]) -> tuple[str, ...]:
    """What an attack through these interfaces looks like from inside."""
    ways = {exposure.reading for exposure in exposures if exposure.width.reachable}
    found = ["Many short prompts of random tokens with one token asked for in return."]
    if WHOLE in ways:
        found.append(
            "Log-probabilities of the whole vocabulary, from one account, again and again."
        )
    if REFERENCE in ways:
        found.append("One prompt with rotating sets of tokens, all with the same largest bias.")
    if "forced" in ways:
        found.append("One prompt again and again, a single token at the largest bias each time.")
    if RACE in ways:
        found.append("One prompt with hundreds of biases that change a little from call to call.")
    return tuple(found)


def advise(exposures: list[Exposure]) -> tuple[str, ...]:
    """Which protections hold and which do not."""
    held = [exposure.title for exposure in exposures if exposure.holds]
    open_ = [exposure for exposure in exposures if exposure.width.reachable]
    found = []
    if held:
        found.append(
            f"Holds: {'; '.join(held)}. That is a count of equations, no proof about the network "
            "below."
        )
    told = [exposure for exposure in exposures if exposure.outcome == "NOT ATTACKED"]
    if told:
        found.append(
            f"Not attacked, and not safe by that count: {'; '.join(one.title for one in told)} "
            f"({told[0].reason}). Tell fewer."
        )
    cheapest = min(open_, key=lambda exposure: exposure.width.questions, default=None)
    if cheapest is not None:
        found.append(
            f"Gives most away: {cheapest.title}, the width for {cheapest.width.questions:,.0f} "
            "questions."
        )
    if any("rounded" in exposure.title for exposure in open_):
        found.append("Rounding does not protect: it costs the attacker digits, not the width.")
    if any(exposure.reading == "forced" for exposure in open_):
        found.append(
            "That a bias leaves log-probabilities alone is not enough while it steers sampling and "
            "the sampled token's log-probability is told."
        )
    found.append(
        "What it means: the width, a fingerprint of the model, and the geometry of its tokens; "
        "not the model. Tied embeddings carry it to the input side."
    )
    return tuple(found)
