"""Thread that resizes services to the number of their tasks, and removes services that have ended."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import structlog

from dl2d.core.backoff_after_failed_starts import doubled
from dl2d.core.cluster import ANCHOR, task_tag
from dl2d.core.errors import NotFound, Rejected, ResourceManagerError, Unavailable
from dl2d.core.jobs import JobKey, Role
from dl2d.core.resource_manager import RmJobState
from dl2d_yarn.cluster_listing import ServiceDescription, read_service, service_path
from dl2d_yarn.component_containers import IDLE_SECONDS
from dl2d_yarn.listed_services import REMOVE_AGAIN_SECONDS, JobService, Services
from dl2d_yarn.queue_and_growth_limits import read_pending_reason
from dl2d_yarn.rest_client import RestClient
from dl2d_yarn.service_description import TASK_ROLES, flex_request
from dl2d_yarn.settings import YarnSettings
from dl2d_yarn.tasks_and_anchors import Task
from dl2d_yarn.tasks_of_containers import ContainerTasks
from dl2d_yarn.yarn_command import ANY_COMMAND_RETRY_SECONDS, COMMAND_RETRY_SECONDS, decommission
from dl2d_yarn.yarn_states import ServiceUse

log = structlog.get_logger(__name__)

#: Time between two rounds, seconds.
_ROUND_SECONDS = 0.2
#: Time from a failure to the next attempt, doubled with each further failure in a row, and its maximum, seconds.
_RETRY_SECONDS, _MAX_RETRY_SECONDS = 1.0, 30.0
#: Time of a round after which it begins no further change of a service whose last one failed, and no further read of
#: details, seconds: each call may last until its time-out.
_FAILED_CHANGES_SECONDS, _READ_SECONDS = 5.0, 5.0
#: Time between two rounds that also read details, which YARN's lists do not have, seconds.
DETAILS_SECONDS = 5.0
#: A coordinator has failed if its service has run for this many times the time after which a container is overdue, and
#: so many of its containers have ended without a report within so many seconds: some may have been preempted, or on a
#: node that was lost. The second number holds where an earlier daemon may have had reports of it. One is enough where
#: YARN has blacklisted nodes, for which several have failed.
_START_INTERVALS, _DEAD_CONTAINERS, _DEAD_ADOPTED, _DEAD_SECONDS = 4, 3, 6, 300.0
#: Maximum number of services for each of these in a round: removal after their end, descriptions, pending reasons.
_MAX_PER_ROUND = 5
#: Number of services that are changed at once.
PARALLEL_CHANGES = 8
#: Maximum time that the end of the daemon waits for a call under way, seconds.
_CLOSE_SECONDS = 5.0


@dataclass(eq=False)
class ServiceChanger:
    """Changes the sizes of jobs' services in a thread, with one request for all starts and stops of a job."""

    settings: YarnSettings
    #: Client of the ResourceManager, with a short time-out.
    client: RestClient
    #: Held while ``tasks`` and ``services`` are read or changed, never during a call. The times and numbers of attempts
    #: in a service are used by this thread, and the one of its pool that changes the service, alone.
    lock: threading.Lock
    tasks: ContainerTasks
    services: Services
    #: Seconds on a monotonic clock.
    timer: Callable[[], float]
    #: Called by the thread every ``DETAILS_SECONDS``.
    read_details: Callable[[], None]
    #: Writes a warning to the log.
    warn: Callable[[str], None]
    _command_retry_at: float = -math.inf
    #: Until when changes are allowed.
    _allowed_until: float = -math.inf
    _closing: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        #: Changes several services at once: each ApplicationMaster may hang.
        self._pool = ThreadPoolExecutor(PARALLEL_CHANGES, "dl2d-yarn-change")

    def start(self) -> None:
        """Start the thread unless it runs."""
        if self._thread is None and not self._closing.is_set():
            self._thread = threading.Thread(target=self._run, name="dl2d-yarn-changer", daemon=True)
            self._thread.start()

    def allow(self, seconds: float) -> None:
        """Allow changes for this time from now, in seconds; before the first call none are allowed."""
        self._allowed_until = self.timer() + seconds

    def _is_allowed(self) -> bool:
        return self.timer() < self._allowed_until

    def close(self) -> None:
        """End the thread; waits ``_CLOSE_SECONDS`` at most for a call that is under way."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _run(self) -> None:
        details_at = time.monotonic()
        while not self._closing.wait(_ROUND_SECONDS):
            details = time.monotonic() - details_at > DETAILS_SECONDS
            details_at = time.monotonic() if details else details_at
            try:
                self._run_round(details=details)
            except Exception:
                # Without this thread no job would change its size any more.
                log.exception("services were not changed")

    def _run_round(self, *, details: bool) -> None:
        """Change the services that are due; with ``details`` also read what YARN's lists do not have, and act on it."""
        self._change_services()
        if details:
            until = self.timer() + _READ_SECONDS
            self.check_overdue(until)
            self._read_descriptions(until)
            self.read_details()
            self._read_pending_reasons(until)
            self._decommission_idle()

    def _change_services(self) -> None:
        """Resize or remove the services that are due, several at once."""
        with self.lock:
            services = self.services.changeable()
            due = [service for service in services if service.retry_at <= self.timer() and not service.removed]
        # At the daemon's start many services may have ended: a few are removed in each round.
        ended = [service for service in due if service.state.ended]
        until = self.timer() + _FAILED_CHANGES_SECONDS

        def change(service: JobService) -> None:
            if self._is_allowed() and (not service.failures or self.timer() < until):
                self._attempt(service, self._remove if service.remove_at is not None else self._resize, is_change=True)

        healthy_first = _healthy_first([service for service in due if not service.state.ended] + ended[:_MAX_PER_ROUND])
        for _ in self._pool.map(change, healthy_first):
            pass

    def _attempt(self, service: JobService, action: Callable[[JobService], object], *, is_change: bool = False) -> None:
        """Call ``action``, unless its service has to wait after a failure; records a failure of it.

        The failure of a change (``is_change``) counts until a change succeeds, other failures until any action does.
        """
        if self._closing.is_set() or self.timer() < service.retry_at:
            return
        try:
            action(service)
        except ResourceManagerError as error:
            self._record_failure(service, str(error))
            self.warn(f"{service.name}: {error}")
            service.change_failed |= is_change
        except Exception as error:
            # An error of the program, too, must not keep the other services from being changed.
            self._record_failure(service, f"{type(error).__name__}: {error}")
            log.exception("service was not changed", name=service.name)
            service.change_failed |= is_change
        else:
            if is_change or not service.change_failed:
                service.failures, service.change_failed = 0, False

    def _record_failure(self, service: JobService, reason: str) -> None:
        """Set when the service is tried again, and show the reason at its waiting tasks."""
        service.failures += 1
        service.retry_at = self.timer() + doubled(_RETRY_SECONDS, service.failures, _MAX_RETRY_SECONDS)
        with self.lock:
            for task in self.tasks.records.of_job(service.job):
                if task.waits:
                    task.reason = reason

    def _resize(self, service: JobService) -> None:
        """Request the number of containers that each component needs, unless YARN has confirmed it."""
        with self.lock:
            if service.state.ended or not service.application_id:
                return
            if not self._needed_sizes(service):
                return
        found = self._read_description(service)
        if found.use is not ServiceUse.RESIZABLE:
            if self._has_ended(service):
                service.retry_at = self.timer() + _RETRY_SECONDS  # it is about to end by itself
                return
            raise Unavailable(f"{service.name} cannot be resized yet")
        with self.lock:
            # The description may have corrected the known sizes, and a request that changes nothing would hold the
            # service in state FLEX.
            wanted = self._needed_sizes(service)
            if not wanted or not self._is_allowed():
                return
            shrinks = any(size < found.component(role).size for role, size in wanted.items())
            if shrinks and self.services.has_unknown(service):
                raise Unavailable(f"{service.name} is not made smaller before all its containers are known")
            for role in TASK_ROLES:
                self.tasks.component(service.job, role).begin_change(self.timer())
        self.client.send("PUT", service_path(service.name), flex_request(wanted), do_as=service.user)
        with self.lock:
            for role, size in wanted.items():
                self.tasks.component(service.job, role).confirmed_size = size
        sizes = {role.value: size for role, size in wanted.items()}
        log.info("service resized", name=service.name, job=service.job.id, **sizes)

    def _has_ended(self, service: JobService) -> bool:
        """Whether the service or its coordinator has ended."""
        with self.lock:
            anchor = self.tasks.records.get(task_tag(service.job, ANCHOR))
        return service.state.ended or (anchor is not None and not anchor.live)

    def _needed_sizes(self, service: JobService) -> Mapping[Role, int]:
        """Number of containers that each component should have; empty if YARN has confirmed these numbers."""
        components = {role: self.tasks.update_size(service.job, role) for role in TASK_ROLES}
        if all(component.confirmed_size == component.size for component in components.values()):
            return {}
        return {role: component.size for role, component in components.items()}

    def _read_description(self, service: JobService) -> ServiceDescription:
        """Read the description of a service, update its components from it, and return it.

        Raises
        ------
        NotFound
            It does not exist any more, or another service has its name.
        Unavailable
            YARN does not say which application it is.
        """
        found = read_service(self.client, service.name, do_as=service.user)
        if found.application_id and found.application_id != service.application_id:
            raise NotFound(f"service {service.name} is {found.application_id} by now, not {service.application_id}")
        if not found.application_id and found.use is not ServiceUse.ENDED:
            raise Unavailable(f"YARN does not say yet which application service {service.name} is")
        service.described_at = self.timer()
        if found.use is ServiceUse.RESIZABLE:
            with self.lock:
                application = self.services.application(service)
                listed = sum(len(component.containers) for component in found.components.values())
                service.all_described = application is not None and listed >= application.containers - 1
                for role in TASK_ROLES:
                    component = found.component(role)
                    self.tasks.update_component(
                        service.job, role, component.size, component.decommissioned, component.containers
                    )
        return found

    def _remove(self, service: JobService) -> None:
        """Remove a service that is due, with all its containers; one that was never listed has no known application.

        Raises
        ------
        Unavailable
            YARN does not say which application has the service's name: it may be a new one that starts.
        """
        ended = self._has_ended(service)
        with self.lock:
            due = service.remove_at is not None and (ended or self.timer() >= service.remove_at)
            if service.removed or not due or not service.application_id:
                return
        try:
            if not self._read_description(service).application_id:
                raise Unavailable(
                    f"YARN does not say whether service {service.name} still is {service.application_id}, so it is "
                    f"left; if nothing else has its name, remove it with `yarn app -destroy {service.name}`"
                )
            if not self._is_allowed():
                return
            self.client.send("DELETE", service_path(service.name), do_as=service.user)
        except NotFound as error:
            self._check_gone(service, error)
        except Rejected as error:
            if "doesn't exist" not in error.said:
                raise
            self._check_gone(service, error)
        if not service.state.ended:
            # It may go on all the same: it counts as removed once its application is listed as ended.
            service.retry_at = self.timer() + REMOVE_AGAIN_SECONDS
            return
        with self.lock:
            service.removed = True
        log.info("service removed", name=service.name)

    @staticmethod
    def _check_gone(service: JobService, error: ResourceManagerError) -> None:
        """Raise ``Unavailable`` if YARN says that a service does not exist but lists its application as live."""
        if not service.state.ended:
            raise Unavailable(
                f"YARN does not know service {service.name} now, but lists its application {service.application_id} as "
                "live; trying again", said=str(error),
            )  # fmt: skip

    def check_overdue(self, until: float = math.inf) -> None:
        """End the tasks of containers that are overdue and that YARN does not list, and jobs that cannot start.

        After ``until`` no further service is read.
        """
        by_job = self.services.by_job
        with self.lock:
            late = [(by_job.get(job), tasks) for job, tasks in self.tasks.overdue().items()]
            anchors = {task.job for task in self.tasks.records.pending_anchors()}
            unreported = self._without_coordinator(anchors, self.timer() - self.tasks.overdue_seconds)
        checks: list[tuple[JobService, Callable[[JobService], None]]] = []
        checks += [(service, partial(self._end_unlisted, tasks)) for service, tasks in late if service is not None]
        checks += [(service, self._end_without_coordinator) for service in unreported]
        for service, check in sorted(checks, key=lambda each: (each[0].failures, each[0].retry_at)):
            if self.timer() < until:
                self._attempt(service, check)

    def _without_coordinator(self, jobs: Collection[JobKey], since: float) -> list[JobService]:
        """Services of these jobs that have been running since before ``since``, seconds on the monotonic clock."""
        found = []
        for service in self.services.by_job.values():
            if service.state is not RmJobState.RUNNING:
                service.running_since = None  # in its queue, where its ApplicationMaster may also be started again
                continue
            began = service.running_since = service.running_since or self.timer()
            if service.job in jobs and began < since and service.remove_at is None:
                found.append(service)
        return found

    def _read_descriptions(self, until: float) -> None:
        """Read the descriptions of services whose containers may differ from those recorded; none after ``until``."""
        with self.lock:
            jobs = self.tasks.unverified_jobs(DETAILS_SECONDS) | self.services.undescribed()
            services = [self.services.live(job) for job in jobs]
        running = [service for service in services if service is not None and service.state is RmJobState.RUNNING]
        running.sort(key=lambda each: each.described_at)
        due = [service for service in _healthy_first(running) if service.retry_at <= self.timer()]
        for service in due[:_MAX_PER_ROUND]:
            if self.timer() < until:
                self._attempt(service, self._read_description)

    def _end_unlisted(self, tasks: Iterable[Task], service: JobService) -> None:
        """End those of a service's tasks whose containers its description does not list.

        None ends unless it lists as many containers as YARN has: an ApplicationMaster that has just started does not
        know all of them yet.
        """
        found = self._read_description(service)
        present = {id_ for component in found.components.values() for id_ in component.containers.values()}
        with self.lock:
            is_complete = found.use is ServiceUse.RESIZABLE and service.all_described
            for task in tasks:
                if is_complete and present and task.container not in present:
                    task.end(RmJobState.LOST, f"{task.container} is gone", self.timer())

    def _end_without_coordinator(self, service: JobService) -> None:
        """End a job whose coordinator's containers end before they report: YARN would start them again and again."""
        found = self._read_description(service)
        dead = found.component(Role.COORDINATOR).dead if found.use is ServiceUse.RESIZABLE else ()
        now = self.timer()
        since = now - _START_INTERVALS * self.tasks.overdue_seconds
        with self.lock:
            anchor = self.tasks.records.get(task_tag(service.job, ANCHOR))
            recent = {each: at for each, at in service.dead_coordinators.items() if now - at < _DEAD_SECONDS}
            service.dead_coordinators = dict.fromkeys(dead[-1:], now) | recent
            if dead and anchor is not None:
                anchor.reason = (
                    f"its coordinator's container {dead[-1]} ended before it reported to dl2d; see its log in YARN"
                )
                has_run_long = service.running_since is not None and service.running_since < since
                needed = _DEAD_ADOPTED if anchor.adopted else _DEAD_CONTAINERS
                if has_run_long and (service.blacklists_nodes or len(service.dead_coordinators) >= needed):
                    anchor.end(RmJobState.FAILED, anchor.reason, self.timer())
                    service.remove_at = 0.0

    def _read_pending_reasons(self, until: float) -> None:
        """Read why containers of services have been waiting, and show it at their tasks; no read after ``until``."""
        since = self.timer() - DETAILS_SECONDS
        with self.lock:
            waiting = (*self.tasks.records.waiting(), *self.tasks.records.pending_anchors())
            late = {task.job for task in waiting if task.added < since}
            services = [service for job, service in self.services.by_job.items() if job in late]
        running = [service for service in services if service.state is RmJobState.RUNNING and service.is_live]
        for service in sorted(running, key=lambda each: each.reasons_read_at)[:_MAX_PER_ROUND]:
            if self.timer() >= until:
                return
            service.reasons_read_at = self.timer()
            try:
                reason = read_pending_reason(self.client, service.application_id)
            except ResourceManagerError as error:
                self.warn(f"{service.name}: {error}")
                continue
            with self.lock:
                service.blacklists_nodes = "blacklisted" in reason
                for task in self.tasks.records.of_job(service.job):
                    has_failed = task.role is Role.COORDINATOR and service.dead_coordinators
                    if task.state is RmJobState.PENDING and reason and not has_failed:
                        task.reason = f"waits for a container: {reason}"

    def _decommission_idle(self) -> None:
        """Decommission containers without a task for ``IDLE_SECONDS``, if the ``yarn`` command is configured."""
        if not self.settings.yarn_command or not self._is_allowed():
            return
        with self.lock:
            surplus = [(self.services.live(job), found) for job, found in self.tasks.surplus(IDLE_SECONDS).items()]
        for service, containers in surplus:
            if service is not None and max(service.command_retry_at, self._command_retry_at) <= self.timer():
                self._attempt(service, partial(self._decommission_containers, containers))

    def _decommission_containers(self, containers: Iterable[tuple[Role, int]], service: JobService) -> None:
        """Decommission these containers (role and position) with the ``yarn`` command."""
        self._read_description(service)
        settings = self.settings
        user = "" if settings.principal else settings.account
        do_as = service.user if service.user != settings.account else ""
        for role, position in containers:
            with self.lock:
                if not self.tasks.mark_decommissioned(service.job, role, position):
                    continue
            try:
                decommission(settings.yarn_command, service.name, f"{role.value}-{position}", user=user, do_as=do_as)
            except ResourceManagerError:
                service.command_retry_at = self.timer() + COMMAND_RETRY_SECONDS
                self._command_retry_at = self.timer() + ANY_COMMAND_RETRY_SECONDS
                with self.lock:
                    # It may have been carried out all the same: the next description says.
                    self.tasks.component(service.job, role).decommissioned.discard(position)
                raise
            log.info("container decommissioned", name=service.name, instance=f"{role.value}-{position}")


def _healthy_first(services: Iterable[JobService]) -> list[JobService]:
    """Services by their number of failures, since a call that fails may last for seconds."""
    return sorted(services, key=lambda service: service.failures)
