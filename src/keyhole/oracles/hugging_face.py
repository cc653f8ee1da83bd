"""A local `transformers` model folder, or a part of it, as a box: hf:FOLDER, hf:FOLDER#PART.

The whole model takes vectors in place of its embeddings and answers with its last hidden state. A
part is asked in place, with the masks and positions that the model itself passes. Weights are read
and nothing else: no code from the folder is run, and nothing is fetched.
"""

from pathlib import Path
from typing import Any

from keyhole.errors import FileFormatError, InvalidArgument
from keyhole.extras import need
from keyhole.models.parts import submodule
from keyhole.oracles.base import Domain
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.torch import Adapter, TorchOracle, inside, move, open_torch
from keyhole.targets import FOLDER, check_folder, check_target


def open_hf(
    name: str,
    width: int | None,
    domain: Domain,
    precision: NoiseModel | None,
    *,
    adapter: Adapter | None = None,
    dtype: Any = None,
    device: Any = None,
) -> TorchOracle:
    """The box behind hf:FOLDER or hf:FOLDER#PART."""
    check_target(name)
    folder, _, path = name.removeprefix(FOLDER).partition("#")
    model = load_folder(folder)
    part = submodule(model, path) if path else model
    if dtype is not None:
        model.to(getattr(need_torch(), dtype) if isinstance(dtype, str) else dtype)
    if device is not None:
        move(model, device)
    domain = within_positions(domain, model.config)
    if adapter is None:
        adapter = inside(model, part, _runner(model)) if path else _embedded
    width = width or getattr(model.config, "hidden_size", None)
    return open_torch(part, width, domain, precision, adapter=adapter)


def need_torch() -> Any:
    return need("torch", "torch", "a transformers model")


def load_folder(folder: str | Path, loader: str = "AutoModel") -> Any:
    """The model in a folder, ready to answer, by one of the loaders of `transformers`. What is no
    such folder is told before anything is imported."""
    folder = Path(folder)
    check_folder(folder, "")
    need_torch()
    transformers = need("transformers", "hf", "a transformers model")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model = getattr(transformers, loader).from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, dtype="auto"
        )
    except Exception as error:  # whatever a damaged folder makes the reader raise
        raise FileFormatError(
            f"transformers cannot read the model in {folder}: {str(error)[:300]}"
        ) from error
    return model.eval()


def own_class(folder: str | Path) -> str:
    """The name of the class that wrote the model in a folder."""
    transformers = need("transformers", "hf", "a transformers model")
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    return str((config.architectures or ["AutoModel"])[0])


def within_positions(domain: Domain, config: Any) -> Domain:
    """The domain, with sequences no longer than the model has positions for."""
    positions = getattr(config, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        return domain
    longest = positions if domain.max_length is None else min(positions, domain.max_length)
    return Domain(**{**vars(domain), "max_length": longest})


def _embedded(model: Any, tokens: Any) -> Any:
    return model(inputs_embeds=tokens)


def _runner(model: Any) -> Any:
    """Runs the model on any input of a size, so that its part is called."""
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise InvalidArgument(
            f"{type(model).__name__} does not take token numbers: load it yourself, and pass "
            "adapter=keyhole.inside(model, part, run)"
        )

    def run(batch: int, length: int) -> Any:
        torch = need_torch()
        numbers = torch.zeros((batch, length), dtype=torch.long, device=model.device)
        return model(input_ids=numbers)

    return run
