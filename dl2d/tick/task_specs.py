"""Task specifications: the command, environment and credentials with which a job's tasks and anchor are started."""

from __future__ import annotations

import hashlib
import hmac
import posixpath
from dataclasses import dataclass, field

from dl2d.core.cluster import Task, task_tag
from dl2d.core.jobs import Job, JobKey, Launch, Role
from dl2d.core.resource_manager import TaskSpec
from dl2d.core.resources import NO_RESOURCES

RUNNER = "dl2-run"
#: Name of a job's anchor among its tasks.
ANCHOR = "anchor"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Derives every secret from the daemon's key with HMAC-SHA256; a restart derives the same ones again."""

    key: bytes = field(repr=False)

    def for_job(self, job: JobKey) -> str:
        """Bearer credential with which a job's coordinator speaks to the job API."""
        return self._derive("coordinator", job.slug)

    def token(self, job: JobKey) -> str:
        """Token that the members of a job show one another."""
        return self._derive("members", job.slug)

    def for_submission(self) -> str:
        """Bearer credential with which the command line submits and cancels jobs."""
        return self._derive("submission", "")

    def is_job(self, job: JobKey, shown: str) -> bool:
        """Whether ``shown`` is the job's credential, in constant time."""
        return hmac.compare_digest(self.for_job(job).encode(), shown.encode())

    def may_submit(self, shown: str) -> bool:
        """Whether ``shown`` is the submission credential, in constant time."""
        return hmac.compare_digest(self.for_submission().encode(), shown.encode())

    def _derive(self, purpose: str, subject: str) -> str:
        return hmac.new(self.key, f"dl2d/{purpose}/{subject}".encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True, slots=True)
class Launcher:
    """Writes task specifications. ``url`` is where coordinators reach the job API."""

    url: str
    credentials: Credentials

    def task(self, job: Job, task: Task) -> TaskSpec:
        """A worker or parameter server of a job whose coordinator has called."""
        return self.of(job).task(task)

    def of(self, job: Job) -> JobLauncher:
        """Specifications for several tasks of one job."""
        shared = (
            ("DL2_COORDINATOR", job.address),
            ("DL2_TOKEN", self.credentials.token(job.key)),
            ("DL2_JOB", job.key.slug),
            ("DL2_ARCHITECTURE", job.request.architecture.value),
        )
        return JobLauncher(job, with_runner(job.launch), _kept(job.launch), shared, task_tag(job.key, ""))

    def anchor(self, job: Job) -> TaskSpec:
        """The coordinator of a job that was submitted to the daemon itself."""
        environment = {
            "DL2_ROLE": Role.COORDINATOR.value,
            "DL2_TOKEN": self.credentials.token(job.key),
            "DL2_JOB": job.key.slug,
            "DL2_DAEMON": self.url,
            "DL2_CREDENTIAL": self.credentials.for_job(job.key),
        }
        return TaskSpec(
            tag=task_tag(job.key, ANCHOR),
            job=job.key,
            role=Role.COORDINATOR,
            name=ANCHOR,
            demand=NO_RESOURCES,
            node="",
            owner=job.owner,
            launch=Launch(with_runner(job.launch), job.launch.cwd, (*_kept(job.launch), *environment.items())),
        )


@dataclass(frozen=True, slots=True)
class JobLauncher:
    """Writes the specifications of one job's tasks."""

    job: Job
    argv: tuple[str, ...]
    #: The user's environment, and what all tasks of the job are told.
    kept: tuple[tuple[str, str], ...]
    shared: tuple[tuple[str, str], ...] = field(repr=False)
    #: Tag of a task of the job, up to the task's own id.
    tag: str

    def task(self, task: Task) -> TaskSpec:
        """A worker or parameter server."""
        job = self.job
        environment = (*self.kept, ("DL2_ROLE", task.role.value), ("DL2_TASK", task.id), *self.shared)
        return TaskSpec(
            tag=self.tag + task.id,
            job=job.key,
            role=task.role,
            name=task.id,
            demand=job.request.demand(task.role),
            node=task.node,
            owner=job.owner,
            launch=Launch(self.argv, job.launch.cwd, environment),
        )


def _kept(launch: Launch) -> tuple[tuple[str, str], ...]:
    """The user's environment without variables that dl2d sets."""
    return tuple((key, value) for key, value in launch.env if not key.startswith("DL2_"))


def with_runner(launch: Launch) -> tuple[str, ...]:
    """The command, run by ``dl2-run`` unless it says so itself."""
    return launch.argv if posixpath.basename(launch.argv[0]) == RUNNER else (RUNNER, *launch.argv)
