"""HTTP client of the daemon's job API."""

from __future__ import annotations

import os
import ssl
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Self

import httpx2

from dl2d.config.settings import Settings
from dl2d.core.errors import ConfigError, Denied, Dl2dError, NotFound, RequestError, Unavailable
from dl2d.daemon.key_and_address_files import load_credentials
from pslite.errors import UsageError
from pslite.launch.daemon_connection.daemon_address_file import find_address
from pslite.launch.daemon_connection.daemon_http import (
    CERTIFICATE_VARIABLE,
    UID_VARIABLE,
    certificate_text,
    check_peer,
    trusted_accounts,
)

_SECONDS = 30.0
#: With what other accounts than the daemon's submit and end jobs, by resource manager.
_OTHER_ACCOUNTS = {"yarn": "`dl2d submit --rm yarn` and `yarn app -stop NAME`", "slurm": "sbatch and scancel"}
#: For how long a request is repeated while the daemon answers with Retry-After: it has just started, or is asked too
#: often.
_START_SECONDS = 30.0


class DaemonClient:
    """Submits and cancels jobs; a context manager.

    Raises
    ------
    ConfigError
        The settings do not say where the daemon listens, or its key cannot be read by this account.
    """

    def __init__(self, settings: Settings) -> None:
        self.url = daemon_url(settings)
        try:
            credential = load_credentials(settings.secret_path, create=False).for_submission()
        except ConfigError as error:
            manager = settings.resource_manager.name
            if not isinstance(error.__cause__, PermissionError) or manager not in _OTHER_ACCOUNTS:
                raise
            raise ConfigError(f"{error}; other accounts use {_OTHER_ACCOUNTS[manager]}") from error
        self._secret = settings.secret_path
        # The daemon is on this machine: no proxy of the environment may be used.
        self._client = client_of_daemon(daemon_trust(settings), _SECONDS, daemon_accounts(settings))
        self._client.base_url = httpx2.URL(self.url)
        self._client.headers["Authorization"] = f"Bearer {credential}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def submit(
        self, request: Mapping[str, object], argv: tuple[str, ...], cwd: str, env: Mapping[str, str]
    ) -> dict[str, Any]:
        """Hand in a job; returns ``job`` (slug), ``id`` and ``name``.

        Raises
        ------
        RequestError
            The request is malformed, or the job is known already.
        Unavailable, Denied, Dl2dError
            The daemon does not answer, does not accept the key, or failed.
        """
        return self._call("POST", "/v1/jobs", {"request": request, "argv": argv, "cwd": cwd, "env": env})

    def cancel(self, slug: str) -> dict[str, Any]:
        """End a job; returns ``job``, ``id`` and ``state``. Raises as ``submit``, and ``NotFound``."""
        return self._call("DELETE", f"/v1/jobs/{slug}")

    def _send(self, method: str, path: str, body: object) -> httpx2.Response:
        try:
            return self._client.request(method, path, json=body) if body else self._client.request(method, path)
        except httpx2.ReadTimeout as error:
            raise Unavailable(
                f"the daemon at {self.url} did not answer within {_SECONDS:g} s, and may still do what it was asked: "
                "look with `dl2d status` before you repeat it"
            ) from error
        except httpx2.TransportError as error:
            raise Unavailable(
                f"the daemon does not answer at {self.url} ({str(error) or type(error).__name__}); "
                "check that it runs: `systemctl status dl2d`"
            ) from error

    def _call(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        answer = repeat_refused(lambda: self._send(method, path, body), _START_SECONDS)
        try:
            content = answer.json()
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise Dl2dError(f"the program at {self.url} is not dl2d (HTTP status {answer.status_code}); check api.port")
        if answer.is_success:
            return content
        text = str(content.get("error", f"HTTP status {answer.status_code}"))
        match answer.status_code:
            case 403:
                raise Denied(
                    f"the daemon at {self.url} refused the request: {text}; it runs with another key than that in "
                    f"{self._secret}"
                )
            case 404:
                raise NotFound(text)
            case 409 | 422:
                raise RequestError("job", text)
            case 503 if "Retry-After" in answer.headers:
                raise Unavailable(
                    f"the daemon has just started and accepts no requests yet ({text}); try again in a minute"
                )
            case 429 | 503:
                raise Unavailable(text)
            case _:
                raise Dl2dError(f"the daemon failed: {text}; see its log: `journalctl -u dl2d`")


def repeat_refused(send: Callable[[], httpx2.Response], seconds: float) -> httpx2.Response:
    """Send a request, repeat it for up to ``seconds`` while answers have Retry-After, and return the last answer."""
    end = time.monotonic() + seconds
    while (said := (answer := send()).headers.get("Retry-After")) is not None:
        pause = float(said) if said.isdecimal() else 1.0
        if time.monotonic() + pause > end:
            break
        time.sleep(pause)
    return answer


def client_of_daemon(
    trust: ssl.SSLContext | bool,  # noqa: FBT001 - as httpx has it
    seconds: float,
    accounts: Collection[int] | None,
) -> httpx2.Client:
    """HTTP client that uses no proxy, and without TLS sends nothing on this machine to other accounts than these.

    Its requests raise ``httpx2.TransportError`` then. With None it sends to any account: for requests without a secret.
    """

    def check(event: str, info: Mapping[str, Any]) -> None:
        if accounts is not None and event == "connection.connect_tcp.complete":
            try:
                check_peer(info["return_value"].get_extra_info("socket"), accounts, seconds)
            except OSError as error:
                info["return_value"].close()
                raise httpx2.TransportError(str(error)) from None

    def prepare(request: httpx2.Request) -> None:
        if request.url.scheme == "http":
            request.extensions["trace"] = check

    return httpx2.Client(timeout=seconds, trust_env=False, verify=trust, event_hooks={"request": [prepare]})


def daemon_accounts(settings: Settings) -> frozenset[int]:
    """Accounts to which this machine's commands send the daemon's credentials: also that of the key file."""
    try:
        return trusted_accounts(settings.secret_path.stat().st_uid)
    except OSError:
        return trusted_accounts()


def daemon_uid_for_jobs(settings: Settings, url: str) -> str:
    """Value of ``DL2_DAEMON_UID`` for a user's job that reaches the daemon at a URL: the caller's own, or the daemon's.

    Empty with https, and where neither the address file nor the owner of the key file can be read.
    """
    own = os.environ.get(UID_VARIABLE, "")
    if own or url.startswith("https:"):
        return own
    file = settings.api.address_file
    try:
        address = find_address(None if file is None else [file])[1]
        if address.uid is not None and address.url.rstrip("/") == url.rstrip("/"):
            return str(address.uid)
    except UsageError:
        pass  # none, or not to be trusted
    try:
        return str(settings.secret_path.stat().st_uid)
    except OSError:
        return ""


def daemon_url(settings: Settings) -> str:
    """Where the daemon of these settings is reached from this machine.

    Raises ``ConfigError`` if ``api.port`` is 0: the daemon listens on a random port.
    """
    api = settings.api
    if api.port == 0:
        raise ConfigError("api.port: with 0 the daemon listens on a port that commands cannot know; set a port number")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(api.host, api.host)  # noqa: S104 - compared, not bound
    return api.url_of(host, api.port)


def daemon_trust(settings: Settings) -> ssl.SSLContext | bool:
    """How this machine's commands verify the daemon: by the certificate of the settings, whatever name it is for.

    Raises
    ------
    ConfigError
        The certificate cannot be read.
    """
    certificate = settings.api.certificate
    if certificate is None:
        return True
    try:
        context = ssl.create_default_context(cafile=str(certificate))
    except OSError as error:
        raise ConfigError(f"api.certificate: cannot read {certificate}: {error.strerror or error}") from error
    context.check_hostname = False
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    return context


def certificate_for_jobs(settings: Settings) -> str:
    """Value of ``DL2_DAEMON_CERTIFICATE`` for a user's job: the caller's own, otherwise the daemon's certificate.

    Empty without https, or where the caller may not read the certificate: then the nodes have to trust its authority.
    """
    own = os.environ.get(CERTIFICATE_VARIABLE, "")
    if own or settings.api.certificate is None:
        return own
    try:
        return certificate_text(settings.api.certificate.read_text(encoding="ascii", errors="replace"))
    except OSError:
        return ""
