"""Models on disk: one safetensors file, its kind and version in the metadata. Never pickle."""

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import FileFormatError, InvalidArgument

FORMAT, VERSION = "keyhole-model", "1"
KINDS = {  # kind in the file -> where its class lives
    "Attention": "keyhole.models.attention",
    "Block": "keyhole.models.block",
    "LabelledAttention": "keyhole.models.sign_attention",
    "Mlp": "keyhole.models.mlp",
    "OutputLayer": "keyhole.models.language_model",
    "ReluNetwork": "keyhole.models.relu_network",
    "Stack": "keyhole.models.stack",
    "TemplateModel": "keyhole.models.template",
    "TokenAttention": "keyhole.models.language_model",
    "TransformerModel": "keyhole.models.transformer",
}


def save_model(model: Any, path: str | Path) -> Path:
    """Writes a model; the file appears whole or not at all."""
    from safetensors.numpy import save

    kind = type(model).__name__
    if kind not in KINDS:
        raise InvalidArgument(f"cannot save a {kind}; known kinds: {', '.join(sorted(KINDS))}")
    arrays = {name: np.array(array, order="C") for name, array in model.to_arrays().items()}
    metadata = {"format": FORMAT, "version": VERSION, "kind": kind}
    if hasattr(model, "to_metadata"):
        metadata |= model.to_metadata()
    path = Path(path)
    with replacing(path) as temporary:
        temporary.write_bytes(save(arrays, metadata))
    return path


def load_model(path: str | Path, template: Any = None) -> Any:
    """The model in a file, or a FileFormatError that says what is wrong with the file. A model that
    was recovered from a template is callable where the `template` is given."""
    path = Path(path)
    metadata, arrays = _read(path)
    if metadata.get("format") != FORMAT:
        raise FileFormatError(
            f"{path} is a safetensors file but not a keyhole model (its metadata does not say "
            f"format={FORMAT}); open it with the framework that wrote it"
        )
    if metadata.get("version") != VERSION:
        raise FileFormatError(
            f"{path} was written by another version (format {metadata.get('version')}, this "
            f"version reads {VERSION}); upgrade keyhole"
        )
    kind = metadata.get("kind", "")
    if kind not in KINDS:
        raise FileFormatError(f"{path} holds an unknown kind of model: {kind!r}")
    home = getattr(import_module(KINDS[kind]), kind)
    try:
        if hasattr(home, "from_file"):
            model = home.from_file(arrays, metadata)
        else:
            model = home.from_arrays(arrays)
    except Exception as error:  # arrays that do not fit together may break their reader anywhere
        raise FileFormatError(f"{path} does not hold a valid {kind}: {error}") from error
    return model if template is None else with_template(model, template)


def with_template(model: Any, template: Any) -> Any:
    """The model in its template, if it is one that was recovered from a template."""
    if not hasattr(model, "with_template"):
        raise InvalidArgument(f"a {type(model).__name__} has no template; leave out template=")
    return model.with_template(template)


def _read(path: Path) -> tuple[Mapping[str, str], dict[str, Array]]:
    from safetensors import safe_open

    if not path.is_file():
        raise FileFormatError(f"{path} does not exist or is not a file")
    try:
        with safe_open(str(path), framework="numpy") as file:
            metadata = file.metadata() or {}
            return metadata, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except Exception as error:  # a damaged file may break its reader anywhere
        raise FileFormatError(
            f"{path} cannot be read as safetensors ({error}); it is truncated, damaged or another "
            "kind of file"
        ) from error


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that takes its place when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        temporary.touch(0o600, exist_ok=False)  # what holds weights or answers is its owner's alone
        yield temporary
        temporary.replace(path)
    except OSError as error:
        error.filename = str(path)  # the name that the user gave
        raise
    finally:
        temporary.unlink(missing_ok=True)
