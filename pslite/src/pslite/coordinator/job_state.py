"""What a coordinator knows of its job and must not forget: what it writes to its log, and goes on from.

Not in it: connections, measurements, and what every member says again and again or when it is asked.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import msgspec

from pslite.job.blocks import Block, cut
from pslite.job.measurements import StepTimes
from pslite.job.plan import Member, Plan
from pslite.job.spec import JobSpec
from pslite.job.status import PlanReport, Reply, Result
from pslite.net.messages import AgentExit, Exit, FromCoordinator, Message, Moved
from pslite.net.reliable_channel import ReliableChannel
from pslite.storage.checkpoints import SavedFile

#: so many workers that die at one version are no accident: the job fails
MOST_DEATHS = 3
#: what users call the roles
ROLES: dict[Literal["worker", "ps"], str] = {"worker": "worker", "ps": "server"}


@dataclass(eq=False)
class Seated:
    """A process that has joined."""

    task: str
    role: Literal["worker", "ps"]
    incarnation: str
    host: str
    pid: int
    address: str
    local: str
    machine: str
    channel: ReliableChannel
    state: Literal["joined", "active", "draining", "left"] = "joined"
    heard: float = 0.0
    joined: float = 0.0
    #: when its connection ended without a word
    lost: float = 0.0
    lost_how: str = ""
    #: it is a server, or has said what it trains
    described: bool = True
    #: what it trains, if it has said so after it had joined
    spec: JobSpec | None = None
    #: it has been told of a plan, and may have opened connections for it
    prepared: bool = False
    #: it has been told its place
    seated: bool = False
    at_barrier: bool = False
    finished: bool = False
    #: when it was
    finished_at: float = 0.0
    finished_version: int = 0
    #: it has finished as the one that writes files
    chief: bool = False
    #: the job has gone on without it
    drained: bool = False
    #: what it said last of its steps
    steps: StepTimes | None = None

    def record(self) -> Member:
        """Return what a plan says about it."""
        return Member(
            task=self.task, incarnation=self.incarnation, host=self.host, pid=self.pid,
            address=self.address, local=self.local, machine=self.machine,
        )  # fmt: skip

    def dismiss(self, reason: str) -> None:
        """Let it go that is in no plan."""
        self.channel.send(Exit(reason=reason))
        self.state = "draining"

    def let_go(self) -> None:
        """The job goes on without it, as a plan says."""
        if self.state != "left":
            self.channel.send(Exit(reason="drained: the job goes on without this task"))
        self.finished = self.drained = True

    @property
    def title(self) -> str:
        """Name it in messages."""
        return f"{self.task} on {self.host} (pid {self.pid})"


@dataclass(eq=False)
class Pending:
    """A plan on its way."""

    plan: Plan
    previous: Plan | None
    began: float
    phase: Literal["preparing", "committed"] = "preparing"
    ready: set[str] = field(default_factory=set)
    prepared_ms: float = 0.0
    first: int = -1
    pushed: dict[str, float | None] = field(default_factory=dict)
    #: all-reduce: it takes the place of a plan whose group is broken, at once; why it cannot be made ready, since when
    recover: bool = False
    refused: float = 0.0
    drained: set[str] = field(default_factory=set)
    moved: dict[str, Moved] = field(default_factory=dict)
    resumed: bool = False

    def members(self) -> set[str]:
        """Every task that takes part: the old plan's and the new one's."""
        return self.plan.tasks() | (self.previous.tasks() if self.previous else set())

    def stamped(self) -> bool:
        """Whether the plan takes effect for certain; a finished worker that crossed into it has said so before."""
        return self.first >= 0 or bool(self.pushed or self.drained or self.moved)

    def newcomers(self) -> set[str]:
        """The tasks that the plan adds."""
        return self.plan.tasks() - (self.previous.tasks() if self.previous else set())

    def leavers(self) -> set[str]:
        """The workers that the plan does without."""
        return {m.task for m in self.previous.workers} - self.plan.tasks() if self.previous else set()

    def movers(self) -> set[str]:
        """The servers that have something to move or to keep."""
        plans = [p for p in (self.previous, self.plan) if p is not None]
        return {plan.servers[owner].task for plan in plans for owner in set(plan.owners)}


@dataclass(eq=False)
class TakingOver:
    """Nodes of workers that are gone, on their way to others: servers have to know before workers do."""

    number: int
    #: servers that have not said yet that they take the nodes from others
    waits_for: set[str]


@dataclass(eq=False)
class Succession:
    """Other servers are to own blocks of those that are gone."""

    number: int
    blocks: tuple[int, ...]
    #: who has not answered yet
    waits_for: set[str]
    #: by block, the versions that servers have
    copies: dict[int, dict[str, int]] = field(default_factory=dict)
    phase: Literal["counting", "promoting"] = "counting"


class Record(msgspec.Struct, kw_only=True, dict=True):
    """The state of a job, as its coordinator has it in use and writes it down; and what follows from it alone."""

    #: when it was written down, monotonic, in seconds
    clock: float = 0.0
    incarnation: str
    #: host:port for members
    address: str = ""
    members: dict[str, Seated] = {}
    exits: dict[str, AgentExit] = {}
    #: what the director wants
    reply: Reply | None = None
    spec: JobSpec | None = None
    plan: Plan | None = None
    pending: Pending | None = None
    plan_number: int = 0
    reports: list[PlanReport] = []
    state: Literal["waiting", "running", "finished", "failed", "cancelled"] = "waiting"
    reason: str | None = None
    result: Result | None = None
    digests: dict[int, bytes] = {}
    digest_asked: bool = False
    version: int = 0
    began: float
    said_waiting: float
    suspensions: list[float] = []
    #: plans since the last one that was done, and when the next may be made
    given_up: int = 0
    retry_at: float = 0.0
    #: when the director has wanted other members, and all that it has ever wanted
    target_changed: float = 0.0
    once_wanted: frozenset[str] = frozenset()
    #: members that the job has no use for, of which the user has been told
    held_back: set[str] = set()
    #: members that could not reach another one, once
    doubted: set[str] = set()
    #: workers that died in the middle of the job, in order, and at which version; -1: the job went on without it
    dead: dict[str, int] = {}
    #: by plan, which worker does the part of a dead one: tree node -> task
    substitutes: dict[int, dict[int, str]] = {}
    taking_over: TakingOver | None = None
    take_overs: int = 0
    succession: Succession | None = None
    successions: int = 0
    #: servers that are gone, and how; the owners of their blocks that workers have not been told of yet
    lost_servers: dict[str, str] = {}
    heirs: dict[int, Member] = {}
    #: the checkpoints to which the job has gone back, in order; the last time why, and who has yet to come again
    rollbacks: list[int] = []
    lost_with: str = ""
    returning: dict[str, Literal["worker", "ps"]] = {}
    #: the newest checkpoint of this job that is whole; -1 if there is none
    snapshot: int = -1
    #: by version, the files of a checkpoint that is being written
    saves: dict[int, dict[str, SavedFile]] = {}
    #: all-reduce: since when the group of which plan is broken although nobody is known to be dead, and why; at
    #: which versions that was
    broken: tuple[float, int, str] | None = None
    breaks: list[int] = []
    #: all workers have the last version, its digest is known, and they are told who writes files
    complete: bool = False
    #: nothing more is to be done
    final: bool = False

    # --- the job --------------------------------------------------------------------------------------------------

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks of the model; none as long as nobody has described it."""
        return cut(self.spec) if self.spec is not None else ()

    def describe(self, spec: JobSpec | None) -> None:
        """Take another description of the job, or none."""
        self.spec = spec
        self.__dict__.pop("blocks", None)

    @property
    def over(self) -> bool:
        """Whether the job has ended in one way or another."""
        return self.state not in ("waiting", "running")

    @property
    def target(self) -> frozenset[str] | None:
        """Tasks that the director wants as members; None: all, or it has not said yet."""
        return self.reply.members if self.reply is not None else None

    @property
    def all_reduce(self) -> bool:
        """Whether the job has no servers: every worker has the whole model."""
        return self.spec is not None and self.spec.architecture == "allreduce"

    @property
    def roles(self) -> tuple[Literal["worker", "ps"], ...]:
        """What members may be."""
        return ("worker",) if self.all_reduce else ("worker", "ps")

    @property
    def too_many_deaths(self) -> bool:
        """Whether so many workers died at the present version that it is no accident."""
        return sum(version == self.version for version in self.dead.values()) >= MOST_DEATHS

    # --- who is there ---------------------------------------------------------------------------------------------

    def there(self) -> set[str]:
        """Tasks of those that have not left."""
        return {task for task, member in self.members.items() if member.state != "left"}

    def present(self) -> list[Seated]:
        """Those that have not left."""
        return [member for member in self.members.values() if member.state != "left"]

    def waiting(self, role: str = "") -> list[Seated]:
        """Who is there and in no plan, in the order in which they came; one that is lost may be about to come back."""
        found = [m for m in self.members.values() if m.state == "joined" and role in ("", m.role)]
        return sorted(found, key=lambda m: m.joined)

    @property
    def somebody_waits_described(self) -> bool:
        """Whether a worker is there, in no plan, that has said what it trains."""
        return any(worker.described for worker in self.waiting("worker"))

    def joined(self, role: str) -> list[str]:
        """Who could become a member of the plan: it is not lost, and workers must have said what they train."""
        return [m.task for m in self.waiting(role) if m.described and not m.lost]

    def takes_part(self, member: Seated) -> bool:
        """Whether a member is or has been in a plan, or is about to be: what others say of one does not count."""
        pending = self.pending
        return (
            member.state != "joined"
            or (self.plan is not None and member.task in self.plan.tasks())
            or (pending is not None and member.task in pending.members())
        )

    # --- plans ----------------------------------------------------------------------------------------------------

    def plans_in_force(self) -> list[Plan]:
        """The plan in force, and the one that is taking its place."""
        pending = self.pending
        follows = pending is not None and pending.phase == "committed" and pending.previous is not None
        coming = pending.plan if pending is not None and follows else None
        return [plan for plan in (self.plan, coming) if plan is not None]

    def workers_there(self) -> set[str]:
        """The workers of the plans in force that are there."""
        return {m.task for plan in self.plans_in_force() for m in plan.workers} & self.there()

    def servers_there(self) -> list[str]:
        """The servers of the plans in force that are there."""
        found = {m.task for plan in self.plans_in_force() for m in plan.servers}
        return [task for task in self.members if task in found & self.there()]

    def able_servers(self) -> list[str]:
        """Those that know the plan in force, not only the one that is taking its place."""
        return [m.task for m in self.plan.servers if m.task in self.there()] if self.plan is not None else []

    @property
    def newest_plan(self) -> Plan:
        """The one on its way, or else the one in force; there is one."""
        newest = self.pending.plan if self.pending is not None else self.plan
        assert newest is not None
        return newest

    def servers_have_begun(self) -> bool:
        """Whether servers have had the weights with which the job begins."""
        pending = self.pending
        if pending is None or pending.previous is not None:
            return True
        assert self.spec is not None
        if self.spec.update == "server" and pending.pushed:
            return True  # who has pushed has had all of them
        return pending.moved.keys() >= pending.movers()

    def go_to(self, gone: tuple[str, ...], owners: dict[int, Member]) -> None:
        """Have the plans in force go on with other owners."""
        pending = self.pending
        self.plan = self.plan and self.plan.without(gone, owners)
        if pending is not None:
            # the first plan takes nobody's place
            pending.previous = pending.previous and self.plan
            pending.plan = pending.plan.without(gone, owners)

    def begin_again(self, now: float, version: int, returning: dict[str, Literal["worker", "ps"]], why: str) -> None:
        """Be as a job that begins with a checkpoint of that version, once those members have come again."""
        fresh = Record(incarnation=self.incarnation, began=now, said_waiting=now)
        kept = {
            "clock", "incarnation", "address", "members", "exits", "reply", "spec", "plan_number", "reports",
            "suspensions", "target_changed", "once_wanted", "take_overs", "successions", "rollbacks", "snapshot",
        }  # fmt: skip
        for name in set(self.__struct_fields__) - kept:
            setattr(self, name, getattr(fresh, name))
        self.version, self.returning, self.lost_with = version, returning, why

    # --- time -----------------------------------------------------------------------------------------------------

    def move(self, seconds: float) -> None:
        """Move all times, as if nothing had happened since the record was written."""
        for member in self.members.values():
            member.joined += seconds
            member.finished_at += seconds if member.finished_at else 0.0
        if self.pending is not None:
            self.pending.began += seconds
            self.pending.refused += seconds if self.pending.refused else 0.0
        if self.broken is not None:
            self.broken = (self.broken[0] + seconds, *self.broken[1:])
        self.began += seconds
        self.said_waiting += seconds
        self.retry_at += seconds
        self.target_changed += seconds
        self.clock += seconds


