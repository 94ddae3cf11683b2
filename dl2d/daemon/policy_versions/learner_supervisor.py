"""The learner process: the daemon starts it on schedule, reads its output, limits its time and ends it.

A thread waits for it, and whatever happens to it is recorded; no tick is affected.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import structlog
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger

from dl2d.config.settings import Settings
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.errors import Dl2dError
from dl2d.core.policy_registry import RunState
from dl2d.daemon.policy_versions.candidate_files import enter, read_candidate, withdraw_if_worse
from dl2d.policies.common.checkpoint import DIGITS
from dl2d.store.tables.policy_versions import SqlRegistry
from pslite.job.job_status import signal_in_words

log = structlog.get_logger()

#: Of its output: maximum length of a line, maximum number of lines that are logged, last lines that are recorded.
_MAX_LINE_BYTES = 4096
_MAX_LINES_LOGGED = 1000
_LINES_RECORDED = 5
#: Seconds between asking it to end and killing it.
_GRACE_SECONDS = 5.0
#: Name of the scheduler's executor in which learners are started.
LEARNING_EXECUTOR = "learn"
_JOB = "learn"
#: A daemon that starts waits for this long before it starts a learner.
_FIRST_SECONDS = 60.0


def learner_command(config: str) -> tuple[str, ...]:
    """How a learner is started."""
    return (sys.executable, "-m", "dl2d.cli.policy_trials.learner_process", config)


class Learner:
    """Starts learners, one at a time.

    Parameters
    ----------
    command
        What to run.
    clock
        Seconds since 1970, for the record.
    mode
        The mode that the daemon has now.
    """

    def __init__(
        self, registry: SqlRegistry, command: Sequence[str], *, clock: Callable[[], float], mode: Callable[[], Mode]
    ) -> None:
        self._registry, self._command, self._clock, self._mode = registry, tuple(command), clock, mode
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._waiting: threading.Thread | None = None
        self._ended_because = ""
        self._closed = False

    @property
    def last_started_at(self) -> float | None:
        """When the last learner was started, seconds since 1970; None if none was, or the store does not say."""
        try:
            return max((run.started_at for run in self._registry.runs(limit=1)), default=None)
        except Dl2dError:
            return None

    @property
    def pid(self) -> int | None:
        """Of the learner that runs."""
        process = self._process
        return None if process is None or process.poll() is not None else process.pid

    def start(self, policy: str, limit: float) -> None:
        """Start one for a policy, unless the last one still runs; after ``limit`` seconds it is ended.

        Never raises: what goes wrong is logged.
        """
        with self._lock:
            if self._closed or (self._waiting is not None and self._waiting.is_alive()):
                log.warning("no learner is started: the last one has not ended, or the daemon is ending")
                return
            try:
                number = self._registry.begin_run(policy, self._clock()).number
            except Dl2dError as error:
                log.error("no learner is started: its start cannot be recorded", error=str(error))
                return
            self._ended_because = ""
            try:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                    start_new_session=True, env=_environment(os.environ),
                )  # fmt: skip
            except (OSError, ValueError) as error:
                log.error("no learner can be started", error=str(error))
                self._keep(number, RunState.FAILED, f"cannot be started: {error}")
                return
            log.info("learner started", run=number, pid=self._process.pid)
            self._waiting = threading.Thread(
                target=self._wait, args=(self._process, number, limit), name="learner", daemon=True
            )
            self._waiting.start()

    def stop(self, why: str) -> None:
        """End the learner that runs, if one does; takes some seconds where it does not listen."""
        with self._lock:
            process, waiting = self._process, self._waiting
        if process is not None and waiting is not None and waiting.is_alive():
            self._end(process, why)
            waiting.join(timeout=2 * _GRACE_SECONDS)

    def close(self) -> None:
        """End the learner that runs, and start no more."""
        with self._lock:
            self._closed = True
        self.stop("the daemon ended")

    def _wait(self, process: subprocess.Popen[bytes], number: int, limit: float) -> None:
        timer = threading.Timer(limit, self._end, (process, f"it took more than {limit / 60:g} minutes"))
        timer.daemon = True
        timer.start()
        try:
            last = self._read_output(process, number)
            status = process.wait()
        except Exception as error:  # whatever it is, it stays in this thread
            log.exception("reading the output of the learner failed")
            self._end(process, f"reading its output failed: {error}")
            status, last = process.wait(), []
        finally:
            timer.cancel()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        said = " | ".join(last)
        if self._ended_because:
            state, note = (
                RunState.STOPPED,
                f"{self._ended_because}; its last output: {said}" if said else self._ended_because,
            )
        elif status == 0:
            state, note = self._take(last[-1] if last else "")
        else:
            how = f"ended with status {status}" if status > 0 else f"was ended by {signal_in_words(-status)}"
            state, note = RunState.FAILED, f"{how}: {said}" if said else how
        tell = log.info if state is RunState.FINISHED else log.warning
        tell("learner ended", run=number, state=str(state), note=note)
        self._keep(number, state, note)

    def _take(self, last: str) -> tuple[RunState, str]:
        """Enter the candidate that the last line names; whatever is wrong with it is the run's note."""
        try:
            found = json.loads(last)
            folder = Path(found["candidate"])
        except (ValueError, KeyError, TypeError):
            return RunState.FAILED, f"named no candidate: {last}"
        try:
            candidate = read_candidate(folder)
            trial = enter(candidate, self._registry, self._mode(), at=self._clock())
            done = (
                ""
                if candidate.review is None
                else withdraw_if_worse(candidate.review, self._registry, at=self._clock())
            )
        except Dl2dError as error:
            return RunState.FAILED, f"its candidate cannot be taken: {error}"
        verdict = "passed" if trial.passed else "failed"
        log.info("candidate", version=trial.candidate[:DIGITS], verdict=verdict, reason=trial.reason)
        note = f"version {trial.candidate[:DIGITS]} {verdict}: {trial.reason}"
        if done:
            log.error("live policy version is worse than the fallback", done=done)
            note = f"{note}; {done}"
        return RunState.FINISHED, note

    def _read_output(self, process: subprocess.Popen[bytes], number: int) -> list[str]:
        """Log its output; returns the last lines."""
        assert process.stdout is not None
        last: deque[str] = deque(maxlen=_LINES_RECORDED)
        count = 0
        while line := process.stdout.readline(_MAX_LINE_BYTES):
            text = line.decode(errors="replace").rstrip()
            if not text:
                continue
            last.append(text)
            count += 1
            if count <= _MAX_LINES_LOGGED:
                log.info("learner", run=number, said=text)
        return list(last)

    def _end(self, process: subprocess.Popen[bytes], why: str) -> None:
        """Ask it and all that it started to end, then kill them."""
        if process.poll() is not None:
            return
        self._ended_because = why
        log.warning("ending the learner", pid=process.pid, reason=why)
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)

    def _keep(self, number: int, state: RunState, note: str) -> None:
        try:
            self._registry.end_run(number, state, note, self._clock())
        except Dl2dError as error:
            log.warning("the end of a learner cannot be recorded", run=number, error=str(error))


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """One thread: it is to take what others leave, not to compete with itself. Not the service manager's socket."""
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    hidden = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
    return {**{key: value for key, value in own.items() if key not in hidden}, **dict.fromkeys(threads, "1")}


