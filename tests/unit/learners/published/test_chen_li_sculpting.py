"""The paper's phases one by one: certificates are never wrong, and the body leads to the layer."""

import numpy as np
import pytest

from keyhole.errors import InvalidArgument
from keyhole.fitting.attention_rows import Rows
from keyhole.learners.examples.learner import FromExamples
from keyhole.learners.published.chen_li_sculpting import (
    bound_direction,
    build_net,
    estimate_values,
    find_open_directions,
    find_proxy,
    refine_values,
    sculpt,
)
from keyhole.models.attention import Attention, Head, every_position
from keyhole.models.canonical import distance
from keyhole.recovery import learn
from keyhole.results import Outcome

D = 8


def drawn(seed: int, k: int, heads: int, scale: float, n: int = 1500) -> tuple[Attention, Rows]:
    rng = np.random.default_rng(seed)
    members = []
    for _ in range(heads):
        score = rng.standard_normal((D, D))
        value = rng.standard_normal((D, D)) / np.sqrt(D)
        members.append(Head(scale * score / np.linalg.norm(score), None, value))
    truth = Attention(members, np.zeros(D))
    X = rng.choice([-1.0, 1.0], (n, k, D))
    return truth, Rows(X, X, None, np.ones((n, k)), every_position(truth, X))


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("scale", [5.0, 20.0, 50.0])
def test_certificates_hold_for_every_head(k: int, heads: int, scale: float) -> None:
    truth, rows = drawn(k + 10 * heads, k, heads, scale)
    found = sculpt(rows)
    total = sum(h.value for h in truth.heads)
    if scale > 5.0:
        assert np.linalg.norm(found.values - total) <= 1e-2 * np.linalg.norm(total)
        assert len(found.certificates) > 100
    for head in truth.heads:
        assert (found.certificates.margins(head.score) > 0).all()


def test_nothing_is_certified_about_weak_attention() -> None:
    _, rows = drawn(0, 4, 2, 1.0)
    assert len(sculpt(rows).certificates) == 0


def test_a_wrong_score_violates_certificates() -> None:
    truth, rows = drawn(1, 3, 1, 20.0)
    body = sculpt(rows).certificates
    assert (body.margins(truth.heads[0].score.T) < 0).mean() > 0.2


def test_the_phases_improve_on_each_other() -> None:
    truth, rows = drawn(2, 3, 2, 20.0)
    total = sum(h.value for h in truth.heads)
    crude = estimate_values(rows)
    refined = refine_values(rows, crude)
    errors = [np.linalg.norm(v - total) / np.linalg.norm(total) for v in (crude, refined)]
    assert errors[1] < 1e-6 < 0.1 < errors[0]


def test_the_body_surrounds_the_scores() -> None:
    truth, rows = drawn(3, 2, 2, 20.0)
    body = sculpt(rows).certificates
    centre = find_proxy(body)
    assert centre is not None
    assert (body.normals() @ centre.ravel() > 1 - 1e-6).all()
    mean = sum(h.score.T for h in truth.heads)
    cosine = (centre * mean).sum() / np.linalg.norm(centre) / np.linalg.norm(mean)
    assert cosine > 0.9
    direction = find_open_directions(body, 2)[0]
    bounds = bound_direction(body, centre, direction)
    assert bounds is not None
    for head in truth.heads:  # the truth, brought to the slice, lies within the certified bounds
        theta = head.score.T * (centre**2).sum() / (centre * head.score.T).sum()
        assert bounds[0] - 1e-6 <= (direction * theta).sum() <= bounds[1] + 1e-6
    assert len(build_net(body, 2)) > 10


@pytest.mark.parametrize("heads", [1, 2])
def test_sculpting_recovers_and_reports_certificates(heads: int) -> None:
    truth, rows = drawn(4, 3, heads, 20.0)
    found = learn(rows.tokens, rows.targets, FromExamples(method="sculpting"))
    assert found.outcome is Outcome.RECOVERED
    assert distance(found.model, truth) < 1e-9
    assert found.details["certified"] == len(found.details["certificates"]["anchors"]) > 100


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"heads": 3}, "at most 2 heads"),
        ({"bias": True}, "bias=False"),
    ],
)
def test_what_sculpting_cannot_do(change: dict[str, object], says: str) -> None:
    _, rows = drawn(5, 3, 1, 20.0, 200)
    learner = FromExamples(method="sculpting", **change)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=says):
        learn(rows.tokens, rows.targets, learner)
    with pytest.raises(InvalidArgument, match="Boolean"):
        learn(0.5 * rows.tokens, rows.targets, FromExamples(method="sculpting"))
    with pytest.raises(InvalidArgument, match="every position"):
        learn(rows.tokens, rows.targets[:, -1], FromExamples(method="sculpting"))
