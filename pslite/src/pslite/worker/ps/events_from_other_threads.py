"""What other threads of a worker hand to the thread of its script, and what that does with each kind."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from pslite.errors import ProtocolError, PsliteError, Unreachable, UsageError
from pslite.fault_points import FaultPoint, FaultPoints
from pslite.net.messages import (
    Abort,
    AssignSamples,
    BarrierOpen,
    Begin,
    Complete,
    FromCoordinator,
    Message,
    Nack,
    PlanDone,
    Prepare,
    Promote,
    Ready,
    Reassign,
    Seat,
)
from pslite.net.tensor_frames import Link
from pslite.worker.progress_reports import Progress
from pslite.worker.ps.data_connections import DataPlane
from pslite.worker.ps.initial_state import InitialState
from pslite.worker.ps.known_plans import PlanTable, PreparedPlan
from pslite.worker.ps.model_buffers import ModelBuffers
from pslite.worker.ps.recovery_from_server_loss import Recovery

#: messages that the script's thread takes up; connections and prepared plans come from threads that make them
Event = (
    PreparedPlan | Link | Abort | Begin | Reassign | Promote | PlanDone | Seat | BarrierOpen | Complete
    | AssignSamples
)  # fmt: skip


@dataclass(eq=False)
class ControlEvents:
    """Queue of events, filled by any thread and emptied by the script's, mostly while that waits."""

    _plans: PlanTable
    _progress: Progress
    #: takes messages for the coordinator
    _send: Callable[[Message], None]
    #: handles what other threads have queued, in the script's thread
    _check: Callable[[], None]
    _faults: FaultPoints
    #: connections go there; set before anything is opened
    plane: DataPlane = field(init=False)
    #: set as soon as it is known what is trained
    model: ModelBuffers = field(init=False)
    initial: InitialState = field(init=False)
    recovery: Recovery = field(init=False)
    #: rank and number of workers before there is a plan
    seat: tuple[int, int] | None = None
    barriers_open: int = 0
    #: whether others have trained while this worker was at the last barrier
    missed_steps: bool = False
    #: the last answer to a question for samples
    samples: AssignSamples | None = None
    #: the worker that writes files, once all have the last version
    chief: str = ""
    #: the last plan that all members have moved to, until this worker is in it too
    _done_plan: int = 0
    _queue: queue.SimpleQueue[Event] = field(default_factory=queue.SimpleQueue)
    _closed: bool = False

    # --- any thread -----------------------------------------------------------------------------------------------

    def hear(self, message: FromCoordinator) -> None:
        """Take a message of the coordinator."""
        if isinstance(message, Prepare):
            threading.Thread(target=self._prepare, args=(message,), name="pslite-prepare", daemon=True).start()
        elif isinstance(message, Event):
            self._queue.put(message)
        else:
            raise ProtocolError(
                f"the coordinator sent {type(message).__name__}, a message that no worker of a job with servers accepts"
            )

    def wake(self) -> None:
        """Make the script's thread look at what there is."""
        self.plane.wake()

    def waits_for(self) -> tuple[str, ...]:
        """Return the servers whose blocks are missing."""
        plans, progress = self._plans, self._progress
        with contextlib.suppress(RuntimeError):  # they are coming in
            missing = progress.missing if plans.current is not None else ()
            return tuple({plans.owner_at(number, progress.awaited) for number in missing} - {""})
        return ()

    def put(self, event: PreparedPlan | Link) -> None:
        """Hand over what was prepared or opened."""
        self._queue.put(event)
        self.wake()
        if self._closed:
            self.discard()

    def _prepare(self, message: Prepare) -> None:
        """Open the connections that a plan needs; runs beside the computation."""
        plan, previous = message.plan, message.previous
        try:
            self._faults.reached(FaultPoint.PREPARE, plan)
            if not message.spec.extends(self.model.spec):
                raise UsageError("the plan's job description differs from that of this worker's script")
            self.plane.reach({m.task: m for p in (plan, previous) if p is not None for m in p.servers}.values())
            self._faults.reached(FaultPoint.PREPARED, plan)
        except (PsliteError, ValueError) as error:
            # the connections that are made stay: the plan that is tried next probably needs them
            about = error.task if isinstance(error, Unreachable) else ""
            self._send(Nack(plan=plan.number, reason=str(error) or type(error).__name__, about=about))
            return
        self.put(PreparedPlan(plan, previous, message.spec))
        self._send(Ready(plan=plan.number))

    # --- the script's thread --------------------------------------------------------------------------------------

    def wait(self, done: Callable[[], bool], *, patient: bool = False) -> None:
        """Move frames and take up events until `done`.

        `patient` where others of an open job may want the same when its first worker has ended.
        """
        progress = self._progress
        computed, progress.computes, progress.patient = progress.computes, False, patient
        try:
            self.plane.pump(done, self._check)
        finally:
            progress.patient = False
        progress.computes = computed

    def take_all(self) -> None:
        """Take up all events that there are."""
        while not self._queue.empty():
            self._take(self._queue.get())
        done, plan = self._done_plan, self._plans.current
        if done and plan is not None and plan.number == done:
            self._done_plan = 0
            self.plane.close_unused(self._plans.settle(done))

    def discard(self) -> None:
        """Close connections that were opened and are not needed."""
        with contextlib.suppress(queue.Empty):
            while True:
                event = self._queue.get_nowait()
                if isinstance(event, Link):
                    event.close()

    def close(self) -> None:
        """Take nothing more, and close all connections."""
        self._closed = True
        self.discard()
        self.plane.close()

    def _take(self, event: Event) -> None:
        match event:
            case PreparedPlan():
                self._prepared(event)
            case Link():
                if self.plane.adopt(event):
                    self.recovery.reconnected(event.task)
            case Abort():
                # its connections stay: the plan that is tried next probably needs them
                self._plans.give_up(event.plan)
            case Begin():
                self._faults.reached(FaultPoint.FIRST_WEIGHTS)
                self.initial.begin(event.plan, event.checkpoint)
            case Reassign():
                # in async mode a dead worker's samples are left out until a plan gives them to others
                self._plans.lose_workers(event.gone, {} if self.model.spec.asynchronous else event.nodes)
            case Promote():
                self.recovery.follow(event)
            case PlanDone():
                self._done_plan = event.plan
            case Seat():
                self.seat = event.rank, event.workers
            case BarrierOpen():
                self.barriers_open += 1
                self.missed_steps = event.missed_steps
            case AssignSamples():
                self.samples = event
            case Complete():
                self.chief = event.chief

    def _prepared(self, prepared: PreparedPlan) -> None:
        if self._plans.add(prepared):
            if prepared.spec != self.model.known_spec:
                added = self.model.prepare(prepared.spec)
                self.recovery.forget_beyond(added.start)
                self.initial.expect(added)
            self._faults.reached(FaultPoint.PLAN_KNOWN, prepared.plan)
            self.plane.reopen_missing()
