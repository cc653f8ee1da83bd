import numpy as np

from keyhole.models.random import attention


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
