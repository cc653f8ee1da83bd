"""open_language_model: a model that takes the numbers of tokens becomes an oracle.

A query is a sequence of vectors of width 1, each of which holds the number of a token; an answer
has one number per token of the vocabulary. So recover(), journal, budget and ledger serve language
models as they serve any other box.
"""

import re
from dataclasses import fields
from typing import Any, Unpack

import numpy as np

from keyhole.arrays import Array, whole_number
from keyhole.errors import InvalidArgument, OracleError
from keyhole.oracles.base import ANSWERS, Domain, Oracle, Spec
from keyhole.oracles.language_model.answers import name_logit_format, recognise_answers
from keyhole.oracles.language_model.function import TokenFunction, call
from keyhole.oracles.language_model.huggingface import adapt_causal_model, is_causal_model
from keyhole.oracles.noise import FORMATS, NoiseModel
from keyhole.oracles.open import name_of_box
from keyhole.oracles.options import LanguageModelOptions


def open_language_model(
    target: Any,
    *,
    vocabulary: int | None = None,
    max_length: int | None = None,
    model: str | None = None,
    answers: str | None = None,
    **options: Unpack[LanguageModelOptions],
) -> Oracle:
    """Opens the language model behind `target`, so that it can be asked.

    A server is asked what it does (`box.interface`); where it gives few log-probabilities or none
    but takes biases, each answer is put together from several questions, which journal, ledger and
    budget count one by one. What is not given is found by asking: one query, which the ledger of a
    run counts as "opening".

    Args:
        target: A callable (batch, length) of token numbers -> (batch, vocabulary) logits or
            log-probabilities of the token that comes next; a Hugging Face causal LM; or the
            `http(s)://` address of a server with OpenAI's API (/v1/completions,
            /v1/chat/completions) or llama.cpp's own (/completion).
        vocabulary: Number of tokens.
        max_length: Tokens in a prompt, at most.
        model: Which model of a server that has several.
        answers: "logits", "logprobs", "top_k" or "labels".
        **options: Of an endpoint: rate, timeout, token_env and so on; `top`, the most
            log-probabilities to ask for; `names`, the text of every token; `journal`, that of the
            run: what is asked to find out what a server does is kept beside it, and whoever opens
            the server again, to continue, does not pay for it twice.

    Returns:
        The oracle, whose queries are numbers of tokens.

    Raises:
        InvalidArgument: Something that is no language model, or an option that it does not have.
        OracleError: A server or function that does not answer, or not with one row per prompt.

    Example:
        >>> import numpy as np
        >>> table = np.random.default_rng(0).standard_normal((50, 50))
        >>> box = open_language_model(lambda prompts: table[prompts[:, -1]])
        >>> box.spec.domain.tokens, box.spec.answers, box.opening_queries
        (50, 'logits', 1)
    """
    if answers not in (None, *ANSWERS):
        raise InvalidArgument(f"answers must be one of {', '.join(ANSWERS)}, got {answers!r}")
    if vocabulary is not None:
        vocabulary = whole_number("vocabulary", vocabulary, 2)
    if isinstance(target, Oracle):
        if target.spec.domain.tokens is None:
            raise InvalidArgument("this Oracle takes vectors, not the numbers of tokens")
        return target
    if isinstance(target, str) and re.match(r"https?://", target, re.IGNORECASE):
        return _open_url(target, vocabulary, max_length, model, dict(options))
    if options:
        raise InvalidArgument(f"only an endpoint has the options {', '.join(sorted(options))}")
    if is_causal_model(target):
        return _open_function(*adapt_causal_model(target, vocabulary, max_length), answers)
    if isinstance(target, type) or not callable(target):
        raise InvalidArgument(
            f"cannot open {target!r} as a language model; expected a callable on token numbers of "
            "shape (batch, length), a Hugging Face causal LM, or the http(s):// address of a server"
        )
    return _open_function(target, vocabulary, max_length, answers)


def _open_url(
    url: str,
    vocabulary: int | None,
    max_length: int | None,
    model: str | None,
    options: dict[str, Any],
) -> Oracle:
    from keyhole.oracles.http.client import Access
    from keyhole.oracles.language_model.endpoint import open_endpoint

    known = [field.name for field in fields(Access)]
    strange = sorted({*options} - {*known, "top", "names", "journal"})
    if strange:
        raise InvalidArgument(
            f"an endpoint of a language model has no option {', '.join(strange)}; it has top, "
            f"names, journal, {', '.join(known)}"
        )
    access = Access(**{name: options.pop(name) for name in known if name in options})
    return open_endpoint(url, vocabulary, max_length, model, access=access, **options)


def _open_function(
    target: Any, vocabulary: int | None, max_length: int | None, answers: str | None
) -> Oracle:
    asked, precision = 0, None
    if vocabulary is None or answers is None:
        seen, asked = call(target, np.zeros((1, 1), dtype=np.int64)), 1
        if seen.ndim not in (1, 2) or len(seen) != 1:
            raise OracleError(
                f"the box answered one prompt with shape {seen.shape}; expected (1, vocabulary): "
                "the logits or log-probabilities of the last position alone"
            )
        answers = answers or recognise_answers(seen)
        precision = read_logit_precision(seen, answers)
        if seen.ndim == 2 and vocabulary not in (None, seen.shape[1]):
            raise OracleError(
                f"vocabulary={vocabulary}, but the box answers with {seen.shape[1]} numbers"
            )
        vocabulary = vocabulary if seen.ndim == 1 else int(seen.shape[1])
    if vocabulary is None:
        raise InvalidArgument("this box does not tell the size of its vocabulary: pass vocabulary=")
    domain = Domain(max_length, tokens=vocabulary)
    outputs = None if answers == "labels" else vocabulary
    spec = Spec(1, outputs, domain, precision, name_of_box(target), answers)
    return TokenFunction(target, spec, asked)


def read_logit_precision(seen: Array, answers: str) -> NoiseModel | None:
    """The precision of logits that were normalised in double precision, where it shows."""
    if answers != "logprobs" or seen.dtype != np.float64:
        return None
    name = name_logit_format(seen)
    return None if name is None else NoiseModel(2.0 ** -dict(FORMATS)[name], format=name)
