import numpy as np
import pytest

from keyhole.errors import InvalidArgument
from keyhole.models.every_position import every_position
from keyhole.models.hard_instances import high_order


def test_the_trace_of_the_heads_vanishes_with_the_step() -> None:
    """Undoing the normalisation, outputs of m heads shrink like step^(m - 1)."""
    X = np.random.default_rng(1).choice([-1.0, 1.0], (50, 4, 6))
    for heads in (2, 3, 4):
        sizes = [
            step ** (heads - 1)
            * np.linalg.norm(
                every_position(high_order(np.random.default_rng(0), 6, heads, step=step), X)
            )
            for step in (0.02, 0.01)
        ]
        assert np.log2(sizes[0] / sizes[1]) == pytest.approx(heads - 1, abs=0.1)


def test_wrong_arguments() -> None:
    with pytest.raises(InvalidArgument, match="step"):
        high_order(np.random.default_rng(0), 4, 2, step=0.0)
