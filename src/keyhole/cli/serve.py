"""`keyhole serve`: a model behind the Open Inference Protocol, for exercises and tests."""

import json
from typing import Annotated

import typer

from keyhole.cli.options import Json


def serve(
    target: Annotated[str, typer.Argument(metavar="MODEL", help="What `recover` takes as TARGET.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    name: Annotated[str | None, typer.Option(help="Name in the URL; else the file's.")] = None,
    width: Annotated[int | None, typer.Option(help="Where the model does not tell.")] = None,
    decimals: Annotated[int | None, typer.Option(help="Round answers to decimals.")] = None,
    bits: Annotated[int | None, typer.Option(help="Round answers to significant bits.")] = None,
    noise: Annotated[float, typer.Option(min=0, help="Standard deviation of added noise.")] = 0.0,
    labels: Annotated[bool, typer.Option("--labels", help="Answer with labels only.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the noise.")] = 0,
    max_batch: Annotated[int, typer.Option(min=1, help="Queries per request.")] = 4096,
    max_length: Annotated[int, typer.Option(min=1, help="Tokens per sequence.")] = 4096,
    max_body: Annotated[int, typer.Option(min=1, help="Bytes per request.")] = 64 * 2**20,
    token_env: Annotated[
        str, typer.Option(help="Environment variable that holds the token, if one is wanted.")
    ] = "KEYHOLE_SERVE_TOKEN",
    public: Annotated[
        bool, typer.Option("--public", help="Let other machines in without a token.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Puts a model behind the Open Inference Protocol (for exercises and tests)."""
    from keyhole.serving.inference import Limits
    from keyhole.serving.server import Bind, Blur, run, service

    blur = Blur(decimals, bits, noise, labels, seed)
    limits = Limits(max_body, max_batch, max_length)
    bind = Bind(host, port, token_env, public)
    bind.token()  # says what is missing before the model is loaded
    served = service(target, name, width=width, blur=blur, limits=limits)

    def told(url: str) -> None:
        if as_json:
            typer.echo(json.dumps({"url": url, "model": served.name}))
        else:
            typer.echo(f"serving {url} (stop with Ctrl-C)", err=True)

    run(served, bind, told)
