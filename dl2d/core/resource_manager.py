"""The contract of a resource manager: Slurm, YARN, this machine, or the simulator.

One test suite (tests/contract) runs over every implementation.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec

from dl2d.core.cluster import Claimant, Node, Task
from dl2d.core.jobs import FailureCause, JobKey, JobState, Launch, Owner, Role
from dl2d.core.resources import NO_RESOURCES, Resources


class RmJobState(enum.StrEnum):
    """State of a job or container in the resource manager, by what it means for scaling.

    ``pending``: accepted, has no room yet. ``running``: holds its room. ``ending``: asked to stop or cleaning up; still
    holds its room. ``done``: ended by itself with status 0. ``failed``: ended by itself otherwise.
    ``time-limit``, ``out-of-memory``: it reached its time limit, or needed more memory than it had, where the manager
    tells this from ``failed``. ``cancelled``: ended from outside (a user, an admin). ``preempted``: ended for another
    job. ``lost``: its node went down.
    """

    PENDING = "pending"
    RUNNING = "running"
    ENDING = "ending"
    DONE = "done"
    FAILED = "failed"
    TIME_LIMIT = "time-limit"
    OUT_OF_MEMORY = "out-of-memory"
    CANCELLED = "cancelled"
    PREEMPTED = "preempted"
    LOST = "lost"

    @property
    def ended(self) -> bool:
        """Whether it holds no resources any more and will not run again."""
        return self not in (RmJobState.PENDING, RmJobState.RUNNING, RmJobState.ENDING)

    @property
    def holds_resources(self) -> bool:
        """Whether its resources count as used on its node."""
        return self in (RmJobState.RUNNING, RmJobState.ENDING)


#: What a state in which a job's own process ended makes of the job.
JOB_ENDS = {
    RmJobState.DONE: JobState.FINISHED,
    RmJobState.FAILED: JobState.FAILED,
    RmJobState.TIME_LIMIT: JobState.FAILED,
    RmJobState.OUT_OF_MEMORY: JobState.FAILED,
    RmJobState.CANCELLED: JobState.CANCELLED,
    RmJobState.PREEMPTED: JobState.CANCELLED,
    RmJobState.LOST: JobState.LOST,
}
#: What a state in which something ended says of its cause.
FAILURE_CAUSES = {
    RmJobState.FAILED: FailureCause.FAILED,
    RmJobState.TIME_LIMIT: FailureCause.TIME_LIMIT,
    RmJobState.OUT_OF_MEMORY: FailureCause.OUT_OF_MEMORY,
    RmJobState.CANCELLED: FailureCause.CANCELLED,
    RmJobState.PREEMPTED: FailureCause.PREEMPTED,
    RmJobState.LOST: FailureCause.NODE_LOST,
}


class Yields(enum.StrEnum):
    """To which waiting jobs of the resource manager an elastic job gives up tasks above its floor."""

    ALWAYS = "always"
    #: To jobs of a higher priority than that of its anchor.
    HIGHER_PRIORITY = "higher-priority"
    NEVER = "never"


class Claim(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job that waits in the resource manager for room and could start if it had that room.

    Of dl2d's tasks only those are claims that wait without a node of their own (``Capabilities.queues_tasks``).

    The room is on nodes, or in a limit. Jobs that wait for anything else (held, a dependency, a begin time, a licence)
    are no claims.
    """

    #: Id by which users know it; of a standing claim, the nodes of which some are kept free (``partition gpu``).
    handle: str
    #: Empty for a standing claim.
    user: str
    #: The resource manager's priority; the larger number comes first, and standing claims come last.
    priority: int
    #: Minimum number of nodes, and the demand on all of them together, divided evenly. A standing claim gets as many
    #: of its nodes as can be had.
    nodes: int
    demand: Resources
    #: Larger numbers of nodes on which it may start as well, each with the demand on all of them: for a job that asks
    #: for a number of tasks and not of nodes.
    spreads: tuple[tuple[int, Resources], ...] = ()
    #: It shares its nodes with no other job.
    whole: bool = False
    #: It gets all memory of its nodes, however much that is.
    all_memory: bool = False
    #: Nodes that it may use; None for all.
    eligible: frozenset[str] | None = None
    #: Nodes on which it runs in any case. A node that is kept free for a standing claim without such nodes counts for
    #: all standing claims without such nodes that may use it.
    required: frozenset[str] = frozenset()
    #: Nodes on which the resource manager plans to start it, and when, seconds since 1970; empty and 0 for unknown.
    planned: tuple[str, ...] = ()
    expected_start: float = 0.0
    #: Number of jobs that wait under the handle. Tasks of a job array share one; there may be fewer claims than tasks.
    waiting: int = 1
    #: Jobs of higher priority wait before it, so that the manager may not start it although it has room.
    behind_others: bool = False
    #: A task of an elastic job, not a job of others.
    is_task: bool = False
    #: Room that the site keeps free for any job: all elastic jobs but those that never yield give it up.
    standing: bool = False
    #: For a standing claim on nodes of a reservation whose jobs may run there now: handles of its anchors; empty for
    #: one on drained nodes. Tasks of all other jobs leave, and no room is kept, since these jobs may not use the nodes.
    #: None for any other claim.
    members: frozenset[str] | None = None

    @property
    def set_aside_with(self) -> tuple[str, bool]:
        """The claims with which it is set aside: those of its user that are tasks, or those that are none."""
        return self.user, self.is_task


