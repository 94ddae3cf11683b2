"""How the tasks of a job are started: the user's command with the environment that gives it its role."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, replace

from dl2d.core.cluster import Task, task_tag
from dl2d.core.jobs import Job, Launch, Role
from dl2d.core.resource_manager import TaskSpec
from dl2d.core.resources import NO_RESOURCES
from dl2d.daemon.credentials import Credentials
from dl2d.daemon.reconcile import ANCHOR

RUNNER = "dl2-run"


@dataclass(frozen=True, slots=True)
class Launcher:
    """Writes task specifications. ``url`` is where coordinators reach the job API."""

    url: str
    credentials: Credentials

    def task(self, job: Job, task: Task) -> TaskSpec:
        """A worker or parameter server of a job whose coordinator has called."""
        environment = {
            "DL2_ROLE": task.role.value,
            "DL2_TASK": task.id,
            "DL2_COORDINATOR": job.address,
            "DL2_TOKEN": self.credentials.token(job.key),
            "DL2_JOB": job.key.slug,
        }
        return self._spec(job, task.tag, task.role, task.id, task.node, environment)

    def anchor(self, job: Job) -> TaskSpec:
        """The coordinator of a job that was submitted to the daemon itself."""
        environment = {
            "DL2_ROLE": Role.COORDINATOR.value,
            "DL2_TOKEN": self.credentials.token(job.key),
            "DL2_JOB": job.key.slug,
            "DL2_DAEMON": self.url,
            "DL2_CREDENTIAL": self.credentials.for_job(job.key),
        }
        return self._spec(job, task_tag(job.key, ANCHOR), Role.COORDINATOR, ANCHOR, "", environment)

    def _spec(self, job: Job, tag: str, role: Role, name: str, node: str, environment: dict[str, str]) -> TaskSpec:
        kept = tuple((key, value) for key, value in job.launch.env if not key.startswith("DL2_"))
        launch = replace(job.launch, argv=with_runner(job.launch), env=(*kept, *environment.items()))
        return TaskSpec(
            tag=tag,
            job=job.key,
            role=role,
            name=name,
            demand=job.request.demand(role) if role is not Role.COORDINATOR else NO_RESOURCES,
            node=node,
            owner=job.owner,
            launch=launch,
        )


def with_runner(launch: Launch) -> tuple[str, ...]:
    """The command, run by ``dl2-run`` unless it says so itself."""
    return launch.argv if posixpath.basename(launch.argv[0]) == RUNNER else (RUNNER, *launch.argv)
