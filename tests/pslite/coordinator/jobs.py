"""Jobs without processes: states that a coordinator may find itself in, and the messages that it queues."""

from __future__ import annotations

from pslite.coordinator.state.coordinator_context import Job
from pslite.coordinator.state.coordinator_settings import Settings
from pslite.coordinator.state.job_state import JobState, MemberState
from pslite.job.job_spec import SGD, JobSpec, Part, Segment
from pslite.job.job_status import Reply
from pslite.job.load_balancing import LoadBalancer, Rule
from pslite.job.membership_plan import make_plan
from pslite.net.reliable_channel import ReliableChannel

#: monotonic seconds at which all members have joined
JOINED = 1000.0


def spec(**changes):
    values = {
        "segments": (Segment(dtype="float32", optimizer=SGD(lr=0.1), parts=(Part("weight", (1000,)),)),),
        "samples": 60, "batch": 12, "epochs": 10, "seed": 1, "mode": "exact", "shards": 8, "block_bytes": 1024,
    }  # fmt: skip
    return JobSpec(**{**values, **changes})


def member(task, **fields):
    role = "ps" if task.startswith("ps") else "worker"
    values = {
        "task": task, "role": role, "incarnation": task, "host": "n", "pid": 7, "address": "n:1", "local": "",
        "machine": "", "channel": ReliableChannel(), "joined": JOINED, "heard": JOINED,
    }  # fmt: skip
    return MemberState(**{**values, **fields})


def job(tasks, *, wanted=(), plan=(), described=None, **settings):
    """A job with members of these tasks; those of `plan` are in the plan in force."""
    state = JobState(incarnation="c", began=JOINED, waiting_reported=JOINED)
    state.members = {task: member(task) for task in tasks}
    state.describe(described or spec())
    if wanted is not None:
        state.reply = Reply(members=frozenset(wanted or tasks))
    if plan:
        workers, servers = ([state.members[t] for t in plan if state.members[t].role == r] for r in ("worker", "ps"))
        state.plan = make_plan(
            1, state.blocks, [m.plan_entry() for m in workers], [m.plan_entry() for m in servers], None,
            replicas=state.spec.durability != "none",
        )  # fmt: skip
        state.plan_number, state.state = 1, "running"
        for each in (*workers, *servers):
            each.state = "active"
    lines = []
    made = Job(state, Settings(**settings), lines.append, LoadBalancer(Rule(), "even"))
    return made, lines


def sent(a_job, task):
    """Kinds of the messages that a member is to be sent."""
    return [type(message).__name__ for message in a_job.state.members[task].channel.unconfirmed]
