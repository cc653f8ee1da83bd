"""What the numbers in a language model's answers are."""

import numpy as np

from keyhole.arrays import Array, Float
from keyhole.errors import OracleError
from keyhole.oracles.noise import FORMATS

SUMS_TO_ONE = 1e-2  # how far the probabilities of all tokens may sum off one, rounded as they are


def log_total(answers: Float[Array, "n tokens"]) -> Float[Array, " n"]:
    """Logarithm of the sum of the exponentials of each row; zero where these are probabilities."""
    rows = np.asarray(answers, dtype=np.float64)
    largest = rows.max(axis=1)
    return np.asarray(largest + np.log(np.exp(rows - largest[:, None]).sum(axis=1)))


def recognise_answers(answers: Array) -> str:
    """Logits or log-probabilities (labels where an answer is one number)? Probabilities are
    refused: their logarithms are wanted."""
    if answers.ndim == 1:
        return "labels"
    rows = np.asarray(answers, dtype=np.float64)
    sums = rows.sum(axis=1)
    if (rows >= 0).all() and (np.abs(sums - 1.0) < SUMS_TO_ONE).all():
        raise OracleError(
            "the box answers with probabilities: return their logarithms, or logits, which "
            "have more digits"
        )
    return "logprobs" if (np.abs(log_total(rows)) < SUMS_TO_ONE).all() else "logits"


def check_sums(logprobs: Float[Array, "n tokens"]) -> None:
    """Refuses log-probabilities of all tokens that do not sum to one: what else was done to them
    is not known."""
    totals = log_total(logprobs)
    off = np.abs(totals) > SUMS_TO_ONE
    if off.any():
        raise OracleError(
            f"the probabilities of all tokens sum to {np.exp(totals[off][0]):.2f}, not to one: "
            "the interface scales, cuts or disturbs them, or leaves tokens out. Where they are "
            'logits, say so with answers="logits"'
        )


def centred(answers: Float[Array, "n tokens"]) -> Float[Array, "n tokens"]:
    """Answers less their mean over the tokens: the same for logits and for log-probabilities."""
    rows = np.asarray(answers, dtype=np.float64)
    return np.asarray(rows - rows.mean(axis=1, keepdims=True))


def name_logit_format(answers: Float[Array, "*n tokens"]) -> str | None:
    """The number format of the logits behind log-probabilities that were normalised and printed in
    double precision; None where it is double too, or too little is told.

    Differences within an answer are differences of logits, and those of a shorter format are whole
    multiples of a power of two. Nine in ten are taken: a logit next to zero has a finer one.
    """
    rows = np.asarray(answers, dtype=np.float64)
    rows = rows[:, None] if rows.ndim == 1 else rows
    gaps = rows - rows.max(axis=1, keepdims=True)
    gaps = gaps[(gaps < 0) & np.isfinite(gaps)]
    if gaps.size < 3:
        return None
    size = float(np.sqrt(np.mean(gaps**2)))
    finest = 36  # beyond, the roundings of double precision are as large
    for power in range(-4, finest + 1):
        scaled = gaps * 2.0**power
        if np.mean(np.abs(scaled - np.rint(scaled)) < 0.01) >= 0.9:  # by chance: two in a hundred
            # numbers a tenth of the ordinary size have three bits more
            bits = np.log2(size) + power - 3.0
            return next((name for name, width in FORMATS[:-1] if bits <= width + 3.0), None)
    return None
