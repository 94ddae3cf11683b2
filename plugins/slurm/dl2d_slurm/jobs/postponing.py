"""Postponing of anchors: they go back into Slurm's queue, with a time before which they do not start."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from dl2d.core.errors import NotFound
from dl2d.core.resource_manager import RmIdentity
from dl2d_slurm.commands.command_records import query_jobs
from dl2d_slurm.commands.commands import Answer, Commands, failure
from dl2d_slurm.jobs.squeue_jobs import IDENTITY_FIELDS, identities

_FIELDS: Final = (*IDENTITY_FIELDS, "State")


def postpone(commands: Commands, anchor: RmIdentity, seconds: float) -> None:
    """See ``PostponingManager.postpone``.

    A time, and not a hold: Slurm starts the job by itself, whatever becomes of dl2d. Should the second command not be
    carried out, it starts after two minutes, as any job that is requeued. Slurm requeues no job that was submitted with
    ``--no-requeue``.
    """
    what = f"putting job {anchor.handle} of {anchor.user} back into the queue"
    answer, found = query_jobs(commands, _FIELDS, [anchor.handle])
    _check(what, answer)
    identity = anchor._replace(tag="")
    of_job = [record for record in found if identity in identities([record])]
    if not of_job:
        raise NotFound(what, said="it has ended, or another job has its id now")
    id_ = identities(of_job)[identity]
    if of_job[0]["State"] != "PENDING":
        _check(what, commands.run("scontrol", "requeue", id_))
    start = f"now+{math.ceil(seconds)}" if seconds else "now"
    _check(f"having job {id_} start later", commands.run("scontrol", "update", f"JobId={id_}", f"StartTime={start}"))


def _check(what: str, answer: Answer) -> None:
    if answer.status != 0:
        raise failure(what, replace(answer, stderr=answer.stderr or answer.stdout))
