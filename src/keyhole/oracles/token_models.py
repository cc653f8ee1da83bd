"""Whole models that take token numbers, as boxes of rows: folders of `sentence-transformers` and
`transformers`, and modules of torch.

A folder of `sentence-transformers` says in modules.json what follows the transformer: pooling,
dense layers, normalisation. They are few and are computed here, so that the package itself is not
needed. A plain folder of `transformers` says nothing of pooling: it is stated, or found by asking
(`list_readings`). A folder with a classification head answers with its logits. Weights are read
and nothing else: no code from the folder is run, and nothing is fetched.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import FileFormatError, InvalidArgument, OracleError
from keyhole.extras import need
from keyhole.oracles.hugging_face import load_folder, need_torch
from keyhole.oracles.rows import (
    NUMBERS,
    TEXT,
    Row,
    RowBox,
    RowSpec,
    check_row_answers,
    pad_rows,
)
from keyhole.oracles.torch import evaluating, first_tensor, name_module
from keyhole.targets import FOLDER, check_folder

POOLINGS = ("mean", "cls", "last", "max", "sqrt", "weighted")
# how modules.json and the pooling's own configuration name them
NAMES = {
    "cls": "cls",
    "cls_token": "cls",
    "mean": "mean",
    "mean_tokens": "mean",
    "max": "max",
    "max_tokens": "max",
    "mean_sqrt_len_tokens": "sqrt",
    "mean_sqrt_len": "sqrt",
    "weightedmean": "weighted",
    "weightedmean_tokens": "weighted",
    "lasttoken": "last",
}
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "Sigmoid", "SiLU")


@dataclass(frozen=True, eq=False)
class TokenReading:
    """What makes one vector of the states of a row: pooling, dense layers, normalisation.
    `pooling=None` takes the answer as it is: logits."""

    pooling: str | None
    dense: tuple[Any, ...] = ()  # modules of torch
    normalize: bool = False
    stated: bool = True  # by the folder or the caller, not guessed

    def __post_init__(self) -> None:
        if self.pooling not in (None, *POOLINGS):
            raise InvalidArgument(
                f"pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}"
            )

    def __str__(self) -> str:
        parts = ["logits" if self.pooling is None else f"{self.pooling} pooling"]
        parts += [f"{len(self.dense)} dense layer(s)"] if self.dense else []
        parts += ["normalised"] if self.normalize else []
        return ", ".join(parts)

    def read(self, states: Any, mask: Any) -> Any:
        """The answers (n, outputs) of states (n, length, width), or of logits (n, outputs)."""
        vectors = states if self.pooling is None else pool(states, mask, self.pooling)
        for layer in self.dense:
            vectors = layer(vectors)
        if self.normalize:
            size = vectors.norm(dim=-1, keepdim=True)
            vectors = vectors / size.clamp(min=1e-12)  # as torch's own normalize does
        return vectors


def pool(states: Any, mask: Any, pooling: str) -> Any:
    """One vector for each row of states (n, length, width); the mask is 1 for a token."""
    import torch

    if pooling == "cls":
        return states[:, 0]
    if pooling == "last":
        last = mask.sum(dim=1) - 1
        return states[torch.arange(len(states), device=states.device), last]
    weights = mask.to(states.dtype)[:, :, None]
    if pooling == "max":
        return states.masked_fill(weights == 0, -torch.inf).amax(dim=1)
    if pooling == "weighted":
        weights = weights * torch.arange(1, states.shape[1] + 1, device=states.device)[:, None]
    total = (states * weights).sum(dim=1)
    count = weights.sum(dim=1).clamp(min=1e-9)
    return total / (count.sqrt() if pooling == "sqrt" else count)


class TokenModel(RowBox):
    """A torch module on token numbers with what follows it."""

    def __init__(
        self,
        module: Any,
        reading: TokenReading,
        *,
        tokenizer: Any = None,
        max_length: int | None = None,
        identity: str = "",
    ) -> None:
        self.module, self.reading, self.tokenizer = module, reading, tokenizer
        config = getattr(module, "config", None)
        positions = getattr(config, "max_position_embeddings", None)
        limits = [n for n in (max_length, positions) if isinstance(n, int) and n > 0]
        takes = (NUMBERS,) if tokenizer is None else (NUMBERS, TEXT)
        self.spec = RowSpec(
            takes,
            identity or name_module(module),
            getattr(config, "vocab_size", None),
            min(limits) if limits else None,
        )

    @property
    def dtype(self) -> Any:
        """The number format it computes in, a type of torch."""
        torch = need_torch()
        floating = (p.dtype for p in self.module.parameters() if p.is_floating_point())
        return next(floating, torch.float32)

    @property
    def reserved(self) -> frozenset[int]:
        """Tokens with a meaning of their own (padding, beginning, end)."""
        if self.tokenizer is not None:
            return frozenset(int(token) for token in self.tokenizer.all_special_ids)
        config = getattr(self.module, "config", None)
        names = ("pad_token_id", "bos_token_id", "eos_token_id")
        known = (getattr(config, name, None) for name in names)
        return frozenset(token for token in known if isinstance(token, int))

    def encode(self, text: str) -> Array:
        """The token numbers of a text, cut to the longest row, as the folder's tokenizer has it."""
        if self.tokenizer is None:
            raise InvalidArgument(
                "the reference has no tokenizer, and the box takes texts: save the tokenizer into "
                "the same folder"
            )
        limit = {} if self.spec.max_length is None else {"max_length": self.spec.max_length}
        found = self.tokenizer(text, truncation=bool(limit), **limit)["input_ids"]
        return np.asarray(found, dtype=np.int64)

    def ask(self, rows: Sequence[Row]) -> Array:
        numbers = [self.encode(row) if isinstance(row, str) else np.asarray(row) for row in rows]
        return self.ask_as(numbers, self.reading)

    def ask_as(self, rows: Sequence[Array], reading: TokenReading) -> Array:
        """The answers under another reading of the same states."""
        import torch

        config = getattr(self.module, "config", None)
        padding = getattr(config, "pad_token_id", None)
        tokens, mask = map(torch.from_numpy, pad_rows(rows, padding or 0))
        device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
        tokens, mask = tokens.to(device), mask.to(device)
        with evaluating(self.module), torch.inference_mode():
            try:
                states = first_tensor(self.module(input_ids=tokens, attention_mask=mask))
                answers = reading.read(states, mask)
            except (KeyboardInterrupt, SystemExit, MemoryError):
                raise
            except Exception as error:
                raise OracleError(
                    f"the model raised {type(error).__name__} on token numbers of shape "
                    f"{tuple(tokens.shape)}: {str(error)[:500]}"
                ) from error
            kind = torch.float64 if answers.dtype == torch.float64 else torch.float32
            return check_row_answers(answers.to(kind).cpu().numpy(), len(rows), self.spec.identity)

    def with_reading(self, reading: TokenReading) -> "TokenModel":
        """The same module, read otherwise."""
        other = copy.copy(self)
        other.reading = reading
        return other

    def in_format(self, name: str, *, compute: str | None = None) -> "TokenModel":
        """A copy whose weights are rounded to a number format, and that computes in it, or in
        another one."""
        torch = need_torch()
        other = copy.copy(self)
        kind = getattr(torch, compute or name)

        def convert(module: Any) -> Any:
            rounded = copy.deepcopy(module).to(getattr(torch, name))
            return rounded.to(kind)

        other.module = convert(self.module)
        other.reading = replace(self.reading, dense=tuple(map(convert, self.reading.dense)))
        return other


