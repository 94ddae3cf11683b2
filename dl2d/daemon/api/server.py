"""The job API on a socket, in a thread of its own."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import threading
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI

from dl2d.config.settings import ApiSettings
from dl2d.core.errors import ConfigError
from dl2d.daemon.api.connection_acceptor import Acceptor
from dl2d.daemon.api.connection_limits import (
    DEFAULT_LIMITS,
    IDLE_SECONDS,
    AcceptedSocket,
    ConnectionLimits,
    ConnectionTable,
)
from pslite.launch.daemon_http import certificate_text

_BACKLOG = 1024


def read_certificate(certificate: Path, key: Path | None) -> str:
    """The certificates as coordinators get them. Raises ``ConfigError`` if they cannot be used with the key."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        return certificate_text(certificate.read_text(encoding="ascii", errors="replace"))
    except OSError as error:
        raise ConfigError(
            f"cannot load api.certificate={certificate} api.certificate_key={key}: {error.strerror or error}; "
            "both must be PEM files, and the key that of the certificate; docs/slurm.md (Install, step 3) and "
            "docs/yarn.md (Install, step 4) say how to make them"
        ) from error


def certificate_problem(api: ApiSettings) -> str:
    """Why jobs refuse the certificate of the API, which can be used with its key; empty if they do not."""
    if api.certificate is None or api.certificate_key is None:
        return ""
    host = urlsplit(api.url(api.host, api.port)).hostname or api.host
    if not (refusal := _refusal(api.certificate, api.certificate_key, host)):
        return ""
    return (
        f"jobs, which reach the daemon as {host}, refuse {api.certificate}: {refusal.rstrip('.')}; set a "
        "certificate that names this host and is valid now, or set api.advertise to a URL with a name that is in it"
    )


def _refusal(certificate: Path, key: Path, host: str) -> str:
    """Why coordinators that reach the API as ``host`` refuse its certificate; empty if they do not.

    It is the outcome of a TLS handshake within this process, in which the client trusts the certificate as jobs do.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(certificate)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    try:
        for end in (*ends, ends[0]):  # client hello; the server's answer; what the client finds in it
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    return ""


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
                "what uses it"
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
