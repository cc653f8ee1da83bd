"""The commands. Heavy imports wait until a command runs."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from keyhole.cli.audit import audit
from keyhole.cli.bench import bench
from keyhole.cli.diff import diff
from keyhole.cli.doctor import doctor
from keyhole.cli.ending import check_places, finish, how_to_resume
from keyhole.cli.layers import layers
from keyhole.cli.main import app
from keyhole.cli.options import (
    Heads,
    Json,
    Learner,
    Method,
    Neurons,
    Out,
    Price,
    Rank,
    Report,
    Seed,
)
from keyhole.cli.plan import plan
from keyhole.cli.report import report
from keyhole.cli.serve import serve
from keyhole.cli.sign import sign
from keyhole.cli.target import Box, asks_a_box
from keyhole.cli.two_boxes import saved_claim
from keyhole.cli.verify import FRESH, verify
from keyhole.cli.watch import watch


def named_learner(name: str, exact: bool | None = None, **options: Any) -> Any:
    """The learner behind a command-line name, with the options that were given."""
    from keyhole.learners.names import make_learner

    given = {option: value for option, value in options.items() if value is not None}
    if exact is not None:
        network = make_learner("relu-network", exact=exact)
        given |= {"ffn": network} if name == "transformer" else {"exact": exact}
    return make_learner(name, **given)


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
    "`keyhole recover --target http://a:8000 --target http://b:8000` · "
    "`keyhole recover https://host/score --width 8 --like mypackage.models:make_model`"
)
@asks_a_box
def recover(
    box: Box,
    learner: Learner = "auto",
    like: Annotated[
        str | None,
        typer.Option(
            metavar="TEMPLATE",
            help="The architecture: `package.module:make_model`, a torch module or what makes one "
            "(imports that code). Its weights are recovered; those it has are ignored.",
        ),
    ] = None,
    exact: Annotated[
        bool | None,
        typer.Option(help="Networks to the last digits, for twice the queries."),
    ] = None,
    method: Method = None,
    heads: Heads = None,
    rank: Rank = None,
    neurons: Neurons = None,
    score_bound: Annotated[
        float | None,
        typer.Option(help="Largest entry of a score, for the published single-head algorithm."),
    ] = None,
    budget: Annotated[int | None, typer.Option(help="Hard limit on queries.")] = None,
    journal: Annotated[
        Path | None, typer.Option(help="Record answers here; run again to continue.")
    ] = None,
    out: Out = None,
    report: Report = None,
    seed: Seed = 0,
    verify: Annotated[bool, typer.Option(help="Compare with fresh answers.")] = True,
    fresh: Annotated[
        int,
        typer.Option(min=1, help=FRESH),
    ] = 59,
    price: Price = None,
    as_json: Json = False,
) -> None:
    """Recovers the model behind TARGET and says whether it is the box."""
    from keyhole.cli.interrupt import Stop
    from keyhole.learners.names import public_name

    public_name(learner)  # a slip of the pen costs no import
    from keyhole.cli.progress import shown
    from keyhole.recovery import recover as run

    check_places(out, report)
    if box.speaks and learner == "auto":
        learner = "output-layer"
    template = None if like is None else load_template(like, learner)
    with (
        box.opened(journal=journal) as oracle,
        shown(not as_json) as progress,
        Stop(progress) as stop,
    ):
        recovery = run(
            oracle,
            template
            or named_learner(
                learner,
                exact,
                method=method,
                heads=heads,
                rank=rank,
                neurons=neurons,
                score_bound=score_bound,
            ),
            budget=budget,
            journal=journal,
            seed=seed,
            verify=verify,
            fresh=fresh,
            progress=stop,
            throw=False,
        )
    if price is not None:
        money = recovery.ledger.money(price)
        recovery = replace(recovery, details={**recovery.details, "money": money})
    if recovery.outcome.name == "REJECTED" and (hint := name_parts_to_open(box.target)):
        recovery = replace(recovery, notes=(*recovery.notes, hint))
    resume = how_to_resume(recovery, journal)
    if resume is not None:
        typer.echo(resume, err=True)
    finish(recovery, as_json, out, report)


def load_template(name: str, learner: str) -> Any:
    """The learner for the template behind a name: a torch module, or what makes one."""
    from keyhole.errors import InvalidArgument
    from keyhole.learners.template import FromTemplate
    from keyhole.oracles.open import load_named
    from keyhole.targets import check_target

    if learner != "auto":
        raise InvalidArgument(f"--like names the architecture: leave out --learner {learner}")
    check_target(name)
    made = load_named(name)
    if isinstance(made, type) or not hasattr(made, "named_parameters"):
        if not callable(made):
            raise InvalidArgument(f"{name} is neither a torch module nor a function that makes one")
        try:
            made = made()
        except Exception as error:  # the user's own code, which may raise anything
            raise InvalidArgument(f"{name}() raised {type(error).__name__}: {error}") from error
    return FromTemplate(made)


def name_parts_to_open(target: str | None) -> str:
    """For a whole model that was refused: parts of it that are attention."""
    from keyhole.targets import FOLDER, weight_names

    if target is None or not target.startswith(FOLDER) or "#" in target:
        return ""
    words = [name.split(".") for name in weight_names(Path(target.removeprefix(FOLDER)))]
    known = ("self", "attn", "self_attn", "attention")
    ends = [max((k for k, w in enumerate(one) if w in known), default=-1) for one in words]
    found = [".".join(one[: k + 1]) for one, k in zip(words, ends, strict=True) if k >= 0]
    if not found:
        return ""
    return f"This is a whole model. A part of it is asked as {target}#{found[0]}."


app.command(
    epilog="Examples: `keyhole verify run/model.safetensors mypackage.models:head` · "
    "`keyhole verify run https://host/v2/models/head --seed random --junit verdict.xml` · "
    "`keyhole verify hf:my-embedder https://host/v1/embeddings --evidence verdict.evidence` · "
    "`keyhole verify hf:my-gpt2 https://host --language-model`"
)(verify)
app.command(
    epilog="Examples: `keyhole sign run --out model.keyhole` · "
    "`keyhole sign https://host/embed --out model.keyhole`"
)(sign)
app.command(
    epilog="Examples: `keyhole watch run mypackage.models:head --state watch.json` · "
    "`keyhole watch hf:my-embedder https://host/embed --state watch.json --report watch.html`"
)(watch)


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
    """What can this box do: outputs, lengths, determinism, precision, which family it looks like,
    whether `recover` has a learner for it. Asks some thirty queries."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from keyhole.measurement.language_model import examine_language_model
    from keyhole.measurement.noise import examine
    from keyhole.oracles.wrappers.validate import Validator
    from keyhole.results import plain

    with box.opened() as oracle:
        if box.speaks:
            found = plain(examine_language_model(oracle, seed))
        else:
            found = plain(examine(Validator(oracle), seed) | check_family(oracle, seed))
    if as_json:
        typer.echo(json.dumps(found))
        return
    table = Table.grid(padding=(0, 2))
    for name, value in found.items():
        table.add_row(Text(name.replace("_", " "), style="dim"), Text(str(value)))
    Console().print(table)


