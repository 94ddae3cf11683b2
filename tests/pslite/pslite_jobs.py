"""Helpers of the tests that run whole jobs as real processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from pslite.coordinator import Settings
from pslite.testing import run_local

#: of tests of leases: as short as it can be where a process may get no processor for seconds
LEASE = Settings(grace=60.0, start=60.0, heartbeat=0.5, lease=8.0, balance="even")
#: newcomers come together, however long they take
PATIENT = Settings(grace=60.0, start=60.0, settle=60.0, verdict=6.0, balance="even")
WORKER = str(Path(__file__).with_name("numpy_worker.py"))


def environment(**changes: str) -> dict[str, str]:
    """Return the environment of a process that no scheduler has started."""
    return {**{k: v for k, v in os.environ.items() if not k.startswith(("DL2_", "SLURM_"))}, **changes}


def schedules(count: int, *, landing: int, fast: int = 0) -> list[pytest.ParameterSet]:
    """Return the seeds of random schedules: so many, or as the environment says (hundreds, by hand).

    The first ``fast`` of them are not slow, and those after the first ``landing`` are nightly.
    """
    first = int(os.environ.get("PSLITE_FIRST_SCHEDULE", "0"))
    marks = pytest.mark.slow, pytest.mark.nightly
    return [
        pytest.param(first + number, marks=marks[: (number >= fast) + (number >= landing)])
        for number in range(int(os.environ.get("PSLITE_PROCESS_SCHEDULES", count)))
    ]


def command(*options: str) -> list[str]:
    """Return the command of a job without torch."""
    return [sys.executable, WORKER, *options]


def run_job(argv, *, state="finished", **more):
    """Run a job of real processes, which has to end in this state; returns what became of it."""
    result = run_local(argv, **more)
    assert result.state == state, (result.reason, result.log)
    return result


def static_digest(*options: str) -> str:
    """Return the digest of a job that is never resized, made by one process without any network."""
    if "--step-seconds" in options:  # nobody does anything to it meanwhile that it would have to wait for
        at = options.index("--step-seconds")
        options = options[:at] + options[at + 2 :]
    return _static_digest(*options)


@cache
def _static_digest(*options: str) -> str:
    done = subprocess.run(command(*options), env=environment(), capture_output=True, text=True, timeout=200, check=True)
    return done.stdout.strip()


class KillAt:
    """Kills the process of one task, once, as soon as the job has reached a version.

    It says that it is not done until the job knows of the death, or with `planned` until there is another plan.
    """

    def __init__(self, task, version, number=signal.SIGKILL, *, planned=False):
        self.task, self.version, self.number, self.planned = task, version, number, planned
        self.pid = None
        self.plans = 0

    def __call__(self, status, director):
        if self.pid is None and status.version >= self.version:
            member = next((m for m in status.members if m.task == self.task), None)
            if member is not None:
                self.pid, self.plans = member.pid, len(status.plans)
                os.kill(member.pid, self.number)
        if self.planned:
            return self.pid is None or len(status.plans) == self.plans
        known = any(m.task == self.task and m.state == "left" for m in status.members)
        if known and self.number == signal.SIGSTOP:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # it need not be waited for
        return not known


class Kills:
    """Kills servers and workers at given versions, by (version, choice, role), where others can go on."""

    def __init__(self, plan):
        self.plan = sorted(plan)
        self.hit = set()
        self.at_plan = -1

    def __call__(self, status, director):
        while self.plan and status.version >= self.plan[0][0]:
            _, choice, role = self.plan[0]
            if role == "ps" and (self.at_plan == status.plan or not status.plans or status.plans[-1].servers < 2):
                return False  # blocks have one copy only until the next plan is done
            self.plan.pop(0)
            there = [m for m in status.members if m.role == role and m.state != "left" and m.pid not in self.hit]
            stay = {m.pid for m in there if m.state == "active" and m.task in director.targets}
            victims = there if role == "worker" else [m for m in there if m.state == "active"]
            victim = random.Random(choice).choice(victims)
            if stay - {victim.pid}:
                self.hit.add(victim.pid)
                self.at_plan = status.plan if role == "ps" else self.at_plan
                os.kill(victim.pid, signal.SIGKILL)
        return bool(self.plan)


class Replace(KillAt):
    """Has another one started in the place of a killed one, as a scheduler does."""

    def __call__(self, status, director):
        before = self.pid
        pending = super().__call__(status, director)
        if self.pid is not None and before is None:
            director.replace(self.task)
        return pending
