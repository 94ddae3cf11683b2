"""The job API on a socket, in a thread of its own."""

from __future__ import annotations

import asyncio
import resource
import socket
import threading
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from dl2d.core.errors import ConfigError
from dl2d.daemon.api.connection_acceptor import Acceptor
from dl2d.daemon.api.connection_limits import (
    DEFAULT_LIMITS,
    IDLE_SECONDS,
    AcceptedSocket,
    ConnectionLimits,
    ConnectionTable,
)
from dl2d.daemon.api.tls_certificate import read_certificate

_BACKLOG = 1024


class _Server(uvicorn.Server):
    """uvicorn's server, which gets its connections from an acceptor."""

    def __init__(self, config: uvicorn.Config, acceptor: Acceptor) -> None:
        super().__init__(config)
        self._acceptor = acceptor

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets or [])
        self._acceptor.start(self._begin)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._acceptor.stop()
        await super().shutdown(sockets=sockets)

    async def _begin(self, accepted: AcceptedSocket) -> None:
        loop, tls = asyncio.get_running_loop(), self.config.ssl
        await loop.connect_accepted_socket(self._handler, accepted, ssl=tls)

    def _handler(self) -> asyncio.Protocol:
        return self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )


class ApiServer:
    """Serves an application until ``stop``; the socket is bound at once, so that a port in use fails at the start."""

    def __init__(
        self,
        host: str,
        port: int,
        limits: ConnectionLimits = DEFAULT_LIMITS,
        certificate: Path | None = None,
        certificate_key: Path | None = None,
    ) -> None:
        self._certificate, self._certificate_key = certificate, certificate_key
        #: Certificates by which coordinators verify this server; "" without https.
        self.certificates = "" if certificate is None else read_certificate(certificate, certificate_key)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # With the protocol named, asyncio sets TCP_NODELAY: else each answer on a connection that is kept waits 40 ms.
        self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._table = ConnectionTable(limits.within(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
            # Listening at once: two processes may bind one port while neither listens, and early calls are queued.
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._socket.close()
            raise ConfigError(
                f"cannot listen on api.host={host} api.port={port}: {error.strerror}; choose another port, or end "
                "the program that uses it"
            ) from error
        #: Host and port that it is bound to.
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """Whether it serves; false once its thread has ended, however that came."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, api: FastAPI) -> None:
        """Begin to serve."""
        config = uvicorn.Config(
            api,
            http=self._table.protocol,  # type: ignore[arg-type]  # it is called as a class is
            ws="none",
            loop="asyncio",
            # X-Forwarded-For is not read: a client could evade the limits of its address with it, or use up another's.
            proxy_headers=False,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=5,
            server_header=False,
            ssl_certfile=self._certificate,
            ssl_keyfile=self._certificate_key,
        )
        self._server = _Server(config, Acceptor(self._socket, self._table))
        self._thread = threading.Thread(target=self._server.run, name="job-api", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish running requests and close the socket."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(timeout=10)
        self._socket.close()
