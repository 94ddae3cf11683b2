"""A coordinator: its connections, what comes over them, and the loop in which it looks at what is due."""

from __future__ import annotations

import selectors
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from pslite.coordinator import checkpoints_and_rollback, job_completion
from pslite.coordinator.failures import failover, failure_detector
from pslite.coordinator.job_completion import GOODBYE_SECONDS
from pslite.coordinator.membership import joining_and_start, membership_plans, work_reassignment
from pslite.coordinator.message_handlers import DUE, FROM_ANYBODY, HANDLERS
from pslite.coordinator.state import status_report
from pslite.coordinator.state.coordinator_context import Job
from pslite.coordinator.state.coordinator_settings import Settings
from pslite.coordinator.state.job_state import JobState, MemberState
from pslite.coordinator.state.state_log_entries import LogWriter
from pslite.errors import Cancelled, Fenced, ProtocolError
from pslite.fault_points import FaultHook, FaultPoint, FaultPoints
from pslite.job.job_status import MembershipSource, Status
from pslite.job.load_balancing import LoadBalancer
from pslite.net.authentication import Acceptor
from pslite.net.handshake_listener import HandshakeListener
from pslite.net.message_framing import Channel, Inbox
from pslite.net.messages import (
    MAX_CONTROL_BYTES,
    AgentExit,
    AgentUsage,
    FromMember,
    Hello,
    JobEnded,
    Join,
    Noted,
    Refused,
    Rejoin,
    Resumed,
    RollBack,
    Taken,
    Welcome,
)
from pslite.net.reliable_channel import ReliableChannel
from pslite.net.tcp_sockets import listen
from pslite.net.tls import Encryption, contexts
from pslite.net.wakeup import Wakeup
from pslite.storage.coordinator_log import CoordinatorLog
from pslite.storage.disk_thread import DiskThread


@dataclass(eq=False)
class _Connection:
    """An authenticated connection: a member's or a task agent's."""

    sock: socket.socket
    hello: Hello
    channel: Channel[FromMember]
    member: MemberState | None = None
    #: of a task agent: whether it has been told to end its process
    ending: bool = False
    #: of a process that may not join: it has been told why, and what it still sends does not count
    refused: bool = False


