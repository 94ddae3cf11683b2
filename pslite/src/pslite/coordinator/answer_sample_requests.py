"""Requests of workers with loops of their own for samples: answers, and what is taken back from the dead."""

from __future__ import annotations

from pslite.coordinator.state.coordinator_context import Job
from pslite.coordinator.state.job_state import JobState, MemberState
from pslite.job.sample_assignment import NOT_COUNTED, SampleAssigner
from pslite.net.messages import AskSamples, AssignSamples


def assign(job: Job, member: MemberState, message: AskSamples) -> None:
    """Answer a worker, once the log has the answer; a question that it repeats is answered as before.

    One that is about to join a job under way gets a sample that does not count, as its first step does not; so does one
    of the time before the job went back.
    """
    record = job.step_record
    answer = record.answers.get(member.task)
    if member.outdated or (job.state.plan is not None and member.state == "joined"):
        answer = AssignSamples(number=message.number, samples=NOT_COUNTED)
    elif answer is None or answer.number != message.number:
        assigner = record.assigners.setdefault((message.dataset, message.samples), SampleAssigner(message.samples))
        given = assigner.assign(member.task, message.version, message.seen, message.count, _workers(job.state))
        answer = record.answers[member.task] = AssignSamples(number=message.number, samples=given)
        job.step_record_changed = True
    member.channel.send(answer)


def _workers(state: JobState) -> int:
    """Return how many workers take part in a step; 1 where each takes its own."""
    if state.spec is not None and state.spec.asynchronous:
        return 1
    taking_part = "joined" if state.plan is None else "active"
    workers = [m for m in state.members.values() if m.role == "worker" and m.state == taking_part]
    return sum(not (worker.finished or worker.away) for worker in workers)


def take_back(job: Job, task: str) -> None:
    """Take back what a worker that died has not used, to assign it again."""
    record = job.step_record
    if record.answers.pop(task, None) is not None:
        for assigner in record.assigners.values():
            assigner.take_back(task, job.state.version)
        job.step_record_changed = True
