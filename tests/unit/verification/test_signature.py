"""Signatures: what was signed is recognised, what changed is not, and nobody can bend a file."""

import json

import numpy as np
import pytest

import keyhole
from embedding_server import served
from keyhole.errors import FileFormatError, InvalidArgument
from keyhole.models.random import attention
from keyhole.oracles.rows import CallableRows
from keyhole.verification.records import read_record, write_record
from keyhole.verification.signature import (
    EVIDENCE,
    SIGNATURE,
    check_evidence,
    choose_requests,
    commit_to,
    is_signature,
    load_signature,
    sign,
    verify_with_evidence,
)
from sentence_folders import write_plain

TABLE = np.random.default_rng(0).standard_normal((30, 4))
MODEL = attention(np.random.default_rng(1), 5, outputs=2)


def embed(tokens, attention_mask=None):
    mask = np.ones_like(tokens) if attention_mask is None else attention_mask
    weights = mask / mask.sum(axis=1, keepdims=True)
    return np.einsum("nl,nld->nd", weights, TABLE[tokens])


def changed(tokens, attention_mask=None):
    return embed(tokens, attention_mask) + 1e-6


@pytest.fixture
def signed(tmp_path):
    path = tmp_path / "rows.keyhole"
    sign(CallableRows(embed, tokens=30, max_length=20), path, seed=3)
    return path


def test_a_signature_is_replayed(signed):
    assert is_signature(signed)
    assert signed.stat().st_mode & 0o777 == 0o600
    verdict = keyhole.verify(embed, str(signed))
    assert verdict.agrees, verdict.bound
    assert verdict.queries == 59
    assert "as the box that was signed answers them" in verdict.bound
    assert not keyhole.verify(changed, signed).agrees
    fewer = keyhole.verify(embed, signed, queries=10)
    assert fewer.agrees
    assert 10 <= fewer.queries <= 15


def test_vectors_are_signed_too(tmp_path):
    path = tmp_path / "model.keyhole"
    signature = keyhole.sign(MODEL, path, queries=20, seed=1)
    assert signature.plan.kind == "vectors"
    assert keyhole.verify(lambda tokens: MODEL(tokens), path).agrees
    other = attention(np.random.default_rng(2), 5, outputs=2)
    assert not keyhole.verify(other, path).agrees
    scalar = attention(np.random.default_rng(2), 5)
    with pytest.raises(InvalidArgument, match="1 numbers, the one that was signed with 2"):
        keyhole.verify(scalar, path)


def test_an_endpoint_is_signed(tmp_path):
    with served(embed) as server:
        signature = sign(server.url, tmp_path / "a.keyhole", queries=20, tokens=30, max_length=9)
        assert signature.plan.tokens == 30
        assert keyhole.verify(server.url, tmp_path / "a.keyhole").agrees


def test_seeds_are_random_unless_stated_and_draw_the_queries(signed, tmp_path):
    box = CallableRows(embed, tokens=30, max_length=20)
    one, two = (sign(box, tmp_path / name) for name in "ab")
    assert one.plan.seed != two.plan.seed
    again = sign(box, tmp_path / "c", seed=3)
    first = load_signature(signed)
    assert np.array_equal(first.answers, again.answers)
    assert first.plan == again.plan


def test_noise_is_measured_by_repetition(tmp_path):
    rng = np.random.default_rng(0)

    def noisy(tokens, attention_mask=None):
        return embed(tokens, attention_mask) + 1e-3 * rng.standard_normal((len(tokens), 4))

    box = CallableRows(noisy, tokens=30, max_length=20)
    signature = sign(box, tmp_path / "a", seed=0)
    assert not signature.noise.repeatable
    assert 5e-4 < signature.noise.additive < 4e-3
    assert keyhole.verify(box, tmp_path / "a").agrees


def bend(path, format_, change):
    body, _ = read_record(path, format_)
    change(body)
    write_record(path, format_, body)  # a forger can make a digest that fits


def test_queries_that_the_seed_does_not_draw_are_refused(signed):
    bend(
        signed, SIGNATURE, lambda body: body["requests"][0]["rows"][0].update(bytes="AAAAAAAAAAA=")
    )
    with pytest.raises(FileFormatError, match="not those that its seed draws"):
        load_signature(signed)


def test_a_seed_that_was_not_committed_to_is_refused(signed):
    bend(signed, SIGNATURE, lambda body: body["plan"].update(seed=4))
    with pytest.raises(FileFormatError, match="committed"):
        load_signature(signed)
    assert commit_to(3) != commit_to(4)


def test_evidence_is_checked_offline(tmp_path):
    reference = CallableRows(embed, tokens=30, max_length=20)
    path = tmp_path / "verdict.evidence"
    verdict = verify_with_evidence(changed, reference, path, seed=5)
    assert not verdict.agrees
    evidence = check_evidence(path)
    assert evidence.sound
    assert not evidence.verdict.agrees
    assert "the seed draws these queries" in str(evidence)
    assert path.stat().st_mode & 0o777 == 0o600
    bend(path, EVIDENCE, lambda body: body["verdict"].update(agrees=True))
    assert not check_evidence(path).sound
    bend(path, EVIDENCE, lambda body: body.update(answered=body["expected"]))
    forged = check_evidence(path)
    assert forged.verdict.agrees  # the answers say so now: the digest is what was published


def test_one_altered_byte_of_evidence_is_found(signed, tmp_path):
    path = tmp_path / "verdict.evidence"
    assert verify_with_evidence(embed, str(signed), path).agrees
    assert check_evidence(path).sound
    whole = path.read_bytes()
    for place in np.linspace(0, len(whole) - 1, 50).astype(int):
        altered = bytearray(whole)
        altered[place] ^= 4
        path.write_bytes(altered)
        with pytest.raises(FileFormatError):
            check_evidence(path)


def test_requests_are_chosen_whole(signed):
    signature = load_signature(signed)
    requests, places = choose_requests(signature, 10, seed=1)
    assert sum(len(request.rows) for request in requests) == len(places)
    everything, places = choose_requests(signature, None, seed=1)
    assert len(everything) == len(signature.requests)
    assert places.tolist() == list(range(59))


def test_the_record_is_plain_json(signed):
    head, body = signed.read_text().splitlines()
    assert head.startswith("keyhole-signature-1 sha256:")
    assert json.loads(body)["versions"]["keyhole"] == keyhole.__version__


def test_a_guess_is_not_signed(tmp_path):
    (tmp_path / "plain").mkdir()
    folder = write_plain(tmp_path / "plain")
    with pytest.raises(InvalidArgument, match="does not say how one vector is made"):
        sign(f"hf:{folder}", tmp_path / "a.keyhole")
