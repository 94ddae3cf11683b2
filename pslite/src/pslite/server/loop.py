"""The parameter server: owns blocks, sums gradients, applies the optimizer, answers with the new weights.

One thread and one poll loop; nothing in it waits for a peer.  Only making a plan ready (allocating memory and
connecting) is done by a second thread, so that answers to workers go on meanwhile.
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
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from pslite.errors import JobFailed, PeerLost, ProtocolError, PsliteError, RolledBack, Unreachable
from pslite.fault_points import FaultHook, FaultPoint, FaultPoints
from pslite.job.blocks import Block, cut
from pslite.job.measurements import ThroughputMeter
from pslite.job.plan import Plan, Reduction, holders_of, reduction
from pslite.job.spec import LAMB, JobSpec, Sum
from pslite.net.authentication import Acceptor, Identity
from pslite.net.coordinator_client import CoordinatorClient
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
    REPLICATE,
    REPLICATED,
    RESTORE,
    SEED,
    SEEDED,
    STATE,
    STATE_ACK,
    WHOLE,
    WRONG_OWNER,
    Header,
    Link,
    region_header,
)  # fmt: skip
from pslite.net.framing import cut_off
from pslite.net.handshake_listener import HandshakeListener
from pslite.net.messages import (
    Abort,
    Beat,
    Census,
    Clip,
    Commit,
    Copies,
    DigestRequest,
    Digests,
    Exit,
    Failed,
    FromCoordinator,
    Hello,
    JobEnded,
    Join,
    Leave,
    Moved,
    Nack,
    Norm,
    NotSaved,
    PlanDone,
    Prepare,
    Promote,
    Promoted,
    Ready,
    Refused,
    RollBack,
    Saved,
    Severed,
    Stamped,
    TakenOver,
    TakeOver,
    Trust,
)
from pslite.net.server_connections import ServerConnections
from pslite.net.shared_memory import Arena, Layout, MappedMemory
from pslite.net.transport import machine, open_listeners, tune
from pslite.numeric.gradient_encoding import Encoding, encoding_of, narrow, wire_bytes
from pslite.numeric.norms import Squares, Tensors
from pslite.numeric.optimizers import Updater, slots, square_norm
from pslite.numeric.sparse_rows import Rows, checked_length, parse
from pslite.server.block_state import Array, BufferPool, Holding
from pslite.server.replication import Guards, Replicas, Step
from pslite.storage.checkpoints import Saver

#: seconds after which the coordinator is told of a broken data connection to a member that it has not given up
_BROKEN_SECONDS = 3.0
#: the longest time between two looks at the control connection
_LOOK_SECONDS = 0.2
#: frames of state queued at a time: moving gives way to answering workers
_STATE_WINDOW = 2
#: highest number of shared memory
_MOST_PLACE = (1 << 16) - 1


#: what gradients are multiplied by, and for LAMB how many elements' updates by what
Scales = tuple[float, tuple[tuple[int, float], ...]]
#: in place of the worker that pushes a tree node: any of the plan, for its own is gone
_ANYBODY = ""


@dataclass
class _Stage:
    """A plan that this server has made ready for."""

    plan: Plan
    previous: Plan | None
    reduction: Reduction
    #: tree node -> the worker that pushes it
    expected: dict[int, str]
    gained: dict[int, Holding]
    #: workers that the plan adds
    newcomers: set[str]
    #: memory for replicas that we have not kept so far
    replicas: dict[int, Holding]
    #: tree nodes of workers that are gone, which nobody pushes in async mode
    left_out: set[int] = field(default_factory=set)
    moved_bytes: int = 0
    reported: bool = False
    began: float = 0.0


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
        self._identity = identity
        self._say = say
        self._faults = FaultPoints(faults, identity.task)
        self._selector = selectors.DefaultSelector()
        self._control = CoordinatorClient(identity, coordinator, timeout=join_timeout, resumed=self._tell_norms_again)
        self._job = self._control.job
        self._identity = self._control.identity
        # the interface that reaches the coordinator reaches the rest of the job, unless the user says otherwise
        listeners, local = open_listeners()
        #: host:port on which data is taken
        self.address = f"{host or self._control.own_host}:{listeners[0].getsockname()[1]}"
        self._control.send(
            Join(host=socket.gethostname(), pid=os.getpid(), address=self.address, local=local, machine=machine())
        )
        self._beaten = self._looked = time.monotonic()
        self._doorways = [
            HandshakeListener(self._selector, listener, acceptor=self._acceptor, welcome=self._welcome, say=say)
            for listener in listeners
        ]
        #: data connections that workers and servers opened to us
        self._links: dict[str, Link] = {}
        self._all_links: set[Link] = set()
        self._writing: set[Link] = set()
        self._lost: dict[str, tuple[float, str]] = {}
        #: members that have sent what they must not
        self._unruly: set[str] = set()
        #: workers that the coordinator has said are gone
        self._gone: set[str] = set()
        self._spec: JobSpec | None = None
        self._blocks: tuple[Block, ...] = ()
        self._layout: Layout
        self._tensors: Tensors
        self._exact = True
        self._async = False
        #: workers have weights and optimizer: we add up gradients, and keep nothing
        self._sums_only = False
        #: by block, how gradients travel if in 16 bits, and their lengths
        self._encodings: list[Encoding | None] = []
        self._lengths: list[int] = []
        self._holdings: dict[int, Holding] = {}
        self._stages: dict[int, _Stage] = {}
        self._stamp: tuple[int, int] | None = None
        self._commit = 0
        self._current = 0
        #: the last plan that everybody has moved to
        self._settled = 0
        self._version = 0
        self._updater = Updater()
        self._meter = ThroughputMeter()
        self._pool = BufferPool()
        self._scratch = bytearray()
        self._incoming: dict[Link, Array] = {}
        #: by worker, numbers of our memory that it knows
        self._shown: dict[Link, set[int]] = {}
        #: workers that want whole blocks, or weights that they lack: what of which block they asked for last
        self._asked: dict[tuple[Link, int, int], Header] = {}
        #: connections that we opened to other servers
        self._peers: dict[str, Link] = {}
        self._dialer = ServerConnections(self._hand_in, self._faults)
        self._guards = Guards(self._peers, self._pool, self._faults)
        self._replicas = Replicas(self._apply)
        #: block -> its owners before others died; what they sent until they heard of it comes late
        self._former: dict[int, set[str]] = {}
        self._outgoing: deque[Holding] = deque()
        self._unacknowledged: dict[int, Holding] = {}
        #: whose last sums workers may lack as long as not all have moved to the plan that made them others'
        self._parted: dict[int, Holding] = {}
        #: blocks of which we have said what we have: that stays so until it is said who owns them
        self._counted: set[int] = set()
        self._refused = 0
        #: what other threads have done
        self._done: queue.SimpleQueue[_Stage | Link | Nack | Saved | NotSaved] = queue.SimpleQueue()
        #: plans that were given up, perhaps while they were made ready
        self._given_up: set[int] = set()
        self._saver: Saver | None = None
        #: of blocks whose sums are whole, not told yet, by what they are of
        self._squares: dict[Literal["gradient", "update"], dict[int, Squares]] = {"gradient": {}, "update": {}}
        #: what the coordinator has been told of the last step, by what it is of
        self._told_squares: dict[Literal["gradient", "update"], Norm] = {}
        #: what gradients, and for LAMB the updates of tensors, are multiplied by in the step from a version
        self._clip = -1, 1.0
        self._trust: tuple[int, dict[int, float]] = -1, {}
        self._wake_out, self._wake_in = socket.socketpair()
        self._status: int | None = None
        self._closed = self._severed = False

    # --- loop -----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until the job ends or we are drained; return the exit status.

        Raises
        ------
        JobFailed
            the job failed or the coordinator is gone.
        RolledBack
            the job goes back to its newest checkpoint: another server takes the place of this one.

        """
        register = self._selector.register
        self._wake_out.setblocking(False)
        self._control.watch(self._selector, self._read_control)
        register(self._wake_out, selectors.EVENT_READ, self._take_prepared)
        try:
            # until the coordinator, or the one that takes its place, knows all that we have said
            while self._status is None or not self._control.settled:
                busy = self._may_plant() or self._can_move()
                self._meter.end()
                ready = self._selector.select(0 if busy else min(0.2, self._control.heartbeat))
                self._meter.begin()
                for key, mask in ready:
                    if isinstance(key.data, Link):
                        self._serve(key.data, mask)
                    else:
                        key.data()
                self._tell_norms()
                self._move()
                self._watch()
                self._tick()
            return self._status
        except JobFailed:
            if self._status is None:
                raise
            return self._status
        finally:
            self._close()

    def sever(self) -> None:
        """Cut every connection at once, as the death of this process would (for tests; from any thread)."""
        self._severed = True
        self._control.sever()
        cut_off([link.sock for link in list(self._all_links)])

    def _close(self) -> None:
        if self._saver is not None:
            self._saver.close()
            self._take_prepared()
        self._control.flush()
        self._closed = True
        for holding in self._holdings.values():
            if holding.arena is not None:
                holding.arena.keep()
        self._close_prepared()
        for link in list(self._all_links):
            link.close()
        for doorway in self._doorways:
            doorway.close()
        for closable in (self._control, self._wake_in, self._wake_out, self._selector):
            closable.close()

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._beaten >= self._control.heartbeat:
            self._beaten = now
            self._control.send(Beat(version=self._version, pace=self._meter.take()))
        if now - self._looked >= _LOOK_SECONDS:
            self._read_control()
        for doorway in self._doorways:
            doorway.expire(now)
        for task, (since, reason) in list(self._lost.items()):
            if self._control.late(since, _BROKEN_SECONDS):
                del self._lost[task]
                self._control.send(Severed(task=task, reason=reason))

    def _fail(self, reason: str) -> None:
        self._control.send(Failed(reason=reason))

    # --- strangers ------------------------------------------------------------------------------------------------

    def _acceptor(self) -> Acceptor:
        return Acceptor(
            job=self._job,
            task=self._identity.task,
            incarnation=self._identity.incarnation,
            token=self._identity.token,
            encrypt=self._identity.encrypt or "none",
            channel="data",
            verdict=self._verdict,
        )

    def _verdict(self, hello: Hello) -> str:
        if hello.task in self._gone:
            return f"{hello.task} was given up"
        return "" if hello.channel == "data" else "this is a parameter server: it takes data connections only"

    def _welcome(self, sock: socket.socket, hello: Hello) -> None:
        tune(sock)
        if hello.role == "worker" and hello.task not in self._unruly:
            self._lost.pop(hello.task, None)  # it is there again, and says what it lacks
        self._adopt(Link(sock, hello.task, hello.incarnation, hello.role), incoming=True)

    # --- data connections -----------------------------------------------------------------------------------------

    def _adopt(self, link: Link, *, incoming: bool) -> None:
        if incoming:
            old = self._links.get(link.task)
            if old is not None:
                self._drop(old)
            self._links[link.task] = link
        self._faults.reached(FaultPoint.CONNECTION_OPENED, link)
        self._all_links.add(link)
        self._selector.register(link.sock, selectors.EVENT_READ, link)
        if self._severed:
            cut_off([link.sock])

    def _drop(self, link: Link) -> None:
        if link in self._all_links:
            self._all_links.discard(link)
            self._writing.discard(link)
            self._selector.unregister(link.sock)
            link.close()
            self._shown.pop(link, None)
            buffer = self._incoming.pop(link, None)
            if buffer is not None:
                self._pool.give(buffer)
            for links in (self._links, self._peers):
                if links.get(link.task) is link:
                    del links[link.task]
                    if links is self._peers:
                        self._dialer.lost(link)

    def _serve(self, link: Link, mask: int) -> None:
        if not link.open:
            return
        try:
            if mask & selectors.EVENT_READ:
                link.receive(self)
            if mask & selectors.EVENT_WRITE:
                link.flush()
        except PeerLost as error:
            self._broken(link, str(error))
        except ProtocolError as error:
            self._say(f"closed the connection of {link.task}: {error}")
            self._unruly.add(link.task)
            self._broken(link, f"{link.task} broke the protocol: {error}")

    def _broken(self, link: Link, reason: str) -> None:
        moving = self._unacknowledged or any(stage.gained for stage in self._stages.values())
        guarding = self._peers.get(link.task) is link
        self._drop(link)
        if link.role == "ps" and not moving and not guarding:
            return  # nothing comes or goes over it
        stage = self._stages.get(self._current)
        if stage is not None and link.task in stage.plan.tasks() - self._gone:
            # Its death is the coordinator's to judge, with better words; speak only if nothing comes of that.
            self._lost[link.task] = (time.monotonic(), f"{self._identity.task}: {reason}")

    def _watch(self) -> None:
        """Flush what was queued; ask to hear when a full socket can take more."""
        for link in list(self._all_links):
            if link.unsent:
                try:
                    link.flush()
                except PeerLost as error:
                    self._broken(link, str(error))
                    continue
            if link.unsent != (link in self._writing):
                events = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
                self._selector.modify(link.sock, events, link)
                (self._writing.add if link.unsent else self._writing.discard)(link)

    # --- frames (the Receiver interface) --------------------------------------------------------------------------

    def payload(self, link: Link, header: Header) -> memoryview:
        """Say where the payload of a frame goes."""
        if header.kind == AGAIN and self._spec is None:
            return memoryview(b"")  # the worker has been told sooner than we what the job is: we have nothing
        if header.block >= len(self._blocks):
            raise ProtocolError(f"block {header.block} does not exist")
        block = self._blocks[header.block]
        if header.kind == PUSH and block.row:
            buffer = np.empty(checked_length(block, header.length), dtype=np.uint8)
            if self._judge(link, header) is not None:
                self._incoming[link] = buffer
            return buffer.data
        if header.kind == PUSH:
            if self._judge(link, header) is None:
                return memoryview(self._scratch)[: self._lengths[block.number]]
            encoding = self._encodings[block.number]
            buffer = self._pool.take(block, encoding.dtype if encoding is not None else "")
            self._incoming[link] = buffer
            return buffer.data.cast("B")
        if header.kind in (STATE_ACK, FETCH, REPLICATED, SEEDED, AGAIN):
            return memoryview(b"")
        if header.kind == FIRST_STATE:
            stage = self._stages.get(header.plan)
            if not self._sums_only or stage is None or stage.plan.worker_index(link.task) < 0:
                raise ProtocolError(f"{link.task} sent a state of block {header.block}, for which nobody waits")
            if header.length != (1 + slots(block.optimizer)) * block.nbytes:
                raise ProtocolError(f"{header.length} bytes are no state of block {header.block}")
            self._incoming[link] = np.empty(header.length, dtype=np.uint8)
            return self._incoming[link].data
        if header.kind in (REPLICATE, SEED):
            owns = self._owns(link, header)
            if owns and header.block in self._unacknowledged:
                self._handed_over(header.block)  # the new owner's word comes before its acknowledgement
            holding = self._replicas.find(link, header) if owns else None
            if header.kind == REPLICATE:
                pieces = len(self._tensors.pieces[header.block])
                buffer = self._replicas.buffer(block, header, pieces)
                if holding is not None:
                    self._incoming[link] = buffer
                return buffer.data
            if holding is None:
                return memoryview(bytearray(block.nbytes * (1 + slots(block.optimizer))))
            return holding.whole
        if header.kind in (INIT, RESTORE) and header.block in self._holdings and self._is_first(link, header):
            # sent again, for the connection broke when it had come
            rows = 1 if header.kind == INIT else 1 + slots(block.optimizer)
            self._incoming[link] = np.empty(rows * block.nbytes, dtype=np.uint8)
            return self._incoming[link].data
        if header.kind in (INIT, STATE, RESTORE):
            holding = self._awaited(link, header)
            return holding.weights if header.kind == INIT else holding.whole
        raise ProtocolError(f"a frame of kind {header.kind} does not belong here")

    def arrived(self, link: Link, header: Header) -> None:
        """Take a frame whose payload is complete."""
        if self._faults.reached(FaultPoint.FRAME, link, header):
            return
        if header.kind == PUSH:
            self._pushed(link, header)
        elif header.kind == FIRST_STATE:
            state = self._incoming.pop(link).data
            for task in self._stages[header.plan].newcomers - {link.task}:
                other = self._links.get(task)
                if other is not None:
                    other.send(header, state)
        elif header.kind in (INIT, RESTORE) and self._incoming.pop(link, None) is None:
            holding = self._awaited(link, header)
            self._enter_gained(holding, header)
            self._settle(holding)
            self._guard(holding, given=False)
            self._answer(holding)
            self._report_moved()
        elif header.kind == STATE:
            holding = self._awaited(link, header)
            crc = zlib.crc32(holding.whole)
            if crc != header.crc:
                self._fail(
                    f"block {header.block} came damaged from {link.task}: checksum {crc:08x}, not {header.crc:08x}"
                )
                return
            self._enter_gained(holding, header)
            link.send(Header(STATE_ACK, header.plan, header.block, 0, 0, header.version, header.first))
            self._settle(holding)
            self._guard(holding, given=True)
            if self._async:
                self._apply_staged(holding)
            else:
                self._complete(holding)
            self._report_moved()
        elif header.kind in (FETCH, AGAIN) and self._spec is not None:
            self._asked[link, header.kind, header.block] = header
            self._answer_fetches()
        elif header.kind == STATE_ACK:
            if header.block in self._unacknowledged:
                self._handed_over(header.block)
            elif not self._replicated:
                raise ProtocolError(f"an acknowledgement of block {header.block}, which was not sent")
            self._report_moved()
        elif header.kind == REPLICATE:
            buffer = self._incoming.pop(link, None)
            # the block may have got another owner while its bytes came
            if buffer is not None and self._owns(link, header) and self._replicas.find(link, header) is not None:
                self._replicas.replicated(link, header, buffer)
        elif header.kind == SEED:
            if self._owns(link, header) and self._replicas.find(link, header) is not None:
                self._replicas.seeded(link, header)
                # what an owner before was sending may not come into what is a replica now
                for other in self._all_links - {link}:
                    late = other.coming
                    if late is not None and (late.kind, late.block) == (SEED, header.block):
                        other.divert()
        elif header.kind == REPLICATED:
            free = self._guards.told(link, header)
            if free is not None:
                self._answer(free)
        elif header.kind == SEEDED:
            self._guards.planted(link, header, self._holdings.get(header.block))
            self._report_moved()

    @property
    def _replicated(self) -> bool:
        return self._spec is not None and self._spec.durability == "durable"

    def shared(self, link: Link, header: Header) -> None:
        """Take a gradient that lies in the worker's own memory, or that memory."""
        if header.kind == REGION:
            if link.role != "worker" or header.place in link.regions or len(link.regions) >= MAX_REGIONS:
                raise ProtocolError(f"{link.task} may not hand over shared memory number {header.place}")
            link.regions[header.place] = MappedMemory(link.descriptor())
            return
        region = link.regions.get(header.place)
        if header.kind != PUSH or region is None or header.block >= len(self._blocks):
            raise ProtocolError(f"{link.task} sent a frame that does not belong here")
        block = self._blocks[header.block]
        if header.length != block.nbytes or block.row or region.nbytes != self._layout.nbytes:
            raise ProtocolError(f"{link.task} announced {header.length} bytes in shared memory of {region.nbytes}")
        if self._judge(link, header) is not None:
            # The worker leaves it as it is until it has the next version of every block.
            self._incoming[link] = region.array(block, self._layout.blocks[block.number])
        if not self._faults.reached(FaultPoint.FRAME, link, header):
            self._pushed(link, header)

    def _awaited(self, link: Link, header: Header) -> Holding:
        stage = self._stages.get(header.plan)
        holding = stage.gained.get(header.block) if stage else None
        if stage is None or holding is None or holding.here:
            raise ProtocolError(f"block {header.block} of plan {header.plan} is not awaited here")
        if header.kind in (INIT, RESTORE) and not self._is_first(link, header):
            raise ProtocolError(f"{link.task} may not set initial weights")
        if header.kind == STATE:
            self._owns(link, header)
        return holding

    def _is_first(self, link: Link, header: Header) -> bool:
        """Whether a frame is of the first worker of the first plan, before everybody has moved to that."""
        stage = self._stages.get(header.plan)
        first = stage is not None and stage.previous is None and not self._settled
        return stage is not None and first and stage.plan.workers[0].task == link.task

    def _owns(self, link: Link, header: Header) -> bool:
        """Whether the sender owns a block; False if it did until servers died, which it had yet to hear.

        Raises
        ------
        ProtocolError
            it has never owned it.

        """
        owner = link.role == "ps" and any(plan.owner(header.block).task == link.task for plan in self._plans())
        if not owner and link.task not in self._former.get(header.block, ()):
            raise ProtocolError(f"block {header.block} is not {link.task}'s, it has no state of it")
        return owner

    def _plans(self) -> list[Plan]:
        return [plan for stage in self._stages.values() for plan in (stage.plan, stage.previous) if plan is not None]

    def _find(self, header: Header) -> Holding | None:
        holding = self._holdings.get(header.block)
        if holding is None:
            stage = self._stages.get(header.plan)
            holding = stage.gained.get(header.block) if stage else None
        return holding

    def _judge(self, link: Link, header: Header) -> Holding | None:
        """Return the block that a push is for, or None if it must not be applied (late, doubled or misdirected)."""
        holding = self._find(header)
        if holding is None:
            return None
        if holding.version < 0:
            holding.version = holding.first = header.first
        if self._async:
            return self._judge_async(link, header, holding)
        if header.version != holding.version or header.plan != holding.plan or header.node in holding.received:
            return None
        if self._stages[holding.plan].expected.get(header.node) not in (link.task, _ANYBODY):
            raise ProtocolError(f"tree node {header.node} is not {link.task}'s to push under plan {header.plan}")
        return holding

    def _pushed(self, link: Link, header: Header) -> None:
        buffer = self._incoming.pop(link, None)
        if buffer is None:
            self._refused += 1
            holding = self._find(header)
            if self._async and holding is not None and self._is_in(header, holding):
                # pushed again, for the server that should have answered is gone
                holding.arrivals.waiting.append((link.task, header.version + 1))
                if holding.here:
                    self._answer_waiting(holding)
                return
            late = holding is not None and header.version < holding.version
            handed_over = holding is None and self._had(header)
            if not handed_over and (holding is None or not (late or header.node in holding.received)):
                self._say(f"refused a push of {link.task}: block {header.block}, step {header.version}")
                link.send(Header(WRONG_OWNER, header.plan, header.block, header.node, 0, header.version, header.first))
            return
        if header.next_plan and self._stamp is None:
            if header.next_plan not in self._stages:
                self._pool.give(buffer)
                raise ProtocolError(f"plan {header.next_plan} is announced but was never prepared")
            self._stamp = (header.next_plan, header.next_first)
        holding = self._find(header)
        if holding is None or (not self._async and self._judge(link, header) is None):
            # a server has died while it came, and the block is at another version: it is pushed again
            self._pool.give(buffer)
            return
        gradient: Array | Rows = buffer
        if holding.block.row:
            gradient = parse(holding.block, buffer.data)
        if not self._async:
            holding.received.add(header.node)
        encoding = self._encodings[header.block]
        if encoding is not None and buffer.dtype == encoding.dtype:
            gradient = self._pool.take(holding.block)
            encoding.unpack(buffer, gradient)
            self._pool.give(buffer)
        if self._async:
            assert not isinstance(gradient, Rows)
            holding.arrivals.received.setdefault(header.version, set()).add(header.node)
            holding.arrivals.staged.append((link.task, header.version, gradient))
            self._apply_staged(holding)
            return
        # In fast mode the nodes differ with the size anyway, so that no more need be lost than is pushed.
        rounding = encoding if self._exact else None
        done = holding.sums.add(header.node, gradient, lambda left, right: self._combine(left, right, rounding))
        if done is not None:
            holding.total = done[1]
            self._complete(holding)

    # --- async mode: no common step, a push is applied when it comes ----------------------------------------------

    def _judge_async(self, link: Link, header: Header, holding: Holding) -> Holding | None:
        """Return the block that a push is for; it may be ahead of others', and beyond the clock of the coming plan."""
        assert self._spec is not None
        plan = self._plan_at(holding, header.version)
        if header.plan != plan or self._is_in(header, holding):
            return None
        if self._stages[plan].expected.get(header.node) != link.task:
            raise ProtocolError(f"tree node {header.node} is not {link.task}'s to push under plan {plan}")
        if header.version - holding.version > self._spec.staleness:
            raise ProtocolError(f"{link.task} is at version {header.version}, {holding.version} is not complete")
        return holding

    def _plan_at(self, holding: Holding, version: int) -> int:
        """The plan under which a version is pushed to a block: one to come rules from its first version on."""
        stamp = self._stamp
        return stamp[0] if stamp is not None and version >= stamp[1] else holding.plan

    def _has_pushed(self, holding: Holding, task: str, version: int) -> bool:
        """Whether all that a worker contributes to a version of a block has come."""
        expected = self._stages[self._plan_at(holding, version)].expected
        nodes = {node for node, other in expected.items() if other == task}
        return version < holding.version or nodes <= holding.arrivals.received.get(version, set())

    @staticmethod
    def _is_in(header: Header, holding: Holding) -> bool:
        """Whether what comes with a frame has come before."""
        return header.version < holding.version or header.node in holding.arrivals.received.get(header.version, ())

    def _apply_staged(self, holding: Holding) -> None:
        """Apply what has come, if the block is here."""
        assert self._spec is not None
        if not holding.here:
            return
        arrivals = holding.arrivals
        for task, version, gradient in arrivals.staged:
            leaves = self._stages[holding.plan].reduction.leaves
            samples = self._spec.divisor(holding.block.optimizer, version, leaves)
            self._updater.apply(holding.block.optimizer, holding.state, gradient, samples, version)
            self._meter.add(holding.block.nbytes)
            self._pool.give(gradient)
            arrivals.waiting.append((task, version + 1))
        arrivals.staged.clear()
        self._advance(holding)

    def _advance(self, holding: Holding) -> None:
        """See which versions all workers have contributed to, and let those go on that waited for them."""
        arrivals = holding.arrivals
        while True:
            stage = self._stages[holding.plan]
            awaited = stage.expected.keys() - stage.left_out
            if not awaited or not arrivals.received.get(holding.version, set()) >= awaited:
                break
            del arrivals.received[holding.version]
            holding.version += 1
            self._version = max(self._version, holding.version)
            if self._saver is not None:
                self._saver.take(holding.block.number, holding.version, holding.state)
            if self._stamp is not None and holding.version == self._stamp[1]:
                self._cross(holding, *self._stamp)
                arrivals.waiting += [(task, holding.version) for task in self._stages[holding.plan].newcomers]
        self._answer_waiting(holding)

    def _answer_waiting(self, holding: Holding) -> None:
        assert self._spec is not None
        arrivals = holding.arrivals
        waiting, arrivals.waiting = arrivals.waiting, []
        for task, version in waiting:
            # the last weights are everybody's
            ahead = self._spec.staleness if version < self._spec.total_versions else 0
            if version - holding.version > ahead:
                arrivals.waiting.append((task, version))
            elif task in self._links:  # else it asks when it is there again
                self._answer_one(holding, self._links[task], version)

    def _answer_one(self, holding: Holding, link: Link, version: int) -> None:
        """Send one worker the weights as they are now, as its next version."""
        block, arrivals = holding.block, holding.arrivals
        next_plan = next_first = 0
        if block.number == 0:
            if self._commit and holding.plan < self._commit:
                # Who is farthest computes the step from `highest`, and has to hear of the plan before its next push.
                self._stamp_from(arrivals.highest + 2)
            # Who has come so far is past it, although others are not.
            if self._stamp is not None and holding.plan != self._stamp[0] and version <= self._stamp[1]:
                next_plan, next_first = self._stamp
        arrivals.highest = max(arrivals.highest, version)
        header = Header(
            PARAM, holding.plan, block.number, 0, block.nbytes, version, holding.first, next_plan, next_first
        )  # fmt: skip
        self._send_weights(link, header, holding, None)

    def _had(self, header: Header) -> bool:
        """Whether the block was ours under the plan of a frame: then its step is complete, and the block on its way."""
        stage = self._stages.get(header.plan)
        return stage is not None and stage.plan.owner(header.block).task == self._identity.task

    def _combine(self, left: Array | Rows, right: Array | Rows, encoding: Encoding | None) -> Array | Rows:
        if isinstance(left, Rows) or isinstance(right, Rows):
            assert isinstance(left, Rows)
            assert isinstance(right, Rows)
            return left.plus(right)
        if not left.flags.writeable:
            left, right = right, left  # the sum is the same
        out = left if left.flags.writeable else self._pool.take_like(left)
        np.add(left, right, out=out)
        if encoding is not None:
            encoding.round(out)
        self._pool.give(right)
        return out

    # --- versions -------------------------------------------------------------------------------------------------

    def _complete(self, holding: Holding) -> None:
        """Apply a step whose sum is whole, if its state is here and all is known that it needs of other blocks."""
        if holding.total is None or not holding.here or holding.block.number in self._counted:
            return
        assert self._spec is not None
        block, version = holding.block, holding.version
        divisor = self._spec.divisor(block.optimizer, version, self._stages[holding.plan].reduction.leaves)
        total = holding.total
        if self._sums_only:
            scales: Scales | None = (1.0, ())
            if block.number not in self._holdings:
                self._settle(holding)
        else:
            scales = self._scales(holding, total.values if isinstance(total, Rows) else total, divisor)
        if scales is None:
            return
        clip, factors = scales
        step = Step(total, divisor, clip, tuple(factor for _, factor in factors))
        self._apply(holding, step)
        if block.number == 0:
            self._make_stamp(holding)
        self._guards.tell(holding, step, self._stamp_after(holding))
        holding.total = None
        holding.received.clear()
        holding.version += 1
        self._version = max(self._version, holding.version)
        if self._saver is not None:
            self._saver.take(block.number, holding.version, holding.state)
        if self._stamp is not None and holding.version == self._stamp[1]:
            self._cross(holding, *self._stamp)
        if not holding.waits:
            self._answer(holding)
        if self._sums_only:
            self._report_moved()

    def _apply(self, holding: Holding, step: Step) -> None:
        self._faults.reached(FaultPoint.APPLY, holding, step)
        rule, version, total = holding.block.optimizer, holding.version, step.total
        self._meter.add(holding.block.nbytes)
        if isinstance(total, Rows):
            self._updater.apply_rows(rule, holding.state, total, step.divisor, version, step.clip)
            holding.note(total)
        else:
            pieces = self._tensors.pieces[holding.block.number] if step.factors else ()
            factors = tuple((piece.size, factor) for piece, factor in zip(pieces, step.factors, strict=True))
            self._updater.apply(rule, holding.state, total, step.divisor, version, step.clip, factors)

    def _make_stamp(self, holding: Holding) -> None:
        """Announce a plan that waits for it with the version that block 0 is about to reach: it rules from the next on.

        Replicas hear of it before any worker does.
        """
        if self._commit and holding.plan < self._commit:
            if self._stamp is not None and self._stamp[0] == self._commit:
                # heard of since: workers have been told, by an owner of the block that is gone
                self._commit = 0
                self._control.send(Stamped(plan=self._stamp[0], first=self._stamp[1]))
            else:
                self._stamp_from(holding.version + 2)

    def _stamp_from(self, first: int) -> None:
        """Have the plan that waits for it rule from a version on, or tell that the job ends before."""
        assert self._spec is not None
        plan, self._commit = self._commit, 0
        if first >= self._spec.total_versions:
            self._control.send(Stamped(plan=plan, first=-1))
        else:
            self._stamp = plan, first
            self._control.send(Stamped(plan=plan, first=first))
        self._faults.reached(FaultPoint.STAMPED, plan)

    def _stamp_after(self, holding: Holding) -> tuple[int, int]:
        """Return the stamp that a replica has to know with the step under way, or (0, 0).

        Of block 0 from the step on whose answer carries it; of others when workers have heard of it for certain. Else a
        stamp could outlive its maker that no worker knows.
        """
        ahead = 2 if holding.block.number == 0 else 1
        return self._stamp if self._stamp is not None and self._stamp[1] <= holding.version + ahead else (0, 0)

    def _scales(self, holding: Holding, total: Array, samples: float) -> Scales | None:
        """Return what the gradient, and for LAMB the update, is multiplied by; None as long as others are asked."""
        assert self._spec is not None
        block, version = holding.block, holding.version
        clip = 1.0
        if self._spec.clip_norm:
            if self._clip[0] != version:
                self._squares["gradient"][block.number] = (square_norm(block.optimizer, total, samples),)
                return None
            clip = self._clip[1]
        rule = block.optimizer
        if not isinstance(rule, LAMB):
            return clip, ()
        asks = block.number in self._tensors.asking
        if asks and self._trust[0] == version:
            return clip, self._tensors.factors(block.number, self._trust[1])
        sizes = [piece.size for piece in self._tensors.pieces[block.number]]
        lengths = self._updater.lengths(rule, holding.state, total, samples, version, clip, sizes)
        squares = {block.number: lengths}
        if asks:
            self._squares["update"].update(squares)
            return None
        return clip, self._tensors.factors(block.number, self._tensors.trust(squares))

    def _answer_header(self, holding: Holding) -> Header:
        block = holding.block
        coming = self._stamp is not None and block.number == 0 and self._stamp[1] == holding.version + 1
        next_plan, next_first = self._stamp if self._stamp is not None and coming else (0, 0)
        return Header(
            PARAM, holding.plan, block.number, 0, block.nbytes, holding.version, holding.first, next_plan, next_first
        )  # fmt: skip

    def _answer(self, holding: Holding) -> None:
        """Send the weights to every worker of the plan now in force for the block, old owner or not."""
        header = self._answer_header(holding)
        rows = holding.recent()
        stage = self._stages[holding.plan]
        for worker in stage.plan.workers:
            if self._sums_only and holding.version == holding.first and worker.task in stage.newcomers:
                continue  # it has no weights yet that the sum could change
            link = self._links.get(worker.task)
            if link is None or link.incarnation != worker.incarnation:
                continue
            self._send_weights(link, header, holding, rows)

    def _send_weights(self, link: Link, header: Header, holding: Holding, rows: Rows | None) -> None:
        """Send all weights of a block, or some rows: as a payload, or by saying where they lie in our memory."""
        self._faults.reached(FaultPoint.SEND_WEIGHTS, link, header)
        # Ours do not change before all workers have pushed again; what another server has from now on is freed.
        stays = holding.block.number in self._holdings
        if rows is not None:
            link.send(replace(header, kind=PARAM_ROWS, length=rows.nbytes), *rows.views())
        elif stays and holding.arena is not None and self._show(link, holding.arena):
            link.send(replace(header, place=holding.arena.number, node=holding.arena.places[holding.block.number]))
        else:
            link.send(header, holding.weights)

    def _show(self, link: Link, arena: Arena) -> bool:
        """Have a worker know the memory that weights lie in; returns whether it can."""
        shown = self._shown.setdefault(link, set())
        if not link.local or (arena.number not in shown and len(shown) >= MAX_REGIONS):
            return False
        if arena.number not in shown:
            shown.add(arena.number)
            link.hand(region_header(arena.number), arena.region.fd)
        return True

    def _answer_fetches(self) -> None:
        """Send blocks to workers that asked for them; one that is on its way to us is awaited."""
        for key, header in list(self._asked.items()):
            link, holding = key[0], self._holdings.get(header.block) or self._parted.get(header.block)
            here = holding is not None and holding.here
            if not link.open or (holding is not None and here and self._answer_asked(link, header, holding)):
                del self._asked[key]

    def _answer_asked(self, link: Link, header: Header, holding: Holding) -> bool:
        """Send a worker what it has asked for of a block that is here; returns whether that is done with."""
        if header.kind == AGAIN:
            self._answer_again(link, header, holding)
            return True
        # in async mode it is as it is
        if not self._async and holding.version != header.version:
            return False
        whole = holding.state.reshape(-1).data.cast("B")
        link.send(Header(WHOLE, header.plan, header.block, 0, whole.nbytes, header.version, holding.first), whole)
        return True

    def _answer_again(self, link: Link, header: Header, holding: Holding) -> None:
        """Answer a worker once more, whose connection broke, unless the answer is still to come."""
        stage = self._stages[holding.plan]
        comes = header.version < 0 and link.task in stage.newcomers
        if self._sums_only and comes:
            for other in self._links.values():
                if other.role == "worker" and other.task not in stage.newcomers:
                    other.send(Header(AGAIN, holding.plan, header.block, 0, 0, -1, 0))
            return
        version = holding.first if comes else header.version
        if self._async:
            # the answer to a push that is not applied yet, or not here, is still to come
            if version >= 0 and (comes or self._has_pushed(holding, link.task, version - 1)):
                holding.arrivals.waiting.append((link.task, version))
                self._answer_waiting(holding)
        elif version == holding.version and not holding.waits:
            self._send_weights(link, self._answer_header(holding), holding, None)

    def _tell_norms(self) -> None:
        """Tell the coordinator of the blocks whose sums have become whole since the last time."""
        for of, squares in self._squares.items():
            if squares:
                version = next(self._holdings[number].version for number in squares)
                told = self._told_squares.get(of)
                before = told.squares if told is not None and told.version == version else {}
                self._told_squares[of] = Norm(version=version, squares={**before, **squares}, of=of)
                self._control.send(Norm(version=version, squares=dict(squares), of=of))
                squares.clear()

    def _tell_norms_again(self) -> None:
        """Another coordinator knows nothing of the step under way; in its first connection it says what it knows."""
        for told in self._told_squares.values():
            self._control.send(told)

    def _take_scale(self, message: Clip | Trust) -> None:
        known = self._clip[0] if isinstance(message, Clip) else self._trust[0]
        if message.version < known:
            return  # from a coordinator that has heard again of a step that is done
        if isinstance(message, Clip):
            self._clip = message.version, message.factor
        else:
            self._trust = message.version, message.factors
        for holding in list(self._holdings.values()):
            if holding.version == message.version:
                self._complete(holding)

    # --- moving ---------------------------------------------------------------------------------------------------

    def _cross(self, holding: Holding, number: int, first: int) -> None:
        """A block has reached the clock: from here on the new plan rules it."""
        stage = self._stages[number]
        if not stage.began:
            stage.began = time.monotonic()
        holding.enter(number, first, stage.reduction.leaves)
        owner = stage.plan.owner(holding.block.number).task
        if owner != self._identity.task:
            del self._holdings[holding.block.number]
            if self._sums_only:
                self._parted[holding.block.number] = holding
                self._report_moved()
                return
            self._outgoing.append(holding)
            self._unacknowledged[holding.block.number] = holding
        else:
            self._guard(holding, given=False)
        self._report_moved()

    def _guard(self, holding: Holding, *, given: bool) -> None:
        """See to it that a block which is ours, just `given` to us or not, has the backup that its plan says."""
        stage, block = self._stages[holding.plan], holding.block.number
        backup = stage.plan.backup(block)
        if backup is None:
            holding.guard = holding.coming = ""
        elif given and backup.task in holders_of(stage.previous, block):
            holding.guard = backup.task
        elif given:
            # nobody else has what we have just been given: the workers' next answer waits until the backup has it
            self._guards.plant(holding, backup.task)
        elif backup.task != holding.guard:
            self._guards.want(holding, backup.task)

    def _handed_over(self, block: int) -> None:
        """A block is where it should be; what we have of it may serve as its replica."""
        holding = self._unacknowledged.pop(block)
        if self._replicated:
            self._guards.release(holding)
            self._replicas.keep(holding)

    def _may_move(self) -> bool:
        """Whether state may leave: every block has crossed, and every answer to workers is on its way."""
        stage = self._stages[self._stamp[0]] if self._stamp else None
        if stage is None or any(h.plan != stage.plan.number for h in self._holdings.values()):
            return False
        return not any(link.unsent for link in self._links.values())

    def _can_move(self) -> bool:
        """Whether the next block can leave at once: if its way is full, the selector tells when it is not."""
        if not self._outgoing or not self._may_move():
            return False
        assert self._stamp is not None
        holding = self._outgoing[0]
        link = self._peers.get(self._stages[self._stamp[0]].plan.owner(holding.block.number).task)
        return not holding.waits and link is not None and link.open and not link.unsent

    def _may_plant(self) -> bool:
        return self._guards.may_plant and not any(link.unsent for link in self._links.values())

    def _move(self) -> None:
        while self._may_plant():
            self._guards.plant_next()
            self._report_moved()  # whom it was for may be gone, and then nothing is to be awaited
        if not self._outgoing or not self._may_move():
            return
        assert self._stamp is not None
        stage = self._stages[self._stamp[0]]
        for _ in range(_STATE_WINDOW):
            if not self._outgoing:
                return
            holding = self._outgoing[0]
            owner = stage.plan.owner(holding.block.number).task
            if holding.waits:
                return  # who keeps its replica may be that of the new owner too
            link = self._peers.get(owner)
            if link is None or not link.open:
                if owner not in self._gone:
                    self._lost.setdefault(owner, (time.monotonic(), f"{self._identity.task}: no connection to {owner}"))
                self._outgoing.rotate(-1)
                return
            if link.unsent:
                return
            self._outgoing.popleft()
            whole = holding.whole
            header = Header(
                STATE,
                holding.plan,
                holding.block.number,
                0,
                whole.nbytes,
                holding.version,
                holding.first,
                crc=zlib.crc32(whole),
            )
            link.send(header, whole)
            stage.moved_bytes += whole.nbytes

    def _enter_gained(self, holding: Holding, header: Header) -> None:
        if holding.version not in (-1, header.version):
            self._fail(
                f"block {header.block} came at version {header.version}, but workers push step {holding.version}"
            )
        holding.version = header.version
        holding.first = header.first
        holding.here = True
        holding.arrivals.highest = header.version
        self._version = max(self._version, holding.version)

    def _settle(self, holding: Holding) -> None:
        """A gained block is ours from now on."""
        stage = self._stages[holding.plan]
        if not stage.began:
            stage.began = time.monotonic()
        self._holdings[holding.block.number] = holding
        del stage.gained[holding.block.number]
        self._answer_fetches()

    def _report_moved(self) -> None:
        """Tell the coordinator once every block is where the newest plan wants it."""
        number = max((n for n, stage in self._stages.items() if stage.began), default=0)
        if not number:
            return
        stage = self._stages[number]
        if stage.reported or stage.gained or self._unacknowledged or not self._guards.settled:
            return
        if any(holding.plan != number for holding in self._holdings.values()):
            return
        stage.reported = True
        if self._stamp is not None and self._stamp[0] <= number:
            self._stamp = None  # that of a plan to come stays: a newcomer reports the plan in force, too
        self._control.send(
            Moved(plan=number, sent_bytes=stage.moved_bytes, move_ms=(time.monotonic() - stage.began) * 1e3)
        )

    # --- control --------------------------------------------------------------------------------------------------

    def _read_control(self) -> None:
        if self._faults.reached(FaultPoint.READ_CONTROL):
            return
        self._looked = time.monotonic()
        for message in self._control.look():
            if not self._faults.reached(FaultPoint.MESSAGE, message):
                self._obey(message)

    def _obey(self, message: FromCoordinator) -> None:
        if isinstance(message, Prepare):
            self._prepare(message)
        elif isinstance(message, Abort):
            self._given_up.add(message.plan)
            self._forget(message.plan)
        elif isinstance(message, Commit):
            if self._stamp is not None and self._stamp[0] == message.plan:
                # its first addressee is gone, and may not have said so
                self._control.send(Stamped(plan=message.plan, first=self._stamp[1]))
            else:
                self._commit = message.plan
        elif isinstance(message, PlanDone):
            self._plan_done(message.plan)
        elif isinstance(message, TakeOver):
            self._take_over(message)
        elif isinstance(message, Census):
            self._count_copies(message)
        elif isinstance(message, Promote):
            self._promote(message)
        elif isinstance(message, Clip | Trust):
            self._take_scale(message)
        elif isinstance(message, DigestRequest):
            self._control.send(
                Digests(blocks={n: hashlib.sha256(h.weights).digest() for n, h in self._holdings.items()})
            )
        elif isinstance(message, Exit):
            self._say(message.reason)
            if self._saver is not None:
                self._saver.close()
                self._take_prepared()
                self._saver = None
            self._control.send(Leave())
            self._status = 0
        elif isinstance(message, RollBack):
            raise RolledBack(message.reason)
        elif isinstance(message, JobEnded):
            raise JobFailed(message.reason)
        elif isinstance(message, Refused):
            raise JobFailed(f"the coordinator refused {self._identity.task}: {message.reason}")
        else:
            raise ProtocolError(f"unexpected {type(message).__name__} from the coordinator")

    def _prepare(self, message: Prepare) -> None:
        if self._spec is None:
            self._spec = message.spec
            self._blocks = cut(message.spec)
            self._layout = Layout(message.spec, self._blocks)
            self._tensors = Tensors(message.spec, self._blocks)
            self._updater = Updater(message.spec.clip_value)
            self._exact = message.spec.mode == "exact"
            self._async = message.spec.asynchronous
            encoding = encoding_of(message.spec)
            self._encodings = [encoding if narrow(message.spec, b) else None for b in self._blocks]
            self._lengths = [wire_bytes(message.spec, block) for block in self._blocks]
            self._scratch = bytearray(max(block.nbytes for block in self._blocks))
            self._sums_only = message.spec.update == "worker"
            if message.spec.checkpoint and not self._sums_only:
                name = f"{self._identity.task}-{self._identity.incarnation[:8]}"
                self._saver = Saver(message.spec, name, self._hand_in)
        elif message.spec != self._spec:
            self._control.send(Nack(plan=message.plan.number, reason="the job's description has changed"))
            return
        held = set(self._holdings)
        thread = threading.Thread(
            target=self._make_ready, args=(message, held, set(self._replicas.kept)), name="prepare", daemon=True
        )
        thread.start()

    def _kept(self, number: int) -> Block:
        """Return a block as it is kept here: without an optimizer, if the workers have that."""
        block = self._blocks[number]
        return replace(block, optimizer=Sum()) if self._sums_only else block

    def _arena(self, plan: Plan, numbers: list[int]) -> Arena | None:
        """Make the memory for blocks that a plan gives us, if workers may look at it."""
        if not numbers or plan.number > _MOST_PLACE:
            return None
        blocks = [self._kept(number) for number in numbers]
        arena = Arena(plan.number, {b.number: (1 + slots(b.optimizer)) * b.nbytes for b in blocks})
        return arena if arena.region.fd >= 0 else None

    def _make_ready(self, message: Prepare, held: set[int], kept: set[int]) -> None:
        """Second thread: allocate and touch what comes, connect to where the rest goes."""
        plan, spec = message.plan, message.spec
        result: _Stage | Nack
        try:
            self._faults.reached(FaultPoint.PREPARE, plan)
            how = reduction(spec, len(plan.workers), plan.shares)
            expected = {node: plan.workers[i].task for i, nodes in enumerate(how.nodes) for node in nodes}
            mine = set(plan.blocks_of(self._identity.task))
            arena = self._arena(plan, sorted(mine - held))
            gained = {b: Holding(self._kept(b), plan.number, how.leaves, arena) for b in sorted(mine - held)}
            if self._sums_only:
                for holding in gained.values():
                    holding.here = True
            # whom a worker has to send its state: in the first plan all others
            old = {m.task for m in message.previous.workers} if message.previous is not None else {plan.workers[0].task}
            self._pool.reserve([self._blocks[b] for b in gained], len(plan.workers))
            # what was ours or another's replica comes in place of that
            others = [b for b in plan.replicas_of(self._identity.task) if b not in kept | held]
            replicas = {b: Holding(self._blocks[b], plan.number, how.leaves) for b in others}
            self._pool.reserve([self._blocks[b] for b in others], 1)
            targets = [plan.owner(b) for b in held - mine] + [m for b in mine if (m := plan.backup(b)) is not None]
            for member in {member.task: member for member in targets}.values():
                self._dialer.reach(member, self._identity)
            newcomers = {m.task for m in plan.workers} - old
            self._faults.reached(FaultPoint.PREPARED, plan)
            result = _Stage(plan, message.previous, how, expected, gained, newcomers, replicas)
        except (PsliteError, MemoryError, ValueError) as error:
            about = error.task if isinstance(error, Unreachable) else ""
            result = Nack(plan=plan.number, reason=str(error) or type(error).__name__, about=about)
        self._hand_in(result)

    def _hand_in(self, result: _Stage | Link | Nack | Saved | NotSaved) -> None:
        """Another thread: have the loop take what was made ready, opened, written or read."""
        self._done.put(result)
        with contextlib.suppress(OSError):
            self._wake_in.send(b"x")
        if self._closed:
            self._close_prepared()

    def _close_prepared(self) -> None:
        """Close what was opened for a plan and not taken into use; from any thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                result = self._done.get_nowait()
                if isinstance(result, Link):
                    result.close()

    def _take_prepared(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_out.recv(256)
        while not self._done.empty():
            result = self._done.get()
            if isinstance(result, Nack | Saved | NotSaved):
                self._control.send(result)
            elif isinstance(result, Link):
                old = self._peers.get(result.task)
                if old is not None:
                    self._drop(old)
                self._peers[result.task] = result
                self._adopt(result, incoming=False)
            elif result.plan.number not in self._given_up:
                number = result.plan.number
                self._stages[number] = result
                self._faults.reached(FaultPoint.PLAN_STAGED, result.plan)
                self._replicas.expect(result.replicas)
                self._current = self._current or number
                self._control.send(Ready(plan=number))

    def _forget(self, number: int) -> None:
        # its connections stay: the plan that is tried next probably needs them
        self._stages.pop(number, None)
        if self._commit == number:
            self._commit = 0
        if self._current == number:
            self._current = 0
        if not self._stages:
            self._counted.clear()  # we are in no plan: it is said to others who owns them

    def _take_over(self, message: TakeOver) -> None:
        """Others do the part of workers that are gone; what those have pushed counts."""
        for number, nodes in message.nodes.items():
            stage = self._stages.get(number)
            if stage is not None:
                if self._async:
                    stage.left_out.update(nodes)
                else:
                    stage.expected.update(dict.fromkeys(nodes, _ANYBODY))
        for task in message.gone:
            self._lost.pop(task, None)
            if task in self._links:
                self._drop(self._links[task])
        self._gone.update(message.gone)
        if self._async:
            for holding in list(self._holdings.values()):
                self._advance(holding)
        self._control.send(TakenOver(number=message.number))

    # --- servers that are gone ------------------------------------------------------------------------------------

    def _count_copies(self, message: Census) -> None:
        """Servers are gone: nothing that they have sent counts from now on, and nobody waits for them."""
        for task in message.gone:
            for link in [links[task] for links in (self._links, self._peers) if task in links]:
                self._hear_out(link)
                self._drop(link)
            self._lost.pop(task, None)
        self._gone.update(message.gone)
        ours = [*self._holdings.values(), *self._unacknowledged.values()]
        for holding in self._guards.without(message.gone, ours):
            self._answer(holding)
        self._counted.update(message.blocks)
        found = {block: self._newest(block) for block in message.blocks}
        versions = {block: holding.version for block, holding in found.items() if holding is not None}
        self._control.send(Copies(number=message.number, versions=versions))
        self._report_moved()

    def _hear_out(self, link: Link) -> None:
        """Take what has come over a connection before it is given up."""
        with contextlib.suppress(PeerLost, ProtocolError):
            while link.receive(self):
                pass

    def _newest(self, block: int) -> Holding | None:
        """What we have of a block: as its owner, on its way to another one, or as a replica."""
        places = (self._holdings, self._unacknowledged, self._replicas.kept)
        return max((place[block] for place in places if block in place), key=lambda h: h.version, default=None)

    def _promote(self, message: Promote) -> None:
        """Blocks have another owner under every plan in force: us, or one that has a newer copy."""
        for block in message.owners:
            self._former.setdefault(block, set()).update(plan.owner(block).task for plan in self._plans())
        for stage in self._stages.values():
            stage.plan = stage.plan.without(message.gone, message.owners)
            stage.previous = stage.previous and stage.previous.without(message.gone, message.owners)
            # the plan in force is done with; one that takes its place may have to move something else
            stage.reported = stage.plan.number <= self._settled
        # what is reported as moved from here on takes account of it
        self._control.send(Promoted(number=message.number))
        ours = []
        for block, owner in message.owners.items():
            newest = self._newest(block)
            for holding in (self._holdings.pop(block, None), self._unacknowledged.pop(block, None)):
                if holding is not None:
                    self._guards.release(holding)
            self._replicas.take(block)
            self._outgoing = deque(holding for holding in self._outgoing if holding.block.number != block)
            for stage in self._stages.values():
                stage.gained.pop(block, None)
            if owner.task == self._identity.task:
                assert newest is not None
                ours.append(newest)
        # all of them first: nothing is reported as moved as long as one is not
        self._holdings.update({holding.block.number: holding for holding in ours})
        for holding in ours:
            self._take_on(holding)
        # with a plan that is given up, blocks of a `Census` before may go back to an owner that has always been there
        held, self._counted = self._counted - message.owners.keys(), set()
        coming = [holding for stage in self._stages.values() for holding in stage.gained.values()]
        for holding in [*self._holdings.values(), *coming]:
            if holding.block.number in held:
                self._complete(holding)
        self._answer_fetches()
        self._report_moved()

    def _take_on(self, holding: Holding) -> None:
        """Own a block, from the version on at which we have it; workers push the step again that was under way."""
        self._faults.reached(FaultPoint.TAKE_BLOCK, holding.block.number)
        plan, first = holding.stamp
        if self._stamp is None and plan > self._settled and plan in self._stages:
            self._stamp = plan, first
        holding.rows = None  # workers have to be sent everything
        stage = self._stages[holding.plan]
        if holding.plan > self._settled and not stage.began:
            stage.began = time.monotonic()
        holding.begin(stage.reduction.leaves)
        if self._stamp is not None and holding.version == self._stamp[1] and holding.plan != self._stamp[0]:
            self._cross(holding, *self._stamp)
        self._answer(holding)

    def _plan_done(self, number: int) -> None:
        before = {task for plan in self._plans() for task in plan.tasks()}
        for old in [n for n in self._stages if n < number]:
            self._forget(old)
        self._current = self._settled = number
        self._parted = {block: holding for block, holding in self._parted.items() if holding.plan > number}
        if self._stamp is not None and self._stamp[0] <= number:
            self._stamp = None
        stage = self._stages[number]
        self._replicas.retain(stage.plan.replicas_of(self._identity.task), number)
        for holding in self._holdings.values():
            backup = stage.plan.backup(holding.block.number)
            # one that left with the plan before, where the one that should follow it is gone
            if holding.guard and (backup is None or holding.guard != backup.task) and self._guards.dismiss(holding):
                self._answer(holding)
        for holding in self._guards.settle():
            self._answer(holding)
        backups = {task for holding in self._holdings.values() for task in holding.guards}
        for task in [task for task in self._peers if task not in backups]:
            self._drop(self._peers[task])
        members = stage.plan.tasks()
        # who is in none of these may be a newcomer that has heard of the next plan before us
        for task in [task for task in self._links if task in before - members]:
            self._drop(self._links[task])
        self._lost.clear()
        copies = max(len(stage.plan.workers), len(stage.expected))
        wanted = [(holding.block, copies) for holding in self._holdings.values()]
        self._pool.trim(wanted + [(holding.block, 1) for holding in self._replicas.kept.values()])
