"""Tokens, passwords, queries and messages that open a door are nowhere to be found afterwards."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import numpy as np
import pytest

from keyhole.cli.main import main
from keyhole.cli.options import without_secrets
from keyhole.models.files import save_model
from keyhole.models.random import attention

pytest.importorskip("uvicorn")

TOKEN = "t0p-s3cr3t-0f-the-t3st"


@pytest.fixture
def protected(tmp_path):
    (tmp_path / "served").mkdir()
    file = save_model(attention(np.random.default_rng(0), 6), tmp_path / "served/m.safetensors")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = "import typer; from keyhole.cli.serve import serve; typer.run(serve)"
    log = (tmp_path / "server.log").open("w")
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(file), "--port", str(port)],
        env={**os.environ, "KEYHOLE_SERVE_TOKEN": TOKEN},
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    url = f"http://127.0.0.1:{port}"
    for _ in range(300):
        try:
            if httpx.get(f"{url}/v2/health/ready").status_code == 200:
                break
        except httpx.TransportError:
            time.sleep(0.05)
    yield url
    process.terminate()
    process.wait()
    log.close()


def command(folder, url, token):
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "keyhole",
            "recover",
            url,
            "--json",
            "--journal",
            str(folder / "run.journal"),
            "--out",
            str(folder / "run"),
        ],
        env={**os.environ, "KEYHOLE_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_token_opens_the_door_and_leaves_no_trace(protected, tmp_path):
    good = command(tmp_path, protected, TOKEN)
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["outcome"] == "RECOVERED"
    wrong = command(tmp_path / "served", protected, TOKEN[::-1])
    assert wrong.returncode == 3
    assert "KEYHOLE_TOKEN" in wrong.stderr
    assert "list its models" not in wrong.stderr  # the token is what is wrong, not the address
    texts = [good.stdout, good.stderr, wrong.stdout, wrong.stderr]
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {"run.journal", "recovery.json", "server.log"} <= {file.name for file in files}
    texts += [file.read_bytes().decode("latin-1") for file in files]
    assert not [text for text in texts if TOKEN in text or TOKEN[::-1] in text]


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["https://me:secret@host:8/v2?key=secret"], ["https://host:8/v2"]),
        (["HTTPS://secret@host/v2#secret"], ["HTTPS://host/v2"]),
        (["--target=Http://me:secret@host?secret"], ["--target=Http://host"]),
        (["--request", '{"key": "secret"}', "--json"], ["--request", "…", "--json"]),
        (['--request={"key": "secret"}'], ["--request=…"]),
        (["--request", "@file.json", "--request=@file"], ["--request", "@file.json", "--request=@file"]),
        (["mine:told@home?"], ["mine:told@home?"]),
    ],
)  # fmt: skip
def test_a_command_is_shown_without_its_secrets(words, shown):
    assert without_secrets(words) == shown


class Scores(BaseHTTPRequestHandler):
    """A head of width 4 behind a JSON of its own, for those who know both secrets."""

    head = attention(np.random.default_rng(0), 4)

    def log_message(self, *_):
        pass

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = self.path.endswith(f"?api_key={TOKEN}") and asked["key"] == TOKEN
        body = json.dumps({"y": self.head(np.array(asked["x"])).tolist()} if known else {}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_keys_in_the_query_and_in_the_message_leave_no_trace(tmp_path, monkeypatch, capsys):
    server = HTTPServer(("127.0.0.1", 0), Scores)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"HTTP://127.0.0.1:{server.server_address[1]}/score?api_key={TOKEN}"
    message = json.dumps({"key": TOKEN, "x": "$tokens"})
    words = f"recover --target={url} --width 4 --learner single-head --answer y --json --out run"
    words += " --journal run.journal --report report.html --request"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["keyhole", *words.split(), message])
    with pytest.raises(SystemExit) as left:
        main()
    server.shutdown()
    server.server_close()
    printed = capsys.readouterr()
    assert not left.value.code, printed.err
    files = {file.name: file for file in tmp_path.rglob("*") if file.is_file()}
    assert {"run.journal", "recovery.json", "report.html"} <= files.keys()
    texts = [file.read_bytes().decode("latin-1") for file in files.values()]
    assert "/score --width 4" in files["recovery.json"].read_text("utf-8")
    assert not [text for text in [printed.out, printed.err, *texts] if TOKEN in text]
