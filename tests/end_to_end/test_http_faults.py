"""A misbehaving endpoint: the right result or a clear outcome, and a true number of queries."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest

import faulty_endpoint
import keyhole
from keyhole.models.random import attention
from keyhole.oracles.http.retry import RetryPolicy

PROGRAM = faulty_endpoint.__file__
WIDTH, SHARE, KILLS, BATCH = 100, 0.2, 5, 50
RECALLED = 1  # verification asks one old query again, on purpose
QUICK = RetryPolicy(attempts=12, first=0.01, longest=0.5)
CLIENT = f"""
import sys, keyhole
from keyhole.oracles.http.retry import RetryPolicy
url, journal, out = sys.argv[1:]
box = keyhole.open_oracle(url, batch={BATCH}, concurrency=4, timeout=4.0,
                          patience=RetryPolicy(attempts=12, first=0.01, longest=0.5))
recovery = keyhole.recover(learner=keyhole.SingleHead(), box=box, journal=journal, seed=3, throw=False)
recovery.save(out)
"""

CALM = f"""
import sys, numpy as np, keyhole
from keyhole.models.random import attention
secret = attention(np.random.default_rng(1), {WIDTH})
keyhole.recover(learner=keyhole.SingleHead(), box=keyhole.open_oracle(secret, batch={BATCH}), seed=3).save(sys.argv[1])
"""


@pytest.fixture
def secret():
    return attention(np.random.default_rng(0), 8)


@pytest.fixture
def faulty():
    started = []

    def start(model, **options):
        started.append(faulty_endpoint.start(model, **options))
        return started[-1]

    yield start
    for endpoint in started:
        endpoint.shutdown()
        endpoint.server_close()


def opened(endpoint, **options):
    return keyhole.open_oracle(
        endpoint.url, batch=16, timeout=0.6, **{"patience": QUICK, **options}
    )


def same(a, b):
    left, right = a.to_arrays(), b.to_arrays()
    return left.keys() == right.keys() and all(np.array_equal(left[k], right[k]) for k in left)


def stats(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/stats", timeout=5) as answer:
        return json.load(answer)


@pytest.fixture
def served():
    command = [sys.executable, PROGRAM, "--width", str(WIDTH)]
    process = subprocess.Popen(
        [*command, "--seed", "1", "--share", str(SHARE)], stdout=subprocess.PIPE, text=True
    )
    yield int(process.stdout.readline())
    process.kill()
    process.wait()
    process.stdout.close()


def test_ten_thousand_queries_through_faults_and_kills(served, tmp_path):
    url = f"http://127.0.0.1:{served}/v2/models/model"
    journal, out = tmp_path / "run.journal", tmp_path / "out"
    command = [sys.executable, "-c", CLIENT, url, str(journal), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for kill in range(1, KILLS + 1):
        client = subprocess.Popen(command, env=environment)
        while stats(served)["distinct"] < kill * 1700 and client.poll() is None:
            time.sleep(0.002)
        assert client.poll() is None, "the client was to be killed, but it had ended"
        client.send_signal(signal.SIGKILL)
        client.wait()
    subprocess.run(command, check=True, timeout=120, env=environment)
    recovery, seen = keyhole.load(out), stats(served)
    assert recovery.outcome is keyhole.Outcome.RECOVERED, recovery.reason
    assert recovery.ledger.paid > 10_000
    assert recovery.ledger.replayed > 0
    assert all(count > 0 for count in seen["faults"].values()), seen["faults"]
    assert seen["unanswered"] == 0  # no query was lost
    again = recovery.ledger.by_purpose["recall"]  # old queries, on purpose
    assert again == 2 * 3 + RECALLED
    alone = 1  # of these, one belonged to a larger request, and alone makes a request of its own
    repeated = 1  # the first fresh query comes again at the end
    assert (
        seen["distinct"] + again - alone + repeated == recovery.ledger.paid
    )  # none was counted twice, none is missing
    in_flight = KILLS * 4 * BATCH  # a kill costs the four requests under way, never more
    assert seen["answered"] <= recovery.ledger.paid + in_flight
    secret = attention(np.random.default_rng(1), WIDTH)
    assert keyhole.distance(recovery.model, secret) < 1e-12
    subprocess.run(
        [sys.executable, "-c", CALM, str(tmp_path / "calm")], check=True, env=environment
    )
    calm = keyhole.load(tmp_path / "calm")
    assert same(recovery.model, calm.model)
    assert recovery.ledger.by_purpose == calm.ledger.by_purpose


@pytest.mark.parametrize("encoding", ["binary", "json"])
@pytest.mark.parametrize(
    "kind", ["drop", "half", "cut", "429", "500", "503", "other", "few", "nan", "drip", "down"]
)
def test_one_fault_of_each_kind_changes_nothing(secret, faulty, kind, encoding):
    endpoint = faulty(secret, plan=["ok", "ok", kind, kind])
    box = opened(endpoint, encoding=encoding)
    recovery = keyhole.recover(learner=keyhole.SingleHead(), box=box)
    assert same(
        recovery.model,
        keyhole.recover(
            learner=keyhole.SingleHead(), box=keyhole.open_oracle(secret, batch=16)
        ).model,
    )
    twice = 2  # an old query, and the first fresh one
    assert endpoint.stats()["distinct"] + twice == recovery.ledger.paid
    assert endpoint.stats()["faults"][kind] == 2
    assert sum(box.traffic.failures.values()) >= 2
    assert box.traffic.queries > recovery.ledger.paid  # what was sent again is told, not paid
    box.close()


@pytest.mark.parametrize("kind", ["drop", "cut", "500", "few", "nan"])
def test_a_fault_that_stays_is_an_oracle_failure_and_the_journal_resumes(
    secret, faulty, kind, tmp_path
):
    endpoint = faulty(secret, plan=["ok", "ok"], share=0.0)
    endpoint.plan += [kind] * 40
    journal = tmp_path / "run.journal"
    box = opened(endpoint, patience=RetryPolicy(attempts=3, first=0.001))
    failed = keyhole.recover(learner=keyhole.SingleHead(), box=box, journal=journal, throw=False)
    assert failed.outcome is keyhole.Outcome.ORACLE_FAILED
    assert "3 attempts" in failed.reason
    endpoint.plan.clear()
    whole = keyhole.recover(learner=keyhole.SingleHead(), box=box, journal=journal)
    assert whole.outcome is keyhole.Outcome.RECOVERED
    assert whole.ledger.replayed > 0
    twice = 2  # an old query, and the first fresh one
    assert endpoint.stats()["distinct"] + twice == whole.ledger.paid
    box.close()


def test_answers_in_the_wrong_order_are_never_a_clean_result(secret, faulty):
    endpoint = faulty(secret, shuffle=True)
    box = opened(endpoint)
    recovery = keyhole.recover(learner=keyhole.SingleHead(), box=box, throw=False)
    assert recovery.outcome is not keyhole.Outcome.RECOVERED
    assert recovery.reason
    box.close()


def test_a_box_that_changes_half_way_is_rejected(secret, faulty):
    other = attention(np.random.default_rng(9), 8)
    endpoint = faulty(secret, drift=(other, 40))
    box = opened(endpoint)
    recovery = keyhole.recover(learner=keyhole.SingleHead(), box=box, throw=False)
    assert recovery.outcome is keyhole.Outcome.REJECTED
    assert "the box changed" in recovery.reason
    example = recovery.verdict.counterexample
    assert abs(example.model_answer - secret(example.input[None])[0]) < 1e-9  # before
    assert abs(example.box_answer - other(example.input[None])[0]) < 1e-9  # now
    box.close()
