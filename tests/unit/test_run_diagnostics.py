"""A run says how many decisions it took and how close the closest one was."""

import numpy as np

import keyhole
from keyhole.models.random import attention


def test_the_closest_decision_is_in_the_diagnostics_and_in_files(tmp_path) -> None:
    secret = attention(np.random.default_rng(0), 6, heads=2, outputs=6)
    recovery = keyhole.recover(secret)
    found = recovery.diagnostics
    assert found.decisions > 0
    assert found.margin is not None
    assert found.margin >= 1.0
    assert "by a factor of" in found.closest_decision
    assert keyhole.load(recovery.save(tmp_path / "run")).diagnostics == found
    assert keyhole.recover(secret).diagnostics == found  # the same seed decides alike
