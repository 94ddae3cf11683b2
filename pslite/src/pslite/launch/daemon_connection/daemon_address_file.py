"""File that says where the daemon's job API is: the daemon writes it, and jobs that users start themselves read it."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import stat
import sys
import urllib.parse
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from pslite.errors import UsageError
from pslite.launch.daemon_connection.daemon_http import CERTIFICATE_VARIABLE, UID_VARIABLE, is_loopback

DAEMON_VARIABLE = "DL2_DAEMON"
_NAME = "dl2d/job-api.json"
_SYSTEM = Path("/etc")
#: folder in which the guide installs dl2d for all nodes
_DOCUMENTED_PREFIX = Path("/opt/dl2d")
_MAX_BYTES = 1 << 20
#: more than the kernel follows
_MAX_LINKS = 64
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class DaemonAddress(msgspec.Struct, frozen=True):
    """Content of the file."""

    #: base URL of the job API
    url: str
    #: value of DL2_DAEMON_CERTIFICATE; "" for the authorities that the nodes trust
    certificate: str = ""
    #: name of the daemon's cluster
    cluster: str = ""
    #: machine on which the daemon runs
    host: str = ""
    #: the daemon's account there; None of a daemon that did not say so
    uid: int | None = None

    def variables(self) -> dict[str, str]:
        """Return the variables by which a process reaches this daemon."""
        found = {DAEMON_VARIABLE: self.url, CERTIFICATE_VARIABLE: self.certificate}
        found[UID_VARIABLE] = "" if self.uid is None else str(self.uid)
        return {name: value for name, value in found.items() if value}


def default_file(prefix: str = sys.prefix) -> Path:
    """Return the file of the installation in `prefix`: below it, or below /etc where it is the system's."""
    root = _SYSTEM if Path(prefix) in (Path("/usr"), Path("/usr/local")) else Path(prefix) / "etc"
    return root / _NAME


def search_files() -> tuple[Path, ...]:
    """Return the files in which a job looks: that of its node, of its installation, and of the documented one."""
    found = (_SYSTEM / _NAME, default_file(), default_file(str(_DOCUMENTED_PREFIX)))
    return tuple(dict.fromkeys(found))


def read_address(path: Path) -> DaemonAddress:
    """Read a file.

    Raises
    ------
    OSError
        it cannot be read; FileNotFoundError if there is none.
    UsageError
        its content is malformed, or another user may have written it.

    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if problem := _distrust(path, status, os.geteuid()):
            raise UsageError(f"{path} is not used: {problem}")
        data = file.read(_MAX_BYTES)
    try:
        address = msgspec.json.decode(data, type=DaemonAddress)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{path} is malformed: {error}") from None
    if not address.url.startswith(("http://", "https://")):
        raise UsageError(f"{path} is malformed: url is {address.url[:200]!r}")
    return address


def distrust_of_others(path: Path) -> str:
    """Return why users who do not own the file do not use it; "" if they use it, too."""
    return _distrust(path, path.stat())


def _distrust(path: Path, status: os.stat_result, *readers: int) -> str:
    """Return why a file may be somebody else's; "" if it is not.

    It is not if it belongs to root, to the account of this installation or to a reader, or to an account to which root
    has given a place for it: then only this account and those can change the folders above it.
    """
    if not stat.S_ISREG(status.st_mode):
        return "it is not a file"
    if status.st_mode & _OTHERS_WRITE:
        return f"others than its owner may write it (mode {stat.S_IMODE(status.st_mode):04o}): run `chmod go-w {path}`"
    owner, trusted = status.st_uid, {0, Path(__file__).stat().st_uid, *readers}
    for place in () if owner in trusted else (*_places(path), path.resolve()):
        if folder := _folder_of_others(place, owner, trusted | {owner}):
            return (
                f"it belongs to uid {owner}, which is neither root nor the owner of this installation, and others than "
                f"these can change {folder}: let root or uid {owner} own this folder, and nobody else write to it"
            )
    return ""


def _places(path: Path) -> Iterator[Path]:
    """Yield the path, and where each link on the way to the file leads: who can change its folder can replace it."""
    place = path.absolute()
    for _ in range(_MAX_LINKS):
        yield place
        link = next((each for each in (*reversed(place.parents), place) if each.is_symlink()), None)
        if link is None:
            return
        place = link.parent / link.readlink() / place.relative_to(link)


def _folder_of_others(path: Path, owner: int, trusted: Collection[int]) -> Path | None:
    """Return the first folder above a file of `owner` that others than the trusted accounts can change."""
    for folder in path.parents:
        status = folder.stat()
        # Of what is in a sticky folder others can replace only their own.
        is_kept = status.st_mode & stat.S_ISVTX and owner == 0
        if status.st_uid not in trusted or (status.st_mode & _OTHERS_WRITE and not is_kept):
            return folder
        owner = status.st_uid
    return None


def find_address(files: Sequence[Path] | None = None) -> tuple[Path, DaemonAddress]:
    """Return the first file that can be used (by default of `search_files`), and its content.

    Raises
    ------
    UsageError
        there is none, or it gives the address of another machine's loopback interface; says what to do.

    """
    problems = []
    searched = search_files() if files is None else files
    for path in searched:
        try:
            address = read_address(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            problems.append(f"{path}: {error.strerror}")
        except UsageError as error:
            problems.append(str(error))
        else:
            _check_reachable(path, address)
            return path, address
    here = socket.gethostname()
    there = "; ".join(problems) or f"{here} has none of {', '.join(map(str, searched))}"
    raise UsageError(
        f"no address of a daemon was found: {there}. The daemon writes this file (api.address_file) where it starts: "
        f"it must be in a folder that {here} shares, or {searched[0]} a link to it"
    )


def renew_certificate(url: str, error: BaseException) -> None:
    """Trust the certificate that an address file now has for the daemon at this URL.

    `error` is that of a failed request: nothing is done unless it is that the certificate was refused.
    """
    if not isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError):
        return
    with contextlib.suppress(UsageError):
        _, address = find_address()
        if address.certificate and address.url.rstrip("/") == url.rstrip("/"):
            os.environ[CERTIFICATE_VARIABLE] = address.certificate


def _check_reachable(path: Path, address: DaemonAddress) -> None:
    here = socket.gethostname()
    host = urllib.parse.urlsplit(address.url).hostname or ""
    if is_loopback(host) and address.host not in ("", here):
        raise UsageError(
            f"{path} says {address.url}, which {here} cannot reach, since the daemon runs on {address.host}: ask the "
            "administrator to set api.host to 0.0.0.0, api.advertise to a URL with the daemon's host name, and "
            "api.certificate"
        )
