"""What can be recovered today: layers as libraries make them, by number format and width.

    python benchmarks/map.py [--layer NAME ...] [--format float32 ...] [--width 16 32 64]
                             [--seeds 1] [--first 4000] [--seconds 300] [--initial]
    python benchmarks/map.py --page

Each run is a process of its own, with nothing given; one that takes more seconds of CPU is stopped
and counts as not ended. Runs replace those of the same layer, format, width and seed in
src/keyhole/measured.json; --page writes the table of docs/results/map.md from that file, and runs
nothing. Errors are those of 60 fresh sequences, of six tokens or, where places matter, of 4 to 64,
over the spread of the answers.
"""

import argparse
import copy
import multiprocessing
import resource
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

import keyhole
from keyhole.measured import Run, gather, read_runs, write_runs
from library_attention import LAYERS as IN_PLACE
from library_attention import PLACES, make_layer
from library_blocks import LAYERS, LastToken, heads_of, make_block

PAGE = Path(__file__).parents[1] / "docs" / "results" / "map.md"
ATTENTION = {f"attention of {name}": name for name in IN_PLACE}  # called with its own positions
MARK = "<!-- table -->\n"
NOT_ENDED = "not ended"


def recover_layer(
    layer: str, number_format: str, width: int, seed: int, initial: bool, answer: Connection
) -> None:
    torch.set_num_threads(1)
    block, lengths, longest = make_box(layer, width, seed, initial)
    kind = getattr(torch, number_format)
    exact, served = copy.deepcopy(block).to(kind).double(), copy.deepcopy(block).to(kind)
    start = time.process_time()
    box = keyhole.open_oracle(served, width=width, max_length=longest)
    end = keyhole.recover(box, seed=seed, throw=False)
    seconds = time.process_time() - start
    rng = np.random.default_rng(seed + 10**6)
    truth, told, off = [], [], []
    for length in lengths:
        fresh = rng.standard_normal((60 // len(lengths), length, width))
        fresh = torch.as_tensor(fresh).to(kind)
        with torch.no_grad():
            truth.append(exact(fresh.double()).numpy())
            told.append(served(fresh).double().numpy() - truth[-1])
        if end.model is not None:
            off.append(end.model(fresh.double().numpy()) - truth[-1])
    floor = end.ledger.floor
    answer.send(
        Run(
            layer=name_of(layer, initial),
            family=str((end.details or {}).get("family", "")),
            format=number_format,
            width=width,
            seed=seed,
            outcome=end.outcome.name,
            error=spread_share(off, truth) if off else None,
            rounding=spread_share(told, truth),
            queries=end.ledger.paid,
            floors=end.ledger.paid / floor if floor else None,
            seconds=round(seconds, 1),
            gigabytes=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        )
    )


def make_box(
    layer: str, width: int, seed: int, initial: bool
) -> tuple[torch.nn.Module, list[int], int | None]:
    """The layer in float64, the lengths at which it is compared, and the longest it takes."""
    if layer not in ATTENTION:
        return make_block(layer, width, seed, initial), [6], None
    name = ATTENTION[layer]
    longest = PLACES if "places" in name else None
    lengths = np.geomspace(4, longest or 64, 6).astype(int).tolist()
    made = make_layer(name, seed, width, heads_of(width), initial)
    return LastToken(made).double(), lengths, longest


def name_of(layer: str, initial: bool) -> str:
    return f"{layer}, as initialised" if initial else layer


def spread_share(off: list[np.ndarray], truth: list[np.ndarray]) -> float:
    """Root mean square of errors over the spread of the answers."""
    answers, errors = np.concatenate(truth), np.concatenate(off)
    spread = np.sqrt(np.mean((answers - answers.mean(axis=0)) ** 2))
    return float(np.sqrt(np.mean(errors**2)) / spread)


def run_apart(
    layer: str, number_format: str, width: int, seed: int, initial: bool, seconds: int
) -> Run:
    """In a process of its own, which ends when its CPU time does."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    job = multiprocessing.get_context("fork").Process(
        target=limited, args=(seconds, layer, number_format, width, seed, initial, theirs)
    )
    job.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        return Run(
            layer=name_of(layer, initial), family="", format=number_format, width=width, seed=seed,
            outcome=NOT_ENDED, error=None, rounding=0.0, queries=0, floors=None, seconds=seconds,
            gigabytes=0.0,
        )  # fmt: skip
    finally:
        job.join()


def limited(seconds: int, *given: object) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    recover_layer(*given)


def write_page() -> None:
    runs = read_runs()
    widths = sorted({run.width for run in runs})
    rows = [
        "| layer | format | " + " | ".join(f"width {width}" for width in widths) + " |",
        "|---|---|" + "---|" * len(widths),
    ]
    for layer, kind in dict.fromkeys((run.layer, run.format) for run in runs):
        own = [run for run in runs if (run.layer, run.format) == (layer, kind)]
        cells = []
        for width in widths:
            alike = [run for run in own if run.width == width]
            cells.append(str(gather(alike)) if alike else "–")
        rows.append(f"| {layer} | {kind} | " + " | ".join(cells) + " |")
    text = PAGE.read_text(encoding="utf-8").split(MARK)[0]
    PAGE.write_text(text + MARK + "\n" + "\n".join(rows) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layer", nargs="*", choices=[*LAYERS, *ATTENTION], default=list(LAYERS))
    parser.add_argument("--format", nargs="*", default=["float32"])
    parser.add_argument("--width", nargs="*", type=int, default=[16, 32, 64])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=4000)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--initial", action="store_true")
    parser.add_argument("--page", action="store_true", help="writes the table, and runs nothing")
    given = parser.parse_args()
    if given.page:
        write_page()
        return
    for width in given.width:
        for layer in given.layer:
            for kind in given.format:
                for seed in range(given.first, given.first + given.seeds):
                    run = run_apart(layer, kind, width, seed, given.initial, given.seconds)
                    print(run, flush=True)
                    key = (run.layer, run.format, run.width, run.seed)
                    runs = [
                        one for one in read_runs()
                        if (one.layer, one.format, one.width, one.seed) != key
                    ]  # fmt: skip
                    write_runs([*runs, run])


if __name__ == "__main__":
    main()
