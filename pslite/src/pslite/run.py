"""dl2-run: runs one task of an elastic job, or a whole job on this machine."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import msgspec

from pslite.agent import Agent
from pslite.auth import TOKEN_BYTES, parse_token
from pslite.channel import listen
from pslite.coordinator import Coordinator, Settings
from pslite.director import HttpDirector, Watched
from pslite.dmlc import is_launched, launched_listener, make_coordinator, task_variables
from pslite.environment import (
    balance_of,
    encryption_of,
    job_encryption,
    need,
    role_of,
    task_environment,
    watch_seconds,
)
from pslite.errors import PsliteError, UsageError
from pslite.journal import Journal
from pslite.leash import Leash, Leashed
from pslite.local import LocalDirector
from pslite.prefetch import DEFAULT_SECONDS, Prefetch, command_of
from pslite.supervisor import Place, Supervisor, find_place
from pslite.tls import VARIABLE, Encryption

_REGISTER_SECONDS = 300.0
#: how long the tasks of a job that are started here may take to come: all of them, and the first of each role
_GRACE_SECONDS, _START_SECONDS = 60.0, 300.0
_JOB = re.compile(r"[A-Za-z0-9._-]+")

_EPILOG = """\
environment (set by the scheduler; without it a whole job runs on this machine):
  DL2_ROLE         coordinator, worker or server
  DL2_TASK         id of the task, such as worker-3
  DL2_COORDINATOR  host:port of the coordinator
  DL2_TOKEN        the job's token, 64 hexadecimal digits
  DL2_ARCHITECTURE ps or allreduce, for scripts that do not say it (workers)
  DL2_BALANCE      speed or even, as --balance (coordinator)
  DL2_WATCH_SECONDS  between two looks at what a task uses (default 5; 0: none)
  DL2_ENCRYPT      what goes over TLS, the same for all: none, control (the default) or all
  DL2_STATE        folder of the coordinator's log (default: a temporary one; none: no log)
  DL2_DAEMON, DL2_JOB, DL2_CREDENTIAL   the scheduler's job API (coordinator)

