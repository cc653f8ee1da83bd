"""A PyTorch module as an oracle: evaluation mode, no gradients, its own device and number format.

The module is called on (batch, length, width). A tuple's or mapping's first tensor is the answer;
of a sequence of answers the last position is taken. The module itself is left as it was.
"""

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from keyhole.arrays import Array
from keyhole.errors import FileFormatError, InvalidArgument, OracleError
from keyhole.extras import need
from keyhole.oracles.base import Domain, Oracle, Spec
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.queries import QueryBatch

WIDTH_NAMES = (
    "width",
    "input_size",
    "embed_dim",
    "d_model",
    "hidden_size",
    "in_features",
    "normalized_shape",
)

Adapter = Callable[[Any, Any], Any]  # (module, tokens) -> the module's answer


def is_module(target: Any) -> bool:
    """Whether this is a torch module, without importing torch to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(target, torch.nn.Module)


def advise(error: str, shape: Any) -> str:
    """What to do about an error of a module, by the words that torch uses for each cause."""
    if "dtype" in error:
        return "Pass dtype= (--dtype) if it computes in another format"
    if "device" in error:
        return (
            "A part of it is on another device: move the whole module, or pass device= (--device)"
        )
    if "shapes cannot be multiplied" in error or "normalized_shape" in error:
        return f"Its tokens may not be {shape[-1]} wide: pass width= (--width)"
    if shape[1] > 1 and ("index out of range" in error or "must match" in error):
        return f"It may take sequences shorter than {shape[1]}: pass max_length= (--max-length)"
    return (
        "A model on token numbers, or with more arguments, has parts that take vectors: open one "
        "of them, or pass adapter="
    )


@dataclass(frozen=True, eq=False)
class TorchOracle(Oracle):
    """Asks `adapter(module, tokens)`."""

    module: Any
    spec: Spec
    adapter: Adapter
    dtype: Any
    device: Any

    def ask(self, queries: QueryBatch) -> Array:
        import torch

        tokens = torch.from_numpy(np.ascontiguousarray(queries.tokens()))
        with evaluating(self.module), torch.inference_mode():
            try:
                answer = self.adapter(self.module, tokens.to(self.device, self.dtype))
            except (KeyboardInterrupt, SystemExit, MemoryError):
                raise
            except Exception as error:
                format_ = str(self.dtype).removeprefix("torch.")
                raise OracleError(
                    f"the module raised {type(error).__name__} on {format_} tokens of shape "
                    f"{tuple(tokens.shape)}: {str(error)[:500].rstrip('.!')}. "
                    + advise(str(error), tokens.shape)
                ) from error
            return self._numbers(answer, len(queries))

    def _numbers(self, answer: Any, count: int) -> Array:
        import torch

        tensor = first_tensor(answer)
        if tensor is None:
            raise OracleError(
                f"the module answered with a {type(answer).__name__} that holds no tensor; pass "
                "adapter=, a function (module, tokens) -> tensor"
            )
        if tensor.ndim == 3 and tensor.shape[0] == count:
            tensor = tensor[:, -1, :]
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.to(torch.float32)  # NumPy has no bfloat16; nothing is lost
        array: Array = tensor.detach().cpu().numpy()
        return array


@contextlib.contextmanager
def evaluating(module: Any) -> Iterator[None]:
    """Evaluation mode, and afterwards the mode every submodule was in."""
    trained = [part for part in module.modules() if part.training]
    for part in trained:
        part.training = False
    try:
        yield
    finally:
        for part in trained:
            part.training = True


def first_tensor(answer: Any) -> Any:
    """The tensor, or the first one in a tuple, list or mapping."""
    import torch

    if isinstance(answer, torch.Tensor):
        return answer
    if isinstance(answer, Mapping):
        answer = list(answer.values())
    if isinstance(answer, (tuple, list)):
        return next((item for item in answer if isinstance(item, torch.Tensor)), None)
    return None


def _called(module: Any, tokens: Any) -> Any:
    return module(tokens)


def _self_attention(module: Any, tokens: Any) -> Any:
    """nn.MultiheadAttention takes query, key and value, and may want the length first."""
    if module.batch_first:
        return module(tokens, tokens, tokens, need_weights=False)[0]
    tokens = tokens.transpose(0, 1)
    return module(tokens, tokens, tokens, need_weights=False)[0].transpose(0, 1)


def _length_first(module: Any, tokens: Any) -> Any:
    return module(tokens.transpose(0, 1)).transpose(0, 1)


def default_adapter(module: Any) -> Adapter:
    """How modules that PyTorch itself ships want to be called; everything else, on the tokens."""
    import torch.nn as nn

    if isinstance(module, nn.MultiheadAttention):
        return _self_attention
    if isinstance(module, nn.TransformerEncoderLayer) and not module.self_attn.batch_first:
        return _length_first
    return _called


def open_torch(
    module: Any,
    width: int | None,
    domain: Domain,
    precision: NoiseModel | None,
    *,
    adapter: Adapter | None = None,
    dtype: Any = None,
    device: Any = None,
    weights: str | Path | None = None,
) -> TorchOracle:
    """The module as a box. `weights` (a state dict or safetensors file) is loaded into it first."""
    torch = need("torch", "torch", "a PyTorch module")
    if weights is not None:
        load_weights(module, weights)
    tensors = [*module.parameters(), *module.buffers()]
    floating = [t for t in tensors if t.is_floating_point()]
    if any(t.is_meta or torch.nn.parameter.is_lazy(t) for t in tensors):
        raise InvalidArgument(
            f"{type(module).__name__} has parameters without numbers (on the meta device, or "
            "lazy): load its weights first, or call it once"
        )
    if device is not None:
        move(module, device)
    width = width or guessed_width(module)
    if width is None:
        raise InvalidArgument(
            f"{type(module).__name__} does not tell its width: pass width= (--width)"
        )
    kind = _dtype(dtype, floating, torch)
    if precision is None and kind in (torch.float16, torch.bfloat16):
        bits = {torch.float16: 11, torch.bfloat16: 8}[kind]  # of the significand
        precision = NoiseModel(2.0**-bits, format=str(kind).removeprefix("torch."))
    return TorchOracle(
        module,
        Spec(width, None, domain, precision, name_module(module)),
        adapter or default_adapter(module),
        kind,
        device or (tensors[0].device if tensors else "cpu"),
    )


def move(module: Any, device: Any) -> None:
    """Moves a module to where it is to compute."""
    try:
        module.to(device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        raise InvalidArgument(
            f"the device {device} cannot be used here ({reason}): pass device= (--device) one that "
            "torch has, as in cpu"
        ) from error


def _dtype(wanted: Any, floating: list[Any], torch: Any) -> Any:
    if wanted is None:  # a module without parameters computes in what it is given
        return floating[0].dtype if floating else torch.float64
    if isinstance(wanted, str):
        wanted = getattr(torch, wanted, None)
    if not isinstance(wanted, torch.dtype) or not wanted.is_floating_point:
        raise InvalidArgument("dtype must be a floating type of torch, such as torch.float32")
    return wanted


def guessed_width(module: Any) -> int | None:
    """The width where the module, its configuration or its first part tells."""
    for holder in (module, getattr(module, "config", None)):
        for name in WIDTH_NAMES:
            found = getattr(holder, name, None)
            if isinstance(found, tuple) and len(found) == 1:
                found = found[0]
            if isinstance(found, int) and not isinstance(found, bool):
                return found
    for part in module.children():
        found = guessed_width(part)
        if found is not None:
            return found
    return None


def name_module(module: Any) -> str:
    """The class, and a digest of the parameters: journals of two trainings stay apart."""
    state = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(module.state_dict().items()):
        if hasattr(tensor, "detach"):
            plain = tensor.detach().cpu().contiguous().reshape(-1)
            state.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            state.update(plain.view(_bytes()).numpy().data if plain.numel() else b"")
    return f"{type(module).__module__}.{type(module).__qualname__}:{state.hexdigest()}"


def _bytes() -> Any:
    import torch

    return torch.uint8


def load_weights(module: Any, path: str | Path) -> None:
    """Parameters from a file: safetensors, or a state dict read with weights only (no code)."""
    torch, path = need("torch", "torch", "a PyTorch module"), Path(path)
    if not path.is_file():
        raise FileFormatError(f"{path} does not exist or is not a file")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(path)
        else:
            state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged or malicious file makes the reader raise
        raise FileFormatError(
            f"{path} cannot be read as a state dict ({str(error)[:300]}). Only tensors are read, "
            "never code; save it with torch.save(module.state_dict(), …) or as safetensors"
        ) from error
    try:
        module.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise FileFormatError(f"{path} does not fit the module: {str(error)[:500]}") from error


class _Seen(Exception):
    """Ends the larger model's run once its part has answered."""


