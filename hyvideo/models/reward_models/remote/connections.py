"""How the reward server treats whoever connects: how many at once, how long without a request, and what it logs."""

import asyncio
import logging
import resource

from uvicorn.protocols.http.h11_impl import H11Protocol

_OPEN_FILES = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
MAX_CONNECTIONS = min(_OPEN_FILES, 8192) // 3 if _OPEN_FILES != resource.RLIM_INFINITY else 2730
"""Connections at once: a third of the files that this process may open, 341 on most machines. The rest is for its own
files, and for connections that are accepted before those that are too many are closed."""

HEAD_SECONDS = 10.0
"""Time in which a connection must bring the whole head of a request, from its beginning or the last answer."""

MAX_LINE = 300
"""Characters in a line of the log."""

_MAX_LINES = 50


class Protocol(H11Protocol):
    """A connection that is closed when no request comes; of too many, the one that has been silent longest."""

    _silence: asyncio.TimerHandle | None = None  # runs while there is no request to answer

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > MAX_CONNECTIONS:
            silent = [connection for connection in self.connections if connection._silence is not None]
            min(silent, key=lambda connection: connection._silence.when())._drop()

    def data_received(self, data: bytes) -> None:
        """Take what came; the head of a request may be whole now."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Wait for the next request, which may have come already."""
        self._wait()
        super().on_response_complete()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        super().connection_lost(exc)
        self._stop_waiting()

    def _wait(self) -> None:
        self._stop_waiting()
        self._silence = self.loop.call_later(HEAD_SECONDS, self._drop)

    def _stop_waiting(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _drop(self) -> None:
        """Close the connection, even if the other side reads nothing."""
        self._stop_waiting()
        self.transport.abort()


class BoundedFormatter(logging.Formatter):
    """Writes few, short lines of printable characters, whatever a client sent; only the first one is not indented."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a message, with the end of a traceback that belongs to it."""
        first, *others = super().format(record).splitlines() or [""]
        lines = [first, *(f"    {line}" for line in others[-_MAX_LINES:])]
        escaped = [repr(line[: MAX_LINE + 1])[1:-1] for line in lines]
        return "\n".join(line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 3]}..." for line in escaped)


LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"bounded": {"()": BoundedFormatter, "format": "%(levelname)s: %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "bounded"}},
    "root": {"handlers": ["stderr"], "level": "WARNING"},
}
"""For `logging.config.dictConfig`: everything that the server's process logs is bounded."""

LIMITS = {"http": Protocol, "ws": "none", "backlog": 32}
"""For uvicorn: `backlog` bounds what is accepted before connections that are too many are closed."""
