"""open_oracle: whatever the user has becomes an oracle."""

import contextlib
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, Unpack

from keyhole.arrays import digest, whole_number
from keyhole.errors import FileFormatError, InvalidArgument
from keyhole.oracles.base import Domain, Oracle, Spec
from keyhole.oracles.function import FunctionOracle
from keyhole.oracles.noise import NoiseModel
from keyhole.oracles.options import BoxOptions
from keyhole.oracles.torch import is_module, open_torch
from keyhole.oracles.wrappers.batch import Batcher
from keyhole.results import RUN_FILE, load
from keyhole.targets import ATTRIBUTE, check_format, check_target, split_gguf, suggest

EXPECTED = (
    "expected a callable on arrays of shape (batch, length, width), a torch module, a keyhole "
    "model, an Oracle, or a name: http(s)://…, a .onnx file, a saved model, hf:FOLDER#part, "
    "gguf:FILE#part, package.module:attribute"
)


def open_oracle(
    target: Any,
    width: int | None = None,
    max_length: int | None = None,
    max_norm: float | None = None,
    vocabulary: Any = None,
    *,
    low: float | None = None,
    high: float | None = None,
    sphere: float | None = None,
    precision: NoiseModel | None = None,
    batch: int | None = None,
    cluster: Any = None,
    **options: Unpack[BoxOptions],
) -> Oracle:
    """Opens the box behind `target`, so that it can be asked.

    Args:
        target: A callable (batch, length, width) -> (batch,) or (batch, outputs); a torch module;
            a keyhole model; an Oracle; or the name of one: an `http(s)://` endpoint, a `.onnx`
            file, a saved keyhole model or run, `hf:FOLDER` or `hf:FOLDER#part` (a local
            `transformers` model, or a part of it by its dotted name), `gguf:FILE#blk.0.attn` (a
            part of a GGUF file), `package.module:attribute` (which imports, and so runs, that
            module; `model.layers[0]` names a part, and with `()` behind it the attribute is
            called). A list of targets is taken as replicas of one box.
        width: Numbers in a token, where the target does not say.
        max_length: Tokens in a sequence that the box accepts, at most.
        max_norm: Norm of a token that the box accepts, at most.
        vocabulary: The only tokens that the box accepts, one in a row.
        low: Smallest entry of a token.
        high: Largest entry of a token.
        sphere: The one norm that all tokens have.
        precision: How exact the answers are, where that is known; otherwise it is measured.
        batch: Queries that the box is given at once, at most.
        cluster: A Dask client, or the address of a scheduler, that answers such batches on many
            machines.
        **options: What only some kinds of boxes have (docs/guide/boxes.md).

    Returns:
        The oracle. No query leaves the domain that is stated here. `close()` it, or use it in a
        `with` statement, where it holds a connection.

    Raises:
        InvalidArgument: A target that cannot be opened, or an option that this box does not have.
        FileFormatError: A file that holds no model.
        MissingExtra: A package that this kind of box needs is not installed.
        OracleError: An endpoint that does not answer.

    Example:
        >>> box = open_oracle(lambda tokens: tokens[:, -1].sum(axis=1), width=3, max_length=8)
        >>> box.spec.width, box.spec.domain.max_length
        (3, 8)
    """
    domain = Domain(max_length, max_norm, low, high, vocabulary, sphere)
    given = read_options(dict(options))
    if batch is not None:
        batch = whole_number("batch", batch, 1)
    if isinstance(target, (list, tuple)):
        if cluster is not None:
            raise InvalidArgument("several targets are spread by themselves: leave out cluster=")
        return _replicas(target, width, domain, precision, batch, given)
    if isinstance(target, str) and re.match(r"https?://", target, re.IGNORECASE):
        oracle = _open_url(target, width, domain, precision, batch=batch, **given)
        batch = None  # the endpoint splits by itself, several parts at a time
    else:
        oracle = _open_local(target, width, domain, precision, given)
    if cluster is not None:
        from keyhole.oracles.wrappers.dask import Distributed

        return Distributed(oracle, cluster, batch)
    return oracle if batch is None else Batcher(oracle, chunk_queries=batch)


