"""What users bring: every accepted form gives the same rows, every wrong one a sentence."""

import zipfile
from pathlib import Path

import numpy as np
import pytest

from keyhole.errors import FileFormatError, InvalidArgument, NotIdentifiable
from keyhole.learners.examples.data import build_examples, check_span, read_examples

RNG = np.random.default_rng(0)
X = RNG.standard_normal((5, 3, 2))
Y = RNG.standard_normal((5, 3, 4))


def test_forms_of_outputs() -> None:
    every, last, scalar = (
        build_examples(X, Y),
        build_examples(X, Y[:, -1]),
        build_examples(X, Y[:, -1, 0]),
    )
    assert (every.form, last.form, scalar.form) == ("every", "last", "scalar")
    assert every.rows.targets.shape == (5, 3, 4)
    np.testing.assert_array_equal(last.rows.anchors[:, 0], X[:, -1])
    assert scalar.rows.targets.shape == (5, 1, 1)


def test_lists_and_masks_are_the_same_rows() -> None:
    lengths = [3, 2, 1, 3, 2]
    mask = np.arange(3)[None] < np.array(lengths)[:, None]
    dirty_x, dirty_y = X.copy(), Y.copy()
    dirty_x[~mask], dirty_y[~mask] = np.nan, np.inf
    masked = build_examples(dirty_x, dirty_y, mask).rows
    listed = build_examples(
        [x[:n] for x, n in zip(X, lengths, strict=True)],
        [y[:n] for y, n in zip(Y, lengths, strict=True)],
    ).rows
    for name in ("anchors", "tokens", "padding", "weights", "targets"):
        np.testing.assert_array_equal(getattr(masked, name), getattr(listed, name))
    assert masked.lengths.tolist() == lengths
    last = build_examples([x[:n] for x, n in zip(X, lengths, strict=True)], Y[:, 0]).rows
    np.testing.assert_array_equal(last.anchors[1, 0], X[1, 1])


def test_masks_of_numbers_and_tensors_of_another_library() -> None:
    class Tensor:
        def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
            return X

    keep = np.ones((5, 3), bool)
    keep[0, 2] = False
    for other in (keep.astype(float), keep.astype(np.uint8)):
        rows = build_examples(Tensor(), Y, other).rows
        np.testing.assert_array_equal(rows.lengths, [2, 3, 3, 3, 3])


def test_single_precision_is_remembered() -> None:
    assert build_examples(X, Y.astype(np.float32)).roundoff > 1e-8 > build_examples(X, Y).roundoff


@pytest.mark.parametrize(
    ("inputs", "outputs", "mask", "says"),
    [
        (X, Y[:4], None, "5 inputs but 4 outputs"),
        (X, Y[:, :2], None, "2 positions"),
        (np.where(X > 1, np.nan, X), Y, None, "inputs holds NaN"),
        (X, np.where(Y > 1, np.inf, Y), None, "outputs holds NaN or infinity"),
        (X[0], Y, None, "3 dimension"),
        ([], Y, None, "no examples"),
        (X[:0], Y[:0], None, "no examples"),
        ([X[0], X[1, :, :1]], Y[:2], None, "one width"),
        ([X[0], X[1, :0]], Y[:2, 0], None, "no tokens"),
        (X, Y, np.ones((5, 2), bool), "mask must be"),
        (X, Y, np.full((5, 3), 0.5), "other values"),
        (X, Y, np.full((5, 3), -100), "other values"),
        (list(X), Y, np.ones((5, 3), bool), "padded array"),
        (X.astype(str), Y, None, "real numbers"),
        ("inputs", Y, None, "inputs"),
        (X, Y[:, :, :0], None, "empty"),
    ],
)
def test_wrong_input_gets_a_sentence(
    inputs: object, outputs: object, mask: object, says: str
) -> None:
    with pytest.raises(InvalidArgument, match=says):
        build_examples(inputs, outputs, mask)


def test_tokens_that_cannot_show_a_matrix() -> None:
    flat = RNG.standard_normal((20, 3, 4))
    flat[:, :, 0] = 1.0
    with pytest.raises(NotIdentifiable, match="differences of tokens span only 3 of 4"):
        check_span(build_examples(flat, flat).rows)
    with pytest.raises(NotIdentifiable, match="single token"):
        check_span(build_examples(flat[:, :1], flat[:, :1]).rows)


def test_files(tmp_path: Path) -> None:
    good = tmp_path / "good.npz"
    np.savez(good, inputs=X, outputs=Y)
    read = read_examples(good)
    np.testing.assert_array_equal(read.inputs, X)
    assert read.mask is None
    cases = {
        "missing.npz": (None, "no file"),
        "text.npz": (b"not an archive", "neither a NumPy archive nor"),
        "empty.npz": (b"", "neither a NumPy archive nor"),
        "truncated.npz": (good.read_bytes()[:200], "not a readable"),
    }
    for name, (content, says) in cases.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(FileFormatError, match=says):
            read_examples(tmp_path / name)
    np.savez(tmp_path / "lacking.npz", inputs=X, labels=Y)
    with pytest.raises(FileFormatError, match="lacks outputs"):
        read_examples(tmp_path / "lacking.npz")
    np.save(tmp_path / "single.npy", X)
    with pytest.raises(FileFormatError, match="single array"):
        read_examples(tmp_path / "single.npy")
    np.savez(tmp_path / "pickled.npz", inputs=np.array([{}], dtype=object), outputs=Y)
    with pytest.raises(FileFormatError, match="plain number arrays"):
        read_examples(tmp_path / "pickled.npz")


def test_an_archive_that_would_take_far_more_room_than_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("keyhole.learners.examples.data.SMALL_ARCHIVE", 2**16)
    np.savez_compressed(tmp_path / "bomb.npz", inputs=np.zeros((2**14, 2, 2)), outputs=np.zeros(2))
    with pytest.raises(FileFormatError, match="far more room"):
        read_examples(tmp_path / "bomb.npz")


@pytest.mark.parametrize(
    "head",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (4611686018427387904, 4)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (-3,)}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<U9', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': 'nonsense', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': (((((((, 'shape': (1,)}",
        "",
    ],
)
def test_a_head_that_claims_what_the_file_does_not_hold(tmp_path: Path, head: str) -> None:
    line = head.encode() + b"\n"
    array = b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line + bytes(64)
    with zipfile.ZipFile(tmp_path / "e.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inputs.npy", array)
    with pytest.raises(FileFormatError, match="not a readable"):
        read_examples(tmp_path / "e.npz")
