import numpy as np
import pytest

from keyhole.errors import InvalidArgument
from keyhole.models.attention import every_position
from keyhole.models.random import attention, high_order


def test_scores_have_the_scale_asked_for() -> None:
    rng = np.random.default_rng(0)
    for rank in (None, 3):
        for scale in (1e-3, 1e2):
            (head,) = attention(rng, 80, rank=rank, scale=scale).heads
            assert 0.6 < np.std(head.score) * np.sqrt(80) / scale < 1.5
            assert head.rank_bound == (rank or 80)


def test_bias_means_key_bias_and_offset() -> None:
    plain = attention(np.random.default_rng(0), 4, outputs=2)
    biased = attention(np.random.default_rng(0), 4, outputs=2, bias=True)
    assert not plain.offset.any()
    assert not plain.heads[0].key_bias.any()
    assert biased.offset.all()
    assert biased.heads[0].key_bias.all()


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


def test_wrong_arguments_of_hard_layers() -> None:
    with pytest.raises(InvalidArgument, match="step"):
        high_order(np.random.default_rng(0), 4, 2, step=0.0)
