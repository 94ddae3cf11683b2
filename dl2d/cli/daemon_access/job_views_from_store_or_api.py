"""Where commands read what users see of jobs: the store, or the job API where the store is closed to the user."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar
from urllib.parse import urlencode

import httpx2
import msgspec

from dl2d.cli.daemon_access.job_api_client import client_of_daemon, repeat_refused
from dl2d.cli.daemon_access.open_store import open_store
from dl2d.cli.daemon_access.read_daemon_health import DaemonHealth, ask_health, daemon_health
from dl2d.config.settings import DEFAULT_PATH, Settings, load_settings
from dl2d.core.errors import ConfigError, Denied, Dl2dError, RequestError, StoreError, Unavailable
from dl2d.core.job_views import MAX_DECISIONS, HistoryView, JobViews, StatusView, UsageView, WhyView, request_payload
from dl2d.core.json_codec import decode
from dl2d.daemon.job_views_from_store import StoreViews
from pslite.errors import UsageError
from pslite.launch.daemon_connection.daemon_address_file import DAEMON_VARIABLE, DaemonAddress, find_address
from pslite.launch.daemon_connection.daemon_http import (
    CERTIFICATE_VARIABLE,
    check_private,
    tls_context,
    trusted_accounts,
)
from pslite.launch.daemon_connection.munge_credentials import munge_credential

if TYPE_CHECKING:
    from dl2d.store.sql_store import SqlStore

_SECONDS = 30.0
#: Seconds to wait for the daemon to say how it is.
_HEALTH_SECONDS = 2.0
#: For how long a request is repeated that the daemon refuses because it answers too many.
_BUSY_SECONDS = 20.0
_View = TypeVar("_View")


@dataclass(frozen=True, slots=True)
class JobSource:
    """What the user may see of jobs, and of the daemon."""

    views: JobViews
    health: Callable[[], DaemonHealth]
    #: Configuration and store, where the user may read them.
    site: tuple[Settings, SqlStore] | None = None


@contextlib.contextmanager
def job_source(config: Path, *, on_failure: Callable[[DaemonHealth], None] | None = None) -> Iterator[JobSource]:
    """The store of a configuration if the user may read both, otherwise the job API of the address file.

    ``on_failure`` is told the health of the daemon if its store cannot be read and nobody else is asked.

    Raises
    ------
    ConfigError
        Neither is found, or the configuration is malformed.
    StoreError
        The store cannot be read, and the job API is not found.
    """
    try:
        settings = load_settings(config)
    except ConfigError as error:
        if not is_hidden(config):
            raise
        reason: Dl2dError = error
    else:
        with contextlib.ExitStack() as stack:
            try:
                store = stack.enter_context(open_store(settings))
            except StoreError as error:
                if os.geteuid() == 0:
                    if on_failure is not None:
                        on_failure(daemon_health(settings, _HEALTH_SECONDS))
                    raise
                reason = error
            else:
                views = StoreViews(store)
                yield JobSource(views, lambda: daemon_health(settings, _HEALTH_SECONDS), (settings, store))
                return
    with _api_views(reason) as api:
        yield JobSource(api, api.health)


def is_hidden(config: Path) -> bool:
    """Whether a configuration is not for this user, or this machine has none in the place where it is looked for."""
    try:
        missing = not config.exists()
    except PermissionError:
        return True
    return config == DEFAULT_PATH if missing else not os.access(config, os.R_OK)


def _api_views(error: Dl2dError) -> ApiViews:
    """What the job API shows; ``error`` is why the store is not read."""
    try:
        address = _address(os.environ)
        check_private(address.url)
        return ApiViews(address, os.environ)
    except (UsageError, OSError, ValueError) as problem:
        kind = type(error) if isinstance(error, StoreError) else ConfigError
        raise kind(f"{error}; so the daemon was asked instead, but {problem}") from None


def _address(environ: Mapping[str, str]) -> DaemonAddress:
    if environ.get(DAEMON_VARIABLE):
        return DaemonAddress(environ[DAEMON_VARIABLE].rstrip("/"), environ.get(CERTIFICATE_VARIABLE, ""))
    return find_address()[1]


class ApiViews:
    """Implements ``JobViews`` by the daemon's job API, as the user who runs this process; a context manager.

    Raises
    ------
    OSError, ValueError
        The certificate of the address cannot be read.
    """

    def __init__(self, address: DaemonAddress, environ: Mapping[str, str]) -> None:
        self._url = address.url
        self._environ = environ
        self._trust = tls_context(address.certificate) if address.url.startswith("https:") else True
        self._accounts = trusted_accounts(*(() if address.uid is None else (address.uid,)))
        # Requests go straight to the daemon: a proxy of the environment is for the internet.
        self._client = client_of_daemon(self._trust, _SECONDS, self._accounts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def health(self) -> DaemonHealth:
        """What the daemon says of itself to everybody."""
        return ask_health(self._url, self._trust, "", _HEALTH_SECONDS, self._accounts)

    def status(self, job: str | None, *, ended_since: float | None, limit: int) -> StatusView:
        """See ``JobViews.status``."""
        return self._get("/v1/status", StatusView, job=job, ended_since=ended_since, limit=limit)

    def why(self, job: str, *, slot: int | None, limit: int) -> WhyView:
        """See ``JobViews.why``."""
        return self._get("/v1/why", WhyView, job=job, slot=slot, limit=min(limit, MAX_DECISIONS))

    def history(self, job: str | None, *, limit: int) -> HistoryView:
        """See ``JobViews.history``."""
        return self._get("/v1/history", HistoryView, job=job, limit=limit)

    def usage(self, job: str) -> UsageView:
        """See ``JobViews.usage``."""
        return self._get("/v1/usage", UsageView, job=job)

    def _get(self, path: str, kind: type[_View], **query: object) -> _View:
        target = f"{path}?{urlencode({name: value for name, value in query.items() if value is not None})}"
        answer = repeat_refused(lambda: self._send(target), _BUSY_SECONDS)
        if answer.is_success:
            try:
                return decode(answer.content, kind)
            except msgspec.MsgspecError as error:
                raise Dl2dError(
                    f"the program at {self._url} does not answer like this version of dl2d ({error}): install the "
                    "daemon's version here"
                ) from None
        raise self._refusal(answer)

    def _send(self, target: str) -> httpx2.Response:
        """Send a request with a credential of its own, since each serves once."""
        try:
            credential = munge_credential(request_payload("GET", self._url, target), self._environ)
        except UsageError as error:
            raise Unavailable(f"the daemon at {self._url} has to know who asks, but {error}") from None
        try:
            return self._client.get(self._url + target, headers={"Authorization": f"Munge {credential}"})
        except httpx2.TransportError as error:
            text = str(error) or type(error).__name__
            if "CERTIFICATE_VERIFY_FAILED" in text:
                raise Unavailable(
                    f"the certificate of the daemon at {self._url} is refused ({text}): ask the administrator "
                    "to set api.certificate to one that is valid and names the host of this URL, and to restart the "
                    "daemon"
                ) from error
            raise Unavailable(
                f"the daemon does not answer at {self._url} ({text}): it does not run, or a firewall is between"
            ) from error

    def _refusal(self, answer: httpx2.Response) -> Dl2dError:
        try:
            text = str(answer.json()["error"])
        except (ValueError, KeyError, TypeError):
            text = f"HTTP status {answer.status_code}"
        match answer.status_code:
            case 401 | 403:
                return Denied(f"the daemon at {self._url} refused the request: {text}")
            case 422:
                key, _, problem = text.partition(": ")
                return RequestError(key, problem)
            case 429:
                return Unavailable(f"the daemon at {self._url} refused this request for {_BUSY_SECONDS:g} s: {text}")
            case 503:
                return Unavailable(text)
            case _:
                return Dl2dError(
                    f"the daemon at {self._url} failed: {text}; if the version in {self._url}/v1/health is not that of "
                    "`dl2d --version`, install the daemon's version here; otherwise ask the administrator to look in "
                    "the daemon's log"
                )
