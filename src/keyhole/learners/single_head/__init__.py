"""One softmax attention head: from its answers to its parameters."""

from keyhole.learners.single_head.bounded_noise import fewest_queries
from keyhole.learners.single_head.calibration import Calibration
from keyhole.learners.single_head.cross import RankSearch
from keyhole.learners.single_head.hypothesis import Score
from keyhole.learners.single_head.learner import RANK_SHOWN, LowRank, SingleHead, learn_head

__all__ = [
    "RANK_SHOWN",
    "Calibration",
    "LowRank",
    "RankSearch",
    "Score",
    "SingleHead",
    "fewest_queries",
    "learn_head",
]
