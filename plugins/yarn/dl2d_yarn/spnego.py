"""SPNEGO authentication (RFC 4559) of calls to a ResourceManager whose HTTP interface demands Kerberos."""

from __future__ import annotations

import base64
import importlib
from collections.abc import Generator
from types import ModuleType

import httpx2

from dl2d.core.errors import ConfigError, Unavailable


class Spnego(httpx2.Auth):
    """Answers a demand for SPNEGO with a Kerberos ticket; the cookie of the answer authenticates the calls after it.

    With a keytab the tickets are kept in memory, and new ones are obtained before they expire. Without one they come
    from the user's credential cache (``kinit``).

    Parameters
    ----------
    principal
        Kerberos principal, such as ``dl2d/head.cluster@EXAMPLE.COM``; "" for whichever the credential cache has.
    keytab
        File with its keys, or "".

    Raises
    ------
    ConfigError
        The Python package gssapi is not installed.
    """

    def __init__(self, principal: str, keytab: str) -> None:
        try:
            self._gssapi: ModuleType = importlib.import_module("gssapi")
        except ImportError as error:
            raise ConfigError(
                "resource_manager.yarn.principal: Kerberos needs the package gssapi, which cannot be loaded "
                f"({error}); install dl2d[kerberos]"
            ) from None
        self._principal = principal
        self._store = {"client_keytab": f"FILE:{keytab}", "ccache": f"MEMORY:dl2d-{principal}"} if keytab else None

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        """Send the request, and once more with a ticket where that is demanded."""
        response = yield request
        if response.status_code == 401 and "negotiate" in response.headers.get("WWW-Authenticate", "").lower():
            request.headers["Authorization"] = f"Negotiate {self._token(request.url.host)}"
            yield request

    def _token(self, host: str) -> str:
        gssapi = self._gssapi
        try:
            user = gssapi.Name(self._principal, gssapi.NameType.kerberos_principal) if self._principal else None
            credentials = gssapi.Credentials(name=user, usage="initiate", store=self._store)
            service = gssapi.Name(f"HTTP@{host}", gssapi.NameType.hostbased_service)
            token = gssapi.SecurityContext(name=service, creds=credentials, usage="initiate").step()
        except gssapi.exceptions.GSSError as error:
            whose = self._principal or "this account"
            raise Unavailable(f"no Kerberos ticket of {whose} for HTTP@{host}", said=str(error)) from None
        return base64.b64encode(token).decode()
