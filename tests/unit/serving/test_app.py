"""The server: what it answers, what it refuses, and that nothing makes it fail."""

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import keyhole
from keyhole.models.random import attention
from keyhole.oracles.http.tensors import DATATYPES, HEADER_LENGTH, Tensor, decode, encode
from keyhole.serving.app import REQUESTS
from keyhole.serving.inference import Limits
from keyhole.serving.server import Bind, Blur, Service, service

WIDTH = 4
SECRET = attention(np.random.default_rng(0), WIDTH)
TOKENS = np.random.default_rng(1).standard_normal((3, 2, WIDTH))
LIMITS = Limits(body=20_000, batch=8, length=16)
INFER = "/v2/models/model/infer"


def request(app, method="GET", path="/v2", body=b"", headers=(), chunks=1):
    """One request to the application, without a network: (status, headers, body)."""
    sent = []
    size = max(1, -(-len(body) // chunks))
    parts = [body[k : k + size] for k in range(0, len(body), size)] or [b""]
    events = [
        {"type": "http.request", "body": part, "more_body": k < len(parts) - 1}
        for k, part in enumerate(parts)
    ]

    async def receive():
        return events.pop(0) if events else {"type": "http.disconnect"}

    async def send(event):
        sent.append(event)

    pairs = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    scope = {"type": "http", "method": method, "path": path, "headers": pairs}
    asyncio.run(app(scope, receive, send))
    start, end = sent
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    assert found["content-length"] == str(len(end["body"]))
    return start["status"], found, end["body"]


def model_app(token=None, **options):
    return Service(keyhole.open_oracle(SECRET), limits=LIMITS, **options).app(token)


def infer(app, tokens=TOKENS, binary=True, **more):
    body, split = encode({"id": "7"}, "inputs", Tensor("tokens", tokens), binary)
    headers = [(HEADER_LENGTH, str(split))] if binary else []
    return request(app, "POST", INFER, body, headers, **more)


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("chunks", [1, 5])
def test_answers(binary, chunks):
    status, headers, body = infer(model_app(), binary=binary, chunks=chunks)
    message, (answer,) = decode(body, headers.get(HEADER_LENGTH.lower()), "outputs")
    assert (status, message["id"], answer.name) == (200, "7", "answers")
    np.testing.assert_array_equal(answer.array, SECRET(TOKENS))


def test_json_has_a_limit_before_it_is_read(monkeypatch):
    def unread(*_):
        raise AssertionError("it was read")

    monkeypatch.setattr("keyhole.serving.inference.decode", unread)
    app = Service(keyhole.open_oracle(SECRET), limits=Limits(json=500)).app()
    status, _, body = infer(app, np.ones((8, 8, WIDTH)), binary=False)
    assert (status, "binary extension" in json.loads(body)["error"]) == (413, True)


def test_a_binary_message_of_any_size_is_read():
    app = Service(keyhole.open_oracle(SECRET), limits=Limits(json=500)).app()
    assert infer(app, np.ones((8, 8, WIDTH)))[0] == 200


@pytest.mark.parametrize("shape", [[0, 2**47, 2**47], [2**47, 0, 4], [2**62, 2**62, 4]])
def test_a_shape_that_no_message_has(shape):
    entry = {"name": "tokens", "datatype": "FP64", "shape": shape, "data": []}
    body = json.dumps({"inputs": [entry]}).encode()
    assert request(model_app(), "POST", INFER, body)[0] == 400


def test_health_is_told_whatever_else_goes_on():
    """One request more than may be under way is refused; health is not."""
    app, ended = model_app(), asyncio.Event

    async def run():
        done = ended()
        replies = []

        async def never():
            await done.wait()
            return {"type": "http.disconnect"}

        async def ask(method, path, receive):
            async def send(event):
                if event["type"] == "http.response.start":
                    replies.append(event["status"])

            scope = {"type": "http", "method": method, "path": path, "headers": []}
            await app(scope, receive, send)

        slow = [asyncio.ensure_future(ask("POST", INFER, never)) for _ in range(REQUESTS)]
        await asyncio.sleep(0)
        await ask("POST", INFER, never)
        await ask("GET", "/v2/health/ready", never)
        done.set()
        await asyncio.gather(*slow)
        return replies

    assert asyncio.run(run())[:2] == [503, 200]


def test_the_client_may_want_binary_answers():
    wish = {"parameters": {"binary_data_output": True}}
    body, split = encode(wish, "inputs", Tensor("tokens", TOKENS), True)
    _, headers, reply = request(model_app(), "POST", INFER, body, [(HEADER_LENGTH, str(split))])
    _, (answer,) = decode(reply, headers[HEADER_LENGTH.lower()], "outputs")
    np.testing.assert_array_equal(answer.array, SECRET(TOKENS))


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2", 200),
        ("GET", "/v2/", 200),
        ("GET", "/v2/health/live", 200),
        ("GET", "/v2/health/ready", 200),
        ("GET", "/v2/models/model", 200),
        ("GET", "/v2/models/model/ready", 200),
        ("GET", "/v2/models/model/versions/1", 200),
        ("POST", "/v2/repository/index", 200),
        ("GET", "/v2/models/other", 404),
        ("GET", "/v2/models/model/versions/2", 404),
        ("GET", "/", 404),
        ("GET", "/etc/passwd", 404),
        ("GET", INFER, 405),
        ("DELETE", "/v2/models/model", 405),
        ("POST", INFER, 400),
    ],
)
def test_paths(method, path, status):
    assert request(model_app(), method, path)[0] == status


