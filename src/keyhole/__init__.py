"""Keyhole recovers attention models through their answers alone."""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOME = {  # public name -> the file that defines it; loaded on first use
    "Attention": "keyhole.models.attention",
    "Head": "keyhole.models.attention",
    "distance": "keyhole.models.canonical",
    "Oracle": "keyhole.oracles.base",
    "Domain": "keyhole.oracles.base",
    "NoiseModel": "keyhole.oracles.noise",
    "Spec": "keyhole.oracles.base",
    "QueryBatch": "keyhole.oracles.queries",
    "open_oracle": "keyhole.oracles.open",
    "choose_tokens": "keyhole.oracles.language_model.restricted",
    "open_language_model": "keyhole.oracles.language_model.open",
    "open_embeddings": "keyhole.oracles.language_model.huggingface",
    "recover_dictionary": "keyhole.learners.output_layer.dictionary",
    "RetryPolicy": "keyhole.oracles.http.retry",
    "inside": "keyhole.oracles.torch",
    "submodule": "keyhole.models.parts",
    "from_torch": "keyhole.models.export",
    "from_hf": "keyhole.models.export",
    "from_gguf": "keyhole.models.export",
    "export": "keyhole.models.export",
    "to_torch": "keyhole.models.export",
    "to_onnx": "keyhole.models.export",
    "to_hf": "keyhole.models.export_names",
    "to_transformer_lens": "keyhole.models.export_names",
    "layer_maps": "keyhole.models.factors",
    "recover": "keyhole.recovery",
    "recover_layers": "keyhole.layers",
    "Layers": "keyhole.layers",
    "Progress": "keyhole.recovery",
    "verify": "keyhole.verification.verify",
    "identifiability": "keyhole.verification.identifiability",
    "witness": "keyhole.verification.identifiability",
    "Auto": "keyhole.learners.auto",
    "FromExamples": "keyhole.learners.examples.learner",
    "learn": "keyhole.recovery",
    "SingleHead": "keyhole.learners.single_head",
    "MultiHead": "keyhole.learners.multi_head.learner",
    "OrthogonalHeads": "keyhole.learners.multi_head.known_subspaces",
    "LowRank": "keyhole.learners.single_head",
    "LabelOnly": "keyhole.learners.label_only",
    "MlpLearner": "keyhole.learners.mlp.learner",
    "ReluNetworkLearner": "keyhole.learners.mlp.relu_learner",
    "Transformer": "keyhole.learners.transformer.learner",
    "FfnLearner": "keyhole.learners.transformer.ffn",
    "Block": "keyhole.models.block",
    "BlockLearner": "keyhole.learners.block.learner",
    "Mlp": "keyhole.models.mlp",
    "ReluNetwork": "keyhole.models.relu_network",
    "Stack": "keyhole.models.stack",
    "StackLearner": "keyhole.learners.stack",
    "TransformerModel": "keyhole.models.transformer",
    "OutputLayer": "keyhole.models.language_model",
    "OutputLayerLearner": "keyhole.learners.output_layer",
    "TokenAttention": "keyhole.models.language_model",
    "TokenAttentionLearner": "keyhole.learners.token_attention",
    "LabelledAttention": "keyhole.models.sign_attention",
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
            "Unsupported",
            "JournalError",
            "JournalMismatch",
            "FileFormatError",
            "MissingExtra",
            "Interrupted",
        ),
        "keyhole.errors",
    ),
}
_FORMER = {  # names of earlier versions
    "Precision": "NoiseModel",
    "Questions": "QueryBatch",
    "Patience": "RetryPolicy",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    current = _FORMER.get(name, name)
    if current not in _HOME:
        raise AttributeError(f"module 'keyhole' has no attribute {name!r}")
    value = getattr(import_module(_HOME[current]), current)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
