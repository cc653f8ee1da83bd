"""A box behind an HTTP endpoint with a JSON of its own.

`request` is the message with the string "$tokens" where a batch of sequences goes, or "$sequence"
where one sequence goes (then every query is a request). `answer` is the path to the numbers in
the reply, names and positions separated by dots, * for every entry of a list; empty if the reply
itself is the list.
"""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import InvalidArgument, OracleError
from keyhole.oracles.base import Domain, Spec
from keyhole.oracles.http.client import Access, Answer, Endpoint
from keyhole.oracles.http.open_inference import last_position, polite, sound
from keyhole.oracles.http.retry import Transient
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import QueryBatch
from keyhole.oracles.wrappers.parts import Parted
from keyhole.text import clean

BATCH, SINGLE = "$tokens", "$sequence"


class JsonOracle(Parted):
    """Asks by filling in a template, reads by following a path."""

    def __init__(
        self, endpoint: Endpoint, request: Any, answer: str, spec: Spec, batch: int | None
    ) -> None:
        self.endpoint, self.request, self.spec = endpoint, request, spec
        self.path = answer.split(".") if answer else []
        self.single = SINGLE in json.dumps(request)
        self.batch = 1 if self.single else polite(batch, endpoint.access)
        self.concurrency = endpoint.access.concurrency

    @property
    def traffic(self) -> Any:
        return self.endpoint.traffic

    def answer(self, queries: QueryBatch, stop: threading.Event) -> Array:
        tokens = queries.tokens()
        filled = fill(self.request, {BATCH: tokens.tolist(), SINGLE: tokens[0].tolist()})
        answers: Array = self.endpoint.ask(
            "POST",
            "",
            content=json.dumps(filled).encode(),
            headers={"Content-Type": "application/json"},
            queries=len(queries),
            read=lambda answer: self._read(answer, len(queries)),
            stop=stop,
        )
        return answers

    def _read(self, answer: Answer, count: int) -> Array:
        who = self.endpoint.identity
        numbers = read_numbers(
            answer,
            self.path,
            lambda found: follow(found, self.path),
            who,
            "numbers (correct answer=, --answer)",
        )
        return sound(last_position(numbers[None] if self.single else numbers), count, who)

    def close(self) -> None:
        self.endpoint.close()


def read_numbers(
    answer: Answer, path: Sequence[str], find: Callable[[Any], Any], who: str, wanted: str
) -> Array:
    """The numbers that `find` takes out of a reply of JSON.

    Raises:
        Transient: The reply is no JSON: it may have been cut on its way.
        OracleError: There are no such numbers; the sentence says where there are some.
    """
    try:
        found = json.loads(answer.body)
    except (ValueError, RecursionError) as error:
        raise Transient(f"{who}: half an answer: not JSON") from error
    try:
        return np.array(find(found), dtype=np.float64)
    except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
        raise OracleError(
            f"{who} answered, but at {'.'.join(path) or 'the top'} of the answer there are no "
            f"{wanted} ({type(error).__name__}). {describe_reply(found)}"
        ) from error


def read_template(request: Any) -> Any:
    """The message of a JSON of one's own, given as text or as plain Python data."""
    if not isinstance(request, str):
        return request
    try:
        return json.loads(request)
    except ValueError as error:
        raise InvalidArgument(f"request is not JSON: {error}") from error


def fill(template: Any, marks: Mapping[str, Any]) -> Any:
    """The message with what stands for each mark in its place.

    >>> fill({"inputs": ["$rows"]}, {"$rows": [3, 1]})
    {'inputs': [[3, 1]]}
    """
    if isinstance(template, str):
        return marks.get(template, template)
    if isinstance(template, dict):
        return {key: fill(item, marks) for key, item in template.items()}
    if isinstance(template, list):
        return [fill(item, marks) for item in template]
    return template


def follow(found: Any, path: list[str]) -> Any:
    """What stands at the end of a path; * takes every entry of a list, or every value of an
    object.

    >>> follow({"predictions": [{"score": 1}, {"score": 2}]}, ["predictions", "*", "score"])
    [1, 2]
    """
    if not path:
        return found
    step, rest = path[0], path[1:]
    if step == "*" and not (isinstance(found, dict) and "*" in found):
        return [
            follow(entry, rest) for entry in (found.values() if isinstance(found, dict) else found)
        ]
    return follow(found[int(step)] if isinstance(found, list) else found[step], rest)


def describe_reply(found: Any) -> str:
    """The paths to numbers in a reply, and its beginning: what one needs to write the path."""
    places = list(dict.fromkeys(list_numbers(found, ())))[:8]
    named = f"Numbers stand at {', '.join(places)}. " if places else ""
    return clean(f"{named}The reply begins {json.dumps(found)[:200]}")


def list_numbers(found: Any, path: tuple[str, ...]) -> Iterator[str]:
    """Paths to the numbers in a reply, entries of lists as *, as far as anyone would read."""
    if len(path) > 6:
        return
    if isinstance(found, dict):
        for name, entry in list(found.items())[:20]:
            yield from list_numbers(entry, (*path, str(name)))
    elif isinstance(found, list) and any(isinstance(entry, dict) for entry in found[:2]):
        for entry in found[:2]:
            yield from list_numbers(entry, (*path, "*"))
    elif isinstance(found, (int, float, list)) and not isinstance(found, bool):
        inner = found
        while isinstance(inner, list) and inner:
            inner = inner[0]
        if isinstance(inner, (int, float)):
            yield ".".join(path) or "the top (an empty path)"


def open_json(
    url: str,
    width: int | None,
    domain: Domain,
    precision: NoiseModel | None,
    *,
    access: Access | None = None,
    request: Any,
    answer: str = "",
    batch: int | None = None,
) -> JsonOracle:
    """The box at `url`; `request` as text or as plain Python data."""
    request = read_template(request)
    text = json.dumps(request)
    if text.count(f'"{BATCH}"') + text.count(f'"{SINGLE}"') != 1:
        raise InvalidArgument(f'request must hold either "{BATCH}" or "{SINGLE}", once')
    if width is None:
        raise InvalidArgument("this box does not tell its width: pass width= (--width)")
    endpoint = Endpoint(url, access or Access())
    spec = Spec(width, None, domain, precision, endpoint.identity)
    return JsonOracle(endpoint, request, answer, spec, batch)
