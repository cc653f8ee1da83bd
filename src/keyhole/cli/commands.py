"""The commands. Heavy imports wait until a command runs."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from keyhole.cli.audit import audit
from keyhole.cli.bench import bench
from keyhole.cli.ending import check_places, finish, how_to_resume
from keyhole.cli.main import DIFFERS, OK, app
from keyhole.cli.options import Json, Out, Report, Seed
from keyhole.cli.plan import plan
from keyhole.cli.report import report
from keyhole.cli.serve import serve
from keyhole.cli.target import Box, asks_a_box

LEARNERS = {  # command-line name -> public name
    "auto": "Auto",
    "single-head": "SingleHead",
    "low-rank": "LowRank",
    "multi-head": "MultiHead",
    "label-only": "LabelOnly",
    "relu-network": "ReluNetworkLearner",
    "mlp": "MlpLearner",
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
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Hides a random attention head, recovers it through its answers, shows the result."""
    import numpy as np

    from keyhole.cli.progress import shown
    from keyhole.models.canonical import distance
    from keyhole.models.random import attention
    from keyhole.recovery import recover as run

    if report is None and out is not None:
        report = out / "report.html"
    check_places(out, report)
    secret = attention(np.random.default_rng([seed, 2]), width, bias=True)
    with shown(not as_json) as progress:
        recovery = run(secret, seed=seed, progress=progress, throw=False)
    if not as_json:
        gap = distance(recovery.model, secret) if recovery.model is not None else float("nan")
        typer.echo(
            f"A head with {width * width + 2 * width + 1:,} parameters was hidden behind a "
            f"function;\nits parameters were found to a relative error of {gap:.1e}.\n"
        )
    finish(recovery, as_json, out, report)


@app.command(
    epilog="Examples: `keyhole recover mypackage.models:head --width 64 --report run.html` · "
    "`keyhole recover https://host/v2/models/head --rate 50 --journal run.journal` · "
    "`keyhole recover --target http://a:8000 --target http://b:8000`"
)
@asks_a_box
def recover(
    box: Box,
    learner: Annotated[
        str,
        typer.Option(help="Which family to assume.", autocompletion=lambda: list(LEARNERS)),
    ] = "auto",
    exact: Annotated[
        bool | None,
        typer.Option(help="Networks to the last digits, for twice the queries."),
    ] = None,
    method: Annotated[
        str | None, typer.Option(help="segment, antisymmetric (transformer); adaptive, convex.")
    ] = None,
    budget: Annotated[int | None, typer.Option(help="Hard limit on queries.")] = None,
    journal: Annotated[
        Path | None, typer.Option(help="Record answers here; run again to continue.")
    ] = None,
    out: Out = None,
    report: Report = None,
    seed: Seed = 0,
    verify: Annotated[bool, typer.Option(help="Compare with fresh answers.")] = True,
    as_json: Json = False,
) -> None:
    """Recovers the model behind TARGET and says whether it is the box."""
    from keyhole.cli.interrupt import Stop
    from keyhole.cli.progress import shown
    from keyhole.recovery import recover as run

    check_places(out, report)
    with box.opened() as oracle, shown(not as_json) as progress, Stop(progress) as stop:
        recovery = run(
            oracle,
            named_learner(learner, exact=exact, method=method),
            budget=budget,
            journal=journal,
            seed=seed,
            verify=verify,
            progress=stop,
            throw=False,
        )
    resume = how_to_resume(recovery, journal)
    if resume is not None:
        typer.echo(resume, err=True)
    finish(recovery, as_json, out, report)


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


