"""Submitting and cancelling jobs through slurmrestd, with a JSON Web Token of the daemon's user.

slurmctld lets root and SlurmUser submit jobs of any user this way, so the daemon need not be root. Releases before
24.11 cannot be used: Slurm 22.05 takes no node for a job (``required_nodes`` is "Disabled key").
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

import httpx2
import msgspec

from dl2d.core.errors import Rejected, Unavailable
from dl2d_slurm.commands import Answer, Commands, configured, failure
from dl2d_slurm.observed_jobs import hosts, limit_seconds
from dl2d_slurm.output_fields import count
from dl2d_slurm.rpc_rate import RpcRate, is_overloaded

#: Versions of the data parser with the fields used here, of Slurm 24.11 to 26.05; the first that is there is used.
VERSIONS: Final = ("v0.0.42", "v0.0.43", "v0.0.44", "v0.0.45")
_TOKEN_SECONDS: Final = 3600
_SOCKET: Final = "unix:"
_USER_ID: Final = re.compile(r"\((\d+)\)")
_MEBIBYTE: Final = 1024**2


class _Error(msgspec.Struct):
    description: str = ""
    error: str = ""


class _JobError(msgspec.Struct):
    message: str = ""


class _JobStatus(msgspec.Struct):
    step_id: str = ""
    error: _JobError = msgspec.field(default_factory=_JobError)


class _Reply(msgspec.Struct):
    job_id: int = 0
    errors: tuple[_Error, ...] = ()
    #: What befell each job that was to be cancelled and was not.
    status: tuple[_JobStatus, ...] = ()


def _number(value: int | None) -> dict[str, object]:
    return {"set": True, "number": value} if value is not None else {"set": True, "infinite": True}


def _memory(text: str) -> dict[str, object]:
    return _number((count(text) or 0) // _MEBIBYTE)


def _minutes(text: str) -> dict[str, object]:
    seconds = limit_seconds(text if ":" in text or "-" in text else f"{text}:00")
    return _number(None if seconds is None else int(seconds // 60))


def _gres(text: str) -> str:
    return ",".join(f"gres/{each}" for each in text.split(","))


#: Fields of a job by the options of sbatch, with what makes their values of the options'. Those without a field are
#: about sbatch itself.
_FIELDS: Final[Mapping[str, tuple[str, Callable[[str], object]]]] = {
    "--account": ("account", str),
    "--chdir": ("current_working_directory", str),
    "--comment": ("comment", str),
    "--constraint": ("constraints", str),
    "--cpus-per-task": ("cpus_per_task", int),
    "--exclude": ("excluded_nodes", hosts),
    "--export": ("", str),
    "--gid": ("group_id", str),
    "--gres": ("tres_per_node", _gres),
    "--job-name": ("name", str),
    "--licenses": ("licenses", str),
    "--mem": ("memory_per_node", _memory),
    "--nice": ("nice", int),
    "--no-requeue": ("requeue", bool),
    "--nodelist": ("required_nodes", hosts),
    "--nodes": ("nodes", str),
    "--ntasks": ("tasks", int),
    "--output": ("standard_output", str),
    "--parsable": ("", str),
    "--partition": ("partition", str),
    "--propagate": ("", str),
    "--qos": ("qos", str),
    "--reservation": ("reservation", str),
    "--time": ("time_limit", _minutes),
    "--uid": ("user_id", str),
    "--wckey": ("wckey", str),
}


def job_fields(options: Sequence[str]) -> dict[str, object]:
    """Fields of slurmrestd's ``job_desc_msg`` for options of sbatch. Raises ``Rejected`` for one that has none here."""
    fields: dict[str, object] = {}
    for option in options:
        name, _, value = option.partition("=")
        if name not in _FIELDS:
            raise Rejected(f"{name} cannot be used with backend: rest, which knows {', '.join(sorted(_FIELDS))}")
        field, made_of = _FIELDS[name]
        if field:
            fields[field] = made_of(value)
    return fields


