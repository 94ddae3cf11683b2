"""Submitting and cancelling jobs through slurmrestd, with a JSON Web Token of the daemon's user.

slurmctld lets root and SlurmUser submit jobs of any user this way, so the daemon need not be root. Releases before
24.11 cannot be used: Slurm 22.05 takes no node for a job (``required_nodes`` is "Disabled key").
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx2
import msgspec

from dl2d.core.errors import Unavailable
from dl2d.http_call_deadline import Deadline, DeadlineTransport
from dl2d_slurm.commands.commands import Answer
from dl2d_slurm.commands.rpc_rate import is_overloaded
from dl2d_slurm.submission.job_fields_for_rest_and_pyslurm import JobFieldsControl, job_description
from dl2d_slurm.submission.json_web_token import JsonWebToken

#: Versions of the data parser with the fields used here, of Slurm 24.11 to 26.05; the first that is there is used.
VERSIONS = ("v0.0.42", "v0.0.43", "v0.0.44", "v0.0.45")
#: Maximum size of an answer. One about 500 jobs that were not cancelled has some 200 kB.
_MAX_ANSWER_BYTES = 4 << 20
_SOCKET = "unix:"
#: What to do where slurmrestd takes no token, and where slurmctld does not take the daemon's.
_HINTS: Mapping[int, str] = {
    httpx2.codes.UNAUTHORIZED: "slurmrestd takes no token (start it with -a rest_auth/jwt and SLURM_JWT=daemon), or is "
    "older than Slurm 24.11 (use backend: command)",
    httpx2.codes.NETWORK_AUTHENTICATION_REQUIRED: "slurmctld does not take the daemon's token: it needs "
    "AuthAltTypes=auth/jwt and the jwt_key that made it, and slurmrestd the same slurm.conf",
}


class _Error(msgspec.Struct):
    description: str = ""
    error: str = ""


class _JobError(msgspec.Struct):
    message: str = ""
    code: int = -1


class _JobStatus(msgspec.Struct):
    step_id: str = ""
    error: _JobError = msgspec.field(default_factory=_JobError)


class _Ping(msgspec.Struct):
    responding: bool = True


class _Reply(msgspec.Struct):
    #: About slurmrestd and the call; what has none is not slurmrestd's answer.
    meta: dict[str, object]
    job_id: int = 0
    errors: tuple[_Error, ...] = ()
    #: Errors of the jobs that could not be cancelled.
    status: tuple[_JobStatus, ...] = ()
    #: Of each slurmctld.
    pings: tuple[_Ping, ...] = ()


@dataclass(eq=False)
class RestControl(JobFieldsControl):
    """``JobControl`` by calls of slurmrestd. Thread-safe.

    Each call opens its own connection, so that what is left of another answer is never read.
    """

    def __post_init__(self) -> None:
        self._socket = self.place.removeprefix(_SOCKET) if self.place.startswith(_SOCKET) else ""
        # Not by ``timer``, which may stand still in tests: this one limits what the network does.
        self._deadline = Deadline(time.monotonic)
        self._client = httpx2.Client(
            transport=DeadlineTransport(self._deadline, verify=True, uds=self._socket or None, keep_alive=False),
            base_url="http://localhost" if self._socket else self.place,
            timeout=self.time_limit,
            trust_env=False,
        )
        self._token = JsonWebToken(self.commands, self.timer)
        self._version = ""

    def check(self) -> None:
        """See ``JobControl``: finds the version of the API."""
        token = self._token.get()
        with self._deadline.within(self.time_limit):
            self._find_version(token)

    def submit(self, options: Sequence[str], script: str, more: Mapping[str, str] | None = None) -> Answer:
        """See ``JobControl``. One call."""
        job = job_description(options, script, {**self.environment, **(more or {})}, backend="rest")
        reply, said = self._ask("POST", "job/submit", {"job": job})
        if reply.job_id <= 0 and not said:
            raise Unavailable(f"slurmrestd at {self.place} does not say whether it has submitted the job")
        # With an id there is a job, whatever else is said of it.
        return Answer(0, "", said, job_id=str(reply.job_id)) if reply.job_id > 0 else Answer(1, "", said)

    def cancel(self, jobs: Sequence[str], *, state: str = "", signal: str = "") -> Answer:
        """See ``JobControl``. One call."""
        body: dict[str, object] = {"jobs": list(jobs)}
        body |= {"job_state": [state]} if state else {}
        body |= {"signal": signal, "flags": ["BATCH_JOB"]} if signal else {}
        reply, said = self._ask("DELETE", "jobs/", body)
        failed = (each for each in reply.status if each.error.code != 0)
        said = said or "\n".join(f"{each.step_id}: {each.error.message}" for each in failed)
        return Answer(1 if said else 0, "", said)

    def close(self) -> None:
        """See ``JobControl``."""
        self._client.close()

    def _find_version(self, token: str) -> str:
        for version in VERSIONS:
            status, body = self._call(token, "GET", f"/slurm/{version}/ping/", "ping")
            if status == httpx2.codes.NOT_FOUND:
                continue
            reply, said = self._read(status, body)
            if status != httpx2.codes.OK:
                raise Unavailable(f"slurmrestd at {self.place} answered {status}", said=said)
            # A ping with a token that slurmctld refuses has status 200, too.
            if not any(each.responding for each in reply.pings):
                hint = _HINTS[httpx2.codes.NETWORK_AUTHENTICATION_REQUIRED]
                self._token.refused(token)
                raise Unavailable(
                    f"slurmrestd at {self.place} got no answer from slurmctld: either that is down, or {hint}"
                )
            self._version = version
            return version
        raise Unavailable(
            f"slurmrestd at {self.place} has none of the APIs {VERSIONS[0]} to {VERSIONS[-1]}, those of Slurm 24.11 "
            "to 26.05; use backend: command",
            said=_shown(body),
        )

    def _ask(self, method: str, path: str, body: object) -> tuple[_Reply, str]:
        """The answer to a call, and the errors in it."""
        token = self._token.get()
        with self._deadline.within(self.time_limit):
            version = self._version or self._find_version(token)
            status, text = self._call(token, method, f"/slurm/{version}/{path}", path.strip("/"), body)
        return self._read(status, text)

    def _read(self, status: int, body: bytes) -> tuple[_Reply, str]:
        try:
            reply = msgspec.json.decode(body, type=_Reply)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            reply = None
        hint = f"; {_HINTS[status]}" if status in _HINTS else ""
        # A proxy may answer with JSON, too; slurmrestd says what was wrong.
        if reply is None or (status != httpx2.codes.OK and not reply.errors):
            self._version = ""  # it may be another slurmrestd by now
            raise Unavailable(f"slurmrestd at {self.place} answered {status}{hint}", said=_shown(body))
        said = "\n".join(f"{each.description}: {each.error}" for each in reply.errors)
        return reply, f"{said}{hint}"

    def _call(self, token: str, method: str, path: str, what: str, body: object = None) -> tuple[int, bytes]:
        """Status and body of an answer. ``what`` stands for the call in the statistics."""
        # Without compression the limit on the size holds for what is read, too.
        headers = {"X-SLURM-USER-TOKEN": token, "Accept-Encoding": "identity"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        content = None if body is None else msgspec.json.encode(body)
        begin, overloaded = self.rate.begins((f"slurmrestd {what}",)), False
        try:
            with self._client.stream(method, path, headers=headers, content=content) as answer:
                text = bytearray()
                for chunk in answer.iter_raw():
                    text += chunk
                    if len(text) > _MAX_ANSWER_BYTES:
                        raise Unavailable(f"slurmrestd at {self.place} answered with over {_MAX_ANSWER_BYTES} bytes")
            overloaded = not answer.is_success and is_overloaded(_shown(text))
        except httpx2.TimeoutException as error:
            raise Unavailable(f"slurmrestd at {self.place} did not answer in time", said=str(error)) from None
        except httpx2.TransportError as error:
            raise Unavailable(f"slurmrestd at {self.place} does not answer", said=self._unreachable(error)) from None
        finally:
            self.rate.ended(f"slurmrestd {what}", begin, overloaded=overloaded)
        if answer.status_code in _HINTS:
            self._token.refused(token)
        return answer.status_code, bytes(text)

    def _unreachable(self, error: BaseException) -> str:
        """Why there is no connection, and what to do about it."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        place = self._socket or "there"
        known = {
            errno.ENOENT: f"there is no socket {place}: start slurmrestd with {self.place} as its address",
            errno.ECONNREFUSED: f"nothing listens {'on ' if self._socket else ''}{place}: start slurmrestd",
            errno.EACCES: f"uid {os.geteuid()} has no permission to connect to {place}: give this account write "
            "permission on the socket",
        }
        number = cause.errno if cause is not None else None
        return known.get(number, str(error)) if number is not None else str(error)


def _shown(body: bytes | bytearray) -> str:
    return bytes(body[:500]).decode(errors="replace")
