"""What an endpoint may say about itself, and what the client makes of it."""

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from jaxtyping import TypeCheckError

import faulty_endpoint
import keyhole
from keyhole.models.random import attention
from keyhole.oracles.http.retry import RetryPolicy
from keyhole.oracles.http.tensors import Malformed, Tensor, decode, encode

PORT = {"name": "x", "datatype": "FP32", "shape": [-1, -1, 4]}
GOOD = {"inputs": [PORT], "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1]}]}


@pytest.fixture
def told():
    """An endpoint that tells what it is told to tell: {path: reply}."""
    started = []

    def start(replies):
        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                body = json.dumps(replies.get(self.path, {"error": "no"})).encode()
                self.send_response(200 if self.path in replies else 404)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET  # noqa: N815 - the library looks for this name

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        started.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def test_everything_comes_from_the_metadata(told):
    url = told({"/v2/models/m": GOOD, "/v2": {"extensions": ["binary_tensor_data"]}})
    with keyhole.open_oracle(f"{url}/v2/models/m") as box:
        meta = box.metadata
        assert (box.spec.width, meta.input, meta.output) == (4, "x", "y")
        assert (meta.datatype, meta.binary, meta.path) == ("FP32", True, "/v2/models/m")
        assert box.spec.identity == f"{url}/v2/models/m"


@pytest.mark.parametrize(
    "shape", [[-1, -1, float("inf")], [-1, -1, float("nan")], [-1, -1, 10**12], [-1, 2**60, 4]]
)
def test_a_side_that_no_model_has(told, shape):
    url = told({"/v2/models/m": {**GOOD, "inputs": [{**PORT, "shape": shape}]}})
    with pytest.raises(keyhole.OracleError, match=r"unknown way|no model has a side"):
        keyhole.open_oracle(f"{url}/v2/models/m")


def test_a_name_that_no_address_can_hold(told):
    with pytest.raises(keyhole.OracleError, match="unknown way"):
        keyhole.open_oracle(told({"/v2/repository/index": [{"name": "\ud800"}]}))


def test_a_token_told_as_the_name_of_a_model(told, monkeypatch, tmp_path):
    monkeypatch.setenv("KEYHOLE_TOKEN", "t0ken-of-this-test")
    url = told(
        {
            "/v2/repository/index": [{"name": "t0ken-of-this-test"}],
            "/v2/models/t0ken-of-this-test": GOOD,
        }
    )
    with keyhole.open_oracle(url) as box:
        assert "t0ken" not in box.spec.identity
        found = keyhole.recover(box, keyhole.SingleHead(), journal=tmp_path / "j", throw=False)
    assert found.outcome is keyhole.Outcome.ORACLE_FAILED
    found.save(tmp_path)
    for file in tmp_path.iterdir():
        assert b"t0ken" not in file.read_bytes()


@pytest.mark.parametrize("shape", [[0, 2**47, 2**47], [2**30, 2**30], [0] * 9, [-1], [1.0], ["1"]])
@pytest.mark.parametrize("binary", [True, False])
def test_a_shape_that_no_message_has(shape, binary):
    entry = {"name": "x", "datatype": "FP64", "shape": shape}
    entry |= {"parameters": {"binary_data_size": 0}} if binary else {"data": []}
    with pytest.raises(Malformed):
        decode(json.dumps({"outputs": [entry]}).encode(), None, "outputs")


def test_without_the_extension_it_is_json(told):
    with keyhole.open_oracle(told({"/v2/models/m": GOOD}) + "/v2/models/m/infer") as box:
        assert box.metadata.binary is False


def test_the_only_model_is_found_and_several_are_listed(told):
    one = told({"/v2/repository/index": [{"name": "m"}], "/v2/models/m": GOOD})
    with keyhole.open_oracle(one) as box:
        assert box.metadata.path == "/v2/models/m"
    two = told({"/v2/repository/index": [{"name": "m"}, {"name": "n"}], "/v2/models/n": GOOD})
    with pytest.raises(keyhole.InvalidArgument, match="m, n"):
        keyhole.open_oracle(two)
    with keyhole.open_oracle(two, model="n") as box:
        assert box.metadata.path == "/v2/models/n"
    with pytest.raises(keyhole.OracleError, match="name one"):
        keyhole.open_oracle(told({}))


def test_versions(told):
    url = told({"/v2/models/m/versions/3": GOOD})
    for box in (
        keyhole.open_oracle(f"{url}/v2/models/m/versions/3"),
        keyhole.open_oracle(f"{url}/v2/models/m", version="3"),
    ):
        assert box.metadata.path == "/v2/models/m/versions/3"
        box.close()


@pytest.mark.parametrize(
    ("metadata", "options", "message"),
    [
        ({}, {}, "does not tell its width"),
        ({"inputs": [{**PORT, "shape": [-1, 4]}]}, {}, "a sequence model takes"),
        ({"inputs": [{**PORT, "datatype": "INT64"}]}, {}, "not vectors"),
        ({"inputs": [{**PORT, "datatype": "FP16"}]}, {}, "JSON cannot carry"),
        ({"inputs": [PORT, {**PORT, "name": "z"}]}, {}, "x, z"),
        ({"inputs": [PORT, {**PORT, "name": "z"}]}, {"input": "z"}, "together"),
        ({"inputs": [PORT], "outputs": [{"name": "a"}, {"name": "b"}]}, {}, "a, b"),
        (GOOD, {"output": "q"}, "not q"),
        (GOOD, {"input": "q"}, "^[^(]* has the inputs x; choose one"),
        (GOOD, {"width": 5}, "width is 4, not 5"),
        (GOOD, {"model": "other"}, "names the model m"),
        (GOOD, {"encoding": "xml"}, "encoding"),
        (GOOD, {"datatype": "INT8"}, "datatype"),
        ({"inputs": 5}, {}, "unknown way"),
        ({"inputs": [{"shape": "x"}]}, {}, "unknown way"),
        ([], {}, "unknown way"),
    ],
)
def test_what_cannot_be_asked_is_told_why(told, metadata, options, message):
    url = told({"/v2/models/m": metadata})
    with pytest.raises((keyhole.KeyholeError, TypeCheckError), match=message):
        keyhole.open_oracle(f"{url}/v2/models/m", **options)


def test_where_nobody_listens_the_address_is_doubted_and_not_the_model(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]  # free again after the block
    monkeypatch.setattr("keyhole.oracles.http.open_inference.OPENING", RetryPolicy(attempts=1))
    with pytest.raises(keyhole.OracleError, match=r"^the connection to .* Is it running") as raised:
        keyhole.open_oracle(f"http://127.0.0.1:{port}")
    assert "name one" not in str(raised.value)


def test_plain_http_behind_https_is_said_to_be_that(told):
    url = told({"/v2/models/m": GOOD})
    with pytest.raises(keyhole.OracleError, match="speaks no TLS: name it as http://"):
        keyhole.open_oracle(f"{url}/v2/models/m".replace("http", "https"))


def test_a_query_in_the_url_is_refused():
    with pytest.raises(keyhole.InvalidArgument, match="no query") as caught:
        keyhole.open_oracle("http://127.0.0.1:9/v2/models/m?key=s3cr3t")
    assert "s3cr3t" not in str(caught.value)


def test_concurrency_is_bounded_and_the_order_kept():
    secret = attention(np.random.default_rng(0), 4)
    end = faulty_endpoint.start(secret)
    asked = keyhole.QueryBatch.of(np.random.default_rng(0).standard_normal((90, 2, 4)), "test")
    with keyhole.open_oracle(end.url, batch=7, concurrency=5) as box:
        alone = keyhole.open_oracle(secret, batch=7).ask(asked)
        np.testing.assert_array_equal(box.ask(asked), alone)
        assert box.traffic.exchanges == 13 + 2  # and two for the metadata
        assert box.ask(asked[:0]).shape == (0,)
    end.shutdown()
    end.server_close()


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("dtype", ["<f2", "<f4", "<f8", "<i4", "|u1", "?"])
def test_tensors_keep_every_bit(dtype, binary):
    array = (np.random.default_rng(0).standard_normal((3, 2)) * 50).astype(dtype)
    body, split = encode({"id": "a"}, "outputs", Tensor("t", array), binary)
    message, (tensor,) = decode(body, str(split) if binary else None, "outputs")
    assert (message["id"], tensor.name, tensor.array.dtype) == ("a", "t", array.dtype)
    np.testing.assert_array_equal(tensor.array, array)


def test_numbers_without_a_name():
    with pytest.raises(Malformed, match="complex128"):
        encode({}, "outputs", Tensor("t", np.zeros(1, complex)), True)
