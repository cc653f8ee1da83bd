"""Sentences and records of a diagnosis."""

import json

from keyhole.diagnosis.result import Cause, Diagnosis, Ranked

CAUSE = Cause("pooling is cls", "cls", "readout", 0.5, 5.0, "everything", "pool as stated")


def diagnosis(**more):
    known = {"same": False, "causes": (), "evidence": (), "ranking": (Ranked((), 0.1, 2.0),)}
    return Diagnosis(**{**known, "tolerance": 1e-6, "queries": 18, "difference": 0.1, **more})


def test_one_sentence_each() -> None:
    assert "answers as the reference does" in str(diagnosis(same=True))
    assert "pooling is cls; this explains all of 18" in str(diagnosis(causes=(CAUSE,)))
    assert "not in the catalogue, most likely near layer 2" in str(
        diagnosis(suspicion="most likely near layer 2")
    )
    part = Cause(**{**vars(CAUSE), "explains": "a part"})
    assert "explains a part" in str(diagnosis(causes=(part,)))


def test_a_record_is_plain() -> None:
    record = diagnosis(causes=(CAUSE,)).to_record()
    assert json.loads(json.dumps(record)) == record
    assert record["causes"][0]["name"] == "pooling is cls"
    assert record["ranking"][0] == {"causes": [], "left_over": 0.1, "score": 2.0}
