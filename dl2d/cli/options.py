"""Options that several commands share, and the store and the job that they name."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from dl2d.config.settings import DEFAULT_PATH, Settings
from dl2d.core.errors import RequestError
from dl2d.core.jobs import Job
from dl2d.core.site_history import RecordingStore
from dl2d.core.store import Store

ConfigOption = Annotated[
    Path,
    typer.Option("--config", "-c", help="Configuration file.", envvar="DL2D_CONFIG", show_default=str(DEFAULT_PATH)),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Id, name or cluster.id.submitted of a job.")]

_MOST_COMPARED = 200


@contextlib.contextmanager
def reading(settings: Settings) -> Iterator[RecordingStore]:
    """The store, opened without the lease and without a change of its schema, as beside a running daemon."""
    from dl2d.store.sql_store import SqlStore  # noqa: PLC0415 - half a second that commands without a store do not wait for

    store = SqlStore(settings.store_url)
    try:
        yield store
    finally:
        store.close()


def find_job(store: Store, text: str) -> Job:
    """The job with a slug, id or name; of several, the only one that has not ended, or the last with that id.

    Raises
    ------
    RequestError
        There is none, or there are several; the message names similar ones.
    """
    found = store.find_jobs(text)
    if not found:
        recent = store.jobs(live=False, limit=_MOST_COMPARED)
        names = {name for job in recent for name in (job.request.name, job.key.id)}
        near = difflib.get_close_matches(text, sorted(names), n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RequestError(
            "JOB", f"there is no job {text!r}{hint} (`dl2d status --all` lists the jobs of the last day)"
        )
    for job in found:
        if job.key.slug == text:
            return job
    candidates = [job for job in found if not job.state.ended] or found
    # A requeued job is a new one with the same id; the newest comes first.
    if len(candidates) == 1 or {job.key[:2] for job in candidates} == {(candidates[0].key.cluster, text)}:
        return candidates[0]
    several = ", ".join(f"{job.key.slug} ({job.request.name}, {job.state})" for job in found[:8])
    raise RequestError("JOB", f"{len(found)} jobs are called {text!r}; give one of {several}")
