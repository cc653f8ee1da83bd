import numpy as np
import pytest

from keyhole.errors import NotIdentifiable
from keyhole.learners.mlp.relu.domain import InputRegion
from keyhole.learners.mlp.relu.line_search import FAR
from keyhole.oracles.base import Domain

DOMAINS = [
    Domain(max_norm=2.0),
    Domain(low=0.0, high=1.0),
    Domain(low=-1.0, high=3.0, max_norm=2.5),
    Domain(low=0.5),
]


@pytest.mark.parametrize("domain", DOMAINS)
def test_everything_drawn_lies_in_the_domain(domain):
    region, rng = InputRegion.of(domain, 4, None), np.random.default_rng(0)
    assert not region.unbounded
    for points in (region.points(rng, 50, 3.0), region.edge_points(rng, 50)):
        domain.check(points[:, None, :])
        assert (region.room(points, 1.0) >= 0).all()
    for _ in range(10):
        frame, reach = region.line(rng)
        domain.check(frame.points(np.array(reach))[:, None, :])


def test_free_inputs_have_long_lines_and_no_edge():
    region = InputRegion.of(Domain(), 4, None)
    assert region.unbounded
    assert region.line(np.random.default_rng(0))[1] == (-FAR, FAR)
    assert region.holds(np.full((3, 4), 1e9)).all()


def test_a_vocabulary_does_not_tell_where_a_network_bends():
    with pytest.raises(NotIdentifiable, match="vocabulary"):
        InputRegion.of(Domain(vocabulary=np.eye(4)), 4, None)
