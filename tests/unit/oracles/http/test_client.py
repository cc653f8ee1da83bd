"""The connection: redirects, tokens, pauses, rates, and answers that never end."""

import contextlib
import gzip
import json
import logging
import socketserver
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest

import faulty_endpoint
import keyhole
from keyhole.models.random import attention
from keyhole.oracles.http.client import (
    Access,
    Endpoint,
    Pace,
    checked_url,
    loopback,
    proxy_for,
    retry_after,
)
from keyhole.oracles.http.retry import RetryPolicy, Transient
from keyhole.oracles.wrappers.count import QueryCounter

TOKEN = "s3cr3t-t0k3n-value"
TOKENS = np.random.default_rng(0).standard_normal((6, 2, 4))
ASKED = keyhole.QueryBatch.of(TOKENS, "test")


@pytest.fixture
def answering():
    """A server whose reply to each request is the next of a list: (status, headers, body)."""
    started = []

    def start(*replies):
        waiting = list(replies)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                server.seen.append((self.path, dict(self.headers), body))
                reply = waiting.pop(0) if len(waiting) > 1 else waiting[0]
                status, headers, content = reply(self) if callable(reply) else reply
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST  # noqa: N815 - the library looks for this name

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads, server.seen = True, []
        server.url = f"http://127.0.0.1:{server.server_address[1]}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def endpoint(server, **more):
    more = {"timeout": 2.0, "patience": RetryPolicy(attempts=3, first=0.001), **more}
    return Endpoint(server.url, Access(**more))


def test_a_redirect_on_the_same_host_is_followed(answering):
    server = answering((307, {"Location": "/elsewhere"}, b""), (200, {}, b"here"))
    end = endpoint(server)
    assert end.ask("POST", "/first", content=b"q").body == b"here"
    assert [(path, body) for path, _, body in server.seen] == [
        ("/first", b"q"),
        ("/elsewhere", b"q"),
    ]
    end.close()


def test_a_redirect_to_another_host_is_refused_and_gets_nothing(answering, monkeypatch):
    monkeypatch.setenv("KEYHOLE_TOKEN", TOKEN)
    other = answering((200, {}, b"stolen"))
    for location in (other.url, other.url.replace("127.0.0.1", "localhost"), "//evil.example/x"):
        end = endpoint(answering((308, {"Location": location}, b"")))
        with pytest.raises(keyhole.OracleError, match="another host"):
            end.ask("POST", "/x", content=b"q")
        end.close()
    assert other.seen == []


def test_a_redirect_in_circles_ends(answering):
    end = endpoint(answering((307, {"Location": "/x"}, b"")))
    with pytest.raises(keyhole.OracleError, match="circles"):
        end.ask("POST", "/x")
    end.close()


def test_a_see_other_is_no_answer(answering):
    end = endpoint(answering((302, {"Location": "/login"}, b"sign in")))
    with pytest.raises(keyhole.OracleError, match="answered 302"):
        end.ask("POST", "/x")
    end.close()


@pytest.fixture
def clock(monkeypatch):
    """The time that an endpoint sees, which its pauses alone move on."""
    clock = SimpleNamespace(now=0.0)

    def pause(seconds, stop):
        clock.now += seconds

    monkeypatch.setattr(
        "keyhole.oracles.http.client.time", SimpleNamespace(monotonic=lambda: clock.now)
    )
    for place in ("client", "retry"):
        monkeypatch.setattr(f"keyhole.oracles.http.{place}.pause", pause)
    return clock


def test_retry_after_is_kept(answering, clock):
    server = answering((429, {"Retry-After": "0.3"}, b""), (200, {}, b"ok"))
    end = endpoint(server)
    end.ask("POST", "/x", queries=1)
    assert clock.now == pytest.approx(0.3)
    assert end.traffic.queries == 2
    end.close()