def inside(model: Any, part: Any, run: Callable[[int, int], Any]) -> Adapter:
    """An adapter that asks a part of a larger model *in place*.

    The tokens take the place of the hidden states that enter the part, and the rest of the model is
    not run. Masks, positions and other arguments are thus what the model itself passes.

    Args:
        model: The larger model, a torch module.
        part: The part of it that is asked.
        run: `run(batch, length)` calls the larger model on any input of that size.

    Returns:
        What `open_oracle(part, adapter=…)` takes.

    Raises:
        InvalidArgument: A part that is not in the model.

    Example:
        >>> import torch
        >>> from keyhole.oracles.open import open_oracle
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
        >>> part = layer.linear1
        >>> run = lambda batch, length: layer(torch.zeros(batch, length, 8))
        >>> adapter = inside(layer, part, run)
        >>> open_oracle(part, adapter=adapter, width=8).spec.width
        8
    """

    def adapter(module: Any, tokens: Any) -> Any:
        answers: list[Any] = []

        def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not args:
                return args, {**kwargs, "hidden_states": tokens}
            states = args[0]  # self-attention may be given the same as query, key and value

            def replaced(given: Any) -> Any:
                return tokens if given is states else given

            named = {name: replaced(given) for name, given in kwargs.items()}
            return tuple(map(replaced, args)), named

        def leave(_: Any, __: Any, answer: Any) -> None:
            answers.append(answer)
            raise _Seen

        hooks = [
            module.register_forward_pre_hook(enter, with_kwargs=True),
            module.register_forward_hook(leave),
        ]
        try:
            with evaluating(model), contextlib.suppress(_Seen):
                run(tokens.shape[0], tokens.shape[1])
        finally:
            for hook in hooks:
                hook.remove()
        if not answers:
            raise OracleError("running the larger model did not call the part that is asked")
        return answers[0]

    if not any(child is part for child in model.modules()):
        raise InvalidArgument(f"this {type(part).__name__} is no part of the model")
    return adapter
