"""Membership source under the daemon: heartbeats that report a job's status and return who should be a member."""

from __future__ import annotations

import secrets
import threading
import time
import urllib.error
from collections.abc import Callable
from typing import Any

import msgspec

from pslite.errors import UsageError
from pslite.job.job_status import MembershipSource, Reply, Status
from pslite.launch.daemon_connection.daemon_address_file import renew_certificate
from pslite.launch.daemon_connection.daemon_http import fetch

#: as long as a daemon takes to be restarted on a busy machine, or its store to be upgraded
_FINAL_SECONDS = 120.0
#: in one heartbeat: members whose measurements are told, completed plans, and characters on how members ended; the next
#: heartbeats tell the rest
_MAX_MEASURED, _MAX_PLANS, _MAX_HOW = 500, 200, 1 << 19


class DaemonClient:
    """Membership source that exchanges heartbeats with the daemon's job API, in a thread of its own.

    If the daemon does not answer, or answers 401, 403 or 404, the job continues at its present size.

    Parameters
    ----------
    daemon
        base URL of the job API.
    job
        name of the job in its URLs.
    credential
        bearer credential.
    say
        takes lines for the user.

    """

    def __init__(self, daemon: str, job: str, credential: str, *, say: Callable[[str], None]) -> None:
        if not daemon.startswith(("http://", "https://")):
            raise UsageError(f"DL2_DAEMON is {daemon!r}: it must be an http:// or https:// URL")
        self._daemon = daemon
        self._url = f"{daemon.rstrip('/')}/v1/jobs/{job}/heartbeat"
        self._credential = credential
        self._say = say
        #: names the process that sends heartbeats, once started; with their number each is taken once
        self._sender, self._number = "", 0
        self._condition = threading.Condition()
        self._status: Status | None = None
        self._urgent = False
        self._closing = False
        #: whether the last heartbeat failed, and whether that was told of the end of the job
        self._failing = self._end_waits = False
        self._acknowledged_plans = 0
        #: with the causes, which may be known later
        self._acknowledged_left: set[tuple[str, str | None]] = set()
        #: by member, what was said of it when that was told last
        self._acknowledged_usage: dict[str, object] = {}
        self._reply: Reply | None = None
        self._wake: Callable[[], None] = lambda: None
        self._final_done = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="pslite-heartbeat", daemon=True)

    def start(self, address: str, token: bytes, wake: Callable[[], None]) -> None:  # noqa: ARG002
        """Begin to send heartbeats."""
        self._wake = wake
        # here, since each coordinator of a job is a process of its own with a copy of this object
        self._sender = secrets.token_hex(8)
        self._thread.start()

    def exchange(self, status: Status, *, urgent: bool) -> Reply | None:
        """Store the status for the next heartbeat; return the newest reply."""
        with self._condition:
            self._status = status
            if urgent:
                self._urgent = True
                self._condition.notify()
            return self._reply

    def close(self, status: Status) -> None:
        """Deliver the last status, trying for at most two minutes."""
        with self._condition:
            self._status = status
            self._closing = True
            self._condition.notify()
        if not self._final_done.wait(_FINAL_SECONDS):
            self._say(f"the daemon did not accept the final heartbeat within {_FINAL_SECONDS:g} s")

    def _loop(self) -> None:
        interval, pause = 1.0, 0.0
        while True:
            with self._condition:
                # after a failure wait for the back-off to end even if the status is urgent
                if pause:
                    self._condition.wait_for(lambda: self._closing, min(pause, 2.0 if self._closing else pause))
                else:
                    self._condition.wait_for(lambda: self._urgent or self._closing, interval)
                status, closing = self._status, self._closing
                self._urgent = False
            if status is None:
                continue
            reply = self._post(status)
            if reply is None:
                pause = min(30.0, max(0.5, 2 * pause))
                if closing:
                    pause = min(pause, 2.0)
                    time.sleep(pause)
                continue
            pause, interval = 0.0, min(60.0, max(0.1, reply.heartbeat_seconds))
            if closing:
                self._final_done.set()
                return

    def _post(self, status: Status) -> Reply | None:
        self._number += 1
        body = {**msgspec.to_builtins(status), "sender": self._sender, "number": self._number}
        body["plans"] = body["plans"][self._acknowledged_plans :][:_MAX_PLANS]
        body["members"] = [m for m in body["members"] if (m["task"], m["cause"]) not in self._acknowledged_left]
        told = self._measurements_to_tell(body["members"])
        try:
            reply = msgspec.json.decode(fetch(self._url, body, credential=self._credential), type=_HttpReply)
        except urllib.error.HTTPError as error:
            self._tell_failure(f"the daemon answered {error.code} to a heartbeat")
            error.close()
            if self._closing and error.code in (401, 403, 404, 409, 410):
                self._final_done.set()
            return None
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            self._tell_failure(f"the heartbeat to the daemon failed: {error}")
            renew_certificate(self._daemon, error)
            return None
        if self._failing:
            self._failing = False
            self._say("the daemon answers again")
        with self._condition:
            self._acknowledged_plans += len(body["plans"])
            self._acknowledged_usage.update(told)
            self._acknowledged_left |= {(m["task"], m["cause"]) for m in body["members"] if m["state"] == "left"}
            self._reply = reply
        self._wake()
        return reply

    def _tell_failure(self, text: str) -> None:
        """Tell the first of several heartbeats that fail, and the first one with the end of the job."""
        if self._closing and not self._end_waits:
            self._end_waits = True
            self._say(f"{text}; waits to report the end of the job, for at most {_FINAL_SECONDS:g} s")
        elif not self._failing:
            self._say(f"{text}; the job goes on at its present size")
        self._failing = True

    def _measurements_to_tell(self, members: list[dict[str, Any]]) -> dict[str, object]:
        """Leave out of members what was told before, or is too much for one heartbeat; return by task what is told."""
        told: dict[str, object] = {}
        how = max(40, _MAX_HOW // max(1, len(members)))
        for member in members:
            news = (member["usage"] or member["steps"], member["cause"])
            member["how"] = member["how"][:how]
            if self._acknowledged_usage.get(member["task"]) == news or len(told) == _MAX_MEASURED:
                member["usage"] = member["steps"] = None
            else:
                told[member["task"]] = news
        return told


class _HttpReply(Reply, frozen=True, kw_only=True):
    """The daemon's answer, which always says who should be a member."""

    members: frozenset[str]


def report_failure(source: MembershipSource, reason: str) -> None:
    """Report a job that has failed before it had a coordinator; `source` has not been started."""
    status = Status(
        address="", incarnation="", state="failed", reason=reason, version=0, total_versions=None, epoch=0.0,
        epochs=None, loss=None, steps_per_second=None, samples_per_second=None, members=[], plan=0, plans=[],
        result=None,
    )  # fmt: skip
    source.start("", b"", lambda: None)
    source.close(status)
