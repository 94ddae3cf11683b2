"""Contract of what submits the tasks of a plan to the resource manager, and the sequential one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import structlog

from dl2d.core.errors import Dl2dError, MachineFault, ResourceManagerError, StartFailed, Unavailable
from dl2d.core.resource_manager import TaskSpec, TickManager

log = structlog.get_logger()

#: Result of submitting a task: its handle; an error; None where it was not tried.
Submitted = str | ResourceManagerError | None


#: Characters of an unexpected error that are recorded.
_MAX_SAID = 500


class TaskSubmitter(Protocol):
    """Submits tasks. After the first ``Unavailable`` no further task is submitted."""

    #: Number of tasks that are persisted and then submitted at a time.
    batch: int

    @property
    def unanswered(self) -> Iterable[int]:
        """Ids of users whose last start was not answered, in the order in which that happened."""
        ...

    def submit(self, tasks: Sequence[TaskSpec]) -> list[Submitted]:
        """Submit tasks; returns the result of each, in their order."""
        ...


def handle_or_error(submit: Callable[[], str], tag: Callable[[], str]) -> str | ResourceManagerError:
    """The handle of a task or anchor that was submitted, or why it was not: ``StartFailed`` for an unexpected error.

    ``MachineFault`` if that is an ``OSError`` or a ``MemoryError``.
    Errors that are not about the task, such as a ``StoreError`` or a lost lease (``AlreadyRunning``), are raised.
    """
    try:
        return submit()
    except ResourceManagerError as error:
        return error
    except Dl2dError:
        raise
    except Exception as error:
        log.exception("start ended unexpectedly", tag=tag())
        kind = MachineFault if isinstance(error, OSError | MemoryError) else StartFailed
        return kind("its start ended unexpectedly, the daemon's log says where", said=repr(error)[:_MAX_SAID])


def submitted_or_error(submit: Callable[[TaskSpec], str], task: TaskSpec) -> str | ResourceManagerError:
    """``handle_or_error`` of a task."""
    return handle_or_error(lambda: submit(task), lambda: task.tag)


class SequentialTaskSubmitter:
    """Implements ``TaskSubmitter`` in the calling thread, task by task; ``check_lease`` is called before each."""

    batch = 1_000_000
    unanswered = ()

    def __init__(self, manager: TickManager, check_lease: Callable[[], None]) -> None:
        self._manager = manager
        self._check_lease = check_lease

    def submit(self, tasks: Sequence[TaskSpec]) -> list[Submitted]:
        """See ``TaskSubmitter.submit``."""
        found: list[Submitted] = []
        for task in tasks:
            self._check_lease()
            found.append(submitted_or_error(self._manager.submit, task))
            if isinstance(found[-1], Unavailable):
                break
        return found + [None] * (len(tasks) - len(found))
