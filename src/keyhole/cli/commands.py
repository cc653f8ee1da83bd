"""The commands. Heavy imports wait until a command runs."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyhole.cli.app import BUDGET, DIFFERS, OK, ORACLE, STOPPED, app
from keyhole.cli.audit import audit
from keyhole.cli.options import Json, MaxLength, MaxNorm, Out, Seed, Target, Width, opened
from keyhole.cli.serve import serve

if TYPE_CHECKING:
    from keyhole.results import Recovery


def finish(recovery: "Recovery", as_json: bool, out: Path | None) -> None:
    """Shows, saves, and leaves with the exit code of the outcome."""
    from keyhole.results import Outcome

    if out is not None:
        recovery.save(out)
    if as_json:
        typer.echo(json.dumps(recovery.to_json()))
    else:
        from rich.console import Console

        from keyhole.report.terminal import show

        console = Console()
        console.print(show(recovery, colour=console.color_system is not None))
        if out is not None:
            console.print(f"saved in [bold]{out}[/]; load it with keyhole.load({str(out)!r})")
    codes = {
        Outcome.RECOVERED: OK,
        Outcome.UNVERIFIED: OK,
        Outcome.ORACLE_FAILED: ORACLE,
        Outcome.BUDGET_EXHAUSTED: BUDGET,
        Outcome.INTERRUPTED: STOPPED,
    }
    raise typer.Exit(codes.get(recovery.outcome, DIFFERS))


LEARNERS = {  # command-line name -> public name
    "auto": "Auto",
    "single-head": "SingleHead",
    "low-rank": "LowRank",
    "multi-head": "MultiHead",
    "label-only": "LabelOnly",
    "relu-network": "ReluNetworkLearner",
    "transformer": "Transformer",
}


METHODS = {  # learners with a choice of method
    "low-rank": ("adaptive", "convex"),
    "transformer": ("segment", "antisymmetric"),
}


def named_learner(name: str, *, exact: bool | None = None, method: str | None = None) -> Any:
    """The learner behind a command-line name, with the options that it has."""
    import keyhole
    from keyhole.errors import InvalidArgument

    if name not in LEARNERS:
        raise InvalidArgument(f"unknown learner {name!r}; choose from {', '.join(LEARNERS)}")
    options: dict[str, Any] = {}
    if method is not None:
        if method not in METHODS.get(name, ()):
            known = ", ".join(f"{key}: {' or '.join(names)}" for key, names in METHODS.items())
            raise InvalidArgument(f"{name} has no method {method!r}; there are {known}")
        options["method"] = method
    if exact is not None:
        if name == "relu-network":
            options["exact"] = exact
        elif name == "transformer":
            options["ffn"] = keyhole.ReluNetworkLearner(exact=exact)
        else:
            raise InvalidArgument(f"--exact is for relu-network and transformer, not for {name}")
    return getattr(keyhole, LEARNERS[name])(**options)


@app.command(epilog="Example: `keyhole demo --width 48`")
def demo(
    width: Annotated[int, typer.Option(min=2, help="Width of the hidden head.")] = 32,
    seed: Seed = 0,
    out: Out = Path("keyhole-demo"),
    as_json: Json = False,
) -> None:
    """Hides a random attention head, recovers it through its answers, shows the result."""
    import numpy as np

    from keyhole.cli.progress import shown
    from keyhole.models.draw import attention
    from keyhole.models.symmetry import distance
    from keyhole.recover import recover as run

    secret = attention(np.random.default_rng([seed, 2]), width, bias=True)
    with shown(not as_json) as progress:
        recovery = run(secret, seed=seed, progress=progress, throw=False)
    if not as_json:
        gap = distance(recovery.model, secret) if recovery.model is not None else float("nan")
        typer.echo(
            f"A head with {width * width + 2 * width + 1:,} parameters was hidden behind a "
            f"function;\nits parameters were found to a relative error of {gap:.1e}.\n"
        )
    finish(recovery, as_json, out)


@app.command(epilog="Example: `keyhole recover mypackage.models:head --width 64 --out run`")
def recover(
    target: Target,
    width: Width = None,
    learner: Annotated[str, typer.Option(help="Which family to assume.")] = "auto",
    exact: Annotated[
        bool | None,
        typer.Option(help="Networks to the last digits, for twice the questions."),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="segment, antisymmetric (transformer); adaptive, convex.")
    ] = None,
    budget: Annotated[int | None, typer.Option(help="Hard limit on questions.")] = None,
    journal: Annotated[
        Path | None, typer.Option(help="Record answers here; run again to continue.")
    ] = None,
    out: Out = None,
    max_length: MaxLength = None,
    max_norm: MaxNorm = None,
    seed: Seed = 0,
    verify: Annotated[bool, typer.Option(help="Compare with fresh answers.")] = True,
    as_json: Json = False,
) -> None:
    """Recovers the model behind TARGET and says whether it is the box."""
    from keyhole.cli.progress import shown
    from keyhole.recover import recover as run

    box = opened(target, width, max_length, max_norm)
    with shown(not as_json) as progress:
        recovery = run(
            box,
            named_learner(learner, exact=exact, method=method),
            budget=budget,
            journal=journal,
            seed=seed,
            verify=verify,
            progress=progress,
            throw=False,
        )
    finish(recovery, as_json, out)


def with_errors(path: Path) -> tuple[Any, Any]:
    """A saved model and its standard errors, where its run recorded them: without them, a
    recovered model is taken for exact to the last digit, which it is not."""
    from keyhole.errors import InvalidArgument
    from keyhole.results import RUN_FILE, Recovery, load

    whole = path.name == "model.safetensors" and (path.parent / RUN_FILE).is_file()
    loaded = load(path.parent if whole else path)
    if not isinstance(loaded, Recovery):
        return loaded, None
    if loaded.model is None:
        raise InvalidArgument(f"the run in {path} ended without a model ({loaded.outcome.name})")
    return loaded.model, loaded.errors


@app.command(epilog="Example: `keyhole verify run/model.safetensors mypackage.models:head`")
def verify(
    model: Annotated[Path, typer.Argument(help="A saved model or the folder of a run.")],
    target: Target,
    width: Width = None,
    queries: Annotated[int | None, typer.Option(help="Fresh questions to ask.")] = None,
    max_length: MaxLength = None,
    max_norm: MaxNorm = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Is the box behind TARGET this model?"""
    from rich.console import Console

    from keyhole.oracles.wrappers.border import Border
    from keyhole.report.terminal import counterexample
    from keyhole.results import plain
    from keyhole.verification.verify import verify as compare

    claimed, errors = with_errors(model)
    box = Border(opened(target, width or getattr(claimed, "width", None), max_length, max_norm))
    verdict = compare(box, claimed, errors=errors, queries=queries, seed=seed)
    if as_json:
        typer.echo(json.dumps(plain(vars(verdict))))
    else:
        console = Console()
        word = "[green]agrees[/]" if verdict.agrees else "[red]differs[/]"
        console.print(f"The box {word}. {verdict.bound}")
        if verdict.counterexample is not None:
            console.print(counterexample(verdict.counterexample))
    raise typer.Exit(OK if verdict.agrees else DIFFERS)