def check_family(oracle: Any, seed: int) -> dict[str, Any]:
    """The family that recover will start from, by the same queries, or why it will refuse."""
    from keyhole.arrays import random_stream
    from keyhole.errors import KeyholeError
    from keyhole.learners.auto import judge_family
    from keyhole.measured import look_up
    from keyhole.measurement.family import examine_family
    from keyhole.oracles.wrappers.count import QueryCounter
    from keyhole.oracles.wrappers.validate import Validator

    domain = oracle.spec.domain
    if domain.vocabulary is not None or domain.radius <= 0:
        return {"family": "single head (tokens are given: the smallest family is tried)"}
    counter, rng = QueryCounter(Validator(oracle)), random_stream(seed, "learning")
    try:
        facts = examine_family(counter, rng.spawn(1)[0])
    except KeyholeError as error:
        return {"family": None, "recover": f"no: {error}"}
    family, refusal = judge_family(counter, facts, rng)
    verdict = f"will try: {family}" if family else f"no: {refusal}"
    found = {"family": family or None, "found": " ".join(facts.sentences), "recover": verdict}
    if family and (places := look_up(family, facts.noise.format, oracle.spec.width)):
        found["measured"] = "; ".join(places)
    return found | {"asked": counter.paid}


app.command(
    epilog="Examples: `keyhole doctor hf:my-bert hf:my-bert --pooling mean` · "
    "`keyhole doctor hf:all-MiniLM-L6-v2 https://host/v1/embeddings --report visit.html`"
)(doctor)
app.command(epilog="Example: `keyhole diff hf:my-bert hf:my-bert`")(diff)
app.command(epilog="Example: `keyhole serve run/model.safetensors --decimals 4`")(serve)
app.command(epilog="Example: `keyhole plan mypackage.models:head --width 64 --rank 8`")(plan)
app.command(
    epilog="Example: `keyhole layers hf:my-bert --part attention.self --learner multi-head "
    "--dtype float64 --out runs`"
)(layers)
app.command(epilog="Example: `keyhole report run --out report.html`")(report)
app.command(epilog="Example: `keyhole bench single-head --quick --seconds 1`")(bench)
app.command(
    epilog="Examples: `keyhole audit run/model.safetensors --plot audit.png` · "
    "`keyhole audit http://localhost:8080 --price 0.5 --report audit.html` · "
    "`keyhole audit mypackage.models:logits --language-model`"
)(audit)


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

    claimed = saved_claim(model)
    found = getattr(claimed, "model", claimed)
    if not isinstance(found, Attention):
        raise InvalidArgument(f"{model} holds a {type(found).__name__}, not attention")
    known = examine(found)
    if as_json:
        record = {"identifiable": known.identifiable, **asdict(known)}
        typer.echo(json.dumps(plain({**record, "sentences": known.sentences()})))
        return
    for sentence in known.sentences():
        typer.echo(sentence)
