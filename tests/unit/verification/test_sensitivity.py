import numpy as np

from keyhole.models.random import attention
from keyhole.models.relu_network import ReluNetwork
from keyhole.models.sign_attention import LabelledAttention
from keyhole.oracles.base import Spec
from keyhole.oracles.wrappers.labels import SIGNS
from keyhole.verification.challenge_queries import Designer
from keyhole.verification.sensitivity import can_tell, change_one_number, most_telling

MODEL = attention(np.random.default_rng(0), 5, heads=2, bias=True)


def test_one_number_is_changed() -> None:
    for seed in range(10):
        other = change_one_number(MODEL, np.random.default_rng(seed)).to_arrays()
        gaps = [np.count_nonzero(other[name] != a) for name, a in MODEL.to_arrays().items()]
        assert sum(gaps) == 1


def test_the_query_that_turns_a_rare_neuron_on_is_taken() -> None:
    net = ReluNetwork(np.array([[1.0, 0.0]]), np.array([-3.0]), np.array([1.0]))
    quiet, loud = np.array([[0.5, 2.0]]), np.array([[3.5, 0.0]])
    for seed in range(5):
        assert most_telling(net, [quiet, loud, quiet], np.random.default_rng(seed)) == 1


def test_what_has_no_parameters_is_left_alone() -> None:
    assert can_tell(MODEL)
    assert not can_tell(lambda tokens: tokens)
    assert not can_tell(LabelledAttention(attention(np.random.default_rng(0), 3), SIGNS))


def test_chosen_queries_come_after_the_first_lap() -> None:
    fresh = list(Designer(Spec(5), 2.0, np.random.default_rng(1), MODEL).stream(24))
    chosen = [i for i, q in enumerate(fresh) if "change of one parameter" in q.reason]
    assert chosen == [10, 16, 22]
