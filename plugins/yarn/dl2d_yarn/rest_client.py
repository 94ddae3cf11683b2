"""HTTP client of the ResourceManager: bounded in time and size, follows a fail-over, raises typed errors; Kerberos."""

from __future__ import annotations

import base64
import getpass
import importlib
import ssl
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from types import ModuleType
from typing import Literal, NoReturn, Self, TypeVar

import httpx2
import msgspec

from dl2d.core.errors import ConfigError, Denied, NotFound, Rejected, Unavailable, printable_line
from dl2d.http_call_deadline import Deadline, DeadlineTransport
from dl2d_yarn.settings import YarnSettings

Method = Literal["GET", "POST", "PUT", "DELETE"]
T = TypeVar("T")

#: Maximum size of an answer: 10,000 nodes take about 30 MB.
MAX_ANSWER_BYTES = 256 * 1024 * 1024
#: Maximum duration of a call about a single service, seconds.
SERVICE_CALL_SECONDS = 5.0
#: Maximum size of the description of a service, in bytes: 20,000 containers take about 10 MB.
MAX_DESCRIPTION_BYTES = 16 * 1024 * 1024
#: Maximum number of redirects of one call: a standby names the active ResourceManager, which may have changed since.
MAX_REDIRECTS = 3
_MAX_MESSAGE = 500
_REDIRECTS = frozenset({301, 302, 303, 307, 308})


class _RemoteException(msgspec.Struct):
    message: str = ""
    exception: str = ""


class _Problem(msgspec.Struct):
    """An error as the Services interface (``diagnostics``) or the ResourceManager (``RemoteException``) reports it."""

    diagnostics: str = ""
    remote: _RemoteException = msgspec.field(name="RemoteException", default_factory=_RemoteException)


#: Parts of the messages that the Services interface sends, with status 500, for requests that can never be carried out,
#: with the classes of Hadoop 3.4.2 that write them. The interface answers 500 to any exception, also to temporary ones
#: such as that of a NameNode in safe mode: requests with other messages are tried again.
_REQUEST_ERRORS = (
    "unknown queue",  # CapacityScheduler
    "does not have permission to submit",  # CapacityScheduler, FairScheduler, RMAppManager
    "is larger than configured max",  # ServiceApiUtil: containers above the maximum allocation
    "invalidresourcerequest",  # exceptions of SchedulerUtils and RMAppManager
    "invalid resource request",  # SchedulerUtils, RMAppManager
    "invalidlabelresourcerequest",  # exception of SchedulerUtils
    "already exist",  # ErrorStrings, ServiceClient, RestApiErrorMessages: of the name
    "doesn't exist",  # ServiceClient: no service of this name
)


