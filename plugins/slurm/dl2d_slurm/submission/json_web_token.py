"""JSON Web Token of the daemon's user, by which slurmrestd and slurmctld know who asks."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from dl2d.core.errors import ResourceManagerError, Unavailable
from dl2d_slurm.commands.commands import Commands, failure

log = structlog.get_logger(__name__)

_SECONDS = 3600
#: A token is not used any more so long before its end: a call with it takes time, and clocks differ.
_MARGIN_SECONDS = 120.0
#: Shortest time between two requests for a token: after a failure of scontrol, and after a token that is then refused.
_PAUSE_SECONDS = 10.0
_PRINTED = re.compile(r"^SLURM_JWT=([!-~]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Token:
    text: str
    made: float
    renew_at: float
    valid_until: float


class JsonWebToken:
    """A token from ``scontrol token``, made anew after half of its time. Thread-safe.

    One thread at a time runs scontrol. Meanwhile the others use the token that there is as long as it is valid, and
    wait only where there is none. After a failure scontrol is not asked for some seconds, in which calls use the token
    that there is, or fail at once with the reason.
    """

    def __init__(self, commands: Commands, timer: Callable[[], float]) -> None:
        self._commands = commands
        self._timer = timer
        self._changed = threading.Condition()
        self._token = _Token("", 0.0, 0.0, 0.0)
        self._making = False
        self._ask_at = 0.0
        self._problem = ""

    def get(self) -> str:
        """A token that is valid. Raises ``Unavailable`` if there is none."""
        with self._changed:
            while True:
                now = self._timer()
                valid = bool(self._token.text) and now < self._token.valid_until
                if valid and now < self._token.renew_at:
                    return self._token.text
                if not self._making and now >= self._ask_at:
                    self._making = True
                    break
                if valid:
                    return self._token.text
                if not self._making:
                    raise Unavailable(self._problem, said=f"scontrol is asked again in {self._ask_at - now:.0f} s")
                self._changed.wait()
        made, problem = "", "scontrol could not be run"
        try:
            made, problem = self._ask()
        finally:
            with self._changed:
                self._making = False
                self._note(made, problem)
                self._changed.notify_all()
        return self.get()

    def refused(self, token: str) -> None:
        """Note that slurmrestd or slurmctld refused this token: it is replaced once it is ``_PAUSE_SECONDS`` old."""
        with self._changed:
            if token == self._token.text:
                end = self._token.made + _PAUSE_SECONDS
                self._token = replace(self._token, renew_at=end, valid_until=end)

    def _ask(self) -> tuple[str, str]:
        """A token, or why there is none."""
        try:
            answer = self._commands.run("scontrol", "token", f"lifespan={_SECONDS}")
        except ResourceManagerError as error:
            return "", str(error)
        found = _PRINTED.search(answer.stdout)
        if answer.status == 0 and found is not None:
            return found[1], ""
        refusal = failure("scontrol makes no token for slurmrestd", answer)
        hint = "" if isinstance(refusal, Unavailable) else "; slurmctld needs AuthAltTypes=auth/jwt and a jwt_key"
        return "", f"{refusal}{hint}"

    def _note(self, made: str, problem: str) -> None:
        now = self._timer()
        if made:
            self._token = _Token(made, now, now + _SECONDS / 2, now + _SECONDS - _MARGIN_SECONDS)
            return
        self._problem, self._ask_at = problem, now + _PAUSE_SECONDS
        if self._token.text and now < self._token.valid_until:
            left = self._token.valid_until - now
            log.warning("no new token for slurmrestd, the old one is used", problem=problem, seconds_left=round(left))
