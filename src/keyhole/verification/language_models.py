"""Does this endpoint still serve that language model? Its log-probabilities beside the reference's.

Questions. Half of the prompts are ordinary (random tokens, lengths 1 to 32), half are chosen to
           tell: of many candidates those whose answers move most, in what the interface tells,
           under small changes of the reference (a temperature, weights rounded to 8 bits, a
           low-rank update). Where only the sampled token is told they are near ties; where a bias
           may be added, the gap between the two likeliest tokens is closed to within the tolerance
           from both sides, so that the label tells the gap.
Tolerance. In nats: REJECTION times what rounding does to the reference (computed in double
           precision, and alone or in a batch), ROUNDINGS roundoffs of the largest logit, half a
           step of values that are rounded, and the server's noise.
Formats.   16 bits are told from other changes by the pattern of rounded weights, as in `reference`,
           where enough log-probabilities are told.
Not shown. What the interface does not tell; the sentence lists it.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import (
    SINGLE_ROUNDOFF,
    TINY,
    UNIT_ROUNDOFF,
    Array,
    Float,
    Int,
    random_stream,
    whole_number,
)
from keyhole.errors import Counterexample, InvalidArgument
from keyhole.measurement.noise import decimal_step
from keyhole.oracles.base import Oracle
from keyhole.oracles.language_model.answers import log_total
from keyhole.oracles.language_model.huggingface import is_causal_model
from keyhole.oracles.language_model.interface import Interface
from keyhole.oracles.language_model.open import open_language_model
from keyhole.oracles.language_model.questions import UNTOLD, Replies, pack
from keyhole.oracles.language_model.restricted import Reader
from keyhole.oracles.noise import DETECTION, FORMATS, REJECTION, ROUNDINGS, VERDICT
from keyhole.oracles.queries import VERIFICATION, QueryBatch
from keyhole.oracles.torch import is_module
from keyhole.results import Verdict
from keyhole.targets import FOLDER
from keyhole.verification.reference import (
    FINGERPRINT,
    FRESH,
    HALVES,
    SIGNED,
    is_address,
    is_whole_folder,
)
from keyhole.verification.statement import CONFIDENCE, share_conceded

LENGTHS = (1, 32)  # tokens of a prompt
CANDIDATES = 16  # prompts of which one is chosen to tell
PORTION = 32  # prompts that the reference computes at once
SMALL_CHANGE = 1e-3  # of the low-rank update, relative to the norm of each matrix
TEMPERATURE = 1.02  # of the heated copy that prompts are chosen by
MOST_PARAMETERS = 2**28  # beyond, copies of the reference take too much memory


@dataclass(frozen=True, eq=False)
class Spoken:
    """Answers to prompts: the sampled tokens, and the log-probabilities that were told."""

    sampled: Int[Array, " n"]
    tokens: Int[Array, "n k"]  # -1 where nothing was told
    logprobs: Float[Array, "n k"]


class Predictor:
    """A reference that tells the log-probabilities of all tokens."""

    tokens: int
    longest: int | None = None
    tokenizer: Any = None
    roundoff: float = UNIT_ROUNDOFF
    identity = "reference"

    def predict(self, prompts: Sequence[Array]) -> Float[Array, "n tokens"]:
        """Log-probabilities of the next token behind each prompt."""
        found = np.zeros((len(prompts), self.tokens))
        for part, places in portion_by_length(prompts):
            logits = np.asarray(self.compute(part), dtype=np.float64)
            found[places] = logits - log_total(logits)[:, None]
        return found

    def compute(self, prompts: Int[Array, "n length"]) -> Array:
        """Logits or log-probabilities of prompts of one length."""
        raise NotImplementedError

    def changed(self, rng: np.random.Generator) -> Iterator["Predictor"]:
        """Copies with a small change each."""
        yield from ()

    def in_format(self, name: str, compute: str | None = None) -> "Predictor | None":
        """A copy whose weights are rounded to a number format; None where there is none."""
        return None


def portion_by_length(prompts: Sequence[Array]) -> Iterator[tuple[Int[Array, "n length"], Array]]:
    """Prompts of one length together, a few at a time, with their places."""
    lengths = np.array([len(prompt) for prompt in prompts])
    for length in np.unique(lengths):
        places = np.flatnonzero(lengths == length)
        for start in range(0, len(places), PORTION):
            part = places[start : start + PORTION]
            yield np.stack([prompts[int(place)] for place in part]).astype(np.int64), part


class FunctionPredictor(Predictor):
    """A function on token numbers, or an oracle that tells all tokens."""

    def __init__(self, oracle: Oracle) -> None:
        if oracle.spec.answers not in ("logits", "logprobs") or oracle.spec.domain.bias is not None:
            raise InvalidArgument(
                "the reference of a language model must tell all log-probabilities or logits, as a "
                "model at hand does"
            )
        self.oracle = oracle
        self.tokens = int(oracle.spec.domain.tokens or 0)
        self.longest, self.identity = oracle.spec.domain.max_length, oracle.spec.identity
        self.roundoff = SINGLE_ROUNDOFF

    def compute(self, prompts: Int[Array, "n length"]) -> Array:
        tokens = prompts[:, :, None].astype(np.float64)
        answers = self.oracle.ask(QueryBatch.of(tokens, VERIFICATION))
        if answers.dtype == np.float64:
            self.roundoff = UNIT_ROUNDOFF
        return answers


class TorchPredictor(Predictor):
    """A causal language model of torch."""

    def __init__(self, module: Any, tokenizer: Any = None, identity: str = "") -> None:
        self.module, self.tokenizer = module.eval(), tokenizer
        self.tokens = int(module.config.vocab_size)
        self.longest = getattr(module.config, "max_position_embeddings", None)
        self.identity = identity or type(module).__qualname__
        bits = dict(FORMATS).get(str(self.dtype).removeprefix("torch."), 24)
        self.roundoff = float(2.0**-bits)

    @property
    def dtype(self) -> Any:
        return next(p.dtype for p in self.module.parameters() if p.is_floating_point())

    @property
    def size(self) -> int:
        return int(sum(p.numel() for p in self.module.parameters()))

    def compute(self, prompts: Int[Array, "n length"]) -> Array:
        import torch

        with torch.inference_mode():
            logits = self.module(torch.as_tensor(prompts)).logits[:, -1, : self.tokens]
            return np.asarray(logits.to(torch.float64))

    def _copied(self, module: Any) -> "TorchPredictor":
        return TorchPredictor(module, self.tokenizer, self.identity)

    def in_format(self, name: str, compute: str | None = None) -> "TorchPredictor | None":
        import torch

        if self.size > MOST_PARAMETERS:
            return None
        rounded = copy.deepcopy(self.module).to(getattr(torch, name))
        return self._copied(rounded.to(getattr(torch, compute or name)))

    def changed(self, rng: np.random.Generator) -> Iterator[Predictor]:
        import torch

        if self.size > MOST_PARAMETERS:
            return
        draws = torch.Generator().manual_seed(int(rng.integers(2**62)))
        with torch.no_grad():
            coarse = copy.deepcopy(self.module)
            for weight in unique_matrices(coarse):
                step = weight.abs().amax().clamp(min=TINY) / 127.0  # eight bits
                weight.copy_((weight / step).round() * step)
            yield self._copied(coarse)
            del coarse
            moved = copy.deepcopy(self.module)
            for weight in unique_matrices(moved):
                left = torch.randn(weight.shape[0], 1, generator=draws, dtype=torch.float64)
                right = torch.randn(1, weight.shape[1], generator=draws, dtype=torch.float64)
                update = left @ right
                update *= SMALL_CHANGE * weight.double().norm() / update.norm()
                weight.add_(update.to(weight.dtype))
            yield self._copied(moved)


def unique_matrices(module: Any) -> list[Any]:
    return [p for p in module.parameters() if p.ndim == 2 and p.is_floating_point()]


def open_predictor(reference: Any) -> Predictor:
    """The reference of a language model: `hf:FOLDER`, a causal model of torch, a function on token
    numbers, or an oracle that tells all tokens."""
    if isinstance(reference, Predictor):
        return reference
    if isinstance(reference, str) and is_whole_folder(reference):
        from keyhole.oracles.token_models import digest_folder, load_decoder, load_tokenizer

        folder = Path(reference.removeprefix(FOLDER))
        identity = f"{FOLDER}{folder.name}:{digest_folder(folder)}"
        return TorchPredictor(load_decoder(folder), load_tokenizer(folder), identity)
    if is_module(reference) and is_causal_model(reference):
        return TorchPredictor(reference)
    return FunctionPredictor(open_language_model(reference))


def speaks(target: Any) -> bool:
    """Whether a target is plainly a language model."""
    if isinstance(target, Predictor):
        return True
    if isinstance(target, Oracle):
        return target.spec.domain.tokens is not None
    if is_module(target):
        name = type(target).__name__
        return name.endswith(("ForCausalLM", "LMHeadModel"))
    if isinstance(target, str) and is_whole_folder(target):
        from keyhole.oracles.token_models import has_decoder

        folder = Path(target.removeprefix(FOLDER))
        return has_decoder(folder) and not (folder / "modules.json").exists()
    return False


class Speaker:
    """The box: whatever its interface, prompts in, `Spoken` out. `asked` counts questions."""

    def __init__(self, oracle: Oracle, reference: Predictor) -> None:
        self.oracle, self.reference, self.asked = oracle, reference, 0
        self.interface: Interface | None = getattr(oracle, "interface", None)
        self.inner = oracle.inner if isinstance(oracle, Reader) else oracle
        tokens = oracle.spec.domain.tokens if self.interface is None else self.interface.vocabulary
        if tokens != reference.tokens:
            raise InvalidArgument(
                f"the reference has {reference.tokens} tokens, the box {tokens}: they cannot be "
                "one model (pass vocabulary= or --tokens where a server pads its own)"
            )

    @property
    def top(self) -> int:
        """How many log-probabilities an answer tells; 0: the sampled token alone."""
        if self.interface is None:
            return 0 if self.oracle.spec.answers == "labels" else self.reference.tokens
        return min(self.interface.top, self.reference.tokens)

    @property
    def races(self) -> bool:
        """Whether a bias can make the sampled token tell a gap."""
        known = self.interface
        return known is not None and not known.top and known.bias != "none"

    @property
    def words(self) -> bool:
        """Whether prompts go out as text."""
        return self.interface is not None and not self.interface.numbers

    def ask(
        self, prompts: Sequence[Array], bias: Sequence[dict[int, float]] | None = None
    ) -> Spoken:
        """One question a prompt."""
        rows: list[tuple[int, Array, Array]] = []
        for number, prompt in enumerate(prompts):
            given = {} if bias is None else bias[number]
            rows.append(self._ask_one(np.asarray(prompt, dtype=np.int64), given))
            self.asked += 1
        wide = max(len(tokens) for _, tokens, _ in rows)
        tokens = np.full((len(rows), wide), -1, dtype=np.int64)
        logprobs = np.full((len(rows), wide), UNTOLD)
        for place, (_, names, values) in enumerate(rows):
            tokens[place, : len(names)], logprobs[place, : len(names)] = names, values
        return Spoken(np.array([sampled for sampled, _, _ in rows]), tokens, logprobs)

    def _ask_one(self, prompt: Array, bias: dict[int, float]) -> tuple[int, Array, Array]:
        if self.interface is None:
            answer = np.asarray(
                self.oracle.ask(QueryBatch.of(prompt[None, :, None].astype(float), VERIFICATION))
            )
            if answer.ndim == 1:
                return int(answer[0]), np.zeros(0, dtype=np.int64), np.zeros(0)
            row = answer.astype(np.float64)
            row = (row - log_total(row)[:, None])[0]
            return int(np.argmax(row)), np.arange(len(row)), row
        names, values = np.array([*bias], dtype=np.int64), np.array([*bias.values()], dtype=float)
        replies = Replies(
            np.asarray(self.inner.ask(pack(prompt[None], names[None], values[None], VERIFICATION)))
        )
        tokens, told = replies.rows[0, 2::2].astype(np.int64), replies.rows[0, 3::2]
        known = (tokens >= 0) & (told != UNTOLD) & np.isfinite(told)
        tokens, told = tokens[known], told[known]
        sampled, own = int(replies.sampled[0]), float(replies.sampled_logprob[0])
        if own != UNTOLD and sampled >= 0 and sampled not in tokens:
            tokens, told = np.append(tokens, sampled), np.append(told, own)
        return sampled, tokens, told


def encode_prompts(speaker: Speaker, prompts: Sequence[Array]) -> list[Array]:
    """Prompts as the reference reads them: as they are, or where the server takes text, the tokens
    of the text that goes out."""
    if not speaker.words:
        return [np.asarray(prompt) for prompt in prompts]
    tokenizer = speaker.reference.tokenizer
    if tokenizer is None:
        raise InvalidArgument(
            "the server takes prompts as text, and the reference has no tokenizer: save it into "
            "the reference's folder"
        )
    from keyhole.oracles.language_model.dialects import prompt_text
    from keyhole.oracles.language_model.questions import Question

    chat = getattr(getattr(speaker.inner, "dialect", None), "name", "") == "chat"
    found = []
    for prompt in prompts:
        text = prompt_text(Question(np.asarray(prompt), {}))
        if chat:
            message = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(
                message, tokenize=False, add_generation_prompt=True
            )
        ids = tokenizer(text, add_special_tokens=not chat)["input_ids"]
        found.append(np.asarray(ids, dtype=np.int64))
    return found


def draw_prompts(
    count: int, tokens: int, longest: int | None, rng: np.random.Generator
) -> list[Array]:
    """Ordinary prompts: random tokens, every factor of length as likely."""
    low, high = LENGTHS
    high = min(high, longest or high)
    lengths = (low * ((high + 1) / low) ** rng.random(count)).astype(int)
    return [rng.integers(tokens, size=min(int(length), high)) for length in lengths]


def choose_prompts(
    reference: Predictor,
    candidates: Sequence[Array],
    encoded: Sequence[Array],
    count: int,
    top: int,
    rng: np.random.Generator,
) -> list[int]:
    """Places of the candidates whose told answers move most under small changes of the reference,
    taken in turns from each change."""
    copies = list(reference.changed(rng))
    scores = np.zeros((1 + len(copies), len(candidates)))
    for start in range(0, len(candidates), PORTION):
        part = list(encoded[start : start + PORTION])
        plain = reference.predict(part)
        heated = plain / TEMPERATURE
        heated = heated - log_total(heated)[:, None]
        others = [heated, *(one.predict(part) for one in copies)]
        for number, other in enumerate(others):
            scores[number, start : start + len(part)] = rate_movement(plain, other, top)
    chosen: list[int] = []
    orders = [np.argsort(-row, kind="stable").tolist() for row in scores]
    for turn in range(len(candidates)):
        for order in orders:
            if len(chosen) < count and order[turn] not in chosen:
                chosen.append(order[turn])
        if len(chosen) >= count:
            break
    return chosen


def rate_movement(
    plain: Float[Array, "n tokens"], other: Float[Array, "n tokens"], top: int
) -> Float[Array, " n"]:
    """How far a change moves what is told: the largest of the told log-probabilities, or, where
    only the sampled token is told, the gap to the next one in units of itself."""
    if top:
        first = np.argpartition(-plain, min(top, plain.shape[1]) - 1, axis=1)[:, :top]
        moved = np.abs(np.take_along_axis(other - plain, first, axis=1))
        return np.asarray(moved.max(axis=1))
    pair = find_two(plain)
    gap = gap_of(plain, *pair)
    return np.asarray(np.abs(gap_of(other, *pair) - gap) / np.maximum(gap, TINY))


def gap_of(
    logprobs: Float[Array, "n tokens"], first: Int[Array, " n"], second: Int[Array, " n"]
) -> Float[Array, " n"]:
    """By how much the first token of each row is likelier than the second."""
    every = np.arange(len(logprobs))
    return np.asarray(logprobs[every, first] - logprobs[every, second])


def find_two(logprobs: Float[Array, "n tokens"]) -> tuple[Int[Array, " n"], Int[Array, " n"]]:
    """The two likeliest tokens of each row."""
    pair = np.argpartition(-logprobs, 1, axis=1)[:, :2]
    values = np.take_along_axis(logprobs, pair, axis=1)
    order = np.argsort(-values, axis=1)
    pair = np.take_along_axis(pair, order, axis=1)
    return pair[:, 0], pair[:, 1]


@dataclass(frozen=True, eq=False)
class SpokenCompared:
    """Answers to prompts beside the reference's."""

    prompts: tuple[Array, ...]
    ordinary: int  # of the prompts, the first so many; the rest was chosen to tell
    deviations: Float[Array, " n"]  # largest |log-probability − reference| that was told, in nats
    allowed: float  # nats
    told: int  # log-probabilities compared
    spoken: Spoken
    expected: Float[Array, "n tokens"]
    notes: tuple[str, ...] = ()
    format: str = ""
    wrong_tokens: int = 0  # sampled tokens that are not the reference's likeliest
    what: str = "reference"  # that the box is compared with
    raced: tuple[Array, Array] | None = None  # tokens said and expected, (2, n), where gaps raced
    longest: int = 0  # length of prompts that may be drawn

    @property
    def bad(self) -> Array:
        return np.asarray(self.deviations > self.allowed)


