"""A coordinator: its connections, what comes over them, and the loop in which it looks at what is due."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pslite.coordinator.checkpoints import Rollback
from pslite.coordinator.completion import Finish
from pslite.coordinator.failover import Takeovers
from pslite.coordinator.failure_detector import Losses
from pslite.coordinator.global_norm import Scales
from pslite.coordinator.job import Voice
from pslite.coordinator.job_state import Record, Seated
from pslite.coordinator.log_writer import LogWriter
from pslite.coordinator.members import Admission
from pslite.coordinator.plans import Planner
from pslite.coordinator.progress import Progress
from pslite.coordinator.regrouping import Regrouping
from pslite.coordinator.server_failover import ServerFailover
from pslite.coordinator.settings import Settings
from pslite.coordinator.snapshots import Snapshots
from pslite.coordinator.status import report
from pslite.errors import Cancelled, Fenced, ProtocolError
from pslite.fault_points import FaultHook, FaultPoint, FaultPoints
from pslite.job.load_balancing import LoadBalancer
from pslite.job.measurements import Usage
from pslite.job.status import MembershipSource, Status
from pslite.net.authentication import Acceptor
from pslite.net.framing import Channel, Inbox, cut_off, listen
from pslite.net.handshake_listener import HandshakeListener
from pslite.net.messages import (
    MAX_CONTROL_BYTES,
    AgentExit,
    AgentUsage,
    AtBarrier,
    Beat,
    Broken,
    Copies,
    Describe,
    Digests,
    Failed,
    Finished,
    FromMember,
    Hello,
    JobEnded,
    Join,
    Leave,
    Norm,
    Noted,
    NotSaved,
    Promoted,
    Refused,
    Rejoin,
    Restored,
    Resumed,
    RollBack,
    Saved,
    Severed,
    Taken,
    TakenOver,
    Welcome,
)
from pslite.net.reliable_channel import ReliableChannel
from pslite.net.tls import Encryption, contexts
from pslite.storage.coordinator_log import CoordinatorLog

#: how long members may take to read that the job is over
_GOODBYE_SECONDS = 3.0
#: what is listened to of members that are in no plan
_FROM_ANYBODY: Final = (Beat, Failed, Leave, Describe, AtBarrier)


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
    log
        where to write down what must not be forgotten, and what a coordinator before us has written down: then we go
        on with its job.  It ends with us, and so does its content if the job has ended.
    faults
        called at fault points, by tests.

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
        director: MembershipSource,
        say: Callable[[str], None],
        settings: Settings | None = None,
        host: str = "",
        address_host: str = "",
        listener: socket.socket | None = None,
        encrypt: Encryption = "control",
        log: CoordinatorLog | None = None,
        faults: FaultHook | None = None,
    ) -> None:
        self._job = job
        self._faults = FaultPoints(faults, "coordinator")
        self._token = token
        self._encrypt = encrypt
        if encrypt != "none":
            contexts(token)  # now, not when the first member comes
        self._director = director
        self._settings = settings or Settings()
        listener = listener or listen(host)
        self._log = LogWriter(log, say)
        written = self._log.last()
        #: whether the job was begun by another coordinator
        self._follows = written is not None
        now = time.monotonic()
        self._record = written or Record(incarnation=uuid.uuid4().hex, began=now, said_waiting=now)
        self._record.address = f"{address_host or host or socket.gethostname()}:{listener.getsockname()[1]}"
        self._voice = Voice(self._record, say)
        self._selector = selectors.DefaultSelector()
        self._doorway = HandshakeListener(
            self._selector, listener, acceptor=self._acceptor, welcome=self._welcome, say=say
        )
        self._connections: set[_Connection] = set()
        self._agents: dict[str, _Connection] = {}
        #: what tasks used last
        self._usage: dict[str, Usage] = {}
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._severed = False
        self._cutting = threading.Lock()
        #: when we have looked last at what is due
        self._ticked = now
        self._make_parts()
        if self._follows:
            self._go_on()

    def _make_parts(self) -> None:
        """Who does what; each knows only those before it."""
        record, voice, settings = self._record, self._voice, self._settings
        self._admission = Admission(record, voice, settings, self._encrypt)
        self._snapshots = Snapshots(record, voice)
        self._scales = Scales(record, voice, self._log)
        self._balance = LoadBalancer(settings.rule, settings.balance)
        self._progress = Progress(record, voice, self._balance)
        self._planner = Planner(record, voice, settings, self._balance)
        self._rollback = Rollback(record, voice, settings, scales=self._scales, progress=self._progress)
        self._failover = ServerFailover(record, voice, self._rollback)
        self._takeovers = Takeovers(record, voice, self._planner, self._rollback)
        self._regrouping = Regrouping(record, voice, settings, self._planner)
        self._losses = Losses(
            record, voice, settings, planner=self._planner, regrouping=self._regrouping, takeovers=self._takeovers,
            failover=self._failover,
        )  # fmt: skip
        self._finish = Finish(record, voice, self._planner, self._takeovers)

    def _go_on(self) -> None:
        """Take up the job where another coordinator has left it."""
        record, now = self._record, time.monotonic()
        self._losses.be_lenient(now)
        if record.plan is not None:
            self._balance.begin(now, record.plan)
        there = len(record.there())
        number = record.plan.number if record.plan is not None else 0
        self._voice.say(
            f"coordinator of {self._job} goes on from its log: plan {number}, {there} members, term {self._log.term}"
        )

    def sever(self) -> None:
        """Cut every connection at once, as the death of this process would (for tests; from any thread)."""
        with self._cutting:
            if not self._severed:
                self._severed = True
                cut_off([connection.sock for connection in list(self._connections)])
        self._wake()

    def disconnect(self, task: str) -> None:
        """Lose the control connection of a member, which comes back (for tests; in our own thread)."""
        for connection in [each for each in self._connections if each.hello.task == task and each.member is not None]:
            self._disconnect(connection, "")

    @property
    def address(self) -> str:
        """host:port for members."""
        return self._record.address

    @property
    def suspensions_ms(self) -> list[float]:
        """One value for each worker and each plan it went through."""
        return self._record.suspensions

    # --- loop -----------------------------------------------------------------------------------------------------

    def run(self) -> Status:
        """Run the job to its end; the returned status is `finished`, `failed` or `cancelled`."""
        record = self._record
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._woken)
        self._voice.say(f"coordinator of {self._job} listens on {record.address}")
        try:
            self._director.start(record.address, self._token, self._wake)
            while not record.final:
                self._poll(self._settings.look)
                if self._severed:
                    raise Fenced("this coordinator was cut off")
                self._tick()
        except Fenced:
            raise  # without another word to anybody
        except BaseException as error:
            # an interrupt, a termination or a defect of ours: nobody may be left waiting for us
            if not record.over:
                if isinstance(error, Cancelled | KeyboardInterrupt):
                    self._voice.end("cancelled", f"its coordinator got {error or 'an interrupt'}")
                else:
                    self._voice.fail(f"the coordinator ended: {error or type(error).__name__}")
            self._goodbye(0.5)
            # before the scheduler is told, who may not answer: whoever ends us may not wait for that
            self._log.forget()
            self._director.close(self._report())
            raise
        else:
            self._goodbye(_GOODBYE_SECONDS)
            self._snapshots.tidy()
            status = self._report()
            self._director.close(status)
            self._log.forget()
            return status
        finally:
            self._close()
            self._log.close()

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
        while time.monotonic() < deadline and (self._connections or (self._follows and self._record.there())):
            self._poll(0.05)
            self._keep()

    def _keep(self) -> None:
        """Say what is due; nothing is said before what it follows from is written down."""
        self._log.write(self._record)
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
        self._faults.reached(FaultPoint.TICK)
        record = self._record
        now = time.monotonic()
        if now - self._ticked > self._settings.lease / 4:
            # we were stopped, or starved: members have looked for another one, and come back now
            self._losses.be_lenient(now)
            self._log.check()
        self._ticked = now
        self._doorway.expire(now)
        if not record.over:
            self._losses.judge(now, self._agents)
        if not record.over:
            self._rollback.check(now)
        if not record.over:
            self._admission.check_start(now)
        if not record.over:
            self._check_prepared(now)
        if not record.over:
            self._regrouping.judge(now)
        if not record.over:
            self._admission.give_seats(now)
            self._admission.open_barrier()
            self._advance(now)
        if record.state == "running":
            self._finish.check()
        urgent, self._voice.urgent = self._voice.urgent, False
        self._log.changed |= urgent
        self._keep()
        reply = self._director.exchange(self._report(), urgent=urgent)
        if reply is not None:
            if record.reply is None or reply.members != record.reply.members:
                record.target_changed = now
                record.once_wanted |= reply.members or frozenset()
            self._log.changed |= reply != record.reply
            record.reply = reply
        if record.reply is not None and record.reply.stop and not record.over:
            self._voice.end("cancelled", "the scheduler cancelled it")

    # --- connections ----------------------------------------------------------------------------------------------

    def _acceptor(self) -> Acceptor:
        return Acceptor(
            job=self._job,
            task="coordinator",
            incarnation=self._record.incarnation,
            token=self._token,
            encrypt=self._encrypt,
            verdict=self._verdict,
        )

    def _verdict(self, hello: Hello) -> str:
        if hello.channel == "data":
            return "this is the coordinator: it takes no data connections"
        known = self._record.members.get(hello.task)
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
            self._voice.say(f"closed the connection of {connection.hello.task}: {error}")
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

    # --- messages -------------------------------------------------------------------------------------------------

    def _take(self, connection: _Connection, message: FromMember) -> None:
        if self._faults.reached(FaultPoint.COORDINATOR_MESSAGE, connection.hello.task, message):
            return
        record = self._record
        hello, channel = connection.hello, connection.channel
        if isinstance(message, AgentExit):
            record.exits[hello.task] = message
            if message.usage is not None:
                self._usage[hello.task] = message.usage
            self._log.changed = True
            self._log.write(record)
            channel.send(Noted())
            self._losses.reported(hello.task, message)
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
        self._losses.hear(member)
        if member.channel.take(message):
            member.channel.send(Taken(count=member.channel.taken))
        if isinstance(message, Taken):
            member.channel.confirm(message.count)
        elif record.members.get(hello.task) is not member:
            return  # it is told to begin again
        elif not isinstance(message, _FROM_ANYBODY) and not record.takes_part(member):
            return
        elif isinstance(message, Beat):
            self._progress.beat(member, message)
        elif isinstance(message, Failed):
            self._losses.lose(member, message.reason, fatal=True)
        elif isinstance(message, Severed):
            self._losses.separate(member, message)
        elif isinstance(message, TakenOver):
            self._takeovers.taken_over(member.task, message.number)
        elif isinstance(message, Copies):
            self._failover.take_copies(member, message)
        elif isinstance(message, Promoted):
            if self._failover.promoted(member, message) and record.digest_asked:
                self._finish.ask_for_digests()
        elif isinstance(message, Leave):
            self._losses.left(member)
        elif isinstance(message, Finished):
            member.finished, member.chief, member.finished_at = True, message.chief, member.heard
            member.finished_version = message.version
            record.version = max(record.version, message.version)
        elif isinstance(message, Digests):
            self._finish.take_digests(member, message)
        elif isinstance(message, Broken):
            self._regrouping.broke(member, message)
        elif isinstance(message, Restored):
            self._snapshots.restored(member, message)
        elif isinstance(message, Saved):
            self._snapshots.saved(message)
        elif isinstance(message, Norm):
            self._scales.add(message)
        elif isinstance(message, Describe):
            self._admission.describe(member, message.spec)
        elif isinstance(message, AtBarrier):
            member.at_barrier = True
        elif isinstance(message, NotSaved):
            self._voice.say(f"no checkpoint of version {message.version}: {member.task}: {message.reason}")
        else:
            self._planner.take(member, message)

    def _join(self, connection: _Connection, hello: Hello, message: Join) -> None:
        record = self._record
        channel = connection.channel
        reason = self._admission.objection(hello, message)
        if reason:
            self._voice.say(f"refused {hello.task}: {reason}")
            channel.send(Refused(reason=reason))
            return
        now = time.monotonic()
        line = ReliableChannel(taken=1)
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
        record.members[hello.task] = connection.member = member
        record.returning.pop(hello.task, None)
        if message.spec is not None:
            self._admission.adopt(message.spec)
        line.send(
            Welcome(
                heartbeat_seconds=self._settings.heartbeat,
                lease_seconds=self._settings.lease,
                lasting=self._log.lasting,
                term=self._log.term,
            )
        )
        line.send(Taken(count=line.taken))
        self._voice.say(f"{member.title} has joined")
        self._voice.hurry()
        if record.result is not None:
            member.dismiss("the job is finished")

    def _rejoin(self, connection: _Connection, hello: Hello, message: Rejoin) -> None:
        """Take a member back whose connection was lost."""
        record = self._record
        member = record.members.get(hello.task)
        if connection.member is not None or hello.channel != "control":
            raise ProtocolError("Rejoin belongs at the beginning of a control connection")
        known = member is not None and member.incarnation == hello.incarnation and record.takes_part(member)
        if message.term > self._log.term and known:
            raise Fenced(
                f"{hello.task} has spoken to a coordinator of term {message.term}, this one's is {self._log.term}"
            )
        if member is None:
            if message.taken:
                # the job has gone back to a checkpoint since
                connection.channel.send(RollBack(reason="the job has gone back to its newest checkpoint"))
                return
            connection.channel.send(Resumed(taken=0, term=self._log.term))
            return
        for other in [other for other in self._connections if other.member is member]:
            other.member = None
            self._drop(other)
        line = member.channel
        scales = self._scales.told() if member.role == "ps" else ()
        line.attach(connection.channel, message.taken, (Resumed(taken=line.taken, term=self._log.term), *scales))
        connection.member = member
        self._losses.take_back(member)
        if member.state == "left":
            line.send(JobEnded(reason=f"{hello.task} was given up"))

    # --- where parts meet -----------------------------------------------------------------------------------------

    def _check_prepared(self, now: float) -> None:
        """Have a plan not wait for ever for members to make ready."""
        record, limit = self._record, self._settings.prepare
        pending = record.pending
        if pending is None or pending.phase != "preparing" or now - pending.began <= limit:
            return
        if not pending.recover:
            self._planner.give_up_late(pending)
            return
        how = f"died or hangs: not ready for plan {pending.plan.number} within {limit:g} s"
        for task in pending.members() - pending.ready - record.dead.keys():
            self._losses.lose(record.members[task], how)

    def _advance(self, now: float) -> None:
        """See what is under way through: a succession before a plan."""
        record = self._record
        pending = record.pending
        if record.succession is not None:
            return
        if pending is None:
            if not self._faults.reached(FaultPoint.CONSIDER_PLAN):
                self._planner.consider(now)
        elif pending.phase == "preparing":
            if pending.ready >= pending.members() - record.dead.keys():
                self._planner.commit(pending)
                self._faults.reached(FaultPoint.PLAN_COMMITTED, pending.plan)
        else:
            gone = self._planner.follow(pending)
            if gone is not None:
                self._progress.resized()
                self._takeovers.stop_waiting_for(gone)  # nobody pushes to them any more, and they may be dead

    def _report(self) -> Status:
        return report(self._record, self._progress, self._usage, self._balance.stragglers)
