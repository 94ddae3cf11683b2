"""What commands show of a job with its newest decision: the reason of that, remarks, and the JSON."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import replace

from dl2d.cli.output import duration
from dl2d.core.cluster import Task
from dl2d.core.job_views import JobStatus
from dl2d.core.jobs import Job, JobState, Role

#: Relative difference below which the epochs of a script count as those that its job file declares.
_SAME_EPOCHS = 0.001
#: A coordinator reports every few seconds, of which the store has one at least every ``store.progress_seconds``.
_SILENT_SECONDS = 120.0


def why_of(status: JobStatus) -> str:
    """Reason of a job's newest decision, what the job waits for, or why it ended."""
    job = status.job
    if job.state.ended:
        return job.end_reason
    if job.state is JobState.SUBMITTED:
        return job.end_reason or "waits for the first heartbeat of its coordinator"
    if status.decided is None:
        return "runs at a fixed size, which dl2d does not change" if job.static else "waits for its first decision"
    return status.decided.binding_reason.text


def remark_on(job: Job) -> str:
    """What the job file says otherwise than the script does; empty for nothing."""
    declared, trained = job.request.epochs, job.script_epochs
    if trained is None or math.isclose(trained, declared, rel_tol=_SAME_EPOCHS):
        return ""
    return (
        f"the script trains {trained:.6g} epochs, but the job was submitted with epochs={declared:g}, from which dl2d "
        "computes the remaining work; correct it in the job file, the #DL2 lines or --dl2-epochs"
    )


def remark_on_silence(job: Job, now: float) -> str:
    """For how long the coordinator of a running job has not reported, where that is long; else empty."""
    silent_for = now - job.progress.at
    if job.static or job.state is not JobState.RUNNING or not job.progress.at or silent_for < _SILENT_SECONDS:
        return ""
    return f"its coordinator has not reported for {duration(silent_for)}; what is shown is its last report"


def remark_on_tasks(tasks: Iterable[Task]) -> str:
    """How many tasks of a job hold their resources and do not execute; empty for none."""
    begun = [task for task in tasks if task.state.wanted and task.has_begun]
    words, reasons = [], dict.fromkeys(task.why_not_executing for task in begun if task.why_not_executing)
    for role, name in ((Role.WORKER, "workers"), (Role.PS, "parameter servers")):
        of_role = [task for task in begun if task.role is role]
        if count := sum(bool(task.why_not_executing) for task in of_role):
            words.append(f"{count} of its {len(of_role)} {name}")
    return f"{' and '.join(words)} hold resources and do not execute: {'; '.join(reasons)}" if words else ""


def job_json(status: JobStatus) -> dict[str, object]:
    """A job for ``--json``."""
    job, progress, decided = status.job, status.job.progress, status.decided
    reason = None if decided is None else decided.binding_reason
    return {
        "job": job.key.slug,
        "id": job.key.id,
        "anchor": job.anchor,
        "name": job.request.name,
        "user": job.owner.user,
        "model": job.request.model,
        "state": job.state,
        "allocation": {"workers": progress.workers, "ps": progress.ps},
        "decided": None if decided is None else decided.allocation._asdict(),
        "epoch": progress.epoch,
        "epochs": job.request.epochs,
        "script_epochs": job.script_epochs,
        "epoch_is": "hour" if job.unreported else "epoch",
        "version": progress.version,
        "total_versions": progress.total_versions,
        "steps_per_second": progress.steps_per_second,
        "samples_per_second": progress.samples_per_second,
        "loss": progress.loss,
        "reported_at": progress.at or None,
        "submitted_at": job.key.submitted,
        "started_at": job.started_at,
        "ended_at": job.ended_at,
        "constraint": None if reason is None else str(reason.constraint),
        "why": why_of(status),
        "digest": job.digest or None,
        "static": job.static,
    }


def as_of_now(job: Job) -> Job:
    """A job with its progress until now, where only the time that it has run is known."""
    return replace(job, progress=job.progress_at(time.time()))
