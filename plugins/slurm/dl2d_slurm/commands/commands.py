"""Slurm's commands: run without a shell, limited in time and rate; typed errors from what they say."""

from __future__ import annotations

import errno
import re
import subprocess
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import structlog

from dl2d.core.errors import Denied, NotFound, Rejected, ResourceManagerError, Unavailable
from dl2d_slurm.commands.rpc_rate import OVERLOADED, RpcRate, is_overloaded

log = structlog.get_logger(__name__)

#: What Slurm and munge say when they cannot answer now, whatever was asked.
_UNAVAILABLE = re.compile(
    r"unable to contact slurm|connect failure|connection refused|connection timed out|socket timed out"
    r"|zero bytes were transmitted|temporarily unable|temporarily unavailable|unexpected message received"
    r"|controller (?:not responding|in standby)|in standby mode|could not establish a configuration source"
    r"|failed to fetch config|authentication (?:error|credential)|auth.munge|did you start munged|munge_|rate limit"
    r"|incompatible versions|communication|maxjobcount",
    re.IGNORECASE,
)
_DENIED = re.compile(r"only permitted by root|permission denied|invalid user id|not permitted", re.IGNORECASE)
_NOT_FOUND = re.compile(r"invalid node name|invalid job id", re.IGNORECASE)
#: Maximum number of job ids in one call, well below the limit on the length of a command line.
MAX_IDS = 500
#: Names of environment variables that shells can set.
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Of a user as slurm.conf is shown: ``slurm(64030)``.
_USER_ID = re.compile(r"\((\d+)\)")
_MAX_SHOWN = 2000
_DEFAULT_PATH = "/usr/local/bin:/usr/bin:/bin"
#: File mode mask of commands. sbatch hands it on to the job: the user's files, not the daemon's.
UMASK = 0o022


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command that ended left behind."""

    status: int
    stdout: str
    stderr: str
    #: Id of the job that was submitted; empty if there is none.
    job_id: str = ""


@dataclass(eq=False)
class Commands:
    """Runs commands found on the daemon's PATH with a small environment."""

    #: Complete environment of every command.
    environment: Mapping[str, str]
    #: Seconds after which a command is killed.
    time_limit: float
    #: Counts the commands.
    rate: RpcRate

    def run(
        self,
        *argv: str,
        stdin: str = "",
        more: Mapping[str, str] | None = None,
        seconds: float | None = None,
        overloaded_if_late: bool = False,
    ) -> Answer:
        """Run a command to its end, within other seconds than usual if given; its exit status is the caller's to judge.

        ``overloaded_if_late``: whether a timeout counts as an overload of slurmctld. Commands about one user may wait
        for the name service, and those with long answers for something else: of these, what they say before they are
        killed counts.

        Raises
        ------
        Rejected
            Its arguments are longer than the system allows.
        Unavailable
            The command is not installed or cannot be run, or did not end in time.
        """
        limit = self.time_limit if seconds is None else seconds
        begin, overloaded, why = self.rate.begins(argv), False, OVERLOADED
        try:
            done = subprocess.run(
                argv,
                input=stdin.encode("utf-8", "surrogateescape"),
                capture_output=True,
                timeout=limit,
                check=False,
                env={**self.environment, **(more or {})},
                cwd="/",
                umask=UMASK,
                start_new_session=True,
            )
        except FileNotFoundError:
            path = self.environment.get("PATH", "")
            raise Unavailable(f"{argv[0]} is not installed (PATH is {path})") from None
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise Rejected(f"{argv[0]}: its options are too long for the system", said=str(error)) from None
            raise Unavailable(f"{argv[0]} cannot be run", said=str(error)) from None
        except subprocess.TimeoutExpired as error:
            said = (error.stderr or b"").decode(errors="replace")
            late = f"{argv[0]} did not answer within {limit:g} s"
            overloaded = overloaded_if_late or is_overloaded(said)
            why = OVERLOADED if is_overloaded(said) else late
            raise Unavailable(late, said=_short(said)) from None
        else:
            # A rate-limited command retries and exits 0; its message still counts as an overload.
            stderr = done.stderr.decode("utf-8", "replace")
            overloaded = is_overloaded(stderr)
        finally:
            self.rate.ended(argv[0], begin, overloaded=overloaded, why=why)
        if done.returncode == 0 and stderr.strip():
            log.debug("noise", command=argv[0], said=_short(stderr))
        return Answer(done.returncode, done.stdout.decode("utf-8", "replace"), stderr)

    def ask(self, *argv: str, more: Mapping[str, str] | None = None, seconds: float | None = None) -> str:
        """Output of a command. Raises as ``run``, and the error of ``failure`` where it ends badly."""
        answer = self.run(*argv, more=more, seconds=seconds)
        if answer.status != 0:
            raise failure(f"{' '.join(argv)} failed", answer)
        return answer.stdout