def test_metadata_tells_width_and_format():
    told = json.loads(request(model_app(), "GET", "/v2/models/model")[2])
    assert told["inputs"] == [{"name": "tokens", "datatype": "FP64", "shape": [-1, -1, WIDTH]}]
    single = service(SECRET.astype(np.float32), "model").app()
    told = json.loads(request(single, "GET", "/v2/models/model")[2])
    assert told["inputs"][0]["datatype"] == "FP32"


@pytest.mark.parametrize(
    ("tokens", "status"),
    [
        (np.zeros((9, 1, WIDTH)), 413),
        (np.zeros((1, 17, WIDTH)), 413),
        (np.zeros((8, 16, WIDTH * 8)), 413),  # more bytes than a request may have
        (np.zeros((1, 1, WIDTH + 1)), 400),
        (np.zeros((0, 1, WIDTH)), 400),
        (np.zeros((1, 0, WIDTH)), 400),
        (np.zeros((1, WIDTH)), 400),
        (np.zeros((1, 1, WIDTH), np.int32), 400),
        (np.full((1, 1, WIDTH), np.nan), 400),
        (np.full((1, 1, WIDTH), np.inf), 400),
        (np.full((2, 2, WIDTH), 1e200), 422),  # overflows inside the model
        (np.full((1, 1, WIDTH), 1e308), 422),  # finite, though its sum is not
        (np.zeros((1, 1, WIDTH), np.float32), 200),
    ],
)
@pytest.mark.parametrize("binary", [True, False])
def test_limits(tokens, status, binary):
    reply = infer(model_app(), tokens, binary)
    assert reply[0] == status, reply[2]
    if reply[0] != 200:
        assert json.loads(reply[2])["error"]


def test_a_body_larger_than_announced():
    app = model_app()
    assert request(app, "POST", INFER, b" " * 30_000, chunks=10)[0] == 413
    assert request(app, "POST", INFER, b"", [("Content-Length", "9" * 30)])[0] == 413
    assert request(app, "POST", INFER, b"{}", [("Content-Encoding", "gzip")])[0] == 415


def test_token():
    app = model_app(token="right")
    assert request(app, "GET", "/v2/health/live")[0] == 200
    for wrong in ((), [("Authorization", "Bearer wrong")], [("Authorization", "right")]):
        status, headers, body = request(app, "GET", "/v2/models/model", b"", wrong)
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert b"right" not in body
    assert request(app, "GET", "/v2", b"", [("Authorization", "Bearer \xff\xfe")])[0] == 401
    assert request(app, "GET", "/v2", b"", [("Authorization", "bearer right")])[0] == 200


@pytest.mark.parametrize(
    ("blur", "expected"),
    [
        (Blur(decimals=2), np.round(SECRET(TOKENS), 2)),
        (Blur(labels=True), (SECRET(TOKENS) > 0).astype(float)),
    ],
)
def test_blurred_answers(blur, expected):
    _, _, body = infer(model_app(blur=blur), binary=False)
    np.testing.assert_array_equal(decode(body, None, "outputs")[1][0].array, expected)


def test_what_is_no_number_has_no_label():
    tokens = np.full((1, 2, WIDTH), np.nan)
    assert infer(model_app(blur=Blur(labels=True)), tokens, False)[0] == 400


@pytest.mark.parametrize("binary", [True, False])
def test_a_model_may_compute_in_its_input(binary):
    def doubled(tokens):
        tokens *= 2.0
        return SECRET(tokens)

    status, headers, body = infer(service(doubled, "model", width=WIDTH).app(), binary=binary)
    assert status == 200
    split = headers.get(HEADER_LENGTH.lower())
    np.testing.assert_array_equal(decode(body, split, "outputs")[1][0].array, SECRET(2 * TOKENS))


def test_noise_is_seeded():
    def answers(blur):
        return decode(infer(model_app(blur=blur), binary=False)[2], None, "outputs")[1][0].array

    first, again = answers(Blur(noise=0.1, seed=3)), answers(Blur(noise=0.1, seed=3))
    np.testing.assert_array_equal(first, again)
    assert 0 < np.abs(first - SECRET(TOKENS)).max() < 1


def test_a_model_that_breaks_is_the_only_500(caplog):
    def broken(_):
        raise MemoryError

    app = Service(keyhole.open_oracle(broken, WIDTH)).app()
    assert infer(app)[0] == 500
    assert "the model failed" in caplog.text
    assert request(app, "GET", "/v2/health/ready")[0] == 200


def test_lifespan_and_websockets():
    app, sent = model_app(), []
    events = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

    async def receive():
        return events.pop(0)

    async def send(event):
        sent.append(event["type"])

    asyncio.run(app({"type": "lifespan"}, receive, send))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    asyncio.run(app({"type": "websocket"}, receive, send))
    assert sent[-1] == "websocket.close"