class StaticJob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A training job that is not dl2d's, of a size that was fixed when it was submitted."""

    name: str
    #: Type of the model, as the site's rules have it.
    model: str
    owner: Owner
    workers: int
    ps: int = 0
    #: Demand of each of its tasks.
    task: Resources
    #: Node of each task, workers first; empty if it has not run.
    nodes: tuple[str, ...] = ()
    #: Longest time that it may run in seconds, or what the site's rules take where it has no limit.
    limit: float
    #: When it began to run, seconds since 1970; 0 if it has not.
    started: float = 0.0


class RmIdentity(NamedTuple):
    """Identity of a job in the resource manager. Managers give ids again and requeue jobs, so the id is not enough."""

    handle: str
    #: Seconds since 1970; 0 where the manager does not say.
    submitted: int
    user: str
    #: dl2d's tag (``RmJob.tag``).
    tag: str


#: Name of the number of tasks among the amounts of a ``GrowthLimit``.
TASKS = "tasks"


@dataclass(frozen=True, slots=True)
class GrowthLimit:
    """What some jobs may have together besides what they have, where that is less than the nodes have free."""

    #: Handles of the jobs' anchors.
    anchors: frozenset[str]
    #: Amounts by resource, and the number of tasks (``TASKS``); what has no limit is absent. Negative where the jobs
    #: have more than they may.
    left: Mapping[str, float]
    #: Who sets the limit, for users: ``queue root.gpu leaves alice no more``.
    reason: str
    #: Whether the manager starts no task beyond it. Otherwise none is submitted beyond it, except of floors.
    enforced: bool = True
    #: Whether the manager enforces a larger one, of which the remainder is left to users and to tasks of floors.
    floors_may_exceed: bool = False
    #: Handles of the jobs among ``RmListing.limit_claims`` for which it holds as well.
    waiting: frozenset[str] = frozenset()
    #: The first of the waiting jobs for which jobs that have more than they may give that up, down to their floors.
    #: Where it is empty, they keep what they have.
    makes_room_for: tuple[Claimant, ...] = ()

    def allows(self, demand: Resources, tasks: int) -> bool:
        """Whether it leaves enough for so many tasks with this demand; one of what they do not need does not matter."""
        amounts = {**demand.as_dict(), TASKS: tasks}
        return all(amounts.get(name, 0.0) <= max(left, 0.0) for name, left in self.left.items())