def test_a_pause_that_is_too_long_is_the_users_decision(answering):
    end = endpoint(answering((503, {"Retry-After": "86400"}, b"")))
    with pytest.raises(keyhole.OracleError, match="86400 seconds"):
        end.ask("POST", "/x")
    end.close()


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 501])
def test_what_will_not_pass_is_not_asked_again(answering, status):
    server = answering((status, {}, b'{"error": "because"}'))
    end = endpoint(server)
    with pytest.raises(keyhole.OracleError, match=f"{status}.*because") as caught:
        end.ask("POST", "/x")
    assert not isinstance(caught.value, Transient)
    assert len(server.seen) == 1
    assert ("KEYHOLE_TOKEN" in str(caught.value)) == (status in (401, 403))
    end.close()


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_what_may_pass_is_asked_again(answering, status):
    server = answering((status, {}, b""), (200, {}, b"ok"))
    end = endpoint(server)
    assert end.ask("POST", "/x").body == b"ok"
    assert len(server.seen) == 2
    end.close()


def test_an_answer_without_end_is_cut_off(answering, monkeypatch):
    monkeypatch.setattr("keyhole.oracles.http.client.MAX_TEXT", 1000)
    end = endpoint(answering((200, {}, b"x" * 2000)))
    with pytest.raises(keyhole.OracleError, match="more than 1000 bytes"):
        end.ask("POST", "/x")
    end.close()


def test_nobody_there():
    end = Endpoint("http://127.0.0.1:9", Access(patience=RetryPolicy(attempts=2, first=0.001)))
    with pytest.raises(keyhole.OracleError, match="2 attempts"):
        end.ask("GET", "/")
    end.close()


def test_the_rate_is_kept(clock):
    pace = Pace(rate=100.0)
    for _ in range(4):
        pace.wait(10, None)
    assert clock.now == pytest.approx(0.3)  # the first goes at once, each further one waits


def test_the_rate_makes_small_parts():
    end = faulty_endpoint.start(attention(np.random.default_rng(0), 4))
    with keyhole.open_oracle(end.url, rate=50.0) as box:
        assert box.batch == 50
    with keyhole.open_oracle(end.url, rate=0.5, batch=7) as box:
        assert box.batch == 1
    end.shutdown()
    end.server_close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://user:pass@host/", "password in a URL"),
        ("http://token@host/", "password in a URL"),
        ("http:///x", "host"),
        ("ftp://host", "http"),
        ("http://[::1", "not a URL"),
        ("http://host:port/", "not a URL"),
    ],
)
def test_urls_that_cannot_be_used(url, message):
    with pytest.raises(keyhole.InvalidArgument, match=message) as caught:
        checked_url(url)
    assert "pass@" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "local"), [("localhost", True), ("127.0.0.5", True), ("::1", True), ("a.b", False)]
)
def test_loopback(host, local):
    assert loopback(host) is local


def test_proxies_of_the_environment_are_used(answering, monkeypatch):
    proxy = answering((200, {}, b"through the proxy"))
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, proxy.url)
    monkeypatch.setenv("NO_PROXY", "inside.example")
    monkeypatch.delenv("no_proxy", raising=False)
    end = Endpoint("http://box.example", Access())
    assert end.ask("POST", "/x", content=b"q").body == b"through the proxy"
    end.close()
    path, headers, body = proxy.seen[0]
    assert (path, headers["Host"], body) == ("http://box.example/x", "box.example", b"q")
    assert headers["User-Agent"].startswith("keyhole/")
    assert proxy_for("http://inside.example:80/") is None
    assert proxy_for("http://127.0.0.1:8000/") is None


@pytest.mark.parametrize("proxy", ["socks5://127.0.0.1:9", "ftp://127.0.0.1", "http://[::1"])
def test_a_proxy_that_cannot_be_used_is_a_sentence(monkeypatch, proxy):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, proxy)
    monkeypatch.setitem(sys.modules, "socksio", None)  # not installed
    with pytest.raises(keyhole.InvalidArgument, match="proxy that the environment names"):
        Endpoint("http://box.example", Access())


