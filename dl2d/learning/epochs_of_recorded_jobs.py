"""How many epochs a recorded job really takes, whatever its user declared. Pure."""

from __future__ import annotations

from typing import Final

from dl2d.core.jobs import Job, JobState

#: A job that trains on beyond its declared epochs is taken to need this part more than it has done.
_BEYOND: Final = 1.1
#: One that reports nothing and still runs is taken to run this many times as long as it has: of jobs that have run for
#: some time, about half end within as long again (Harchol-Balter and Downey, 1997). Its limit says little.
_STILL_RUNS: Final = 2.0
#: Least part of an epoch that a job does.
LEAST_EPOCHS: Final = 1e-6


def epochs_of(job: Job) -> float | None:
    """How many epochs a job really takes; None for one that ended before it trained."""
    done, declared = job.progress.epoch, job.request.epochs
    if job.state is JobState.FINISHED:
        return max(done, LEAST_EPOCHS) if done > 0 else declared
    if job.state.ended:
        return max(done, LEAST_EPOCHS) if done > 0 else None
    if job.unreported and 0 < done * _STILL_RUNS < declared:
        return done * _STILL_RUNS
    return max(declared, done * _BEYOND)
