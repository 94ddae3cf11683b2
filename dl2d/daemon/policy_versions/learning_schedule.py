"""When the learner is started: at a time of day, or every so many hours."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.cron import CronTrigger
from apscheduler.triggers.interval import IntervalTrigger

from dl2d.config.settings import Settings
from dl2d.daemon.policy_versions.learner_supervisor import Learner

#: Name of the scheduler's executor in which learners are started.
LEARNING_EXECUTOR: Final = "learn"
_JOB: Final = "learn"
#: A daemon that starts waits for this long before it starts a learner.
_FIRST_SECONDS: Final = 60.0


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
