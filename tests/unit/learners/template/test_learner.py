import numpy as np
import pytest
import torch
from tests.templates import AttentionHeads, Encoder, Pooled, TorchHeads, randomise

import keyhole
from keyhole import FromTemplate, Outcome
from keyhole.oracles.base import Spec


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "linear", "sink"])
def test_scalar_attention_by_template(kind: str) -> None:
    box, learner = randomise(AttentionHeads(kind=kind), 5), FromTemplate(AttentionHeads(kind=kind))
    recovery = keyhole.recover(box, learner)
    assert recovery.outcome is Outcome.RECOVERED
    expected = learner.expected_queries(Spec(width=8))
    assert expected == pytest.approx(recovery.ledger.by_purpose["template"], rel=0.02)
    unknowns = recovery.details["weights"]
    assert recovery.ledger.learning <= 8 * unknowns
    assert recovery.details["undetermined"] > 0  # a query and a key share a scale at least
    assert sum(recovery.details["by_tensor"].values()) == pytest.approx(
        recovery.details["undetermined"], abs=0.5
    )
    tokens = np.random.default_rng(0).standard_normal((50, 7, 8))
    with torch.no_grad():
        truth = box(torch.as_tensor(tokens)).numpy()
    assert np.abs(recovery.model(tokens) - truth).max() < 1e-10


def test_a_wrong_template_is_neither_recovered_nor_rejected() -> None:
    box = randomise(AttentionHeads(4, 2, "sigmoid"), 0)
    learner = FromTemplate(AttentionHeads(4, 2, "linear"), starts=2, seconds=2.0)
    recovery = keyhole.recover(box, learner, throw=False)
    assert recovery.outcome is Outcome.ILL_CONDITIONED
    assert recovery.model is not None
    assert "fresh answers differ" in recovery.reason
    assert "nothing against the template" in recovery.reason


def test_time_changes_no_query() -> None:
    box = randomise(AttentionHeads(4, 2), 1)
    runs = [
        keyhole.recover(box, FromTemplate(AttentionHeads(4, 2), seconds=s), throw=False)
        for s in (1e-6, 30.0)
    ]
    assert [run.outcome for run in runs] == [Outcome.ILL_CONDITIONED, Outcome.RECOVERED]
    # the first asks old queries again before it says so
    assert runs[0].ledger.by_purpose["template"] == runs[1].ledger.by_purpose["template"]
    assert repr(FromTemplate(box, seconds=1.0)) == repr(FromTemplate(box, seconds=2.0))


def test_templates_that_do_not_fit_the_box() -> None:
    box = randomise(AttentionHeads(4, 2), 0)
    with pytest.raises(keyhole.InvalidArgument, match="width 4"):
        keyhole.recover(box, FromTemplate(AttentionHeads(6, 2)))
    with pytest.raises(keyhole.InvalidArgument, match="answers with 3 numbers"):
        keyhole.recover(box, FromTemplate(Encoder(4, 4, 2, 4, 3)))
    with pytest.raises(keyhole.InvalidArgument, match="read one position"):
        keyhole.recover(box, FromTemplate(torch.nn.Linear(4, 1)))
    with pytest.raises(keyhole.InvalidArgument, match=r"torch\.nn\.Module"):
        FromTemplate("a name")


def test_the_loss_is_told_while_it_falls() -> None:
    told: list[str] = []
    keyhole.recover(
        randomise(Pooled(2), 0),
        FromTemplate(Pooled(2)),
        progress=lambda event: told.append(event.note),
    )
    levels = [float(note.split()[3]) for note in told if note]
    assert all(note.endswith("roundings") for note in told if note)
    assert max(levels) > 1e6
    assert min(levels) < 100.0


def test_a_budget_that_is_too_small() -> None:
    box = randomise(AttentionHeads(4, 2), 0)
    recovery = keyhole.recover(box, FromTemplate(AttentionHeads(4, 2)), budget=10, throw=False)
    assert recovery.outcome is Outcome.BUDGET_EXHAUSTED


def test_surplus_neurons_are_zero_and_counted() -> None:
    box = randomise(Pooled(3), 1)
    recovery = keyhole.recover(box, FromTemplate(Pooled(5), widths="at most"))
    assert recovery.outcome is Outcome.RECOVERED
    assert recovery.details["surplus"] == {"net.0.weight": 2}
    assert np.sum(~recovery.model.parameters["net.0.weight"].any(axis=1)) == 2


def test_surplus_heads_are_zero_and_counted() -> None:
    box = randomise(TorchHeads(), 1)
    with torch.no_grad():
        box.attend.out_proj.weight[:, 2:] = 0.0  # of two heads one is idle
    recovery = keyhole.recover(box, FromTemplate(TorchHeads(), widths="at most"))
    assert recovery.outcome is Outcome.RECOVERED
    assert recovery.details["surplus"] == {"attend.in_proj_weight": 1}


def test_what_widths_may_be() -> None:
    with pytest.raises(keyhole.InvalidArgument, match="at most"):
        FromTemplate(Pooled(), widths="about")  # type: ignore[arg-type]
