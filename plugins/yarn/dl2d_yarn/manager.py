"""The YARN resource manager: an elastic job as a YARN service with the components coordinator, ps and worker."""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NoReturn

import structlog
from msgspec import structs

from dl2d.core.cluster import Node, task_tag
from dl2d.core.errors import Denied, NotFound, Rejected, ResourceManagerError, Unavailable
from dl2d.core.jobs import JobKey, Role
from dl2d.core.resource_manager import (
    Anchor,
    Capabilities,
    ContainerOrder,
    ContainerReport,
    ResourceManager,
    RmIdentity,
    RmJob,
    RmJobState,
    RmListing,
    TaskSpec,
)
from dl2d.core.resources import Resources
from dl2d_yarn.client_command import decommission
from dl2d_yarn.container_tasks import ContainerTasks, Task
from dl2d_yarn.listing import (
    SERVICE_TYPE,
    SERVICES_PATH,
    Application,
    ClusterListing,
    Service,
    read_listing,
    read_service,
    read_version,
)
from dl2d_yarn.observed_jobs import WatchedApplications, owner_of
from dl2d_yarn.queue_limits import QueueLimits, read_pending_reason, read_queue_limits, within_limits
from dl2d_yarn.rest_client import RestClient
from dl2d_yarn.service_file import (
    PREFIX,
    SECRET,
    TASK_ROLES,
    application_id,
    flex_request,
    job_of_service,
    service_description,
    service_name,
)
from dl2d_yarn.settings import YarnSettings
from dl2d_yarn.states import ServiceUse

log = structlog.get_logger(__name__)

#: Id of a job's anchor in its tag.
ANCHOR: Final = "anchor"
#: Time between two looks of the thread that changes services, and from a failure to the next attempt, seconds.
_LOOK_SECONDS: Final = 0.2
_RETRY_SECONDS: Final = 1.0
#: A container that has not reported for so many intervals, and seconds, is looked for.
_OVERDUE_INTERVALS, _OVERDUE_SECONDS = 5, 15.0
#: A coordinator whose containers have all ended so many times later has failed.
_START_INTERVALS: Final = 4
#: A container below a busy one that has had no task for so long is given up, seconds.
_IDLE_SECONDS: Final = 30.0
#: After a restart, so many intervals may pass until all containers have reported.
_SETTLING_INTERVALS: Final = 3
_MAX_REPORTED: Final = 1000
#: Number of services that are asked why their containers wait, or removed after their end, each time.
_MAX_ASKED: Final = 5


def create(settings: Mapping[str, object], *, clock: Callable[[], float]) -> ResourceManager:
    """Build the manager from ``resource_manager.yarn`` of the config file. Asks nothing of YARN yet.

    Raises
    ------
    ConfigError
        A setting is unknown or bad; names the key.
    """
    return YarnManager(YarnSettings.parse(settings), clock=clock)


@dataclass(slots=True)
class _Service:
    """A job's service, as it was listed last."""

    job: JobKey
    name: str
    #: Empty until it is listed.
    application: str = ""
    user: str = ""
    #: When it started, seconds since 1970, and whether its name is dl2d's mark.
    started: int = 0
    tagged: bool = False
    state: RmJobState = RmJobState.PENDING
    #: Its removal was asked for, since when; None: it is not to be removed.
    remove_at: float | None = None
    removed: bool = False
    #: When the next attempt to change it is due.
    retry_at: float = 0.0


#: Services that are posted at once; tasks only wait for containers, which takes no call.
_PARALLEL_SUBMITS = 4


