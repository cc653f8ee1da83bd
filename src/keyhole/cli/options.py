"""Options that several commands share."""

import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from keyhole.learners.names import LEARNERS

ACCEPTS, HTTP, NAMES = "What the box accepts", "HTTP endpoints", "Inside files and endpoints"
LANGUAGE = "Language models"
MANY = "Many queries, many machines"

Width = Annotated[
    int | None, typer.Option(help="Width of a token, where the target does not tell.")
]
MaxLength = Annotated[int | None, typer.Option(help="Longest sequence the box accepts.")]
MaxNorm = Annotated[float | None, typer.Option(help="Largest token norm the box accepts.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Seed = Annotated[int, typer.Option(min=0, help="The same seed asks the same queries.")]
Learner = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help=f"What to assume of the box: {', '.join(LEARNERS)}.",
        autocompletion=lambda: list(LEARNERS),
    ),
]
Method = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Of learners that have several: keyhole, paper, theorem-4.1 (single-head); adaptive, "
        "convex (low-rank); segment, antisymmetric (transformer).",
    ),
]
Heads = Annotated[int | None, typer.Option(min=1, help="Number of heads, where it is known.")]
Rank = Annotated[int | None, typer.Option(min=1, help="Rank of a score, where it is known.")]
Neurons = Annotated[int | None, typer.Option(min=1, help="Number of neurons, where it is known.")]
Price = Annotated[
    float | None,
    typer.Option(min=0.0, help="Money per million tokens, of a language model's prompts."),
]
Out = Annotated[Path | None, typer.Option(help="Save the run (model, errors, verdict) here.")]
Report = Annotated[
    Path | None, typer.Option("--report", help="Write a report to look at: one HTML file.")
]

# of a box: cli/target.py spreads them over every command that asks one
Low = Annotated[
    float | None, typer.Option(help="Smallest entry of a token.", rich_help_panel=ACCEPTS)
]
High = Annotated[
    float | None, typer.Option(help="Largest entry of a token.", rich_help_panel=ACCEPTS)
]
Vocabulary = Annotated[
    Path | None,
    typer.Option(help="Only these tokens: a .npy file.", rich_help_panel=ACCEPTS),
]
Replicas = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        metavar="TARGET",
        help="A replica of the same box; repeat it for more.",
        rich_help_panel=MANY,
    ),
]
Batch = Annotated[
    int | None,
    typer.Option(min=1, help="Most queries at a time.", rich_help_panel=MANY),
]
Scheduler = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Ask through a Dask cluster, as in tcp://host:8786.",
        rich_help_panel=MANY,
    ),
]
Rate = Annotated[
    float | None, typer.Option(help="Queries per second, at most.", rich_help_panel=HTTP)
]
Concurrency = Annotated[
    int | None, typer.Option(min=1, help="Requests at a time.", rich_help_panel=HTTP)
]
Timeout = Annotated[
    float | None, typer.Option(help="Seconds for one request.", rich_help_panel=HTTP)
]
TokenEnv = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Environment variable that holds the token, if not KEYHOLE_TOKEN.",
        rich_help_panel=HTTP,
    ),
]
PlainToken = Annotated[
    bool | None,
    typer.Option(
        "--plain-token",
        help="Let the token travel unencrypted to another machine.",
        rich_help_panel=HTTP,
    ),
]
Header = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=ENV",
        help="A header of every request, its value in the environment variable ENV; repeat it "
        "for more.",
        rich_help_panel=HTTP,
    ),
]
Request = Annotated[
    str | None,
    typer.Option(
        metavar="JSON",
        help='For an endpoint with a JSON of its own: the message, with "$tokens" where a '
        'batch of sequences goes or "$sequence" for one; @FILE reads it from a file.',
        rich_help_panel=HTTP,
    ),
]
AnswerPath = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Where the numbers are in its reply, as in `result.0.scores` or "
        "`predictions.*.score` (`*` takes every entry).",
        rich_help_panel=HTTP,
    ),
]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="NAME", help="Of several at an endpoint.", rich_help_panel=NAMES
    ),
]
Input = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Which input takes the tokens.", rich_help_panel=NAMES),
]
Output = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Which output answers.", rich_help_panel=NAMES),
]
Tokens = Annotated[
    int | None,
    typer.Option(
        min=2,
        metavar="N",
        help="A language model: queries are numbers of N tokens. `--language-model` where it "
        "tells N itself.",
        rich_help_panel=LANGUAGE,
    ),
]
LanguageModel = Annotated[
    bool | None,
    typer.Option(
        "--language-model",
        help="TARGET takes the numbers of tokens: a callable, or a server with OpenAI's API "
        "or llama.cpp's own.",
        rich_help_panel=LANGUAGE,
    ),
]
Top = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Most log-probabilities to ask a server for.",
        rich_help_panel=LANGUAGE,
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        help="State dict or safetensors file to load into a torch module.",
        rich_help_panel=NAMES,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="FORMAT",
        help="Number format a torch module computes in, as in float64.",
        rich_help_panel=NAMES,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Where a torch module computes, as in cuda:0.",
        rich_help_panel=NAMES,
    ),
]
Adapter = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="How to call a torch module: `package.module:function` of module and tokens.",
        rich_help_panel=NAMES,
    ),
]

ADDRESS = re.compile(r"(https?://)(?:[^/?#]*@)?([^?#]*).*", re.IGNORECASE | re.DOTALL)
REQUEST = "--request"


def typed(*more: str, hide: bool = True) -> str:
    """The command under way as it can be typed again, and `more` words. `hide` leaves out what a
    file must not hold."""
    words = [*sys.argv[1:], *more]
    return shlex.join(["keyhole", *(without_secrets(words) if hide else words)])


def without_secrets(words: list[str]) -> list[str]:
    """A command without the users, passwords and queries of its addresses, and without messages
    to an endpoint: runs and reports hold it."""
    shown = [ADDRESS.sub(r"\1\2", word) for word in words]
    for place, (before, word) in enumerate(zip(["", *words], words, strict=False)):
        if before == REQUEST and not word.startswith("@"):  # a file of that name tells nothing
            shown[place] = "…"
        elif word.startswith(f"{REQUEST}=") and not word.startswith(f"{REQUEST}=@"):
            shown[place] = f"{REQUEST}=…"
    return shown
