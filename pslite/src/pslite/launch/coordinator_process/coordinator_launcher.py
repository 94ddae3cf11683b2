"""The process that the user started: it coordinates a job alone, as MXNet's scheduler, or under dl2d."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from pslite.coordinator import Coordinator, Settings
from pslite.coordinator.stall_detector import ProgressRule
from pslite.errors import PsliteError, UsageError
from pslite.job.environment_passed_to_tasks import remarks, user_environment
from pslite.launch.coordinator_process.coordinator_supervisor import LogLocation, Supervisor, locate_log
from pslite.launch.coordinator_process.mxnet_launcher import OpenMembership, launched_listener
from pslite.launch.coordinator_process.slurm_batch_script import refuse_container, submission_options
from pslite.launch.coordinator_process.task_processes_on_this_machine import LocalTasks
from pslite.launch.daemon_connection.daemon_http import is_loopback
from pslite.launch.daemon_connection.job_registration import Registration, register
from pslite.launch.daemon_connection.membership_from_daemon import DaemonClient, report_failure
from pslite.launch.daemon_connection.munge_credentials import munge_credential, registration_payload
from pslite.launch.environment_parsing import balance_of, encryption_of, need, progress_deadline
from pslite.net.authentication import TOKEN_BYTES, parse_token
from pslite.net.tcp_sockets import listen

#: how long the tasks of a job that are started here may take to come: all of them, and the first of each role
_GRACE_SECONDS, _START_SECONDS = 60.0, 300.0
_NOT_AVAILABLE = (
    "; ask an administrator to run `dl2d check --slurm-probe`, which says what is missing; `dl2-run --standalone` "
    "trains without dl2d, inside this job alone"
)
_JOB = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Tasks:
    """What the tasks of a job run."""

    command: Sequence[str]
    #: how many, where no scheduler starts them
    workers: int
    servers: int
    #: what the user wants encrypted; "" for the default
    encrypt: str = ""
    #: what the user wants of replicas; "" for what the script says
    durability: str = ""

    def local(self, environ: Mapping[str, str], present: Collection[str]) -> LocalTasks:
        """Return what starts them on this machine; some may be `present`."""
        return LocalTasks(self.command, workers=self.workers, servers=self.servers, environ=environ, present=present)

    def argv(self) -> list[str]:
        """Return the command as a scheduler has to start it; dl2-run need not be said where it is without options."""
        # a scheduler drops pslite's variables from the environment
        chosen = {"--encrypt": self.encrypt, "--durability": self.durability}
        options = [word for option, value in chosen.items() if value for word in (option, value)]
        return ["dl2-run", *options, "--", *self.command] if options else list(self.command)


def _settings(environ: Mapping[str, str]) -> Settings:
    """Return a coordinator's settings, with those that the user has set."""
    return Settings(balance=balance_of(environ), progress=ProgressRule(progress_deadline(environ)))


def _coordinator(
    environ: Mapping[str, str], say: Callable[[str], None], *, job: str, token: str, host: str, settings: Settings
) -> Callable[..., Coordinator]:
    """Return what makes a job's coordinator for a `Supervisor`."""
    return partial(
        Coordinator, job=job, token=parse_token(token), say=say, settings=settings, host=host,
        encrypt=encryption_of(environ),
    )  # fmt: skip


def launched(environ: Mapping[str, str], say: Callable[[str], None]) -> int:
    """Be the coordinator that the scheduler of MXNet's launcher is; returns the exit status.

    Raises
    ------
    UsageError
        a variable is absent or malformed.

    """
    settings = replace(_settings(environ), grace=_GRACE_SECONDS)
    token, host = need(environ, "DL2_TOKEN"), need(environ, "DMLC_PS_ROOT_URI")
    make = _coordinator(environ, say, job="dmlc", token=token, host=host, settings=settings)
    location, source = locate_log(environ), OpenMembership.of(environ)
    return Supervisor(make, listener=launched_listener(environ), location=location, say=say, source=source).run()


def standalone(tasks: Tasks, environ: Mapping[str, str], say: Callable[[str], None]) -> int:
    """Go through a whole job on this machine; returns the exit status.

    Raises
    ------
    UsageError
        a variable is malformed, or the log is of a job that cannot be gone on with.

    """
    location = locate_log(environ)
    token = environ.get("DL2_TOKEN", "")
    if location.port and not token:
        raise UsageError(
            f"DL2_TOKEN is not set: to continue the job whose log is in {location.folder}, set it to that job's token"
        )
    host, token = "127.0.0.1", token or secrets.token_hex(TOKEN_BYTES)
    settings = replace(_settings(environ), grace=_GRACE_SECONDS, start=_START_SECONDS)
    make = _coordinator(environ, say, job="standalone", token=token, host=host, settings=settings)
    local = tasks.local(environ, location.wanted)
    return Supervisor(make, listener=_listen(location, host), location=location, say=say, tasks=local).run()


