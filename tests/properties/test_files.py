"""What is saved is what is loaded, to the last bit; what is not a model is a FileFormatError."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from keyhole.errors import FileFormatError
from keyhole.models.attention import Attention, Head
from keyhole.models.files import load_model, save_model

numbers = st.floats(allow_nan=False, allow_infinity=False, width=64)
in_folder = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def layers(draw: st.DrawFn) -> tuple[list[Any], np.ndarray]:
    """Any finite numbers at all: zeros of both signs, subnormals, the largest floats."""
    width, outputs = draw(st.integers(1, 4)), draw(st.none() | st.integers(1, 3))
    shape = (width,) if outputs is None else (width, outputs)

    def array(*size: int) -> np.ndarray:
        return draw(hnp.arrays(np.float64, size, elements=numbers))

    heads = []
    for _ in range(draw(st.integers(1, 3))):
        rank = draw(st.none() | st.integers(1, 3))
        score = array(width, width) if rank is None else (array(width, rank), array(rank, width))
        heads.append((score, array(width), array(*shape)))
    return heads, array(*shape[1:])


@in_folder
@given(layers())
def test_round_trip(tmp_path: Path, parts: tuple[list[Any], np.ndarray]) -> None:
    model = Attention([Head(*head) for head in parts[0]], parts[1])
    before = model.to_arrays()
    after = load_model(save_model(model, tmp_path / "m.safetensors")).to_arrays()
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


@in_folder
@given(st.binary(max_size=200))
def test_bytes_that_are_no_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "noise"
    path.write_bytes(content)
    with pytest.raises(FileFormatError):
        load_model(path)
