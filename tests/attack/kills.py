"""kill -9 at random moments, and on from the journal: the same bits, and nothing paid twice beyond
the requests that were under way.

A program of its own, which forks: the children die, and nothing else holds threads meanwhile.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

import numpy as np

KILLS = 16
PAUSE = (0.02, 0.04)  # seconds that a request takes: the slow boxes of the journal's promise


def draw(rng):
    batch = int(rng.choice([1, 4, 16]))
    return {
        "width": int({1: 4, 4: 8, 16: 14}[batch] + rng.integers(3)),
        "outputs": None if rng.random() < 0.7 else 2,
        "batch": batch,
        "pause": float(rng.uniform(*PAUSE)),
        "moments": [float(x) for x in rng.random(KILLS)],
        "seed": int(rng.integers(2**31)),
    }


def run(spec, folder):
    ended = subprocess.run(
        [sys.executable, __file__, json.dumps(spec), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if ended.returncode:
        return {}, [("traceback", f"kills: {ended.stderr[-300:]}")]
    seen = json.loads(ended.stdout)
    counts = {"kills": seen["kills"], "runs killed and resumed": 1, "queries": seen["whole"]}
    counts["queries asked again"] = seen["again"]
    findings = []
    if not seen["identical"]:
        findings.append(("not the same bits", f"after {seen['kills']} kills"))
    if seen["again"] > seen["kills"] * spec["batch"]:
        findings.append(
            ("paid twice", f"{seen['again']} after {seen['kills']} kills of {spec['batch']} each")
        )
    return counts, findings


def _child(spec, folder, name, journal):
    """Starts a run that can be killed; its box notes what it answered."""
    import keyhole
    from keyhole.models.random import attention

    keyhole.recover(attention(np.random.default_rng(0), 2), keyhole.SingleHead())  # loads all code
    process = os.fork()
    if process:
        return process
    try:
        secret = attention(
            np.random.default_rng(spec["seed"]), spec["width"], outputs=spec["outputs"]
        )
        log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

        def box(tokens):
            pause = spec["pause"] / 2 if journal else 0.0
            time.sleep(pause)
            os.write(log, f"{len(tokens)}\n".encode())
            time.sleep(pause)  # answered, and not recorded yet
            return secret(tokens)

        opened = keyhole.open_oracle(box, width=spec["width"], batch=spec["batch"])
        path = folder / "journal" if journal else None
        keyhole.recover(opened, keyhole.SingleHead(), journal=path, seed=1).save(folder / name)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _asked(folder, name):
    log = folder / f"{name}.log"
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def _bits(folder):
    """Every parameter and standard error, byte by byte."""
    import keyhole

    run = keyhole.load(folder)
    return [
        (name, array.tobytes())
        for part in (run.model, run.errors)
        for name, array in part.to_arrays().items()
    ]


def _main(spec, folder):
    _, status = os.waitpid(_child(spec, folder, "whole", journal=False), 0)
    assert status == 0, "the run without kills failed"
    whole = _asked(folder, "whole")
    left, kills, ended = len(whole) * spec["pause"], 0, False
    for moment in spec["moments"]:
        process = _child(spec, folder, "killed", journal=True)
        time.sleep(moment * 2.5 * left / len(spec["moments"]))
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        ended = os.WIFEXITED(status)
        if ended:
            break
        kills += 1
    if not ended:
        _, status = os.waitpid(_child(spec, folder, "killed", journal=True), 0)
    assert os.waitstatus_to_exitcode(status) == 0, "the run that continues failed"
    same = _bits(folder / "whole") == _bits(folder / "killed")
    again = sum(_asked(folder, "killed")) - sum(whole)
    return {"kills": kills, "whole": sum(whole), "again": again, "identical": same}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_main(json.loads(sys.argv[1]), Path(sys.argv[2]))))