class Coordinator:
    """Runs one job.

    Parameters
    ----------
    job
        its name.
    token
        the per-job token.
    director
        the membership source: where wanted tasks come from and status goes.
    settings
        times.
    say
        takes lines for the user.
    host
        name or address under which members reach the coordinator; it listens there unless `listener` is given.
    listener
        listens already.
    encrypt
        what the user wants to go over TLS; "" for all, but for the gradients of an all-reduce job, which gloo cannot
        encrypt: such a job is refused if the user wants all.
    log
        where to write what must not be forgotten, and what a coordinator before this one has written: then its job is
        continued.  It is closed at the end, and deleted if the job has ended.
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
        host: str,
        settings: Settings | None = None,
        listener: socket.socket | None = None,
        encrypt: Encryption | Literal[""] = "",
        log: CoordinatorLog | None = None,
        faults: FaultHook | None = None,
    ) -> None:
        self._name = job
        self._faults = FaultPoints(faults, "coordinator")
        self._token = token
        if encrypt != "none":
            contexts(token)  # now, not when the first member comes
        self._director = director
        settings = settings or Settings()
        listener = listener or listen(host)
        self._selector = selectors.DefaultSelector()
        self._wakeup = Wakeup(self._selector)
        wake = self._wakeup.wake
        self._log = LogWriter(log, say, DiskThread(wake, lambda: self._faults.reached(FaultPoint.DISK, "log")))
        written = self._log.last_state()
        #: whether the job was begun by another coordinator
        self._follows = written is not None
        now = time.monotonic()
        state = written or JobState(incarnation=uuid.uuid4().hex, began=now, waiting_reported=now)
        state.address = f"{host}:{listener.getsockname()[1]}"
        balance = LoadBalancer(settings.rule, settings.balance)
        #: by task, the connection of its task agent
        self._agents: dict[str, _Connection] = {}
        disk = DiskThread(wake, lambda: self._faults.reached(FaultPoint.DISK, "checkpoint"))
        self._job = Job(
            state,
            settings,
            say,
            balance,
            encrypt,
            agents=self._agents.keys(),
            step_record=self._log.last_step_record(),
            then=self._log.then,
            disk=disk,
        )
        self._listener = HandshakeListener(
            self._selector, listener, acceptor=self._acceptor, welcome=self._welcome, say=say
        )
        self._connections: dict[_Connection, None] = {}
        #: when `_tick` was called last
        self._ticked = now
        if self._follows:
            failure_detector.be_lenient(self._job, now)
            if state.plan is not None:
                balance.begin(now, state.plan)
            checkpoints_and_rollback.complete_again(self._job)
            number = state.plan.number if state.plan is not None else 0
            say(
                f"coordinator of {job} goes on from its log: plan {number}, {len(state.present())} members, "
                f"term {self._log.term}"
            )

    @property
    def state(self) -> JobState:
        """The state of the job, which changes while `run` does."""
        return self._job.state

    # --- loop -----------------------------------------------------------------------------------------------------

    def run(self) -> Status:
        """Run the job to its end; the returned status is `finished`, `failed` or `cancelled`."""
        state = self._job.state
        self._job.say(f"coordinator of {self._name} listens on {state.address}")
        try:
            self._director.start(state.address, self._token, self._wakeup.wake)
            while not state.over:
                self._poll(self._job.settings.look)
                self._tick()
        except Fenced:
            raise  # without another word to anybody
        except BaseException as error:
            # an interrupt, a termination or a defect here: nobody may be left waiting for this coordinator
            if not state.over:
                if isinstance(error, Cancelled | KeyboardInterrupt):
                    self._job.end("cancelled", f"its coordinator got {error or 'an interrupt'}")
                else:
                    self._job.fail(f"the coordinator ended: {error or type(error).__name__}")
            self._goodbye(0.5)
            # before the daemon is told, who may not answer: whoever ends this process may not wait for that
            self._log.forget()
            self._director.close(status_report.report(self._job))
            raise
        else:
            self._goodbye(GOODBYE_SECONDS)
            checkpoints_and_rollback.tidy(self._job)
            self._job.disk.close(GOODBYE_SECONDS)
            report = status_report.report(self._job)
            self._director.close(report)
            self._log.forget()
            return report
        finally:
            self._close()
            self._log.close()

    def _close(self) -> None:
        for connection in list(self._connections):
            self._drop(connection)
        self._listener.close()
        for closable in (self._selector, self._wakeup):
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
        """Send the last messages: wait until members have closed their connections, not longer than `seconds`."""
        deadline = time.monotonic() + seconds
        if self._job.state.state == "cancelled":
            for connection in self._agents.values():
                connection.channel.send(JobEnded(reason=self._job.state.reason or "cancelled", cancelled=True))
        self._write_and_send()
        while time.monotonic() < deadline and (self._connections or (self._follows and self._job.state.present())):
            self._poll(0.05)
            self._job.disk.take()
            self._write_and_send()

    def _write_and_send(self) -> None:
        """Begin to write the state to the log, and send the messages that follow from what is written."""
        self._log.write(self._job, [each.member.channel for each in self._connections if each.member is not None])

    def _tick(self) -> None:
        """Do what is due, send what follows from it, and exchange status and wanted tasks with the source."""
        self._faults.reached(FaultPoint.TICK)
        job, state = self._job, self._job.state
        now = time.monotonic()
        if now - self._ticked > job.settings.lease / 4:
            # this process was stopped, or starved: members have looked for another one, and come back now
            failure_detector.be_lenient(job, now)
            job.watch.rest(now)
            self._log.check()
        self._ticked = now
        self._listener.expire(now)
        job.disk.take()
        for step in DUE:
            if not state.over:
                step(job, now)
        if not state.over:
            self._advance(now)
        if state.state == "running":
            job_completion.check(job)
        urgent, job.urgent = job.urgent, False
        self._log.changed |= urgent
        self._end_given_up()
        self._write_and_send()
        reply = self._director.exchange(status_report.report(job), urgent=urgent)
        if reply is not None:
            if state.reply is None or reply.members != state.reply.members:
                state.target_changed = now
                state.once_wanted |= reply.members or frozenset()
            self._log.changed |= reply != state.reply
            state.reply = reply
        if state.reply is not None and state.reply.stop and not state.over:
            reason = state.reply.reason
            job.end("failed" if reason else "cancelled", reason or "the daemon cancelled it")

    def _end_given_up(self) -> None:
        """Tell task agents to end processes that were given up, since one that hangs does not end by itself."""
        for task, connection in self._agents.items():
            member = self._job.state.members.get(task)
            if member is not None and member.given_up and not connection.ending:
                connection.ending = True
                end = JobEnded(reason=f"{task} was given up")
                self._log.then(partial(connection.channel.send, end))

    def _advance(self, now: float) -> None:
        """Take the next step of a plan, unless blocks of a dead server have to find their owners first."""
        job, state = self._job, self._job.state
        pending = state.pending
        if state.failover is not None:
            return
        if pending is None:
            if not self._faults.reached(FaultPoint.CONSIDER_PLAN):
                membership_plans.consider(job, now)
        elif pending.phase == "preparing":
            if pending.ready >= pending.members() - state.dead.keys():
                membership_plans.commit(job, pending)
                work_reassignment.share_out_again(job)
                self._faults.reached(FaultPoint.PLAN_COMMITTED, pending.plan)
        else:
            removed = membership_plans.follow(job, pending)
            if removed is not None:
                # no worker pushes to them any more, and they may be dead
                work_reassignment.stop_waiting_for(job, removed)

    # --- connections ----------------------------------------------------------------------------------------------

    def _acceptor(self) -> Acceptor:
        return Acceptor(
            job=self._name,
            task="coordinator",
            incarnation=self._job.state.incarnation,
            token=self._token,
            encrypt=self._job.encrypt or "all",
            verdict=self._verdict,
        )

    def _verdict(self, hello: Hello) -> str:
        if hello.channel == "data":
            return "the coordinator does not accept data connections"
        known = self._job.state.members.get(hello.task)
        if hello.channel == "control" and known is not None and known.incarnation != hello.incarnation:
            return f"{hello.task} has joined already (pid {known.pid} on {known.host}); task ids are never used twice"
        return ""

    def _welcome(self, sock: socket.socket, hello: Hello) -> None:
        connection = _Connection(sock, hello, Channel(sock, Inbox(FromMember, MAX_CONTROL_BYTES)))
        self._connections[connection] = None
        self._selector.register(sock, selectors.EVENT_READ, connection)
        if hello.channel == "agent":
            self._agents[hello.task] = connection

    def _read(self, connection: _Connection) -> None:
        try:
            messages, still_open = connection.channel.receive()
            for message in messages:
                self._take(connection, message)
        except ProtocolError as error:
            self._job.say(f"closed the connection of {connection.hello.task}, which violated the protocol: {error}")
            self._disconnect(connection, f"violated the protocol: {error}")
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
        if member is not None and member.present and not member.lost:
            member.lost = time.monotonic()
            member.lost_how = how

    def _drop(self, connection: _Connection) -> None:
        if connection in self._connections:
            del self._connections[connection]
            self._selector.unregister(connection.sock)
            connection.sock.close()

    # --- messages -------------------------------------------------------------------------------------------------

    def _take(self, connection: _Connection, message: FromMember) -> None:
        if self._faults.reached(FaultPoint.COORDINATOR_MESSAGE, connection.hello.task, message) or connection.refused:
            return
        job, state = self._job, self._job.state
        hello, member = connection.hello, connection.member
        match message:
            case AgentExit():
                state.exits[hello.task] = message
                if message.usage is not None:
                    job.usage[hello.task] = message.usage
                self._log.changed = True
                self._log.then(lambda: connection.channel.send(Noted()))
                failover.process_ended(job, hello.task, message)
                return
            case AgentUsage():
                job.usage[hello.task] = message.usage
                return
            case Join() | Rejoin() if member is not None or hello.channel != "control":
                raise ProtocolError(
                    f"{type(message).__name__} is allowed only as the first message of a control connection"
                )
            case Join():
                self._join(connection, message)
                return
            case Rejoin():
                self._rejoin(connection, message)
                return
        if member is None:
            raise ProtocolError(f"{type(message).__name__} was sent before Join")
        failure_detector.heard(job, member)
        if member.channel.take(message):
            member.channel.send(Taken(count=member.channel.taken))
        if isinstance(message, Taken):
            member.channel.confirm(message.count)
        elif state.members.get(hello.task) is member and (
            type(message) in FROM_ANYBODY or (state.takes_part(member) and not member.outdated)
        ):
            HANDLERS[type(message)](job, member, message)
        # else it is told to begin again, or what it says of others or of an earlier run does not count

    def _join(self, connection: _Connection, message: Join) -> None:
        """Let a process join the job, or refuse it."""
        job, hello = self._job, connection.hello
        reason = joining_and_start.objection(job, hello, message)
        if reason:
            job.say(f"refused {hello.task}: {reason}")
            connection.refused = True
            connection.channel.send(Refused(reason=reason))
            return
        line = ReliableChannel(taken=1)
        line.attach(connection.channel, 0)
        member = connection.member = joining_and_start.join(job, hello, message, line)
        line.send(
            Welcome(
                heartbeat_seconds=job.settings.heartbeat,
                lease_seconds=job.settings.lease,
                lasting=self._log.lasting,
                term=self._log.term,
            )
        )
        line.send(Taken(count=line.taken))
        if job.state.result is not None:
            member.dismiss("the job is finished")

    def _rejoin(self, connection: _Connection, message: Rejoin) -> None:
        """Take a member back whose connection was lost."""
        job, hello, term = self._job, connection.hello, self._log.term
        member = job.state.members.get(hello.task)
        known = member is not None and member.incarnation == hello.incarnation and job.state.takes_part(member)
        if message.term > term and known:
            raise Fenced(
                f"{hello.task} is connected to a coordinator of term {message.term}, which has replaced this one of "
                f"term {term}"
            )
        if member is None:
            if message.taken:
                # the job has gone back to a checkpoint since
                connection.channel.send(RollBack(reason="the job has gone back to its newest checkpoint"))
            else:
                connection.channel.send(Resumed(taken=0, term=term))
            return
        for other in [other for other in self._connections if other.member is member]:
            other.member = None
            self._drop(other)
        line = member.channel
        factors = job.step_record.factors.values() if member.role == "ps" else ()
        line.attach(connection.channel, message.taken, (Resumed(taken=line.taken, term=term), *factors))
        connection.member = member
        failure_detector.take_back(job, member)
        if not member.present:
            line.send(JobEnded(reason=f"{hello.task} was given up"))
