"""Pool of threads that submits tasks to the resource manager in parallel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from dl2d.core.errors import Unavailable
from dl2d.core.resource_manager import TaskSpec
from dl2d.tick.task_submitter import Submitted, submitted_or_error

#: Tasks of a batch for each thread: enough that threads seldom wait for the slowest call, and few enough that a crash
#: leaves few tasks to find again.
_TASKS_PER_THREAD = 8


class ParallelTaskSubmitter:
    """Submits the tasks of a batch in parallel, with no more calls at once than the resource manager allows.

    Implements ``dl2d.tick.task_submitter.TaskSubmitter``.

    A call that has no answer in ``answer_seconds`` counts as ``Unavailable``: the task may have been started, and is
    found by its tag. Its thread is not used for others before the call returns. An error that is not about a task, such
    as that of a lost lease, is raised after the answers to the others of its batch.

    Parameters
    ----------
    submit
        Submits one task; called in the pool's threads.
    threads
        Maximum number of calls at once.
    answer_seconds
        How long to wait for the answers to one batch.
    """

    def __init__(self, submit: Callable[[TaskSpec], str], threads: int, *, answer_seconds: float = 120.0) -> None:
        self.batch = _TASKS_PER_THREAD * threads
        self._submit = submit
        self._threads = threads
        self._answer_seconds = answer_seconds
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dl2d-start")
        #: See ``TaskSubmitter``; a dictionary for its order.
        self.unanswered: dict[int, None] = {}
        #: Calls of earlier batches that have not returned.
        self._hanging: set[Future[Submitted]] = set()

    def submit(self, tasks: Sequence[TaskSpec]) -> list[Submitted]:
        """See ``TaskSubmitter.submit``."""
        self._hanging = {call for call in self._hanging if not call.done()}
        if len(self._hanging) >= self._threads:
            hangs = Unavailable(f"{len(self._hanging)} earlier starts have no answer from the resource manager yet")
            return [hangs, *([None] * (len(tasks) - 1))]
        unavailable = threading.Event()
        calls = [self._pool.submit(self._submit_one, task, unavailable) for task in tasks]
        wait(calls, timeout=self._answer_seconds)
        answers = [self._answer(call, unavailable) for call in calls]
        for task, answer in zip(tasks, answers, strict=True):
            if answer is not None:
                self.unanswered.pop(task.owner.uid, None)
            if isinstance(answer, Unavailable):
                self.unanswered[task.owner.uid] = None
        return answers

    def _submit_one(self, task: TaskSpec, unavailable: threading.Event) -> Submitted:
        if unavailable.is_set():
            return None
        answer = submitted_or_error(self._submit, task)
        if isinstance(answer, Unavailable):
            unavailable.set()
        return answer

    def _answer(self, call: Future[Submitted], unavailable: threading.Event) -> Submitted:
        if not call.done():
            unavailable.set()
            if call.cancel():
                return None
            self._hanging.add(call)
            return Unavailable(
                f"the resource manager did not answer the request to start it within {self._answer_seconds:g} s"
            )
        return call.result()

    def close(self) -> None:
        """Submit nothing more; calls that are under way are not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
