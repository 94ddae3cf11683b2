"""The coordinator: one per job. Knows who is there, makes plans, sees them through, and notices failures.

It never touches weights or gradients, and the data plane does not wait for it: a plan takes effect when the owner of
block 0 stamps it into its answers to the workers.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import statistics
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from pslite.auth import Acceptor
from pslite.balance import Balance, Rule
from pslite.blocks import Block, cut
from pslite.channel import Channel, Inbox, cut_off, listen
from pslite.checkpoint import SavedFile, complete, drop_unfinished
from pslite.director import Director, MemberReport, PlanReport, Reply, Result, Status, Suspension
from pslite.doorway import Doorway
from pslite.ending import Cause, signal_in_words
from pslite.errors import Cancelled, CheckpointError, Fenced, ProtocolError
from pslite.journal import Journal
from pslite.line import Line
from pslite.messages import (
    MAX_CONTROL_BYTES,
    Abort,
    AgentExit,
    AgentUsage,
    Alive,
    AtBarrier,
    BarrierOpen,
    Beat,
    Begin,
    Broken,
    Census,
    Clip,
    Clocks,
    Commit,
    Complete,
    Copies,
    Describe,
    DigestRequest,
    Digests,
    Drained,
    Exit,
    Failed,
    Finished,
    FromMember,
    Hello,
    JobEnded,
    Join,
    Leave,
    Message,
    Moved,
    Nack,
    Norm,
    Noted,
    NotSaved,
    PlanDone,
    Prepare,
    Promote,
    Promoted,
    Provide,
    Publish,
    Published,
    Pushed,
    Ready,
    Rebuilt,
    Refused,
    Rejoin,
    Restart,
    Restored,
    Resume,
    Resumed,
    Resumption,
    Saved,
    Seat,
    Severed,
    Stamped,
    Taken,
    TakenOver,
    TakeOver,
    Trust,
    Welcome,
)
from pslite.norms import Squares, Tensors
from pslite.optimizers import clip_factor, slots
from pslite.plan import Member, Plan, make_plan, next_members, reduction
from pslite.record import Pending, Record, Seated, TakingOver, Vacancy, decode, encode
from pslite.session import digest_of
from pslite.spec import JobSpec, Sum, differences
from pslite.succession import Choice, Loss, Succession, account, choose, holders, inexact
from pslite.tls import VARIABLE, Encryption, contexts
from pslite.usage import Usage

#: how long members may take to read that the job is over
_GOODBYE_SECONDS = 3.0
#: what is listened to of members that are in no plan
_FROM_ANYBODY: Final = (Beat, Failed, Leave, Describe, AtBarrier)
#: so many workers that die at one version are no accident: the job fails
_MOST_DEATHS = 3
#: how long the other workers of an open job may go on by themselves after one has ended its loop: mostly all do at once
_EARLY_SECONDS = 1.0
#: a group that breaks so often at one version, although nobody is dead, fails the job
_MOST_BREAKS = 5
_NAMES: dict[Literal["worker", "ps"], str] = {"worker": "worker", "ps": "server"}
#: fields of a log that say something to its reader alone
_ONLY_TOLD = ("clock", "address")
#: the window over which speed is measured
_SPEED_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Times, in seconds, and the one comparison switch."""

    heartbeat: float = 1.0
    #: a member that is silent for so long is dead
    lease: float = 10.0
    #: how long a plan's members may take to get ready
    prepare: float = 30.0
    #: how long announced members are waited for at the start, once one worker and one server are there
    grace: float = 3.0
    #: how long announced members are waited for before a resize, once one is there: merges what comes together
    settle: float = 0.3
    #: how long a lost member's dl2-run may take to say how it ended; a tenth of it where there is none
    verdict: float = 2.0
    #: the longest time between two looks at what is due
    look: float = 0.1
    #: how long the first worker and server may take to come; None: as long as the resource manager needs
    start: float | None = None
    #: how long a resource manager may take to start another process where a role has nobody left
    vacancy: float = 600.0
    #: "stop" is the way of the DL2 paper: workers stand still at the clock until everything has moved
    handoff: Literal["tagged", "stop"] = "tagged"
    #: "speed": who is slow gets less to do; "even": all get the same
    balance: Literal["speed", "even"] = "speed"
    rule: Rule = field(default_factory=Rule)


@dataclass(eq=False)
class _Connection:
    """A connection that was let in: a member's or an agent's."""

    sock: socket.socket
    hello: Hello
    channel: Channel[FromMember]
    member: Seated | None = None


