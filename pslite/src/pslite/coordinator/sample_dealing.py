"""Samples that the coordinator deals to the scripts of an open job that ask it for them."""

from __future__ import annotations

from pslite.coordinator.coordinator_context import Job
from pslite.coordinator.job_state import JobState, MemberState
from pslite.job.sample_dealing import NOT_COUNTED, SampleDealer
from pslite.net.messages import AskSamples, DealSamples


def deal(job: Job, member: MemberState, message: AskSamples) -> None:
    """Answer a worker, once the log has the answer; a question that it repeats is answered as before.

    One that is about to join a job under way gets a sample that does not count, as its first step does not.
    """
    record = job.step_record
    last = record.deals.get(member.task)
    if job.state.plan is not None and member.state == "joined":
        last = DealSamples(number=message.number, deal=NOT_COUNTED)
    elif last is None or last.number != message.number:
        dealer = record.dealers.setdefault((message.dataset, message.samples), SampleDealer(message.samples))
        given = dealer.deal(member.task, message.version, message.seen, message.count, _workers(job.state))
        last = record.deals[member.task] = DealSamples(number=message.number, deal=given)
        job.step_record_changed = True
    member.channel.send(last)


def _workers(state: JobState) -> int:
    """Return how many workers take part in a step; 1 where each takes its own."""
    if state.spec is not None and state.spec.asynchronous:
        return 1
    taking_part = "joined" if state.plan is None else "active"
    workers = [m for m in state.members.values() if m.role == "worker" and m.state == taking_part]
    return sum(not (worker.finished or worker.away) for worker in workers)


def lose(job: Job, task: str) -> None:
    """Take back what a worker that died has not used."""
    record = job.step_record
    if record.deals.pop(task, None) is not None:
        for dealer in record.dealers.values():
            dealer.lose(task, job.state.version)
        job.step_record_changed = True