class RmJob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job, container or process in the resource manager."""

    handle: str
    state: RmJobState
    #: dl2d's tag (``dl2d.core.cluster.task_tag``), or "" on jobs that are not dl2d's tasks.
    tag: str = ""
    user: str = ""
    node: str = ""
    #: Why it waits or how it ended, in the manager's own words.
    reason: str = ""
    #: Seconds since 1970; 0 where the manager does not say.
    submitted: int = 0
    #: How often the manager has put it back into its queue after it had started. Its submit time is then that of the
    #: last time.
    requeues: int = 0
    #: When it ended, seconds since 1970; 0 if it has not, or where the manager does not say.
    ended: float = 0.0
    #: For a task that runs: what it holds, where the manager may give more than is asked for. For an anchor that a
    #: ``RequeuingManager`` can requeue: what it holds, or asks for while it ``begins_later``.
    held: Resources = NO_RESOURCES
    #: When it reaches its time limit and the manager ends it, seconds since 1970; 0 where there is none or it has not
    #: begun to run.
    time_limit_at: float = 0.0
    #: Id of a task of a job array for users (``12_3``); empty for other jobs.
    array_id: str = ""
    #: For one that runs: it holds its resources, but its processes do not execute, since it is suspended or its node is
    #: being prepared.
    not_executing: bool = False
    #: For a task that waits: the manager does not start it on the node that it was asked for, whatever is free there.
    node_refused: bool = False
    #: For a task that waits: its node is not the cause, for example if it waits for a licence or the end of a hold, or
    #: behind a claim to which its job yields.
    any_node: bool = False
    #: For a task that waits: the limit that keeps it waiting, where the manager tells of a limit only in this way.
    limit: GrowthLimit | None = None
    #: For a task that waits: why the manager never starts it as it was submitted, on any node and whatever is free, and
    #: what its user can do; empty if it may start.
    never_starts: str = ""
    #: Position of a task among those of its job and role, where the manager chooses the nodes and only stops the tasks
    #: of the highest positions (YARN); else None.
    position: int | None = None
    #: Of another's training job, where the site's rules recognise it; else None.
    static: StaticJob | None = None
    #: For the anchor of an elastic job: its priority, and to which claims the job gives up tasks.
    priority: int = 0
    yields: Yields = Yields.NEVER
    #: For a waiting anchor: whether it has a begin time in the future.
    begins_later: bool = False

    @property
    def shown_id(self) -> str:
        """Id by which users know it."""
        return self.array_id or self.handle

    @property
    def identity(self) -> RmIdentity:
        """Its identity, with which it can be stopped."""
        return RmIdentity(self.handle, self.submitted, self.user, self.tag)

    def yields_to(self, claim: Claim) -> bool:
        """Whether the elastic job of this anchor gives up tasks to a claim."""
        if self.yields is Yields.HIGHER_PRIORITY and not claim.standing:
            return claim.priority > self.priority
        return self.yields is not Yields.NEVER


@dataclass(frozen=True, slots=True)
class EligibleNodes:
    """The nodes that the tasks of a job may use."""

    nodes: frozenset[str]
    #: Why not the others, for users: ``partition small; not n3, which the job excludes``.
    reason: str


@dataclass(frozen=True, slots=True)
class RmListing:
    """Nodes and jobs that a resource manager lists, at one time."""

    #: When it was asked, seconds since 1970.
    at: float
    nodes: tuple[Node, ...]
    jobs: tuple[RmJob, ...]
    #: Jobs that ended after the ``ended_since`` asked for and before this time are listed, seconds since 1970;
    #: None if all are that the manager knows.
    ended_until: float | None = None
    #: Why nodes or jobs may be missing, such as a record that cannot be read; empty if the listing is complete.
    incomplete: tuple[str, ...] = ()
    #: What an administrator should know of it, such as limits that were not told this time, or states and reasons that
    #: the plug-in does not know; one sentence each.
    remarks: tuple[str, ...] = ()
    #: Limits for some of the jobs (YARN's queues and their users), which the nodes do not show.
    growth_limits: tuple[GrowthLimit, ...] = ()
    #: Nodes that the tasks of a job may use, by the handle of its anchor; jobs that are absent may use all.
    eligible_nodes: Mapping[str, EligibleNodes] = field(default_factory=dict)
    #: Handles of anchors whose tasks each get a node of their own, which no other task and no other job gets.
    whole_nodes: frozenset[str] = frozenset()
    #: What a task of a job gets that demands so much, where that may be more, by the handle of its anchor: a function
    #: without side effects. Jobs that are absent get what they demand.
    given: Mapping[str, Callable[[Resources], Resources]] = field(default_factory=dict)
    #: Handles of anchors whose tasks may run although they are not listed: the manager knows tasks by the reports of
    #: containers, and more of a job's containers run than have reported.
    unreported: frozenset[str] = frozenset()
    #: Jobs that wait for room beside dl2d's: on nodes, and in a limit (``GrowthLimit.waiting``).
    claims: tuple[Claim, ...] = ()
    limit_claims: tuple[Claim, ...] = ()
    #: Handles of anchors for whose tasks the manager may end or suspend running jobs (preemption) on a node that they
    #: may use. That node shows no room, but a task that waits in the manager's queue would start there.
    may_preempt: frozenset[str] = frozenset()


class TaskSpec(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A task to be started. ``launch.env`` is the complete environment; nothing is inherited from the daemon."""

    tag: str
    job: JobKey
    role: Role
    #: Number or name within the job, for output files: ``worker-3``.
    name: str
    demand: Resources
    #: Node to start on; "" leaves the choice to the manager.
    node: str
    #: Nodes that the manager does not choose.
    avoid: tuple[str, ...] = ()
    owner: Owner
    launch: Launch
    #: For an anchor: the demand of each task that its job may have, for managers that reserve containers by role.
    member_demands: tuple[tuple[Role, Resources], ...] = ()


