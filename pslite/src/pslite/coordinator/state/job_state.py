"""State of a job as its coordinator keeps it, writes it to the log, and continues from it after a restart."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import msgspec

from pslite.failure_rate_limits import Incident
from pslite.job.job_spec import JobSpec
from pslite.job.job_status import JobPhase, MemberPhase, PlanReport, Reply, Result, Role
from pslite.job.membership_plan import Member, Plan
from pslite.job.step_time_and_usage_statistics import StepTimes
from pslite.job.weight_blocks import Block, cut
from pslite.net.messages import AgentExit, Exit, Moved
from pslite.net.reliable_channel import ReliableChannel
from pslite.storage.checkpoint_files import SavedFile

#: what users call the roles
ROLES: dict[Role, str] = {"worker": "worker", "ps": "server"}


@dataclass(eq=False)
class MemberState:
    """A process that has joined the job."""

    task: str
    role: Role
    incarnation: str
    host: str
    pid: int
    address: str
    local: str
    machine: str
    channel: ReliableChannel
    state: MemberPhase = "joined"
    #: monotonic times in seconds: of its last message, of its joining, of the loss of its connection (0: not lost)
    heard: float = 0.0
    joined: float = 0.0
    lost: float = 0.0
    #: how the connection was lost, if that is known
    lost_how: str = ""
    #: it is a server, or a worker whose job specification is known
    described: bool = True
    #: the last job specification that it has sent after it had joined
    spec: JobSpec | None = None
    #: a plan was sent to it, for which it may have opened connections
    prepared: bool = False
    #: the rank that was sent to it; -1: none
    seat: int = -1
    at_barrier: bool = False
    #: since when, monotonic, in seconds
    barrier_since: float = 0.0
    #: others do its part of the steps, since they train while it waits at the barrier; or have done so
    away: bool = False
    missed_steps: bool = False
    #: it has its last version; since when, and which
    finished: bool = False
    finished_at: float = 0.0
    finished_version: int = 0
    #: it has finished as the worker that writes files
    chief: bool = False
    #: it has finished and left; how its process ends will say whether its script has failed
    leaving: bool = False
    #: a plan has removed it
    drained: bool = False
    #: whether the job goes on without it although its process may live
    given_up: bool = False
    #: it was in a plan before the job went back to a checkpoint, and has not joined again
    outdated: bool = False
    #: how it held the job up, if it was given up for that
    hung: str = ""
    #: why it cannot go on, in its own words
    failure: str = ""
    #: step times of its last heartbeat that had any
    steps: StepTimes | None = None

    def plan_entry(self) -> Member:
        """Return what a plan says about it."""
        return msgspec.convert(self, Member, from_attributes=True)

    def dismiss(self, reason: str) -> None:
        """End a member that is in no plan."""
        self.channel.send(Exit(reason=reason))
        self.state = "draining"

    def drain(self) -> None:
        """End a member that a plan has removed."""
        if self.present:
            self.channel.send(Exit(reason="drained: the job goes on without this task"))
        self.finished = self.drained = True

    @property
    def seated(self) -> bool:
        """Whether its rank was sent to it."""
        return self.seat >= 0

    @property
    def present(self) -> bool:
        """Whether it has not left."""
        return self.state != "left"

    @property
    def ended_early(self) -> bool:
        """Whether its loop has ended before the first worker's (open jobs), and the job goes on without it."""
        return bool(self.finished_at) and not self.finished

    @property
    def title(self) -> str:
        """Its name in messages to the user."""
        return f"{self.task} on {self.host} (pid {self.pid})"


