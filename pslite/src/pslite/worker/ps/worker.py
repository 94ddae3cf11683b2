"""The worker's side of an elastic job.

The user's thread computes and exchanges; a second thread keeps the control connection, answers heartbeats while the
first one computes, and opens what a coming plan needs.  Taking a new plan into use is then a matter of looking it up.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import queue
import selectors
import socket
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pslite.errors import PeerLost, ProtocolError, PsliteError, Unreachable, UsageError
from pslite.fault_points import FaultHook, FaultPoint
from pslite.job.blocks import Block, cut
from pslite.job.plan import Member, Plan
from pslite.job.spec import JobSpec
from pslite.net.authentication import Identity
from pslite.net.data_frames import (
    AGAIN,
    FETCH,
    FIRST_STATE,
    INIT,
    MAX_REGIONS,
    PARAM,
    PARAM_ROWS,
    PUSH,
    REGION,
    RESTORE,
    WHOLE,
    WRONG_OWNER,
    Header,
    Link,
    region_header,
)
from pslite.net.framing import cut_off
from pslite.net.messages import (
    Abort,
    AtBarrier,
    BarrierOpen,
    Begin,
    Complete,
    Describe,
    Digests,
    Finished,
    FromCoordinator,
    Join,
    Nack,
    PlanDone,
    Prepare,
    Promote,
    Pushed,
    Ready,
    Restored,
    Resume,
    Seat,
    Severed,
    TakeOver,
)
from pslite.net.messages import (
    Drained as DrainedMessage,
)
from pslite.net.server_connections import ServerConnections
from pslite.net.shared_memory import MappedMemory
from pslite.numeric.gradient_encoding import Encoding, encoding_of, wire_bytes
from pslite.numeric.gradients import Array, Bundle, Contribution, Supply
from pslite.numeric.optimizers import slots
from pslite.numeric.sparse_rows import checked_length, parse
from pslite.storage.checkpoints import Checkpoint, Saver, to_resume
from pslite.worker.control_connection import Membership
from pslite.worker.model_replica import Replica
from pslite.worker.script_process import Host
from pslite.worker.session import Given, Share, Stopwatch

#: how long a broken data connection may take to be there again, or the coordinator to say why it will not
_VERDICT_SECONDS = 10.0
#: what the user's thread has to hear when others are gone
_Told = TakeOver | Promote | Begin


@dataclass(frozen=True)
class _Stage:
    """A plan that this worker has made ready for."""

    plan: Plan
    previous: Plan | None


class Worker(Membership):
    """One worker of an elastic job; see `pslite.worker.session.Session`.

    Parameters
    ----------
    identity
        who we are, with the job's token.
    coordinator
        host:port of the coordinator.
    spec
        the job as this worker's script describes it; must equal the other workers'.  None: `describe` gives it later.
    say
        takes lines for the user.
    join_timeout
        seconds to reach the coordinator.
    process
        what we live in; None for a process that runs one script.
    faults
        called at fault points, by tests.

    """

    def __init__(
        self,
        identity: Identity,
        coordinator: str,
        spec: JobSpec | None,
        *,
        say: Callable[[str], None],
        join_timeout: float = 60.0,
        process: Host | None = None,
        faults: FaultHook | None = None,
    ) -> None:
        super().__init__(
            identity, coordinator, spec, say=say, join_timeout=join_timeout, process=process, faults=faults
        )
        self.blocks: tuple[Block, ...] = ()
        #: for weights of even and of odd versions: a step can be done over until all of the next one are here
        #: for sums instead, where the workers update: they have the state of all blocks, which the first of them saves
        self._bundles: tuple[Bundle, Bundle]
        self._replica: Replica | None = None
        self._saver: Saver | None = None
        self._sent_state = 0
        self.weights: Bundle
        self.share: Share
        self._encoding: Encoding | None = None
        #: whether there was a plan before the one we came with
        self.late = False
        self._described = False
        if spec is not None:
            self.describe(spec)
        # the user's thread
        self._links: dict[str, Link] = {}
        self._selector = selectors.DefaultSelector()
        self._writing: set[Link] = set()
        self._plan: Plan | None = None
        self._source: Plan | None = None
        self._first = 0
        #: number of the last bundle of gradients whose memory is shared, and numbers of those that a server knows
        self._places = 0
        self._shown: dict[Link, set[int]] = {}
        #: rows that are coming in
        self._rows: dict[Link, bytearray] = {}
        self._stages: dict[int, _Stage] = {}
        #: plans that were given up, perhaps while they were made ready
        self._given_up: set[int] = set()
        self._stamp: tuple[int, int] | None = None
        self._missing: set[int] = set()
        self._awaited = -1
        #: by plan, nodes of workers that are gone which we push beside our own
        self._extra: dict[int, tuple[int, ...]] = {}
        self._gone: frozenset[str] = frozenset()
        #: nodes of this step that are pushed, and those that the next call of `exchange` has to bring
        self._pushed: set[int] = set()
        #: what was pushed in this step, for servers that take the place of others
        self._sent: list[Contribution] = []
        #: servers whose connections have ended, and those that refused a push: since when, until it is known why
        self._unheard: dict[str, tuple[float, str]] = {}
        #: those whose connections have ended, and are opened again
        self._severed: set[str] = set()
        self._spare = bytearray()
        #: over which there comes a frame that is for nothing
        self._passed_over: set[Link] = set()
        self._due: tuple[int, ...] = ()
        self._watch_gate = Stopwatch()
        self._suspensions: list[float] = []
        self._report_first_push = False
        self._was_member = False
        self._leaving = False
        self._finished: bool | None = None
        # shared with the control thread
        self._staged: queue.SimpleQueue[_Stage | Link | _Told | int] = queue.SimpleQueue()
        self._closed = False
        self._dialer = ServerConnections(self._hand_in, self._faults)
        self._resumed = 0
        self._done_plan = 0
        #: who writes files, once all have the last version
        self._chief = ""
        self._seat: tuple[int, int] | None = None
        self._barriers_open = 0
        self._barriers = 0
        self._given: Given | Checkpoint | None = None
        #: the last plan that everybody has moved to
        self._settled = 0
        #: the job has begun with weights of ours
        self._began = False
        #: blocks whose optimizer state is on its way to us
        self._fetching: dict[int, Array] = {}
        #: whether the user's thread does something that can be done when the last version is there
        self._patient = False
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._wake_in.setblocking(False)
        self._selector.register(self._wake_out, selectors.EVENT_READ, None)

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the first of the plan in force that is there; does not change after the end."""
        if self._finished is not None:
            return self._finished
        workers = self._plan.workers if self._plan is not None else ()
        first = next((member.task for member in workers if member.task not in self._gone), "")
        return first == self._identity.task

    @property
    def place(self) -> tuple[int, int]:
        """Our rank, and the number of workers: by the plan in force, before the first by the order of coming."""
        if self._plan is None:
            return self._seat or (0, 1)
        there = [member.task for member in self._plan.workers if member.task not in self._gone]
        return there.index(self._identity.task), len(there)

    @property
    def coming(self) -> Bundle:
        """Where the next version's weights will arrive."""
        return self._bundles[(self.version + 1) % 2]

    @property
    def lent(self) -> bool:
        """Whether servers look into bundles, so that they must not be pointed elsewhere."""
        return self.weights.region.fd >= 0 and any(link.local for link in self._links.values())

    # --- joining and leaving --------------------------------------------------------------------------------------

    def describe(self, spec: JobSpec) -> None:
        """Say what is trained, and allocate memory for it."""
        self.spec = spec
        self.blocks = cut(spec)
        self.weights = Bundle(spec, self.blocks)
        self.supply = Supply(spec, self.blocks)
        if spec.update == "server":
            self._bundles = self.weights, Bundle(spec, self.blocks)
        else:
            sums = Bundle(spec, self.blocks)
            self._bundles = sums, sums
            self._replica = Replica(spec, self.blocks, self.weights)
            if spec.checkpoint:
                name = f"{self._identity.task}-{self._identity.incarnation[:8]}"
                self._saver = Saver(spec, name, self._send)
        self.share = Share(spec, 1, 0)
        self._encoding = encoding_of(spec)
        self._described = True

    def attach(self) -> None:
        """Come to the job before it is known what to train; returns when `place` is valid.  Raises as `start` does."""
        self._open()
        self._join(Join(host=socket.gethostname(), pid=os.getpid()))
        self._pump(lambda: self._seat is not None)

    def start(self) -> None:
        """Join the job; returns when the first weights are here.

        Raises
        ------
        AuthenticationError
            the coordinator refused us.
        JobFailed
            the job failed meanwhile.
        Drained
            we are not needed.

        """
        if self._line is None:
            self._open()
            self._join(Join(host=socket.gethostname(), pid=os.getpid(), spec=self.spec))
        else:
            self._send(Describe(spec=self.spec))
        self._missing = set(range(len(self.blocks)))
        self._pump(lambda: not self._missing)
        stage = self._stages[self._plan.number] if self._plan else None
        assert stage is not None
        if self._replica is None:
            self.weights = self._bundles[self._awaited % 2]
        else:
            self._replica.show()
        self.late = stage.previous is not None
        self._enter(stage, self._awaited)
        self._meter.begin()

    def _send_first_weights(self, plan: Plan, checkpoint: int) -> None:
        """We are the chief: the job begins with our weights, or goes on from a checkpoint."""
        self._faults.reached(FaultPoint.FIRST_WEIGHTS)
        self._given = found = self._given or to_resume(self.spec, checkpoint)
        if self._replica is not None:
            self._begin_alone(plan, found)
            return
        self._plan = self._source = plan
        self._awaited, self._began = 0, True
        if found is not None:
            self._awaited = found.version
            self._say(f"the job goes on from version {found.version}: {found.place}")
            self._send(Restored(version=found.version))
        self._send_first_blocks(plan, self._missing)

    def _send_first_blocks(self, plan: Plan, numbers: Collection[int]) -> None:
        """Send servers their blocks; who is not there, or takes its place, is sent all that it lacks later."""
        version, found = self._awaited, self._given
        links = {number: self._links.get(plan.owner(number).task) for number in numbers}
        if found is None:
            for number, link in links.items():
                view = self._bundles[0].views[number]
                if link is not None:
                    link.send(Header(INIT, plan.number, number, 0, view.nbytes, 0, 0), view)
            return
        for block, state in found.states():
            link = links.get(block.number)
            self._bundles[version % 2].views[block.number][:] = state[0].data.cast("B")
            if link is not None:
                whole = state.reshape(-1).data.cast("B")
                link.send(Header(RESTORE, plan.number, block.number, 0, whole.nbytes, version, version), whole)

    def _begin_alone(self, plan: Plan, found: Checkpoint | Given | None) -> None:
        """We have the first state: the other workers get it from us."""
        assert self._replica is not None
        self._plan = self._source = plan
        self._awaited = 0
        if found is None:
            self._replica.begin()
        else:
            self._awaited = found.version
            self._say(f"the job goes on from version {found.version}: {found.place}")
            self._send(Restored(version=found.version))
            self._replica.restore(found)
        self._missing.clear()

    def _send_first_state(self, again: Collection[int] = ()) -> None:
        """Send our state to workers that the plan adds, if that falls to us; they get it at the plan's first version.

        Nobody goes on to the next one without them: so another worker can still do it, should we die.  `again` has the
        blocks whose server is gone, perhaps before it had passed them on.
        """
        plan, replica = self._plan, self._replica
        stage = self._stages.get(plan.number) if plan is not None else None
        if replica is None or plan is None or stage is None or (self._sent_state == plan.number and not again):
            return
        if self.version != self._first or not self._entered:
            return
        old = {m.task for m in stage.previous.workers} if stage.previous else {plan.workers[0].task}
        able = [m.task for m in plan.workers if m.task in old and m.task not in self._gone]
        if all(m.task in old for m in plan.workers) or not able or able[0] != self._identity.task:
            return
        only = again if self._sent_state == plan.number else range(len(self.blocks))
        self._sent_state = plan.number
        for block, state in [(self.blocks[number], replica.states[number]) for number in only]:
            whole = state.reshape(-1).data.cast("B")
            link = self._links.get(plan.owner(block.number).task)
            if link is not None:
                version = self.version
                header = Header(
                    FIRST_STATE, plan.number, block.number, 0, whole.nbytes, version, version, crc=zlib.crc32(whole)
                )  # fmt: skip
                link.send(header, whole)

    def _close(self) -> None:
        self._closed = True
        self._dialer.close()
        self._close_staged()
        for link in list(self._links.values()):
            link.close()
        for closable in (self._selector, self._wake_in, self._wake_out):
            closable.close()

    def _close_staged(self) -> None:
        """Close what was made ready for a plan and not taken into use; from any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._staged.get_nowait()
                if isinstance(item, Link):
                    item.close()

    def sever(self) -> None:
        """Cut every connection at once, as the death of this process would (for tests; from any thread)."""
        self._dialer.close()
        super().sever()
        cut_off([link.sock for link in list(self._links.values())])

    def finish(self) -> None:
        """Say that the last version is reached, and wait until everybody has it: others may need what we have.

        Of an open job nobody knows where it ends: there its workers do not wait for each other.  The control thread
        lives on until the script ends.
        """
        self._faults.reached(FaultPoint.FINISH)
        self._report_progress(force=True)
        chief = self.spec.open and self.is_chief
        if self._replica is not None and (chief or not self.spec.open):
            self._send(Digests(blocks=self._replica.digests()))
        self._send(Finished(version=self.version, suspension_ms=self._suspensions, chief=chief))
        if not self.spec.open:
            self._pump(lambda: bool(self._chief))
            chief = self._chief == self._identity.task
        with self._lock:
            self._finished = chief
        self._severed.clear()
        while not self._staged.empty():
            item = self._staged.get()
            if isinstance(item, Link):
                item.close()
        if self._saver is not None:
            self._saver.close()

    def begin_with(self, given: Given) -> None:
        """Have the job begin with that state, if we are its first worker; call it before `start`."""
        self._given = given

    def barrier(self) -> None:
        """Wait until every worker of the job does."""
        self._barriers += 1
        self._send(AtBarrier())
        self._await(lambda: self._barriers_open >= self._barriers)

    def _may_leave(self) -> bool:
        return self._last < 0 or (self._awaited > self._last and not self._patient)

    def _await(self, done: Callable[[], bool]) -> None:
        """Wait for what others of an open job may want too when its first worker has ended."""
        self._patient = True
        try:
            self._pump(done)
        finally:
            self._patient = False

    def fetch(self) -> list[Array]:
        """Return weights and optimizer state of every block at the present version, as the servers have them.

        Call it between steps: servers cannot go on to the next version without us.  Each has shape (1 + slots, size).
        """
        plan = self._plan
        assert plan is not None
        if self._replica is not None:
            return [state.copy() for state in self._replica.states]
        states = [np.empty((1 + slots(b.optimizer), b.size), dtype=b.dtype) for b in self.blocks]
        self._fetching = dict(enumerate(states))
        self._ask_for(plan, self._fetching)
        self._await(lambda: not self._fetching)
        return states

    def _ask_for(self, plan: Plan, blocks: Iterable[int]) -> None:
        for number in blocks:
            link = self._links.get(plan.owner(number).task)
            if link is not None:
                link.send(Header(FETCH, plan.number, number, 0, 0, self.version, self._first))

    # --- a step ---------------------------------------------------------------------------------------------------

    def exchange(self, contributions: Sequence[Contribution], loss: float, samples: int) -> tuple[int, ...]:
        """Push this step's gradient sums and wait for the next version.

        Parameters
        ----------
        contributions
            one for each node of `share.nodes`; in a further call for the same step, of those that the last returned.
        loss
            sum of the losses of this worker's samples.
        samples
            their number.

        Returns
        -------
        Nodes that a worker has left undone which is gone: to be computed and given to another call.  None where the
        version is complete.

        Raises
        ------
        Drained
            this was our last step.
        JobFailed
            the job failed.

        """
        plan = self._plan
        assert plan is not None
        if {c.node for c in contributions} != set(self._due):
            raise UsageError(f"step {self.version} needs the tree nodes {self._due}")
        self._meter.end()
        self._meter.add(self.share.amount(self._due))
        self._watch_gate.start()
        self._take_staged()
        plan = self._plan  # servers may have taken the place of others
        assert plan is not None
        self._watch_gate.stop()
        if self._report_first_push:
            self._report_first_push = False
            waited = self._watch_gate.total_ms if self._was_member else None
            if waited is not None:
                self._suspensions.append(waited)
            self._send(Pushed(plan=plan.number, suspension_ms=waited))
        self._watch_gate.total_ms = 0.0
        self._sent += contributions
        self._push(plan, contributions, self.blocks)
        self._note_progress(loss, samples)
        self._take_staged()
        if not self._pushed:
            self._missing = set(range(len(self.blocks)))
            self._awaited = self.version + 1
        self._pushed.update(self._due)
        if self._stamp is not None and self._stamp[1] == self.version + 1 and not self._left_undone():
            stage = self._stages[self._stamp[0]]
            if stage.plan.worker_index(self._identity.task) < 0:
                self._leave(stage.plan.number)
        # What was queued is sent before its arrays are used for something else.
        self._pump(
            lambda: not self._missing or bool(self._left_undone() and not any(k.unsent for k in self._links.values()))
        )
        if self._missing:
            self._due = self._left_undone()
            self._meter.begin()
            return self._due
        if self._replica is not None:
            self._replica.apply(self._bundles[0], self.version)
        self.version += 1
        if self._replica is None:
            self.weights = self._bundles[self.version % 2]
        elif self._saver is not None and self.is_chief:
            for block, state in zip(self.blocks, self._replica.states, strict=True):
                self._saver.take(block.number, self.version, state)
        self._pushed.clear()
        self._sent.clear()
        self._note_step()
        self._report_progress()
        if self._stamp is not None and self._stamp[1] == self.version:
            stage = self._stages[self._stamp[0]]
            self._stamp = None
            self._enter(stage, self.version)
        else:
            self._set_share(plan)
        self._meter.begin()
        return ()

    def _left_undone(self) -> tuple[int, ...]:
        """Nodes of this step that fall to us and are not pushed yet."""
        plan = self._plan.number if self._plan is not None else 0
        return tuple(node for node in self._extra.get(plan, ()) if node not in self._pushed)

    def _set_share(self, plan: Plan) -> None:
        """What we do in the coming step: our own part, and what falls to us of others'."""
        self.share = Share(self.spec, len(plan.workers), plan.worker_index(self._identity.task), plan.shares)
        self.share.nodes += self._extra.get(plan.number, ())
        self._due = self.share.nodes

    def _push(self, plan: Plan, contributions: Sequence[Contribution], blocks: Iterable[Block]) -> None:
        next_plan, next_first = self._stamp or (0, 0)
        places = [self._place(contribution.bundle) for contribution in contributions]
        fillers = {fill for fill in (contribution.bundle.fill for contribution in contributions) if fill is not None}
        segment = -1
        for block in blocks:
            link = self._links.get(plan.owner(block.number).task)
            if link is None:
                continue  # its server is gone; who takes its place is sent everything
            length = wire_bytes(self.spec, block)
            if fillers and block.segment != segment:
                segment = block.segment
                for fill in fillers:
                    fill(segment)
            for contribution, place in zip(contributions, places, strict=True):
                bundle = contribution.bundle
                shown = link.local and place and not block.row and self._show(link, place, bundle)
                rows = bundle.rows[block.segment].within(block) if block.row else None
                if rows is not None:
                    length = rows.nbytes
                header = Header(
                    PUSH, plan.number, block.number, contribution.node, block.nbytes if shown else length,
                    self.version, self._first, next_plan, next_first, place=place if shown else 0,
                )  # fmt: skip
                if shown:
                    link.send(header)
                elif rows is not None:
                    link.send(header, *rows.views())
                elif self._encoding is None or length == block.nbytes:
                    link.send(header, bundle.views[block.number])
                else:
                    link.send(header, bundle.packed(block, self._encoding))
                    self._flush(link)  # it travels while the next ones are packed
            if fillers:
                self._flush(link)

    def _place(self, bundle: Bundle) -> int:
        """Return the number of a bundle's shared memory, 0 if it has none."""
        if not bundle.place and bundle.region.fd >= 0 and self._places < MAX_REGIONS:
            self._places += 1
            bundle.place = self._places
        return bundle.place

    def _show(self, link: Link, place: int, bundle: Bundle) -> bool:
        """Have a server know some shared memory."""
        shown = self._shown.setdefault(link, set())
        if place not in shown:
            shown.add(place)
            link.hand(region_header(place), bundle.region.fd)
        return True

    def _enter(self, stage: _Stage, version: int) -> None:
        """Take a plan into use: it rules from `version` on."""
        self._faults.reached(FaultPoint.ENTER_PLAN, stage.plan)
        self._entered = True
        self._was_member = self._plan is not stage.plan
        self._plan = self._source = stage.plan
        self._first = self.version = version
        self._set_share(stage.plan)
        self._report_first_push = True
        self._send_first_state()
        if stage.plan.stop and self._was_member:
            # The way of the DL2 paper, for comparison: stand still at the clock until everything has moved.
            self._watch_gate.start()
            self._pump(lambda: self._resumed >= stage.plan.number)
            self._watch_gate.stop()

    def _leave(self, plan: int) -> None:
        self._pump(lambda: not any(link.unsent for link in self._links.values()))
        self._leaving = True
        self._report_progress(force=True)
        self._send(DrainedMessage(plan=plan))
        self._pump(lambda: False)

    # --- the data plane -------------------------------------------------------------------------------------------

    def _pump(self, done: Callable[[], bool]) -> None:
        """Move bytes in both directions until `done`."""
        while True:
            self._check()
            for link in list(self._links.values()):
                self._flush(link)
            if done():
                return
            self._faults.reached(FaultPoint.WAIT)
            ready = self._selector.select(0.2 if self._unheard else 1.0)
            if any(key.data is None for key, _ in ready):
                # before any frame: it may be of the plan that we have just been made ready for
                with contextlib.suppress(BlockingIOError):
                    self._wake_out.recv(256)
                self._check()
            for key, mask in ready:
                link = key.data
                if link is not None and mask & selectors.EVENT_READ and link.open:
                    reason = ""
                    try:
                        link.receive(self)
                    except PeerLost as error:
                        reason = str(error)
                    if reason:
                        self._lost(link, reason)

    def _flush(self, link: Link) -> None:
        if link.unsent:
            reason = ""
            try:
                link.flush()
            except PeerLost as error:
                reason = str(error)
            if reason:
                self._lost(link, reason)
                return
        if link.unsent != (link in self._writing):
            self._selector.modify(link.sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0), link)
            (self._writing.add if link.unsent else self._writing.discard)(link)

    def _lost(self, link: Link, reason: str) -> None:
        """A server's connection ended: fine if it has left; else it is gone, as we shall hear, or is opened again."""
        self._unlink(link)
        if link.task in self._servers():
            self._sever(link.task, reason)

    def _plans(self) -> list[Plan]:
        """The plans in force, and those to come."""
        stages = self._stages.values()
        before = [stage.previous for stage in stages if stage.previous and stage.plan.number > self._settled]
        return [*before, *(stage.plan for stage in stages)]

    def _servers(self) -> dict[str, Member]:
        """Their servers."""
        return {m.task: m for plan in self._plans() for m in plan.servers if m.task not in self._gone}

    def _sever(self, server: str, reason: str) -> None:
        """A connection is not there that should be: open it again."""
        if not self._leaving:
            self._unheard[server] = time.monotonic(), reason
        self._severed.add(server)
        self._dialer.again(self._servers()[server], self._identity, lambda: server in self._severed)

    def _resume(self, server: str) -> None:
        """A connection is there again: what was on the one before may be lost, in both directions."""
        self._severed.discard(server)
        self._unheard.pop(server, None)
        plan = self._plan
        if plan is not None:
            numbers = plan.blocks_of(server)
            if self._began and not self._entered:
                self._send_first_blocks(plan, self._missing.intersection(numbers))
            self._send_first_state(numbers)
            self._push(plan, self._sent, [self.blocks[number] for number in self._unanswered(numbers)])
            self._ask_for(plan, self._fetching.keys() & set(numbers))
        self._ask_again(self._missing)
        self._faults.reached(FaultPoint.RESUMED, server)

    def _ask_again(self, numbers: Iterable[int]) -> None:
        """Ask whoever may have them for weights that we lack; what they have sent may be lost, or on its way."""
        version = self._awaited if self._entered or self._began else -1
        plans = self._plans()
        for number in numbers:
            for owner in {plan.owner(number).task for plan in plans}:
                link = self._links.get(owner)
                if link is not None:
                    link.send(Header(AGAIN, 0, number, 0, 0, version, 0))

    def _unlink(self, link: Link) -> None:
        if self._links.get(link.task) is link:
            del self._links[link.task]
            self._dialer.lost(link)
        self._writing.discard(link)
        self._shown.pop(link, None)
        self._rows.pop(link, None)
        self._passed_over.discard(link)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(link.sock)
        link.close()

    def _check(self) -> None:
        """Look at what the control thread has heard."""
        super()._check()
        self._take_staged()
        for server, (since, reason) in list(self._unheard.items()):
            if self._line is not None and self._line.late(since, _VERDICT_SECONDS):
                del self._unheard[server]
                self._send(Severed(task=server, reason=reason))

    def _take_staged(self) -> None:
        while not self._staged.empty():
            item = self._staged.get()
            if isinstance(item, TakeOver):
                # in async mode a dead worker's samples are left out until a plan gives them to others
                self._extra = {} if self.spec.asynchronous else item.nodes
                self._gone |= set(item.gone)
                self._send_first_state()
                continue
            if isinstance(item, Promote):
                self._follow(item)
                continue
            if isinstance(item, Begin):
                self._send_first_weights(self._stages[item.plan].plan, item.checkpoint)
                continue
            if isinstance(item, int):
                # its connections stay: the plan that is tried next probably needs them
                self._stages.pop(item, None)
                self._given_up.add(item)
                continue
            if isinstance(item, Link) and item.task in self._gone:
                # others own its blocks: nothing more may come from it, should it live
                self._dialer.lost(item)
                item.close()
                continue
            if isinstance(item, Link):
                old = self._links.get(item.task)
                if old is not None:
                    self._unlink(old)
                self._links[item.task] = item
                self._faults.reached(FaultPoint.CONNECTION_OPENED, item)
                self._selector.register(item.sock, selectors.EVENT_READ, item)
                if item.task in self._severed or (self._plan is not None and item.task in self._plan.tasks()):
                    self._resume(item.task)
                continue
            if item.plan.number not in self._given_up:
                self._stages[item.plan.number] = item
                self._faults.reached(FaultPoint.PLAN_STAGED, item.plan)
                for task in self._servers().keys() - self._links.keys() - self._severed:
                    self._sever(task, f"the connection to {task} ended before its plan had begun")
        done = self._done_plan
        if done and self._plan is not None and self._plan.number == done:
            self._done_plan, self._settled = 0, done
            before = [stage.previous for stage in self._stages.values()]
            before += [self._stages.pop(number).plan for number in [n for n in self._stages if n < done]]
            self._close_unused({member.task for plan in before if plan is not None for member in plan.servers})
            for task in self._severed - self._servers().keys():
                self._severed.discard(task)
                self._unheard.pop(task, None)

    def _follow(self, message: Promote) -> None:
        """Some blocks have other owners: what was pushed to the one before in this step is pushed again."""
        gone, owners = message.gone, message.owners
        for number, stage in self._stages.items():
            self._stages[number] = replace(
                stage,
                plan=stage.plan.without(gone, owners),
                previous=stage.previous and stage.previous.without(gone, owners),
            )
        self._forget(gone)
        self._unheard.clear()
        plan, source = self._plan, self._source
        if plan is not None and source is not None:
            stage = self._stages[plan.number]
            self._plan = stage.plan
            self._source = stage.plan if source.number == plan.number else stage.previous
            self._push(self._plan, self._sent, [self.blocks[number] for number in owners])
            # who is behind has been sent them, but perhaps over a connection that broke
            self._ask_again(owners.keys() & self._missing)
            self._ask_for(self._plan, owners.keys() & self._fetching.keys())
        self._faults.reached(FaultPoint.OWNERS_CHANGED)

    def _unanswered(self, blocks: Iterable[int]) -> list[int]:
        """Those of some blocks of which there is no answer to this step's push."""
        return [block for block in blocks if self._newest(block) <= self.version]

    def _forget(self, gone: Iterable[str]) -> None:
        """Take nothing more from servers that are gone."""
        self._gone |= set(gone)
        self._severed.difference_update(gone)
        for task in gone:
            self._unheard.pop(task, None)
            if task in self._links:
                self._unlink(self._links[task])

    def _newest(self, block: int) -> int:
        """The version of the weights (of the sums, if workers update) that we have of a block; -1 if there are none."""
        if block not in self._missing:
            return self._awaited
        if self._entered:
            return self._awaited - 1
        return self._awaited if self._began else -1

    def _close_unused(self, before: set[str]) -> None:
        """Close connections to servers of plans before that are in no plan any more; others may be in one to come."""
        wanted = {member.task for stage in self._stages.values() for member in stage.plan.servers}
        for task in [task for task in self._links if task in before - wanted]:
            self._unlink(self._links[task])

    def payload(self, link: Link, header: Header) -> memoryview:
        """Say where the payload of a frame goes: straight into the weights."""
        self._faults.reached(FaultPoint.PAYLOAD, link, header)
        if header.kind in (WRONG_OWNER, AGAIN):
            return memoryview(b"")
        if header.kind == WHOLE and header.block < len(self.blocks):
            return self._fetched(link, header)
        if header.kind == FIRST_STATE and self._replica is not None and header.block < len(self.blocks):
            return self._first_state_of(link, header)
        if header.kind not in (PARAM, PARAM_ROWS) or header.block >= len(self.blocks):
            raise ProtocolError(f"{link.task} sent a frame that does not belong here")
        if self._plan is None:
            stage = self._stages.get(header.plan)
            if stage is None:
                raise ProtocolError(f"{link.task} speaks of plan {header.plan}, which was not prepared")
            self._plan = stage.plan
            self._source = stage.previous or stage.plan
            self._awaited = header.first
        assert self._source is not None
        if header.version <= self._awaited and not self._wants(header):
            # from a server that has taken another one's place; the same bytes as before
            return self._nowhere(link, header)
        if not self._wants(header):
            raise ProtocolError(
                f"{link.task} sent block {header.block} at version {header.version}, awaited is {self._awaited}"
            )
        if header.kind == PARAM:
            return self._bundles[header.version % 2].views[header.block]
        block = self.blocks[header.block]
        if not block.row:
            raise ProtocolError(f"{link.task} sent rows of block {header.block}, which has none")
        self._rows[link] = bytearray(checked_length(block, header.length))
        return memoryview(self._rows[link])

    def _nowhere(self, link: Link, header: Header) -> memoryview:
        """Say where weights go that are not wanted: nor are they when all of them are here, whatever is known then."""
        self._passed_over.add(link)
        block = self.blocks[header.block]
        length = checked_length(block, header.length) if header.kind == PARAM_ROWS else block.nbytes
        if len(self._spare) < length:
            self._spare = bytearray(length)
        return memoryview(self._spare)[:length]

    def _fetched(self, link: Link, header: Header) -> memoryview:
        """Say where the state of a block goes that we have asked for; it may come again, when its owner has changed."""
        if header.block in self._fetching and header.version == self.version:
            wanted: memoryview = self._fetching[header.block].reshape(-1).data.cast("B")
            return wanted
        self._passed_over.add(link)
        block = self.blocks[header.block]
        return memoryview(bytearray((1 + slots(block.optimizer)) * block.nbytes))

    def _first_state_of(self, link: Link, header: Header) -> memoryview:
        """Say where the state of a block goes that another worker sends; a second one is for nothing."""
        assert self._replica is not None
        whole: memoryview = self._replica.states[header.block].reshape(-1).data.cast("B")
        if self._plan is None and header.plan in self._stages:
            self._plan = self._source = self._stages[header.plan].plan
            self._awaited = header.first
        if not self._entered and header.version == self._awaited and header.block in self._missing:
            return whole
        self._passed_over.add(link)
        return memoryview(bytearray(whole.nbytes))

    def _have(self, block: int) -> None:
        """The weights of a block that were awaited are here."""
        self._missing.discard(block)
        take = self._bundles[self._awaited % 2].take
        if take is not None:
            take(self.blocks[block])
        self._faults.reached(FaultPoint.WEIGHTS_HERE, block, self._awaited)

    def _wants(self, header: Header) -> bool:
        return header.version == self._awaited and header.block in self._missing

    def shared(self, link: Link, header: Header) -> None:
        """Take weights that lie in the server's memory, or that memory."""
        if header.kind == REGION:
            if link.role != "ps" or header.place in link.regions or len(link.regions) >= MAX_REGIONS:
                raise ProtocolError(f"{link.task} may not hand over shared memory number {header.place}")
            link.regions[header.place] = MappedMemory(link.descriptor())
            return
        region = link.regions.get(header.place)
        if header.kind != PARAM or region is None:
            raise ProtocolError(f"{link.task} sent a frame that does not belong here")
        view = self.payload(link, header)
        block = self.blocks[header.block]
        if not header.length == view.nbytes == block.nbytes:
            raise ProtocolError(f"{link.task} announced {header.length} bytes, {block.nbytes} are right")
        there = region.array(block, header.node * mmap.PAGESIZE)
        np.copyto(np.frombuffer(view, dtype=there.dtype), there)
        self.arrived(link, header)

    def arrived(self, link: Link, header: Header) -> None:
        """Take a frame whose payload is complete."""
        if self._faults.reached(FaultPoint.FRAME, link, header):
            return
        passed_over = link in self._passed_over
        self._passed_over.discard(link)
        if header.kind == WRONG_OWNER:
            if header.version < self.version or header.block not in self._missing:
                return  # what came twice came late, and has been answered
            text = (
                f"{link.task} refused block {header.block} of step {header.version} under plan {header.plan}: "
                "it does not own it"
            )
            self._unheard[link.task] = time.monotonic(), text
            return
        if header.kind == AGAIN:
            self._send_first_state([header.block])
            return
        if header.kind == WHOLE:
            if not passed_over:
                self._close_to_others(link, header)
                self._fetching.pop(header.block, None)
            return
        if header.kind == FIRST_STATE:
            assert self._replica is not None
            if not passed_over and not self._entered and header.block in self._missing:
                if zlib.crc32(self._replica.states[header.block].reshape(-1).data.cast("B")) != header.crc:
                    raise ProtocolError(f"the state of block {header.block} came damaged through {link.task}")
                self._close_to_others(link, header)
                self._missing.discard(header.block)
            return
        if passed_over or not self._wants(header):
            return
        if header.kind == PARAM_ROWS:
            block = self.blocks[header.block]
            rows = parse(block, memoryview(self._rows.pop(link)))
            array = self._bundles[header.version % 2].arrays[block.segment][block.offset : block.offset + block.size]
            array.reshape(-1, block.row)[rows.numbers] = rows.values
        self._close_to_others(link, header)
        self._have(header.block)
        if header.next_plan:
            self._stamp = (header.next_plan, header.next_first)

    def _close_to_others(self, link: Link, header: Header) -> None:
        """The payload of a frame is here: what another server is sending may not come when it has changed."""
        for other in self._links.values():
            late = other.coming if other is not link else None
            if late is None or (late.block, late.version) != (header.block, header.version):
                continue
            if late.kind == header.kind or {late.kind, header.kind} == {PARAM, PARAM_ROWS}:
                self._passed_over.add(other)
                other.divert()

    # --- the control thread ---------------------------------------------------------------------------------------

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_in.send(b"x")

    def _hear(self, message: FromCoordinator) -> None:
        if isinstance(message, Prepare):
            threading.Thread(target=self._make_ready, args=(message,), name="pslite-prepare", daemon=True).start()
        elif isinstance(message, Abort):
            self._staged.put(message.plan)
        elif isinstance(message, _Told):
            if self._finished is None:
                self._staged.put(message)
        elif isinstance(message, Seat):
            self._seat = message.rank, message.workers
        elif isinstance(message, BarrierOpen):
            self._barriers_open += 1
        elif isinstance(message, Resume):
            self._resumed = message.plan
        elif isinstance(message, PlanDone):
            self._done_plan = message.plan
        elif isinstance(message, Complete):
            self._chief = message.chief
        else:
            raise ProtocolError(f"unexpected {type(message).__name__} from the coordinator")

    def _make_ready(self, message: Prepare) -> None:
        """Open the connections that a plan needs; runs beside the computation."""
        plan, previous = message.plan, message.previous
        try:
            self._faults.reached(FaultPoint.PREPARE, plan)
            if not message.spec.agrees(self.spec):
                raise UsageError("the job's description has changed")
            if message.spec != self.spec:
                self.spec, self.blocks = message.spec, cut(message.spec)
            servers = {m.task: m for p in (plan, previous) if p is not None for m in p.servers}
            for member in servers.values():
                self._dialer.reach(member, self._identity)
            self._faults.reached(FaultPoint.PREPARED, plan)
        except (PsliteError, ValueError) as error:
            # the connections that are made stay: the plan that is tried next probably needs them
            about = error.task if isinstance(error, Unreachable) else ""
            self._send(Nack(plan=plan.number, reason=str(error) or type(error).__name__, about=about))
            return
        self._hand_in(_Stage(plan, previous))
        self._send(Ready(plan=plan.number))

    def _hand_in(self, result: _Stage | Link) -> None:
        """Have the user's thread take what was made ready or opened."""
        self._staged.put(result)
        self._wake()
        if self._closed:
            self._close_staged()