def measure_told(spoken: Spoken, expected: Float[Array, "n tokens"]) -> Float[Array, "n k"]:
    """What was told less what was expected; NaN where nothing was told."""
    places = np.maximum(spoken.tokens, 0)
    known = (
        np.take_along_axis(expected, places, axis=1) if places.shape[1] else places.astype(float)
    )
    return np.asarray(np.where(spoken.tokens >= 0, spoken.logprobs - known, np.nan))


def allow_nats(
    reference: Predictor, prompts: Sequence[Array], expected: Float[Array, "n tokens"]
) -> float:
    """What rounding may do to a log-probability of an honest copy, in nats."""
    alone = reference.predict(prompts[:1])
    spread = float(np.abs(alone - expected[:1]).max())
    exact = reference.in_format("float64") if reference.roundoff > UNIT_ROUNDOFF else None
    if exact is not None:
        some = slice(0, 12)  # of the prompts: enough for the level of rounding
        spread = max(spread, float(np.abs(exact.predict(prompts[some]) - expected[some]).max()))
    unit = max(reference.roundoff, SINGLE_ROUNDOFF)  # servers compute in single precision at best
    return float(REJECTION * spread + ROUNDINGS * unit * np.abs(expected).max())


def measure_server_noise(speaker: Speaker, prompt: Array, first: Spoken) -> float:
    """Standard deviation of log-probabilities told to one prompt, asked three times in all."""
    again = speaker.ask([prompt, prompt])
    rows = [dict(zip(first.tokens[0].tolist(), first.logprobs[0].tolist(), strict=True))]
    rows += [
        dict(zip(names.tolist(), values.tolist(), strict=True))
        for names, values in zip(again.tokens, again.logprobs, strict=True)
    ]
    shared = [t for t in rows[0] if t >= 0 and all(t in row for row in rows)]
    if not shared:
        return 0.0
    values = np.array([[row[t] for t in shared] for row in rows])
    return float(np.sqrt(np.mean(np.var(values, axis=0, ddof=1))))


