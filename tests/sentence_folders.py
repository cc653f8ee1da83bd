"""Small folders of `transformers` and `sentence-transformers` with random weights, for tests."""

import json

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcdefghijklmnopqrstuvwxyz", *(f"w{k}" for k in range(70))]  # fmt: skip
TOKENS, WIDTH = len(WORDS), 16


def config(**more):
    return transformers.BertConfig(
        vocab_size=TOKENS,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=0.4,
        **more,
    )


def write_tokenizer(folder):
    words = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, "[UNK]"))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    ).save_pretrained(folder)


def write_plain(folder, seed=0, tokenizer=False):
    """A BERT without a head."""
    torch.manual_seed(seed)
    transformers.BertModel(config()).save_pretrained(folder)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def write_classifier(folder, seed=0):
    torch.manual_seed(seed)
    model = transformers.BertForSequenceClassification(config(num_labels=3))
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_sentence(folder, pooling="mean_tokens", dense=False, normalize=True, seed=0):
    """A folder of sentence-transformers: transformer, pooling, perhaps dense, normalisation."""
    write_plain(folder, seed, tokenizer=True)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 48}))
    parts = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (folder / "1_Pooling").mkdir()
    mode = {f"pooling_mode_{name}": name == pooling for name in ("cls_token", "mean_tokens")}
    mode |= {f"pooling_mode_{pooling}": True, "word_embedding_dimension": WIDTH}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(mode))
    if dense:
        (folder / "2_Dense").mkdir()
        known = {"in_features": WIDTH, "out_features": 5, "bias": True}
        known["activation_function"] = "torch.nn.modules.activation.Tanh"
        (folder / "2_Dense" / "config.json").write_text(json.dumps(known))
        torch.manual_seed(seed + 1)
        layer = torch.nn.Linear(WIDTH, 5)
        state = {f"linear.{name}": value for name, value in layer.state_dict().items()}
        save_file(state, folder / "2_Dense" / "model.safetensors")
        parts.append(("2_Dense", "Dense"))
    if normalize:
        parts.append((f"{len(parts)}_Normalize", "Normalize"))
    listed = [
        {"idx": k, "name": str(k), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for k, (path, kind) in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    return folder
