"""What a coordinator knows of its job and must not forget: what it writes to its log, and goes on from.

Not in it: connections, measurements, and what every member says again and again or when it is asked.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from pslite.checkpoint import SavedFile
from pslite.director import PlanReport, Reply, Result
from pslite.line import Line
from pslite.messages import AgentExit, FromCoordinator, Message, Moved
from pslite.plan import Member, Plan
from pslite.spec import JobSpec
from pslite.succession import Succession
from pslite.usage import StepTimes


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
    channel: Line
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
class Vacancy:
    """A role that has nobody left in the middle of the job: a newcomer takes its place."""

    role: Literal["worker", "ps"]
    since: float
    #: how it came to that
    reason: str
    #: the newcomer, whether it was a member of the coming plan, and since when members make ready for it
    task: str = ""
    member: bool = False
    began: float = 0.0
    #: members that have not made ready yet, each with the number of a plan
    waits_for: set[tuple[str, int]] = field(default_factory=set)


@dataclass(eq=False)
class TakingOver:
    """Nodes of workers that are gone, on their way to others: servers have to know before workers do."""

    number: int
    #: servers that have not said yet that they take the nodes from others
    waits_for: set[str]


class Record(msgspec.Struct, kw_only=True):
    """The state of a job; the fields have the names of the coordinator's attributes."""

    #: when it was written down, monotonic, in seconds
    clock: float
    incarnation: str
    address: str
    members: dict[str, Seated]
    exits: dict[str, AgentExit]
    reply: Reply | None
    spec: JobSpec | None
    plan: Plan | None
    pending: Pending | None
    plan_number: int
    reports: list[PlanReport]
    state: Literal["waiting", "running", "finished", "failed", "cancelled"]
    reason: str | None
    result: Result | None
    digests: dict[int, bytes]
    digest_asked: bool
    version: int
    began: float
    said_waiting: float
    suspensions: list[float]
    given_up: int
    retry_at: float
    target_changed: float
    once_wanted: frozenset[str]
    held_back: set[str]
    doubted: set[str]
    dead: dict[str, int]
    substitutes: dict[int, dict[int, str]]
    taking_over: TakingOver | None
    take_overs: int
    succession: Succession | None
    successions: int
    lost_servers: dict[str, str]
    heirs: dict[int, Member]
    orphans: set[int]
    vacancy: Vacancy | None
    inexact_from: int | None
    snapshot: int
    began_with_state: bool
    saves: dict[int, dict[str, SavedFile]]
    broken: tuple[float, int, str] | None
    breaks: list[int]
    complete: bool
    final: bool

    def move(self, seconds: float) -> None:
        """Move all times, as if nothing had happened since the record was written."""
        for member in self.members.values():
            member.joined += seconds
            member.finished_at += seconds if member.finished_at else 0.0
        if self.pending is not None:
            self.pending.began += seconds
            self.pending.refused += seconds if self.pending.refused else 0.0
        if self.vacancy is not None:
            self.vacancy.since += seconds
            self.vacancy.began += seconds if self.vacancy.began else 0.0
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
        assert kind is Line
        taken, confirmed, unconfirmed = msgspec.convert(plain, _Lines)
        return Line(taken, confirmed, [letters[place] for place in unconfirmed])

    record = msgspec.json.decode(envelope.record, type=Record, dec_hook=line)
    record.move(time.monotonic() - record.clock)
    for member in record.members.values():
        # it has the time of a lease to come back
        member.heard, member.lost, member.lost_how = record.clock, 0.0, ""
    return record


def _unconfirmed(members: Iterable[Seated]) -> Iterable[Message]:
    return (message for member in members for message in member.channel.unconfirmed)


def _plain(line: object, places: dict[int, int]) -> _Lines:
    assert isinstance(line, Line)
    return line.taken, line.confirmed, [places[id(message)] for message in line.unconfirmed]
