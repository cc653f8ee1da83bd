"""A Dask cluster of two workers, one of which is killed half way: the same result."""

import os
import signal
import threading
import time

import numpy as np
import pytest

import keyhole
from keyhole.models.export import export
from keyhole.models.random import attention

distributed = pytest.importorskip("distributed")

WIDTH, BATCH = 10, 8
pytestmark = pytest.mark.filterwarnings("ignore")  # Dask's own, when processes come and go


class Slow:
    """Takes its time, so that there is a half way."""

    width = WIDTH

    def __init__(self, model, seconds):
        self.model, self.seconds = model, seconds

    def __call__(self, tokens):
        time.sleep(self.seconds)
        return self.model(tokens)


@pytest.fixture(scope="module")
def cluster():
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50
    ) as running:
        yield running


@pytest.fixture
def client(cluster):
    with distributed.Client(cluster) as connected:
        connected.wait_for_workers(2)
        yield connected


def same(a, b):
    left, right = a.to_arrays(), b.to_arrays()
    return left.keys() == right.keys() and all(np.array_equal(left[k], right[k]) for k in left)


def test_a_worker_killed_half_way_changes_nothing(cluster, client):
    secret = attention(np.random.default_rng(0), WIDTH)
    victim = next(iter(cluster.workers.values())).pid
    killed = threading.Event()

    def kill(progress):
        if progress.stage == "score" and not killed.is_set():
            killed.set()
            threading.Timer(0.15, os.kill, (victim, signal.SIGKILL)).start()

    box = keyhole.open_oracle(Slow(secret, 0.05), batch=BATCH, cluster=client)
    found = keyhole.recover(learner=keyhole.SingleHead(), box=box, progress=kill)
    alone = keyhole.recover(
        learner=keyhole.SingleHead(), box=keyhole.open_oracle(secret, batch=BATCH)
    )
    assert killed.is_set()
    assert victim not in {worker.pid for worker in cluster.workers.values()}
    assert found.outcome is keyhole.Outcome.RECOVERED
    assert same(found.model, alone.model)
    assert dict(found.ledger.by_purpose) == dict(alone.ledger.by_purpose)


def test_parts_that_the_cluster_forgets_are_asked_again(client):
    from distributed import Future

    secret = attention(np.random.default_rng(0), WIDTH)
    forgotten = threading.Event()

    def forget():
        client.cancel([Future(key, client) for key in list(client.futures)], force=True)
        forgotten.set()

    timer = threading.Timer(0.12, forget)

    def lose(progress):
        if progress.stage == "score" and timer.ident is None:
            timer.start()

    box = keyhole.open_oracle(Slow(secret, 0.05), batch=BATCH, cluster=client)
    found = keyhole.recover(learner=keyhole.SingleHead(), box=box, progress=lose)
    assert forgotten.is_set()
    alone = keyhole.recover(
        learner=keyhole.SingleHead(), box=keyhole.open_oracle(secret, batch=BATCH)
    )
    assert same(found.model, alone.model)
    assert dict(found.ledger.by_purpose) == dict(alone.ledger.by_purpose)


def test_an_onnx_file_goes_to_the_workers_as_its_path(client, tmp_path):
    pytest.importorskip("onnxruntime")
    file = export(attention(np.random.default_rng(1), WIDTH), tmp_path / "model.onnx")
    found = keyhole.recover(
        learner=keyhole.SingleHead(), box=keyhole.open_oracle(file, batch=BATCH, cluster=client)
    )
    alone = keyhole.recover(
        learner=keyhole.SingleHead(), box=keyhole.open_oracle(file, batch=BATCH)
    )
    assert same(found.model, alone.model)


def test_what_fails_on_a_worker_is_an_oracle_error(client):
    def box(tokens):
        raise RuntimeError("out of order")

    with pytest.raises(keyhole.OracleError, match="out of order"):
        keyhole.recover(
            learner=keyhole.SingleHead(), box=keyhole.open_oracle(box, width=3, cluster=client)
        )


def test_endpoints_and_lists_want_no_cluster(client):
    with pytest.raises(keyhole.InvalidArgument, match="leave out cluster"):
        keyhole.open_oracle(["http://a", "http://b"], cluster=client)
