"""`keyhole doctor`: what is wrong with a served model, beside the one that was signed off."""

import contextlib
import json
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from keyhole.cli.ending import check_places
from keyhole.cli.main import Exit
from keyhole.cli.options import HTTP, Json, ModelName, Report, Seed, Timeout, TokenEnv

if TYPE_CHECKING:
    from keyhole.diagnosis.result import Diagnosis


def doctor(
    reference: Annotated[
        str,
        typer.Argument(
            help="The model that was signed off: `hf:FOLDER` (transformers or "
            "sentence-transformers), or `package.module:attribute`, a torch module."
        ),
    ],
    suspect: Annotated[
        str,
        typer.Argument(
            help="What is served: the address of an embedding endpoint, `hf:FOLDER`, or "
            "`package.module:attribute`, a function (tokens, attention_mask)."
        ),
    ],
    pooling: Annotated[
        str | None,
        typer.Option(help="mean, cls, last, max, sqrt: where the folder does not state it."),
    ] = None,
    normalize: Annotated[
        bool | None, typer.Option(help="Answers of length one, where the folder does not state it.")
    ] = None,
    budget: Annotated[int, typer.Option(min=1, help="Rows that may be asked.")] = 200,
    dialect: Annotated[
        str | None,
        typer.Option(
            help="Of an embedding endpoint: openai, tei or predict.", rich_help_panel=HTTP
        ),
    ] = None,
    request: Annotated[
        str | None,
        typer.Option(help='JSON with "$tokens" or "$texts" for the rows.', rich_help_panel=HTTP),
    ] = None,
    answer: Annotated[
        str, typer.Option(help="Path to the vectors in a reply.", rich_help_panel=HTTP)
    ] = "",
    model_name: ModelName = None,
    token_env: TokenEnv = None,
    timeout: Timeout = None,
    report: Report = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Names what is wrong with SUSPECT, which should answer as REFERENCE does."""
    from keyhole.targets import check_target

    check_places(None, report)
    for name in (reference, suspect):  # a slip of the pen costs no import
        check_target(name)
    from keyhole.cli.progress import shown
    from keyhole.diagnosis.diagnosis import doctor as examine

    target: Any = suspect
    if re.match(r"https?://", suspect, re.IGNORECASE):
        target = _open_url(suspect, dialect, request, answer, model_name, token_env, timeout)
    opened = target if hasattr(target, "close") else contextlib.nullcontext()
    with opened, shown(not as_json) as progress:
        diagnosis = examine(
            reference,
            target,
            pooling=pooling,
            normalize=normalize,
            budget=budget,
            seed=seed,
            progress=progress,
        )
    if report is not None:
        from keyhole.diagnosis.page import write_page

        write_page(diagnosis, reference, suspect, report)
    if as_json:
        typer.echo(json.dumps(diagnosis.to_record()))
    else:
        show(diagnosis)
    raise typer.Exit(Exit.OK if diagnosis.same else Exit.DIFFERS)


def _open_url(
    url: str,
    dialect: str | None,
    request: str | None,
    answer: str,
    model: str | None,
    token_env: str | None,
    timeout: float | None,
) -> Any:
    from keyhole.cli.target import read_request
    from keyhole.oracles.embeddings import open_embedding_endpoint

    access: dict[str, Any] = {"token_env": token_env, "timeout": timeout}
    return open_embedding_endpoint(
        url,
        dialect=dialect,
        request=None if request is None else read_request(request),
        answer=answer,
        model=model,
        **{name: value for name, value in access.items() if value is not None},
    )


def show(diagnosis: "Diagnosis") -> None:
    """The diagnosis as a person reads it: the sentence, causes, evidence, what was ranked below."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    style = "green" if diagnosis.same else "red"
    word = "HEALTHY" if diagnosis.same else "DIFFERENT"
    console.print(Text.assemble((f"{word}: ", style), str(diagnosis)))
    if not diagnosis.same:
        for item in diagnosis.evidence[:1]:
            console.print(
                Text(
                    f"\nEvidence  {item.purpose}: reference and suspect differ by "
                    f"{item.residual:.0e} of the answer\n"
                )
            )
        table = Table("What would explain it", "left over", "", box=None, pad_edge=False)
        unchanged = [row for row in diagnosis.ranking[4:] if not row.causes][:1]
        for row in (*diagnosis.ranking[:4], *unchanged):
            explains = "explains every row" if row.left_over <= diagnosis.tolerance else ""
            table.add_row(Text(str(row)), f"{row.left_over:.0e}", explains)
        console.print(table)
        for cause in diagnosis.causes:
            console.print(Text(f"Do    {cause.advice}"))
    for note in diagnosis.notes:
        console.print(Text(f"Note  {note}"))