def list_readings(reading: TokenReading) -> Iterator[TokenReading]:
    """What a folder that says nothing of pooling may be followed by."""
    for pooling in ("mean", "cls", "last", "max"):
        for normalize in (True, False):
            yield replace(reading, pooling=pooling, normalize=normalize, stated=False)


def open_token_model(
    target: Any,
    *,
    pooling: str | None = None,
    normalize: bool | None = None,
    dtype: str | None = None,
    tokenizer: Any = None,
) -> TokenModel:
    """A whole model on token numbers.

    Args:
        target: `hf:FOLDER` or a folder of `sentence-transformers` or `transformers`, or a module
            of torch that takes `input_ids` and `attention_mask`.
        pooling: "mean", "cls", "last", "max", "sqrt" or "weighted", where the folder does not say.
        normalize: Whether vectors are divided by their norm, where the folder does not say.
        dtype: Number format to compute in, that of the weights unless stated.
        tokenizer: Overrules that of the folder.

    Returns:
        The model as a box of rows; `reading.stated` is False where neither folder nor caller said
        how states become one vector.
    """
    if isinstance(target, (str, Path)):
        found = _open_folder(Path(str(target).removeprefix(FOLDER)), pooling, normalize, tokenizer)
    else:
        heads = ("logits",) if _is_classifier(target) else ()
        plain = TokenReading(None) if heads else state_reading(pooling, normalize)
        found = TokenModel(target, plain, tokenizer=tokenizer)
    return found if dtype is None else found.in_format(dtype)


