"""Handlers: which function takes each kind of message of a member, and which ones look at what is due."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pslite.coordinator import answer_sample_requests, checkpoints_and_rollback, global_norm, job_completion
from pslite.coordinator.failures import allreduce_repair, failover, stall_handling
from pslite.coordinator.membership import (
    barrier,
    joining_and_start,
    membership_plans,
    work_reassignment,
)
from pslite.coordinator.state import status_report
from pslite.coordinator.state.coordinator_context import Job
from pslite.coordinator.state.job_state import MemberState
from pslite.net.messages import (
    Announced,
    AskSamples,
    AtBarrier,
    Beat,
    Broken,
    Copies,
    Describe,
    Digests,
    Drained,
    Failed,
    Finished,
    Leave,
    Moved,
    Nack,
    Norm,
    NotSaved,
    Promoted,
    Publish,
    Pushed,
    Ready,
    Reassigned,
    Restored,
    Saved,
    Severed,
    Stacks,
)

#: by kind, what takes a member's message; only the first ones are taken of members that are in no plan
FROM_ANYBODY: dict[type, Callable[[Job, MemberState, Any], None]] = {
    AskSamples: answer_sample_requests.assign,
    AtBarrier: barrier.arrive,
    Beat: status_report.heartbeat,
    Describe: joining_and_start.describe,
    Failed: failover.failed,
    Leave: failover.leave,
}
HANDLERS: dict[type, Callable[[Job, MemberState, Any], None]] = {
    **FROM_ANYBODY,
    Broken: allreduce_repair.broke,
    Copies: failover.take_copies,
    Digests: job_completion.take_digests,
    Finished: work_reassignment.finished,
    Norm: global_norm.add,
    NotSaved: checkpoints_and_rollback.not_saved,
    Promoted: failover.promoted,
    Restored: checkpoints_and_rollback.restored,
    Saved: checkpoints_and_rollback.saved,
    Severed: failover.severed,
    Stacks: stall_handling.take_stacks,
    Reassigned: work_reassignment.taken_over,
    **dict.fromkeys((Ready, Publish, Nack, Announced, Pushed, Drained, Moved), membership_plans.take),
}

#: what is looked at in each turn of the loop, in that order, as long as the job has not ended
DUE: tuple[Callable[[Job, float], None], ...] = (
    failover.check_members,
    checkpoints_and_rollback.check_return,
    joining_and_start.check_start,
    failover.check_prepared,
    allreduce_repair.check,
    joining_and_start.give_ranks,
    barrier.check,
    stall_handling.check,
)
