"""A box behind an HTTP endpoint with a JSON of its own.

`request` is the message with the string "$tokens" where a batch of sequences goes, or "$sequence"
where one sequence goes (then every query is a request). `answer` is the path to the numbers in
the reply, names and positions separated by dots; empty if the reply itself is the list.
"""

import json
import threading
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
        filled = _filled(self.request, SINGLE if self.single else BATCH, tokens, self.single)
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
        try:
            found = json.loads(answer.body)
        except (ValueError, RecursionError) as error:
            raise Transient(f"{who}: half an answer: not JSON") from error
        try:
            for step in self.path:
                found = found[int(step)] if isinstance(found, list) else found[step]
            numbers = np.array(found, dtype=np.float64)
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise OracleError(
                f"{who} answered, but at {'.'.join(self.path) or 'the top'} of the answer there "
                f"are no numbers ({type(error).__name__}): correct answer="
            ) from error
        return sound(last_position(numbers[None] if self.single else numbers), count, who)

    def close(self) -> None:
        self.endpoint.close()


def _filled(template: Any, mark: str, tokens: Array, single: bool) -> Any:
    if template == mark:
        return (tokens[0] if single else tokens).tolist()
    if isinstance(template, dict):
        return {key: _filled(item, mark, tokens, single) for key, item in template.items()}
    if isinstance(template, list):
        return [_filled(item, mark, tokens, single) for item in template]
    return template


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
    if isinstance(request, str):
        try:
            request = json.loads(request)
        except ValueError as error:
            raise InvalidArgument(f"request is not JSON: {error}") from error
    text = json.dumps(request)
    if text.count(f'"{BATCH}"') + text.count(f'"{SINGLE}"') != 1:
        raise InvalidArgument(f'request must hold either "{BATCH}" or "{SINGLE}", once')
    if width is None:
        raise InvalidArgument("this box does not tell its width: pass width= (--width)")
    endpoint = Endpoint(url, access or Access())
    spec = Spec(width, None, domain, precision, endpoint.identity)
    return JsonOracle(endpoint, request, answer, spec, batch)