def state_reading(pooling: str | None, normalize: bool | None) -> TokenReading:
    """What the caller says, or the usual thing, marked as a guess."""
    stated = pooling is not None
    return TokenReading(pooling or "mean", normalize=bool(normalize), stated=stated)


def _is_classifier(module: Any) -> bool:
    return type(module).__name__.endswith("ForSequenceClassification")


def _open_folder(
    folder: Path, pooling: str | None, normalize: bool | None, tokenizer: Any
) -> TokenModel:
    parts = read_modules(folder)
    inner = folder if parts is None else folder / parts[0]["path"]
    check_folder(inner, "")
    if tokenizer is None:
        tokenizer = load_tokenizer(folder if (folder / "tokenizer.json").exists() else inner)
    identity = f"{FOLDER}{folder.name}:{digest_folder(inner)}"
    if parts is None and has_classifier(folder):
        module = load_classifier(folder)
        return TokenModel(module, TokenReading(None), tokenizer=tokenizer, identity=identity)
    module = load_folder(inner)
    if parts is None:
        reading = state_reading(pooling, normalize)
        return TokenModel(module, reading, tokenizer=tokenizer, identity=identity)
    reading = read_reading(folder, parts[1:])
    if pooling is not None:
        reading = replace(reading, pooling=pooling)
    if normalize is not None:
        reading = replace(reading, normalize=normalize)
    return TokenModel(
        module,
        reading,
        tokenizer=tokenizer,
        max_length=read_max_length(inner),
        identity=identity,
    )


def ends_in(folder: Path, *heads: str) -> bool:
    """Whether the name of the folder's architecture ends in one of these."""
    try:
        known = json.loads((folder / "config.json").read_text()).get("architectures") or [""]
        return str(known[0]).endswith(heads)
    except (OSError, ValueError, AttributeError, IndexError, TypeError):
        return False


def has_classifier(folder: Path) -> bool:
    """Whether the folder's model ends in a classification head."""
    return ends_in(folder, "ForSequenceClassification")


def has_decoder(folder: Path) -> bool:
    """Whether the folder's model predicts the next token."""
    return ends_in(folder, "ForCausalLM", "LMHeadModel")


def load_classifier(folder: Path) -> Any:
    """A classifier or reranker."""
    return load_folder(folder, "AutoModelForSequenceClassification")


def load_decoder(folder: Path) -> Any:
    """A model that predicts the next token."""
    return load_folder(folder, "AutoModelForCausalLM")


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer in a folder; None where there is none."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    transformers = need("transformers", "hf", "a tokenizer")
    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise FileFormatError(
            f"transformers cannot read the tokenizer in {folder}: {str(error)[:300]}"
        ) from error


