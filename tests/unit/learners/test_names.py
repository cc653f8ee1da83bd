import numpy as np
import pytest

import keyhole
from keyhole.learners.names import LEARNERS, make_learner
from keyhole.models.random import attention


def test_every_name_makes_a_learner():
    for name, public in LEARNERS.items():
        assert type(make_learner(name)).__name__ == public == type(make_learner(public)).__name__


def test_options_are_those_of_the_learner():
    assert make_learner("multi-head", heads=3) == keyhole.MultiHead(heads=3)
    with pytest.raises(keyhole.InvalidArgument, match="LowRank has no option heads; it has method"):
        make_learner("low-rank", heads=3)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(keyhole.InvalidArgument, match="did you mean multi-head"):
        make_learner("multihead")


def test_recover_takes_a_name():
    secret = attention(np.random.default_rng(0), 4)
    assert keyhole.recover(secret, "single-head").run["learner"].startswith("SingleHead")
