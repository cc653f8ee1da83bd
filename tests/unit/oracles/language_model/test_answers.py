"""What the numbers in a language model's answers are, and how exact."""

import numpy as np
import pytest

from keyhole.oracles.language_model.answers import log_total, name_logit_format


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_the_format_of_logits_shows_behind_double_precision(name):
    logits = np.random.default_rng(0).standard_normal((3, 200)).astype(name).astype(float)
    logprobs = logits - log_total(logits)[:, None]
    assert (logprobs != logprobs.astype(np.float32)).any()
    assert name_logit_format(logprobs) == name
    assert name_logit_format(logprobs[0, :6]) is None  # one number each: nothing to compare
    assert name_logit_format(logprobs[:1, :6]) in ("bfloat16", name)  # few numbers, few bits


def test_double_precision_is_left_alone():
    logits = np.random.default_rng(0).standard_normal((3, 200))
    assert name_logit_format(logits - log_total(logits)[:, None]) is None
