"""The YARN resource manager: an elastic job as a YARN service with the components coordinator, ps and worker."""

from __future__ import annotations

import hmac
import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import structlog
from msgspec import structs

from dl2d.core.cluster import ANCHOR, Node, task_tag
from dl2d.core.errors import Denied, NotFound, Rejected, RequestError, ResourceManagerError, Unavailable, Waiting
from dl2d.core.jobs import Role
from dl2d.core.resource_manager import (
    Anchor,
    Capabilities,
    ContainerOrder,
    ContainerReport,
    ResourceManager,
    RmIdentity,
    RmListing,
    TaskSpec,
)
from dl2d.core.resources import Resources
from dl2d_yarn.cluster_listing import (
    LOOK_UP_SECONDS,
    SERVICES_PATH,
    Application,
    ClusterListing,
    NodeSizes,
    read_listing,
    read_service,
    read_version,
    service_path,
)
from dl2d_yarn.component_containers import IdleContainer
from dl2d_yarn.listed_services import NO_APPLICATION_SECONDS, JobService, Services
from dl2d_yarn.queue_and_growth_limits import (
    Queues,
    idle_limits,
    queue_limits,
    queue_shares,
    read_queues,
    within_shares,
)
from dl2d_yarn.rest_client import MAX_DESCRIPTION_BYTES, SERVICE_CALL_SECONDS, RestClient
from dl2d_yarn.service_description import (
    MAX_REQUEST_CHARACTERS,
    PROPERTY_PREFIX,
    SECRET_VARIABLE,
    TASK_ROLES,
    check_same_job,
    read_application_id,
    read_template,
    service_description,
    service_name,
)
from dl2d_yarn.service_resizing import ServiceChanger
from dl2d_yarn.settings import YarnSettings
from dl2d_yarn.static_jobs import WatchedApplications, owner_of
from dl2d_yarn.tasks_and_anchors import Task
from dl2d_yarn.tasks_of_containers import ContainerTasks
from dl2d_yarn.yarn_states import ServiceUse

log = structlog.get_logger(__name__)

#: Number of report intervals after a start within which all containers have reported, and the time in seconds where an
#: earlier daemon may have set a longer interval: more than the longest.
_SETTLING_INTERVALS, _SETTLING_SECONDS = 3, 65.0
#: Number of services that are posted at once.
_PARALLEL_SUBMITS = 4
#: Number of different warnings of which each is logged once.
_MAX_WARNINGS = 1000
#: Maximum number of containers of a user's services that are authenticated at once: the API authenticates 8 in all.
_MAX_AUTHENTICATED = 2


def create(settings: Mapping[str, object], *, clock: Callable[[], float]) -> ResourceManager:
    """Create the manager from ``resource_manager.yarn`` of the config file, without a call to YARN.

    Raises ``ConfigError`` if a setting is unknown or bad; names the key.
    """
    return YarnManager(YarnSettings.parse(settings), clock=clock)


