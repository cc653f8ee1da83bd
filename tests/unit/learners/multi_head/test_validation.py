"""Fresh queries find what is wrong with a hypothesis and nothing else."""

import numpy as np

from keyhole.learners.multi_head.validation import (
    EXCUSED,
    MultiHeadDiagnostics,
    find_counterexample,
    note_missing_heads,
    tolerate,
)
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention
from keyhole.oracles.base import Domain
from keyhole.oracles.noise import NoiseModel
from multi_head_boxes import asker

MODEL = attention(np.random.default_rng(0), 5, heads=2, bias=True)


def scaled(model: Attention, factor: float) -> Attention:
    heads = [Head(factor * h.score, factor * h.key_bias, factor * h.value) for h in model.heads]
    return Attention(heads, factor * model.offset)


def test_the_model_itself_has_no_counterexample() -> None:
    rng, exact = np.random.default_rng(1), scaled(MODEL, 0.0)
    assert find_counterexample(asker(MODEL, 5), MODEL, exact, rng) is None
    shifted = asker(MODEL, 5).subtracting(np.array([3.0]))  # the offset is added again
    assert find_counterexample(shifted, MODEL, exact, rng) is None


def test_another_model_has_one() -> None:
    first, second = MODEL.heads
    other = Attention(
        [first, Head(1.001 * second.score, second.key_bias, second.value)], MODEL.offset
    )
    example = find_counterexample(
        asker(MODEL, 5), other, scaled(MODEL, 0.0), np.random.default_rng(2)
    )
    assert example is not None
    np.testing.assert_allclose(MODEL(example.input[None])[0], example.box_answer)
    np.testing.assert_allclose(other(example.input[None])[0], example.model_answer)


def test_queries_stay_inside_the_domain() -> None:
    seen: list[np.ndarray] = []

    def box(tokens: np.ndarray) -> np.ndarray:
        seen.append(tokens)
        return MODEL(tokens)

    ask = asker(box, 5, domain=Domain(max_norm=0.5, max_length=9))
    find_counterexample(ask, MODEL, scaled(MODEL, 0.0), np.random.default_rng(3), 0.5)
    assert len(seen) == 2
    assert all(3 <= part.shape[1] <= 9 for part in seen)
    assert max(np.linalg.norm(part, axis=2).max() for part in seen) <= 0.5 + 1e-12


def test_standard_errors_excuse_up_to_a_limit() -> None:
    ask = asker(MODEL, 5)
    none, some, many = (
        tolerate(
            ask,
            MODEL,
            Attention([Head(f * h.score, None, 0 * h.value) for h in MODEL.heads]),
            1.0,
            EXCUSED,
        )
        for f in (0.0, 1e-7, 1.0)
    )
    assert none < some < many < 1e-2
    noisy = asker(MODEL, 5, precision=NoiseModel(additive=0.1))
    assert tolerate(noisy, MODEL, scaled(MODEL, 0.0), 1.0, EXCUSED) > 0.5


def test_notes_and_diagnostics() -> None:
    assert note_missing_heads(None, 2) == note_missing_heads(2, 2) == ()
    assert "5 heads were claimed, 2" in note_missing_heads(5, 2)[0]
    shown = MultiHeadDiagnostics(heads=2, ranks=(3, 3)).as_dict()
    assert shown == {"heads": 2, "ranks": (3, 3)}
