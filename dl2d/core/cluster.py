"""The observed cluster: nodes, tasks, and the snapshot on which a policy decides.

Records of which a tick makes very many are msgspec structs, here and elsewhere in the core: ten times faster to make
than dataclasses, and as nothing in them can form a cycle, the garbage collector need not look at them.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from dl2d.core.errors import counted, some_of
from dl2d.core.jobs import TASK_ROLES, Allocation, Job, JobKey, Role
from dl2d.core.measured_speeds_and_losses import JobSpeeds, MeasuredLoss, MeasuredSpeeds
from dl2d.core.resources import NO_RESOURCES, Resources


class NodeState(enum.StrEnum):
    """Whether a node takes new tasks (``up``), only finishes those it has (``draining``), or is gone (``down``)."""

    UP = "up"
    DRAINING = "draining"
    DOWN = "down"


class Node(msgspec.Struct, frozen=True, gc=False):
    """A machine. ``used`` counts all jobs on it, dl2d's tasks included, as the resource manager does."""

    name: str
    capacity: Resources
    used: Resources = NO_RESOURCES
    state: NodeState = NodeState.UP
    #: The resource manager's own word for the state, or an admin's reason.
    remark: str = ""

    @property
    def is_open(self) -> bool:
        """Whether it takes new tasks."""
        return self.state is NodeState.UP


class TaskState(enum.StrEnum):
    """The resize state machine of one task; a task only moves forward through it.

    Up: ``asked`` (persisted, then sent to the resource manager), ``granted`` (the manager runs it), ``joined`` (it is
    connected to its coordinator), ``confirmed`` (it takes part in a plan). Down: ``draining`` (to leave), ``drained``
    (out of the plan), ``released`` (the manager says it has ended: only now is its room free).
    ``failed``: ended without being asked to.
    """

    ASKED = "asked"
    GRANTED = "granted"
    JOINED = "joined"
    CONFIRMED = "confirmed"
    DRAINING = "draining"
    DRAINED = "drained"
    RELEASED = "released"
    FAILED = "failed"

    @property
    def rank(self) -> int:
        """Position in the machine: a task never goes to a state of lower rank."""
        return _RANKS[self]

    @property
    def ended(self) -> bool:
        """Whether it holds nothing in the resource manager any more."""
        return self in (TaskState.RELEASED, TaskState.FAILED)

    @property
    def wanted(self) -> bool:
        """Whether the task is meant to be a member of its job."""
        return self in _WANTED


_RANKS = {state: rank for rank, state in enumerate(TaskState)}
_RANKS[TaskState.FAILED] = _RANKS[TaskState.RELEASED]
_WANTED = frozenset(state for state, rank in _RANKS.items() if rank <= _RANKS[TaskState.CONFIRMED])


#: The tasks of one job and role. They are alike, so a job may lose any of them.
TaskGroup = tuple[JobKey, Role]
#: Beginning of the note of a task that holds its resources and does not execute.
NOT_EXECUTING = "does not execute: "


