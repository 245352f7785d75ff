"""`lexperts keyphrases serve`: an HTTP server with a keyphrase model."""

import socket
from contextlib import suppress
from typing import Annotated

import typer

from run_tools.errors import short_repr

from .common import Debug, Device, Dtype, TrustRemoteCode, user_errors
from .corpus_options import check_local

KEEP_ALIVE = 75  # seconds; longer than the longest Retry-After, and than load balancers keep idle connections


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Folder or Hub id of a token classifier; by default lexperts-seke-minilm."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for any free one.")] = 8000,
    batch_size: Annotated[int, typer.Option(min=1, help="Documents per batch.")] = 16,
    max_wait_ms: Annotated[float, typer.Option(min=0, help="How long an idle server waits to fill a batch.")] = 5,
    max_queue: Annotated[
        int, typer.Option(min=1, help="Documents that may wait; requests beyond that get status 503.")
    ] = 128,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of sub-tokens in a request.")] = 50_000,
    max_candidates: Annotated[
        int, typer.Option(min=1, help="Maximum of a request's candidates, with synonyms, times its documents.")
    ] = 20_000,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Maximum size of a request.")] = 1_000_000,
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
        check_local("local", device, model=model)
        prepare_process()
        extract = open_extractor(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
        limits: dict = {"max_queue": max_queue, "max_tokens": max_tokens, "max_candidates": max_candidates}
        limits |= {"batch_size": batch_size, "max_wait_ms": max_wait_ms, "max_body_bytes": max_body_bytes}
        app = create_app(extract, **limits)
        run_server(app, listener)


def check_host(option: str, host: str, port: int = 0) -> tuple:
    """Family, kind, protocol and address of a host's socket. Raises an `OSError` for an unknown host."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise OSError(
            f"{option} {short_repr(host)} is not known ({error}). Use 127.0.0.1, or 0.0.0.0 for all."
        ) from error
    return family, kind, protocol, address


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound but does not listen yet, so that clients are refused until the model is loaded. Raises an
    `OSError` if the address is not available.
    """
    family, kind, protocol, address = check_host("--host", host, port)
    try:
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise OSError(
            f"--host {host} --port {port} is not available: {error.strerror}. Use another port, or 0 for any."
        ) from error
    return listener


def run_server(app, listener: socket.socket) -> None:
    """Serves an app until SIGTERM or SIGINT, and then finishes what it has accepted."""
    import uvicorn

    from .connections import BACKLOG, PunctualProtocol, connection_limit

    PunctualProtocol.max_connections = connection_limit()
    host, port = listener.getsockname()[:2]
    print(f"serving on http://{f'[{host}]' if ':' in host else host}:{port}, documentation at /docs", flush=True)
    config = uvicorn.Config(
        app, loop="asyncio", http=PunctualProtocol, ws="none", access_log=False, server_header=False, backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE,
    )  # fmt: skip
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
