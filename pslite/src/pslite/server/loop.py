"""The parameter server's poll loop: takes frames and the coordinator's messages, and never waits for a peer.

Only preparing a plan (allocating memory and connecting) and writing checkpoints are done by other threads.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping

from pslite.errors import JobFailed, ProtocolError, RolledBack
from pslite.fault_points import FaultHook, FaultPoint, FaultPoints
from pslite.net.authentication import Identity
from pslite.net.coordinator_client import CoordinatorClient
from pslite.net.data_frames import Link
from pslite.net.data_transport import machine
from pslite.net.messages import (
    Abort,
    Beat,
    Census,
    Clip,
    Commit,
    DigestRequest,
    Digests,
    Exit,
    JobEnded,
    Join,
    Leave,
    Message,
    Nack,
    NotSaved,
    PlanDone,
    Prepare,
    Promote,
    Ready,
    Refused,
    RollBack,
    Saved,
    TakenOver,
    TakeOver,
    Trust,
)
from pslite.server.async_rounds import AsynchronousRounds
from pslite.server.block_handoff import Handoff
from pslite.server.block_step import Steps
from pslite.server.connections import Connections
from pslite.server.failover import Failover
from pslite.server.frame_handlers import Frames
from pslite.server.plan_preparation import prepare
from pslite.server.replication import ReplicaSender, ReplicaStore
from pslite.server.rounds import Rounds, SynchronousRounds
from pslite.server.server_state import PreparedPlan, ServerState
from pslite.storage.checkpoints import Saver

#: the longest time between two readings of the control connection, in seconds
_LOOK_SECONDS = 0.2


class Server:
    """One parameter server of a job.

    Parameters
    ----------
    identity
        who we are, with the job's token.
    coordinator
        host:port of the coordinator.
    host
        the name or address under which workers reach this server.
    say
        takes lines for the user.
    join_timeout
        seconds to reach the coordinator.
    faults
        called at fault points, by tests.

    """

    #: set when the job is known
    _rounds: Rounds

    def __init__(
        self,
        identity: Identity,
        coordinator: str,
        *,
        host: str,
        say: Callable[[str], None],
        join_timeout: float = 60.0,
        faults: FaultHook | None = None,
    ) -> None:
        self._selector = selectors.DefaultSelector()
        self._control = CoordinatorClient(
            identity, coordinator, timeout=join_timeout,
            resumed=lambda: self._steps.report_again(),  # noqa: PLW0108  (they are made below)
        )  # fmt: skip
        self._identity = self._control.identity
        self._state = state = ServerState(identity.task, self._control.send, say, FaultPoints(faults, identity.task))
        self._connections = connections = Connections(
            state, self._selector, self._identity, self._control.job, needed=self._needs, opened=self._queue_result
        )
        # the interface that reaches the coordinator reaches the rest of the job, unless the user says otherwise
        #: host:port on which data is taken
        self.address = f"{host or self._control.own_host}:{connections.port}"
        me = Join(
            host=socket.gethostname(), pid=os.getpid(), address=self.address, local=connections.local, machine=machine()
        )
        state.send(me)
        self._steps = Steps(state)
        self._backups = backups = ReplicaSender(connections.peers, state.pool, state.faults)
        self._replicas = replicas = ReplicaStore(self._steps.apply)
        self._handoff = handoff = Handoff(state, connections, backups, replicas)
        self._failover = Failover(state, connections, backups, replicas, handoff)
        self._frames = Frames(state, connections, backups, replicas, handoff)
        self._handlers: Mapping[type[Message], Callable[..., None]] = {
            Prepare: self._prepare,
            Abort: self._abort,
            Commit: lambda message: state.clock.commit(message.plan),
            PlanDone: self._plan_done,
            TakeOver: self._take_over,
            Census: lambda message: self._failover.count_copies(message, self._frames),
            Promote: self._failover.promote,
            Clip: self._take_factors,
            Trust: self._take_factors,
            DigestRequest: self._send_digests,
            Exit: self._exit,
            RollBack: _roll_back,
            JobEnded: _job_ended,
            Refused: self._refused,
        }
        self._beaten = self._looked = time.monotonic()
        #: what other threads have done
        self._done: queue.SimpleQueue[PreparedPlan | Link | Nack | Saved | NotSaved] = queue.SimpleQueue()
        #: plans that were given up, perhaps while they were prepared
        self._given_up: set[int] = set()
        self._wake_out, self._wake_in = socket.socketpair()
        self._status: int | None = None
        self._closed = False

    # --- loop -----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until the job ends or this server is drained; return the exit status.

        Raises
        ------
        JobFailed
            the job failed or the coordinator is gone.
        RolledBack
            the job goes back to its newest checkpoint: another server takes the place of this one.

        """
        meter = self._state.meter
        self._wake_out.setblocking(False)
        self._control.watch(self._selector, self._read_control)
        self._selector.register(self._wake_out, selectors.EVENT_READ, self._take_results)
        try:
            # until a coordinator has confirmed all messages of this server
            while self._status is None or not self._control.settled:
                wait = 0 if self._handoff.can_send else min(0.2, self._control.heartbeat)
                meter.end()
                ready = self._selector.select(wait)
                meter.begin()
                for key, mask in ready:
                    if isinstance(key.data, Link):
                        self._connections.serve(key.data, mask, self._frames)
                    else:
                        key.data()
                self._steps.report()
                self._handoff.send()
                self._connections.flush()
                self._heartbeat()
            return self._status
        except JobFailed:
            if self._status is None:
                raise
            return self._status
        finally:
            self._close()

    def sever(self) -> None:
        """Cut every connection at once, as the death of this process would (for tests; from any thread)."""
        self._control.sever()
        self._connections.sever()

    def _close(self) -> None:
        self._finish_checkpoints()
        self._control.flush()
        self._closed = True
        for block in self._state.owned.values():
            if block.arena is not None:
                block.arena.keep()
        self._close_opened()
        self._connections.close()
        for closable in (self._control, self._wake_in, self._wake_out, self._selector):
            closable.close()

    def _heartbeat(self) -> None:
        """Send a heartbeat if one is due, and read the coordinator's messages at least every `_LOOK_SECONDS`."""
        now = time.monotonic()
        if now - self._beaten >= self._control.heartbeat:
            self._beaten = now
            self._state.send(Beat(version=self._state.version, pace=self._state.meter.take()))
        if now - self._looked >= _LOOK_SECONDS:
            self._read_control()
        self._connections.report_broken(self._control)

    def _needs(self, link: Link) -> bool:
        """Whether a connection is needed: it is to a member of the plan in force, and something comes or goes."""
        prepared = self._state.plans.get(self._state.current)
        used = link.role != "ps" or self._handoff.moving or self._connections.peers.get(link.task) is link
        return used and prepared is not None and link.task in prepared.plan.tasks()

    # --- results of other threads ---------------------------------------------------------------------------------

    def _queue_result(self, result: PreparedPlan | Link | Nack | Saved | NotSaved) -> None:
        """Queue a result of another thread (prepared plan, opened connection, written checkpoint) for the loop."""
        self._done.put(result)
        with contextlib.suppress(OSError):
            self._wake_in.send(b"x")
        if self._closed:
            self._close_opened()

    def _close_opened(self) -> None:
        """Close connections that were opened for a plan and never used; from any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                result = self._done.get_nowait()
                if isinstance(result, Link):
                    result.close()

    def _take_results(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(256)
        while not self._done.empty():
            result = self._done.get()
            if isinstance(result, Nack | Saved | NotSaved):
                self._state.send(result)
            elif isinstance(result, Link):
                self._connections.add_peer(result)
            elif result.plan.number not in self._given_up:
                self._take_plan(result)

    def _take_plan(self, prepared: PreparedPlan) -> None:
        number = prepared.plan.number
        self._state.plans[number] = prepared
        self._state.faults.reached(FaultPoint.PLAN_STAGED, prepared.plan)
        self._replicas.expect(prepared.replicas)
        self._state.current = self._state.current or number
        self._state.send(Ready(plan=number))

    def _finish_checkpoints(self) -> None:
        """Write what is begun of a checkpoint, and begin no other."""
        saver, self._state.saver = self._state.saver, None
        if saver is not None:
            saver.close()
            self._take_results()

    # --- messages of the coordinator ------------------------------------------------------------------------------

    def _read_control(self) -> None:
        if self._state.faults.reached(FaultPoint.READ_CONTROL):
            return
        self._looked = time.monotonic()
        for message in self._control.look():
            if self._state.faults.reached(FaultPoint.MESSAGE, message):
                continue
            handler = self._handlers.get(type(message))
            if handler is None:
                raise ProtocolError(f"unexpected {type(message).__name__} from the coordinator")
            handler(message)

    def _prepare(self, message: Prepare) -> None:
        state = self._state
        if not state.known:
            self._begin(message)
        elif message.spec != state.spec:
            self._state.send(Nack(plan=message.plan.number, reason="the job's description has changed"))
            return
        owned, replicas = set(state.owned), set(self._replicas.kept)

        def work() -> None:
            self._queue_result(
                prepare(message, state, owned, replicas, identity=self._identity, connector=self._connections.connector)
            )

        threading.Thread(target=work, name="prepare", daemon=True).start()

    def _begin(self, message: Prepare) -> None:
        """Set up what depends on the job's description, which comes with the first plan."""
        state, spec = self._state, message.spec
        state.begin(spec)
        if spec.checkpoint and not state.sums_only:
            name = f"{self._identity.task}-{self._identity.incarnation[:8]}"
            state.saver = Saver(spec, name, self._queue_result)
        kind = AsynchronousRounds if spec.asynchronous else SynchronousRounds
        self._rounds = self._frames.rounds = self._failover.rounds = kind(
            state, self._connections, self._steps, self._backups, self._handoff
        )

    def _abort(self, message: Abort) -> None:
        self._given_up.add(message.plan)
        self._forget(message.plan)

    def _forget(self, plan: int) -> None:
        self._state.forget(plan)
        self._state.clock.forget(plan)

    def _plan_done(self, message: PlanDone) -> None:
        state, connections, number = self._state, self._connections, message.plan
        before = {task for plan in state.plans_in_force() for task in plan.tasks()}
        for old in [n for n in state.plans if n < number]:
            self._forget(old)
        state.current = state.settled = number
        self._handoff.plan_done(number)
        self._state.clock.passed(number)
        prepared = state.plans[number]
        plan, owned = prepared.plan, list(state.owned.values())
        self._replicas.plan_done(plan.replicas_of(state.task), number)
        named = {block.number: backup.task for block in owned if (backup := plan.backup(block.number)) is not None}
        for block in self._backups.plan_done(owned, named):
            self._rounds.broadcast(block)
        backups = {task for block in owned for task in block.backups}
        members = plan.tasks()
        # a worker in no plan known here may belong to the next one, of which it has been told before this server
        connections.keep_only(peers=backups, links=connections.links.keys() - (before - members))
        connections.forget_broken()
        copies = max(len(plan.workers), len(prepared.expected))
        wanted = [(block.block, copies) for block in owned]
        state.pool.trim(wanted + [(block.block, 1) for block in self._replicas.kept.values()])

    def _take_over(self, message: TakeOver) -> None:
        """Continue without workers that are gone: others push their tree nodes; what they have pushed counts."""
        self._connections.give_up(message.gone)
        if self._state.known:
            self._rounds.workers_lost(message.nodes)
        self._state.send(TakenOver(number=message.number))

    def _take_factors(self, message: Clip | Trust) -> None:
        if self._state.known:
            self._rounds.take_factors(message)

    def _send_digests(self, message: DigestRequest) -> None:  # noqa: ARG002
        blocks = {number: hashlib.sha256(block.weights).digest() for number, block in self._state.owned.items()}
        self._state.send(Digests(blocks=blocks))

    def _exit(self, message: Exit) -> None:
        self._state.say(message.reason)
        self._finish_checkpoints()
        self._state.send(Leave())
        self._status = 0

    def _refused(self, message: Refused) -> None:
        raise JobFailed(f"the coordinator refused {self._identity.task}: {message.reason}")


def _roll_back(message: RollBack) -> None:
    raise RolledBack(message.reason)


def _job_ended(message: JobEnded) -> None:
    raise JobFailed(message.reason)