@dataclass(eq=False)
class PendingPlan:
    """A plan on its way: its members make ready for it, then it is committed and they move to it."""

    plan: Plan
    #: the plan that it replaces
    previous: Plan | None
    began: float
    #: when its members were sent it, monotonic, in seconds: a stalled disk of the log delays that; 0: not yet
    sent: float = 0.0
    phase: Literal["preparing", "committed"] = "preparing"
    ready: set[str] = field(default_factory=set)
    prepared_ms: float = 0.0
    #: the version from which on it is in force; -1: not known yet
    first: int = -1
    #: workers that push under it, and how many ms each was suspended; None: it has just joined
    pushed: dict[str, float | None] = field(default_factory=dict)
    #: all-reduce: it replaces a plan whose group is broken, at once; since when a member says that it cannot
    recover: bool = False
    refused: float = 0.0
    #: workers that have pushed their last step under the previous plan
    drained: set[str] = field(default_factory=set)
    #: servers whose blocks are where the plan wants them
    moved: dict[str, Moved] = field(default_factory=dict)

    def members(self) -> set[str]:
        """Return all tasks that take part: the previous plan's and the new one's."""
        return self.plan.tasks() | self.previous_tasks()

    def previous_tasks(self) -> set[str]:
        """Return the tasks of the previous plan."""
        return self.previous.tasks() if self.previous else set()

    def stamped(self) -> bool:
        """Whether the plan takes effect for certain; a finished worker that crossed into it has said so before."""
        return self.first >= 0 or bool(self.pushed or self.drained or self.moved)

    def newcomers(self) -> set[str]:
        """Return the tasks that the plan adds."""
        return self.plan.tasks() - self.previous_tasks()

    def leavers(self) -> set[str]:
        """Return the workers that the plan removes."""
        return {m.task for m in self.previous.workers} - self.plan.tasks() if self.previous else set()

    def all_moved(self) -> bool:
        """Whether all servers that have something to move or to keep have done so."""
        plans = [p for p in (self.previous, self.plan) if p is not None]
        return self.moved.keys() >= {plan.servers[owner].task for plan in plans for owner in set(plan.owners)}


@dataclass(eq=False)
class Reassignment:
    """Tree nodes of dead workers on their way to others: servers have to know before workers do."""

    number: int
    #: servers that have not confirmed that they take the nodes from others
    waits_for: set[str]


@dataclass(eq=False)
class ServerFailover:
    """Blocks of dead servers on their way to new owners."""

    number: int
    blocks: tuple[int, ...]
    #: servers that have not answered yet
    waits_for: set[str]
    #: by block and server, the version of the copy that the server has
    copies: dict[int, dict[str, int]] = field(default_factory=dict)
    phase: Literal["counting", "promoting"] = "counting"


