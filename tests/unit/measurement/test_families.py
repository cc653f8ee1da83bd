import json

import numpy as np

from keyhole.learners.auto import judge_family
from keyhole.measurement.families import NORMED, Family
from keyhole.measurement.family import examine_family
from keyhole.models.random import attention
from keyhole.oracles.open import open_oracle


def test_every_family_has_a_name_of_its_own_that_files_can_hold() -> None:
    assert len({family.value for family in Family}) == len(Family)
    assert json.loads(json.dumps({"family": Family.STACK})) == {"family": "a stack of blocks"}


def test_norms_and_whole_blocks() -> None:
    assert {family for family in Family if family.has_norm} == NORMED
    assert Family.PRE_NORM_BLOCK.is_whole_block
    assert not Family.PRE_NORM_ATTENTION.is_whole_block
    assert not Family.STACK.has_norm


def test_a_box_is_judged_by_a_member_not_a_sentence() -> None:
    box = open_oracle(attention(np.random.default_rng(0), 5), width=5)
    facts = examine_family(box, np.random.default_rng(1))
    assert judge_family(box, facts, np.random.default_rng(0)) == (Family.SINGLE_HEAD, "")