class YarnManager:
    """YARN through REST; implements ``ResourceManager`` and ``ContainerManager``.

    It learns what runs from YARN's lists and from the reports of the containers: after a restart of the daemon
    ``listing`` raises ``Unavailable`` until they have had the time to report. A thread changes the sizes of services.

    Parameters
    ----------
    settings
        Checked settings.
    clock
        Seconds since 1970.
    timer
        Seconds on a monotonic clock.
    client
        Replaces the clients of the ResourceManager in tests.
    """

    def __init__(
        self,
        settings: YarnSettings,
        *,
        clock: Callable[[], float],
        timer: Callable[[], float] = time.monotonic,
        client: RestClient | None = None,
    ) -> None:
        self._settings = settings
        self._clock, self._timer = clock, timer
        self._user = settings.account
        read_template(settings.template)
        self._client = client or RestClient.of(settings)
        #: Client with a short time-out for calls about one service: its ApplicationMaster answers, which may hang.
        limit = min(SERVICE_CALL_SECONDS, settings.timeout_seconds)
        self._service_client = client or RestClient.of(
            settings, timeout_seconds=limit, max_answer_bytes=MAX_DESCRIPTION_BYTES
        )
        #: Held while container tasks and services are read or changed, never during a call.
        self._lock = threading.Lock()
        self._tasks = ContainerTasks(timer, settings.report_seconds)
        self._services = Services(settings.cluster, self._user, self._tasks, clock)
        self._sizes = NodeSizes(())
        #: Ids of the nodes of the last listing, and since when some of them are missing.
        self._node_ids: frozenset[str] = frozenset()
        self._missing_since: float | None = None
        #: Queues of the capacity scheduler; None until they have been read, or if YARN has another scheduler.
        self._queues: Queues | None = None
        self._watched = WatchedApplications(self._client, settings.watch)
        #: Time of the first listing, and whether all containers have had the time to report since.
        self._listed_at: float | None = None
        self._settled = False
        #: When a listing was read last to look up an application, and whether one is being read.
        self._looked_up_at, self._looking_up = -math.inf, False
        #: Number of containers of each user's services that are being authenticated.
        self._authenticating: Counter[str] = Counter()
        #: Logs a warning unless it is one of the last ``_MAX_WARNINGS`` different ones.
        self._warn_once = lru_cache(_MAX_WARNINGS)(_warn)
        self._changer = ServiceChanger(
            settings, self._service_client, self._lock, self._tasks, self._services,
            timer=timer, read_details=self._read_details, warn=self._warn_once,
        )  # fmt: skip

    def capabilities(self) -> Capabilities:
        """See ``ResourceManager.capabilities``. Also reads the queues, so that the first tick has their limits."""
        self._read_queues()
        return Capabilities(
            name="yarn",
            cluster=self._settings.cluster,
            version=read_version(self._client),
            starts_anchors=True,
            other_users=False,
            parallel_submits=_PARALLEL_SUBMITS,
            parallel_authentication=True,
            output="the log of its container (yarn logs)",
            defaults=Resources.of(cpu=1, memory=self._settings.default_memory_mib),
        )

    def listing(self, ended_since: float | None = None, tasks: Collection[object] | None = None) -> RmListing:
        """See ``ResourceManager.listing``. Makes two calls, whatever the number of jobs.

        ``ended_since`` is ignored: YARN lists applications for long after their end. ``tasks`` is: users write no tags.

        Raises
        ------
        Unavailable
            An answer is missing or incomplete.
        Waiting
            Containers may not have reported yet since the daemon's start.
        """
        del ended_since, tasks
        at, now = self._clock(), self._timer()
        with self._lock:
            self._tasks.spread_reports(0)  # by those that have reported, if YARN does not answer
        listing = self._read_listing()
        self._check_nodes(listing, now)
        for remark in (*listing.remarks, *listing.incomplete):
            self._warn_once(remark)
        with self._lock:
            self._sizes = NodeSizes(listing.nodes)
            jobs = self._services.update(listing)
            self._tasks.records.end_on_nodes(listing.lost_nodes)
            self._tasks.forget(self._services.by_job)
            # Before containers of an earlier daemon have settled: there may be thousands.
            self._spread_reports()
            self._check_settled(listing, now)
            self._services.add_missing_anchors()
            self._changer.start()
            own = {service.application_id for service in self._services.by_job.values()}
            jobs += [*self._tasks.records.listed(listing.node_names), *self._watched.jobs(listing, own)]
            names = {id_: name for id_, name in listing.node_names.items() if id_ not in listing.lost_nodes}
            idle = [each._replace(node=names[each.node]) for each in self._tasks.idle() if each.node in names]
            services = self._services.by_job.values()
            settings, queues = self._settings, self._queues
            shares = queue_shares(queues, services, queue=settings.queue, user=self._user, warn=self._warn_once)
            nodes = within_shares(listing.nodes, queues, shares, leave_pending=settings.leave_pending)
            nodes = self._with_idle_as_free(idle, nodes)
            limits = (*queue_limits(shares, idle), *idle_limits(services, idle, nodes))
            unreported = self._services.unreported()
        return RmListing(
            at, nodes, tuple(jobs), incomplete=listing.incomplete, growth_limits=limits, unreported=unreported
        )

    def _check_settled(self, listing: ClusterListing, now: float) -> None:
        """Raise ``Waiting`` while containers may not have had the time to report since the daemon's start."""
        if self._settled:
            return
        self._listed_at = now if self._listed_at is None else self._listed_at
        live = any(each.is_service and not each.state.ended for each in listing.applications)
        seconds = _SETTLING_INTERVALS * self._settings.report_seconds if live or listing.incomplete else 0.0
        if not self._services.unreported().isdisjoint(each.application_id for each in self._services.by_job.values()):
            seconds = max(seconds, _SETTLING_SECONDS)
        left = self._listed_at + seconds - now
        if left > 0:
            raise Waiting(f"containers of running jobs have up to {left:.1f} s for their first report")
        self._settled = True

    def _spread_reports(self) -> None:
        """Set the report interval of all containers by their number in YARN's list."""
        services = self._services
        found = (services.application(each) for each in services.by_job.values() if not each.state.ended)
        self._tasks.spread_reports(sum(each.containers for each in found if each is not None))

    def allow_changes(self, seconds: float) -> None:
        """See ``ContainerManager.allow_changes``."""
        self._changer.allow(seconds)

    def _read_listing(self) -> ClusterListing:
        settings = self._settings
        return read_listing(
            self._client, settings.partition, attributes=settings.node_attributes, all_types=bool(settings.watch)
        )

    def _check_nodes(self, listing: ClusterListing, now: float) -> None:
        """Raise ``Unavailable``, for ``node_return_seconds``, if nodes of the last listing are missing, up or down.

        After a restart of the ResourceManager nodes register again; otherwise jobs would shrink to fit the first ones.
        After a restart of the daemon, the nodes on which containers report tasks count as those of the last listing.
        """
        before = self._node_ids if self._settled else self._tasks.records.nodes()
        missing = before - listing.node_names.keys()
        if not missing or self._missing_since is None:
            self._missing_since = now if missing else None
        if self._missing_since is not None and now - self._missing_since < self._settings.node_return_seconds:
            raise Unavailable(
                f"{len(missing)} nodes are missing from YARN's list, such as {min(missing)}; waiting up to "
                f"{self._settings.node_return_seconds:g} s for them to register again"
            )
        self._node_ids = frozenset(listing.node_names) - listing.lost_nodes

    def _with_idle_as_free(self, idle: Iterable[IdleContainer], nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """The nodes, with the containers without a task counted as free."""
        free: dict[str, list[Resources]] = defaultdict(list)
        for _, node, demand in idle:
            free[node].append(demand)
        # A container that has started but has not reported counts in its node's use already, and the tick counts the
        # demand of its task on the node that was planned: there it is subtracted.
        for job in {task.job for task in self._tasks.records.waiting()}:
            service = self._services.by_job.get(job)
            application = self._services.application(service) if service is not None else None
            if application is not None:
                for task in self._tasks.tasks_of_unreported(job, application.containers - 1):
                    free[task.planned_node].append(self._tasks.component(job, task.role).demand)
        return tuple(
            structs.replace(node, used=node.used.minus(Resources.total(free[node.name]))) if node.name in free else node
            for node in nodes
        )

    def _read_details(self) -> None:
        """Read what YARN's lists do not have: the queues, and the containers of watched applications."""
        self._read_queues()
        for remark in self._watched.read(self._services.applications.values()):
            self._warn_once(remark)

    def _read_queues(self) -> None:
        """Read the queues; after a failure those that were read before stay in use."""
        try:
            self._queues = read_queues(self._client, self._settings.partition)
        except ResourceManagerError as error:
            self._warn_once(f"limits of queues: {error}")

    def submit(self, task: TaskSpec) -> str:
        """Post the service of an anchor, or have a task wait for a container of its job's service.

        YARN chooses the node of a container. After ``Unavailable`` an anchor may exist all the same: look for its tag
        in a listing.
        """
        if task.role is Role.COORDINATOR:
            return self._submit_anchor(task)
        self._check_fits(task)
        with self._lock:
            service = self._services.live(task.job)
            if service is None:
                raise NotFound(f"{task.name}: job {task.job.id} has no service that runs")
            waiting = Task(task.job, task.name, task.role, service.user, self._clock())
            waiting.reason, waiting.planned_node = "waits for a container", task.node
            self._tasks.component(task.job, task.role).demand = task.demand
            self._tasks.records.add(waiting)
            self._services.managed.add(task.job)
            self._changer.start()
        return task.tag

    def _check_fits(self, task: TaskSpec) -> None:
        """Raise an error for a demand that no node can ever meet, which YARN would queue, or an unknown node."""
        if not self._sizes.names:
            self._sizes = NodeSizes(self._read_listing().nodes)
        if task.node and task.node not in self._sizes.names:
            raise NotFound(f"{task.name} of job {task.job.id}: there is no node {task.node!r}")
        if obstacle := self._sizes.obstacle(task.demand):
            raise Rejected(f"{task.name} of job {task.job.id} fits on no node: even {obstacle}")

    def _submit_anchor(self, task: TaskSpec) -> str:
        name = service_name(task.job)
        description = service_description(task, self._settings)
        with self._lock:
            # Added before the POST, since the coordinator may report before the answer arrives. A retry finds it here.
            anchor = self._tasks.records.get(task.tag)
            if anchor is None or not anchor.live:
                anchor = Task(task.job, task.name, task.role, task.owner.user, self._clock())
                self._tasks.records.add(anchor)
            self._services.managed.add(task.job)
        try:
            application, size = read_application_id(self._client.send("POST", SERVICES_PATH, description)), 0
        except Unavailable:
            anchor.added = self._timer()  # YARN may have begun to start it
            raise
        except Rejected as error:
            if "already exist" not in error.said.lower():
                raise
            application, size = self._find_own_service(anchor, description, error), None
        with self._lock:
            service = self._services.by_job.setdefault(task.job, JobService(task.job, name))
            service.user = self._user
            for role in TASK_ROLES:
                self._tasks.component(task.job, role).confirmed_size = size
            self._changer.start()
        log.info("service posted", name=name, application=application)
        return application

    def _find_own_service(self, anchor: Task, description: Mapping[str, Any], error: Rejected) -> str:
        """Id of the application of an earlier POST of this service whose answer was lost.

        Raises
        ------
        Rejected
            A service of another dl2d has the name.
        Unavailable
            YARN does not say yet, or another user's service has the name.
        """
        name = str(description["name"])
        listing = self._read_listing()
        running = [each for each in listing.applications if each.name == name and not each.state.ended]
        own = next((each for each in running if each.user == self._user), None)
        problem = "retrying after the next listing"
        if own is not None:
            found = read_service(self._client, name)
            if found.application_id == own.id and found.use is not ServiceUse.WAIT:
                check_same_job(found.application_id, found.environment, description)
                return own.id
        elif running:
            problem = f"{running[0].id} of user {running[0].user} has it, and YARN allows a name once"
        elif not listing.incomplete:
            self._remove_without_application(name, anchor)
        raise Unavailable(f"{name}: a service of this name exists; {problem}", said=error.said)

    def _remove_without_application(self, name: str, anchor: Task) -> None:
        """Remove a service that is no application ``NO_APPLICATION_SECONDS`` after its POST: it may be posted anew."""
        if self._timer() - anchor.added < NO_APPLICATION_SECONDS:
            return
        # Read right before its removal: it may have become an application since the listing.
        if read_service(self._client, name).use is ServiceUse.ENDED:
            self._client.send("DELETE", service_path(name))
            anchor.added = self._timer()

    def stop(self, jobs: Sequence[RmIdentity], grace: float) -> None:
        """See ``ResourceManager.stop``. Containers are told when they report; services are removed after ``grace``."""
        with self._lock:
            services = {
                service.identity: service for service in self._services.by_job.values() if service.application_id
            }
            for identity in jobs:
                service = services.get(identity)
                task = self._tasks.records.get(
                    task_tag(service.job, ANCHOR) if service is not None else identity.handle
                )
                if task is not None and (service is not None or task.identity == identity):
                    self._services.managed.add(task.job)
                    self._tasks.records.stop(task, grace)
                if service is not None and not service.state.ended:
                    service.remove_by(self._timer() + max(grace, 0.0))
            self._changer.start()

    def report_container(self, report: ContainerReport) -> ContainerOrder:
        """Record a container's report; returns what it is to do: see ``ContainerTasks.answer``."""
        with self._lock:
            self._services.manage(report.job)
            order = self._tasks.answer(report)
            service = self._services.by_job.get(report.job)
            # After a coordinator's exit status 0 its service ends by itself, unless the container was lost first: YARN
            # starts another one, which reports without the anchor.
            starts_again = report.role is Role.COORDINATOR and (report.task != ANCHOR or bool(report.exit_code))
            anchor = self._tasks.records.get(task_tag(report.job, ANCHOR)) if starts_again else None
            if anchor is not None and not anchor.live and service is not None and service.remove_at is None:
                service.remove_at = 0.0  # else YARN would start it again and again
            return order

    def authenticate(self, rm_id: str, proof: str) -> Anchor:
        """Check that a container knows the secret of the service that its user posted; see docs/yarn.md.

        Reads the service's description from its ApplicationMaster, which blocks for ``SERVICE_CALL_SECONDS`` at most,
        for ``_MAX_AUTHENTICATED`` containers of a user at once; others have to try again.
        """
        application = self._services.applications.get(rm_id) or self._look_up_application(rm_id)
        user = application.user
        with self._lock:
            if self._authenticating[user] >= _MAX_AUTHENTICATED:
                raise Unavailable(f"{rm_id[:80]}: other containers of user {user} are being authenticated")
            self._authenticating[user] += 1
        try:
            return self._authenticate(application, proof)
        finally:
            with self._lock:
                self._authenticating[user] -= 1
                self._authenticating += Counter()  # leaves out what is 0

    def _authenticate(self, application: Application, proof: str) -> Anchor:
        rm_id = application.id
        if application.state.ended or not application.is_service:
            raise NotFound(f"{rm_id}: YARN knows no such service that has not ended")
        service = read_service(self._service_client, application.name, do_as=application.user)
        if service.use is ServiceUse.WAIT:
            raise Unavailable(f"{rm_id}: YARN does not yet show the description of service {application.name}")
        secret = service.environment.get(SECRET_VARIABLE, "")
        if service.application_id != rm_id or not secret or not hmac.compare_digest(secret.encode(), proof.encode()):
            raise Denied(f"{rm_id}: the credential does not match the {SECRET_VARIABLE} in service {application.name}")
        given = {key: text for key, text in service.properties.items() if key.startswith(PROPERTY_PREFIX)}
        request = {key.removeprefix(PROPERTY_PREFIX): text for key, text in given.items()}
        request |= {role.value: demand for role in TASK_ROLES if (demand := service.component(role).demand)}
        size = sum(len(key) + len(text) for key, text in request.items())
        if size > MAX_REQUEST_CHARACTERS:
            raise RequestError(
                f"{PROPERTY_PREFIX}*",
                f"the properties have {size} characters together; at most {MAX_REQUEST_CHARACTERS} are allowed",
                where=f"service {application.name}",
            )  # fmt: skip
        job = self._services.key(application)
        script = "".join(f'#DL2 {key}="{text}"\n' for key, text in request.items())
        return Anchor(
            key=job, owner=owner_of(application.user), name=application.name, script=script, handle=rm_id,
            source=f"properties {PROPERTY_PREFIX}* of service {application.name}",
        )  # fmt: skip

    def _look_up_application(self, rm_id: str) -> Application:
        """Find an unknown application in a new listing. Anybody may name one: listings are read rarely, one at a time.

        Raises
        ------
        NotFound
            YARN does not list it.
        Unavailable
            A listing was read just before, or is being read.
        """
        with self._lock:
            if self._looking_up or self._timer() - self._looked_up_at < LOOK_UP_SECONDS:
                raise Unavailable(f"{rm_id[:80]}: not known; YARN is asked again in {LOOK_UP_SECONDS:g} s at most")
            self._looking_up, self._looked_up_at = True, self._timer()
        try:
            listing = self._read_listing()
        finally:
            self._looking_up = False
        with self._lock:
            self._services.add_applications(listing)
        application = self._services.applications.get(rm_id)
        if application is None:
            raise NotFound(f"{rm_id[:80]}: YARN knows no such service that has not ended")
        return application

    def close(self) -> None:
        """End the thread that changes services, and close the connections; running jobs continue."""
        self._changer.close()
        self._client.close()
        self._service_client.close()


def _warn(remark: str) -> None:
    log.warning("unexpected answer from YARN", remark=remark)


__all__ = ["YarnManager", "create"]
