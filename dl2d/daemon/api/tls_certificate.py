"""The API's TLS certificate: read with its key, and checked as jobs that reach the daemon would."""

from __future__ import annotations

import ssl
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from dl2d.config.settings import ApiSettings
from dl2d.core.errors import ConfigError
from pslite.launch.daemon_connection.daemon_http import certificate_text


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


def served_certificate_problem(api: ApiSettings, served: str) -> str:
    """Why jobs refuse the certificate ``served``, or that it is not the one of the file any more; empty if neither."""
    try:
        if api.certificate is not None and read_certificate(api.certificate, api.certificate_key) != served:
            return f"{api.certificate} was replaced, and the daemon serves the one before: restart it"
    except ConfigError as error:
        return str(error)
    return certificate_problem(api)


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
