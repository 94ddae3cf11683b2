"""Status of a job as its membership source is told it, and the progress that members measure for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

import msgspec

from pslite.coordinator.state.coordinator_context import AwaitedSteps, Job
from pslite.coordinator.state.job_state import JobState, MemberState
from pslite.job.job_status import Cause, MemberReport, PlanReport, Status, signal_in_words
from pslite.job.step_time_and_usage_statistics import ResizeSteps
from pslite.net.messages import AgentExit, Alive, Beat

#: the window over which speed is measured; it has two versions at least
_SPEED_SECONDS = 10.0
#: heartbeats that the window spans at least: heartbeats of several members may come at one moment with two versions
_SPEED_HEARTBEATS = 2
#: without a step for longer than the window and than so many steps, a job stands still
_MISSING_STEPS = 10
#: a member that was given up is lost when nothing was heard of it for so many leases
_LOST_LEASES = 3
#: characters of a task's error output that a report repeats
_MAX_OUTPUT = 3000
#: users are told of members that take at least so many times as long as the others, of each once
_SLOW_FACTOR = 1.5


def heartbeat(job: Job, member: MemberState, message: Beat) -> None:
    """Answer a heartbeat, and take the progress that it reports."""
    state = job.state
    member.channel.send_now(Alive())
    if member.outdated or not state.takes_part(member):
        return  # what it says of a run before the job went back was perhaps said long ago
    member.steps = message.steps or member.steps
    job.balance.note(member.task, message.pace, message.steps)
    if message.resize is not None:
        _add_steps(job, member.task, message.resize)
    if message.samples:
        job.loss = message.loss / message.samples
    if message.version <= state.version:
        return
    state.version = message.version
    now = time.monotonic()
    if job.progress and message.version <= job.progress[-1][1]:
        job.progress.clear()  # the version had gone back, as after a failover
    job.progress.append((now, state.version))
    while len(job.progress) > 2 and job.progress[0][0] < now - _SPEED_SECONDS:
        job.progress.pop(0)
    epoch = current_epoch(job)
    if epoch > job.epoch_reported and state.spec is not None:
        job.epoch_reported = epoch
        loss = "" if job.loss is None else f", loss {job.loss:.4f}"
        job.say(f"epoch {epoch} of {state.spec.epochs} done ({state.version} updates{loss})")


def report_slow_members(job: Job) -> None:
    """Say which members take much longer than the others, once of each."""
    for straggler in job.balance.stragglers:
        if straggler.task not in job.slow_reported and straggler.factor >= _SLOW_FACTOR:
            job.slow_reported.add(straggler.task)
            job.say(f"{straggler.task} on {straggler.host} is slow: it {straggler.reason}")


def current_epoch(job: Job) -> int:
    """Return how many epochs are done; 0 for a job without."""
    state = job.state
    return 0 if state.spec is None or state.spec.open else state.version // state.spec.steps_per_epoch


def steps_per_second(job: Job, now: float) -> float | None:
    """Return the speed of the job, 0 if it stands still; None if it is not known yet."""
    if len(job.progress) < 2:
        return None
    (began, first), (ended, last) = job.progress[0], job.progress[-1]
    if ended - began < _SPEED_HEARTBEATS * job.settings.heartbeat:
        return None
    rate = (last - first) / (ended - began)
    return rate if now - ended <= max(_SPEED_SECONDS, _MISSING_STEPS / rate) else 0.0


def report(job: Job) -> Status:
    """Return the state of a job for its membership source."""
    now = time.monotonic()
    state, rate = job.state, steps_per_second(job, now)
    spec = state.spec if state.spec is not None and not state.spec.open else None
    assigned = max((assigner.epochs for assigner in job.step_record.assigners.values()), default=0.0)
    return Status(
        address=state.address,
        incarnation=state.incarnation,
        state=state.state,
        reason=state.reason,
        version=state.version,
        total_versions=spec.total_versions if spec else None,
        epoch=state.version / spec.steps_per_epoch if spec else assigned,
        epochs=float(spec.epochs) if spec else None,
        loss=job.loss,
        steps_per_second=rate,
        samples_per_second=rate * spec.samples / spec.steps_per_epoch if rate and spec else None,
        members=[
            *(_member(job, member, now) for member in state.members.values()),
            *(_never_joined(task, ended) for task, ended in state.exits.items() if task not in state.members),
        ],
        plan=state.plan.number if state.plan else 0,
        plans=_complete_reports(job, now),
        result=state.result if state.state == "finished" else None,
        stragglers=list(job.balance.stragglers),
        batches_per_version=_batches_per_version(job),
        most_workers=_most_workers(state),
        epochs_before=state.spec.epochs_before if state.spec is not None else 0,
        versions_before=state.spec.versions_before if state.spec is not None else 0,
        starting=[task for task in job.agents if task not in state.members],
        ending=state.result is not None,
    )


def _batches_per_version(job: Job) -> int | None:
    """Return by how many batches of one worker an epoch advances with each version; None if that is not known.

    Scripts with loops of their own alone need it.  If they split the data themselves, they do so when they begin, for
    the workers of that time: the loop of the first worker has as many steps with more or fewer.
    """
    spec = job.state.spec
    if spec is None or not spec.open:
        return None
    if job.step_record.assigners:
        return len(job.state.workers_in_force() - job.state.away()) or None
    reports = job.state.reports[::-1]
    began = next((plan.first_version for plan in reports if len(plan.added) == plan.workers + plan.servers), None)
    return next((plan.workers for plan in reports if plan.first_version == began), None)


def _most_workers(state: JobState) -> int | None:
    """Return how many workers the job can have; None if new ones can come."""
    if state.plan is None or state.spec is None or not state.spec.updated_by_scripts:
        return None
    return sum(state.members[task].present for task in state.workers_left(state.plan)) or None


def _member(job: Job, member: MemberState, now: float) -> MemberReport:
    ended, silent = job.state.exits.get(member.task), now - member.heard
    cause, how = None, ""
    if ended is not None:
        cause, how = ended.cause, "" if ended.cause is Cause.DONE else how_it_ended(ended)
    elif member.failure:
        cause, how = Cause.FAILED, member.failure
    elif member.given_up and silent > _LOST_LEASES * job.settings.lease:
        cause, how = Cause.LOST, f"silent for {silent:.0f} s, and no dl2-run reported how its process ended"
    if cause is Cause.DONE and member.drained:
        cause = Cause.DRAINED  # whether a process was asked to end is known here, not to its dl2-run
    if member.hung:
        cause, how = Cause.HUNG, member.hung
    return MemberReport(
        task=member.task,
        role=member.role,
        state=member.state,
        host=member.host,
        pid=member.pid,
        usage=job.usage.get(member.task),
        steps=member.steps,
        cause=cause,
        how=how,
    )


def _never_joined(task: str, ended: AgentExit) -> MemberReport:
    """A task whose process ended before it joined; its role is in its name."""
    return MemberReport(
        task=task,
        role="ps" if task.startswith("ps") else "worker",
        state="left",
        host="",
        pid=ended.pid,
        cause=ended.cause,
        how="" if ended.cause is Cause.DONE else how_it_ended(ended, " before it joined"),
    )


def how_it_ended(ended: AgentExit, when: str = "") -> str:
    """Say how a process died, `when`, and what it wrote last."""
    known = f": {ended.text}" if ended.text else ""
    if ended.cause is Cause.NOT_STARTED:
        how = f"died{known}"
    elif ended.signal:
        how = f"died: killed by {signal_in_words(ended.signal)}{known}"
    else:
        how = f"died: its process ended with status {ended.status}{known}"
    comma = "," if known and when else ""
    return f"{how}{comma}{when}" + (f"; {ended.output[:_MAX_OUTPUT]}" if ended.output else "")


# --- step times around a resize: workers report them once the plan is done -------------------------------------------


def await_steps(job: Job, plan: int, workers: Iterable[str]) -> None:
    """Await the step times of these workers around a plan that is done now."""
    awaited = AwaitedSteps(plan, set(workers), time.monotonic() + job.settings.lease)
    job.awaited_steps = awaited if awaited.workers else None


def _add_steps(job: Job, task: str, steps: ResizeSteps) -> None:
    """Add a worker's step times to the report of the plan, which is complete with those of the last worker."""
    awaited = job.awaited_steps
    if awaited is None or awaited.plan != steps.plan or task not in awaited.workers:
        return
    awaited.workers.remove(task)
    awaited.reported.append(steps)
    longest = round(max(each.longest_ms for each in awaited.reported), 3)
    median = round(statistics.median(each.median_ms for each in awaited.reported), 3)
    plan_reports = job.state.reports
    plan_reports[-1] = msgspec.structs.replace(plan_reports[-1], longest_step_ms=longest, median_step_ms=median)
    if not awaited.workers:
        job.awaited_steps = None
        job.urgent = True
        job.say(
            f"plan {steps.plan}: the longest step around the resize took {longest:.1f} ms, "
            f"the median step before it {median:.1f} ms"
        )


def _complete_reports(job: Job, now: float) -> list[PlanReport]:
    """Return the plans' reports without that of the last plan as long as its step times are awaited."""
    awaited, plan_reports = job.awaited_steps, job.state.reports
    wait = awaited is not None and not job.state.over and now < awaited.until
    return plan_reports[:-1] if wait else list(plan_reports)
