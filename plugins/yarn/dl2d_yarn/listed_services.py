"""Services of dl2d's jobs, by job, as last listed by YARN. No I/O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dl2d.core.cluster import ANCHOR, task_tag
from dl2d.core.jobs import JobKey, Role
from dl2d.core.resource_manager import RmIdentity, RmJob, RmJobState
from dl2d_yarn.cluster_listing import Application, ClusterListing
from dl2d_yarn.service_description import job_of_service
from dl2d_yarn.tasks_and_anchors import Task
from dl2d_yarn.tasks_of_containers import ContainerTasks

#: Time after which a posted service that never became an application is removed, seconds: YARN copies files first.
NO_APPLICATION_SECONDS = 300.0
#: Time after which the removal of a service is tried again whose application is still listed as live, seconds.
REMOVE_AGAIN_SECONDS = 30.0


@dataclass(slots=True)
class JobService:
    """A job's service, as last listed, and when it is to be changed or read again."""

    job: JobKey
    name: str
    #: Id of its application; empty until it is listed.
    application_id: str = ""
    user: str = ""
    queue: str = ""
    #: When it started, seconds since 1970.
    started: int = 0
    #: Whether the daemon posted it, as its name says, and not its user.
    posted_by_daemon: bool = False
    state: RmJobState = RmJobState.PENDING
    #: When it is to be removed; None if it is not. Seconds on a monotonic clock, like the times below.
    remove_at: float | None = None
    #: Whether YARN has removed it, and its application is listed as ended.
    removed: bool = False
    #: Number of failures in a row to change it or to ask for its description, and when the next attempt is due.
    failures: int = 0
    retry_at: float = 0.0
    #: Whether an attempt to change it has failed since the last one that succeeded.
    change_failed: bool = False
    #: Ended containers of its coordinator that were found before one had reported to this daemon, and when.
    dead_coordinators: dict[str, float] = field(default_factory=dict)
    #: Whether YARN starts no more containers of it on a node because several have failed there.
    blacklists_nodes: bool = False
    #: When the ``yarn`` command may be run for it again, after a failure.
    command_retry_at: float = 0.0
    #: Time at which its description was last read.
    described_at: float = 0.0
    #: Whether the last description since the daemon's start had all its containers.
    all_described: bool = False
    #: Time at which it was first found running; None while it waits in its queue.
    running_since: float | None = None
    #: Time at which was last read why its containers wait.
    reasons_read_at: float = 0.0

    @property
    def identity(self) -> RmIdentity:
        """Identity of its anchor."""
        tag = task_tag(self.job, ANCHOR) if self.posted_by_daemon else ""
        return RmIdentity(self.application_id, self.started, self.user, tag)

    @property
    def is_live(self) -> bool:
        """Whether it has neither ended nor is to be removed."""
        return not self.state.ended and self.remove_at is None

    def remove_by(self, at: float) -> None:
        """Have it removed at this time, or earlier if it is to be removed earlier; seconds on a monotonic clock."""
        self.remove_at = at if self.remove_at is None else min(at, self.remove_at)


