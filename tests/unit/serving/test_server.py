"""The server's life: where it listens, and memory that is kept between requests."""

import json
import platform
import subprocess
import sys

import numpy as np
import pytest

import keyhole
from keyhole.models.draw import attention
from keyhole.models.files import save_model

ROUNDS, BYTES, PAGE = 20, 2**22, 4096
BODIES = f"""
import resource
from keyhole.serving.server import keep_memory
keep_memory()


def body():  # as it arrives and is put together
    return bytearray().join([bytearray(b"x") * 2**18 for _ in range({BYTES} >> 18)])


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


body()
before = faults()
for _ in range({ROUNDS}):
    body()
print(faults() - before)
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other allocators keep what they like"
)
def test_bodies_come_and_go_without_page_faults():
    """Without `keep_memory` body and parts fault twice this often, but for huge pages."""
    command = [sys.executable, "-c", BODIES]
    faults = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    pages = ROUNDS * BYTES // PAGE
    assert int(faults) < pages / 10  # the first body's own, at most


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