def schedule_learning(scheduler: BackgroundScheduler, settings: Settings, learner: Learner, now: float) -> None:
    """Have ``scheduler`` start ``learner`` as ``settings.learning`` says, in place of what was scheduled before.

    A learner that runs is ended if learning is switched off. ``now`` is in seconds since 1970.
    """
    learning = settings.learning
    if scheduler.get_job(_JOB) is not None:
        scheduler.remove_job(_JOB)
    if not learning.enabled:
        learner.stop("learning was switched off")
        return
    timing: dict[str, object]
    if learning.at:
        hour, _, minute = learning.at.partition(":")
        timing = {"trigger": CronTrigger(hour=int(hour), minute=int(minute))}  # local time, also when clocks change
    else:
        seconds = 3600 * learning.every_hours
        first = datetime.fromtimestamp(next_learning(seconds, learner.last_started_at, now), tz=UTC)
        timing = {"trigger": IntervalTrigger(seconds=seconds), "next_run_time": first}
    arguments = (settings.policy.name, 60 * learning.limit_minutes)
    scheduler.add_job(learner.start, args=arguments, id=_JOB, executor=LEARNING_EXECUTOR, **timing)


def next_learning(seconds: float, last: float | None, now: float) -> float:
    """When to learn next: so many seconds after the last time, and not in the first minute. Seconds since 1970."""
    return max((now if last is None else last) + seconds, now + min(seconds, _FIRST_SECONDS))
