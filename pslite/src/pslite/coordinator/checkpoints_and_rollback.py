"""Checkpoints of a job: which is complete, and the rollback to the newest one when state is lost."""

from __future__ import annotations

import time
from pathlib import Path

from pslite.coordinator.state.coordinator_context import Job, StepRecord
from pslite.coordinator.state.job_state import ROLES, MemberState
from pslite.coordinator.state.status_report import current_epoch
from pslite.errors import CheckpointError
from pslite.failure_rate_limits import MAX_ROLLBACKS, Incident
from pslite.job.job_status import Result
from pslite.net.messages import Exit, NotSaved, Restored, RollBack, Saved
from pslite.storage.checkpoint_files import SavedFile, complete, drop_part, drop_unfinished

#: how long a finished job waits for its last checkpoint, in seconds
_LAST_SECONDS = 600.0


def restored(job: Job, member: MemberState, message: Restored) -> None:
    """The first worker has begun with a checkpoint."""
    state = job.state
    pending, version = state.pending, message.version
    if pending is not None and pending.previous is None and pending.plan.workers[0].task == member.task:
        pending.first = state.version = version
        if job.spec.checkpoint:
            state.checkpoint = version
        job.say(f"the job goes on from its checkpoint of version {version}")


def saved(job: Job, _member: MemberState, message: Saved) -> None:
    """Some blocks of a version are on disk; with the last of them its checkpoint is complete."""
    files = job.state.checkpoint_files.setdefault(message.version, {})
    files[message.name] = SavedFile(message.sha256, message.blocks)
    _complete_if_whole(job, message.version)


def complete_again(job: Job) -> None:
    """Complete the checkpoints that a coordinator before this one may not have completed."""
    for version in list(job.state.checkpoint_files):
        _complete_if_whole(job, version)


def _complete_if_whole(job: Job, version: int) -> None:
    """Begin to complete a checkpoint if all of its blocks are on disk."""
    state, files = job.state, dict(job.state.checkpoint_files[version])
    spec = job.spec
    whole = {number for file in files.values() for number in file.blocks} == set(range(len(state.blocks)))
    if not whole or version in job.completing:
        return
    job.completing.add(version)

    def completed(result: Path | Exception) -> None:
        job.completing.discard(version)
        for other in [other for other in state.checkpoint_files if other <= version]:
            del state.checkpoint_files[other]
        if isinstance(result, CheckpointError):
            job.say(str(result))
        elif isinstance(result, Exception):
            raise result
        else:
            state.checkpoint = max(version, state.checkpoint)
            job.say(f"checkpoint of version {version}: {result}")
        job.urgent = True

    job.disk.submit(lambda: complete(Path(spec.checkpoint), version, spec, files), completed)


def last_one_is_written(job: Job, now: float) -> bool:
    """Return whether the job has to wait for its last checkpoint; false after `_LAST_SECONDS`."""
    state = job.state
    assert state.plan is not None
    saving = bool(job.spec.checkpoint) and any(state.members[m.task].present for m in state.plan.servers)
    if not saving and not job.completing:
        return False
    job.last_checkpoint_since = job.last_checkpoint_since or now
    if now - job.last_checkpoint_since < _LAST_SECONDS:
        return True
    job.say(f"the last checkpoint is not complete after {_LAST_SECONDS:g} s: the job ends without it")
    return False


def not_saved(job: Job, member: MemberState, message: NotSaved) -> None:
    """A server could not write its blocks: the checkpoint of this version will not be whole."""
    job.say(f"no checkpoint of version {message.version}: {member.task}: {message.reason}")
    spec, version = job.state.spec, message.version
    job.state.checkpoint_files.pop(version, None)
    if spec is not None and version not in job.completing:
        folder = Path(spec.checkpoint)
        job.disk.submit(lambda: drop_part(folder, version), lambda _: None)


