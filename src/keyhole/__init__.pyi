# Every public name, where it is defined, and the heading of the API reference it stands under.
# This file is the one list: type checkers and editors read it, keyhole/__init__.py loads a name
# from where it says on first use, and `python .ci/api` writes docs/reference/api.md from it.
# A new name is one line here (from MODULE import NAME as NAME), then `python .ci/api`.

__version__: str

# Recover
from keyhole.recovery import recover as recover
from keyhole.results import Recovery as Recovery
from keyhole.results import Outcome as Outcome
from keyhole.results import Ledger as Ledger
from keyhole.results import Verdict as Verdict
from keyhole.recovery import Progress as Progress
from keyhole.results import load as load
from keyhole.layers import recover_layers as recover_layers
from keyhole.layers import Layers as Layers
from keyhole.verification.verify import verify as verify
from keyhole.verification.signature import sign as sign
from keyhole.verification.signature import Signature as Signature
from keyhole.verification.watching import watch as watch
from keyhole.verification.watching import Watch as Watch
from keyhole.verification.signature import check_evidence as check_evidence
from keyhole.verification.signature import Evidence as Evidence
from keyhole.models.canonical import distance as distance

# Compare
from keyhole.diagnosis.diagnosis import doctor as doctor
from keyhole.diagnosis.result import Diagnosis as Diagnosis
from keyhole.diagnosis.result import Cause as Cause
from keyhole.diagnosis.difference import diff as diff
from keyhole.diagnosis.difference import Difference as Difference

# Boxes
from keyhole.oracles.open import open_oracle as open_oracle
from keyhole.oracles.language_model.open import open_language_model as open_language_model
from keyhole.oracles.language_model.restricted import choose_tokens as choose_tokens
from keyhole.oracles.language_model.huggingface import open_embeddings as open_embeddings
from keyhole.learners.output_layer.dictionary import recover_dictionary as recover_dictionary
from keyhole.oracles.embeddings import open_embedding_endpoint as open_embedding_endpoint
from keyhole.oracles.base import Oracle as Oracle
from keyhole.oracles.base import Spec as Spec
from keyhole.oracles.base import Domain as Domain
from keyhole.oracles.noise import NoiseModel as NoiseModel
from keyhole.oracles.queries import QueryBatch as QueryBatch
from keyhole.oracles.http.retry import RetryPolicy as RetryPolicy
from keyhole.oracles.torch import inside as inside
from keyhole.models.parts import submodule as submodule

# Learners
from keyhole.learners.base import Hypothesis as Hypothesis
from keyhole.learners.auto import Auto as Auto
from keyhole.learners.single_head.learner import SingleHead as SingleHead
from keyhole.learners.single_head.learner import LowRank as LowRank
from keyhole.learners.multi_head.learner import MultiHead as MultiHead
from keyhole.learners.multi_head.known_subspaces import OrthogonalHeads as OrthogonalHeads
from keyhole.learners.label_only.learner import LabelOnly as LabelOnly
from keyhole.learners.mlp.learner import MlpLearner as MlpLearner
from keyhole.learners.mlp.relu.learner import ReluNetworkLearner as ReluNetworkLearner
from keyhole.learners.transformer.learner import Transformer as Transformer
from keyhole.learners.transformer.ffn import FfnLearner as FfnLearner
from keyhole.learners.block.learner import BlockLearner as BlockLearner
from keyhole.learners.stack.learner import StackLearner as StackLearner
from keyhole.learners.output_layer.learner import OutputLayerLearner as OutputLayerLearner
from keyhole.learners.token_attention.learner import TokenAttentionLearner as TokenAttentionLearner
from keyhole.learners.template.learner import FromTemplate as FromTemplate
from keyhole.learners.examples.learner import FromExamples as FromExamples
from keyhole.recovery import learn as learn

# Models
from keyhole.models.attention import Attention as Attention
from keyhole.models.attention import Head as Head
from keyhole.models.sign_attention import LabelledAttention as LabelledAttention
from keyhole.models.mlp import Mlp as Mlp
from keyhole.models.relu_network import ReluNetwork as ReluNetwork
from keyhole.models.transformer import TransformerModel as TransformerModel
from keyhole.models.block import Block as Block
from keyhole.models.stack import Stack as Stack
from keyhole.models.template import TemplateModel as TemplateModel
from keyhole.models.language_model import OutputLayer as OutputLayer
from keyhole.models.language_model import TokenAttention as TokenAttention
from keyhole.models.factors import layer_maps as layer_maps
from keyhole.models.export import from_torch as from_torch
from keyhole.models.export import from_hf as from_hf
from keyhole.models.export import from_gguf as from_gguf
from keyhole.models.export import to_torch as to_torch
from keyhole.models.export import to_onnx as to_onnx
from keyhole.models.export_names import to_hf as to_hf
from keyhole.models.export_names import to_transformer_lens as to_transformer_lens
from keyhole.models.export import export as export

# What cannot be known
from keyhole.verification.identifiability import identifiability as identifiability
from keyhole.verification.identifiability import witness as witness

# Errors
from keyhole.errors import KeyholeError as KeyholeError
from keyhole.errors import Counterexample as Counterexample
from keyhole.errors import InvalidArgument as InvalidArgument
from keyhole.errors import DomainError as DomainError
from keyhole.errors import OracleError as OracleError
from keyhole.errors import Inconsistent as Inconsistent
from keyhole.errors import BudgetExhausted as BudgetExhausted
from keyhole.errors import NotIdentifiable as NotIdentifiable
from keyhole.errors import IllConditioned as IllConditioned
from keyhole.errors import WrongFamily as WrongFamily
from keyhole.errors import Unsupported as Unsupported
from keyhole.errors import JournalError as JournalError
from keyhole.errors import JournalMismatch as JournalMismatch
from keyhole.errors import FileFormatError as FileFormatError
from keyhole.errors import MissingExtra as MissingExtra
from keyhole.errors import Interrupted as Interrupted
