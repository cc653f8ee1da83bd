"""An attack of some minutes: damaged files, hostile endpoints, kills, and boxes of all kinds.

    python tests/attack/campaign.py --minutes 15 --seed 0 [--page docs/results/attack.md] [--keep]
    python tests/attack/campaign.py --changes lengths odd multiples --cases 300 [--seed 0]

The same seed draws the same cases; time alone decides how many. Figures go to a JSON file and, from
there, to the page of the documentation. What was found is kept below `cases/open/`: a case that is
mended moves to `cases/`, where the tests run it for good.
"""

import argparse
import hashlib
import json
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from attack import boxes, endpoints, files, kills

PARTS = {"files": files, "endpoints": endpoints, "kills": kills, "boxes": boxes}
SHARES = {"files": 0.1, "endpoints": 0.15, "kills": 0.35, "boxes": 0.4}  # of the time
PATIENCE = 120  # seconds after which a case hangs; a run that was killed often takes longer
PAGE_START, PAGE_END = "<!-- figures: make attack -->", "<!-- end of figures -->"
TITLES = {
    "files": "damaged files",
    "endpoints": "hostile endpoints",
    "kills": "runs killed and resumed",
    "boxes": "boxes, honest and not",
}


class Hangs(BaseException):
    """Not an Exception: nothing on the way may handle it."""


def hangs(*_):
    raise Hangs


def run_case(part, spec):
    """Counts and findings of one case."""
    signal.signal(signal.SIGALRM, hangs)
    signal.alarm(PATIENCE if part != "kills" else 3 * PATIENCE)
    try:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return PARTS[part].run(spec, Path(folder))
    except Hangs:
        return {}, [("hangs", f"no end within {PATIENCE} s")]
    finally:
        signal.alarm(0)


def keep(part, spec, findings, folder):
    text = json.dumps({"part": part, "spec": spec, "found": findings}, indent=1)
    name = f"{part}-{hashlib.blake2b(json.dumps(spec).encode(), digest_size=4).hexdigest()}.json"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text + "\n")


def campaign(minutes, seed, only=None, folder=None, changes=(), cases=None):
    """Cases in turn, so that every part has its share of the time. Where changes are named, boxes
    that are something else in another way are passed over."""
    parts = [part for part in PARTS if only in (None, part)]
    spent, number = Counter(), Counter()
    counts = {part: Counter() for part in parts}
    found = []
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end and sum(seen["cases"] for seen in counts.values()) != cases:
        part = min(parts, key=lambda name: spent[name] / SHARES[name])
        begun = time.monotonic()
        spec = PARTS[part].draw(
            np.random.default_rng([seed, list(PARTS).index(part), number[part]])
        )
        if changes and spec.get("change") not in changes:
            number[part] += 1
            continue
        seen, findings = run_case(part, spec)
        counts[part].update({"cases": 1, **seen})
        for kind, what in findings:
            found.append({"part": part, "number": number[part], "kind": kind, "what": what})
            print(f"{part} {number[part]}: {kind}: {what}", flush=True)
        if findings and folder is not None:
            keep(part, spec, findings, folder)
        number[part] += 1
        spent[part] += time.monotonic() - begun
    return {
        "minutes": minutes,
        "seed": seed,
        "date": time.strftime("%Y-%m-%d"),
        "counts": {part: dict(sorted(seen.items())) for part, seen in counts.items()},
        "findings": found,
    }


def table(figures):
    """The figures as a page shows them."""
    kinds = Counter((one["part"], one["kind"]) for one in figures["findings"])
    lines = ["| what | cases | of which | findings |", "|---|---|---|---|"]
    for part, counts in figures["counts"].items():
        rest = ", ".join(f"{name} {n:,}" for name, n in counts.items() if name != "cases")
        bad = ", ".join(f"{kind} {n}" for (own, kind), n in kinds.items() if own == part) or "none"
        lines.append(f"| {TITLES[part]} | {counts.get('cases', 0):,} | {rest} | {bad} |")
    lines += ["", f"{figures['minutes']:g} minutes with seed {figures['seed']}, {figures['date']}."]
    if figures["findings"]:
        lines.append("")
    for one in figures["findings"][:20]:
        what = " ".join(one["what"].split())[:160].replace("|", "/")
        lines.append(f"- {one['part']} {one['number']}, {one['kind']}: {what}")
    return "\n".join(lines)


def write_page(page, figures):
    text = page.read_text()
    before, _, rest = text.partition(PAGE_START)
    _, _, after = rest.partition(PAGE_END)
    page.write_text(f"{before}{PAGE_START}\n{table(figures)}\n{PAGE_END}{after}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(PARTS))
    parser.add_argument("--changes", nargs="+", default=(), choices=boxes.CHANGES)
    parser.add_argument("--cases", type=int, help="end after so many")
    parser.add_argument("--out", type=Path, default=Path("build/attack.json"))
    parser.add_argument("--page", type=Path, help="write the table into this page")
    parser.add_argument("--keep", action="store_true", help="keep what is found as open cases")
    given = parser.parse_args()
    folder = HERE / "cases" / "open" if given.keep else None
    only = "boxes" if given.changes else given.only
    figures = campaign(given.minutes, given.seed, only, folder, given.changes, given.cases)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(figures, indent=1) + "\n")
    if given.page is not None:
        write_page(given.page, figures)
    print(table(figures))
    raise SystemExit(1 if figures["findings"] else 0)


if __name__ == "__main__":
    main()