def _listen_as(host: str, location: LogLocation, say: Callable[[str], None]) -> socket.socket:
    """Listen on the address of the name under which members reach this host, or on all if it has none of its own."""
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    except OSError:
        found = []
    for address in found:
        # /etc/hosts may give a loopback address for this host's name, which other hosts resolve to another address
        if is_loopback(address) and host not in (address, "localhost"):
            continue
        with contextlib.suppress(OSError):
            listen(address).close()
            return _listen(location, address)
    if found and all(map(is_loopback, found)):
        say(
            f"{host} resolves to {found[0]} here, which other nodes cannot reach: members are accepted on all "
            "addresses of this host; if none come, correct /etc/hosts or set DL2_HOST"
        )
    else:
        text = "members are accepted on all of its addresses; set DL2_HOST to one of them"
        say(f"{host} is no address of this host: {text}")
    return _listen(location)


def _listen(location: LogLocation, host: str = "") -> socket.socket:
    """Listen on the port to which the members of a job that is continued reconnect, otherwise on a free port."""
    try:
        return listen(host, location.port)
    except OSError as error:
        raise UsageError(
            f"cannot listen on port {location.port}, to which the members of the job in {location.folder} reconnect: "
            f"{error.strerror}"
        ) from error


def coordinate(
    tasks: Tasks, environ: Mapping[str, str], say: Callable[[str], None], registration: Registration | None = None
) -> int:
    """Coordinate the job under dl2d that this batch job is, which registers itself if need be; returns the exit status.

    A container of YARN has a `registration` already.

    Raises
    ------
    UsageError
        a variable is absent or malformed, or the daemon did not take the job.

    """
    try:
        return _coordinate(tasks, environ, say, registration)
    except PsliteError as error:
        if environ.get("DL2_CREDENTIAL"):
            job, credential = need(environ, "DL2_JOB"), environ["DL2_CREDENTIAL"]
            report_failure(DaemonClient(need(environ, "DL2_DAEMON"), job, credential, say=say), str(error))
        raise


def _coordinate(
    tasks: Tasks, environ: Mapping[str, str], say: Callable[[str], None], registration: Registration | None
) -> int:
    daemon = need(environ, "DL2_DAEMON")
    host = environ.get("DL2_HOST") or _own_name()
    location = locate_log(environ)
    with _listen_as(host, location, say) as listener:
        address = f"{host}:{listener.getsockname()[1]}"
        if registration is None and environ.get("DL2_CREDENTIAL"):
            registration = Registration(
                job=need(environ, "DL2_JOB"), credential=environ["DL2_CREDENTIAL"], token=need(environ, "DL2_TOKEN")
            )
        elif registration is None:
            registration = _register(daemon, tasks.argv(), address, environ, say)
        if not _JOB.fullmatch(registration.job):
            raise UsageError(
                f"the daemon answered with the job id {registration.job!r}, which has characters that are not allowed"
            )
        settings = replace(_settings(environ), heartbeat=registration.heartbeat_seconds)
        own: LocalTasks | None = None
        if registration.static:
            say(
                f"the daemon only observes this job: {tasks.workers} workers and {tasks.servers} servers run on "
                "this node until it ends"
            )
            own = tasks.local(environ, location.wanted)
            settings = replace(settings, grace=_GRACE_SECONDS, start=_START_SECONDS)
        make = _coordinator(environ, say, job=registration.job, token=registration.token, host=host, settings=settings)
        source = DaemonClient(daemon, registration.job, registration.credential, say=say)
        return Supervisor(make, listener=listener, location=location, say=say, tasks=own, source=source).run()


def _own_name() -> str:
    """Return the name under which other nodes reach this one; a machine that cannot look itself up is on its own."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "127.0.0.1"
    return name


def _register(
    daemon: str, command: Sequence[str], address: str, environ: Mapping[str, str], say: Callable[[str], None]
) -> Registration:
    """Make ourselves known to the daemon, as the anchor that a user's batch job is."""
    rm_id = need(environ, "SLURM_JOB_ID")
    refuse_container(environ)
    given = submission_options(environ)
    kept = user_environment(environ)
    for line in remarks(kept):
        say(line)

    def body() -> dict[str, object]:
        return {
            "rm_id": rm_id,
            "proof": munge_credential(registration_payload(rm_id), environ),
            "argv": list(command),
            "cwd": os.getcwd(),  # noqa: PTH109  (a string is what is wanted)
            "env": dict(kept.variables),
            "address": address,
            **({"options": given} if given else {}),  # an older daemon knows no options
        }

    registration = register(daemon, body, say, _NOT_AVAILABLE)
    for line in registration.remarks:
        say(line)
    return registration
