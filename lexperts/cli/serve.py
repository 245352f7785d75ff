"""`lexperts keyphrases serve`: an HTTP server with a keyphrase model."""

from typing import Annotated, Any

import typer

from run_tools.servers import SERVER_OPTIONS, KeyphraseServer, bind, run_server

from .common import Debug, Device, Dtype, TrustRemoteCode, user_errors
from .file_options import check_local


def about(name: str) -> Any:
    """The limits and the help of an option that the server of lexperts-lite has, too."""
    one = SERVER_OPTIONS[name]
    return typer.Option(min=one.limits.least, max=one.limits.most, help=f"{one.help[0].upper()}{one.help[1:]}.")


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Folder or Hub id of a token classifier, or tiny; by default lexperts-seke-minilm."
        ),
    ] = None,
    host: Annotated[str, about("host")] = KeyphraseServer.host,
    port: Annotated[int, about("port")] = KeyphraseServer.port,
    batch_size: Annotated[int, about("batch_size")] = KeyphraseServer.batch_size,
    max_wait_ms: Annotated[float, about("max_wait_ms")] = KeyphraseServer.max_wait_ms,
    max_queue: Annotated[int, about("max_queue")] = KeyphraseServer.max_queue,
    max_tokens: Annotated[int, about("max_tokens")] = KeyphraseServer.max_tokens,
    max_candidates: Annotated[int, about("max_candidates")] = KeyphraseServer.max_candidates,
    max_body_bytes: Annotated[int, about("max_body_bytes")] = KeyphraseServer.max_body_bytes,
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    dtype: Dtype = "float32",
    debug: Debug = False,
):
    """Serve keyphrases over HTTP: POST /keyphrases, with /docs, /healthz and /metrics. Stops gracefully on SIGTERM.

    \b
    Example:
      lexperts keyphrases serve --port 8000
      curl localhost:8000/keyphrases -H 'Content-Type: application/json' -d '{"inputs": "Graph cuts solve problems."}'
    """
    with user_errors(debug):
        from keyphrase_tools.loading import open_extractor
        from keyphrase_tools.serving import create_app
        from run_tools.processes import prepare_process

        listener = bind(host, port)
        check_local(device, model=model)
        prepare_process()
        extract = open_extractor(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
        limits: dict = {"max_queue": max_queue, "max_tokens": max_tokens, "max_candidates": max_candidates}
        limits |= {"batch_size": batch_size, "max_wait_ms": max_wait_ms, "max_body_bytes": max_body_bytes}
        app = create_app(extract, **limits)
        run_server(app, listener)
