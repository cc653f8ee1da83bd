"""Recoveries of every kind, for the tests of the report."""

from collections.abc import Callable
from functools import cache

import numpy as np

import keyhole
from boxes import impostors
from keyhole.models.attention import Attention
from keyhole.models.random import attention
from keyhole.results import Ledger, Outcome, Recovery, Verdict

NETWORK = keyhole.ReluNetwork(
    np.random.default_rng(1).standard_normal((6, 4)),
    np.random.default_rng(2).standard_normal(6),
    np.random.default_rng(3).standard_normal(6),
)
SCORE = np.random.default_rng(4).standard_normal((4, 4)) / 2


def head(width: int = 12) -> Attention:
    return attention(np.random.default_rng(0), width, bias=True)


def labels(tokens: np.ndarray) -> np.ndarray:
    return np.sign(attention(np.random.default_rng(0), 4)(tokens))


def claimed(model: Attention, errors: Attention | None = None) -> Recovery:
    """A recovery that never ran: for sizes at which running would take long."""
    verdict = Verdict(True, 5, 100, 0.1, 1e-16, "All fresh answers agree.")
    return Recovery(Outcome.RECOVERED, model, errors, verdict, Ledger({"score": 1000}, 900.0))


def wide(width: int = 512, **kind: int) -> Recovery:
    drawn = [attention(np.random.default_rng(seed), width, bias=True, **kind) for seed in (0, 1)]
    return claimed(*drawn)


KINDS: dict[str, Callable[[], Recovery]] = {
    "one head": lambda: keyhole.recover(head(), keyhole.SingleHead()),
    "low rank": lambda: keyhole.recover(
        attention(np.random.default_rng(3), 16, rank=2), keyhole.LowRank()
    ),
    "several heads": lambda: keyhole.recover(
        attention(np.random.default_rng(0), 12, heads=2, rank=3, outputs=12, bias=True),
        keyhole.MultiHead(),
    ),
    "network": lambda: keyhole.recover(NETWORK, keyhole.ReluNetworkLearner()),
    "transformer": lambda: keyhole.recover(
        keyhole.TransformerModel(SCORE, None, NETWORK), keyhole.Transformer()
    ),
    "labels": lambda: keyhole.recover(
        keyhole.open_oracle(labels, width=4), keyhole.LabelOnly(bits=10), throw=False
    ),
    "rejected": lambda: keyhole.recover(
        keyhole.open_oracle(impostors(8)["two heads"], width=8), keyhole.SingleHead(), throw=False
    ),
    "budget": lambda: keyhole.recover(head(), keyhole.SingleHead(), budget=30, throw=False),
    "not identifiable": lambda: keyhole.recover(
        keyhole.open_oracle(head(), max_length=1), keyhole.SingleHead(), throw=False
    ),
    "wide": wide,
    "wider": lambda: wide(4096, rank=8),
}


@cache
def recovery(kind: str) -> Recovery:
    return KINDS[kind]()
