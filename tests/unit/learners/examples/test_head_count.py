"""The search over the number of heads, stage by stage on exact labels."""

import numpy as np

from example_layers import boolean, layer
from keyhole.fitting.attention_rows import Rows
from keyhole.fitting.levenberg_marquardt import measure_label_power
from keyhole.fitting.variable_projection import project
from keyhole.learners.examples.data import build_examples
from keyhole.learners.examples.head_count import HeadSearch, HeadTally, SearchOptions, search_heads
from keyhole.learners.examples.restarts import Chain, ChainRunner
from keyhole.models.attention import every_position


def labelled(seed: int, heads: int, noise: float = 0.0) -> tuple[Rows, np.ndarray]:
    rng = np.random.default_rng(seed)
    truth, X = layer(rng, 6, heads), boolean(rng, 60, 4, 6)
    Y = every_position(truth, X)
    Y = Y + noise * np.sqrt(np.mean(Y**2)) * rng.standard_normal(Y.shape)
    return build_examples(X, Y).rows, np.stack([h.score.T for h in truth.heads], axis=1)


def searching(rows: Rows, **options: float) -> HeadSearch:
    settings = SearchOptions(None, 4, restarts=9, **options)
    return HeadSearch(rows, settings, np.random.default_rng(0), ChainRunner(rows, 1))


def test_the_right_number_of_heads_is_found() -> None:
    for heads in (1, 2, 3):
        rows, _ = labelled(heads, heads)
        found = search_heads(rows, SearchOptions(None, 5), np.random.default_rng(0))
        assert found.theta.shape[1] == heads
        assert found.ending == "exact"
        assert min(found.residuals, key=found.residuals.get) == heads


def test_noise_is_told_from_another_head() -> None:
    rows, _ = labelled(5, 2, noise=0.01)
    found = search_heads(rows, SearchOptions(None, 4), np.random.default_rng(0))
    assert (found.theta.shape[1], found.ending) == (2, "noise")
    assert found.hits >= 2


def test_a_fit_with_a_head_too_many_sheds_it() -> None:
    rows, theta = labelled(24, 2)
    search = searching(rows)
    theta = np.concatenate([theta, theta[:, :1]], axis=1)
    theta = theta + 1e-4 * np.random.default_rng(1).standard_normal(theta.shape)
    search.tallies[3] = HeadTally(3, theta, project(rows, theta).cost / measure_label_power(rows))
    assert not search.is_exact(search.tallies[3])
    slim = search.slim(search.tallies[3])
    assert slim.heads == 2
    assert slim.relative <= 1e-18
    assert search.tallies[2] is slim


def test_work_goes_where_it_promises_most() -> None:
    rows, theta = labelled(25, 2)
    search = searching(rows)
    for heads, relative in ((1, 0.5), (2, 0.01), (3, 0.4)):
        chain = Chain(np.repeat(theta[:, :1], heads, axis=1), relative, 100.0)
        search.count(search.tallies.setdefault(heads, HeadTally(heads)), chain)
    assert search.choose_heads() == 2
    for _ in range(2):
        search.count(search.tallies[2], Chain(theta, 0.01, 100.0))
    assert search.tallies[2].hits == 3
    assert search.choose_heads() != 2
    assert search.restarts == 5


def test_budgets_and_settled_minima_end_the_search() -> None:
    rows, theta = labelled(26, 2)
    search = searching(rows, noise=0.1)
    for heads, relative in ((2, 0.01), (2, 0.01), (3, 0.0099)):
        search.count(
            search.tallies.setdefault(heads, HeadTally(heads)), Chain(theta, relative, 1.0)
        )
    assert search.best().heads == 2
    assert search.find_undecided() == 3
    assert not search.is_settled(search.best())
    search.count(search.tallies[3], Chain(theta, 0.0099, 1.0))
    assert search.is_settled(search.best())
    assert not search.is_over()
    assert searching(rows, seconds=-1.0).is_over()