exit status: 0 done or drained, 1 the job failed, 2 used wrongly or refused by the scheduler,
128+n the command was ended by signal n.
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dl2-run",
        usage="dl2-run [options] [--] COMMAND [ARGUMENT ...]",
        description="Run COMMAND as a task of an elastic training job. Its role comes from the environment; "
        "parameter servers and coordinators do not run COMMAND themselves.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", type=int, default=1, help="workers, where no scheduler starts them (default 1)")
    parser.add_argument("--servers", type=int, default=1, help="parameter servers, likewise (default 1)")
    parser.add_argument(
        "--encrypt",
        choices=get_args(Encryption),
        help="what goes over TLS between machines: what tasks say to the coordinator (control, the default), gradients "
        "and weights too (all), or none",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress lines on stderr")
    parser.add_argument(
        "--balance", choices=("speed", "even"), default="",
        help="speed: who is slow gets less to do (default); even: all get the same",
    )  # fmt: skip
    near = parser.add_argument_group("before a worker joins")
    near.add_argument(
        "--prefetch", action="append", default=[], metavar="PATH",
        help="read these files into memory: a file, a folder, or a pattern such as 'data/**/*.bin'; may be repeated",
    )  # fmt: skip
    near.add_argument(
        "--prefetch-command", default="", metavar="COMMAND",
        help="run this, without a shell: words as a shell would split them, or a JSON list of words",
    )  # fmt: skip
    near.add_argument(
        "--prefetch-limit", type=_size, default=0, metavar="BYTES",
        help="read no more than that, such as 20G (default: half of the memory that is free)",
    )  # fmt: skip
    near.add_argument(
        "--prefetch-seconds", type=float, default=DEFAULT_SECONDS, metavar="SECONDS",
        help="begin after so long at the latest (default 600)",
    )  # fmt: skip
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND", help="the training command")
    return parser


def _size(text: str) -> int:
    """Return a number of bytes, which may end in k, M, G or T (powers of 1024)."""
    power = "kMGT".find(text[-1:]) + 1 if text[-1:] in tuple("kMGT") else 0
    return int(float(text[:-1] if power else text) * 1024**power)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of dl2-run; returns the exit status."""
    options = _parser().parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    environ = dict(os.environ)
    quiet = options.quiet or environ.get("DL2_QUIET") == "1"
    if quiet:
        environ["DL2_QUIET"] = "1"
    if options.encrypt:
        environ[VARIABLE] = options.encrypt
    if options.balance:
        environ["DL2_BALANCE"] = options.balance

    def say(text: str) -> None:
        if not quiet:
            sys.stderr.write(f"dl2-run: {text}\n")
            sys.stderr.flush()

    try:
        warm = Prefetch(
            paths=tuple(options.prefetch),
            command=command_of(options.prefetch_command) if options.prefetch_command else (),
            limit=options.prefetch_limit,
            seconds=options.prefetch_seconds,
        )
        if is_launched(environ):
            if environ["DMLC_ROLE"] == "scheduler":
                return _launched(environ, say)
            environ.update(task_variables(environ))
        role = role_of(environ)
        if role == "ps":
            return _task(role, [sys.executable, "-m", "pslite.serve"], environ, say)
        if not command:
            raise UsageError("no command given: dl2-run [options] python train.py ...")
        if role == "worker":
            return _task(role, command, with_hooks(environ), say, warm)
        if options.workers < 1 or options.servers < 0:
            raise UsageError("--workers must be at least 1, --servers at least 0")
        tasks = _Tasks(command, options.workers, options.servers, warm, encryption_of(environ))
        if role == "coordinator":
            return _coordinate(tasks, environ, say)
        return _standalone(tasks, environ, say)
    except UsageError as error:
        sys.stderr.write(f"dl2-run: {error}\n")
        return 2
    except PsliteError as error:
        sys.stderr.write(f"dl2-run: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def with_hooks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a script that imports mxnet gets ours with it; see hooks/sitecustomize.py."""
    hooks = str(Path(__file__).with_name("hooks"))
    before = environ.get("PYTHONPATH", "")
    places = [place for place in before.split(os.pathsep) if place and place != hooks]
    return {**environ, "PYTHONPATH": os.pathsep.join([hooks, *places])}


def _task(
    role: Literal["worker", "ps"],
    command: Sequence[str],
    environ: dict[str, str],
    say: Callable[[str], None],
    warm: Prefetch | None = None,
) -> int:
    place = task_environment(environ, role)
    seconds = watch_seconds(environ)
    return Agent(place.identity, place.coordinator, command, environ, say=say, watch_seconds=seconds, warm=warm).run()


@dataclass(frozen=True)
class _Tasks:
    """What the tasks of a job run."""

    command: Sequence[str]
    #: how many, where no scheduler starts them
    workers: int
    servers: int
    warm: Prefetch
    #: what the user wants encrypted; "" for the default
    encrypt: str = ""

    def here(self, environ: Mapping[str, str], present: Collection[str]) -> LocalDirector:
        """Return what starts them on this machine; some may be `present`."""
        options = self.warm.options()
        return LocalDirector(
            self.command, workers=self.workers, servers=self.servers, environ=environ, options=options, present=present
        )

    def argv(self) -> list[str]:
        """Return the command as a scheduler has to start it; dl2-run need not be said where it is without options."""
        # a scheduler drops variables of ours from the environment
        options = [*self.warm.options(), *(["--encrypt", self.encrypt] if self.encrypt else [])]
        return ["dl2-run", *options, "--", *self.command] if options else list(self.command)


def _launched(environ: Mapping[str, str], say: Callable[[str], None]) -> int:
    """Be the coordinator that the scheduler of MXNet's launcher is."""
    place = find_place(environ)

    def make(leash: Leash, listener: socket.socket, journal: Journal | None) -> Coordinator:
        return make_coordinator(environ, say, leash, listener, journal)

    return Supervisor(make, listener=launched_listener(environ), place=place, say=say).run()


def _standalone(tasks: _Tasks, environ: Mapping[str, str], say: Callable[[str], None]) -> int:
    place = find_place(environ)
    token = environ.get("DL2_TOKEN", "")
    if place.port and not token:
        raise UsageError(f"{place.folder} is the log of a job whose DL2_TOKEN must be given to go on with it")
    key = parse_token(token) if token else secrets.token_bytes(TOKEN_BYTES)

    def make(leash: Leash, listener: socket.socket, journal: Journal | None) -> Coordinator:
        return Coordinator(
            job="standalone",
            token=key,
            director=leash,
            say=say,
            settings=Settings(grace=_GRACE_SECONDS, start=_START_SECONDS, balance=balance_of(environ)),
            host="127.0.0.1",
            listener=listener,
            encrypt=job_encryption(environ),
            journal=journal,
        )

    director = tasks.here(environ, place.wanted)
    return Supervisor(make, listener=_listen(place, "127.0.0.1"), place=place, say=say, director=director).run()


def _listen(place: Place, host: str = "") -> socket.socket:
    """Listen where the members of a job that is gone on with look for their coordinator, otherwise anywhere."""
    try:
        return listen(host, place.port)
    except OSError as error:
        raise UsageError(
            f"cannot listen on port {place.port}, at which the members of the job in {place.folder} look for their "
            f"coordinator: {error.strerror}"
        ) from error


# --- coordinator under the scheduler ------------------------------------------------------------------------------


class _Registration(msgspec.Struct):
    job: str
    credential: str
    token: str
    heartbeat_seconds: float = 1.0
    #: the daemon looks on and starts no tasks: they are ours to start, beside the coordinator
    static: bool = False


def _coordinate(tasks: _Tasks, environ: Mapping[str, str], say: Callable[[str], None]) -> int:
    daemon = need(environ, "DL2_DAEMON")
    host = environ.get("DL2_HOST") or _own_name()
    place = find_place(environ)
    with _listen(place) as listener:
        address = f"{host}:{listener.getsockname()[1]}"
        if environ.get("DL2_CREDENTIAL"):
            registration = _Registration(
                job=need(environ, "DL2_JOB"), credential=environ["DL2_CREDENTIAL"], token=need(environ, "DL2_TOKEN")
            )
        else:
            registration = _register(daemon, tasks.argv(), address, environ, say)
        if not _JOB.fullmatch(registration.job):
            raise UsageError(f"the job name {registration.job!r} is malformed")
        token = parse_token(registration.token)
        settings = Settings(heartbeat=registration.heartbeat_seconds, balance=balance_of(environ))
        own: LocalDirector | None = None
        if registration.static:
            say(
                f"the scheduler only looks on: {tasks.workers} workers and {tasks.servers} servers on this node, "
                "to the end"
            )
            own = tasks.here(environ, place.wanted)
            settings = replace(settings, grace=_GRACE_SECONDS, start=_START_SECONDS)

        def make(leash: Leash, listener: socket.socket, journal: Journal | None) -> Coordinator:
            heartbeats = HttpDirector(daemon, registration.job, registration.credential, say=say)
            return Coordinator(
                job=registration.job,
                token=token,
                director=Watched(leash, heartbeats) if registration.static else Leashed(heartbeats, leash),
                say=say,
                settings=settings,
                address_host=host,
                listener=listener,
                encrypt=job_encryption(environ),
                journal=journal,
            )

        return Supervisor(make, listener=listener, place=place, say=say, director=own).run()


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
) -> _Registration:
    """Make ourselves known to the daemon, as the anchor that a user's batch job is."""
    rm_id = need(environ, "SLURM_JOB_ID")
    kept = {k: v for k, v in environ.items() if not k.startswith(("SLURM_", "DL2_", "BASH_FUNC_"))}
    deadline = time.monotonic() + _REGISTER_SECONDS
    pause = 0.5
    while True:
        body = {
            "rm_id": rm_id,
            "proof": _proof(rm_id, environ),
            "argv": list(command),
            "cwd": os.getcwd(),  # noqa: PTH109  (a string is what is wanted)
            "env": kept,
            "address": address,
        }
        request = urllib.request.Request(  # noqa: S310  (http or https: HttpDirector checks the same URL)
            f"{daemon.rstrip('/')}/v1/register",
            data=msgspec.json.encode(body),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as response:  # noqa: S310
                return msgspec.json.decode(response.read(1 << 20), type=_Registration)
        except urllib.error.HTTPError as error:
            text = _error_text(error)
            if error.code != 503:
                raise UsageError(f"the scheduler refused this job: {text}") from None
            reason = text
        except (OSError, msgspec.MsgspecError) as error:
            reason = str(error)
        if time.monotonic() + pause > deadline:
            raise UsageError(f"the scheduler at {daemon} did not take this job within 5 minutes: {reason}")
        say(f"the scheduler at {daemon} is not available ({reason}); trying again")
        time.sleep(pause)
        pause = min(15.0, 2 * pause)


def _error_text(error: urllib.error.HTTPError) -> str:
    with error:
        data = error.read(65536)
    try:
        return str(msgspec.json.decode(data, type=dict[str, object])["error"])
    except (msgspec.MsgspecError, KeyError):
        return f"{error.code} {error.reason}"


def _proof(rm_id: str, environ: Mapping[str, str]) -> str:
    """Return a munge credential that proves to the daemon which user we are."""
    command = ["munge", "-s", f"dl2d:{rm_id}"]
    if environ.get("MUNGE_SOCKET"):
        command += ["-S", environ["MUNGE_SOCKET"]]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except FileNotFoundError:
        raise UsageError("munge is not installed on this node: the scheduler cannot know whose job this is") from None
    except subprocess.TimeoutExpired:
        raise UsageError("munge did not answer within 30 s") from None
    except subprocess.CalledProcessError as error:
        raise UsageError(f"munge failed: {error.stderr.strip()}") from None
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
