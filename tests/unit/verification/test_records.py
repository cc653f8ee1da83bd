"""Files with a digest over every byte."""

import numpy as np
import pytest

from keyhole.errors import FileFormatError
from keyhole.verification.records import (
    holds_record,
    pack_array,
    pack_row,
    read_record,
    unpack_array,
    unpack_row,
    write_record,
)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "a"
    digest = write_record(path, "keyhole-test-1", {"b": 2, "a": [1.5]})
    assert read_record(path, "keyhole-test-1") == ({"b": 2, "a": [1.5]}, digest)
    assert path.stat().st_mode & 0o777 == 0o600
    assert holds_record(path, "keyhole-test-1")
    assert not holds_record(tmp_path / "b", "keyhole-test-1")
    with pytest.raises(FileFormatError, match="no keyhole-other-1 file"):
        read_record(path, "keyhole-other-1")


def test_every_altered_byte_is_found(tmp_path):
    path = tmp_path / "a"
    write_record(path, "keyhole-test-1", {"numbers": [1, 2, 3]})
    whole = path.read_bytes()
    for place in range(len(whole)):
        altered = bytearray(whole)
        altered[place] ^= 1
        path.write_bytes(altered)
        with pytest.raises(FileFormatError):
            read_record(path, "keyhole-test-1")
    for changed in (whole[:-1], whole + b" ", b""):
        path.write_bytes(changed)
        with pytest.raises(FileFormatError):
            read_record(path, "keyhole-test-1")


def test_arrays_keep_every_bit():
    for array in (np.array([0.1, -0.0, 1e-310]), np.arange(6).reshape(2, 3), np.float32([0.1])):
        again = unpack_array(pack_array(array))
        assert again.tobytes() == array.tobytes()
        assert again.shape == array.shape
    assert unpack_row(pack_row("a text")) == "a text"
    with pytest.raises(FileFormatError):
        unpack_array({"type": "O", "shape": [1], "bytes": ""})
