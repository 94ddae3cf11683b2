"""How a script gets its session: from the environment that dl2-run gives it, or alone in one process."""

from __future__ import annotations

import os
from functools import partial

from pslite.errors import UsageError
from pslite.job.job_spec import JobSpec
from pslite.job.printable_text import tell
from pslite.launch.environment_parsing import TaskEnvironment, role_of, task_environment
from pslite.worker.ps.worker import Worker
from pslite.worker.session_without_network import SingleSession
from pslite.worker.training_session import OpenSession, Session


def session_for(spec: JobSpec) -> Session:
    """Return the session of this process: a worker of an elastic job, or the whole job if there is none.

    Raises `UsageError` if the environment is incomplete, or this process is no worker.
    """
    if spec.architecture == "allreduce" and role_of(os.environ) == "worker":
        from pslite.worker.allreduce.worker import AllReduceWorker  # noqa: PLC0415  (it needs torch, which others do not have)

        place = task_environment(os.environ, "worker")
        host = os.environ.get("DL2_HOST", "")
        return AllReduceWorker(place.identity, place.coordinator, spec, say=partial(_say, place), host=host)
    return _session(spec)


def open_session() -> OpenSession:
    """Return the session of a script that says later what it trains; as `session_for` otherwise."""
    return _session(None)


def _session(spec: JobSpec | None) -> Worker | SingleSession:
    """Return the session that the environment asks for.

    Raises `UsageError` if the environment is incomplete, or this process is no worker.
    """
    if role_of(os.environ) == "worker":
        place = task_environment(os.environ, "worker")
        return Worker(place.identity, place.coordinator, spec, say=partial(_say, place))
    role = os.environ.get("DL2_ROLE")
    if role:
        raise UsageError(f"DL2_ROLE is {role!r}: a training script runs in workers; start it by dl2-run")
    return SingleSession(spec)


def _say(place: TaskEnvironment, text: str) -> None:
    """Write a line for the user."""
    if os.environ.get("DL2_QUIET") != "1":
        tell(place.identity.task, text)