@app.command(epilog="Example: `keyhole check mypackage.models:head --width 64`")
def check(
    target: Target,
    width: Width = None,
    max_length: MaxLength = None,
    max_norm: MaxNorm = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """What can this box do: outputs, lengths, determinism, precision. Asks some fifteen
    questions."""
    from rich.console import Console
    from rich.table import Table

    from keyhole.oracles.wrappers.border import Border
    from keyhole.probes.precision import examine

    found = examine(Border(opened(target, width, max_length, max_norm)), seed)
    if as_json:
        typer.echo(json.dumps(found))
        return
    table = Table.grid(padding=(0, 2))
    for name, value in found.items():
        table.add_row(f"[dim]{name.replace('_', ' ')}[/]", str(value))
    Console().print(table)


app.command(epilog="Example: `keyhole serve run/model.safetensors --decimals 4`")(serve)
app.command(epilog="Example: `keyhole audit run/model.safetensors --out audit`")(audit)


@app.command(epilog="Example: `keyhole learn examples.npz --out run`")
def learn(
    examples: Annotated[Path, typer.Argument(help="An .npz file with `inputs` and `outputs`.")],
    heads: Annotated[int | None, typer.Option(min=1, help="Number of heads, if known.")] = None,
    seed: Seed = 0,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Learns a layer from labelled examples, without asking anything."""
    from keyhole.learn import learn as run
    from keyhole.learners.example_files import read_examples
    from keyhole.learners.examples import FromExamples

    found = read_examples(examples)
    recovery = run(
        found.inputs,
        found.outputs,
        FromExamples(heads=heads),
        seed=seed,
        mask=found.mask,
        throw=False,
    )
    finish(recovery, as_json, out)


@app.command(epilog="Example: `keyhole identifiability run/model.safetensors`")
def identifiability(
    model: Annotated[Path, typer.Argument(help="A saved model or the folder of a run.")],
) -> None:
    """Which parameters of MODEL nobody can know from its answers, however many."""
    from keyhole.errors import InvalidArgument
    from keyhole.models.attention import Attention
    from keyhole.results import Recovery, load
    from keyhole.verification.witness import identifiability as examine

    loaded = load(model)
    found = loaded.model if isinstance(loaded, Recovery) else loaded
    if not isinstance(found, Attention):
        raise InvalidArgument(f"{model} holds a {type(found).__name__}, not attention")
    for sentence in examine(found).sentences():
        typer.echo(sentence)