def read_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options of torch modules as they are given on the command line: a number format by its name,
    an adapter as package.module:function."""
    if isinstance(options.get("dtype"), str):
        check_format(options["dtype"].removeprefix("torch."))
        options = {**options, "dtype": options["dtype"].removeprefix("torch.")}
    if isinstance(options.get("adapter"), str):
        options = {**options, "adapter": load_named(options["adapter"])}
    if not callable(options.get("adapter", read_options)):
        raise InvalidArgument("adapter must be a function (module, tokens) -> tensor")
    return options


@contextlib.contextmanager
def opened(box: Any) -> Iterator[Oracle]:
    """The oracle behind `box`. What was opened for it is closed at the end, and what the caller
    had opened is not."""
    oracle, own = open_oracle(box), box if isinstance(box, (list, tuple)) else [box]
    try:
        yield oracle
    finally:
        for part in getattr(oracle, "members", [oracle]):
            if not any(part is mine for mine in own):
                part.close()


def _open_local(
    target: Any, width: int | None, domain: Domain, precision: NoiseModel | None, options: Any
) -> Oracle:
    if isinstance(target, str) and target.startswith("hf:"):
        from keyhole.oracles.hugging_face import open_hf

        return _opened(open_hf, "a transformers model", options)(target, width, domain, precision)
    if isinstance(target, (str, Path)):
        path = Path(target)
        if split_gguf(str(target)) is not None:
            return _opened(open_gguf, "a GGUF file", options)(str(target), width, domain, precision)
        if path.suffix.lower() == ".onnx":
            from keyhole.oracles.onnx import open_onnx

            return _opened(open_onnx, "an ONNX file", options)(path, width, domain, precision)
        target = _named(str(target), path)
    if isinstance(target, Oracle):
        _refuse(options, "an Oracle")
        return _as_stated(target, width, domain, precision)
    if is_module(target):
        return _opened(open_torch, "a torch module", options)(target, width, domain, precision)
    _refuse(options, "a function or a keyhole model")
    return _function(target, width, domain, precision)


def open_gguf(
    name: str,
    width: int | None,
    domain: Domain,
    precision: NoiseModel | None,
    *,
    dtype: Any = None,
) -> Oracle:
    """The box behind gguf:FILE#part: its weights as a keyhole model, in double precision unless
    told otherwise."""
    model = load_named(name)
    model = model if dtype is None else model.astype(dtype)
    return _function(model, width, domain, precision)


def _as_stated(
    oracle: Oracle, width: int | None, domain: Domain, precision: NoiseModel | None
) -> Oracle:
    """The oracle as its own spec describes it, which nobody may contradict from outside."""
    if width not in (None, oracle.spec.width):
        raise InvalidArgument(f"width={width}, but this Oracle says {oracle.spec.width}")
    stated = {**vars(domain), "precision": precision}
    told = [name for name, part in stated.items() if part is not None]
    if told:
        raise InvalidArgument(
            f"an Oracle says in its own spec what it accepts and how exact it is: state "
            f"{', '.join(told)} there"
        )
    return oracle


def _function(
    target: Any, width: int | None, domain: Domain, precision: NoiseModel | None
) -> Oracle:
    if not callable(target):
        raise InvalidArgument(f"cannot open a {type(target).__name__} as a box; {EXPECTED}")
    if isinstance(target, type):
        raise InvalidArgument(
            f"{target.__qualname__} is a class; make an instance of it (on the command line, "
            "package.module:Class() does)"
        )
    if width is None:
        width = getattr(target, "width", None)
        if width is None and domain.vocabulary is not None:
            width = int(domain.vocabulary.shape[1])
    if width is None:
        raise InvalidArgument("this box does not tell its width: pass width= (--width)")
    outputs = getattr(target, "outputs", None) if hasattr(target, "to_arrays") else None
    return FunctionOracle(target, Spec(width, outputs, domain, precision, name_of_box(target)))


def name_of_box(target: Any) -> str:
    """Names a function or model in reports, and keeps its journal apart."""
    if hasattr(target, "to_arrays"):  # a keyhole model: its parameters name it
        contents = digest(*target.to_arrays().values()).hex()
        return f"{type(target).__name__.lower()} {contents}"
    name = getattr(target, "__qualname__", None) or type(target).__qualname__
    return f"{getattr(target, '__module__', type(target).__module__)}.{name}"


def load_named(name: str) -> Any:
    """The object that a saved model or `package.module:attribute` names."""
    return _named(name, Path(name))


def _named(name: str, path: Path) -> Any:
    """What a name on the command line stands for."""
    check_target(name)
    gguf = split_gguf(name)
    if gguf is not None:
        from keyhole.models.import_gguf import from_gguf

        return from_gguf(*gguf)
    if path.exists():
        if path.is_dir() and not (path / RUN_FILE).exists():
            raise FileFormatError(f"{path} is a folder without a keyhole run in it")
        if path.is_file() and path.suffix.lower() in (".pt", ".pth", ".bin", ".ckpt"):
            raise FileFormatError(
                f"{path} holds parameters but no code: name the module that they belong to, and "
                f"pass weights={path.name!r} (--weights)"
            )
        found = load(path)
        model = getattr(found, "model", found)
        if model is None:
            raise InvalidArgument(f"the run in {path} ended without a model")
        return model
    match = ATTRIBUTE.fullmatch(name)
    assert match is not None  # it was checked
    module, attribute, call = match.groups()
    return _attribute(module, attribute, bool(call))


def _attribute(module: str, attribute: str, call: bool) -> Any:
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InvalidArgument(
            f"no module named {error.name!r}; run from the folder that holds it, or install it"
        ) from error
    except (Exception, SystemExit) as error:  # the user's own code, which may raise anything
        script = "; keep what only a script does under if __name__ == '__main__'"
        raise InvalidArgument(
            f"importing {module} raised {type(error).__name__}: {error}"
            + (script if isinstance(error, SystemExit) else "")
        ) from error
    try:
        for name in re.sub(r"\[(\d+)\]", r".\1", attribute).split("."):
            if name.isdigit() and not hasattr(found, name):
                found = found[int(name)]  # an entry of a list, or of torch's own
                continue
            if not hasattr(found, name):
                raise InvalidArgument(
                    f"{module} has no {attribute!r}: {suggest(name, public_names(found))}"
                )
            found = getattr(found, name)
        return found() if call else found
    except InvalidArgument:
        raise
    except Exception as error:  # the user's own code again
        raise InvalidArgument(
            f"{module}:{attribute}{'()' * call} raised {type(error).__name__}: {error}"
        ) from error


def public_names(found: Any) -> list[str]:
    return [name for name in dir(found) if not name.startswith("_")]


def _open_url(
    url: str, width: int | None, domain: Domain, precision: NoiseModel | None, **options: Any
) -> Oracle:
    from keyhole.oracles.http.client import Access
    from keyhole.oracles.http.json_endpoint import open_json
    from keyhole.oracles.http.open_inference import open_inference

    names = [field.name for field in fields(Access)]
    access = Access(**{name: options.pop(name) for name in names if name in options})
    opener: Any = open_json if "request" in options else open_inference
    kind = "an endpoint with a JSON of its own" if "request" in options else "an HTTP endpoint"
    if "answer" in options and "request" not in options:
        raise InvalidArgument(
            "answer= (--answer) says where an endpoint with a JSON of its own answers: say with "
            "request= (--request) how it is asked"
        )
    open_url = _opened(opener, kind, options, names)
    return open_url(url, width, domain, precision, access=access)


def _replicas(
    targets: Any,
    width: int | None,
    domain: Domain,
    precision: NoiseModel | None,
    batch: int | None,
    options: dict[str, Any],
) -> Oracle:
    from keyhole.oracles.wrappers.replicas import Replicas

    members: list[Oracle] = []
    try:
        for target in targets:
            if isinstance(target, str) and re.match(r"https?://", target, re.IGNORECASE):
                members.append(_open_url(target, width, domain, precision, **_hasty(options)))
            else:
                members.append(_open_local(target, width, domain, precision, dict(options)))
        return Replicas(members, batch)
    except BaseException:
        for member in members:
            member.close()
        raise


def _hasty(options: dict[str, Any]) -> dict[str, Any]:
    """Less patience with one endpoint where another can take over."""
    from keyhole.oracles.http.retry import RetryPolicy

    return {"patience": RetryPolicy(attempts=3), **options}


def _opened(
    opener: Any, kind: str, options: dict[str, Any], more: list[str] | None = None
) -> Callable[..., Oracle]:
    """The opener with its options; one that it does not know is named, beside those that it has
    (and `more` that were taken out before)."""
    keywords = inspect.Parameter.KEYWORD_ONLY
    known = [p.name for p in inspect.signature(opener).parameters.values() if p.kind is keywords]
    known = [name for name in known if name != "access"] + (more or [])
    _refuse({name: None for name in options if name not in known}, kind, known)
    return functools.partial(opener, **options)


def _refuse(options: dict[str, Any], kind: str, known: list[str] | None = None) -> None:
    if options:
        offered = f"; it has {', '.join(known)}" if known else ""
        raise InvalidArgument(f"{kind} has no option {', '.join(sorted(options))}{offered}")
