"""A server of keyphrases: the options of its commands, and its socket."""

import socket
from contextlib import suppress

OPTIONS = {  # default and help; those after the port are limits of `lexperts_lite.serving.create_app`
    "host": ("127.0.0.1", "Address to listen on; 0.0.0.0 for all."),
    "port": (8000, "Port to listen on; 0 for any free one."),
    "batch_size": (16, "Documents per batch."),
    "max_wait_ms": (5.0, "How long an idle server waits to fill a batch."),
    "max_queue": (128, "Documents that may wait; requests beyond that get status 503."),
    "max_characters": (250_000, "Maximum number of characters in a request's documents."),
    "max_candidates": (20_000, "Maximum of a request's candidates, times its documents."),
    "max_body_bytes": (1_000_000, "Maximum size of a request."),
}


def bind(host: str, port: int) -> socket.socket:
    """A listening socket: clients wait until the model is loaded. Raises an `OSError` for an address that is taken."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def run_server(app, listener: socket.socket) -> None:
    """Serves an app until SIGTERM or SIGINT, and then finishes what it has accepted."""
    import uvicorn

    host, port = listener.getsockname()[:2]
    print(f"serving on http://{f'[{host}]' if ':' in host else host}:{port}, documentation at /docs", flush=True)
    limits = {"limit_concurrency": 512, "timeout_keep_alive": 75}  # seconds, more than the longest Retry-After
    config = uvicorn.Config(app, http="h11", ws="none", access_log=False, server_header=False, **limits)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
