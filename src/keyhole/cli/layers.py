"""`keyhole layers`: a whole transformers model, block by block."""

import json
from pathlib import Path
from typing import Annotated

import typer

from keyhole.cli.main import Exit
from keyhole.cli.options import Dtype, Json, Learner, Seed


def layers(
    target: Annotated[str, typer.Argument(help="`hf:FOLDER`, a local transformers model.")],
    out: Annotated[Path, typer.Option(help="Keep runs, journals and reports here.")],
    part: Annotated[
        str, typer.Option(help="The same part of each block, as in attention.self.")
    ] = "",
    learner: Learner = "block",
    dtype: Dtype = None,
    processes: Annotated[int, typer.Option(min=1, help="Blocks at a time.")] = 1,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Recovers every block of a model in a folder; typed again, it continues where it was."""
    from keyhole.cli.progress import shown
    from keyhole.layers import predicts, recover_layers
    from keyhole.results import Recovery

    done = 0

    def tell(name: str, run: Recovery) -> None:
        nonlocal done
        done += 1
        if not as_json:
            typer.echo(f"{done}. {name}: {run}", err=True)

    with shown(not as_json) as asking:
        found = recover_layers(
            target,
            out,
            part=part,
            learner=learner,
            dtype=dtype,
            processes=processes,
            seed=seed,
            progress=tell,
            asking=asking,
        )
    if as_json:
        parts = [
            {
                "part": name,
                "outcome": run.outcome.name,
                "queries": run.ledger.paid,
                "predicts": run.details.get("predicts"),
            }
            for name, run in zip(found.names, found.runs, strict=True)
        ]
        moved = None if found.agreement is None else vars(found.agreement)
        answer = {"parts": parts, "queries": found.paid, "agreement": moved, "out": str(out)}
        typer.echo(json.dumps(answer))
    else:
        count = sum(run.outcome.name == "RECOVERED" for run in found.runs)
        predicted = sum(predicts(run) for run in found.runs)
        more = f", {predicted} predicted," if predicted else ""
        if found.agreement is not None:
            typer.echo(str(found.agreement))
        typer.echo(
            f"{count} of {len(found.runs)} parts recovered{more} with {found.paid:,} queries: "
            f"open {out / 'index.html'} in a browser"
        )
    raise typer.Exit(Exit.OK if found.complete else Exit.DIFFERS)