class RestControl:
    """``JobControl`` by calls of slurmrestd. Thread-safe.

    Parameters
    ----------
    address
        ``unix:`` and the path of a socket, or a URL.
    commands
        Run scontrol, which makes the tokens.
    time_limit
        Seconds after which a call counts as unanswered.
    path
        PATH of jobs.
    timer
        Seconds on a monotonic clock.
    """

    def __init__(
        self,
        address: str,
        commands: Commands,
        rate: RpcRate,
        *,
        time_limit: float,
        path: str,
        timer: Callable[[], float],
    ) -> None:
        socket = address.removeprefix(_SOCKET) if address.startswith(_SOCKET) else None
        self._client = httpx2.Client(
            transport=httpx2.HTTPTransport(uds=socket),
            base_url=address if socket is None else "http://localhost",
            timeout=time_limit,
            trust_env=False,
        )
        self._address, self._commands, self._rate, self._timer = address, commands, rate, timer
        self._path = path
        self._lock = threading.Lock()
        self._token, self._renew_at = "", 0.0
        self._version = ""

    def check(self) -> None:
        """See ``JobControl``: finds the version of the API."""
        for version in VERSIONS:
            status, text = self._call("GET", f"/slurm/{version}/ping/", "ping")
            if status == httpx2.codes.OK:
                self._version = version
                return
        raise Unavailable(
            f"slurmrestd at {self._address} has none of the APIs {VERSIONS[0]} to {VERSIONS[-1]}, those of Slurm 24.11 "
            "to 26.05; use backend: command",
            said=text[:500],
        )

    def privileged(self) -> Collection[int]:
        """See ``JobControl``: root and SlurmUser."""
        number = _USER_ID.search(configured(self._commands, "SlurmUser"))
        return (0, int(number[1])) if number is not None else (0,)

    def submit(self, options: Sequence[str], script: str, more: Mapping[str, str] | None = None) -> Answer:
        """See ``JobControl``. One call."""
        environment = [f"{name}={value}" for name, value in {"PATH": self._path, **(more or {})}.items()]
        job = {**job_fields(options), "environment": environment, "script": script}
        reply = self._ask("POST", "job/submit", {"job": job})
        said = _complaints(reply.errors)
        return Answer(1 if said or not reply.job_id else 0, str(reply.job_id or ""), said)

    def cancel(self, jobs: Sequence[str], *, state: str = "", signal: str = "") -> Answer:
        """See ``JobControl``. One call."""
        body: dict[str, object] = {"jobs": list(jobs)}
        body |= {"job_state": [state]} if state else {}
        body |= {"signal": signal, "flags": ["BATCH_JOB"]} if signal else {}
        reply = self._ask("DELETE", "jobs/", body)
        said = _complaints(reply.errors) or "\n".join(f"{each.step_id}: {each.error.message}" for each in reply.status)
        return Answer(1 if said else 0, "", said)

    def close(self) -> None:
        """See ``JobControl``."""
        self._client.close()

    def _ask(self, method: str, path: str, body: object) -> _Reply:
        if not self._version:
            self.check()
        status, text = self._call(method, f"/slurm/{self._version}/{path}", path.strip("/"), body)
        try:
            reply = msgspec.json.decode(text, type=_Reply)
        except (msgspec.DecodeError, UnicodeEncodeError):
            reply = None
        # A proxy may answer with JSON, too; slurmrestd says what was wrong.
        if reply is None or (status != httpx2.codes.OK and not reply.errors):
            self._version = ""  # it may be another slurmrestd by now
            raise Unavailable(f"slurmrestd at {self._address} answered {status}", said=text[:500])
        return reply

    def _call(self, method: str, path: str, what: str, body: object = None) -> tuple[int, str]:
        """Status and text of an answer. ``what`` stands for the call in the statistics."""
        headers = {"X-SLURM-USER-TOKEN": self._own_token()}
        begin, overloaded = self._rate.begins((f"slurmrestd {what}",)), False
        try:
            answer = self._client.request(method, path, headers=headers, json=body)
            overloaded = not answer.is_success and is_overloaded(answer.text)
        except httpx2.TimeoutException as error:
            overloaded = True
            raise Unavailable(f"slurmrestd at {self._address} did not answer in time", said=str(error)) from None
        except httpx2.TransportError as error:
            raise Unavailable(f"slurmrestd at {self._address} does not answer", said=str(error)) from None
        finally:
            self._rate.ended(f"slurmrestd {what}", begin, overloaded=overloaded)
        if answer.status_code in (httpx2.codes.UNAUTHORIZED, httpx2.codes.NETWORK_AUTHENTICATION_REQUIRED):
            self._renew_at = 0.0
        return answer.status_code, answer.text

    def _own_token(self) -> str:
        """A token of the daemon's user, made anew after half of its time."""
        with self._lock:
            if not self._token or self._timer() >= self._renew_at:
                answer = self._commands.run("scontrol", "token", f"lifespan={_TOKEN_SECONDS}")
                name, _, token = answer.stdout.strip().partition("=")
                if answer.status != 0 or name != "SLURM_JWT":
                    raise failure("scontrol makes no token for slurmrestd (is auth/jwt in AuthAltTypes?)", answer)
                self._token, self._renew_at = token, self._timer() + _TOKEN_SECONDS / 2
            return self._token


def _complaints(errors: Sequence[_Error]) -> str:
    return "\n".join(f"{each.description}: {each.error}" for each in errors)
