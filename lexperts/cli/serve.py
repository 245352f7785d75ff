"""`lexperts keyphrases serve`: an HTTP server with a keyphrase model."""

from typing import Annotated, Any

import typer

from run_tools.servers import OPTIONS, bind, run_server

from .common import Device, Dtype, TrustRemoteCode

DEFAULTS: dict[str, Any] = {name: default for name, (default, _) in OPTIONS.items()}


def about(name: str, least: int | None = 1) -> Any:
    """The help and the least value of an option that the server of lexperts-lite has, too."""
    return typer.Option(min=least, help=OPTIONS[name][1])


def serve(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help="Token classifier; by default lexperts-seke-minilm.")] = None,
    host: Annotated[str, about("host", None)] = DEFAULTS["host"],
    port: Annotated[int, typer.Option(min=0, max=65535, help=OPTIONS["port"][1])] = DEFAULTS["port"],
    batch_size: Annotated[int, about("batch_size")] = DEFAULTS["batch_size"],
    max_wait_ms: Annotated[float, about("max_wait_ms", 0)] = DEFAULTS["max_wait_ms"],
    max_queue: Annotated[int, about("max_queue")] = DEFAULTS["max_queue"],
    max_tokens: Annotated[int, about("max_tokens")] = DEFAULTS["max_tokens"],
    max_candidates: Annotated[int, about("max_candidates")] = DEFAULTS["max_candidates"],
    max_body_bytes: Annotated[int, about("max_body_bytes")] = DEFAULTS["max_body_bytes"],
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    dtype: Dtype = "float32",
):
    """Serve keyphrases over HTTP: POST /keyphrases, with /docs, /healthz and /metrics. Stops gracefully on SIGTERM.

    \b
    Example:
      lexperts keyphrases serve --port 8000
      curl localhost:8000/keyphrases -H 'Content-Type: application/json' -d '{"inputs": "Graph cuts solve problems."}'
    """
    from keyphrase_tools.loading import open_extractor
    from keyphrase_tools.serving import create_app
    from run_tools.processes import prepare_process

    listener = bind(host, port)
    prepare_process()
    extract = open_extractor(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    limits = {name: context.params[name] for name in OPTIONS if name not in ("host", "port")}
    run_server(create_app(extract, **limits), listener)
