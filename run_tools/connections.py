"""The connections of a server: clients that send nothing, or do not read, make room for others."""

import asyncio
import os
import time

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT = 10  # seconds from the connection, or from the first byte of a later request, to the end of its head
BACKLOG = 128  # connections that are accepted at once
SPARE = 32  # file descriptors for everything that is opened later
MOST = 4096


def connection_limit() -> int:
    """How many connections the process's limit of open files allows."""
    try:
        import resource
    except ImportError:  # Windows
        return MOST
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # not on Linux
        used = 64
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed == resource.RLIM_INFINITY:
        return MOST
    return max(1, min(allowed - used - BACKLOG - SPARE, MOST))


class PunctualProtocol(H11Protocol):
    """uvicorn's protocol with a time limit for the head of a request, and a maximum number of connections.

    uvicorn itself limits only the time between requests. Beyond `max_connections`, the connection that has been idle for longest
    is closed, or the new one if all have requests that are not answered yet.
    """

    max_connections = MOST

    def connection_made(self, transport) -> None:
        """Starts the time limit, and makes room."""
        super().connection_made(transport)
        self._head_timer: asyncio.TimerHandle | None = None
        self._idle_since = time.monotonic()
        self._await_head()
        if len(self.connections) > self.max_connections:
            idle = [connection for connection in self.connections if connection.is_idle and connection is not self]
            closed = min(idle, key=lambda connection: connection._idle_since, default=self)
            self.connections.discard(closed)  # now, so that each new connection closes another one
            closed.transport.abort()

    @property
    def is_idle(self) -> bool:
        """Whether no request waits for its answer; the client may be sending a head, or not reading an answer."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Ends the time limit once a head is complete."""
        super().data_received(data)
        if not self.is_idle:
            self._stop_timer()
        elif self._head_timer is None:
            self._await_head()

    def on_response_complete(self) -> None:
        """Notes the time; a client that then does not read its answer is not waited for."""
        self._idle_since = time.monotonic()
        if self.transport.is_closing():  # as the client has asked for, once everything has been sent
            self.loop.call_later(self.timeout_keep_alive, self.transport.abort)
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        """Closes at once: `close` would wait for a client that does not read."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the time limit."""
        self._stop_timer()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
