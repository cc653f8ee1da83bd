"""A BERT of transformers with random weights, block by block, killed in the middle and resumed.

python benchmarks/layers.py [--width 32 --layers 6 --heads 4 --neurons 128] [--kill 300]
                            [--seconds 1800] [--seed 9000] [--gpt2] [--learner block]

--gpt2: the blocks of a GPT-2 instead, whose norms stand before the parts.

`keyhole layers` runs as a process of its own; it is killed (-9) after `kill` seconds, started
again, and given up after `seconds`. For every block: the largest error of fresh answers, and
keyhole.distance of all but the epsilons (BERT's are 1e-12, so that the second one is less than a
hundredth of a rounding of most answers) with these apart.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers

import keyhole
from keyhole.models.canonical import canonical_block
from keyhole.results import RUN_FILE


def make_bert(folder, chosen):
    torch.manual_seed(chosen.seed)
    config = transformers.BertConfig(
        hidden_size=chosen.width, num_hidden_layers=chosen.layers,
        num_attention_heads=chosen.heads, intermediate_size=chosen.neurons, vocab_size=20,
        max_position_embeddings=300,
    )  # fmt: skip
    model = transformers.BertModel(config).double().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0.0, weight.shape[1] ** -0.5)
            elif "LayerNorm.weight" in name:
                weight.add_(0.2 * torch.randn_like(weight))
            else:
                weight.add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return model


def make_gpt2(folder, chosen):
    torch.manual_seed(chosen.seed)
    config = transformers.GPT2Config(
        n_embd=chosen.width, n_layer=chosen.layers, n_head=chosen.heads, n_inner=chosen.neurons,
        n_positions=64, vocab_size=20, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2Model(config).double().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                weight.normal_(0.0, weight.shape[0] ** -0.5)
            else:
                weight.add_((0.2 if "ln" in name else 0.3) * torch.randn_like(weight))
    model.save_pretrained(folder)
    return model


def compare(found, true, seed):
    """Errors of fresh answers, of all parameters but the epsilons, and of these."""
    tokens = 2.0 * np.random.default_rng(seed).standard_normal((100, 5, true.width))
    fresh = float(np.abs(found(tokens) - true(tokens)).max())
    found, true = canonical_block(found), canonical_block(true)
    apart = np.abs(found.epsilons / true.epsilons - 1.0).max()
    same = keyhole.Block(
        found.attention, found.mlp, norm=found.norm, kind=found.kind, epsilons=true.epsilons,
        gain=found.gain, bias=found.bias, parallel=found.parallel,
    )  # fmt: skip
    return (
        f"fresh {fresh:.1e} distance {keyhole.distance(same, true):.1e} epsilons {apart:.0e} "
        f"({', '.join(f'{epsilon:.0e}' for epsilon in true.epsilons)})"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("width", 32), ("layers", 6), ("heads", 4), ("neurons", 128),
                        ("kill", 300), ("seconds", 1800), ("seed", 9000)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--gpt2", action="store_true")
    parser.add_argument("--learner", default="block")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder, out = Path(place) / "model", Path(place) / "runs"
        model = (make_gpt2 if chosen.gpt2 else make_bert)(folder, chosen)
        command = [sys.executable, "-m", "keyhole", "layers", f"hf:{folder}", "--out", str(out),
                   "--dtype", "float64", "--learner", chosen.learner]  # fmt: skip
        begin = time.monotonic()
        for limit in (chosen.kill, chosen.seconds):
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            spent = time.monotonic() - begin
            print(f"after {spent:.0f} s: exit {process.returncode}", flush=True)
        for number in range(chosen.layers):
            name = f"h.{number}" if chosen.gpt2 else f"encoder.layer.{number}"
            if not (out / name / RUN_FILE).is_file():
                print(f"{name}: not finished")
                continue
            run = keyhole.load(out / name)
            apart = ""
            if run.model is not None:
                found = run.model
                found = found.blocks[0] if isinstance(found, keyhole.Stack) else found
                apart = compare(found, keyhole.from_hf(model, name), chosen.seed)
            print(f"{name}: {run.outcome.name} {apart} queries {run.ledger.paid} {run.reason}")


if __name__ == "__main__":
    main()
