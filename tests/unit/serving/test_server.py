"""The server's life: memory that is kept between requests."""

import platform
import subprocess
import sys

import pytest

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
