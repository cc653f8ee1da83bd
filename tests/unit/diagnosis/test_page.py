"""The page of a diagnosis."""

import numpy as np

from keyhole.diagnosis.page import write_page
from keyhole.diagnosis.result import Cause, Diagnosis, ProbeEvidence, Ranked

CAUSE = Cause("the <mask> is ignored", None, "input", 0.5, 5.0, "everything", "pass it")
ITEM = ProbeEvidence("a row alone", (np.array([3, 4]),), 0, np.ones(3), np.zeros(3), 1.0, 1e-7)


def diagnosis(**more):
    ranking = (Ranked(("the <mask> is ignored",), 1e-7, 0.0), Ranked((), 0.5, 3.0))
    known = {"same": False, "causes": (CAUSE,), "evidence": (ITEM,), "ranking": ranking}
    return Diagnosis(**{**known, "tolerance": 1e-6, "queries": 18, **more})


def test_the_page_holds_all_and_escapes_it(tmp_path) -> None:
    path = write_page(diagnosis(), "hf:here", "http://host/embed?key=secret", tmp_path / "d.html")
    text = path.read_text()
    assert "the &lt;mask&gt; is ignored" in text
    assert "<mask>" not in text
    assert "secret" not in text
    assert "a row alone" in text
    assert "5.0 decades" in text
    assert '<h1 id="headline">The suspect differs: the &lt;mask&gt; is ignored.</h1>' in text


def test_a_healthy_page_says_so(tmp_path) -> None:
    healthy = diagnosis(same=True, causes=(), evidence=(), ranking=())
    text = write_page(healthy, "a", "b", tmp_path / "d.html").read_text()
    assert "The suspect is healthy." in text
    assert "Left over" not in text  # nothing was named that could leave something