def read_modules(folder: Path) -> list[dict[str, Any]] | None:
    """The parts of a folder of `sentence-transformers`, in order; None where it is none."""
    path = folder / "modules.json"
    if not path.exists():
        return None
    try:
        parts = sorted(json.loads(path.read_text("utf-8")), key=lambda part: int(part["idx"]))
        kinds = [str(part["type"]).rpartition(".")[2] for part in parts]
        parts = [
            {"kind": kind, "path": str(part.get("path", ""))}
            for kind, part in zip(kinds, parts, strict=True)
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise FileFormatError(f"{path} is no list of modules: {error}") from error
    if not parts or parts[0]["kind"] != "Transformer":
        raise FileFormatError(f"{path} does not begin with a Transformer")
    return parts


def read_reading(folder: Path, parts: Sequence[dict[str, Any]]) -> TokenReading:
    """What follows the transformer in a folder of `sentence-transformers`."""
    reading = TokenReading("mean", stated=False)
    readers: dict[str, Callable[[Path, TokenReading], TokenReading]] = {
        "Pooling": read_pooling,
        "Dense": read_dense,
        "Normalize": lambda _, known: replace(known, normalize=True),
        "Dropout": lambda _, known: known,  # nothing outside training
    }
    for part in parts:
        if part["kind"] not in readers:
            raise InvalidArgument(
                f"{folder} has a module {part['kind']} behind its transformer, which is not "
                f"computed here; {', '.join(readers)} are. Load it yourself, and pass a function "
                "(tokens, attention_mask) -> (batch, outputs)"
            )
        if reading.normalize:
            raise InvalidArgument(f"{folder} has a module behind its normalisation: not supported")
        reading = readers[part["kind"]](folder / part["path"], reading)
    return reading


def read_pooling(folder: Path, known: TokenReading) -> TokenReading:
    """The one pooling that the configuration names."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        named = config.get("pooling_mode")
        marks = [
            name.removeprefix("pooling_mode_")
            for name, chosen in config.items()
            if name.startswith("pooling_mode_") and chosen is True
        ]
        modes = [named] if isinstance(named, str) else marks
    except (OSError, ValueError, AttributeError) as error:
        raise FileFormatError(f"{folder} holds no configuration of a pooling: {error}") from error
    if len(modes) != 1 or modes[0] not in NAMES:
        raise InvalidArgument(
            f"{folder} pools by {' and '.join(modes) or 'nothing'}; one of {', '.join(NAMES)} is "
            "understood"
        )
    return replace(known, pooling=NAMES[modes[0]], stated=True)


def read_dense(folder: Path, known: TokenReading) -> TokenReading:
    """A dense layer with its activation."""
    torch = need_torch()
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        sizes = int(config["in_features"]), int(config["out_features"])
        name = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
        if name not in ACTIVATIONS:
            raise ValueError(f"activation {name}")
        layer = torch.nn.Linear(*sizes, bias=bool(config.get("bias", True)))
        layer.load_state_dict(_dense_weights(folder, torch))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError) as error:
        raise FileFormatError(f"{folder} holds no dense layer that is known: {error}") from error
    layer = torch.nn.Sequential(layer, getattr(torch.nn, name)()).eval()
    return replace(known, dense=(*known.dense, layer))


def _dense_weights(folder: Path, torch: Any) -> dict[str, Any]:
    if (folder / "model.safetensors").exists():
        from safetensors.torch import load_file

        state: dict[str, Any] = load_file(folder / "model.safetensors")
    else:
        state = torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    return {name.removeprefix("linear."): value for name, value in state.items()}


def read_max_length(folder: Path) -> int | None:
    """The longest row that a folder of `sentence-transformers` states."""
    try:
        known = json.loads((folder / "sentence_bert_config.json").read_text("utf-8"))
        length = known.get("max_seq_length")
    except (OSError, ValueError, AttributeError):
        return None
    return length if isinstance(length, int) else None


def digest_folder(folder: Path) -> str:
    """Names the weights in a folder: sizes and contents of its files of weights."""
    state = hashlib.blake2b(digest_size=8)
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        state.update(path.name.encode())
        with path.open("rb") as file:
            while part := file.read(2**20):
                state.update(part)
    return state.hexdigest()
