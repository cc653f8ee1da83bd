"""What a journal costs: recoveries with and without one, round by round in one run.

    python benchmarks/journal.py [--quick] [--against FOLDER]

The box is a function that takes 60 microseconds a call, asked one query at a time, sixteen at a
time, and in chunks. With --against, a checkout of another version runs beside this one, and the
figure is the throughput of this version's journal over that of the other one. Medians of rounds;
every round runs both in turn, in a process of its own.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BATCHES = (1, 16, None)
ROUND = """
import json, sys, tempfile, time
from pathlib import Path
import numpy as np
import keyhole

width, repeats, batches = json.loads(sys.argv[1])
rng = np.random.default_rng(0)
score, value = rng.standard_normal((width, width)) / np.sqrt(width), rng.standard_normal(width)
model = keyhole.Attention([keyhole.Head(score, None, value)])

def busy(tokens):
    end = time.perf_counter() + 6e-5
    answers = model(tokens)
    while time.perf_counter() < end:
        pass
    return answers

def spend(batch, journal):
    box = keyhole.open_oracle(busy, width=width, batch=batch)
    begun = time.process_time()
    keyhole.recover(box, keyhole.SingleHead(), journal=journal, verify=False)
    return time.process_time() - begun

found = {}
for batch in batches:
    spend(batch, None)
    plain, kept = [], []
    for _ in range(repeats):
        plain.append(spend(batch, None))
        with tempfile.TemporaryDirectory() as folder:
            kept.append(spend(batch, Path(folder) / "run.journal"))
    found[str(batch)] = [min(plain), min(kept)]
print(json.dumps(found))
"""


def run_round(root: Path, width: int, repeats: int) -> dict[str, list[float]]:
    """CPU seconds without and with a journal, by batch, of the version in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", ROUND, json.dumps([width, repeats, BATCHES])]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--against", type=Path, help="a checkout of another version")
    told = parser.parse_args()
    width, repeats, rounds = (24, 1, 1) if told.quick else (96, 3, 3)
    roots = [ROOT, *([told.against] if told.against else [])]
    rows = [[run_round(root, width, repeats) for root in roots] for _ in range(rounds)]
    for batch in map(str, BATCHES):
        with_journal = [row[0][batch][1] / row[0][batch][0] for row in rows]
        line = (
            f"batch {batch}: time with a journal {statistics.median(with_journal):.2f} of without"
        )
        if told.against:
            ratios = [row[1][batch][1] / row[0][batch][1] for row in rows]
            line += f"; throughput {statistics.median(ratios):.2f} of the other version's"
            line += f" ({min(ratios):.2f} … {max(ratios):.2f})"
            plain = [row[1][batch][0] / row[0][batch][0] for row in rows]
            line += f"; without a journal {statistics.median(plain):.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