class TokenBucket:
    """At most ``rate`` times a second on average, with bursts of up to a second's worth. Thread-safe.

    Parameters
    ----------
    rate
        Tokens that come in each second.
    clock
        Time in seconds; may jump, which costs at most a burst.
    sleep
        Waits for some seconds.
    """

    def __init__(self, rate: float, *, clock: Callable[[], float], sleep: Callable[[float], None]) -> None:
        self._rate = rate
        self._most = max(1.0, rate)
        self._clock = clock
        self._sleep = sleep
        self._tokens = self._most
        self._at = clock()
        #: Held while a thread waits for its token, so that others wait behind it.
        self._taking = threading.Lock()

    def take(self) -> None:
        """Take one token, after waiting for it if there is none."""
        with self._taking:
            now = self._clock()
            self._tokens = min(self._most, self._tokens + max(0.0, now - self._at) * self._rate)
            self._at = now
            if self._tokens < 1:
                wait = (1 - self._tokens) / self._rate
                self._sleep(wait)
                self._tokens += wait * self._rate
                self._at += wait
            self._tokens -= 1


def command_environment(slurm_conf: str, given: Mapping[str, str]) -> dict[str, str]:
    """The environment of Slurm's commands, from that of this process; ``slurm_conf`` replaces its SLURM_CONF.

    sbatch hands all of it on to the jobs, so there is no more of it than the commands need.
    """
    conf = slurm_conf or given.get("SLURM_CONF", "")
    return {"PATH": given.get("PATH", _DEFAULT_PATH), **({"SLURM_CONF": conf} if conf else {})}


def configured(commands: Commands, name: str) -> str:
    """A value of slurm.conf as slurmctld has it. Raises ``Unavailable``."""
    answer = commands.run("scontrol", "show", "config")
    match = re.search(rf"^{re.escape(name)}\s*=\s*(\S+)", answer.stdout, re.MULTILINE)
    if answer.status != 0 or match is None:
        raise Unavailable(f"cannot ask Slurm for its {name}", said=answer.stderr)
    return match[1]


def installed_version(commands: Commands) -> str:
    """Version of Slurm's commands, such as 22.05.8. Raises ``Unavailable``."""
    answer = commands.run("sinfo", "--version")
    if answer.status != 0 or not answer.stdout.split():
        raise Unavailable("cannot ask Slurm for its version", said=answer.stderr)
    return answer.stdout.split()[-1]


def privileged_users(commands: Commands) -> tuple[int, ...]:
    """Ids of the users of whom slurmctld takes jobs for others: root and SlurmUser. Raises ``Unavailable``."""
    number = _USER_ID.search(configured(commands, "SlurmUser"))
    return (0, int(number[1])) if number is not None else (0,)


def failure(what: str, answer: Answer) -> ResourceManagerError:
    """The typed error for a command that ended badly, with the command's own words."""
    said = _short(answer.stderr) or f"exit status {answer.status}, without a message"
    kind: type[ResourceManagerError] = Rejected
    if _UNAVAILABLE.search(said):
        kind = Unavailable
    elif _DENIED.search(said):
        kind = Denied
    elif _NOT_FOUND.search(said):
        kind = NotFound
    return kind(what, said=said)


def _short(said: str) -> str:
    text = "; ".join(line.strip() for line in said.splitlines() if line.strip())
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + " ..."
