import numpy as np
import pytest

from keyhole.arrays import digest, finite_array, frozen
from keyhole.errors import InvalidArgument


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
