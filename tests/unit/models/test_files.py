"""A model file is read, never run; one that is broken or hostile gets one clear sentence."""

import json
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keyhole.errors import FileFormatError, InvalidArgument
from keyhole.models.files import load_model, replacing, save_model
from keyhole.models.random import attention

META = {"format": "keyhole-model", "version": "1", "kind": "Attention"}
NUMBER = {"dtype": "F64", "shape": [], "data_offsets": [0, 8]}


def written(folder: Path, header: Any, data: bytes = b"", size: int | None = None) -> Path:
    """A safetensors file by hand: eight bytes of header size, header, data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "made.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text + data)
    return path


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("rank", [None, 2])
def test_round_trip_to_the_bit(tmp_path: Path, rank: int | None, dtype: Any) -> None:
    model = attention(np.random.default_rng(0), 5, heads=2, rank=rank, bias=True).astype(dtype)
    again = load_model(save_model(model, tmp_path / "deep" / "m.safetensors"))
    before, after = model.to_arrays(), again.to_arrays()
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].dtype == after[name].dtype
        assert before[name].tobytes() == after[name].tobytes()


def test_only_known_kinds_are_saved(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot save a dict"):
        save_model({"weights": 1}, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = save_model(attention(np.random.default_rng(0), 3), tmp_path / "m").read_bytes()
    part = tmp_path / "part"
    for size in range(0, len(whole), 11):
        part.write_bytes(whole[:size])
        with pytest.raises(FileFormatError, match="truncated"):
            load_model(part)


def test_flipped_bytes_never_escape_as_another_error(tmp_path: Path) -> None:
    whole = save_model(attention(np.random.default_rng(0), 3), tmp_path / "m").read_bytes()
    rng, path, refused = np.random.default_rng(1), tmp_path / "flipped", 0
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[int(rng.integers(min(400, len(whole))))] ^= int(rng.integers(1, 256))
        path.write_bytes(bytes(damaged))
        try:
            load_model(path)
        except FileFormatError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (b"", b"", "truncated"),
        (b"{" * 50, b"", "truncated"),
        (
            {"__metadata__": META, "offset": {**NUMBER, "dtype": "F8_E4M3"}},
            b"\0" * 8,
            "safetensors",
        ),
        (
            {
                "__metadata__": META,
                "offset": {"dtype": "F8_E4M3", "shape": [], "data_offsets": [0, 1]},
            },
            b"\0",
            "cannot be read",
        ),
        (
            {
                "__metadata__": META,
                "offset": {"dtype": "F64", "shape": [2**62, 2**62], "data_offsets": [0, 8]},
            },
            b"\0" * 8,
            "cannot be read",
        ),
        ({"offset": NUMBER}, b"\0" * 8, "not a keyhole model"),
        ({"__metadata__": {**META, "version": "99"}, "offset": NUMBER}, b"\0" * 8, "upgrade"),
        ({"__metadata__": {**META, "kind": "os.system"}, "offset": NUMBER}, b"\0" * 8, "unknown"),
        ({"__metadata__": META, "offset": NUMBER}, b"\0" * 8, "at least one head"),
        (
            {
                "__metadata__": META,
                "offset": NUMBER,
                **{
                    f"heads.0.{name}": {"dtype": "F64", "shape": shape, "data_offsets": [8, 8]}
                    for name, shape in (("score", [0, 0]), ("key_bias", [0]), ("value", [0]))
                },
            },
            b"\0" * 8,
            "width",
        ),
    ],
    ids=[
        "no header",
        "broken JSON",
        "wrong size",
        "float8",
        "overflow",
        "not ours",
        "version",
        "kind",
        "no heads",
        "width zero",
    ],
)
def test_hostile_headers(tmp_path: Path, header: Any, data: bytes, words: str) -> None:
    with pytest.raises(FileFormatError, match=words):
        load_model(written(tmp_path, header, data))


def test_a_header_that_claims_to_be_huge_costs_nothing(tmp_path: Path) -> None:
    for size in (2**40, 2**63, 2**64 - 1):
        with pytest.raises(FileFormatError, match="cannot be read"):
            load_model(written(tmp_path, b"{}", size=size))


def test_nan_in_a_file_is_refused(tmp_path: Path) -> None:
    model = attention(np.random.default_rng(0), 3)
    path = save_model(model, tmp_path / "m")
    whole, needle = path.read_bytes(), model.heads[0].value.tobytes()
    assert needle in whole
    path.write_bytes(whole.replace(needle, np.full(3, np.nan).tobytes()))
    with pytest.raises(FileFormatError, match="value holds NaN"):
        load_model(path)


class Bomb:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('a pickle was run')",))


def test_a_pickle_is_not_run(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(FileFormatError, match="another kind of file"):
        load_model(path)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(FileFormatError, match="does not exist or is not a file"):
            load_model(path)


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_text("old")

    def interrupted() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half of the n")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        interrupted()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_are_for_their_owner_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        saved = save_model(attention(np.random.default_rng(0), 3), tmp_path / "m.safetensors")
    finally:
        os.umask(before)
    assert saved.stat().st_mode & 0o777 == 0o600
