"""The law of the journal: kill -9 at any moment, run again, same result to the last bit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import keyhole

SOURCE = str(Path(keyhole.__file__).parents[1])
KILLS, BATCH = 10, 64
PROGRAM = """
import sys, time
from pathlib import Path
import numpy as np
import keyhole
from keyhole.models.random import attention

journal, log, out, pause = sys.argv[1], Path(sys.argv[2]), sys.argv[3], float(sys.argv[4])
secret = attention(np.random.default_rng(64), 64, bias=True)

def box(tokens):
    time.sleep(pause / 2)
    answers = secret(tokens)
    with log.open("a") as file:
        file.write(f"{len(tokens)}\\n")
    time.sleep(pause / 2)  # answered, but not recorded yet
    return answers

keyhole.recover(
    learner=keyhole.SingleHead(), box=keyhole.open_oracle(box, width=64, batch=64), journal=None if journal == "-" else journal, seed=3
).save(out)
"""


def start(folder: Path, journal: str, out: str, pause: float) -> subprocess.Popen[bytes]:
    arguments = [journal, str(folder / f"{out}.log"), str(folder / out), str(pause)]
    environment = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], env=environment)


def asked(folder: Path, out: str) -> list[int]:
    """Sizes of the batches that the box answered, over all processes."""
    log = folder / f"{out}.log"
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def kill_during_call(
    folder: Path, process: subprocess.Popen[bytes], call: int, late: float
) -> None:
    """SIGKILL some time after the box answered its `call`-th batch."""
    deadline = time.monotonic() + 120.0
    while len(asked(folder, "killed")) < call and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    time.sleep(late)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_killed_ten_times_and_resumed(tmp_path: Path) -> None:
    assert start(tmp_path, "-", "whole", 0.0).wait() == 0
    whole, calls = keyhole.load(tmp_path / "whole"), len(asked(tmp_path, "whole"))
    assert calls > 2 * KILLS
    rng, killed, pause = np.random.default_rng(10), 0, 0.06
    # each kill comes up to one call late: the last must still find the process at work
    moments = np.sort(rng.integers(0, calls - KILLS, size=KILLS))
    for new in np.diff(moments, prepend=0):
        target = len(asked(tmp_path, "killed")) + int(new)
        process = start(tmp_path, str(tmp_path / "run.journal"), "killed", pause)
        kill_during_call(tmp_path, process, target, float(rng.uniform(0, pause)))
        killed += process.returncode == -signal.SIGKILL
    assert killed == KILLS
    assert start(tmp_path, str(tmp_path / "run.journal"), "killed", 0.0).wait() == 0
    resumed = keyhole.load(tmp_path / "killed")
    for part in ("model", "errors"):
        before, after = (getattr(run, part).to_arrays() for run in (whole, resumed))
        assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    assert resumed.ledger.by_purpose == whole.ledger.by_purpose
    assert resumed.outcome is keyhole.Outcome.RECOVERED
    # only a request that was under way when the process died can have been asked again
    again = sum(asked(tmp_path, "killed")) - whole.ledger.paid
    assert 0 <= again <= KILLS * BATCH
