import pytest

from keyhole.errors import Counterexample
from keyhole.verification.statement import in_words


def test_enough_answers_bound_the_share_that_differs() -> None:
    words = in_words(200, 0, None)
    assert "All 200 fresh answers agree" in words
    assert "at most 1.5%" in words  # 1 - 0.05 ** (1 / 200)
    assert "one in 67" in words
    assert "nothing is claimed" in words


@pytest.mark.parametrize(("count", "often"), [(4, "94%"), (2, "75%"), (1, "50%")])
def test_few_answers_say_what_they_would_have_caught(count: int, often: str) -> None:
    words = in_words(count, 0, None)
    assert f"{often} of the time" in words
    assert "at most" not in words
    assert "verify with 200 queries" in words


def test_old_answers_are_mentioned_and_one_is_not_many() -> None:
    assert "and so do 31 answers given while learning" in in_words(4, 31, None)
    assert in_words(1, 0, None).startswith("The one fresh answer agrees")


def test_noise_that_hides_the_box_is_no_agreement() -> None:
    words = in_words(4, 31, None, hidden=True)
    assert words.startswith("Noise hides the box")
    assert "agree within" not in words


def test_a_difference_is_said_with_its_reason() -> None:
    example = Counterexample([[0.0]], 1.0, 2.0, "a long sequence")
    assert in_words(3, 5, example) == "The box and the model differ: a long sequence."