class Coordinator:
    """Runs one job.

    Parameters
    ----------
    job
        its name.
    token
        the per-job token.
    director
        where targets come from and status goes.
    settings
        times.
    say
        takes lines for the user.
    host
        interface to listen on; all if empty.
    address_host
        name or address under which members reach us.
    listener
        listens already; in place of `host`.
    encrypt
        what goes over TLS.
    journal
        where to write down what must not be forgotten, and what a coordinator before us has written down: then we go
        on with its job.  It ends with us, and so does its content if the job has ended.

    Raises
    ------
    UsageError
        something that encryption needs is missing.

    """

    def __init__(
        self,
        *,
        job: str,
        token: bytes,
        director: Director,
        say: Callable[[str], None],
        settings: Settings | None = None,
        host: str = "",
        address_host: str = "",
        listener: socket.socket | None = None,
        encrypt: Encryption = "control",
        journal: Journal | None = None,
    ) -> None:
        self._job = job
        self._token = token
        self._encrypt = encrypt
        if encrypt != "none":
            contexts(token)  # now, not when the first member comes
        self._director = director
        self._settings = settings or Settings()
        self._say = say
        self._incarnation = uuid.uuid4().hex
        listener = listener or listen(host)
        self._address = f"{address_host or host or socket.gethostname()}:{listener.getsockname()[1]}"
        self._selector = selectors.DefaultSelector()
        self._doorway = Doorway(self._selector, listener, acceptor=self._acceptor, welcome=self._welcome, say=say)
        self._connections: set[_Connection] = set()
        self._members: dict[str, Seated] = {}
        self._agents: dict[str, _Connection] = {}
        self._exits: dict[str, AgentExit] = {}
        #: what tasks used last
        self._usage: dict[str, Usage] = {}
        self._balance = Balance(self._settings.rule, self._settings.balance)
        #: slow members that the user has been told of
        self._told_slow: set[str] = set()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._reply: Reply | None = None
        self._urgent = True
        self._spec: JobSpec | None = None
        self._blocks: tuple[Block, ...] = ()
        self._plan: Plan | None = None
        self._pending: Pending | None = None
        self._plan_number = 0
        self._reports: list[PlanReport] = []
        self._state: Literal["waiting", "running", "finished", "failed", "cancelled"] = "waiting"
        self._reason: str | None = None
        self._result: Result | None = None
        self._digests: dict[int, bytes] = {}
        self._digest_asked = False
        self._version = 0
        self._loss: float | None = None
        self._speed: list[tuple[float, int]] = []
        self._said_epoch = 0
        self._began = time.monotonic()
        self._said_waiting = self._began
        self._suspensions: list[float] = []
        self._given_up = 0
        self._retry_at = 0.0
        self._target_changed = 0.0
        self._once_wanted: frozenset[str] = frozenset()
        self._held_back: set[str] = set()
        #: members that could not reach another one, once
        self._doubted: set[str] = set()
        #: workers that died in the middle of the job, in order, and at which version
        self._dead: dict[str, int] = {}
        #: by plan, which worker does the part of a dead one: tree node -> task
        self._substitutes: dict[int, dict[int, str]] = {}
        self._taking_over: TakingOver | None = None
        self._succession: Succession | None = None
        self._successions = 0
        #: servers that are gone, and how; the owners of their blocks that workers have not been told of yet
        self._lost_servers: dict[str, str] = {}
        self._heirs: dict[int, Member] = {}
        #: blocks that have an owner, but no state yet
        self._orphans: set[int] = set()
        self._vacancy: Vacancy | None = None
        #: from which version on the result is not what it should be, because state was lost
        self._inexact_from: int | None = None
        #: the newest checkpoint of this job that is whole; -1 if there is none
        self._snapshot = -1
        #: the job began with what a checkpoint, or its script, had of an optimizer's state
        self._began_with_state = False
        #: by version, the files of a checkpoint that is being written
        self._saves: dict[int, dict[str, SavedFile]] = {}
        #: by version and of what, the sums of squares of the blocks that have their sums
        self._squares: dict[tuple[int, Literal["gradient", "update"]], dict[int, Squares]] = {}
        #: what servers were told last of that
        self._scales: dict[str, Clip | Trust] = {}
        self._take_overs = 0
        #: all-reduce: since when the group of which plan is broken although nobody is known to be dead, and why; at
        #: which versions that was
        self._broken: tuple[float, int, str] | None = None
        self._breaks: list[int] = []
        #: all workers have the last version, its digest is known, and they are told who writes files
        self._complete = False
        self._final = False
        self._journal = journal
        self._term = journal.term if journal is not None else 0
        #: whether something is to be written down that no message shows
        self._changed = False
        #: whether the job was begun by another coordinator
        self._follows = False
        self._severed = False
        self._cutting = threading.Lock()
        #: when we have looked last at what is due; until when which members may come back
        self._ticked = time.monotonic()
        self._lenient_until, self._lenient = 0.0, frozenset[str]()
        if journal is not None and journal.state is not None:
            self._go_on(journal.state, journal.scales)

    def _go_on(self, state: bytes, scales: bytes) -> None:
        """Take up the job where another coordinator has left it."""
        record = decode(state)
        for name in Record.__struct_fields__:
            if name not in _ONLY_TOLD:
                setattr(self, f"_{name}", getattr(record, name))
        self._blocks = cut(self._spec) if self._spec is not None else ()
        with contextlib.suppress(msgspec.MsgspecError):
            self._scales = msgspec.msgpack.decode(scales, type=dict[str, Clip | Trust]) if scales else {}
        self._follows = self._urgent = True
        now = time.monotonic()
        self._lenient_until, self._lenient = now + self._settings.lease, frozenset(self._members)
        if self._plan is not None:
            self._balance.begin(now, self._plan)
        there = len(self._there())
        number = self._plan.number if self._plan is not None else 0
        self._say(f"coordinator of {self._job} goes on from its log: plan {number}, {there} members, term {self._term}")

    def _write_down(self) -> None:
        """Write down what has changed; where that fails, nobody can follow us any more."""
        lines = [member.channel for member in self._members.values()]
        if self._journal is None or not (self._changed or any(line.changed for line in lines)):
            return
        values: dict[str, Any] = {name: getattr(self, f"_{name}", None) for name in Record.__struct_fields__}
        try:
            self._journal.write(encode(Record(**values | {"clock": time.monotonic()})))
        except OSError as error:
            self._say(
                f"the coordinator's log cannot be written ({error.strerror}): the job ends if its coordinator dies"
            )
            self._journal.remove()
            self._journal = None
        self._changed = False
        for line in lines:
            line.changed = False

    def sever(self) -> None:
        """Cut every connection at once, as the death of this process would (for tests; from any thread)."""
        with self._cutting:
            if not self._severed:
                self._severed = True
                cut_off([connection.sock for connection in list(self._connections)])
        self._wake()

    @property
    def address(self) -> str:
        """host:port for members."""
        return self._address

    @property
    def suspensions_ms(self) -> list[float]:
        """One value for each worker and each plan it went through."""
        return self._suspensions

    # --- loop -----------------------------------------------------------------------------------------------------

    def run(self) -> Status:
        """Run the job to its end; the returned status is `finished`, `failed` or `cancelled`."""
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._woken)
        self._say(f"coordinator of {self._job} listens on {self._address}")
        try:
            self._director.start(self._address, self._token, self._wake)
            while not self._final:
                self._poll(self._settings.look)
                if self._severed:
                    raise Fenced("this coordinator was cut off")
                self._tick()
        except Fenced:
            raise  # without another word to anybody
        except BaseException as error:
            # an interrupt, a termination or a defect of ours: nobody may be left waiting for us
            if self._state in ("waiting", "running"):
                if isinstance(error, Cancelled | KeyboardInterrupt):
                    self._end_early("cancelled", f"its coordinator got {error or 'an interrupt'}")
                else:
                    self._fail(f"the coordinator ended: {error or type(error).__name__}")
            self._goodbye(0.5)
            # before the scheduler is told, who may not answer: whoever ends us may not wait for that
            self._forget()
            self._director.close(self.status())
            raise
        else:
            self._goodbye(_GOODBYE_SECONDS)
            if self._state == "finished" and self._spec is not None and self._spec.checkpoint:
                drop_unfinished(Path(self._spec.checkpoint))
            status = self.status()
            self._director.close(status)
            self._forget()
            return status
        finally:
            self._close()
            if self._journal is not None:
                self._journal.close()

    def _forget(self) -> None:
        """The job is over: nobody may go on with it."""
        if self._journal is not None:
            self._journal.remove()

    def _close(self) -> None:
        with self._cutting:
            self._severed = True
        for connection in list(self._connections):
            self._drop(connection)
        self._doorway.close()
        for closable in (self._wake_in, self._wake_out, self._selector):
            closable.close()

    def _poll(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            if isinstance(key.data, _Connection):
                self._read(key.data)
            else:
                key.data()
        for connection in list(self._connections):
            if connection.channel.unsent:
                connection.channel.flush()

    def _goodbye(self, seconds: float) -> None:
        """Let members read the last message: wait until their connections have ended, not longer than `seconds`."""
        deadline = time.monotonic() + seconds
        self._keep()
        while time.monotonic() < deadline and (self._connections or (self._follows and self._there())):
            self._poll(0.05)
            self._keep()

    def _keep(self) -> None:
        """Say what is due; nothing is said before what it follows from is written down."""
        self._write_down()
        for connection in self._connections:
            if connection.member is not None:
                connection.member.channel.release()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_in.send(b"x")

    def _woken(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(256)

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._ticked > self._settings.lease / 4:
            # we were stopped, or starved: members have looked for another one, and come back now
            if now >= self._lenient_until:
                self._lenient_until = now + self._settings.lease
            self._lenient = frozenset(self._members)
            if self._journal is not None:
                self._journal.check()
        self._ticked = now
        self._doorway.expire(now)
        if self._state in ("waiting", "running"):
            self._judge_losses(now)
        if self._state in ("waiting", "running"):
            self._check_deadlines(now)
        if self._state in ("waiting", "running"):
            self._judge_breaks(now)
        if self._state in ("waiting", "running"):
            self._give_seats(now)
            self._open_barrier()
            self._advance(now)
        if self._state == "running":
            self._check_end()
        urgent, self._urgent = self._urgent, False
        self._changed |= urgent
        self._keep()
        reply = self._director.exchange(self.status(), urgent=urgent)
        if reply is not None:
            if self._reply is None or reply.members != self._reply.members:
                self._target_changed = now
                self._once_wanted |= reply.members or frozenset()
            self._changed |= reply != self._reply
            self._reply = reply
        if self._reply is not None and self._reply.stop and self._state in ("waiting", "running"):
            self._end_early("cancelled", "the scheduler cancelled it")

    # --- connections ----------------------------------------------------------------------------------------------

    def _acceptor(self) -> Acceptor:
        return Acceptor(
            job=self._job,
            task="coordinator",
            incarnation=self._incarnation,
            token=self._token,
            encrypt=self._encrypt,
            verdict=self._verdict,
        )

    def _verdict(self, hello: Hello) -> str:
        if hello.channel == "data":
            return "this is the coordinator: it takes no data connections"
        known = self._members.get(hello.task)
        if hello.channel == "control" and known is not None and known.incarnation != hello.incarnation:
            return f"{hello.task} has joined already (pid {known.pid} on {known.host}); task ids are never used twice"
        return ""

    def _welcome(self, sock: socket.socket, hello: Hello) -> None:
        connection = _Connection(sock, hello, Channel(sock, Inbox(FromMember, MAX_CONTROL_BYTES)))
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        if hello.channel == "agent":
            self._agents[hello.task] = connection

    def _read(self, connection: _Connection) -> None:
        try:
            messages, still_open = connection.channel.receive()
            for message in messages:
                self._take(connection, message)
        except ProtocolError as error:
            self._say(f"closed the connection of {connection.hello.task}: {error}")
            self._disconnect(connection, f"broke the protocol: {error}")
            return
        if not still_open and connection in self._connections:
            self._disconnect(connection, "")

    def _disconnect(self, connection: _Connection, how: str) -> None:
        member = connection.member
        if self._agents.get(connection.hello.task) is connection:
            del self._agents[connection.hello.task]
        self._drop(connection)
        if member is not None:
            member.channel.detach()
        if member is not None and member.state != "left" and not member.lost:
            member.lost = time.monotonic()
            member.lost_how = how

    def _drop(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.discard(connection)
            self._selector.unregister(connection.sock)
            connection.sock.close()

    def _tell(self, tasks: set[str], message: Message) -> None:
        for task in tasks:
            member = self._members.get(task)
            if member is not None and member.state != "left":
                member.channel.send(message)

    # --- messages -------------------------------------------------------------------------------------------------

    def _take(self, connection: _Connection, message: FromMember) -> None:
        hello, channel = connection.hello, connection.channel
        assert hello is not None
        assert channel is not None
        if isinstance(message, AgentExit):
            self._exits[hello.task] = message
            if message.usage is not None:
                self._usage[hello.task] = message.usage
            self._changed = True
            self._write_down()
            channel.send(Noted())
            self._agent_reported(hello.task, message)
            return
        if isinstance(message, AgentUsage):
            self._usage[hello.task] = message.usage
            return
        if isinstance(message, Join):
            if connection.member is not None or hello.channel != "control":
                raise ProtocolError("Join belongs at the beginning of a control connection")
            self._join(connection, hello, message)
            return
        if isinstance(message, Rejoin):
            self._rejoin(connection, hello, message)
            return
        member = connection.member
        if member is None:
            raise ProtocolError(f"{type(message).__name__} before Join")
        member.heard = time.monotonic()
        if member.channel.take(message):
            member.channel.send(Taken(count=member.channel.taken))
        if isinstance(message, Taken):
            member.channel.confirm(message.count)
        elif not isinstance(message, _FROM_ANYBODY) and not self._takes_part(member):
            return
        elif isinstance(message, Beat):
            self._beat(member, message)
        elif isinstance(message, Failed):
            self._member_failed(member, message.reason, fatal=True)
        elif isinstance(message, Severed):
            self._part(member, message)
        elif isinstance(message, TakenOver):
            self._taken_over(member, message.number)
        elif isinstance(message, Copies):
            self._take_copies(member, message)
        elif isinstance(message, Promoted):
            self._promoted(member, message)
        elif isinstance(message, Rebuilt):
            self._take_rebuilt(member, message)
        elif isinstance(message, Leave):
            self._left(member)
        elif isinstance(message, Finished):
            member.finished, member.chief, member.finished_at = True, message.chief, member.heard
            member.finished_version = message.version
            self._version = max(self._version, message.version)
        elif isinstance(message, Digests):
            self._take_digests(member, message)
        elif isinstance(message, Broken):
            self._group_broke(member, message)
        elif isinstance(message, Restored):
            self._restored(member, message)
        elif isinstance(message, Saved):
            self._saved(message)
        elif isinstance(message, Norm):
            self._add_norm(message)
        elif isinstance(message, Describe):
            self._describe(member, message.spec)
        elif isinstance(message, AtBarrier):
            member.at_barrier = True
        elif isinstance(message, NotSaved):
            self._say(f"no checkpoint of version {message.version}: {member.task}: {message.reason}")
        else:
            self._take_plan_message(member, message)

    def _takes_part(self, member: Seated) -> bool:
        """Whether a member is or has been in a plan, or is about to be: what others say of one does not count."""
        pending, vacancy = self._pending, self._vacancy
        return (
            member.state != "joined"
            or (self._plan is not None and member.task in self._plan.tasks())
            or (pending is not None and member.task in pending.members())
            or (vacancy is not None and member.task == vacancy.task)
        )

    def _take_plan_message(self, member: Seated, message: Message) -> None:
        pending, vacancy = self._pending, self._vacancy
        number = getattr(message, "plan", 0)
        if vacancy is not None and (member.task, number) in vacancy.waits_for and isinstance(message, Ready | Nack):
            if isinstance(message, Nack) and message.about not in ("", vacancy.task):
                return  # about one that was to come in this one's place; it has been asked again
            if isinstance(message, Nack):
                self._drop_newcomer(f"{member.title} cannot reach it: {message.reason}")
            vacancy.waits_for.discard((member.task, number))
            return
        if pending is None or number != pending.plan.number:
            return  # about a plan that was given up meanwhile
        if isinstance(message, Ready):
            pending.ready.add(member.task)
        elif isinstance(message, Publish):
            published = Published(plan=number, key=message.key, value=message.value)
            self._tell({m.task for m in pending.plan.workers} - {member.task}, published)
        elif isinstance(message, Nack) and pending.recover:
            # Somebody else is gone, most likely, which will be known soon.
            pending.refused = pending.refused or time.monotonic()
            self._say(f"{member.title} cannot take part in plan {number}: {message.reason}")
        elif isinstance(message, Nack):
            fault = {message.about} & pending.newcomers() or {member.task}
            if message.about in pending.members() - fault and member.task not in self._doubted:
                # perhaps the other one has just died, of which nobody has heard yet
                self._doubted.add(member.task)
                fault = set()
            self._give_up_plan(f"{member.title} cannot take part: {message.reason}", fault)
        elif isinstance(message, Stamped):
            if message.first < 0:
                self._abort(pending, "the job ends before the plan could take effect")
            else:
                pending.first = message.first
        elif isinstance(message, Pushed):
            pending.pushed[member.task] = message.suspension_ms
        elif isinstance(message, Drained):
            pending.drained.add(member.task)
        elif isinstance(message, Moved):
            pending.moved[member.task] = message

    def _join(self, connection: _Connection, hello: Hello, message: Join) -> None:
        assert connection.channel is not None
        channel = connection.channel
        reason = self._objection(hello, message)
        if reason:
            self._say(f"refused {hello.task}: {reason}")
            channel.send(Refused(reason=reason))
            return
        now = time.monotonic()
        line = Line(taken=1)
        line.attach(channel, 0)
        member = Seated(
            task=hello.task,
            role=hello.role,
            incarnation=hello.incarnation,
            host=message.host,
            pid=message.pid,
            address=message.address,
            local=message.local,
            machine=message.machine,
            channel=line,
            heard=now,
            joined=now,
            described=hello.role == "ps" or message.spec is not None,
        )
        self._members[hello.task] = connection.member = member
        if message.spec is not None:
            self._adopt(message.spec)
        line.send(
            Welcome(
                heartbeat_seconds=self._settings.heartbeat,
                lease_seconds=self._settings.lease,
                lasting=self._journal is not None,
                term=self._term,
            )
        )
        line.send(Taken(count=line.taken))
        self._say(f"{member.title} has joined")
        self._urgent = True
        if self._result is not None:
            self._dismiss(member, "the job is finished")

    def _rejoin(self, connection: _Connection, hello: Hello, message: Rejoin) -> None:
        """Take a member back whose connection was lost."""
        member = self._members.get(hello.task)
        if connection.member is not None or hello.channel != "control":
            raise ProtocolError("Rejoin belongs at the beginning of a control connection")
        known = member is not None and member.incarnation == hello.incarnation and self._takes_part(member)
        if message.term > self._term and known:
            raise Fenced(f"{hello.task} has spoken to a coordinator of term {message.term}, this one's is {self._term}")
        if member is None:
            if message.taken:
                raise ProtocolError("it was a member, of which nothing is known here")
            connection.channel.send(Resumed(taken=0, term=self._term))
            return
        for other in [other for other in self._connections if other.member is member]:
            other.member = None
            self._drop(other)
        line = member.channel
        scales = self._scales.values() if member.role == "ps" else ()
        line.attach(connection.channel, message.taken, (Resumed(taken=line.taken, term=self._term), *scales))
        connection.member = member
        member.heard, member.lost, member.lost_how = time.monotonic(), 0.0, ""
        self._lenient -= {member.task}  # who is lost once more has died
        if member.state == "left":
            line.send(JobEnded(reason=f"{hello.task} was given up"))

    def _adopt(self, spec: JobSpec) -> None:
        """Take the description of the job from the first worker that gives one."""
        if self._spec is None:
            self._spec = spec
            self._blocks = cut(spec)

    def _describe(self, member: Seated, spec: JobSpec) -> None:
        """A worker that has joined says what it trains."""
        reason = self._mismatch(spec)
        if reason:
            self._say(f"refused {member.task}: {reason}")
            member.channel.send(Refused(reason=reason))
            return
        self._adopt(spec)
        member.described, member.spec = True, spec
        self._urgent = True

    def _dismiss(self, member: Seated, reason: str) -> None:
        """Let a member go that is in no plan."""
        member.channel.send(Exit(reason=reason))
        member.state = "draining"

    def _objection(self, hello: Hello, message: Join) -> str:
        if self._state in ("failed", "cancelled"):
            return f"the job is over, {self._state}: {self._reason}"
        if hello.role == "ps":
            if self._all_reduce:
                return "the job's architecture is allreduce: it has no servers"
            return "" if message.address else "a server must say where it takes data"
        return self._mismatch(message.spec) if message.spec is not None else ""

    def _mismatch(self, spec: JobSpec) -> str:
        if spec.architecture == "allreduce" and self._encrypt == "all":
            return (
                f"{VARIABLE} is all, and an all-reduce job cannot keep that: gradients go over connections of torch "
                "(gloo), which are not encrypted; train with servers, or with control"
            )
        if self._spec is None or spec.agrees(self._spec):
            late = self._plan is not None and any(isinstance(s.optimizer, Sum) for s in spec.segments)
            return (
                "its script updates the weights in its workers (update_on_kvstore=False), so there is nobody to get "
                "them from: only servers can be added"
                if late
                else ""
            )
        return "its script describes another job than the first worker's: " + "; ".join(
            differences(spec, self._spec)[:10]
        )

    def _beat(self, member: Seated, message: Beat) -> None:
        member.channel.send(Alive())
        if not self._takes_part(member):
            return
        member.steps = message.steps or member.steps
        self._balance.note(member.task, message.pace, message.steps)
        if message.samples:
            self._loss = message.loss / message.samples
        if message.version > self._version:
            self._version = message.version
            now = time.monotonic()
            self._speed.append((now, self._version))
            while self._speed[0][0] < now - _SPEED_SECONDS:
                self._speed.pop(0)
            if self._spec is not None and not self._spec.open:
                epoch = self._version // self._spec.steps_per_epoch
                if epoch > self._said_epoch:
                    self._said_epoch = epoch
                    loss = "" if self._loss is None else f", loss {self._loss:.4f}"
                    self._say(f"epoch {epoch} of {self._spec.epochs} done (version {self._version}{loss})")

    def _left(self, member: Seated) -> None:
        if member.state == "active" and not member.finished and member.role == "worker":
            self._member_failed(member, "its process left in the middle of the job", fatal=True)
            return
        member.state = "left"
        self._urgent = True
        self._recount()
        alone = (
            self._state == "waiting"
            and self._plan is None
            and not any(other.role == "worker" for other in self._waiting())
        )
        if alone and member.role == "worker" and not member.described and self._settings.start is not None:
            self._fail(f"{member.title}: its script ended without training anything")

    # --- checkpoints ----------------------------------------------------------------------------------------------

    def _restored(self, member: Seated, message: Restored) -> None:
        """The job goes on from a checkpoint."""
        pending, version = self._pending, message.version
        if pending is not None and pending.previous is None and pending.plan.workers[0].task == member.task:
            pending.first = self._version = version
            self._began_with_state = True
            self._inexact_from = message.inexact_from
            if self._spec is not None and self._spec.checkpoint:
                self._snapshot = version
            self._say(f"the job goes on from its checkpoint of version {version}")

    def _saved(self, message: Saved) -> None:
        """Some blocks of a version are on disk; with the last of them its checkpoint is complete."""
        assert self._spec is not None
        files = self._saves.setdefault(message.version, {})
        files[message.name] = SavedFile(message.sha256, message.blocks)
        if {number for file in files.values() for number in file.blocks} != set(range(len(self._blocks))):
            return
        for version in [version for version in self._saves if version <= message.version]:
            del self._saves[version]
        try:
            place = complete(
                Path(self._spec.checkpoint), message.version, self._spec, files, inexact_from=self._inexact_from
            )
        except CheckpointError as error:
            self._say(str(error))
        else:
            self._snapshot = message.version
            self._say(f"checkpoint of version {message.version}: {place}")

    # --- the norm of the gradient ---------------------------------------------------------------------------------

    def _add_norm(self, message: Norm) -> None:
        """With the last block's the norm over the whole model is known, and servers may apply the step."""
        assert self._spec is not None
        self._squares.setdefault((message.version, message.of), {}).update(message.squares)
        self._scale(message.version, message.of)

    def _scale(self, version: int, of: Literal["gradient", "update"]) -> None:
        """Have servers apply a step, if all is known of it."""
        assert self._spec is not None
        squares = self._squares[version, of]
        tensors = Tensors(self._spec, self._blocks) if of == "update" else None
        known = self._scales.get(of)
        if known is not None and known.version != version:
            known = None
        if known is None and len(squares) < (len(self._blocks) if tensors is None else len(tensors.asking)):
            return
        if self._succession is not None and self._succession.newcomer:
            return  # servers have said how far they are, and must not go on
        del self._squares[version, of]
        servers = {m.task for plan in self._plans_in_force() for m in plan.servers}
        if known is not None:
            # who asks has come in the place of a server that died before it heard; other blocks have done the step
            self._tell(servers, known)
            return
        if tensors is not None:
            scale: Clip | Trust = Trust(version=version, factors=tensors.trust(squares))
        else:
            factor = clip_factor(self._spec.clip_norm, [squares[block.number][0] for block in self._blocks])
            scale = Clip(version=version, factor=factor)
        self._scales[of] = scale
        if self._journal is not None:
            self._journal.note(msgspec.msgpack.encode(self._scales))
        self._tell(servers, scale)

    # --- failures -------------------------------------------------------------------------------------------------

    def _judge_losses(self, now: float) -> None:
        for member in list(self._members.values()):
            if member.state == "left":
                continue
            silent = not member.lost and now - member.heard > self._settings.lease
            if silent:
                member.lost = now - self._settings.verdict
                member.lost_how = f"died or hangs: silent for {self._settings.lease:g} s"
            told = self._exits.get(member.task)
            if not member.lost and (told is None or member.channel.channel is not None):
                continue
            patience = self._settings.verdict * (1.0 if member.task in self._agents else 0.1)
            given_up_at = member.lost + patience
            if member.task in self._lenient:
                given_up_at = max(given_up_at, self._lenient_until)
            if told is not None:
                if self._ended_well(member, told):
                    self._left(member)
                else:
                    self._member_failed(member, _how(told), fatal=not told.signal)
            elif silent or now >= given_up_at:
                self._member_failed(
                    member, member.lost_how or "died: its connection ended, and nobody reported how its process did"
                )

    @staticmethod
    def _ended_well(member: Seated, told: AgentExit) -> bool:
        return told.status == 0 and not told.signal and (member.finished or member.state in ("joined", "draining"))

    def _member_failed(self, member: Seated, how: str, *, fatal: bool = False) -> None:
        """Do what has to be done; `fatal` where it is no accident, so that another worker would fare no better."""
        if member.state == "left" or self._state not in ("waiting", "running"):
            return
        separator = " " if how.startswith(("died", "broke")) else ": "
        text = f"{member.title}{separator}{how}"
        pending = self._pending
        in_plan = self._plan is not None and member.task in self._plan.tasks()
        certain = pending is not None and (pending.phase == "committed" or pending.recover)
        committed = pending is not None and certain and member.task in pending.members()
        if in_plan or committed:
            if self._all_reduce:
                go_on = self._regroup_without
            else:
                go_on = self._go_on_without_server if member.role == "ps" else self._go_on_without
            if fatal or not go_on(member, text):
                self._fail(text)
            return
        member.state = "left"
        self._say(f"{text}; it is in no plan, the job goes on")
        self._urgent = True
        if pending is not None and member.task in pending.plan.tasks():
            self._give_up_plan(text, set())
        if self._plan is None and member.role == "worker" and not self._joined("worker"):
            # the only one that knew what to train: nothing can come of this job unless another worker comes
            self._spec = None
            self._blocks = ()
        alone = not any(other.role == member.role for other in self._waiting())
        if self._plan is None and self._settings.start is not None and alone:
            self._fail(text)  # nobody starts another one

    def _part(self, member: Seated, message: Severed) -> None:
        """Two members live and cannot reach each other: go on without one, a worker if one is, for nothing is lost."""
        other = self._members.get(message.task)
        if other is None or "left" in (member.state, other.state) or other.lost or member.lost:
            return  # one of them is judged already, or about to be
        away = member if member.role == "worker" else other
        stays = other if away is member else member
        self._member_failed(away, f"cannot reach {stays.title}, although both live: {message.reason}")

    # --- all-reduce: groups that are broken -----------------------------------------------------------------------

    @property
    def _all_reduce(self) -> bool:
        """Whether the job has no servers: every worker has the whole model."""
        return self._spec is not None and self._spec.architecture == "allreduce"

    @property
    def _roles(self) -> tuple[Literal["worker", "ps"], ...]:
        return ("worker",) if self._all_reduce else ("worker", "ps")

    def _regroup_without(self, member: Seated, text: str) -> bool:
        """A worker died: the others go on from the newest version that one of them has. Returns whether they can."""
        self._dead[member.task] = self._version
        if sum(version == self._version for version in self._dead.values()) >= _MOST_DEATHS:
            self._say(f"{_MOST_DEATHS} workers died at version {self._version}")
            return False
        member.state = "left"
        if self._complete:
            self._say(f"{text}; it had finished")
            return not member.chief
        if not self._regroup(f"{text}; the others go on without it, nothing is lost"):
            return False
        member.channel.send(JobEnded(reason=f"{member.task} was given up: {text}"))
        return True

    def _regroup(self, why: str) -> bool:
        """Make a group of all workers that are left and may have weights; returns whether there is one."""
        pending = self._pending
        if pending is not None and pending.phase == "preparing" and not pending.recover:
            self._abort(pending, why)
            pending = None
        plans = [plan for plan in (self._plan, pending.plan if pending is not None else None) if plan is not None]
        present = [m.task for plan in plans for m in plan.workers]
        tasks = [task for task in dict.fromkeys(present) if self._members[task].state != "left"]
        self._broken = None
        if not tasks:
            return False
        self._say(why)
        self._plan_number += 1
        plan = Plan(
            number=self._plan_number,
            workers=tuple(self._members[task].record() for task in tasks),
            servers=(),
            owners=(),
        )
        self._pending = Pending(plan, self._plan, time.monotonic(), recover=True)
        self._tell(plan.tasks(), self._prepare(self._pending))
        self._urgent = True
        return True

    def _prepare(self, pending: Pending) -> Prepare:
        assert self._spec is not None
        return Prepare(
            plan=pending.plan,
            previous=pending.previous,
            spec=self._spec,
            recover=pending.recover,
            fresh=not self._reports,
        )

    def _group_broke(self, member: Seated, message: Broken) -> None:
        """An exchange failed; if a worker is dead, that will be known within the time for verdicts."""
        if self._broken is None:
            self._broken = time.monotonic(), message.plan, f"{member.title} says: {message.reason}"

    def _judge_breaks(self, now: float) -> None:
        """Nobody is dead, and still a group is broken or cannot be made: try again."""
        pending, verdict = self._pending, self._settings.verdict
        recovering = pending is not None and pending.recover
        if pending is not None and recovering and self._broken is None and pending.refused:
            self._broken = pending.refused, pending.plan.number, f"plan {pending.plan.number} could not be made ready"
        if self._broken is None:
            return
        since, number, why = self._broken
        in_use = pending.plan if pending is not None and recovering else self._plan
        if in_use is None or number < in_use.number or self._complete:
            self._broken = None  # another group has taken its place
            return
        if now - since < 1.5 * verdict or any(member.lost for member in self._present()):
            return
        self._breaks.append(self._version)
        if self._breaks.count(self._version) >= _MOST_BREAKS:
            self._fail(f"workers cannot reach each other: {why}")
        elif not self._regroup(f"{why}; nobody is known to be dead: they try again"):
            self._fail(why)

    def _present(self) -> list[Seated]:
        return [member for member in self._members.values() if member.state != "left"]

    def _take_digests(self, member: Seated, message: Digests) -> None:
        """Take digests of final weights; every replica must have the same."""
        for block, digest in message.blocks.items():
            if self._digests.setdefault(block, digest) != digest:
                self._fail(f"{member.title} ends with other weights in block {block} than another worker")
                return

    # --- workers that are gone ------------------------------------------------------------------------------------

    def _go_on_without(self, member: Seated, text: str) -> bool:
        """Have others do the part of a worker that died; returns whether that is possible.

        Nothing is rolled back: what it pushed counts, and what it did not push of the present version others compute
        again.  The plan stays in force until the next one, which is made without it.
        """
        pending = self._pending
        early = bool(member.finished_at) and not member.finished
        self._dead[member.task] = -1 if early else self._version
        first = self._is_before_first_weights(member)
        if (first and self._spec is not None and self._spec.update == "worker") or not self._somebody_has_the_state():
            return False
        if sum(version == self._version for version in self._dead.values()) >= _MOST_DEATHS:
            self._say(f"{_MOST_DEATHS} workers died at version {self._version}")
            return False
        if member.finished and (self._complete or (self._spec is not None and self._spec.open)):
            # The last version is there, and only one worker has something left to do.
            member.state = "left"
            if member.chief:
                self._fail(f"{text}, before it had written what the script saves at its end")
            else:
                self._say(f"{text}; it had finished")
            return True
        if pending is not None and pending.phase == "preparing":
            self._abort(pending, text)
            pending = None
        before = self._substitutes
        self._substitutes = {}
        for plan in [plan for plan in (self._plan, pending.plan if pending else None) if plan is not None]:
            given = self._share_out(plan, before.get(plan.number, {}))
            if given is None:
                return self._lose_last_worker(member, text)
            self._substitutes[plan.number] = given
        member.state = "left"
        others = sorted({task for given in self._substitutes.values() for task in given.values()})
        if self._spec is not None and self._spec.asynchronous:
            self._say(f"{text}; its samples are left out until the next plan")
        else:
            self._say(f"{text}; {' and '.join(others)} {'do' if len(others) > 1 else 'does'} its part, nothing is lost")
        if not early:
            member.channel.send(JobEnded(reason=f"{member.task} was given up: {text}"))
        self._take_overs += 1
        servers = {m.task for plan in self._plans_in_force() for m in plan.servers} & self._there()
        self._taking_over = TakingOver(self._take_overs, servers)
        self._tell(servers, self._take_over_message())
        self._take_over_parts()
        self._urgent = True
        if first:
            # what it had sent of them may be everything
            self._orphans.update(block.number for block in self._blocks)
            self._succeed(text)
        else:
            self._recount()
        return True

    def _recount(self) -> None:
        """A worker is gone that others may count on for its weights."""
        if self._succession is not None and self._succession.workers:
            self._succeed()

    def _is_before_first_weights(self, member: Seated) -> bool:
        """Whether a worker dies that may have weights which nobody else has: the first one, as it sends them."""
        pending = self._pending
        return pending is not None and pending.plan.workers[0].task == member.task and not self._servers_have_begun()

    def _servers_have_begun(self) -> bool:
        """Whether servers have had the weights with which the job begins."""
        pending = self._pending
        if pending is None or pending.previous is not None:
            return True
        assert self._spec is not None
        if self._spec.update == "server" and pending.pushed:
            return True  # who has pushed has had all of them
        return pending.moved.keys() >= pending.movers()

    def _somebody_has_the_state(self) -> bool:
        """Whether weights are left: where workers have them, with one that was there before or has begun to push."""
        pending = self._pending
        if self._spec is None or self._spec.update == "server" or pending is None or pending.phase == "preparing":
            return True
        old = {m.task for m in pending.previous.workers} if pending.previous is not None else set()
        having = {m.task for m in pending.plan.workers} & (old | pending.pushed.keys())
        return pending.previous is None or bool(having - self._dead.keys())

    def _share_out(self, plan: Plan, before: dict[int, str]) -> dict[int, str] | None:
        """Which worker of a plan pushes each node of those that are gone; None where no worker is left.

        Who has begun with a node keeps it.  Workers that stay in the next plan come first: the others may have left.
        """
        assert self._spec is not None
        pending = self._pending
        there = [m.task for m in plan.workers if m.task not in self._dead and self._members[m.task].state != "left"]
        leaving = pending.leavers() if pending is not None else set()
        willing = [task for task in there if task not in leaving] or [
            task for task in there if pending is None or task not in pending.drained
        ]
        how = reduction(self._spec, len(plan.workers), plan.shares)
        nodes = [
            node
            for member, own in zip(plan.workers, how.nodes, strict=True)
            if member.task in self._dead
            for node in own
        ]
        if not nodes:
            return {}
        if not willing and pending is not None and plan.number != pending.plan.number and pending.pushed:
            return {}  # who has pushed under the next plan has the last version of this one
        if not willing:
            return None
        given = {node: task for node, task in before.items() if task in willing}
        load = Counter(given.values())
        for node in nodes:
            if node not in given:
                given[node] = min(willing, key=lambda task: load[task])
                load[given[node]] += 1
        return given

    def _taken_over(self, member: Seated, number: int) -> None:
        taking = self._taking_over
        if taking is None or number != taking.number:
            return  # another worker has died since
        taking.waits_for.discard(member.task)
        self._take_over_parts()

    def _take_over_message(self) -> TakeOver:
        """Return what servers have to know."""
        nodes = {number: tuple(given) for number, given in self._substitutes.items()}
        return TakeOver(number=self._take_overs, gone=tuple(self._dead), nodes=nodes)

    def _take_over_parts(self) -> None:
        """Once all servers know, tell workers what they do in place of others."""
        if self._taking_over is None or self._taking_over.waits_for:
            return
        number = self._taking_over.number
        self._taking_over = None
        for task in {m.task for plan in self._plans_in_force() for m in plan.workers} & self._there():
            nodes = {
                number: tuple(node for node, other in given.items() if other == task)
                for number, given in self._substitutes.items()
            }
            self._tell({task}, TakeOver(number=number, gone=tuple(self._dead), nodes=nodes))

    # --- servers that are gone ------------------------------------------------------------------------------------

    def _go_on_without_server(self, member: Seated, text: str) -> bool:
        """Have others own the blocks of a server that died; returns whether that is possible."""
        assert self._spec is not None
        pending = self._pending
        if self._result is not None:
            member.state = "left"
            self._say(f"{text}; it was needed no more")
            return True
        if self._spec.asynchronous and self._spec.on_loss == "fail":
            self._fail(f"{text}; without a common step something is lost with it, and on_loss is 'fail'")
            return True
        if pending is not None and pending.phase == "preparing":
            self._abort(pending, text)
        member.state = "left"
        self._lost_servers[member.task] = text
        member.channel.send(JobEnded(reason=f"{member.task} was given up: {text}"))
        if self._able_servers():
            self._say(f"{text}; others take its place")
        if self._taking_over is not None:
            self._taken_over(member, self._taking_over.number)
        self._succeed()
        return True

    def _servers_there(self) -> list[str]:
        """The servers of the plans in force that are there."""
        found = {m.task for plan in self._plans_in_force() for m in plan.servers}
        return [task for task in self._members if task in found & self._there()]

    def _able_servers(self) -> list[str]:
        """Those that know the plan in force, not only the one that is taking its place."""
        return [m.task for m in self._plan.servers if m.task in self._there()] if self._plan is not None else []

    def _succeed(self, why: str = "") -> None:
        """Ask who is left what it has of the blocks of servers that are gone, and of those that nobody owns yet."""
        assert self._spec is not None
        plans = self._plans_in_force()
        blocks = {block for plan in plans for task in self._lost_servers for block in plan.blocks_of(task)}
        servers = set(self._servers_there())
        self._successions += 1
        superseded, self._succession = self._succession, None
        self._urgent = True
        if not self._able_servers():
            self._vacate("ps", next(reversed(self._lost_servers.values())))
            return
        # Where every block has a replica that workers wait for, nobody else need be asked.
        ask_workers = self._spec.durability != "durable"
        self._succession = Succession(
            self._successions,
            tuple(sorted(blocks | self._orphans)),
            set(),
            workers=ask_workers,
            why="; ".join(filter(None, (why, *self._lost_servers.values()))),
        ).after(superseded)
        self._count(servers | (self._workers_there() if ask_workers else set()))

    def _workers_there(self) -> set[str]:
        return {m.task for plan in self._plans_in_force() for m in plan.workers} & self._there()

    def _count(self, tasks: set[str]) -> None:
        succession = self._succession
        assert succession is not None
        succession.waits_for = set(tasks)
        gone = tuple(self._lost_servers)
        keep = bool(succession.newcomer)
        self._tell(tasks, Census(number=succession.number, gone=gone, blocks=succession.blocks, keep=keep))

    def _take_copies(self, member: Seated, message: Copies) -> None:
        succession = self._succession
        if succession is None or message.number != succession.number:
            return  # another one has died since
        if succession.phase == "restarting":
            self._promote_for(succession)
        if succession.phase != "counting":
            return
        succession.waits_for.discard(member.task)
        found = succession.held if member.role == "worker" else succession.copies
        succession.came[member.task] = message.came
        succession.reached = max(succession.reached, message.reached)
        if self._pending is not None and message.stamp[0] == self._pending.plan.number:
            succession.stamp = message.stamp
        for block, version in message.versions.items():
            found.setdefault(block, {})[member.task] = version
        if not succession.waits_for and succession.newcomer:
            self._resume_with(succession)
        elif not succession.waits_for:
            self._choose_heirs(succession)

    def _choose_heirs(self, succession: Succession) -> None:
        assert self._spec is not None
        pending = self._pending
        newest = pending.plan if pending is not None else self._plan
        assert newest is not None
        choice = choose(
            succession.blocks, self._blocks, succession.copies, succession.held, newest, self._servers_there(),
            self._able_servers(), succession.came,
        )  # fmt: skip
        if choice.nowhere and not succession.workers:
            succession.workers = True
            self._count(self._workers_there())
            return
        why = succession.why
        if choice.nowhere:
            count = len(choice.nowhere)
            blocks = f"{count} blocks" if count > 1 else f"block {choice.nowhere[0]}"
            self._fail(f"{why}; {blocks} of the model had no copy anywhere else")
            return
        succession.choice = choice
        for block in choice.losses:
            succession.states.pop(block, None)  # made anew once more
        certain = [b for b in self._lossy(choice.losses) if choice.losses[b].version != self._snapshot]
        if certain and self._spec.on_loss == "fail":
            self._fail(f"{why}; optimizer state of {len(certain)} blocks is lost, and on_loss is 'fail'")
            return
        owners = {block: self._members[task].record() for block, task in choice.owners.items()}
        self._heirs.update(owners)
        self._orphans |= choice.losses.keys()
        gone = tuple(self._lost_servers)
        self._go_to(gone, owners)
        for plan in self._plans_in_force():
            for server in plan.servers:
                # one that was to leave may be needed for longer
                self._members[server.task].state = "active"
        succession.phase = "promoting"
        succession.waits_for = {m.task for plan in self._plans_in_force() for m in plan.servers}
        self._tell(
            succession.waits_for.copy(),
            Promote(
                number=succession.number, gone=gone, owners=owners,
                rebuilt={block: loss.version for block, loss in choice.losses.items()}, snapshot=self._snapshot,
                clocks=self._clocks(succession, choice) if self._spec.asynchronous else None,
            ),
        )  # fmt: skip

    def _clocks(self, succession: Succession, choice: Choice) -> Clocks:
        """Return, for async mode, how far the workers of blocks are that are made anew; from there on it is inexact."""
        pending, stamp = self._pending, succession.stamp
        if pending is not None and not stamp[0] and pending.first >= 0:
            stamp = pending.plan.number, pending.first  # nobody may have heard of it but us
        workers = {
            # a copy has been given away, if at all, when all had got as far
            block: {task: max(version, loss.kept) for task, version in succession.held[block].items()}
            for block, loss in choice.losses.items()
        }
        found = {version for versions in workers.values() for version in versions.values()}
        if found:
            self._inexact_from = min(found if self._inexact_from is None else {*found, self._inexact_from})
        return Clocks(workers, stamp, max({succession.reached, *found}))

    def _go_to(self, gone: tuple[str, ...], owners: dict[int, Member]) -> None:
        """Have the plans in force go on with other owners."""
        pending = self._pending
        self._plan = self._plan and self._plan.without(gone, owners)
        if pending is not None:
            # the first plan takes nobody's place
            pending.previous = pending.previous and self._plan
            pending.plan = pending.plan.without(gone, owners)

    def _lossy(self, losses: Mapping[int, Loss]) -> list[int]:
        """Blocks that lose some of what an optimizer keeps."""
        assert self._spec is not None
        if self._spec.update == "worker":
            return []
        # before the first step there is nothing to lose, unless the job has begun with an optimizer's state
        lossy = [b for b in inexact(self._blocks, losses) if losses[b].version or self._began_with_state]
        # and after the last one nothing is made of it any more
        last = self._spec.total_versions
        return lossy if self._spec.open else [b for b in lossy if losses[b].version < last]

    def _promoted(self, member: Seated, message: Promoted) -> None:
        succession, pending = self._succession, self._pending
        if pending is not None:
            pending.moved.pop(member.task, None)  # said before it had other blocks
        if succession is None or message.number != succession.number or succession.phase != "promoting":
            return
        succession.waits_for.discard(member.task)
        if succession.waits_for:
            return
        choice = succession.choice or Choice({}, {}, ())
        losses, owners = choice.losses, choice.owners
        succession.phase = "rebuilding"
        succession.waits_for = {owners[block] for block in losses}
        for worker in {loss.worker for loss in losses.values()}:
            theirs = {b: self._heirs[b] for b, loss in losses.items() if loss.worker == worker}
            self._tell({worker}, Provide(number=succession.number, owners=theirs))
        self._rebuilt()

    def _take_rebuilt(self, member: Seated, message: Rebuilt) -> None:
        succession = self._succession
        if succession is not None and message.number == succession.number:
            succession.waits_for.discard(member.task)
            succession.states |= message.states
            self._rebuilt()

    def _rebuilt(self) -> None:
        """With the last block workers can go on."""
        succession, pending = self._succession, self._pending
        assert succession is not None
        if succession.waits_for:
            return
        self._succession = None
        if self._vacancy is not None and (self._vacancy.role == "ps" or succession.newcomer):
            self._vacancy = None
        self._orphans.clear()
        if not self._may_go_on(succession):
            return
        workers = self._workers_there()
        self._tell(workers, Promote(number=succession.number, gone=tuple(self._lost_servers), owners=self._heirs))
        if 0 in self._heirs and pending is not None and pending.previous is not None:
            self._tell({pending.previous.owner(0).task}, Commit(plan=pending.plan.number))
        self._heirs = {}
        for version, of in list(self._squares):
            self._scale(version, of)  # some may have been whole before the last server said that it goes on
        if self._digest_asked:
            self._ask_for_digests()
        self._urgent = True

    def _may_go_on(self, succession: Succession) -> bool:
        """Note what is not exact from here on; returns whether the job goes on so."""
        assert self._spec is not None
        losses = succession.losses()
        if self._spec.asynchronous:
            if losses:
                versions = {block: loss.version for block, loss in losses.items()}
                self._say(
                    f"INEXACT from version {self._inexact_from} on: "
                    f"{account(dict.fromkeys(versions, -1) | succession.states, versions, self._lossy(losses))}; "
                    "what was pushed to them last may be left out, or count twice"
                )
            return True
        lost = {
            block: succession.states.get(block, -1)
            for block in self._lossy(losses)
            if succession.states.get(block, -1) != losses[block].version
        }
        if not lost:
            if losses:
                self._say(f"{len(losses)} blocks go on from what workers have of them, nothing is lost")
            return True
        versions = {block: losses[block].version for block in lost}
        story = account(lost, versions, lost)
        if self._spec.on_loss == "fail":
            self._fail(f"{succession.why}; {story}, and on_loss is 'fail'")
            return False
        first = min(versions.values())
        self._inexact_from = first if self._inexact_from is None else min(first, self._inexact_from)
        self._say(f"INEXACT from version {first} on: {story}")
        return True

    # --- a role that has nobody left ------------------------------------------------------------------------------

    def _vacate(self, role: Literal["worker", "ps"], why: str) -> None:
        """Wait for a newcomer."""
        now = time.monotonic()
        assert self._spec is not None
        lossy = self._spec.update == "server" and any(slots(block.optimizer) for block in self._blocks)
        if role == "ps" and lossy and self._spec.on_loss == "fail" and self._snapshot < 0:
            self._fail(f"{why}; optimizer state is lost with it, and on_loss is 'fail'")
            return
        if self._vacancy is None:
            self._vacancy = Vacancy(role, now, why)
            self._say(f"{why}; the job waits for another {_NAMES[role]}")
        self._vacancy.task = ""

    def _fill_vacancy(self, now: float) -> None:
        """Bring a newcomer in, or give up."""
        vacancy = self._vacancy
        assert vacancy is not None
        if vacancy.task:
            if not {(task, number) for task, number in vacancy.waits_for if task in self._there()}:
                if vacancy.role == "worker":
                    self._count_for(vacancy.task)
                    return
                self._tell({vacancy.task}, self._take_over_message())
                self._succeed()
            elif now - vacancy.began > self._settings.prepare:
                self._drop_newcomer(f"not ready within {self._settings.prepare:g} s")
            return
        target = self._reply.members if self._reply is not None else None
        # who is leaving does no other step
        coming = self._pending.plan.tasks() & self._workers_there() if self._pending is not None else set()
        old = {m.task for m in self._plan.workers} if self._plan is not None else set()
        present = self._servers_there() if vacancy.role == "ps" else sorted(coming - old)
        joined = present + [task for task in self._joined(vacancy.role) if target is None or task in target]
        if joined:
            (self._seat_server if vacancy.role == "ps" else self._seat_worker)(vacancy, joined[0], now)
            return
        limit = self._settings.start
        expected = any(task not in self._members for task in target or ())
        if limit is not None and not expected:
            limit = self._settings.settle  # nobody starts another one
        limit = self._settings.vacancy if limit is None else limit
        if now - max(vacancy.since, self._target_changed) > limit:
            self._fail(f"{vacancy.reason}; it was the last {_NAMES[vacancy.role]}, and no other came in its place")

    def _seat_server(self, vacancy: Vacancy, task: str, now: float) -> None:
        """Have a newcomer own all blocks: it makes ready, and workers reach it."""
        assert self._spec is not None
        member = self._members[task]
        known = {plan.number for plan in self._plans_in_force() if task in plan.tasks()}
        member.state = "active"
        self._go_to(tuple(self._lost_servers), {block.number: member.record() for block in self._blocks})
        self._orphans.update(block.number for block in self._blocks)
        vacancy.task, vacancy.began = task, now
        plans = self._plans_in_force()
        newest, previous = plans[-1], plans[-2] if len(plans) > 1 else None
        self._say(f"{member.title} takes the place of servers that are gone")
        vacancy.waits_for = {(task, plan.number) for plan in plans if plan.number not in known}
        for plan, before in zip(plans, [None, *plans], strict=False):
            if plan.number not in known:
                # it has to know which workers a plan to come adds
                self._tell({task}, Prepare(plan=plan, previous=before, spec=self._spec))
        if not known:
            workers = self._workers_there()
            vacancy.waits_for |= {(worker, newest.number) for worker in workers}
            self._tell(workers, Prepare(plan=newest, previous=previous, spec=self._spec))

    # --- workers that are all gone --------------------------------------------------------------------------------

    def _lose_last_worker(self, member: Seated, text: str) -> bool:
        """Wait for another worker, where servers have all that it needs; returns whether they have."""
        assert self._spec is not None
        spec, succession = self._spec, self._succession
        if spec.update == "worker" or spec.open or spec.asynchronous or self._all_reduce:
            return False
        if not self._servers_have_begun():
            return False
        if self._orphans or (succession is not None and succession.workers):
            return False  # weights that only workers had
        if self._vacancy is not None and self._vacancy.role == "ps":
            return False
        if succession is not None and succession.newcomer:
            self._succession = None
        member.state = "left"
        member.channel.send(JobEnded(reason=f"{member.task} was given up: {text}"))
        self._substitutes, self._taking_over = {}, None
        self._vacate("worker", text)
        # nobody waits for its death to be judged
        self._take_overs += 1
        self._tell(set(self._servers_there()), self._take_over_message())
        self._urgent = True
        return True

    def _seat_worker(self, vacancy: Vacancy, task: str, now: float) -> None:
        """Have a newcomer go on in the place of a worker that is gone; it makes ready for the plan in force."""
        assert self._spec is not None
        assert self._plan is not None
        member, pending = self._members[task], self._pending
        self._say(f"{member.title} takes the place of workers that are gone")
        member.state = "active"
        vacancy.task, vacancy.began, vacancy.waits_for, vacancy.member = task, now, set(), False
        news: list[Prepare] = []
        if task not in self._plan.tasks():
            self._plan = self._plan.instead(self._gone_of(self._plan), member.record())
            news.append(Prepare(plan=self._plan, previous=None, spec=self._spec))
        if pending is not None and pending.previous is None:
            pending.plan = self._plan
        elif pending is not None:
            vacancy.member = task in pending.plan.tasks()
            pending.previous = self._plan
            if not vacancy.member:
                pending.plan = pending.plan.instead(self._gone_of(pending.plan), member.record())
                news.append(Prepare(plan=pending.plan, previous=self._plan, spec=self._spec))
        for message in news:
            vacancy.waits_for.add((task, message.plan.number))
            self._tell({task}, message)

    def _gone_of(self, plan: Plan) -> str:
        """A worker of a plan that is gone."""
        there = self._there()
        return next(m.task for m in plan.workers if m.task not in there)

    def _count_for(self, task: str) -> None:
        """Have servers forget the workers that are gone, and say how far they are."""
        assert self._spec is not None
        assert self._plan is not None
        self._substitutes = {plan.number: self._share_out(plan, {}) or {} for plan in self._plans_in_force()}
        how = {p.number: reduction(self._spec, len(p.workers), p.shares).nodes for p in self._plans_in_force()}
        # of the step under way it does everything, also what others have done that are there
        self._substitutes[self._plan.number] = {
            node: task
            for member, own in zip(self._plan.workers, how[self._plan.number], strict=True)
            for node in own
            if member.task != task
        }
        self._take_overs += 1
        everything = {number: tuple(node for own in nodes for node in own) for number, nodes in how.items()}
        servers = set(self._servers_there())
        message = TakeOver(number=self._take_overs, gone=tuple(self._dead), nodes=everything)
        self._tell(servers, message)
        nodes = {
            number: tuple(node for node, other in given.items() if other == task)
            for number, given in self._substitutes.items()
        }
        self._tell({task}, TakeOver(number=self._take_overs, gone=tuple(self._dead), nodes=nodes))
        self._successions += 1
        blocks = tuple(block.number for block in self._blocks)
        fresh = Succession(self._successions, blocks, set(), workers=False, newcomer=task)
        self._succession = fresh.after(self._succession)
        self._count(servers)

    def _resume_with(self, succession: Succession) -> None:
        """Servers have said how far they are: the worker begins with the version that all have reached."""
        assert self._spec is not None
        assert self._vacancy is not None
        pending = self._pending
        newest = pending.plan if pending is not None else self._plan
        assert newest is not None
        assert self._plan is not None
        found = holders(self._blocks, succession.copies, newest)
        if found is None:
            self._fail(f"{self._vacancy.reason}; it was the last worker, and servers have not all of the model")
            return
        versions = [version for version, _ in found.values()]
        succession.at = min(versions)
        succession.ahead = sum(version > succession.at for version in versions)
        crossed = pending is not None and 0 <= pending.first <= succession.at
        succession.plan = newest.number if crossed else self._plan.number
        if succession.ahead and self._spec.on_loss == "fail" and not (crossed and self._vacancy.member):
            self._fail(
                f"{self._vacancy.reason}; it was the last worker, it has pushed a part of step {succession.at}, "
                "and on_loss is 'fail'"
            )
            return
        self._heirs = {block: self._members[task].record() for block, (_, task) in found.items()}
        if crossed and self._vacancy.member:
            succession.plan = 0  # it has its weights from the coming plan, or is about to
            self._promote_for(succession)
            return
        succession.phase = "restarting"
        self._tell({succession.newcomer}, Restart(number=succession.number, plan=succession.plan))

    def _promote_for(self, succession: Succession) -> None:
        """The worker awaits its weights: have servers send them."""
        at = succession.at
        self._go_to(tuple(self._lost_servers), self._heirs)
        plans = self._plans_in_force()
        resume = Resumption(
            worker=succession.newcomer, plan=succession.plan, version=at,
            workers={plan.number: plan.workers for plan in plans},
        )  # fmt: skip
        self._squares.clear()
        if succession.ahead and succession.plan:
            self._inexact_from = at if self._inexact_from is None else min(at, self._inexact_from)
            self._say(
                f"INEXACT from version {at} on: {succession.ahead} of {len(self._blocks)} blocks have step {at}, "
                "so the gradient of the others is of weights that have it in part"
            )
        else:
            self._say(f"the job goes on from version {at}, nothing is lost")
        succession.phase = "promoting"
        succession.waits_for = {m.task for plan in plans for m in plan.servers}
        gone = tuple(self._lost_servers)
        going = resume if succession.plan else None
        message = Promote(number=succession.number, gone=gone, owners=self._heirs, resume=going)
        self._tell(succession.waits_for.copy(), message)

    def _drop_newcomer(self, reason: str) -> None:
        vacancy = self._vacancy
        assert vacancy is not None
        if vacancy.task:
            self._member_failed(self._members[vacancy.task], reason)

    def _plans_in_force(self) -> list[Plan]:
        """The plan in force, and the one that is taking its place."""
        pending = self._pending
        follows = pending is not None and pending.phase == "committed" and pending.previous is not None
        coming = pending.plan if pending is not None and follows else None
        return [plan for plan in (self._plan, coming) if plan is not None]

    def _there(self) -> set[str]:
        return {task for task, member in self._members.items() if member.state != "left"}

    def _agent_reported(self, task: str, message: AgentExit) -> None:
        if task in self._members:
            return  # judged when its connection ends, which it does at the same time
        if message.status or message.signal:
            text = f"{task} (pid {message.pid}) {_how(message)}{',' if message.text else ''} before it joined"
        else:
            text = f"{task} (pid {message.pid}): its script ended without joining the job (does it use ElasticJob?)"
        self._say(text)
        if self._plan is None and not self._joined("worker") and self._state == "waiting":
            self._fail(text)

    def _fail(self, reason: str) -> None:
        self._end_early("failed", reason)

    def _end_early(self, state: Literal["failed", "cancelled"], reason: str) -> None:
        self._state = state
        self._reason = reason
        self._say(f"job {state}: {reason}")
        self._tell(set(self._members), JobEnded(reason=reason))
        self._final = True

    # --- plans ----------------------------------------------------------------------------------------------------

    def _joined(self, role: str) -> list[str]:
        """Who could become a member of the plan: workers must have said what they train."""
        return [m.task for m in self._waiting() if m.role == role and m.described]

    def _waiting(self) -> list[Seated]:
        """Who is there and in no plan, in the order in which they came."""
        found = [m for m in self._members.values() if m.state == "joined" and not m.lost]
        return sorted(found, key=lambda m: m.joined)

    def _give_seats(self, now: float) -> None:
        """Tell workers that need it before they can say what they train which place they have among how many.

        At the start all that are announced are waited for; a later one takes the next place.
        """
        waiting = [m for m in self._waiting() if m.role == "worker"]
        if all(m.seated or m.described for m in waiting):
            return
        target = self._reply.members if self._reply is not None else None
        if self._plan is None:
            there = {m.task for m in self._members.values()}
            late = self._reply is None or target is None or bool(target - there)
            if late and now - max(m.joined for m in waiting) < self._settings.grace:
                return
        present = [m.task for m in self._plan.workers if m.task not in self._dead] if self._plan else []
        places = [*present, *(m.task for m in waiting if target is None or m.task in target)]
        for member in waiting:
            if member.task in places and not member.seated:
                member.seated = True
                member.channel.send(Seat(rank=places.index(member.task), workers=len(places)))

    def _open_barrier(self) -> None:
        """Let the workers go on that wait for all others, once all do; a newcomer passes barriers of the beginning."""
        there = [m for m in self._members.values() if m.role == "worker" and m.state != "left" and not m.lost]
        waiting = [m for m in there if m.state == "joined" and m.seated]
        members = [m for m in there if m.state != "joined" and not m.finished]
        groups = [[m] for m in waiting] + [members] if self._plan is not None else [waiting]
        for group in groups:
            if group and all(m.at_barrier for m in group):
                for member in group:
                    member.at_barrier = False
                    member.channel.send(BarrierOpen())

    def _check_deadlines(self, now: float) -> None:
        pending = self._pending
        if pending is not None and pending.phase == "preparing" and now - pending.began > self._settings.prepare:
            late = (pending.members() - pending.ready) & pending.newcomers()
            # workers that are late may be so because they wait for a server; servers wait for no newcomer but servers
            servers = {task for task in late if self._members[task].role == "ps"}
            if pending.recover:
                late = pending.members() - pending.ready - self._dead.keys()
                how = f"died or hangs: not ready for plan {pending.plan.number} within {self._settings.prepare:g} s"
                for task in late:
                    self._member_failed(self._members[task], how)
                return
            names = ", ".join(sorted(servers or late or pending.members() - pending.ready))
            self._give_up_plan(f"{names} not ready within {self._settings.prepare:g} s", servers or late)
        limit = self._settings.start
        if self._plan is None and pending is None and limit is not None and now - self._began > limit:
            there = {m.role for m in self._waiting()}
            if there == {"worker", "ps"} and any(not m.described for m in self._waiting()):
                return  # it takes its time to say what it trains
            names_of = {"worker": "worker", "ps": "server"}
            missing = [names_of[role] for role in self._roles if not self._joined(role)]
            self._fail(f"no {' and no '.join(missing) or 'wanted member'} joined within {limit:g} s")
        elif self._plan is None and now - self._said_waiting > 60.0:
            self._said_waiting = now
            self._say("still waiting for at least one worker and one server")

    def _give_up_plan(self, reason: str, unfit: set[str]) -> None:
        """Try again without the unfit members; those of the running plan stay as they are."""
        pending = self._pending
        assert pending is not None
        for task in unfit:
            member = self._members[task]
            if pending.previous is not None and task in pending.previous.tasks():
                continue
            member.channel.send(JobEnded(reason=f"dropped from the job: {reason}"))
            member.state = "left"
        self._abort(pending, reason)

    def _abort(self, pending: Pending, reason: str) -> None:
        self._say(f"plan {pending.plan.number} is given up: {reason}")
        self._tell(pending.members(), Abort(plan=pending.plan.number, reason=reason))
        self._pending = None
        before = pending.previous.tasks() if pending.previous else set()
        for task in pending.members():
            member = self._members[task]
            if member.state != "left":
                member.state = "active" if task in before else "joined"
        self._given_up += 1
        self._retry_at = time.monotonic() + min(30.0, 0.1 * 2**self._given_up)
        self._urgent = True

    def _advance(self, now: float) -> None:
        if self._succession is not None:
            return
        if self._vacancy is not None:
            self._fill_vacancy(now)
            return
        if self._pending is None:
            self._consider(now)
        elif self._pending.phase == "preparing":
            if self._pending.ready >= self._pending.members() - self._dead.keys():
                self._commit(self._pending)
        else:
            self._follow(self._pending)

    def _consider(self, now: float) -> None:
        """Start a plan if the members should be other than they are."""
        if self._spec is None or self._digest_asked or (self._reply is None and self._plan is None):
            return
        if self._taking_over is not None:
            return
        target = self._reply.members if self._reply is not None else None
        if target is not None:
            for task in {*self._joined("worker"), *self._joined("ps")} & (self._once_wanted - target):
                self._dismiss(self._members[task], "no longer wanted")
        if self._all_reduce:
            for task in self._joined("ps"):
                self._dismiss(self._members[task], "the job's architecture is allreduce: it has no servers")
        present = self._plan
        workers = next_members(
            [m.task for m in present.workers if m.task not in self._dead] if present else [],
            self._joined("worker"),
            target,
            self._spec.shards,
        )
        servers = next_members(
            [m.task for m in present.servers] if present else [],
            self._joined("ps"),
            target,
            len(self._blocks),
        )
        if not workers or not (servers or self._all_reduce):
            return
        if self._all_reduce and present is not None:
            # One of those that have the weights has to stay until another has them.
            old = [m.task for m in present.workers if m.task not in self._dead]
            workers = workers if set(workers) & set(old) else (old[0], *workers)
        before = present.tasks() if present else set()
        if self._spec.update == "worker" and present is not None and not before & set(workers):
            # one that has the weights stays until the newcomers have them
            stays = next((m.task for m in present.workers if m.task not in self._dead), None)
            workers = (stays, *workers)[: self._spec.shards] if stays is not None else workers
        wanted = {*workers, *servers}
        self._note_held_back(target, wanted)
        # of blocks whose server has died there is one copy, until a plan gives them another
        exposed = present is not None and len(servers) > 1 and -1 in present.backups
        if wanted == before and not exposed and not self._deal_anew(now):
            return
        if now < self._retry_at or self._should_wait(now, target, before):
            return
        first = self._members[workers[0]].spec
        if present is None and first is not None:
            # open jobs: the others' may say another optimizer, made of their rank, say
            self._spec, self._blocks = first, cut(first)
        self._plan_number += 1
        dealing = self._balance.dealing
        plan = make_plan(
            self._plan_number,
            () if self._all_reduce else self._blocks,
            [self._members[task].record() for task in workers],
            [self._members[task].record() for task in servers],
            present,
            replicas=self._spec.durability != "none",
            shares=() if self._all_reduce else dealing.shares(self._spec.shards, workers),
            speeds=dealing.speeds(servers),
            stop=self._settings.handoff == "stop",
        )
        self._pending = Pending(plan, present, now)
        self._say(f"plan {plan.number}: {len(workers)} workers, {len(servers)} servers")
        self._tell(self._pending.members(), self._prepare(self._pending))

    def _deal_anew(self, now: float) -> bool:
        """Whether the work should be dealt otherwise than it is, for who is slow; then the next plan does so."""
        plan, spec = self._plan, self._spec
        assert spec is not None
        if plan is None or any(self._members[task].state != "active" for task in plan.tasks()):
            return False
        shards = 0 if spec.open or self._all_reduce else spec.shards
        left = spec.total_versions - self._version
        proposal = self._balance.consider(now, plan, shards, [block.nbytes for block in self._blocks], left)
        slow = {straggler.task for straggler in self._balance.stragglers}
        for straggler in self._balance.stragglers:
            if straggler.task not in self._told_slow:
                self._say(f"{straggler.task} on {straggler.host} is slow: it {straggler.reason}")
        self._told_slow = slow
        if proposal is not None:
            self._say(f"{proposal.reason}, for a step {proposal.gain:.0%} shorter")
            self._urgent = True
        return proposal is not None

    def _note_held_back(self, target: frozenset[str] | None, wanted: set[str]) -> None:
        spare = {t for r in ("worker", "ps") for t in self._joined(r) if (target is None or t in target)} - wanted
        for task in sorted(spare - self._held_back):
            self._say(
                f"{task} waits: the job has {self._spec.shards if self._spec else 0} shards for workers and "
                f"{len(self._blocks)} blocks for servers, it can use no more of them"
            )
        self._held_back = spare

    def _should_wait(self, now: float, target: frozenset[str] | None, before: set[str]) -> bool:
        """Whether announced members that have not joined yet deserve a moment, so that one plan serves all."""
        joined = {t for r in self._roles for t in self._joined(r)}
        if not before and any(m.seated and not m.described for m in self._waiting()):
            return True  # it has a place already: the others count on it
        if target is None:
            missing = not before
        else:
            missing = bool(target - joined - before - {t for t, m in self._members.items() if m.state == "left"})
        if not missing:
            return False
        newest = max((self._members[t].joined for t in joined), default=0.0)
        newest = max(newest, self._target_changed)
        if not before:
            roles = [min(self._members[t].joined for t in self._joined(r)) for r in self._roles]
            return now - max(roles) < self._settings.grace
        return now - newest < self._settings.settle

    def _commit(self, pending: Pending) -> None:
        pending.phase = "committed"
        pending.prepared_ms = (time.monotonic() - pending.began) * 1e3
        plan, previous = pending.plan, pending.previous
        if previous is None:
            pending.first = max(0, pending.first)
            if plan.servers:
                self._tell({plan.workers[0].task}, Begin(plan=plan.number))
            self._activate(plan)
            self._plan = plan
            self._balance.begin(time.monotonic(), plan)
            self._state = "running"
            self._urgent = True
            return
        for task in (previous.tasks() - plan.tasks()) & self._there():
            self._members[task].state = "draining"
        self._activate(plan)
        self._urgent = True
        if not pending.recover:
            pacer = previous.owner(0) if previous.servers else previous.workers[0]
            self._tell({pacer.task}, Commit(plan=plan.number))

    def _activate(self, plan: Plan) -> None:
        # a worker that had finished may have left meanwhile
        for task in plan.tasks() & self._there():
            self._members[task].state = "active"

    def _follow(self, pending: Pending) -> None:
        """See a committed plan through."""
        plan, previous = pending.plan, pending.previous
        all_moved = pending.moved.keys() >= pending.movers()
        if plan.stop and previous is not None and all_moved and not pending.resumed:
            pending.resumed = True
            self._tell({m.task for m in plan.workers}, Resume(plan=plan.number))
        leavers = pending.leavers() - self._dead.keys()
        # A worker that has finished has nothing to push: the job went on from its last version.
        stayers = {m.task for m in plan.workers if not self._members[m.task].finished} - self._dead.keys()
        if not all_moved or not pending.drained >= leavers or not pending.pushed.keys() >= stayers:
            return
        self._substitutes.pop(previous.number if previous else 0, None)
        self._plan = plan
        # What was measured so far belongs to another size.
        del self._speed[:-1]
        self._balance.begin(time.monotonic(), plan)
        self._pending = None
        self._given_up = 0
        self._report(pending)
        self._tell(plan.tasks(), PlanDone(plan=plan.number))
        gone = previous.tasks() - plan.tasks() if previous else set()
        self._tell(gone, Exit(reason="drained: the job goes on without this task"))
        for task in gone:
            self._members[task].finished = self._members[task].drained = True
        if self._taking_over is not None:
            self._taking_over.waits_for -= gone  # nobody pushes to them any more, and they may be dead
            self._take_over_parts()
        self._urgent = True

    def _report(self, pending: Pending) -> None:
        plan, previous = pending.plan, pending.previous
        before = previous.tasks() if previous else set()
        waits = [ms for ms in pending.pushed.values() if ms is not None]
        self._suspensions += waits
        report = PlanReport(
            number=plan.number,
            first_version=pending.first,
            workers=len(plan.workers),
            servers=len(plan.servers),
            added=sorted(plan.tasks() - before),
            removed=sorted(before - plan.tasks()),
            moved_bytes=sum(m.sent_bytes for m in pending.moved.values()),
            prepare_ms=round(pending.prepared_ms, 3),
            move_ms=round(max((m.move_ms for m in pending.moved.values()), default=0.0), 3),
            suspension_ms=Suspension(
                p50=round(statistics.median(waits), 3) if waits else 0.0, max=round(max(waits, default=0.0), 3)
            ),
        )
        self._reports.append(report)
        kept = sum(place >= 0 for place in plan.backups)
        replicas = f", replicas of {kept} of {len(plan.backups)} blocks" if plan.backups else ""
        self._say(
            f"plan {report.number} done at version {report.first_version}: {report.workers} workers, "
            f"{report.servers} servers, moved {report.moved_bytes / 1e6:.1f} MB in {report.move_ms:.0f} ms, "
            f"suspension {report.suspension_ms.p50:.2f} ms (max {report.suspension_ms.max:.2f}){replicas}"
        )

    # --- the end --------------------------------------------------------------------------------------------------

    def _check_end(self) -> None:
        assert self._plan is not None
        if self._succession is not None or self._vacancy is not None:
            return
        workers = [self._members[m.task] for m in self._plan.workers if m.task not in self._dead]
        assert self._spec is not None
        if self._spec.open:
            if not any(w.chief for w in workers):
                self._release_early(workers)
                return
            if not self._settled_at_end(max(w.finished_version for w in workers if w.chief)):
                return
            workers = [self._members[m.task] for m in self._plan.workers if m.task not in self._dead]
            if not self._have_ended(workers):
                return
        pending = self._pending
        committed = pending is not None and pending.phase == "committed" and pending.stamped()
        if pending is not None and (pending.recover or (committed and not self._spec.open)):
            return
        if not self._spec.open and not all(w.finished for w in workers):
            return
        if pending is not None:
            self._abort(pending, "the job has reached its last version")
        if not self._digest_asked:
            self._digest_asked = True
            if self._spec.update == "server":
                self._ask_for_digests()
        if len(self._digests) < len(self._blocks):
            return  # who has the weights may still die: nobody may go yet
        if self._result is None:
            self._result = Result(
                digest=digest_of(self._digests), versions=self._version, inexact_from=self._inexact_from
            )
            if not self._spec.open:
                self._complete = workers[0].chief = True
                self._tell({w.task for w in workers}, Complete(chief=workers[0].task))
            self._tell({m.task for m in self._plan.servers}, Exit(reason="the job is finished"))
            for member in self._members.values():
                if member.state == "joined":
                    self._dismiss(member, "the job is finished")
        # the chief may still be writing its files: the job ends when its workers' processes have
        if all(w.state == "left" for w in workers):
            since = "" if self._inexact_from is None else f", INEXACT from version {self._inexact_from} on"
            self._say(f"finished: {self._result.versions} versions, digest {self._result.digest}{since}")
            self._state = "finished"
            self._final = True

    def _settled_at_end(self, version: int) -> bool:
        """Whether all parameters are where a plan says; an open job has ended at `version`, no plan begins any more."""
        pending = self._pending
        if pending is None or pending.phase != "committed" or pending.previous is None:
            return True
        if 0 <= pending.first <= version:
            if pending.moved.keys() >= pending.movers():
                self._plan, self._pending = pending.plan, None
            return self._pending is None
        return True

    @staticmethod
    def _have_ended(workers: list[Seated]) -> bool:
        """Whether all workers of an open job have ended: who is in a loop leaves it, others go on to their end."""
        version = max(worker.finished_version for worker in workers if worker.chief)
        for worker in workers:
            if worker.state == "active" and not worker.finished:
                worker.state = "draining"
                reason = "the first worker's script has ended, and so has the job"
                worker.channel.send(Exit(reason=reason, version=version))
        return all(worker.finished or worker.state == "left" for worker in workers)

    def _release_early(self, workers: list[Seated]) -> None:
        """Go on without workers of an open job whose loops ended before the first one's."""
        now = time.monotonic()
        for worker in workers:
            if worker.finished and now - worker.finished_at >= _EARLY_SECONDS:
                worker.finished = False
                text = f"{worker.title}: its script has ended"
                if (
                    self._plan is not None
                    and worker.task in self._plan.tasks()
                    and not self._go_on_without(worker, text)
                ):
                    self._fail(text)

    def _ask_for_digests(self) -> None:
        assert self._plan is not None
        self._digests.clear()  # of blocks that others had, which may have been different in async mode
        self._tell({m.task for m in self._plan.servers}, DigestRequest(version=self._version))

    def status(self) -> Status:
        """Return the state of the job, for the director."""
        spec = self._spec
        rate = None
        if len(self._speed) > 1 and self._speed[-1][0] > self._speed[0][0]:
            rate = (self._speed[-1][1] - self._speed[0][1]) / (self._speed[-1][0] - self._speed[0][0])
        return Status(
            address=self._address,
            incarnation=self._incarnation,
            state=self._state,
            reason=self._reason,
            version=self._version,
            total_versions=spec.total_versions if spec and not spec.open else None,
            epoch=self._version / spec.steps_per_epoch if spec and not spec.open else 0.0,
            epochs=float(spec.epochs) if spec and not spec.open else None,
            loss=self._loss,
            steps_per_second=rate,
            samples_per_second=(
                rate * spec.samples / spec.steps_per_epoch if rate is not None and spec and not spec.open else None
            ),
            members=[self._report_of(member) for member in self._members.values()],
            plan=self._plan.number if self._plan else 0,
            plans=list(self._reports),
            result=self._result if self._state == "finished" else None,
            inexact_from=self._inexact_from,
            stragglers=list(self._balance.stragglers),
        )

    def _report_of(self, member: Seated) -> MemberReport:
        told = self._exits.get(member.task)
        return MemberReport(
            task=member.task,
            role=member.role,
            state=member.state,
            host=member.host,
            pid=member.pid,
            usage=self._usage.get(member.task),
            steps=member.steps,
            cause=None if told is None else self._cause(member, told),
            how="" if told is None or told.cause is Cause.DONE else _how(told),
        )

    @staticmethod
    def _cause(member: Seated, told: AgentExit) -> Cause:
        """Why a process ended: whether it was asked to go is known here, not to its dl2-run."""
        return Cause.DRAINED if told.cause is Cause.DONE and member.drained else told.cause


def _how(told: AgentExit) -> str:
    tail = f": {told.text}" if told.text else ""
    if told.cause is Cause.NOT_STARTED:
        return f"died: {told.text}"
    if told.signal:
        return f"died: killed by {signal_in_words(told.signal)}{tail}"
    return f"died: its process ended with status {told.status}{tail}"
