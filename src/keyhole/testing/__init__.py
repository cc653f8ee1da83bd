"""Contracts that a third party's oracle or learner can be held to, from its own tests.

from keyhole.testing import check_learner, check_oracle

def test_my_box():
    check_oracle(MyOracle("…"))

def test_my_learner():
    check_learner(MyLearner(), lambda: open_oracle(my_model))
"""

from keyhole.testing.contract import ContractBroken
from keyhole.testing.learners import check_learner
from keyhole.testing.oracles import check_oracle

__all__ = ["ContractBroken", "check_learner", "check_oracle"]
