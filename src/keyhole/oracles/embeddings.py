"""Embedding endpoints over HTTP: rows of token numbers or texts in, one vector for each out.

Dialects. OpenAI's `/v1/embeddings` (vLLM, llama.cpp, Ollama, TEI and others serve it too), TEI's
`/embed` and `/predict` (logits of a classifier or reranker), and a JSON of one's own (`request`,
`answer`). Rows that are asked together travel in one request: what a server does to a batch
(padding, masks, truncation) is part of what is to be seen.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import InvalidArgument, OracleError
from keyhole.oracles.http.client import Access, Answer, Endpoint, Forbidden, Unreachable
from keyhole.oracles.http.json_endpoint import fill, follow, read_numbers, read_template
from keyhole.oracles.http.retry import RetryPolicy, Transient
from keyhole.oracles.rows import NUMBERS, TEXT, Row, RowBox, RowSpec, check_row_answers, kind_of_row

JSON = {"Content-Type": "application/json"}
# where a row, or the list of all rows of a request, goes in a message of one's own
ROWS, ROW = ("$tokens", "$texts"), ("$sequence", "$text")
HASTY = RetryPolicy(attempts=2)  # what is only tried is not tried for long


@dataclass(frozen=True)
class EmbeddingDialect:
    """How rows are put to a server, and where its reply holds the vectors."""

    name: str
    path: str  # behind the address of the server; empty: the address itself
    template: Any  # the message, with "$rows" where the list of rows goes
    answer: tuple[str, ...]  # path to the list of answers in a reply
    vector: tuple[str, ...] = ()  # path to the vector in one answer
    takes: tuple[str, ...] = (NUMBERS, TEXT)
    single: bool = False  # one row a request
    labelled: bool = False  # an answer is a list of scores with their labels, the best first


OPENAI = EmbeddingDialect(
    "openai",
    "/v1/embeddings",
    {"input": "$rows", "encoding_format": "float"},
    ("data",),
    ("embedding",),
)
TEI = EmbeddingDialect("tei", "/embed", {"inputs": "$rows", "truncate": False}, ())
PREDICT = EmbeddingDialect(  # a list of two strings would be taken for one pair
    "predict",
    "/predict",
    {"inputs": "$lists", "raw_scores": True, "truncate": False},
    (),
    takes=(TEXT,),
    labelled=True,
)
DIALECTS = {dialect.name: dialect for dialect in (OPENAI, TEI, PREDICT)}


class EmbeddingEndpoint(RowBox):
    """Asks an embedding server, one request for all rows that are asked together."""

    def __init__(
        self,
        endpoint: Endpoint,
        dialect: EmbeddingDialect,
        path: str,
        spec: RowSpec,
        model: str | None,
        labels: Sequence[str] = (),
    ) -> None:
        self.endpoint, self.dialect, self.path = endpoint, dialect, path
        self.spec, self.model, self.asked, self.labels = spec, model, 0, tuple(labels)

    @property
    def traffic(self) -> Any:
        """What went over the wire since it was opened."""
        return self.endpoint.traffic

    @property
    def opening_queries(self) -> int:
        return self.asked

    def ask(self, rows: Sequence[Row], patience: RetryPolicy | None = None) -> Array:
        """The vectors (rows, outputs) of these rows, asked in one request."""
        if not len(rows):
            raise InvalidArgument("no rows to ask")
        strange = [kind for kind in map(kind_of_row, rows) if kind not in self.spec.takes]
        if strange:
            raise InvalidArgument(
                f"{self.spec.identity} takes {' and '.join(self.spec.takes)}, and was given "
                f"{strange[0]}"
            )
        if self.dialect.single:
            return np.concatenate([self._ask([row], patience) for row in rows])
        return self._ask(rows, patience)

    def _ask(self, rows: Sequence[Row], patience: RetryPolicy | None) -> Array:
        plain = [row if isinstance(row, str) else np.asarray(row).tolist() for row in rows]
        body = fill(self.dialect.template, marks_of(plain))
        if self.model is not None and isinstance(body, dict):
            body = {**body, "model": self.model}
        answers: Array = self.endpoint.ask(
            "POST",
            self.path,
            content=json.dumps(body).encode(),
            headers=JSON,
            queries=len(rows),
            read=lambda answer: self._read(answer, len(rows)),
            patience=patience,
        )
        return answers

    def _read(self, answer: Answer, count: int) -> Array:
        who, dialect = self.endpoint.identity, self.dialect
        numbers = read_numbers(answer, dialect.answer, self._find, who, "vectors of equal length")
        if len(numbers) != count:
            raise Transient(f"{who} gave {len(numbers)} answers to {count} rows")
        return check_row_answers(numbers, count, who)

    def _find(self, found: Any) -> list[Any]:
        """The vectors in a reply, in the order of the rows."""
        listed = follow(found, list(self.dialect.answer))
        if self.dialect.single and not self.dialect.vector:
            listed = [listed]
        entries = in_order(listed)
        if self.dialect.labelled:
            return [by_label(entry, self.labels) for entry in entries]
        return [follow(entry, list(self.dialect.vector)) for entry in entries]

    def close(self) -> None:
        self.endpoint.close()


def in_order(listed: Any) -> list[Any]:
    """Answers in the order of the rows: by the index that each carries, where all do."""
    entries = list(listed)
    if not entries or not all(isinstance(e, dict) and "index" in e for e in entries):
        return entries
    places = sorted(entry["index"] for entry in entries)
    if places != list(range(len(entries))):
        raise ValueError("answers whose indices do not count the rows")
    return sorted(entries, key=lambda entry: int(entry["index"]))


def by_label(scores: Any, labels: Sequence[str]) -> list[float]:
    """Scores in the order of the labels, or, where that is not known, of their names.

    >>> by_label([{"label": "LABEL_1", "score": 3.0}, {"label": "LABEL_0", "score": 1.0}], ())
    [1.0, 3.0]
    """
    found = {str(entry["label"]): float(entry["score"]) for entry in scores}
    order = list(labels) if set(labels) == set(found) else sorted(found, key=_name_of_label)
    return [found[label] for label in order]


def _name_of_label(label: str) -> tuple[str, int]:
    """Names with a number at the end in the order of the numbers: LABEL_2 before LABEL_10."""
    name = label.rstrip("0123456789")
    return name, int(label[len(name) :] or 0)


def marks_of(rows: list[Any]) -> dict[str, Any]:
    """What stands for the rows of a request in a message."""
    return {
        **dict.fromkeys(("$rows", *ROWS), rows),
        "$lists": [[row] for row in rows],
        **dict.fromkeys(ROW, rows[0]),
    }


def own_dialect(request: Any, answer: str) -> EmbeddingDialect:
    """The dialect of an endpoint with a JSON of its own."""
    request = read_template(request)
    text = json.dumps(request)
    marks = [mark for mark in (*ROWS, *ROW) if f'"{mark}"' in text]
    if len(marks) != 1 or text.count(f'"{marks[0]}"') != 1:
        raise InvalidArgument(
            f"request must hold one of {', '.join((*ROWS, *ROW))}, once: where all rows of a "
            "request go (numbers of tokens, or texts), or the only one"
        )
    single = marks[0] in ROW
    takes = (TEXT,) if marks[0] in (ROWS[1], ROW[1]) else (NUMBERS,)
    return EmbeddingDialect(
        "own", "", request, tuple(answer.split(".")) if answer else (), (), takes, single
    )


def find_dialects(url: str, dialect: str | None) -> list[tuple[EmbeddingDialect, str]]:
    """Dialects to try at an address, with the path of each behind it: the one that is named, the
    one that the address ends with, else all."""
    if dialect is not None and dialect not in DIALECTS:
        raise InvalidArgument(
            f"dialect must be one of {', '.join(DIALECTS)}, got {dialect!r}; for another one say "
            "request= and answer="
        )
    place = urlsplit(url).path.rstrip("/")
    known = [DIALECTS[dialect]] if dialect is not None else list(DIALECTS.values())
    ends = [one for one in known if place.endswith(one.path)]
    if ends:
        return [(ends[0], "")]
    return [(one, f"{place.removesuffix('/v1')}{one.path}") for one in known]


def open_embedding_endpoint(
    url: str,
    *,
    dialect: str | None = None,
    tokenizer: Any = None,
    model: str | None = None,
    tokens: int | None = None,
    max_length: int | None = None,
    labels: Sequence[str] = (),
    request: Any = None,
    answer: str = "",
    **access: Any,
) -> EmbeddingEndpoint:
    """The embedding server at `url` as a box of rows.

    Args:
        url: Address of the server, or of one of its endpoints (`…/v1/embeddings`, `…/embed`).
        dialect: "openai", "tei" or "predict"; found by asking where it is not given.
        tokenizer: Of the model, where it is at hand: its size is the vocabulary of token numbers.
        model: Name of the model, where the server has several.
        tokens: Size of the vocabulary, where no tokenizer says it.
        max_length: Tokens of the longest row.
        labels: Of a classifier, in the order of its logits: servers may send the best first.
        request: For a JSON of one's own: the message, with "$tokens" (all rows as token numbers),
            "$texts" (as texts), "$sequence" or "$text" (one row) where they go.
        answer: Path to the vectors in its reply, as in "result.vectors" or "data.*.embedding".
        **access: Options of any endpoint: token_env, timeout, rate, headers, patience, plain_token.

    Returns:
        A box whose `ask(rows)` sends all rows in one request and answers (rows, outputs);
        `spec.takes` says whether rows may be token numbers or texts.

    Raises:
        OracleError: The address serves none of the dialects, or refuses both kinds of rows.

    Example:
        >>> open_embedding_endpoint("http://localhost:9", dialect="telepathy")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        keyhole.errors.InvalidArgument: ...
    """
    known = [field.name for field in fields(Access)]
    strange = sorted({*access} - {*known})
    if strange:
        raise InvalidArgument(
            f"an embedding endpoint has no option {', '.join(strange)}; it has {', '.join(known)}"
        )
    if tokens is None and tokenizer is not None:
        tokens = len(tokenizer)
    endpoint = Endpoint(url, Access(**access))
    try:
        if request is not None:
            own = own_dialect(request, answer)
            spec = RowSpec(own.takes, endpoint.identity, tokens, max_length)
            return EmbeddingEndpoint(endpoint, own, "", spec, model)
        return _examine(endpoint, url, dialect, model, tokens, max_length, labels)
    except BaseException:
        endpoint.close()
        raise


def _examine(
    endpoint: Endpoint,
    url: str,
    dialect: str | None,
    model: str | None,
    tokens: int | None,
    max_length: int | None,
    labels: Sequence[str],
) -> EmbeddingEndpoint:
    """Which dialect is served, and which rows it takes: one short row of each kind."""
    model = model or _name_of_model(endpoint)
    # numbers that every vocabulary has; a text of one ordinary word
    samples: dict[str, Row] = {NUMBERS: np.array([1, 2]), TEXT: "word"}
    refusal, asked = "", 0
    for one, path in find_dialects(url, dialect):
        taken = []
        for kind in one.takes:
            spec = RowSpec((kind,), endpoint.identity, tokens, max_length)
            box = EmbeddingEndpoint(endpoint, one, path, spec, model, labels)
            asked += 1
            try:
                box.ask([samples[kind]], HASTY)
            except (Forbidden, Unreachable):
                raise
            except OracleError as error:
                refusal = str(error)
                continue
            taken.append(kind)
        if taken:
            spec = RowSpec(tuple(taken), endpoint.identity, tokens, max_length)
            found = EmbeddingEndpoint(endpoint, one, path, spec, model, labels)
            found.asked = asked
            return found
    raise OracleError(
        f"{endpoint.identity} serves no embeddings: neither {OPENAI.path} nor {TEI.path} nor "
        f"{PREDICT.path} answers. Name its own JSON with request= and answer= (--request, "
        f"--answer). Its last word: {refusal}"
    )


def _name_of_model(endpoint: Endpoint) -> str | None:
    """The first model that the server lists, where it does."""
    try:
        reply = endpoint.ask("GET", "/v1/models", patience=RetryPolicy(attempts=1))
        name = json.loads(reply.body)["data"][0]["id"]
    except (OracleError, ValueError, LookupError, TypeError):
        return None
    return name if isinstance(name, str) else None
