"""`transformers serve` with a small random model, as a program: it answers with text, takes a bias
and tells no log-probabilities.

Needs transformers[serving] and torch, which live in an environment of their own (`make test` builds
it), so that this file imports nothing of the project. Arguments: a folder for the model, a port.
"""

import json
import os
import sys
from pathlib import Path

TOKENS, WIDTH = 44, 8
WORDS = ["<s>", "</s>", *(str(k) for k in range(TOKENS - 2))]  # prompts are numbers, written out
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_model(folder, seed=0):
    """A Llama of one layer with random weights, whose tokens are whole words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, "<s>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TOKENS,
            hidden_size=WIDTH,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=64,
            initializer_range=1.0,
            bos_token_id=0,
            eos_token_id=1,
        )
    )
    model.generation_config.update(do_sample=False, pad_token_id=1)
    model.save_pretrained(folder)
    (folder / "rows.json").write_text(json.dumps(model.lm_head.weight.tolist()))


def main(folder, port):
    if not (folder / "config.json").exists():
        write_model(folder)
    program = Path(sys.executable).with_name("transformers")
    serve = ["serve", str(folder), "--host", "127.0.0.1", "--port", port, "--device", "cpu"]
    os.execv(program, [str(program), *serve])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
