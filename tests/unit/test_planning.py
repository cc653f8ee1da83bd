from types import SimpleNamespace

import numpy as np
import pytest

import keyhole
from boxes import CountingBox, in_float32
from keyhole.measurement.families import Kind
from keyhole.models.attention import Attention, Head
from keyhole.models.random import attention, block
from keyhole.models.relu_network import ReluNetwork
from keyhole.oracles.base import Domain, Spec
from keyhole.oracles.noise import NoiseModel
from keyhole.planning import Size, Survey, plan, survey
from placed_layers import placed_layer
from recoveries import NETWORK, SCORE

HEAD = attention(np.random.default_rng(0), 6)
SMOOTH = keyhole.Mlp(NETWORK.weight, NETWORK.bias, NETWORK.output.T)


def test_forecasts_are_those_of_the_learners() -> None:
    found = {e.learner: e for e in plan(Spec(width=32), Size(rank=3), rehearse=False)}
    assert found["single-head"].queries == keyhole.SingleHead().expected_queries(Spec(width=32))
    assert found["low-rank"].queries == 2 * 3 * 32 - 9 + 32 + 6 + 4
    assert found["relu-network"].queries is None
    assert found["relu-network"].depends == "give --neurons"
    assert all(e.seconds is None and e.error is None for e in found.values())


@pytest.mark.parametrize(("neurons", "outputs"), [(8, None), (16, None), (12, 6)])
def test_a_forecast_for_a_network_in_single_precision(neurons: int, outputs: int | None) -> None:
    rng = np.random.default_rng(neurons)
    shape = (neurons,) if outputs is None else (neurons, outputs)
    secret = ReluNetwork(rng.standard_normal((neurons, 10)), None, rng.standard_normal(shape))
    box = secret.astype(np.float32)
    (found,) = plan(survey(box), Size(neurons=neurons), rehearse=False)
    paid = keyhole.recover(box, keyhole.ReluNetworkLearner()).ledger.paid
    assert found.queries is not None
    assert 0.7 < paid / found.queries < 1.5


@pytest.mark.parametrize("precision", [np.float32, np.float64])
def test_a_forecast_for_a_layer(precision: type) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((2, 16, 8)) @ rng.standard_normal((2, 8, 16)) / 16
    drawn = attention(rng, 16, heads=2, rank=8).heads
    heads = [Head(h.score, None, v) for h, v in zip(drawn, values, strict=True)]
    box = Attention(heads, np.zeros(16)).astype(precision)
    found = {e.learner: e for e in plan(survey(box), Size(heads=2), rehearse=False)}["multi-head"]
    paid = keyhole.recover(box, keyhole.MultiHead(heads=2)).ledger.learning
    assert found.queries is not None
    assert 0.85 < paid / found.queries < 1.2


def test_a_forecast_is_near_what_the_run_pays() -> None:
    box = attention(np.random.default_rng(1), 10, rank=2)
    found = {e.learner: e for e in plan(survey(box), Size(rank=2), rehearse=False)}
    for name, learner in (
        ("single-head", keyhole.SingleHead()),
        ("low-rank", keyhole.LowRank(rank=2)),
    ):
        paid = keyhole.recover(box, learner).ledger.learning
        assert found[name].queries == pytest.approx(paid, rel=0.25)


@pytest.mark.parametrize(
    ("box", "kind", "learners"),
    [
        (HEAD, "attention", ["single-head", "low-rank", "multi-head"]),
        (lambda x: np.sign(HEAD(x)), "labels", ["label-only"]),
        (NETWORK, "network", ["relu-network"]),
        (SMOOTH, "smooth network", ["mlp"]),
        (keyhole.TransformerModel(SCORE, None, NETWORK), "layer", ["transformer"]),
        (block(np.random.default_rng(1), 8, heads=2), "block", ["block"]),
        (placed_layer("linear bias", 8, 2, 1), "positions", ["auto"]),
    ],
)
def test_only_learners_that_come_into_question(box: object, kind: str, learners: list[str]) -> None:
    known = survey(keyhole.open_oracle(box, width=getattr(box, "width", 6)))
    assert known.kind == kind
    assert [e.learner for e in plan(known, rehearse=False)] == learners


def test_a_block_in_single_precision_has_a_measured_price() -> None:
    box = block(np.random.default_rng(1), 16, heads=2, neurons=64).astype(np.float32)
    (found,) = plan(survey(keyhole.open_oracle(box, width=16)))
    assert found.measured is not None
    assert found.queries == found.measured.queries
    assert found.measured.seconds <= found.measured.most_seconds


def test_the_survey_counts_its_queries() -> None:
    box = CountingBox(HEAD, 6)
    assert survey(keyhole.open_oracle(box)).asked == box.seen
    assert box.seen <= 40


def test_time_follows_the_measured_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def slow(tokens: np.ndarray) -> np.ndarray:
        nonlocal now
        now += 0.02 + 0.002 * len(tokens)
        return HEAD(tokens)

    monkeypatch.setattr("keyhole.planning.time", SimpleNamespace(perf_counter=lambda: now))
    known = survey(keyhole.open_oracle(slow, width=6))
    assert known.latency == pytest.approx(0.02)
    assert known.each == pytest.approx(0.002)
    one, two = known.seconds(1000), known.seconds(2000)
    assert one is not None
    assert two is not None
    assert one > 1000 * known.each
    assert two > one


def test_the_expected_error_is_rehearsed_at_the_precision_of_the_box() -> None:
    errors = []
    for box in (HEAD, in_float32(HEAD)):
        known = survey(keyhole.open_oracle(box, width=6))
        line = plan(known)[0]
        assert line.rehearsal == "RECOVERED"
        errors.append(line.error)
    assert errors[0] < 1e-12
    assert 1e-9 < errors[1] < 1e-3


def test_a_learner_that_refuses_says_why() -> None:
    spec = Spec(8, domain=Domain(max_length=1))
    found = {e.learner: e for e in plan(Survey(spec, NoiseModel(), "float64", Kind.ATTENTION))}
    assert found["multi-head"].error is None
    assert found["multi-head"].rehearsal == "NOT_IDENTIFIABLE"


def test_sizes_must_make_sense() -> None:
    with pytest.raises(keyhole.InvalidArgument, match="heads must be a whole number of at least 1"):
        Size(heads=0)
    for spec in (Spec(4), Spec(4, outputs=3)):
        with pytest.raises(keyhole.InvalidArgument, match="rank must be at most the width 4"):
            plan(spec, Size(rank=9), rehearse=False)
        for learner in (keyhole.LowRank(rank=9), keyhole.MultiHead(rank=9)):
            with pytest.raises(keyhole.InvalidArgument, match="rank must be at most the width 4"):
                learner.expected_queries(spec)
