"""Helpers of the tests that run whole jobs as real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

WORKER = str(Path(__file__).with_name("numpy_worker.py"))


def schedules(count: int) -> range:
    """Return the seeds of random schedules: so many, or as the environment says (hundreds, by hand)."""
    first = int(os.environ.get("PSLITE_FIRST_SCHEDULE", "0"))
    return range(first, first + int(os.environ.get("PSLITE_PROCESS_SCHEDULES", count)))


def command(*options: str) -> list[str]:
    """Return the command of a job without torch."""
    return [sys.executable, WORKER, *options]


@cache
def static_digest(*options: str) -> str:
    """Return the digest of a job that is never resized, made by one process without any network."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith("DL2_")}
    done = subprocess.run(command(*options), env=environ, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.strip()


class KillAt:
    """Kills the process of one task, once, as soon as the job has reached a version; says whether it has yet to."""

    def __init__(self, task, version, number=signal.SIGKILL):
        self.task, self.version, self.number = task, version, number
        self.pid = None

    def __call__(self, status, director):
        if self.pid is None and status.version >= self.version:
            member = next((m for m in status.members if m.task == self.task), None)
            if member is not None:
                self.pid = member.pid
                os.kill(member.pid, self.number)
        return self.pid is None


class Replace(KillAt):
    """Has another one started in the place of a killed one, as a scheduler does."""

    def __call__(self, status, director):
        before = self.pid
        pending = super().__call__(status, director)
        if self.pid is not None and before is None:
            director.replace(self.task)
        return pending