def tidy(job: Job) -> None:
    """Remove what is left of checkpoints that are not complete, once the job has finished."""
    state = job.state
    if state.state == "finished" and state.spec is not None and state.spec.checkpoint:
        folder = Path(state.spec.checkpoint)
        job.disk.submit(lambda: drop_unfinished(folder), lambda _: None)


# --- going back -------------------------------------------------------------------------------------------------------


def go_back(job: Job, reason: str) -> None:
    """State is lost for that reason: begin again from the newest checkpoint, or from the beginning if there is none.

    Nothing of the old run counts any more: every member is told to end and to join again, and the first plan is made
    of those that do.  So the result is that of a job which was stopped and started again.
    """
    state, now = job.state, time.monotonic()
    if job.spec.open and any(member.chief for member in state.members.values()):
        _end_without_digest(job, reason)
        return
    state.rollbacks = MAX_ROLLBACKS.recent(state.rollbacks, now)
    objection = _objection(job)
    if objection:
        job.fail(f"{reason}{objection}")
        return
    version = max(0, state.checkpoint)
    where = f"its checkpoint of version {version}" if state.checkpoint >= 0 else "its beginning"
    job.say(f"{reason}; the job goes back to {where}")
    state.rollbacks.append(Incident(now, version))
    returning = {}
    for member in state.present():
        if member.state == "draining":
            member.drain()
        elif member.prepared and not member.leaving:
            member.channel.send(RollBack(reason=f"the job goes back to {where}"))
            returning[member.task] = member.role
            del state.members[member.task]
    for member in state.members.values():
        member.outdated = member.prepared
    state.begin_again(now, version, returning, reason)
    job.squares.clear()
    job.step_record = StepRecord()
    job.step_record_changed = True
    job.progress.clear()
    job.epoch_reported = current_epoch(job)
    job.urgent = True


def _end_without_digest(job: Job, reason: str) -> None:
    """Have an open job end whose first worker's script has ended, although weights are lost: no script needs them."""
    state = job.state
    job.say(f"{reason}; the job ends well, since the first worker's script has ended and needs no weights any more")
    state.result, state.digests_requested, state.failover = Result(digest="", versions=state.version), True, None
    for member in state.present():
        if member.role == "worker" and not member.finished:
            member.channel.send(Exit(reason="the first worker's script has ended, and so has the job"))
    job.urgent = True


def _objection(job: Job) -> str:
    """Return why the job cannot go back, to be said after what has happened; empty if it can."""
    state = job.state
    if job.spec.on_loss == "fail":
        return ": state is lost, and on_loss is 'fail'"
    if any(member.chief for member in state.members.values()):
        return ", after the script of the first worker had ended"
    if MAX_ROLLBACKS.reached(state.rollbacks, max(0, state.checkpoint)):
        return (
            f"; the job has gone back {MAX_ROLLBACKS.count} times within {MAX_ROLLBACKS.seconds / 3600:g} h without a "
            "newer checkpoint: give it checkpoints (checkpoint=...) or replicas (durability='durable')"
        )
    return ""


def check_return(job: Job, now: float) -> None:
    """Fail a job that has gone back if no members come for a role that has nobody left."""
    state, limit = job.state, job.settings.start
    if not state.rollback_reason or state.plan is not None:
        return
    coming = state.coming()
    empty = [role for role in state.roles if not state.waiting(role) and role not in coming.values()]
    unknown = any(task not in state.members and task not in coming for task in state.target or ())
    if limit is None:
        limit = job.settings.vacancy
    elif empty and not unknown:
        limit = job.settings.settle  # nobody starts another one
    if now - max(state.began, state.target_changed) <= limit:
        return
    missing = empty or [role for role in state.roles if not state.joined(role)]
    if missing and state.pending is None:
        roles = " and no ".join(ROLES[role] for role in missing)
        job.fail(
            f"{state.rollback_reason}; the job went back, and no {roles} has joined within {limit:g} s: submit it again"
        )
