"""Low rank at width 1024: kill -9 while the box is at work, run again, same result."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import keyhole
from keyhole.oracles.wrappers.batch import CHUNK_QUERIES

SOURCE = str(Path(keyhole.__file__).parents[1])
WIDTH, RANK = 1024, 2
PROGRAM = """
import sys, time
from pathlib import Path
import numpy as np
import keyhole
from keyhole.models.random import attention

log, out, width, rank = Path(sys.argv[1]), sys.argv[2], int(sys.argv[4]), int(sys.argv[5])
journal, pause = (None if sys.argv[3] == "-" else sys.argv[3]), float(sys.argv[6])
secret = attention(np.random.default_rng(1), width, rank=rank)

def box(tokens):
    answers = secret(tokens)
    with log.open("a") as file:
        file.write(f"{len(tokens)}\\n")
    time.sleep(pause)
    return answers

oracle = keyhole.open_oracle(box, width=width)
keyhole.recover(oracle, keyhole.LowRank(), journal=journal, seed=5).save(out)
"""


def start(folder: Path, name: str, journal: str, pause: float) -> subprocess.Popen[bytes]:
    arguments = [folder / f"{name}.log", folder / name, journal, WIDTH, RANK, pause]
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *map(str, arguments)], env=environment)


def asked(folder: Path, name: str) -> list[int]:
    log = folder / f"{name}.log"
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def test_killed_and_resumed(tmp_path: Path) -> None:
    assert start(tmp_path, "whole", "-", 0.0).wait() == 0
    whole, calls = keyhole.load(tmp_path / "whole"), len(asked(tmp_path, "whole"))
    journal, kills = str(tmp_path / "run.journal"), 2
    for share in (0.3, 0.7):
        process = start(tmp_path, "killed", journal, 0.05)
        deadline = time.monotonic() + 120.0
        while len(asked(tmp_path, "killed")) < share * calls and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert start(tmp_path, "killed", journal, 0.0).wait() == 0
    resumed = keyhole.load(tmp_path / "killed")
    for part in ("model", "errors"):
        before, after = (getattr(run, part).to_arrays() for run in (whole, resumed))
        assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    assert resumed.outcome is keyhole.Outcome.RECOVERED
    assert resumed.details["rank"] == RANK
    assert resumed.ledger.by_purpose == whole.ledger.by_purpose
    assert resumed.ledger.replayed > 0.5 * whole.ledger.paid
    again = sum(asked(tmp_path, "killed")) - whole.ledger.paid
    assert 0 <= again <= kills * CHUNK_QUERIES
