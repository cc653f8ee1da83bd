"""A llama.cpp server with a small random model, as a program: prints its address and waits.

Needs xllamacpp and gguf, which live in an environment of their own (`make test` builds it), so that
this file imports nothing of the project. With the path of a .gguf file it serves that model.
"""

import sys
import time
from pathlib import Path

import numpy as np

WORDS, WIDTH, HEADS, INNER = 61, 24, 2, 48
TOKENS = 3 + 256 + WORDS  # control tokens, bytes, words


def write_model(path, seed=0):
    """A Llama of one layer with random weights; the output layer is its own (not tied)."""
    import gguf

    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_vocab_size(TOKENS)
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [f"▁w{k}" for k in range(WORDS)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([word.encode() for word in words])
    writer.add_token_scores([0.0] * 259 + [-float(k) for k in range(WORDS)])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * WORDS)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    shapes = {
        "token_embd": (TOKENS, WIDTH),
        "output": (TOKENS, WIDTH),
        "blk.0.attn_q": (WIDTH, WIDTH),
        "blk.0.attn_k": (WIDTH, WIDTH),
        "blk.0.attn_v": (WIDTH, WIDTH),
        "blk.0.attn_output": (WIDTH, WIDTH),
        "blk.0.ffn_gate": (INNER, WIDTH),
        "blk.0.ffn_up": (INNER, WIDTH),
        "blk.0.ffn_down": (WIDTH, INNER),
    }
    for name, shape in shapes.items():
        size = 1.0 if name == "token_embd" else shape[1] ** -0.5
        size *= 3.0 if name == "output" else 1.0
        table = (size * rng.standard_normal(shape)).astype(np.float32)
        writer.add_tensor(f"{name}.weight", table)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        gain = np.exp(0.2 * rng.standard_normal(WIDTH)).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gain)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(path):
    import xllamacpp

    if not path.exists():
        write_model(path)
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = 256
    params.n_parallel = 1
    params.warmup = False
    params.port = 0
    params.hostnames = ["127.0.0.1"]
    params.cpuparams.n_threads = 1
    server = xllamacpp.Server(params)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    while True:
        time.sleep(1.0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
