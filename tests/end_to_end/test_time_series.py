import importlib.util
from pathlib import Path

from keyhole import Outcome

EXAMPLE = Path(__file__).parents[2] / "examples" / "audit_a_time_series_model.py"


def test_a_forecaster_behind_an_address_is_recovered() -> None:
    spec = importlib.util.spec_from_file_location("time_series", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    recovery = module.main(seconds=60.0)
    assert recovery.outcome is Outcome.RECOVERED
    assert recovery.ledger.learning <= 8 * recovery.details["weights"]
