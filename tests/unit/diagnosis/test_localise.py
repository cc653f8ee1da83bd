"""Where weights moved, by the evidence of answers."""

import numpy as np
import pytest

import keyhole
from keyhole.diagnosis.experiment import Experiment
from keyhole.diagnosis.localise import Traces, choose_directions, kernel, locate, weigh
from keyhole.diagnosis.probes import Call, RowMaker
from keyhole.diagnosis.reference import open_reference
from keyhole.diagnosis.simulate import Bench
from keyhole.diagnosis.suspects import TokenFunction
from suspects import add_low_rank, serve_llama, small_llama

MODEL = small_llama(4, num_hidden_layers=2)


def experiment(*edits, rows=16) -> Experiment:
    reference = open_reference(MODEL)
    asked = Experiment(Bench(reference))
    maker = RowMaker(reference, np.random.default_rng(1))
    suspect = TokenFunction(serve_llama(MODEL, edits=list(edits)), reference.pad)
    for k in range(rows):
        call = Call((maker.make(4 + k % 5),), "a row")
        asked.add(call, suspect.ask(call.rows))
    return asked


def random_traces(rng, rows=3, directions=2, inputs=4, outputs=5):
    owner = np.repeat(np.arange(rows), 2)
    shape = (directions, len(owner), outputs)
    return Traces(rng.standard_normal((len(owner), inputs)), rng.standard_normal(shape), owner)


def test_the_kernel_is_that_of_the_gradients() -> None:
    traces = random_traces(np.random.default_rng(0))
    gradients = [
        sum(np.outer(traces.gradients[j, t], traces.inputs[t]) for t in np.flatnonzero(traces.row == x)).ravel()
        for x in range(3)
        for j in range(2)
    ]  # fmt: skip
    expected = np.array(gradients) @ np.array(gradients).T
    assert kernel(traces, 3) == pytest.approx(expected)


def test_evidence_prefers_the_right_covariance() -> None:
    rng = np.random.default_rng(1)
    right, wrong = (rng.standard_normal((40, 5)) for _ in range(2))
    values = 0.1 * right @ rng.standard_normal(5)
    evidence, size = weigh(right @ right.T, values, 1e-6)
    assert evidence > weigh(wrong @ wrong.T, values, 1e-6)[0] + 20
    assert 0.02 < size < 0.4


@pytest.mark.parametrize(
    "name", ["layers.1.self_attn.v_proj", "layers.0.mlp.down_proj", "layers.1.self_attn.o_proj"]
)
def test_the_weight_that_moved_is_found(name) -> None:
    asked = experiment(add_low_rank(f"{name}.weight", 4, 1e-2))
    rng = np.random.default_rng(0)
    change = locate(asked, list(range(16)), 1e-7, 8, rng)
    assert change.module == name
    assert change.margin > 10
    assert 3e-3 < change.size < 3e-2


def test_directions_are_orthonormal() -> None:
    rng = np.random.default_rng(2)
    basis = choose_directions(rng.standard_normal((6, 20)), 8, rng)
    assert basis @ basis.T == pytest.approx(np.eye(8))


def test_a_visit_says_where() -> None:
    edit = add_low_rank("layers.1.self_attn.v_proj.weight", 1, 1e-2)
    diagnosis = keyhole.doctor(MODEL, serve_llama(MODEL, edits=[edit]))
    assert not diagnosis.same
    assert not diagnosis.causes
    assert diagnosis.change is not None
    assert (diagnosis.change.module, diagnosis.change.rank) == ("layers.1.self_attn.v_proj", 1)
    assert "layers.1.self_attn.v_proj" in str(diagnosis)
    delta = serve_llama(MODEL, edits=[edit]).weights["layers.1.self_attn.v_proj.weight"].numpy()
    delta = delta - MODEL.state_dict()["layers.1.self_attn.v_proj.weight"].numpy()
    assert np.linalg.norm(diagnosis.change.delta - delta) < 0.02 * np.linalg.norm(delta)
