"""A language model behind an HTTP endpoint: it finds out what the interface does, by asking.

Questions. Which dialect is served; how many log-probabilities an answer tells; whether a bias
steers sampling, changes what is told, or neither; whether the sampled token's log-probability is
told beyond the top; how many entries a bias may have; whether the same question is answered alike.
Each takes a request or a few, some twenty in all; the ledger counts them as "opening", and with a
journal they are asked once (`opening`).
"""

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import InvalidArgument, OracleError
from keyhole.oracles.base import Domain, Spec
from keyhole.oracles.http.client import Access, Answer, Endpoint, Forbidden
from keyhole.oracles.http.retry import RetryPolicy, Transient
from keyhole.oracles.language_model.dialects import (
    DIALECTS,
    Chat,
    Completions,
    Dialect,
    Llama,
    Request,
    Told,
)
from keyhole.oracles.language_model.interface import CLOSED, Interface, name_format
from keyhole.oracles.language_model.opening import OpeningRecord
from keyhole.oracles.language_model.questions import Question, reply, unpack
from keyhole.oracles.language_model.restricted import Reader, read_logprobs
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.parts import Parted

TOPS = (100_000, 1000, 100, 20, 5, 1)  # numbers of log-probabilities that are tried
MAX_BIAS = 100.0  # what OpenAI's API allows
JSON = {"Content-Type": "application/json"}


class QuestionEndpoint(Parted):
    """Puts questions to a server, one a request."""

    batch = 1

    def __init__(
        self,
        endpoint: Endpoint,
        dialect: Dialect,
        request: Request,
        interface: Interface,
        numbers: dict[str, int] | None,
        max_length: int | None,
        asked: int,
        replayed: int = 0,
    ) -> None:
        self.endpoint, self.dialect, self.request = endpoint, dialect, request
        self.interface, self.numbers = interface, numbers
        self.asked, self.replayed = asked, replayed
        self.concurrency = endpoint.access.concurrency
        domain = Domain(max_length, tokens=interface.vocabulary, bias=MAX_BIAS)
        columns = 2 + 2 * interface.top
        self.spec = Spec(2, columns, domain, None, endpoint.identity, interface.answers)

    @property
    def opening_queries(self) -> int:
        return self.asked

    @property
    def opening_replayed(self) -> int:
        return self.replayed

    @property
    def traffic(self) -> Any:
        return self.endpoint.traffic

    def answer(self, queries: QueryBatch, stop: threading.Event) -> Array:
        return np.array([self._answer(question, stop) for question in unpack(queries)])

    def _answer(self, question: Question, stop: threading.Event) -> Float[Array, " k"]:
        told = put(self.endpoint, self.dialect, question, self.request, stop)
        likeliest = {}
        for token, value in told.likeliest.items():
            number = self._number(token)
            if number is not None:
                likeliest[number] = value
        sampled = self._number(told.sampled)
        return reply(
            self.interface.top, -1 if sampled is None else sampled, told.logprob, likeliest
        )

    def _number(self, token: int | str) -> int | None:
        """None for text that no token has, or several have, and for numbers that no token has."""
        if isinstance(token, int):
            return token if 0 <= token < self.interface.vocabulary else None
        return (self.numbers or {}).get(token)

    def close(self) -> None:
        self.endpoint.close()


def put(
    endpoint: Endpoint,
    dialect: Dialect,
    question: Question,
    request: Request,
    stop: threading.Event | None = None,
    patience: RetryPolicy | None = None,
) -> Told:
    """One question, one reply."""

    def read(answer: Answer) -> Told:
        try:
            found = json.loads(answer.body)
        except (ValueError, RecursionError) as error:
            raise Transient(f"{endpoint.identity}: half an answer: not JSON") from error
        try:
            return dialect.read(found)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise OracleError(
                f"{endpoint.identity} answered in a form that {dialect.path} does not have "
                f"({type(error).__name__}: {error})"
            ) from error

    told: Told = endpoint.ask(
        "POST",
        dialect.path,
        content=json.dumps(dialect.body(question, request)).encode(),
        headers=JSON,
        queries=1,
        read=read,
        stop=stop,
        patience=patience,
    )
    return told