class _Envelope(msgspec.Struct):
    """A record as it is written: messages that several members have to be sent stand in it once."""

    letters: list[msgspec.Raw]
    record: msgspec.Raw


_Lines = tuple[int, int, list[int]]


def encode(record: Record) -> bytes:
    """Return a record as JSON, without line breaks."""
    encoder = msgspec.json.Encoder(enc_hook=lambda line: _plain(line, places))
    places: dict[int, int] = {}
    letters: list[msgspec.Raw] = []
    for message in _unconfirmed(record.members.values()):
        if id(message) not in places:
            places[id(message)] = len(letters)
            letters.append(msgspec.Raw(encoder.encode(message)))
    return encoder.encode(_Envelope(letters, msgspec.Raw(encoder.encode(record))))


def decode(data: bytes) -> Record:
    """Return the record that was written down as `data`; its times are moved to now.

    Raises
    ------
    msgspec.MsgspecError
        it is not one.

    """
    envelope = msgspec.json.decode(data, type=_Envelope)
    letters: list[Message] = [msgspec.json.decode(letter, type=FromCoordinator) for letter in envelope.letters]

    def line(kind: type, plain: Any) -> Any:
        assert kind is ReliableChannel
        taken, confirmed, unconfirmed = msgspec.convert(plain, _Lines)
        return ReliableChannel(taken, confirmed, [letters[place] for place in unconfirmed])

    record = msgspec.json.decode(envelope.record, type=Record, dec_hook=line)
    record.move(time.monotonic() - record.clock)
    for member in record.members.values():
        # it has the time of a lease to come back
        member.heard, member.lost, member.lost_how = record.clock, 0.0, ""
    return record


def _unconfirmed(members: Iterable[Seated]) -> Iterable[Message]:
    return (message for member in members for message in member.channel.unconfirmed)


def _plain(line: object, places: dict[int, int]) -> _Lines:
    assert isinstance(line, ReliableChannel)
    return line.taken, line.confirmed, [places[id(message)] for message in line.unconfirmed]
