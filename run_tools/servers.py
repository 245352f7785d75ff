"""What the commands of a server have in common: their options, the socket, and the run until SIGTERM."""

import socket
from contextlib import suppress
from dataclasses import dataclass

from .errors import short_repr
from .options import list_options, option

KEEP_ALIVE = 75  # seconds; longer than the longest Retry-After, and than load balancers keep idle connections


@dataclass(frozen=True)
class KeyphraseServer:
    """The options of a server of keyphrases; those after the port are limits of `keyphrase_tools.serving.create_app`."""

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 for all")
    port: int = option(8000, "port to listen on; 0 for any free one", least=0, most=65535)
    batch_size: int = option(16, "documents per batch", least=1)
    max_wait_ms: float = option(5, "how long an idle server waits to fill a batch", least=0)
    max_queue: int = option(128, "documents that may wait; requests beyond that get status 503", least=1)
    max_tokens: int = option(50_000, "maximum number of sub-tokens in a request", least=1)
    max_candidates: int = option(
        20_000, "maximum of a request's candidates, with synonyms, times its documents", least=1
    )
    max_body_bytes: int = option(1_000_000, "maximum size of a request", least=1)


SERVER_OPTIONS = {one.name: one for one in list_options(KeyphraseServer)}


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
