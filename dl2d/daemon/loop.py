"""The daemon: sets everything up, ticks at every interval, reloads its settings, and stops."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from types import FrameType, TracebackType

import structlog
from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger

from dl2d.config.settings import Settings
from dl2d.core.daemon_mode_and_canary import Mode
from dl2d.core.errors import AlreadyRunning, ConfigError, Dl2dError, Waiting, counted
from dl2d.core.resource_manager import RateLimitedManager, ResourceManager, TaskSpec
from dl2d.daemon.api.connection_limits import ConnectionLimits
from dl2d.daemon.api.http_application import create_api
from dl2d.daemon.api.http_server import ApiServer
from dl2d.daemon.api.job_admission import Admission
from dl2d.daemon.api.recent_heartbeats import AnsweredHeartbeats
from dl2d.daemon.api.request_limits import (
    BURST_SECONDS,
    HEARTBEATS_PER_SECOND,
    VIEWS_PER_SECOND,
    RateLimiter,
    UserTurns,
    heartbeat_interval,
)
from dl2d.daemon.api.route_dependencies import Services
from dl2d.daemon.api.tls_certificate import served_certificate_problem
from dl2d.daemon.health_and_metrics import Health, stuck_seconds
from dl2d.daemon.key_and_address_files import load_credentials, write_address
from dl2d.daemon.log_lines_of_ticks import TickLog
from dl2d.daemon.parallel_task_submitter import ParallelTaskSubmitter
from dl2d.daemon.policy_versions.active_version import ActiveVersion, slot_length_warning
from dl2d.daemon.policy_versions.canary_run import JUDGE_SECONDS, CanaryRun
from dl2d.daemon.policy_versions.learner_supervisor import LEARNING_EXECUTOR, Learner, schedule_learning
from dl2d.daemon.retention_thread import PRUNE_SECONDS, prune
from dl2d.daemon.shared_resource_manager import ManagerAccess
from dl2d.daemon.standby import LeaseKeeper, lease_seconds, renewal_seconds
from dl2d.daemon.systemd import ServiceManager
from dl2d.daemon.tick_settings_from_configuration import guard_rules, manager_settings, timeouts
from dl2d.plugins import load_manager, load_placement, load_policy
from dl2d.policies.common.checkpoint import checkpoint_of
from dl2d.store.sql_store import SqlStore
from dl2d.tick.policy_check.policy_call import Deadline
from dl2d.tick.policy_check.policy_failures import RECENT_DECISIONS
from dl2d.tick.reconciliation.static_jobs import LOOK_BACK_SECONDS
from dl2d.tick.record_slot import Report
from dl2d.tick.task_command_and_environment import TaskSpecs
from dl2d.tick.tick import tick
from dl2d.tick.tick_context import Context, Deciders
from dl2d.tick.tick_state import ReconcileHistory, TickState
from pslite.launch.daemon_connection.daemon_address_file import DaemonAddress, default_file

log = structlog.get_logger()

_TICK, _PRUNE = "tick", "prune"
#: Minimum time between two ticks, so that a burst of events does not overload the manager.
_MIN_TICK_GAP_SECONDS = 0.5
#: How often the certificate is checked.
_CERTIFICATE_SECONDS = 600.0
#: Settings that are read once: sockets, files and managers are not exchanged under running jobs.
_RESTART_ONLY = ("state_dir", "store", "resource_manager", "api")


class Daemon(AbstractContextManager["Daemon"]):
    """A daemon on one store and one resource manager. Use as a context; ``run`` serves until it is told to stop."""

    def __init__(
        self,
        settings: Settings,
        store: SqlStore,
        *,
        reread: Callable[[], Settings] | None = None,
        reloaded: Callable[[Settings], None] | None = None,
        learner: Sequence[str] = (),
        clock: Callable[[], float] = time.time,
        timer: Callable[[], float] = time.monotonic,
    ) -> None:
        """Set up everything that can fail at the start.

        ``store`` is closed by the daemon. ``reread`` gives the settings anew at a reload, ``reloaded`` is told those
        that were taken. ``learner`` is the command that learns, where ``learning.enabled`` says so. ``clock`` gives
        seconds since 1970, ``timer`` seconds on a monotonic clock.

        Raises
        ------
        AlreadyRunning, ConfigError, PluginError, StoreError, ResourceManagerError
            The daemon cannot run; everything opened is closed again.
        """
        self._settings = settings
        self._reread, self._reloaded = reread, reloaded
        self._clock, self._timer = clock, timer
        self._stop, self._reload, self._wakeup = threading.Event(), threading.Event(), threading.Event()
        #: A tick was asked for and has not begun; a tick is under way.
        self._again, self._ticking = threading.Event(), threading.Event()
        self._service = ServiceManager()
        self._service.starting(stuck_seconds(settings.schedule.poll_seconds))
        self._state = TickState()
        #: Number of jobs in the last tick.
        self._live_jobs = 0
        self._health = Health(timer, stuck_seconds(settings.schedule.poll_seconds))
        self._last_done = timer()
        self._tick_log = TickLog()
        self._status = "starting"
        self._fatal: Dl2dError | None = None
        self._opened = ExitStack()
        with ExitStack() as stack:
            stack.callback(store.close)
            self._store = store
            credentials = load_credentials(settings.secret_path, create=True)
            store.acquire(process_name())
            keeper = LeaseKeeper(store, renewal_seconds(settings.schedule.poll_seconds), self._lease_lost)
            stack.callback(keeper.close)
            limits = ConnectionLimits(per_address=settings.api.connections_per_address)
            self._server = ApiServer(
                settings.api.host, settings.api.port, limits, settings.api.certificate, settings.api.certificate_key
            )
            stack.callback(self._server.stop)
            self._check_certificate()
            self._manager: ResourceManager = load_manager(
                settings.resource_manager.name, manager_settings(settings), clock
            )
            stack.callback(self._manager.close)
            if isinstance(self._manager, RateLimitedManager):
                self._health.counts(self._manager.call_statistics)
            capabilities = self._manager.capabilities()
            self._starts_anchors, self._tasks_as_owner = capabilities.starts_anchors, capabilities.other_users
            self._cluster = capabilities.cluster
            self._output, self._queues_tasks = capabilities.output, capabilities.queues_tasks
            self._scheduler = f"{capabilities.name} {capabilities.version}".strip()
            self._task_specs = TaskSpecs(self.url, credentials, self._server.certificates, os.geteuid())
            parallel_submits = capabilities.parallel_submits
            self._manager_access = ManagerAccess(
                self._manager,
                parallel_submits=parallel_submits,
                parallel_authentication=capabilities.parallel_authentication,
            )
            self._submitter = ParallelTaskSubmitter(self._submit, max(1, parallel_submits))
            stack.callback(self._submitter.close)
            self._admission = Admission(settings.jobs.rules, defaults=capabilities.defaults)
            #: Held to replace the context; a tick works with the one that it began with.
            self._replacing_context = threading.Lock()
            self._answered = AnsweredHeartbeats(timer, lambda: self._settings.jobs.silent_seconds)
            self._active = ActiveVersion(settings, store, clock, starting=True)
            self._context, self._canary = self._build(settings, self._active)
            self._enter(settings.mode, "start")
            self._write_address()
            self._refreshed_at, self._judged_at = timer(), -math.inf
            self._services = Services(
                cluster=self._cluster,
                url=self.url,
                store=store,
                manager=self._manager_access,
                admission=lambda: self._admission,
                credentials=credentials,
                task_specs=self._task_specs,
                clock=clock,
                heartbeat_seconds=lambda: heartbeat_interval(
                    settings.api.heartbeat_seconds, self._live_jobs, self._settings.jobs.silent_seconds
                ),
                starts_anchors=capabilities.starts_anchors,
                mode=lambda: self._context.mode,
                health=self._health,
                rate=RateLimiter(
                    settings.api.requests_per_second, BURST_SECONDS * settings.api.requests_per_second, timer
                ),
                heartbeat_rate=RateLimiter(HEARTBEATS_PER_SECOND, BURST_SECONDS * HEARTBEATS_PER_SECOND, timer),
                wake=self.wake,
                user_turns=UserTurns(RateLimiter(VIEWS_PER_SECOND, BURST_SECONDS * VIEWS_PER_SECOND, timer)),
                operators=lambda: frozenset(self._settings.api.operators),
                answered=self._answered,
            )
            last = next(iter(store.slots(limit=1)), None)
            self._last_slot_at, self._began = math.inf if last is None else last.at, timer()
            self._state = TickState(
                slot=store.last_slot_number(),
                reconcile_history=ReconcileHistory(ended_until=None if last is None else last.at - LOOK_BACK_SECONDS),
            )
            store.registry.lose_runs(clock())
            self._learner = Learner(store.registry, learner, clock=clock, mode=lambda: self._settings.mode)
            stack.callback(self._learner.close)
            self._opened = stack.pop_all()
        log.info("daemon set up", cluster=self._cluster, manager=capabilities.name, version=capabilities.version)

    @property
    def url(self) -> str:
        """Where coordinators reach the job API."""
        return self._settings.api.url(*self._server.address)

    def _write_address(self) -> None:
        """Write the file by which jobs that users submit find the daemon; a daemon that cannot goes on without it."""
        path = self._settings.api.address_file or (None if self._starts_anchors else default_file())
        if path is None:
            return
        here = socket.gethostname()
        address = DaemonAddress(self.url, self._server.certificates, self._cluster, here, os.geteuid())
        try:
            write_address(path, address)
        except OSError as error:
            log.error(
                "the address file cannot be written: jobs find the daemon only if DL2_DAEMON is set; let the daemon's "
                "account write to its folder, or set another api.address_file, and restart the daemon",
                path=str(path), error=error.strerror,
            )  # fmt: skip

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close everything; jobs and their tasks go on."""
        self._opened.close()

    def stop(self) -> None:
        """End ``run`` after the tick that is under way."""
        self._stop.set()
        self._wakeup.set()

    def reload(self) -> None:
        """Read the settings again."""
        self._reload.set()
        self._wakeup.set()

    def wake(self) -> None:
        """Ask for a tick soon."""
        self._again.set()
        self._wakeup.set()

    def run(self) -> None:
        """Serve until ``stop``, SIGTERM or SIGINT; SIGHUP reloads. Signals are heard in the main thread only.

        Raises
        ------
        AlreadyRunning
            The lease on the store was lost to another daemon.
        Dl2dError
            The job API has ended by itself; a service manager starts everything anew.
        """
        handled: list[tuple[int, object]] = []
        if threading.current_thread() is threading.main_thread():
            handled = [
                (number, signal.signal(number, self._on_signal))
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
            ]
        scheduler = BackgroundScheduler(
            executors={
                "default": {"type": "threadpool", "max_workers": 1},
                LEARNING_EXECUTOR: {"type": "threadpool", "max_workers": 1},
                _PRUNE: {"type": "threadpool", "max_workers": 1},
            },
            job_defaults={"coalesce": True, "max_instances": 1, "misfire_grace_time": None},
            timezone="UTC",
        )
        try:
            self._server.start(create_api(self._services))
            self._tick_first()
            scheduler.add_job(self.tick, "interval", seconds=self._settings.schedule.poll_seconds, id=_TICK)
            schedule_learning(scheduler, self._settings, self._learner, self._clock())
            pruning = (self._store, self._settings.store.keep, self._recorded_time, self._stop)
            # First at the start, for a daemon that is always restarted before the interval is over.
            now, every = datetime.now(tz=UTC), IntervalTrigger(seconds=PRUNE_SECONDS)
            scheduler.add_job(prune, every, args=pruning, id=_PRUNE, executor=_PRUNE, next_run_time=now)
            # Not in the executor of ticks: the check must not delay them.
            scheduler.add_job(self._check_certificate, "interval", seconds=_CERTIFICATE_SECONDS, executor=_PRUNE)
            scheduler.start()
            self._service.ready(self._status)
            log.info("ready", url=self.url, poll_seconds=self._settings.schedule.poll_seconds)
            self._serve(scheduler)
        finally:
            self._service.stopping()
            self._learner.close()
            if scheduler.running:
                scheduler.shutdown(wait=True)
            self._server.stop()  # before what it works with is closed
            for number, before in handled:
                signal.signal(number, before)  # type: ignore[arg-type]
            log.info("stopped")
        if self._fatal is not None:
            raise self._fatal

    def _check_certificate(self) -> None:
        """Check whether jobs accept the certificate, which may expire or be replaced while the daemon runs."""
        problem = served_certificate_problem(self._settings.api, self._server.certificates)
        if problem:
            log.warning("jobs refuse the certificate", problem=problem)
        self._health.certificate_checked(problem)

    def _recorded_time(self) -> float:
        """The time by which old rows are deleted: not later than the last slot before the start and the time since.

        A clock that is wrong by years, as after the start of a machine, must not delete the site's history.
        """
        return min(self._clock(), self._last_slot_at + self._timer() - self._began)

    def _tick_first(self) -> None:
        """Tick before the daemon is ready, which may take minutes where the resource manager is slow.

        A standby that has taken over is ready for the service manager, which wants signs of life meanwhile.
        """
        self._service.starting(stuck_seconds(self._settings.schedule.poll_seconds))
        ticking = threading.Thread(target=self.tick, name="first tick")
        ticking.start()
        ticking.join(self._pause)
        while ticking.is_alive():
            if not self._stuck():
                self._service.alive(self._status)
            ticking.join(self._pause)

    @property
    def _pause(self) -> float:
        """Time between two signs of life, seconds."""
        return (self._service.watchdog_seconds or 60.0) / 3

    def _serve(self, scheduler: BackgroundScheduler) -> None:
        while not self._stop.is_set():
            self._wakeup.wait(timeout=self._pause)
            self._wakeup.clear()
            if self._reload.is_set():
                self._reload.clear()
                self._take_settings(scheduler)
            if self._again.is_set() and not self._ticking.is_set() and not self._stop.is_set():
                self._tick_soon(scheduler)
            if not self._server.alive and not self._stop.is_set():
                self._fatal = Dl2dError(
                    "the job API has stopped unexpectedly and coordinators cannot reach it; the log above has the cause"
                )
                self.stop()
            if not self._stuck():
                self._service.alive(self._status)

    def _tick_soon(self, scheduler: BackgroundScheduler) -> None:
        """Tick before the next interval, but keep the minimum time after the last tick."""
        delay = max(0.0, self._last_done + _MIN_TICK_GAP_SECONDS - self._timer())
        if not self._stop.wait(delay):
            # Cleared when a tick begins, so a request during a tick is served after it.
            scheduler.modify_job(_TICK, next_run_time=datetime.now(tz=UTC))

    def _stuck(self) -> bool:
        return self._timer() - self._last_done > stuck_seconds(self._settings.schedule.poll_seconds)

    def tick(self) -> Report | None:
        """Run one tick; a failure is logged and shown in the status, and the next tick completes what it left.

        A resource manager that has to wait for a known time is shown as such, and is no failure.
        """
        self._ticking.set()
        self._again.clear()
        try:
            self._refresh_policy()
            self._judge_canary()
            self._state, report = tick(self._context, self._state)
        except AlreadyRunning as error:
            self._lease_lost(error)
            return None
        except Waiting as error:
            self._status = f"waiting: {error}"
            self._health.waits(str(error))
            log.info("tick skipped until the resource manager may be asked again", reason=str(error))
            return None
        except Dl2dError as error:
            self._status = f"last tick failed: {error}"
            self._health.failed(str(error))
            log.error("tick failed; the next tick tries again", error=str(error), kind=type(error).__name__)
            return None
        except Exception as error:
            self._status = f"last tick failed: {type(error).__name__}: {error}"
            self._health.failed(repr(error))
            log.exception("tick failed unexpectedly; the next tick tries again")
            return None
        finally:
            self._last_done = self._timer()
            self._ticking.clear()
            if self._again.is_set():
                self._wakeup.set()
        self._health.completed(report, max(0.0, self._clock() - report.snapshot.at))
        if self._tick_log.write(report, self._context.idle_seconds):
            self._withdraw_canary(report)
            self.wake()
        self._withdraw_if_failing(report)
        if len(report.outcome.started) < len(report.plan.starts) and not report.outcome.failures:
            self.wake()  # it had no time to submit them all
        snapshot = report.snapshot
        self._live_jobs = len(snapshot.jobs)
        status = f"slot {snapshot.slot}: {counted(len(snapshot.jobs), 'job')}, {counted(len(snapshot.tasks), 'task')}"
        self._status = status if report.mode is Mode.LIVE else f"{report.mode}, {status}"
        return report

    def _lease_lost(self, error: AlreadyRunning) -> None:
        """End: the lease on the store was lost to another daemon, and two must never act on one cluster."""
        self._fatal = error
        self.stop()

    def _submit(self, task: TaskSpec) -> str:
        """Submit a task, in a thread of the pool."""
        self._store.check_lease()
        return self._manager_access.submit(task)

    def _withdraw_if_failing(self, report: Report) -> None:
        """Take back a learned version of which decisions fail one after the other, or half of the last ones did."""
        failures = report.policy_failures
        with self._replacing_context:
            recent = sum(failures.recent)
            if not report.decided or not failures.consecutive:
                return
            if failures.consecutive >= self._settings.policy.max_failures:
                reason = f"{failures.consecutive} consecutive decisions failed, the last one: {failures.cause}"
            elif recent >= RECENT_DECISIONS / 2:
                reason = f"{recent} of the last {RECENT_DECISIONS} decisions failed, the last one: {failures.cause}"
            else:
                return
            if self._canary.withdraw(reason) or self._active.withdraw(reason):
                self._apply_canary()
                self.wake()

    def _withdraw_canary(self, report: Report) -> None:
        """End a canary whose policy was set aside since it left jobs waiting."""
        with self._replacing_context:
            aside = report.set_aside
            if aside is not None and self._context.withdrawn is None and self._canary.withdraw(f"it {aside.reason}"):
                self._apply_canary()

    def _judge_canary(self) -> None:
        """Once an hour: compare the groups of the canary, and end it if its rule says so."""
        with self._replacing_context:
            now = self._timer()
            if now - self._judged_at < JUDGE_SECONDS:
                return
            self._judged_at = now
            if (found := self._canary.judge()) is not None:
                self._health.compared(found)
                self._apply_canary()

    def _apply_canary(self) -> None:
        """Tick as the canary says by now, and look up the live policy version soon."""
        self._context = self._canary.applied(self._context)
        self._refreshed_at = -math.inf

    def _refresh_policy(self) -> None:
        """Once a slot: take a policy version that has become live."""
        with self._replacing_context:
            now = self._timer()
            if now - self._refreshed_at < self._context.slot_seconds:
                return
            self._refreshed_at = now
            try:
                policy = self._active.refreshed() or self._active.policy
                if policy is self._context.deciders.policy:
                    return
                self._canary.begin()
            except Exception:
                log.exception("looking up the live policy version failed")
                return
            deciders = replace(self._context.deciders, policy=policy)
            self._context = self._canary.applied(replace(self._context, deciders=deciders))

    def _take_settings(self, scheduler: BackgroundScheduler) -> None:
        self._service.reloading()
        try:
            if self._reread is None:
                raise ConfigError("the settings did not come from a file")
            settings = self._reread()
            check_restart_only(self._settings, settings)
            active = ActiveVersion(settings, self._store, self._clock, running=self._active.policy)
            context, canary = self._build(settings, active)
            self._enter(settings.mode, "reload")
        except Dl2dError as error:
            log.error("settings not reloaded; the old ones stay in force", error=str(error))
            # What it says may be only for those who may read the configuration.
            only = isinstance(error, RestartNeeded)
            self._health.reloaded(
                str(error) if only else "`dl2d check` and the daemon's log say why; nothing was changed"
            )
        except Exception:
            log.exception("settings not reloaded, unexpectedly; the old ones stay in force")
            self._health.reloaded("the daemon's log says why; nothing was changed")
        else:
            with self._replacing_context:
                self._settings, self._context, self._active, self._canary = settings, context, active, canary
                self._judged_at = -math.inf
            self._admission = replace(self._admission, rules=settings.jobs.rules)
            if self._reloaded is not None:
                self._reloaded(settings)
            schedule_learning(scheduler, settings, self._learner, self._clock())
            scheduler.reschedule_job(_TICK, trigger="interval", seconds=settings.schedule.poll_seconds)
            self._write_address()
            self._health.reloaded()
            log.info("reloaded", policy=settings.policy.name)
        self._service.ready(self._status)

    def _enter(self, mode: Mode, reason: str) -> None:
        """Record the mode; a mode that cannot be recorded is not entered."""
        change = self._store.enter_mode(mode, at=self._clock(), by=process_name(), reason=reason)
        if change is not None:
            log.info("mode", mode=str(mode), before=str(change.before or ""), reason=reason)

    def _build(self, settings: Settings, active: ActiveVersion) -> tuple[Context, CanaryRun]:
        if problem := slot_length_warning(settings, checkpoint_of(active.policy)):
            log.warning("intervals of another length than in training", problem=problem)
        jobs, poll_seconds = settings.jobs, settings.schedule.poll_seconds
        fallback = load_policy(settings.policy.fallback, "policy.fallback")
        lease_left = lease_seconds(poll_seconds) - renewal_seconds(poll_seconds)
        context = Context(
            cluster=self._cluster,
            manager=self._manager_access,
            store=self._store,
            deciders=Deciders(
                policy=active.policy,
                fallback=fallback,
                placement=load_placement(settings.placement),
                call_policy=Deadline(settings.policy.timeout_seconds),
                out_of_range=active.out_of_range,
            ),
            task_specs=self._task_specs,
            guard_rules=guard_rules(settings),
            timeouts=timeouts(settings),
            slot_seconds=settings.schedule.slot_seconds,
            seed=settings.schedule.seed,
            starts_anchors=self._starts_anchors,
            tasks_as_owner=self._tasks_as_owner,
            mode=settings.mode,
            scheduler=self._scheduler,
            request_rules=jobs.rules,
            idle_seconds=settings.policy.idle_seconds,
            grace_seconds=jobs.grace_seconds,
            allow_changes=partial(self._manager_access.allow_changes, lease_left),
            output=self._output,
            queues_tasks=self._queues_tasks,
            final_states=self._manager_access.final_states,
            requeue=self._manager_access.requeue,
            last_heartbeat=self._answered.last,
            start_allowance=(self._manager.start_allowance if isinstance(self._manager, RateLimitedManager) else None),
            submitter=self._submitter,
            submit_seconds=poll_seconds,
            timer=self._timer,
        )
        canary = CanaryRun(settings, self._store, active, fallback, self._clock)
        return canary.applied(context), canary

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGHUP:
            self.reload()
        else:
            self.stop()


class RestartNeeded(ConfigError):
    """A key that is read at the start only has changed; the message names the key."""


def check_restart_only(before: Settings, after: Settings) -> None:
    """Raise ``RestartNeeded`` if a key that is read at the start only has changed."""
    if changed := [key for key in _RESTART_ONLY if getattr(before, key) != getattr(after, key)]:
        raise RestartNeeded(f"{', '.join(changed)} can only be changed by a restart; nothing was changed")


def process_name() -> str:
    """This process and its machine, for people."""
    return f"process {os.getpid()} on {socket.gethostname()}"
