"""Requeue of anchors: they go back into Slurm's queue, with a time before which they do not start."""

from __future__ import annotations

import math
from dataclasses import replace

from dl2d.core.errors import NotFound
from dl2d.core.resource_manager import RmIdentity, RmJobState
from dl2d_slurm.commands.commands import Answer, Commands, failure
from dl2d_slurm.commands.squeue_and_sinfo_records import query_jobs
from dl2d_slurm.jobs.slurm_states import job_state
from dl2d_slurm.jobs.squeue_jobs import IDENTITY_FIELDS, identities

_FIELDS = (*IDENTITY_FIELDS, "State")


def requeue(commands: Commands, anchor: RmIdentity, seconds: float) -> None:
    """Put an anchor back into Slurm's queue (``scontrol requeue``) with a begin time; see ``RequeuingManager``.

    A begin time is used, not a hold, so that Slurm starts the job also if dl2d is down. If the second command fails,
    the job may start after two minutes. Slurm requeues no job that was submitted with ``--no-requeue``. With
    ``Incomplete`` it requeues none that has ended; otherwise such a job would run once more.
    """
    what = f"setting the begin time of job {anchor.handle} of {anchor.user}"
    answer, found = query_jobs(commands, _FIELDS, [anchor.handle])
    _check(what, answer)
    identity = anchor._replace(tag="")
    of_job = [record for record in found if identity in identities([record])]
    state = job_state(of_job[0]["State"], placed=True)[0] if of_job else None
    if state not in (RmJobState.PENDING, RmJobState.RUNNING):
        raise NotFound(what, said="it has ended, or another job has its id now")
    id_ = identities(of_job)[identity]
    if state is RmJobState.RUNNING:
        if seconds == 0.0:  # Slurm has started it since it was listed.
            return
        _check(f"requeueing job {id_}", commands.run("scontrol", "requeue", "Incomplete", id_))
    start = f"now+{math.ceil(seconds)}" if seconds else "now"
    _check(what, commands.run("scontrol", "update", f"JobId={id_}", f"StartTime={start}"))


def _check(what: str, answer: Answer) -> None:
    if answer.status != 0:
        raise failure(what, replace(answer, stderr=answer.stderr or answer.stdout))
