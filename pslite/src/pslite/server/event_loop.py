"""The parameter server's event loop: handles data frames and the coordinator's messages without waiting for a peer.

Only the preparation of plans (allocating memory, opening connections), the writing of checkpoints and the computation
of digests run in other threads.
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
from pslite.job.job_spec import JobSpec
from pslite.job.thread_stacks import dump_stacks
from pslite.net.authentication import Identity
from pslite.net.coordinator_client import JOIN_SECONDS, CoordinatorClient
from pslite.net.messages import (
    Abort,
    Beat,
    Census,
    Commit,
    DigestRequest,
    Digests,
    DumpStacks,
    Exit,
    Factors,
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
    Reassign,
    Reassigned,
    Refused,
    RollBack,
    Saved,
    Stacks,
)
from pslite.net.tcp_or_unix_socket import machine
from pslite.net.tensor_frames import Link
from pslite.net.wakeup import Wakeup
from pslite.server.async_rounds import AsynchronousRounds
from pslite.server.block_handoff import Handoff
from pslite.server.block_step import StepMaker
from pslite.server.data_connections import Connections
from pslite.server.failover import Failover
from pslite.server.frame_handlers import FrameHandlers
from pslite.server.plan_preparation import prepare
from pslite.server.replication import ReplicaSender, ReplicaStore
from pslite.server.server_state import PreparedPlan, ServerState
from pslite.server.training_rounds import Rounds, SynchronousRounds
from pslite.storage.checkpoint_files import Saver

#: the longest time between two readings of the control connection, in seconds
_CONTROL_SECONDS = 0.2
#: when the server is closed without `Exit`, how long it waits for a checkpoint that is being written, in seconds
_CLOSE_SECONDS = 2.0

#: results of other threads: a prepared plan, why it cannot be prepared, an opened connection, a checkpoint, digests
_Result = PreparedPlan | Nack | Link | Saved | NotSaved | Digests


class Server:
    """One parameter server of a job.

    Parameters
    ----------
    identity
        of this server, with the job's token.
    coordinator
        host:port of the coordinator.
    host
        the name or address under which workers reach this server; "" for the one that it reaches the coordinator from.
    say
        prints a line for the user.
    join_timeout
        seconds to reach the coordinator.
    faults
        called at fault points, by tests.

    Raises
    ------
    PsliteError
        the coordinator cannot be reached, or refuses the server.

    """

    #: set when the job's description is known
    _rounds: Rounds

    def __init__(
        self,
        identity: Identity,
        coordinator: str,
        *,
        host: str,
        say: Callable[[str], None],
        join_timeout: float = JOIN_SECONDS,
        faults: FaultHook | None = None,
    ) -> None:
        self._selector = selectors.DefaultSelector()
        self._control = CoordinatorClient(
            identity, coordinator, timeout=join_timeout,
            resumed=lambda: self._step_maker.send_squares_again(),  # noqa: PLW0108  (`_step_maker` is set below)
        )  # fmt: skip
        self._identity = self._control.identity
        self._state = state = ServerState(identity.task, self._control.send, say, FaultPoints(faults, identity.task))
        self._connections = connections = Connections(
            state, self._selector, self._identity, self._control.job, host or self._control.own_host,
            is_needed=self._is_needed, on_opened=self._queue_result,
        )  # fmt: skip
        #: host:port on which data connections are accepted
        self.address = f"{connections.host}:{connections.port}"
        state.send(
            Join(
                host=socket.gethostname(),
                pid=os.getpid(),
                address=self.address,
                local=connections.unix_socket,
                machine=machine(),
            )
        )
        self._step_maker = StepMaker(state)
        self._replica_sender = ReplicaSender(connections.opened, state.pool, state.faults)
        self._replica_store = ReplicaStore(self._step_maker.apply)
        self._handoff = Handoff(state, connections, self._replica_sender, self._replica_store)
        parts = state, connections, self._replica_sender, self._replica_store, self._handoff
        self._failover = Failover(*parts)
        self._frames = FrameHandlers(*parts)
        self._handlers: Mapping[type[Message], Callable[..., None]] = {
            Prepare: self._prepare,
            Abort: self._abort,
            Commit: lambda message: state.activation.commit(message.plan),
            PlanDone: self._plan_completed,
            Reassign: self._reassign,
            Census: lambda message: self._failover.report_copies(message, self._frames),
            Promote: self._failover.promote,
            Factors: self._take_factors,
            DigestRequest: self._send_digests,
            DumpStacks: self._dump_stacks,
            Exit: self._exit,
            RollBack: _roll_back,
            JobEnded: _job_ended,
            Refused: self._refused,
        }
        #: times (monotonic, seconds) of the last heartbeat and of the last reading of the control connection
        self._beat_at = self._control_read_at = time.monotonic()
        self._results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
        #: numbers of plans that the coordinator has aborted; one may still be in preparation
        self._aborted: set[int] = set()
        #: wakes the selector when another thread queues a result
        self._wakeup = Wakeup(self._selector, self._take_results)
        #: whether `Exit` has arrived
        self._exiting = False
        #: exit status; None until the last checkpoint is written
        self._status: int | None = None
        self._closed = False

    # --- loop -----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until the job ends or this server leaves it; return the exit status.

        Raises
        ------
        JobFailed
            the job failed, or the coordinator cannot be reached any more.
        RolledBack
            the job goes back to its newest checkpoint, which a new server joins.

        """
        meter = self._state.meter
        self._control.watch(self._selector, self._read_control)
        try:
            steps_wait = False
            # even after `Exit`, until the coordinator has confirmed all messages of this server
            while self._status is None or not self._control.settled:
                wait = 0 if steps_wait or self._handoff.can_send() else min(_CONTROL_SECONDS, self._control.heartbeat)
                meter.end()  # the time in `select` is not counted as work
                ready = self._selector.select(wait)
                meter.begin()
                for key, mask in ready:
                    if isinstance(key.data, Link):
                        self._connections.serve(key.data, mask, self._frames)
                    else:
                        key.data()
                steps_wait = self._continue_steps()
                self._step_maker.send_squares()
                self._handoff.send()
                self._connections.flush()
                self._leave_when_saved()
                self._do_what_is_due()
            return self._status
        except JobFailed:
            if self._status is None:
                raise
            return self._status  # this server had left: the coordinator may have ended before it confirmed the messages
        finally:
            self._close()

    def _close(self) -> None:
        if self._state.saver is not None:
            self._state.saver.close(_CLOSE_SECONDS)
            self._take_results()
        self._control.flush()
        self._closed = True
        for block in self._state.owned.values():
            if block.arena is not None:
                block.arena.keep()  # workers may still have to read the last weights in it
        self._close_unused()
        self._connections.close()
        for closable in (self._control, self._selector, self._wakeup):
            closable.close()

    def _do_what_is_due(self) -> None:
        """Send a heartbeat if one is due, check timeouts, and read messages at least every `_CONTROL_SECONDS`.

        The selector reports the control connection, too, but not what has been received and is not read yet.
        """
        now = time.monotonic()
        if now - self._beat_at >= self._control.heartbeat:
            self._beat_at = now
            self._state.send(Beat(version=self._state.version, pace=self._state.meter.take()))
        if now - self._control_read_at >= _CONTROL_SECONDS:
            self._read_control()
        self._connections.check_timeouts(self._control)

    def _continue_steps(self) -> bool:
        """Continue steps whose factors have come, for a moment; return whether more of them wait."""
        return self._state.has_spec and self._rounds.continue_steps()

    def _is_needed(self, link: Link) -> bool:
        """Return whether a connection is needed: its peer is a member of a plan that is in use here.

        A plan is in use if a block has entered it, or if it is the oldest known plan: the completed one or, until there
        is one, the first plan of this server.  A connection with a server is needed only if this server opened it, or
        while blocks move.
        """
        plans = self._state.plans
        if link.role == "ps" and not self._handoff.moving and self._connections.opened.get(link.task) is not link:
            return False
        oldest = min(plans, default=0)
        return any(
            link.task in prepared.plan.tasks()
            for number, prepared in plans.items()
            if number == oldest or prepared.entered_at
        )

    # --- results of other threads ---------------------------------------------------------------------------------

    def _queue_result(self, result: _Result) -> None:
        """Queue a result for the loop; called by other threads."""
        self._results.put(result)
        self._wakeup.wake()
        if self._closed:
            self._close_unused()

    def _close_unused(self) -> None:
        """Close opened connections that the loop has not taken; may be called in any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                result = self._results.get_nowait()
                if isinstance(result, Link):
                    result.close()

    def _take_results(self) -> None:
        self._wakeup.clear()
        while not self._results.empty():
            result = self._results.get()
            if isinstance(result, Nack | Saved | NotSaved | Digests):
                self._state.send(result)
            elif isinstance(result, Link):
                self._connections.add_opened(result)
            elif result.plan.number not in self._aborted:
                self._take_prepared(result)

    def _take_prepared(self, prepared: PreparedPlan) -> None:
        number = prepared.plan.number
        self._state.plans[number] = prepared
        self._state.faults.reached(FaultPoint.PLAN_KNOWN, prepared.plan)
        self._replica_store.expect(prepared.replicas)
        self._state.send(Ready(plan=number))

    def _leave_when_saved(self) -> None:
        """Leave the job, once the checkpoint in progress is written."""
        saver = self._state.saver
        if self._exiting and self._status is None and (saver is None or saver.done):
            self._take_results()
            self._state.send(Leave())
            self._status = 0

    # --- messages of the coordinator ------------------------------------------------------------------------------

    def _read_control(self) -> None:
        if self._state.faults.reached(FaultPoint.READ_CONTROL):
            return
        self._control_read_at = time.monotonic()
        for message in self._control.look():
            if self._state.faults.reached(FaultPoint.MESSAGE, message):
                continue
            handler = self._handlers.get(type(message))
            if handler is None:
                raise ProtocolError(f"the coordinator sent {type(message).__name__}, a message that no server accepts")
            handler(message)

    def _prepare(self, message: Prepare) -> None:
        state = self._state
        if not state.has_spec:
            self._set_spec(message.spec)
        elif message.spec != state.spec and message.spec.without_late().agrees(state.spec.without_late()):
            # It differs in keys that were added during the training (late segments), or that an aborted plan would have
            # added.
            state.set_spec(message.spec)
        elif message.spec != state.spec:
            self._state.send(Nack(plan=message.plan.number, reason="the job's description differs from the first one"))
            return
        owned, replicas = set(state.owned), set(self._replica_store.kept)

        def run() -> None:
            self._queue_result(
                prepare(
                    message, owned, replicas, identity=self._identity, connector=self._connections.connector,
                    pool=state.pool, faults=state.faults,
                )
            )  # fmt: skip

        threading.Thread(target=run, name="prepare", daemon=True).start()

    def _set_spec(self, spec: JobSpec) -> None:
        """Create what depends on the job's description, which arrives with the first plan."""
        state = self._state
        state.set_spec(spec)
        if spec.checkpoint:
            name = f"{self._identity.task}-{self._identity.incarnation[:8]}"
            state.saver = Saver(
                spec, name, self._queue_result, lambda: state.faults.reached(FaultPoint.DISK, "checkpoint")
            )
        rounds = AsynchronousRounds if spec.asynchronous else SynchronousRounds
        self._rounds = rounds(state, self._connections, self._step_maker, self._handoff)
        self._frames.rounds = self._failover.rounds = self._rounds

    def _abort(self, message: Abort) -> None:
        self._aborted.add(message.plan)
        self._drop_plan(message.plan)

    def _drop_plan(self, plan: int) -> None:
        self._state.drop_plan(plan)
        self._state.activation.forget_plan(plan)

    def _plan_completed(self, message: PlanDone) -> None:
        """Drop everything that belongs to the plans before one to which all members have moved."""
        state, connections, number = self._state, self._connections, message.plan
        former_members = {task for plan in state.known_plans() for task in plan.tasks()}
        # plans and their announcements
        for earlier in [n for n in state.plans if n < number]:
            self._drop_plan(earlier)
        state.completed_plan_number = number
        state.activation.forget_announcement(number)
        prepared = state.plans[number]
        plan, owned = prepared.plan, list(state.owned.values())
        # replicas here, and backups of the blocks here
        self._replica_store.plan_completed(plan.replicas_of(state.task), number)
        backups = {block.number: server.task for block in owned if (server := plan.backup(block.number)) is not None}
        for block in self._replica_sender.plan_completed(owned, backups):
            self._rounds.answer_workers(block)
        # Connections. A member that is in no known plan stays connected: it may belong to the next one, which has not
        # arrived here.
        no_members = former_members - plan.tasks()
        connections.keep_only(
            opened={task for block in owned for task in block.backups},
            accepted=connections.accepted.keys() - no_members,
        )
        connections.forget_broken()
        # Buffers: for the gradient of each worker, or each tree node where a worker pushes several, and for a step of
        # each replica.
        gradients = max(len(plan.workers), len(prepared.pushers))
        needed = [(block.definition, gradients) for block in owned]
        state.pool.trim(needed + [(block.definition, 1) for block in self._replica_store.kept.values()])

    def _reassign(self, message: Reassign) -> None:
        """Continue without workers that have died or wait at a barrier: others push their nodes."""
        self._connections.drop_dead(message.gone)
        self._state.away = frozenset(message.away)
        if self._state.has_spec:
            self._rounds.continue_without(message.nodes)
        self._state.send(Reassigned(number=message.number))

    def _take_factors(self, message: Factors) -> None:
        if self._state.has_spec:
            self._rounds.take_factors(message)

    def _send_digests(self, message: DigestRequest) -> None:  # noqa: ARG002
        """Compute the digests of all blocks in a thread of its own: of large models it takes longer than the lease."""
        weights = {number: block.weights for number, block in self._state.owned.items()}

        def run() -> None:
            self._state.faults.reached(FaultPoint.DIGEST)
            blocks = {number: hashlib.sha256(data).digest() for number, data in weights.items()}
            self._queue_result(Digests(blocks=blocks))

        threading.Thread(target=run, name="digests", daemon=True).start()

    def _dump_stacks(self, message: DumpStacks) -> None:  # noqa: ARG002
        dump_stacks()
        waits_for = tuple(sorted(self._rounds.waits_for())) if self._state.has_spec else ()
        self._state.send(Stacks(waits_for=waits_for))

    def _exit(self, message: Exit) -> None:
        self._state.say(message.reason)
        self._exiting = True
        if self._state.saver is not None:
            self._state.saver.finish()

    def _refused(self, message: Refused) -> None:
        raise JobFailed(f"the coordinator refused {self._identity.task}: {message.reason}")


def _roll_back(message: RollBack) -> None:
    raise RolledBack(message.reason)


def _job_ended(message: JobEnded) -> None:
    raise JobFailed(message.reason)
