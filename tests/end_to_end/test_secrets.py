"""A token-protected server, asked by the command line: the token is nowhere to be found."""

import json
import os
import socket
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest

from keyhole.models.draw import attention
from keyhole.models.files import save_model

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