@dataclass(eq=False)
class Services:
    """Services of dl2d's jobs. Not thread-safe.

    A service that its user posted is dl2d's once one of its containers has reported. In the modes observe and shadow
    none reports, so dl2d does not change it.
    """

    #: Name of the cluster, the first part of its jobs' keys.
    cluster: str
    #: User as whom the daemon acts in YARN. Services of this user with a name that dl2d gives were posted by it.
    user: str
    #: Tasks of the containers that report.
    tasks: ContainerTasks
    #: Seconds since 1970.
    clock: Callable[[], float]
    by_job: dict[JobKey, JobService] = field(default_factory=dict)
    #: Jobs whose services this daemon may change: it was told to start or stop a part of them, or a container of theirs
    #: has reported to it.
    managed: set[JobKey] = field(default_factory=set)
    #: Applications of the last listing, by id.
    applications: dict[str, Application] = field(default_factory=dict)

    def key(self, application: Application) -> JobKey:
        """Key of the job of a service that its user posted."""
        return JobKey(self.cluster, application.id.removeprefix("application_"), application.started)

    def live(self, job: JobKey) -> JobService | None:
        """The live service of a job, if it has one."""
        service = self.by_job.get(job)
        return service if service is not None and service.is_live else None

    def changeable(self) -> list[JobService]:
        """Services that this daemon may change, and ended ones of earlier daemons, whose names are to be freed."""
        services = self.by_job.values()
        return [each for each in services if each.job in self.managed or (each.posted_by_daemon and each.state.ended)]

    def application(self, service: JobService) -> Application | None:
        """The application of a service, if it is listed."""
        return self.applications.get(service.application_id)

    def update(self, listing: ClusterListing) -> list[RmJob]:
        """Update the services from a listing; returns the listed ones as jobs: anchors, and services of others."""
        jobs = []
        present = set()
        # Jobs whose containers have reported, also those that an earlier daemon registered.
        reporting = self.tasks.records.jobs()
        self.applications = {application.id: application for application in listing.applications}
        # Of several with one name the job's is the one that runs, in whatever order they are listed.
        for application in sorted(listing.applications, key=lambda each: each.state.ended):
            if not application.is_service:
                continue
            own = job_of_service(application.name, self.cluster) if application.user == self.user else None
            job = own or self.key(application)
            if own is None and job not in self.by_job and job not in reporting:
                jobs.append(_listed_job(application))
                continue
            service = self.by_job.get(job) or self._add(job, application.name)
            if service.application_id not in ("", application.id):
                if application.state.ended:
                    continue
                # ``remove_at`` of the ended service of this name is not carried over.
                service = self._add(job, application.name)
            present.add(job)
            service.posted_by_daemon = own is not None
            self._update_service(service, application)
            jobs.append(self._listed_anchor(application, service))
        if not listing.incomplete:
            for job in [job for job, service in self.by_job.items() if service.application_id and job not in present]:
                del self.by_job[job]
            self.managed &= self.by_job.keys() | self.tasks.records.jobs()
        return jobs

    def _update_service(self, service: JobService, application: Application) -> None:
        """Update a service from its application; the end of the application ends all its tasks."""
        service.application_id, service.state = application.id, application.state
        service.user, service.queue, service.started = application.user, application.queue, application.started
        if application.state.ended:
            reason = f"{application.id} has ended: {application.reason}"
            self.tasks.records.end_job(service.job, RmJobState.CANCELLED, reason)
            # The name and the folder stay taken until the service is removed.
            service.remove_at = service.remove_at if service.remove_at is not None else 0.0

    def _add(self, job: JobKey, name: str) -> JobService:
        """Add a service that was not listed before; it is to be removed if its coordinator has failed or is to stop."""
        anchor = self.tasks.records.get(task_tag(job, ANCHOR))
        failed = anchor is not None and anchor.state is RmJobState.FAILED
        remove_at = 0.0 if failed else None if anchor is None else anchor.deadline
        service = self.by_job[job] = JobService(job, name, remove_at=remove_at)
        return service

    def unreported(self) -> frozenset[str]:
        """Ids of live services with containers that have not reported since the daemon's start.

        Among them are services of users of which no container has reported yet. Once all containers of a service have
        been described, those in components that dl2d does not use do not count.
        """
        services = {service.application_id: service for service in self.by_job.values()}
        live = [each for each in self.applications.values() if each.is_service and not each.state.ended]
        return frozenset(each.id for each in live if self._is_unreported(each, services.get(each.id)))

    def _is_unreported(self, application: Application, service: JobService | None) -> bool:
        job = self.key(application) if service is None else service.job
        all_described = service is not None and service.all_described
        return (not all_described and self._has_more(application, job)) or self.tasks.has_unreported(job)

    def _has_more(self, application: Application, job: JobKey) -> bool:
        """Whether YARN has more containers than have reported; one of them is the ApplicationMaster's."""
        return self.tasks.count_reported(job) < application.containers - 1

    def has_unknown(self, service: JobService) -> bool:
        """Whether YARN has containers of a service that have neither reported nor been described."""
        application = self.application(service)
        return not service.all_described and application is not None and self._has_more(application, service.job)

    def undescribed(self) -> set[JobKey]:
        """Jobs with containers that have not reported, whose service has not been described with all its containers."""
        unreported = self.unreported()
        return {
            each.job for each in self.by_job.values() if each.application_id in unreported and not each.all_described
        }

    def add_applications(self, listing: ClusterListing) -> None:
        """Add the unknown applications of a listing; all other conclusions from listings are drawn by ``update``."""
        self.applications = {application.id: application for application in listing.applications} | self.applications

    def manage(self, job: JobKey) -> None:
        """Count a job whose container has reported as this daemon's, and add its service if its user posted it."""
        self.managed.add(job)
        application = self.applications.get(f"application_{job.id}")
        if application is None or not application.is_service:
            return
        if job not in self.by_job and self.key(application) == job:
            self.by_job[job] = JobService(
                job, application.name, application.id, application.user, application.queue, application.started,
                state=application.state,
            )  # fmt: skip
            self.add_anchor(job, application.user)

    def add_anchor(self, job: JobKey, user: str) -> None:
        """Add the anchor of a job, waiting for a container, unless it is known."""
        if self.tasks.records.get(task_tag(job, ANCHOR)) is None:
            self.tasks.records.add(Task(job, ANCHOR, Role.COORDINATOR, user, self.clock(), adopted=True))

    def add_missing_anchors(self) -> None:
        """Add the unknown anchors of live services: no container of them has reported since the daemon's start."""
        for service in self.by_job.values():
            if service.is_live and service.application_id:
                self.add_anchor(service.job, service.user)

    def _listed_anchor(self, application: Application, service: JobService) -> RmJob:
        """The anchor of a service as a job; if its coordinator has reported its end, this counts, not YARN's state."""
        task = self.tasks.records.get(task_tag(service.job, ANCHOR))
        state, reason = application.state, application.reason
        if task is not None and task.state in (RmJobState.DONE, RmJobState.FAILED):
            state, reason = task.state, task.reason
        elif not state.ended and service.remove_at is not None:
            state, reason = RmJobState.ENDING, "asked to stop"
        elif state is RmJobState.RUNNING and task is not None and task.state is RmJobState.PENDING:
            reason = task.reason
        handle, submitted, user, tag = service.identity
        return RmJob(handle=handle, state=state, tag=tag, user=user, reason=reason, submitted=submitted)


def _listed_job(application: Application) -> RmJob:
    """A service that is not dl2d's, as a job."""
    return RmJob(
        handle=application.id, state=application.state, user=application.user, reason=application.reason,
        submitted=application.started, ended=application.ended,
    )  # fmt: skip
