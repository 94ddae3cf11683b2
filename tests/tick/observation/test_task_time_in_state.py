"""For how long a coordinator has known that a task is to leave."""

from __future__ import annotations

import pytest

from dl2d.core.cluster import Task, TaskState
from dl2d.core.jobs import JobState, Role
from dl2d.core.resources import Resources
from dl2d.testing import make_job
from dl2d.tick.observation.observe import LiveJobs
from dl2d.tick.observation.task_time_in_state import StateSince, elapsed_times


@pytest.mark.parametrize(
    ("state", "other", "since_told"),
    [
        (JobState.READY, None, 100.0), (JobState.READY, TaskState.ASKED, 100.0),
        (JobState.READY, TaskState.JOINED, 100.0),
        (JobState.RUNNING, None, None), (JobState.RUNNING, TaskState.ASKED, None),
        (JobState.RUNNING, TaskState.JOINED, 100.0),
    ],
)  # fmt: skip
def test_only_a_running_job_keeps_a_leaving_task_until_another_one_has_joined(
    state: JobState, other: TaskState | None, since_told: float | None
) -> None:
    """One of a job that has not trained may hang, and is stopped in time, also while others of its role wait."""
    job = make_job(1, state=state, min_workers=1)
    tasks = tuple(
        Task(job=job.key, id=id_, role=Role.WORKER, node="n1", demand=Resources.of(cpu=1), state=task_state)
        for id_, task_state in (("worker-0", TaskState.DRAINING), ("worker-1", other))
        if task_state is not None
    )
    since = {task.tag: StateSince(task.state, 0.0, 0.0) for task in tasks}
    found = elapsed_times(LiveJobs((job,), tasks), since, {job.key: 0.0}, now=100.0)
    assert found[tasks[0].tag].since_told == since_told
