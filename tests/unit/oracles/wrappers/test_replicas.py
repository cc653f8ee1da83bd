import threading
import time

import numpy as np
import pytest

import faulty_endpoint
import keyhole
from keyhole.models.random import attention
from keyhole.oracles.base import Oracle, Spec
from keyhole.oracles.http.retry import RetryPolicy
from keyhole.oracles.wrappers.replicas import STRIKES, Replicas

WIDTH = 6


def asked(n=100):
    return keyhole.QueryBatch.of(np.random.default_rng(0).standard_normal((n, 2, WIDTH)), "test")


class Member(Oracle):
    def __init__(self, model, fails=False, seconds=0.0, width=WIDTH):
        self.spec, self.model, self.fails, self.seconds = Spec(width), model, fails, seconds
        self.seen, self.tried, self.inside, self.most = 0, 0, 0, 0
        self.lock = threading.Lock()

    def ask(self, queries):
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        time.sleep(self.seconds)
        with self.lock:
            self.inside -= 1
            self.tried += 1
            if self.fails:
                raise keyhole.OracleError("this replica is down")
            self.seen += len(queries)
        return self.model(queries.tokens())


@pytest.fixture
def secret():
    return attention(np.random.default_rng(0), WIDTH)


def test_bit_for_bit_what_one_box_answers(secret):
    members = [Member(secret, seconds=0.001 * k) for k in range(3)]
    together = Replicas(members, batch=8).ask(asked())
    alone = keyhole.open_oracle(secret, batch=8).ask(asked())
    np.testing.assert_array_equal(together, alone)
    assert sum(m.seen for m in members) == 100
    assert all(m.seen > 0 for m in members)
    assert all(m.most == 1 for m in members)  # each is asked one part at a time


def test_a_dead_replica_costs_its_parts_and_is_left_alone(secret):
    dead, alive = Member(secret, fails=True), Member(secret)
    box = Replicas([dead, alive], batch=2)
    np.testing.assert_array_equal(
        box.ask(asked()), keyhole.open_oracle(secret, batch=2).ask(asked())
    )
    assert alive.seen == 100
    assert dead.tried <= STRIKES + 1
    assert box.answered == [0, 100]


def test_all_dead(secret):
    box = Replicas([Member(secret, fails=True), Member(secret, fails=True)], batch=10)
    with pytest.raises(keyhole.OracleError, match="none of 2 replicas"):
        box.ask(asked())


def test_replicas_must_fit(secret):
    with pytest.raises(keyhole.InvalidArgument, match="widths"):
        Replicas([Member(secret), Member(secret, width=7)])
    with pytest.raises(keyhole.InvalidArgument, match="at least one"):
        Replicas([])
    for limits in ({"max_norm": 1.0}, {"max_length": 4}, {"vocabulary": np.eye(WIDTH)}):
        boxes = [keyhole.open_oracle(secret), keyhole.open_oracle(secret, **limits)]
        with pytest.raises(keyhole.InvalidArgument, match="different tokens or lengths"):
            Replicas(boxes)


def test_several_endpoints_one_of_which_dies(secret):
    ends = [faulty_endpoint.start(secret) for _ in range(3)]
    box = keyhole.open_oracle(
        [end.url for end in ends], batch=4, patience=RetryPolicy(attempts=2, first=0.001)
    )
    ends[1].plan = ["ok", "ok", *["drop"] * 1000]
    found = keyhole.recover(box)
    alone = keyhole.recover(keyhole.open_oracle(secret, batch=4))
    for name, array in found.model.to_arrays().items():
        np.testing.assert_array_equal(array, alone.model.to_arrays()[name])
    assert dict(found.ledger.by_purpose) == dict(alone.ledger.by_purpose)
    assert sum(box.answered) == found.ledger.paid
    box.close()
    for end in ends:
        end.shutdown()
        end.server_close()


def test_a_replica_with_other_weights_is_found_out(secret):
    other = attention(np.random.default_rng(5), WIDTH)
    box = Replicas([Member(secret, seconds=0.002), Member(other, seconds=0.002)], batch=4)
    found = keyhole.recover(box, throw=False)
    assert found.outcome is not keyhole.Outcome.RECOVERED