def compare_language_models(
    oracle: Oracle, reference: Predictor, count: int, seed: int
) -> SpokenCompared:
    """Asks the box `count` prompts (two questions each where gaps are raced) and compares."""
    rng = random_stream(seed, "language models")
    speaker = Speaker(oracle, reference)
    longest = min(n for n in (reference.longest, oracle.spec.domain.max_length, 2**20) if n)
    each = 2 if speaker.races else 1
    count = max(1, count // each)
    plain, pool = draw_comparison(count, reference.tokens, longest, rng)
    ordinary = len(plain)
    chosen = choose_prompts(
        reference, pool, encode_prompts(speaker, pool), count - ordinary, speaker.top, rng
    )
    prompts = [*plain, *(pool[place] for place in chosen)]
    read = encode_prompts(speaker, prompts)
    expected = reference.predict(read)
    allowed = allow_nats(reference, read, expected)
    if speaker.races:
        return replace(_race(speaker, prompts, ordinary, expected, allowed), longest=longest)
    spoken = speaker.ask(prompts)
    check_told(spoken)
    errors = measure_told(spoken, expected)
    numbers = spoken.logprobs[spoken.tokens >= 0]
    if numbers.size:
        allowed += 0.5 * decimal_step(numbers)
        allowed += VERDICT * measure_server_noise(speaker, prompts[0], spoken)
    deviations, wrong = judge_spoken(spoken, errors, expected, allowed)
    found = SpokenCompared(
        tuple(prompts),
        ordinary,
        deviations,
        allowed,
        int((spoken.tokens >= 0).sum()) or int((spoken.sampled >= 0).sum()),
        spoken,
        expected,
        (tell_hidden(speaker),),
        wrong_tokens=wrong,
        longest=longest,
    )
    return recognise_half(reference, read, errors, found) if found.bad.any() else found


def draw_comparison(
    count: int, tokens: int, longest: int, rng: np.random.Generator
) -> tuple[list[Array], list[Array]]:
    """Ordinary prompts, and a pool from which those that tell are chosen: `count` in all."""
    ordinary = (count + 1) // 2
    plain = draw_prompts(ordinary, tokens, longest, rng)
    return plain, draw_prompts(CANDIDATES * (count - ordinary), tokens, longest, rng)


def check_told(spoken: Spoken) -> None:
    """Raises where not one answer can be compared: agreement would mean nothing."""
    if (spoken.sampled < 0).all() and (spoken.tokens < 0).all():
        raise InvalidArgument(
            "the server names tokens by their text, and which tokens these are is not known: pass "
            "names=, the text of every token in order, or a reference with its tokenizer"
        )


def judge_spoken(
    spoken: Spoken, errors: Float[Array, "n k"], expected: Float[Array, "n tokens"], allowed: float
) -> tuple[Float[Array, " n"], int]:
    """The largest deviation of each prompt in nats: of what was told, and of how much less likely
    the sampled token is than the likeliest; and how many sampled tokens are others."""
    told = np.where(np.isnan(errors), 0.0, np.abs(errors))
    deviations = told.max(axis=1, initial=0.0)
    every = np.arange(len(expected))
    sampled = np.where(spoken.sampled >= 0, spoken.sampled, expected.argmax(axis=1))
    # two log-probabilities may be off by as much
    behind = 0.5 * (expected.max(axis=1) - expected[every, sampled])
    return np.maximum(deviations, behind), int((behind > allowed).sum())


def _race(
    speaker: Speaker,
    prompts: Sequence[Array],
    ordinary: int,
    expected: Float[Array, "n tokens"],
    allowed: float,
) -> SpokenCompared:
    """Where only the sampled token is told: a bias closes the gap of the two likeliest tokens to
    within what rounding may do, from both sides."""
    first, second = find_two(expected)
    gaps = gap_of(expected, first, second)
    margin = 2.0 * allowed  # both log-probabilities of a gap may be off
    said, winners = np.empty((2, 2, len(prompts)), dtype=np.int64)
    for place, (side, winner) in enumerate(((-margin, first), (margin, second))):
        bias = [{int(t): float(g + side)} for t, g in zip(second, gaps, strict=True)]
        answer = speaker.ask(prompts, bias)
        check_told(answer)
        said[place], winners[place] = answer.sampled, winner
    sampled = np.where(said[1] != second, said[1], np.where(said[0] != first, said[0], first))
    nothing = np.zeros((len(prompts), 0))
    spoken = Spoken(sampled, nothing.astype(np.int64), nothing)
    return SpokenCompared(
        tuple(prompts),
        ordinary,
        judge_race(said, winners),
        margin,
        2 * len(prompts),
        spoken,
        expected,
        (tell_hidden(speaker),),
        raced=(said, winners),
    )


def judge_race(said: Int[Array, "2 n"], winners: Int[Array, "2 n"]) -> Float[Array, " n"]:
    """Deviations where gaps were raced: infinite where another token won on either side."""
    return np.where((said != winners).any(axis=0), np.inf, 0.0)


def recognise_half(
    reference: Predictor,
    prompts: Sequence[Array],
    errors: Float[Array, "n k"],
    found: SpokenCompared,
) -> SpokenCompared:
    """The comparison with the tolerance of a 16-bit format, where the errors have its pattern."""
    known = ~np.isnan(errors)
    # a correlation of so many numbers by chance is below this
    least = max(FINGERPRINT, DETECTION / np.sqrt(max(int(known.sum()), 1)))
    if least > 1.0:
        return found
    for name in HALVES:
        rounded = reference.in_format(name, "float32")
        engine = reference.in_format(name)
        if rounded is None or engine is None:
            return found
        places = np.maximum(found.spoken.tokens, 0)
        pattern, honest = (
            np.take_along_axis(one.predict(prompts) - found.expected, places, axis=1)[known]
            for one in (rounded, engine)
        )
        own = errors[known]
        likeness = float(own @ pattern / max(np.linalg.norm(own) * np.linalg.norm(pattern), TINY))
        # the largest of as many normal errors as there are
        limit = float(np.sqrt(np.mean(honest**2)) * (DETECTION + np.sqrt(2 * np.log(own.size))))
        if likeness >= least and np.abs(own).max() <= limit:
            deviations = np.where(np.isnan(errors), 0.0, np.abs(errors)).max(axis=1, initial=0.0)
            note = (
                f"The box computes in {name}: its errors have the pattern of weights rounded to it "
                f"(correlation {likeness:.2f})."
            )
            return replace(
                found,
                allowed=limit,
                deviations=deviations,
                notes=(*found.notes, note),
                format=name,
            )
    return found


def tell_hidden(speaker: Speaker) -> str:
    """What the interface could not have shown."""
    parts = []
    if speaker.top == 0 and not speaker.races:
        parts.append(
            "only the sampled token is told: a temperature, and whatever does not change the "
            "likeliest token, could not show"
        )
    elif speaker.races:
        parts.append("gaps between the two likeliest tokens alone are told, not the others")
    elif speaker.top < speaker.reference.tokens:
        parts.append(f"the {speaker.top} likeliest tokens are told, and the others could not show")
    parts.append("how answers are sampled at other temperatures was not asked")
    return f"Not shown by this interface: {'; '.join(parts)}."


def verify_language_models(
    box: Any, reference: Any, *, queries: int | None = None, seed: int = 0, **options: Any
) -> Verdict:
    """The verdict on a language model beside its reference.

    Args:
        box: An oracle of `open_language_model`, or the address of a server.
        reference: `hf:FOLDER`, a causal model of torch, or a function that tells all tokens.
        queries: Prompts, 59 unless stated: half ordinary, half chosen to tell.
        seed: The same seed asks the same prompts.
        **options: Of an endpoint of a language model.
    """
    count = FRESH if queries is None else whole_number("queries", queries, 1)
    return make_spoken_verdict(compare_spoken(box, reference, count, seed, options))


def compare_spoken(
    box: Any, reference: Any, count: int, seed: int, options: dict[str, Any]
) -> SpokenCompared:
    """Opens both, and compares them on fresh prompts."""
    predictor = open_predictor(reference)
    oracle = open_speaker(box, predictor, options)
    try:
        return compare_language_models(oracle, predictor, count, whole_number("seed", seed, 0))
    finally:
        if oracle is not box:
            oracle.close()


def open_speaker(box: Any, reference: Predictor, options: dict[str, Any]) -> Oracle:
    """The box as an oracle of a language model; tokens are named by the reference's tokenizer."""
    if isinstance(box, Oracle):
        return box
    if not is_address(box):
        if is_whole_folder(box):
            from keyhole.oracles.token_models import has_decoder, load_decoder

            folder = Path(box.removeprefix(FOLDER))
            if (folder / "config.json").exists() and not has_decoder(folder):
                raise InvalidArgument(
                    f"{box} is no language model: its config.json names no architecture that "
                    "predicts the next token (…ForCausalLM, …LMHeadModel)"
                )
            box = load_decoder(folder)
        elif isinstance(box, str):
            from keyhole.oracles.open import load_named

            box = load_named(box)
        return open_language_model(box, vocabulary=reference.tokens)
    given = {"vocabulary": reference.tokens, "max_length": reference.longest, **options}
    if reference.tokenizer is not None and "names" not in given:
        given["names"] = [reference.tokenizer.decode([k]) for k in range(reference.tokens)]
    return open_language_model(box, **given)


def make_spoken_verdict(found: SpokenCompared) -> Verdict:
    """What the comparison allows one to say."""
    count, bad = len(found.prompts), int(found.bad.sum())
    worst = float(np.max(found.deviations))
    kinds = f"{found.ordinary} ordinary, {count - found.ordinary} chosen to tell"
    fresh = "prompts" if found.what == SIGNED else "fresh prompts"
    finite = worst if np.isfinite(worst) else 0.0
    if bad:
        off = f", by up to {worst:.1e} nats" if np.isfinite(worst) else ""
        bound = (
            f"{bad} of {count} prompts ({kinds}) are answered otherwise than the {found.what} "
            f"answers them{off} (allowed: {found.allowed:.1e})."
        )
        if found.wrong_tokens:
            bound += f" On {found.wrong_tokens} another token than the likeliest was sampled."
    else:
        share = share_conceded(found.ordinary)
        bound = (
            f"{count} {fresh} ({kinds}) were answered as the {found.what} answers them: "
            f"{found.told:,} log-probabilities or labels agree within {found.allowed:.1e} nats "
            f"(largest difference {worst:.1e}). With {CONFIDENCE:.0%} confidence at most "
            f"{share:.0%} of ordinary prompts are answered differently. Smaller differences are "
            "not shown."
        )
    return Verdict(
        agrees=not bad,
        queries=count,
        replayed=0,
        worst=worst / max(found.allowed, TINY),
        tolerance=found.allowed,
        bound=" ".join([bound, *found.notes]),
        counterexample=_show(found) if bad else None,
        precision=found.allowed,
        format=found.format,
        difference=finite,
        absolute=finite,
    )


def _show(found: SpokenCompared) -> Counterexample:
    """The prompt that differs most, with what was told of at most eight tokens."""
    place = int(np.argmax(found.deviations))
    prompt = np.asarray(found.prompts[place], dtype=np.float64)[:, None]
    kind = "an ordinary prompt" if place < found.ordinary else "a prompt chosen to tell"
    tokens = found.spoken.tokens[place]
    tokens = tokens[tokens >= 0]
    if not len(tokens):
        likeliest = float(np.argmax(found.expected[place]))
        return Counterexample(
            prompt, np.array([float(found.spoken.sampled[place])]), np.array([likeliest]), kind
        )
    values = found.spoken.logprobs[place][: len(tokens)]
    order = np.argsort(-np.abs(values - found.expected[place][tokens]))[:8]
    return Counterexample(prompt, values[order], found.expected[place][tokens[order]], kind)
