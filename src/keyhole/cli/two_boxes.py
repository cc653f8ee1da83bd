"""REFERENCE and TARGET as the commands verify, sign and watch are given them."""

import contextlib
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from keyhole.cli.target import Box, read_headers, read_request

Reference = Annotated[
    str | None,
    typer.Argument(
        help="What TARGET should be: a saved model or the folder of a run, a signature "
        "(`keyhole sign`), `hf:FOLDER`, or any other target.",
        show_default=False,
    ),
]
Dialect = Annotated[
    str | None,
    typer.Option(help="Of an embedding endpoint: openai, tei or predict.", show_default=False),
]


@dataclass(frozen=True, eq=False)
class Pair:
    """Both sides as the library takes them, with the options of an endpoint of rows."""

    box: Any
    reference: Any
    options: dict[str, Any]

    @property
    def claimed(self) -> Any:
        """The model, where the reference is one or a run; else None."""
        model = getattr(self.reference, "model", self.reference)
        return model if hasattr(model, "to_arrays") else None

    def describe(self) -> dict[str, str]:
        """What is compared, for a record."""
        from keyhole.cli.options import without_secrets
        from keyhole.verification.watching import name_reference

        spec = getattr(self.box, "spec", None)
        box = str(self.box) if spec is None else spec.identity
        if self.claimed is not None:
            return {"box": box, "model": model_digest(self.claimed)}
        name = name_reference(self.reference)
        return {"box": without_secrets([box])[0], "reference": without_secrets([name])[0]}


def saved_claim(path: Path) -> Any:
    """The run that a saved model belongs to, with its standard errors: without them, a recovered
    model is taken for exact to the last digit, which it is not. The model where there is none."""
    from keyhole.errors import InvalidArgument
    from keyhole.results import RUN_FILE, Recovery, load

    whole = path.name == "model.safetensors" and (path.parent / RUN_FILE).is_file()
    loaded = load(path.parent if whole else path)
    if isinstance(loaded, Recovery) and loaded.model is None:
        raise InvalidArgument(f"the run in {path} ended without a model ({loaded.outcome.name})")
    return loaded


def read_seed(text: str) -> int:
    """A seed, or a random one."""
    if text == "random":
        return secrets.randbits(32)
    if not text.isdecimal():
        raise typer.BadParameter(f"a whole number or random, got {text!r}", param_hint="--seed")
    return int(text)


def model_digest(model: Any) -> str:
    """What names the parameters of a model."""
    from keyhole.arrays import digest

    return f"{type(model).__name__} {digest(*model.to_arrays().values()).hex()}"


def read_named_reference(name: str) -> Any:
    """What REFERENCE stands for: a run, a model, a signature, or a target as it is."""
    from keyhole.targets import check_target
    from keyhole.verification.dispatch import read_reference
    from keyhole.verification.reference import is_target
    from keyhole.verification.signature import is_signature

    path = Path(name)
    if is_target(name):
        check_target(name)
    elif path.exists() and not is_signature(path):
        return saved_claim(path)
    elif not path.exists():
        check_target(name)
    return read_reference(name)


def collect_options(box: Box, dialect: str | None, *, spoken: bool) -> dict[str, Any]:
    """What the command line says about an endpoint of rows, or of a language model."""
    names = ["rate", "timeout", "token_env", "plain_token"]
    names += ["top", "concurrency", "max_length"] if spoken else []
    found = {name: getattr(box, name) for name in names if getattr(box, name) is not None}
    if box.model_name is not None:
        found["model"] = box.model_name
    if box.header:
        found["headers"] = read_headers(box.header)
    if spoken:
        return found if box.tokens is None else {**found, "vocabulary": box.tokens}
    if dialect is not None:
        found["dialect"] = dialect
    for name in ("tokens", "max_length"):
        if getattr(box, name) is not None:
            found[name] = getattr(box, name)
    if box.request is not None:
        found |= {"request": read_request(box.request), "answer": box.answer or ""}
    return found


def is_address(name: str) -> bool:
    return name.lower().startswith(("http://", "https://"))


def _open_signed(
    box: Box, target: str, reference: Any, dialect: str | None, stack: contextlib.ExitStack
) -> Pair:
    """A box beside a signature."""
    if reference.plan.kind == "vectors":
        opened = stack.enter_context(box.opened(reference.plan.width))
        return Pair(opened, reference, {})
    spoken = reference.talk is not None
    options = collect_options(box, dialect, spoken=spoken)
    return Pair(target, reference, options if is_address(target) or not spoken else {})


def open_pair(box: Box, named: str, dialect: str | None, stack: contextlib.ExitStack) -> Pair:
    """Both sides, opened as far as the command line must: boxes of vectors with all the options
    that they have, others as the names that they are."""
    from keyhole.verification.dispatch import serves_rows
    from keyhole.verification.language_models import open_predictor, speaks
    from keyhole.verification.reference import is_target, takes_vectors
    from keyhole.verification.signature import Signature

    if not Path(named).exists() and box.target is not None and is_kept(box.target):
        named, box = box.target, _exchange(box, named)  # the other way round
    reference = read_named_reference(named)
    target = box.target
    claimed = getattr(reference, "model", reference)
    if hasattr(claimed, "to_arrays"):
        opened = stack.enter_context(box.opened(getattr(claimed, "width", None)))
        return Pair(opened, reference, {})
    if target is None:
        raise typer.BadParameter("name the box: TARGET", param_hint="TARGET")
    if isinstance(reference, Signature):
        return _open_signed(box, target, reference, dialect, stack)
    if not serves_rows(target) and (box.speaks or speaks(reference)):
        options = collect_options(box, dialect, spoken=True)
        return Pair(target, open_predictor(reference), options if is_address(target) else {})
    options = collect_options(box, dialect, spoken=False)
    if not is_target(reference):  # a function of `package.module:attribute`
        opened = stack.enter_context(box.opened())
        return Pair(opened, reference, {})
    if box.width is None and not takes_vectors(target, reference, options):
        return Pair(target, reference, options)
    from keyhole.oracles.open import open_oracle

    known = stack.enter_context(open_oracle(reference, None))
    opened = stack.enter_context(box.opened(known.spec.width))
    return Pair(opened, known, {})


def _exchange(box: Box, named: str) -> Box:
    from dataclasses import replace

    other = replace(box, target=named)
    other.check()
    return other


def is_kept(name: str) -> bool:
    """Whether a name is that of a saved model, a run or a signature."""
    from keyhole.results import RUN_FILE
    from keyhole.verification.signature import is_signature

    path = Path(name)
    if path.is_dir():
        return (path / RUN_FILE).exists()
    return path.is_file() and (path.suffix == ".safetensors" or is_signature(path))