class RestClient:
    """Calls to the active one of some ResourceManagers; a context manager.

    Parameters
    ----------
    addresses
        Base URLs, such as ``http://rm1:8088``. The one that answered last is tried first. Redirects lead to these only.
    user
        User of simple authentication; "" sends none.
    timeout_seconds
        Maximum duration of one request with its answer, from connecting to the last byte.
    ca_file
        Certificate authorities that sign the servers' certificates; "" for the system's.
    auth
        Authenticates the calls; None for simple authentication.
    max_answer_bytes
        Maximum size of an answer.
    timer
        Seconds on a monotonic clock.
    transport
        Replaces the network in tests.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        user: str,
        timeout_seconds: float,
        ca_file: str = "",
        auth: httpx2.Auth | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        timer: Callable[[], float] = time.monotonic,
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self._addresses = [address.rstrip("/") for address in addresses]
        self._user = user
        self._timeout_seconds = timeout_seconds
        self._max_answer_bytes = max_answer_bytes
        self._deadline = Deadline(timer)
        # The proxy and the .netrc file of the daemon's environment are not meant for the ResourceManager.
        self._client = httpx2.Client(
            timeout=timeout_seconds, trust_env=False, auth=auth, follow_redirects=False,
            transport=transport or DeadlineTransport(self._deadline, verify=_tls(ca_file)),
        )  # fmt: skip

    @classmethod
    def of(
        cls,
        settings: YarnSettings,
        *,
        timeout_seconds: float | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        as_caller: bool = False,
    ) -> Self:
        """Client with the addresses, user, authentication and TLS of the settings.

        With ``as_caller`` it acts as the account of this process, with that account's tickets, and not as the daemon.

        Raises
        ------
        ConfigError
            The settings ask for Kerberos and it is missing, or ``ca_file`` cannot be used.
        """
        if as_caller:
            user, auth = ("", Spnego("", "")) if settings.principal else (getpass.getuser(), None)
        else:
            user = settings.account
            auth = Spnego(settings.principal, settings.keytab) if settings.principal else None
        return cls(
            settings.addresses,
            user=user,
            timeout_seconds=timeout_seconds or settings.timeout_seconds,
            ca_file=settings.ca_file,
            auth=auth,
            max_answer_bytes=max_answer_bytes,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def get(self, path: str, answer: type[T], *, parameters: Mapping[str, str] | None = None, do_as: str = "") -> T:
        """Ask for a path and decode the JSON answer.

        Raises
        ------
        Unavailable
            No ResourceManager answers in time, or the answer is too large, cut off, no JSON, or of another form.
        Denied, NotFound, Rejected
            The ResourceManager refuses, or knows no such thing.
        """
        body = self._call("GET", path, None, parameters or {}, do_as)
        try:
            return msgspec.json.decode(body, type=answer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Unavailable(
                f"GET {path}: the ResourceManager's answer of {len(body)} bytes cannot be read",
                said=f"{error}; it begins with {body[:80]!r}",
            ) from None

    def send(self, method: Method, path: str, content: object = None, *, do_as: str = "") -> bytes:
        """Send a request that may change something; returns the body of the answer. Raises as ``get``.

        It is sent again only where no connection was made or a standby redirects, never after it may have been carried
        out.
        """
        return self._call(method, path, content, {}, do_as)

    def _call(self, method: Method, path: str, content: object, parameters: Mapping[str, str], do_as: str) -> bytes:
        identity = {"user.name": self._user, "doAs": do_as if do_as != self._user else ""}
        query = {**parameters, **{name: value for name, value in identity.items() if value}}
        problems: list[str] = []
        for address in tuple(self._addresses):
            try:
                with self._deadline.within(self._timeout_seconds):
                    status, body, answered = self._follow(method, address, path, query, content)
            except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.TooManyRedirects) as error:
                problems.append(f"{address}: {error or type(error).__name__}")
                continue
            except (httpx2.HTTPError, httpx2.InvalidURL) as error:
                what = f"{type(error).__name__} {error}".strip()
                if method == "GET":
                    problems.append(f"{address}: {what}")
                    continue
                raise Unavailable(
                    f"{method} {path}: no complete answer; the request may have been carried out", said=what
                ) from None
            if 200 <= status < 300:
                self._prefer(address, answered)
                return body
            if status in (502, 503, 504) and method == "GET":
                problems.append(f"{address}: HTTP status {status}")
                continue
            self._prefer(address, answered)
            _raise_error(f"{method} {path}", status, body, user=self._user, do_as=do_as)
        raise Unavailable(f"{method} {path}: no ResourceManager answers", said="; ".join(problems))

    def _prefer(self, address: str, answered: str) -> None:
        """From now on try first the address that answered, then the one that led there. Other threads may call too."""
        self._addresses = sorted(self._addresses, key=lambda other: (other != answered, other != address))

    def _follow(
        self, method: Method, address: str, path: str, query: Mapping[str, str], content: object
    ) -> tuple[int, bytes, str]:
        """Send a request, and again to the address to which a standby redirects it.

        Returns status, body, and the address that answered. Only scheme, host and port of a redirect count, which must
        be those of one of the addresses: an answer that another server has forged cannot choose what is sent where.
        """
        origins = {_origin(httpx2.URL(each)): each for each in self._addresses}
        for _ in range(1 + MAX_REDIRECTS):
            url = httpx2.URL(address + path).copy_merge_params(query)
            body = None if content is None else msgspec.json.encode(content)
            headers = {"Accept": "application/json", **({"Content-Type": "application/json"} if body else {})}
            with self._client.stream(method, url, content=body, headers=headers) as response:
                if response.status_code not in _REDIRECTS:
                    return response.status_code, self._read(response), address
                target = url.join(response.headers.get("Location", ""))
            if _origin(target) not in origins or (url.scheme == "https" and target.scheme != "https"):
                raise httpx2.TooManyRedirects(
                    f"redirects to {target.scheme}://{target.netloc.decode(errors='replace')}, which is refused: it is "
                    "none of resource_manager.yarn.addresses, or gives up TLS"
                )
            address = origins[_origin(target)]
        raise httpx2.TooManyRedirects(f"redirected more than {MAX_REDIRECTS} times, at last to {address}")

    def _read(self, response: httpx2.Response) -> bytes:
        """Body of a response. Raises ``DecodingError`` where it is larger than allowed."""
        body = bytearray()
        for chunk in response.iter_bytes():
            body += chunk
            if len(body) > self._max_answer_bytes:
                raise httpx2.DecodingError(f"the answer is larger than {self._max_answer_bytes} bytes")
        return bytes(body)


def _origin(url: httpx2.URL) -> tuple[str, str, int | None]:
    return url.scheme, url.host, url.port


def _tls(ca_file: str) -> ssl.SSLContext | bool:
    """httpx2's parameter ``verify``: the system's certificate authorities, or those of one file."""
    try:
        return ssl.create_default_context(cafile=ca_file) if ca_file else True
    except OSError as error:
        raise ConfigError(f"resource_manager.yarn.ca_file: {ca_file} cannot be used: {error}") from None


def _raise_error(call: str, status: int, body: bytes, *, user: str, do_as: str) -> NoReturn:
    """Raise the typed error for an answer whose status is not success."""
    said = f"HTTP status {status}: {_message(body)}"
    if status == 403 and do_as and "impersonate" in said:
        raise Denied(
            f"{call}: {user} has no permission to act for {do_as}; set hadoop.proxyuser.{user}.hosts and "
            f"hadoop.proxyuser.{user}.users (or .groups) in core-site.xml of the ResourceManager",
            said=said,
        )
    if status in (401, 403):
        raise Denied(f"{call}: the ResourceManager does not allow this", said=said)
    if status == 404:
        raise NotFound(f"{call}: unknown to the ResourceManager", said=said)
    is_request_error = status == 500 and any(words in said.lower() for words in _REQUEST_ERRORS)
    if status in (400, 405, 406, 409, 413, 415) or is_request_error:
        raise Rejected(f"{call}: refused", said=said)
    raise Unavailable(f"{call}: failed", said=said)


def _diagnostics(body: bytes) -> str:
    try:
        problem = msgspec.json.decode(body, type=_Problem)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    return problem.diagnostics or problem.remote.message or problem.remote.exception


def _message(body: bytes) -> str:
    """Message of an answer in one short line."""
    words = _diagnostics(body) or body[: 4 * _MAX_MESSAGE].decode(errors="replace")
    return printable_line(words)[:_MAX_MESSAGE] or "no reason given"


class Spnego(httpx2.Auth):
    """Answers a demand for SPNEGO (RFC 4559) with a Kerberos ticket; the answer has a cookie for later calls.

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
            remedy = "see resource_manager.yarn.keytab and principal" if self._store else "run kinit"
            raise Unavailable(f"no Kerberos ticket of {whose} for HTTP@{host} ({remedy})", said=str(error)) from None
        return base64.b64encode(token).decode()
