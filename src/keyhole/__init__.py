"""Keyhole recovers attention models through their answers alone."""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_HOME = {  # public name -> the file that defines it; loaded on first use
    "Attention": "keyhole.models.attention",
    "Head": "keyhole.models.attention",
    "distance": "keyhole.models.symmetry",
    "Oracle": "keyhole.oracles.base",
    "Domain": "keyhole.oracles.base",
    "Precision": "keyhole.oracles.base",
    "Spec": "keyhole.oracles.base",
    "Questions": "keyhole.oracles.questions",
    "open_oracle": "keyhole.oracles.open",
    "Patience": "keyhole.oracles.patience",
    "inside": "keyhole.oracles.torch_module",
    "submodule": "keyhole.oracles.torch_module",
    "export": "keyhole.models.export",
    "to_torch": "keyhole.models.export",
    "to_onnx": "keyhole.models.export",
    "layer_maps": "keyhole.models.structure",
    "recover": "keyhole.recover",
    "Progress": "keyhole.recover",
    "verify": "keyhole.verification.verify",
    "identifiability": "keyhole.verification.witness",
    "witness": "keyhole.verification.witness",
    "Auto": "keyhole.learners.auto",
    "FromExamples": "keyhole.learners.examples",
    "learn": "keyhole.learn",
    "SingleHead": "keyhole.learners.single_head",
    "MultiHead": "keyhole.learners.multi_head",
    "OrthogonalHeads": "keyhole.learners.orthogonal_heads",
    "LowRank": "keyhole.learners.low_rank",
    "LabelOnly": "keyhole.learners.labels",
    "ReluNetworkLearner": "keyhole.learners.relu_network",
    "Transformer": "keyhole.learners.transformer",
    "FfnLearner": "keyhole.learners.ffn",
    "ReluNetwork": "keyhole.models.relu_network",
    "TransformerModel": "keyhole.models.transformer",
    "LabelledAttention": "keyhole.models.labelled",
    "Outcome": "keyhole.results",
    "Ledger": "keyhole.results",
    "Verdict": "keyhole.results",
    "Recovery": "keyhole.results",
    "load": "keyhole.results",
    **dict.fromkeys(
        (
            "Counterexample",
            "KeyholeError",
            "InvalidArgument",
            "DomainError",
            "OracleError",
            "Inconsistent",
            "BudgetExhausted",
            "NotIdentifiable",
            "IllConditioned",
            "WrongFamily",
            "JournalError",
            "JournalMismatch",
            "FileFormatError",
            "MissingExtra",
            "Interrupted",
        ),
        "keyhole.errors",
    ),
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'keyhole' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Importing a file such as keyhole/recover.py would put the module in the place of the public
    function of the same name; here the public name wins."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
