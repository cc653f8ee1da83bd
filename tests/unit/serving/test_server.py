"""The server's life: where it listens."""

import json
import socket
import subprocess
import sys

import numpy as np
import pytest

import keyhole
from keyhole.models.files import save_model
from keyhole.models.random import attention
from keyhole.serving.server import Bind


def test_a_port_in_use_is_said_to_be_that():
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(keyhole.InvalidArgument, match=r"in use.*--port"),
    ):
        Bind("127.0.0.1", taken.getsockname()[1]).listening(six=False)


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_it_tells_the_port_that_it_was_given(tmp_path, form):
    pytest.importorskip("uvicorn")
    file = save_model(attention(np.random.default_rng(0), 4), tmp_path / "m.safetensors")
    command = [sys.executable, "-m", "keyhole", "serve", str(file), "--port", "0", *form]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as server:
        line = (server.stdout if form else server.stderr).readline()
        url = json.loads(line)["url"] if form else line.split()[1]
        try:
            with keyhole.open_oracle(url) as box:
                assert box.spec.width == 4
        finally:
            server.terminate()
    assert ":0/" not in url