def test_other_machines_need_a_token(monkeypatch):
    monkeypatch.delenv("KEYHOLE_SERVE_TOKEN", raising=False)
    assert Bind().token() is None
    with pytest.raises(keyhole.InvalidArgument, match="opens the model"):
        Bind(host="0.0.0.0").token()
    assert Bind(host="0.0.0.0", public=True).token() is None
    monkeypatch.setenv("KEYHOLE_SERVE_TOKEN", "x")
    assert Bind(host="0.0.0.0").token() == "x"


@pytest.mark.parametrize("name", ["", "a/b", "a b", "x" * 101])
def test_names_fit_into_urls(name):
    with pytest.raises(keyhole.InvalidArgument, match="name"):
        Service(keyhole.open_oracle(SECRET), name)


# ---- malformed requests, thousands of them -------------------------------------------------------

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(-2, 9), max_size=4),
    st.sampled_from([{}, [], [[]], [[1, 2], [3]], "tokens", "FP64", [1, 1, WIDTH], [2**60] * 3]),
)
SHAPE = st.one_of(st.just([1, 1, WIDTH]), st.lists(st.integers(-1, 20), max_size=9), ODD)
DATA = st.one_of(st.lists(st.floats(), min_size=WIDTH, max_size=WIDTH), ODD)
PARAMETERS = st.one_of(
    ODD, st.fixed_dictionaries({}, optional={"binary_data_size": ODD, "binary_data": ODD})
)
TENSOR = st.one_of(
    ODD,
    st.fixed_dictionaries(
        {},
        optional={
            "name": st.one_of(st.just("tokens"), ODD),
            "shape": SHAPE,
            "datatype": st.one_of(st.sampled_from([*DATATYPES, "BYTES"]), ODD),
            "data": DATA,
            "parameters": PARAMETERS,
        },
    ),
)
MESSAGE = st.one_of(
    ODD,
    st.fixed_dictionaries(
        {"inputs": st.one_of(st.lists(TENSOR, max_size=2), ODD)},
        optional={"id": ODD, "parameters": PARAMETERS, "outputs": st.one_of(st.lists(TENSOR), ODD)},
    ),
)
GOOD = st.fixed_dictionaries(
    {
        "name": st.just("tokens"),
        "shape": st.just([1, 1, WIDTH]),
        "datatype": st.sampled_from(["FP16", "FP32", "FP64"]),
        "data": st.lists(st.floats(), min_size=WIDTH, max_size=WIDTH),
    }
)
FUZZED = model_app()


def survives(status, body):
    assert status in (200, 400, 401, 404, 405, 408, 413, 415, 422), (status, body)
    if status != 200:
        assert isinstance(json.loads(body)["error"], str)


@settings(max_examples=1500, deadline=None)
@given(
    MESSAGE,
    st.one_of(st.none(), st.integers(-5, 500).map(str), st.text(max_size=4)),
    st.binary(max_size=64),
)
def test_malformed_messages(message, header, tail):
    text = json.dumps(message).encode()
    headers = [] if header is None else [("inference-header-content-length", header)]
    headers = [(n, v.encode("utf-8").decode("latin-1")) for n, v in headers]
    status, _, body = request(FUZZED, "POST", INFER, text + tail, headers)
    survives(status, body)


@settings(max_examples=800, deadline=None)
@given(
    GOOD, st.dictionaries(st.sampled_from(["name", "shape", "datatype", "data"]), ODD, max_size=2)
)
def test_nearly_good_messages(entry, spoiled):
    text = json.dumps({"inputs": [{**entry, **spoiled}]}).encode()
    status, _, body = request(FUZZED, "POST", INFER, text)
    survives(status, body)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 400))
def test_noise_for_a_body(noise, split):
    status, _, body = request(FUZZED, "POST", INFER, noise, [(HEADER_LENGTH, str(split))])
    survives(status, body)


@settings(max_examples=500, deadline=None)
@given(st.sampled_from(["GET", "POST", "PUT", "HEAD", "OPTIONS", "x"]), st.text(max_size=40))
def test_noise_for_a_path(method, path):
    for prefix in ("", "/v2/", "/v2/models/model/"):
        status, _, body = request(FUZZED, method, prefix + path)
        survives(status, body)


def test_depth_and_size_tricks():
    for text in (b"[" * 9000, b'{"inputs":' * 1500, b'{"inputs": [' + b"9" * 9000 + b"]}"):
        assert request(FUZZED, "POST", INFER, text)[0] == 400
    deep = b'{"inputs":[{"name":"tokens","shape":[1,1,4],"datatype":"FP64","data":' + b"[" * 900
    assert request(FUZZED, "POST", INFER, deep + b"]" * 900 + b"}]}")[0] == 400
    huge = {"name": "tokens", "shape": [1, 1, 4], "datatype": "FP64", "data": [10**400] * 4}
    assert request(FUZZED, "POST", INFER, json.dumps({"inputs": [huge]}).encode())[0] == 400
