"""Registration of a job with the daemon, where the user started the job in the resource manager and not the daemon."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

import msgspec

from pslite.errors import UsageError
from pslite.launch.daemon_http import check_private, error_text, fetch

_REGISTER_SECONDS = 300.0


class Registration(msgspec.Struct):
    """The daemon's answer: the job's name in its URLs, and the job's secrets."""

    job: str
    credential: str
    token: str
    heartbeat_seconds: float = 1.0
    #: the daemon only observes the job and starts no tasks: the launcher starts them beside the coordinator
    static: bool = False


def register(
    daemon: str, body: Callable[[], Mapping[str, object]], say: Callable[[str], None], advice: str = ""
) -> Registration:
    """Register with the daemon, trying for 5 minutes while it is not available; `body` makes each request.

    `advice` says what to do where it is not available for longer.

    Raises
    ------
    UsageError
        the daemon refused the job, did not answer in time, or can only be reached in clear over a network.

    """
    check_private(daemon)
    deadline = time.monotonic() + _REGISTER_SECONDS
    pause = 0.5
    while True:
        request = urllib.request.Request(  # noqa: S310  (http or https: the caller has checked)
            f"{daemon.rstrip('/')}/v1/register",
            data=msgspec.json.encode(body()),
            headers={"Content-Type": "application/json"},
            method="POST",
        )
        try:
            return msgspec.json.decode(fetch(request, 30, 1 << 20), type=Registration)
        except urllib.error.HTTPError as error:
            text = error_text(error)
            if error.code not in (429, 503):
                raise UsageError(f"the scheduler refused this job: {text}") from None
            reason = text
        except (OSError, msgspec.MsgspecError) as error:
            reason = str(error)
        if time.monotonic() + pause > deadline:
            raise UsageError(f"the scheduler at {daemon} did not accept this job within 5 minutes: {reason}{advice}")
        say(f"the scheduler at {daemon} is not available ({reason}); trying again")
        time.sleep(pause)
        pause = min(15.0, 2 * pause)