def test_a_token_does_not_travel_unencrypted(monkeypatch):
    monkeypatch.setenv("KEYHOLE_TOKEN", TOKEN)
    with pytest.raises(keyhole.InvalidArgument, match="unencrypted") as caught:
        Endpoint("http://example.org", Access())
    assert TOKEN not in str(caught.value)
    Endpoint("http://example.org", Access(plain_token=True)).close()
    Endpoint("https://example.org", Access()).close()


@pytest.mark.parametrize("token", ["two words", "line\nbreak", "caf\u00e9"])
def test_a_token_no_header_can_hold(monkeypatch, token):
    monkeypatch.setenv("KEYHOLE_TOKEN", token)
    with pytest.raises(keyhole.InvalidArgument, match="characters") as caught:
        Endpoint("https://example.org", Access())
    assert token not in str(caught.value)


def test_retry_after_header():
    assert retry_after(None) is None
    assert retry_after("1.5") == 1.5
    assert retry_after("-3") == 0.0
    assert retry_after("soon") is None
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert retry_after("Wed, 21 Oct 2999 07:28:00 GMT") > 1e9
    for nonsense in ("Wed, 21 Oct 99999999999999 07:28:00 GMT", "Wed, 21 Oct 0 07:28:00 -9999"):
        assert retry_after(nonsense) in (None, 0.0)


@pytest.mark.parametrize("options", [{"timeout": 0}, {"rate": 0}, {"rate": -1}, {"concurrency": 0}])
def test_access_makes_sense(options):
    with pytest.raises(keyhole.InvalidArgument):
        Access(**options)


def echo_headers(handler):
    """An endpoint that repeats the secrets it was sent."""
    return 400, {}, json.dumps({"error": str(handler.headers)}).encode()


