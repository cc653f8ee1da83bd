"""One call a night: quiet where nothing changed, an alarm with its date where it did."""

import json
import zlib

import numpy as np
import pytest

import keyhole
from keyhole.errors import FileFormatError, InvalidArgument, OracleError
from keyhole.models.random import attention
from keyhole.oracles.rows import CallableRows
from keyhole.verification.sequential import Monitor
from keyhole.verification.watching import draw_seed, name_reference, read_state

MODEL = attention(np.random.default_rng(0), 5, outputs=3)
REFERENCE = keyhole.open_oracle(MODEL)


def seldom(share):
    """The model, with a share of its answers changed, by what was asked."""

    def box(tokens):
        answers = np.array(MODEL(tokens))
        odd = np.array([zlib.crc32(query.tobytes()) % 1000 < 1000 * share for query in tokens])
        answers[odd] += 0.01
        return answers

    return box


def test_healthy_nights_are_quiet_and_fresh(tmp_path):
    path, seen = tmp_path / "watch.json", []

    def box(tokens):
        seen.extend(query.tobytes() for query in tokens if query.any())  # zeros may come again
        return MODEL(tokens)

    for night in range(1, 6):
        watch = keyhole.watch(box, REFERENCE, path)
        assert (watch.alarm, watch.nights, watch.bad, watch.asked) == (False, night, 0, 30)
        assert watch.e_value < 1.0
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(set(seen)) >= 5 * 29  # no night asks what another asked
    assert "No alarm after 5 night(s)" in str(watch)
    assert watch.verdict.agrees


def test_a_change_is_noticed_and_dated(tmp_path):
    path = tmp_path / "watch.json"
    for _ in range(4):
        keyhole.watch(seldom(0.0), REFERENCE, path)
    for _ in range(5):
        watch = keyhole.watch(seldom(0.2), REFERENCE, path)
        if watch.alarm:
            break
    assert watch.alarm
    assert watch.e_value >= 100.0
    kept = json.loads(path.read_text())["nights"]
    assert watch.since in [one["when"] for one in kept[3:]]
    assert "ALARM" in str(watch)
    # it stays until it is armed again
    assert keyhole.watch(seldom(0.0), REFERENCE, path).alarm
    again = keyhole.watch(seldom(0.0), REFERENCE, path, rearm=True)
    assert (again.alarm, again.nights) == (False, 1)
    assert len(again.history) == len(kept) + 2


def test_one_bad_night_raises_no_alarm_by_itself(tmp_path):
    path = tmp_path / "watch.json"
    for share in (0.0, 0.0, 1.0, 0.0, 0.0):
        watch = keyhole.watch(seldom(share), REFERENCE, path)
    assert not watch.alarm


@pytest.mark.parametrize("kind", ["model", "run", "saved", "signature"])
def test_any_reference(kind, tmp_path):
    if kind == "run":
        reference = keyhole.recover(MODEL)
    elif kind == "saved":
        reference = str(keyhole.export(MODEL, tmp_path / "model.safetensors"))
    elif kind == "signature":
        keyhole.sign(MODEL, tmp_path / "a.keyhole", seed=0)
        reference = str(tmp_path / "a.keyhole")
    else:
        reference = MODEL
    watch = keyhole.watch(lambda tokens: MODEL(tokens), reference, tmp_path / "good.json")
    assert watch.bad == 0
    changed = keyhole.watch(seldom(1.0), reference, tmp_path / "bad.json")
    assert changed.bad >= 0.9 * changed.asked


def test_rows_of_tokens(tmp_path):
    table = np.random.default_rng(0).standard_normal((30, 4))
    reference = CallableRows(lambda tokens: table[tokens].sum(axis=1), tokens=30, max_length=9)
    watch = keyhole.watch(lambda tokens: table[tokens].sum(axis=1), reference, tmp_path / "w.json")
    assert (watch.bad, watch.asked) == (0, 30)


def test_a_night_without_answers_is_not_counted(tmp_path):
    path = tmp_path / "watch.json"
    keyhole.watch(seldom(0.0), REFERENCE, path)
    before = path.read_bytes()

    def broken(tokens):
        raise RuntimeError("down")

    with pytest.raises(OracleError):
        keyhole.watch(broken, REFERENCE, path)
    assert path.read_bytes() == before


def test_a_state_belongs_to_its_reference_and_settings(tmp_path):
    path = tmp_path / "watch.json"
    keyhole.watch(seldom(0.0), REFERENCE, path)
    with pytest.raises(InvalidArgument, match="begun with benign"):
        keyhole.watch(seldom(0.0), REFERENCE, path, alpha=0.05)
    with pytest.raises(InvalidArgument, match="watches"):
        keyhole.watch(seldom(0.0), attention(np.random.default_rng(3), 5, outputs=3), path)
    path.write_text("{}")
    with pytest.raises(FileFormatError, match="no state of a watch"):
        read_state(path, "a", Monitor())


def test_seeds_and_names():
    assert draw_seed("a", 0) != draw_seed("a", 1) != draw_seed("b", 1)
    assert name_reference(MODEL) == name_reference(MODEL)
    assert name_reference("http://host/a?key=secret") == "http://host/a"
    assert name_reference(seldom).endswith("seldom")
    assert name_reference(REFERENCE) == REFERENCE.spec.identity


def test_a_language_model(tmp_path):
    table = np.random.default_rng(0).standard_normal((30, 30))

    def logits(prompts):
        return table[prompts[:, -1]] + table[prompts[:, 0]]

    box = keyhole.open_language_model(lambda prompts: logits(prompts))
    watch = keyhole.watch(box, keyhole.open_language_model(logits), tmp_path / "w.json", queries=10)
    assert (watch.bad, watch.asked) == (0, 10)
    heated = keyhole.open_language_model(lambda prompts: logits(prompts) / 1.3)
    other = keyhole.open_language_model(logits)
    assert keyhole.watch(heated, other, tmp_path / "v.json", queries=10).bad == 10
