"""Task specifications: command, environment and credentials with which the tasks and the anchor of a job start."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, field

from dl2d.core.cluster import ANCHOR, Task, task_tag
from dl2d.core.credentials_from_daemon_key import Credentials
from dl2d.core.jobs import TASK_ROLES, Durability, Job, Launch, Role
from dl2d.core.resource_manager import TaskSpec
from dl2d.core.resources import NO_RESOURCES

#: Program that runs the user's command in the role of its task.
RUNNER = "dl2-run"


@dataclass(frozen=True, slots=True)
class TaskSpecs:
    """Makes the specifications of all jobs' tasks and anchors."""

    #: URL of the job API, which coordinators call.
    url: str
    #: Makes the secrets of the jobs.
    credentials: Credentials
    #: Value of ``DL2_DAEMON_CERTIFICATE`` by which coordinators verify the job API; "" for authorities they trust.
    certificate: str = ""
    #: The daemon's account, to which coordinators on its machine send their credential where nothing is encrypted.
    daemon_uid: int | None = None

    def of_job(self, job: Job) -> JobTaskSpecs:
        """What makes the specifications of a job's tasks, once its coordinator has called."""
        request = job.request
        environment = (
            *_user_environment(job.launch),
            ("DL2_COORDINATOR", job.address),
            ("DL2_TOKEN", self.credentials.token(job.key)),
            ("DL2_JOB", job.key.slug),
            ("DL2_ARCHITECTURE", request.architecture.value),
            *((("DL2_DURABILITY", request.durability.value),) if request.durability is not Durability.NONE else ()),
        )
        return JobTaskSpecs(job, Launch(with_runner(job.launch), job.launch.cwd, environment), task_tag(job.key, ""))

    def anchor_spec(self, job: Job) -> TaskSpec:
        """Specification of the anchor of a job that was submitted to the daemon."""
        environment = (
            *_user_environment(job.launch),
            ("DL2_ROLE", Role.COORDINATOR.value),
            ("DL2_TOKEN", self.credentials.token(job.key)),
            ("DL2_JOB", job.key.slug),
            ("DL2_DAEMON", self.url),
            ("DL2_CREDENTIAL", self.credentials.for_job(job.key)),
            *((("DL2_DAEMON_CERTIFICATE", self.certificate),) if self.certificate else ()),
            *((("DL2_DAEMON_UID", str(self.daemon_uid)),) if self.daemon_uid is not None else ()),
        )
        return TaskSpec(
            tag=task_tag(job.key, ANCHOR),
            job=job.key,
            role=Role.COORDINATOR,
            name=ANCHOR,
            demand=NO_RESOURCES,
            node="",
            owner=job.owner,
            launch=Launch(with_runner(job.launch), job.launch.cwd, environment),
            member_demands=tuple((role, job.request.demand(role)) for role in TASK_ROLES),
        )


@dataclass(frozen=True, slots=True)
class JobTaskSpecs:
    """Makes the specifications of one job's tasks."""

    job: Job
    #: Command, folder and environment that all tasks of the job have in common.
    launch: Launch = field(repr=False)
    #: Tag of a task of the job without the task's id.
    tag_prefix: str

    def task_spec(self, task: Task) -> TaskSpec:
        """Specification of a worker or parameter server."""
        job, launch = self.job, self.launch
        environment = (*launch.env, ("DL2_ROLE", task.role.value), ("DL2_TASK", task.id))
        return TaskSpec(
            tag=self.tag_prefix + task.id,
            job=job.key,
            role=task.role,
            name=task.id,
            demand=job.request.demand(task.role),
            node=task.node,
            owner=job.owner,
            launch=Launch(launch.argv, launch.cwd, environment),
        )


def _user_environment(launch: Launch) -> tuple[tuple[str, str], ...]:
    """The user's environment without variables that dl2d sets."""
    return tuple((key, value) for key, value in launch.env if not key.startswith("DL2_"))


def with_runner(launch: Launch) -> tuple[str, ...]:
    """The user's command, run by ``dl2-run`` unless it already starts with it."""
    return launch.argv if posixpath.basename(launch.argv[0]) == RUNNER else (RUNNER, *launch.argv)
