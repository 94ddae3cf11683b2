"""Check of the way from this machine to the daemon: its address, connection, certificate, munge, and authentication."""

from __future__ import annotations

import os
import socket
import sys
import urllib.error
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import msgspec

from pslite.errors import UsageError
from pslite.job.printable_text import printable
from pslite.launch.daemon_connection.daemon_address_file import DAEMON_VARIABLE, find_address
from pslite.launch.daemon_connection.daemon_http import check_private, error_text, fetch
from pslite.launch.daemon_connection.munge_credentials import munge_credential, registration_payload

_CONNECT_SECONDS = 10.0


class Link(NamedTuple):
    """Result of one step."""

    item: str
    good: bool
    text: str


class _Authenticated(msgspec.Struct):
    """The daemon's answer to a checked credential."""

    user: str
    job: str


def print_check(environ: Mapping[str, str]) -> int:
    """Print each step in a line, `ok` or `WRONG` first; return 0 if all are good, otherwise 1."""
    good = True
    for link in check_daemon(environ):
        good &= link.good
        sys.stdout.write(f"{'ok' if link.good else 'WRONG'} {link.item} {printable(link.text)}\n")
        sys.stdout.flush()
    return 0 if good else 1


def check_daemon(environ: Mapping[str, str]) -> Iterator[Link]:
    """Go the way of a job that registers, as far as it leads; nothing is registered."""
    link, url = _step("address", partial(_address, environ))
    yield link
    for item, check in (("connection", _connect), ("certificate", _ask_health)):
        if url:
            link, url = _step(item, partial(check, url))
            yield link
    if job := environ.get("SLURM_JOB_ID", ""):
        link, credential = _step(
            "munge", lambda: ("a credential was made", munge_credential(registration_payload(job), environ))
        )
        yield link
        if url and credential:
            yield _step("registration", partial(_authenticate, url, job, credential))[0]


def _step(item: str, check: Callable[[], tuple[str, str]]) -> tuple[Link, str]:
    """Return the result of a check that returns what it found and a value, and the value; "" where it fails."""
    try:
        text, value = check()
    except (UsageError, OSError, ValueError) as error:
        return Link(item, good=False, text=str(error)), ""
    return Link(item, good=True, text=text), value


def _address(environ: Mapping[str, str]) -> tuple[str, str]:
    url, source = environ.get(DAEMON_VARIABLE, ""), DAEMON_VARIABLE
    if not url:
        path, address = find_address()
        url, source = address.url, str(path)
        os.environ.update({name: value for name, value in address.variables().items() if not environ.get(name)})
    check_private(url)
    return f"{url} ({source})", url.rstrip("/")


def _connect(url: str) -> tuple[str, str]:
    parts = urllib.parse.urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((host, port), _CONNECT_SECONDS).close()
    except OSError as error:
        raise OSError(
            f"port {port} of {host} cannot be reached ({error.strerror or error}): check that the daemon runs and "
            "listens on an address of its network (api.host: 0.0.0.0), and that no firewall is between"
        ) from None
    return f"port {port} of {host} can be reached", url


def _ask_health(url: str) -> tuple[str, str]:
    try:
        fetch(f"{url}/v1/health")
    except urllib.error.HTTPError as error:
        raise OSError(error_text(error)) from None
    except urllib.error.URLError as error:
        raise OSError(
            f"{error.reason}; set api.certificate to one that is valid and names the host of this URL (`dl2d check` "
            "says which), and restart the daemon"
        ) from None
    return ("verified" if url.startswith("https") else "none: this URL does not leave the machine"), url


def _authenticate(url: str, job: str, credential: str) -> tuple[str, str]:
    try:
        answer = fetch(f"{url}/v1/authenticate", {"rm_id": job, "proof": credential})
    except urllib.error.HTTPError as error:
        raise OSError(f"the daemon refused: {error_text(error)}") from None
    try:
        known = msgspec.json.decode(answer, type=_Authenticated)
    except msgspec.MsgspecError as error:
        raise OSError(
            f"the program at {url} does not answer like this version of dl2d ({error}): install the same version here "
            "and on the daemon's machine, or correct DL2_DAEMON"
        ) from None
    return f"the daemon has verified that job {known.job} is of user {known.user}", url
