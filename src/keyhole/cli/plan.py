"""`keyhole plan`: what a recovery will cost, before paying for it."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyhole.cli.options import Heads, Json, Neurons, Rank, Seed
from keyhole.cli.target import Box, asks_a_box

if TYPE_CHECKING:
    from keyhole.measured import Price
    from keyhole.planning import CostEstimate, Survey
SHORT = 24  # letters of an outcome; what is longer is a sentence and goes below the table


@asks_a_box
def plan(
    box: Box,
    outputs: Annotated[
        int | None, typer.Option(min=1, help="Numbers in an answer, without a target.")
    ] = None,
    heads: Heads = None,
    rank: Rank = None,
    neurons: Neurons = None,
    rehearse: Annotated[
        bool, typer.Option(help="Measure the expected error on a small random model.")
    ] = True,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """What recovery will cost: queries, time, computing and expected error, for each learner.

    TARGET is asked some forty queries; without it, --width alone tells the queries."""
    from keyhole.errors import InvalidArgument
    from keyhole.oracles.base import Domain, Spec
    from keyhole.oracles.noise import NoiseModel
    from keyhole.planning import Size, Survey, survey
    from keyhole.planning import plan as estimate

    if box.target is not None or box.replicas:
        with box.opened() as oracle:
            known = survey(oracle, seed)
    elif box.width is not None:
        spec = Spec(box.width, outputs, Domain(box.max_length, box.max_norm))
        known = Survey(spec, NoiseModel(), "taken for float64", None)
    else:
        raise InvalidArgument("name a TARGET, or give --width")
    found = estimate(known, Size(heads, rank, neurons), seed=seed, rehearse=rehearse)
    if as_json:
        typer.echo(json.dumps(record(known, found)))
        return
    from rich.console import Console

    console = Console()
    console.print(table(found))
    refusals = dict.fromkeys(line.rehearsal for line in found if len(line.rehearsal) >= SHORT)
    for sentence in (
        *(f"¹ {text}." for text in refusals),
        *(f"{line.learner}: {dearest(line.measured)}" for line in found if line.measured),
        *sentences(
            known,
            any(line.error is not None for line in found),
            {line.learner: line.depends for line in found if line.queries is None and line.depends},
        ),
    ):
        console.print(sentence, style="dim", markup=False, highlight=False)


def record(known: "Survey", found: "list[CostEstimate]") -> dict[str, Any]:
    from dataclasses import asdict

    from keyhole.results import plain

    return {
        "width": known.spec.width,
        "outputs": known.spec.outputs,
        "kind": known.kind or None,
        "number_format": known.format,
        "precision": plain(vars(known.precision)),
        "seconds_per_call": known.latency,
        "seconds_per_query": known.each,
        "asked": known.asked,
        "learners": [plain(asdict(line)) for line in found],
    }


def table(found: "list[CostEstimate]") -> Any:
    from rich.table import Table

    grid = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("learner", "assumes"):
        grid.add_column(name)
    for name in ("queries", "the box's time", "computing", "expected error"):
        grid.add_column(name, justify="right")
    for line in found:
        grid.add_row(
            f"[bold]{line.learner}[/]",
            line.assumes,
            line.depends if line.queries is None else f"{line.queries:,}",
            duration(line.seconds),
            computing(line),
            expected(line),
        )
    return grid


def computing(line: "CostEstimate") -> str:
    return "not measured" if line.measured is None else duration(line.measured.seconds)


def expected(line: "CostEstimate") -> str:
    if line.error is not None:
        return f"{line.error:.0e}"
    return line.rehearsal.replace("_", " ").lower() if len(line.rehearsal) < SHORT else "none: ¹"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "not known"
    if seconds < 1:
        return "below 1 s"
    for size, unit in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.0f} s"


def dearest(price: "Price") -> str:
    """How far boxes of one family are apart."""
    return (
        f"layers of this family, format and width took up to {price.most_queries:,} queries and "
        f"{duration(price.most_seconds)} of computing on one core (docs/results/map.md)."
    )


def sentences(known: "Survey", rehearsed: bool, unknown: dict[str, str]) -> list[str]:
    """Where the figures come from."""
    from keyhole.measurement.families import Kind

    lines = []
    if known.asked and known.kind is not None:
        kinds = {
            Kind.ATTENTION: "single tokens act linearly: attention",
            Kind.NETWORK: "single tokens bend, the rest does not matter: a network",
            Kind.SMOOTH_NETWORK: "single tokens act smoothly: a network with GELU or the like",
            Kind.LAYER: "single tokens bend, and the rest matters: attention and a network",
            Kind.LABELS: "every answer is a label",
            Kind.POSITIONS: "the places of tokens matter: attention with positions",
            Kind.BLOCK: f"huge tokens act as behind a norm: {known.family}",
        }
        kind = kinds[known.kind]
        domain = known.spec.domain
        if domain.vocabulary is not None or domain.radius <= 0:
            kind = "tokens around zero cannot be asked, taken for attention"
        lines.append(f"{known.asked} queries were asked: {kind}; answers in {known.format}.")
        if known.latency is not None and known.each is not None:
            lines.append(
                f"Time is the box's: {1e3 * known.latency:.3g} ms a call and "
                f"{1e3 * known.each:.3g} ms a query, measured now."
            )
    lines.append("Queries are those to learn; 59 more verify the model (--fresh of recover).")
    if known.latency is None:
        lines.append("Time is not known: no box was asked. Name a TARGET to have it measured.")
    elif unknown:
        lines.append(
            "Not known: "
            + "; ".join(f"{name}: {why}" for name, why in unknown.items())
            + ". Queries and time follow from that."
        )
    if rehearsed:
        lines.append(
            "Expected error: measured on a small random model of the family, behind answers as "
            "exact as these; yours may be better or worse conditioned."
        )
    return lines