class JobState(msgspec.Struct, kw_only=True, dict=True):
    """What a coordinator knows of its job and writes to its log, and what follows from that alone.

    Not in it: connections, measurements, and what members repeat (`pslite.coordinator.state.coordinator_context.Job`).

    Who writes which field, beside `begin_again` (a job that goes back to a checkpoint):

    ============================================================================  ===================================
    fields                                                                        written by
    ============================================================================  ===================================
    clock                                                                         state_log_entries
    address, reply, target_changed, once_wanted, exits                            loop
    members                                                                       loop (joins, leaves), and each module
                                                                                  the state of its members
    spec, began, waiting_reported                                                 members (spec: failover, plans too)
    plan_number, pending, given_up, retry_at, spare, doubted, reports, begun,     plans; failover where members are
    suspensions                                                                   lost; job_completion at the end
    plan                                                                          plans, failover, job_completion
    dead, losses, reassigned, reassignment, reassignments, failover, failovers,   failover
    lost_servers, new_owners, broken, breaks
    checkpoint, checkpoint_files, rollbacks, rollback_reason                      checkpoints_and_rollback
    returning                                                                     checkpoints_and_rollback, loop (joins)
    version                                                                       status_report, job_completion,
                                                                                  checkpoints_and_rollback
    stalls                                                                        stall_handling
    digests, digests_requested, result                                            job_completion
    state, reason                                                                 plans (running), job_completion
                                                                                  (finished), `Job.end`
    ============================================================================  ===================================
    """

    #: when it was written, monotonic, in seconds
    clock: float = 0.0
    incarnation: str
    #: host:port for members
    address: str = ""
    members: dict[str, MemberState] = {}
    #: by task, how its process ended
    exits: dict[str, AgentExit] = {}
    #: the last answer of the membership source: which tasks it wants
    reply: Reply | None = None
    spec: JobSpec | None = None
    plan: Plan | None = None
    pending: PendingPlan | None = None
    plan_number: int = 0
    reports: list[PlanReport] = []
    #: whether a plan was completed since the job began, or began again: then workers have weights
    begun: bool = False
    state: JobPhase = "waiting"
    reason: str | None = None
    result: Result | None = None
    #: the worker that writes files at the end knows it, and all others were told to end
    dismissed: bool = False
    digests: dict[int, bytes] = {}
    digests_requested: bool = msgspec.field(default=False, name="digest_asked")
    version: int = 0
    began: float
    #: when the user was told last that the job cannot begin yet
    waiting_reported: float = msgspec.field(name="said_waiting")
    #: ms, one value for each worker and each plan it went through
    suspensions: list[float] = []
    #: plans given up since the last one that was done, and when the next may be made
    given_up: int = 0
    retry_at: float = 0.0
    #: when the wanted tasks have changed, and all that were ever wanted
    target_changed: float = 0.0
    once_wanted: frozenset[str] = frozenset()
    #: members that the job has no use for, of which the user has been told
    spare: set[str] = msgspec.field(default_factory=set, name="held_back")
    #: members that could not reach another one, once
    doubted: set[str] = set()
    #: workers that died in the middle of the job, in order, and at which version; -1: its script had ended early
    dead: dict[str, int] = {}
    #: their deaths of the last hour; those on one host at one time are one
    losses: list[Incident] = []
    #: by plan, which worker pushes a tree node of a dead one: node -> task
    reassigned: dict[int, dict[int, str]] = msgspec.field(default_factory=dict, name="substitutes")
    reassignment: Reassignment | None = msgspec.field(default=None, name="taking_over")
    reassignments: int = msgspec.field(default=0, name="take_overs")
    failover: ServerFailover | None = msgspec.field(default=None, name="succession")
    failovers: int = msgspec.field(default=0, name="successions")
    #: servers that died, and how; new owners of their blocks of whom workers have not been told yet
    lost_servers: dict[str, str] = {}
    new_owners: dict[int, Member] = msgspec.field(default_factory=dict, name="heirs")
    #: returns to checkpoints of the last day, and the last one; its reason, and which members have yet to join again
    rollbacks: list[Incident] = msgspec.field(default_factory=list, name="returns")
    rollback_reason: str = msgspec.field(default="", name="lost_with")
    returning: dict[str, Role] = {}
    #: passed progress deadlines of the last day
    stalls: list[Incident] = []
    #: version of the newest complete checkpoint of this job; -1 if there is none
    checkpoint: int = msgspec.field(default=-1, name="snapshot")
    #: by version, the files of a checkpoint that is being written
    checkpoint_files: dict[int, dict[str, SavedFile]] = msgspec.field(default_factory=dict, name="saves")
    #: all-reduce: since when the group of which plan is broken although no member is known to be dead, and why; those
    #: of the last hour
    broken: tuple[float, int, str] | None = None
    breaks: list[Incident] = msgspec.field(default_factory=list, name="broken_groups")

    # --- the job --------------------------------------------------------------------------------------------------

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of the model; none as long as no worker has described it."""
        return cut(self.spec) if self.spec is not None else ()

    def describe(self, spec: JobSpec | None) -> None:
        """Set the job's specification, or forget it."""
        self.spec = spec
        self.__dict__.pop("blocks", None)

    @property
    def extended(self) -> JobSpec | None:
        """The job's specification with the segments that its first worker has added; None if it has added none."""
        chief = next((self.members[task] for task in self.workers_left(self.plan)), None)
        theirs, ours = chief.spec if chief is not None else None, self.spec
        if theirs is None or ours is None or len(theirs.segments) <= len(ours.segments) or not theirs.extends(ours):
            return None
        return theirs

    def describe_in_force(self) -> None:
        """Go back to the specification without the segments that the plan in force does not have."""
        if self.spec is not None and self.plan is not None and self.plan.owners:
            last = self.blocks[len(self.plan.owners) - 1].segment
            self.describe(msgspec.structs.replace(self.spec, segments=self.spec.segments[: last + 1]))

    @property
    def over(self) -> bool:
        """Whether the job has ended in one way or another."""
        return self.state not in ("waiting", "running")

    @property
    def complete(self) -> bool:
        """Whether all workers have the last version and its digest is known: what is left is to write files."""
        return self.result is not None and self.spec is not None and not self.spec.open

    @property
    def target(self) -> frozenset[str] | None:
        """Tasks that are wanted as members; None: all, or it is not known yet."""
        return self.reply.members if self.reply is not None else None

    @property
    def all_reduce(self) -> bool:
        """Whether the job has no servers: every worker has the whole model."""
        return self.spec is not None and self.spec.architecture == "allreduce"

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles that the job has."""
        return ("worker",) if self.all_reduce else ("worker", "ps")

    # --- members --------------------------------------------------------------------------------------------------

    def present(self) -> list[MemberState]:
        """Return the members that have not left."""
        return [member for member in self.members.values() if member.present]

    def present_tasks(self) -> set[str]:
        """Return the tasks of the members that have not left."""
        return {member.task for member in self.present()}

    def waiting(self, role: str = "") -> list[MemberState]:
        """Return present members that are in no plan, by rank, then by number; a lost one may be about to come back."""
        found = [m for m in self.members.values() if m.state == "joined" and role in ("", m.role)]
        return sorted(found, key=lambda m: (not m.seated, m.seat, len(m.task), m.task))

    def coming(self) -> dict[str, Role]:
        """Return the members that are told to join again, and whose processes are not known to have ended."""
        return {task: role for task, role in self.returning.items() if task not in self.exits}

    @property
    def somebody_waits_described(self) -> bool:
        """Whether a worker in no plan has sent its job specification."""
        return any(worker.described for worker in self.waiting("worker"))

    def joined(self, role: str) -> list[str]:
        """Return the tasks that could enter a plan: not lost, and of workers the job specification is known."""
        return [m.task for m in self.waiting(role) if m.described and not m.lost]

    def takes_part(self, member: MemberState) -> bool:
        """Whether a member is or has been in a plan, or is about to be: messages of others do not count."""
        pending = self.pending
        return (
            member.state != "joined"
            or (self.plan is not None and member.task in self.plan.tasks())
            or (pending is not None and member.task in pending.members())
        )

    # --- plans ----------------------------------------------------------------------------------------------------

    def plans_in_force(self) -> list[Plan]:
        """Return the plan in force, and the one that is replacing it."""
        pending = self.pending
        follows = pending is not None and pending.phase == "committed" and pending.previous is not None
        coming = pending.plan if pending is not None and follows else None
        return [plan for plan in (self.plan, coming) if plan is not None]

    def workers_left(self, plan: Plan | None) -> list[str]:
        """Return a plan's workers that have not died."""
        return [m.task for m in plan.workers if m.task not in self.dead] if plan is not None else []

    def away(self) -> set[str]:
        """Return the workers whose part others do since they wait at a barrier."""
        return {member.task for member in self.members.values() if member.away and member.present}

    def workers_in_force(self) -> set[str]:
        """Return the present workers of the plans in force."""
        return {m.task for plan in self.plans_in_force() for m in plan.workers} & self.present_tasks()

    def servers_in_force(self) -> list[str]:
        """Return the present servers of the plans in force, in the order of joining."""
        found = {m.task for plan in self.plans_in_force() for m in plan.servers}
        return [member.task for member in self.present() if member.task in found]

    def replace_servers(self, gone: tuple[str, ...], owners: dict[int, Member]) -> None:
        """Continue the plans in force with other owners of blocks."""
        pending = self.pending
        self.plan = self.plan and self.plan.without(gone, owners)
        if pending is not None:
            # the first plan replaces none
            pending.previous = pending.previous and self.plan
            pending.plan = pending.plan.without(gone, owners)

    def begin_again(self, now: float, version: int, returning: dict[str, Role], why: str) -> None:
        """Become the state of a job that begins from the checkpoint of `version`, once `returning` members join."""
        fresh = JobState(incarnation=self.incarnation, began=now, waiting_reported=now)
        kept = {
            "clock", "incarnation", "address", "members", "exits", "reply", "spec", "plan_number", "reports",
            "suspensions", "target_changed", "once_wanted", "reassignments", "failovers", "rollbacks", "checkpoint",
            "stalls",
        }  # fmt: skip
        for name in set(self.__struct_fields__) - kept:
            setattr(self, name, getattr(fresh, name))
        if self.spec is not None:
            self.describe(self.spec.without_late())
        self.version, self.returning, self.rollback_reason = version, returning, why

    # --- time -----------------------------------------------------------------------------------------------------

    def shift_times(self, seconds: float) -> None:
        """Move all times, as if nothing had happened since the state was written."""
        for member in self.members.values():
            member.joined += seconds
            member.finished_at += seconds if member.finished_at else 0.0
            member.barrier_since += seconds
        if self.pending is not None:
            self.pending.began += seconds
            self.pending.sent = (self.pending.sent or self.clock) + seconds
            self.pending.refused += seconds if self.pending.refused else 0.0
        if self.broken is not None:
            self.broken = (self.broken[0] + seconds, *self.broken[1:])
        for incidents in (self.losses, self.rollbacks, self.breaks, self.stalls):
            incidents[:] = [msgspec.structs.replace(each, at=each.at + seconds) for each in incidents]
        self.began += seconds
        self.waiting_reported += seconds
        self.retry_at += seconds
        self.target_changed += seconds
        self.clock += seconds