class YarnManager:
    """YARN through REST; implements ``ResourceManager`` and ``ContainerManager``.

    What runs is known from YARN and from the reports of the containers: after a restart of the daemon ``listing``
    raises ``Unavailable`` until they have had the time to report. A thread changes sizes of services: one request for
    all starts and stops of a job in a tick.

    Parameters
    ----------
    settings
        Checked settings.
    clock
        Seconds since 1970.
    client
        Replaces the client of the ResourceManager in tests.
    """

    def __init__(self, settings: YarnSettings, *, clock: Callable[[], float], client: RestClient | None = None) -> None:
        self._settings = settings
        self._clock = clock
        self._user = settings.account
        self._client = client or RestClient.of(settings)
        #: Held while container tasks and services are read or changed, never during a call.
        self._lock = threading.Lock()
        self._tasks = ContainerTasks(clock, settings.report_seconds)
        self._services: dict[JobKey, _Service] = {}
        self._nodes: tuple[Node, ...] = ()
        #: Ids of the nodes of the last listing, and since when some of them are missing.
        self._node_ids: frozenset[str] = frozenset()
        self._missing_since: float | None = None
        #: Limits of the queue, where YARN tells them.
        self._limits: QueueLimits | None = None
        self._watched = WatchedApplications(self._client, settings.watch)
        #: Services of the last listing, by id.
        self._applications: Mapping[str, Application] = {}
        self._settled_at: float | None = None
        self._reported: set[str] = set()
        self._closing = threading.Event()
        self._changer: threading.Thread | None = None

    def capabilities(self) -> Capabilities:
        """Two calls: the version of Hadoop, and the limits of the queue."""
        self._read_limits()
        return Capabilities(
            name="yarn",
            cluster=self._settings.cluster,
            version=read_version(self._client),
            starts_anchors=True,
            other_users=False,
            parallel_submits=_PARALLEL_SUBMITS,
        )

    def listing(self, ended_since: float | None = None) -> RmListing:
        """Two calls, whatever the number of jobs. ``ended_since`` is ignored: YARN lists ended applications for long.

        Raises
        ------
        Unavailable
            An answer is missing or incomplete, or containers may not have reported yet since the daemon's start.
        """
        del ended_since
        now = self._clock()
        listing = self._read_listing()
        self._check_nodes(listing, now)
        for remark in (*listing.remarks, *listing.incomplete):
            self._report_once(remark)
        with self._lock:
            self._nodes = listing.nodes
            anchors = self._take(listing)
            self._tasks.end_on(listing.lost_nodes)
            self._tasks.forget(self._services)
            if self._settled_at is None:
                services = [application for application in listing.applications if application.type == SERVICE_TYPE]
                running = any(not application.state.ended for application in services)
                self._settled_at = now + _SETTLING_INTERVALS * self._settings.report_seconds if running else now
            if now < self._settled_at:
                raise Unavailable(
                    f"containers of running jobs may not have reported yet; waiting {self._settled_at - now:.1f} s"
                )
            self._restart_anchors()
            self._ensure_changer()
            own = {anchor.handle for anchor in anchors}
            jobs = (*anchors, *self._tasks.listed(listing.node_names), *self._watched.jobs(listing, own))
            return RmListing(now, self._with_idle_room(listing), jobs, incomplete=listing.incomplete)

    def _read_listing(self) -> ClusterListing:
        settings = self._settings
        return read_listing(self._client, settings.partition, all_types=bool(settings.watch))

    def _take(self, listing: ClusterListing) -> list[RmJob]:
        """Note the services of a listing; returns their anchors as jobs."""
        anchors = []
        present = set()
        #: Jobs whose containers reported, also if an earlier daemon registered them.
        reporting = self._tasks.jobs()
        self._applications = {application.id: application for application in listing.applications}
        for application in listing.applications:
            if application.type != SERVICE_TYPE:
                continue
            job = job_of_service(application.name, self._settings.cluster) if application.user == self._user else None
            posted = job is None
            if job is None:
                job = self._key(application)
                if job not in self._services and job not in reporting:
                    continue
            service = self._services.setdefault(job, _Service(job, application.name))
            if application.state.ended and service.application not in ("", application.id):
                continue
            present.add(job)
            service.application, service.user = application.id, application.user
            service.state = application.state
            if application.state.ended:
                reason = f"{application.id} has ended: {application.reason}"
                self._tasks.end_job(job, RmJobState.CANCELLED, reason)
                # The name and the folder stay taken until the service is removed.
                service.remove_at = service.remove_at if service.remove_at is not None else 0.0
            anchors.append(self._anchor(application, job, tagged=not posted))
        if not listing.incomplete:
            unlisted = [job for job, service in self._services.items() if service.application and job not in present]
            for job in unlisted:
                del self._services[job]
        return anchors

    def _check_nodes(self, listing: ClusterListing, now: float) -> None:
        """Refuse a list in which nodes are missing that were there, up or down: they register again after a restart.

        Otherwise jobs would shrink to the nodes that come first.
        """
        missing = self._node_ids - listing.node_names.keys()
        self._missing_since = (self._missing_since or now) if missing else None
        if self._missing_since is not None and now - self._missing_since < self._settings.node_return_seconds:
            raise Unavailable(
                f"{len(missing)} nodes are not listed any more, such as {min(missing)}: "
                "the ResourceManager has restarted, and they may still register"
            )
        self._node_ids = frozenset(listing.node_names) - listing.lost_nodes

    def _with_idle_room(self, listing: ClusterListing) -> tuple[Node, ...]:
        """The nodes as the queue's limits have them, on which containers without a task count as free."""
        seconds = _OVERDUE_INTERVALS * self._settings.report_seconds
        limits = self._limits
        nodes = listing.nodes
        if limits is not None:
            nodes = within_limits(nodes, limits, leave_pending=self._settings.leave_pending)
        idle = self._tasks.idle_room(seconds).items()
        room: dict[str, list[Resources]] = {listing.node_names.get(node, node): [free] for node, free in idle}
        # The tick counts a waiting task on the node that it planned. Where its container is on another one already, it
        # would count twice.
        for job in {task.job for task in self._tasks.waiting()}:
            service = self._services.get(job)
            application = self._applications.get(service.application) if service is not None else None
            # One of the containers is the master's.
            for task in self._tasks.unreported(job, application.containers - 1) if application is not None else ():
                room.setdefault(task.planned_node, []).append(self._tasks.component(job, task.role).demand)
        return tuple(
            structs.replace(node, used=node.used.minus(Resources.total(room[node.name]))) if node.name in room else node
            for node in nodes
        )

    def _decommission(self) -> None:
        """Give up containers that have had no task for long, where the ``yarn`` command is configured."""
        if not self._settings.yarn_command:
            return
        with self._lock:
            surplus = [(self._services.get(job), found) for job, found in self._tasks.surplus(_IDLE_SECONDS).items()]
        for service, containers in surplus:
            if service is not None and service.remove_at is None:
                self._attempt(service, partial(self._give_up, containers))

    def _give_up(self, containers: Iterable[tuple[Role, int]], service: _Service) -> None:
        self._described(service)
        for role, position in containers:
            user = service.user if service.user != self._user else ""
            decommission(self._settings.yarn_command, service.name, f"{role.value}-{position}", do_as=user)
            with self._lock:
                component = self._tasks.component(service.job, role)
                component.decommissioned.add(position)
                component.idle.pop(position, None)
                component.asked = None if component.asked is None else component.asked - 1
            log.info("container given up", name=service.name, instance=f"{role.value}-{position}")

    def _read_limits(self) -> None:
        """Read what the queue allows; where YARN does not say, what was known before counts."""
        settings = self._settings
        try:
            self._limits = read_queue_limits(self._client, settings.queue, self._user, partition=settings.partition)
        except ResourceManagerError as error:
            self._report_once(f"limits of queue {settings.queue}: {error}")

    def _read_reasons(self) -> None:
        """Ask YARN why containers wait, for each service that has waited for some."""
        since = self._clock() - _OVERDUE_SECONDS / 3
        with self._lock:
            late = {task.job for task in self._tasks.waiting() if task.submitted < since}
            services = [service for job, service in self._services.items() if job in late and service.application]
        for service in services[:_MAX_ASKED]:
            self._attempt(service, self._read_reason)

    def _read_reason(self, service: _Service) -> None:
        reason = read_pending_reason(self._client, service.application)
        with self._lock:
            for task in self._tasks.waiting():
                if task.job == service.job and reason:
                    task.reason = f"waits for a container: {reason}"

    def _restart_anchors(self) -> None:
        """Have anchors wait for a container where none has reported since the daemon's start: YARN starts another."""
        for service in self._services.values():
            if not service.state.ended and service.remove_at is None and service.application:
                self._add_anchor(service.job, service.user)

    def _add_anchor(self, job: JobKey, user: str) -> None:
        if self._tasks.get(task_tag(job, ANCHOR)) is None:
            self._tasks.add(Task(job, ANCHOR, Role.COORDINATOR, user, self._clock()))

    def _key(self, application: Application) -> JobKey:
        """Key of a job whose service its user posted."""
        return JobKey(self._settings.cluster, application.id.removeprefix("application_"), application.started)

    def _anchor(self, application: Application, job: JobKey, *, tagged: bool) -> RmJob:
        """The anchor: its coordinator's own report of its end counts more than what became of the service."""
        task = self._tasks.get(task_tag(job, ANCHOR))
        state, reason = application.state, application.reason
        if task is not None and task.state in (RmJobState.DONE, RmJobState.FAILED):
            state, reason = task.state, task.reason
        elif not state.ended and self._services[job].remove_at is not None:
            state, reason = RmJobState.ENDING, "asked to stop"
        service = self._services[job]
        service.started, service.tagged = application.started, tagged
        handle, submitted, user, tag = self._identity(service)
        return RmJob(handle=handle, state=state, tag=tag, user=user, reason=reason, submitted=submitted)

    @staticmethod
    def _identity(service: _Service) -> RmIdentity:
        tag = task_tag(service.job, ANCHOR) if service.tagged else ""
        return RmIdentity(service.application, service.started, service.user, tag)

    def _report_once(self, remark: str) -> None:
        if remark not in self._reported and len(self._reported) < _MAX_REPORTED:
            self._reported.add(remark)
            log.warning("unexpected answer from YARN", remark=remark)

    def submit(self, task: TaskSpec) -> str:
        """Post the service of an anchor, or have a task wait for a container of its job's service.

        YARN chooses the node of a container. After ``Unavailable`` an anchor may exist all the same: look for its tag
        in a listing.
        """
        if task.role is Role.COORDINATOR:
            return self._submit_anchor(task)
        self._check_fits(task)
        with self._lock:
            service = self._services.get(task.job)
            if service is None or service.state.ended or service.remove_at is not None:
                raise NotFound(f"{task.name}: job {task.job.id} has no service that runs")
            waiting = Task(task.job, task.name, task.role, service.user, self._clock())
            waiting.reason, waiting.planned_node = "waits for a container", task.node
            self._tasks.component(task.job, task.role).demand = task.demand
            self._tasks.add(waiting)
            self._ensure_changer()
        return task.tag

    def _check_fits(self, task: TaskSpec) -> None:
        """Refuse a demand that can never be met, which YARN would queue, and a node that does not exist."""
        if not self._nodes:
            self._nodes = self._read_listing().nodes
        if task.node and task.node not in {node.name for node in self._nodes}:
            raise NotFound(f"{task.name} of job {task.job.id}: there is no node {task.node!r}")
        missing = {node.name: task.demand.shortfalls(node.capacity) for node in self._nodes}
        if missing and all(missing.values()):
            nearest, short = min(missing.items(), key=lambda item: len(item[1]))
            lacks = "; ".join(map(str, short))
            raise Rejected(f"{task.name} of job {task.job.id} fits on no node: {nearest} has too little {lacks}")

    def _submit_anchor(self, task: TaskSpec) -> str:
        name = service_name(task.job)
        description = service_description(task, self._settings)
        with self._lock:
            # Before the call: its coordinator may report before the answer comes.
            anchor = Task(task.job, task.name, task.role, task.owner.user, self._clock())
            self._tasks.add(anchor)
        try:
            answer = self._client.send("POST", SERVICES_PATH, description)
        except Rejected as error:
            if "already exist" not in error.said.lower() and "in use" not in error.said.lower():
                raise
            self._remove_remainder(name, error)
        application = application_id(answer)
        with self._lock:
            service = self._services.setdefault(task.job, _Service(task.job, name))
            service.user = self._user
            for role in TASK_ROLES:
                self._tasks.component(task.job, role).asked = 0
            self._ensure_changer()
        log.info("service posted", name=name, application=application)
        return application

    def _remove_remainder(self, name: str, error: Rejected) -> NoReturn:
        """Remove a service that was posted without ever becoming an application, whose name is taken."""
        if name not in {application.name for application in self._read_listing().applications}:
            self._client.send("DELETE", f"{SERVICES_PATH}/{name}")
        raise Unavailable(f"{name}: was posted before; looking for it again", said=error.said)

    def stop(self, jobs: Sequence[RmIdentity], grace: float) -> None:
        """Note what is to end; containers hear of it when they report, services are removed after ``grace``.

        A service is looked up again right before it is removed: another one may have got its name (``_remove``).
        """
        with self._lock:
            by_application = {service.application: service for service in self._services.values()}
            for job in jobs:
                service = by_application.get(job.handle) if job.handle else None
                if service is not None and job != self._identity(service):
                    continue
                task = self._tasks.get(task_tag(service.job, ANCHOR) if service is not None else job.handle)
                if task is not None and (service is not None or task.identity == job):
                    self._tasks.stop(task, grace)
                if service is not None and not service.state.ended:
                    at = self._clock() + max(grace, 0.0)
                    service.remove_at = at if service.remove_at is None else min(at, service.remove_at)
            self._ensure_changer()

    def report_container(self, report: ContainerReport) -> ContainerOrder:
        """Take a container's report; see ``ContainerTasks.report``."""
        with self._lock:
            order = self._tasks.report(report)
            anchor = self._tasks.get(task_tag(report.job, ANCHOR)) if report.exit_code else None
            service = self._services.get(report.job)
            if anchor is not None and not anchor.live and service is not None and service.remove_at is None:
                service.remove_at = 0.0  # else YARN would start it again
            return order

    def authenticate(self, rm_id: str, proof: str) -> Anchor:
        """Check that a container knows the secret of the service that its user posted; see docs/yarn.md."""
        application = self._applications.get(rm_id)
        if application is None:
            with self._lock:
                self._take(self._read_listing())
            application = self._applications.get(rm_id)
        if application is None or application.state.ended:
            raise NotFound(f"{rm_id[:80]}: YARN knows no such service that has not ended")
        service = read_service(self._client, application.name, do_as=application.user)
        if service.use is ServiceUse.WAIT:
            raise Unavailable(f"{rm_id}: YARN does not tell the description of service {application.name} yet")
        secret = service.environment.get(SECRET, "")
        if service.application != rm_id or not secret or not hmac.compare_digest(secret.encode(), proof.encode()):
            raise Denied(f"{rm_id}: this is not the {SECRET} in the environment of service {application.name}")
        request = {key.removeprefix(PREFIX): text for key, text in service.properties.items() if key.startswith(PREFIX)}
        request |= {role.value: service.demands[role.value] for role in TASK_ROLES if role.value in service.demands}
        job = self._key(application)
        with self._lock:
            started = _Service(job, application.name, rm_id, application.user, state=application.state)
            self._services.setdefault(job, started)
            self._add_anchor(job, application.user)
            self._ensure_changer()
        script = "".join(f'#DL2 {key}="{text}"\n' for key, text in request.items())
        return Anchor(key=job, owner=owner_of(application.user), name=application.name, script=script, handle=rm_id)

    def close(self) -> None:
        """End the thread that changes services; running jobs go on."""
        self._closing.set()
        if self._changer is not None:
            self._changer.join()
        self._client.close()

    # Changing services: one thread

    def _ensure_changer(self) -> None:
        if self._changer is None and not self._closing.is_set():
            self._changer = threading.Thread(target=self._change, name="dl2d-yarn-changer", daemon=True)
            self._changer.start()

    def _change(self) -> None:
        """Bring services to the size that their tasks need, and remove those that have ended, until closed."""
        looked_at = time.monotonic()
        while not self._closing.wait(_LOOK_SECONDS):
            look = time.monotonic() - looked_at > _OVERDUE_SECONDS / 3
            looked_at = time.monotonic() if look else looked_at
            try:
                self._change_all(look=look)
            except Exception:
                # Without this thread no job would change its size any more.
                log.exception("services were not changed")

    def _change_all(self, *, look: bool) -> None:
        """One round of the thread; with ``look`` also ask YARN what it does not say by itself."""
        with self._lock:
            if self._settled_at is None or self._clock() < self._settled_at:
                return
            due = [
                service
                for service in self._services.values()
                if service.retry_at <= self._clock() and not service.removed
            ]
        # Of services that have ended, of which there may be many at the start, a few each time.
        ended = [service for service in due if service.state.ended]
        for service in [service for service in due if not service.state.ended] + ended[:_MAX_ASKED]:
            self._attempt(service, self._remove if service.remove_at is not None else self._resize)
        if look:
            self._find_overdue()
            self._read_limits()
            self._read_reasons()
            for remark in self._watched.read(self._applications.values()):
                self._report_once(remark)
            self._decommission()

    def _attempt(self, service: _Service, change: Callable[[_Service], None]) -> None:
        try:
            change(service)
        except ResourceManagerError as error:
            service.retry_at = self._clock() + _RETRY_SECONDS
            with self._lock:
                for task in self._tasks.of_job(service.job):
                    if task.state is RmJobState.PENDING and task.role is not Role.COORDINATOR:
                        task.reason = str(error)
            self._report_once(f"{service.name}: {error}")

    def _resize(self, service: _Service) -> None:
        """Ask for the number of containers that each component needs, in one request."""
        with self._lock:
            if service.state.ended or not service.application:
                return
            components = {role: self._tasks.size_wanted(service.job, role) for role in TASK_ROLES}
            wanted = {role: component.size for role, component in components.items()}
            unknown = any(component.asked is None for component in components.values())
        if not unknown and all(component.asked == wanted[role] for role, component in components.items()):
            return
        found = self._described(service)
        if unknown:  # as after a restart; a request that changes nothing would hold the service in state FLEX
            if found.use is not ServiceUse.FLEX:
                raise Unavailable(f"{service.name} cannot be resized yet")
            for role, component in components.items():
                component.asked = found.sizes.get(role.value)
                component.decommissioned |= found.decommissioned.get(role.value, set())
                wanted[role] = component.size
        if all(component.asked == wanted[role] for role, component in components.items()):
            return
        path = f"{SERVICES_PATH}/{service.name}"
        self._client.send("PUT", path, flex_request(wanted), do_as=service.user)
        with self._lock:
            for role, component in components.items():
                component.asked = wanted[role]
        log.info("service resized", name=service.name, **{role.value: size for role, size in wanted.items()})

    def _described(self, service: _Service) -> Service:
        """Description of a service, right before it is changed by its name.

        Raises
        ------
        NotFound
            It does not exist any more, or another one has got its name.
        Unavailable
            YARN does not say which one it is.
        """
        found = read_service(self._client, service.name, do_as=service.user)
        if found.application and found.application != service.application:
            raise NotFound(f"service {service.name} is {found.application} by now, not {service.application}")
        if not found.application and found.use is not ServiceUse.ENDED:
            raise Unavailable(f"YARN does not say yet which application service {service.name} is")
        return found

    def _remove(self, service: _Service) -> None:
        """Remove a service, with all that runs in it, once its coordinator has had its time to end."""
        anchor = task_tag(service.job, ANCHOR)
        with self._lock:
            task = self._tasks.get(anchor)
            ended = service.state.ended or (task is not None and not task.live)
            due = service.remove_at is not None and (ended or self._clock() >= service.remove_at)
            if service.removed or not due:
                return
        try:
            self._described(service)
            self._client.send("DELETE", f"{SERVICES_PATH}/{service.name}", do_as=service.user)
        except NotFound:
            pass
        except Rejected as error:
            if "doesn't exist" not in error.said:
                raise
        with self._lock:
            service.removed = True
        log.info("service removed", name=service.name)

    def _find_overdue(self) -> None:
        """Look for containers that do not report: what YARN does not list any more has ended."""
        seconds = max(_OVERDUE_SECONDS, _OVERDUE_INTERVALS * self._settings.report_seconds)
        with self._lock:
            late = [(self._services.get(job), tasks) for job, tasks in self._tasks.overdue(seconds).items()]
            since = self._clock() - _START_INTERVALS * seconds
            unstarted = [
                self._services[anchor.job]
                for anchor in self._tasks.pending_anchors()
                if anchor.submitted < since and anchor.job in self._services
            ]
        for service, tasks in late:
            if service is not None:
                self._attempt(service, partial(self._end_gone, tasks))
        for service in unstarted:
            if service.state is RmJobState.RUNNING and service.remove_at is None:
                self._attempt(service, self._end_unstarted)

    def _end_unstarted(self, service: _Service) -> None:
        """End a job whose coordinator's containers end before they report: YARN may wait for another node for ever."""
        dead = read_service(self._client, service.name, do_as=service.user).dead.get(Role.COORDINATOR.value)
        anchor = self._tasks.get(task_tag(service.job, ANCHOR))
        if dead and anchor is not None:
            with self._lock:
                reason = f"its coordinator's container {dead[-1]} ended before it called; see its log in YARN"
                anchor.end(RmJobState.FAILED, reason, self._clock())
                service.remove_at = 0.0

    def _end_gone(self, tasks: Iterable[Task], service: _Service) -> None:
        present = read_service(self._client, service.name, do_as=service.user).containers
        with self._lock:
            for task in tasks:
                if present and task.container not in present:
                    task.end(RmJobState.LOST, f"{task.container} is gone", self._clock())


__all__ = ["YarnManager", "create"]
