"""Certificates: one that nobody vouches for, or of another host, gets no query and no token."""

import shutil
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import keyhole
from keyhole.oracles.http.client import Access, Endpoint

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates")


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.server.tokens.append(self.headers["Authorization"])
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")


class Encrypted(ThreadingHTTPServer):
    daemon_threads = True
    tokens: list

    def handle_error(self, *_):
        """A handshake that the client breaks off is what is tested here."""


@pytest.fixture
def encrypted(tmp_path, monkeypatch):
    """An endpoint over TLS, with a certificate for `name` that it signed itself."""
    monkeypatch.setenv("KEYHOLE_TOKEN", "s3cr3t")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    started = []

    def start(name):
        key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
        request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
        files = ["-keyout", str(key), "-out", str(certificate)]
        names = ["-subj", "/CN=test", "-addext", f"subjectAltName={name}"]
        subprocess.run([*request, *files, *names], check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        server = Encrypted(("127.0.0.1", 0), Handler)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.tokens = []
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        started.append(server)
        return server, certificate

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def ask(server):
    end = Endpoint(f"https://127.0.0.1:{server.server_address[1]}", Access(timeout=5.0))
    try:
        return end.ask("GET", "/").body, end.traffic.exchanges
    finally:
        end.close()


def test_a_certificate_that_nobody_vouches_for(encrypted, monkeypatch):
    server, certificate = encrypted("IP:127.0.0.1")
    with pytest.raises(keyhole.OracleError, match=r"cannot be trusted.*SSL_CERT_FILE") as caught:
        ask(server)
    assert "attempts" not in str(caught.value)  # it will not be better next time
    assert server.tokens == []
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert ask(server) == (b"ok", 1)
    assert server.tokens == ["Bearer s3cr3t"]


def test_a_certificate_of_another_host(encrypted, monkeypatch):
    server, certificate = encrypted("DNS:other.example")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with pytest.raises(keyhole.OracleError, match="cannot be trusted"):
        ask(server)
    assert server.tokens == []
