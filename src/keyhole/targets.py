"""Strings that name a box, checked before anything heavy is imported: a slip of the pen costs no
second of waiting.

    http(s)://…   a .onnx file   a saved model or run   hf:FOLDER   hf:FOLDER#part
    gguf:FILE   FILE.gguf#blk.0.attn
    package.module:attribute   package.module:model.encoder.layer.0   package.module:layers[0]
"""

import difflib
import importlib.util
import json
import pkgutil
import re
import struct
import sys
from pathlib import Path

from keyhole.errors import FileFormatError, InvalidArgument

ATTRIBUTE = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*):([A-Za-z_]\w*(?:\.\w+|\[\d+\])*)(\(\))?")
FOLDER, FILE = "hf:", "gguf:"
FORMATS = ("float64", "float32", "float16", "bfloat16")


def suggest(name: str, known: list[str]) -> str:
    """The names next to one that is not there, or the first of all."""
    near = difflib.get_close_matches(name, known, n=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    if not known:
        return "there is none"
    return f"it has {', '.join(known[:20])}" + (" …" if len(known) > 20 else "")


def check_target(name: str) -> None:
    """Raises where a string cannot name a box, whatever is behind it."""
    if re.match(r"https?://", name, re.IGNORECASE):
        return
    if name.startswith(FOLDER):
        folder, _, part = name.removeprefix(FOLDER).partition("#")
        check_folder(Path(folder), part)
        return
    gguf = split_gguf(name)
    if gguf is not None:
        check_gguf(gguf[0])
        return
    code, _, attribute = name.partition(":")
    if code.endswith(".py"):
        file = Path(code)
        module = file.stem if file.is_absolute() else ".".join(file.with_suffix("").parts)
        holder = str(file.parent) if file.is_absolute() else "the folder that holds it"
        missing = "" if file.exists() else f"; there is no file {code}"
        raise InvalidArgument(
            f"{code} is Python code: name what is in it as {module}:{attribute or 'attribute'}, "
            f"from {holder}{missing}"
        )
    match = ATTRIBUTE.fullmatch(name)
    if Path(name).exists():
        return
    if match is not None:
        check_module(match[1])
    elif not name.lower().endswith(".onnx"):  # its reader says that it is not there
        raise InvalidArgument(
            f"{name!r} does not exist: it is no file, no URL, no hf:FOLDER, no gguf:FILE and no "
            "package.module:attribute"
        )


def split_gguf(name: str) -> tuple[Path, str] | None:
    """File and part of gguf:FILE#part or FILE.gguf#part; None where a string is neither."""
    file, _, part = name.removeprefix(FILE).partition("#")
    named = name.startswith(FILE) or file.lower().endswith(".gguf")
    return (Path(file), part) if named else None


def check_gguf(path: Path) -> None:
    """Raises where there is no GGUF file."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise FileFormatError(f"cannot read {path}: {error.strerror}") from error
    if start != b"GGUF":
        raise FileFormatError(f"{path} is no GGUF file: it does not begin with GGUF")


def check_module(module: str) -> None:
    """Raises where nothing of that name could be imported."""
    top = module.partition(".")[0]
    if top in sys.modules or importlib.util.find_spec(top) is not None:
        return
    here = [found.name for found in pkgutil.iter_modules([""])]
    near = difflib.get_close_matches(top, here, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    raise InvalidArgument(
        f"no module named {top!r}{hint or '; run from the folder that holds it, or install it'}"
    )


def check_folder(folder: Path, part: str) -> None:
    """Raises where there is no model in the folder, or none of its weights belongs to the part."""
    if not (folder / "config.json").is_file():
        raise FileFormatError(
            f"{folder} is no folder of a transformers model: it has no config.json. Save one with "
            "model.save_pretrained(FOLDER)"
        )
    names = weight_names(folder)
    wanted = re.sub(r"\[(\d+)\]", r".\1", part)
    if not wanted or not names or any(f".{wanted}." in f".{name}" for name in names):
        return
    pieces = [name.split(".") for name in names]
    # weights of a model with a head are stored below its name: bert.encoder, transformer.h
    starts = [words[skip:] for words in pieces for skip in (0, 1)]
    parts = {".".join(words[:stop]) for words in starts for stop in range(1, len(words))}
    raise InvalidArgument(
        f"the model in {folder} has no weights of a part {part!r}; {suggest(wanted, sorted(parts))}"
    )


def weight_names(folder: Path) -> list[str]:
    """Names of the weights in a folder, from the heads of its safetensors files; none where they
    cannot be read, which is for their reader to say."""
    names: list[str] = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                names += json.loads(file.read(min(length, 2**26)))
        except (OSError, ValueError, struct.error):
            return []
    return [name for name in names if name != "__metadata__"]


def check_format(name: str) -> None:
    """Raises where a number format is none that models compute in."""
    if name not in FORMATS:
        raise InvalidArgument(f"dtype must be one of {', '.join(FORMATS)}, got {name!r}")