class Task(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One worker or parameter server of a job, as the store keeps it."""

    job: JobKey
    #: Unique in its job and never used again: ``worker-3``.
    id: str
    role: Role
    node: str
    demand: Resources
    state: TaskState = TaskState.ASKED
    #: Handle in the resource manager; empty until it has answered.
    handle: str = ""
    #: When the resource manager accepted it, seconds since 1970 by its clock; 0 until it was listed. Together with
    #: the cluster, the handle and the job's owner this is its identity, since managers give handles again.
    submitted: int = 0
    asked_at: float = 0.0
    #: When the present state began, seconds since 1970.
    since: float = 0.0
    #: Why it failed, what the manager waits for, or that it holds its resources and does not execute.
    note: str = ""
    #: What it holds by the resource manager's listing, if that is not its demand. Only in snapshots, whose demands are
    #: what tasks get (``RmListing.given``).
    held: Resources = NO_RESOURCES

    @property
    def group(self) -> TaskGroup:
        """Its job and role."""
        return self.job, self.role

    @property
    def has_begun(self) -> bool:
        """Whether the resource manager has begun to run it."""
        return self.state is not TaskState.ASKED

    @property
    def why_not_executing(self) -> str:
        """Why and since when it holds its resources and does not execute; empty if it does."""
        return self.note.removeprefix(NOT_EXECUTING) if self.note.startswith(NOT_EXECUTING) else ""

    @property
    def room(self) -> Resources:
        """What its node has free when it has left. Its replacement needs its demand."""
        return self.held if self.held.thousandths else self.demand

    @property
    def tag(self) -> str:
        """Tag by which the task is found again in the resource manager."""
        return task_tag(self.job, self.id)

    @property
    def number(self) -> int:
        """The number in its id."""
        return int(self.id.rpartition("-")[2])


#: Slurm's priority/basic counts down from 2**32; such a priority tells people nothing.
_MIN_COUNTED_DOWN = 4_000_000_000


class Claimant(NamedTuple):
    """A waiting job of the resource manager for which room is made, or free room is kept."""

    handle: str
    user: str
    priority: int
    #: Whether tasks leave or move so that it has room.
    tasks_leave: bool = True

    @property
    def text(self) -> str:
        """The job in words: ``job 812 of bob (priority 9000)``."""
        shown = f" (priority {self.priority})" if self.priority < _MIN_COUNTED_DOWN else ""
        return f"job {self.handle} of {self.user}{shown}"


class NodeGrant(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Nodes, or room on them, that elastic jobs vacate for a claim (``Claim``). It counts as used on its nodes."""

    handle: str
    user: str
    priority: int
    nodes: tuple[str, ...]
    #: Room on each of these nodes.
    room: tuple[Resources, ...]
    #: Tags of the tasks that leave these nodes, or move to others.
    leaving: tuple[str, ...] = ()

    @property
    def claimant(self) -> Claimant | None:
        """The job that gets the room; None where the site keeps it free."""
        return Claimant(self.handle, self.user, self.priority, bool(self.leaving)) if self.user else None

    @property
    def text(self) -> str:
        """The grant in words: ``room made for job 812 of bob (priority 9000) on 2 nodes: n3, n4``, where tasks leave
        for it; ``free room is kept for`` it where none does.
        """
        count, names = counted(len(self.nodes), "node"), some_of(self.nodes)
        if (claimant := self.claimant) is None:
            return f"the site keeps {count} of {self.handle} free: {names}"
        what = "room made" if claimant.tasks_leave else "free room is kept"
        return f"{what} for {claimant.text} on {count}: {names}"


#: Id of a job's anchor in its tag, where tasks have theirs.
ANCHOR = "anchor"
_TASK = re.compile(f"(?:{'|'.join(TASK_ROLES)})-[0-9]{{1,9}}|{ANCHOR}")


def task_tag(job: JobKey, task: str) -> str:
    """Tag of a task in the resource manager: ``dl2:<job slug>:<task id>``."""
    return f"dl2:{job.slug}:{task}"


def parse_tag(tag: str) -> tuple[JobKey, str] | None:
    """Job and task id of a tag, or None where the text is not one of dl2d."""
    prefix, _, rest = tag.partition(":")
    slug, _, task = rest.partition(":")
    if prefix != "dl2" or not _TASK.fullmatch(task):  # users may write any comment
        return None
    try:
        return JobKey.from_slug(slug), task
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class NodeSet:
    """The only nodes that new tasks of some jobs may use."""

    jobs: tuple[JobKey, ...]
    nodes: frozenset[str]
    #: Why not the others, for users: ``partition small; not n3, which the job excludes``.
    reason: str

    def text(self, nodes: int) -> str:
        """How many nodes of so many these are, and why not the others."""
        return f"{len(self.nodes)} of {nodes} nodes ({self.reason})"


@dataclass(frozen=True, slots=True)
class SharedLimit:
    """The most that some jobs may hold together: a limit of the site, or one of the resource manager."""

    jobs: tuple[JobKey, ...]
    #: In thousandths by resource, 0 or less where they may hold nothing; resources without a limit are absent.
    most: tuple[tuple[str, int], ...]
    #: The limit in words: ``jobs of ann may hold gpu=4 together``.
    text: str
    #: The first of the waiting jobs for which these jobs give up what they have beyond the limit. Where it is empty,
    #: they keep that.
    makes_room_for: tuple[Claimant, ...] = ()


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Jobs that are given nothing until one that was submitted earlier, and has waited for too long, has started."""

    long_waiting: JobKey
    jobs: tuple[JobKey, ...]


class Snapshot(msgspec.Struct, frozen=True):
    """All that a policy may look at: the cluster and the jobs at one moment.

    ``jobs`` are those that can be given tasks now, in submit order, then by id. ``tasks`` are all that have not ended,
    without those that wait in the resource manager's queue for any node.
    """

    #: Seconds since 1970, or virtual time.
    at: float
    #: Number of the scheduling interval.
    slot: int
    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...]
    tasks: tuple[Task, ...]
    #: Allocation below which a job must not fall, for jobs that have one.
    floors: tuple[tuple[JobKey, Allocation], ...] = ()
    #: Speeds that were measured so far, for the kinds of these jobs; empty unless the policy needs them.
    speeds: tuple[MeasuredSpeeds, ...] = ()
    #: Speeds of these jobs, each by itself; empty unless the policy needs them.
    job_speeds: tuple[JobSpeeds, ...] = ()
    #: How these jobs' losses fell; empty unless the policy needs them.
    losses: tuple[MeasuredLoss, ...] = ()
    #: Room that claims get, which counts as used on its nodes: more may be used than a node has until tasks have left
    #: it. Stored as ``claims``.
    grants: tuple[NodeGrant, ...] = msgspec.field(default=(), name="claims")
    #: Tags of tasks that reach their own time limit soon, and before the anchor of their job: they are replaced.
    expiring: frozenset[str] = frozenset()
    #: The nodes that jobs may use; jobs that are in none may use all. No job is in two.
    node_sets: tuple[NodeSet, ...] = ()
    #: Limits on what jobs hold together.
    limits: tuple[SharedLimit, ...] = ()
    #: Jobs whose coordinators are silent, or whose first tasks the resource manager starts from its queue: their tasks
    #: neither leave nor move.
    silent: tuple[JobKey, ...] = ()
    #: Jobs that are held back; policies do not see them.
    held_back: HeldBack | None = None

    @property
    def capacity(self) -> Resources:
        """Total capacity of the nodes that take tasks, and what runs on others that do not take new ones."""
        # Most nodes are alike.
        up = NodeState.UP
        alike = Counter([node.capacity for node in self.nodes if node.state is up])
        if draining := {node.name for node in self.nodes if node.state is NodeState.DRAINING}:
            alike.update(task.room for task in self.tasks if task.node in draining and task.state.wanted)
        return Resources.total(capacity * many for capacity, many in alike.items())

    def may_use(self) -> dict[JobKey, frozenset[str]]:
        """Names of the nodes that each job may use, without jobs that may use all."""
        return {job: nodes.nodes for nodes in self.node_sets for job in nodes.jobs}

    def held(self) -> dict[JobKey, Allocation]:
        """Allocation that each job is meant to have at present (tasks asked for included, leaving ones not)."""
        workers, ps = (
            Counter([task.job for task in self.tasks if task.role is role and task.state in _WANTED])
            for role in TASK_ROLES
        )
        return {job.key: Allocation(workers[job.key], ps[job.key]) for job in self.jobs}

    def begun(self) -> dict[JobKey, Allocation]:
        """The tasks of each job that have begun to run and are not to leave."""
        return msgspec.structs.replace(self, tasks=tuple(task for task in self.tasks if task.has_begun)).held()


def in_submit_order(jobs: list[Job]) -> tuple[Job, ...]:
    """Jobs by submit time, then id; the order in which ties are broken everywhere.

    Ids that are numbers compare as numbers, so that 9 comes before 10; so do those of a job array's elements (12_9).
    """
    return tuple(sorted(jobs, key=lambda job: submit_order(job.key)))


def submit_order(key: JobKey) -> tuple[int, tuple[int, tuple[int, ...], str], str]:
    """Sort key of a job: submit time, then id, numbers before words and by value, then cluster."""
    return (key.submitted, _natural(key.id), key.cluster)


def _natural(text: str) -> tuple[int, tuple[int, ...], str]:
    parts = text.split("_")
    return (0, tuple(map(int, parts)), "") if all(part.isdecimal() for part in parts) else (1, (), text)
