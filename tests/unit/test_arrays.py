import re
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest

import keyhole
from keyhole.arrays import digest, finite_array, frozen, whole_number
from keyhole.errors import InvalidArgument
from keyhole.models.random import attention
from keyhole.oracles.http.client import Access
from keyhole.oracles.noise import NoiseModel


def test_float32_stays_and_integers_become_float64() -> None:
    assert finite_array("x", np.ones(3, np.float32), ndim=1).dtype == np.float32
    assert finite_array("x", [1, 2], ndim=1).dtype == np.float64
    assert finite_array("x", np.float16(1.5), ndim=0).dtype == np.float64


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1.0, np.nan], "x holds NaN or infinity"),
        ([np.inf], "NaN or infinity"),
        ([1j], "real numbers, got dtype complex128"),
        (["a"], "real numbers"),
        ([[1.0], [1.0, 2.0]], "not an array"),
        ([[1.0]], r"1 dimension\(s\), got shape \(1, 1\)"),
    ],
)
def test_a_bad_array_is_named_with_what_was_wrong(value: object, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        finite_array("x", value, ndim=1)


def test_frozen_copies_what_somebody_could_write_to() -> None:
    mine = np.zeros(3)
    kept = frozen(mine)
    mine[0] = 1.0
    assert kept[0] == 0.0
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 2.0
    assert frozen(kept) is kept


def test_frozen_is_not_fooled_by_a_read_only_view() -> None:
    mine = np.zeros(3)
    view = mine[:]
    view.flags.writeable = False
    kept = frozen(view)
    mine[0] = 1.0
    assert kept[0] == 0.0


def test_digest_names_contents_shape_and_type() -> None:
    a = np.arange(6.0)
    names = {
        digest(a),
        digest(a.reshape(2, 3)),
        digest(a.reshape(3, 2)),
        digest(a.astype(np.float32)),
        digest(a.tobytes()),
        digest(a[:3], a[3:]),
        digest(np.zeros(0)),
        digest(np.zeros((0, 2))),
        digest(b"", a),
    }
    assert len(names) == 9
    assert digest(a) == digest(a.copy())
    assert digest(a.reshape(2, 3).T) == digest(np.ascontiguousarray(a.reshape(2, 3).T))


def test_whole_numbers_are_ints() -> None:
    assert whole_number("n", np.int64(4), 1) == 4
    assert type(whole_number("n", np.uint8(4), 1)) is int
    for value in (0, True, 2.0, 1.5, np.nan, "2", None, [3]):
        with pytest.raises(InvalidArgument, match="n must be a whole number of at least 1, got"):
            whole_number("n", value, 1)


HEAD = attention(np.random.default_rng(0), 4)
BAD: dict[str, Callable[[], object]] = {
    "seed": lambda: keyhole.recover(HEAD, seed=-1),
    "budget": lambda: keyhole.recover(HEAD, budget=np.nan),  # type: ignore[arg-type]
    "budget ": lambda: keyhole.recover(HEAD, budget="5"),  # type: ignore[arg-type]
    "learner": lambda: keyhole.recover(HEAD, keyhole.SingleHead),  # type: ignore[arg-type]
    "seed ": lambda: keyhole.verify(HEAD, HEAD, seed=-1),
    "model": lambda: keyhole.verify(HEAD, None),
    "queries": lambda: keyhole.verify(HEAD, HEAD, queries=1.5),  # type: ignore[arg-type]
    "seed  ": lambda: keyhole.learn(np.zeros((3, 2, 2)), np.zeros(3), seed=-1),
    "max_length": lambda: keyhole.open_oracle(HEAD, max_length=np.nan),  # type: ignore[arg-type]
    "max_length ": lambda: keyhole.open_oracle(HEAD, max_length=1.5),  # type: ignore[arg-type]
    "width": lambda: keyhole.open_oracle(len, width="4"),  # type: ignore[arg-type]
    "batch": lambda: keyhole.open_oracle(HEAD, batch=2.5),  # type: ignore[arg-type]
    "outputs": lambda: keyhole.Spec(4, 0),
    "rank": lambda: keyhole.SingleHead(rank="foo"),  # type: ignore[arg-type]
    "rank ": lambda: keyhole.SingleHead(rank=1.5),  # type: ignore[arg-type]
    "rank  ": lambda: keyhole.LowRank(rank=1.5),  # type: ignore[arg-type]
    "measurements": lambda: keyhole.LowRank("convex", measurements="9"),  # type: ignore[arg-type]
    "heads": lambda: keyhole.MultiHead(heads="2"),  # type: ignore[arg-type]
    "heads ": lambda: keyhole.MultiHead(heads=1.5),  # type: ignore[arg-type]
    "bits": lambda: keyhole.LabelOnly(bits="a"),  # type: ignore[arg-type]
    "neurons": lambda: keyhole.ReluNetworkLearner(neurons=1.5),  # type: ignore[arg-type]
    "max_norm": lambda: keyhole.open_oracle(HEAD, max_norm="a"),  # type: ignore[arg-type]
    "max_norm ": lambda: keyhole.open_oracle(HEAD, max_norm=True),
    "low": lambda: keyhole.open_oracle(HEAD, low="a"),
    "high": lambda: keyhole.open_oracle(HEAD, high=[1.0]),
    "precision": lambda: keyhole.open_oracle(len, 4, precision=1e-3),
    "additive": lambda: NoiseModel(additive=None),  # type: ignore[arg-type]
    "timeout": lambda: Access(timeout="9"),  # type: ignore[arg-type]
    "rate": lambda: Access(rate=np.nan),
    "accuracy": lambda: keyhole.SingleHead(accuracy="a"),  # type: ignore[arg-type]
    "score_bound": lambda: keyhole.SingleHead(score_bound=None),  # type: ignore[arg-type]
    "tolerance": lambda: keyhole.LowRank(tolerance="a"),  # type: ignore[arg-type]
    "scale": lambda: keyhole.ReluNetworkLearner(scale=[]),  # type: ignore[arg-type]
    "unseen": lambda: keyhole.ReluNetworkLearner(unseen=1.0),
    "seconds": lambda: keyhole.FromExamples(seconds="60"),  # type: ignore[arg-type]
    "noise": lambda: keyhole.FromExamples(noise=-0.1),
    "attention": lambda: keyhole.Transformer(attention="single"),  # type: ignore[arg-type]
    "ffn": lambda: keyhole.Transformer(ffn=keyhole.ReluNetworkLearner),  # type: ignore[arg-type]
}


def complaints() -> list[str]:
    """Bad arguments that were not named."""
    found = []
    for name, call in BAD.items():
        try:
            call()
        except InvalidArgument as error:
            if re.match(f"{name.strip()}.* must ", str(error)) is None:
                found.append(f"{name}: {error}")
        else:
            found.append(f"{name}: accepted")
    return found


def test_bad_arguments_are_named() -> None:
    """In a process of its own: here types are checked before the code sees them."""
    run = subprocess.run([sys.executable, __file__], check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


if __name__ == "__main__":
    assert complaints() == [], complaints()
    box = keyhole.open_oracle(lambda tokens: HEAD(tokens), width=np.int64(4))  # type: ignore[arg-type]
    assert keyhole.recover(box, keyhole.SingleHead()).outcome is keyhole.Outcome.RECOVERED
