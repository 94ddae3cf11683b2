"""Registration of a job with the daemon, where the user started the job in the resource manager and not the daemon."""

from __future__ import annotations

import time
import urllib.error
from collections.abc import Callable, Mapping

import msgspec

from pslite.errors import UsageError
from pslite.launch.daemon_connection.daemon_address_file import renew_certificate
from pslite.launch.daemon_connection.daemon_http import check_private, error_text, fetch

#: how long to try while the daemon does not answer, or has no answer from the resource manager
_REGISTER_SECONDS = 300.0
#: how long to try while the daemon answers that it is busy: it lets a user's jobs register some dozens a minute, so
#: that the last of a job array of 1,000 tasks has its turn after most of an hour
_BUSY_SECONDS = 3600.0


class Registration(msgspec.Struct):
    """The daemon's answer: the job's name in its URLs, and the job's secrets."""

    job: str
    credential: str
    token: str
    heartbeat_seconds: float = 1.0
    #: the daemon only observes the job and starts no tasks: the launcher starts them beside the coordinator
    static: bool = False
    #: what the user should know of the job, each a line of its output
    remarks: list[str] = []


def register(
    daemon: str, body: Callable[[], Mapping[str, object]], say: Callable[[str], None], advice: str = ""
) -> Registration:
    """Register with the daemon; `body` makes each request.

    It is tried again for 5 minutes while the daemon is not available, and for an hour while it says that it is busy
    (Retry-After). `advice` says what to do where it is not available for longer.

    Raises
    ------
    UsageError
        the daemon refused the job, did not answer in time, or can only be reached in clear over a network.

    """
    check_private(daemon)
    begun = answered = time.monotonic()
    pause, told = 0.5, False
    while True:
        content, busy = body(), False
        try:
            answer = fetch(f"{daemon.rstrip('/')}/v1/register", content, timeout=30)
            return msgspec.json.decode(answer, type=Registration)
        except urllib.error.HTTPError as error:
            reason, busy = error_text(error), "Retry-After" in error.headers
            if error.code not in (429, 503):
                raise UsageError(f"the daemon refused this job: {reason}") from None
        except (OSError, msgspec.MsgspecError) as error:
            reason = str(getattr(error, "reason", error))  # without "urlopen error"
            renew_certificate(daemon, error)
        now = time.monotonic()
        if busy:
            answered = now
        seconds = _BUSY_SECONDS if busy else _REGISTER_SECONDS
        if now + pause > (begun if busy else answered) + seconds:
            raise UsageError(
                f"the daemon at {daemon} did not accept this job within {seconds / 60:g} minutes: {reason}"
                f"{'' if busy else advice}"
            )
        if not busy:
            say(f"the daemon at {daemon} is not available ({reason}); trying again")
        elif not told:
            told = True
            say(
                f"the daemon at {daemon} is busy ({reason}): the job tries to register for up to "
                f"{_BUSY_SECONDS / 60:g} minutes, and starts as soon as it is registered"
            )
        time.sleep(pause)
        pause = min(15.0, 2 * pause)
