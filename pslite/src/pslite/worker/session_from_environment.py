"""How a script gets its session: from the environment that dl2-run gives it, or alone in one process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping

from pslite.errors import UsageError
from pslite.job.job_spec import JobSpec
from pslite.job.printable_text import indented
from pslite.launch.task_environment import TaskEnvironment, role_of, task_environment
from pslite.worker.ps.worker import Worker
from pslite.worker.single_session import SingleSession
from pslite.worker.training_session import OpenSession, Session


def session_for(spec: JobSpec, environ: Mapping[str, str] | None = None) -> Session:
    """Return the session of this process: a worker of an elastic job, or the whole job if there is none.

    Raises `UsageError` if the environment is incomplete, or this process is no worker.
    """
    environ = os.environ if environ is None else environ
    if spec.architecture == "allreduce" and role_of(environ) == "worker":
        from pslite.worker.allreduce.worker import AllReduceWorker  # noqa: PLC0415  (it needs torch, which others do not have)

        place = task_environment(environ, "worker")
        host = environ.get("DL2_HOST", "")
        return AllReduceWorker(place.identity, place.coordinator, spec, say=_voice(place, environ), host=host)
    return _session(spec, environ)


def _voice(place: TaskEnvironment, environ: Mapping[str, str]) -> Callable[[str], None]:
    """Return where a worker's lines for the user go."""
    quiet = environ.get("DL2_QUIET") == "1"

    def say(text: str) -> None:
        if not quiet:
            sys.stderr.write(f"{place.identity.task}: {indented(text)}\n")

    return say


def open_session(environ: Mapping[str, str] | None = None) -> OpenSession:
    """Return the session of a script that says later what it trains; as `session_for` otherwise."""
    return _session(None, environ)


def _session(spec: JobSpec | None, environ: Mapping[str, str] | None) -> Worker | SingleSession:
    """Return the session that the environment asks for.

    Raises `UsageError` if the environment is incomplete, or this process is no worker.
    """
    environ = os.environ if environ is None else environ
    role = role_of(environ)
    if role == "worker":
        place = task_environment(environ, "worker")
        return Worker(place.identity, place.coordinator, spec, say=_voice(place, environ))
    if environ.get("DL2_ROLE"):
        raise UsageError(f"DL2_ROLE is {environ['DL2_ROLE']!r}: a training script runs in workers; start it by dl2-run")
    return SingleSession(spec)
