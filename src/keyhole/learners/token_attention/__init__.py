"""Models of one attention layer on tokens, from their logits or log-probabilities."""

from keyhole.learners.token_attention.learner import (
    TokenAttentionDiagnostics,
    TokenAttentionLearner,
)

__all__ = ["TokenAttentionDiagnostics", "TokenAttentionLearner"]
