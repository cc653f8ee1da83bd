"""Replies to the questions that find out what a server does, on disk beside the journal of a run:
who opens the server again, to continue, does not pay for them twice.

One line of JSON a question, written before the next goes out: a digest of where and what was asked,
and what the reply told, or the words of the refusal. A line that is damaged counts as not written.
"""

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

from keyhole.errors import JournalError
from keyhole.oracles.language_model.dialects import Told

ENDING = ".opening"  # behind the name of the journal


class OpeningRecord:
    """Replies in the order of the questions; `replayed` were answered from the file. A question
    that is asked twice, to see whether the answer is the same, is kept twice. Without a journal
    nothing is kept."""

    def __init__(self, journal: str | Path | None) -> None:
        self.path = None if journal is None else Path(f"{journal}{ENDING}")
        self.replayed = 0
        self._name = ""  # of the question that was recalled last
        self._asked: Counter[str] = Counter()
        self._known: dict[str, Told | str] = {}
        if self.path is None or not self.path.exists():
            return
        try:
            lines = self.path.read_bytes().splitlines()
        except OSError as error:
            raise JournalError(f"{self.path} cannot be read: {error}") from error
        for line in lines:
            both = _read_line(line)
            if both is not None:
                self._known[both[0]] = both[1]

    def recall(self, identity: str, path: str, body: dict[str, Any]) -> Told | str | None:
        """What was told (or the words of the refusal) when this was asked before, as often as now;
        None if it was not."""
        text = json.dumps([identity, path, body], sort_keys=True)
        self._asked[text] += 1
        # a digest: prompts and addresses do not go to the disk
        self._name = hashlib.sha256(f"{self._asked[text]} {text}".encode()).hexdigest()
        found = self._known.get(self._name)
        self.replayed += found is not None
        return found

    def keep(self, told: Told | str) -> None:
        """Writes down what was told to the question recalled last, or the refusal."""
        if self.path is None:
            return
        entry: dict[str, Any] = {"asked": self._name}
        if isinstance(told, str):
            entry["refusal"] = told
        else:
            likeliest = list(told.likeliest.items())
            entry["told"] = [told.sampled, told.logprob, likeliest, told.echoed]
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise JournalError(f"{self.path} cannot be written: {error}") from error


def _read_line(line: bytes) -> tuple[str, Told | str] | None:
    """Question and reply; None where the line is no such thing."""
    try:
        entry = json.loads(line)
        name = entry["asked"]
        if "refusal" in entry:
            return (str(name), str(entry["refusal"])) if isinstance(name, str) else None
        sampled, logprob, likeliest, echoed = entry["told"]
        pairs = {_token(token): float(value) for token, value in likeliest}
        told = Told(
            _token(sampled), None if logprob is None else float(logprob), pairs, bool(echoed)
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return str(name), told


def _token(value: Any) -> int | str:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise TypeError("a token is a number or a text")
    return value
