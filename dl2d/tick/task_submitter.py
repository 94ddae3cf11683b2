"""Contract of what submits the tasks of a plan to the resource manager, and the sequential one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dl2d.core.errors import ResourceManagerError, Unavailable
from dl2d.core.resource_manager import ResourceManager, TaskSpec

#: Result of submitting a task: its handle; an error; None where it was not tried.
Submitted = str | ResourceManagerError | None


class TaskSubmitter(Protocol):
    """Submits tasks. After the first ``Unavailable`` no further task is submitted."""

    #: Number of tasks that are persisted and then submitted at a time.
    batch: int

    def submit(self, tasks: Sequence[TaskSpec]) -> list[Submitted]:
        """Submit tasks; returns the result of each, in their order."""
        ...


class SequentialTaskSubmitter:
    """Implements ``TaskSubmitter`` in the calling thread, task by task; ``check_lease`` is called before each."""

    batch = 1_000_000

    def __init__(self, manager: ResourceManager, check_lease: Callable[[], None]) -> None:
        self._manager = manager
        self._check_lease = check_lease

    def submit(self, tasks: Sequence[TaskSpec]) -> list[Submitted]:
        """See ``TaskSubmitter.submit``."""
        found: list[Submitted] = []
        for task in tasks:
            self._check_lease()
            try:
                found.append(self._manager.submit(task))
            except ResourceManagerError as error:
                found.append(error)
                if isinstance(error, Unavailable):
                    break
        return found + [None] * (len(tasks) - len(found))