class ContainerReport(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Report of a container that runs one task of a job after the other, as they are given to it."""

    job: JobKey
    role: Role
    #: Position among the containers of its role, from 0.
    position: int
    #: Id of the container in the resource manager.
    container: str
    #: Different for each process that runs in the container.
    incarnation: str
    #: Node as the container knows it, ``host:port``.
    node: str
    #: Id of the task that it runs or has run; "" for none.
    task: str = ""
    #: Exit status of the task, the negative number of the signal that ended it, or None while it runs.
    exit_code: int | None = None
    #: The resource manager is ending the container (preempted, its node stops): it takes no other task.
    ending: bool = False


class ContainerOrder(msgspec.Struct, frozen=True, gc=False):
    """Answer to a container's report."""

    #: Seconds until the next report.
    report_seconds: float
    #: Id of the task to start; "" for none.
    task: str = ""
    #: The task that runs is asked to end, and killed after these seconds; None: it goes on.
    grace: float | None = None


@runtime_checkable
class ContainerManager(Protocol):
    """Additional methods of a resource manager whose containers ask which task to run (YARN). Thread-safe."""

    def report_container(self, report: ContainerReport) -> ContainerOrder:
        """Take a container's report; returns what it is to do. Does not ask the resource manager anything."""
        ...

    def allow_changes(self, seconds: float) -> None:
        """Allow to change the containers of jobs, as tasks start and end, for so many seconds from now.

        Before the first call nothing is changed. A tick in a mode that acts calls this while the daemon holds the lease
        on the store: without it, another daemon may be in charge.
        """
        ...


@runtime_checkable
class AccountingManager(Protocol):
    """Additional method of a resource manager with accounting: final states of jobs that it no longer lists (Slurm)."""

    def final_states(self, handles: Collection[str]) -> tuple[RmJob, ...]:
        """The jobs with these handles in their last states as far as they are known: the end of one that has not ended
        there is not accounted yet. May raise ``ResourceManagerError``.
        """
        ...


@runtime_checkable
class RequeuingManager(Protocol):
    """Resource manager that can put a running anchor back into its queue with an earliest start time (Slurm)."""

    def requeue(self, anchor: RmIdentity, seconds: float) -> None:
        """Have an anchor start again in so many seconds at the earliest; one that runs ends, and waits in the queue.

        With 0 seconds an anchor that waits may start now, and one that runs goes on. None that has ended runs again. It
        starts by itself when the time is over and there is room, also if dl2d is down. The identity is checked again
        before the request. Raises ``ResourceManagerError``.
        """
        ...


class StartAllowance(NamedTuple):
    """How many tasks may be submitted to a resource manager now."""

    tasks: int
    #: Why not more, for users.
    reason: str


@dataclass(frozen=True, slots=True)
class CallStatistics:
    """Calls of a resource manager since the daemon's start."""

    #: Number of calls and how long they took in all, seconds, by the name of the command.
    calls: Mapping[str, int]
    seconds: Mapping[str, float]
    #: Requests to the resource manager in the last minute.
    last_minute: int
    #: Calls to which it answered that it has too much to do.
    overloads: int


@runtime_checkable
class RateLimitedManager(Protocol):
    """Additional methods of a resource manager to which no more than so many requests are sent (Slurm). Thread-safe."""

    def start_allowance(self) -> StartAllowance:
        """How many tasks may be submitted now."""
        ...

    def call_statistics(self) -> CallStatistics:
        """Calls so far."""
        ...


@runtime_checkable
class UserAuthenticator(Protocol):
    """Additional method of a resource manager that can say which user sent a request (Slurm, by munge). Thread-safe."""

    def authenticate_user(self, credential: str, payload: str) -> int:
        """User id of whoever made a credential with this payload; each credential serves once.

        Raises ``Denied`` (no such credential, expired, used before, or for another payload), and ``Unavailable``.
        """
        ...


class ProbeStep(NamedTuple):
    """Result of one step of a probe."""

    item: str
    good: bool
    #: What was found, or what is wrong and what to change.
    text: str


@runtime_checkable
class ProbeManager(Protocol):
    """What a resource manager has besides where a small job can check that jobs on a node reach the daemon (Slurm)."""

    def probe(self, runner: str, user: str, seconds: float) -> Sequence[ProbeStep]:
        """Submit a job that runs ``dl2-run --check-daemon`` on a node, wait for its end, and return its steps.

        The job is ended after ``seconds``. ``runner``: path of dl2-run on the nodes. ``user``: whose job it is; "" for
        the calling user's. May raise ``ResourceManagerError``.
        """
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a manager can do, where they differ."""

    name: str
    #: Name of the cluster, first part of every job's key: letters, digits, _ and -.
    cluster: str
    version: str
    #: It starts anchors itself (``dl2d submit``); otherwise users submit them with its own tools.
    starts_anchors: bool
    #: Tasks can be started as other users.
    other_users: bool
    #: Number of calls of ``submit`` that may be under way at once, beside a call of another method. 0: ``submit`` is
    #: called by itself too.
    parallel_submits: int = 0
    #: ``authenticate`` may be called by several threads at once, beside calls of other methods.
    parallel_authentication: bool = False
    #: Where the output of a task is, for people: with ``{cwd}``, ``{id}`` and ``{slug}`` of its job, and ``{name}``;
    #: "" if that is not known.
    output: str = ""
    #: Tasks that are submitted without a node wait in its queue until it is their turn, beside jobs of others.
    queues_tasks: bool = False
    #: What a task gets of resources of which it demands none, where all are given in whole numbers only; empty where
    #: each task gets what it demands.
    defaults: Resources = NO_RESOURCES


@dataclass(frozen=True, slots=True)
class Anchor:
    """A submitted job as the manager has authenticated it: its owner and its script."""

    key: JobKey
    owner: Owner
    name: str
    #: Text of the batch script with its ``#DL2`` lines.
    script: str
    #: ``#DL2`` lines of what its user gave as options when it was submitted; they come before those of the script.
    options: str = ""
    #: Its handle, where that is not the id in its key.
    handle: str = ""
    #: Where its user wrote what ``script`` says, for messages.
    source: str = "#DL2 lines"
    #: What its user should know of it, for the job's output.
    remarks: tuple[str, ...] = ()


class TickManager(Protocol):
    """What a tick needs of a resource manager; see ``ResourceManager``."""

    def listing(self, ended_since: float | None = None, tasks: Collection[Task] | None = None) -> RmListing:
        """The nodes and jobs now, read by a number of queries that does not grow with the number of jobs.

        A record that cannot be read makes the listing ``incomplete``.
        Jobs that ended stay listed for at least ten minutes or until the manager forgets them by its own rule. Where it
        has accounting, static jobs that ended after ``ended_since`` (seconds since 1970) are listed even if it has
        forgotten them, up to the time ``ended_until`` of the answer; a job may be listed in several answers.

        ``tasks`` are the live tasks of elastic jobs as the store has them (None: those of the last call). Where users
        can write tags themselves, a task of these has its tag whatever its user wrote, and nothing else counts as a
        task in ``growth_limits``.
        """
        ...

    def submit(self, task: TaskSpec) -> str:
        """Start a task and return its handle.

        A manager that starts anchors does not start one that runs already: it returns its handle, or raises
        ``Unavailable`` and lists it.

        Raises ``Rejected`` (bad demand, account), ``NodeRefused`` (not on this node), ``NotFound`` (no such node),
        ``Denied``.
        """
        ...

    def stop(self, jobs: Sequence[RmIdentity], grace: float) -> None:
        """Ask tasks to end; what still runs after ``grace`` seconds is killed, whole process group.

        Identities are those of a listing. They are read again right before a task is asked to end or killed: what has
        ended, is unknown, or is another job by now is passed over. Does not wait; may be repeated.
        """
        ...


class ResourceManager(TickManager, Protocol):
    """What dl2d needs of a resource manager. Methods may block.

    They are called from one thread at a time, except ``submit`` and ``authenticate`` as far as
    ``Capabilities.parallel_submits`` and ``Capabilities.parallel_authentication`` allow.

    Every method may raise ``Unavailable``.
    """

    def capabilities(self) -> Capabilities:
        """What this manager can do; asked once."""
        ...

    def authenticate(self, rm_id: str, proof: str) -> Anchor:
        """Check that ``proof`` comes from the owner of job ``rm_id`` and return what the manager knows of the job.

        Raises ``Denied`` (the proof is bad or somebody else's), ``NotFound`` (no such job).
        """
        ...

    def close(self) -> None:
        """Close connections and helper processes; running tasks go on."""
        ...
