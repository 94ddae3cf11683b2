"""Health of the daemon: what is wrong now, in sentences, and its metrics in the format of Prometheus."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Lock

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dl2d.core.errors import counted
from dl2d.core.resource_manager import CallStatistics
from dl2d.daemon.policy_versions.canary_comparison import CanaryComparison
from dl2d.tick.observation.observe import NO_NODES
from dl2d.tick.record_slot import Report
from pslite.job.printable_text import printable

#: Characters of an error that are kept.
_MAX_ERROR = 1000
#: A tick that takes longer than this many poll intervals (and this many seconds) counts as stuck.
_STUCK_INTERVALS, _STUCK_SECONDS = 10, 300.0


def stuck_seconds(poll_seconds: float) -> float:
    """Time without a completed tick after which the daemon counts as stuck."""
    return max(_STUCK_INTERVALS * poll_seconds, _STUCK_SECONDS)


@dataclass(frozen=True, slots=True)
class Status:
    """Health at one moment."""

    #: One sentence for each thing that is wrong; empty where all is well.
    problems: tuple[str, ...]
    #: Seconds since the last tick that was completed; None for none yet.
    last_tick_seconds: float | None
    #: Age of the resource manager's listing from which that tick decided; None for none yet.
    listing_seconds: float | None
    #: What ticks wait for, which only the daemon's account may read; empty if nothing.
    waiting: str = ""
    #: Error of the last tick that failed, which only the daemon's account may read.
    last_error: str = ""
    #: Seconds since that tick; None for none yet.
    last_error_seconds: float | None = None
    #: Number of the last slot; None before the first tick was completed.
    slot: int | None = None


class Health:
    """Collects problems and metrics from each tick; ``status`` and ``metrics`` may be called by other threads.

    Parameters
    ----------
    timer
        Seconds on a monotonic clock.
    stuck_seconds
        Time without a completed tick after which that is a problem.
    """

    def __init__(self, timer: Callable[[], float], stuck_seconds: float = math.inf) -> None:
        self._timer = timer
        self._stuck_seconds = stuck_seconds
        self._began = timer()
        self._error, self._failed_at = "", 0.0
        self._lock = Lock()
        self._problems: tuple[str, ...] = ()
        self._certificate: tuple[str, ...] = ()
        self._refused: tuple[str, ...] = ()
        self._failing = False
        self._waiting = ""
        self._last: float | None = None
        self._last_slot: int | None = None
        #: How old the listing of that tick was by its end.
        self._listing_age = 0.0
        self._registry = CollectorRegistry()

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"dl2d_{name}", text, registry=self._registry)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"dl2d_{name}", text, registry=self._registry)

        self._ticks = counter("ticks", "Ticks that were completed.")
        self._failures = counter("tick_failures", "Ticks that failed.")
        self._starts = counter("task_starts", "Tasks that were started.")
        self._stops = counter("task_stops", "Tasks that were asked to leave.")
        self._fallbacks = counter("fallback_slots", "Decisions that the fallback made in the policy's place.")
        self._seconds = gauge("tick_seconds", "Duration of the last tick, in seconds.")
        self._slot = gauge("slot", "Number of the scheduling interval.")
        self._jobs = gauge("jobs", "Jobs that can be given tasks.")
        self._tasks = gauge("tasks", "Tasks that have not ended.")
        self._unknown = gauge("unknown_tasks", "Running tasks with tags of this cluster that are not in this database.")
        self._requeued = gauge(
            "postponed_coordinators", "Coordinators without tasks that were requeued for other jobs."
        )
        self._deferred = gauge("deferred_tasks", "Tasks that were decided on and have no room yet.")
        self._idle = gauge("idle_waiting_jobs", "Jobs that wait although there is room for every one of them.")
        self._idle_seconds = gauge("idle_seconds", "For how many seconds such jobs have been waiting.")
        self._set_aside = gauge(
            "policy_set_aside",
            "1 while the fallback decides because the policy left jobs waiting, was withdrawn or cannot be read.",
        )
        self._canary_jobs = gauge("canary_jobs", "Jobs on which the policy decided in mode canary.")
        self._canary_change = {
            end: gauge(
                f"canary_change{end}",
                f"Completion time with the policy divided by that with the fallback, minus 1{words}.",
            )
            for end, words in (("", ""), ("_low", ": lower end of the interval"), ("_high", ": its upper end"))
        }
        for each in self._canary_change.values():
            each.set(math.nan)

    def counts(self, statistics: Callable[[], CallStatistics]) -> None:
        """Show the calls of the resource manager among the metrics."""
        self._registry.register(_Calls(statistics))

    def certificate_checked(self, problem: str) -> None:
        """The API's certificate was checked; ``problem``: why jobs refuse it, empty if they do not."""
        self._certificate = (problem,) if problem else ()

    def reloaded(self, error: str = "") -> None:
        """Settings were read again, or for a reason were not."""
        with self._lock:
            self._refused = (f"the last reload was refused: {printable(error[:_MAX_ERROR])}",) if error else ()

    def completed(self, report: Report, listing_age: float = 0.0) -> None:
        """A tick was completed; ``listing_age``: how old the listing is by now from which it decided, in seconds."""
        waiting, seconds = len(report.needless_wait.jobs), report.needless_wait.seconds
        problems = [*report.listing_remarks]
        if report.incomplete:
            reasons = [NO_NODES] if NO_NODES in report.incomplete else []
            # everybody may read problems, and the other reasons hold records of users' jobs
            if unreadable := len(report.incomplete) - len(reasons):
                reasons.append(f"{counted(unreadable, 'record')} cannot be read; the daemon's log says which")
            problems.append(
                "the resource manager's listing is incomplete, so only cancelled jobs are ended or stopped: "
                + " and ".join(reasons)
            )
        if report.remarks:  # they may hold what users have written
            problems.append(
                f"not stopped: {counted(len(report.remarks), 'job')} of the resource manager that should end; the "
                "daemon's log says why"
            )
        unknown = sum(report.unknown_tasks.values())
        if unknown:
            problems.append(
                f"this database does not know {counted(unknown, 'running task')} of "
                f"{counted(len(report.unknown_tasks), 'user')} with tags of this cluster: another daemon with another "
                "database uses the cluster, or this database was lost or replaced; the daemon's log names the users, "
                "docs/troubleshooting.md says what to do"
            )
        if report.requeued:
            problems.append(
                f"dl2d has requeued {counted(report.requeued, 'coordinator')} without tasks, since too many held the "
                "room that their jobs' tasks need; docs/slurm.md says how to start fewer"
            )
        if report.set_aside is not None:
            problems.append(
                f"policy {report.set_aside.policy} version {report.set_aside.version} is set aside and the fallback "
                f"decides: it {report.set_aside.reason}"
            )
        elif (failures := report.policy_failures).consecutive:
            times = "last decision" if failures.consecutive == 1 else f"last {failures.consecutive} decisions"
            problems.append(f"the fallback made the {times}: {failures.cause} (version {failures.version})")
        if waiting:
            problems.append(
                f"{counted(waiting, 'job')} waiting for {seconds:.0f} s although there is room for every one of them: "
                f"policy {report.decision.policy} gives them nothing"
            )
        with self._lock:
            self._problems, self._failing, self._last = tuple(problems), False, self._timer()
            self._waiting, self._listing_age = "", listing_age
            # If nothing was decided, the snapshot has the number of the next slot.
            self._last_slot = report.snapshot.slot - (not report.decided)
        self._ticks.inc()
        self._starts.inc(len(report.outcome.started))
        self._stops.inc(len(report.plan.stops))
        if report.decided and report.slot_decision.proposed.fallback_cause:
            self._fallbacks.inc()
        self._seconds.set(report.seconds)
        self._slot.set(report.snapshot.slot)
        self._jobs.set(len(report.snapshot.jobs))
        self._tasks.set(len(report.snapshot.tasks))
        self._unknown.set(unknown)
        self._deferred.set(sum(item.count for item in report.plan.deferred))
        self._requeued.set(report.requeued)
        self._idle.set(waiting)
        self._idle_seconds.set(seconds)
        self._set_aside.set(report.set_aside is not None)
        self._canary_jobs.set(len(report.slot_decision.canary_jobs or ()))

    def compared(self, found: CanaryComparison) -> None:
        """The groups of a canary were compared."""
        for end, value in (("", found.change), ("_low", found.low), ("_high", found.high)):
            self._canary_change[end].set(math.nan if value is None else value)

    def waits(self, reason: str) -> None:
        """A tick was not possible yet, for a known time."""
        with self._lock:
            self._failing, self._waiting = False, printable(reason[:_MAX_ERROR])

    def failed(self, error: str) -> None:
        """A tick failed."""
        with self._lock:
            self._failing, self._waiting = True, ""
            self._error, self._failed_at = printable(error[:_MAX_ERROR]), self._timer()
        self._failures.inc()

    def status(self) -> Status:
        """How it is now."""
        with self._lock:
            now = self._timer()
            failure = ("the last tick failed; the daemon's log says why",) if self._failing else ()
            last = None if self._last is None else now - self._last
            idle = now - (self._began if self._last is None else self._last)
            stuck = (f"no tick was completed for {idle:.0f} s",) if idle > self._stuck_seconds else ()
            since_error = now - self._failed_at if self._error else None
            return Status(
                (*failure, *stuck, *self._certificate, *self._refused, *self._problems),
                last,
                None if last is None else last + self._listing_age,
                self._waiting,
                self._error,
                since_error,
                self._last_slot,
            )

    def metrics(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _Calls(Collector):
    """Metrics of the calls of the resource manager."""

    def __init__(self, statistics: Callable[[], CallStatistics]) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        """See ``Collector``."""
        found, prefix = self._statistics(), "dl2d_resource_manager"
        for name, text, amounts in (
            ("calls", "Calls of the resource manager.", found.calls),
            ("call_seconds", "Duration of these calls, in seconds.", found.seconds),
        ):
            family = CounterMetricFamily(f"{prefix}_{name}", text, labels=["call"])
            for call, amount in amounts.items():
                family.add_metric([call], amount)
            yield family
        text = "Calls to which the resource manager answered that it has too much to do."
        yield CounterMetricFamily(f"{prefix}_overloads", text, value=found.overloads)
        text = "Requests to the resource manager in the last minute."
        yield GaugeMetricFamily(f"{prefix}_requests_last_minute", text, value=found.last_minute)