def test_the_token_is_sent_and_never_shown(answering, monkeypatch, tmp_path, caplog):
    """Journals, saved runs, --json output, log messages at every level, and representations."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("KEYHOLE_TOKEN", TOKEN)
    end = faulty_endpoint.start(attention(np.random.default_rng(0), 4))
    shown = []
    with keyhole.open_oracle(end.url) as box:
        run = keyhole.recover(
            learner=keyhole.SingleHead(), box=box, journal=tmp_path / "run.journal"
        )
        run.save(tmp_path / "run")
        shown += [json.dumps(run.to_json()), repr(run), repr(vars(box)), repr(vars(box.endpoint))]
    assert end.tokens_seen == {f"Bearer {TOKEN}"}
    end.shutdown()
    end.server_close()
    shown[-1] = shown[-1].replace(f"'_token': '{TOKEN}'", "")  # the one place that holds it
    bad = answering(echo_headers)
    with pytest.raises(keyhole.OracleError) as caught:
        keyhole.open_oracle(bad.url)
    shown.append(str(caught.value))
    assert TOKEN in bad.seen[0][1]["Authorization"]
    shown += [record.getMessage() for record in caplog.records]
    for file in tmp_path.rglob("*"):
        if file.is_file():
            shown.append(file.read_bytes().decode("latin-1"))
    assert len(shown) > 10
    assert not [text for text in shown if TOKEN in text]


def test_further_headers_are_sent_and_never_shown(answering, monkeypatch):
    monkeypatch.setenv("MY_KEY", "api key of mine")
    server = answering(echo_headers)
    options = {"width": 4, "request": {"x": "$tokens"}, "headers": {"X-Api-Key": "MY_KEY"}}
    with (
        keyhole.open_oracle(server.url, **options) as box,
        pytest.raises(keyhole.OracleError) as caught,
    ):
        box.ask(ASKED)
    assert server.seen[0][1]["X-Api-Key"] == "api key of mine"
    assert "api key of mine" not in str(caught.value)
    for headers, message in (
        ({"X-Api-Key": "NOT_SET"}, "NOT_SET"),
        ({"X Api": "MY_KEY"}, "no name of a header"),
        ({"Host": "MY_KEY"}, "set by Keyhole"),
    ):
        with pytest.raises(keyhole.InvalidArgument, match=message):
            keyhole.open_oracle(server.url, **{**options, "headers": headers})
    with pytest.raises(keyhole.InvalidArgument, match="unencrypted"):
        keyhole.open_oracle("http://somewhere.example/score", **options)


def test_a_path_may_take_every_entry(answering):
    secret = attention(np.random.default_rng(0), 4)

    def predict(handler):
        tokens = np.array(json.loads(handler.server.seen[-1][2])["x"])
        entries = [{"score": y, "name": "a"} for y in secret(tokens).tolist()]
        return 200, {}, json.dumps({"predictions": entries, "took": 3}).encode()

    options = {"width": 4, "request": {"x": "$tokens"}}
    server = answering(predict)
    with keyhole.open_oracle(server.url, answer="predictions.*.score", **options) as box:
        np.testing.assert_array_equal(box.ask(ASKED), secret(TOKENS))
    with (
        keyhole.open_oracle(server.url, answer="scores", **options) as box,
        pytest.raises(keyhole.OracleError) as caught,
    ):
        box.ask(ASKED)
    assert r"predictions.*.score, took" in str(caught.value)
    assert 'The reply begins {"predictions": [{"score"' in str(caught.value)


def test_json_endpoints(answering):
    secret = attention(np.random.default_rng(0), 4)

    def predict(handler):
        asked = json.loads(handler.server.seen[-1][2])
        tokens = np.array(asked["data"]["x"])
        answers = secret(tokens if tokens.ndim == 3 else tokens[None]).tolist()
        return (
            200,
            {},
            json.dumps({"out": [{"y": answers if tokens.ndim == 3 else answers[0]}]}).encode(),
        )

    server = answering(predict)
    request = {"data": {"x": "$tokens"}, "fixed": 1}
    with keyhole.open_oracle(server.url, width=4, request=request, answer="out.0.y") as box:
        np.testing.assert_array_equal(box.ask(ASKED), secret(TOKENS))
        assert (
            keyhole.distance(keyhole.recover(learner=keyhole.SingleHead(), box=box).model, secret)
            < 1e-12
        )
    asked = '{"data": {"x": "$sequence"}}'
    with keyhole.open_oracle(server.url, width=4, request=asked, answer="out.0.y") as box:
        np.testing.assert_allclose(box.ask(ASKED), secret(TOKENS), rtol=1e-13)
    with (
        keyhole.open_oracle(server.url, width=4, request=request, answer="out.1") as box,
        pytest.raises(keyhole.OracleError, match=r"out\.1"),
    ):
        box.ask(ASKED)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"request": {"x": 1}, "width": 4}, "tokens"),
        ({"request": {"x": "$tokens", "y": "$sequence"}, "width": 4}, "once"),
        ({"request": "{", "width": 4}, "not JSON"),
        ({"request": {"x": "$tokens"}}, "width"),
    ],
)
def test_json_mappings_that_make_no_sense(options, message):
    with pytest.raises(keyhole.InvalidArgument, match=message):
        keyhole.open_oracle("http://127.0.0.1:9/", **options)


@pytest.mark.parametrize(
    "reply",
    [
        (307, {"Location": "http://[::1"}, b""),
        (307, {"Location": "http://:99999999/"}, b""),
        (307, {"Location": "//" + "a" * 5000}, b""),
        (503, {"Retry-After": "Wed, 21 Oct 99999999999999 07:28:00 GMT"}, b""),
        (503, {"Retry-After": "1e999"}, b""),
        (200, {"Content-Encoding": "gzip, gzip"}, b""),
        (200, {"Content-Encoding": "gzip"}, gzip.compress(b"{}")),
        (200, {"Content-Encoding": "br"}, b"{}"),
        (418, {"Content-Encoding": "gzip"}, b"no gzip at all"),
    ],
)
def test_whatever_an_endpoint_sends_the_worst_is_an_oracle_error(answering, reply):
    end = endpoint(answering(reply), patience=RetryPolicy(attempts=2, first=0.001, willing=1.0))
    with pytest.raises(keyhole.OracleError):
        end.ask("POST", "/x", queries=1)
    end.close()


def test_what_was_not_asked_to_be_compressed_is_not_unpacked(answering):
    bomb = gzip.compress(gzip.compress(bytes(2**24)))
    end = endpoint(answering((200, {"Content-Encoding": "gzip, gzip"}, bomb)))
    with pytest.raises(keyhole.OracleError, match="compresses its answers"):
        end.ask("POST", "/x")
    end.close()


def test_a_failure_to_read_an_answer_is_the_endpoints(answering):
    def broken(answer):
        raise OverflowError("no such number")

    end = endpoint(answering((200, {}, b"{}")))
    with pytest.raises(keyhole.OracleError, match=r"makes no sense.*OverflowError"):
        end.ask("POST", "/x", read=broken)
    end.close()


@pytest.fixture
def without_end():
    """Serves the same bytes again and again, `pause` apart, and no end of them."""
    started = []

    def start(first, again, pause):
        class Handler(socketserver.BaseRequestHandler):
            def handle(self):
                self.request.recv(2**16)
                with contextlib.suppress(OSError):
                    self.request.sendall(first)
                    while not ended.wait(pause):
                        self.request.sendall(again)

        ended = threading.Event()
        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        started.append((server, ended))
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server, ended in started:
        ended.set()
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("first", "again"),
    [
        (b"HTTP/1.1 200 OK\r\nX-Slow: ", b"a"),  # a head that drips in
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),  # headers without end
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),  # one promise after another
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"a"),  # a body that drips in
    ],
)
def test_an_answer_that_never_ends_is_given_up_in_time(without_end, first, again):
    """Each byte comes well within the time-out, the whole does not."""
    url = without_end(first, again, 0.02)
    end = Endpoint(url, Access(timeout=0.3, patience=RetryPolicy(attempts=1)))
    with pytest.raises(keyhole.OracleError, match=r"within 0.3 seconds"):
        end.ask("GET", "/")
    end.close()


def test_no_limit_of_time(answering):
    end = endpoint(answering((200, {}, b"ok")), timeout=float("inf"))
    assert end.ask("POST", "/x").body == b"ok"
    end.close()


def test_queries_sent_again_have_a_limit_of_their_own(answering):
    server = answering((503, {}, b"not now"))
    box = keyhole.open_oracle(
        server.url,
        width=2,
        request={"x": "$tokens"},
        batch=4,
        patience=RetryPolicy(attempts=50, first=0.0),
    )
    counter = QueryCounter(box, budget=20)
    with pytest.raises(keyhole.OracleError, match="fails too often: 20 queries were sent again"):
        counter.ask(keyhole.QueryBatch.of(np.ones((12, 1, 2)), "test"))
    counter.release()
    assert counter.repeats.spent == 20
    assert box.traffic.queries == 4 + 20
    assert box.endpoint.repeats.spent == 0
    box.close()


def test_a_token_or_an_escape_in_what_an_endpoint_says(answering, monkeypatch):
    monkeypatch.setenv("KEYHOLE_TOKEN", TOKEN)
    for reply in (
        (307, {"Location": f"http://{TOKEN.upper()}.example/"}, b""),
        (400, {}, f"you sent {TOKEN}\x1b]0;title\x07 {TOKEN[:5]}\x00{TOKEN[5:]}".encode()),
    ):
        end = endpoint(answering(reply))
        with pytest.raises(keyhole.OracleError) as caught:
            end.ask("POST", "/x")
        end.close()
        text = str(caught.value)
        assert "[token]" in text
        assert TOKEN.lower() not in text.lower()
        assert text.isprintable()
