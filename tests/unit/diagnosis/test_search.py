"""The search over the catalogue, on answers that another implementation gives."""

import numpy as np
import pytest

from keyhole.diagnosis.catalogue import variants
from keyhole.diagnosis.experiment import Experiment, double_floor
from keyhole.diagnosis.probes import RowMaker, first_calls
from keyhole.diagnosis.reference import open_reference
from keyhole.diagnosis.search import Search, best_pairs
from keyhole.diagnosis.simulate import Bench
from keyhole.diagnosis.suspects import TokenFunction
from suspects import serve_llama, small_llama


def search(**faults) -> Search:
    model = small_llama(3)
    reference = open_reference(model)
    suspect = TokenFunction(serve_llama(model, **faults), reference.pad)
    experiment = Experiment(Bench(reference))
    for call in first_calls(RowMaker(reference, np.random.default_rng(0))):
        experiment.add(call, suspect.ask(call.rows))
    rows = list(range(len(experiment.rows)))
    floor = double_floor(experiment, (), rows)
    return Search(experiment, variants(reference), 8 * floor, rows)


def test_a_value_between_those_tried_is_found() -> None:
    found = search(temperature=1.37)
    found.try_singles()
    (cause,) = found.explanations[0].hypothesis
    assert cause.fault.name.startswith("attention scores")
    assert cause.value == pytest.approx(1.37, rel=1e-4)


def test_a_pair_is_found_and_a_needless_cause_is_dropped() -> None:
    found = search(activation="relu", eps=1e-3)
    found.try_singles()
    assert not found.explanations
    found.try_pairs()
    best = found.explanations[0]
    assert sorted(v.fault.group for v in best.hypothesis) == ["network", "norm"]
    window = next(v for v in found.variants if v.fault.parameter == "window" and v.value == 16)
    longer = found.evaluate((*best.hypothesis, window))
    assert len(found.prune(longer).hypothesis) <= 2 or not found.explains(longer)


def test_first_order_ranks_the_right_pair_first() -> None:
    rng = np.random.default_rng(1)
    moves = rng.standard_normal((20, 3, 8))
    rest = moves[4] + moves[11]
    assert best_pairs(rest, np.ones((3, 8)), moves, 1e-6)[0] == (4, 11)