class Examiner:
    """Asks a server what it does: the explicit accumulator of what is known so far."""

    def __init__(
        self,
        endpoint: Endpoint,
        model: str | None,
        vocabulary: int | None,
        record: OpeningRecord,
    ) -> None:
        self.endpoint, self.vocabulary, self.record = endpoint, vocabulary, record
        self.request = Request(1, model)
        self.dialect: Dialect = DIALECTS[0]
        self.asked = 0
        self.refusal = ""  # the last one

    def try_(self, question: Question, request: Request | None = None) -> Told | None:
        """The reply, or None where the server refuses."""
        self.asked += 1
        request = request or self.request
        body = self.dialect.body(question, request)
        known = self.record.recall(self.endpoint.identity, self.dialect.path, body)
        if known is None:
            known = self._put(question, request)
            self.record.keep(known)
        if isinstance(known, str):
            self.refusal = known
            return None
        return known

    def _put(self, question: Question, request: Request) -> Told | str:
        """What the server tells, or the words of its refusal."""
        hasty = replace(self.endpoint.access.patience, attempts=3)
        try:
            return put(self.endpoint, self.dialect, question, request, None, hasty)
        except Forbidden:
            raise
        except OracleError as error:
            if "answered" not in str(error):  # nobody there, rather than a refusal
                raise
            return str(error)

    def find_model(self) -> None:
        """Name and vocabulary, where the server lists them."""
        try:
            answer = self.endpoint.ask("GET", "/v1/models", patience=RetryPolicy(attempts=2))
            listed = json.loads(answer.body)["data"][0]
            name, meta = listed.get("id"), listed.get("meta") or {}
        except (OracleError, ValueError, LookupError, TypeError, AttributeError):
            return
        if self.request.model is None and isinstance(name, str):
            self.request = replace(self.request, model=name)
        if listed.get("owned_by") == "llamacpp":
            self.request = replace(self.request, llama=True)
        if self.vocabulary is None and isinstance(meta.get("n_vocab"), int):
            most = 2**22  # tokens: several times what the largest vocabularies have
            if not 2 <= meta["n_vocab"] <= most:
                raise OracleError(
                    f"{self.endpoint.identity} claims a vocabulary that no model has: 2 to "
                    f"{most} tokens are expected. Pass vocabulary= (--tokens)"
                )
            self.vocabulary = meta["n_vocab"]

    def find_dialect(self, path: str) -> Told:
        """The first dialect that is served, prompts as numbers where they are taken."""
        named = [d for d in DIALECTS if path.rstrip("/").endswith(d.path)]
        question = Question(np.array([3, 1, 2]), {})
        for dialect in named or DIALECTS:
            self.dialect = dialect
            for words in (False, True) if dialect.name != "chat" else (True,):
                for top in (1, 0):
                    request = replace(self.request, words=words, top=top)
                    told = self.try_(question, request)
                    if told is not None:
                        self.request = request
                        return told
        raise OracleError(
            f"{self.endpoint.identity} serves neither /v1/completions nor /v1/chat/completions nor "
            "llama.cpp's /completion: name the address of a server that does. Its last word: "
            f"{self.refusal}"
        )

    def find_top(self, limit: int | None) -> int:
        """How many log-probabilities an answer tells."""
        if not self.request.top:
            return 0
        question = Question(np.array([3, 1, 2]), {})
        whole = () if self.vocabulary is None else (self.vocabulary,)
        tops = (limit,) if limit is not None else (*whole, *TOPS)
        for top in tops:
            told = self.try_(question, replace(self.request, top=top))
            if told is not None and told.likeliest:
                if self.vocabulary is None and top == TOPS[0]:
                    self._find_vocabulary(told, top)
                return min(top, len(told.likeliest))
        return 0

    def _find_vocabulary(self, told: Told, top: int) -> None:
        """The tokens that are told are all there are, if another prompt brings the same ones: a
        server may cut the list to its likeliest without a word."""
        other = self.try_(Question(np.array([1, 1, 3]), {}), replace(self.request, top=top))
        if other is not None and set(other.likeliest) == set(told.likeliest):
            self.vocabulary = len(told.likeliest)

    def find_bias(self, top: int) -> tuple[str, bool, int]:
        """What a bias acts on, whether the sampled token is told, how many entries it may have."""
        request, prompt = replace(self.request, top=top), np.array([3, 1, 2])
        plain = self.try_(Question(prompt, {}), request)
        if plain is None:
            return "none", False, 0
        forced = self._force(plain, request, prompt)
        if forced is None:
            return "none", False, 0
        biased = forced.likeliest.get(forced.sampled, forced.logprob)
        reported = biased is not None and biased > -1e-3
        # where the bias is not in it, that the token's log-probability is told tells something
        told = forced.logprob is not None and not reported
        return "reported" if reported else "sampling", told, self._find_entries(request, prompt)

    def _force(self, plain: Told, request: Request, prompt: Array) -> Told | None:
        """The answer to the largest bias on an unlikely token, where two such tokens obey."""
        obeyed: list[
            Told
        ] = []  # a few tokens are tried: some have no text that a server could tell
        for target in self._choose_unlikely(plain):
            forced = self.try_(Question(prompt, {target: MAX_BIAS}), request)
            if forced is None:
                return None
            samples = [plain.sampled, *(one.sampled for one in obeyed)]
            wrong = isinstance(forced.sampled, int) and forced.sampled != target
            if not wrong and forced.sampled not in samples:
                obeyed.append(forced)
            if len(obeyed) == 2:
                return obeyed[0]
        return None

    def _choose_unlikely(self, plain: Told) -> list[int]:
        """About eight tokens that a plain answer does not name, the last ones first."""
        count = self.vocabulary or 2
        known = [t for t in plain.likeliest if isinstance(t, int)][: count // 2]
        taken = [t for t in (*known, plain.sampled) if isinstance(t, int) and 0 <= t < count]
        unlikely: list[int] = np.setdiff1d(np.arange(count), np.array(taken, np.int64)).tolist()
        return unlikely[:: max(1, len(unlikely) // 8)][::-1]

    def _find_entries(self, request: Request, prompt: Array) -> int:
        entries = (1024, 300, 100, 20, 5, 2, 1)  # numbers of biases that are tried
        for count in entries:
            count = min(count, (self.vocabulary or 2) - 1)
            bias = dict.fromkeys(range(count), -1.0)
            if self.try_(Question(prompt, bias), request) is not None:
                return count
        return 0

    def find_rest(self, top: int) -> dict[str, Any]:
        """Repeatable, heated, echo."""
        question, request = Question(np.array([2, 3, 1]), {}), replace(self.request, top=top)
        first, second = self.try_(question, request), self.try_(question, request)
        hot = self.try_(question, replace(request, temperature=2.0))
        found: dict[str, Any] = {"numbers": not self.request.words}
        if first is not None and not isinstance(self.dialect, Llama):
            found["number_format"] = name_format(first.likeliest.values())
        elif first is not None:  # its probabilities are single precision, their logarithms not
            found["number_format"] = "float32"
        if first is not None and second is not None:
            found["repeatable"] = first == second or (
                first.sampled == second.sampled and dict(first.likeliest) == dict(second.likeliest)
            )
        if first is not None and hot is not None and first.likeliest:
            same = set(first.likeliest) & set(hot.likeliest)
            found["heated"] = any(abs(first.likeliest[t] - hot.likeliest[t]) > 1e-2 for t in same)
        if self.dialect.name == "completions":
            echo = self.try_(question, replace(request, echo=True))
            found["echo"] = echo is not None and echo.echoed
        return found

    def find_names(self, entries: int) -> dict[str, int]:
        """The text of every token, by forcing each: where a server names tokens by text alone."""
        numbers: dict[str, int] = {}
        count = self.vocabulary or 0
        most_names = 4096  # tokens whose text is found out by asking, one question each
        if not entries or count > most_names:
            raise InvalidArgument(
                f"{self.endpoint.identity} names tokens by their text, and the vocabulary has "
                f"{count} of them: pass names=, the text of every token in the order of numbers"
            )
        double = set()
        for token in range(count):
            told = self.try_(Question(np.array([1, 2, 3]), {token: MAX_BIAS}))
            if told is None or not isinstance(told.sampled, str):
                continue
            if told.sampled in numbers:
                double.add(told.sampled)
            numbers[told.sampled] = token
        return {text: number for text, number in numbers.items() if text not in double}


def open_endpoint(
    url: str,
    vocabulary: int | None,
    max_length: int | None,
    model: str | None,
    *,
    access: Access,
    top: int | None = None,
    names: Sequence[str] | None = None,
    journal: str | Path | None = None,
) -> Reader | QuestionEndpoint:
    """The language model at `url`. Where no log-probabilities can be had of all tokens, the
    interface itself: it answers questions (`interface` says which). What finds that out is kept
    beside the `journal`, and asked once."""
    record = OpeningRecord(journal)
    endpoint = Endpoint(url, access)
    try:
        examiner = Examiner(endpoint, model, vocabulary, record)
        box = _examined(examiner, max_length, top, names)
    except BaseException:
        endpoint.close()
        raise
    return box if box.interface.reading == CLOSED else read_logprobs(box, box.interface)


def _examined(
    examiner: Examiner, max_length: int | None, top: int | None, names: Sequence[str] | None
) -> QuestionEndpoint:
    examiner.find_model()
    path = urlsplit(examiner.endpoint.url).path
    box = _examine_dialect(examiner, path, max_length, top, names)
    named = any(path.rstrip("/").endswith(dialect.path) for dialect in DIALECTS)
    if box.interface.reading != CLOSED or named or not isinstance(box.dialect, Completions):
        return box
    try:  # a server may take biases in one dialect and not in another
        other = _examine_dialect(examiner, Chat.path, max_length, top, names)
    except OracleError:
        return box
    return other if other.interface.reading != CLOSED else box


def _examine_dialect(
    examiner: Examiner,
    path: str,
    max_length: int | None,
    top: int | None,
    names: Sequence[str] | None,
) -> QuestionEndpoint:
    """What the server does in the dialect of a path, or in the first that it has."""
    endpoint = examiner.endpoint
    first = examiner.find_dialect(path)
    told = examiner.find_top(top)
    if examiner.vocabulary is None and names is not None:
        examiner.vocabulary = len(names)
    if examiner.vocabulary is None:
        raise InvalidArgument(
            f"{endpoint.identity} does not tell the size of its vocabulary: pass vocabulary= "
            "(--tokens)"
        )
    bias, sampled, entries = examiner.find_bias(told)
    if isinstance(examiner.dialect, Llama):
        bias, sampled = ("reported" if entries else "none"), False
    rest = examiner.find_rest(told)
    numbers = None
    if isinstance(first.sampled, str) and (entries or names is not None):
        numbers = (
            {text: number for number, text in enumerate(names)}
            if names is not None
            else examiner.find_names(entries)
        )
    interface = Interface(examiner.vocabulary, told, bias, sampled, entries, MAX_BIAS, **rest)
    request = replace(examiner.request, top=told)
    return QuestionEndpoint(
        endpoint,
        examiner.dialect,
        request,
        interface,
        numbers,
        max_length,
        examiner.asked,
        examiner.record.replayed,
    )