@app.command(
    epilog="Examples: `keyhole verify run/model.safetensors mypackage.models:head` · "
    "`keyhole verify run https://host/v2/models/head --token-env HOST_TOKEN`"
)
@asks_a_box
def verify(
    model: Annotated[Path, typer.Argument(help="A saved model or the folder of a run.")],
    box: Box,
    queries: Annotated[int | None, typer.Option(help="Fresh queries to ask.")] = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Is the box behind TARGET this model?"""
    from rich.console import Console
    from rich.text import Text

    from keyhole.oracles.wrappers.validate import Validator
    from keyhole.report.terminal import counterexample
    from keyhole.results import plain
    from keyhole.verification.verify import verify as compare

    claimed, errors = with_errors(model)
    with box.opened(getattr(claimed, "width", None)) as oracle:
        verdict = compare(Validator(oracle), claimed, errors=errors, queries=queries, seed=seed)
    if as_json:
        typer.echo(json.dumps(plain(vars(verdict))))
    else:
        console = Console()
        word = Text(verdict.word, style="green" if verdict.agrees else "red")
        console.print(Text.assemble("The box ", word, f". {verdict.bound}"))
        if verdict.counterexample is not None:
            console.print(counterexample(verdict.counterexample))
    raise typer.Exit(OK if verdict.agrees else DIFFERS)


@app.command(
    epilog="Examples: `keyhole check mypackage.models:head --width 64` · "
    '`keyhole check https://host/score --width 64 --request \'{"x": "$tokens"}\' --answer y`'
)
@asks_a_box
def check(
    box: Box,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """What can this box do: outputs, lengths, determinism, precision. Asks some fifteen
    queries."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from keyhole.measurement.noise import examine
    from keyhole.oracles.wrappers.validate import Validator
    from keyhole.results import plain

    with box.opened() as oracle:
        found = plain(examine(Validator(oracle), seed))
    if as_json:
        typer.echo(json.dumps(found))
        return
    table = Table.grid(padding=(0, 2))
    for name, value in found.items():
        table.add_row(Text(name.replace("_", " "), style="dim"), Text(str(value)))
    Console().print(table)


app.command(epilog="Example: `keyhole serve run/model.safetensors --decimals 4`")(serve)
app.command(epilog="Example: `keyhole plan mypackage.models:head --width 64 --rank 8`")(plan)
app.command(epilog="Example: `keyhole report run --out report.html`")(report)
app.command(epilog="Example: `keyhole bench --heads 3 --seconds 1`")(bench)
app.command(epilog="Example: `keyhole audit run/model.safetensors --plot audit.png`")(audit)


@app.command(epilog="Example: `keyhole learn examples.npz --out run`")
def learn(
    examples: Annotated[Path, typer.Argument(help="An .npz file with `inputs` and `outputs`.")],
    heads: Annotated[int | None, typer.Option(min=1, help="Number of heads, if known.")] = None,
    most_heads: Annotated[int, typer.Option(min=1, help="Most heads tried otherwise.")] = 8,
    bias: Annotated[bool, typer.Option("--bias", help="Fit key biases and an offset too.")] = False,
    noise: Annotated[
        float | None, typer.Option(help="Error of the outputs over their size, if known; 0: exact.")
    ] = None,
    method: Annotated[str, typer.Option(help="varpro, or the paper's own: sculpting.")] = "varpro",
    seconds: Annotated[float, typer.Option(help="Longest search.")] = 60.0,
    restarts: Annotated[int, typer.Option(min=1, help="Most starts of the search.")] = 100_000,
    workers: Annotated[int, typer.Option(min=1, help="Processes that share the starts.")] = 1,
    seed: Annotated[
        int, typer.Option(min=0, help="The same seed starts from the same places.")
    ] = 0,
    out: Out = None,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Learns a layer from labelled examples, without asking anything."""
    from keyhole.cli.progress import searching
    from keyhole.learners.examples import FromExamples, read_examples
    from keyhole.recovery import learn as run

    check_places(out, report)
    found = read_examples(examples)
    learner = FromExamples(
        heads, method, restarts, seconds, workers, most_heads, bias=bias, noise=noise
    )
    with searching(not as_json) as progress:
        recovery = run(
            found.inputs,
            found.outputs,
            learner,
            seed=seed,
            mask=found.mask,
            progress=progress,
            throw=False,
        )
    finish(recovery, as_json, out, report)


@app.command(epilog="Example: `keyhole identifiability run/model.safetensors`")
def identifiability(
    model: Annotated[Path, typer.Argument(help="A saved model or the folder of a run.")],
    as_json: Json = False,
) -> None:
    """Which parameters of MODEL nobody can know from its answers, however many."""
    from keyhole.errors import InvalidArgument
    from keyhole.models.attention import Attention
    from keyhole.results import plain
    from keyhole.verification.identifiability import identifiability as examine

    found, _ = with_errors(model)
    if not isinstance(found, Attention):
        raise InvalidArgument(f"{model} holds a {type(found).__name__}, not attention")
    known = examine(found)
    if as_json:
        record = {"identifiable": known.identifiable, **asdict(known)}
        typer.echo(json.dumps(plain({**record, "sentences": known.sentences()})))
        return
    for sentence in known.sentences():
        typer.echo(sentence)
