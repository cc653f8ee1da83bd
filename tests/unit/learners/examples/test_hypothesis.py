"""From scores to a hypothesis: rows kept aside, the last descent, what is reported."""

import numpy as np
import pytest

from example_layers import boolean, layer
from keyhole.fitting.fisher import FisherInformation
from keyhole.fitting.variable_projection import project
from keyhole.learners.examples.data import build_examples
from keyhole.learners.examples.head_count import Found
from keyhole.learners.examples.hypothesis import (
    add_certificates,
    assemble_layer,
    count_copies_once,
    describe_search,
    fit_layer,
    hold_rows,
    measure_amplification,
)
from keyhole.learners.published.chen_li_sculpting import Certificates
from keyhole.models.attention import every_position
from keyhole.models.canonical import distance


def test_copies_are_kept_aside_together() -> None:
    rng = np.random.default_rng(15)
    X = boolean(rng, 20, 4, 6)
    shuffled = X[:, [2, 0, 3, 1]]
    rows = build_examples(np.concatenate([X, shuffled]), np.zeros((40, 4, 6))).rows
    kept = hold_rows(rows, rng)
    assert kept.sum() >= 4
    np.testing.assert_array_equal(kept[:20][:, [2, 0, 3, 1]], kept[20:])
    assert count_copies_once(rows).counted == count_copies_once(build_examples(X, X).rows).counted


@pytest.mark.parametrize("ending", ["spent", "noise"])
def test_the_last_steps_of_a_search_that_ran_out_of_time_may_make_it_exact(ending: str) -> None:
    rng = np.random.default_rng(22)
    truth, X = layer(rng, 6, 2), boolean(rng, 40, 4, 6)
    data = build_examples(X, every_position(truth, X))
    kept = hold_rows(data.rows, rng)
    train = data.rows.with_weights(data.rows.weights * ~kept)
    theta = np.stack([h.score.T for h in truth.heads], axis=1)
    near = Found(theta + 1e-3 * rng.standard_normal(theta.shape), 1e-6, ending, 9, 60.0, 1, {})
    fitted = fit_layer(data, train, kept, near, 1e-18, 1, rng)
    assert fitted.diagnostics.ending == "exact"
    assert distance(fitted.learned.model, truth) < 1e-10
    far = Found(rng.standard_normal(theta.shape), 0.5, "spent", 9, 60.0, 1, {})
    assert fit_layer(data, train, kept, far, 1e-18, 1, rng).learned.errors is None
    assert describe_search(fitted.diagnostics)[1] == "The labels are reproduced to rounding."
    assert fitted.learned.report_details()["held_out_rows"] == kept.sum()
    assert "certificates" not in fitted.learned.report_details()
    body = Certificates(*np.ones((3, 2, 6)))
    certified = add_certificates(fitted, np.eye(6), body).learned.report_details()
    assert certified["certified"] == 2
    assert sorted(certified["certificates"]) == ["anchors", "others", "preferred"]


def test_a_layer_is_assembled_as_the_rows_were_computed() -> None:
    rng = np.random.default_rng(1)
    truth, X = layer(rng, 5, 2), boolean(rng, 10, 3, 5)
    data = build_examples(X, every_position(truth, X))
    theta = np.stack([h.score.T for h in truth.heads], axis=1)
    values = np.concatenate([h.value for h in truth.heads])
    model = assemble_layer(data.rows, theta, values, np.zeros(5), data.form)
    np.testing.assert_allclose(every_position(model, X), data.rows.targets)


def test_amplification_is_relative_to_each_block() -> None:
    rng = np.random.default_rng(2)
    truth, X = layer(rng, 4, 1), boolean(rng, 30, 3, 4)
    rows = build_examples(X, every_position(truth, X)).rows
    at = project(rows, truth.heads[0].score.T[:, None, :])
    spread = FisherInformation(0.1 * np.abs(at.theta), 0.3 * np.abs(at.values), at.offset, 1.0)
    assert measure_amplification(rows, at, spread, 2.0) == pytest.approx(0.6)
