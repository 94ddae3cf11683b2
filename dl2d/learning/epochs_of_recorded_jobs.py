"""How many epochs a recorded job really takes, whatever its user declared. Pure."""

from __future__ import annotations

from typing import Final

from dl2d.core.jobs import Job, JobState

#: A job that trains on beyond its declared epochs is taken to need this part more than it has done.
_BEYOND: Final = 1.1
#: Least part of an epoch that a job does.
LEAST_EPOCHS: Final = 1e-6


def epochs_of(job: Job) -> float | None:
    """How many epochs a job really takes; None for one that ended before it trained."""
    done, declared = job.progress.epoch, job.request.epochs
    if job.state is JobState.FINISHED:
        return max(done, LEAST_EPOCHS) if done > 0 else declared
    if job.state.ended:
        return max(done, LEAST_EPOCHS) if done > 0 else None
    return max(declared, done * _BEYOND)
