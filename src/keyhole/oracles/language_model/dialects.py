"""How a question is put to a server, and how its reply is read: three dialects of JSON.

Replies are read for what they hold, not for who sent them: tokens by number (`id`,
"token_id:123") or by text, log-probabilities in the older or the newer form of OpenAI's API, or
llama.cpp's own.
"""

import math
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from keyhole.errors import OracleError
from keyhole.oracles.language_model.questions import Question

NUMBERED = "token_id:"  # how some servers write tokens that are no text by themselves


@dataclass(frozen=True, eq=False)
class Told:
    """What one reply tells. Tokens are numbers, or text where the server names no numbers."""

    sampled: int | str
    logprob: float | None
    likeliest: Mapping[int | str, float]
    echoed: bool = False  # the prompt's own tokens were told as well


@dataclass(frozen=True)
class Request:
    """What is put to a server beside the question itself."""

    top: int
    model: str | None = None
    temperature: float = 0.0  # the likeliest token is sampled
    echo: bool = False
    words: bool = False  # the prompt as text: the numbers of its tokens, written out
    llama: bool = False  # the server is llama.cpp, which may take more than OpenAI's API has

    @property
    def own(self) -> dict[str, Any]:
        """llama.cpp: that a prompt was seen before must not change how its answer is rounded."""
        return {"cache_prompt": False} if self.llama else {}


class Dialect(ABC):
    """One way to ask."""

    name: str
    path: str  # of the endpoint, behind the address of the server

    @abstractmethod
    def body(self, question: Question, request: Request) -> dict[str, Any]:
        """The message."""

    @abstractmethod
    def read(self, reply: Any) -> Told:
        """What the reply tells; a reply of another form raises (KeyError, TypeError, …)."""


def prompt_text(question: Question, names: Sequence[str] | None = None) -> str:
    """A prompt as text: what its tokens stand for, or else their numbers, written out. Different
    prompts are different texts, and no more is needed."""
    if names is not None:
        return "".join(names[token] for token in question.prompt)
    return " ".join(str(token) for token in question.prompt)


def seed_of(question: Question) -> int:
    """The same for the same question: what a server samples at random it samples again."""
    text = f"{question.prompt.tolist()} {sorted(question.bias.items())}"
    return zlib.crc32(text.encode()) & 0x7FFFFFFF


class Completions(Dialect):
    """OpenAI's /v1/completions, as llama.cpp, vLLM and others serve it too."""

    name, path = "completions", "/v1/completions"

    def body(self, question: Question, request: Request) -> dict[str, Any]:
        prompt = prompt_text(question) if request.words else question.prompt.tolist()
        body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": 1,
            "temperature": request.temperature,
            "seed": seed_of(question),
            **request.own,
        }
        if request.top:
            body["logprobs"] = request.top
        if question.bias:
            body["logit_bias"] = {str(token): bias for token, bias in question.bias.items()}
        if request.echo:
            body["echo"] = True
        if request.model is not None:
            body["model"] = request.model
        return body

    def read(self, reply: Any) -> Told:
        return _read_choice(reply["choices"][0])


class Chat(Dialect):
    """OpenAI's /v1/chat/completions: prompts are text."""

    name, path = "chat", "/v1/chat/completions"

    def body(self, question: Question, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": prompt_text(question)}],
            "max_tokens": 1,
            "temperature": request.temperature,
            "seed": seed_of(question),
            **request.own,
        }
        if request.top:
            body |= {"logprobs": True, "top_logprobs": request.top}
        if question.bias:
            body["logit_bias"] = {str(token): bias for token, bias in question.bias.items()}
        if request.model is not None:
            body["model"] = request.model
        return body

    def read(self, reply: Any) -> Told:
        return _read_choice(reply["choices"][0])


class Llama(Dialect):
    """llama.cpp's own /completion, which tells probabilities behind the bias."""

    name, path = "llama", "/completion"

    def body(self, question: Question, request: Request) -> dict[str, Any]:
        return {
            "prompt": prompt_text(question) if request.words else question.prompt.tolist(),
            "n_predict": 1,
            "n_probs": request.top,
            "post_sampling_probs": True,
            "temperature": request.temperature or 1.0,
            "samplers": ["temperature"],
            "seed": seed_of(question),
            "cache_prompt": False,
            "logit_bias": [[token, bias] for token, bias in question.bias.items()],
        }

    def read(self, reply: Any) -> Told:
        found = reply.get("completion_probabilities") or []
        if not found:  # the sampled token is no whole character
            return Told(-1, None, {})
        likeliest: dict[int | str, float] = {
            entry["id"]: math.log(entry["prob"])
            for entry in found[0]["top_probs"]
            if entry["prob"] > 0
        }
        prob = found[0]["prob"]
        return Told(found[0]["id"], math.log(prob) if prob > 0 else None, likeliest)


DIALECTS: tuple[Dialect, ...] = (Completions(), Chat(), Llama())


def _read_choice(choice: Any) -> Told:
    """Of OpenAI's API: either form of log-probabilities, or none."""
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    told = choice.get("logprobs")
    if not told:
        return Told(_token({"token": text or ""}), None, {})
    if told.get("content"):
        last = told["content"][-1]
        likeliest = {_token(entry): _logprob(entry["logprob"]) for entry in last["top_logprobs"]}
        return Told(_token(last), _logprob(last["logprob"]), likeliest, len(told["content"]) > 1)
    if not told.get("tokens"):
        return Told(_token({"token": text or ""}), None, {})
    best = (told.get("top_logprobs") or [{}])[-1] or {}
    likeliest = {_token({"token": name}): _logprob(value) for name, value in best.items()}
    value = told["token_logprobs"][-1]
    logprob = None if value is None else _logprob(value)
    return Told(_token({"token": told["tokens"][-1]}), logprob, likeliest, len(told["tokens"]) > 1)


def _logprob(value: Any) -> float:
    """A log-probability may be minus infinity, but neither infinity nor no number at all."""
    try:
        number = float(value)
    except OverflowError as error:
        raise ValueError("a log-probability of more digits than a number has") from error
    if math.isnan(number) or number == math.inf:
        raise ValueError(f"a log-probability of {number}")
    return number


def _token(entry: Mapping[str, Any]) -> int | str:
    """A token's number where the server tells it, else its text."""
    if isinstance(entry.get("id"), int):
        return int(entry["id"])
    text = entry["token"]
    if not isinstance(text, str):
        raise OracleError(f"the server names a token {text!r}, which is no text")
    return int(text.removeprefix(NUMBERED)) if text.startswith(NUMBERED) else text
